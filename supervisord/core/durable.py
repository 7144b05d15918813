"""What of the node must survive the daemon, as plain JSON values, and back.

Times are monotonic seconds and mean something only within one boot. What is read back may be half-written or edited by
hand: every value is checked, a wrong one is as good as an absent one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Final, TypeVar

from supervisord.core import policy
from supervisord.core.memory import UNSEEN, MemoryWatch
from supervisord.core.model import (
    STATE_OF,
    After,
    Backoff,
    Draining,
    Engine,
    ExitClass,
    Failed,
    FailedKind,
    Gpu,
    LastExit,
    Left,
    Node,
    Phase,
    Reason,
    Starting,
    State,
    Stopped,
    Stopping,
    Warmup,
)
from supervisord.core.spec import EngineSpec, NodeSpec, RestartSpec
from supervisord.core.watch import Watch

Saved = dict[str, Any]
E = TypeVar("E", bound=Enum)

_NUMBER_MAX: Final = 2**63
"""No count of ours is larger, and every float can hold it."""


def save(node: Node) -> dict[str, Saved]:
    """The durable part of every engine, by name."""
    return {engine.spec.name: save_engine(engine) for engine in node.engines.values() if not engine.removed}


def save_engine(engine: Engine) -> Saved:
    """The durable part of one engine, ready for JSON. It changes with decisions and states, not with looks."""
    phase, last, left = engine.phase, engine.last_exit, _left_of(engine)
    failed = isinstance(phase, Failed) and phase.kind is not FailedKind.UNKILLABLE
    return {
        "generation": engine.generation,
        "wanted": engine.wanted,
        "plan_id": engine.plan_id,
        "good_plan_id": engine.good_plan_id,
        "warm_generation": engine.warm_generation,
        "good_blocks": engine.good_blocks,
        "shortfall_retried": engine.shortfall_retried,
        "replacing": engine.replacing,
        "refused_claim": None if engine.refused_claim is None else list(engine.refused_claim),
        "failures": engine.failures,
        "devices": list(engine.devices),
        "devices_generation": engine.generation if engine.launching is None else engine.launching,
        "restart_times": list(engine.restart_times),
        "failed": {"kind": phase.kind.value, "message": phase.message}
        if isinstance(phase, Failed) and failed
        else None,
        "last_exit": None
        if last is None
        else {
            "class": last.kind.value,
            "code": last.code,
            "signal": last.signal,
            "at": last.at,
            "generation": last.generation,
            "advice": last.advice,
        },
        "state": left.state.value,
        "since": left.since,
        "until": left.until,
        "after": None if left.after is None else left.after.value,
        "cause": _saved_reason(left.cause),
        "ready_since": engine.ready_since,
        "warmup": None if engine.warmup is None else _saved_warmup(engine.warmup),
        "memory": None if engine.watch is None else _saved_memory(engine.watch),
        "app_xids": list(engine.app_xids),
    }


def _left_of(engine: Engine) -> Left:
    """How the next daemon would find it. An adopted one that did not answer yet is still as the last one left it."""
    phase = engine.phase
    if isinstance(phase, Starting) and engine.left is not None:
        return engine.left
    if isinstance(phase, Draining) and phase.recoverable:
        return Left(State.READY, engine.since)  # judged anew: its blocks may be free by then
    if isinstance(phase, Draining | Stopping):
        return Left(engine.state, engine.since, phase.after, phase.cause)
    if isinstance(phase, Backoff):
        return Left(engine.state, engine.since, cause=phase.reason, until=phase.until)
    return Left(engine.state, engine.since)


def _saved_reason(reason: Reason | None) -> Saved | None:
    return None if reason is None else {"code": reason.code, "message": reason.message}


def _saved_warmup(warmup: Warmup) -> Saved:
    return {
        "first_ms": warmup.first_ms,
        "settled_ms": warmup.settled_ms,
        "rounds": warmup.rounds,
        "problem": _saved_reason(warmup.problem),
        "memory_bytes": warmup.memory_bytes,
        "gpu_bytes": warmup.gpu_bytes,
        "took_s": warmup.took_s,
    }


def _saved_memory(watch: Watch) -> Saved:
    """The levels from which growth is counted, once they are settled; trends begin anew."""
    host, gpu = (None if memory.settling else memory.high_bytes for memory in (watch.host, watch.gpu))
    return {"asleep": watch.asleep, "host": host, "gpu": gpu}


def save_gpus(node: Node) -> dict[str, Saved]:
    """What must be remembered of GPUs, by UUID: those that are quarantined."""
    return {
        gpu.uuid: {
            "pci_id": gpu.pci_id,
            "index": gpu.index,
            "name": gpu.name,
            "code": gpu.quarantine.code,
            "message": gpu.quarantine.message,
        }
        for gpu in node.gpus.values()
        if gpu.quarantine is not None
    }


def restore_gpus(saved: Mapping[str, Any]) -> dict[str, Gpu]:
    """The quarantined GPUs that an earlier daemon knew: a reboot does not heal them by itself."""
    found = {uuid: _mapping(value) for uuid, value in saved.items()}
    return {
        uuid: Gpu(
            uuid,
            pci_id=_text(known.get("pci_id")) or "",
            index=_integer(known.get("index")),
            name=_text(known.get("name")) or "",
            quarantine=Reason(_text(known.get("code")) or "gpu_fault", _text(known.get("message")) or "quarantined"),
        )
        for uuid, known in found.items()
    }


def restore(
    spec: NodeSpec,
    plan_ids: Mapping[str, str],
    saved: Mapping[str, Any],
    now: float,
    *,
    same_boot: bool,
    spawned: Mapping[str, int],
) -> dict[str, Engine]:
    """The engines of a starting daemon.

    An operator's stop, start or drain survives within one boot; a reboot applies `autostart`. Generations always go on.
    `failed: config` is tried again by a daemon start, a crash loop is not (same boot, same launch plan).
    `spawned`: the last generations that the launcher's records know; a killed daemon may not have saved its last one.
    """
    engines = {
        name: _restore_engine(engine, plan_ids[name], _mapping(saved.get(name)), now, same_boot=same_boot)
        for name, engine in spec.engines.items()
    }
    return {
        name: _as_spawned(engine, _mapping(saved.get(name)), spawned.get(name, 0)) for name, engine in engines.items()
    }


def _as_spawned(engine: Engine, saved: Mapping[str, Any], spawned: int) -> Engine:
    """With the generation that lives, and nothing of what was saved of another one."""
    generation = max(engine.generation, spawned)
    if _count(saved.get("devices_generation")) == generation:
        return replace(engine, generation=generation)
    of_another = replace(engine, devices=(), left=None, ready_since=None, warmup=None, watch=None, app_xids=())
    return replace(of_another, generation=generation)


def _restore_engine(spec: EngineSpec, plan_id: str, saved: Mapping[str, Any], now: float, *, same_boot: bool) -> Engine:
    generation, warm = _count(saved.get("generation")), _count(saved.get("warm_generation"))
    engine = Engine(
        spec=spec,
        plan_id=plan_id,
        since=now,
        wanted=spec.autostart,
        generation=generation,
        good_plan_id=_text(saved.get("good_plan_id")),
        good_blocks=_count(saved.get("good_blocks")) or None,
        shortfall_retried=saved.get("shortfall_retried") is True,
        warm_generation=warm if warm <= generation else 0,
    )
    return _of_this_boot(engine, saved, now) if same_boot else engine


def _of_this_boot(engine: Engine, saved: Mapping[str, Any], now: float) -> Engine:
    """With what ends with the machine: processes, times, and what an operator wanted."""
    moments = (_moment(value, now) for value in _list(saved.get("restart_times")))
    phase: Phase = Stopped()
    failed = _mapping(saved.get("failed"))
    same_plan = saved.get("plan_id") == engine.plan_id
    if failed.get("kind") == FailedKind.CRASH_LOOP.value and same_plan:
        phase = Failed(FailedKind.CRASH_LOOP, str(failed.get("message", "")))
    left = _left(saved, now, engine.spec.restart if same_plan else None)
    return replace(
        engine,
        phase=phase,
        since=left.since if left is not None and left.state is STATE_OF[type(phase)] else now,
        wanted=saved["wanted"] if isinstance(saved.get("wanted"), bool) else engine.wanted,
        restart_times=tuple(at for at in moments if at is not None),
        failures=_count(saved.get("failures")),
        replacing=saved.get("replacing") is True,
        refused_claim=_claim(_list(saved.get("refused_claim"))),
        last_exit=_last_exit(_mapping(saved.get("last_exit")), now),
        left=left,
        ready_since=_moment(saved.get("ready_since"), now),
        warmup=_warmup(saved.get("warmup")),
        watch=_watch(saved.get("memory"), now),
        app_xids=_texts(saved.get("app_xids")),
        devices=_texts(saved.get("devices")),
    )


def _left(saved: Mapping[str, Any], now: float, spec: RestartSpec | None) -> Left | None:
    """`spec`: by which a back-off may go on; without one it is over."""
    state, since = _member(State, saved.get("state")), _moment(saved.get("since"), now)
    if state is None or since is None:
        return None
    after, cause = _member(After, saved.get("after")), _reason(saved.get("cause"))
    until = _real(saved.get("until"))
    if state is State.BACKOFF and spec is not None and until is not None and cause is not None:
        longest_s = max(spec.backoff_max_s, policy.EXTERNAL_DELAY_S)
        return Left(state, since, cause=cause, until=min(until, now + longest_s))
    return Left(state, since, after, cause) if after is not None and cause is not None else Left(state, since)


def _claim(saved: list[Any]) -> tuple[str, float] | None:
    plan_id, part = (*saved, None, None)[:2]
    size = _real(part)
    return (plan_id, size) if isinstance(plan_id, str) and size is not None else None


def _warmup(saved: object) -> Warmup | None:
    known = _mapping(saved)
    if not known:
        return None
    return Warmup(
        first_ms=_real(known.get("first_ms")),
        settled_ms=_real(known.get("settled_ms")),
        rounds=_count(known.get("rounds")),
        problem=_reason(known.get("problem")),
        memory_bytes=_count(known.get("memory_bytes")) or None,
        gpu_bytes=_count(known.get("gpu_bytes")) or None,
        took_s=_real(known.get("took_s")) or 0.0,
    )


def _watch(saved: object, now: float) -> Watch | None:
    """Levels go on, trends begin anew: what happened between the two daemons was not looked at."""
    known = _mapping(saved)
    if not known:
        return None
    host, gpu = (_count(known.get(kind)) for kind in ("host", "gpu"))
    return Watch(
        since=now,
        moved_at=now,
        asleep=known.get("asleep") is True,
        host=MemoryWatch(settling=0, high_bytes=host) if host else UNSEEN,
        gpu=MemoryWatch(settling=0, high_bytes=gpu) if gpu else UNSEEN,
    )


def _last_exit(saved: Mapping[str, Any], now: float) -> LastExit | None:
    kind, at = _member(ExitClass, saved.get("class")), _moment(saved.get("at"), now)
    if kind is None or at is None:
        return None
    return LastExit(
        kind=kind,
        code=_integer(saved.get("code")),
        signal=_integer(saved.get("signal")),
        at=at,
        generation=_count(saved.get("generation")),
        advice=_text(saved.get("advice")) or "",
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(text for text in _list(value) if isinstance(text, str))


def _member(kind: type[E], value: object) -> E | None:
    return next((member for member in kind if member.value == value), None)


def _reason(value: object) -> Reason | None:
    known = _mapping(value)
    code, message = _text(known.get("code")), _text(known.get("message"))
    return Reason(code, message) if code and message is not None else None


def _real(value: object) -> float | None:
    """A number of seconds, milliseconds or parts: no NaN, no infinity, none that no float can hold."""
    return _moment(value, _NUMBER_MAX)


def _moment(value: object, now: float) -> float | None:
    """A monotonic time of this boot: never in the future, and no NaN, infinity or number that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= now else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(value: object) -> int:
    number = _integer(value)
    return number if number is not None and 0 <= number < _NUMBER_MAX else 0
