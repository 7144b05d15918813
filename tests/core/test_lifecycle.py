"""The state diagram and the deadlines, against a table that was written apart from the code."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from supervisord.core.lifecycle import IllegalTransitionError, check, deadlines
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Engine,
    Failed,
    FailedKind,
    Phase,
    Ready,
    Reason,
    Starting,
    State,
    Stopped,
    Stopping,
    Waiting,
    Warming,
)
from tests.core.play import engine_spec

ALLOWED: Final = {
    "stopped": "waiting starting draining stopping backoff",
    "waiting": "stopped starting stopping backoff failed",
    "starting": "waiting warming ready stopping backoff failed",
    "warming": "ready stopping",
    "ready": "draining stopping",
    "draining": "ready stopping",
    "stopping": "stopped waiting starting backoff failed",
    "backoff": "stopped waiting starting",
    "failed": "stopped waiting starting draining stopping",
}

WHY: Final = Reason("why", "because")
SPEC: Final = engine_spec(start_timeout_s=600.0)


@pytest.mark.parametrize(("old", "new"), [*itertools.product(State, State)])
def test_transitions(old: State, new: State) -> None:
    if new is old or new.value in ALLOWED[old.value].split():
        check(old, new)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{old.value} -> {new.value}"):
            check(old, new)


def at(phase: Phase, launching: int | None = None) -> list[float]:
    return sorted(deadlines(Engine(spec=SPEC, plan_id="p1", phase=phase, launching=launching)))


@pytest.mark.parametrize(
    "phase", [Stopped(), Ready(), Failed(FailedKind.CONFIG, ""), Failed(FailedKind.UNKILLABLE, "")]
)
def test_resting_places_have_none(phase: Phase) -> None:
    assert at(phase) == []


def test_waiting_and_backoff() -> None:
    assert at(Waiting(WHY, 7.0)) == [7.0]
    assert at(Backoff(8.0, WHY)) == [8.0]


def test_starting_counts_from_the_last_progress_up_to_the_hard_cap() -> None:
    assert at(Starting(progress_at=100.0, give_up_at=3700.0)) == [700.0]
    assert at(Starting(progress_at=3600.0, give_up_at=3700.0)) == [3700.0]


def test_warming() -> None:
    assert at(Warming(give_up_at=9.0)) == [9.0]


def test_draining() -> None:
    assert at(Draining(After.STOP, 30.0, WHY, next_look_at=2.0)) == [2.0, 30.0]
    assert at(Draining(After.HOLD, None, WHY, next_look_at=2.0)) == [2.0]


@pytest.mark.parametrize(
    ("phase", "launching", "expected"),
    [
        (Stopping(After.STOP, WHY, 60.0, 90.0), None, [60.0, 90.0]),
        (Stopping(After.STOP, WHY, 60.0, 90.0, repeat_at=2.0), None, [2.0, 60.0, 90.0]),
        (Stopping(After.STOP, WHY, 60.0, 90.0, repeat_at=2.0), 1, [90.0]),
        (Stopping(After.STOP, WHY, 60.0, 90.0, exited=True, sweeping=True), None, [90.0]),
        (Stopping(After.STOP, WHY, 60.0, 90.0, sweeping=True), None, [90.0]),
        (Stopping(After.STOP, WHY, 60.0, 90.0, exited=True, sweep_at=61.0), None, [61.0, 90.0]),
        (Stopping(After.STOP, WHY, 60.0, 90.0, sweep_at=61.0), None, [61.0, 90.0]),
    ],
)
def test_stopping_always_has_an_end(phase: Stopping, launching: int | None, expected: list[float]) -> None:
    assert at(phase, launching) == expected
