"""Identity records: what makes the process of an engine ours, also for the daemon after this one.

`<state_dir>/identity/<engine>.jsonl`: the first line is the identity, written whole to a new file that is renamed.
Facts that come later (shared-memory names, a log that was cut, the end) are appended as lines of their own. So no later
write endangers the identity, and a torn last line costs only itself.

A record is in the kernel, and so survives the death of the daemon, as soon as it is renamed; `sync` makes it survive
the machine. Processes do not survive the machine, so a spawn need not wait for the disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeGuard

from supervisord.core.model import Process

VERSION: Final = 1
DIRECTORY: Final = "identity"
"""Below the state directory."""
SUFFIX: Final = ".jsonl"
_NEW: Final = ".new"
_MAX_BYTES: Final = 1024 * 1024
_PID_MAX: Final = 2**31 - 1
_UID_MAX: Final = 2**32 - 2
_NUMBER_MAX: Final = 2**63 - 1
"""More than the system's calls take; every other number of ours is far smaller."""
_QUOTED_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class Record:
    """One generation of one engine.

    `uid`: whose process it is. `private_dir`: its temporary directory. `log_offset`: where its output begins in the
    log. `shared_memory`: names in /dev/shm with their inodes. `ended`: it was swept, nothing of it is left.
    """

    engine: str
    generation: int
    plan_id: str
    uid: int
    process: Process
    private_dir: str
    log_offset: int
    shared_memory: Mapping[str, int] = field(default_factory=dict)
    ended: bool = False


class RecordError(Exception):
    """A record cannot be used."""


class Records:
    """The records of all engines."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = Lock()
        self._generations: dict[str, int] = {}

    def put(self, record: Record) -> None:
        """Replace the record of an engine. Raises OSError."""
        process = record.process
        facts = {
            "version": VERSION,
            "engine": record.engine,
            "generation": record.generation,
            "plan_id": record.plan_id,
            "uid": record.uid,
            "pid": process.pid,
            "start_ticks": process.start_ticks,
            "boot_id": process.boot_id,
            "private_dir": record.private_dir,
            "log_offset": record.log_offset,
        }
        path = self._path(record.engine)
        temporary = path.with_name(f".{path.name}{_NEW}")
        with self._lock:
            _write(temporary, os.O_CREAT | os.O_TRUNC, facts)
            temporary.rename(path)
            self._generations[record.engine] = record.generation

    def sync(self, engine: str) -> None:
        """Make the record of an engine survive a power failure. Raises OSError."""
        for path in (self._path(engine), self._directory):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def add(self, engine: str, generation: int, facts: Mapping[str, Any]) -> None:
        """Append what became known about a generation; dropped when the record is of another one. Raises OSError."""
        with self._lock:
            if self._generations.get(engine) == generation:
                _write(self._path(engine), os.O_APPEND, facts)

    def load(self) -> tuple[list[Record], list[str]]:
        """All records, and one sentence about each that cannot be used. Changes nothing: it may be another daemon's."""
        records, problems = [], []
        for path in sorted(path for path in self._directory.iterdir() if path.suffix == SUFFIX):
            try:
                record = parse(path.stem, _read(path))
            except (OSError, RecordError) as error:
                problems.append(f"cannot use the identity record {path}: {error}; the next start replaces it")
                continue
            self._generations[record.engine] = record.generation
            records.append(record)
        return records, problems

    def remove_unfinished(self) -> None:
        """Remove new files that a killed daemon did not come to rename. Raises OSError."""
        for path in self._directory.glob(f".*{SUFFIX}{_NEW}"):
            path.unlink()

    def _path(self, engine: str) -> Path:
        return self._directory / f"{engine}{SUFFIX}"


def parse(engine: str, data: bytes) -> Record:
    """Read a record. Raises RecordError when the identity is not all there; wrong later lines are skipped."""
    first, *later = data.split(b"\n")
    facts = _object(first)
    if facts is None:
        raise RecordError("its first line is not a JSON object")
    if facts.get("version") != VERSION:
        raise RecordError(f"its version is {_quoted(facts.get('version'))}, this program reads {VERSION}")
    if facts.get("engine") != engine:
        raise RecordError(f"it is about engine {_quoted(facts.get('engine'))}")
    record = Record(
        engine=engine,
        generation=_number(facts, "generation"),
        plan_id=_text(facts, "plan_id"),
        uid=_number(facts, "uid", most=_UID_MAX),
        process=Process(_number(facts, "pid", most=_PID_MAX), _number(facts, "start_ticks"), _text(facts, "boot_id")),
        private_dir=_text(facts, "private_dir"),
        log_offset=_number(facts, "log_offset"),
    )
    shared_memory: dict[str, int] = {}
    log_offset, ended = record.log_offset, False
    for line in later:
        more = _object(line) or {}
        names = more.get("shared_memory")
        if isinstance(names, dict):
            shared_memory |= {name: inode for name, inode in names.items() if _is_file(name) and _is_number(inode)}
        if _is_number(more.get("log_offset")):
            log_offset = more["log_offset"]
        ended = ended or more.get("ended") is True
    return replace(record, shared_memory=shared_memory, log_offset=log_offset, ended=ended)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _text(facts: Mapping[str, Any], name: str) -> str:
    value = facts.get(name)
    if not isinstance(value, str) or not _is_path(value):
        raise RecordError(f"its {name} is {_quoted(value)}")
    return value


def _number(facts: Mapping[str, Any], name: str, most: int = _NUMBER_MAX) -> int:
    value = facts.get(name)
    if not _is_number(value, most):
        raise RecordError(f"its {name} is {_quoted(value)}")
    return value


def _is_number(value: object, most: int = _NUMBER_MAX) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_path(text: str) -> bool:
    """Whether the system's calls take it."""
    try:
        return b"\0" not in os.fsencode(text) and text != ""
    except UnicodeEncodeError:
        return False


def _is_file(name: str) -> bool:
    """Whether it names something in a directory, and nothing elsewhere."""
    return _is_path(name) and "/" not in name


def _quoted(value: object) -> str:
    return repr(value)[:_QUOTED_CHARS]


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return file.read(_MAX_BYTES)


def _write(path: Path, flags: int, facts: Mapping[str, Any]) -> None:
    line = json.dumps(facts).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)
