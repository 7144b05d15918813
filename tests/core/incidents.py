"""Incidents as text: what an engine says over time, and what the core decided, to be reviewed as a diff.

    # A12 what it is about
    must: KIND[REASON] ...        told at least once, by kind of record and its reason
    must not: KIND[REASON] ...    never told, with `*` for any reason

    > engine KEY=JSON ...         keys of [engine.X]; tables as restart.KEY; the engine then becomes ready
    > says KEY=JSON ...           what looks see from now on (see Says)
    > pass SECONDS                polls every 5 s, deadlines, canaries and closer looks
    > exits CODE                  the main process ends
      +12.3 ...                   and what came of it

The lines that came of it are written by `play`. test_transcripts.py is the finer tool: each observation by itself.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from supervisord.core.messages import (
    Action,
    CanaryEnded,
    Due,
    Exited,
    Launch,
    MeasureProgress,
    Observation,
    PortAnswered,
    Probe,
    Record,
    Sampled,
    SendCanary,
    Spawned,
    Sweep,
    Swept,
    Terminate,
    WarmedUp,
    WarmUp,
    WatchPort,
    What,
)
from supervisord.core.model import Sample, State
from tests.core.looks import page, rank, spec
from tests.core.play import GOOD, T0, Play, launching, process

POLL_S = 5.0
TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Says:
    """What the simulated engine says.

    `health`: a status, or refused, timeout, malformed. `metrics`: false for none. `rate`: steps per second of the first
    ranks, a list for several. `canary`: ok, hang, garbage, or an HTTP status; `canary_s`: how long it takes. `stale`:
    gauges that stay as they are until the engine steps. `free`, `total`: blocks; `stated`: /health tells the free ones.
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


class Incident:
    """One engine, "a", and its world, in which only the engine's own behaviour is told from outside."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.told: Counter[str] = Counter()
        self.says = Says()
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
        tables: dict[str, Any] = {}
        for key, value in keys.items():
            table, dot, name = key.partition(".")
            if dot:
                tables.setdefault(table, {})[name] = value
            else:
                tables[table] = value
        self.play = launching(spec(**tables))
        self.carry_out(self.play.actions)
        while self.play.engine().state is not State.READY:
            self.next_event(T0 + 60)
        self.quiet, self.began = False, self.play.now
        self.poll_at = self.play.now + POLL_S

    def says_(self, **keys: Any) -> None:
        """Change what it says."""
        self.move()
        self.says = replace(self.says, **keys)

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
        self.hear(Exited("a", self.play.engine().generation, code, None))

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
        self.play.see(seen)
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
            else:
                line = type(action).__name__
                self.told[line] += 1
                self.do(action)
            if not self.quiet and not isinstance(action, Probe | SendCanary | WatchPort | WarmUp | MeasureProgress):
                self.out.append(f"  +{self.play.now - self.began:.1f} {line}")

    def do(self, action: Action) -> None:
        generation = self.play.engine().launching or self.play.engine().generation
        match action:
            case Launch():
                if generation > 1:
                    self.says = Says()
                self.later(0.1, Spawned("a", generation, process(generation)))
            case WatchPort():
                self.later(20, PortAnswered("a", generation))
            case WarmUp():
                self.later(3, WarmedUp("a", generation, GOOD))
            case Terminate():
                self.later(0.5, Exited("a", generation, 0, None))
            case Sweep():
                self.later(0.3, Swept("a", generation))
            case Probe():
                self.look(generation)
            case SendCanary():
                self.canaries += 1
                if self.says.canary != "hang":
                    self.later(self.says.canary_s, lambda: self.answer_canary(generation))
            case _:
                pass

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
        self.moved_at = self.play.now

    def look(self, generation: int) -> None:
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
            _perform(incident, line[2:].split())
    for wanted, name in musts:
        if (incident.told[name] > 0) is not wanted:
            broken.append(f"must{'' if wanted else ' not'}: {name}, told {incident.told[name]} times")
    return "\n".join(incident.out) + "\n", broken


def _perform(incident: Incident, words: list[str]) -> None:
    command, *arguments = words
    if command in {"pass", "exits"}:
        {"pass": incident.pass_, "exits": incident.exits}[command](json.loads(arguments[0]))
        return
    keys = {key: _value(value) for key, _, value in (argument.partition("=") for argument in arguments)}
    {"engine": incident.engine, "says": incident.says_}[command](**keys)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
