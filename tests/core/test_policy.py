"""Back-off and budget: exact numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord.core.policy import backoff_delay_s, external_delay_s, within_window
from supervisord.core.spec import RestartSpec

JITTER = 1.25


def plain(failures: int, initial_s: float, max_s: float = 300.0) -> float:
    return backoff_delay_s(RestartSpec(backoff_initial_s=initial_s, backoff_max_s=max_s), failures, "a")


@pytest.mark.parametrize(
    ("failures", "least"),
    [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (8, 128.0), (9, 256.0)],
)
def test_doubles_from_the_first_delay(failures: int, least: float) -> None:
    assert least <= plain(failures, 1.0) <= min(least * JITTER, 300.0)


@pytest.mark.parametrize(("failures", "least"), [(1, 0.0), (2, 1.0), (3, 2.0), (4, 4.0)])
def test_zero_means_at_once_and_then_from_one_second(failures: int, least: float) -> None:
    assert least <= plain(failures, 0.0) <= least * JITTER


@pytest.mark.parametrize("failures", [11, 100, 10_000])
def test_the_cap_holds_for_ever(failures: int) -> None:
    assert plain(failures, 1.0) == plain(failures, 0.0) == 300.0


def test_the_cap_is_above_the_jitter() -> None:
    assert plain(1, 10.0, max_s=10.0) == 10.0
    assert plain(5, 0.0, max_s=0.0) == 0.0


def test_the_numbers_of_one_engine() -> None:
    """Jitter is derived from name and count, so these never change from run to run or from daemon to daemon."""
    assert [round(plain(n, 1.0), 3) for n in range(1, 10)] == [
        1.19, 2.178, 4.173, 9.393, 19.083, 34.884, 66.703, 151.5, 300.0,
    ]  # fmt: skip


@given(st.text(max_size=32), st.integers(1, 10_000), st.floats(0.0, 86400.0), st.floats(0.0, 86400.0))
def test_bounded_and_deterministic(name: str, failures: int, initial_s: float, max_s: float) -> None:
    spec = RestartSpec(backoff_initial_s=initial_s, backoff_max_s=max_s)
    delay = backoff_delay_s(spec, failures, name)
    assert 0.0 <= delay <= max_s
    assert delay == backoff_delay_s(spec, failures, name)
    first_s = initial_s or 1.0
    doublings = failures - (1 if initial_s else 2)
    if 0 <= doublings < 60:
        assert min(max_s, first_s * 2.0**doublings) <= delay <= first_s * 2.0**doublings * JITTER


def test_two_engines_do_not_restart_in_step() -> None:
    spec = RestartSpec()
    assert len({backoff_delay_s(spec, 3, name) for name in "abcdefgh"}) == 8


def test_something_outside_is_asked_again_slowly() -> None:
    spec = RestartSpec(backoff_max_s=300.0)
    delays = [external_delay_s(spec, n, "a") for n in range(1, 6)]
    assert all(60.0 * 2 ** (n - 1) <= d <= 60.0 * 2 ** (n - 1) * JITTER for n, d in enumerate(delays[:2], 1))
    assert delays[3] == 300.0


def test_never_faster_than_a_minute_whatever_the_cap() -> None:
    assert external_delay_s(RestartSpec(backoff_max_s=1.0), 1, "a") == 60.0


def test_only_the_window_counts() -> None:
    spec = RestartSpec(max_restarts_window_s=100.0)
    assert within_window((0.0, 49.9, 50.0, 50.1, 149.0), spec, 150.0) == (50.1, 149.0)
    assert within_window((), spec, 150.0) == ()
