"""The history's database: its tables, one transaction for what came together, and the bounds that it keeps.

events        what was told, with its numbers
observations  everything that the core saw, as zlib-compressed JSON: {"node": NODE, "seen": [[now, observation], ...]};
              NODE is the node before them in rows that a replay can start with, otherwise null
samples       mean, lowest and highest of a few numbers per engine and five minutes

For one thread; readers have connections of their own (history_read), and with WAL nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

FILE: Final = "history.sqlite3"
VERSION: Final = 1

DAY_S: Final = 86_400.0
BUCKET_S: Final = 300

_BUSY_S: Final = 2.0
_BROKEN_KEPT: Final = 2
_SETTINGS: Final = (
    "PRAGMA auto_vacuum = INCREMENTAL",  # has to come before the first table
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    "PRAGMA cache_size = -256",
    "PRAGMA journal_size_limit = 4194304",
)
_SCHEMA: Final = (
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL, boot_id TEXT NOT NULL, monotonic REAL NOT NULL,
        severity INTEGER NOT NULL, kind TEXT NOT NULL,
        engine TEXT, generation INTEGER, reason TEXT, message TEXT NOT NULL, numbers TEXT NOT NULL)""",
    "CREATE INDEX events_of_engine ON events (engine, id)",
    """CREATE TABLE observations (
        id INTEGER PRIMARY KEY,
        at REAL NOT NULL, boot_id TEXT NOT NULL, has_node INTEGER NOT NULL, data BLOB NOT NULL)""",
    "CREATE INDEX observations_with_node ON observations (id, at) WHERE has_node",
    """CREATE TABLE samples (
        bucket INTEGER NOT NULL, engine TEXT NOT NULL, name TEXT NOT NULL,
        n INTEGER NOT NULL, mean REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL,
        PRIMARY KEY (bucket, engine, name)) WITHOUT ROWID""",
)

_LAYOUT: Final = (
    "SELECT m.type, m.name, c.name FROM sqlite_master AS m LEFT JOIN pragma_table_info(m.name) AS c "
    "WHERE m.name NOT LIKE 'sqlite%'"
)
"""Tables with their columns, and all else that is in a file: an index or a trigger could refuse what is written."""

_ID_MAX: Final = 1 << 62
"""A counter beyond this was damaged; at its very end SQLite would call the disk full for ever."""

LAST_ID: Final = "SELECT seq FROM sqlite_sequence WHERE name = 'events'"
"""The id of the newest event that there ever was."""

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = ()
"""What makes version n + 1 of version n, from version 1 on."""

