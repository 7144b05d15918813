"""The events of one engine, cut into incidents.

An incident begins with what set it off (an exit, a verdict, a request, a closed gate) and ends when the engine is ready
again. Times of events are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supervisord.core.messages import Severity

Number = float | int | str | None

_REQUESTS: Final = frozenset({"stop", "restart", "drain"})
_ENDINGS: Final = frozenset({"draining", "stopping", "killing"})
_UP: Final = frozenset({"spawned", "answering", "adopted", "ready"})
_FIRST: Final = frozenset({"restart", "failed", "waiting", *_ENDINGS})
"""What the oldest incident may begin with, too: the history does not reach back to its real beginning."""
_GRAVE: Final = frozenset({"exited", "leftover", "restart", "failed", "stopping", "killing"})


@dataclass(frozen=True, slots=True)
class Event:
    """What was told once. `at` is epoch seconds, `now` monotonic seconds within the boot `boot_id`."""

    id: int
    at: float
    boot_id: str
    now: float
    severity: Severity
    kind: str
    message: str
    engine: str | None = None
    generation: int | None = None
    reason: str | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)


def between(first: Event, second: Event) -> float:
    """Seconds; by the wall clock only across a reboot."""
    same = first.boot_id == second.boot_id
    return max(0.0, second.now - first.now if same else second.at - first.at)


@dataclass(frozen=True, slots=True)
class Incident:
    """`events` from the trigger on, `before` all earlier ones, `row` the triggers of its kind in a row up to it."""

    events: Sequence[Event]
    before: Sequence[Event]
    row: Sequence[Event]

    @property
    def trigger(self) -> Event:
        """What set it off."""
        return self.events[0]

    def first(self, kind: str) -> Event | None:
        """The first event of this kind."""
        return next((event for event in self.events if event.kind == kind), None)


class _Part:
    """An incident under way."""

    def __init__(self, start: int, trigger: Event) -> None:
        self.start = start
        self.events = [trigger]
        self.kinds = {trigger.kind}

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.kinds.add(event.kind)

    def over(self) -> bool:
        return "ready" in self.kinds

    def matters(self) -> bool:
        asked = self.events[0].kind == "requested" and "spawned" in self.kinds
        return asked or bool(self.kinds & _GRAVE)


def last_incident(events: Sequence[Event]) -> Incident | None:
    """The last one that mattered, of events oldest first: a wait that is over did not, unless there is nothing else."""
    parts: list[_Part] = []
    for index, event in enumerate(events):
        if _sets_off(event, parts[-1].kinds if parts else None):
            parts.append(_Part(index, event))
        elif parts and not parts[-1].over():
            parts[-1].add(event)
    if not parts:
        return None
    chosen = len(parts) - 1
    if parts[chosen].over():
        chosen = next((i for i in reversed(range(len(parts))) if parts[i].matters()), chosen)
    first = chosen
    while first > 0 and _goes_on(parts[first - 1], parts[chosen]):
        first -= 1
    row = [part.events[0] for part in parts[first : chosen + 1]]
    return Incident(parts[chosen].events, events[: parts[chosen].start], row)


def _sets_off(event: Event, kinds: set[str] | None) -> bool:
    """Whether an incident begins; `kinds` are those of the events of the present one, None before the first."""
    kind = event.kind
    asked = kind == "requested" and event.reason in _REQUESTS
    if kind in {"exited", "leftover"}:
        return True
    if kinds is None:
        # Who waits for the first look at the GPUs, or for a neighbour, has met with nothing.
        return asked or (kind in _FIRST and not (kind == "waiting" and event.severity is Severity.NOTICE))
    if kind == "requested" and event.reason == "start":
        return "stopped" in kinds and not kinds & _UP
    if asked or kind in _ENDINGS:
        return bool(kinds & _UP)
    if kind == "failed":
        return bool(kinds & {"ready", "stopped"})
    return kind == "waiting" and "ready" in kinds


def _goes_on(earlier: _Part, later: _Part) -> bool:
    """Whether the same thing happened again before the engine was ready or at rest."""
    return earlier.events[0].kind == later.events[0].kind and not earlier.kinds & {"ready", "stopped"}
