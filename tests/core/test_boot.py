"""The start of the daemon: what an earlier one left is adopted or ended, never doubled; and READY=1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisord.core.memory import MemoryWatch
from supervisord.core.messages import (
    Abandon,
    Adopt,
    AnnounceReady,
    Booted,
    Due,
    Exited,
    GateClosed,
    GpuHelperEnded,
    Launch,
    Op,
    Probe,
    Severity,
    StartGpuHelper,
    Sweep,
    SweepGpus,
    Swept,
    Terminate,
    WatchPort,
    What,
)
from supervisord.core.model import (
    After,
    Draining,
    ExitClass,
    Failed,
    FailedKind,
    Found,
    Gpu,
    LastExit,
    Left,
    Ready,
    Reason,
    Starting,
    State,
    Stopping,
)
from supervisord.core.spec import EngineSpec
from supervisord.core.watch import Watch
from tests.core.play import BAD, GIB, GOOD, T0, Play, card, engine_spec, new_node, node_spec, process


def found(
    generation: int = 3, *, main: bool = True, plan: str | None = "p1", name: str = "a", left: tuple[str, ...] = ()
) -> Found:
    lives = process(generation) if main else None
    return Found(name, generation, lives, left or ("pid 103 (vllm)",), plan)


def boot(*left: Found, engines: tuple[EngineSpec, ...] = (engine_spec(),), **fields: Any) -> Play:
    """A daemon starts, with its engine "a" restored with these fields."""
    play = Play(new_node(node_spec(*engines)))
    if fields:
        play.change(**fields)
    return play.see(Booted(left))


# --- nothing left ---


def test_a_back_off_of_the_daemon_before_goes_on() -> None:
    left = Left(State.BACKOFF, T0 - 1.0, cause=Reason("exited", "boom"), until=T0 + 9.0)
    play = boot(left=left).is_(State.BACKOFF)
    play.clock(8.9).is_(State.BACKOFF)
    play.clock(0.1).does(Launch("a", 1)).is_(State.STARTING)
    boot(left=replace(left, until=T0)).is_(State.STARTING)
    boot(left=left).ask(Op.RESET).is_(State.STARTING)
    boot(left=left, wanted=False).is_(State.STOPPED)


def test_autostart() -> None:
    boot().does(Launch("a", 1), AnnounceReady).is_(State.STARTING)
    boot(engines=(engine_spec(autostart=False),)).does(AnnounceReady).is_(State.STOPPED)


def test_generations_go_on() -> None:
    boot(generation=7).does(Launch("a", 8), AnnounceReady)


def test_an_operators_stop_is_remembered() -> None:
    boot(wanted=False).does(AnnounceReady).is_(State.STOPPED)


def test_a_crash_loop_is_remembered() -> None:
    boot(phase=Failed(FailedKind.CRASH_LOOP, "x")).does(AnnounceReady).is_(State.FAILED)


# --- adopted ---


def test_wanted_as_it_runs_is_adopted() -> None:
    play = boot(found()).does(Adopt("a", 3), WatchPort("a", 3), AnnounceReady).is_(State.STARTING).says("adopted")
    engine = play.engine()
    assert (engine.generation, engine.process, engine.running_plan_id, engine.launching) == (3, process(3), "p1", None)
    assert "generation 3 (pid 103 (vllm)); adopted" in play.record("adopted").message
    assert play.wakeup == T0 + 600.0


def test_an_adopted_engine_that_was_ready_is_not_warmed_again() -> None:
    boot(found(), warm_generation=3).answer().is_(State.READY)


def test_an_adopted_engine_that_was_not_yet_ready_is() -> None:
    boot(found(), warm_generation=2).answer().is_(State.WARMING)


def test_an_adopted_engine_that_died_meanwhile_is_a_crash() -> None:
    play = boot(found()).see(Exited("a", 3, None, None)).does(Abandon, Sweep).see(Swept("a", 3)).is_(State.BACKOFF)
    play.wake().does(Launch("a", 4))


def test_it_is_told_with_the_state_that_it_was_left_in() -> None:
    play = boot(found(), **left(State.READY)).see(Exited("a", 3, None, None))
    assert play.record("exited").message.startswith("a ended while ready: ended, exit code unknown (crash)")
    known = boot(found(), **left(State.READY)).see(Exited("a", 3, None, 9))
    assert known.record("exited").message.startswith("a ended by itself while ready: killed by SIGKILL")
    fresh = boot(found()).see(Exited("a", 3, None, None))
    assert fresh.record("exited").message.startswith("a ended by itself while starting: ")


@pytest.mark.parametrize(("number", "counts"), [(None, False), (9, True)])
def test_an_end_that_came_while_no_daemon_ran_is_no_failure_of_its_own_unless_it_is_known(
    number: int | None, counts: bool
) -> None:
    """A container or a control group ends both; six of these are no crash loop."""
    before = {**left(State.STARTING), "restart_times": (T0 - 5.0, T0 - 4.0, T0 - 3.0, T0 - 2.0, T0 - 1.0)}
    play = boot(found(), **before).see(Exited("a", 3, None, number)).see(Swept("a", 3))
    engine = play.is_(State.FAILED if counts else State.BACKOFF).engine()
    assert (len(engine.restart_times), engine.failures) == (5 + counts, 1)
    if not counts:
        assert play.record("restart").numbers["restarts_in_window"] == 5
        spent = {**before, "restart_times": tuple(T0 - second for second in range(6, 0, -1))}
        longest = boot(found(), **spent).see(Exited("a", 3, None, None)).see(Swept("a", 3)).is_(State.BACKOFF)
        assert longest.record("restart").numbers["delay_s"] == longest.engine().spec.restart.backoff_max_s
        play.wake().does(Launch("a", 4)).spawn().see(Exited("a", 4, 1, None)).see(Swept("a", 4)).is_(State.FAILED)


def test_the_counts_go_on_from_the_higher_number() -> None:
    assert boot(found(3), generation=2).engine().generation == 3
    assert boot(found(3), generation=5).engine().generation == 5


def test_an_adopted_engine_holds_its_gpu_until_it_answers() -> None:
    engines = (engine_spec("a", gpus=("GPU-0",)), engine_spec("b", gpus=("GPU-0",)))
    play = boot(found(), engines=engines, warm_generation=3).is_(State.WAITING, "b").answer().is_(State.STARTING, "b")
    assert play.engine().state is State.READY


def test_what_lives_is_adopted_even_if_it_was_given_up_on() -> None:
    boot(found(), phase=Failed(FailedKind.CRASH_LOOP, "x")).is_(State.STARTING)


# --- what the earlier daemon knew goes on ---


def left(state: State, since: float = T0 - 300.0, after: After | None = None, text: str = "as asked") -> dict[str, Any]:
    """What was saved of a generation 3 that had been ready, and is left in this state."""
    cause = Reason("operator", text) if after is not None else None
    return {
        "generation": 3,
        "warm_generation": 3,
        "ready_since": T0 - 900.0,
        "warmup": GOOD,
        "watch": Watch(T0, T0, host=MemoryWatch(settling=0, high_bytes=5 * GIB)),
        "left": Left(state, since, after, cause),
    }


def test_an_engine_that_was_ready_goes_on_being_so() -> None:
    play = boot(found(), **left(State.READY)).is_(State.STARTING)
    assert play.engine().left is not None
    engine = play.answer().is_(State.READY).engine()
    assert play.record("ready").message == "a is ready", "its warm-up was told when it was done"
    assert (engine.since, engine.ready_since, engine.warmup) == (T0 - 300.0, T0 - 900.0, GOOD)
    assert engine.watch is not None
    assert (engine.watch.since, engine.watch.host.high_bytes) == (play.now, 5 * GIB)
    assert engine.left is None


def test_so_does_what_its_warm_up_found() -> None:
    play = boot(found(), **{**left(State.READY), "warmup": BAD}).answer().is_(State.READY)
    assert play.phase(Ready).reasons == (BAD.problem,)


def test_an_old_state_knows_less() -> None:
    engine = boot(found(), warm_generation=3, generation=3).answer().is_(State.READY).engine()
    assert (engine.since, engine.ready_since, engine.warmup) == (T0, T0, None)
    before = {**left(State.READY), "ready_since": None, "watch": None}
    engine = boot(found(), **before).answer().is_(State.READY).engine()
    assert (engine.since, engine.ready_since) == (T0 - 300.0, T0)


def test_what_was_saved_of_another_generation_does_not() -> None:
    engine = boot(found(4), **left(State.READY)).answer().is_(State.WARMING).engine()
    assert (engine.since, engine.ready_since, engine.warmup, engine.watch) == (T0, None, None, None)


def test_one_that_died_meanwhile_is_started_anew() -> None:
    play = (
        boot(found(), **left(State.READY)).see(Exited("a", 3, None, 9)).see(Swept("a", 3)).wake().does(Launch("a", 4))
    )
    engine = play.spawn().answer().warm().is_(State.READY).engine()
    assert (engine.left, engine.ready_since, engine.since) == (None, play.now, play.now)
    assert engine.watch == Watch(play.now, play.now)


def test_a_start_has_no_more_time_than_it_had() -> None:
    before = {**left(State.STARTING, T0 - 3000.0), "warm_generation": 2}
    play = boot(found(), **before).is_(State.STARTING)
    assert play.phase(Starting) == Starting(T0, T0 + 600.0)
    assert play.engine().since == T0 - 3000.0
    late = boot(found(), **{**before, "left": Left(State.STARTING, T0 - 9000.0)})
    assert late.phase(Starting).give_up_at == T0 + 10.0
    late.answer().is_(State.WARMING)


@pytest.mark.parametrize("plan", ["p1", "p0"])
def test_an_operators_drain_stays(plan: str) -> None:
    """As over a reload: a changed plan waits for the operator too."""
    play = boot(found(plan=plan), **left(State.DRAINING, after=After.HOLD)).is_(State.DRAINING)
    play.does(Adopt("a", 3), AnnounceReady)
    assert "adopted, and still drained: as asked" in play.record("adopted").message
    assert (play.phase(Draining).after, play.phase(Draining).until) == (After.HOLD, None)
    assert (play.engine().since, play.engine().left) == (T0 - 300.0, None)
    play.ask(Op.START).is_(State.READY if plan == "p1" else State.DRAINING)
    assert play.engine().ready_since == T0 - 900.0


def test_a_drained_engine_that_died_meanwhile_stays_down() -> None:
    play = boot(found(), **left(State.DRAINING, after=After.HOLD)).see(Exited("a", 3, None, None))
    play.see(Swept("a", 3)).is_(State.STOPPED)


def test_so_does_one_of_which_only_orphans_or_nothing_is_left() -> None:
    before = left(State.DRAINING, after=After.HOLD)
    boot(found(main=False), **before).is_(State.STOPPING).see(Swept("a", 3)).is_(State.STOPPED)
    play = boot(**before).does(AnnounceReady).is_(State.STOPPED)
    assert "has ended meanwhile: it is not started by itself" in play.record("stopped").message
    assert not play.engine().wanted


def test_a_drained_engine_that_is_not_wanted_any_more_is_ended() -> None:
    boot(found(), wanted=False, **left(State.DRAINING, after=After.HOLD)).is_(State.DRAINING)


@pytest.mark.parametrize(("after", "then"), [(After.START, State.STARTING), (After.CRASH, State.BACKOFF)])
def test_an_end_that_was_under_way_goes_on(after: After, then: State) -> None:
    crash = LastExit(ExitClass.CRASH, None, None, T0 - 5.0, 3, "stalled")
    play = boot(found(), last_exit=crash, **left(State.STOPPING, after=after)).is_(State.STOPPING)
    play.does(Adopt, Abandon, Terminate, AnnounceReady)
    assert "ended: as asked" in play.record("leftover").message
    play.see(Exited("a", 3, 0, None)).see(Swept("a", 3)).is_(then)


def test_a_restart_for_an_operator_drains_first_if_it_was_draining() -> None:
    play = (
        boot(found(), **left(State.DRAINING, after=After.START)).is_(State.DRAINING).does(Adopt, Probe, AnnounceReady)
    )
    assert play.phase(Draining).after is After.START


def test_a_daemon_that_ended_its_engines_and_was_killed_has_them_back() -> None:
    play = boot(found(), **left(State.STOPPING, after=After.STOP)).is_(State.STOPPING)
    play.see(Exited("a", 3, 0, None)).see(Swept("a", 3)).does(Launch("a", 4))


def test_an_engine_that_serves_is_replaced_gracefully() -> None:
    play = boot(found(plan="p0"), **left(State.READY)).does(Adopt, Probe, AnnounceReady).is_(State.DRAINING)
    assert play.phase(Draining).after is After.START
    assert play.phase(Draining).cause.message == "left by an earlier daemon, it is not wanted as it runs"
    at_once = engine_spec(drain_timeout_s=0)
    boot(found(plan="p0"), engines=(at_once,), **left(State.READY)).is_(State.STOPPING)


def test_a_crash_loop_whose_process_serves_is_replaced_gracefully_too() -> None:
    failed = Failed(FailedKind.CRASH_LOOP, "x")
    boot(found(plan="p0"), phase=failed, **left(State.READY)).is_(State.DRAINING)


# --- ended ---


@pytest.mark.parametrize("plan", ["p0", None])
def test_another_plan_is_ended_and_the_right_one_started(plan: str | None) -> None:
    play = boot(found(plan=plan)).does(Adopt("a", 3), Abandon("a", 3), Terminate("a", 3), AnnounceReady)
    play.is_(State.STOPPING).says("leftover", "stopping")
    assert play.phase(Stopping).after is After.START
    assert play.record("leftover").severity is Severity.WARNING
    assert "ended: it is not wanted as it runs" in play.record("leftover").message
    play.see(Exited("a", 3, 0, None)).see(Swept("a", 3)).does(Launch("a", 4))


@pytest.mark.parametrize(("devices", "gpus"), [(("GPU-0",), ("1",)), ((), ("GPU-0",))])
def test_what_runs_on_a_quarantined_gpu_is_ended(devices: tuple[str, ...], gpus: tuple[str, ...]) -> None:
    """A killed daemon had not ended it yet, or an older one did not know."""
    bad = Gpu("GPU-0", pci_id="0000:10:00.0", index=0, quarantine=Reason("gpu_fault", "Xid 79: gone"))
    node = new_node(node_spec(engine_spec(gpus=gpus)))
    engines = {"a": replace(node.engines["a"], devices=devices)}
    play = Play(replace(node, gpus={"GPU-0": bad}, engines=engines))
    play.cards = None
    play.see(Booted((found(),))).does(StartGpuHelper, SweepGpus, Adopt, Abandon, Terminate, AnnounceReady)
    stopping = play.phase(Stopping)
    assert (stopping.after, stopping.cause.code) == (After.START, "gpu_fault")
    assert "ended: GPU 0 (GPU-0) is quarantined: Xid 79" in play.record("leftover").message


def test_what_nobody_wants_is_ended() -> None:
    play = boot(found(), wanted=False).does(Adopt, Abandon, Terminate, AnnounceReady).is_(State.STOPPING)
    play.see(Exited("a", 3, 0, None)).see(Swept("a", 3)).is_(State.STOPPED).does()


@pytest.mark.parametrize("warm", [3, 2])
def test_sigterm_is_repeated_if_it_may_still_initialise(warm: int) -> None:
    """The daemon that started it is gone; all we know is whether that one ever saw it ready."""
    play = boot(found(plan="p0"), warm_generation=warm)
    assert play.phase(Stopping).repeat_at == (None if warm == 3 else T0 + 2.0)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("plan", ["p1", "p0"])
def test_a_main_process_that_is_gone_leaves_only_orphans_to_sweep(wanted: bool, plan: str) -> None:
    play = boot(found(main=False, plan=plan), wanted=wanted)
    play.does(Adopt("a", 3), Abandon("a", 3), Sweep("a", 3), AnnounceReady).is_(State.STOPPING)
    play.says("leftover", "killing")
    assert "ended: its main process is gone" in play.record("leftover").message
    play.see(Swept("a", 3, ("pid 104 (VLLM::EngineCor)",))).wake().does(Sweep("a", 3)).see(Swept("a", 3))
    if wanted:
        play.does(Launch("a", 4))
    else:
        play.does().is_(State.STOPPED)


def test_nothing_is_started_beside_an_orphan_that_does_not_die() -> None:
    play = boot(found(main=False)).clock(30.0).is_(State.FAILED).does()
    assert play.phase(Failed).kind is FailedKind.UNKILLABLE


@pytest.mark.parametrize("main", [True, False])
def test_an_engine_that_is_not_configured_any_more_is_ended_and_forgotten(main: bool) -> None:
    play = boot(found(name="ghost", main=main), found())
    assert play.engine("ghost").removed
    play.is_(State.STOPPING, "ghost").is_(State.STARTING, "a")
    play.see(Exited("ghost", 3, 0, None)).see(Swept("ghost", 3)).says("removed")
    assert set(play.node.engines) == {"a"}


def test_a_record_of_which_nothing_lives() -> None:
    play = boot(Found("a", 3, None, (), "p1")).does(Adopt, Abandon, Sweep, AnnounceReady)
    play.see(Swept("a", 3)).does(Launch("a", 4))


# --- READY=1 ---


def announces(play: Play) -> bool:
    return any(isinstance(action, AnnounceReady) for action in play.actions)


def test_at_once_by_default() -> None:
    play = boot()
    assert announces(play)
    assert not announces(play.clock(1.0).spawn())


def waiting_to_be_ready(*engines: EngineSpec) -> Play:
    return Play(new_node(node_spec(*(engines or (engine_spec(),)), ready_timeout_s=100.0))).see(Booted())


def test_when_all_have_settled() -> None:
    play = waiting_to_be_ready(engine_spec("a"), engine_spec("b"))
    assert not announces(play.up("a"))
    assert announces(play.spawn("b").answer("b").warm("b"))


def test_or_when_the_time_has_passed() -> None:
    play = waiting_to_be_ready()
    assert play.wakeup == T0 + 100.0
    assert not announces(play.clock(99.9))
    assert announces(play.clock(0.1))
    assert play.wakeup == T0 + 600.0


def test_a_gate_a_failure_or_an_operators_stop_does_not_hold_it_back() -> None:
    assert announces(waiting_to_be_ready().see(GateClosed("a", 1, "port_held", "x")))
    assert announces(Play(new_node(node_spec(engine_spec(), ready_timeout_s=9.0))).change(wanted=False).see(Booted()))


def test_the_first_look_at_the_gpus_does() -> None:
    play = Play(new_node(node_spec(engine_spec(gpus=("GPU-0",)), ready_timeout_s=100.0)))
    play.cards = None
    assert not announces(play.see(Booted()).is_(State.WAITING))
    assert not announces(play.see(GpuHelperEnded(1, "it broke"))), "another one tries"
    play.see(Due(What.CLOCK), after=5.0)
    assert announces(play.sweep(card("GPU-1"))), "it waits for a GPU that is not there: nobody knows how long"


def test_who_was_drained_by_an_operator_does_not() -> None:
    node = new_node(node_spec(engine_spec(), ready_timeout_s=100.0))
    play = Play(node).change(**left(State.DRAINING, after=After.HOLD))
    assert announces(play.see(Booted((found(),))))


def test_a_back_off_does() -> None:
    play = waiting_to_be_ready().spawn().see(Exited("a", 1, 0, None))
    assert not announces(play.see(Swept("a", 1)).is_(State.BACKOFF))


def test_engines_that_do_not_start_by_themselves_are_not_waited_for() -> None:
    play = Play(new_node(node_spec(engine_spec(autostart=False), ready_timeout_s=100.0))).change(wanted=True)
    assert announces(play.see(Booted()).is_(State.STARTING))


def test_nor_is_one_that_is_not_configured_any_more() -> None:
    play = Play(new_node(node_spec(ready_timeout_s=100.0))).see(Booted((found(name="ghost"),)))
    assert announces(play)


def test_no_daemon_is_ready_before_it_has_booted() -> None:
    play = Play(new_node(node_spec(engine_spec()))).see(Due(What.WATCHDOG)).does_nothing()
    assert play.wakeup is None
