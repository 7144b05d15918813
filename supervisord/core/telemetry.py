"""The GPU probe, watched like an engine: NVML calls can hang for ever in the kernel, so a helper process makes them.

A sweep that is not answered in time means SIGKILL for the helper and another one in its place. One that SIGKILL does
not end is abandoned; after two of them no more are started, and supervision goes on without telemetry until one ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisord.core import xids
from supervisord.core.gpu_samples import LOST, GpuPlace, GpuSweep
from supervisord.core.messages import GpuHelperEnded, GpusSwept, KillGpuHelper, Severity, StartGpuHelper, SweepGpus
from supervisord.core.model import Node, Reason, Telemetry
from supervisord.core.turn import Turn

SWEEP_DEADLINE_S: Final = 5.0
"""A sweep takes milliseconds; during the tear-down of a process single calls took 68 ms."""
FIRST_DEADLINE_S: Final = 30.0
"""The first one initialises the driver: 1 to 3 s for each GPU while persistence is off."""
GRACE_S: Final = 1.0
"""More, once that is over: a daemon that was stopped itself hears first of the answer that lies in its inbox."""
ABANDON_S: Final = 3.0
"""What lives so long after SIGKILL sits in the kernel."""
STUCK_MAX: Final = 2
SLOW_EVERY_S: Final = 30.0
HURRY_S: Final = 1.0
"""Between sweeps while an engine starts, stops, or waits for a GPU; otherwise they come with the polls."""
URGENT_S: Final = 0.1
"""Between sweeps while memory has to come back: it takes 86 to 150 ms."""
RETRY_S: Final = 5.0
RETRY_MAX_S: Final = 300.0
UNUSED_RETRY_S: Final = 600.0
"""Between attempts on a machine whose driver does not work and which no engine needs."""
RELEASE_S: Final = 600.0
"""How long NVML stays closed after `gpu release`."""

NOBODY_THERE: Final = 6
"""NVML's code for what was not found: no GPU is listed, or none that answers, where there were some."""
RELEASED: Final = (
    f"NVML is closed for {RELEASE_S / 60:g} min by an operator (gpu release), so that a GPU can be reset; "
    "when that is done: vllm-supervisor gpu clear GPU"
)

NO_DRIVER: Final = {
    4: ("driver_no_permission", "cannot open the NVIDIA devices: no permission; see ls -l /dev/nvidia*"),
    NOBODY_THERE: ("driver_no_gpu", "NVML lists no GPU that answers any more; see nvidia-smi and dmesg"),
    9: ("driver_not_loaded", "the NVIDIA driver is not loaded; see nvidia-smi and dmesg"),
    12: ("driver_no_library", "libnvidia-ml.so.1 is not there: the NVIDIA driver is not installed, or not its tools"),
    18: (
        "driver_mismatch",
        "the NVIDIA driver was upgraded underneath: no new process can use a GPU, those that run keep working; reboot",
    ),
    999: (
        "driver_unknown",
        "NVML answers Unknown Error: in a container whose devices were taken away, create it anew; else see dmesg",
    ),
}
LASTING: Final = frozenset({4, 9, 12, 18})
"""Codes with which no new process could use a GPU: they hold until NVML answers otherwise, also while it hangs."""
GSP_FAULTS: Final = tuple(f"{xids.name_of(number)}:" for number in xids.GSP)
"""How the messages of quarantines begin after which each call for that GPU would hang."""
AVOIDED_MAX: Final = 16
"""A request has to fit into a pipe at once."""


def boot(turn: Turn, *, nvidia: bool) -> None:
    """Begin, on a machine with a driver or with engines that need one."""
    if nvidia or needed(turn):
        turn.node = replace(turn.node, telemetry=replace(turn.node.telemetry, next_at=turn.now))
        on_clock(turn)


def needed(turn: Turn) -> bool:
    """Whether an engine of this node uses GPUs."""
    return any(engine.spec.gpus for engine in turn.engines())


def off(node: Node) -> bool:
    """Whether nobody looks at GPUs: nothing is known of them, and nothing waits for that."""
    telemetry = node.telemetry
    return telemetry.helper == 0 and telemetry.next_at is None


