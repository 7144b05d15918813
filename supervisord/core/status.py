"""What people and programs see of the node: the document behind `status`, version 1 (status.schema.json).

Every field is always there; None is unknown, never zero. Fields may be added, none changes its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from supervisord.core import memory
from supervisord.core.model import (
    Backoff,
    Draining,
    Engine,
    Gpu,
    LastExit,
    Node,
    Ready,
    Reason,
    Sample,
    Starting,
    Stopped,
    Stopping,
    Waiting,
    Warming,
    Warmup,
)
from supervisord.core.rules import service
from supervisord.core.samples import RankMetrics

VERSION: Final = 1
_GIB: Final = 1024**3
_MIB: Final = 1024**2
_RATE_S: Final = 30.0
"""Tokens per second are those of about this long."""

Clock = Callable[[float | None], str | None]
"""Monotonic seconds to RFC 3339 in UTC; None stays None."""


def of(node: Node, now: float, wall: float, stamp: Callable[[float], str]) -> dict[str, Any]:
    """The document at `now` (monotonic) = `wall` (epoch seconds); `stamp` writes epoch seconds as RFC 3339 in UTC.

    Ages and "ago" are as of `now`, so the document is made when it is asked for, from the node that was published.
    """

    def clock(at: float | None) -> str | None:
        return None if at is None else stamp(wall - (now - at))

    return {
        "version": VERSION,
        "supervisor": {
            "pid": node.pid,
            "version": node.version,
            "since": clock(node.since),
            "launcher": node.launcher,
            "config_error": node.config_error,
        },
        "engines": [_engine(engine, now, clock) for engine in node.engines.values()],
        "gpus": [_gpu(gpu, node) for gpu in node.gpus.values()],
    }


def reasons(engine: Engine, now: float) -> tuple[Reason, ...]:
    """Why an engine is where it is, in words; empty when there is nothing to say."""
    phase = engine.phase
    match phase:
        case Stopped():
            return ()
        case Ready():
            return phase.reasons
        case Waiting() | Backoff():
            return (phase.reason,)
        case Draining() | Stopping():
            return (phase.cause,)
        case Starting():
            return (Reason("starting", _start_progress(engine, phase, now)),)
        case Warming():
            return (Reason("warming", phase.note or "warm-up under way"),)
        case _:
            return (Reason(phase.kind.value, phase.message),)


def _start_progress(engine: Engine, phase: Starting, now: float) -> str:
    if engine.launching is not None:
        return "being launched"
    parts = ["the process runs and does not answer yet"]
    if phase.progress is not None:
        seen = phase.progress
        parts.append(
            f"{seen.read_bytes / _GIB:.1f} GiB read, {seen.memory_bytes / _GIB:.1f} GiB in host memory, "
            f"{seen.log_lines} different log lines"
        )
    ago_s = max(0.0, now - phase.progress_at)
    parts.append(f"last progress {ago_s:.0f} s ago, start_timeout_s is {engine.spec.start_timeout_s:g}")
    return "; ".join(parts)


def _engine(engine: Engine, now: float, clock: Clock) -> dict[str, Any]:
    spec, phase, sample = engine.spec, engine.phase, engine.sample
    # What a process that is gone said last would be read as the present.
    seen = sample if engine.process is not None else None
    health = None
    if isinstance(phase, Ready):
        health = "degraded" if phase.reasons else "ok"
    return {
        "name": spec.name,
        "model": spec.model,
        "port": spec.port,
        "gpus": list(spec.gpus),
        "wanted": "running" if engine.wanted else "stopped",
        "state": engine.state.value,
        "health": health,
        "reasons": _reasons(reasons(engine, now)),
        "since": clock(engine.since),
        "generation": engine.generation,
        "pid": engine.process.pid if engine.process is not None else None,
        "vllm_version": sample.version if sample is not None else None,
        "restarts": engine.restarts,
        "next_start_at": clock(_next_start(engine)),
        "ready_since": clock(engine.ready_since),
        **_work(seen, now),
        **_service(engine),
        "memory": {
            "gpu_mib": None,
            "host_mib": _number(seen.host_bytes / _MIB, 1)
            if seen is not None and seen.host_bytes is not None
            else None,
            "gpu_creep_mib_per_h": None,
            "host_creep_mib_per_h": _host_creep(engine),
            "exhausted_in_s": _exhausted_in_s(engine, now),
        },
        "warmup": _warmup(engine.warmup),
        "last_exit": _last_exit(engine.last_exit, clock),
    }


def _work(sample: Sample | None, now: float) -> dict[str, Any]:
    seen = sample if sample is not None else Sample(at=now)
    known = (seen.total_blocks, seen.free_blocks, seen.kv_usage) != (None, None, None)
    return {
        "kv": {
            "total_blocks": seen.total_blocks,
            "free_blocks": seen.free_blocks,
            "usage": _number(seen.kv_usage, 4),
            "age_s": _number(max(0.0, now - seen.at), 1) if known else None,
        },
        "requests": {"running": seen.running, "waiting": seen.waiting},
        "ranks": [] if sample is None else [_rank(rank) for rank in sample.ranks],
    }


def _next_start(engine: Engine) -> float | None:
    phase = engine.phase
    if isinstance(phase, Backoff):
        return phase.until
    if isinstance(phase, Waiting) and engine.launching is None:
        return phase.recheck_at
    return None


def _warmup(warmup: Warmup | None) -> dict[str, Any]:
    if warmup is None:
        return {"first_ms": None, "settled_ms": None, "rounds": None}
    return {
        "first_ms": _number(warmup.first_ms, 1),
        "settled_ms": _number(warmup.settled_ms, 1),
        "rounds": warmup.rounds,
    }


def _last_exit(last: LastExit | None, clock: Clock) -> dict[str, Any] | None:
    if last is None:
        return None
    return {
        "class": last.kind.value,
        "code": last.code,
        "signal": last.signal,
        "at": clock(last.at),
        "generation": last.generation,
        "advice": last.advice,
    }


def _host_creep(engine: Engine) -> float | None:
    """None while too little was seen of it, and while it is not ready."""
    if engine.watch is None or engine.watch.host.trend is None or not isinstance(engine.phase, Ready):
        return None
    return _number(engine.watch.host.trend.slope_mib_per_h, 1)


def _exhausted_in_s(engine: Engine, now: float) -> float | None:
    """Seconds until its host memory ends at the pace of now."""
    limit = engine.sample.host_limit_bytes if engine.sample is not None else None
    if engine.watch is None or not isinstance(engine.phase, Ready):
        return None
    return _number(memory.exhausted_in_s(engine.watch.host, now, limit), 0)


def _service(engine: Engine) -> dict[str, float | None]:
    known = engine.watch is not None and engine.sample is not None and engine.sample.ranks
    points = engine.watch.points if engine.watch is not None and known and isinstance(engine.phase, Ready) else ()
    return {
        "tokens_per_s": _number(service.rate_per_s(points, _RATE_S), 1),
        "ttft_p95_ms": _number(service.ttft_p95_ms(points), 1),
        "prefix_hit_rate": _number(service.hit_rate(points), 4),
        "draft_acceptance_rate": _number(service.acceptance_rate(points), 4),
    }


def _rank(rank: RankMetrics) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "running": rank.running,
        "waiting": rank.waiting,
        "total_blocks": rank.total_blocks,
        "free_blocks": rank.free_blocks,
        "usage": rank.kv_usage,
        "preemptions": rank.preemptions,
    }


def _gpu(gpu: Gpu, node: Node) -> dict[str, Any]:
    names = {gpu.uuid, str(gpu.index)}
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "name": gpu.name or None,
        "generation": gpu.generation or None,
        "class": gpu.kind or None,
        "memory_total_mib": _number(gpu.memory_total_mib, 1),
        "memory_used_mib": _number(gpu.memory_used_mib, 1),
        "energy_j": _number(gpu.energy_j, 1),
        "persistence": {"wanted": None, "actual": None, "why": None},
        "health": "degraded" if gpu.quarantined or gpu.reasons else "ok",
        "quarantined": gpu.quarantined,
        "reasons": _reasons(gpu.reasons),
        "engines": [e.spec.name for e in node.engines.values() if not names.isdisjoint(e.spec.gpus)],
    }


def _reasons(found: tuple[Reason, ...]) -> list[dict[str, str]]:
    return [{"code": reason.code, "message": reason.message} for reason in found]


def _number(value: float | None, digits: int) -> float | None:
    """Round for people; what is no number (an engine may say NaN) is unknown, and JSON has no word for it."""
    return round(value, digits) if value is not None and math.isfinite(value) else None
