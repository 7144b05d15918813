"""Every request in every state: how it is answered, and what state it leads to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from supervisord.core.messages import (
    Abandon,
    Answer,
    EndRequested,
    Exited,
    GateClosed,
    Launch,
    Op,
    Probe,
    Requested,
    Severity,
    Sweep,
    Swept,
    Terminate,
)
from supervisord.core.model import After, Draining, Failed, FailedKind, Reason, State, Stopping
from tests.core.play import T0, Play, engine_spec, launching, ready, starting, stopped, warming


def failed(kind: FailedKind) -> Play:
    play = stopped()
    if kind is FailedKind.UNKILLABLE:
        return ready().see(Exited("a", 1, 0, None)).clock(30.0).is_(State.FAILED)
    return play.change(wanted=True, phase=Failed(kind, "the reason"), restart_times=(T0,), failures=3)


def waiting() -> Play:
    return launching().see(GateClosed("a", 1, "port_held", "pid 4 (nginx) holds port 8000"))


def looking() -> Play:
    return waiting().wake()


def back_off() -> Play:
    return ready().see(Exited("a", 1, 0, None)).see(Swept("a", 1)).is_(State.BACKOFF)


def stopping(after: Op = Op.STOP) -> Play:
    return ready().ask(after, now=True).is_(State.STOPPING)


IN: Final[dict[str, Callable[[], Play]]] = {
    "stopped": stopped,
    "waiting": waiting,
    "waiting, looking": looking,
    "launching": launching,
    "starting": starting,
    "warming": warming,
    "ready": ready,
    "draining to stop": lambda: ready().ask(Op.STOP),
    "draining to restart": lambda: ready().ask(Op.RESTART),
    "held": lambda: ready().ask(Op.DRAIN),
    "stopping": stopping,
    "restarting": lambda: stopping(Op.RESTART),
    "crashed": lambda: ready().see(Exited("a", 1, 0, None)),
    "backoff": back_off,
    "failed: config": lambda: failed(FailedKind.CONFIG),
    "failed: crash_loop": lambda: failed(FailedKind.CRASH_LOOP),
    "failed: unkillable": lambda: failed(FailedKind.UNKILLABLE),
}

YES: Final = Answer.ACCEPTED
NO: Final = Answer.REFUSED

TABLE: Final = """
                     | start    | stop     | restart  | drain     | reset
 stopped             | starting | stopped  | starting | !stopped  | stopped
 waiting             | waiting  | stopped  | waiting  | !waiting  | waiting
 waiting, looking    | waiting  | stopping | stopping | !waiting  | waiting
 launching           | starting | stopping | stopping | !starting | starting
 starting            | starting | stopping | stopping | !starting | starting
 warming             | warming  | stopping | stopping | !warming  | warming
 ready               | ready    | draining | draining | draining  | ready
 draining to stop    | ready    | stopping | draining | draining  | draining
 draining to restart | ready    | draining | draining | draining  | draining
 held                | ready    | draining | draining | draining  | draining
 stopping            | stopping | stopping | stopping | !stopping | stopping
 restarting          | stopping | stopping | stopping | !stopping | stopping
 crashed             | stopping | stopping | stopping | !stopping | stopping
 backoff             | starting | stopped  | starting | !backoff  | starting
 failed: config      | !failed  | stopped  | !failed  | !failed   | starting
 failed: crash_loop  | !failed  | stopped  | !failed  | !failed   | starting
 failed: unkillable  | !failed  | failed   | !failed  | !failed   | stopping