def trouble(node: Node) -> Reason | None:
    """Why nothing is known of the GPUs now; None: they are seen, or nobody looks."""
    telemetry = node.telemetry
    if telemetry.released_until is not None:
        return Reason("gpu_released", RELEASED)
    if telemetry.unresponsive:
        return Reason("gpu_telemetry_unresponsive", "NVML does not answer; nothing is known of the GPUs")
    if telemetry.hangs:
        return Reason("gpu_probe_hangs", "the GPU probe did not answer; another one tries")
    if telemetry.problem is not None:
        return no_driver(telemetry.problem)
    if telemetry.swept_at is None and not off(node):
        return Reason("gpu_first_look", "the GPUs have not been looked at yet")
    return None


def no_driver(problem: int) -> Reason:
    """What an NVML code means that initialising failed with."""
    unknown = ("driver_error", f"NVML fails with code {problem}; see nvidia-smi and dmesg")
    return Reason(*NO_DRIVER.get(problem, unknown))


def closed(node: Node) -> Reason | None:
    """Why no process may be started on any GPU now; None: each GPU is a matter of its own.

    While the probe fails for a moment, what was known last holds. When it is unresponsive that may be long ago, so only
    what cannot have passed by itself does.
    """
    telemetry = node.telemetry
    if telemetry.problem is not None and (not telemetry.unresponsive or telemetry.problem in LASTING):
        return no_driver(telemetry.problem)
    return trouble(node) if telemetry.released_until is not None or unseen(node) else None


def unseen(node: Node) -> bool:
    """Whether there has been no look yet, and nobody has given up on one."""
    telemetry = node.telemetry
    given_up = telemetry.unresponsive or telemetry.released_until is not None or off(node)
    return telemetry.swept_at is None and telemetry.problem is None and not given_up


def avoided(node: Node) -> tuple[GpuPlace, ...]:
    """GPUs whose firmware is dead: each call would take 45 s and blind us for the others (Xid 119, 120)."""
    dead = [
        GpuPlace(gpu.uuid, gpu.pci_id, gpu.index)
        for gpu in node.gpus.values()
        if gpu.quarantine is not None and gpu.quarantine.message.startswith(GSP_FAULTS) and gpu.pci_id
    ]
    return tuple(dead[:AVOIDED_MAX])


def blind(node: Node) -> bool:
    """Whether nothing that is known of the GPUs can be trusted to be so now."""
    return trouble(node) is not None


def looking(node: Node) -> bool:
    """Whether the first look is still under way: nothing is wrong yet."""
    return unseen(node) and not node.telemetry.hangs


def deadline(telemetry: Telemetry) -> float | None:
    """When this has to be looked at again (monotonic seconds)."""
    times = [telemetry.next_at, telemetry.released_until]
    if telemetry.asked_at is not None:
        times.append(_late_at(telemetry, telemetry.asked_at))
    if telemetry.killed_at is not None:
        times.append(telemetry.killed_at + ABANDON_S)
    return min((at for at in times if at is not None), default=None)


def _late_at(telemetry: Telemetry, asked_at: float) -> float:
    if telemetry.late_until is not None:
        return telemetry.late_until
    return asked_at + (SWEEP_DEADLINE_S if telemetry.answered else FIRST_DEADLINE_S)


def hasten(turn: Turn, at: float) -> None:
    """Have the next sweep at `at` at the latest."""
    telemetry = turn.node.telemetry
    idle = telemetry.running and telemetry.asked_at is None and telemetry.killed_at is None
    if idle and (telemetry.next_at is None or at < telemetry.next_at):
        turn.node = replace(turn.node, telemetry=replace(telemetry, next_at=at))


def hurry(turn: Turn) -> None:
    """Somebody begins to wait for a GPU: have the next sweep soon, unless an answer or an end is due that sets it."""
    telemetry = turn.node.telemetry
    if telemetry.asked_at is None and telemetry.killed_at is None:
        hasten(turn, turn.now + HURRY_S)


def look_closely(turn: Turn) -> None:
    """Have a slow sweep as soon as can be."""
    turn.node = replace(turn.node, telemetry=replace(turn.node.telemetry, slow_at=turn.now))
    hasten(turn, turn.now)


def on_poll(turn: Turn) -> None:
    """The regular time for a sweep."""
    hasten(turn, turn.now)
    on_clock(turn)


