"""What is remembered of an engine between two looks, so that rules can judge runs of evidence instead of moments.

Three facts are kept apart: HTTP answers (or how it fails), the engine's counters move, a canary comes back. A look that
failed is a missing sample: it is remembered as that, and never read as "nothing moved".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from supervisord.core.samples import Histogram, RankMetrics, Sample
from supervisord.core.spec import ProbeSpec

WINDOW_S: Final = 300.0
"""Percentiles and rates are taken over this sliding window."""

POINT_EVERY_S: Final = 15.0
HTTP_SERVICE_UNAVAILABLE: Final = 503

Odometer = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, slots=True)
class RankWatch:
    """One rank. `still_since`: since when work was seen pending without any counter moving; None: it moves or idles."""

    rank: int
    odometer: Odometer
    moved_at: float
    still_since: float | None = None
    pending: bool | None = None


@dataclass(frozen=True, slots=True)
class Canary:
    """Tiny completions of our own. `counted`: how many deadlines the outstanding one has outlived already."""

    sent_at: float | None = None
    counted: int = 0
    failures: int = 0
    ok_at: float | None = None
    ended_at: float | None = None
    garbage: int = 0
    possible: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """Totals at one time, for rates and percentiles."""

    at: float
    generation_tokens: float | None
    prefix_queries: float | None
    prefix_hits: float | None
    draft_tokens: float | None
    accepted_tokens: float | None
    ttft: Histogram | None


@dataclass(frozen=True, slots=True)
class Watch:
    """One ready engine, since it became ready."""

    moved_at: float
    ranks: tuple[RankWatch, ...] = ()
    unavailable: int = 0
    """`/health` 503 in a row."""
    failing_since: float | None = None
    """Since when `/health` and `/metrics` both fail."""
    refused_since: float | None = None
    low_since: float | None = None
    low_samples: int = 0
    low_canaries: int = 0
    """Canaries that came back while blocks were low and nothing ran."""
    asleep: bool = False
    canary: Canary = Canary()
    points: tuple[Point, ...] = ()


def looked(watch: Watch, sample: Sample) -> Watch:
    """Remember one look."""
    watch = _reachability(watch, sample)
    if not sample.ranks:
        return watch
    known = {rank.rank: rank for rank in watch.ranks}
    ranks = tuple(_rank(known.get(rank.rank), rank, sample.at) for rank in sample.ranks)
    moved_at = max([watch.moved_at, *(rank.moved_at for rank in ranks)])
    canary = watch.canary
    if moved_at > watch.moved_at:
        canary = replace(canary, failures=0)
    return replace(
        watch,
        ranks=ranks,
        moved_at=moved_at,
        asleep=any(rank.awake is False for rank in sample.ranks),
        canary=canary,
        points=_points(watch.points, sample),
    )


def blocks_looked(watch: Watch, sample: Sample, *, low: bool | None) -> Watch:
    """Remember whether this look saw too few free blocks; None says nothing, and is no recovery either."""
    if low is None:
        return watch
    if not low:
        return replace(watch, low_since=None, low_samples=0, low_canaries=0)
    since = watch.low_since if watch.low_since is not None else sample.at
    canaries = 0 if sample.pending else watch.low_canaries
    return replace(watch, low_since=since, low_samples=watch.low_samples + 1, low_canaries=canaries)


def _reachability(watch: Watch, sample: Sample) -> Watch:
    unavailable = watch.unavailable + 1 if sample.health_status == HTTP_SERVICE_UNAVAILABLE else 0
    failed = sample.health_error is not None and not sample.metrics_ok
    refused = sample.health_error == "refused"
    return replace(
        watch,
        unavailable=unavailable,
        failing_since=(watch.failing_since if watch.failing_since is not None else sample.at) if failed else None,
        refused_since=(watch.refused_since if watch.refused_since is not None else sample.at) if refused else None,
    )


def _rank(old: RankWatch | None, new: RankMetrics, at: float) -> RankWatch:
    if old is None:
        return RankWatch(new.rank, new.odometer, moved_at=at, pending=new.pending)
    if all(value is None for value in new.odometer):
        # Nothing is known of its counters: neither movement nor stillness.
        return replace(old, still_since=None, pending=new.pending)
    moved = any(a is not None and b is not None and a != b for a, b in zip(old.odometer, new.odometer, strict=True))
    merged = tuple(b if b is not None else a for a, b in zip(old.odometer, new.odometer, strict=True))
    odometer: Odometer = (merged[0], merged[1], merged[2])
    if moved or not new.pending:
        return RankWatch(new.rank, odometer, moved_at=at if moved else old.moved_at, pending=new.pending)
    return RankWatch(
        new.rank,
        odometer,
        moved_at=old.moved_at,
        still_since=old.still_since if old.still_since is not None else at,
        pending=True,
    )


def _points(points: tuple[Point, ...], sample: Sample) -> tuple[Point, ...]:
    kept = tuple(point for point in points if point.at >= sample.at - WINDOW_S)
    if kept and sample.at - kept[-1].at < POINT_EVERY_S:
        return kept
    return (*kept, point_of(sample))


def point_of(sample: Sample) -> Point:
    """The totals of one look, over all ranks; unknown if one rank's is unknown."""
    return Point(
        at=sample.at,
        generation_tokens=_total([rank.generation_tokens for rank in sample.ranks]),
        prefix_queries=_total([rank.prefix_queries for rank in sample.ranks]),
        prefix_hits=_total([rank.prefix_hits for rank in sample.ranks]),
        draft_tokens=_total([rank.draft_tokens for rank in sample.ranks]),
        accepted_tokens=_total([rank.accepted_tokens for rank in sample.ranks]),
        ttft=_joined([rank.ttft for rank in sample.ranks]),
    )


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _joined(histograms: list[Histogram | None]) -> Histogram | None:
    known = [histogram for histogram in histograms if histogram is not None]
    if not known or len(known) != len(histograms) or any(h.bounds_s != known[0].bounds_s for h in known):
        return None
    return Histogram(known[0].bounds_s, tuple(map(sum, zip(*(h.counts for h in known), strict=True))))


