"""What is recorded of a run is enough for the same core to reach the same decisions, from the database alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisord import history, history_rows
from supervisord.core import codec
from supervisord.core import node as reducer
from supervisord.core.messages import Action, Booted, Due, EndRequested, Observation, Op, Reconfigured, Requested, What
from supervisord.core.model import Node
from supervisord.history import History
from supervisord.history_read import Reader, Recording
from supervisord.history_store import FILE
from supervisord.loop import Loop
from tests.core.play import engine_spec, new_node, node_spec
from tests.core.world import Core, Luck, World

Turn = tuple[Node, float, Observation, Node, tuple[Action, ...]]
"""The node before, when, what was seen, the node after, what was decided."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "GATHER_S", 0.01)


class Tape:
    """Effects that remember each turn; `observe` hands it to the history as the loop does."""

    def __init__(self, kept: History) -> None:
        self.turns: list[Turn] = []
        self._kept = kept
        self._actions: list[Action] = []
        self._seen: tuple[Node, Observation, float] | None = None

    def observe(self, node: Node, seen: Observation, now: float) -> None:
        self._seen = (node, seen, now)
        self._kept.observe(node, seen, now)

    def begin(self, old: Node, new: Node) -> None:
        self._actions = []

    def perform(self, action: Action, node: Node) -> None:
        self._actions.append(action)

    def end(self, node: Node) -> None:
        assert self._seen is not None
        before, seen, now = self._seen
        self.turns.append((before, now, seen, node, tuple(self._actions)))


def as_recorded(node: Node) -> Node:
    """A node without the values of environments, which are not recorded."""
    specs = {name: replace(spec, env=dict.fromkeys(spec.env, codec.HIDDEN)) for name, spec in node.spec.engines.items()}
    engines = {}
    for name, engine in node.engines.items():
        hidden = replace(engine.spec, env=dict.fromkeys(engine.spec.env, codec.HIDDEN))
        engines[name] = replace(engine, spec=hidden)
    return replace(node, spec=replace(node.spec, engines=specs), engines=engines)


def assert_replays(folder: Path, turns: list[Turn]) -> list[Recording]:
    """Decide everything again from the file, and compare."""
    found = list(Reader(folder / FILE, 60.0).recordings())
    rest = iter(turns)
    for recording in found:
        node = recording.node
        for now, seen in recording.seen:
            before, then, saw, after, decided = next(rest)
            assert now == then
            assert node == as_recorded(before)
            node, actions = reducer.step(node, seen, now)
            assert node == as_recorded(after), saw
            assert actions == decided
    assert next(rest, None) is None
    return found


# --- the loop of the daemon, over a world of the tests ----------------------------------------------------------------


def recorded_world(kept: History, tape: list[Turn], **keys: Any) -> World:
    """A world whose core is recorded."""
    specs = [
        engine_spec("a", gpus=("0",), env={"HF_TOKEN": "hf_precious"}, **keys),
        engine_spec("b", gpus=("0",), args={"max-num-batched-tokens": 2048, "x": {"y": [1, 2.5, None]}}),
        engine_spec("c", warmup={"enabled": False}, restart={"max_restarts": 1, "backoff_initial_s": 0}),
    ]

    def step(node: Node, seen: Observation, now: float) -> tuple[Node, tuple[Action, ...]]:
        kept.observe(node, seen, now)
        after, actions = reducer.step(node, seen, now)
        tape.append((node, now, seen, after, actions))
        return after, actions

    spec = node_spec(*specs, max_parallel_starts=2)
    return World(spec, dict.fromkeys(spec.engines, "p1"), Core(step=step))


