"""Playbooks for the core: observations in, decisions out, and time is a number that the test owns.

    play = ready("a")
    play.see(Exited("a", 1, 0, None)).does(Abandon, Sweep).says("exited")
    play.see(Swept("a", 1)).is_(State.BACKOFF)

`does` compares the whole sequence of actions of the last observation without what is only told (`Record`) and answered
(`Reply`): those have `says` and `replies`. An action is expected by its class, or as a whole. Every observation is also
held against the invariants (see invariants.py).

GPUs answer every sweep at once with `cards`, so that plays that are not about GPUs need not speak of them: what comes
of the answer counts as the doing of the observation before it, and `does` leaves the probe's own actions out. A play
that sets `cards` to None answers by itself (`sweep`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from supervisord.core import node as reducer
from supervisord.core.gpu_samples import MEMORY_V2, GpuProcess, GpuReading, GpuSweep
from supervisord.core.lifecycle import deadlines
from supervisord.core.messages import (
    Action,
    Answer,
    Booted,
    Due,
    GpusSwept,
    Observation,
    Op,
    PortAnswered,
    Record,
    Reply,
    Requested,
    Sampled,
    Spawned,
    StartGpuHelper,
    SweepGpus,
    WarmedUp,
    What,
)
from supervisord.core.model import Engine, Gpu, Node, Phase, Process, Reason, Sample, State, Warmup
from supervisord.core.spec import EngineSpec, NodeSpec, RestartSpec, SupervisorSpec, WarmupSpec
from tests.core.invariants import Step, check

T0 = 1000.0
"""When every play begins (monotonic seconds)."""

PROBING: Final = StartGpuHelper | SweepGpus
"""What the probe is asked as a matter of routine."""

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


GIB: Final = 1 << 30


def card(uuid: str = "GPU-0", index: int | None = None, *, used_gib: float = 0.0, **values: Any) -> GpuReading:
    """An H200-like card of 80 GiB that answers; the number at the end of its UUID is its place."""
    place = index if index is not None else int(uuid[-1], 36)
    used = int(used_gib * GIB)
    base = GpuReading(
        uuid=uuid,
        pci_id=f"0000:{place + 16:02x}:00.0",
        index=place,
        name="NVIDIA H200",
        architecture=9,
        compute=(9, 0),
        brand=14,
        total_bytes=80 * GIB,
        used_bytes=used,
        free_bytes=80 * GIB - used,
        memory_version=MEMORY_V2,
        processes=(),
        persistence=True,
        utilization_percent=40.0,
        temperature_c=55.0,
        clock_reasons=0,
    )
    return replace(base, **values)


def holds(reading: GpuReading, *processes: GpuProcess) -> GpuReading:
    """The same card with these processes on it, which hold all that is in use there."""
    used = sum(process.used_bytes or 0 for process in processes)
    total = reading.total_bytes or 0
    return replace(reading, processes=processes, used_bytes=used, free_bytes=total - used)


def mine(gib: float = 70.0, engine: str = "a", generation: int = 1, pid: int = 4711) -> GpuProcess:
    """A process of an engine."""
    return GpuProcess(pid, int(gib * GIB), "VLLM::EngineCore", engine, generation)


def foreign(gib: float = 70.0, pid: int = 77) -> GpuProcess:
    """Somebody else's process."""
    return GpuProcess(pid, int(gib * GIB), "python")


def cards_of(spec: NodeSpec) -> tuple[GpuReading, ...]:
    """A card for each UUID in a configuration."""
    names = {name for engine in spec.engines.values() for name in engine.gpus if name.startswith("GPU-")}
    return tuple(card(name) for name in sorted(names))


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
        self.cards: tuple[GpuReading, ...] | None = cards_of(node.spec)

    # --- what happens ---

    def see(self, observation: Observation, *, at: float | None = None, after: float = 0.0) -> Play:
        """One observation, at an absolute time or some seconds later."""
        self.now = at if at is not None else self.now + after
        self.actions = self._step(observation)
        while self.cards is not None:
            asked = [action for action in self.actions if isinstance(action, SweepGpus)]
            telemetry = self.node.telemetry
            if asked and telemetry.asked_at is not None:
                self.actions += self._step(self._answer(asked[-1], self.cards))
            elif telemetry.next_at is not None and telemetry.next_at <= self.now:
                self.actions += self._step(Due(What.CLOCK))
            else:
                break
        self.told += [action for action in self.actions if isinstance(action, Record)]
        return self

    def _step(self, observation: Observation) -> tuple[Action, ...]:
        before = self.node
        self.node, actions = reducer.step(before, observation, self.now)
        check(Step(before, observation, self.now, self.node, actions))
        return actions

    def _answer(self, asked: SweepGpus, cards: tuple[GpuReading, ...], problem: int | None = None) -> GpusSwept:
        sweep = GpuSweep(self.now, cards, problem, slow=asked.slow, driver="580.1")
        return GpusSwept(asked.helper, asked.number, sweep)

    def sweep(self, *cards: GpuReading, after: float = 0.0, problem: int | None = None) -> Play:
        """A sweep is asked for, if none is outstanding, and sees these cards and nothing else."""
        self.now += after
        self.cards = None
        told: tuple[Action, ...] = ()
        if self.node.telemetry.asked_at is None:
            told = self.see(Due(What.POLL)).actions
        telemetry = self.node.telemetry
        assert telemetry.asked_at is not None, telemetry
        slow = telemetry.slow_at > self.now + 29.0
        self.see(self._answer(SweepGpus(telemetry.helper, telemetry.number, slow), cards, problem))
        self.actions = (*told, *self.actions)
        return self

    def clock(self, after: float = 0.0) -> Play:
        """The clock is due, some seconds later."""
        return self.see(Due(What.CLOCK), after=after)

    def wake(self) -> Play:
        """Go on to the next deadline of an engine."""
        while True:
            at = self.wakeup
            assert at is not None, "nothing is timed"
            timed = [due for engine in self.node.engines.values() for due in deadlines(engine)]
            if self.node.announce_ready_at is not None:
                timed.append(self.node.announce_ready_at)
            self.see(Due(What.CLOCK), at=max(at, self.now))
            if self.cards is None or not timed or at >= min(timed):
                return self

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
        probing = any(isinstance(one, PROBING) or one in (StartGpuHelper, SweepGpus) for one in expected)
        left_out = Record | Reply if probing else Record | Reply | PROBING
        done = [action for action in self.actions if not isinstance(action, left_out)]
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

    def gpu(self, uuid: str = "GPU-0") -> Gpu:
        """One GPU."""
        return self.node.gpus[uuid]

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
