"""The metrics of engines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from supervisord.core import status
from supervisord.core.model import Engine, Node, State
from supervisord.figures import Figures
from supervisord.web.families import Families

_MIB: Final = 1024**2
_HOUR_S: Final = 3600.0
_LOOKS_MISSED: Final = 3
"""So many looks have to be overdue before what the last one saw counts as stale."""


def add_engines(families: Families, node: Node, document: Mapping[str, Any], figures: Figures, now: float) -> None:
    """Add what is known of each engine at `now` (monotonic)."""
    looks, restarts, wall = figures.looks(), figures.restarts(), time.time()
    for engine, seen in zip(node.engines.values(), document["engines"], strict=True):
        name = engine.spec.name
        _state(families, engine, seen, now, wall)
        _warmup(families, engine, seen)
        fresh = _fresh(engine, node, now)
        if fresh:
            _work(families, engine, seen)
        for kind in ("gpu", "host") if fresh else ("gpu",):
            _memory(families, name, seen["memory"], kind)
        text = "Until its GPU memory or the memory of the host ends at this pace, whichever is sooner."
        families.gauge("engine_memory_exhaustion_seconds", text, seen["memory"]["exhausted_in_s"], engine=name)
        if engine.sample is not None:
            text = "When the engine was looked at last, since the epoch."
            at = round(wall - (now - engine.sample.at), 1)
            families.gauge("engine_last_look_timestamp_seconds", text, at, engine=name)
        for reason, count in restarts.get(name, {}).items():
            text = "Processes that followed one that had ended, by why it ended, since the daemon started."
            families.counter("engine_restarts_total", text, count, engine=name, reason=reason)
        if name in looks:
            text = "Looks at the engine (/health, /metrics, and host memory now and then)."
            families.durations("engine_look_duration_seconds", text, looks[name], engine=name)


def _state(families: Families, engine: Engine, seen: Mapping[str, Any], now: float, wall: float) -> None:
    name, state = engine.spec.name, engine.state
    families.gauge(
        "engine_info",
        "What the engine is; 1.",
        1,
        engine=name,
        model=engine.spec.model,
        port=str(engine.spec.port),
        replica_group=engine.spec.replica_group or "",
        vllm_version=seen["vllm_version"] or "",
    )
    for one in State:
        families.gauge("engine_state", "1 for the state that it is in.", state is one, engine=name, state=one.value)
    families.gauge("engine_ready", "Whether /ready/ENGINE says ready.", state is State.READY, engine=name)
    families.gauge("engine_wanted", "Whether it is wanted.", engine.wanted, engine=name)
    since = round(wall - (now - engine.since), 1)
    families.gauge("engine_state_since_timestamp_seconds", "When it came into its state.", since, engine=name)
    if state is State.READY:
        families.gauge(
            "engine_degraded", "Whether something is wrong, while ready.", bool(seen["reasons"]), engine=name
        )
    for code in dict.fromkeys(reason.code for reason in status.reasons(engine, now)):
        families.gauge("engine_reason", "Why it is in its state, or degraded; 1.", 1, engine=name, reason=code)
    text = "Processes that were started for it, over all daemons."
    families.counter("engine_spawns_total", text, engine.generation, engine=name)


def _warmup(families: Families, engine: Engine, seen: Mapping[str, Any]) -> None:
    name, warmup = engine.spec.name, seen["warmup"]
    text = "The first request of its last warm-up."
    families.gauge("engine_warmup_first_seconds", text, _seconds(warmup["first_ms"]), engine=name)
    text = "A request at the end of its last warm-up."
    families.gauge("engine_warmup_settled_seconds", text, _seconds(warmup["settled_ms"]), engine=name)
    families.gauge("engine_warmup_rounds", "Rounds of its last warm-up.", warmup["rounds"], engine=name)
    took_s = engine.warmup.took_s if engine.warmup is not None else None
    families.gauge("engine_warmup_duration_seconds", "All of its last warm-up.", took_s, engine=name)


def _work(families: Families, engine: Engine, seen: Mapping[str, Any]) -> None:
    name, blocks, requests = engine.spec.name, seen["kv"], seen["requests"]
    text = "KV blocks, of the rank with the fewest free ones."
    families.gauge("engine_kv_blocks", text, blocks["total_blocks"], engine=name)
    text = "Free KV blocks, cached prefixes included, of the rank with the fewest."
    families.gauge("engine_kv_blocks_free", text, blocks["free_blocks"], engine=name)
    families.gauge("engine_kv_usage_ratio", "KV cache in use, of the fullest rank.", blocks["usage"], engine=name)
    families.gauge("engine_requests_running", "Requests that run.", requests["running"], engine=name)
    families.gauge("engine_requests_waiting", "Requests that wait.", requests["waiting"], engine=name)
    text = "Generated tokens per second over 30 s."
    families.gauge("engine_generation_tokens_per_second", text, seen["tokens_per_s"], engine=name)
    text = "Time to the first token over five minutes, 95th percentile."
    families.gauge("engine_ttft_p95_seconds", text, _seconds(seen["ttft_p95_ms"]), engine=name)
    limit_ms = engine.spec.slo.ttft_p95_ms
    text = "What the configuration wants of it (slo.ttft_p95_ms)."
    families.gauge("engine_ttft_p95_slo_seconds", text, limit_ms / 1000 if limit_ms > 0 else None, engine=name)
    text = "Prefix cache hits by queries over five minutes."
    families.gauge("engine_prefix_hit_ratio", text, seen["prefix_hit_rate"], engine=name)
    text = "Accepted by drafted tokens over five minutes."
    families.gauge("engine_draft_acceptance_ratio", text, seen["draft_acceptance_rate"], engine=name)


def _memory(families: Families, engine: str, memory: Mapping[str, float | None], kind: str) -> None:
    size_mib, creep_mib_per_h = memory[f"{kind}_mib"], memory[f"{kind}_creep_mib_per_h"]
    text = "Memory of its processes: on all its GPUs, and anonymous memory of the host."
    size = None if size_mib is None else size_mib * _MIB
    families.gauge("engine_memory_bytes", text, size, engine=engine, kind=kind)
    text = "How fast it grows: a robust slope since it became ready."
    growth = None if creep_mib_per_h is None else creep_mib_per_h * _MIB / _HOUR_S
    families.gauge("engine_memory_growth_bytes_per_second", text, growth, engine=engine, kind=kind)


def _fresh(engine: Engine, node: Node, now: float) -> bool:
    """Whether what the last look saw is the present: only engines that serve are looked at."""
    if engine.sample is None or engine.state not in {State.READY, State.DRAINING}:
        return False
    return now - engine.sample.at <= engine.spec.probe.timeout_s + _LOOKS_MISSED * node.spec.supervisor.poll_interval_s


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000
