"""Afterwards: whether the history has everything that happened, and whether restarts kept their budget.

Pure: the log's lines and the starts that engines recorded themselves are compared with the history's events.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from supervisord.core.incident import Event

ENDINGS = frozenset({"exited", "stopping", "stopped", "leftover", "killing", "failed", "unkillable_gone"})
BEGINNINGS = frozenset({"spawned", "adopted", "leftover"})
RELEASES = frozenset({"requested", "daemon_started", "reconfigured", "reload"})
"""After one of these an engine may be started before its back-off is over."""

NEVER_IN_HISTORY = frozenset({"log_lost", "history"})
KILL_LOSES_S = 2.0
"""The history gathers for half a second, then writes; a machine that is busy adds to that."""
LOG_LATE_S = 15.0
"""A line is in the log by then, also of a daemon that was frozen; the same sentence may be told again later."""
CLOCK_SLACK_S = 0.05


_LOST = re.compile(r"(\d+) events and \d+ observations are missing")


class Told(NamedTuple):
    """A line of the log: when it was there (monotonic), and the document."""

    at: float
    document: dict[str, Any]


class Start(NamedTuple):
    """What a process of an engine recorded when it began."""

    engine: str
    generation: int
    pid: int


def _key(kind: str, engine: str | None, generation: int | None, message: str) -> tuple[str, str, int, str]:
    return (kind, engine or "", generation or 0, message)


def _nearest(times: Iterable[float], at: float) -> float | None:
    return min(times, key=lambda time: abs(at - time), default=None)


def missing(log: Iterable[Told], history: Iterable[Event], forgiven: Sequence[tuple[float, float]]) -> list[str]:
    """What was told and is not in the history, beyond `forgiven` (times in which it may get lost).

    The oldest of what is missing pays for losses that were counted and told themselves.
    """
    there: dict[tuple[str, str, int, str], list[float]] = defaultdict(list)
    for e in history:
        there[_key(e.kind, e.engine, e.generation, e.message)].append(e.now)
    lost, counted = [], 0
    for at, line in log:
        if line["kind"] == "history" and (found := _LOST.match(line["event"])):
            counted += int(found[1])
        key = _key(line["kind"], line.get("engine"), line.get("generation"), line["event"])
        nearest = _nearest(there[key], at)
        if key[0] in NEVER_IN_HISTORY:
            continue
        if nearest is not None and abs(at - nearest) < LOG_LATE_S:
            there[key].remove(nearest)
        elif not any(begin <= at <= end for begin, end in forgiven):
            lost.append(f"not in the history: {line['timestamp']} {line['kind']} {line.get('engine')} {line['event']}")
    return lost[counted:]


def unexplained(starts: Iterable[Start], log: Iterable[Told], living: dict[str, int]) -> list[str]:
    """Starts that no one told of, twice the same generation, and generations of which no end was told."""
    told: dict[tuple[str, int], set[str]] = defaultdict(set)
    for _, line in log:
        if line.get("engine") and line.get("generation"):
            told[line["engine"], line["generation"]].add(line["kind"])
    seen: Counter[tuple[str, int]] = Counter()
    wrong = []
    for start in starts:
        key = (start.engine, start.generation)
        seen[key] += 1
        if seen[key] == 2:
            wrong.append(f"generation {start.generation} of {start.engine} ran twice")
        if not told[key] & BEGINNINGS:
            wrong.append(f"nobody told of generation {start.generation} of {start.engine} (pid {start.pid})")
        if living.get(start.engine) != start.generation and not told[key] & ENDINGS:
            wrong.append(f"nobody told of the end of generation {start.generation} of {start.engine}")
    return wrong


def too_hasty(history: Iterable[Event], backoff_max_s: float) -> list[str]:
    """Starts before their back-off was over, and back-offs shorter than a spent budget demands."""
    due: dict[str, tuple[float, float]] = {}
    wrong = []
    for event in history:
        name = event.engine or ""
        if event.kind == "restart":
            numbers = event.numbers
            delay_s = float(numbers["delay_s"])  # type: ignore[arg-type]
            due[name] = (event.now, delay_s)
            over = numbers["restarts_in_window"] > numbers["max_restarts"]  # type: ignore[operator]
            if over and delay_s < backoff_max_s:
                wrong.append(f"{name} has spent its budget and is started again after {delay_s} s: {event.message}")
        elif event.kind in RELEASES:
            for engine in [name] if name else list(due):
                due.pop(engine, None)
        elif event.kind == "spawned" and name in due:
            decided, delay_s = due.pop(name)
            if event.now < decided + delay_s - CLOCK_SLACK_S:
                wrong.append(f"{name} was started {event.now - decided:.2f} s after it was told to wait {delay_s} s")
    return wrong
