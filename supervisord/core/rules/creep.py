"""Memory that creeps: a leak is told with its pace and its end, and is replaced gracefully before it becomes a crash.

Growth alone is no leak: vLLM takes workspaces in steps, allocators fill up, load comes and goes (see `memory`).
"""

from __future__ import annotations

from typing import Final

from supervisord.core.memory import HOUR_S, MIB, MemoryWatch, exhausted_in_s, growth_bytes, is_creeping, window_s
from supervisord.core.model import Reason
from supervisord.core.rules import Finding, Remedy
from supervisord.core.spec import RestartSpec

URGENT_S: Final = 1800.0
"""Exhausted within this: a maintenance window is not waited for."""
WAIVED_S: Final = 600.0
"""Exhausted within this: the node's budget of voluntary restarts neither."""
STALE_WINDOWS: Final = 3
"""Not looked at for that many windows: nothing is known."""


def gpu_creep(watch: MemoryWatch, spec: RestartSpec, now: float, *, capacity_bytes: int | None) -> Finding | None:
    """GPU memory of the engine's own processes; `capacity_bytes`: where it ends, None if unknown."""
    return _creep("gpu", watch, spec, now, capacity_bytes)


def host_creep(watch: MemoryWatch, spec: RestartSpec, now: float, *, capacity_bytes: int | None) -> Finding | None:
    """Anonymous host memory: only told, until its end (`capacity_bytes`) is near."""
    return _creep("host", watch, spec, now, capacity_bytes)


def _creep(kind: str, watch: MemoryWatch, spec: RestartSpec, now: float, capacity_bytes: int | None) -> Finding | None:
    trend, left_s = watch.trend, exhausted_in_s(watch, now, capacity_bytes)
    if trend is None or watch.seen_at is None or now - watch.seen_at > STALE_WINDOWS * window_s(spec):
        return None
    urgent = left_s is not None and left_s <= URGENT_S
    if not watch.creeping and not (urgent and is_creeping(watch, spec, patience=1.0)):
        return None
    growth_mib = growth_bytes(watch) / MIB
    where = "GPU memory" if kind == "gpu" else "host memory"
    end = "" if left_s is None else f"; exhausted in about {_span(left_s)} at this pace"
    text = (
        f"{where} grows by {trend.slope_mib_per_h:.0f} MiB/h, seen over {_span(trend.span_s)} "
        f"(creep_mib_per_h {spec.creep_mib_per_h:g}, creep_window_s {spec.creep_window_s:g}), and is "
        f"{growth_mib:.0f} MiB above its level after the start (creep_margin_mib {spec.creep_margin_mib:g}){end}"
    )
    numbers = {
        "slope_mib_per_h": round(trend.slope_mib_per_h, 1),
        "limit_mib_per_h": spec.creep_mib_per_h,
        "span_s": round(trend.span_s),
        "growth_mib": round(growth_mib, 1),
        "margin_mib": spec.creep_margin_mib,
        "exhausted_in_s": None if left_s is None else round(left_s),
    }
    waived = left_s is not None and left_s <= WAIVED_S
    remedy = Remedy.REPLACE if kind == "gpu" or urgent else Remedy.TELL
    return Finding(Reason(f"{kind}_creep", text), remedy, numbers, urgent=urgent, waives_budget=waived)


def _span(seconds: float) -> str:
    return f"{seconds / HOUR_S:.1f} h" if seconds >= HOUR_S else f"{seconds / 60:.0f} min"
