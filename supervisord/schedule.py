"""The schedule: APScheduler jobs that only put "due" into the inbox.

APScheduler computes in wall-clock time, so a clock that is set back would silence its jobs; `resync`, called after
turns, notices that in monotonic time and starts the jobs over.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timezone
from typing import Final

from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from supervisord.core.messages import Due, What
from supervisord.loop import Inbox

_SILENT_FACTOR: Final = 3.0


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
        self._scheduler.add_job(self._poll, "interval", seconds=self._interval_s, id="poll")
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

    def stop(self) -> None:
        """End the schedule; never waits for a job."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _poll(self) -> None:
        self._fired_at = time.monotonic()
        self._inbox.put(Due(What.POLL))

    def _reschedule(self) -> None:
        self._fired_at = time.monotonic()
        job = self._scheduler.reschedule_job("poll", trigger="interval", seconds=self._interval_s)
        job.modify(next_run_time=datetime.now(timezone.utc))
