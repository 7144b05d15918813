"""Faults of GPUs: what the driver reports of them (Xids), and the quarantine that follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisord.core import ending, telemetry, xids
from supervisord.core.gpu_inventory import find, label, normal_pci_id, of_engine
from supervisord.core.messages import Severity, XidSeen
from supervisord.core.model import After, Engine, Failed, Gpu, Reason, Stopping
from supervisord.core.turn import Turn
from supervisord.core.xids import XidClass

AGAIN_S: Final = 2.0
"""NVML and the kernel log tell of the same one; repeats of a fault that is known come every 45 s."""
TOLD_EVERY_S: Final = 60.0
"""A page fault of a careless kernel comes many times a second: people hear of it once a minute, with a count."""
OFF_BUS: Final = "off_bus"
"""Counted as, where the kernel log gives no number."""
OTHER: Final = "other"
"""Counted as, beyond NUMBERS_MAX different ones on one GPU."""
NUMBERS_MAX: Final = 32
UNSEEN_MAX: Final = 16
EVIDENCE_MAX: Final = 16


def put(turn: Turn, gpu: Gpu) -> Gpu:
    """Keep a changed GPU."""
    turn.node = replace(turn.node, gpus={**turn.node.gpus, gpu.uuid: gpu})
    return gpu


def on_xid(turn: Turn, seen: XidSeen) -> None:
    """The driver reported a fault: of the GPU, or of a process on it."""
    gpu = find(turn.node.gpus, seen.gpu) or _unseen(turn, seen.gpu)
    _keep_as_evidence(turn, gpu, seen)
    number, kind = _number(gpu, seen.xid), xids.class_of(seen.xid)
    last = gpu.xid_at.get(number)
    if last is not None and abs(seen.at - last) <= AGAIN_S:
        return
    counts, times = {**gpu.xids, number: gpu.xids.get(number, 0) + 1}, {**gpu.xid_at, number: seen.at}
    gpu = _put(turn, replace(gpu, xids=counts, xid_at=times))
    if kind in xids.REMEDIES and _is_news(gpu, seen.xid):
        text = f"{xids.name_of(seen.xid)}: {xids.REMEDIES[kind].format(gpu=gpu.uuid)}"
        fault = Reason("gpu_fault", text)
        if gpu.uuid in turn.node.gpus:
            quarantine(turn, gpu, fault, at_once=True)
            return
        gpu = _put(turn, replace(gpu, quarantine=fault))
    elif kind in xids.REMEDIES:
        return  # a faulty GPU says it again every 45 s, to everybody who asks
    if seen.xid == xids.RECOVERY_CHANGED:
        telemetry.look_closely(turn)
    _tell(turn, gpu, number, seen)


def _is_news(gpu: Gpu, xid: int | None) -> bool:
    """Whether a hardware fault changes something: it is the first one, or says that no call may touch the GPU."""
    old = gpu.quarantine
    return old is None or (xid in xids.GSP and not old.message.startswith(telemetry.GSP_FAULTS))


def _number(gpu: Gpu, xid: int | None) -> str:
    number = OFF_BUS if xid is None else str(xid)
    return number if number in gpu.xids or len(gpu.xids) < NUMBERS_MAX else OTHER


def _tell(turn: Turn, gpu: Gpu, number: str, seen: XidSeen) -> None:
    """At most once a minute for each number, with how often it came since."""
    told_at, told = gpu.xid_told.get(number, (None, 0))
    if told_at is not None and turn.now < told_at + TOLD_EVERY_S:
        return
    since = gpu.xids[number] - told
    _put(turn, replace(gpu, xid_told={**gpu.xid_told, number: (turn.now, gpu.xids[number])}))
    kind, engine = xids.class_of(seen.xid), _culprit(turn, seen)
    whose = "" if seen.pid is None else f" by pid {seen.pid}"
    if engine is not None:
        whose += f" of {engine.spec.name}"
    elif seen.engine is not None:
        whose += f" of {seen.engine}, generation {seen.generation}, which is gone"
    again = "" if since == 1 else f"; {since} times since it was told last"
    turn.record(
        "xid",
        engine,
        f"{label(gpu)}: {xids.name_of(seen.xid)}{whose}{again}",
        severity=Severity.WARNING if engine is not None or kind in xids.REMEDIES else Severity.INFO,
        reason=kind.value,
        xid=seen.xid,
        gpu=gpu.uuid,
        pid=seen.pid,
        times=since,
    )


# --- GPUs that no sweep has seen --------------------------------------------------------------------------------------


def _unseen(turn: Turn, name: str) -> Gpu:
    """A GPU that only the driver has named: what is known of it waits for the sweep that sees it."""
    pci_id = normal_pci_id(name) if ":" in name else ""
    key = pci_id or name
    return turn.node.unseen_gpus.get(key) or Gpu(key, pci_id=pci_id)


def _put(turn: Turn, gpu: Gpu) -> Gpu:
    if gpu.uuid in turn.node.gpus:
        return put(turn, gpu)
    unseen = {**turn.node.unseen_gpus, gpu.uuid: gpu}
    if len(unseen) > UNSEEN_MAX:
        del unseen[next((name for name, one in unseen.items() if one.quarantine is None), next(iter(unseen)))]
    turn.node = replace(turn.node, unseen_gpus=unseen)
    return gpu


def meet(turn: Turn, gpu: Gpu) -> Gpu:
    """A sweep has seen it: what the driver reported of it before counts from now on."""
    unseen = dict(turn.node.unseen_gpus)
    before = unseen.pop(gpu.uuid, None) or unseen.pop(gpu.pci_id, None)
    if before is None or gpu.reading is None:
        return gpu
    turn.node = replace(turn.node, unseen_gpus=unseen)
    fault = before.quarantine if gpu.quarantine is None else None
    gpu = put(turn, replace(gpu, xids=before.xids, xid_at=before.xid_at, xid_told=before.xid_told))
    if fault is not None:
        message = fault.message.replace(before.uuid, gpu.uuid)
        gpu = quarantine(turn, gpu, Reason(fault.code, message), at_once=True)
    return gpu


# --- what follows -----------------------------------------------------------------------------------------------------


def _culprit(turn: Turn, seen: XidSeen) -> Engine | None:
    """The engine whose living generation it was; what a dead one left behind is harmless."""
    engine = turn.engine(seen.engine) if seen.engine is not None else None
    ours = engine is not None and engine.generation == seen.generation and engine.process is not None
    return engine if ours else None


def _keep_as_evidence(turn: Turn, gpu: Gpu, seen: XidSeen) -> None:
    """NVML tells an Xid without the pid, the kernel log with it, and either may come first."""
    engine = _culprit(turn, seen)
    if engine is None or xids.class_of(seen.xid) is not XidClass.APPLICATION:
        return
    line = f"NVRM: Xid (PCI:{gpu.pci_id or gpu.uuid}): {seen.xid}"
    if line not in engine.app_xids and len(engine.app_xids) < EVIDENCE_MAX:
        turn.put(replace(engine, app_xids=(*engine.app_xids, line)))


def quarantine(turn: Turn, gpu: Gpu, reason: Reason, *, at_once: bool) -> Gpu:
    """No engine is started on it any more, and those on it are ended: at once, or with a drain."""
    gpu = put(turn, replace(gpu, quarantine=reason))
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
    return gpu
