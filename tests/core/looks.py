"""Looks at an engine, as the probe makes them: what one says, and what one does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supervisord.core.messages import CanaryEnded, Sampled
from supervisord.core.samples import RankMetrics, Sample
from supervisord.core.spec import EngineSpec, ProbeSpec, SloSpec
from tests.core.play import Play, engine_spec, ready

TOTAL = 1000
"""Blocks of a rank here, the null block included: 5 % of them are 50."""


def rank(number: int = 0, **values: Any) -> RankMetrics:
    """One rank that idles, unless `values` say otherwise; `steps` moves all its counters."""
    steps = values.pop("steps", 10.0)
    base = RankMetrics(
        rank=number,
        running=0,
        waiting=0,
        awake=True,
        kv_usage=0.0,
        total_blocks=TOTAL,
        free_blocks=TOTAL - 1,
        iterations=steps,
        prompt_tokens=steps,
        generation_tokens=steps,
    )
    return replace(base, **values)


def page(at: float, *ranks: RankMetrics, **values: Any) -> Sample:
    """A look that saw these ranks."""
    sums: dict[str, int | None] = {}
    for name in ("running", "waiting"):
        known = [getattr(one, name) for one in ranks]
        sums[name] = None if None in known or not known else sum(known)
    free = [one.free_blocks for one in ranks if one.free_blocks is not None]
    totals = [one.total_blocks for one in ranks if one.total_blocks is not None]
    base = Sample(
        at=at,
        health_status=200,
        running=sums["running"],
        waiting=sums["waiting"],
        total_blocks=totals[0] if totals else None,
        free_blocks=min(free, default=None),
        metrics_ok=True,
        metrics_status=200,
        ranks=ranks,
        pool_blocks=sum(totals) if totals else None,
    )
    return replace(base, **values)


def look(at: float, **values: Any) -> Sample:
    """A look at an engine with one rank."""
    return page(at, rank(**values))


def missing(at: float, error: str = "timeout") -> Sample:
    """A look that saw nothing."""
    return Sample(at=at, health_error=error)


def stated(at: float, free: int, **values: Any) -> Sample:
    """A look at a patched build or a proxy: `/health` states free blocks, and there are no metrics."""
    return replace(Sample(at=at, health_status=200, free_blocks=free, free_stated=True, metrics_status=404), **values)


def spec(**keys: Any) -> EngineSpec:
    """An engine; `probe` and `slo` may be mappings too."""
    for table, kind in (("probe", ProbeSpec), ("slo", SloSpec)):
        if isinstance(keys.get(table), dict):
            keys[table] = kind(**keys[table])
    return engine_spec(**keys)


def serving(**keys: Any) -> Play:
    """Engine "a" is ready and has not been looked at."""
    made = spec(**keys)
    return ready(**{name: getattr(made, name) for name in keys})


def see(play: Play, sample: Sample, engine: str = "a") -> Play:
    """This look, at its own time."""
    return play.see(Sampled(engine, play.engine(engine).generation, sample), at=max(play.now, sample.at))


def canary(play: Play, *, ok: bool = True, sane: bool = True, possible: bool = True, after: float = 0.0) -> Play:
    """The canary comes back."""
    return play.see(CanaryEnded("a", play.engine().generation, ok, sane, possible, "HTTP 401"), after=after)
