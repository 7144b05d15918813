"""The schedule: APScheduler jobs that only put "due" into the inbox.

APScheduler computes in wall-clock time, so a clock that is set back would silence its jobs; `resync`, called after
turns, notices that in monotonic time and starts the jobs over. A clock that is set forward skips times, see `_Ahead`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Final

from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from tzlocal import get_localzone

from supervisord.core.messages import Due, What, WindowOpened
from supervisord.loop import Inbox

_SILENT_FACTOR: Final = 3.0
_LOOK_BACK_S: Final = 60.0
_WINDOW: Final = "window-"
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class _Ahead(BaseTrigger):  # type: ignore[misc] # APScheduler has no hints
    """A trigger without a past.

    APScheduler goes through every time that was missed, with its lock held, only to run once for all of them. A machine
    that boots in 1970 and then asks for the time has missed 350 million polls: hours, and gigabytes.
    """

    _PAST_THIS_ONE: Final = timedelta(milliseconds=1)

    def __init__(self, trigger: BaseTrigger) -> None:
        self._trigger = trigger

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The first one after now."""
        fires: datetime | None = self._trigger.get_next_fire_time(
            None, now if previous_fire_time is None else now + self._PAST_THIS_ONE
        )
        return fires


class Schedule:
    """The periodic part of the node."""

    def __init__(self, inbox: Inbox, poll_interval_s: float) -> None:
        # Jobs run in the scheduler's own thread: all they do is one put.
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self._inbox = inbox
        self._interval_s = poll_interval_s
        self._fired_at = time.monotonic()
        self._scheduler = BackgroundScheduler(
            executors={"default": DebugExecutor()},
            timezone=timezone.utc,
            job_defaults={"coalesce": True, "misfire_grace_time": None},
        )

    def start(self) -> None:
        """Begin to poll."""
        self._scheduler.add_job(self._poll, self._every_interval(), id="poll")
        self._scheduler.start()

    def set_interval(self, poll_interval_s: float) -> None:
        """Apply a reloaded `poll_interval_s`."""
        if poll_interval_s != self._interval_s:
            self._interval_s = poll_interval_s
            self._reschedule()

    def resync(self) -> None:
        """Start over if the jobs have been silent for too long (the wall clock was set back)."""
        if time.monotonic() - self._fired_at > _SILENT_FACTOR * self._interval_s + 1.0:
            self._reschedule()

    def set_windows(self, windows: Mapping[str, str]) -> None:
        """Say when voluntary restarts may happen: by engine "CRON DURATION" (5 fields and e.g. 90m, local time)."""
        for job in self._scheduler.get_jobs():
            if job.id.startswith(_WINDOW):
                job.remove()
        for engine, text in windows.items():
            if text:
                trigger, for_s = window(text)
                # The job looks at the clock: after a suspend it fires late, and the window may be over.
                arguments = (engine, trigger, for_s)
                self._scheduler.add_job(self._if_open_now, _Ahead(trigger), arguments, id=_WINDOW + engine)
                self._if_open_now(engine, trigger, for_s)

    def _if_open_now(self, engine: str, trigger: CronTrigger, for_s: float) -> None:
        """Cron says when windows begin; one may have begun before the daemon did."""
        now = datetime.now(timezone.utc)
        began = last_fired(trigger, now, for_s)
        if began is not None:
            self._inbox.put(WindowOpened(engine, for_s - (now - began).total_seconds()))

    def stop(self) -> None:
        """End the schedule; never waits for a job."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _poll(self) -> None:
        self._fired_at = time.monotonic()
        self._inbox.put(Due(What.POLL))

    def _every_interval(self) -> _Ahead:
        return _Ahead(IntervalTrigger(seconds=self._interval_s, timezone=timezone.utc))

    def _reschedule(self) -> None:
        self._fired_at = time.monotonic()
        job = self._scheduler.reschedule_job("poll", trigger=self._every_interval())
        job.modify(next_run_time=datetime.now(timezone.utc))


def window(text: str) -> tuple[CronTrigger, float]:
    """A maintenance window, "0 3 * * * 2h": when it begins, and for how many seconds it is open. Raises ValueError."""
    expression, _, duration = text.strip().rpartition(" ")
    return CronTrigger.from_crontab(expression, _local_zone()), float(int(duration[:-1]) * _UNITS_S[duration[-1]])


def last_fired(trigger: CronTrigger, now: datetime, within_s: float) -> datetime | None:
    """When it fired last, if that was within so many seconds; a trigger only knows what comes next."""
    quiet_s, back_s = 0.0, min(_LOOK_BACK_S, within_s)
    began: datetime | None = None
    while began is None:
        fires = trigger.get_next_fire_time(None, now - timedelta(seconds=back_s))
        if fires is None:
            return None  # never: 30 February
        if fires <= now:
            began = fires
        elif back_s >= within_s:
            return None
        else:
            quiet_s, back_s = back_s, min(2 * back_s, within_s)
    # Halved, not walked through: between the last minute of January and December there are 44,640 of them.
    while back_s - quiet_s > 1.0:
        middle_s = (quiet_s + back_s) / 2
        fires = trigger.get_next_fire_time(None, now - timedelta(seconds=middle_s))
        if fires is not None and fires <= now:
            back_s, began = middle_s, fires
        else:
            quiet_s = middle_s
    return began


def _local_zone() -> tzinfo:
    """The machine's time zone; UTC where its settings contradict each other (tzlocal raises then)."""
    try:
        return get_localzone()
    except (ValueError, LookupError, OSError):
        return timezone.utc
