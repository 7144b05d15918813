"""Restart budget and back-off: pure numbers.

The budget is Erlang/OTP's restart intensity (`supervisor.erl`, add_restart/3); the jitter is derived from the engine's
name and its failure count, so that a decision can be replayed and two engines still do not restart in step.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

from supervisord.core.spec import RestartSpec

JITTER: Final = 0.25
"""At most this fraction is added to a delay."""

EXTERNAL_DELAY_S: Final = 60.0
"""First delay after a failure of something outside (hub, network): asking again at once does not help (A16)."""


def backoff_delay_s(spec: RestartSpec, failures: int, name: str) -> float:
    """Seconds before restart number `failures` (from 1) in a row.

    `backoff_initial_s` = 0 means that the first restart is immediate; later ones then start at 1 s.
    """
    if spec.backoff_initial_s > 0:
        doublings, first_s = failures - 1, spec.backoff_initial_s
    elif failures <= 1:
        return 0.0
    else:
        doublings, first_s = failures - 2, 1.0
    return _jittered(first_s * 2.0 ** min(doublings, 60), spec.backoff_max_s, f"{name}:{failures}")


def external_delay_s(spec: RestartSpec, failures: int, name: str) -> float:
    """Seconds before another try after a failure of something outside."""
    slow_s = EXTERNAL_DELAY_S * 2.0 ** min(failures - 1, 60)
    return _jittered(slow_s, max(spec.backoff_max_s, EXTERNAL_DELAY_S), f"{name}:{failures}")


def _jittered(delay_s: float, max_s: float, seed: str) -> float:
    fraction = crc32(seed.encode()) / 0xFFFFFFFF
    return min(max_s, delay_s * (1.0 + JITTER * fraction))


def within_window(times: tuple[float, ...], spec: RestartSpec, now: float) -> tuple[float, ...]:
    """The restarts that still count against the budget."""
    return tuple(t for t in times if t > now - spec.max_restarts_window_s)
