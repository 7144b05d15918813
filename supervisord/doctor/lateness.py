"""Calls that may hang (a disk that is gone, a driver): each in a thread of its own, which is left behind when late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class LateError(Exception):
    """There is no answer in time."""


class Call(Generic[T]):
    """A call under way."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._done.put((self._function(),))
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            self._done.put(error)

    def result(self, until: float) -> T:
        """What it came to, waited for until then (monotonic seconds). Raises LateError, and what it raised."""
        try:
            outcome = self._done.get(timeout=max(0.001, until - time.monotonic()))
        except Empty:
            raise LateError("no answer in time: a disk or a driver hangs (see dmesg)") from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome[0]


def in_time(timeout_s: float, function: Callable[[], T]) -> T:
    """Call it and wait so long. Raises LateError, and what it raises."""
    return Call(function).result(time.monotonic() + timeout_s)