_ADD_EVENT: Final = (
    "INSERT INTO events (at, boot_id, monotonic, severity, kind, engine, generation, reason, message, numbers) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_ADD_CHUNK: Final = "INSERT INTO observations (at, boot_id, has_node, data) VALUES (?, ?, ?, ?)"
_ADD_SAMPLE: Final = (
    "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "mean = (mean * n + excluded.mean * excluded.n) / (n + excluded.n), n = n + excluded.n, "
    "low = min(low, excluded.low), high = max(high, excluded.high)"
)

EventRow = tuple[float, str, float, int, str, str | None, int | None, str | None, str, str]
ChunkRow = tuple[float, str, bool, bytes]
SampleRow = tuple[int, str, str, int, float, float, float]


class BrokenError(Exception):
    """The file is no database, damaged, or of a newer version: it is of no use to this program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept. `bytes_max` is for the whole file; observations give way first."""

    events_for_s: float = 90 * DAY_S
    events_max: int = 100_000
    observations_for_s: float = DAY_S
    samples_for_s: float = 30 * DAY_S
    bytes_max: int = 256 << 20
    rows_per_turn: int = 10_000
    pages_per_turn: int = 2_000


@dataclass(frozen=True, slots=True)
class Rows:
    """What is written in one transaction."""

    events: tuple[EventRow, ...] = ()
    chunks: tuple[ChunkRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()

    @property
    def bytes(self) -> int:
        """What weighs of it."""
        return sum(len(row[-1]) for row in self.chunks) + sum(len(row[-1]) + len(row[-2]) for row in self.events)


class Store:
    """An open database. Raises sqlite3.OperationalError or OSError for trouble of the disk, BrokenError otherwise."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._limits = limits
        self._path = path
        _prepare(path)
        self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        self._connection.text_factory = lambda text: text.decode(errors="replace")
        try:
            with told_apart():
                version = self._version()
                for setting in _SETTINGS:
                    self._connection.execute(setting)
                self._migrate(version)
                self.last_id = self._number(LAST_ID)
                self._check_tables()
            self._identity = _identity(path)
        except BaseException:
            self._connection.close()
            raise

    def write(self, rows: Rows) -> None:
        """Write all of it or nothing."""
        if self._identity != _identity(self._path):
            raise FileNotFoundError(0, "the file was removed or replaced", str(self._path))
        with self._transaction():
            self._connection.executemany(_ADD_EVENT, rows.events)
            self._connection.executemany(_ADD_CHUNK, rows.chunks)
            self._connection.executemany(_ADD_SAMPLE, rows.samples)
        self.last_id += len(rows.events)

    def prune(self, at: float) -> None:
        """Drop what is too old or too much, at most some rows of each kind; `at` is epoch seconds."""
        limits = self._limits
        with self._transaction():
            self._drop_events(at - limits.events_for_s)
            # From a node on everything can be replayed: drop up to the last one that is old enough.
            old = "SELECT max(id) FROM observations WHERE has_node AND at < ?"
            self._drop("observations", self._number(old, at - limits.observations_for_s))
            self._connection.execute(
                "DELETE FROM samples WHERE bucket < ?", (int((at - limits.samples_for_s) // BUCKET_S),)
            )
            if self.bytes_used() > limits.bytes_max:
                first = self._number("SELECT min(id) FROM observations")
                last = self._number("SELECT max(id) FROM observations")
                self._drop("observations", first + 1 + (last - first) // 10)
        with told_apart():
            self._connection.execute(f"PRAGMA incremental_vacuum({limits.pages_per_turn:d})").fetchall()

    def check(self) -> None:
        """Look at the whole file; takes a second or so for a large one."""
        with told_apart():
            found = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise BrokenError(f"it is damaged: {found}")

    def bytes_used(self) -> int:
        """Bytes of the file that hold something."""
        pages = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return pages * self._number("PRAGMA page_size")

    def close(self) -> None:
        """Close; nothing is lost if that fails."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _version(self) -> int:
        version = self._number("PRAGMA user_version")
        if version == 0 and self._number("SELECT count(*) FROM sqlite_master"):
            raise BrokenError("it is somebody else's database")
        if version > VERSION:
            raise BrokenError(f"it is of version {version}, this program knows {VERSION}")
        return version

    def _migrate(self, version: int) -> None:
        steps = (_SCHEMA, *MIGRATIONS)[version:]
        if steps:
            with self._transaction():
                for statement in (statement for step in steps for statement in step):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {VERSION:d}")

    def _check_tables(self) -> None:
        with contextlib.closing(sqlite3.connect(":memory:")) as ours:
            for statement in (statement for step in (_SCHEMA, *MIGRATIONS) for statement in step):
                ours.execute(statement)
            layout = set(ours.execute(_LAYOUT))
        if set(self._connection.execute(_LAYOUT)) != layout or not 0 <= self.last_id <= _ID_MAX:
            raise BrokenError("its tables are not as this program makes them")

    def _drop_events(self, before: float) -> None:
        kept = self._number("SELECT id FROM events WHERE at >= ? ORDER BY id LIMIT 1", before)
        self._drop("events", max(kept or self.last_id + 1, self.last_id + 1 - self._limits.events_max))

    def _drop(self, table: str, before_id: int) -> None:
        first = self._number(f"SELECT min(id) FROM {table}")  # noqa: S608 (our own table names)
        until = min(before_id, first + self._limits.rows_per_turn)
        self._connection.execute(f"DELETE FROM {table} WHERE id < ?", (until,))  # noqa: S608 (our own table names)

    def _number(self, query: str, *parameters: float) -> int:
        row = self._connection.execute(query, parameters).fetchone()
        return whole(row[0]) if row is not None else 0

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with told_apart():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise


def set_aside(path: Path) -> Path:
    """Rename a database that is of no use, with the time; of those the newest are kept. Raises OSError."""
    aside = path.with_name(f"{path.name}.broken-{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%f}")
    path.rename(aside)
    with contextlib.suppress(FileNotFoundError):
        path.with_name(f"{path.name}-wal").rename(f"{aside}-wal")
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    older = sorted(path.parent.glob(f"{path.name}.broken-*[0-9]"))[:-_BROKEN_KEPT]
    for file in older:
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}-wal").unlink(missing_ok=True)
    return aside


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Trouble of the disk is an OperationalError; a bare DatabaseError is a file that is damaged or no database."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if type(error) is sqlite3.DatabaseError:
            raise BrokenError(str(error)) from None
        raise
    except UnicodeDecodeError:  # in what SQLite says about it
        raise BrokenError("it is damaged") from None


def whole(value: object) -> int:
    """A number that SQLite gave; 0 for NULL, and for what is no whole number, as in a damaged file."""
    return value if isinstance(value, int) else 0


def _prepare(path: Path) -> None:
    """Make the file, for us alone; one that is there has to be a plain file of ours.

    It is never opened here when it is there: closing it would drop the locks that readers of this process hold.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise BrokenError("it is a link, no plain file, or not ours") from None
        if found.st_mode & 0o077:
            path.chmod(0o600)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
