"""Afterwards: whether the history has everything that happened (`budget`: whether restarts kept theirs).

Pure: the log's lines and the starts that engines recorded themselves are compared with the history's events.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from supervisord.core.incident import Event

ENDINGS = frozenset({"exited", "stopping", "stopped", "leftover", "killing", "failed", "unkillable_gone"})
BEGINNINGS = frozenset({"spawned", "adopted", "leftover"})

TAKEN_OUT = frozenset({"draining", "stopping"})
VOLUNTARY = frozenset({"kv_shortfall", "gpu_creep", "host_creep"})

NEVER_IN_HISTORY = frozenset({"log_lost", "history"})
KILL_LOSES_S = 2.0
"""The history gathers for half a second, then writes; a machine that is busy adds to that."""
LOG_EARLY_S = 0.5
"""A line may be seen in the log before the history notes the time of its event."""
SEEN_EVERY_S = 0.5
"""Processes are looked at more often than this."""
TOLD_S = 10.0
"""The end of an engine is told within this: what ignores SIGTERM takes longest."""


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
    at: float = 0.0
    """Monotonic."""


Span = tuple[float, float]


def _key(kind: str, engine: str | None, generation: int | None, message: str) -> tuple[str, str, int, str]:
    return (kind, engine or "", generation or 0, message)


def missing(log: Sequence[Told], history: Iterable[Event], forgiven: Sequence[Span], checked: int = 0) -> list[str]:
    """What was told and is not in the history, beyond `forgiven` (times in which it may get lost).

    The oldest of what is missing pays for losses that were counted and told themselves. So many lines were `checked`
    before, and what was counted in them pays for nothing later.
    """
    lines: dict[tuple[str, str, int, str], list[int]] = defaultdict(list)
    counted = 0
    for number, (_, line) in enumerate(log):
        if number >= checked and line["kind"] == "history" and (found := _LOST.match(line["event"])):
            counted += int(found[1])
        if line["kind"] not in NEVER_IN_HISTORY:
            lines[_key(line["kind"], line.get("engine"), line.get("generation"), line["event"])].append(number)
    for event in history:
        same = lines[_key(event.kind, event.engine, event.generation, event.message)]
        # The same sentence may be told again and again: an event is the first line that is not older than itself.
        own = next((number for number in same if log[number].at > event.now - LOG_EARLY_S), None)
        if own is not None:
            same.remove(own)
    left = sorted(number for same in lines.values() for number in same)
    lost = [number for number in left if number >= checked and not within(log[number].at, forgiven)]
    return [
        f"not in the history: {line['timestamp']} {line['kind']} {line.get('engine')} {line['event']}"
        for _, line in (log[number] for number in lost[counted:])
    ]


def within(at: float, spans: Sequence[Span]) -> bool:
    """Whether something was in one of these times."""
    return any(begin <= at <= end for begin, end in spans)


@dataclass(frozen=True)
class Ends:
    """When something of each generation was seen last, and when daemons were killed."""

    last_seen: Mapping[tuple[str, int], float]
    kills: Sequence[float]

    def may_be_untold(self, key: tuple[str, int]) -> bool:
        """It ended while a daemon was there, which was killed before it had told that; otherwise the next one tells."""
        ended = self.last_seen.get(key)
        if ended is None:  # too quick to be seen
            return bool(self.kills)
        return any(ended - SEEN_EVERY_S <= kill <= ended + TOLD_S for kill in self.kills)


def unexplained(starts: Iterable[Start], log: Iterable[Told], living: dict[str, int], ends: Ends) -> list[str]:
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
        if living.get(start.engine) != start.generation and not told[key] & ENDINGS and not ends.may_be_untold(key):
            wrong.append(f"nobody told of the end of generation {start.generation} of {start.engine}")
    return wrong


def out_of_turn(history: Iterable[Event], group: Collection[str]) -> list[str]:
    """Restarts that nobody needed at once, of a replica while no other one was ready."""
    ready: dict[str, bool] = {}
    wrong = []
    for event in history:
        name = event.engine or ""
        if event.kind == "daemon_started":
            ready.clear()  # what was told last may be lost
        if name not in group:
            continue
        if event.kind in TAKEN_OUT and event.reason in VOLUNTARY:
            others = [other for other in group if other != name]
            if all(ready.get(other) is False for other in others):
                wrong.append(f"{name} was taken out of traffic while no replica of it was ready: {event.message}")
        if event.kind == "ready":
            ready[name] = True
        elif event.kind == "stopped":
            ready.pop(name, None)  # not wanted: nobody waits for it
        elif event.kind in ENDINGS | TAKEN_OUT:
            ready[name] = False
    return wrong
