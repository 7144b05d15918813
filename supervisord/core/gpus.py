"""The GPUs of the node: who they are, what is wrong with them, and what that means for the engines on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from supervisord.core import ending, gpu_kinds, persistence, starting, telemetry, xids
from supervisord.core.gpu_faults import meet, put, quarantine
from supervisord.core.gpu_inventory import counts_lost_gpus, held, label, of_engine, strange_bytes
from supervisord.core.gpu_samples import LOST, GpuReading, GpuSweep
from supervisord.core.memory import observed
from supervisord.core.messages import GpusSwept, Severity
from supervisord.core.model import (
    After,
    Draining,
    Engine,
    ExitClass,
    Gpu,
    LastExit,
    Node,
    Ready,
    Reason,
    Starting,
    State,
    Stopping,
    Warming,
)
from supervisord.core.turn import Turn
from supervisord.core.xids import XidClass

ABSENT_FOR_S: Final = 2.0
"""One sweep without a GPU may be an enumeration that went wrong; it is looked at again at once."""
THROTTLED_FOR_S: Final = 30.0
_SLOW_FIELDS: Final = ("energy_j", "mig", "ecc_uncorrected", "remap_pending", "remap_failed", "recovery_action")

THROTTLING: Final = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits NVML_CLOCKS_EVENT_REASON_* that somebody should know of. The power cap (0x4) is normal."""

LIVE: Final = Starting | Warming | Ready | Draining

HURRIED: Final = frozenset({State.WAITING, State.STARTING, State.WARMING, State.STOPPING})
"""While an engine with GPUs is in one of these, they are looked at every second."""
PLACED_WITHIN_S: Final = 60.0
"""And so long after it became ready, until its processes were seen where they belong."""


# --- sweeps -----------------------------------------------------------------------------------------------------------


def on_swept(turn: Turn, seen: GpusSwept) -> None:
    """Take in a sweep: what the GPUs are, what is wrong with them, what the engines hold there."""
    sweep = telemetry.on_swept(turn, seen)
    if sweep is None or sweep.problem is not None:
        _pace(turn)
        return
    before = turn.node.gpus
    known = dict(before)
    for reading in sweep.gpus:
        if reading.uuid:
            known[reading.uuid] = as_seen(known.get(reading.uuid) or Gpu(reading.uuid), reading, sweep)
    _miss(known, sweep)
    _drop_replaced(turn, known, sweep)
    turn.node = replace(turn.node, gpus=known)
    for gpu in known.values():
        _judge(turn, meet(turn, gpu), _reading_of(before, gpu.uuid), sweep)
        persistence.reconcile(turn, turn.node.gpus[gpu.uuid])
    for engine in turn.engines():
        _on_engine(turn, engine, before, sweep)
    _pace(turn)


def as_seen(old: Gpu, new: GpuReading, sweep: GpuSweep) -> Gpu:
    """What a sweep makes of a GPU, before anything is concluded from it."""
    if new.error is not None and new.error not in LOST:
        return _silent(replace(old, pci_id=new.pci_id or old.pci_id), new.index, new.error)
    if new.error is not None:
        since = old.absent_since if old.absent_since is not None else sweep.at
        return replace(old, pci_id=new.pci_id or old.pci_id, absent_since=since)
    before = old.reading
    if not sweep.slow and before is not None:
        new = replace(new, **{name: getattr(before, name) for name in _SLOW_FIELDS})
    kind = gpu_kinds.kind_of(new.name, new.architecture, new.compute, new.brand)
    throttled = new.clock_reasons is not None and any(new.clock_reasons & bit for bit in THROTTLING)
    since = old.throttled_since if old.throttled_since is not None else sweep.at
    return replace(
        old,
        pci_id=new.pci_id,
        index=new.index,
        name=new.name,
        generation=kind.generation,
        kind=kind.gpu_class,
        reading=new,
        absent_since=None,
        throttled_since=since if throttled else None,
    )


def _reading_of(gpus: Mapping[str, Gpu], uuid: str) -> GpuReading | None:
    return gpus[uuid].reading if uuid in gpus else None


def _silent(old: Gpu, index: int | None, error: int) -> Gpu:
    """It fails with a code that says nothing about the GPU itself: nothing is known of it, and nothing concluded."""
    index, before = old.index if old.index is not None else index, old.reading
    reading = GpuReading(old.uuid, old.pci_id, index or 0, error=error)
    if before is not None:
        kept = {name: getattr(before, name) for name in _SLOW_FIELDS if name != "energy_j"}
        reading = replace(reading, **kept)
    return replace(old, index=index, reading=reading, absent_since=None, throttled_since=None)


