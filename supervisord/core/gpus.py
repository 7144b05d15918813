"""The GPUs of the node: who they are, what is wrong with them, and what that means for the engines on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from supervisord.core import ending, gpu_kinds, persistence, telemetry, xids
from supervisord.core.gpu_inventory import find, held, label, of_engine
from supervisord.core.gpu_samples import GpuReading, GpuSweep
from supervisord.core.memory import observed
from supervisord.core.messages import GpusSwept, Severity, XidSeen
from supervisord.core.model import (
    After,
    Draining,
    Engine,
    ExitClass,
    Failed,
    Gpu,
    LastExit,
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
XID_AGAIN_S: Final = 2.0
"""NVML and the kernel log tell of the same one; repeats of a fault that is known come every 45 s."""
OFF_BUS: Final = "off_bus"
"""Counted as, where the kernel log gives no number."""
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
    known = dict(turn.node.gpus)
    for reading in sweep.gpus:
        if reading.uuid:
            known[reading.uuid] = as_seen(known.get(reading.uuid) or Gpu(reading.uuid), reading, sweep)
    here = {reading.uuid for reading in sweep.gpus if reading.uuid}
    for uuid, gpu in known.items():
        if uuid not in here and gpu.absent_since is None:
            known[uuid] = replace(gpu, absent_since=sweep.at)
    turn.node = replace(turn.node, gpus=known)
    for gpu in known.values():
        _judge(turn, gpu, sweep)
        persistence.reconcile(turn, turn.node.gpus[gpu.uuid])
    for engine in turn.engines():
        _on_engine(turn, engine, sweep)
    _pace(turn)


def as_seen(old: Gpu, new: GpuReading, sweep: GpuSweep) -> Gpu:
    """What a sweep makes of a GPU, before anything is concluded from it."""
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


def _judge(turn: Turn, gpu: Gpu, sweep: GpuSweep) -> None:
    """Quarantine what must not be used, tell what is worth knowing."""
    reading = gpu.reading
    if reading is None or gpu.absent_since is not None:
        if gpu.quarantine is None and sweep.at - (gpu.absent_since or sweep.at) >= ABSENT_FOR_S:
            remedy = xids.REMEDIES[XidClass.REBOOT]
            _quarantine(turn, gpu, Reason("gpu_lost", f"it does not answer any more: {remedy}"), at_once=True)
        return
    if gpu.quarantine is None:
        action = xids.RECOVERY.get(reading.recovery_action or 0)
        if action is not None:
            text = f"the driver asks for a recovery: {action.format(gpu=gpu.uuid)}"
            _quarantine(turn, gpu, Reason("gpu_recovery", text), at_once=False)
        elif reading.remap_failed:
            text = "it could not remap a broken row of its memory: have it replaced"
            _quarantine(turn, gpu, Reason("gpu_remap_failed", text), at_once=False)
    _tell(turn, turn.node.gpus[gpu.uuid], reading, sweep)


def _tell(turn: Turn, gpu: Gpu, reading: GpuReading, sweep: GpuSweep) -> None:
    found = tuple(_wrong(gpu, reading, sweep))
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


def _wrong(gpu: Gpu, reading: GpuReading, sweep: GpuSweep) -> Iterator[Reason]:
    """What makes a GPU degraded, short of a quarantine."""
    if gpu.throttled_since is not None and sweep.at - gpu.throttled_since >= THROTTLED_FOR_S:
        why = ", ".join(name for bit, name in THROTTLING.items() if (reading.clock_reasons or 0) & bit)
        heat = "" if reading.temperature_c is None else f", {reading.temperature_c:.0f} C"
        yield Reason("gpu_throttled", f"it runs slower ({why}{heat}); look at cooling and power")
    if reading.ecc_uncorrected:
        text = f"{reading.ecc_uncorrected} uncorrectable memory errors since the driver was loaded; reset it, and watch"
        yield Reason("gpu_ecc", text)
    if reading.remap_pending:
        yield Reason("gpu_remap_pending", "a row of its memory is to be remapped: reset it at the next occasion")


def put(turn: Turn, gpu: Gpu) -> Gpu:
    """Keep a changed GPU."""
    turn.node = replace(turn.node, gpus={**turn.node.gpus, gpu.uuid: gpu})
    return gpu


# --- faults -----------------------------------------------------------------------------------------------------------


def on_xid(turn: Turn, seen: XidSeen) -> None:
    """The driver reported a fault: of the GPU, or of a process on it."""
    gpu = find(turn.node.gpus, seen.gpu)
    _keep_as_evidence(turn, gpu, seen)
    number, kind = OFF_BUS if seen.xid is None else str(seen.xid), xids.class_of(seen.xid)
    if gpu is not None:
        last = gpu.xid_at.get(number)
        if last is not None and abs(seen.at - last) <= XID_AGAIN_S:
            return
        counts, times = {**gpu.xids, number: gpu.xids.get(number, 0) + 1}, {**gpu.xid_at, number: seen.at}
        gpu = put(turn, replace(gpu, xids=counts, xid_at=times))
    if kind in xids.REMEDIES and gpu is not None and gpu.quarantine is None:
        text = f"{xids.name_of(seen.xid)}: {xids.REMEDIES[kind].format(gpu=gpu.uuid)}"
        _quarantine(turn, gpu, Reason("gpu_fault", text), at_once=True)
        return
    if kind in xids.REMEDIES and gpu is not None and gpu.xids[number] > 1:
        return  # a faulty GPU says it again every 45 s, to everybody who asks
    if seen.xid == xids.RECOVERY_CHANGED:
        telemetry.look_closely(turn)
    engine = _culprit(turn, seen)
    whose = "" if seen.pid is None else f" by pid {seen.pid}"
    if engine is not None:
        whose += f" of {engine.spec.name}"
    elif seen.engine is not None:
        whose += f" of {seen.engine}, generation {seen.generation}, which is gone"
    turn.record(
        "xid",
        engine,
        f"{label(gpu) if gpu is not None else f'GPU {seen.gpu}'}: {xids.name_of(seen.xid)}{whose}",
        severity=Severity.WARNING if engine is not None or kind in xids.REMEDIES else Severity.INFO,
        reason=kind.value,
        xid=seen.xid,
        gpu=seen.gpu if gpu is None else gpu.uuid,
        pid=seen.pid,
    )


def _culprit(turn: Turn, seen: XidSeen) -> Engine | None:
    """The engine whose living generation it was; what a dead one left behind is harmless."""
    engine = turn.engine(seen.engine) if seen.engine is not None else None
    ours = engine is not None and engine.generation == seen.generation and engine.process is not None
    return engine if ours else None


def _keep_as_evidence(turn: Turn, gpu: Gpu | None, seen: XidSeen) -> None:
    """NVML tells an Xid without the pid, the kernel log with it, and either may come first."""
    engine = _culprit(turn, seen)
    if engine is None or xids.class_of(seen.xid) is not XidClass.APPLICATION:
        return
    line = f"NVRM: Xid (PCI:{seen.gpu if gpu is None else gpu.pci_id}): {seen.xid}"
    if line not in engine.app_xids:
        turn.put(replace(engine, app_xids=(*engine.app_xids, line)))


def _quarantine(turn: Turn, gpu: Gpu, reason: Reason, *, at_once: bool) -> None:
    """No engine is started on it any more, and those on it are ended: at once, or with a drain."""
    put(turn, replace(gpu, quarantine=reason))
    text = f"{label(gpu)} is quarantined: {reason.message}; then: vllm-supervisor gpu clear {gpu.uuid}"
    turn.record("gpu_quarantined", None, text, severity=Severity.CRITICAL, reason=reason, gpu=gpu.uuid)
    cause = Reason("gpu_fault", f"{label(gpu)} is quarantined: {reason.message}")
    for engine in turn.engines():
        ended = not engine.live or isinstance(engine.phase, Stopping | Failed)
        if ended or gpu.uuid not in {g.uuid for g in of_engine(turn.node.gpus, engine)}:
            continue
        after = After.STOP if turn.node.ending or not engine.wanted else After.START
        if at_once:
            ending.kill(turn, engine, after, cause, keep=True)
        else:
            ending.stop(turn, engine, after, cause, at_once=False)


def clear(turn: Turn, gpu: Gpu, actor: str) -> str:
    """Trust a GPU again, or forget one that this daemon never saw; the next looks may quarantine it anew."""
    telemetry.resume(turn)
    if gpu.absent_since is not None and gpu.reading is None:
        turn.node = replace(turn.node, gpus={uuid: one for uuid, one in turn.node.gpus.items() if uuid != gpu.uuid})
    else:
        absent_since = None if gpu.absent_since is None else turn.now
        # What a slow sweep saw before whatever was done since would quarantine it again.
        unknown: dict[str, Any] = dict.fromkeys(_SLOW_FIELDS)
        reading = gpu.reading and replace(gpu.reading, **unknown)
        put(turn, replace(gpu, quarantine=None, absent_since=absent_since, reading=reading))
    text = f"{label(gpu)} is trusted again: cleared by {actor}"
    turn.record("gpu_cleared", None, text, severity=Severity.NOTICE, gpu=gpu.uuid, actor=actor)
    telemetry.look_closely(turn)
    return text


# --- engines ----------------------------------------------------------------------------------------------------------


def _on_engine(turn: Turn, engine: Engine, sweep: GpuSweep) -> None:
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
    wrong = [uuid for uuid, used in on.items() if used and uuid not in engine.devices] if engine.devices else []
    if wrong:
        names = ", ".join(label(turn.node.gpus[uuid]) for uuid in wrong)
        cause = Reason(
            "wrong_gpu", f"its processes run on {names}, which it was not given: CUDA counts differently here"
        )
        turn.record("verdict", engine, f"{engine.spec.name}: {cause.message}", severity=Severity.ERROR, reason=cause)
        last = LastExit(ExitClass.CRASH, None, None, turn.now, engine.generation, cause.message)
        ending.kill(turn, replace(engine, last_exit=last), After.CRASH, cause)
        return
    used = _used_bytes(turn, engine, on, sweep)
    placed = engine.placed or (bool(engine.devices) and all(on.get(uuid) for uuid in engine.devices))
    seen = engine.watch
    if isinstance(phase, Ready) and seen is not None and used is not None:
        baseline = engine.warmup.gpu_bytes if engine.warmup is not None else None
        seen = replace(seen, gpu=observed(seen.gpu, sweep.at, used, baseline, engine.spec.restart))
    if (used, placed, seen) != (engine.gpu_bytes, engine.placed, engine.watch):
        turn.put(replace(engine, gpu_bytes=used, placed=placed, watch=seen))


def _is_of(engine: Engine, name: str | None, generation: int | None) -> bool:
    return name == engine.spec.name and generation == engine.generation


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
