"""From running to gone: exits, drain, SIGTERM, SIGKILL, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from supervisord.core.messages import (
    Abandon,
    Due,
    Exited,
    GateClosed,
    Launch,
    Op,
    Probe,
    Reconfigured,
    Sampled,
    Severity,
    Sweep,
    Swept,
    Terminate,
    What,
)
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    ExitClass,
    Failed,
    FailedKind,
    LastExit,
    Ready,
    Reason,
    Sample,
    State,
    Stopping,
    Waiting,
)
from tests.core.play import T0, Play, engine_spec, launching, node_spec, ready, starting, warming

STATES: dict[str, Callable[[], Play]] = {"starting": starting, "warming": warming, "ready": ready}


def exited(code: int | None = 0, signal: int | None = None, *tail: str, oom: bool = False) -> Exited:
    return Exited("a", 1, code, signal, tail, oom)


def crash(play: Play, *tail: str, code: int = 1) -> Play:
    """The present generation dies of itself, and nothing of it is left."""
    generation = play.engine().generation
    play.see(Exited("a", generation, code, None, tail)).does(Abandon, Sweep)
    return play.see(Swept("a", generation))


def exit_class(play: Play) -> ExitClass:
    last = play.engine().last_exit
    assert last is not None
    return last.kind


# --- exits nobody asked for ---


@pytest.mark.parametrize("state", STATES)
def test_an_exit_is_swept_before_anything_else(state: str) -> None:
    play = STATES[state]().see(exited(0), after=50.0)
    play.is_(State.STOPPING).does(Abandon("a", 1), Sweep("a", 1)).says("exited")
    phase = play.phase(Stopping)
    assert (phase.after, phase.exited, phase.give_up_at) == (After.CRASH, True, play.now + 30.0)
    assert play.engine().process is None
    play.see(Swept("a", 1), after=0.3).is_(State.BACKOFF).does().says("restart")


@pytest.mark.parametrize("state", STATES)
def test_exit_code_0_is_a_crash(state: str) -> None:
    play = STATES[state]().see(exited(0), after=50.0)
    assert play.engine().last_exit == LastExit(
        ExitClass.CRASH, 0, None, T0 + 50.0, 1, play.record("exited").message.split("(crash): ")[1]
    )
    assert play.record("exited").severity is Severity.ERROR
    assert play.record("exited").numbers == {"exit_class": "crash", "code": 0, "signal": None}
    assert "exit code 0 (crash)" in play.record("exited").message


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (exited(3), "exit code 3"),
        (exited(None, 11), "killed by SIGSEGV"),
        (exited(None, 9), "killed by SIGKILL"),
        (exited(None, 63), "killed by signal 63"),
        (exited(None, None), "ended, exit code unknown"),
    ],
)
def test_how_it_ended_is_told(seen: Exited, text: str) -> None:
    assert text in ready().see(seen).record("exited").message


def test_the_back_off_and_the_next_launch() -> None:
    play = crash(ready())
    assert play.phase(Backoff).until == pytest.approx(T0 + 1.19, abs=0.001)
    assert play.record("restart").numbers == {
        "delay_s": 1.19,
        "failures": 1,
        "max_restarts": 5,
        "restarts_in_window": 1,
    }
    play.wake().does(Launch("a", 2)).is_(State.STARTING)


def test_no_delay_means_in_the_same_turn() -> None:
    play = crash(ready(restart={"backoff_initial_s": 0.0}))
    play.does(Launch("a", 2)).is_(State.STARTING).says("restart")
    assert "at once" in play.record("restart").message


def test_failures_in_a_row_wait_longer_and_longer() -> None:
    play = crash(ready(restart={"max_restarts": 100}))
    delays = []
    for _ in range(10):
        delays.append(play.phase(Backoff).until - play.now)
        crash(play.wake().up())
    assert delays == sorted(delays)
    assert delays[-1] == 300.0


def test_long_health_starts_the_delays_over() -> None:
    play = crash(ready())
    for _ in range(3):
        crash(play.wake().up())
    assert play.engine().failures == 4
    play.wake().up()
    play.now += 600.0
    crash(play)
    assert play.engine().failures == 1
    assert play.phase(Backoff).until - play.now < 1.25


def test_a_long_start_is_no_health() -> None:
    play = crash(crash(ready()).wake().spawn())
    play.wake().spawn()
    play.now += 599.0
    crash(play)
    assert play.engine().failures == 3


# --- the budget ---


def test_a_plan_that_never_worked_fails_after_its_budget() -> None:
    play = starting()
    for n in range(5):
        crash(play).is_(State.BACKOFF)
        assert len(play.engine().restart_times) == n + 1
        play.wake().spawn()
    crash(play, "RuntimeError: no").is_(State.FAILED).does().says("failed")
    phase = play.phase(Failed)
    assert phase.kind is FailedKind.CRASH_LOOP
    assert "6 failures in 3600 s (max_restarts = 5)" in phase.message
    assert "last line: RuntimeError: no" in phase.message
    assert play.wakeup is None


def test_no_budget_at_all() -> None:
    crash(starting(restart={"max_restarts": 0})).is_(State.FAILED)


def test_a_plan_that_worked_is_retried_slowly_for_ever() -> None:
    play = ready(restart={"max_restarts": 2})
    for _ in range(2):
        crash(play)
        assert play.phase(Backoff).until - play.now < 300.0
        play.wake().spawn()
    for _ in range(20):
        crash(play)
        assert play.phase(Backoff).until - play.now == pytest.approx(300.0)
        play.wake().spawn()


def test_another_plan_that_worked_is_no_excuse() -> None:
    play = ready(restart={"max_restarts": 0}).change(plan_id="p2")
    crash(play).is_(State.FAILED)


def test_the_window_slides() -> None:
    play = starting(restart={"max_restarts": 1, "max_restarts_window_s": 100.0, "backoff_max_s": 10.0})
    for _ in range(10):
        crash(play).is_(State.BACKOFF)
        play.now = max(play.phase(Backoff).until, play.engine().restart_times[-1] + 100.0)
        play.see(Due(What.CLOCK)).spawn()
    assert len(play.engine().restart_times) == 1
    crash(play)
    crash(play.wake().spawn()).is_(State.FAILED)


# --- what the class decides ---


def test_config_is_not_tried_again() -> None:
    play = crash(starting(), "vllm: error: unrecognized arguments: --nope", code=2)
    play.is_(State.FAILED).says("failed")
    assert play.phase(Failed).kind is FailedKind.CONFIG
    assert "--nope" in play.phase(Failed).message
    assert play.record("failed").reason == "config"


def test_what_a_serving_engine_logs_is_no_configuration_error() -> None:
    """It may quote a request; and it did start with this configuration."""
    play = crash(ready(), "vllm: error: unrecognized arguments: --nope", code=1).is_(State.BACKOFF)
    assert exit_class(play) is ExitClass.CRASH


def test_nor_is_it_for_one_that_was_ready_under_an_earlier_daemon() -> None:
    play = starting().change(warm_generation=1)
    crash(play, "pydantic: 1 validation error for Request", code=1).is_(State.BACKOFF)


def test_external_waits_long_and_costs_no_budget() -> None:
    play = starting(restart={"max_restarts": 0})
    for n in range(1, 4):
        crash(play, "HfHubHTTPError: 504 Server Error: Gateway Time-out").is_(State.BACKOFF)
        assert play.phase(Backoff).until - play.now >= min(300.0, 60.0 * 2 ** (n - 1))
        play.wake().spawn()
    assert play.engine().restart_times == ()


def test_resource_goes_back_to_the_gates_and_costs_no_budget() -> None:
    play = starting(restart={"max_restarts": 0})
    for n in range(1, 9):
        crash(play, "OSError: [Errno 98] Address already in use").is_(State.WAITING).says("waiting")
        assert play.phase(Waiting).reason.code == "exited"
        assert play.phase(Waiting).recheck_at - play.now >= max(5.0, 2.0 ** (n - 1))
        play.wake().does(Launch).is_(State.WAITING).spawn()
    assert play.engine().restart_times == ()


def test_host_memory() -> None:
    play = ready().see(exited(None, 9, oom=True))
    assert "(oom_host)" in play.record("exited").message
    play.see(Swept("a", 1)).is_(State.BACKOFF)
    assert play.engine().restart_times == (play.now,)


# --- an operator's stop ---


def test_an_idle_stop() -> None:
    play = ready().ask(Op.STOP).is_(State.DRAINING).does(Probe("a", 1)).says("requested", "draining")
    play.sample(running=0, waiting=0).is_(State.STOPPING).does(Abandon("a", 1), Terminate("a", 1)).says("stopping")
    play.see(exited(0), after=0.5).does(Sweep("a", 1)).says()
    play.see(Swept("a", 1), after=0.1).is_(State.STOPPED).does().says("stopped")
    assert play.engine().last_exit == LastExit(ExitClass.STOPPED, 0, None, T0 + 0.5, 1, "asked for")
    assert play.record("stopped").numbers == {"took_s": 0.6}
    assert play.engine().restart_times == ()


def test_a_stop_that_has_to_kill() -> None:
    play = ready(stop_timeout_s=60.0).ask(Op.STOP, now=True)
    play.clock(59.9).does().is_(State.STOPPING).clock(0.1).does(Sweep("a", 1)).says("killing")
    assert "did not end within 60 s after SIGTERM (stop_timeout_s): SIGKILL" in play.record("killing").message
    play.see(Swept("a", 1), after=0.2).is_(State.STOPPED)
    play.see(exited(None, 9)).does_nothing()


def test_the_exit_between_sigkill_and_the_end_of_the_sweep() -> None:
    play = ready().ask(Op.STOP, now=True).clock(60.0).see(exited(None, 9)).does().says()
    assert play.phase(Stopping).exited
    play.see(Swept("a", 1)).is_(State.STOPPED)


@pytest.mark.parametrize("state", ["starting", "warming"])
def test_sigterm_is_repeated_while_it_initialises(state: str) -> None:
    play = STATES[state]().ask(Op.STOP).does(Abandon("a", 1), Terminate("a", 1))
    for n in range(1, 30):
        play.wake().does(Terminate("a", 1)).says()
        assert play.now == T0 + 2.0 * n
    play.wake().does(Sweep("a", 1))
    assert play.now == T0 + 60.0


@pytest.mark.parametrize("drain_first", [True, False])
def test_sigterm_is_not_repeated_once_it_serves(drain_first: bool) -> None:
    play = ready().ask(Op.STOP, now=not drain_first)
    if drain_first:
        play.sample(running=0, waiting=0)
    assert play.phase(Stopping).repeat_at is None
    assert play.wakeup == T0 + 60.0


def test_sigterm_is_not_repeated_to_one_that_served_under_an_earlier_daemon() -> None:
    play = starting().change(warm_generation=1).ask(Op.STOP)
    assert play.phase(Stopping).repeat_at is None


def test_orphans_are_swept_until_they_are_gone() -> None:
    play = ready().ask(Op.STOP, now=True).see(exited(0), after=0.5)
    for n in range(5):
        play.see(Swept("a", 1, ("pid 7 VLLM::EngineCor",)), after=0.1).does().is_(State.STOPPING)
        play.see(Due(What.CLOCK)).does()
        play.wake().does(Sweep("a", 1))
        assert play.now == pytest.approx(T0 + 0.5 + (n + 1) * 1.1)
    play.see(Swept("a", 1)).is_(State.STOPPED)


def test_what_does_not_die_is_unkillable() -> None:
    play = ready().see(exited(0)).see(Swept("a", 1, ("pid 7",)), after=0.3)
    for _ in range(22):
        play.wake().does(Sweep("a", 1)).see(Swept("a", 1, ("pid 7",)), after=0.3)
    play.clock(T0 + 30.0 - play.now).is_(State.FAILED).does().says("failed")
    assert play.phase(Failed).kind is FailedKind.UNKILLABLE
    assert play.record("failed").severity is Severity.CRITICAL
    assert "still there 30 s after SIGKILL" in play.phase(Failed).message
    assert play.wakeup is None


def test_the_time_after_sigkill_is_counted_from_sigkill() -> None:
    """The main process went at once, a child does not: 30 s, not the rest of stop_timeout_s as well."""
    play = ready(stop_timeout_s=600.0).ask(Op.STOP, now=True).see(exited(0), after=1.0)
    assert play.phase(Stopping).give_up_at == T0 + 31.0


def test_a_sweep_that_is_never_answered() -> None:
    ready().ask(Op.STOP, now=True).clock(60.0).does(Sweep).clock(29.9).does().is_(State.STOPPING).clock(0.1).is_(
        State.FAILED
    )


def test_unkillable_that_dies_later_is_told() -> None:
    play = ready().see(exited(0)).clock(30.0).is_(State.FAILED)
    play.see(exited(0)).does(Sweep("a", 1)).is_(State.FAILED)
    play.see(Swept("a", 1, ("pid 7",))).does_nothing()
    play.see(Swept("a", 1)).says("unkillable_gone").does().is_(State.FAILED)
    assert "reset it to start it again" in play.phase(Failed).message
    play.ask(Op.RESET).see(Swept("a", 1)).is_(State.STARTING)


def test_unkillable_that_died_is_forgotten_when_nobody_wants_it_any_more() -> None:
    play = ready().see(exited(0)).clock(30.0).see(Swept("a", 1)).is_(State.FAILED)
    assert not play.engine().live
    play.see(Reconfigured(node_spec(), {}, "uid 0")).does()
    assert play.node.engines == {}


def test_nothing_is_started_in_place_of_what_does_not_die() -> None:
    play = ready().see(exited(0)).clock(30.0).is_(State.FAILED)
    for seconds in (1.0, 1000.0, 100_000.0):
        play.clock(seconds).does()
    play.see(Due(What.POLL)).does().ask(Op.START).does()


def test_a_stop_while_it_crashes() -> None:
    play = ready().see(exited(1)).ask(Op.STOP).does().is_(State.STOPPING).see(Swept("a", 1)).is_(State.STOPPED)
    assert play.engine().restart_times == ()


def test_a_stop_in_back_off() -> None:
    crash(ready()).ask(Op.STOP).is_(State.STOPPED).does()


# --- draining ---


def draining(**keys: object) -> Play:
    return ready(**{"drain_timeout_s": 30.0, **keys}).ask(Op.STOP).is_(State.DRAINING)


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (0, 1), (None, 0), (0, None), (None, None)])
def test_a_drain_goes_on_while_something_may_be_in_flight(running: int | None, waiting: int | None) -> None:
    draining().sample(running=running, waiting=waiting).does_nothing().is_(State.DRAINING)


def test_a_sample_from_before_the_drain_says_nothing() -> None:
    play = draining()
    play.now += 0.5
    play.sample(running=0, waiting=0, at=T0 - 0.1).does_nothing().is_(State.DRAINING)
    play.sample(running=0, waiting=0).is_(State.STOPPING)


def test_an_idle_engine_stays_until_gateways_have_seen_its_drain() -> None:
    play = draining(drain_min_s=5.0)
    for _ in range(4):
        play.wake().does(Probe("a", 1)).sample(running=0, waiting=0).does_nothing().is_(State.DRAINING)
    assert play.now == T0 + 4
    play.wake().sample(running=0, waiting=0).is_(State.STOPPING)


def test_a_drain_looks_every_second() -> None:
    play = draining()
    for n in range(1, 30):
        play.wake().does(Probe("a", 1))
        assert play.now == T0 + n
    assert play.wakeup == T0 + 30.0


def test_a_drain_ends_at_its_timeout() -> None:
    play = draining().clock(29.9).does(Probe).is_(State.DRAINING)
    play.clock(0.1).is_(State.STOPPING).does(Abandon, Terminate).says("drain_timeout", "stopping")
    assert "after 30 s (drain_timeout_s)" in play.record("drain_timeout").message


def test_no_drain_time() -> None:
    ready(drain_timeout_s=0.0).ask(Op.STOP).is_(State.STOPPING).does(Abandon, Terminate)


def test_held_until_told_otherwise() -> None:
    play = ready().ask(Op.DRAIN).is_(State.DRAINING).does()
    assert play.phase(Draining).until is None
    for _ in range(100):
        play.sample(running=0, waiting=0).is_(State.DRAINING).wake().does(Probe)
    play.see(Due(What.POLL)).does(Probe("a", 1, host=True))


def test_a_drain_is_taken_back() -> None:
    play = ready().ask(Op.DRAIN).ask(Op.START).is_(State.READY).does().says("requested", "ready")
    assert play.engine().ready_since == T0


def test_a_second_reason_to_drain_adds_no_time() -> None:
    play = draining()
    play.now += 20.0
    play.ask(Op.RESTART).does().is_(State.DRAINING)
    assert play.phase(Draining) == Draining(
        After.START, T0 + 30.0, Reason("operator", "restart requested by uid 1000"), T0 + 1.0
    )
    play.clock(10.0).is_(State.STOPPING).see(Swept("a", 1)).is_(State.STARTING)


def test_an_exit_while_draining_to_stop() -> None:
    play = draining().see(exited(0)).does(Abandon, Sweep).says("exited").see(Swept("a", 1)).is_(State.STOPPED)
    assert exit_class(play) is ExitClass.CRASH


def test_an_exit_while_draining_to_restart() -> None:
    play = ready().ask(Op.RESTART).see(exited(0)).see(Swept("a", 1)).is_(State.STARTING).does(Launch("a", 2))
    assert play.engine().restart_times == ()


def test_an_exit_while_held_stops() -> None:
    """Somebody took it out of traffic on purpose; a new one would be put back into it."""
    play = ready().ask(Op.DRAIN).see(exited(0)).see(Swept("a", 1)).is_(State.STOPPED)
    assert not play.engine().wanted


# --- samples ---


def test_samples_keep_what_is_looked_at_less_often() -> None:
    play = ready().see(Sampled("a", 1, Sample(at=T0, host_bytes=5, host_at=T0, version="0.24.0")))
    play.see(Sampled("a", 1, Sample(at=T0 + 5.0, running=1)), after=5.0)
    sample = play.engine().sample
    assert sample is not None
    assert (sample.running, sample.host_bytes, sample.host_at, sample.version) == (1, 5, T0, "0.24.0")
    play.see(Due(What.POLL)).does(Probe("a", 1, host=False))
    play.see(Due(What.POLL), after=25.0).does(Probe("a", 1, host=True))


def test_an_older_sample_is_not_taken() -> None:
    play = ready().sample(running=2, waiting=0)
    before = play.node
    play.sample(running=0, waiting=0, at=T0 - 1.0).does_nothing()
    assert play.node == before


def test_samples_of_a_stopping_engine_are_not_taken() -> None:
    ready().ask(Op.STOP, now=True).sample(running=0, waiting=0).does_nothing()


def test_a_failed_look_changes_nothing_but_what_is_known() -> None:
    play = ready().see(Sampled("a", 1, Sample(at=T0, health_error="timeout"))).does_nothing()
    assert play.phase(Ready) == Ready()


# --- stale messages: a race between the sweep and the watcher of the exit, among others ---


def test_an_exit_that_is_heard_after_the_next_launch() -> None:
    """SIGKILL, all gone, launched again: only now the watcher of the old process is heard."""
    play = ready(restart={"backoff_initial_s": 0.0}).ask(Op.RESTART, now=True).clock(60.0)
    play.see(Swept("a", 1)).does(Launch("a", 2))
    before = play.node
    for seen in (exited(None, 9), Swept("a", 1), Sampled("a", 1, Sample(at=play.now))):
        play.see(seen).does_nothing()
    assert play.node == before
    play.up()
    play.see(exited(None, 9)).does_nothing().is_(State.READY)


def test_an_exit_in_back_off_or_at_a_gate_changes_nothing() -> None:
    play = crash(ready())
    play.see(exited(0)).does_nothing()
    play.wake().see(GateClosed("a", 2, "disk_full", "full"))
    play.see(exited(0)).does_nothing()


@pytest.mark.parametrize("kind", [FailedKind.CONFIG, FailedKind.CRASH_LOOP])
def test_an_exit_of_a_failed_engine_changes_nothing(kind: FailedKind) -> None:
    launching(engine_spec()).change(phase=Failed(kind, "x"), launching=None, generation=1).see(exited(0)).does_nothing()


def test_messages_of_unknown_engines() -> None:
    ready().see(Exited("ghost", 1, 0, None)).does_nothing()


def test_polls_look_at_serving_engines_only() -> None:
    play = ready().ask(Op.STOP, now=True)
    play.see(Due(What.POLL)).does()
    crash(ready()).see(Due(What.POLL)).does()


# --- stopped past the daemon ---


@pytest.mark.parametrize("state", STATES)
def test_who_stops_its_unit_is_an_operator(state: str) -> None:
    play = STATES[state]().see(Exited("a", 1, 0, None, stopped_by="systemctl stop a")).does(Abandon, Sweep)
    play.says("stopping").see(Swept("a", 1)).does().is_(State.STOPPED)
    assert not play.engine().wanted
    assert not play.engine().restart_times
    assert exit_class(play) is ExitClass.STOPPED


@pytest.mark.parametrize("state", STATES)
def test_who_restarts_its_unit_is_an_operator_too(state: str) -> None:
    seen = Exited("a", 1, None, None, stopped_by="systemctl restart a", again=True)
    play = STATES[state]().see(seen).does(Abandon, Sweep).says("stopping")
    play.see(Swept("a", 1)).is_(State.STARTING)
    assert play.engine().wanted
    assert not play.engine().restart_times
    assert exit_class(play) is ExitClass.STOPPED


def test_a_stop_of_its_unit_wins_over_a_restart_under_way() -> None:
    play = ready().ask(Op.RESTART).see(Exited("a", 1, 0, None, stopped_by="systemctl stop a"))
    play.see(Swept("a", 1)).is_(State.STOPPED)


def test_a_stop_of_its_unit_while_it_is_stopping_changes_nothing() -> None:
    play = ready().ask(Op.RESTART, now=True).see(Exited("a", 1, 0, None, stopped_by="systemctl stop a")).does(Sweep)
    play.see(Swept("a", 1)).is_(State.STARTING)
