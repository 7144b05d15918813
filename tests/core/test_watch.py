"""What is remembered between two looks: runs of evidence, movement by rank, canaries, the sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisord.core import watch
from supervisord.core.samples import Histogram, RankMetrics, Sample
from supervisord.core.spec import ProbeSpec
from supervisord.core.watch import Canary, RankWatch, Watch
from tests.core.looks import look, missing, page, rank, spec

NEW = Watch(since=0.0, moved_at=0.0)


def after(*samples: Sample, begin: Watch = NEW) -> Watch:
    for sample in samples:
        begin = watch.looked(begin, sample)
    return begin


def only(seen: Watch) -> RankWatch:
    (one,) = seen.ranks
    return one


# --- reachability -----------------------------------------------------------------------------------------------------


def test_503_counts_until_another_answer_and_no_answer_is_none() -> None:
    sick = after(page(1, health_status=503), missing(2), page(3, health_status=503))
    assert sick.unavailable == 2
    assert after(look(4), begin=sick).unavailable == 0


def test_only_both_failing_is_failing() -> None:
    assert after(missing(1), missing(2, "malformed"), missing(7)).failing_since == 1
    assert (
        after(missing(1), missing(2), replace(look(3), health_status=None, health_error="timeout")).failing_since
        is None
    )
    assert after(missing(1), page(2, health_status=503)).failing_since is None


def test_refused_is_a_run_of_its_own() -> None:
    assert after(missing(1, "refused"), missing(5, "refused")).refused_since == 1
    assert after(missing(1, "refused"), missing(5, "timeout")).refused_since is None


# --- movement ---------------------------------------------------------------------------------------------------------


def test_stillness_counts_from_the_last_look_that_saw_movement_with_work_pending() -> None:
    seen = after(look(0, steps=1, running=2), look(5, steps=9, running=2), look(10, steps=9, running=2))
    assert (only(seen).still_since, only(seen).seen_at, seen.moved_at) == (5, 10, 5)
    assert watch.still(seen, 10)
    assert not watch.still(seen, 11)
    seen = after(look(15, steps=10, running=2), begin=seen)
    assert (only(seen).still_since, seen.moved_at) == (None, 15)


def test_work_that_arrives_at_a_still_engine_counts_from_its_arrival() -> None:
    seen = after(look(0), look(5), look(10, waiting=1), look(15, waiting=1))
    assert only(seen).still_since == 10


def test_an_idle_engine_is_not_still() -> None:
    assert only(after(look(0), look(500))).still_since is None
    assert only(after(look(0, running=1), look(5, running=1), look(10))).still_since is None


def test_any_counter_is_movement_and_prefill_is_one() -> None:
    base = rank(running=1)
    for name in ("iterations", "prompt_tokens", "generation_tokens"):
        moved: dict[str, Any] = {name: 11.0}
        seen = after(page(0, base), page(5, replace(base, **moved)))
        assert (seen.moved_at, only(seen).still_since) == (5, None)


def test_a_counter_that_fell_is_movement_too() -> None:
    assert after(look(0, steps=10, running=1), look(5, steps=3, running=1)).moved_at == 5


@pytest.mark.parametrize(
    "unknown",
    [
        rank(running=1, steps=None),
        rank(running=None, waiting=None),
        rank(running=1, iterations=None, generation_tokens=None),
        rank(running=1, iterations=None, prompt_tokens=None),
    ],
)
def test_a_page_that_does_not_tell_neither_begins_nor_ends_stillness(unknown: RankMetrics) -> None:
    begun = after(look(0, running=1), page(5, unknown))
    assert (only(begun).still_since, only(begun).seen_at) == (None, 0)
    still = after(look(0, running=1), look(5, running=1))
    assert (only(still).still_since, only(still).seen_at) == (0, 5)
    kept = after(page(10, unknown), begin=still)
    assert (only(kept).still_since, only(kept).seen_at) == (0, 5)
    assert only(after(look(15, running=1), begin=kept)).still_since == 0
    assert not watch.sees_movement(kept, 10)


def test_tokens_alone_tell_where_steps_are_unknown() -> None:
    seen = after(look(0, running=1, iterations=None), look(5, running=1, iterations=None))
    assert only(seen).still_since == 0


def test_ranks_are_remembered_each_for_itself() -> None:
    first = page(0, rank(0, steps=1, running=1), rank(1, steps=1, running=1))
    seen = after(first, page(5, rank(0, steps=2, running=1), rank(1, steps=1, running=1)))
    assert [one.still_since for one in seen.ranks] == [None, 0]
    assert seen.moved_at == 5
    assert watch.sees_movement(seen, 5)
    assert [one.rank for one in after(page(10, rank(1, steps=1)), begin=seen).ranks] == [1]


def test_looks_without_a_page_keep_what_was_known_of_ranks() -> None:
    seen = after(look(0, running=1), look(5, running=1), missing(10), page(15))
    assert only(seen).still_since == 0
    assert not watch.sees_movement(seen, 15)
    assert not watch.sees_movement(NEW, 0)


def test_sleep_is_stillness_with_a_known_cause() -> None:
    seen = after(look(0, running=1), look(5, running=1), look(100, running=1, awake=False))
    assert (seen.asleep, only(seen).still_since, seen.moved_at) == (True, None, 100)
    seen = after(look(105, running=1), begin=seen)
    assert (seen.asleep, only(seen).still_since) == (False, 100)


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_low_looks_are_counted_and_one_good_look_ends_them() -> None:
    seen = NEW
    for at in (1, 2, 3):
        seen = watch.blocks_looked(seen, look(at), low=True)
    assert (seen.low_since, seen.low_samples) == (1, 3)
    assert watch.blocks_looked(seen, missing(4), low=None) is seen
    over = watch.blocks_looked(seen, look(5), low=False)
    assert (over.low_since, over.low_samples) == (None, 0)


def test_sleep_ends_a_run_of_low_looks() -> None:
    seen = replace(NEW, low_since=1.0, low_samples=9, asleep=True)
    assert watch.blocks_looked(seen, look(2), low=True).low_since is None


def test_canaries_count_only_while_nothing_else_runs() -> None:
    seen = watch.canary_ended(watch.blocks_looked(NEW, look(1), low=True), 2, ok=True, sane=True)
    assert seen.low_canaries == 1
    assert watch.blocks_looked(seen, look(3, running=1), low=True).low_canaries == 0
    outstanding = watch.canary_sent(seen, 3)
    assert watch.blocks_looked(outstanding, look(4, running=1), low=True).low_canaries == 1, "that one is ours"
    assert watch.blocks_looked(outstanding, look(4, running=2), low=True).low_canaries == 0


def test_pending_is_that_of_others() -> None:
    sent = watch.canary_sent(NEW, 1)
    assert watch.pending(NEW, missing(1)) is None
    assert watch.pending(NEW, look(1, waiting=1)) is True
    assert watch.pending(sent, look(1, waiting=1)) is False
    assert watch.pending(sent, look(1, running=1, waiting=1)) is True


def test_the_pool_is_believed_after_looks_that_agree() -> None:
    seen = after(look(0), look(5), missing(10))
    assert (seen.pool, seen.pool_looks) == (1000, 2)
    assert after(look(15, total_blocks=None), begin=seen).pool_looks == 2
    assert after(look(15, total_blocks=7), begin=seen).pool_looks == 1


# --- canary -----------------------------------------------------------------------------------------------------------


SPEC = spec()


def due(seen: Watch, now: float, *, confirming: bool = False, busy: bool = False) -> bool:
    return watch.canary_due(seen, SPEC, now, confirming=confirming, busy=busy)


def test_a_canary_is_sent_when_nothing_moved_for_canary_after_s() -> None:
    assert not due(NEW, 59.9)
    assert due(NEW, 60.0)
    moved = replace(NEW, moved_at=50.0)
    assert not due(moved, 109.9)
    assert due(moved, 110.0)
    ended = replace(NEW, canary=Canary(ended_at=70.0))
    assert not due(ended, 129.9)
    assert due(ended, 130.0)


@pytest.mark.parametrize(
    "seen",
    [
        replace(NEW, canary=Canary(sent_at=1.0)),
        replace(NEW, asleep=True),
        replace(NEW, canary=Canary(possible=False)),
    ],
)
def test_never_two_never_asleep_never_where_it_is_impossible(seen: Watch) -> None:
    assert not due(seen, 1e6)
    assert not due(seen, 1e6, confirming=True)


def test_canaries_follow_each_other_by_a_deadline_while_a_rule_waits_for_them() -> None:
    ended = replace(NEW, moved_at=100.0, canary=Canary(ended_at=100.0))
    assert due(replace(NEW, moved_at=100.0), 100.0, confirming=True)
    assert not due(ended, 129.9, confirming=True)
    assert due(ended, 130.0, confirming=True)
    assert not due(ended, 130.0, confirming=True, busy=True), "never while others are served"
    assert due(ended, 160.0, confirming=True, busy=True)


def test_a_short_stall_is_asked_about_in_time() -> None:
    short = spec(restart={"stall_after_s": 15})
    assert not watch.canary_due(NEW, short, 4.9, confirming=False, busy=True)
    assert watch.canary_due(NEW, short, 5.0, confirming=False, busy=True)
    assert not watch.canary_due(NEW, short, 59.9, confirming=False, busy=False)


def test_every_deadline_that_a_canary_outlives_counts_once() -> None:
    probe = ProbeSpec()
    seen = watch.canary_sent(NEW, 100.0)
    assert watch.canary_deadline(NEW, probe) is None
    assert watch.canary_deadline(seen, probe) == 130.0
    assert watch.canary_outlived(NEW, probe, 500.0) is NEW
    assert watch.canary_outlived(seen, probe, 129.9) is seen
    for number in (1, 2, 3):
        at = watch.canary_deadline(seen, probe)
        assert at is not None
        seen = watch.canary_outlived(seen, probe, at)
        assert (seen.canary.failures, seen.canary.counted) == (number, number)
        assert watch.canary_outlived(seen, probe, at + 1.0) is seen


def test_deadlines_that_passed_while_nobody_looked_count_once() -> None:
    seen = watch.canary_outlived(watch.canary_sent(NEW, 0.0), ProbeSpec(), 1000.0)
    assert (seen.canary.failures, seen.canary.counted) == (1, 33)
    assert watch.canary_deadline(seen, ProbeSpec()) == 1020.0


def test_the_next_deadline_lies_ahead_whatever_floats_do() -> None:
    for step in range(1, 2000):
        probe = ProbeSpec(canary_deadline_s=1.0 + step / 7)
        sent = 1000.1 + step / 3
        seen = watch.canary_sent(NEW, sent)
        for _ in range(5):
            at = watch.canary_deadline(seen, probe)
            assert at is not None
            seen = watch.canary_outlived(seen, probe, at)
            ahead = watch.canary_deadline(seen, probe)
            assert ahead is not None
            assert ahead > at


def test_how_a_canary_ends() -> None:
    sent = watch.canary_sent(replace(NEW, canary=Canary(failures=2)), 10.0)
    failed = watch.canary_ended(sent, 11.0, ok=False, sane=False).canary
    assert (failed.failures, failed.sent_at, failed.ended_at, failed.ok_at) == (3, None, 11.0, None)
    late = watch.canary_outlived(sent, ProbeSpec(), 50.0)
    assert watch.canary_ended(late, 51.0, ok=False, sane=False).canary.failures == 3, "counted already"
    good = watch.canary_ended(late, 51.0, ok=True, sane=True).canary
    assert (good.failures, good.ok_at, good.garbage) == (0, 51.0, 0)
    odd = watch.canary_ended(sent, 12.0, ok=True, sane=False)
    assert odd.canary.garbage == 1
    assert watch.canary_ended(watch.canary_sent(odd, 13.0), 14.0, ok=False, sane=False).canary.garbage == 1
    assert watch.canary_ended(watch.canary_sent(odd, 13.0), 14.0, ok=True, sane=True).canary.garbage == 0


def test_one_that_cannot_be_asked_is_not_asked_again() -> None:
    gone = watch.canary_impossible(watch.canary_sent(replace(NEW, canary=Canary(failures=2)), 1.0)).canary
    assert (gone.possible, gone.failures, gone.sent_at) == (False, 0, None)


def test_movement_resets_the_failures() -> None:
    begin = replace(NEW, canary=Canary(failures=2))
    assert after(look(1), look(2), begin=begin).canary.failures == 0, (
        "a first look is movement: nothing is known before"
    )
    seen = replace(after(look(1)), canary=Canary(failures=2))
    assert after(look(2), begin=seen).canary.failures == 2
    assert after(look(3, steps=11), begin=seen).canary.failures == 0


def test_a_canary_over_a_sleep_starts_over() -> None:
    sent = watch.canary_sent(after(look(1)), 2.0)
    asleep = after(look(100, awake=False), begin=sent)
    assert (asleep.canary.sent_at, asleep.canary.counted) == (100, 0)
    assert watch.canary_outlived(asleep, ProbeSpec(), 131.0).canary.failures == 0
    assert watch.canary_ended(asleep, 110.0, ok=False, sane=False).canary.failures == 0


def test_what_was_before_a_drain_is_no_evidence_after_it() -> None:
    old = replace(
        after(look(1, running=1), look(5, running=1), missing(6, "refused")),
        low_since=1.0,
        unavailable=1,
        told_limit=True,
        canary=Canary(sent_at=3.0, counted=4, failures=4, garbage=2, possible=True, ok_at=2.0),
    )
    new = watch.renewed(old, 500.0)
    canary = Canary(sent_at=500.0, garbage=2, ok_at=2.0)
    assert new == Watch(since=500.0, moved_at=500.0, told_limit=True, canary=canary, points=old.points)
    assert watch.renewed(NEW, 500.0).canary.sent_at is None


# --- the sliding window -----------------------------------------------------------------------------------------------


def test_points_are_kept_every_15_s_for_300_s() -> None:
    seen = after(*(look(at, steps=at) for at in range(0, 400, 5)))
    assert [point.at for point in seen.points] == list(range(105, 391, 15))
    assert seen.points[-1].generation_tokens == 390
    assert after(missing(600), begin=seen).points == seen.points[-7:]
    assert after(missing(1000), begin=seen).points == ()


def test_totals_are_unknown_if_one_rank_s_is() -> None:
    known = watch.point_of(page(0, rank(0, steps=1.0), rank(1, steps=2.0)))
    assert known.generation_tokens == 3
    assert watch.point_of(page(0, rank(0), rank(1, generation_tokens=None))).generation_tokens is None
    assert watch.point_of(page(0)).generation_tokens is None


def test_histograms_of_ranks_are_added() -> None:
    one, two = Histogram((0.1, float("inf")), (1, 2)), Histogram((0.1, float("inf")), (10, 20))
    assert watch.point_of(page(0, rank(0, ttft=one), rank(1, ttft=two))).ttft == Histogram(
        (0.1, float("inf")), (11, 22)
    )
    other = Histogram((0.2, float("inf")), (1, 2))
    for ttft in (None, other):
        assert watch.point_of(page(0, rank(0, ttft=one), rank(1, ttft=ttft))).ttft is None
    assert watch.point_of(page(0, rank(0))).ttft is None
