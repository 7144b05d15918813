"""What engines write: read without trust, wherever it is; and the files of the plain launcher, one for each engine.

Never a pipe to the daemon: a full one blocks the engine, and the end of the daemon would break it. The engine appends
to its file (O_APPEND), so that can be cut while it runs.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

KEEP: Final = 3
"""Older logs that are kept, as .1 (the latest) to .3."""

ROTATE_BYTES: Final = 64 * 1024 * 1024
"""A log of this size is set aside at the next launch; the part of a cut log that is kept."""

CUT_BYTES: Final = 256 * 1024 * 1024
"""A log of this size is cut while its engine runs."""

TAIL_LINES: Final = 200
TAIL_BYTES: Final = 64 * 1024
_DISTINCT_MAX: Final = 4096
_READ_BYTES: Final = 1024 * 1024

_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_LINE_END: Final = re.compile(rb"[\r\n]+")
_DIGITS: Final = re.compile(rb"\d+")


def open_log(path: Path, generation: int) -> tuple[int, int]:
    """Open for an engine that starts; give the descriptor and where its output begins. Raises OSError."""
    if _size(path) >= ROTATE_BYTES:
        _make_room(path)
        path.rename(_older(path, 1))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        os.write(descriptor, f"--- vllm-supervisor: generation {generation} at {at} ---\n".encode())
        return descriptor, os.fstat(descriptor).st_size
    except OSError:
        os.close(descriptor)
        raise


def cut(path: Path) -> bool:
    """Shorten a log that is being written, if it is too large: its end is copied to .1. Raises OSError.

    Lines written between the last copied byte and the cut are lost. It is cut also when the copy fails: a full disk is
    when it matters most.
    """
    if _size(path) < CUT_BYTES:
        return False
    with path.open("r+b", buffering=0) as log:
        try:
            _make_room(path)
            with _older(path, 1).open("wb", buffering=0) as older:
                end = log.seek(-ROTATE_BYTES, os.SEEK_END) + 2 * ROTATE_BYTES
                while log.tell() < end and (data := log.read(_READ_BYTES)):
                    older.write(data)
        finally:
            log.truncate(0)
    return True


def _make_room(path: Path) -> None:
    for number in range(KEEP - 1, 0, -1):
        if _older(path, number).exists():
            _older(path, number).rename(_older(path, number + 1))


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def tail(path: Path, offset: int, lines: int) -> tuple[str, ...]:
    """Last lines from `offset` on, oldest first, as `last_lines`; empty when the log cannot be read."""
    try:
        with path.open("rb", buffering=0) as log:
            size = log.seek(0, os.SEEK_END)
            start = max(offset if offset <= size else 0, size - TAIL_BYTES)
            log.seek(start)
            data = log.read(TAIL_BYTES)
    except OSError:
        return ()
    return last_lines(data, lines)


def last_lines(data: bytes, lines: int) -> tuple[str, ...]:
    """The end of what an engine wrote, oldest line first, at most 200 and 64 KiB, without control characters."""
    text = data[-TAIL_BYTES:].decode("utf-8", "replace").removesuffix("\n")
    found = text.split("\n")[-min(lines, TAIL_LINES) :] if text else []
    # A progress bar overwrites itself with carriage returns: what stands there at last counts.
    return tuple(plain(line.rstrip("\r").rpartition("\r")[2]) for line in found)


def plain(line: str) -> str:
    """Text without what could steer a terminal: escape sequences, control characters, direction marks."""
    text = _ESCAPE.sub("", line).replace("\t", " ")
    if text.isprintable():
        return text
    return "".join(c for c in text if unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Zl", "Zp"})


class DistinctLines:
    """Counts different lines, digits masked: a repeated line is no progress (A10). Remembers at most 4096."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, lines: Iterable[bytes]) -> int:
        """Give the number of different lines so far."""
        for line in lines:
            if len(self._seen) >= _DISTINCT_MAX:
                break
            self._seen.add(hash(_DIGITS.sub(b"0", line)))
        return len(self._seen)


class LinesOfFile:
    """Counts the different lines of a log file as it grows.

    Reads on from where it was, at most 1 MiB a call (more is skipped).
    """

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""
        self._distinct = DistinctLines()

    def count(self) -> int:
        """Read what is new; give the number of different lines so far."""
        try:
            with self._path.open("rb", buffering=0) as log:
                size = log.seek(0, os.SEEK_END)
                if size < self._offset:
                    self._offset = 0
                self._offset = max(self._offset, size - _READ_BYTES)
                log.seek(self._offset)
                data = log.read(_READ_BYTES)
        except OSError:
            return self._distinct.add(())
        self._offset += len(data)
        *lines, self._rest = split(self._rest + data)
        self._rest = self._rest[-TAIL_BYTES:]
        return self._distinct.add(lines)


def split(data: bytes) -> list[bytes]:
    """Lines; a carriage return (progress bars) ends one too. The last is what was not ended."""
    return _LINE_END.split(data)
