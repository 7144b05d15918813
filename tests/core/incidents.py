"""Incidents as text: what an engine says over time, and what the core decided, to be reviewed as a diff.

    # A12 what it is about
    must: NAME ...                told at least once; NAME<=N: at most N times, NAME>=N: at least
    must not: NAME ...            never

    > engine KEY=JSON ...         keys of [engine.X]; tables as restart.KEY; the engine then becomes ready
    > boots KEY=JSON ...          the same, but told from the first second, whatever becomes of it
    > says KEY=JSON ...           what looks see from now on (see Says)
    > does KEY=JSON ...           how its processes start and end from now on (see Does)
    > because TEXT                what they say about it: last line of output, message of a gate, refusal of a warm-up
    > gpus KEY=JSON ...           how the GPUs are from now on, and the probe that looks at them (see Gpus)
    > xid NUMBER KEY=JSON ...     the driver reports a fault (gpu=, source=, mine=true: of a process of this engine)
    > gpu OP NAME                 an operator asks of GPUs: clear GPU-0, release
    > window SECONDS              the maintenance window opens for so long
    > pass SECONDS                polls every 5 s, deadlines, canaries and closer looks
    > exits CODE                  the main process ends; -9: by SIGKILL
    > asks OP                     an operator asks: start, stop, restart, drain, reset
    > reloads PLAN KEY=JSON ...   a reload with this launch plan ("p1" is the first) and these keys
      +12.3 ...                   and what came of it

A NAME is KIND or KIND[REASON] of a record, an action, or `budget`: a restart was counted. The lines that came of it are
written by `play`; no incident may launch while anything of an earlier generation lives. test_transcripts.py is the
finer tool: each observation by itself.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any, Final

from supervisord.core.gpu_samples import GpuProcess, GpuReading, GpuSweep
from supervisord.core.messages import (
    Action,
    Booted,
    CanaryEnded,
    Due,
    Exited,
    GateClosed,
    GpuHelperEnded,
    GpuOp,
    GpuRequested,
    GpusSwept,
    KillGpuHelper,
    Launch,
    MeasureProgress,
    Observation,
    Op,
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
    StartGpuHelper,
    Sweep,
    SweepGpus,
    Swept,
    Terminate,
    WarmedUp,
    WarmUp,
    WatchPort,
    What,
    WindowOpened,
    XidSeen,
)
from supervisord.core.model import Progress, Reason, Sample, State, Warmup
from supervisord.core.spec import GpuSpec
from tests.core.looks import page, rank, spec
from tests.core.play import GOOD, T0, Play, card, holds, launching, new_node, node_spec, process

POLL_S = 5.0
TIMEOUT_S = 15.0
MIB: Final = 1024**2
FOLDED_FROM: Final = 4
"""So many equal lines in a row are written as one."""
ROUTINE: Final = Probe | SendCanary | WatchPort | WarmUp | MeasureProgress | SweepGpus
"""Not written down."""


@dataclass(frozen=True)
class Says:
    """What the simulated engine says.

    `health`: a status, or refused, timeout, malformed. `metrics`: false for none. `rate`: steps per second of the first
    ranks, a list for several. `canary`: ok, hang, garbage, or an HTTP status; `canary_s`: how long it takes. `stale`:
    gauges that stay as they are until the engine steps. `free`, `total`: blocks; `stated`: /health tells the free ones.
    `host`: MiB of host memory as of now, `grows`: MiB per hour, `host_limit`: MiB where it would end.
    """

    health: Any = 200
    metrics: bool = True
    counters: bool = True
    running: Any = 0
    waiting: Any = 0
    rate: Any = 0
    ranks: int = 1
    canary: Any = "ok"
    canary_s: float = 0.2
    stale: bool = False
    free: int | None = 9000
    total: int | None = 10000
    stated: int | None = None
    awake: bool = True
    host: float | None = None
    grows: float = 0
    host_limit: float | None = None


@dataclass(frozen=True)
class Does:
    """How its processes start and end.

    `gate`: code of one that is closed. `exits`: code with which a start ends after `start_s` (null: it answers then);
    a `start_s` of null: neither ever. `oom`: the kernel ended it. `reads`: MiB per second while it starts. `foreign`:
    somebody else answers on its port. `warmup`: ok, refused, failed, after `warm_s`, with `first_ms` and `settled_ms`.
    `term_s`: from SIGTERM to its exit, null: never. `remain_s`: how long something of it lives on after SIGKILL.
    """

    gate: str | None = None
    exits: int | None = None
    start_s: float | None = 20
    oom: bool = False
    reads: float = 0
    foreign: bool = False
    warmup: str = "ok"
    warm_s: float = 3
    first_ms: float | None = GOOD.first_ms
    settled_ms: float | None = GOOD.settled_ms
    term_s: float | None = 0.5
    remain_s: float = 0


@dataclass(frozen=True)
class Gpus:
    """How the GPUs are: GPU-0, GPU-1, ... of 80 GiB each; processes of the engine are on those that it was given.

    `own`, `foreign`: GiB that its processes (on each of its GPUs) and somebody else's (on GPU-0) hold; `grows`,
    `foreign_grows`: MiB per hour. `back_s`: how long memory of the dead stays. `lost`: UUIDs that are gone, `errors`:
    NVML code by UUID. `dead`: UUIDs of those for which each call hangs. `problem`: NVML does not work at all. `hangs`,
    `stuck`: the probe answers no more, and not even SIGKILL ends it. `processes`: false for no process list, null for
    an empty one; `memory`: false for no memory figures. `reasons`: bits of throttling. `recovery`: what the driver asks
    for. `persistence`, and `undoes`: somebody sets it back; `may_set`: an NVML code, null: it may.
    """

    count: int = 1
    own: float = 70
    grows: float = 0
    foreign: float = 0
    foreign_grows: float = 0
    back_s: float = 0.1
    lost: Any = ()
    errors: Any = ()
    dead: Any = ()
    problem: int | None = None
    hangs: bool = False
    stuck: bool = False
    processes: bool | None = True
    memory: bool = True
    reasons: int = 0
    recovery: int = 0
    persistence: bool = True
    undoes: bool = False
    may_set: int | None = None
    name: str = "NVIDIA H200"
    compute: Any = (9, 0)
    architecture: int = 9


class Incident:
    """One engine, "a", and its world, in which only the engine's own behaviour is told from outside."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.told: Counter[str] = Counter()
        self.says, self.does, self.text = Says(), Does(), ""
        self.gpus, self.helpers = Gpus(), dict[int, bool]()
        self.own_mib = self.foreign_mib = 0.0
        self.rest: tuple[int, float] = (0, 0.0)
        self.given: tuple[str, ...] = ()
        self.living: set[int] = set()
        self.main: int | None = None
        self.spawned_at, self.swept_at = T0, 0.0
        self.host_mib = 0.0
        self.steps = [100.0] * 8
        self.moved_at = T0
        self.play: Play = launching()
        self.waiting: list[tuple[float, int, Observation | Callable[[], None]]] = []
        self.numbers = count()
        self.looks = self.canaries = 0
        self.began = T0
        self.quiet = True
        self.poll_at = T0

    # --- commands ---

    def engine(self, **keys: Any) -> None:
        """Configure it and let it become ready."""
        self.boot(keys)
        while self.play.engine().state is not State.READY:
            self.next_event(T0 + 60)
        self.quiet, self.began = False, self.play.now
        self.poll_at = self.play.now + POLL_S

    def boots(self, **keys: Any) -> None:
        """Configure it, and tell from here on."""
        self.quiet, self.poll_at = False, T0 + POLL_S
        self.boot(keys)

    def boot(self, keys: dict[str, Any]) -> None:
        tables = _tables(keys)
        supervisor, gpu = tables.pop("supervisor", {}), tables.pop("gpu", {})
        spec_ = node_spec(spec(**tables), **supervisor)
        self.play = Play(replace(new_node(spec_), spec=replace(spec_, gpu=GpuSpec(**gpu))))
        self.play.cards = None
        self.play.see(Booted())
        self.carry_out(self.play.actions)

    def reloads(self, plan: str, **keys: Any) -> None:
        """Another configuration."""
        self.hear(Reconfigured(node_spec(spec(**_tables(keys))), {"a": plan}, "uid 1000", 2))

    def asks(self, op: str) -> None:
        """An operator asks for something."""
        self.hear(Requested(1, Op(op), "a", "uid 1000"))

    def says_(self, **keys: Any) -> None:
        """Change what it says."""
        self.move()
        self.says = replace(self.says, **keys)
        self.host_mib = keys.get("host", self.host_mib)

    def does_(self, **keys: Any) -> None:
        """Change how its processes start and end."""
        self.does = replace(self.does, **keys)

    def gpus_(self, **keys: Any) -> None:
        """Change how the GPUs are."""
        self.move()
        self.gpus = replace(self.gpus, **keys)
        if "own" in keys:
            self.own_mib = 0.0
        if "foreign" in keys:
            self.foreign_mib = 0.0
        for helper in [helper for helper, killed in self.helpers.items() if killed and not self.gpus.stuck]:
            self.end_helper(helper)

    def xid(self, number: int | None, gpu: str = "GPU-0", source: str = "nvml", *, mine: bool = False) -> None:
        """The driver reports a fault."""
        seen = XidSeen(self.play.now, gpu, number, source)
        generation = self.play.engine().generation
        self.hear(replace(seen, pid=4711, engine="a", generation=generation) if mine else seen)

    def gpu(self, op: str, name: str | None = None) -> None:
        """An operator asks something of GPUs."""
        self.hear(GpuRequested(1, GpuOp(op), name, "uid 1000"))

    def window(self, seconds: float) -> None:
        """The maintenance window opens."""
        self.hear(WindowOpened("a", seconds))

    def pass_(self, seconds: float) -> None:
        """Time passes."""
        looks, canaries = self.looks, self.canaries
        end = self.play.now + seconds
        while self.next_event(end):
            pass
        self.play.now = end
        phase = self.play.engine()
        reasons = ",".join(reason.code for reason in getattr(phase.phase, "reasons", ()))
        state = f"{phase.state.value}{f' ({reasons})' if reasons else ''}, generation {phase.generation}"
        self.out.append(f"  = {state}; {self.looks - looks} looks, {self.canaries - canaries} canaries")

    def exits(self, code: int) -> None:
        """The main process ends by itself."""
        self.exit(self.play.engine().generation, code)

    # --- the world ---

    def next_event(self, end: float) -> bool:
        """Hear what comes next, if it comes before `end`."""
        clock = self.play.wakeup
        first = self.waiting[0][0] if self.waiting else None
        times = [at for at in (clock, first, None if self.quiet else self.poll_at) if at is not None]
        at = max(min(times), self.play.now)
        if at > end:
            return False
        self.play.now = at
        if first is not None and first <= at:
            event = heapq.heappop(self.waiting)[2]
            event() if callable(event) else self.hear(event)
        elif clock is not None and clock <= at:
            self.hear(Due(What.CLOCK))
        else:
            self.poll_at = at + POLL_S
            self.hear(Due(What.POLL))
        return True

    def hear(self, seen: Observation) -> None:
        """One observation."""
        counted = self.play.engine().restart_times
        self.play.see(seen)
        self.told["budget"] += self.play.engine().restart_times[-1:] != counted[-1:]
        self.carry_out(self.play.actions)

    def later(self, after: float, event: Observation | Callable[[], None]) -> None:
        heapq.heappush(self.waiting, (self.play.now + after, next(self.numbers), event))

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Do what was decided, and write down what matters of it."""
        for action in actions:
            if isinstance(action, Record):
                self.told[action.kind] += 1
                self.told[f"{action.kind}[{action.reason}]"] += 1
                reason = f"[{action.reason}]" if action.reason else ""
                line = f"{action.kind}{reason}: {action.message}"
            elif isinstance(action, Reply):
                line = f"Reply[{action.answer.value}]: {action.message}"
                self.told[f"Reply[{action.answer.value}]"] += 1
            else:
                line = type(action).__name__
                self.told[line] += 1
                self.do(action)
            if not self.quiet and not isinstance(action, ROUTINE):
                self.out.append(f"  +{self.play.now - self.began:.1f} {line}")

    def do(self, action: Action) -> None:
        generation = self.play.engine().launching or self.play.engine().generation
        match action:
            case StartGpuHelper() | KillGpuHelper() | SweepGpus() | SetPersistence():
                self.do_gpu(action)
            case Launch():
                places = action.devices if action.devices is not None else ()
                there = [uuid for uuid in self.uuids() if uuid not in {*self.gpus.lost, *self.gpus.dead}]
                self.given = tuple(there[place] for place in places) or self.play.engine().spec.gpus
                self.launch(generation)
            case WatchPort():
                self.start(generation)
            case MeasureProgress():
                read = int(self.does.reads * MIB * (self.play.now - self.spawned_at))
                self.later(0.1, Progressed("a", generation, Progress(read, 0, 0)))
            case WarmUp():
                self.later(self.does.warm_s, WarmedUp("a", generation, self.warmup()))
            case Terminate():
                if self.does.term_s is not None:
                    self.later(self.does.term_s, lambda: self.exit(generation, 0))
            case Sweep():
                self.sweep(generation)
            case Probe():
                self.look(generation, host=action.host)
            case SendCanary():
                self.canaries += 1
                if self.says.canary != "hang":
                    self.later(self.says.canary_s, lambda: self.answer_canary(generation))
            case _:
                pass

    def launch(self, generation: int) -> None:
        assert not self.living, f"generation {generation} is launched while {self.living} lives"
        if self.does.gate is not None:
            self.later(0.1, GateClosed("a", generation, self.does.gate, self.text))
            return
        if generation > 1:
            self.says, self.gpus, self.own_mib = Says(), replace(self.gpus, grows=0), 0.0
        self.living, self.main, self.spawned_at = {generation}, generation, self.play.now
        self.later(0.1, Spawned("a", generation, process(generation)))

    def start(self, generation: int) -> None:
        does = self.does
        if does.start_s is None:
            return
        if does.foreign:
            self.later(does.start_s, PortForeign("a", generation, self.text))
        elif does.exits is None:
            self.later(does.start_s, PortAnswered("a", generation))
        else:
            code = does.exits
            self.later(does.start_s, lambda: self.exit(generation, code))

    def warmup(self) -> Warmup:
        gpu_bytes = self.play.engine().gpu_bytes
        good = replace(GOOD, first_ms=self.does.first_ms, settled_ms=self.does.settled_ms, gpu_bytes=gpu_bytes)
        if self.does.warmup == "ok":
            return good
        return Warmup(None, None, 0, Reason(f"warmup_{self.does.warmup}", self.text))

    def exit(self, generation: int, code: int) -> None:
        """The main process ends, once; what it started may live on."""
        if self.main != generation:
            return
        self.main = None
        number, signal = (code, None) if code >= 0 else (None, -code)
        tail = (self.text,) if self.text else ()
        self.hear(Exited("a", generation, number, signal, tail, oom_killed=self.does.oom))

    def sweep(self, generation: int) -> None:
        """SIGKILL to everything; what hangs in the kernel does not heed it at once."""
        if self.main == generation or self.swept_at < self.spawned_at:
            self.swept_at = self.play.now
        self.main = None
        gone = self.play.now >= self.swept_at + self.does.remain_s
        if gone and generation in self.living:
            self.living.discard(generation)
            self.rest = (generation, self.play.now + self.gpus.back_s)
        self.later(0.3, Swept("a", generation, () if gone else ("EngineCore (pid 4712)",)))

    def answer_canary(self, generation: int) -> None:
        if self.play.engine().generation != generation:
            return
        said = self.says.canary
        if said in {"ok", "garbage"}:
            self.steps = [self.steps[0] + 8, *self.steps[1:]]
            if self.says.stale:
                self.says = replace(self.says, running=0, waiting=0, free=9999, stale=False)
            self.hear(CanaryEnded("a", generation, ok=True, sane=said == "ok"))
        elif said == "hang":
            return
        else:
            possible = not 400 <= said < 500
            self.hear(CanaryEnded("a", generation, ok=False, sane=False, possible=possible, detail=f"HTTP {said}"))

    def move(self) -> None:
        """Counters as of now."""
        passed = self.play.now - self.moved_at
        rates = self.says.rate if isinstance(self.says.rate, list) else [self.says.rate]
        rates = [*rates, *([0] * 8)][:8]
        self.steps = [steps + rate * passed for steps, rate in zip(self.steps, rates, strict=True)]
        self.host_mib += self.says.grows * passed / 3600
        self.own_mib += self.gpus.grows * passed / 3600
        self.foreign_mib += self.gpus.foreign_grows * passed / 3600
        self.moved_at = self.play.now

    # --- GPUs ---

    def uuids(self) -> list[str]:
        return [f"GPU-{number}" for number in range(self.gpus.count)]

    def do_gpu(self, action: StartGpuHelper | KillGpuHelper | SweepGpus | SetPersistence) -> None:
        gpus, helper = self.gpus, action.helper
        match action:
            case StartGpuHelper():
                self.helpers[helper] = False
            case KillGpuHelper():
                self.helpers[helper] = True
                if not gpus.stuck:
                    self.later(0.05, lambda: self.end_helper(helper))
            case _ if gpus.hangs or helper not in self.helpers:
                pass
            case SweepGpus() if set(gpus.dead) - {place.uuid for place in action.avoid}:
                pass
            case SweepGpus():
                began = self.play.now
                self.later(
                    0.005, lambda: self.hear(GpusSwept(helper, action.number, self.sweep_gpus(began, action.slow)))
                )
            case SetPersistence():
                if gpus.may_set is None and not gpus.undoes:
                    self.gpus = replace(gpus, persistence=action.on)
                self.later(0.005, PersistenceSet(action.uuid, action.on, gpus.may_set))

    def end_helper(self, helper: int) -> None:
        if self.helpers.pop(helper, None) is not None:
            self.hear(GpuHelperEnded(helper, "killed"))

    def sweep_gpus(self, at: float, slow: bool) -> GpuSweep:
        self.move()
        if self.gpus.problem is not None:
            return GpuSweep(at, problem=self.gpus.problem, slow=slow)
        there = [uuid for uuid in self.uuids() if uuid not in self.gpus.lost]
        return GpuSweep(
            at, tuple(self.reading(uuid, place) for place, uuid in enumerate(there)), slow=slow, driver="580.1"
        )

    def reading(self, uuid: str, place: int) -> GpuReading:
        gpus, found = self.gpus, []
        number = int(uuid[-1])
        base = card(uuid, number, name=gpus.name, compute=tuple(gpus.compute), architecture=gpus.architecture)
        if uuid in gpus.errors or uuid in gpus.dead:
            return GpuReading(uuid, base.pci_id, place, error=16 if uuid in gpus.dead else gpus.errors[uuid])
        own_bytes = int((gpus.own * 1024 + self.own_mib) * MIB)
        if uuid in self.given:
            found += [GpuProcess(4711, own_bytes, "VLLM::EngineCore", "a", generation) for generation in self.living]
            if self.play.now < self.rest[1]:
                found.append(GpuProcess(4711, own_bytes, "VLLM::EngineCore", "a", self.rest[0]))
        if gpus.foreign and uuid == "GPU-0":
            found.append(GpuProcess(77, int((gpus.foreign * 1024 + self.foreign_mib) * MIB), "python"))
        reading = replace(
            holds(base, *found),
            index=place,
            clock_reasons=gpus.reasons,
            recovery_action=gpus.recovery,
            persistence=gpus.persistence,
        )
        if gpus.processes is not True:
            reading = replace(reading, processes=() if gpus.processes is None else None)
        return reading if gpus.memory else replace(reading, used_bytes=None, free_bytes=None, total_bytes=None)

    def look(self, generation: int, *, host: bool) -> None:
        """What a look sees; one that times out is heard of that much later."""
        self.looks += 1
        self.move()
        says, at = self.says, self.play.now
        status = says.health if isinstance(says.health, int) else None
        error = None if status is not None else says.health
        spent_s = TIMEOUT_S if error == "timeout" else 0.0
        if says.metrics and error != "refused":
            sample = page(at, *(self.rank(number) for number in range(says.ranks)))
        else:
            sample = Sample(at=at)
            spent_s += 0.0 if error == "refused" or (not says.metrics and status is not None) else TIMEOUT_S
        if says.stated is not None and status == 200:
            sample = replace(sample, free_blocks=says.stated, free_stated=True, metrics_status=404)
        sample = replace(sample, health_status=status, health_error=error)
        if host and says.host is not None:
            limit = None if says.host_limit is None else int(says.host_limit * MIB)
            sample = replace(sample, host_bytes=int(self.host_mib * MIB), host_at=at, host_limit_bytes=limit)
        seen = Sampled("a", generation, sample)
        if spent_s:
            self.later(spent_s, seen)
        else:
            self.hear(seen)

    def rank(self, number: int) -> Any:
        says = self.says

        def of(value: Any) -> Any:
            return value[number] if isinstance(value, list) else value

        return rank(
            number,
            steps=self.steps[number] if says.counters else None,
            running=of(says.running),
            waiting=of(says.waiting),
            free_blocks=says.free if says.total is not None else None,
            total_blocks=says.total,
            awake=says.awake,
        )


def play(text: str) -> tuple[str, list[str]]:
    """The transcript as it comes out today, and what it promised and did not keep."""
    incident, broken = Incident(), []
    musts: list[tuple[bool, str]] = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        incident.out.append(line)
        if line.startswith(("must: ", "must not: ")):
            word, _, names = line.partition(": ")
            musts += [(word == "must", name) for name in names.split()]
        elif line.startswith("> "):
            _perform(incident, line[2:])
    for wanted, name in musts:
        if _holds(incident.told, name) is not wanted:
            broken.append(f"must{'' if wanted else ' not'}: {name}, told {incident.told[_name(name)[0]]} times")
    return "\n".join(_folded(incident.out)) + "\n", broken


def _name(text: str) -> tuple[str, str, int]:
    name, bound, number = re.split("([<>]=|$)", text, maxsplit=1)
    return name, bound or ">=", int(number or 1)


def _holds(told: Counter[str], text: str) -> bool:
    name, bound, number = _name(text)
    return told[name] >= number if bound == ">=" else told[name] <= number


def _folded(lines: list[str]) -> Iterator[str]:
    """What is said many times in a row, once."""
    for _, group in groupby(lines, lambda line: re.sub(r"^  [+]\S+", "  +", line)):
        same = list(group)
        if len(same) < FOLDED_FROM or not same[0].startswith("  +"):
            yield from same
        else:
            yield f"{same[0]} ({len(same)} times, the last at {same[-1].split()[0]})"


def _perform(incident: Incident, line: str) -> None:
    command, _, rest = line.partition(" ")
    words = rest.split()
    match command:
        case "because":
            incident.text = rest
        case "xid":
            incident.xid(json.loads(words[0]), **_keys(words[1:]))
        case "gpu":
            incident.gpu(*words)
        case "window":
            incident.window(json.loads(rest))
        case "pass":
            incident.pass_(json.loads(rest))
        case "exits":
            incident.exits(json.loads(rest))
        case "asks":
            incident.asks(rest)
        case "reloads":
            incident.reloads(words[0], **_keys(words[1:]))
        case _:
            commands = {
                "engine": incident.engine,
                "boots": incident.boots,
                "says": incident.says_,
                "does": incident.does_,
                "gpus": incident.gpus_,
            }
            commands[command](**_keys(words))


def _keys(words: list[str]) -> dict[str, Any]:
    return {key: _value(value) for key, _, value in (word.partition("=") for word in words)}


def _tables(keys: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        table, dot, name = key.partition(".")
        if dot:
            tables.setdefault(table, {})[name] = value
        else:
            tables[table] = value
    return tables


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