def _miss(known: dict[str, Gpu], sweep: GpuSweep) -> None:
    """What is known and not listed is gone, if another GPU answers and none is listed that cannot say its name."""
    here, taken = ({getattr(reading, name) for reading in sweep.gpus} for name in ("uuid", "pci_id"))
    nameless = [reading.error for reading in sweep.gpus if not reading.uuid]
    doubt = next((error for error in nameless if error not in LOST), None)
    if all(reading.error is not None for reading in sweep.gpus):
        doubt = telemetry.NOBODY_THERE if doubt is None else doubt
    for uuid, gpu in known.items():
        if uuid in here:
            continue
        known_well = gpu.reading is not None and gpu.quarantine is None
        if doubt is not None and known_well and gpu.pci_id not in taken:
            known[uuid] = _silent(gpu, gpu.index, doubt)
        elif gpu.absent_since is None:
            known[uuid] = replace(gpu, absent_since=sweep.at)


def _drop_replaced(turn: Turn, known: dict[str, Gpu], sweep: GpuSweep) -> None:
    """Whose place another card has is not in the machine: it has no index any more, and no PCI id."""
    place_of = {reading.pci_id: reading.uuid for reading in sweep.gpus if reading.uuid and reading.pci_id}
    for gpu in list(known.values()):
        other = place_of.get(gpu.pci_id, gpu.uuid)
        if gpu.absent_since is None or other == gpu.uuid:
            continue
        text = f"{label(gpu)} was replaced: {gpu.pci_id} is {label(known[other])} now"
        if gpu.quarantine is None:
            del known[gpu.uuid]
        else:
            text += f"; it is shown until: vllm-supervisor gpu clear {gpu.uuid}"
            known[gpu.uuid] = replace(gpu, pci_id="", index=None, reading=None, reasons=())
        turn.record("gpu_replaced", None, text, severity=Severity.NOTICE, gpu=gpu.uuid, by=other)


def _judge(turn: Turn, gpu: Gpu, before: GpuReading | None, sweep: GpuSweep) -> None:
    """Quarantine what must not be used, tell what is worth knowing."""
    reading = gpu.reading
    if reading is None or gpu.absent_since is not None:
        if gpu.quarantine is None and sweep.at - (gpu.absent_since or sweep.at) >= ABSENT_FOR_S:
            remedy = xids.REMEDIES[XidClass.REBOOT]
            quarantine(turn, gpu, Reason("gpu_lost", f"it does not answer any more: {remedy}"), at_once=True)
        return
    if gpu.quarantine is None and reading.error is None:
        action = xids.RECOVERY.get(reading.recovery_action or 0)
        if action is not None:
            text = f"the driver asks for a recovery: {action.format(gpu=gpu.uuid)}"
            quarantine(turn, gpu, Reason("gpu_recovery", text), at_once=False)
        elif reading.remap_failed:
            text = "it could not remap a broken row of its memory: have it replaced"
            quarantine(turn, gpu, Reason("gpu_remap_failed", text), at_once=False)
    _tell(turn, turn.node.gpus[gpu.uuid], tuple(_wrong(gpu, before, reading, sweep)))


def _tell(turn: Turn, gpu: Gpu, found: tuple[Reason, ...]) -> None:
    before, now = ({reason.code for reason in reasons} for reasons in (gpu.reasons, found))
    for reason in found:
        if reason.code not in before:
            text = f"{label(gpu)}: {reason.message}"
            turn.record("gpu_degraded", None, text, severity=Severity.WARNING, reason=reason, gpu=gpu.uuid)
    for reason in gpu.reasons:
        if reason.code not in now:
            text = f"{label(gpu)}: {reason.code} is over; it was: {reason.message}"
            turn.record("gpu_recovered", None, text, severity=Severity.NOTICE, reason=reason, gpu=gpu.uuid)
    if found != gpu.reasons:
        put(turn, replace(gpu, reasons=found))


