"""Playbooks for the core: observations in, decisions out, and time is a number that the test owns.

    play = ready("a")
    play.see(Exited("a", 1, 0, None)).does(Abandon, Sweep).says("exited")
    play.see(Swept("a", 1)).is_(State.BACKOFF)

`does` compares the whole sequence of actions of the last observation without what is only told (`Record`) and answered
(`Reply`): those have `says` and `replies`. An action is expected by its class, or as a whole. Every observation is also
held against the invariants (see invariants.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from supervisord.core import node as reducer
from supervisord.core.messages import (
    Action,
    Answer,
    Booted,
    Due,
    Observation,
    Op,
    PortAnswered,
    Record,
    Reply,
    Requested,
    Sampled,
    Spawned,
    WarmedUp,
    What,
)
from supervisord.core.model import Engine, Node, Phase, Process, Reason, Sample, State, Warmup
from supervisord.core.spec import EngineSpec, NodeSpec, RestartSpec, SupervisorSpec, WarmupSpec
from tests.core.invariants import Step, check

T0 = 1000.0
"""When every play begins (monotonic seconds)."""

P = TypeVar("P", bound=Phase)

GOOD = Warmup(first_ms=28.0, settled_ms=10.0, rounds=3)
BAD = Warmup(first_ms=None, settled_ms=None, rounds=0, problem=Reason("warmup_failed", "no answer"))


def engine_spec(name: str = "a", **keys: Any) -> EngineSpec:
    """One engine. `restart`, `warmup` and `probe` may be given as mappings of their keys."""
    for table, kind in (("restart", RestartSpec), ("warmup", WarmupSpec)):
        if isinstance(keys.get(table), Mapping):
            keys[table] = kind(**keys[table])
    return EngineSpec(**{"name": name, "model": "m", "port": 8000 + ord(name[0]) - ord("a"), **keys})


def node_spec(*engines: EngineSpec, **supervisor: Any) -> NodeSpec:
    """A whole configuration."""
    return NodeSpec(supervisor=SupervisorSpec(**supervisor), engines={e.name: e for e in engines})


def plan_ids(spec: NodeSpec, **changed: str) -> dict[str, str]:
    """Launch plans by engine: "p1" unless said otherwise."""
    return {name: changed.get(name, "p1") for name in spec.engines}


def new_node(spec: NodeSpec, **plans: str) -> Node:
    """A node that has not been booted: every engine stopped, wanted as `autostart` says."""
    plan_of = plan_ids(spec, **plans)
    engines = {
        name: Engine(spec=engine, plan_id=plan_of[name], since=T0, wanted=engine.autostart)
        for name, engine in spec.engines.items()
    }
    return Node(spec=spec, engines=engines)


def process(generation: int, pid: int | None = None) -> Process:
    """The process of a generation."""
    return Process(pid=pid if pid is not None else 100 + generation, start_ticks=7, boot_id="boot")


class Play:
    """A node under test, and the clock."""

    def __init__(self, node: Node, now: float = T0) -> None:
        self.node = node
        self.now = now
        self.actions: tuple[Action, ...] = ()
        self.told: list[Record] = []

    # --- what happens ---

    def see(self, observation: Observation, *, at: float | None = None, after: float = 0.0) -> Play:
        """One observation, at an absolute time or some seconds later."""
        self.now = at if at is not None else self.now + after
        before = self.node
        self.node, self.actions = reducer.step(before, observation, self.now)
        check(Step(before, observation, self.now, self.node, self.actions))
        self.told += [action for action in self.actions if isinstance(action, Record)]
        return self

    def clock(self, after: float = 0.0) -> Play:
        """The clock is due, some seconds later."""
        return self.see(Due(What.CLOCK), after=after)

    def wake(self) -> Play:
        """Go on to the next deadline."""
        at = self.wakeup
        assert at is not None, "nothing is timed"
        return self.see(Due(What.CLOCK), at=max(at, self.now))

    def ask(self, op: Op, engine: str = "a", *, now: bool = False) -> Play:
        """An operator asks for something."""
        return self.see(Requested(1, op, engine, "uid 1000", at_once=now))

    def sample(self, engine: str = "a", *, running: int | None, waiting: int | None, at: float | None = None) -> Play:
        """A look at the engine succeeded, at `at` (now)."""
        seen = Sample(at=self.now if at is None else at, health_status=200, running=running, waiting=waiting)
        return self.see(Sampled(engine, self.engine(engine).generation, seen))

    def spawn(self, engine: str = "a") -> Play:
        """The outstanding launch succeeds."""
        generation = self.engine(engine).launching
        assert generation is not None, f"{engine} is not being launched"
        return self.see(Spawned(engine, generation, process(generation)))

    def answer(self, engine: str = "a") -> Play:
        """`/health` is 200."""
        return self.see(PortAnswered(engine, self.engine(engine).generation))

    def warm(self, engine: str = "a", warmup: Warmup = GOOD) -> Play:
        """The warm-up ends."""
        return self.see(WarmedUp(engine, self.engine(engine).generation, warmup))

    def up(self, engine: str = "a") -> Play:
        """From an outstanding launch to ready."""
        return self.spawn(engine).answer(engine).warm(engine).is_(State.READY, engine)

    # --- what is expected ---

    def does(self, *expected: type[Action] | Action) -> Play:
        """These are all the actions of the last observation, in this order, but for Record and Reply."""
        done = [action for action in self.actions if not isinstance(action, Record | Reply)]
        wanted = list(expected)
        same = len(done) == len(wanted) and all(
            type(action) is want if isinstance(want, type) else action == want
            for action, want in zip(done, wanted, strict=True)
        )
        assert same, f"expected {wanted}, got {done}"
        return self

    def does_nothing(self) -> Play:
        """Not even told."""
        assert self.actions == ()
        return self

    def says(self, *kinds: str) -> Play:
        """These are all the kinds of record of the last observation, in this order."""
        told = [action.kind for action in self.actions if isinstance(action, Record)]
        assert told == list(kinds), f"expected {kinds}, got {told}"
        return self

    def replies(self, answer: Answer, *parts: str) -> Play:
        """Exactly one answer, whose message has these parts."""
        replies = [action for action in self.actions if isinstance(action, Reply)]
        assert len(replies) == 1, f"expected one reply, got {replies}"
        assert replies[0].answer is answer, replies[0]
        for part in parts:
            assert part in replies[0].message, f"{part!r} not in {replies[0].message!r}"
        return self

    def is_(self, state: State, engine: str = "a") -> Play:
        """The state that people see."""
        assert self.engine(engine).state is state, self.engine(engine).phase
        return self

    # --- what can be looked at ---

    def engine(self, name: str = "a") -> Engine:
        """One engine."""
        return self.node.engines[name]

    def phase(self, kind: type[P], name: str = "a") -> P:
        """The phase of an engine, which must be of this kind."""
        phase = self.engine(name).phase
        assert isinstance(phase, kind), phase
        return phase

    def record(self, kind: str) -> Record:
        """The one record of this kind that the last observation caused."""
        found = [action for action in self.actions if isinstance(action, Record) and action.kind == kind]
        assert len(found) == 1, f"{len(found)} records of kind {kind}"
        return found[0]

    @property
    def wakeup(self) -> float | None:
        """When the clock is due."""
        return reducer.wakeup(self.node)

    def change(self, name: str = "a", **fields: Any) -> Play:
        """Set fields of an engine by hand, for states that are tedious to reach."""
        engines = {**self.node.engines, name: replace(self.engine(name), **fields)}
        self.node = replace(self.node, engines=engines)
        return self


def stopped(*engines: EngineSpec, **supervisor: Any) -> Play:
    """A booted node whose engines are stopped and not wanted."""
    specs = engines or (engine_spec(),)
    spec = node_spec(*(replace(e, autostart=False) for e in specs), **supervisor)
    return Play(new_node(spec)).see(Booted())


def launching(*engines: EngineSpec, **supervisor: Any) -> Play:
    """A booted node whose engines are wanted: those that may are being launched."""
    return Play(new_node(node_spec(*(engines or (engine_spec(),)), **supervisor))).see(Booted())


def starting(**keys: Any) -> Play:
    """Engine "a" runs and does not answer yet."""
    return launching(engine_spec(**keys)).spawn()


def warming(**keys: Any) -> Play:
    """Engine "a" answers and is being warmed up."""
    return starting(**keys).answer()


def ready(**keys: Any) -> Play:
    """Engine "a" serves."""
    return warming(**keys).warm()
