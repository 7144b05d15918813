"""The loop with recording effects: no sleeps, the clock is a number."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from threading import Event, Thread

import pytest

from supervisord.core import node as reducer
from supervisord.core.messages import (
    Action,
    AnnounceReady,
    Booted,
    Due,
    EndRequested,
    Exited,
    Launch,
    Observation,
    Record,
    Spawned,
    Swept,
    Terminate,
    What,
)
from supervisord.core.model import Engine, Node, Process, State
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.loop import IDLE_TURN_S, Board, Loop


class Recorder:
    """Effects that only remember."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.actions: list[Action] = []

    def begin(self, old: Node, new: Node) -> None:
        self.calls.append("begin")

    def perform(self, action: Action, node: Node) -> None:
        if not isinstance(action, Record):
            self.calls.append(type(action).__name__)
            self.actions.append(action)

    def end(self, node: Node) -> None:
        self.calls.append("end")


class Rig:
    def __init__(self, *names: str) -> None:
        specs = {name: EngineSpec(name=name, model="/m", port=8000 + i) for i, name in enumerate(names)}
        engines = {name: Engine(spec=spec, plan_id="p", wanted=True) for name, spec in specs.items()}
        self.now = 100.0
        self.inbox: SimpleQueue[Observation] = SimpleQueue()
        self.effects = Recorder()
        node = Node(spec=NodeSpec(engines=specs), engines=engines)
        self.loop = Loop(node, self.inbox, self.effects, clock=lambda: self.now)


def test_a_turn_persists_before_it_acts_and_feeds_the_watchdog_last() -> None:
    rig = Rig("a")
    rig.loop.turn(Booted())
    assert rig.effects.calls == ["begin", "Launch", "AnnounceReady", "end"]
    assert rig.effects.actions[0] == Launch("a", 1)


def test_runs_until_nothing_lives() -> None:
    rig = Rig("a")
    process = Process(77, 5, "boot")
    for seen in (
        Booted(),
        Spawned("a", 1, process),
        EndRequested("SIGTERM"),
        Exited("a", 1, 0, None),
        Swept("a", 1),
    ):
        rig.inbox.put(seen)
    rig.loop.run()
    assert rig.loop.finished
    assert rig.loop.node.engines["a"].state is State.STOPPED
    assert Terminate("a", 1) in rig.effects.actions


def test_a_passed_deadline_goes_before_the_inbox() -> None:
    rig = Rig("a")
    rig.loop.turn(Booted())
    rig.inbox.put(Due(What.POLL))
    wakeup = reducer.wakeup(rig.loop.node)
    assert wakeup is not None
    rig.now = wakeup
    assert rig.loop._next() == Due(What.CLOCK)


def test_idle_turns_happen_for_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    waited: list[float] = []

    class Quiet:
        def get(self, timeout: float) -> Observation:
            waited.append(timeout)
            raise Empty

    monkeypatch.setattr(rig.loop, "_inbox", Quiet())
    assert rig.loop._next() == Due(What.WATCHDOG)
    assert waited == [IDLE_TURN_S]


def test_a_bug_in_the_core_feeds_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("a")

    def broken(*_: object) -> object:
        raise RuntimeError("bug")

    monkeypatch.setattr(reducer, "step", broken)
    with pytest.raises(RuntimeError):
        rig.loop.turn(Booted())
    assert "end" not in rig.effects.calls


def test_ready_is_announced_once() -> None:
    rig = Rig()
    rig.loop.turn(Booted())
    rig.loop.turn(Due(What.POLL))
    assert [a for a in rig.effects.actions if isinstance(a, AnnounceReady)] == [AnnounceReady()]


def test_board_wakes_who_waits_for_a_newer_node() -> None:
    node = Node(spec=NodeSpec())
    board = Board(node)
    serial, _ = board.read()
    seen: list[int] = []
    started = Event()

    def wait() -> None:
        started.set()
        seen.append(board.wait(serial, 10.0)[0])

    thread = Thread(target=wait)
    thread.start()
    started.wait(10)
    board.publish(node)
    thread.join(10)
    assert seen == [serial + 1]
    assert board.wait(serial + 1, 0.0)[0] == serial + 1
