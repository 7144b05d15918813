"""What a metrics page says, as numbers. None is unknown, never zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Odometer = tuple[float | None, float | None, float | None]
"""Counters that move when a rank works: steps, prompt tokens, generated tokens."""


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
    def odometer(self) -> Odometer:
        """What moves when it works."""
        return self.iterations, self.prompt_tokens, self.generation_tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an engine: what it said, as numbers. None is unknown, never zero.

    `health_status` is the HTTP status of /health (200, 503, ...), or None with `health_error` = "refused",
    "timeout" or "malformed".
    """

    at: float
    health_status: int | None = None
    health_error: str | None = None
    running: int | None = None
    waiting: int | None = None
    total_blocks: int | None = None
    free_blocks: int | None = None
    kv_usage: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    iterations: float | None = None
    host_bytes: int | None = None
    """Anonymous memory of all its processes; looked at less often than the rest, see `host_at`."""
    host_at: float | None = None
    version: str | None = None
    host_limit_bytes: int | None = None
    """Where its host memory would end: what it has and what the machine still has (MemAvailable)."""
    metrics_status: int | None = None
    """HTTP status of `/metrics`; None: no answer, so nobody knows whether there is a page."""
    metrics_ok: bool = False
    """Whether `/metrics` gave a page; what it says may still be unknown."""
    ranks: tuple[RankMetrics, ...] = ()
    pool_blocks: int | None = None
    """KV blocks of all ranks together."""
    free_stated: bool = False
    """`free_blocks` was stated by `/health` itself (patched builds, proxies)."""

    @property
    def pending(self) -> bool | None:
        """Whether requests run or wait anywhere; None when no gauge is known."""
        if self.running is None and self.waiting is None:
            return None
        return bool(self.running) or bool(self.waiting)
