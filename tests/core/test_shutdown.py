"""The end of the daemon: bounded, and over exactly when nothing of ours lives."""

from __future__ import annotations

from supervisord.core.messages import (
    Abandon,
    AnnounceReady,
    Due,
    EndRequested,
    Exited,
    Finish,
    GateClosed,
    Op,
    Probe,
    Spawned,
    Sweep,
    Swept,
    Terminate,
    What,
)
from supervisord.core.model import Failed, FailedKind, State, Stopping
from tests.core.play import T0, engine_spec, launching, process, ready, starting, stopped

END = EndRequested("SIGTERM")


def test_with_nothing_alive_it_is_over_at_once() -> None:
    stopped().see(END).does(Finish).says("daemon_ending")


def test_a_serving_engine_drains_and_stops_first() -> None:
    play = ready().see(END).does(Probe("a", 1)).is_(State.DRAINING).says("daemon_ending", "draining")
    play.sample(running=0, waiting=0).does(Abandon, Terminate)
    play.see(Exited("a", 1, 0, None)).does(Sweep).see(Swept("a", 1)).does(Finish).is_(State.STOPPED)
    assert play.engine().wanted, "the next daemon starts it again"


def test_it_is_bounded() -> None:
    """Streams that never end, a process that hears nothing, and a kernel that does not let go: 30 + 60 + 30 s."""
    play = ready().see(END)
    while not any(isinstance(action, Finish) for action in play.actions):
        play.wake()
    assert play.now == T0 + 120.0
    assert play.phase(Failed).kind is FailedKind.UNKILLABLE


def test_every_state_ends() -> None:
    starting().see(END).does(Abandon, Terminate)
    launching().see(END).does(Abandon).see(GateClosed("a", 1, "port_held", "x")).does(Finish)
    launching().see(GateClosed("a", 1, "port_held", "x")).see(END).does(Finish).is_(State.STOPPED)
    ready().see(Exited("a", 1, 0, None)).see(Swept("a", 1)).see(END).does(Finish).is_(State.STOPPED)
    ready().see(Exited("a", 1, 0, None)).see(END).does().see(Swept("a", 1)).does(Finish)
    ready().ask(Op.DRAIN).see(END).does(Probe).is_(State.DRAINING)
    ready().ask(Op.STOP).see(END).does().is_(State.DRAINING)


def test_a_restart_under_way_becomes_a_stop() -> None:
    for play in (ready().ask(Op.RESTART), ready().ask(Op.RESTART, now=True)):
        play.see(END).see(Due(What.CLOCK), at=T0 + 30.0).see(Swept("a", 1)).does(Finish).is_(State.STOPPED)


def test_what_does_not_die_does_not_hold_it_up() -> None:
    play = ready().see(Exited("a", 1, 0, None)).clock(30.0).is_(State.FAILED)
    play.see(END).does(Finish).is_(State.FAILED)


def test_failed_engines_stay_failed() -> None:
    play = stopped().change(wanted=True, phase=Failed(FailedKind.CRASH_LOOP, "x"))
    play.see(END).does(Finish).is_(State.FAILED)


def test_all_engines_have_to_go() -> None:
    play = launching(engine_spec("a"), engine_spec("b")).spawn("a").spawn("b").see(END)
    play.see(Swept("a", 1)).does().see(Swept("b", 1)).does(Finish)


# --- asked again ---


def test_a_second_order_kills_what_drains() -> None:
    play = ready().see(END).see(END, after=1.0).does(Abandon("a", 1), Sweep("a", 1))
    play.says("daemon_ending", "killing")
    play.see(Swept("a", 1), after=0.2).does(Finish)


def test_a_second_order_kills_what_was_asked_to_end() -> None:
    starting().see(END).see(END, after=1.0).does(Abandon("a", 1), Sweep("a", 1)).see(Swept("a", 1)).does(Finish)


def test_a_second_order_leaves_a_sweep_alone() -> None:
    ready().see(Exited("a", 1, 0, None)).see(END).see(END).does()


def test_a_second_order_and_a_launch_that_is_not_answered_yet() -> None:
    play = launching().see(END).does(Abandon).see(END, after=1.0).does(Abandon)
    assert play.phase(Stopping).give_up_at == T0 + 31.0
    play.see(Spawned("a", 1, process(1)), after=1.0).does(Sweep("a", 1))
    play.see(Swept("a", 1)).does(Finish)


def test_a_second_order_and_a_launch_that_is_never_answered() -> None:
    play = launching().see(END).see(END, after=1.0).wake().does(Finish).is_(State.FAILED)
    assert play.now == T0 + 31.0


def test_a_third_order_changes_nothing() -> None:
    ready().see(END).see(END).see(END).does().says("daemon_ending")


# --- engines that are kept ---

KEEP = EndRequested("SIGTERM", keep=True)


def test_engines_that_are_kept_are_left_as_they_are() -> None:
    play = ready().see(KEEP).does(Finish).is_(State.READY).says("daemon_ending")
    assert play.record("daemon_ending").message == "ending (SIGTERM): engines run on (a)"
    stopped().see(KEEP).does(Finish)
    for play in (launching(), starting(), ready().ask(Op.RESTART), ready().ask(Op.STOP, now=True)):
        state = play.engine().state
        play.see(KEEP).does(Finish).is_(state)


def test_what_an_operator_wanted_holds_for_the_next_daemon() -> None:
    play = ready().ask(Op.STOP).see(KEEP).does(Finish)
    assert not play.engine().wanted, "it is ended by the daemon that finds it"


def test_nothing_begins_any_more_while_engines_are_kept() -> None:
    ready().see(KEEP).see(Exited("a", 1, 1, None)).does(Abandon, Sweep, Finish).see(Swept("a", 1)).does(Finish)


# --- and READY=1 ---


def test_a_daemon_that_ends_before_it_was_ready() -> None:
    play = launching(engine_spec(), ready_timeout_s=100.0).see(END).does(Abandon)
    play.see(GateClosed("a", 1, "port_held", "x")).does(AnnounceReady, Finish)