def on_clock(turn: Turn) -> None:
    """Deadlines, and what is due."""
    telemetry = turn.node.telemetry
    if telemetry.asked_at is not None and turn.now >= _late_at(telemetry, telemetry.asked_at):
        late = telemetry.late_until is not None
        telemetry = _hangs(turn, telemetry) if late else replace(telemetry, late_until=turn.now + GRACE_S)
    if telemetry.killed_at is not None and turn.now >= telemetry.killed_at + ABANDON_S:
        telemetry = _abandoned(turn, telemetry)
    if telemetry.released_until is not None and turn.now >= telemetry.released_until:
        telemetry = replace(telemetry, released_until=None, next_at=turn.now)
    due = telemetry.next_at is not None and turn.now >= telemetry.next_at
    if due and telemetry.running and telemetry.asked_at is None and telemetry.killed_at is None:
        telemetry = _asked(turn, telemetry)
    elif due and not telemetry.running and _may_start(telemetry):
        telemetry = _started(turn, telemetry)
    elif due:
        telemetry = replace(telemetry, next_at=None)  # the answer, or an end, sets it
    turn.node = replace(turn.node, telemetry=telemetry)


def _may_start(telemetry: Telemetry) -> bool:
    return telemetry.stuck < STUCK_MAX and telemetry.released_until is None


def _started(turn: Turn, telemetry: Telemetry) -> Telemetry:
    helper = telemetry.helper + 1
    turn.do(StartGpuHelper(helper))
    return _asked(turn, replace(telemetry, helper=helper, running=True, answered=False, slow_at=turn.now))


def _asked(turn: Turn, telemetry: Telemetry) -> Telemetry:
    slow = turn.now >= telemetry.slow_at
    number = telemetry.number + 1
    turn.do(SweepGpus(telemetry.helper, number, slow, avoided(turn.node)))
    slow_at = turn.now + SLOW_EVERY_S if slow else telemetry.slow_at
    return replace(telemetry, number=number, asked_at=turn.now, late_until=None, next_at=None, slow_at=slow_at)


def _hangs(turn: Turn, telemetry: Telemetry) -> Telemetry:
    turn.do(KillGpuHelper(telemetry.helper))
    waited_s = turn.now - (telemetry.asked_at or turn.now)
    if not telemetry.unresponsive:
        text = f"the GPU probe has not answered for {waited_s:.0f} s: its process is killed, another one tries"
        turn.record("gpu_probe_hangs", None, text, severity=Severity.WARNING, hangs=telemetry.hangs + 1)
    return replace(telemetry, asked_at=None, killed_at=turn.now, hangs=telemetry.hangs + 1, next_at=None)


def _abandoned(turn: Turn, telemetry: Telemetry) -> Telemetry:
    """SIGKILL did not end it."""
    stuck = telemetry.stuck + 1
    unresponsive = telemetry.unresponsive or max(stuck, telemetry.hangs) >= STUCK_MAX
    if unresponsive and not telemetry.unresponsive:
        failed = f"{telemetry.hangs} probes in a row failed, and the last one cannot be killed"
        many = f"{stuck} probe processes hang in the driver and cannot be killed"
        _tell_unresponsive(turn, many if stuck >= STUCK_MAX else failed)
    # Where no other one may be started now, the end of this one, or of a release, makes room.
    return replace(telemetry, killed_at=None, running=False, stuck=stuck, unresponsive=unresponsive, next_at=turn.now)


def _tell_unresponsive(turn: Turn, why: str) -> None:
    text = (
        f"GPU telemetry is unresponsive: {why}; engines are supervised without it. See dmesg; a reboot is likely to be "
        "needed"
    )
    turn.record("gpu_telemetry_unresponsive", None, text, severity=Severity.CRITICAL)


