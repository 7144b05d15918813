"""The history: what was told and everything that the core saw, written to SQLite by a thread of its own.

The loop only appends to a queue; encoding, compressing, writing and pruning happen in the thread. A broken or full disk
never stops supervision: what waits is written when the disk is back, what does not fit into the queue is counted and
told. From any node in it on, the same core reaches the same decisions (`Reader.recordings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Event, Thread
from typing import Final, TypeVar

from supervisord.core.messages import Observation, Record, Severity
from supervisord.core.model import Node
from supervisord.history_read import Page, Reader, UnreadableError
from supervisord.history_rows import Losses, Packer, Seen, Told
from supervisord.history_store import FILE, BrokenError, Limits
from supervisord.history_writer import Writer
from supervisord.state import boot_id

T = TypeVar("T")

QUEUE_MAX: Final = 2048
SEEN_MAX: Final = 1024
"""Observations leave the rest of the queue to what is told, which is worth more. So many hold up to 10 MiB."""

TURN_ROWS: Final = 500
GATHER_S: Final = 0.5
SAY_EVERY_S: Final = 60.0
SETTLE_S: Final = 1.0
"""How long a reader waits for what was told before it asked."""

_SLOW: Final = "the disk was too slow, or could not be written"


class History:
    """`<state_dir>/history.sqlite3`.

    `on_trouble` is told, on the history's thread, when it cannot be written, when it can be again, and what is missing.
    """

    def __init__(self, state_dir: Path, on_trouble: Callable[[str], None], limits: Limits | None = None) -> None:
        self._path = state_dir / FILE
        self._on_trouble = on_trouble
        self._queue: SimpleQueue[Seen | Told | Event | None] = SimpleQueue()
        self._after_gap = True
        self._losses = Losses()
        self._say_at = time.monotonic()
        self._closing = Event()
        self._hurry = Event()
        self._written = Condition()
        self._last_id = 0
        self._reader = Reader(self._path)
        self._packer = Packer(boot_id(), self._losses)
        self._writer = Writer(self._path, limits or Limits(), self._closing, on_trouble, self._packer.gap)
        self._thread = Thread(target=self._run, name="history", daemon=True)
        self._thread.start()

    # --- any thread ---------------------------------------------------------------------------------------------

    def observe(self, node: Node, seen: Observation, now: float) -> None:
        """Remember what the core is about to decide on, and the node before it. For the loop alone; never waits."""
        if self._queue.qsize() >= SEEN_MAX:
            self._after_gap = True
            self._losses.add(_SLOW, seen=1)
            return
        self._queue.put(Seen(node, seen, now, self._after_gap))
        self._after_gap = False

    def record(self, record: Record) -> None:
        """Remember what people are told. Never waits."""
        if self._queue.qsize() >= QUEUE_MAX:
            self._losses.add(_SLOW, told=1)
            return
        self._queue.put(Told(record, time.time(), time.monotonic()))

    def lost(self) -> tuple[int, int]:
        """See `Losses.totals`."""
        return self._losses.totals()

    def page(self, engine: str | None, since: float | None, after: int | None, limit: int) -> Page:
        """See `Reader.page`; without `after` all that was told before is in it. Raises UnreadableError."""
        if after is None:
            self._settle()
        return self._read(lambda: self._reader.page(engine, since, after, limit))

    def knows(self, engine: str) -> bool:
        """See `Reader.knows`. Raises UnreadableError."""
        return self._read(lambda: self._reader.knows(engine))

    def wait(self, last_id: int, timeout_s: float) -> None:
        """Return as soon as there is an event after `last_id`, at the latest after `timeout_s`."""
        with self._written:
            self._written.wait_for(lambda: self._last_id > last_id, timeout_s)

    def close(self, timeout_s: float = 3.0) -> None:
        """Write what waits, within bounds."""
        self._closing.set()
        self._queue.put(None)
        self._hurry.set()
        self._thread.join(timeout_s)

    def _settle(self) -> None:
        """Let the thread write now what waits for more."""
        if self._writer.trouble is None and not self._closing.is_set():
            done = Event()
            self._queue.put(done)
            self._hurry.set()
            done.wait(SETTLE_S)

    def _read(self, read: Callable[[], T]) -> T:
        if self._writer.trouble is not None and not self._path.exists():
            raise UnreadableError(f"cannot read the history: there is none; {self._writer.trouble}")
        try:
            return read()
        except BrokenError as error:
            self._writer.suspect()
            raise UnreadableError(f"cannot read the history: {error}; it begins anew if that is confirmed") from None

    # --- the history's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over():
            gathered = self._gather()
            items = [item for item in gathered if not isinstance(item, Event)]
            if items or self._over():
                self._turn(items)
            for item in gathered:
                if isinstance(item, Event):
                    item.set()
            self._say_losses()
        self._writer.close()

    def _gather(self) -> list[Seen | Told | Event]:
        """Wait for something, and a little longer for what comes with it."""
        items = [self._queue.get()]
        if self._queue.qsize() < TURN_ROWS:
            self._hurry.wait(GATHER_S)
        self._hurry.clear()
        while len(items) < TURN_ROWS and not self._queue.empty():
            items.append(self._queue.get())
        return [item for item in items if item is not None]

    def _turn(self, items: list[Seen | Told]) -> None:
        written, why = False, _SLOW
        try:
            written = self._writer.write(self._packer.pack(items, last=self._over()))
            self._writer.prune()
        except Exception as error:  # noqa: BLE001 - a bug here must not end the history; it is said like a loss
            why = f"internal error: {type(error).__name__}: {error}; please report it"
        if not written:
            told = sum(isinstance(item, Told) for item in items)
            self._losses.add(why, told=told, seen=len(items) - told)
            self._packer.gap()
        elif why != _SLOW:
            self._losses.add(why)
        with self._written:
            self._last_id = self._writer.last_id
            self._written.notify_all()

    def _over(self) -> bool:
        return self._closing.is_set() and self._queue.empty()

    def _say_losses(self) -> None:
        """Once for each trouble, when it is over; once a minute if it is only slow; and at the end."""
        now, over = time.monotonic(), self._over()
        due = self._writer.trouble is None and now >= self._say_at
        text = self._losses.take() if due or over else None
        if text is None:
            return
        self._say_at = now + SAY_EVERY_S
        self._on_trouble(text)
        if not over:
            # Past the bound: the queue may still be full of what waited.
            self._queue.put(Told(Record("history_lost", text, Severity.WARNING), time.time(), now))
