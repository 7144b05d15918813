"""What is remembered of one engine's memory: minima of short windows, the level it started from, and the trend.

Minima, because what is in use for a moment is not lost. Everything scales with `creep_window_s`: a window is a twelfth
of it, six times it is remembered. So the state is bounded (72 points), and a trend is made once a window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from supervisord.core.slopes import given_back, pair_slopes, reached_by, theil_sen
from supervisord.core.spec import RestartSpec

MIB: Final = 1024**2
HOUR_S: Final = 3600.0

PARTS: Final = 12
"""Windows in `creep_window_s`."""
LOWS_MAX: Final = 6 * PARTS
LOWS_MIN: Final = PARTS // 2
"""Fewer of them in the last `creep_window_s` say nothing."""
WINDOW_MIN_S: Final = 60.0
"""Host memory is looked at every 30 s."""
SETTLING: Final = 3
"""Windows in which growth is still part of the start."""
LEVEL: Final = 3
"""The level is the lowest of the last windows, that many."""
PATIENCE: Final = 5.0
"""Before that many `creep_window_s` the margin is larger in proportion (five times it after the first): young engines
grow by bounded steps (measured without warm-up: 1,066 MiB), so tolerate what only looks like a leak for an hour."""
STEADY_SHARE: Final = 0.65
"""Of all pairs of windows, that many must grow at the limit or faster: a few steps cannot do that, a leak does."""
PACE: Final = 0.7
"""A leak goes on at its pace: the later half of what is remembered grows at least at this part of the earlier one."""
HELD: Final = 0.5
"""Half of every limit keeps it on, so that it does not flap."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Growth, as of the last window that closed. All slopes are Theil-Sen.

    `slope`: over everything remembered; `steady`: what STEADY_SHARE of its pairs of windows reach; `recent`: over the
    last `creep_window_s`; `early`, `late`: over the halves of everything. `swing_bytes`: the most that was given back.
    """

    slope_mib_per_h: float
    steady_mib_per_h: float
    recent_mib_per_h: float
    early_mib_per_h: float
    late_mib_per_h: float
    level_bytes: int
    swing_bytes: int
    span_s: float


@dataclass(frozen=True, slots=True)
class MemoryWatch:
    """Memory of one generation since it became ready, fell asleep or woke: each of these begins a new one."""

    seen_at: float | None = None
    opened_at: float = 0.0
    low: tuple[float, int] | None = None
    """Time and bytes of the minimum in the open window."""
    settling: int = SETTLING
    high_bytes: int | None = None
    """High-water mark of the start, from which growth is counted."""
    lows: tuple[tuple[float, int], ...] = ()
    trend: Trend | None = None
    creeping: bool = False


UNSEEN: Final = MemoryWatch()


def window_s(spec: RestartSpec) -> float:
    """Length of one window."""
    return max(WINDOW_MIN_S, spec.creep_window_s / PARTS)


def observed(
    watch: MemoryWatch, at_s: float, used_bytes: int, baseline_bytes: int | None, spec: RestartSpec
) -> MemoryWatch:
    """Remember one look; an old one changes nothing.

    `baseline_bytes`: what was in use at the end of the warm-up, None if that is not known.
    """
    if watch.seen_at is not None and at_s <= watch.seen_at:
        return watch
    if watch.low is not None and at_s < watch.opened_at + window_s(spec):
        return replace(watch, seen_at=at_s, low=watch.low if watch.low[1] <= used_bytes else (at_s, used_bytes))
    if watch.low is not None:
        watch = _closed(watch, watch.low, baseline_bytes, spec)
    return replace(watch, seen_at=at_s, opened_at=at_s, low=(at_s, used_bytes))


def _closed(watch: MemoryWatch, low: tuple[float, int], baseline_bytes: int | None, spec: RestartSpec) -> MemoryWatch:
    if watch.settling:
        high = max(low[1], watch.high_bytes or 0, baseline_bytes or 0)
        return replace(watch, settling=watch.settling - 1, high_bytes=high)
    watch = replace(watch, lows=(*watch.lows[1 - LOWS_MAX :], low))
    watch = replace(watch, trend=_trend(watch.lows, spec))
    return replace(watch, creeping=is_creeping(watch, spec, patience=PATIENCE))


def _trend(lows: tuple[tuple[float, int], ...], spec: RestartSpec) -> Trend | None:
    first_at, last_at = lows[0][0], lows[-1][0]
    recent = [low for low in lows if low[0] >= last_at - spec.creep_window_s]
    if len(recent) < LOWS_MIN:
        return None
    half, pairs, scale = len(lows) // 2, pair_slopes(lows), HOUR_S / MIB
    return Trend(
        slope_mib_per_h=reached_by(0.5, pairs) * scale,
        steady_mib_per_h=reached_by(STEADY_SHARE, pairs) * scale,
        recent_mib_per_h=theil_sen(recent) * scale,
        early_mib_per_h=theil_sen(lows[:half]) * scale,
        late_mib_per_h=theil_sen(lows[half:]) * scale,
        level_bytes=min(used for _, used in lows[-LEVEL:]),
        swing_bytes=given_back([used for _, used in lows]),
        span_s=last_at - first_at + window_s(spec),
    )


def growth_bytes(watch: MemoryWatch) -> int:
    """How far the level is above the high-water mark of the start; 0 while either is unknown."""
    if watch.trend is None or watch.high_bytes is None:
        return 0
    return watch.trend.level_bytes - watch.high_bytes


def is_creeping(watch: MemoryWatch, spec: RestartSpec, *, patience: float) -> bool:
    """Whether it has grown for long enough, far enough, still grows, and does not slow down.

    Far enough is also more than was given back once: that was load, and can be given back again.
    """
    trend, part = watch.trend, HELD if watch.creeping else 1.0
    if trend is None or trend.span_s < spec.creep_window_s:
        return False
    margin_bytes = spec.creep_margin_mib * MIB * max(1.0, patience * spec.creep_window_s / trend.span_s)
    return (
        growth_bytes(watch) > part * max(margin_bytes, trend.swing_bytes)
        and min(trend.steady_mib_per_h, trend.recent_mib_per_h) >= part * spec.creep_mib_per_h
        and trend.late_mib_per_h >= part * PACE * trend.early_mib_per_h
    )


def exhausted_in_s(watch: MemoryWatch, now: float, capacity_bytes: int | None) -> float | None:
    """Seconds until the trend reaches `capacity_bytes`; None when that is unknown or it does not grow."""
    if watch.trend is None or capacity_bytes is None or watch.trend.slope_mib_per_h <= 0:
        return None
    at_s, used_bytes = watch.lows[-1]
    grows_s = (capacity_bytes - used_bytes) / (watch.trend.slope_mib_per_h * MIB / HOUR_S)
    return max(0.0, at_s + grows_s - now)
