"""A new configuration: only engines whose launch plan changed are restarted, and that is said first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from supervisord.core.messages import (
    Abandon,
    Answer,
    Due,
    EndRequested,
    Exited,
    GateClosed,
    Launch,
    Op,
    Probe,
    Reconfigured,
    Record,
    Reply,
    Sweep,
    Swept,
    Terminate,
    What,
)
from supervisord.core.model import After, Draining, Failed, FailedKind, Ready, State, Stopping
from supervisord.core.requests import changes, held
from supervisord.core.spec import EngineSpec, NodeSpec, RestartSpec
from tests.core.play import T0, Play, engine_spec, launching, node_spec, plan_ids, ready, starting, stopped, warming


def reload(play: Play, *engines: EngineSpec, request: int | None = None, **plans: str) -> Play:
    """Reload with these engines; plans as given, or as they are."""
    known = {name: engine.plan_id for name, engine in play.node.engines.items()}
    spec = node_spec(*engines)
    return play.see(Reconfigured(spec, {**plan_ids(spec), **known, **plans}, "uid 0", request))


def told(play: Play) -> list[str]:
    return [a.message for a in play.actions if isinstance(a, Record) and a.kind == "reconfigured"]


A = engine_spec("a")
OTHER = engine_spec("a", stop_timeout_s=7.0)


def test_nothing_changed() -> None:
    play = ready()
    before = play.node
    reload(play, A).does_nothing()
    assert play.node.engines == before.engines


def test_settings_are_applied_without_a_restart() -> None:
    play = reload(ready(), OTHER).does().is_(State.READY)
    assert told(play) == ["a: its settings changed: applied without a restart"]
    play.ask(Op.STOP, now=True)
    assert play.phase(Stopping).kill_at == T0 + 7.0


def test_a_changed_plan_restarts_with_a_drain() -> None:
    play = reload(ready(), A, a="p2").does(Probe("a", 1)).is_(State.DRAINING)
    assert told(play) == ["a: its launch plan changed: it is restarted"]
    assert play.phase(Draining).after is After.START
    assert "reloaded by uid 0" in play.phase(Draining).cause.message
    play.sample(running=0, waiting=0).see(Exited("a", 1, 0, None)).see(Swept("a", 1)).does(Launch("a", 2)).spawn()
    assert play.engine().running_plan_id == "p2"
    assert play.engine().restart_times == ()


@pytest.mark.parametrize("make", [starting, warming])
def test_a_changed_plan_of_a_start(make: Callable[[], Play]) -> None:
    reload(make(), A, a="p2").does(Abandon("a", 1), Terminate("a", 1)).is_(State.STOPPING)


def test_a_changed_plan_while_it_is_launched() -> None:
    """The process that comes is of the old plan: it is ended, not taken for one of the new."""
    play = reload(launching(A), A, a="p2").is_(State.STOPPING).spawn().does(Terminate("a", 1))
    play.see(Swept("a", 1)).does(Launch("a", 2)).up()


def test_a_changed_plan_while_an_outside_gate_is_looked_at() -> None:
    play = launching(A).see(GateClosed("a", 1, "port_held", "x")).wake().does(Launch("a", 1))
    reload(play, A, a="p2").is_(State.STOPPING)
    assert told(play) == ["a: its launch plan changed: it is restarted"]
    play.spawn().does(Terminate("a", 1)).see(Swept("a", 1)).up()
    assert play.engine().running_plan_id == "p2"


def test_a_changed_plan_at_a_gate_or_in_back_off_or_stopped_is_used_at_the_next_start() -> None:
    for play in (
        stopped(A),
        launching(A).see(GateClosed("a", 1, "port_held", "x")),
        ready().see(Exited("a", 1, 0, None)).see(Swept("a", 1)),
        ready().ask(Op.STOP, now=True),
        ready().ask(Op.DRAIN),
    ):
        state = play.engine().state
        reload(play, A, a="p2").does().is_(state)
        assert told(play) == ["a: its launch plan changed: used at the next start"]
        assert play.engine().plan_id == "p2"


def test_a_held_engine_stays_held_and_is_restarted_when_it_is_let_go() -> None:
    play = reload(ready().ask(Op.DRAIN), A, a="p2").ask(Op.START)
    assert play.phase(Draining).after is After.START


@pytest.mark.parametrize("kind", [FailedKind.CONFIG, FailedKind.CRASH_LOOP])
@pytest.mark.parametrize(("spec", "plan"), [(OTHER, "p1"), (A, "p2")])
def test_a_changed_section_starts_a_failed_engine(kind: FailedKind, spec: EngineSpec, plan: str) -> None:
    play = stopped(replace(A, autostart=True)).change(
        wanted=True, phase=Failed(kind, "x"), failures=3, restart_times=(T0,)
    )
    reload(play, spec, a=plan).does(Launch("a", 1)).is_(State.STARTING)
    assert (play.engine().failures, play.engine().restart_times) == (0, ())


def test_a_failed_engine_whose_section_is_the_same_stays_failed() -> None:
    play = launching(A).change(phase=Failed(FailedKind.CONFIG, "x"), launching=None)
    reload(play, A).does_nothing()


def test_a_failed_engine_that_nobody_wants_is_just_stopped() -> None:
    play = stopped(A).change(phase=Failed(FailedKind.CRASH_LOOP, "x"))
    reload(play, OTHER).does().is_(State.STOPPED)


def test_what_does_not_die_is_not_started_by_a_reload() -> None:
    play = ready().see(Exited("a", 1, 0, None)).clock(30.0)
    reload(play, OTHER, a="p2").does().is_(State.FAILED)
    assert told(play) == ["a: its launch plan changed: used at the next start"]


# --- new engines ---


def test_a_new_engine_is_started() -> None:
    play = reload(ready(), A, engine_spec("b")).does(Launch("b", 1)).is_(State.STARTING, "b")
    assert told(play) == ["b: is new"]
    assert play.engine("b").wanted


def test_a_new_engine_that_is_not_started_by_itself() -> None:
    reload(ready(), A, engine_spec("b", autostart=False)).does().is_(State.STOPPED, "b")


def test_a_new_engine_waits_at_the_gates() -> None:
    play = launching(engine_spec("a", gpus=("GPU-0",)))
    reload(play, engine_spec("a", gpus=("GPU-0",)), engine_spec("b", gpus=("GPU-0",))).is_(State.WAITING, "b")


def test_limits_of_the_new_configuration_count_at_once() -> None:
    play = launching(A, engine_spec("b"), max_parallel_starts=1).is_(State.WAITING, "b")
    play.see(Reconfigured(node_spec(A, engine_spec("b"), max_parallel_starts=2), {"a": "p1", "b": "p1"}, "uid 0"))
    play.does(Launch("b", 1)).is_(State.STARTING, "b")


# --- removed engines ---


def test_a_removed_engine_drains_stops_and_is_forgotten() -> None:
    play = reload(ready()).does(Probe("a", 1)).is_(State.DRAINING)
    assert told(play) == ["a: is no longer configured: it is stopped and forgotten"]
    play.sample(running=0, waiting=0).see(Exited("a", 1, 0, None)).see(Swept("a", 1)).says("removed")
    assert play.node.engines == {}
    play.see(Swept("a", 1)).does_nothing()


def test_a_removed_engine_of_which_nothing_lives_is_forgotten_at_once() -> None:
    for play in (
        stopped(A),
        launching(A).see(GateClosed("a", 1, "port_held", "x")),
        stopped(A).change(phase=Failed(FailedKind.CONFIG, "x")),
    ):
        assert reload(play).node.engines == {}


def test_a_removed_engine_while_it_is_launched() -> None:
    play = reload(launching(A)).is_(State.STOPPING).see(GateClosed("a", 1, "port_held", "x"))
    assert play.node.engines == {}


def test_a_removed_engine_cannot_be_asked_for_anything() -> None:
    play = reload(ready())
    play.ask(Op.START).replies(Answer.UNKNOWN_ENGINE).does().is_(State.DRAINING)


def test_a_removed_engine_is_told_once() -> None:
    play = reload(ready())
    assert told(reload(play)) == []


def test_a_removed_engine_that_does_not_die_stays_until_it_does() -> None:
    play = reload(ready().see(Exited("a", 1, 0, None)).clock(30.0)).is_(State.FAILED).does()
    play.see(Exited("a", 1, 0, None)).does(Sweep).see(Swept("a", 1)).says("removed")
    assert play.node.engines == {}


def test_a_removed_engine_that_does_not_die_can_be_reset_as_its_message_says() -> None:
    play = reload(ready().see(Exited("a", 1, 0, None)).clock(30.0))
    play.ask(Op.RESET).replies(Answer.ACCEPTED).does(Sweep).see(Swept("a", 1)).says("removed")
    assert play.node.engines == {}


@pytest.mark.parametrize("now", [False, True])
def test_a_removed_engine_that_is_configured_again_starts_when_the_old_one_is_gone(now: bool) -> None:
    play = reload(ready())
    if now:
        play.sample(running=0, waiting=0).is_(State.STOPPING)
    reload(play, OTHER, a="p2").does()
    assert told(play) == ["a: is new"]
    assert (play.engine().wanted, play.engine().removed, play.engine().spec) == (True, False, OTHER)
    if not now:
        play.sample(running=0, waiting=0)
    play.see(Swept("a", 1)).does(Launch("a", 2)).up()


def test_a_removed_engine_that_is_configured_again_without_autostart() -> None:
    play = reload(reload(ready()), replace(A, autostart=False)).sample(running=0, waiting=0)
    play.see(Swept("a", 1)).is_(State.STOPPED)


def test_a_removed_engine_that_does_not_die_and_is_configured_again() -> None:
    play = reload(reload(ready().see(Exited("a", 1, 0, None)).clock(30.0)), A).is_(State.FAILED)
    play.ask(Op.RESET).see(Swept("a", 1)).does(Launch("a", 2))


# --- the rest ---


def test_a_reload_is_answered_when_it_is_applied() -> None:
    play = reload(ready(), A, request=5)
    assert [a for a in play.actions if isinstance(a, Reply)] == [
        Reply(5, Answer.ACCEPTED, "the configuration is applied")
    ]


def test_a_reload_clears_the_configuration_error() -> None:
    play = ready()
    play.node = replace(play.node, config_error="cannot read /etc/x")
    assert reload(play, A).node.config_error is None


def test_a_reload_of_a_daemon_that_ends_starts_nothing() -> None:
    play = ready().see(EndRequested("SIGTERM"))
    reload(play, A, engine_spec("b")).does().is_(State.STOPPED, "b")
    play.see(Due(What.WATCHDOG)).does()


def test_what_a_reload_would_do_is_told_beforehand() -> None:
    play = launching(*(engine_spec(name) for name in "abcd"), max_parallel_starts=9).up("a").up("b").up("c").up("d")
    new = node_spec(engine_spec("a"), engine_spec("b", stop_timeout_s=7.0), engine_spec("c"), engine_spec("e"))
    plans = {"a": "p1", "b": "p1", "c": "p2", "e": "p1"}
    assert changes(play.node, new, plans) == {
        "b": "its settings changed: applied without a restart",
        "c": "its launch plan changed: it is restarted",
        "d": "is no longer configured: it is stopped and forgotten",
        "e": "is new",
    }
    assert isinstance(play.engine("d").phase, Ready)


def test_nobody_need_wait_for_a_held_engine() -> None:
    play, new = ready().ask(Op.DRAIN), node_spec(A)
    assert held(play.node, new, "a")
    assert not held(play.node, node_spec(), "a"), "it is removed, so it goes"
    assert not held(play.node, new, "b")
    assert not held(ready().ask(Op.STOP).node, new, "a")


def test_a_reload_without_engines() -> None:
    assert changes(stopped(A).node, NodeSpec(), {}) == {
        "a": "is no longer configured: it is stopped and forgotten",
    }


def test_another_window_closes_the_one_that_is_open() -> None:
    play = ready(restart=RestartSpec(maintenance_window="0 3 * * * 2h")).change(window_until=T0 + 9999)
    engine = play.engine()
    other = replace(engine.spec, restart=RestartSpec(maintenance_window="0 4 * * * 2h"))
    play.see(Reconfigured(NodeSpec(engines={"a": other}), {"a": engine.plan_id}, "uid 0"))
    assert play.engine().window_until is None
