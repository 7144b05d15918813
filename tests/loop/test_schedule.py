"""The schedule only enqueues, survives a wall clock that is set back, and knows when maintenance windows are open."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from queue import SimpleQueue

import pytest

from supervisord import schedule as module
from supervisord.core.messages import Due, Observation, What, WindowOpened
from supervisord.schedule import Schedule, last_fired, window


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


@pytest.mark.parametrize(("job", "every"), [("poll", timedelta(seconds=0.2)), ("window-a", timedelta(minutes=5))])
def test_a_clock_set_forward_skips_what_it_skipped(job: str, every: timedelta) -> None:
    """As at a boot without a clock that runs on. APScheduler asks for the next one until it lies ahead."""
    schedule = Schedule(SimpleQueue(), 0.2)
    schedule.start()
    try:
        schedule.set_windows({"a": "*/5 * * * * 5m"})
        trigger = schedule._scheduler.get_job(job).trigger
        now = datetime.now(timezone.utc)
        for missed in (datetime.fromtimestamp(0, timezone.utc), now - timedelta(hours=1), now):
            assert now < trigger.get_next_fire_time(missed, now) <= now + every + timedelta(milliseconds=2)
        first = trigger.get_next_fire_time(None, now)
        assert first < trigger.get_next_fire_time(first, first) <= first + every + timedelta(milliseconds=2)
    finally:
        schedule.stop()


# --- maintenance windows ----------------------------------------------------------------------------------------------


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_localzone", lambda: timezone.utc)


@pytest.mark.parametrize(
    ("text", "for_s"),
    [("0 3 * * * 2h", 7200), ("*/5 * * * * 90s", 90), ("0 3 * * sun 30m", 1800), (" 0 3 1 * * 1d ", 86400)],
)
def test_a_window_is_a_cron_expression_and_a_duration(text: str, for_s: float) -> None:
    trigger, seconds = window(text)
    assert seconds == for_s
    assert trigger.get_next_fire_time(None, datetime.now(timezone.utc)) is not None


def test_a_window_begins_in_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    zone = timezone(timedelta(hours=5))
    monkeypatch.setattr(module, "get_localzone", lambda: zone)
    fires = window("0 3 * * * 2h")[0].get_next_fire_time(None, at("2026-05-28 20:00"))
    assert fires == at("2026-05-28 22:00")


def test_a_machine_without_a_usable_time_zone_has_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    def contradiction() -> None:
        raise LookupError("multiple conflicting time zone configurations")

    monkeypatch.setattr(module, "get_localzone", contradiction)
    fires = window("0 3 * * * 2h")[0].get_next_fire_time(None, at("2026-05-28 20:00"))
    assert fires == at("2026-05-29 03:00")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "now", "began"),
    [
        ("0 3 * * * 2h", "2026-05-29 02:59", None),
        ("0 3 * * * 2h", "2026-05-29 03:00", "2026-05-29 03:00"),
        ("0 3 * * * 2h", "2026-05-29 05:00", "2026-05-29 03:00"),
        ("0 3 * * * 2h", "2026-05-29 05:01", None),
        ("0 3 * * * 3d", "2026-05-29 12:00", "2026-05-29 03:00"),
        ("0 3 * * sun 8d", "2026-05-29 12:00", "2026-05-24 03:00"),
        ("*/10 * * * * 5m", "2026-05-29 12:04", "2026-05-29 12:00"),
        ("*/10 * * * * 5m", "2026-05-29 12:06", None),
        ("* * * * * 99999d", "2026-05-29 12:06", "2026-05-29 12:06"),
        ("0 3 30 2 * 99999d", "2026-05-29 12:06", None),
        ("* * * jan * 300d", "2026-10-27 12:00", "2026-01-31 23:59"),
        ("* * * jan * 30s", "2026-01-01 00:00", "2026-01-01 00:00"),
    ],
)
def test_when_a_window_began(text: str, now: str, began: str | None, utc: None) -> None:
    trigger, for_s = window(text)
    start = time.thread_time()
    assert last_fired(trigger, at(now), for_s) == (None if began is None else at(began))
    assert time.thread_time() - start < 0.5  # the loop waits for it; walking through January took 0.7 s


def test_a_window_that_is_open_at_the_start_is_open(utc: None) -> None:
    inbox: SimpleQueue[Observation] = SimpleQueue()
    schedule = Schedule(inbox, 3600.0)
    schedule.start()
    try:
        schedule.set_windows({"a": "* * * * * 1h", "b": "", "c": "0 0 29 2 mon 1s"})
        opened = inbox.get(timeout=10)
        assert isinstance(opened, WindowOpened)
        assert opened.engine == "a"
        assert 3600 - 61 <= opened.for_s <= 3600
        jobs = {job.id for job in schedule._scheduler.get_jobs()}
        assert jobs == {"poll", "window-a", "window-c"}
        schedule.set_windows({"a": ""})
        assert {job.id for job in schedule._scheduler.get_jobs()} == {"poll"}
        assert inbox.empty()
    finally:
        schedule.stop()


def test_a_window_opens_when_its_time_comes(utc: None) -> None:
    inbox: SimpleQueue[Observation] = SimpleQueue()
    schedule = Schedule(inbox, 3600.0)
    schedule.start()
    try:
        schedule.set_windows({"a": "* * * * * 2h", "b": "0 0 29 2 mon 90m"})
        opened = inbox.get(timeout=10)
        schedule._scheduler.modify_job("window-a", next_run_time=datetime.now(timezone.utc))
        again = inbox.get(timeout=10)
        for seen in (opened, again):
            assert isinstance(seen, WindowOpened)
            assert seen.engine == "a"
            assert 7100 < seen.for_s <= 7200, "what is left of it by the clock"
        schedule._scheduler.modify_job("window-b", next_run_time=datetime.now(timezone.utc))
        schedule._scheduler.modify_job("window-a", next_run_time=datetime.now(timezone.utc))
        late = inbox.get(timeout=10)
        assert isinstance(late, WindowOpened)
        assert late.engine == "a", "a job that fires when its window is over (after a suspend) opens nothing"
    finally:
        schedule.stop()
