"""Who may start: the gates inside the node, and waiting."""

from __future__ import annotations

from collections import Counter

from supervisord.core.messages import (
    AnnounceReady,
    Due,
    Exited,
    GateClosed,
    Launch,
    Op,
    Progressed,
    Severity,
    Swept,
    What,
)
from supervisord.core.model import Backoff, Failed, FailedKind, Progress, State, Waiting
from tests.core.play import T0, Play, engine_spec, launching


def waits(play: Play, name: str) -> str:
    return play.phase(Waiting, name).reason.code


def trio(**keys: object) -> Play:
    """Three engines on one GPU, all wanted."""
    return launching(*(engine_spec(name, gpus=("GPU-0",), **keys) for name in "abc"))


def test_one_engine_a_gpu_starts_at_a_time() -> None:
    play = trio().does(AnnounceReady, Launch("a", 1, (0,)))
    assert waits(play, "b") == waits(play, "c") == "gpu_busy_starting"
    assert "a is starting" in play.phase(Waiting, "b").reason.message
    assert play.phase(Waiting, "b").recheck_at == T0 + 60.0


def test_the_gate_opens_when_the_engine_answers_not_when_it_is_warm() -> None:
    play = trio().spawn("a")
    assert waits(play, "b") == "gpu_busy_starting"
    play.answer("a").is_(State.WARMING)
    assert play.engine("b").launching == 1
    assert waits(play, "c") == "gpu_busy_starting"


def test_release_follows_the_order_of_the_configuration() -> None:
    play = trio().up("a").up("b").up("c")
    assert all(play.engine(name).state is State.READY for name in "abc")


def test_an_engine_that_stops_holds_its_gpu() -> None:
    play = trio(autostart=False).ask(Op.START, "a").up("a").ask(Op.STOP, "a", now=True).is_(State.STOPPING, "a")
    play.ask(Op.START, "b").is_(State.WAITING, "b")
    assert "a is stopping" in play.phase(Waiting, "b").reason.message
    play.see(Exited("a", 1, 0, None)).is_(State.WAITING, "b")
    play.see(Swept("a", 1)).is_(State.STOPPED, "a").is_(State.STARTING, "b").does(Launch("b", 1, (0,)))


def test_a_serving_or_draining_engine_does_not() -> None:
    play = trio(autostart=False).ask(Op.START, "a").up("a").ask(Op.DRAIN, "a")
    play.ask(Op.START, "b").is_(State.STARTING, "b")


def test_any_common_gpu_counts() -> None:
    play = launching(
        engine_spec("a", gpus=("GPU-0", "GPU-1")),
        engine_spec("b", gpus=("GPU-1", "GPU-2")),
        engine_spec("c", gpus=("GPU-3",)),
    )
    assert waits(play, "b") == "gpu_busy_starting"
    play.is_(State.STARTING, "c")


def test_different_gpus_and_none_start_in_parallel_up_to_the_limit() -> None:
    play = launching(*(engine_spec(name, gpus=(f"GPU-{name}",)) for name in "abc"), max_parallel_starts=2)
    assert [play.engine(name).state for name in "abc"] == [State.STARTING, State.STARTING, State.WAITING]
    assert waits(play, "c") == "max_parallel_starts"
    play.up("b").is_(State.STARTING, "c")


def test_waiting_is_said_once_and_keeps_its_since() -> None:
    play = trio()
    assert [(record.engine, record.reason) for record in play.told if record.kind == "waiting"] == [
        *((name, "driver_not_ready") for name in "abc"),
        ("b", "gpu_busy_starting"),
        ("c", "gpu_busy_starting"),
    ]
    said = len(play.told)
    for seconds in (1.0, 30.0, 29.0, 60.0):
        play.see(Due(What.CLOCK), after=seconds)
    assert play.engine("b").since == T0
    assert len(play.told) == said


def test_waiting_is_left_alone_by_what_does_not_concern_it() -> None:
    """Nothing changes, so nothing is published or saved either."""
    play = trio().spawn("a")
    before, play.cards = play.node, None
    play.see(Due(What.WATCHDOG), after=3.0)
    play.see(Progressed("b", 0, Progress(1, 1, 1)), after=3.0)
    assert play.node == before


def test_the_net_below_a_gate_of_the_node() -> None:
    play = trio().clock(60.0)
    assert play.phase(Waiting, "b").recheck_at == T0 + 120.0


def test_a_new_reason_is_said() -> None:
    play = trio().spawn("a").says("spawned")
    play.see(Exited("a", 1, 1, None))
    assert [r.message for r in play.told if r.kind == "waiting"][-1].startswith("c waits: engine a is stopping")


def test_a_closed_outside_gate_is_looked_at_every_five_seconds() -> None:
    play = launching().see(GateClosed("a", 1, "port_held", "pid 4 (x) has it"), after=0.2)
    play.is_(State.WAITING).says("waiting").does()
    assert play.record("waiting").severity is Severity.WARNING
    assert play.record("waiting").reason == "port_held"
    for n in range(1, 5):
        play.wake().does(Launch("a", 1)).is_(State.WAITING).says()
        assert play.now == T0 + 0.2 + n * 5.0
        play.see(GateClosed("a", 1, "port_held", "pid 4 (x) has it")).does().says()
    assert play.engine().since == T0 + 0.2


