"""Reading the history: in the caller's thread, through a connection of its own, each answer within a deadline."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from supervisord.core import codec
from supervisord.core.incident import Event
from supervisord.core.messages import Observation, Severity
from supervisord.core.model import Node
from supervisord.history_store import LAST_ID, told_apart, whole

DEADLINE_S: Final = 5.0
PAGE_CHARS: Final = 1 << 20
"""Of messages and numbers; a page is cut there."""

_AT_MAX: Final = 253_402_300_799.0
"""The last second of the year 9999, in epoch seconds."""
_RECORDED_MAX: Final = 64 << 20
"""Bytes of one recording, unpacked."""
_STEPS: Final = 2000
"""Instructions of SQLite's machine between two looks at the clock."""
_COLUMNS: Final = "id, at, boot_id, monotonic, severity, kind, engine, generation, reason, message, numbers"


class UnreadableError(Exception):
    """The history cannot be read now; the message says why. `slow`: it would take too long."""

    def __init__(self, message: str, *, slow: bool = False) -> None:
        super().__init__(message)
        self.slow = slow


@dataclass(frozen=True, slots=True)
class Page:
    """Events, oldest first. The next page comes `after` last_id; `more`: it is not empty."""

    events: tuple[Event, ...]
    last_id: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class Recording:
    """What the core saw, one after the other, from a node on."""

    node: Node
    seen: tuple[tuple[float, Observation], ...]


class Reader:
    """Answers questions about what is in the file, for any thread. Raises UnreadableError, BrokenError.

    `deadline_s` is for each answer.
    """

    def __init__(self, path: Path, deadline_s: float = DEADLINE_S) -> None:
        self._path = path
        self._deadline_s = deadline_s

    def page(self, engine: str | None, since: float | None, after: int | None, limit: int) -> Page:
        """Events after an id, or from a time on, oldest first; neither: the newest ones.

        An id that the history has not reached is of one that was begun anew since: then from its beginning.
        """
        with self._connection() as connection:
            if connection is None:
                return Page((), 0)
            last_id = _first(connection, LAST_ID)
            if after is not None and after > last_id:
                after = 0
            newest = after is None and since is None
            wanted = {"id > ?": after or 0, "engine = ?": engine, "at >= ?": since}
            wanted = {condition: value for condition, value in wanted.items() if value is not None}
            order = "DESC" if newest else "ASC"
            query = f"SELECT {_COLUMNS} FROM events WHERE {' AND '.join(wanted)} ORDER BY id {order}"  # noqa: S608 (no values in it)
            found, more = _some(connection.execute(query, tuple(wanted.values())), limit)
        if newest:
            return Page(tuple(reversed(found)), last_id)
        return Page(tuple(found), found[-1].id if more else last_id, more)

    def knows(self, engine: str) -> bool:
        """Whether there is any event of this engine."""
        with self._connection() as connection:
            return connection is not None and bool(
                _first(connection, "SELECT 1 FROM events WHERE engine = ? LIMIT 1", engine)
            )

    def recordings(self) -> Iterator[Recording]:
        """Everything that can be replayed, oldest first. Raises DecodeError too."""
        with self._connection() as connection:
            if connection is None:
                return
            node: Node | None = None
            seen: list[tuple[float, Observation]] = []
            for (data,) in connection.execute("SELECT data FROM observations ORDER BY id"):
                first, more = _recorded(data)
                if first is not None:
                    if node is not None:
                        yield Recording(node, tuple(seen))
                    node, seen = first, []
                seen += more
            if node is not None:
                yield Recording(node, tuple(seen))

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection | None]:
        """A connection with one snapshot of the file; None when there is nothing in it yet."""
        if not self._path.exists():
            yield None
            return
        until = time.monotonic() + self._deadline_s
        try:
            with told_apart(), contextlib.closing(_open(self._path)) as connection:
                connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
                connection.execute("BEGIN")
                yield connection if _first(connection, "PRAGMA user_version") else None
        except sqlite3.OperationalError as error:
            if time.monotonic() > until:
                text = f"cannot read the history within {self._deadline_s:g} s: the disk or the machine is too busy"
                raise UnreadableError(text, slow=True) from None
            raise UnreadableError(f"cannot read the history {self._path}: {error}") from None


def document(event: Event, at: str) -> dict[str, Any]:
    """An event for programs; `at` is its time as RFC 3339 in UTC."""
    return {
        "id": event.id,
        "at": at,
        "severity": event.severity.name.lower(),
        "kind": event.kind,
        "engine": event.engine,
        "generation": event.generation,
        "reason": event.reason,
        "message": event.message,
        "numbers": dict(event.numbers),
    }


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=1.0, isolation_level=None)
    connection.text_factory = lambda text: text.decode(errors="replace")  # one broken text must not hide all others
    return connection


def _recorded(data: Any) -> tuple[Node | None, list[tuple[float, Observation]]]:
    """The node, if there is one, and the observations of one row. Raises DecodeError."""
    try:
        document = json.loads(zlib.decompressobj().decompress(data, _RECORDED_MAX))
        node = None if document["node"] is None else codec.decode_node(document["node"])
        return node, [(float(now), codec.decode_observation(value)) for now, value in document["seen"]]
    except (zlib.error, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise codec.DecodeError(f"a recording is damaged: {error}") from None


def _first(connection: sqlite3.Connection, query: str, *parameters: str) -> int:
    row = connection.execute(query, parameters).fetchone()
    return whole(row[0]) if row is not None else 0


def _some(rows: sqlite3.Cursor, limit: int) -> tuple[list[Event], bool]:
    """As many as are wanted and fit into a page, and whether there are more. Rows that are damaged are passed over."""
    found: list[Event] = []
    chars = 0
    for row in rows:
        event = _event(row)
        if event is None:
            continue
        chars += len(event.message) + len(row[-1])
        if len(found) == limit or (found and chars > PAGE_CHARS):
            return found, True
        found.append(event)
    return found, False


def _event(row: tuple[Any, ...]) -> Event | None:
    """An event; None when the row is none of ours. SQLite lets every column hold a value of every kind."""
    id_, at, boot_id, now, severity, kind, engine, generation, reason, message, numbers = row
    try:
        told = json.loads(numbers)
        rank = Severity(severity)
    except (ValueError, TypeError, RecursionError):
        return None
    texts = all(isinstance(text, str) for text in (boot_id, kind, message, engine or "", reason or ""))
    times = isinstance(at, float) and isinstance(now, float) and 0.0 <= at <= _AT_MAX and math.isfinite(now)
    if not texts or not times or not isinstance(generation, int | None) or not _are_numbers(told):
        return None
    return Event(id_, at, boot_id, now, rank, kind, message, engine, generation, reason, told)


def _are_numbers(told: object) -> bool:
    """Whether they are what `history_rows` writes: a text or a finite number each, or null."""
    if not isinstance(told, dict):
        return False
    values = told.values()
    return all(
        isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value)) for value in values
    )
