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
        """Of one that nothing was done to since it rested, none."""
        self._blinded: frozenset[str] = frozenset()
        self._blind_until = 0.0
        self._generation: dict[str, int] = {}
        self._spoilt: dict[str, int] = {}
        """Generations that a fault has left something in."""
        self._well_at: dict[str, float | None] = dict.fromkeys(self._open)
        self.guarded_s = dict.fromkeys(self._open, 0.0)
        """How long it was looked at while a restart would have been a violation."""

    def begin(self, engines: Iterable[str], *, rest_s: float = REST_S) -> None:
        """Something is done to these. No `rest_s` is needed after what leaves nothing that a rule could see."""
        for name in engines:
            self._open[name] += 1
            self._ready_since[name] = self._well_at[name] = None
            self._rest_s[name] = max(self._rest_s[name], rest_s)

    def end(self, engines: Iterable[str], *, spoils: bool = False) -> None:
        """And it is undone. What `spoils` stays in a process until it is another one, maybe in one begun just now."""
        for name in engines:
            self._open[name] -= 1
            self._ready_since[name] = self._well_at[name] = None
            if spoils:
                self._spoilt[name] = self._generation.get(name, 0) + 1

    def blind(self, engines: Iterable[str], until: float, *, shifting: bool = False) -> None:
        """The daemon may not see the GPUs of these as they are (infinity: now it cannot): what befell them comes later.

        `shifting`: GPUs come or go; who is being started just now may have got another one than its own.
        """
        self._blinded = frozenset(engines)
        self._blind_until = until
        for name in self._blinded:
            if shifting and self._ready_since[name] is None:
                self._rest_s[name] = REST_S

    def sees(self, now: float) -> None:
        """The daemon has shown that it sees the GPUs as they are."""
        if self._blind_until < float("inf"):
            self._blind_until = min(self._blind_until, now)

    def open_faults(self, engine: str) -> int:
        """How many befall it now."""
        return self._open[engine]

    def well(self, engine: str, now: float) -> bool:
        """Nothing that was done to it can be why it is restarted now."""
        since = self._ready_since[engine]
        if self._open[engine] or since is None or self._generation[engine] <= self._spoilt.get(engine, -1):
            return False
        if self._rest_s[engine] and engine in self._blinded:
            since = max(since, self._blind_until)
        return now - since >= self._rest_s[engine]

    def seen(self, engine: str, state: str, generation: int, now: float, *, adopting: bool = False) -> str | None:
        """An engine was looked at; what is wrong about that.

        `adopting`: the daemon has just begun, and what it found is `starting` until it answers once.
        """
        before = self._generation.setdefault(engine, generation)
        well = self._rested(engine, now)
        self._generation[engine] = max(before, generation)
        if generation > before:
            if well:
                return f"{engine} was restarted (generation {before} to {generation}) though nothing was done to it"
            if engine in self._blinded:  # begun while a GPU was not counted, it may run on another than its own
                self._rest_s[engine] = REST_S
        if adopting and state == "starting" and generation == before:
            return None
        if state != "ready":
            if well:
                return f"{engine} is {state} though nothing was done to it"
            self._ready_since[engine] = None
        elif self._ready_since[engine] is None or generation > before:
            self._ready_since[engine] = now
        return None

    def _rested(self, engine: str, now: float) -> bool:
        """Whether it is well; from then on it is like one that nothing was ever done to."""
        well, before = self.well(engine, now), self._well_at[engine]
        if well:
            self._rest_s[engine] = 0.0
            self.guarded_s[engine] += now - before if before is not None else 0.0
        self._well_at[engine] = now if well else None
        return well
