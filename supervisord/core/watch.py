"""What is remembered of an engine between two looks, so that rules can judge runs of evidence instead of moments.

Three facts are kept apart: HTTP answers (or how it fails), the engine's counters move, a canary comes back. A look that
did not see something says nothing about it: it neither begins nor ends a run of evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from supervisord.core.memory import UNSEEN, MemoryWatch, observed
from supervisord.core.samples import Histogram, Odometer, RankMetrics, Sample
from supervisord.core.spec import EngineSpec, ProbeSpec, RestartSpec, SloSpec

WINDOW_S: Final = 300.0
"""Percentiles and rates are taken over this sliding window."""

POINT_EVERY_S: Final = 15.0
HTTP_SERVICE_UNAVAILABLE: Final = 503

PROOF_FRACTION: Final = 1 / 3
"""Of `stall_after_s`: after this much of it a canary is sent, and so long it has to come back before the verdict."""


@dataclass(frozen=True, slots=True)
class RankWatch:
    """One rank. `still_since`: since when work is pending without any counter moving; None: it moves, idles or sleeps.

    `seen_at`: the last look that saw its counters and its gauges. What lies between that and `still_since` is proven,
    because counters only grow.
    """

    rank: int
    odometer: Odometer
    moved_at: float
    seen_at: float
    still_since: float | None = None
    still_looks: int = 0
    """Looks since then that saw it still."""
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
    detail: str = ""
    """How the last one failed."""


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
    """One ready engine, since it became ready (`since`)."""

    since: float
    moved_at: float
    ranks: tuple[RankWatch, ...] = ()
    unavailable: int = 0
    """Looks that saw `/health` 503, without another answer between them."""
    failing_since: float | None = None
    """Since when `/health` and `/metrics` both fail."""
    refused_since: float | None = None
    failing_looks: int = 0
    refused_looks: int = 0
    low_since: float | None = None
    low_samples: int = 0
    low_canaries: int = 0
    """Canaries that came back while blocks were low and nothing else ran."""
    pool: int | None = None
    pool_looks: int = 0
    """Looks in a row that saw this KV pool."""
    told_limit: bool = False
    """What the free-blocks rule goes by has been said."""
    asleep: bool = False
    canary: Canary = Canary()
    points: tuple[Point, ...] = ()
    host: MemoryWatch = UNSEEN
    gpu: MemoryWatch = UNSEEN
    """Memory of its processes on GPUs, from sweeps."""
    idle_since: float | None = None
    """Since when requests wait while its GPUs are hardly used (`slo.gpu_util_min_percent`)."""


def renewed(old: Watch, now: float) -> Watch:
    """Begin anew after a time in which nobody judged (a drain that was taken back): old evidence is none.

    A canary that is still outstanding stays the only one, and its clock starts over.
    """
    canary = replace(old.canary, failures=0, counted=0, sent_at=None if old.canary.sent_at is None else now)
    return Watch(
        since=now, moved_at=now, told_limit=old.told_limit, canary=canary, points=old.points, host=old.host, gpu=old.gpu
    )


def looked(watch: Watch, sample: Sample) -> Watch:
    """Remember one look."""
    watch = replace(_reachability(watch, sample), points=_points(watch.points, sample))
    if not sample.ranks:
        return watch
    known = {rank.rank: rank for rank in watch.ranks}
    ranks = tuple(_rank(known.get(rank.rank), rank, sample.at) for rank in sample.ranks)
    moved_at = max([watch.moved_at, *(rank.moved_at for rank in ranks)])
    asleep = any(rank.awake is False for rank in sample.ranks)
    canary = watch.canary
    if moved_at > watch.moved_at:
        canary = replace(canary, failures=0)
    if asleep and canary.sent_at is not None:
        # It cannot come back before the engine wakes up.
        canary = replace(canary, sent_at=sample.at, counted=0)
    if asleep is not watch.asleep:
        # Sleep moves weights between GPU and host memory: growth is counted anew.
        watch = replace(watch, host=UNSEEN, gpu=UNSEEN)
    pool = sample.pool_blocks if sample.pool_blocks is not None else watch.pool
    return replace(
        watch,
        ranks=ranks,
        moved_at=moved_at,
        asleep=asleep,
        canary=canary,
        pool=pool,
        pool_looks=(watch.pool_looks if pool == watch.pool else 0) + (sample.pool_blocks is not None),
    )


def memory_looked(watch: Watch, sample: Sample, spec: RestartSpec, *, baseline_bytes: int | None) -> Watch:
    """Remember the host memory; a value that was only carried over from an earlier look is none."""
    if sample.host_bytes is None:
        return watch
    at = sample.host_at if sample.host_at is not None else sample.at
    host = observed(watch.host, at, sample.host_bytes, baseline_bytes, spec)
    return watch if host is watch.host else replace(watch, host=host)


def utilization_looked(watch: Watch, sample: Sample, percent: float | None, spec: SloSpec) -> Watch:
    """Remember whether requests wait while the GPUs idle; unknown says nothing."""
    if percent is None or sample.waiting is None:
        return watch
    idle = sample.waiting > 0 and percent < spec.gpu_util_min_percent
    since = watch.idle_since if watch.idle_since is not None else sample.at
    return watch if not idle and watch.idle_since is None else replace(watch, idle_since=since if idle else None)


def blocks_looked(watch: Watch, sample: Sample, *, low: bool | None) -> Watch:
    """Remember whether this look saw too few free blocks; None says nothing, and is no recovery either."""
    if low is False or watch.asleep:
        return watch if watch.low_since is None else replace(watch, low_since=None, low_samples=0, low_canaries=0)
    if low is None:
        return watch
    since = watch.low_since if watch.low_since is not None else sample.at
    canaries = 0 if pending(watch, sample) else watch.low_canaries
    return replace(watch, low_since=since, low_samples=watch.low_samples + 1, low_canaries=canaries)


def pending(watch: Watch, sample: Sample) -> bool | None:
    """Whether requests of others than our own canary run or wait; None when no gauge is known."""
    if sample.pending is None:
        return None
    own = 0 if watch.canary.sent_at is None else 1
    return (sample.running or 0) + (sample.waiting or 0) > own


def still(watch: Watch, at: float) -> bool:
    """Whether the look at `at` saw work pending on a rank that does not move."""
    return any(rank.still_since is not None and rank.seen_at == at for rank in watch.ranks)


def others_still(watch: Watch, at: float) -> bool:
    """The same, and that work was there before our canary: a hung one may or may not be in the gauges."""
    sent_at = watch.canary.sent_at
    return any(
        rank.still_since is not None and rank.seen_at == at and (sent_at is None or rank.still_since < sent_at)
        for rank in watch.ranks
    )


def stillest(watch: Watch) -> int | None:
    """The rank that a canary should reach: with several, the one that has stood still longest; None: any."""
    waiting = [(rank.still_since, rank.rank) for rank in watch.ranks if rank.still_since is not None]
    return min(waiting)[1] if waiting and len(watch.ranks) > 1 else None


def sees_movement(watch: Watch, at: float) -> bool:
    """Whether the look at `at` saw the counters of every rank."""
    return bool(watch.ranks) and all(rank.seen_at == at for rank in watch.ranks)


def _reachability(watch: Watch, sample: Sample) -> Watch:
    unavailable = watch.unavailable
    if sample.health_status is not None:
        unavailable = unavailable + 1 if sample.health_status == HTTP_SERVICE_UNAVAILABLE else 0
    failed = sample.health_error is not None and not sample.metrics_ok
    refused = sample.health_error == "refused"
    if not (failed or refused or watch.failing_looks or watch.refused_looks) and unavailable == watch.unavailable:
        return watch  # nearly every look
    return replace(
        watch,
        unavailable=unavailable,
        failing_since=(watch.failing_since if watch.failing_since is not None else sample.at) if failed else None,
        refused_since=(watch.refused_since if watch.refused_since is not None else sample.at) if refused else None,
        failing_looks=watch.failing_looks + 1 if failed else 0,
        refused_looks=watch.refused_looks + 1 if refused else 0,
    )


def _rank(old: RankWatch | None, new: RankMetrics, at: float) -> RankWatch:
    if old is None:
        return RankWatch(new.rank, new.odometer, moved_at=at, seen_at=at, pending=new.pending)
    pairs = tuple(zip(old.odometer, new.odometer, strict=True))
    merged = tuple(after if after is not None else before for before, after in pairs)
    odometer: Odometer = (merged[0], merged[1], merged[2])
    if new.awake is False or any(None not in pair and pair[0] != pair[1] for pair in pairs):
        # Sleep is stillness with a known cause; what follows it begins anew.
        return RankWatch(new.rank, odometer, moved_at=at, seen_at=at, pending=new.pending)
    # Steps are the heartbeat. Without them both kinds of tokens are needed: a prefill generates none.
    steps, prompt, generated = (None not in pair for pair in pairs)
    if new.pending is None or not (steps or (prompt and generated)):
        return replace(old, odometer=odometer)
    since, looks = None, 0
    if new.pending:
        began_at = old.moved_at if old.pending else at
        since = old.still_since if old.still_since is not None else began_at
        looks = old.still_looks + 1
    return RankWatch(new.rank, odometer, old.moved_at, at, still_since=since, still_looks=looks, pending=new.pending)


def _points(points: tuple[Point, ...], sample: Sample) -> tuple[Point, ...]:
    kept = points
    if points and points[0].at < sample.at - WINDOW_S:
        kept = tuple(point for point in points if point.at >= sample.at - WINDOW_S)
    if not sample.ranks or (kept and sample.at - kept[-1].at < POINT_EVERY_S):
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


def canary_due(watch: Watch, spec: EngineSpec, now: float, *, confirming: bool, busy: bool) -> bool:
    """Whether one should be sent: none is outstanding, nothing moves, the engine is not asleep.

    `busy`: others have work pending; then a stall is being judged, which may be shorter than `canary_after_s`.
    `confirming`: a rule waits for canaries; then one follows the other by one deadline, at once if nobody is busy.
    """
    canary = watch.canary
    if canary.sent_at is not None or watch.asleep or not canary.possible:
        return False
    quiet_s = spec.probe.canary_after_s
    if busy:
        quiet_s = min(quiet_s, PROOF_FRACTION * spec.restart.stall_after_s)
    if not (confirming and not busy) and now < watch.moved_at + quiet_s:
        return False
    pause_s = spec.probe.canary_deadline_s if confirming else quiet_s
    return canary.ended_at is None or now >= canary.ended_at + pause_s


def canary_sent(watch: Watch, now: float) -> Watch:
    """Remember that one is under way."""
    return replace(watch, canary=replace(watch.canary, sent_at=now, counted=0))


def canary_ended(watch: Watch, now: float, *, ok: bool, sane: bool, detail: str = "") -> Watch:
    """Remember how it ended: a whole answer resets the failures, also when it came late."""
    old = watch.canary
    if ok:
        canary = replace(old, failures=0, ok_at=now, garbage=0 if sane else old.garbage + 1, detail="")
    else:
        counts = old.counted == 0 and not watch.asleep
        canary = replace(old, failures=old.failures + (1 if counts else 0), detail=detail)
    low = watch.low_canaries + 1 if ok and watch.low_since is not None else watch.low_canaries
    return replace(watch, canary=replace(canary, sent_at=None, counted=0, ended_at=now), low_canaries=low)


def canary_turned_away(watch: Watch, now: float) -> Watch:
    """It was refused for the moment (too many requests): that is no evidence, and another one follows."""
    return replace(watch, canary=replace(watch.canary, sent_at=None, counted=0, ended_at=now))


def canary_impossible(watch: Watch) -> Watch:
    """This engine cannot be asked (no completions, another key): that is no evidence, and is not tried again."""
    return replace(watch, canary=replace(watch.canary, sent_at=None, counted=0, failures=0, possible=False))


def canary_outlived(watch: Watch, spec: ProbeSpec, now: float) -> Watch:
    """Count each deadline that the outstanding canary outlives as a failure.

    It is neither aborted (an abort mid-decode has wedged engines, A05) nor joined by another one. Deadlines that passed
    while nobody looked at the clock (a daemon that was stopped, a reload with a shorter one) count once.
    """
    canary = watch.canary
    if canary.sent_at is None:
        return watch
    outlived = max(canary.counted, int((now - canary.sent_at) // spec.canary_deadline_s))
    while now >= canary.sent_at + (outlived + 1) * spec.canary_deadline_s:
        outlived += 1
    if outlived == canary.counted:
        return watch
    failures = canary.failures + (0 if watch.asleep else 1)
    return replace(watch, canary=replace(canary, counted=outlived, failures=failures))


def canary_deadline(watch: Watch, spec: ProbeSpec) -> float | None:
    """When the outstanding canary outlives its next deadline."""
    canary = watch.canary
    return None if canary.sent_at is None else canary.sent_at + (canary.counted + 1) * spec.canary_deadline_s