def drive(world: World, choose: Callable[[int], int], turns: int, *, mortal: bool = True) -> None:
    """Some life: whatever is waiting happens, in an order that `choose` decides."""
    for _ in range(turns):
        if world.over:
            return
        what = choose(16)
        lanes, sources = world.busy_lanes(), world.busy_sources()
        if what < 4 and lanes:
            outcome = ("spawn", "spawn", "spawn", "gate", "crash", "config")[choose(6)]
            world.perform(lanes[choose(len(lanes))], Luck(outcome, swallows=choose(2), deaf=choose(4) == 0))
        elif what < 7 and sources:
            world.deliver(sources[choose(len(sources))])
        elif what == 7:
            world.next_clock(choose(3) * 0.5)
        elif what == 8:
            world.see(Due((What.POLL, What.WATCHDOG)[choose(2)]))
        elif what == 9:
            world.request(Requested(0, list(Op)[choose(5)], "abcd"[choose(4)], "uid 7 pid 8", choose(2) == 0))
        elif what == 10:
            happen(world, choose, mortal=mortal)
        elif what > 12:
            world.one_turn(Luck())
        else:
            name = "abc"[choose(3)]
            world.answer(name, foreign=choose(6) == 0)
            world.end_warmup(name, well=choose(3) > 0)


def happen(world: World, choose: Callable[[int], int], *, mortal: bool) -> None:
    """What comes from outside: crashes, reloads, the end of the daemon."""
    name, kind = "abc"[choose(3)], choose(8)
    proc = world.proc(name)
    if kind < 5 and proc is not None and proc.main:
        world.end_main(name, proc, code=choose(2), kind=("crash", "config", "resource", "external")[choose(4)])
    elif kind == 5:
        world.reconfigure(world.spec, {**world.plans, name: f"p{choose(3)}"})
    elif kind == 6 and mortal:
        world.see(EndRequested("SIGTERM"))


@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 2**32), st.booleans())
def test_any_life_replays(tmp_path_factory: pytest.TempPathFactory, seed: int, warm: bool) -> None:
    folder = tmp_path_factory.mktemp("life")
    turns: list[Turn] = []
    kept = History(folder, pytest.fail)
    drive(recorded_world(kept, turns, warmup={"enabled": warm}), random.Random(seed).randrange, 150)
    kept.close(20)
    assert assert_replays(folder, turns)


def test_a_whole_day_replays_from_any_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_rows, "NODE_EVERY_S", 600.0)
    turns: list[Turn] = []
    kept = History(tmp_path, pytest.fail)
    chance = random.Random(1)
    world = recorded_world(kept, turns)
    for _ in range(20):
        drive(world, chance.randrange, 40, mortal=False)
        world.pass_time(200.0)
    kept.close(20)
    spans = [turns[0][1]]
    for _, now, *_ in turns:
        if now >= spans[-1] + 600.0:
            spans.append(now)
    assert len(spans) > 5
    assert {type(seen).__name__ for _, _, seen, *_ in turns} >= {"WarmedUp", "Swept", "Exited", "GateClosed", "Sampled"}
    assert [recording.seen[0][0] for recording in assert_replays(tmp_path, turns)] == spans
    assert b"hf_precious" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_the_loop_records_before_it_decides_and_a_new_daemon_begins_anew(tmp_path: Path) -> None:
    spec = node_spec(engine_spec("a", env={"SECRET": "x"}), engine_spec("b", autostart=False))
    turns: list[Turn] = []
    for daemon in range(2):
        kept = History(tmp_path, pytest.fail)
        tape = Tape(kept)
        clock = iter(100.0 + 0.1 * n for n in range(100))
        inbox: SimpleQueue[Observation] = SimpleQueue()
        first = replace(new_node(spec), pid=daemon)
        loop = Loop(first, inbox, tape, clock=lambda clock=clock: next(clock), observe=tape.observe)  # type: ignore[misc]
        for seen in (
            Booted(),
            Due(What.POLL),
            Requested(1, Op.START, "b", "uid 0 pid 1"),
            Reconfigured(replace(spec, engines={"b": spec.engines["b"]}), {"b": "p2"}, "uid 0 pid 2", 2),
            EndRequested("SIGTERM"),
        ):
            loop.turn(seen)
        kept.close(20)
        turns += tape.turns
    assert len(turns) == 10
    assert [recording.node.pid for recording in assert_replays(tmp_path, turns)] == [0, 1]
