"""From wanted to ready: spawn, gates, progress, deadlines, warm-up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisord.core.gpu_samples import GpuReading
from supervisord.core.messages import (
    Abandon,
    Due,
    GateClosed,
    Launch,
    MeasureProgress,
    Op,
    PortAnswered,
    PortForeign,
    Probe,
    Progressed,
    Spawned,
    SpawnFailed,
    Swept,
    Terminate,
    WarmedUp,
    WarmUp,
    WarmupNoted,
    WatchPort,
    What,
)
from supervisord.core.model import (
    Backoff,
    ExitClass,
    Failed,
    FailedKind,
    Progress,
    Ready,
    Reason,
    Starting,
    State,
    Stopping,
    Waiting,
    Warming,
    Warmup,
)
from tests.core.play import (
    BAD,
    GOOD,
    T0,
    Play,
    card,
    engine_spec,
    holds,
    launching,
    mine,
    process,
    ready,
    starting,
    stopped,
    warming,
)

MIB = 1024 * 1024


def progress(play: Play, read_mib: float, memory_mib: float, lines: int) -> Play:
    return play.see(Progressed("a", 1, Progress(int(read_mib * MIB), int(memory_mib * MIB), lines)))


# --- the launch ---


def test_a_launch_is_asked_for_with_the_next_generation() -> None:
    play = stopped().ask(Op.START).does(Launch("a", 1)).is_(State.STARTING)
    assert (play.engine().launching, play.engine().generation) == (1, 0)


def test_spawned() -> None:
    play = launching().see(Spawned("a", 1, process(1)), after=2.0)
    play.does(WatchPort("a", 1)).says("spawned").is_(State.STARTING)
    engine = play.engine()
    assert (engine.generation, engine.launching, engine.process) == (1, None, process(1))
    assert engine.running_plan_id == "p1"
    assert play.phase(Starting) == Starting(progress_at=T0 + 2.0, give_up_at=T0 + 2.0 + 3600.0)


def test_what_was_known_of_the_last_generation_is_forgotten_with_the_launch() -> None:
    play = ready().sample(running=1, waiting=0)
    assert play.engine().sample is not None
    play.ask(Op.RESTART, now=True).see(Swept("a", 1))
    engine = play.engine()
    assert (engine.launching, engine.sample, engine.warmup, engine.ready_since) == (2, None, None, None)


def test_restarts_are_spawns_after_the_first() -> None:
    play = ready()
    assert play.engine().restarts == 0
    play.ask(Op.RESTART, now=True).see(Swept("a", 1)).spawn()
    assert (play.engine().restarts, play.engine().generation) == (1, 2)


def test_gate_closed() -> None:
    play = launching().see(GateClosed("a", 1, "port_held", "pid 4 (nginx) holds port 8000"), after=0.1)
    play.does().says("waiting").is_(State.WAITING)
    assert play.phase(Waiting).reason == Reason("port_held", "pid 4 (nginx) holds port 8000")
    assert play.phase(Waiting).recheck_at == T0 + 0.1 + 5.0


def test_spawn_failed_for_good() -> None:
    play = launching().see(SpawnFailed("a", 1, ExitClass.CONFIG, "cannot run /nope: no such file"))
    play.does().says("failed").is_(State.FAILED)
    assert play.phase(Failed) == Failed(FailedKind.CONFIG, "cannot run /nope: no such file")
    assert play.wakeup is None


@pytest.mark.parametrize("from_waiting", [False, True])
def test_spawn_failed_and_may_work_later(from_waiting: bool) -> None:
    play = launching()
    if from_waiting:
        play.see(GateClosed("a", 1, "disk_full", "full")).wake()
    play.see(SpawnFailed("a", 1, ExitClass.CRASH, "cannot fork")).does().says("restart").is_(State.BACKOFF)
    assert play.engine().restart_times == (play.now,)
    assert play.engine().last_exit is not None
    play.wake().does(Launch("a", 1))


def test_spawn_failed_with_no_delay_is_tried_again_at_once() -> None:
    play = launching(engine_spec(restart={"backoff_initial_s": 0.0}))
    play.see(SpawnFailed("a", 1, ExitClass.CRASH, "cannot fork"), after=3.0).does(Launch("a", 1)).is_(State.STARTING)
    assert play.engine().since == T0
    assert play.phase(Starting).progress_at == T0 + 3.0
    play.see(SpawnFailed("a", 1, ExitClass.CRASH, "cannot fork")).is_(State.BACKOFF)


def test_spawn_failed_for_lack_of_something_waits() -> None:
    play = launching().see(SpawnFailed("a", 1, ExitClass.RESOURCE, "no space left on device")).is_(State.WAITING)
    assert play.engine().restart_times == ()


# --- progress and deadlines ---


def test_polls_measure_a_start_and_nothing_else() -> None:
    play = launching().see(Due(What.POLL)).does()
    play.spawn().see(Due(What.POLL)).does(MeasureProgress("a", 1))
    play.answer().see(Due(What.POLL)).does()
    play.warm().see(Due(What.POLL)).does(Probe("a", 1, host=True))


@pytest.mark.parametrize(("read", "memory", "lines"), [(12, 10, 10), (10, 12, 10), (10, 10, 11), (5, 5, 11)])
def test_any_growth_moves_the_deadline(read: int, memory: int, lines: int) -> None:
    play = progress(starting(), 10, 10, 10)
    play.now += 500.0
    progress(play, read, memory, lines)
    assert play.phase(Starting).progress_at == T0 + 500.0
    assert play.wakeup == T0 + 500.0 + 600.0
    assert play.phase(Starting).progress == Progress(max(read, 10) * MIB, max(memory, 10) * MIB, max(lines, 10))


@pytest.mark.parametrize(("read", "memory", "lines"), [(10, 10, 10), (9, 10, 10), (0, 0, 0), (10.5, 10.5, 10)])
def test_no_growth_or_the_breathing_of_a_process_does_not(read: float, memory: float, lines: int) -> None:
    play = progress(starting(), 10, 10, 10)
    play.now += 500.0
    progress(play, read, memory, lines)
    assert play.wakeup == T0 + 600.0


def test_slow_growth_adds_up() -> None:
    play = progress(starting(), 10, 10, 10)
    for n in range(1, 11):
        play.now += 50.0
        progress(play, 10 + n * 0.25, 10, 10)
    assert play.phase(Starting).progress_at == T0 + 400.0


def test_the_first_measurement_is_no_progress() -> None:
    play = starting()
    play.now += 100.0
    assert progress(play, 10**12, 10**12, 5000).wakeup == T0 + 600.0


def test_memory_that_shrinks_and_grows_back_is_no_progress() -> None:
    play = progress(starting(), 10, 10, 10)
    play.now += 100.0
    progress(progress(play, 10, 20, 10), 10, 5, 10)
    play.now += 100.0
    progress(play, 10, 19, 10)
    assert play.phase(Starting).progress_at == T0 + 100.0


def test_gpu_memory_that_grows_is_progress() -> None:
    """Weights may come from the page cache, so that not a byte is read, and no memory of the host is taken."""

    def holding(mib: float) -> GpuReading:
        return holds(card(), mine(mib / 1024))

    play = starting(gpus=("GPU-0",), start_timeout_s=100.0)
    began = play.now
    play.sweep(holding(500), after=10.0)
    assert play.phase(Starting).progress_at == began, "the first look is no progress"
    play.sweep(holding(500.9), after=10.0)
    assert play.phase(Starting).progress_at == began
    play.sweep(holding(501), after=10.0)
    assert play.phase(Starting).progress_at == play.now
    grown_at = play.now
    play.sweep(holding(100), after=10.0).sweep(holding(501), after=10.0)
    assert play.phase(Starting).progress_at == grown_at, "what shrinks and grows back"
    play.sweep(card(), after=10.0).sweep(replace(card(), processes=None, used_bytes=None), after=10.0)
    assert play.phase(Starting).progress_at == grown_at


def test_progress_is_of_no_interest_later() -> None:
    play = ready()
    before = play.node
    progress(play, 1, 1, 1).does_nothing()
    assert play.node == before


def test_a_start_that_stands_still() -> None:
    play = starting().clock(599.9).is_(State.STARTING).clock(0.1)
    play.is_(State.STOPPING).does(Abandon("a", 1), Terminate("a", 1)).says("stopping")
    assert "no progress for 600 s (start_timeout_s)" in play.record("stopping").message
    play.see(Swept("a", 1)).is_(State.BACKOFF)
    assert play.engine().restart_times == (play.now,)


def test_the_hard_cap_holds_whatever_the_progress() -> None:
    play = progress(starting(start_timeout_max_s=1000.0), 1, 1, 1)
    for n in range(2, 10):
        play.now += 100.0
        progress(play, n, 1, 1)
    play.clock(199.9).is_(State.STARTING).clock(0.1).is_(State.STOPPING)
    assert "not answering after 1000 s in all (start_timeout_max_s)" in play.record("stopping").message


def test_a_launch_that_is_never_answered() -> None:
    play = launching().clock(600.0).is_(State.STOPPING).does(Abandon)
    play.wake().is_(State.FAILED)
    assert play.now == T0 + 600.0 + 60.0 + 30.0
    assert play.phase(Failed).kind is FailedKind.UNKILLABLE
    assert "launch is never answered" in play.phase(Failed).message


# --- the port ---


def test_the_port_answers() -> None:
    play = starting(warmup={"timeout_s": 300.0}).see(PortAnswered("a", 1), after=42.0)
    play.does(WarmUp("a", 1)).says("answering").is_(State.WARMING)
    assert play.record("answering").numbers == {"took_s": 42.0}
    assert play.phase(Warming).give_up_at == T0 + 42.0 + 300.0 + 10.0


def test_the_port_answers_and_there_is_nothing_to_warm() -> None:
    play = starting(warmup={"enabled": False}).answer().does(Probe("a", 1, host=True)).is_(State.READY)
    assert play.phase(Ready).reasons == ()
    assert play.engine().ready_since == T0


def test_the_port_answers_twice() -> None:
    warming().answer().does_nothing()
    ready().answer().does_nothing()


def test_somebody_else_answers() -> None:
    play = starting().see(PortForeign("a", 1, "pid 9 (nginx)"))
    play.is_(State.STOPPING).does(Abandon("a", 1), Terminate("a", 1)).says("stopping")
    last = play.engine().last_exit
    assert last is not None
    assert (last.kind, last.advice) == (
        ExitClass.RESOURCE,
        "port 8000 is answered by pid 9 (nginx), not by this engine",
    )
    play.see(Swept("a", 1)).is_(State.WAITING).says("waiting")
    assert play.phase(Waiting).reason.code == "port_held"
    assert play.engine().restart_times == ()


def test_somebody_else_answers_too_late_to_matter() -> None:
    ready().see(PortForeign("a", 1, "pid 9 (nginx)")).does_nothing()


# --- the warm-up ---


def test_warmed_up() -> None:
    play = warming().see(WarmedUp("a", 1, GOOD), after=3.0).does(Probe("a", 1, host=True)).says("ready")
    play.is_(State.READY)
    engine = play.engine()
    assert (engine.ready_since, engine.good_plan_id, engine.warm_generation, engine.warmup) == (T0 + 3.0, "p1", 1, GOOD)
    assert "first answer 28 ms, settled 10 ms after 3 rounds" in play.record("ready").message
    assert play.record("ready").numbers == {"first_ms": 28.0, "settled_ms": 10.0, "rounds": 3}


def test_a_stage_is_noted_and_shown() -> None:
    play = warming().see(WarmupNoted("a", 1, "prefill 2 of 5")).does_nothing()
    assert play.phase(Warming).note == "prefill 2 of 5"
    ready().see(WarmupNoted("a", 1, "late")).does_nothing()


def test_a_failed_warmup_degrades_by_default() -> None:
    play = warming().warm(warmup=BAD).is_(State.READY)
    assert play.phase(Ready).reasons == (BAD.problem,)
    assert "degraded: no answer" in play.record("ready").message


def test_a_failed_warmup_restarts_if_told_to() -> None:
    play = warming(warmup={"on_failure": "restart"}).warm(warmup=BAD)
    play.is_(State.STOPPING).does(Abandon("a", 1), Terminate("a", 1))
    assert play.engine().warmup is None
    play.see(Swept("a", 1)).is_(State.BACKOFF)
    assert play.engine().good_plan_id is None


def test_a_warmup_that_is_refused_never_restarts() -> None:
    """401 and 404 mean "cannot warm up", not "does not work" (A23)."""
    refused = replace(BAD, problem=Reason("warmup_refused", "401 from /v1/completions"))
    play = warming(warmup={"on_failure": "restart"}).warm(warmup=refused).is_(State.READY)
    assert play.phase(Ready).reasons[0].code == "warmup_refused"


def test_a_warmup_without_numbers() -> None:
    play = warming().warm(warmup=Warmup(None, None, 0))
    assert play.record("ready").message == "a is ready"


def test_a_warmup_that_never_ends() -> None:
    play = warming(warmup={"timeout_s": 300.0}).clock(309.9).is_(State.WARMING).clock(0.1)
    play.is_(State.READY).does(Abandon("a", 1), Probe("a", 1, host=True))
    assert play.phase(Ready).reasons[0].code == "warmup_timeout"
    play.see(WarmedUp("a", 1, GOOD), after=1.0).does_nothing()
    assert play.phase(Ready).reasons[0].code == "warmup_timeout"


def test_a_warmup_that_never_ends_and_restarts() -> None:
    play = warming(warmup={"timeout_s": 300.0, "on_failure": "restart"}).wake()
    play.is_(State.STOPPING).does(Abandon("a", 1), Terminate("a", 1))
    assert play.phase(Stopping).cause.code == "warmup_timeout"


# --- late answers to a launch ---


def stop_while_launching() -> Play:
    play = launching(engine_spec(stop_timeout_s=60.0)).ask(Op.STOP).is_(State.STOPPING).does(Abandon("a", 0))
    assert play.engine().launching == 1
    return play


def test_spawned_after_the_stop_is_ended_at_once() -> None:
    play = stop_while_launching().see(Spawned("a", 1, process(1)), after=5.0).does(Terminate("a", 1))
    assert play.phase(Stopping).repeat_at == T0 + 7.0
    play.wake().does(Terminate("a", 1)).see(Swept("a", 1)).is_(State.STOPPED)


def test_spawned_when_the_stop_should_have_killed_it_already() -> None:
    play = stop_while_launching().see(Spawned("a", 1, process(1)), after=80.0)
    assert [type(action).__name__ for action in play.actions] == ["Record", "Sweep"]
    assert play.phase(Stopping).give_up_at == T0 + 80.0 + 30.0
    play.see(Swept("a", 1)).is_(State.STOPPED)


def test_a_gate_closed_after_the_stop() -> None:
    stop_while_launching().see(GateClosed("a", 1, "port_held", "x"), after=5.0).is_(State.STOPPED).says("stopped")


def test_a_spawn_failed_after_the_stop() -> None:
    stop_while_launching().see(SpawnFailed("a", 1, ExitClass.CONFIG, "x"), after=5.0).is_(State.STOPPED)


def test_spawned_when_it_was_given_up() -> None:
    play = stop_while_launching().wake().is_(State.FAILED)
    play.see(Spawned("a", 1, process(1)), after=9.0)
    assert [type(action).__name__ for action in play.actions] == ["Record", "Sweep"]
    play.see(Swept("a", 1)).is_(State.FAILED).says("unkillable_gone")


@pytest.mark.parametrize(
    "seen", [GateClosed("a", 1, "port_held", "x"), SpawnFailed("a", 1, ExitClass.CRASH, "x")], ids=["gate", "failed"]
)
def test_nothing_spawned_when_it_was_given_up(seen: GateClosed | SpawnFailed) -> None:
    play = stop_while_launching().wake().see(seen, after=9.0).does().is_(State.FAILED)
    assert play.engine().launching is None
    play.ask(Op.RESET).see(Swept("a", 0)).is_(State.STOPPED)


def test_a_reset_that_meets_a_late_spawn_still_kills_it() -> None:
    """The sweep of the reset does not count for what is spawned after it."""
    play = stop_while_launching().wake().ask(Op.RESET).is_(State.STOPPING)
    play.see(Swept("a", 0)).is_(State.STOPPING)
    play.see(Spawned("a", 1, process(1)), after=2.0)
    assert [type(action).__name__ for action in play.actions] == ["Record", "Sweep"]
    play.see(Swept("a", 1, ("pid 101",))).wake()
    assert [type(action).__name__ for action in play.actions] == ["Sweep"]
    play.see(Swept("a", 1)).is_(State.STOPPED)


def test_a_launch_is_answered_only_once() -> None:
    play = launching().spawn()
    before = play.node
    for seen in (
        Spawned("a", 1, process(1)),
        GateClosed("a", 1, "port_held", "x"),
        SpawnFailed("a", 1, ExitClass.CRASH, "x"),
    ):
        play.see(seen).does_nothing()
    assert play.node == before


def test_back_off_after_a_start_that_failed() -> None:
    play = starting().wake().see(Swept("a", 1)).is_(State.BACKOFF)
    assert play.phase(Backoff).until == pytest.approx(play.now + 1.19, abs=0.001)
    play.wake().is_(State.STARTING).does(Launch("a", 2))
