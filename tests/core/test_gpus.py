"""What sweeps and Xids mean: faults and quarantines, whose memory it is, engines on the wrong GPU, throttling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisord.core import durable, gpu_faults, gpus, telemetry
from supervisord.core.gpu_samples import GpuProcess, GpuReading, GpuSweep
from supervisord.core.messages import (
    Booted,
    Due,
    EndRequested,
    Exited,
    GateClosed,
    GpuHelperEnded,
    GpuOp,
    GpuRequested,
    GpusSwept,
    KeepEvidence,
    Launch,
    Op,
    Record,
    Severity,
    Spawned,
    Sweep,
    SweepGpus,
    Swept,
    Terminate,
    What,
    XidSeen,
)
from supervisord.core.model import Draining, ExitClass, Found, Gpu, LastExit, Ready, Reason, State, Stopping, Waiting
from supervisord.core.rules import service
from supervisord.core.spec import EngineSpec, SloSpec
from tests.core.looks import look, see
from tests.core.play import GIB, Play, card, engine_spec, foreign, holds, launching, mine, new_node, node_spec, process

ON0 = ("GPU-0",)
GOOD0, GOOD1 = card("GPU-0"), card("GPU-1")


def serving(*engines: EngineSpec) -> Play:
    """These engines, or "a" on GPU-0 and "b" on GPU-1, are ready; from now on only the test answers sweeps."""
    specs = engines or (engine_spec(gpus=ON0, drain_timeout_s=5), engine_spec("b", gpus=("GPU-1",)))
    play = launching(*specs)
    for spec in specs:
        play.up(spec.name)
    play.cards = None
    return play


def xid(play: Play, number: int | None, gpu: str = "0000:10:00.0", *, after: float = 0.0, **fields: Any) -> Play:
    return play.see(XidSeen(play.now + after, gpu, number, "kmsg", **fields), after=after)


def codes(play: Play, name: str = "a") -> list[str]:
    phase = play.engine(name).phase
    assert isinstance(phase, Ready)
    return [reason.code for reason in phase.reasons]


def states(play: Play) -> list[str]:
    return [engine.state.value for engine in play.node.engines.values()]


# --- what is seen -----------------------------------------------------------------------------------------------------


def test_what_a_sweep_tells_of_a_gpu() -> None:
    play = serving().sweep(GOOD0, GOOD1)
    gpu = play.gpu()
    assert (gpu.pci_id, gpu.index, gpu.name) == ("0000:10:00.0", 0, "NVIDIA H200")
    assert (gpu.generation, gpu.kind, gpu.absent_since) == ("hopper", "datacenter", None)


def test_what_only_slow_sweeps_see_is_kept_over_fast_ones() -> None:
    play = serving()
    slow = replace(GOOD0, mig=True, ecc_uncorrected=3, remap_pending=True, remap_failed=False, recovery_action=0)
    play.see(Due(What.POLL), after=40.0)
    play.sweep(replace(slow, energy_j=9.0), GOOD1)
    play.sweep(GOOD0, GOOD1, after=1.0)
    reading = play.gpu().reading
    assert reading is not None
    assert (reading.mig, reading.ecc_uncorrected, reading.remap_pending, reading.remap_failed) == (True, 3, True, False)
    play.sweep(GOOD0, GOOD1, after=40.0)
    reading = play.gpu().reading
    assert reading is not None
    assert reading.mig is None, "a slow sweep that does not know says so"


def test_a_gpu_without_a_name_is_passed_over() -> None:
    play = serving().sweep(GOOD0, GOOD1, GpuReading("", "", 2, error=999))
    assert set(play.node.gpus) == {"GPU-0", "GPU-1"}


# --- lost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [None, replace(GOOD0, error=15), GpuReading("GPU-0", "", 0, error=16)])
def test_lost_is_what_does_not_answer_for_two_seconds(gone: GpuReading | None) -> None:
    play = serving()
    rest = (GOOD1,) if gone is None else (gone, GOOD1)
    play.sweep(*rest, after=1.0)
    lost_at = play.now
    assert play.gpu().absent_since == lost_at
    assert states(play) == ["ready", "ready"]
    play.sweep(*rest, after=gpus.ABSENT_FOR_S - 0.001)
    assert play.gpu().quarantine is None
    play.sweep(*rest, after=0.001)
    quarantine = play.gpu().quarantine
    assert quarantine is not None
    assert quarantine.code == "gpu_lost"
    assert play.record("gpu_quarantined").severity is Severity.CRITICAL
    assert states(play) == ["stopping", "ready"]
    assert KeepEvidence("a", 1, "gpu_fault") in play.actions
    assert Sweep("a", 1) in play.actions
    assert play.gpu().pci_id == "0000:10:00.0", "it is known by what it was"


def test_a_moment_without_it_is_nothing() -> None:
    play = serving().sweep(GOOD1).sweep(GOOD0, GOOD1, after=1.0).sweep(GOOD1, after=1.9)
    assert play.gpu().quarantine is None
    assert states(play) == ["ready", "ready"]


def test_while_one_is_missing_they_are_looked_at_every_second() -> None:
    play = serving()
    for name in "ab":
        play.change(name, placed=True)
    play.sweep(GOOD1, after=100.0)
    assert play.node.telemetry.next_at == play.now + telemetry.HURRY_S
    play.sweep(GOOD1, after=2.0)
    play.see(Swept("a", 1))
    play.sweep(GOOD1)
    assert play.engine().state is State.WAITING


def test_its_engine_waits_with_the_remedy_until_it_is_cleared() -> None:
    play = serving().sweep(GOOD1).sweep(GOOD1, after=2.0)
    play.see(Swept("a", 1), after=0.1).sweep(GOOD1)
    reason = play.phase(Waiting).reason
    assert reason.code == "gpu_quarantined"
    assert "rebooted" in reason.message
    assert reason.message.endswith("then: vllm-supervisor gpu clear GPU-0")
    play.sweep(GOOD0, GOOD1, after=30.0).is_(State.WAITING)
    play.see(GpuRequested(9, GpuOp.CLEAR, "GPU-0", "uid 0")).is_(State.STARTING)


def test_what_is_cleared_and_still_gone_is_not_started_on() -> None:
    play = serving().sweep(GOOD1).sweep(GOOD1, after=2.0)
    play.see(Swept("a", 1), after=0.1).sweep(GOOD1)
    play.see(GpuRequested(9, GpuOp.CLEAR, "GPU-0", "uid 0"), after=5.0)
    assert play.phase(Waiting).reason == Reason("gpu_missing", "GPU 0 (GPU-0) does not answer")
    play.sweep(GOOD1, after=1.9)
    assert play.gpu().quarantine is None, "it has two seconds to answer"
    play.sweep(GOOD1, after=0.1)
    assert play.gpu().quarantine is not None


def test_a_gpu_that_this_daemon_never_saw_is_forgotten_when_cleared() -> None:
    """It was quarantined, and somebody took it out of the machine."""
    old = Gpu("GPU-9", pci_id="0000:99:00.0", index=3, quarantine=Reason("gpu_lost", "gone"))
    play = Play(replace(new_node(node_spec(engine_spec(gpus=ON0))), gpus={"GPU-9": old}))
    play.cards = None
    play.see(Booted()).sweep(GOOD0).sweep(GOOD0, after=60.0)
    assert play.gpu("GPU-9").quarantine == old.quarantine
    play.see(GpuRequested(9, GpuOp.CLEAR, "GPU-9", "uid 0"))
    assert set(play.node.gpus) == {"GPU-0"}


# --- what the driver asks for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"recovery_action": 1}, "gpu_recovery"),
        ({"recovery_action": 2}, "gpu_recovery"),
        ({"recovery_action": 3}, "gpu_recovery"),
        ({"recovery_action": 4}, "gpu_recovery"),
        ({"remap_failed": True}, "gpu_remap_failed"),
        ({"recovery_action": 0}, None),
        ({"recovery_action": 9}, None),
        ({"remap_failed": False}, None),
        ({"remap_pending": True}, None),
        ({"ecc_uncorrected": 5}, None),
    ],
)
def test_what_quarantines_without_a_fault_now(values: dict[str, Any], code: str | None) -> None:
    play = serving().sweep(replace(GOOD0, **values), GOOD1, after=40.0)
    quarantine = play.gpu().quarantine
    assert (quarantine.code if quarantine else None) == code
    assert states(play) == ["draining" if code else "ready", "ready"]
    if code:
        assert play.phase(Draining).cause.code == "gpu_fault"
        assert not any(isinstance(action, Sweep | KeepEvidence) for action in play.actions)
        play.sample(running=0, waiting=0).is_(State.STOPPING)
    play.sweep(replace(GOOD0, **values), GOOD1, after=40.0).says()


def test_what_is_cleared_is_judged_by_a_new_look() -> None:
    """Not by what the last slow sweep saw before somebody reset it, which fast sweeps carry on."""
    play = serving().sweep(replace(GOOD0, recovery_action=1), GOOD1, after=40.0)
    play.sweep(GOOD0, GOOD1, after=1.0)
    reading = play.gpu().reading
    assert reading is not None
    assert reading.recovery_action == 1
    play.see(Due(What.POLL), after=1.0)
    assert play.node.telemetry.asked_at == play.now, "a fast one is under way"
    play.see(GpuRequested(9, GpuOp.CLEAR, "GPU-0", "uid 0"))
    telemetry_ = play.node.telemetry
    play.see(GpusSwept(telemetry_.helper, telemetry_.number, GpuSweep(play.now, (GOOD0, GOOD1))))
    assert play.gpu().quarantine is None
    play.see(Due(What.POLL))
    assert [action.slow for action in play.actions if isinstance(action, SweepGpus)] == [True]
    play.sweep(replace(GOOD0, recovery_action=1), GOOD1)
    assert play.gpu().quarantine is not None, "if it still asks for it"


def test_a_changed_recovery_action_is_looked_at_at_once() -> None:
    play = serving().sweep(GOOD0, GOOD1, after=1.0)
    xid(play, 154).says("xid").see(Due(What.CLOCK))
    assert [action.slow for action in play.actions if isinstance(action, SweepGpus)] == [True]


def test_rows_to_be_remapped_are_told_once() -> None:
    play = serving().sweep(replace(GOOD0, remap_pending=True), GOOD1, after=40.0)
    assert play.record("gpu_degraded").reason == "gpu_remap_pending"
    play.sweep(replace(GOOD0, remap_pending=True), GOOD1, after=40.0).says()
    play.sweep(replace(GOOD0, remap_pending=False), GOOD1, after=40.0).says("gpu_recovered")
    assert play.gpu().reasons == ()


def ecc(count: int | None) -> tuple[GpuReading, GpuReading]:
    return replace(GOOD0, ecc_uncorrected=count), GOOD1


def test_uncorrectable_errors_are_told_when_they_come() -> None:
    play = serving().sweep(*ecc(0), after=40.0).says()
    play.sweep(*ecc(2), after=40.0)
    assert "went from 0 to 2" in play.record("gpu_degraded").message
    assert play.record("gpu_degraded").reason == "gpu_ecc"
    play.sweep(*ecc(None), after=1.0).says()
    assert [reason.code for reason in play.gpu().reasons] == ["gpu_ecc"], "a fast sweep does not look"
    play.sweep(*ecc(2), after=40.0).says()
    play.sweep(*ecc(3), after=40.0).says()
    assert "went from 2 to 3" in play.gpu().reasons[0].message
    play.sweep(*ecc(0), after=40.0).says("gpu_recovered")


def test_old_errors_are_no_eternal_alarm() -> None:
    """The counter goes back to zero when the driver is loaded, which may be in a year."""
    play = serving().sweep(*ecc(5), after=40.0).says()
    play.sweep(*ecc(5), after=40.0).says()
    assert play.gpu().reasons == ()


def test_an_operator_ends_the_alarm() -> None:
    play = serving().sweep(*ecc(0), after=40.0).sweep(*ecc(2), after=40.0).says("gpu_degraded")
    play.see(GpuRequested(9, GpuOp.CLEAR, "GPU-0", "uid 0")).sweep(*ecc(2), after=1.0).says("gpu_recovered")
    play.sweep(*ecc(2), after=40.0).says()
    play.sweep(*ecc(3), after=40.0).says("gpu_degraded")


# --- Xids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [48, 74, 79, 62, 64, 95, 119, 120, 140, None])
@pytest.mark.parametrize("gpu", ["0000:10:00.0", "GPU-0"])
def test_a_hardware_fault_stops_what_runs_there_at_once(number: int | None, gpu: str) -> None:
    play = xid(serving(), number, gpu)
    assert states(play) == ["stopping", "ready"]
    quarantine = play.gpu().quarantine
    assert quarantine is not None
    assert quarantine.code == "gpu_fault"
    assert play.phase(Stopping).cause.code == "gpu_fault"
    kinds = [type(action).__name__ for action in play.actions]
    assert kinds.index("KeepEvidence") < kinds.index("Sweep")
    assert play.engine("b").phase.__class__.__name__ == "Ready"
    assert play.engine().restart_times == (), "no budget is spent"


def test_the_remedy_names_the_gpu_by_what_does_not_shift() -> None:
    play = xid(serving(), 119)
    assert "nvidia-smi --gpu-reset -i GPU-0" in play.record("gpu_quarantined").message


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 92, 94, 121, 154, 999])
def test_what_is_no_hardware_fault_is_told(number: int) -> None:
    play = xid(serving(), number, pid=99).says("xid")
    assert states(play) == ["ready", "ready"]
    assert play.gpu().xids == {str(number): 1}
    assert play.record("xid").numbers["xid"] == number
    assert play.record("xid").severity is Severity.INFO
    assert "by pid 99" in play.record("xid").message


def test_two_sources_tell_of_one() -> None:
    play = xid(serving(), 31).says("xid")
    xid(play, 31, "GPU-0", after=gpu_faults.AGAIN_S).says()
    assert play.gpu().xids == {"31": 1}
    xid(play, 31, after=0.001).says()
    assert play.gpu().xids == {"31": 2}
    xid(play, 13).says("xid")


def test_one_that_is_told_late_is_still_the_same() -> None:
    play = xid(serving(), 31)
    play.see(XidSeen(play.now - 1.9, "GPU-0", 31, "nvml"), after=1.0).says()


def test_a_known_fault_that_repeats_stops_nobody_again() -> None:
    play = xid(serving(), 119)
    xid(play, 119, after=45.0)
    assert [action for action in play.actions if isinstance(action, Sweep)] == []
    assert play.gpu().xids == {"119": 2}
    play.says()


def test_an_unknown_gpu() -> None:
    play = xid(serving(), 79, "0000:77:00.0")
    assert states(play) == ["ready", "ready"]
    assert play.record("xid").severity is Severity.WARNING
    assert play.record("xid").message == "GPU 0000:77:00.0: Xid 79 (fallen off the bus)"


def test_an_engines_own_mistake_is_evidence_for_its_end() -> None:
    play = xid(serving(), 31, pid=4711, engine="a", generation=1)
    assert play.record("xid").engine == "a"
    assert "of a" in play.record("xid").message
    assert play.record("xid").severity is Severity.WARNING
    play.see(Exited("a", 1, 0, None, ("INFO Application shutdown complete.",)))
    last = play.engine().last_exit
    assert last is not None
    assert last.kind is ExitClass.CUDA_APP


def test_the_pid_may_come_second() -> None:
    """NVML tells the Xid without a pid; the kernel log follows, and is no second Xid, but names the culprit."""
    play = xid(serving(), 31, "GPU-0")
    xid(play, 31, pid=4711, engine="a", generation=1, after=0.5).says()
    assert play.engine().app_xids == ("NVRM: Xid (PCI:0000:10:00.0): 31",)
    xid(play, 31, pid=4711, engine="a", generation=1, after=0.5)
    assert len(play.engine().app_xids) == 1
    xid(play, 13, "0000:77:00.0", pid=4711, engine="a", generation=1)
    assert play.engine().app_xids[1:] == ("NVRM: Xid (PCI:0000:77:00.0): 13",)


@pytest.mark.parametrize("generation", [0, 2])
def test_what_a_dead_generation_leaves_behind_is_harmless(generation: int) -> None:
    play = xid(serving(), 43, pid=9, engine="a", generation=generation)
    assert play.engine().app_xids == ()
    assert play.record("xid").severity is Severity.INFO
    assert f"of a, generation {generation}, which is gone" in play.record("xid").message


def test_a_launch_forgets_the_evidence_of_the_last_one() -> None:
    play = xid(serving(), 31, pid=4711, engine="a", generation=1)
    play.see(Exited("a", 1, 0, None)).see(Swept("a", 1)).sweep(GOOD0, GOOD1, after=0.1)
    while play.engine().launching is None:
        play.see(Due(What.CLOCK), after=1.0)
        if play.node.telemetry.asked_at is not None:
            play.sweep(GOOD0, GOOD1)
    assert play.engine().app_xids == ()


# --- who is ended -----------------------------------------------------------------------------------------------------


def test_an_engine_on_two_gpus_is_stopped_for_either() -> None:
    play = serving(engine_spec(gpus=("GPU-0", "GPU-1")), engine_spec("b", gpus=("GPU-2",)))
    xid(play, 79, "GPU-1")
    assert states(play) == ["stopping", "ready"]


def test_a_launch_under_way_is_overtaken() -> None:
    play = launching(engine_spec(gpus=ON0))
    xid(play, 79).is_(State.STOPPING)
    assert not any(isinstance(action, KeepEvidence) for action in play.actions), "there is nothing to look at yet"
    play.see(Spawned("a", 1, process(1)), after=0.1).does(Sweep)


def test_a_launch_behind_an_outside_gate_is_overtaken_too() -> None:
    play = launching(engine_spec(gpus=ON0)).see(GateClosed("a", 1, "disk_full", "full")).wake()
    assert play.engine().launching == 1
    xid(play, 79).is_(State.STOPPING)
    play.see(GateClosed("a", 1, "disk_full", "full"))
    assert play.phase(Waiting).reason.code == "gpu_quarantined"


def test_what_is_stopping_or_given_up_is_left_alone() -> None:
    play = serving().ask(Op.STOP, now=True)
    xid(play, 79).does()
    assert play.phase(Stopping).cause.code == "operator"


def test_an_engine_that_nobody_wants_stays_stopped() -> None:
    play = serving().ask(Op.STOP)
    assert play.engine().state is State.DRAINING
    xid(play, 79).see(Swept("a", 1)).sweep(GOOD0, GOOD1).is_(State.STOPPED)


def test_a_daemon_that_ends_waits_for_no_memory() -> None:
    play = serving(engine_spec(gpus=ON0, drain_timeout_s=0)).see(EndRequested("SIGTERM"))
    play.see(Swept("a", 1)).is_(State.STOPPED)
    play = serving(engine_spec(gpus=ON0, drain_timeout_s=0)).ask(Op.STOP).see(Swept("a", 1)).is_(State.STOPPING)
    play.see(EndRequested("SIGTERM")).is_(State.STOPPED)


def test_a_quarantine_survives_the_daemon() -> None:
    play = xid(serving(), 79)
    gpus_ = durable.restore_gpus(durable.save_gpus(play.node))
    again = Play(replace(new_node(node_spec(engine_spec(gpus=("0",)))), gpus=gpus_))
    again.cards = (GOOD0,)
    again.see(Booted())
    assert again.phase(Waiting).reason.code == "gpu_quarantined"


# --- where it runs ----------------------------------------------------------------------------------------------------


def test_processes_on_another_gpu_than_given() -> None:
    play = launching(engine_spec(gpus=ON0), engine_spec("b", gpus=("GPU-1",), autostart=False)).spawn()
    play.sweep(GOOD0, holds(GOOD1, mine(1)), after=1.0).is_(State.STARTING).says()
    play.sweep(GOOD0, holds(GOOD1, mine(1)), after=1.0)
    play.is_(State.STOPPING).says("verdict", "killing")
    assert play.record("verdict").reason == "wrong_gpu"
    assert "run on GPU 1 (GPU-1)" in play.record("verdict").message
    last = play.engine().last_exit
    assert last is not None
    assert last.kind is ExitClass.CRASH, "the budget bounds it"


def test_how_cuda_counts_is_learned_from_who_is_astray() -> None:
    """The daemon began while GPU 0 was lost. That CUDA counts it is seen by two engines one place too far down."""
    lost = GpuReading("", "", 0, error=15)
    two = (engine_spec(gpus=("GPU-2",)), engine_spec("b", gpus=("GPU-3",)))
    play = Play(new_node(node_spec(*two)))
    play.cards = (lost, GOOD1, card("GPU-2"), card("GPU-3"))
    play.see(Booted())
    assert [one for one in play.actions if isinstance(one, Launch)] == [Launch("a", 1, (1,)), Launch("b", 1, (2,))]
    play.spawn().spawn("b")
    for _ in range(2):
        play.sweep(lost, holds(GOOD1, mine()), holds(card("GPU-2"), mine(engine="b")), card("GPU-3"), after=1.0)
    seen = "which it was not given: CUDA counts a GPU that is lost, and from now on so do we"
    verdicts = [one.message for one in play.actions if isinstance(one, Record) and one.kind == "verdict"]
    assert verdicts == [
        f"a: its processes run on GPU 1 (GPU-1), {seen}",
        f"b: its processes run on GPU 2 (GPU-2), {seen}",
    ]
    assert states(play) == ["stopping", "stopping"]
    play.cards = (lost, GOOD1, card("GPU-2"), card("GPU-3"))
    play.see(Swept("a", 1)).see(Swept("b", 1))
    launches: list[Launch] = []
    while len(launches) < 2:
        play.clock(after=1.0)
        launches += [one for one in play.actions if isinstance(one, Launch)]
    assert launches == [Launch("a", 2, (2,)), Launch("b", 2, (3,))]


def test_and_learned_anew_when_it_is_shown_otherwise() -> None:
    play = Play(new_node(node_spec(engine_spec(gpus=("GPU-1",)))))
    play.node = replace(play.node, telemetry=replace(play.node.telemetry, cuda_counts_lost=True))
    lost, other = GpuReading("", "", 0, error=15), card("GPU-2")
    play.cards = (lost, GOOD1, other)
    play.see(Booted())
    assert play.engine().places == (1,)
    play.spawn().sweep(lost, GOOD1, holds(other, mine()), after=1.0).sweep(lost, GOOD1, holds(other, mine()), after=1.0)
    assert play.record("verdict").message.endswith(": CUDA does not count a GPU that is lost, and from now on so do we")
    assert not play.node.telemetry.cuda_counts_lost


def test_that_costs_budget_whatever_ended_it_before() -> None:
    play = launching(engine_spec(gpus=ON0), engine_spec("b", gpus=("GPU-1",), autostart=False)).spawn()
    play.change(last_exit=LastExit(ExitClass.RESOURCE, 1, None, play.now, 0, "memory held"))
    play.sweep(GOOD0, holds(GOOD1, mine(1)), after=1.0).sweep(GOOD0, holds(GOOD1, mine(1)), after=1.0)
    play.see(Swept("a", 1)).sweep(GOOD0, GOOD1)
    play.is_(State.BACKOFF)
    assert len(play.engine().restart_times) == 1


def test_one_look_at_another_gpu_is_not_enough() -> None:
    play = launching(engine_spec(gpus=ON0), engine_spec("b", gpus=("GPU-1",), autostart=False)).spawn()
    for _ in range(3):
        play.sweep(GOOD0, holds(GOOD1, mine(1)), after=1.0).sweep(holds(GOOD0, mine(1)), GOOD1, after=1.0)
    play.sweep(GOOD0, GOOD1, holds(card("GPU-2"), mine(1)), after=1.0).is_(State.STARTING)


@pytest.mark.parametrize("stranger", [mine(1, "a", 9), mine(1, "b", 1), foreign(1)])
def test_others_there_are_no_evidence(stranger: GpuProcess) -> None:
    play = launching(engine_spec(gpus=ON0), engine_spec("b", gpus=("GPU-1",), autostart=False)).spawn()
    play.sweep(GOOD0, holds(GOOD1, stranger), after=1.0).sweep(GOOD0, holds(GOOD1, stranger), after=1.0)
    play.is_(State.STARTING)


def test_placed_when_seen_on_every_one_of_its_gpus() -> None:
    play = serving(engine_spec(gpus=("GPU-0", "GPU-1")))
    play.sweep(holds(GOOD0, mine(1)), GOOD1, after=1.0)
    assert not play.engine().placed
    assert telemetry.deadline(play.node.telemetry) == play.now + telemetry.HURRY_S
    play.sweep(holds(GOOD0, mine(1)), holds(GOOD1, mine(1)), after=1.0)
    assert play.engine().placed
    assert telemetry.deadline(play.node.telemetry) is None
    play.sweep(GOOD0, GOOD1, after=1.0)
    assert play.engine().placed, "once is enough"


def test_after_a_minute_it_is_no_longer_hurried() -> None:
    play = serving(engine_spec(gpus=ON0))
    ready_at = play.now
    play.sweep(GOOD0, after=gpus.PLACED_WITHIN_S - 0.1)
    assert play.node.telemetry.next_at is not None
    play.see(Due(What.CLOCK), at=ready_at + gpus.PLACED_WITHIN_S + 1.0)
    play.sweep(GOOD0)
    assert play.node.telemetry.next_at is None


def test_an_adopted_engine_is_where_it_was() -> None:
    node = new_node(node_spec(engine_spec(gpus=("0",))))
    engine = replace(node.engines["a"], devices=("GPU-1",), warm_generation=1, generation=1)
    play = Play(replace(node, engines={"a": engine}))
    play.cards = (holds(GOOD0, foreign(70)), holds(GOOD1, mine(70)))
    play.see(Booted((Found("a", 1, process(1), ("pid 4711",), "p1"),)))
    play.is_(State.STARTING).answer().is_(State.READY)
    play.see(Due(What.POLL))
    assert (play.engine().placed, play.engine().gpu_bytes) == (True, 70 * GIB)
    assert not any(isinstance(action, Terminate) for action in play.actions)


# --- whose memory it is -----------------------------------------------------------------------------------------------


def used(*cards: GpuReading, engines: tuple[EngineSpec, ...] = ()) -> int | None:
    """What a sweep that sees these cards says of engine "a" on GPU-0."""
    return serving(*(engines or (engine_spec(gpus=ON0),))).sweep(*cards, after=1.0).engine().gpu_bytes


TOTALS = replace(GOOD0, used_bytes=5 * GIB, free_bytes=75 * GIB)


@pytest.mark.parametrize(
    ("reading", "gib"),
    [
        (holds(GOOD0, mine(3), mine(2, pid=5), foreign(60)), 5),
        (holds(GOOD0, mine(3), mine(9, "a", 7)), 3),
        # Nobody is listed, or without figures: all of the GPU, if it is nobody else's.
        (replace(TOTALS, processes=None), 5),
        (replace(TOTALS, processes=()), 5),
        (replace(TOTALS, processes=(GpuProcess(1, None, "", "a", 1),)), 5),
        (replace(TOTALS, processes=(GpuProcess(1, None, "", "a", 1), foreign(1))), None),
        (replace(TOTALS, processes=(foreign(1),)), None),
        (replace(TOTALS, processes=None, used_bytes=None), None),
        (GpuReading("GPU-0", "", 0, error=15), None),
    ],
)
def test_memory_of_its_own_processes(reading: GpuReading, gib: int | None) -> None:
    assert used(reading) == (None if gib is None else gib * GIB)


def test_totals_are_nobodys_where_two_engines_live() -> None:
    two = (engine_spec(gpus=ON0, args={"gpu-memory-utilization": 0.4}), engine_spec("b", gpus=ON0, args={}))
    two = (two[0], replace(two[1], args={"gpu-memory-utilization": 0.4}))
    assert used(replace(TOTALS, processes=()), engines=two) is None
    assert used(holds(GOOD0, mine(3), mine(4, "b")), engines=two) == 3 * GIB


def test_a_gpu_that_is_missing_makes_the_sum_unknown() -> None:
    both = (engine_spec(gpus=("GPU-0", "GPU-1")),)
    assert used(holds(GOOD0, mine(3)), holds(GOOD1, mine(4)), engines=both) == 7 * GIB
    assert used(holds(GOOD0, mine(3)), engines=both) is None


def test_the_memory_watch_is_fed_while_it_is_ready() -> None:
    play = serving(engine_spec(gpus=ON0))
    play.sweep(holds(GOOD0, mine(3)), after=1.0)
    watch = play.engine().watch
    assert watch is not None
    assert watch.gpu.low == (play.now, 3 * GIB)
    play.sweep(replace(GOOD0, processes=None, used_bytes=None), after=1.0)
    watch = play.engine().watch
    assert watch is not None
    assert watch.gpu.seen_at == play.now - 1.0, "what nobody saw is no look"


def test_while_it_starts_only_the_figure_is_kept() -> None:
    play = launching(engine_spec(gpus=ON0)).spawn()
    play.sweep(holds(GOOD0, mine(3)), after=1.0)
    assert (play.engine().gpu_bytes, play.engine().watch) == (3 * GIB, None)
    assert play.node.telemetry.next_at == play.now + telemetry.HURRY_S


# --- throttling -------------------------------------------------------------------------------------------------------


def hot(reasons: int, **values: Any) -> GpuReading:
    return replace(GOOD0, clock_reasons=reasons, **values)


@pytest.mark.parametrize(
    ("bits", "word"),
    [
        (0x8, "hardware slowdown"),
        (0x20, "software thermal slowdown"),
        (0x40, "hardware thermal slowdown"),
        (0x80, "power brake"),
        (0x48, "hardware slowdown, hardware thermal slowdown"),
        (0x4, None),
        (0x1, None),
        (0x0, None),
    ],
)
def test_throttling_for_half_a_minute(bits: int, word: str | None) -> None:
    play = serving().sweep(hot(bits), GOOD1, after=1.0)
    play.sweep(hot(bits), GOOD1, after=gpus.THROTTLED_FOR_S - 0.001).says()
    play.sweep(hot(bits), GOOD1, after=0.001)
    if word is None:
        play.says()
        return
    assert play.record("gpu_degraded").message == (
        f"GPU 0 (GPU-0): it runs slower ({word}, 55 C); look at cooling and power"
    )
    see(play, look(play.now + 0.1)).is_(State.READY)
    assert codes(play) == ["gpu_throttled"]
    see(play, look(play.now + 0.1), "b")
    assert codes(play, "b") == []
    play.sweep(GOOD0, GOOD1, after=1.0).says("gpu_recovered")
    assert states(play) == ["ready", "ready"]


def test_it_has_to_last() -> None:
    play = serving().sweep(hot(0x40), GOOD1).sweep(GOOD0, GOOD1, after=20.0).sweep(hot(0x40), GOOD1, after=20.0)
    play.sweep(hot(0x40, temperature_c=None), GOOD1, after=29.0)
    assert play.gpu().reasons == ()
    play.sweep(hot(0x40, temperature_c=None), GOOD1, after=1.0)
    assert "(hardware thermal slowdown)" in play.gpu().reasons[0].message


def test_unknown_reasons_are_none() -> None:
    play = serving().sweep(replace(GOOD0, clock_reasons=None), GOOD1)
    assert play.gpu().throttled_since is None


# --- nothing known ----------------------------------------------------------------------------------------------------


def test_a_driver_that_fails_says_nothing_about_gpus() -> None:
    play = serving().sweep(GOOD0, GOOD1)
    before = play.node.gpus
    for _ in range(10):
        play.sweep(problem=18, after=5.0)
    assert play.node.gpus == before
    assert states(play) == ["ready", "ready"]


def test_an_answer_that_comes_too_late_is_none() -> None:
    play = serving()
    play.see(GpusSwept(99, 1, GpuSweep(play.now, ())))
    assert set(play.node.gpus) == {"GPU-0", "GPU-1"}
    assert all(gpu.absent_since is None for gpu in play.node.gpus.values())


def test_no_launch_is_lost_when_the_sweep_opens_a_gate() -> None:
    play = Play(new_node(node_spec(engine_spec(gpus=ON0))))
    play.cards = None
    play.see(Booted()).sweep(holds(GOOD0, foreign(70))).is_(State.WAITING)
    play.sweep(GOOD0, after=1.0)
    assert Launch("a", 1, (0,)) in play.actions


# --- utilisation ------------------------------------------------------------------------------------------------------


def ready_at(percent: float | None, limit: float) -> Play:
    spec = engine_spec(gpus=ON0, slo=SloSpec(ttft_p95_ms=0, gpu_util_min_percent=limit))
    play = launching(spec).up()
    play.cards = None
    return play.sweep(replace(GOOD0, utilization_percent=percent), after=1.0)


@pytest.mark.parametrize(
    ("percent", "limit", "waiting", "told"),
    [
        (29.9, 30.0, 3, True),
        (30.0, 30.0, 3, False),
        (None, 30.0, 3, False),
        (0.0, 0.0, 3, False),
        (0.0, 30.0, 0, False),
        (0.0, 30.0, None, False),
    ],
)
def test_gpus_that_idle_while_requests_wait(
    *, percent: float | None, limit: float, waiting: int | None, told: bool
) -> None:
    play = ready_at(percent, limit)
    began = play.now + 1.0
    for second in (0.0, 30.0, service.IDLE_FOR_S - 0.1):
        see(play, look(began + second, running=1, waiting=waiting, steps=10 + second))
        assert "gpu_idle" not in codes(play)
    see(play, look(began + service.IDLE_FOR_S, running=1, waiting=waiting, steps=100))
    assert ("gpu_idle" in codes(play)) is told
    if told:
        see(play, look(play.now + 1.0, running=1, waiting=0, steps=101))
        assert codes(play) == []


def test_what_nobody_sees_is_no_idleness() -> None:
    play = ready_at(0.0, 30.0)
    play.see(GpuHelperEnded(1, "it broke"))
    for second in (1.0, 30.0, 62.0):
        see(play, look(play.now + second, running=1, waiting=3, steps=second))
    assert "gpu_idle" not in codes(play)


def test_the_busiest_counts_and_an_unknown_one_makes_it_unknown() -> None:
    def of(*percents: float | None) -> float | None:
        seen = [Gpu(f"GPU-{n}", reading=replace(GOOD0, utilization_percent=p)) for n, p in enumerate(percents)]
        return service.utilization_percent(seen)

    assert of(3.0, 80.0) == 80.0
    assert of(3.0, None) is None
    assert of() is None
    assert service.utilization_percent([Gpu("GPU-0")]) is None


def test_two_gpus_with_the_same_trouble_are_told_once() -> None:
    trouble = (Reason("gpu_throttled", "it runs slower"),)
    found = list(service.of_gpus([Gpu("GPU-0", reasons=trouble), Gpu("GPU-1", reasons=trouble)], None))
    assert [one.reason.message for one in found] == ["GPU GPU-0: it runs slower"]


@pytest.mark.parametrize("code", sorted(service.PASSING))
def test_a_moment_without_sight_degrades_nobody(code: str) -> None:
    assert list(service.of_gpus([], Reason(code, "x"))) == []
    assert [one.reason.code for one in service.of_gpus([], Reason("driver_mismatch", "x"))] == ["driver_mismatch"]
