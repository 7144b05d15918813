"""Rules that only tell, and the figures of the sliding window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.rules import Remedy
from supervisord.core.rules.service import (
    acceptance_rate,
    garbage,
    hit_rate,
    quantile,
    rate_per_s,
    slo,
    ttft_p95_ms,
)
from supervisord.core.samples import Histogram
from supervisord.core.watch import Canary, Point, Watch, point_of
from supervisord.engine import metrics
from tests.core.looks import page, spec

NEW = Watch(since=0.0, moved_at=0.0)
INF = float("inf")
BOUNDS = (0.1, 0.2, 0.4, INF)
ZERO = Histogram(BOUNDS, (0, 0, 0, 0))
DATA = Path(__file__).parents[2] / "data"


def point(at: float, tokens: float | None = None, ttft: Histogram | None = None, **values: Any) -> Point:
    empty = Point(at, tokens, None, None, None, None, ttft)
    return replace(empty, **values)


def test_garbage_three_times_in_a_row() -> None:
    found = [garbage(replace(NEW, canary=Canary(garbage=times))) for times in (0, 2, 3)]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert (found[2].reason.code, found[2].remedy) == ("garbage", Remedy.TELL)
    assert found[2].reason.message == "3 canaries in a row came back empty or as one repeated character"
    assert found[2].numbers == {"canaries": 3, "canaries_max": 3}


# --- quantiles --------------------------------------------------------------------------------------------------------


def test_a_quantile_is_linear_within_its_bucket() -> None:
    assert quantile(ZERO, Histogram(BOUNDS, (10, 10, 10, 10)), 0.95) == pytest.approx(0.095)
    assert quantile(ZERO, Histogram(BOUNDS, (0, 100, 100, 100)), 0.95) == pytest.approx(0.195)
    assert quantile(ZERO, Histogram(BOUNDS, (90, 90, 100, 100)), 0.95) == pytest.approx(0.3)
    assert quantile(ZERO, Histogram(BOUNDS, (0, 0, 10, 20)), 0.5) == pytest.approx(0.4)


def test_in_the_last_bucket_its_lower_bound_is_the_answer() -> None:
    assert quantile(ZERO, Histogram(BOUNDS, (0, 0, 0, 20)), 0.95) == 0.4
    assert quantile(Histogram((INF,), (0,)), Histogram((INF,), (20,)), 0.95) == 0.0


def test_only_what_came_between_counts() -> None:
    old = Histogram(BOUNDS, (1000, 1000, 1000, 1000))
    assert quantile(old, Histogram(BOUNDS, (1000, 1100, 1100, 1100)), 0.95) == pytest.approx(0.195)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ZERO, Histogram(BOUNDS, (9, 9, 9, 9))),
        (ZERO, Histogram((0.1, 0.3, 0.4, INF), (20, 20, 20, 20))),
        (Histogram(BOUNDS, (5, 5, 5, 5)), Histogram(BOUNDS, (4, 20, 20, 20))),
        (Histogram((), ()), Histogram((), ())),
    ],
)
def test_an_anecdote_other_bounds_and_another_process_have_none(old: Histogram, new: Histogram) -> None:
    assert quantile(old, new, 0.95) is None


def test_ten_requests_are_enough() -> None:
    assert quantile(ZERO, Histogram(BOUNDS, (10, 10, 10, 10)), 0.5) == pytest.approx(0.05)


# --- slo --------------------------------------------------------------------------------------------------------------


def slow(ms: float) -> Watch:
    """Twenty requests, all in a bucket that ends at this."""
    bounds = (ms / 1000 * 0.9, ms / 1000, INF)
    old, new = Histogram(bounds, (0, 0, 0)), Histogram(bounds, (0, 20, 20))
    return replace(NEW, points=(point(0, ttft=old), point(15, ttft=new)))


def test_ttft_above_the_limit_is_told() -> None:
    p95 = ttft_p95_ms(slow(500).points)
    assert p95 == pytest.approx(497.5)
    assert slo(slow(500), spec()) is None
    found = slo(slow(510), spec())
    assert found is not None
    assert (found.reason.code, found.remedy) == ("slo", Remedy.TELL)
    assert found.reason.message == "time to first token p95 is 507 ms (ttft_p95_ms 500)"
    assert found.numbers == {"ttft_p95_ms": 507.4, "limit_ms": 500.0}
    assert slo(slow(510), spec(slo={"ttft_p95_ms": 0})) is None
    assert slo(NEW, spec()) is None


def test_at_the_limit_is_well() -> None:
    bounds = (0.25, 0.75, INF)
    points = (point(0, ttft=Histogram(bounds, (0, 0, 0))), point(15, ttft=Histogram(bounds, (18, 20, 20))))
    assert ttft_p95_ms(points) == pytest.approx(500.0)
    assert slo(replace(NEW, points=points), spec(slo={"ttft_p95_ms": 500.0001})) is None


def test_a_percentile_needs_two_points() -> None:
    assert ttft_p95_ms(()) is None
    assert ttft_p95_ms((point(0, ttft=ZERO), point(15))) is None


# --- rates ------------------------------------------------------------------------------------------------------------


def test_tokens_per_second_are_those_of_the_last_half_minute() -> None:
    points = (point(0, 0), point(15, 9000), point(30, 9000), point(45, 9300))
    assert rate_per_s(points, 30) == pytest.approx(10.0)
    assert rate_per_s(points, 5) == pytest.approx(20.0), "at least the last two points"
    assert rate_per_s(points[:1], 30) is None
    assert rate_per_s((), 30) is None


@pytest.mark.parametrize(
    "points",
    [
        (point(0, None), point(15, 5)),
        (point(0, 5), point(15, None)),
        (point(0, 5), point(15, 4)),
        (point(15, 5), point(15, 9)),
    ],
)
def test_an_unknown_rate_is_unknown(points: tuple[Point, ...]) -> None:
    assert rate_per_s(points, 30) is None


def test_hits_and_accepted_drafts() -> None:
    points = (
        point(0, prefix_hits=10, prefix_queries=100, accepted_tokens=0, draft_tokens=0),
        point(15),
        point(30, prefix_hits=60, prefix_queries=200, accepted_tokens=3, draft_tokens=4),
    )
    assert hit_rate(points) == 0.5
    assert acceptance_rate(points) == 0.75
    assert hit_rate(points[:2]) is None
    assert hit_rate((points[0], points[0])) is None, "nobody asked"
    assert hit_rate((points[2], points[0])) is None, "another process"
    assert hit_rate((point(0, prefix_hits=0, prefix_queries=0), point(1, prefix_hits=9, prefix_queries=3))) is None


def test_captured_pages_of_a_real_engine() -> None:
    """Idle before and after the 300 requests of the saturation run on vLLM 0.32.0."""
    pages = [
        metrics.parse((DATA / "metrics" / name).read_bytes()) for name in ("kv-idle-before.txt", "after-saturated.txt")
    ]
    before, after = (point_of(page(at, *one.ranks)) for at, one in zip((0.0, 100.0), pages, strict=True))
    assert before.generation_tokens is not None
    assert after.generation_tokens is not None
    grown = after.generation_tokens - before.generation_tokens
    assert grown > 200_000
    assert rate_per_s((before, after), 300) == pytest.approx(grown / 100)
    p95 = ttft_p95_ms((before, after))
    assert p95 is not None
    assert 1000 < p95 < 60_000
    hits = hit_rate((before, after))
    assert hits is not None
    assert 0 <= hits < 1
    assert acceptance_rate((before, after)) is None
