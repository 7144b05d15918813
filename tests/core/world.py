"""A model of the world outside the core: processes that exist whether or not the daemon knows, lanes of actions that
are performed late, sources of observations that arrive out of step with each other, and a daemon that may be killed at
any point and begin again from what it last saved and what is found alive.

Actions wait in lanes, one of each engine for everything done to its processes, others for its port, warm-up, probes;
within a lane order is kept, between lanes it is not. What comes of them waits in sources: the answers of each lane and
the exits of each engine, again ordered only within. Nothing happens by itself: the state machine chooses.

The GPUs are those of the configuration. A sweep sees the processes that live, and for a while the memory of those that
died; a probe that hangs answers no more until it is killed, and one that is stuck not even that ends.

The contract that the adapters keep, and this world with them: a launch is answered exactly once; `Spawned` comes before
`Exited` of the same generation; `Sweep` reaches every process of its engine; `Found` names each engine at most once;
nothing is heard of an engine that was forgotten when one of the same name is configured again (its count begins anew).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from supervisord.core import durable
from supervisord.core import node as reducer
from supervisord.core.gpu_samples import GpuProcess, GpuReading, GpuSweep
from supervisord.core.messages import (
    Abandon,
    Action,
    Adopt,
    AnnounceReady,
    Booted,
    CanaryEnded,
    Due,
    Exited,
    Finish,
    GateClosed,
    GpuHelperEnded,
    GpuOp,
    GpuRequested,
    GpusSwept,
    KeepEvidence,
    KillGpuHelper,
    Launch,
    MeasureProgress,
    Observation,
    PersistenceSet,
    PortAnswered,
    PortForeign,
    Probe,
    Progressed,
    Reconfigured,
    Record,
    Reply,
    Requested,
    Sampled,
    SendCanary,
    SetPersistence,
    Spawned,
    SpawnFailed,
    StartGpuHelper,
    Sweep,
    SweepGpus,
    Swept,
    Terminate,
    WarmedUp,
    WarmUp,
    WatchPort,
    What,
    XidSeen,
)
from supervisord.core.model import (
    ExitClass,
    Failed,
    Found,
    Node,
    Process,
    Progress,
    Ready,
    Reason,
    Sample,
    Warmup,
)
from supervisord.core.spec import NodeSpec
from tests.core.invariants import (
    WORLD_INVARIANTS,
    Step,
    check,
    few_probes_live,
    forgotten_means_gone,
    ready_is_said_once,
    what_was_saved_survives,
)
from tests.core.play import GIB, card, holds

T0 = 1000.0

FAIR_TURNS = 2000
"""A fair world that is not done after so many turns never will be."""


@dataclass(frozen=True)
class Core:
    """The functions under test; mutants have their own."""

    step: Callable[[Node, Observation, float], tuple[Node, tuple[Action, ...]]] = reducer.step
    wakeup: Callable[[Node], float | None] = reducer.wakeup
    save: Callable[[Node], dict[str, Any]] = durable.save
    restore: Callable[..., dict[str, Any]] = durable.restore
    save_gpus: Callable[[Node], dict[str, Any]] = durable.save_gpus
    restore_gpus: Callable[[Mapping[str, Any]], dict[str, Any]] = durable.restore_gpus


def core_of(modules: Mapping[str, ModuleType]) -> Core:
    """A core made of other modules."""
    node, kept = modules["node"], modules["durable"]
    return Core(node.step, node.wakeup, kept.save, kept.restore, kept.save_gpus, kept.restore_gpus)


@dataclass
class Proc:
    """The processes of one generation."""

    generation: int
    plan_id: str
    pid: int
    main: bool = True
    children: int = 1
    swallows: int = 0
    """SIGTERMs that have no effect, because the engine initialises."""
    deaf: bool = False
    """SIGTERM has no effect at all: it waits for its clients without bound."""
    stuck: bool = False
    """SIGKILL has no effect: it sits in the kernel."""
    watched: bool = False
    """The present daemon hears of its exit."""
    on: tuple[str, ...] = ()
    """UUIDs of its GPUs."""


@dataclass(frozen=True)
class Luck:
    """How the next launch of an engine goes."""

    outcome: str = "spawn"
    swallows: int = 0
    deaf: bool = False
    children: int = 1


@dataclass(frozen=True)
class Rest:
    """Memory of a process that died, which comes back at `until`."""

    engine: str
    generation: int
    pid: int
    on: tuple[str, ...]
    until: float


@dataclass
class GpuHelper:
    """A probe process."""

    hangs: bool = False
    stuck: bool = False
    killed: bool = False


@dataclass(frozen=True)
class Board:
    """How the GPUs are. `problem`: NVML does not work at all; `lingers_s`: until memory of the dead comes back."""

    problem: int | None = None
    lost: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    """Calls for these fail with a code that blames nobody."""
    broken: frozenset[str] = frozenset()
    """The driver asks for a reset."""
    astray: bool = False
    """CUDA counts differently: processes run on another GPU than they were given."""
    silent: bool = False
    """No process list."""
    lingers_s: float = 0.1
    persistence: bool = True


CRASH_TAILS: Mapping[str, tuple[str, ...]] = {
    "crash": ("RuntimeError: Engine core initialization failed.",),
    "config": ("ValueError: To serve at least one request with the model's max seq len (9) no",),
    "resource": ("OSError: [Errno 98] Address already in use",),
    "external": ("HfHubHTTPError: 429 Client Error: Too Many Requests",),
}

Lane = tuple[str, str]

PROBE: Lane = ("", "gpu")
"""What is asked of the GPU probe, in order, and what comes of it."""


@dataclass
class World:
    """Everything that exists, the daemon included."""

    spec: NodeSpec
    plans: dict[str, str]
    core: Core = field(default_factory=Core)
    now: float = T0
    node: Node = field(init=False)
    procs: dict[str, list[Proc]] = field(default_factory=dict)
    lanes: dict[Lane, deque[tuple[Action, str]]] = field(default_factory=dict)
    sources: dict[Lane, deque[Observation]] = field(default_factory=dict)
    heard: list[Observation] = field(default_factory=list)
    """What was delivered to the present daemon."""
    watching: dict[str, int] = field(default_factory=dict)
    warming: dict[str, int] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    saved_before: dict[str, Any] = field(default_factory=dict)
    announced: int = 0
    over: bool = False
    """The daemon has finished."""
    spent: dict[str, list[float]] = field(default_factory=dict)
    good: dict[str, str] = field(default_factory=dict)
    next_pid: int = 100
    requests: int = 0
    turned_at: float = T0
    spawned: dict[str, int] = field(default_factory=dict)
    """The launcher's records: the last generation of each engine that was ever spawned."""
    strangers: bool = False
    """An engine was found that is not configured: it is stopped by the defaults, which are slow."""
    adoptable: set[str] = field(default_factory=set)
    """Engines whose main process was found alive by the present daemon."""
    board: Board = Board()
    rests: list[Rest] = field(default_factory=list)
    probes: dict[int, GpuHelper] = field(default_factory=dict)
    """Those of the present daemon that live."""
    saved_gpus: dict[str, Any] = field(default_factory=dict)
    saved_gpus_before: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start_daemon(same_boot=True)

    # --- the daemon ---

    def reboot(self) -> None:
        """The machine starts anew: nothing lives, only the disk is left."""
        self.procs, self.spent, self.rests = {}, {}, []
        self.board = Board(broken=self.board.broken)
        self.start_daemon(same_boot=False)

    def start_daemon(self, *, same_boot: bool) -> None:
        """A new daemon, from what was saved and what is found."""
        self.lanes, self.sources, self.heard = {}, {}, []
        self.watching, self.warming = {}, {}
        self.announced, self.over = 0, False
        saved = json.loads(json.dumps(self.saved))
        engines = self.core.restore(
            self.spec, self.plans, saved, self.now, same_boot=same_boot, spawned=dict(self.spawned)
        )
        self.probes = {}
        gpus = self.core.restore_gpus(json.loads(json.dumps(self.saved_gpus)))
        self.node = Node(spec=self.spec, engines=engines, gpus=gpus)
        for proc in self._all():
            proc.watched = False
        found = self._found()
        self.strangers = any(left.engine not in self.spec.engines for left in found)
        self.see(Booted(tuple(found)))

    def _found(self) -> list[Found]:
        found = []
        self.adoptable = {name for name, procs in self.procs.items() for proc in procs if proc.main}
        for name, procs in self.procs.items():
            for proc in procs:
                main = Process(proc.pid, 1, "boot") if proc.main else None
                left = tuple(f"pid {proc.pid + n}" for n in range(int(proc.main) + proc.children))
                found.append(Found(name, proc.generation, main, left, proc.plan_id))
        return found

    def kill_daemon(self, *, persisted: bool) -> None:
        """SIGKILL of the daemon: what waited in lanes and sources is lost, perhaps the last state too."""
        if not persisted:
            self.saved, self.saved_gpus = self.saved_before, self.saved_gpus_before
            self.spent = {name: [at for at in times if at < self.turned_at] for name, times in self.spent.items()}
        before = self.node
        self.start_daemon(same_boot=True)
        if persisted:
            what_was_saved_survives(self, before, self.node)

    def see(self, seen: Observation) -> None:
        """One turn of the loop, held against every invariant."""
        before, self.turned_at = self.node, self.now
        self.node, actions = self.core.step(before, seen, self.now)
        self.heard.append(seen)
        self._count(before, seen, actions)
        for action in actions:
            self._submit(action)
        check(Step(before, seen, self.now, self.node, actions, self.core.wakeup))
        self.check()
        for name in before.engines.keys() - self.node.engines.keys():
            self._forget(name)
        self.saved_before, self.saved = self.saved, self.core.save(self.node)
        self.saved_gpus_before, self.saved_gpus = self.saved_gpus, self.core.save_gpus(self.node)

    def _forget(self, name: str) -> None:
        self.heard = [seen for seen in self.heard if getattr(seen, "engine", None) != name]
        for queues in (self.sources, self.lanes):
            for (engine, _), waiting in queues.items():
                if engine == name:
                    waiting.clear()

    def check(self) -> None:
        """The invariants that need the world."""
        for engine in self.node.engines.values():
            for invariant in WORLD_INVARIANTS:
                invariant(self.node, self.now, self, engine)
        ready_is_said_once(self, self.node)
        few_probes_live(self, self.node)
        forgotten_means_gone(self, self.node, self.procs)

    def _count(self, before: Node, seen: Observation, actions: tuple[Action, ...]) -> None:
        """Keep our own books of what the invariants ask for."""
        for action in actions:
            if isinstance(action, Record) and action.kind == "restart" and action.engine is not None:
                last = self.node.engines[action.engine].last_exit
                if (last is None or last.kind is not ExitClass.EXTERNAL) and not self._worked(action.engine):
                    self.spent.setdefault(action.engine, []).append(self.now)
        for name, engine in self.node.engines.items():
            old = before.engines.get(name)
            forgiven = old is None or (isinstance(old.phase, Failed) and isinstance(seen, Reconfigured))
            if forgiven or (isinstance(seen, Requested) and seen.engine == name and seen.op.value == "reset"):
                self.spent.pop(name, None)
            if isinstance(engine.phase, Ready):
                self.good[name] = engine.running_plan_id or ""

    def _submit(self, action: Action) -> None:
        match action:
            case AnnounceReady():
                self.announced += 1
            case Finish():
                self.over = True
            case Record() | Reply():
                pass
            case StartGpuHelper() | SweepGpus() | KillGpuHelper() | SetPersistence():
                self.lanes.setdefault(PROBE, deque()).append((action, ""))
            case _:
                lane = (action.engine, _LANE.get(type(action), "process"))
                self.lanes.setdefault(lane, deque()).append((action, self.plans.get(action.engine, "")))

    def _say(self, engine: str, source: str, seen: Observation) -> None:
        self.sources.setdefault((engine, source), deque()).append(seen)

    # --- GPUs ---

    def _probing(self, action: StartGpuHelper | SweepGpus | KillGpuHelper | SetPersistence, luck: Luck) -> None:
        """What the probe is asked; one that hangs or is gone answers nothing."""
        probe = self.probes.get(action.helper)
        match action:
            case StartGpuHelper():
                if luck.outcome == "crash":
                    self._say(*PROBE, GpuHelperEnded(action.helper, "cannot start it"))
                else:
                    self.probes[action.helper] = GpuHelper()
            case KillGpuHelper():
                if probe is not None:
                    probe.killed = True
                    self.end_killed_probes()
            case _ if probe is None or probe.hangs:
                pass
            case SweepGpus():
                self._say(*PROBE, GpusSwept(action.helper, action.number, self._sweep_of(slow=action.slow)))
            case SetPersistence():
                done = luck.outcome == "spawn"
                if done:
                    self.board = replace(self.board, persistence=action.on)
                self._say(*PROBE, PersistenceSet(action.uuid, action.on, None if done else 4))

    def end_probe(self, helper: int) -> None:
        """It is gone, and that is told."""
        if self.probes.pop(helper, None) is not None:
            self._say(*PROBE, GpuHelperEnded(helper, "it ended"))

    def end_killed_probes(self) -> None:
        """What was killed and is not stuck any more ends."""
        for helper, probe in list(self.probes.items()):
            if probe.killed and not probe.stuck:
                self.end_probe(helper)

    @property
    def cards(self) -> tuple[str, ...]:
        """The GPUs of this machine; the second is nobody's."""
        return ("GPU-0", "GPU-1")

    @property
    def helpers(self) -> int:
        """Probe processes of this daemon that live."""
        return len(self.probes)

    def _sweep_of(self, *, slow: bool) -> GpuSweep:
        if self.board.problem is not None:
            return GpuSweep(self.now, (), self.board.problem, slow=slow)
        there = [uuid for uuid in self.cards if uuid not in self.board.lost]
        return GpuSweep(self.now, tuple(self._reading(uuid, n) for n, uuid in enumerate(there)), slow=slow)

    def _reading(self, uuid: str, index: int) -> GpuReading:
        self.rests = [rest for rest in self.rests if rest.until > self.now]
        living = [(name, p.generation, p.pid, p.on) for name, procs in self.procs.items() for p in procs]
        dead = [(rest.engine, rest.generation, rest.pid, rest.on) for rest in self.rests]
        used = [
            GpuProcess(pid, 20 * GIB, "vllm", name, generation)
            for name, generation, pid, on in (*living, *dead)
            if (uuid in on) is not (self.board.astray and bool(on))
        ]
        reading = replace(
            holds(card(uuid, index), *used),
            pci_id=f"0000:0{self.cards.index(uuid)}:00.0",
            persistence=self.board.persistence,
        )
        if self.board.silent:
            reading = replace(reading, processes=None)
        if uuid in self.board.failing:
            return GpuReading(uuid, reading.pci_id, index, error=999)
        return replace(reading, recovery_action=1 if uuid in self.board.broken else 0)

    def xid(self, uuid: str, number: int | None) -> None:
        """The kernel reports a fault, of the newest process there if there is one."""
        whose = next(((name, proc) for name, procs in self.procs.items() for proc in procs if uuid in proc.on), None)
        pci_id = f"0000:0{self.cards.index(uuid)}:00.0"
        seen = XidSeen(self.now, pci_id, number, "kmsg")
        if whose is not None:
            name, proc = whose
            seen = replace(seen, pid=proc.pid, engine=name, generation=proc.generation)
        self._say("", "kmsg", seen)

    def gpu_request(self, op: GpuOp, gpu: str | None) -> None:
        """An operator asks something of GPUs."""
        self.requests += 1
        self.see(GpuRequested(self.requests, op, gpu, "uid 1000"))

    # --- what the invariants ask ---

    def _all(self) -> list[Proc]:
        return [proc for procs in self.procs.values() for proc in procs]

    def generations(self, engine: str) -> set[int]:
        """Generations of which some process lives."""
        return {proc.generation for proc in self.procs.get(engine, ())}

    def plan_of(self, engine: str) -> str | None:
        """The launch plan of the main process that lives."""
        plans = [proc.plan_id for proc in self.procs.get(engine, ()) if proc.main]
        return plans[0] if plans else None

    def budgeted(self, engine: str) -> list[float]:
        """When restarts that cost budget were decided, of plans that had never worked."""
        return self.spent.get(engine, [])

    def _worked(self, engine: str) -> bool:
        return self.good.get(engine) == self.plans.get(engine)

    # --- what happens ---

    def proc(self, engine: str) -> Proc | None:
        """The newest generation of an engine that lives."""
        procs = self.procs.get(engine, [])
        return procs[-1] if procs else None

    def busy_lanes(self) -> list[Lane]:
        """Lanes with something to perform."""
        return sorted(lane for lane, waiting in self.lanes.items() if waiting)

    def busy_sources(self) -> list[Lane]:
        """Sources with something to deliver."""
        return sorted(source for source, waiting in self.sources.items() if waiting)

    def perform(self, lane: Lane, luck: Luck) -> None:
        """Do the next thing in a lane, which has one."""
        action, plan_id = self.lanes[lane].popleft()
        match action:
            case StartGpuHelper() | SweepGpus() | KillGpuHelper() | SetPersistence():
                self._probing(action, luck)
            case _:
                self._perform(action, plan_id, luck)
        self.check()

    def _perform(self, action: Action, plan_id: str, luck: Luck) -> None:
        match action:
            case Launch():
                self._launch(action, plan_id, luck)
            case Adopt():
                self._adopt(action)
            case Terminate():
                self._terminate(action)
            case Sweep():
                self._sweep(action)
            case WatchPort():
                self.watching[action.engine] = action.generation
            case WarmUp():
                self.warming[action.engine] = action.generation
            case MeasureProgress():
                progress = Progress(read_bytes=int(self.now), memory_bytes=0, log_lines=1)
                self._say(action.engine, "progress", Progressed(action.engine, action.generation, progress))
            case Probe():
                self._probe(action, luck)
            case SendCanary():
                self._canary(action, luck)
            case Abandon():
                self._abandon(action)
            case KeepEvidence():
                pass
            case _:
                raise TypeError(action)

    def _abandon(self, action: Abandon) -> None:
        for kept in (self.watching, self.warming):
            if kept.get(action.engine) == action.generation:
                del kept[action.engine]

    def _launch(self, action: Launch, plan_id: str, luck: Luck) -> None:
        name, generation = action.engine, action.generation
        if luck.outcome == "gate":
            self._say(name, "process", GateClosed(name, generation, "port_held", "pid 4 has it"))
        elif luck.outcome in ("config", "crash"):
            self._say(name, "process", SpawnFailed(name, generation, ExitClass(luck.outcome), "cannot spawn"))
        else:
            pid, self.next_pid = self.next_pid, self.next_pid + 10
            proc = Proc(generation, plan_id, pid, children=luck.children, swallows=luck.swallows, deaf=luck.deaf)
            proc.watched = True
            proc.on = self._given(name, action.devices)
            self.spawned[name] = generation
            self.procs.setdefault(name, []).append(proc)
            self._say(name, "process", Spawned(name, generation, Process(pid, 1, "boot")))

    def _given(self, name: str, devices: tuple[int, ...] | None) -> tuple[str, ...]:
        there = [uuid for uuid in self.cards if uuid not in self.board.lost]
        if devices is not None:
            return tuple(there[index] for index in devices if index < len(there))
        names = self.spec.engines[name].gpus if name in self.spec.engines else ()
        return tuple(uuid for uuid in names if uuid in self.cards)

    def _adopt(self, action: Adopt) -> None:
        mains = [proc for proc in self.procs.get(action.engine, ()) if proc.main]
        for proc in mains:
            proc.watched = True
        if not mains and action.engine in self.adoptable:
            self._say(action.engine, "exit", Exited(action.engine, action.generation, None, None))

    def _terminate(self, action: Terminate) -> None:
        for proc in self.procs.get(action.engine, ()):
            if proc.generation != action.generation or not proc.main or proc.deaf or proc.stuck:
                continue
            if proc.swallows > 0:
                proc.swallows -= 1
            else:
                self.end_main(action.engine, proc, code=0)

    def _sweep(self, action: Sweep) -> None:
        left = []
        for proc in list(self.procs.get(action.engine, ())):
            if proc.stuck:
                left.append(f"pid {proc.pid}")
                continue
            if proc.main:
                self.end_main(action.engine, proc, signal=9)
            proc.children = 0
        self.bury(action.engine)
        self._say(action.engine, "process", Swept(action.engine, action.generation, tuple(left)))

    def _probe(self, action: Probe, luck: Luck) -> None:
        sample = Sample(at=self.now, health_error="timeout")
        if luck.outcome != "gate":
            busy = 1 if luck.deaf else 0
            sample = Sample(at=self.now, health_status=200, running=busy, waiting=0)
        self._say(action.engine, "probe", Sampled(action.engine, action.generation, sample))

    def _canary(self, action: SendCanary, luck: Luck) -> None:
        """It comes back, is refused, or hangs for as long as the engine lives."""
        if luck.deaf:
            return
        ok = luck.outcome != "crash"
        self._say(action.engine, "canary", CanaryEnded(action.engine, action.generation, ok=ok, sane=True))

    def end_main(
        self, engine: str, proc: Proc, *, code: int | None = None, signal: int | None = None, kind: str = "crash"
    ) -> None:
        """The main process ends; children may go on."""
        proc.main = False
        if proc.watched:
            self._say(engine, "exit", Exited(engine, proc.generation, code, signal, CRASH_TAILS[kind]))
        self.bury(engine)

    def bury(self, engine: str) -> None:
        """Forget generations of which nothing lives; their GPU memory comes back a little later."""
        self.rests += [
            Rest(engine, proc.generation, proc.pid, proc.on, self.now + self.board.lingers_s)
            for proc in self.procs.get(engine, ())
            if proc.on and not proc.main and not proc.children
        ]
        self.procs[engine] = [proc for proc in self.procs.get(engine, ()) if proc.main or proc.children]

    def deliver(self, source: Lane) -> None:
        """The daemon hears the next thing from a source, unless it has just forgotten that engine."""
        if self.sources[source]:
            self.see(self.sources[source].popleft())

    def answer(self, engine: str, *, foreign: bool = False) -> None:
        """The port of a watched, living engine answers (or somebody else does)."""
        generation, proc = self.watching.get(engine), self.proc(engine)
        if generation is None or proc is None or not proc.main or proc.generation != generation:
            return
        del self.watching[engine]
        seen: Observation = PortAnswered(engine, generation)
        if foreign:
            seen = PortForeign(engine, generation, "pid 9 (nginx)")
        else:
            proc.swallows = 0
        self._say(engine, "port", seen)

    def end_warmup(self, engine: str, *, well: bool) -> None:
        """The warm-up of an engine ends."""
        generation = self.warming.pop(engine, None)
        if generation is not None:
            problem = None if well else Reason("warmup_failed", "no answer")
            self._say(engine, "warmup", WarmedUp(engine, generation, Warmup(1.0, 1.0, 2, problem)))

    def request(self, seen: Requested) -> None:
        """An operator asks; requests are numbered here."""
        self.requests += 1
        self.see(replace(seen, request=self.requests))

    def reconfigure(self, spec: NodeSpec, plans: dict[str, str]) -> None:
        """A validated configuration arrives."""
        self.spec, self.plans = spec, plans
        self.see(Reconfigured(spec, plans, "uid 1000"))

    # --- time ---

    def pass_time(self, seconds: float) -> None:
        """Time passes; the loop looks at the clock whenever that is due."""
        end = self.now + seconds
        while (at := self.core.wakeup(self.node)) is not None and at <= end and not self.over:
            self.now = max(self.now, at)
            self.see(Due(What.CLOCK))
        self.now = max(self.now, end)

    def next_clock(self, late_s: float) -> None:
        """On to the next deadline, seen a little late."""
        at = self.core.wakeup(self.node)
        if at is not None:
            self.now = max(self.now, at + late_s)
            self.see(Due(What.CLOCK))

    # --- a fair world ---

    def copy(self) -> World:
        """The same world, to find out what would become of it."""
        twin = copy(self)
        twin.procs = {name: [replace(proc) for proc in procs] for name, procs in self.procs.items()}
        twin.lanes = {lane: deque(waiting) for lane, waiting in self.lanes.items()}
        twin.sources = {source: deque(waiting) for source, waiting in self.sources.items()}
        twin.spent = {name: list(times) for name, times in self.spent.items()}
        twin.heard, twin.watching, twin.warming = list(self.heard), dict(self.watching), dict(self.warming)
        twin.spawned = dict(self.spawned)
        twin.probes, twin.rests = {n: replace(probe) for n, probe in self.probes.items()}, list(self.rests)
        twin.good, twin.adoptable = dict(self.good), set(self.adoptable)
        return twin

    def heal(self) -> None:
        """From now on everything that gets SIGKILL dies, and the driver works."""
        for proc in self._all():
            proc.stuck = False
        for probe in self.probes.values():
            probe.stuck = False
        self.end_killed_probes()
        self.board = Board()

    def one_turn(self, luck: Luck) -> bool:
        """All that waits is performed and one thing is heard; everything answers. False: nothing was waiting."""
        lanes = self.busy_lanes()
        for lane in lanes:
            self.perform(lane, luck)
        for name in sorted(self.node.engines):
            self.answer(name)
            self.end_warmup(name, well=True)
        sources = self.busy_sources()
        if sources:
            self.deliver(sources[0])
        return bool(lanes or sources)

    def be_fair(self, done: Callable[[World], bool], bound_s: float) -> float | None:
        """Everything is performed, heard and answered at once until `done`; None: that is not within bounds."""
        end = self.now + bound_s
        for _ in range(FAIR_TURNS):
            if done(self):
                return self.now
            if not self.one_turn(Luck()):
                at = self.core.wakeup(self.node)
                if at is None or at > end:
                    return None
                self.now = max(self.now, at)
                self.see(Due(What.CLOCK))
        return None


_LANE: Mapping[type, str] = {
    WatchPort: "port",
    WarmUp: "warmup",
    Probe: "probe",
    MeasureProgress: "progress",
}
