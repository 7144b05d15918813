"""What a metrics page says, as numbers. None is unknown, never zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound in seconds, ascending; the last bound is infinity."""

    bounds_s: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """One data-parallel rank (label `engine`). Counters are totals since the engine started; None is unknown.

    `total_blocks` includes the null block that vLLM keeps, so an idle rank has `total_blocks - 1` free. Blocks that
    only hold cached prefixes are free.
    """

    rank: int
    running: int | None = None
    waiting: int | None = None
    waiting_by_reason: Mapping[str, int] | None = None
    awake: bool | None = None
    kv_usage: float | None = None
    total_blocks: int | None = None
    free_blocks: int | None = None
    preemptions: float | None = None
    iterations: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    finished: Mapping[str, float] | None = None
    """Requests by finished_reason: stop, length, abort, error, ..."""
    ttft: Histogram | None = None
    inter_token: Histogram | None = None

    @property
    def pending(self) -> bool | None:
        """Whether requests run or wait; None when neither gauge is known."""
        if self.running is None and self.waiting is None:
            return None
        return bool(self.running) or bool(self.waiting)

    @property
    def odometer(self) -> tuple[float | None, float | None, float | None]:
        """Counters that move when the rank works: steps, prompt tokens, generated tokens."""
        return self.iterations, self.prompt_tokens, self.generation_tokens
