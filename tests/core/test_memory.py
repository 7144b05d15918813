"""What is remembered of memory: bounded, by windows, from the level of the start."""

from __future__ import annotations

import random
import timeit

import pytest

from supervisord.core.memory import HOUR_S, LOWS_MAX, MIB, UNSEEN, MemoryWatch, exhausted_in_s, growth_bytes, observed
from supervisord.core.spec import RestartSpec
from tests.core.rules.memory_series import looks

SPEC = RestartSpec()


def watched(mib_per_h: float, hours: float, spec: RestartSpec = SPEC, baseline: int | None = None) -> MemoryWatch:
    watch = UNSEEN
    for at_s, used in looks(lambda t: mib_per_h * t / HOUR_S, hours):
        watch = observed(watch, at_s, used, baseline, spec)
    return watch


def test_a_window_keeps_its_minimum_and_when_it_was() -> None:
    watch = UNSEEN
    for at_s, used in ((0.0, 9), (100.0, 5), (200.0, 7), (299.0, 6)):
        watch = observed(watch, at_s, used, None, SPEC)
    assert watch.low == (100.0, 5)
    assert observed(watch, 300.0, 8, None, SPEC).low == (300.0, 8)


def test_an_old_look_changes_nothing() -> None:
    watch = observed(UNSEEN, 10.0, 5, None, SPEC)
    assert observed(watch, 10.0, 1, None, SPEC) is watch
    assert observed(watch, 9.0, 1, None, SPEC) is watch


def test_the_level_of_the_start_is_the_highest_of_warm_up_and_the_first_windows() -> None:
    assert watched(120, 0.5).high_bytes == pytest.approx(20_020 * MIB, abs=MIB)
    assert watched(120, 0.5, baseline=20_500 * MIB).high_bytes == 20_500 * MIB
    assert watched(120, 0.5, baseline=10).high_bytes == pytest.approx(20_020 * MIB, abs=MIB)


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    watch = watched(120, 30)
    assert len(watch.lows) == LOWS_MAX
    assert watch.trend is not None
    assert watch.trend.span_s == pytest.approx(6 * HOUR_S, abs=300)
    assert watch.trend.slope_mib_per_h == pytest.approx(120, abs=0.1)


def test_too_little_says_nothing() -> None:
    watch = watched(10_000, 0.7)
    assert (watch.trend, watch.creeping, growth_bytes(watch)) == (None, False, 0)
    assert exhausted_in_s(watch, 0.0, 10**12) is None


def test_everything_scales_with_the_window() -> None:
    watch = watched(120, 30, RestartSpec(creep_window_s=4 * HOUR_S))
    assert watch.trend is not None
    assert watch.trend.span_s == pytest.approx(24 * HOUR_S, abs=1200)
    tiny = watched(120, 3, RestartSpec(creep_window_s=60))
    assert len(tiny.lows) == LOWS_MAX
    assert tiny.lows[1][0] - tiny.lows[0][0] == 60


def test_a_gap_is_no_evidence() -> None:
    watch, lone = watched(10_000, 3), 3 * HOUR_S + 10 * HOUR_S
    for offset_s in (0, 300):
        watch = observed(watch, lone + offset_s, 90_000 * MIB, None, SPEC)
    assert (watch.trend, watch.creeping) == (None, False)


def test_where_it_ends() -> None:
    watch = watched(1200, 5)
    now = 5 * HOUR_S
    left_s = exhausted_in_s(watch, now, (20_000 + 6_000 + 1_200) * MIB)
    assert left_s == pytest.approx(HOUR_S, abs=5)
    assert exhausted_in_s(watch, now, 20_000 * MIB) == 0.0
    assert exhausted_in_s(watch, now, None) is None
    assert exhausted_in_s(watched(-5, 5), now, 10**12) is None


def test_a_leak_that_ends_is_let_go() -> None:
    def series(t: float) -> float:
        return min(t, 8 * HOUR_S) * 120 / HOUR_S

    watch, hours = UNSEEN, {True: 0.0, False: 0.0}
    for at_s, used in looks(series, 10):
        watch = observed(watch, at_s, used, None, SPEC)
        hours[watch.creeping] = at_s / HOUR_S
    assert 8 <= hours[True] < 9 < hours[False]


def test_a_closing_window_is_cheap() -> None:
    r = random.Random(1)
    watch = UNSEEN
    for at_s, used in looks(lambda t: t / 30 + r.gauss(0, 10), 8):
        watch = observed(watch, at_s, used, None, SPEC)
    at_s = watch.opened_at + 300
    best_ms = 1000 * min(timeit.repeat(lambda: observed(watch, at_s, 1, None, SPEC), number=1, repeat=50))
    assert best_ms < 3.0, "0.7 ms on an idle machine, once in five minutes"