# --- canary -----------------------------------------------------------------------------------------------------------


def canary_due(watch: Watch, spec: ProbeSpec, now: float, *, confirming: bool) -> bool:
    """Whether one should be sent: none is outstanding, nothing moves, the engine is not asleep.

    While a rule is being confirmed the next follows its predecessor by one deadline, otherwise by `canary_after_s`.
    """
    canary = watch.canary
    if canary.sent_at is not None or watch.asleep or not canary.possible:
        return False
    if confirming:
        return canary.ended_at is None or now >= canary.ended_at + spec.canary_deadline_s
    return now >= max(watch.moved_at, canary.ended_at or 0.0) + spec.canary_after_s


def canary_sent(watch: Watch, now: float) -> Watch:
    """Remember that one is under way."""
    return replace(watch, canary=replace(watch.canary, sent_at=now, counted=0))


def canary_ended(watch: Watch, now: float, *, ok: bool, sane: bool) -> Watch:
    """Remember how it ended: a whole answer resets the failures, also when it came late."""
    old = watch.canary
    if ok:
        canary = replace(old, failures=0, ok_at=now, garbage=0 if sane else old.garbage + 1)
    else:
        canary = replace(old, failures=old.failures + (1 if old.counted == 0 else 0))
    low = watch.low_canaries + 1 if ok and watch.low_since is not None else watch.low_canaries
    return replace(watch, canary=replace(canary, sent_at=None, counted=0, ended_at=now), low_canaries=low)


def canary_impossible(watch: Watch) -> Watch:
    """This engine cannot be asked (no completions, another key): that is no evidence, and is not tried again."""
    return replace(watch, canary=replace(watch.canary, sent_at=None, counted=0, possible=False))


def canary_outlived(watch: Watch, spec: ProbeSpec, now: float) -> Watch:
    """Count each deadline that the outstanding canary outlives as a failure.

    It is neither aborted (an abort mid-decode has wedged engines, A05) nor joined by another one.
    """
    canary = watch.canary
    if canary.sent_at is None:
        return watch
    outlived = int((now - canary.sent_at) // spec.canary_deadline_s)
    if outlived <= canary.counted:
        return watch
    failures = canary.failures + outlived - canary.counted
    return replace(watch, canary=replace(canary, counted=outlived, failures=failures))


def canary_deadline(watch: Watch, spec: ProbeSpec) -> float | None:
    """When the outstanding canary outlives its next deadline."""
    canary = watch.canary
    return None if canary.sent_at is None else canary.sent_at + (canary.counted + 1) * spec.canary_deadline_s
