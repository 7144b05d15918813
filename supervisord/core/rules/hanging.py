"""Rules for an engine that does not work any more: dead, unreachable, stalled, unresponsive.

HTTP alone proves nothing: `/health` stays 200 on a hung engine (measured: SIGSTOP of EngineCore or Worker), and a busy
one has needed 10 s for `/health` and 30 s for `/metrics`. So each rule needs evidence of its own kind, repeated.
"""

from __future__ import annotations

from typing import Final

from supervisord.core.model import Reason, Sample
from supervisord.core.rules import Finding, Remedy
from supervisord.core.spec import EngineSpec
from supervisord.core.watch import PROOF_FRACTION, Watch, others_still, sees_movement

UNAVAILABLE_LOOKS: Final = 2
LOOKS_MIN: Final = 3
"""A verdict needs so many looks in a row: a machine that was paused sees old and new with nothing between."""

TOLD_AFTER_S: Final = 60.0
TOLD_FRACTION: Final = 1 / 3
"""Stalls heal themselves (A07): one that is shorter than this, and than this part of its limit, is not worth a word."""
REFUSED_AFTER_S: Final = 30.0
"""Refused while ready means that nobody listens any more; a socket that is only slow times out instead."""


def engine_dead(watch: Watch) -> Finding | None:
    """`/health` 503: vLLM itself says that its engine died (it then lives on for seconds, or for ever: A09)."""
    if watch.unavailable == 0:
        return None
    times = "once" if watch.unavailable == 1 else f"{watch.unavailable} times in a row"
    reason = Reason("engine_dead", f"/health answered 503 {times} ({UNAVAILABLE_LOOKS} decide)")
    remedy = Remedy.KILL if watch.unavailable >= UNAVAILABLE_LOOKS else Remedy.CONFIRM
    return Finding(reason, remedy, {"looks": watch.unavailable, "looks_max": UNAVAILABLE_LOOKS})


def unreachable(watch: Watch, sample: Sample, spec: EngineSpec) -> Finding | None:
    """`/health` and `/metrics` both fail; timeouts also need failed canaries, a refused connection does not.

    The time is that between looks which failed: one that took long, or was judged late, proves nothing.
    """
    if watch.refused_since is not None:
        return _refused(sample.at - watch.refused_since, watch.refused_looks)
    if watch.failing_since is None:
        return None
    failing_s, limit_s = sample.at - watch.failing_since, spec.restart.unreachable_after_s
    failures, failures_max = watch.canary.failures, spec.probe.canary_failures
    if failing_s < _told_after_s(limit_s):
        return None
    text = f"/health and /metrics have failed for {failing_s:.0f} s (unreachable_after_s {limit_s:g})"
    if watch.canary.possible:
        text += f" and {failures} of {failures_max} canaries in a row (canary_failures)"
        decided = failing_s >= limit_s and failures >= failures_max
    else:
        # It cannot be asked for a completion: that much time, and every look of it, is all the evidence there can be.
        decided = failing_s >= limit_s and watch.failing_looks >= LOOKS_MIN
    numbers = {"failing_s": round(failing_s, 1), "limit_s": limit_s, "canaries": failures, "canaries_max": failures_max}
    return Finding(Reason("unreachable", text), Remedy.KILL if decided else Remedy.CONFIRM, numbers)


def _told_after_s(limit_s: float) -> float:
    return min(TOLD_AFTER_S, TOLD_FRACTION * limit_s)


def _refused(refused_s: float, looks: int) -> Finding:
    text = f"nobody has listened on its port for {refused_s:.0f} s ({REFUSED_AFTER_S:g} s decide); its process lives"
    remedy = Remedy.KILL if refused_s >= REFUSED_AFTER_S and looks >= LOOKS_MIN else Remedy.CONFIRM
    numbers = {"refused_s": round(refused_s, 1), "limit_s": REFUSED_AFTER_S}
    return Finding(Reason("unreachable", text), remedy, numbers)


