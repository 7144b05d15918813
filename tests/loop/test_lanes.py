"""Lanes: order within a key, independence between keys, errors told."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from threading import Event, Lock, Thread

import pytest

from supervisord import lanes as module
from supervisord.lanes import Lanes, Turnstile


def test_same_key_in_order_other_keys_not_held_up() -> None:
    lanes = Lanes(_unexpected)
    order: list[int] = []
    gate, other, done = Event(), Event(), Event()

    def wait() -> None:
        gate.wait(10)

    lanes.submit("a", wait)
    for i in range(5):
        lanes.submit("a", partial(order.append, i))
    lanes.submit("a", done.set)
    lanes.submit("b", other.set)
    assert other.wait(10), "lane b waited for lane a"
    assert order == []
    gate.set()
    assert done.wait(10)
    assert order == [0, 1, 2, 3, 4]


def test_only_if_idle_drops_while_busy() -> None:
    lanes = Lanes(_unexpected)
    entered, gate, done = Event(), Event(), Event()

    def busy() -> None:
        entered.set()
        gate.wait(10)

    assert lanes.submit("a", busy, only_if_idle=True)
    assert entered.wait(10)
    assert not lanes.submit("a", _never, only_if_idle=True)
    gate.set()
    lanes.submit("a", done.set)
    assert done.wait(10)


def test_a_bug_in_a_job_is_told_and_the_lane_goes_on() -> None:
    told: list[tuple[Hashable, BaseException]] = []
    lanes = Lanes(lambda key, error: told.append((key, error)))
    done = Event()
    lanes.submit("a", _bug)
    lanes.submit("a", done.set)
    assert done.wait(10)
    assert [(key, type(error)) for key, error in told] == [("a", ZeroDivisionError)]


def test_idle_lanes_end_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    lanes = Lanes(_unexpected)
    for _ in range(200):
        done = Event()
        lanes.submit("a", done.set)
        assert done.wait(10), "a job was lost while its lane was ending"


def _unexpected(key: Hashable, error: BaseException) -> None:
    raise AssertionError(key, error)


def _never() -> None:
    raise AssertionError


def _bug() -> None:
    raise ZeroDivisionError


def test_turnstile_lets_one_pass_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 30.0)
    turnstile, inside, overlaps = Turnstile(), Lock(), []

    def work() -> None:
        with turnstile.passing():
            overlaps.append(not inside.acquire(blocking=False))
            Event().wait(0.005)
            inside.release()

    threads = [Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert overlaps == [False] * 8


def test_one_that_hangs_in_the_turnstile_holds_nobody_up() -> None:
    turnstile, entered, gate = Turnstile(), Event(), Event()
    passed = [Event() for _ in range(4)]

    def hang() -> None:
        with turnstile.passing():
            entered.set()
            gate.wait(30)

    def work(mine: Event) -> None:
        with turnstile.passing():
            mine.set()

    hanging = Thread(target=hang, daemon=True)
    hanging.start()
    assert entered.wait(10)
    for mine in passed:
        Thread(target=work, args=(mine,), daemon=True).start()
    assert all(mine.wait(10) for mine in passed)
    gate.set()
    hanging.join(10)
    again = Event()
    work(again)  # and it is free again after all of that
    assert again.is_set()