def _wrong(gpu: Gpu, before: GpuReading | None, reading: GpuReading, sweep: GpuSweep) -> Iterator[Reason]:
    """What makes a GPU degraded, short of a quarantine."""
    if reading.error is not None:
        yield telemetry.no_driver(reading.error)
    if gpu.throttled_since is not None and sweep.at - gpu.throttled_since >= THROTTLED_FOR_S:
        why = ", ".join(name for bit, name in THROTTLING.items() if (reading.clock_reasons or 0) & bit)
        heat = "" if reading.temperature_c is None else f", {reading.temperature_c:.0f} C"
        yield Reason("gpu_throttled", f"it runs slower ({why}{heat}); look at cooling and power")
    yield from _ecc(gpu, None if before is None else before.ecc_uncorrected, reading.ecc_uncorrected)
    if reading.remap_pending:
        yield Reason("gpu_remap_pending", "a row of its memory is to be remapped: reset it at the next occasion")


def _ecc(gpu: Gpu, before: int | None, now: int | None) -> Iterator[Reason]:
    """Errors that came while it was watched; until a reset lowers the counter, or an operator clears the GPU."""
    if before is None or now is None or now < before:
        return
    if now > before:
        text = (
            f"uncorrectable memory errors since the driver was loaded went from {before} to {now}; reset it, and watch"
        )
        yield Reason("gpu_ecc", text)
    else:
        yield from (reason for reason in gpu.reasons if reason.code == "gpu_ecc")


def clear(turn: Turn, gpu: Gpu, actor: str) -> str:
    """Trust a GPU again, or forget one that this daemon never saw; the next looks may quarantine it anew."""
    released = turn.node.telemetry.released_until is not None
    telemetry.resume(turn)
    if gpu.reading is None:
        known, unseen = (
            {key: one for key, one in gpus.items() if key != gpu.uuid}
            for gpus in (turn.node.gpus, turn.node.unseen_gpus)
        )
        turn.node = replace(turn.node, gpus=known, unseen_gpus=unseen)
    else:
        absent_since = None if gpu.absent_since is None else turn.now
        # What a slow sweep saw before whatever was done since would quarantine it again.
        unknown: dict[str, Any] = dict.fromkeys(_SLOW_FIELDS)
        reading = replace(gpu.reading, **unknown)
        put(turn, replace(gpu, quarantine=None, absent_since=absent_since, reading=reading))
    text = f"{label(gpu)} is trusted again: cleared by {actor}"
    if gpu.quarantine is None:
        text = f"{label(gpu)} was not quarantined"
        text += f"; NVML is open again (by {actor})" if released else "; it is looked at once more"
    turn.record("gpu_cleared", None, text, severity=Severity.NOTICE, gpu=gpu.uuid, actor=actor)
    telemetry.look_closely(turn)
    return text


def is_closed_unseen(node: Node) -> bool:
    """Whether NVML was released before this daemon has seen any GPU: none can be named, and yet it has to end."""
    return node.telemetry.released_until is not None and all(gpu.reading is None for gpu in node.gpus.values())


def reopen(turn: Turn, name: str, actor: str) -> str:
    """End a release for a GPU that is not known yet."""
    telemetry.resume(turn)
    text = f"NVML is open again (by {actor}); '{name}' was not seen before the release"
    turn.record("gpu_cleared", None, text, severity=Severity.NOTICE, gpu=name, actor=actor)
    telemetry.look_closely(turn)
    return text


# --- engines ----------------------------------------------------------------------------------------------------------


def _on_engine(turn: Turn, engine: Engine, before: Mapping[str, Gpu], sweep: GpuSweep) -> None:
    """What a sweep says about one engine: where its processes are, how much they hold, whether all came back."""
    if not engine.spec.gpus:
        return
    phase = engine.phase
    if isinstance(phase, Stopping) and phase.gone_at is not None and sweep.at >= phase.gone_at:
        if held(turn.node.gpus, engine) is None:
            ending.conclude(turn, engine, phase)
        return
    if engine.process is None or not isinstance(phase, LIVE):
        return
    on = {
        reading.uuid: [p.used_bytes for p in reading.processes or () if _is_of(engine, p.engine, p.generation)]
        for reading in sweep.gpus
    }
    strays = [uuid for uuid, used in on.items() if used and uuid not in engine.devices] if engine.devices else []
    wrong = [uuid for uuid in strays if _listed(engine, _reading_of(before, uuid))]
    if wrong:
        cause = Reason("wrong_gpu", _astray(turn, engine, [turn.node.gpus[uuid] for uuid in wrong]))
        turn.record("verdict", engine, f"{engine.spec.name}: {cause.message}", severity=Severity.ERROR, reason=cause)
        last = LastExit(ExitClass.CRASH, None, None, turn.now, engine.generation, cause.message)
        ending.kill(turn, replace(engine, last_exit=last), After.CRASH, cause)
        return
    used = _used_bytes(turn, engine, on, sweep)
    if used is not None:
        engine = starting.on_gpu_memory(turn, engine, used)
    placed = engine.placed or (bool(engine.devices) and all(on.get(uuid) for uuid in engine.devices))
    strange = _strange_bytes(engine, on, sweep)
    seen = engine.watch
    if isinstance(phase, Ready) and seen is not None and used is not None:
        baseline = engine.warmup.gpu_bytes if engine.warmup is not None else None
        seen = replace(seen, gpu=observed(seen.gpu, sweep.at, used, baseline, engine.spec.restart))
    if (used, placed, strange, seen) != (engine.gpu_bytes, engine.placed, engine.strange_bytes, engine.watch):
        turn.put(replace(engine, gpu_bytes=used, placed=placed, strange_bytes=strange, watch=seen))


