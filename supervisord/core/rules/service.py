"""Rules that tell and never restart: garbage instead of text, and the operator's service levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from supervisord.core.gpu_inventory import label
from supervisord.core.model import Gpu, Reason
from supervisord.core.rules import Finding, Remedy
from supervisord.core.samples import Histogram
from supervisord.core.spec import EngineSpec
from supervisord.core.watch import Point, Watch

GARBAGE_TIMES: Final = 3
PASSING: Final = frozenset({"gpu_first_look", "gpu_probe_hangs", "gpu_released"})
"""Why nothing is known of GPUs for a moment, or because somebody wanted it so."""
IDLE_FOR_S: Final = 60.0
REQUESTS_MIN: Final = 10
"""A percentile of fewer requests is an anecdote."""


def garbage(watch: Watch) -> Finding | None:
    """Canaries came back empty or as one repeated character: broken weights, a broken kernel, NaN."""
    times = watch.canary.garbage
    if times < GARBAGE_TIMES:
        return None
    text = f"{times} canaries in a row came back empty or as one repeated character"
    return Finding(Reason("garbage", text), Remedy.TELL, {"canaries": times, "canaries_max": GARBAGE_TIMES})


def slo(watch: Watch, spec: EngineSpec) -> Finding | None:
    """TTFT p95 of the sliding window above what the operator wants."""
    limit_ms = spec.slo.ttft_p95_ms
    p95_ms = ttft_p95_ms(watch.points)
    if limit_ms <= 0 or p95_ms is None or p95_ms <= limit_ms:
        return None
    text = f"time to first token p95 is {p95_ms:.0f} ms (ttft_p95_ms {limit_ms:g})"
    return Finding(Reason("slo", text), Remedy.TELL, {"ttft_p95_ms": round(p95_ms, 1), "limit_ms": limit_ms})


def utilization_percent(gpus: Sequence[Gpu]) -> float | None:
    """Of the busiest of an engine's GPUs; None if one is unknown."""
    known = [gpu.reading.utilization_percent for gpu in gpus if gpu.reading is not None]
    values = [value for value in known if value is not None]
    return max(values) if values and len(values) == len(gpus) else None


def idle_gpus(watch: Watch, spec: EngineSpec, now: float) -> Finding | None:
    """Requests wait and the GPUs are hardly used: something else is the bottleneck."""
    if watch.idle_since is None or now - watch.idle_since < IDLE_FOR_S:
        return None
    limit = spec.slo.gpu_util_min_percent
    text = f"requests have waited for {now - watch.idle_since:.0f} s while its GPUs are used less than {limit:g} %"
    return Finding(Reason("gpu_idle", f"{text} (gpu_util_min_percent)"), Remedy.TELL, {"limit_percent": limit})


def of_gpus(gpus: Sequence[Gpu], trouble: Reason | None) -> Iterator[Finding]:
    """What is wrong with the GPUs of an engine, or why nobody knows."""
    told = set()
    if trouble is not None and trouble.code not in PASSING:
        told.add(trouble.code)
        yield Finding(trouble, Remedy.TELL, {})
    for gpu in gpus:
        for reason in gpu.reasons:
            if reason.code not in told:
                told.add(reason.code)
                yield Finding(Reason(reason.code, f"{label(gpu)}: {reason.message}"), Remedy.TELL, {"gpu": gpu.uuid})


def ttft_p95_ms(points: tuple[Point, ...]) -> float | None:
    """Milliseconds, over the requests between the first and the last point; None when there were too few."""
    histograms = [point.ttft for point in points if point.ttft is not None]
    if len(histograms) < 2:  # noqa: PLR2004 (a difference needs two)
        return None
    seconds = quantile(histograms[0], histograms[-1], 0.95)
    return None if seconds is None else seconds * 1000.0


def quantile(old: Histogram, new: Histogram, q: float) -> float | None:
    """Quantile in seconds of what came between two cumulative histograms, linear within a bucket.

    None when the bounds differ, a counter went back (another process), or fewer than REQUESTS_MIN requests came. In the
    last bucket, which has no upper bound, its lower bound is the answer.
    """
    if old.bounds_s != new.bounds_s:
        return None
    counts = [b - a for a, b in zip(old.counts, new.counts, strict=True)]
    if not counts or min(counts) < 0 or counts[-1] < REQUESTS_MIN:
        return None
    wanted = q * counts[-1]
    index = next(number for number, count in enumerate(counts) if count >= wanted)
    lower_s, below = (new.bounds_s[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    bound_s = new.bounds_s[index]
    if bound_s == float("inf"):
        return lower_s
    return lower_s + (bound_s - lower_s) * (wanted - below) / (counts[index] - below)


def rate_per_s(points: tuple[Point, ...], latest_s: float) -> float | None:
    """Generated tokens per second over about the last `latest_s`; None when unknown or another process began."""
    if len(points) < 2:  # noqa: PLR2004 (a difference needs two)
        return None
    last = points[-1]
    first = next(point for point in points if point.at >= last.at - latest_s or point is points[-2])
    if first.generation_tokens is None or last.generation_tokens is None or last.at <= first.at:
        return None
    grown = last.generation_tokens - first.generation_tokens
    return grown / (last.at - first.at) if grown >= 0 else None


def hit_rate(points: tuple[Point, ...]) -> float | None:
    """Prefix-cache hits by queries in the window; None when nobody asked."""
    return _ratio([(point.prefix_hits, point.prefix_queries) for point in points])


def acceptance_rate(points: tuple[Point, ...]) -> float | None:
    """Accepted by drafted tokens in the window (speculative decoding)."""
    return _ratio([(point.accepted_tokens, point.draft_tokens) for point in points])


def _ratio(pairs: list[tuple[float | None, float | None]]) -> float | None:
    known = [(part, whole) for part, whole in pairs if part is not None and whole is not None]
    if len(known) < 2:  # noqa: PLR2004 (a difference needs two)
        return None
    part, whole = known[-1][0] - known[0][0], known[-1][1] - known[0][1]
    return part / whole if whole > 0 and 0 <= part <= whole else None
