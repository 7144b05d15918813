"""Who may be restarted: the engines that something was done to, until they have been well again for a while."""

from __future__ import annotations

from collections.abc import Iterable

REST_S = 12.0
"""An engine that was ready for so long after its last fault ended is none that a rule still has evidence against."""
BLIND_S = 60.0
"""A probe that hangs is noticed after 31 s, and the next one needs a few: what it sees may have been for so long."""


class Blame:
    """Faults begin and end; engines are seen. Times are monotonic. Pure: the storm has a lock around it."""

    def __init__(self, engines: Iterable[str]) -> None:
        self._open = dict.fromkeys(engines, 0)
        self._ready_since: dict[str, float | None] = dict.fromkeys(self._open)
        self._rest_s = dict.fromkeys(self._open, 0.0)
        """Of one that nothing was ever done to, none."""
        self._blind_until = dict.fromkeys(self._open, 0.0)
        self._generation: dict[str, int] = {}

    def begin(self, engines: Iterable[str]) -> None:
        """Something is done to these."""
        for name in engines:
            self._open[name] += 1
            self._ready_since[name] = None
            self._rest_s[name] = REST_S

    def end(self, engines: Iterable[str]) -> None:
        """And it is undone."""
        for name in engines:
            self._open[name] -= 1
            self._ready_since[name] = None

    def blind(self, engines: Iterable[str], now: float) -> None:
        """What was done to these may come out later than usual."""
        for name in engines:
            self._blind_until[name] = now + BLIND_S if self._rest_s[name] else 0.0

    def open_faults(self, engine: str) -> int:
        """How many befall it now."""
        return self._open[engine]

    def well(self, engine: str, now: float) -> bool:
        """Nothing that was done to it can be why it is restarted now."""
        since = self._ready_since[engine]
        if self._open[engine] or since is None:
            return False
        return now - max(since, self._blind_until[engine]) >= self._rest_s[engine]

    def seen(self, engine: str, state: str, generation: int, now: float, *, adopting: bool = False) -> str | None:
        """An engine was looked at; what is wrong about that.

        `adopting`: the daemon has just begun, and what it found is `starting` until it answers once.
        """
        before = self._generation.get(engine, generation)
        self._generation[engine] = max(before, generation)
        well = self.well(engine, now)
        if generation > before and well:
            return f"{engine} was restarted (generation {before} to {generation}) though nothing was done to it"
        if adopting and state == "starting" and generation == before:
            return None
        if state != "ready":
            if well:
                return f"{engine} is {state} though nothing was done to it"
            self._ready_since[engine] = None
        elif self._ready_since[engine] is None or generation > before:
            self._ready_since[engine] = now
        return None