def on_ended(turn: Turn, seen: GpuHelperEnded) -> None:
    """A helper is gone: one that was abandoned makes room, the present one is replaced, but not in a hot loop."""
    telemetry = turn.node.telemetry
    if seen.helper != telemetry.helper or not telemetry.running:
        room = not telemetry.running and telemetry.stuck == STUCK_MAX
        next_at = turn.now if room else telemetry.next_at
        turn.node = replace(turn.node, telemetry=replace(telemetry, stuck=max(0, telemetry.stuck - 1), next_at=next_at))
        return
    killed = telemetry.killed_at is not None
    hangs = telemetry.hangs if killed else telemetry.hangs + 1
    delay_s = _delay_s(turn, telemetry, hangs)
    if not killed and not telemetry.unresponsive:
        text = f"the GPU probe ended by itself ({seen.detail}); another one is started in {delay_s:g} s"
        turn.record("gpu_probe_ended", None, text, severity=Severity.WARNING)
    unresponsive = telemetry.unresponsive or hangs >= STUCK_MAX
    if unresponsive and not telemetry.unresponsive:
        _tell_unresponsive(turn, f"{hangs} probes in a row failed, the last one: {seen.detail}")
    turn.node = replace(
        turn.node,
        telemetry=replace(
            telemetry,
            running=False,
            asked_at=None,
            killed_at=None,
            hangs=hangs,
            unresponsive=unresponsive,
            next_at=turn.now + delay_s,
        ),
    )


def _delay_s(turn: Turn, telemetry: Telemetry, hangs: int) -> float:
    """How long the next one waits: for a driver that hangs, for one that nobody needs; not after a release."""
    if hangs:
        return min(RETRY_MAX_S, RETRY_S * 2.0 ** min(hangs - 1, 10))
    return UNUSED_RETRY_S if telemetry.problem is not None and not needed(turn) else 0.0


def on_swept(turn: Turn, seen: GpusSwept) -> GpuSweep | None:
    """An answer: the sweep, if it is the one that is waited for."""
    telemetry = turn.node.telemetry
    if seen.helper != telemetry.helper or seen.number != telemetry.number or telemetry.asked_at is None:
        return None
    sweep = _as_a_whole(turn.node, seen.sweep)
    if telemetry.unresponsive:
        turn.record("gpu_telemetry_answers", None, "GPU telemetry answers again", severity=Severity.NOTICE)
    if sweep.problem != telemetry.problem:
        _tell_problem(turn, sweep)
    unused = sweep.problem is not None and not needed(turn)
    telemetry = replace(
        telemetry,
        asked_at=None,
        answered=True,
        hangs=0,
        unresponsive=False,
        problem=sweep.problem,
        swept_at=telemetry.swept_at if sweep.problem is not None else sweep.at,
        driver=sweep.driver,
        killed_at=turn.now if unused else None,
    )
    if unused:
        turn.do(KillGpuHelper(telemetry.helper))
    turn.node = replace(turn.node, telemetry=telemetry)
    return sweep


def _as_a_whole(node: Node, sweep: GpuSweep) -> GpuSweep:
    """Where no GPU answers, or none is left, and none is known to be faulty, it is NVML that does not work."""
    errors = {reading.error for reading in sweep.gpus}
    if errors and None not in errors and not errors & LOST:
        return replace(sweep, gpus=(), problem=sweep.gpus[0].error)
    well = any(gpu.reading is not None and gpu.quarantine is None for gpu in node.gpus.values())
    if sweep.problem is None and not errors and well:
        return replace(sweep, problem=NOBODY_THERE)
    return sweep


def _tell_problem(turn: Turn, sweep: GpuSweep) -> None:
    if sweep.problem is None:
        turn.record("gpu_driver_ready", None, f"the NVIDIA driver answers: {sweep.driver}", severity=Severity.NOTICE)
        return
    why = no_driver(sweep.problem)
    severity = Severity.ERROR if needed(turn) else Severity.INFO
    text = f"nothing is known of the GPUs: {why.message}"
    turn.record("gpu_driver_trouble", None, text, severity=severity, reason=why.code)


def release(turn: Turn) -> None:
    """Close NVML for a while: a process that has it open blocks the reset of a GPU."""
    telemetry = turn.node.telemetry
    if telemetry.running and telemetry.killed_at is None:
        turn.do(KillGpuHelper(telemetry.helper))
        telemetry = replace(telemetry, killed_at=turn.now, asked_at=None)
    turn.node = replace(
        turn.node, telemetry=replace(telemetry, released_until=turn.now + RELEASE_S, next_at=None, swept_at=None)
    )


def resume(turn: Turn) -> None:
    """Look again, sooner than a release would end."""
    telemetry = turn.node.telemetry
    if telemetry.released_until is not None:
        turn.node = replace(turn.node, telemetry=replace(telemetry, released_until=None, next_at=turn.now))