def stalled(watch: Watch, sample: Sample, spec: EngineSpec) -> Finding | None:
    """Work is pending on a rank and none of its counters moved, though this look read them anew.

    A canary that completed since is proof of life, but only where there is one rank: with several nobody knows which
    one it reached, so each is judged by its own counters. Gauges alone prove nothing: they are stale after a mass
    cancel. Before the verdict a canary had its chance, or another rank serves meanwhile.
    """
    alone = len(watch.ranks) == 1
    worst: tuple[float, int, int] | None = None
    for rank in watch.ranks:
        since = rank.still_since
        if since is None or rank.seen_at != sample.at:
            continue
        if alone and watch.canary.ok_at is not None:
            since = max(since, watch.canary.ok_at)
        one = (rank.seen_at - since, rank.rank, rank.still_looks)
        worst = one if worst is None or one[0] > worst[0] else worst
    limit_s = spec.restart.stall_after_s
    if worst is None or worst[0] < _told_after_s(limit_s):
        return None
    still_s, number, looks = worst
    where = "" if alone else f" on rank {number}"
    text = (
        f"{sample.running or 0} running and {sample.waiting or 0} waiting requests, and no step or token{where} "
        f"for {still_s:.0f} s (stall_after_s {limit_s:g})"
    )
    numbers = {
        "still_s": round(still_s, 1),
        "limit_s": limit_s,
        "rank": number,
        "running": sample.running,
        "waiting": sample.waiting,
    }
    if not watch.canary.possible:
        # Gauges are stale after a mass cancel until the engine steps, and nobody can make this one step.
        text += "; it cannot be asked for a completion, so nobody can tell whether that is old news"
        return Finding(Reason("stalled", text), Remedy.TELL, numbers)
    proven = _asked(watch, sample, spec) or _others_work(watch, number, sample.at - still_s)
    decided = still_s >= limit_s and looks >= LOOKS_MIN and proven
    return Finding(Reason("stalled", text), Remedy.KILL if decided else Remedy.CONFIRM, numbers)


def _asked(watch: Watch, sample: Sample, spec: EngineSpec) -> bool:
    """Whether a canary had its chance to prove life: gauges are stale after a mass cancel, until the engine steps."""
    canary = watch.canary
    if canary.failures > 0:
        return True
    chance_s = min(spec.probe.canary_deadline_s, PROOF_FRACTION * spec.restart.stall_after_s)
    return canary.sent_at is not None and sample.at - canary.sent_at >= chance_s


def _others_work(watch: Watch, still: int, since: float) -> bool:
    """Whether requests are served by another rank while this one stands still: then its gauges are not just stale."""
    return any(rank.rank != still and rank.pending and rank.moved_at > since for rank in watch.ranks)


def unresponsive(watch: Watch, sample: Sample, spec: EngineSpec) -> Finding | None:
    """Nothing moved and canaries fail: a wedge that looks idle (A03). With work pending, `stalled` decides, and when.

    Where this look cannot see whether anything moves (no metrics), an engine that is only busy would look the same: it
    is told, and `unreachable` decides if `/health` fails too. An engine that may sleep unseen is told as well.
    """
    failures, failures_max = watch.canary.failures, spec.probe.canary_failures
    if failures == 0 or watch.asleep or others_still(watch, sample.at):
        return None
    what = "1 canary" if failures == 1 else f"{failures} canaries in a row"
    how = watch.canary.detail or f"no whole answer within {spec.probe.canary_deadline_s:g} s"
    text = f"{what} failed ({how}; {failures_max} decide)"
    numbers = {"canaries": failures, "canaries_max": failures_max, "deadline_s": spec.probe.canary_deadline_s}
    if not sees_movement(watch, sample.at):
        text += "; its metrics do not say whether anything moves, so it may only be busy"
        return Finding(Reason("unresponsive", text), Remedy.TELL, numbers)
    if may_sleep_unseen(spec, sample):
        text += "; this vLLM does not say whether it sleeps, so it may only be asleep"
        return Finding(Reason("unresponsive", text), Remedy.TELL, numbers)
    text += ", and nothing else moved"
    return Finding(Reason("unresponsive", text), Remedy.KILL if failures >= failures_max else Remedy.CONFIRM, numbers)


def may_sleep_unseen(spec: EngineSpec, sample: Sample) -> bool:
    """Whether sleep mode is on and no rank says whether it sleeps (releases before 0.12)."""
    enabled = spec.args.get("enable-sleep-mode") is True
    return enabled and all(rank.awake is None for rank in sample.ranks)
