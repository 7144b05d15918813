"""What the daemon counts of itself for its metrics: how long turns and looks took, and why engines were restarted.

Counted since the daemon started. Every method is for any thread and takes no longer than a few additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Final

from supervisord.core.messages import Record

TURN_BOUNDS_S: Final = (0.0001, 0.001, 0.01, 0.1, 1.0)
LOOK_BOUNDS_S: Final = (0.001, 0.01, 0.1, 1.0, 10.0)

_ENDS: Final = frozenset({"exited", "killing", "stopping"})
"""Records that say, by their reason, why a process ends."""


@dataclass(frozen=True, slots=True)
class Durations:
    """How often something took at most so many seconds (cumulative; the last bound is infinity), and all of it."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


class _Clock:
    """Durations in the making. Its owner locks."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> Durations:
        return Durations((*self._bounds_s, float("inf")), tuple(accumulate(self._counts)), self._sum_s)


class Figures:
    """The counts of one daemon. What is counted of an engine is forgotten with it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._turns = _Clock(TURN_BOUNDS_S)
        self._looks: dict[str, _Clock] = {}
        self._ends: dict[str, str] = {}
        self._restarts: dict[str, dict[str, int]] = {}

    def turned(self, seconds: float) -> None:
        """One turn of the loop."""
        with self._lock:
            self._turns.add(seconds)

    def looked(self, engine: str, seconds: float) -> None:
        """One look at an engine."""
        with self._lock:
            self._looks.setdefault(engine, _Clock(LOOK_BOUNDS_S)).add(seconds)

    def heard(self, record: Record) -> None:
        """Count a restart: a process is there, and one of the same engine has ended before it."""
        name = record.engine
        if name is None:
            return
        with self._lock:
            if record.kind in _ENDS and record.reason is not None:
                self._ends[name] = record.reason
            elif record.kind == "spawned" and (reason := self._ends.pop(name, None)) is not None:
                counts = self._restarts.setdefault(name, {})
                counts[reason] = counts.get(reason, 0) + 1
            elif record.kind == "removed":
                for known in (self._looks, self._ends, self._restarts):
                    known.pop(name, None)

    def turns(self) -> Durations:
        """Of all turns."""
        with self._lock:
            return self._turns.read()

    def looks(self) -> Mapping[str, Durations]:
        """Of all looks, by engine."""
        with self._lock:
            return {name: clock.read() for name, clock in self._looks.items()}

    def restarts(self) -> Mapping[str, Mapping[str, int]]:
        """By engine and reason."""
        with self._lock:
            return {name: dict(counts) for name, counts in self._restarts.items()}