def _astray(turn: Turn, engine: Engine, landed: Sequence[Gpu]) -> str:
    """What is wrong with an engine on other GPUs than its own; what that says about CUDA is remembered."""
    why = "CUDA counts differently here"
    counts_lost = counts_lost_gpus(turn.node.gpus, engine, landed)
    if counts_lost is not None:
        turn.node = replace(turn.node, telemetry=replace(turn.node.telemetry, cuda_counts_lost=counts_lost))
        why = f"CUDA {'counts' if counts_lost else 'does not count'} a GPU that is lost, and from now on so do we"
    return f"its processes run on {', '.join(map(label, landed))}, which it was not given: {why}"


def _listed(engine: Engine, reading: GpuReading | None) -> bool:
    """Whether processes of this generation were on a GPU when it was looked at."""
    processes = reading.processes or () if reading is not None else ()
    return any(_is_of(engine, process.engine, process.generation) for process in processes)


def _is_of(engine: Engine, name: str | None, generation: int | None) -> bool:
    return name == engine.spec.name and generation == engine.generation


def _strange_bytes(engine: Engine, on: Mapping[str, list[int | None]], sweep: GpuSweep) -> dict[str, int]:
    """What no process accounted for on each of its GPUs when its own processes were listed there last."""
    now = {reading.uuid: strange_bytes(reading) for reading in sweep.gpus if on[reading.uuid]}
    known = engine.strange_bytes if engine.placed else {}
    return {**known, **{uuid: size for uuid, size in now.items() if size is not None}}


def _used_bytes(turn: Turn, engine: Engine, on: Mapping[str, list[int | None]], sweep: GpuSweep) -> int | None:
    """Memory of its processes on all its GPUs; where they cannot be told apart, all of a GPU that nobody else uses."""
    total, gpus = 0, of_engine(turn.node.gpus, engine)
    readings = {reading.uuid: reading for reading in sweep.gpus}
    if len(gpus) < len(engine.devices or engine.spec.gpus):
        return None
    for gpu in gpus:
        reading = readings.get(gpu.uuid)
        if reading is None:
            return None
        own = on[gpu.uuid]
        if own and None not in own:
            total += sum(used for used in own if used is not None)
        elif reading.used_bytes is not None and _alone(turn, engine, gpu, reading):
            total += reading.used_bytes
        else:
            return None
    return total


def _alone(turn: Turn, engine: Engine, gpu: Gpu, reading: GpuReading) -> bool:
    """Whether nobody else can hold memory on a GPU: device totals are then this engine's."""
    others = (e for e in turn.engines() if e.spec.name != engine.spec.name and e.live)
    if any(gpu.uuid == other.uuid for e in others for other in of_engine(turn.node.gpus, e)):
        return False
    return all(_is_of(engine, p.engine, p.generation) for p in reading.processes or ())


def _pace(turn: Turn) -> None:
    """When the next sweep is wanted, if sooner than the next poll."""
    delay_s: float | None = None
    for engine in turn.engines():
        if not engine.spec.gpus:
            continue
        phase = engine.phase
        if isinstance(phase, Stopping) and phase.gone_at is not None:
            delay_s = telemetry.URGENT_S
            break
        young = engine.ready_since is not None and turn.now < engine.ready_since + PLACED_WITHIN_S
        if engine.state in HURRIED or (young and not engine.placed):
            delay_s = telemetry.HURRY_S
    if any(gpu.absent_since is not None and gpu.quarantine is None for gpu in turn.node.gpus.values()):
        delay_s = min(delay_s or telemetry.HURRY_S, telemetry.HURRY_S)
    if delay_s is not None:
        telemetry.hasten(turn, turn.now + delay_s)