def test_waiting_costs_neither_budget_nor_a_generation() -> None:
    play = launching(engine_spec(restart={"max_restarts": 0}))
    for _ in range(20):
        play.see(GateClosed("a", 1, "port_held", "pid 4 (nginx)")).wake()
    engine = play.engine()
    assert (engine.restart_times, engine.failures, engine.generation, engine.restarts) == ((), 0, 0, 0)
    play.up()
    assert play.engine().restarts == 0


def test_an_outside_gate_that_opens() -> None:
    play = launching().see(GateClosed("a", 1, "disk_full", "0 bytes free")).wake().is_(State.WAITING)
    play.see(Due(What.CLOCK), after=1.0).does().spawn().is_(State.STARTING)
    assert play.engine().since == play.now


def test_an_engine_behind_an_outside_gate_lets_its_neighbour_look_too() -> None:
    play = trio().see(GateClosed("a", 1, "disk_full", "no space"))
    assert waits(play, "a") == "disk_full"
    play.is_(State.STARTING, "b")


def test_two_behind_the_same_outside_gate_are_told_once_each() -> None:
    """One that is only looking at its gate does not push the other from one reason to the next and back."""
    play = trio()
    took_s = {"a": 0.1, "b": 0.5, "c": 0.9}
    answers, looks = [(T0, "a")], Counter[str]()
    while play.now < T0 + 300.0:
        if answers and play.wakeup is not None and answers[0][0] <= play.wakeup:
            at, name = answers.pop(0)
            play.see(GateClosed(name, 1, "disk_full", "no space"), at=at)
        else:
            assert play.wakeup is not None
            play.see(Due(What.CLOCK), at=max(play.wakeup, play.now))
        launched = [action.engine for action in play.actions if isinstance(action, Launch)]
        answers += [(play.now + took_s[name], name) for name in launched]
        answers.sort()
        looks.update(launched)
    said = [(r.engine, r.reason) for r in play.told if r.kind == "waiting" and r.reason != "driver_not_ready"]
    assert said == [
        ("b", "gpu_busy_starting"),
        ("c", "gpu_busy_starting"),
        ("a", "disk_full"),
        ("c", "gpu_busy_starting"),  # now behind b
        ("b", "disk_full"),
        ("c", "disk_full"),
    ]
    assert all(40 <= looks[name] <= 60 for name in "abc"), looks


def test_one_behind_an_outside_gate_gives_way_to_a_neighbour_that_starts() -> None:
    play = trio().see(GateClosed("a", 1, "disk_full", "no space")).spawn("b")
    play.wake().is_(State.WAITING, "a").says("waiting")
    assert waits(play, "a") == "gpu_busy_starting"


def test_a_launch_that_never_answers_while_waiting_ends_as_unkillable() -> None:
    play = launching(engine_spec(start_timeout_max_s=3600.0)).see(GateClosed("a", 1, "disk_full", "full")).wake()
    play.clock(3599.0).is_(State.WAITING).clock(1.0).is_(State.FAILED)
    assert play.phase(Failed).kind is FailedKind.UNKILLABLE
    assert "launch is never answered" in play.phase(Failed).message


def test_back_off_ends_at_a_closed_gate() -> None:
    play = launching(engine_spec("a", gpus=("GPU-0",)), engine_spec("b", gpus=("GPU-0",))).spawn("a")
    play.see(Exited("a", 1, 0, None)).see(Swept("a", 1)).is_(State.BACKOFF, "a").is_(State.STARTING, "b")
    until = play.phase(Backoff, "a").until
    play.see(Due(What.CLOCK), at=until).is_(State.WAITING, "a")
    play.up("b").is_(State.STARTING, "a")


def test_nothing_is_started_beside_what_cannot_be_ended() -> None:
    """What hangs in the kernel has its memory, and nobody knows what else."""
    play = trio(autostart=False).ask(Op.START, "a").up("a")
    play.change("a", phase=Failed(FailedKind.UNKILLABLE, "D state")).ask(Op.START, "b")
    assert waits(play, "b") == "gpu_quarantined"
    assert "processes of engine a on the same GPU cannot be ended" in play.phase(Waiting, "b").reason.message
    play.change("a", phase=Failed(FailedKind.UNKILLABLE, "gone by now", gone=True))
    play.see(Due(What.POLL)).is_(State.STARTING, "b")
    other = launching(engine_spec("a", gpus=("GPU-0",), autostart=False), engine_spec("b", gpus=("GPU-1",)))
    other.change("a", phase=Failed(FailedKind.UNKILLABLE, "D state")).is_(State.STARTING, "b")
    looped = trio(autostart=False).change("a", phase=Failed(FailedKind.CRASH_LOOP, "x")).ask(Op.START, "b")
    looped.is_(State.STARTING, "b")
