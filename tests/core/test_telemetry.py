"""The GPU probe, watched like an engine: deadlines, hangs, what cannot be killed, a driver that is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisord.core import telemetry
from supervisord.core.gpu_samples import GpuSweep
from supervisord.core.messages import (
    Booted,
    Due,
    GpuHelperEnded,
    GpuOp,
    GpuRequested,
    GpusSwept,
    KillGpuHelper,
    Launch,
    Op,
    Reconfigured,
    Severity,
    StartGpuHelper,
    SweepGpus,
    What,
)
from supervisord.core.model import Reason, State, Waiting
from tests.core.play import PROBING, T0, Play, card, engine_spec, launching, new_node, node_spec, plan_ids, ready

GPU = ("GPU-0",)


def probing() -> Play:
    """A daemon whose first sweep is outstanding; nothing answers but what the test says."""
    play = Play(new_node(node_spec(engine_spec(gpus=GPU))))
    play.cards = None
    return play.see(Booted())


def looked() -> Play:
    """Engine "a" serves on a GPU that was seen; nothing answers any more."""
    play = ready(gpus=GPU)
    play.cards = None
    if play.node.telemetry.asked_at is None:
        play.see(Due(What.POLL))
    return play.sweep(card())


def ask(play: Play) -> Play:
    """The regular time for a sweep."""
    return play.see(Due(What.POLL))


def hang(play: Play, patience_s: float = telemetry.SWEEP_DEADLINE_S) -> Play:
    """The outstanding sweep, or the next one, is not answered."""
    if play.node.telemetry.asked_at is None:
        ask(play)
    play.see(Due(What.CLOCK), after=patience_s)
    return play.see(Due(What.CLOCK), after=telemetry.GRACE_S)


def ended(play: Play, helper: int | None = None, *, after: float = 0.1) -> Play:
    return play.see(GpuHelperEnded(helper or play.node.telemetry.helper, "signal 9"), after=after)


# --- beginning --------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_driver_and_without_need_is_left_alone() -> None:
    play = Play(new_node(node_spec(engine_spec()))).see(Booted())
    assert telemetry.off(play.node)
    assert telemetry.trouble(play.node) is None
    assert not telemetry.blind(play.node)
    play.clock(1.0).does().see(Due(What.POLL))
    assert not any(isinstance(action, PROBING) for action in play.actions)
    assert play.node.telemetry.helper == 0


@pytest.mark.parametrize("nvidia", [True, False])
def test_it_begins_with_a_driver_or_with_an_engine_that_needs_one(*, nvidia: bool) -> None:
    spec = node_spec(engine_spec() if nvidia else engine_spec(gpus=GPU))
    play = Play(new_node(spec))
    play.cards = None
    play.see(Booted(nvidia=nvidia))
    assert [a for a in play.actions if isinstance(a, StartGpuHelper | SweepGpus)] == [
        StartGpuHelper(1),
        SweepGpus(1, 1, slow=True),
    ]
    assert telemetry.looking(play.node)


def test_an_engine_waits_for_the_first_look_quietly() -> None:
    play = probing()
    assert play.phase(Waiting).reason.code == "driver_not_ready"
    assert play.record("waiting").severity is Severity.NOTICE
    play.sweep(card()).is_(State.STARTING)
    assert not telemetry.looking(play.node)


def test_a_reload_that_needs_gpus_begins_at_once() -> None:
    play = Play(new_node(node_spec(engine_spec()))).see(Booted())
    spec = node_spec(engine_spec(), engine_spec("b", gpus=GPU))
    play.cards = None
    play.see(Reconfigured(spec, plan_ids(spec), "uid 0"))
    play.does(StartGpuHelper, SweepGpus)
    play.sweep(card()).is_(State.STARTING, "b")
    play.see(Reconfigured(spec, plan_ids(spec), "uid 0")).does()


def test_a_reload_wakes_a_probe_that_nobody_had_needed() -> None:
    play = Play(new_node(node_spec(engine_spec())))
    play.cards = None
    play.see(Booted(nvidia=True)).sweep(problem=9)
    ended(play)
    assert play.node.telemetry.next_at == play.now + telemetry.UNUSED_RETRY_S
    spec = node_spec(engine_spec(), engine_spec("b", gpus=GPU))
    play.see(Reconfigured(spec, plan_ids(spec), "uid 0")).does(StartGpuHelper(2), SweepGpus(2, 2, slow=True))


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_slow_sweeps_every_thirty_seconds() -> None:
    play = probing().sweep(card())
    began = play.now
    slow = []
    for second in range(61):
        ask(play.see(Due(What.WATCHDOG), at=began + second))
        slow += [second for action in play.actions if isinstance(action, SweepGpus) and action.slow]
        play.sweep(card())
    assert slow == [30, 60]


def test_one_sweep_at_a_time() -> None:
    play = looked()
    ask(play)
    assert play.node.telemetry.asked_at == play.now
    ask(play)
    assert not [action for action in play.actions if isinstance(action, SweepGpus)]
    assert play.node.telemetry.next_at is None, "the answer sets it"


@pytest.mark.parametrize("change", [{"helper": 9}, {"number": 99}])
def test_the_answer_to_another_question_is_none(change: dict[str, int]) -> None:
    play = probing()
    answer = GpusSwept(1, 1, GpuSweep(play.now, (card(),), slow=True))
    play.see(replace(answer, **change))  # type: ignore[arg-type]  # a table
    assert play.node.gpus == {}
    play.see(answer)
    assert set(play.node.gpus) == {"GPU-0"}
    play.see(replace(answer, sweep=GpuSweep(play.now, (card("GPU-9"),))))
    assert set(play.node.gpus) == {"GPU-0"}, "it was answered already"


# --- hangs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_a_sweep_that_is_not_answered_in_time(*, first: bool) -> None:
    play = probing() if first else ask(looked())
    patience_s = telemetry.FIRST_DEADLINE_S if first else telemetry.SWEEP_DEADLINE_S
    asked_at = play.now
    assert play.wakeup is not None
    patience_s += telemetry.GRACE_S
    play.see(Due(What.CLOCK), at=asked_at + patience_s - telemetry.GRACE_S)
    assert play.wakeup == asked_at + patience_s
    play.see(Due(What.CLOCK), at=asked_at + patience_s - 0.001)
    assert KillGpuHelper(1) not in play.actions
    play.see(Due(What.CLOCK), at=asked_at + patience_s)
    assert KillGpuHelper(1) in play.actions
    assert f"{patience_s:.0f} s" in play.record("gpu_probe_hangs").message
    trouble = telemetry.trouble(play.node)
    assert trouble is not None
    assert trouble.code == "gpu_probe_hangs"
    assert telemetry.blind(play.node)


def test_a_killed_probe_that_ends_is_replaced_after_a_pause_that_grows() -> None:
    play = looked()
    delays = []
    for _ in range(9):
        patience_s = telemetry.SWEEP_DEADLINE_S if play.node.telemetry.answered else telemetry.FIRST_DEADLINE_S
        ended(hang(play, patience_s))
        next_at = play.node.telemetry.next_at
        assert next_at is not None
        delays.append(next_at - play.now)
        play.see(Due(What.CLOCK), at=next_at)
        assert any(isinstance(action, StartGpuHelper) for action in play.actions)
    assert delays == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_two_that_fail_in_a_row_are_told_once_and_an_answer_too() -> None:
    play = looked()
    ended(hang(play))
    assert not play.node.telemetry.unresponsive
    play.see(Due(What.CLOCK), after=5.0)
    ended(hang(play, telemetry.FIRST_DEADLINE_S)).says("gpu_telemetry_unresponsive")
    assert play.record("gpu_telemetry_unresponsive").severity is Severity.CRITICAL
    play.see(Due(What.CLOCK), after=10.0)
    hang(play, telemetry.FIRST_DEADLINE_S).says()
    ended(play).says()
    play.see(Due(What.CLOCK), after=20.0)
    play.sweep(card())
    assert "gpu_telemetry_answers" in [record.kind for record in play.told]
    assert (play.node.telemetry.hangs, play.node.telemetry.unresponsive) == (0, False)


def test_a_probe_that_ends_by_itself() -> None:
    play = ended(looked())
    assert "another one is started in 5 s" in play.record("gpu_probe_ended").message
    play.see(Due(What.CLOCK), after=4.999).see(Due(What.CLOCK), after=0.001)
    assert StartGpuHelper(2) in play.actions


def test_a_probe_that_cannot_work_is_told_once() -> None:
    """It is tried again every five minutes, which nobody wants to read of."""
    play = looked()
    for _ in range(50):
        ended(play)
        play.see(Due(What.CLOCK), at=play.node.telemetry.next_at)
    kinds = [record.kind for record in play.told if record.severity.value <= Severity.WARNING.value]
    assert kinds == ["gpu_probe_ended", "gpu_probe_ended", "gpu_telemetry_unresponsive"]


def test_an_answer_that_lies_in_the_inbox_is_heard_first() -> None:
    """The daemon itself was stopped for a while: its clock is due before it has taken in what came meanwhile."""
    play = ask(looked())
    asked = play.node.telemetry
    play.see(Due(What.CLOCK), after=60.0)
    assert not any(isinstance(action, KillGpuHelper) for action in play.actions)
    assert play.wakeup == play.now + telemetry.GRACE_S
    play.see(GpusSwept(1, asked.number, GpuSweep(play.now - 59.9, (card(),))))
    play.see(Due(What.CLOCK), after=telemetry.GRACE_S)
    assert telemetry.trouble(play.node) is None
    ask(play)
    assert play.node.telemetry.late_until is None, "each question has its own deadline"


def test_each_abandoned_in_turn_is_unresponsive_too() -> None:
    """Calls that take 45 s: the first one ends before the second is given up, so two are never stuck at once."""
    play = hang(looked())
    play.see(Due(What.CLOCK), after=telemetry.ABANDON_S)
    ended(play, 1)
    hang(play, telemetry.FIRST_DEADLINE_S)
    play.see(Due(What.CLOCK), after=telemetry.ABANDON_S)
    assert play.node.telemetry.unresponsive
    assert "2 probes in a row failed, and the last one cannot" in play.record("gpu_telemetry_unresponsive").message


def test_two_are_abandoned_and_no_third_is_started() -> None:
    play = hang(looked())
    play.see(Due(What.CLOCK), after=telemetry.ABANDON_S - 0.001)
    assert not any(isinstance(action, StartGpuHelper) for action in play.actions)
    play.see(Due(What.CLOCK), after=0.001)
    assert StartGpuHelper(2) in play.actions
    assert play.node.telemetry.stuck == 1
    hang(play, telemetry.FIRST_DEADLINE_S)
    play.see(Due(What.CLOCK), after=telemetry.ABANDON_S)
    assert "2 probe processes hang" in play.record("gpu_telemetry_unresponsive").message
    assert not any(isinstance(action, StartGpuHelper) for action in play.actions)
    assert play.node.telemetry.next_at is None
    for _ in range(5):
        ask(play.see(Due(What.CLOCK), after=1000.0))
        assert not any(isinstance(action, StartGpuHelper | SweepGpus) for action in play.actions)
    play.is_(State.READY)
    # One of the two comes back from the kernel: there is room.
    ended(play, 1)
    play.see(Due(What.CLOCK))
    assert StartGpuHelper(3) in play.actions
    ended(play, 2)
    assert (play.node.telemetry.stuck, play.node.telemetry.asked_at) == (0, play.now - 0.1)
    play.sweep(card())
    assert telemetry.trouble(play.node) is None


def test_the_first_of_two_that_ends_changes_nothing_for_the_one_that_works() -> None:
    play = hang(looked())
    play.see(Due(What.CLOCK), after=telemetry.ABANDON_S)
    before = play.node.telemetry
    ended(play, 1)
    assert play.node.telemetry == replace(before, stuck=0)


# --- a driver that is not there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (4, "driver_no_permission"),
        (9, "driver_not_loaded"),
        (12, "driver_no_library"),
        (18, "driver_mismatch"),
        (999, "driver_unknown"),
        (77, "driver_error"),
    ],
)
def test_what_nvml_says_at_its_beginning(problem: int, code: str) -> None:
    play = probing().sweep(problem=problem)
    record = play.record("gpu_driver_trouble")
    assert (record.reason, record.severity) == (code, Severity.ERROR)
    trouble = telemetry.trouble(play.node)
    assert trouble is not None
    assert trouble.code == code
    assert play.phase(Waiting).reason == Reason("driver_not_ready", trouble.message)
    play.sweep(problem=problem, after=1.0).says()
    play.sweep(card(), after=1.0).is_(State.STARTING)
    assert "gpu_driver_ready" in [told.kind for told in play.told]


def test_where_nobody_needs_one_it_is_asked_again_every_ten_minutes() -> None:
    play = Play(new_node(node_spec(engine_spec(autostart=False))))
    play.cards = None
    play.see(Booted(nvidia=True)).sweep(problem=9)
    assert KillGpuHelper(1) in play.actions
    assert play.record("gpu_driver_trouble").severity is Severity.INFO
    ended(play).says()
    for _ in range(100):
        ask(play)
        assert not play.actions
    play.see(Due(What.CLOCK), after=telemetry.UNUSED_RETRY_S - 0.001).does()
    play.see(Due(What.CLOCK), after=0.001).does(StartGpuHelper(2), SweepGpus(2, 2, slow=True))


# --- release ----------------------------------------------------------------------------------------------------------


def release(play: Play) -> Play:
    return play.see(GpuRequested(1, GpuOp.RELEASE, None, "uid 0"))


def test_released_for_ten_minutes() -> None:
    play = release(looked())
    assert KillGpuHelper(1) in play.actions
    ended(play).says()
    released_at = play.now - 0.1
    for _ in range(3):
        ask(play)
        assert not any(isinstance(action, StartGpuHelper | SweepGpus) for action in play.actions)
    trouble = telemetry.trouble(play.node)
    assert trouble is not None
    assert trouble.code == "gpu_released"
    play.see(Due(What.CLOCK), at=released_at + telemetry.RELEASE_S - 0.001)
    assert telemetry.trouble(play.node) == trouble
    play.see(Due(What.CLOCK), at=released_at + telemetry.RELEASE_S)
    assert StartGpuHelper(2) in play.actions
    assert telemetry.trouble(play.node) == Reason("gpu_first_look", "the GPUs have not been looked at yet")


def test_a_probe_that_does_not_end_does_not_open_nvml_again_while_it_is_released() -> None:
    play = release(ask(looked()))
    play.see(Due(What.CLOCK), after=telemetry.ABANDON_S)
    assert play.node.telemetry.stuck == 1
    assert not any(isinstance(action, StartGpuHelper) for action in play.actions)
    release(play)
    assert not any(isinstance(action, KillGpuHelper) for action in play.actions)


def test_a_release_that_is_taken_back_before_the_probe_has_ended() -> None:
    """It has not hung, so the next one does not wait."""
    play = release(looked())
    play.see(GpuRequested(2, GpuOp.CLEAR, "GPU-0", "uid 0"), after=0.01)
    play.see(Due(What.CLOCK))
    ended(play)
    play.see(Due(What.CLOCK))
    assert StartGpuHelper(2) in play.actions


def test_a_release_does_not_start_a_third_beside_two_that_are_stuck() -> None:
    play = hang(looked())
    play.see(Due(What.CLOCK), after=telemetry.ABANDON_S)
    hang(play, telemetry.FIRST_DEADLINE_S)
    play.see(Due(What.CLOCK), after=telemetry.ABANDON_S)
    release(play)
    play.see(Due(What.CLOCK), after=telemetry.RELEASE_S)
    assert not any(isinstance(action, StartGpuHelper) for action in play.actions)


def test_released_means_that_nothing_is_started_even_if_it_hung_before() -> None:
    play = launching(engine_spec(autostart=False, gpus=GPU))
    play.cards = None
    release(hang(play))
    play.ask(Op.START)
    assert not any(isinstance(action, Launch) for action in play.actions)
    assert play.phase(Waiting).reason.code == "driver_not_ready"


# --- how often --------------------------------------------------------------------------------------------------------


def test_nothing_is_hurried_while_all_is_well() -> None:
    play = looked()
    play.change(placed=True)
    play.sweep(card(), after=5.0)
    assert play.node.telemetry.next_at is None, "the next poll"


def test_who_begins_to_wait_for_a_gpu_is_not_left_until_the_next_poll() -> None:
    play = launching(engine_spec(autostart=False, gpus=GPU))
    play.cards = None
    play.sweep(problem=18)
    assert play.node.telemetry.next_at is None
    play.ask(Op.START).is_(State.WAITING)
    assert play.wakeup == play.now + telemetry.HURRY_S


def test_the_clock_is_needed_for_what_is_outstanding() -> None:
    play = probing()
    assert telemetry.deadline(play.node.telemetry) == T0 + telemetry.FIRST_DEADLINE_S
    hang(play, telemetry.FIRST_DEADLINE_S)
    assert telemetry.deadline(play.node.telemetry) == play.now + telemetry.ABANDON_S
    ended(play)
    assert telemetry.deadline(play.node.telemetry) == play.now + telemetry.RETRY_S
