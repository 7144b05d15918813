"""Writing to the history through every trouble: a full disk, a damaged file, one that was removed."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Final

from supervisord.history_store import BrokenError, Limits, Rows, Store, set_aside

RETRY_S: Final = 5.0
SETTLED_S: Final = 30.0
"""A full disk lets a little through now and then: only after this long without a failure it is over."""
ANEW_EVERY_S: Final = 3600.0
PRUNE_EVERY_S: Final = 60.0
PRUNE_EVERY_BYTES: Final = 16 << 20


class Writer:
    """For one thread. `say` hears when it cannot write, and when it can again; `on_anew` when the file is a new one."""

    def __init__(
        self, path: Path, limits: Limits, closing: Event, say: Callable[[str], None], on_anew: Callable[[], None]
    ) -> None:
        self._path = path
        self._limits = limits
        self._closing = closing
        self._say = say
        self._on_anew = on_anew
        self._store: Store | None = None
        self._suspect = Event()
        self._begun = time.time(), time.monotonic()
        self._prune_at = self._begun[1] + PRUNE_EVERY_S
        self._unpruned_bytes = 0
        self._failed_at = 0.0
        self._anew_at = -ANEW_EVERY_S
        self.last_id = 0
        self.trouble: str | None = None

    def suspect(self) -> None:
        """A reader found the file damaged; from any thread."""
        self._suspect.set()

    def write(self, rows: Rows) -> bool:
        """Write all of it, trying until that works; False when it does not and the history is closing."""
        while True:
            try:
                store = self._opened()
                store.write(rows)
            except BrokenError as error:
                if self._begin_anew(error):
                    continue
            except (sqlite3.OperationalError, OSError) as error:
                self._in_trouble(_why(error))
            else:
                self._well(store, rows)
                return True
            if self._closing.wait(RETRY_S):
                return False

    def prune(self) -> None:
        """Drop what is too old or too much, now and then; what does not work now is tried again later.

        Age counts to the wall clock of our beginning and what has passed since: one that is set forward, perhaps for a
        moment only, must not empty the history.
        """
        if self._store is None or not (time.monotonic() >= self._prune_at or self._unpruned_bytes >= PRUNE_EVERY_BYTES):
            return
        self._prune_at = time.monotonic() + PRUNE_EVERY_S
        self._unpruned_bytes = 0
        try:
            began_at, began = self._begun
            self._store.prune(min(time.time(), began_at + time.monotonic() - began))
        except BrokenError:
            self._suspect.set()
        except (sqlite3.OperationalError, OSError):
            self.close()  # the next write finds out what it is, and says it

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = Store(self._path, self._limits)
            self.last_id = self._store.last_id
        if self._suspect.is_set():
            self._suspect.clear()
            self._store.check()
        return self._store

    def _well(self, store: Store, rows: Rows) -> None:
        self.last_id = store.last_id
        self._unpruned_bytes += rows.bytes
        if self.trouble is not None and time.monotonic() >= self._failed_at + SETTLED_S:
            self.trouble = None
            self._say(f"{self._path} can be written again")

    def _in_trouble(self, why: str) -> None:
        self.close()
        self._failed_at = time.monotonic()
        if self.trouble is None:
            self.trouble = f"cannot write {self._path}: {why}"
            self._say(f"{self.trouble}; supervision goes on, what cannot be kept meanwhile will be missing in `events`")

    def _begin_anew(self, error: BrokenError) -> bool:
        """Put the file aside; what is broken again soon is a broken disk, and left alone."""
        self.close()
        if time.monotonic() < self._anew_at + ANEW_EVERY_S:
            self._in_trouble(f"{error}, again")
            return False
        self._anew_at = time.monotonic()
        try:
            aside = set_aside(self._path)
        except OSError as failed:
            self._in_trouble(f"{error}, and it cannot be renamed: {_why(failed)}")
            return False
        self._on_anew()
        self._say(f"cannot use {self._path} ({error}): it is kept as {aside.name}, the history begins anew")
        return True


def _why(error: sqlite3.Error | OSError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
