"""The schedule only enqueues, and survives a wall clock that is set back."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from queue import SimpleQueue

import pytest

from supervisord.core.messages import Due, Observation, What
from supervisord.schedule import Schedule


def test_polls_are_put_into_the_inbox() -> None:
    inbox: SimpleQueue[Observation] = SimpleQueue()
    schedule = Schedule(inbox, 0.2)
    schedule.start()
    try:
        assert [inbox.get(timeout=10) for _ in range(3)] == [Due(What.POLL)] * 3
        schedule.set_interval(0.3)
        assert inbox.get(timeout=10) == Due(What.POLL)
    finally:
        schedule.stop()


def test_a_clock_set_back_does_not_silence_the_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox: SimpleQueue[Observation] = SimpleQueue()
    schedule = Schedule(inbox, 3600.0)
    schedule.start()
    try:
        # What a clock that was set back looks like to the scheduler: the next run lies far in the future.
        schedule._scheduler.modify_job("poll", next_run_time=datetime.now(timezone.utc) + timedelta(hours=9))
        schedule.resync()
        assert inbox.empty()
        late = time.monotonic() + 4 * 3600
        monkeypatch.setattr(time, "monotonic", lambda: late)
        schedule.resync()
        assert inbox.get(timeout=10) == Due(What.POLL)
    finally:
        schedule.stop()
