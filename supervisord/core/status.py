"""What people and programs see of the node: the document behind `status`, version 1 (status.schema.json).

Every field is always there; None is unknown, never zero. Fields may be added, none changes its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from supervisord.core import memory, telemetry
from supervisord.core.gpu_inventory import capacity_bytes, of_engine
from supervisord.core.gpu_samples import GpuProcess, GpuReading
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Engine,
    Failed,
    FailedKind,
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
            "driver": node.telemetry.driver or None,
            "gpu_trouble": _trouble(node),
        },
        "engines": [_engine(engine, node, now, clock) for engine in node.engines.values()],
        "gpus": [_gpu(gpu, node) for gpu in node.gpus.values()],
    }


def _trouble(node: Node) -> dict[str, str] | None:
    """Why nothing is known of GPUs; None: they are seen, or there are none."""
    trouble = telemetry.trouble(node)
    return None if trouble is None else _reasons((trouble,))[0]


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
        case Draining(after=After.HOLD):
            text = f"{phase.cause.message}; back into traffic: vllm-supervisor start {engine.spec.name}"
            return (Reason(phase.cause.code, text),)
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


def _engine(engine: Engine, node: Node, now: float, clock: Clock) -> dict[str, Any]:
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
            "gpu_mib": _mib(engine.gpu_bytes) if engine.process is not None and not telemetry.trouble(node) else None,
            "host_mib": _mib(seen.host_bytes) if seen is not None else None,
            "gpu_creep_mib_per_h": _creep(engine, "gpu"),
            "host_creep_mib_per_h": _creep(engine, "host"),
            "exhausted_in_s": _exhausted_in_s(engine, node.gpus, now),
        },
        "slo": {
            "ttft_p95_ms": spec.slo.ttft_p95_ms or None,
            "gpu_util_min_percent": spec.slo.gpu_util_min_percent or None,
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


def _creep(engine: Engine, kind: str) -> float | None:
    """None while too little was seen of it, and while it is not ready."""
    if engine.watch is None or not isinstance(engine.phase, Ready):
        return None
    trend = (engine.watch.gpu if kind == "gpu" else engine.watch.host).trend
    return None if trend is None else _number(trend.slope_mib_per_h, 1)


def _exhausted_in_s(engine: Engine, gpus: Mapping[str, Gpu], now: float) -> float | None:
    """Seconds until its GPU memory or its host memory ends at the pace of now, whichever is sooner."""
    seen = engine.watch
    if seen is None or not isinstance(engine.phase, Ready):
        return None
    host = engine.sample.host_limit_bytes if engine.sample is not None else None
    ends = (
        memory.exhausted_in_s(seen.gpu, now, capacity_bytes(gpus, engine)),
        memory.exhausted_in_s(seen.host, now, host),
    )
    return _number(min((end for end in ends if end is not None), default=None), 0)


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
    reading = gpu.reading if gpu.absent_since is None and telemetry.trouble(node) is None else None
    seen = reading if reading is not None else GpuReading(gpu.uuid, gpu.pci_id, gpu.index or 0)
    found = gpu.reasons if gpu.quarantine is None else (gpu.quarantine, *gpu.reasons)
    engines = [e for e in node.engines.values() if any(g.uuid == gpu.uuid for g in of_engine(node.gpus, e))]
    stuck = [e.spec.name for e in engines if isinstance(e.phase, Failed) and e.phase.kind is FailedKind.UNKILLABLE]
    if stuck:
        found = (*found, Reason("unkillable", f"processes of engine {stuck[0]} on it cannot be ended"))
    if gpu.absent_since is not None and gpu.quarantine is None:
        found = (Reason("gpu_missing", "it does not answer"), *found)
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "name": gpu.name or None,
        "generation": gpu.generation or None,
        "class": gpu.kind or None,
        "pci_id": gpu.pci_id or None,
        "memory_total_mib": _mib(seen.total_bytes),
        "memory_used_mib": _mib(seen.used_bytes),
        "memory_free_mib": _mib(seen.free_bytes),
        "energy_j": _number(seen.energy_j, 1),
        "temperature_c": _number(seen.temperature_c, 1),
        "power_w": _number(seen.power_w, 1),
        "utilization_percent": _number(seen.utilization_percent, 1),
        "persistence": {
            "wanted": {None: "leave", True: "on", False: "off"}[gpu.persistence.wanted] if reading else None,
            "actual": None if seen.persistence is None else ("on" if seen.persistence else "off"),
            "why": gpu.persistence.told or gpu.persistence.why or None,
        },
        "health": "degraded" if found else "ok",
        "quarantined": gpu.quarantine is not None or bool(stuck),
        "reasons": _reasons(found),
        "xids": dict(gpu.xids),
        "processes": None if seen.processes is None else [_gpu_process(process) for process in seen.processes],
        "engines": [engine.spec.name for engine in engines],
    }


def _gpu_process(process: GpuProcess) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "name": process.name or None,
        "memory_mib": _mib(process.used_bytes),
        "engine": process.engine,
    }


def _mib(size: int | None) -> float | None:
    return None if size is None else _number(size / _MIB, 1)


def _reasons(found: tuple[Reason, ...]) -> list[dict[str, str]]:
    return [{"code": reason.code, "message": reason.message} for reason in found]


def _number(value: float | None, digits: int) -> float | None:
    """Round for people; what is no number (an engine may say NaN) is unknown, and JSON has no word for it."""
    return round(value, digits) if value is not None and math.isfinite(value) else None
