"""What waits for one receiver: its order, what is a repetition, when to try again, when to give up, what is lost.

Time is an argument (monotonic seconds). Nothing here waits or sends; for one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from supervisord.core import kinds
from supervisord.core.messages import Record, Severity
from supervisord.webhook.notice import Notice, Subject

QUEUE_MAX: Final = 256
SUBJECTS_MAX: Final = 1024
"""Repetitions of more than that are not noticed."""

RETRY_FIRST_S: Final = 1.0
RETRY_MAX_S: Final = 60.0
ASKED_MAX_S: Final = 300.0
"""Longest wait that a receiver may ask for (Retry-After)."""
GIVE_UP_S: Final = 3600.0
"""So long after it was told a message is news no more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. `again`: the same may work later, after `wait_s` at the earliest. `detail`: in words."""

    ok: bool
    detail: str
    again: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Messages since the receiver was configured. `failed`: refused or given up; `dropped`: too many waited."""

    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    waiting: int = 0
    failing: bool = False


@dataclass(slots=True)
class _Window:
    """The time in which an event is a repetition: of those the last is kept, and their number."""

    until: float
    more: int = 0
    last: Notice | None = None


class Outbox:
    """For one receiver. `where` names it in what is told about it; `jitter` gives numbers from 0 to 1."""

    def __init__(self, name: str, where: str, repeat_s: float, jitter: Callable[[], float]) -> None:
        self._name = name
        self._where = where
        self._repeat_s = repeat_s
        self._jitter = jitter
        self._queue: deque[tuple[Notice, float]] = deque()
        self._current: tuple[Notice, float] | None = None
        self._windows: dict[Subject, _Window] = {}
        self._attempts = 0
        self._retry_at = 0.0
        self._failing_since: float | None = None
        self._lost = 0
        self._loss_told = False
        self._news: list[Record] = []
        self._delivered = self._failed = self._dropped = 0

    def configure(self, where: str, repeat_s: float) -> None:
        """Go on under other settings, and try at once: they may be what was wrong."""
        self._where, self._repeat_s = where, repeat_s
        self._retry_at = 0.0

    def offer(self, notice: Notice, now: float) -> None:
        """Take a message."""
        self._end_windows(now)
        window = self._windows.get(notice.subject)
        if window is not None:
            window.more += 1
            window.last = notice
            return
        self._enqueue(notice, now)

    def take(self, now: float) -> Notice | None:
        """The message to be sent now; it stays ours until `settle`. None: nothing is due."""
        self._end_windows(now)
        if now < self._retry_at:
            return None
        if self._current is None and self._queue:
            self._current = self._queue.popleft()
        return self._current[0] if self._current is not None else None

    def settle(self, outcome: Outcome, now: float) -> None:
        """The message that was taken has been tried."""
        if self._current is None:
            return
        if outcome.ok:
            self._current = None
            self._attempts = 0
            self._delivered += 1
            self._over(now)
            return
        self._attempts += 1
        given_up = now >= self._current[1] + GIVE_UP_S
        self._retry_at = now + max(self._pause_s(), min(outcome.wait_s, ASKED_MAX_S) if outcome.again else 0.0)
        if self._failing_since is None:
            self._failing_since = now
            then = "it is tried again" if outcome.again else "that message is lost"
            self._loss_told = self._loss_told or not outcome.again
            text = f"cannot notify {self._place}: {outcome.detail}; {then}"
            self._news.append(record("notify_failing", text, Severity.WARNING, receiver=self._name))
        if given_up or not outcome.again:
            self._current = None
            self._failed += 1
            self._lose(f"it did not take one for {GIVE_UP_S / 60:g} minutes" if given_up else outcome.detail)

    def wakeup(self) -> float | None:
        """When `take` may have something new; None: not by waiting."""
        times = [window.until for window in self._windows.values() if window.last is not None]
        if self._current is not None or self._queue:
            times.append(self._retry_at)
        return min(times, default=None)

    def hurry(self, now: float) -> None:
        """The end is near: what waits for its time, does not any more."""
        self._retry_at = 0.0
        for window in self._windows.values():
            window.until = now
        self._end_windows(now)

    def close(self) -> None:
        """Nobody tries any more; what still waits is lost."""
        count = self.stats().waiting
        self._queue.clear()
        self._current = None
        if count:
            self._failed += count
            self._lost += count
            what = "1 message" if count == 1 else f"{count} messages"
            text = f"{what} to {self._place} did not get through before the end, and may be lost"
            self._news.append(record("notify_lost", text, Severity.WARNING, receiver=self._name, lost=self._lost))

    def news(self) -> list[Record]:
        """What people should know of the receiver, once."""
        news, self._news = self._news, []
        return news

    def stats(self) -> Stats:
        """Count."""
        waiting = len(self._queue) + (self._current is not None)
        return Stats(self._delivered, self._failed, self._dropped, waiting, self._failing_since is not None)

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        return f"{self._name} ({self._where})"

    def _enqueue(self, notice: Notice, now: float) -> None:
        once = notice.record.kind in kinds.FINAL
        if self._repeat_s > 0 and not once and len(self._windows) < SUBJECTS_MAX:
            self._windows[notice.subject] = _Window(now + self._repeat_s)
        if len(self._queue) >= QUEUE_MAX:
            self._queue.popleft()
            self._dropped += 1
            self._lose(f"{QUEUE_MAX} wait for it already, the oldest give way")
        self._queue.append((notice, now))

    def _end_windows(self, now: float) -> None:
        ended = [subject for subject, window in self._windows.items() if now >= window.until]
        for window in [self._windows.pop(subject) for subject in ended]:
            if window.last is not None:
                self._enqueue(replace(window.last, repeated=window.more - 1), now)

    def _pause_s(self) -> float:
        """Doubled with each failure, and somewhere between half of it and all of it."""
        longest: float = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(self._attempts - 1, 16))
        return longest * (1 + self._jitter()) / 2

    def _lose(self, why: str) -> None:
        self._lost += 1
        if not self._loss_told:
            self._loss_told = True
            text = f"messages to {self._place} are lost: {why}"
            self._news.append(record("notify_lost", text, Severity.WARNING, receiver=self._name, lost=self._lost))

    def _over(self, now: float) -> None:
        """It takes messages: the end of an outage, or of a flood that was too much for it."""
        since = self._failing_since
        if since is None and not (self._lost and not self._queue):
            return
        after = "" if since is None else f" after {now - since:.0f} s"
        lost = f"; {self._lost} {'was' if self._lost == 1 else 'were'} lost" if self._lost else ""
        text = f"{self._place} takes messages again{after}{lost}"
        self._news.append(record("notify_recovered", text, Severity.NOTICE, receiver=self._name, lost=self._lost))
        self._failing_since, self._lost, self._loss_told = None, 0, False


def record(kind: str, message: str, severity: Severity, **numbers: str | int) -> Record:
    """What people are told of a receiver."""
    return Record(kind, message, severity, numbers=numbers)
