"""Who is left alone for a while: without quiet no engine that faults befall is ever one that must not be restarted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

SHORT_S = 25.0
LONG_S = 45.0
"""With GPUs: before an engine's rest can begin, the daemon has to see again."""

Unit = frozenset[str]
"""Engines that a fault of one befalls too."""


class Quiet:
    """Phases by turns: some engines without GPUs are left alone; half of all, and the sight of GPUs too."""

    def __init__(self, units: Sequence[Unit], with_gpus: Collection[str], rng: Random) -> None:
        self._units = units
        self._with_gpus = frozenset(with_gpus)
        self._rng = rng
        self._until = 0.0
        self._long = True
        self.engines: Unit = frozenset()

    @property
    def gpus(self) -> bool:
        """Nothing may befall all GPUs, or how the daemon sees them."""
        return bool(self.engines & self._with_gpus)

    def turns(self, now: float) -> bool:
        """Whether another phase begins now."""
        if now < self._until:
            return False
        self._long = not self._long
        units = [unit for unit in self._units if self._long or not unit & self._with_gpus]
        self.engines = frozenset().union(*self._rng.sample(units, len(units) // 2))
        self._until = now + (LONG_S if self._long else SHORT_S)
        return True
