"""Theil-Sen against what is known of it, and what it costs."""

from __future__ import annotations

import random
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord.core.memory import LOWS_MAX
from supervisord.core.slopes import given_back, pair_slopes, reached_by, theil_sen

VALUES = st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=20)


def test_a_line_has_its_slope() -> None:
    assert theil_sen([(t, 7.0 + 3.0 * t) for t in (0.0, 1.0, 5.0, 6.5)]) == 3.0
    assert theil_sen([(0.0, 1.0), (2.0, 0.0)]) == -0.5


def test_a_quarter_of_wild_points_does_not_move_it() -> None:
    points = [(float(t), 1e9 if t % 4 == 0 else 2.0 * t) for t in range(40)]
    assert theil_sen(points) == pytest.approx(2.0, abs=0.5)


def test_one_step_is_no_slope_wherever_it_is() -> None:
    for at in range(1, 20):
        assert theil_sen([(float(t), 1000.0 if t >= at else 0.0) for t in range(21)]) == 0.0 or at in (9, 10, 11, 12)
        slopes = pair_slopes([(float(t), 1000.0 if t >= at else 0.0) for t in range(21)])
        assert reached_by(0.65, slopes) == 0.0


def test_shares() -> None:
    assert [reached_by(share, [1.0, 2.0, 3.0, 4.0, 5.0]) for share in (1.0, 0.75, 0.5, 0.0)] == [1.0, 2.0, 3.0, 5.0]


@given(VALUES, st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_it_shifts_with_a_slope_and_not_with_a_level(values: list[int], level: int, slope: int) -> None:
    points = [(float(t), float(v)) for t, v in enumerate(values)]
    moved = [(t, v + level + slope * t) for t, v in points]
    assert len(pair_slopes(points)) == len(points) * (len(points) - 1) // 2
    assert theil_sen(moved) == pytest.approx(theil_sen(points) + slope, abs=1e-6)


def test_it_is_cheap() -> None:
    r = random.Random(1)
    points = [(300.0 * i, 2e10 + 1e7 * i + r.gauss(0, 1e7)) for i in range(LOWS_MAX)]
    best_ms = 1000 * min(timeit.repeat(lambda: theil_sen(points), number=1, repeat=50))
    assert best_ms < 2.0, "0.4 ms on an idle machine"


def test_what_was_given_back() -> None:
    assert [given_back(values) for values in ([], [3], [1, 2, 3], [1, 9, 4, 10, 8])] == [0, 0, 0, 5]