"""
"""The state that a request leads to at once; with "!" it is refused and changes nothing."""

ROWS: Final = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip("\n").splitlines()]
CASES: Final = [(row[0], Op(op), state) for row in ROWS[1:] for op, state in zip(ROWS[0][1:], row[1:], strict=True)]


def test_the_table_is_whole() -> None:
    assert [row[0] for row in ROWS[1:]] == list(IN)
    assert {op for _, op, _ in CASES} == set(Op)


@pytest.mark.parametrize(("state", "op", "leads_to"), CASES, ids=[f"{op.value}-{state}" for state, op, _ in CASES])
def test_every_request_in_every_state(state: str, op: Op, leads_to: str) -> None:
    refused = leads_to.startswith("!")
    play = IN[state]().ask(op).replies(NO if refused else YES)
    assert play.engine().state.value == leads_to.lstrip("!")
    assert play.record("requested").message == f"{op.value} of a requested by uid 1000"
    assert play.record("requested").numbers == {"actor": "uid 1000"}
    if refused:
        play.does().replies(NO, f"cannot {op.value} a: ")


@pytest.mark.parametrize("state", IN)
def test_what_was_asked_for_last_is_wanted(state: str) -> None:
    play = IN[state]().ask(Op.STOP)
    assert not play.engine().wanted
    if not isinstance(play.engine().phase, Failed):
        play.ask(Op.START)
        assert play.engine().wanted


@pytest.mark.parametrize("state", IN)
def test_now_skips_every_drain(state: str) -> None:
    for op in (Op.STOP, Op.RESTART):
        play = IN[state]().ask(op, now=True)
        assert play.engine().state is not State.DRAINING
        assert "(now)" in play.record("requested").message


# --- stop ---


def test_a_second_stop_means_now() -> None:
    play = ready().ask(Op.STOP).does(Probe).ask(Op.STOP).does(Abandon("a", 1), Terminate("a", 1)).is_(State.STOPPING)
    play.see(Exited("a", 1, 0, None)).see(Swept("a", 1)).is_(State.STOPPED)


def test_a_stop_after_a_restart_is_the_first_stop() -> None:
    """What is in flight may still finish, within the time that the restart gave it."""
    play = ready().ask(Op.RESTART)
    play.now += 10.0
    play.ask(Op.STOP).does().is_(State.DRAINING)
    assert play.phase(Draining).until == T0 + 30.0
    play.sample(running=0, waiting=0).see(Swept("a", 1)).is_(State.STOPPED)


def test_a_stop_of_a_held_engine_drains_with_a_limit() -> None:
    play = ready().ask(Op.DRAIN)
    play.now += 500.0
    play.ask(Op.STOP).does(Probe("a", 1)).is_(State.DRAINING)
    assert play.phase(Draining).until == T0 + 500.0 + 30.0


def test_a_stop_overtakes_a_restart() -> None:
    play = stopping(Op.RESTART).ask(Op.STOP).does().see(Swept("a", 1)).is_(State.STOPPED)
    assert play.engine().launching is None


def test_a_stop_of_what_does_not_die_says_so() -> None:
    failed(FailedKind.UNKILLABLE).ask(Op.STOP).replies(YES, "not wanted any more", "do not end", "SIGKILL")


# --- start and restart ---


@pytest.mark.parametrize("op", [Op.START, Op.RESTART])
@pytest.mark.parametrize("kind", FailedKind)
def test_a_failed_engine_is_not_started_but_told_how_to_mend(op: Op, kind: FailedKind) -> None:
    play = failed(kind).ask(op).does().is_(State.FAILED)
    play.replies(NO, f"cannot {op.value} a: it failed ({kind.value})", "vllm-supervisor reset a")


@pytest.mark.parametrize("op", [Op.START, Op.RESTART])
def test_somebody_asked_so_there_is_no_back_off(op: Op) -> None:
    play = back_off().ask(op).does(Launch("a", 2))
    assert play.engine().failures == 0


@pytest.mark.parametrize("op", [Op.START, Op.RESTART])
def test_a_start_while_stopping_follows_it(op: Op) -> None:
    play = stopping().ask(op).does().is_(State.STOPPING).see(Swept("a", 1)).does(Launch("a", 2))
    assert play.engine().wanted
    assert play.engine().restart_times == ()


def test_a_start_while_it_crashes_costs_nothing() -> None:
    play = ready().see(Exited("a", 1, 0, None)).ask(Op.START).see(Swept("a", 1)).does(Launch("a", 2))
    assert play.engine().restart_times == ()


def test_a_restart_drains_and_starts() -> None:
    play = ready().ask(Op.RESTART).does(Probe("a", 1)).is_(State.DRAINING)
    play.sample(running=0, waiting=0).does(Abandon, Terminate)
    play.see(Exited("a", 1, 0, None)).does(Sweep).see(Swept("a", 1)).does(Launch("a", 2)).is_(State.STARTING)
    play.up()
    assert play.engine().restart_times == ()


def test_a_start_of_a_waiting_engine_says_what_it_waits_for() -> None:
    waiting().ask(Op.START).does().replies(YES, "it waits: pid 4 (nginx) holds port 8000")


def test_a_start_of_a_drained_engine_whose_plan_has_changed_restarts_it() -> None:
    play = ready().ask(Op.DRAIN).change(plan_id="p2").ask(Op.START).replies(YES, "launch plan has changed")
    assert play.phase(Draining).after is After.START
    play.sample(running=0, waiting=0).see(Swept("a", 1)).spawn()
    assert play.engine().running_plan_id == "p2"


# --- drain ---


def test_a_drain_is_refused_with_the_state() -> None:
    starting().ask(Op.DRAIN).does().replies(NO, "cannot drain a: it is starting, not ready")


def test_a_drain_waits_for_nobody() -> None:
    ready().ask(Op.DRAIN).does().replies(YES, "start, stop or restart ends that")


# --- reset ---


@pytest.mark.parametrize("kind", [FailedKind.CONFIG, FailedKind.CRASH_LOOP])
def test_a_reset_starts_what_is_wanted(kind: FailedKind) -> None:
    play = failed(kind).ask(Op.RESET).does(Launch("a", 1))
    assert (play.engine().failures, play.engine().restart_times) == (0, ())


@pytest.mark.parametrize("kind", [FailedKind.CONFIG, FailedKind.CRASH_LOOP])
def test_a_reset_of_what_is_not_wanted(kind: FailedKind) -> None:
    failed(kind).change(wanted=False).ask(Op.RESET).does().is_(State.STOPPED)


def test_a_reset_of_what_does_not_die_looks_again() -> None:
    play = failed(FailedKind.UNKILLABLE).ask(Op.RESET).does(Sweep("a", 1)).is_(State.STOPPING)
    assert play.phase(Stopping).give_up_at == play.now + 30.0
    play.see(Swept("a", 1, ("pid 7",))).wake().does(Sweep("a", 1)).see(Swept("a", 1)).does(Launch("a", 2))


def test_a_reset_of_what_still_does_not_die_fails_again() -> None:
    failed(FailedKind.UNKILLABLE).ask(Op.RESET).see(Swept("a", 1, ("pid 7",))).clock(30.0).is_(State.FAILED)


def test_a_reset_of_what_does_not_die_and_is_not_wanted() -> None:
    failed(FailedKind.UNKILLABLE).ask(Op.STOP).ask(Op.RESET).see(Swept("a", 1)).is_(State.STOPPED)


def test_a_reset_forgets_failures_and_budget() -> None:
    play = ready().change(failures=4, restart_times=(T0,)).ask(Op.RESET).does()
    assert (play.engine().failures, play.engine().restart_times) == (0, ())


# --- who cannot ask ---


def test_an_unknown_engine_names_the_known_ones() -> None:
    play = stopped(engine_spec("a"), engine_spec("b")).see(Requested(7, Op.STOP, "c", "uid 0"))
    play.replies(Answer.UNKNOWN_ENGINE, "cannot stop c: no such engine (known: a, b)").says()


def test_there_may_be_none() -> None:
    stopped().change(removed=True).ask(Op.START).replies(Answer.UNKNOWN_ENGINE, "(known: none)")


@pytest.mark.parametrize("op", Op)
def test_a_daemon_that_ends_refuses(op: Op) -> None:
    play = ready().see(EndRequested("SIGTERM")).ask(op).does().says()
    play.replies(NO, f"cannot {op.value} a: the daemon is shutting down")


def test_requests_are_told_with_their_severity() -> None:
    assert ready().ask(Op.STOP).record("requested").severity is Severity.NOTICE
    assert ready().ask(Op.STOP).phase(Draining).cause == Reason("operator", "stop requested by uid 1000")
