"""Lanes: work with the same key runs one after the other, different keys in parallel, on plain daemon threads.

A thread that hangs in the kernel blocks its own lane and nothing else, and never the exit of the process (style notes:
thread pools and asyncio do). Idle lanes end.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from threading import Condition, Lock, Thread
from typing import Final

IDLE_S: Final = 30.0
PATIENCE_S: Final = 0.1

Job = Callable[[], None]


class Lanes:
    """Runs jobs by key. `on_error` hears of exceptions, which are bugs: jobs turn expected failures into results."""

    def __init__(self, on_error: Callable[[Hashable, BaseException], None]) -> None:
        self._on_error = on_error
        self._lock = Lock()
        self._lanes: dict[Hashable, _Lane] = {}

    def submit(self, key: Hashable, job: Job, *, only_if_idle: bool = False) -> bool:
        """Queue a job. With `only_if_idle` it is dropped (False) while the lane has work."""
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = _Lane()
                Thread(target=self._run, args=(key, lane), name=f"lane-{key}", daemon=True).start()
            with lane.wake:
                if only_if_idle and (lane.busy or lane.jobs):
                    return False
                lane.jobs.append(job)
                lane.wake.notify()
        return True

    def once(self, key: Hashable, job: Job) -> None:
        """Run a long job in a thread of its own that ends with it; an idle lane for each would only cost memory."""
        Thread(target=self._do, args=(key, job), name=f"once-{key}", daemon=True).start()

    def _run(self, key: Hashable, lane: _Lane) -> None:
        while True:
            with lane.wake:
                lane.busy = False
                lane.wake.wait_for(lambda: lane.jobs, IDLE_S)
                job = lane.jobs.popleft() if lane.jobs else None
                lane.busy = job is not None
            if job is None:
                if self._retire(key, lane):
                    return
                continue
            self._do(key, job)

    def _do(self, key: Hashable, job: Job) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 (a bug in a job must be told, not kill the lane silently)
            self._on_error(key, error)

    def _retire(self, key: Hashable, lane: _Lane) -> bool:
        """End the lane unless work arrived meanwhile; `submit` holds the same lock."""
        with self._lock:
            if lane.jobs:
                return False
            self._lanes.pop(key, None)
            return True


class _Lane:
    __slots__ = ("busy", "jobs", "wake")

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.busy = False
        self.wake = Condition()


class Turnstile:
    """Lets short jobs of different lanes pass one at a time: started together they fight for the interpreter's lock.

    Measured with 8 looks at once: 3 times the thread switches and a quarter more CPU. Nobody waits for longer than
    PATIENCE_S, so one that hangs holds nobody up for longer than that.
    """

    def __init__(self) -> None:
        self._lock = Lock()

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Wait for those before, if they are quick."""
        alone = self._lock.acquire(timeout=PATIENCE_S)
        try:
            yield
        finally:
            if alone:
                self._lock.release()
