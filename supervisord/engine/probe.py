"""One look at an engine: GET /health and GET /metrics, as numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from supervisord.core.model import Sample
from supervisord.core.samples import RankMetrics
from supervisord.engine import metrics
from supervisord.engine.http import Answer, Client, Failure, Target
from supervisord.engine.metrics import PageMetrics

_SMALL_BYTES: Final = 64 << 10
_OK: Final = 200
_BLOCKS_MAX: Final = 10**12
_Number = TypeVar("_Number", int, float)
_VERSION: Final = re.compile(r"[0-9A-Za-z.+_-]{1,64}")


class EngineProbe:
    """Looks at one process of an engine (make a new one for each generation). For one thread at a time.

    `timeout_s` is the total time of each request; a loaded machine has answered /health after 10 s, /metrics after 30.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._client = Client(Target(host, port))
        self._timeout_s = timeout_s
        self._version: str | None = None
        self._version_asked = False
        self.last_page: PageMetrics | None = None
        """What the metrics page of the last look said; None when there was none."""

    def look(self, at: float, host_bytes: int | None) -> Sample:
        """Ask once; takes two timeouts at most. `at` and `host_bytes` are passed through."""
        health = self._client.get("/health", timeout_s=self._timeout_s, limit_bytes=_SMALL_BYTES)
        refused = isinstance(health, Failure) and health.kind == "refused"
        page = None if refused else self._client.get("/metrics", timeout_s=self._timeout_s)
        if isinstance(page, Answer) and page.status == _OK:
            self.last_page = metrics.parse(page.body)
            self._ask_version()
        else:
            self.last_page = None
        ranks = () if self.last_page is None else self.last_page.ranks
        worst = worst_rank(ranks) or RankMetrics(rank=0)
        stated = _block_table_stats(health)
        return Sample(
            at=at,
            health_status=health.status if isinstance(health, Answer) else None,
            health_error=health.kind if isinstance(health, Failure) else None,
            running=_sum(ranks, lambda rank: rank.running),
            waiting=_sum(ranks, lambda rank: rank.waiting),
            total_blocks=stated.get("total_blocks", worst.total_blocks),
            free_blocks=stated.get("free_blocks", worst.free_blocks),
            kv_usage=worst.kv_usage,
            prompt_tokens=_sum(ranks, lambda rank: rank.prompt_tokens),
            generation_tokens=_sum(ranks, lambda rank: rank.generation_tokens),
            iterations=_sum(ranks, lambda rank: rank.iterations),
            host_bytes=host_bytes,
            host_at=at if host_bytes is not None else None,
            version=self._version,
            metrics_ok=self.last_page is not None,
            metrics_status=page.status if isinstance(page, Answer) else None,
            ranks=ranks,
            pool_blocks=None if self.last_page is None else self.last_page.num_gpu_blocks,
            free_stated="free_blocks" in stated,
        )

    def close(self) -> None:
        """Give the connection back."""
        self._client.close()

    def _ask_version(self) -> None:
        """Once per process, and only if it answers at all: proxies and old builds have no /version."""
        if self._version_asked:
            return
        answer = self._client.get("/version", timeout_s=self._timeout_s, limit_bytes=_SMALL_BYTES)
        if not isinstance(answer, Answer):
            return
        self._version_asked = True
        version = answer.json_object().get("version")
        if isinstance(version, str) and _VERSION.fullmatch(version):
            self._version = version


def worst_rank(ranks: Sequence[RankMetrics]) -> RankMetrics | None:
    """The rank with the fewest free blocks; where the pool is unknown, the one with the highest usage."""
    by_blocks = [(rank.free_blocks, rank.rank, rank) for rank in ranks if rank.free_blocks is not None]
    by_usage = [(-rank.kv_usage, rank.rank, rank) for rank in ranks if rank.kv_usage is not None]
    return min(by_blocks or by_usage, default=(0, 0, None))[2]


def _block_table_stats(health: Answer | Failure) -> dict[str, int]:
    """Block numbers in the JSON of /health, which patched builds and proxies send; vLLM's own body is empty."""
    if not isinstance(health, Answer) or health.status != _OK:
        return {}
    stats = health.json_object().get("block_table_stats")
    if not isinstance(stats, dict):
        return {}
    return {key: value for key, value in stats.items() if type(value) is int and 0 <= value <= _BLOCKS_MAX}


def _sum(ranks: Sequence[RankMetrics], value_of: Callable[[RankMetrics], _Number | None]) -> _Number | None:
    """Sum over all ranks; unknown if one is unknown or there are none."""
    known = [value for value in map(value_of, ranks) if value is not None]
    return sum(known) if known and len(known) == len(ranks) else None
