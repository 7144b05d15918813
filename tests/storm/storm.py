"""The storm: seeded faults of all kinds, one after the other and over each other, and what must hold all the while."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from supervisord.core.incident import Event
from supervisord.history_read import Reader, UnreadableError
from supervisord.history_store import FILE, BrokenError
from supervisord.history_writer import RETRY_S
from tests.daemon.outside import engine_processes
from tests.sim.engine import wait_until
from tests.storm import budget, engine_faults, gpu_faults, ledger, node_faults
from tests.storm.blame import BLIND_S, REST_S
from tests.storm.faults import KINDS, Fault, NotNowError, On, Undo
from tests.storm.ledger import Span, Start, Told
from tests.storm.quiet import Quiet
from tests.storm.stage import BACKOFF_MAX_S, HASTY, PAIR, Stage
from tests.storm.witness import Witness

SOURCES = (engine_faults, gpu_faults, node_faults)
"""Imported, so that their kinds are known."""

GAP_S = float(os.environ.get("STORM_GAP_S", "0.3"))
"""Between two faults, on average."""
CALM_EVERY_S = 300.0
"""So often a long storm lets everything come to rest and looks at the books."""
CONVERGED_S = 150.0
OVERTIME_S = 240.0
"""So much longer a storm goes on until each kind has had its minimum."""
HISTORY_S = 60.0
"""What is told is in the history by then, with a disk that was full before."""
CATCH_UP_S = RETRY_S + ledger.KILL_LOSES_S
"""So long after a disk was full the history tries again."""
SAVED_S = 1.0
"""What was decided so long ago is in the state file, if the disk is not full."""
LEFT_S = 30.0
TEND_S = 1.0
RULE = budget.Rule(HASTY["restart"]["max_restarts"], HASTY["restart"]["max_restarts_window_s"], BACKOFF_MAX_S)
SHOWN = 40
DULL = frozenset({"config_warning", "refused"})
"""Kinds of events that tell nothing about a violation."""


class StormError(AssertionError):
    """Something does not hold; the text has the seed, the last faults, and what the daemon said."""


@dataclass(order=True)
class Open:
    """A fault that is to be undone."""

    until: float
    number: int
    kind: Fault = field(compare=False)
    engines: tuple[str, ...] = field(compare=False)
    undo: Undo = field(compare=False)


class Storm:
    """Of one stage, for `lasts_s`. The order of faults and every choice in them come from the seed."""

    def __init__(self, stage: Stage, witness: Witness, seed: int, lasts_s: float, minimum: int) -> None:
        self._stage = stage
        self._witness = witness
        self._seed = seed
        self._lasts_s = lasts_s
        self._minimum = minimum
        self._kinds = {name: kind for name, kind in KINDS.items() if name != "disk_full" or stage.has_disk}
        self._open: list[Open] = []
        self._began = time.monotonic()
        self._forgiven: list[Span] = []
        self._forgotten: list[Span] = []
        self._full_since, self._full_until = 0.0, 0.0
        self._checked = 0
        self._rests = 0
        units = sorted({frozenset(stage.sharing(name)) for name in stage.victims}, key=min)
        with_gpus = [name for name in stage.victims if stage.gpus_of(name)]
        self._quiet = Quiet(units, with_gpus, Random(f"{seed}:quiet"))
        self._asked: dict[str, float] = {}
        self._tend_at = 0.0
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []

    def run(self) -> None:
        """Rage, and come to rest. Raises StormError."""
        try:
            self._stage.start()
            self._come_to_rest()
            self._rage()
            self._rest()
            self._stop()
        except StormError:
            raise
        except AssertionError as error:
            raise self._error([str(error)]) from error
        finally:
            for left in self._open:
                with contextlib.suppress(Exception):  # what went wrong before is what counts
                    left.undo()

    def _rage(self) -> None:
        order, waiting = self._order(), list[tuple[int, Fault]]()
        until, calm_at = time.monotonic() + self._lasts_s, time.monotonic() + CALM_EVERY_S
        while time.monotonic() < until or self._lacking():
            if time.monotonic() > until + OVERTIME_S:
                raise self._error([f"could not be staged {self._minimum} times: {', '.join(self._lacking())}"])
            if self._quiet.turns(time.monotonic()):
                self._begin_quiet()
            if time.monotonic() > calm_at:
                self._rest()
                calm_at = time.monotonic() + CALM_EVERY_S
            number, kind = next(order)
            if time.monotonic() >= until and kind.name not in self._lacking():
                continue
            waiting = [later for later in [*waiting, (number, kind)] if not self._try(*later)]
            # What cannot be staged for long will be drawn again.
            waiting = waiting[-10:]
            self._pause(Random(f"{self._seed}:{number}:pause").random() * 2 * GAP_S)

    def _order(self) -> Iterator[tuple[int, Fault]]:
        """Rounds of all kinds, each in an order of its own."""
        rng, number = Random(self._seed), 0
        while True:
            for name in rng.sample(sorted(self._kinds), len(self._kinds)):
                number += 1
                yield number, self._kinds[name]

    def _lacking(self) -> list[str]:
        return [name for name in self._kinds if self.counts[name] < self._minimum]

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self._undo(lambda fault: fault.until <= time.monotonic())
            self._tend()
            self._check()
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.05))

    # --- faults ---

    def _begin_quiet(self) -> None:
        """Leave some engines alone from now on; what befalls them is over."""
        quiet = self._quiet
        self._say(0, None, ",".join(sorted(quiet.engines)), "left alone")
        self._undo(
            lambda fault: bool((quiet.gpus and _blinds(fault.kind)) or quiet.engines.intersection(fault.engines))
        )

    def _tend(self) -> None:
        """Do for those that are left alone what only an operator can do."""
        if self._quiet.engines and time.monotonic() >= self._tend_at:
            self._tend_at = time.monotonic() + TEND_S
            document = self._stage.status()
            if document:
                self._stage.operate(document, self._asked, self._quiet.engines)

    def _try(self, number: int, kind: Fault) -> bool:
        rng = Random(f"{self._seed}:{number}")
        candidates = [""]
        if _blinds(kind) and self._quiet.gpus:
            return False
        if kind.on in {On.ENGINE, On.GPU}:
            rest = [name for name in self._stage.victims if name not in self._quiet.engines]
            candidates = rng.sample(rest, len(rest))
            with self._witness.blaming() as blame:
                candidates.sort(key=blame.open_faults)
        return any(self._begin(number, kind, name) for name in candidates)

    def _begin(self, number: int, kind: Fault, name: str) -> bool:
        stage = self._stage
        befalls = {On.ENGINE: [name], On.GPU: stage.sharing(name) if name else [], On.ALL: [*stage.sims]}
        befalls[On.GPUS] = [victim for victim in stage.victims if stage.gpus_of(victim)]
        engines, rng = tuple(befalls.get(kind.on, ())), Random(f"{self._seed}:{number}:{name}")
        began = time.monotonic()
        with self._witness.blaming() as blame:
            # A daemon that was ended starts them anew: nothing is left of them that a rule could see.
            blame.begin(engines, rest_s=0.0 if kind.on is On.ALL else REST_S)
        if _blinds(kind):
            self._blind(kind, float("inf"))
        try:
            undo = kind.begin(stage, name, rng)
        except NotNowError:
            self._end(kind, engines)
            return False
        self.counts[kind.name] += 1
        self._say(number, kind, name, "")
        self._forgive(kind, began)
        if undo is None:
            self._end(kind, engines)
        else:
            at = time.monotonic() + rng.uniform(*kind.lasts_s)
            self._open.append(Open(at, number, kind, engines, undo))
        return True

    def _undo(self, test: Callable[[Open], bool]) -> None:
        for over in sorted(filter(test, self._open)):
            self._open.remove(over)
            over.undo()
            if over.kind.name == "disk_full":
                self._full_until = time.monotonic()
            self._end(over.kind, over.engines)
            self._say(over.number, over.kind, ",".join(over.engines), "over")

    def _end(self, kind: Fault, engines: tuple[str, ...]) -> None:
        with self._witness.blaming() as blame:
            blame.end(engines, spoils=kind.spoils)
        if _blinds(kind) and not any(_blinds(fault.kind) for fault in self._open):
            self._blind(kind, time.monotonic() + BLIND_S)
            self._stage.show()

    def _blind(self, kind: Fault, until: float) -> None:
        named = [name for name in self._stage.sims if self._stage.gpus_of(name)]
        with self._witness.blaming() as blame:
            blame.blind(named, until, shifting=kind.shifts)

    def _forgive(self, kind: Fault, began: float) -> None:
        """When what was told may miss in the history: what a killed daemon had not written yet."""
        full = any(over.kind.name == "disk_full" for over in self._open)
        behind = full or began < self._full_until + CATCH_UP_S
        if kind.name == "disk_full":
            self._full_since = self._full_since if behind else began
        elif kind.name.startswith("daemon_sigkill"):
            since, now = self._full_since if behind else began, time.monotonic()
            self._forgiven.append((since - ledger.KILL_LOSES_S, now))
            self._forgotten.append((since - SAVED_S, now))

    def _say(self, number: int, kind: Fault | None, whom: str, what: str) -> None:
        at_s = time.monotonic() - self._began
        name = f"#{number} {kind.name}" if kind is not None else "---"
        self.told.append(f"{at_s:8.2f} {name}{f' of {whom}' if whom else ''} {what}".rstrip())

    # --- what must hold ---

    def _check(self) -> None:
        if self._witness.violations:
            raise self._error(self._witness.violations)

    def _rest(self) -> None:
        self._come_to_rest()
        self._rests += 1

    def _come_to_rest(self) -> None:
        """Undo everything; all must be ready within bounds, nothing left over, and the books must be right."""
        stage, daemon = self._stage, self._stage.daemon
        self._say(0, None, "", "rest")
        self._undo(lambda _: True)
        for sim in stage.sims.values():
            sim.mood.clear()
        stage.settle(CONVERGED_S)
        self._check()
        wait_until(self._nothing_else_lives, LEFT_S, "leftovers of earlier generations to be gone", every_s=0.1)
        daemon.assert_no_bug()
        self._books()

    def _nothing_else_lives(self) -> bool:
        """Every process of an engine is of the generation that status shows, and its main process is among them."""
        engines = {e["name"]: e for e in self._stage.status().get("engines", ())}
        found = engine_processes(self._stage.daemon.state_dir)
        known = all(seen.engine in engines and engines[seen.engine]["generation"] == seen.generation for seen in found)
        return bool(engines) and known and {e["pid"] for e in engines.values()} <= {seen.pid for seen in found}

    def _books(self) -> None:
        reader = Reader(self._stage.daemon.state_dir / FILE)
        self._witness.read_log()
        log = [Told(line.at, line.document) for line in self._witness.log]
        problems: list[str] = []

        def right() -> bool:
            events = list(_all_events(reader))
            problems[:] = ledger.missing(log, events, self._forgiven, self._checked)
            problems[:] += budget.too_hasty(events, BACKOFF_MAX_S, _turns(reader), log, self._forgotten)
            problems[:] += ledger.out_of_turn(events, PAIR)
            return not problems

        with contextlib.suppress(AssertionError):
            wait_until(right, HISTORY_S, "the history to be written", every_s=1.0)
        living = {e["name"]: e["generation"] for e in self._stage.status().get("engines", ()) if e["pid"]}
        starts, last_seen = list(self._starts()), self._witness.last_seen
        problems += ledger.unexplained(starts, log, living, ledger.Ends(last_seen, self._stage.kills))
        victims = [start for start in starts if start.engine in self._stage.victims]
        problems += budget.overspent(victims, log, last_seen, RULE, self._forgotten)
        if problems:
            raise self._error(problems)
        # It has everything: from now on nothing that was told before can get lost, however full the disk was.
        self._checked = len(log)
        self._full_since = self._full_until = 0.0

    def _starts(self) -> Iterator[Start]:
        for name, sim in self._stage.sims.items():
            for start in sim.starts():
                yield Start(name, int(start["env"]["SUPERVISED_GENERATION"]), start["pid"], start["now"])

    def _stop(self) -> None:
        stage = self._stage
        stage.down()
        began = time.monotonic()
        code = stage.daemon.stop()
        took_s = time.monotonic() - began
        self.told.append(f"{began - self._began:8.2f} --- stop, {took_s:.1f} s")
        left = [f"{seen}" for seen in engine_processes(stage.daemon.state_dir)]
        if code != 0 or left:
            raise self._error([f"the daemon ended with {code} and left {left}"])
        self._witness.read_log()
        self._check()

    # --- telling ---

    def _error(self, problems: list[str]) -> StormError:
        self._witness.read_log()
        log = [line.document for line in self._witness.log if line.document["kind"] not in DULL]
        parts = [
            f"STORM_SEED={self._seed} STORM_S={self._lasts_s:g}",
            *problems[:SHOWN],
            f"--- the last faults of {sum(self.counts.values())}",
            *self.told[-SHOWN:],
            "--- the daemon's log",
            *map(_shown, log[-4 * SHOWN :]),
        ]
        return StormError("\n".join(parts))

    def report(self) -> str:
        """What happened, in figures."""
        most, log = self._witness.most, [line.document for line in self._witness.log]
        answers = sorted(most.answers_s)
        kinds = Counter(document["kind"] for document in log)
        generations = {name: len(sim.starts()) for name, sim in self._stage.sims.items()}
        with self._witness.blaming() as blame:
            guarded = ", ".join(f"{name} {seconds:.0f}" for name, seconds in blame.guarded_s.items())
        rows = {
            "faults": _counted(self.counts),
            "starts": ", ".join(f"{name} {count}" for name, count in generations.items()),
            "events": _counted(kinds),
            "status": f"{len(answers)} answers, median {statistics.median(answers) * 1e3:.0f} ms, "
            f"p99 {answers[int(len(answers) * 0.99)] * 1e3:.0f} ms, longest {answers[-1] * 1e3:.0f} ms",
            "books": f"{self._rests} times at rest with all engines ready and the books right; "
            f"{len(self._stage.kills)} kills of the daemon",
            "daemon": f"at most {most.rss_mib:.0f} MiB, {most.descriptors} descriptors, {most.threads} threads",
            "guarded": f"seconds in which a restart would have been a violation: {guarded}",
            "seen": f"{most.looks} looks at all processes; {self._stage.receiver.received} notices received",
        }
        took_s = time.monotonic() - self._began
        total = f"{sum(self.counts.values())} faults of {len(self.counts)} kinds in {took_s:.0f} s"
        return "\n".join([f"STORM_SEED={self._seed}: {total}", *(f"  {name}: {row}" for name, row in rows.items())])


def _blinds(kind: Fault) -> bool:
    """Whether the daemon may not see GPUs as they are, while it lasts and for a while after it."""
    return kind.on is On.SIGHT or kind.shifts


def _all_events(reader: Reader) -> Iterator[Event]:
    after, more = 0, True
    while more:
        page = reader.page(None, None, after, 1000)
        yield from page.events
        after, more = page.last_id, page.more


def _turns(reader: Reader) -> list[float]:
    """When the loop took up what is in the history."""
    with contextlib.suppress(UnreadableError, BrokenError):
        return [at for recording in reader.recordings() for at, _ in recording.seen]
    return []


def _shown(document: dict[str, object]) -> str:
    engine = document.get("engine")
    return f"{document['timestamp']} {document['kind']} {f'{engine} ' if engine else ''}{document['event']}"[:300]


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
