"""What of the node must survive the daemon, as plain JSON values, and back.

Times are monotonic seconds and mean something only within one boot. What is read back may be half-written or edited by
hand: every value is checked, a wrong one is as good as an absent one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from supervisord.core.model import (
    Engine,
    ExitClass,
    Failed,
    FailedKind,
    Gpu,
    LastExit,
    Node,
    Phase,
    Reason,
    Stopped,
)
from supervisord.core.spec import EngineSpec, NodeSpec

Saved = dict[str, Any]


def save(node: Node) -> dict[str, Saved]:
    """The durable part of every engine, by name."""
    return {engine.spec.name: save_engine(engine) for engine in node.engines.values() if not engine.removed}


def save_engine(engine: Engine) -> Saved:
    """The durable part of one engine, ready for JSON."""
    phase, last = engine.phase, engine.last_exit
    failed = isinstance(phase, Failed) and phase.kind is not FailedKind.UNKILLABLE
    return {
        "generation": engine.generation,
        "wanted": engine.wanted,
        "plan_id": engine.plan_id,
        "good_plan_id": engine.good_plan_id,
        "warm_generation": engine.warm_generation,
        "good_blocks": engine.good_blocks,
        "shortfall_retried": engine.shortfall_retried,
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
    }


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

    An operator's stop or start survives within one boot; a reboot applies `autostart`. Generations always go on.
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
    """With the generation that lives, and no GPUs but those that this very one was given."""
    generation = max(engine.generation, spawned)
    devices = engine.devices if _count(saved.get("devices_generation")) == generation else ()
    return replace(engine, generation=generation, devices=devices)


def _restore_engine(spec: EngineSpec, plan_id: str, saved: Mapping[str, Any], now: float, *, same_boot: bool) -> Engine:
    wanted, failures = spec.autostart, 0
    times: tuple[float, ...] = ()
    phase: Phase = Stopped()
    last_exit: LastExit | None = None
    if same_boot:
        wanted = saved["wanted"] if isinstance(saved.get("wanted"), bool) else wanted
        moments = (_moment(value, now) for value in _list(saved.get("restart_times")))
        times = tuple(at for at in moments if at is not None)
        failures = _count(saved.get("failures"))
        last_exit = _last_exit(_mapping(saved.get("last_exit")), now)
        failed = _mapping(saved.get("failed"))
        if failed.get("kind") == FailedKind.CRASH_LOOP.value and saved.get("plan_id") == plan_id:
            phase = Failed(FailedKind.CRASH_LOOP, str(failed.get("message", "")))
    generation, warm = _count(saved.get("generation")), _count(saved.get("warm_generation"))
    return Engine(
        spec=spec,
        plan_id=plan_id,
        phase=phase,
        since=now,
        wanted=wanted,
        generation=generation,
        restart_times=times,
        failures=failures,
        good_plan_id=_text(saved.get("good_plan_id")),
        good_blocks=_count(saved.get("good_blocks")) or None,
        shortfall_retried=saved.get("shortfall_retried") is True,
        warm_generation=warm if warm <= generation else 0,
        last_exit=last_exit,
        devices=tuple(uuid for uuid in _list(saved.get("devices")) if isinstance(uuid, str)) if same_boot else (),
    )


def _last_exit(saved: Mapping[str, Any], now: float) -> LastExit | None:
    kinds = {kind.value: kind for kind in ExitClass}
    kind, at = saved.get("class"), _moment(saved.get("at"), now)
    if not isinstance(kind, str) or kind not in kinds or at is None:
        return None
    return LastExit(
        kind=kinds[kind],
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


def _moment(value: object, now: float) -> float | None:
    """A monotonic time of this boot: never in the future, and no NaN, infinity or number that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= now else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(value: object) -> int:
    number = _integer(value)
    return number if number is not None and number >= 0 else 0
