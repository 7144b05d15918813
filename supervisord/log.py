"""Telling people: structlog in front, a bounded queue behind it. Logging never blocks the loop; losses are counted.

On a terminal one line for eyes, elsewhere one JSON object a line. journald gets fields instead (systemd/journal.py).
"""

from __future__ import annotations

import sys
import time
from enum import Enum
from queue import Full, Queue
from threading import Lock, Thread
from typing import Any, Final, Protocol, TextIO

import structlog

from supervisord.core.messages import Record, Severity

_QUEUE: Final = 2000
_LEVELS: Final = {
    Severity.CRITICAL: "critical",
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.NOTICE: "notice",
    Severity.INFO: "info",
    Severity.DEBUG: "debug",
}
_COLOURS: Final = {
    Severity.CRITICAL: "\x1b[1;31m",
    Severity.ERROR: "\x1b[31m",
    Severity.WARNING: "\x1b[33m",
    Severity.NOTICE: "\x1b[32m",
    Severity.INFO: "",
    Severity.DEBUG: "\x1b[2m",
}


class Sent(Enum):
    """What became of a record. `LATER`: it was not taken within a bounded wait, and may be sent again."""

    TAKEN = "taken"
    LATER = "later"
    LOST = "lost"


class Sink(Protocol):
    """Where records go. Only the journal's thread calls it."""

    hindrance: str
    """Why lines are lost there, in words."""

    def send(self, record: Record) -> Sent:
        """Hand a record over; raises nothing."""

    def close(self) -> None:
        """Nothing follows."""


class Journal:
    """Writes records in a thread of its own."""

    def __init__(self, stream: TextIO | None = None, sink: Sink | None = None) -> None:
        """Into `sink`, where there is one; otherwise as lines on `stream`, stderr if it is None."""
        self._sink: Sink = sink if sink is not None else Lines(stream if stream is not None else sys.stderr)
        self._queue: Queue[Record | None] = Queue(_QUEUE)
        self._given_up = False
        self._losses = Lock()
        self.dropped = 0
        self._reported = 0
        self._thread = Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue a record; when the reader of the log is too slow it is dropped and counted."""
        try:
            self._queue.put_nowait(record)
        except Full:
            self._lose()

    def tell(self, kind: str, message: str, severity: Severity = Severity.INFO) -> None:
        """Write something that is not a decision of the core."""
        self.write(Record(kind=kind, message=message, severity=severity))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write out what is queued, within bounds."""
        over = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, over - time.monotonic()))
        except Full:
            pass
        self._given_up = True

    def _run(self) -> None:
        while (record := self._queue.get()) is not None and not self._given_up:
            if not self._emit(record):
                self._lose()
            if self._queue.empty():  # what was lost came after all that the queue could hold
                self._emit_losses()
        self._emit_losses()
        self._sink.close()

    def _lose(self) -> None:
        with self._losses:  # any thread may lose a line
            self.dropped += 1

    def _emit_losses(self) -> None:
        """Say them; again, if it was not heard."""
        lost = self.dropped - self._reported
        if lost:
            text = f"{lost} log lines were dropped: {self._sink.hindrance}"
            if self._emit(Record("log_lost", text, Severity.WARNING)):
                self._reported += lost

    def _emit(self, record: Record) -> bool:
        while (sent := self._sink.send(record)) is Sent.LATER and not self._given_up:
            pass  # the wait is in there; meanwhile the queue fills, and what it cannot hold is counted
        return sent is Sent.TAKEN


class Lines:
    """A stream: for eyes if it is a terminal, else JSON."""

    hindrance = "the log is read too slowly"

    def __init__(self, stream: TextIO) -> None:
        terminal = stream.isatty()
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal)
        json_lines = [_people_first, structlog.processors.JSONRenderer()]
        processors: list[Any] = [stamp, *([_for_eyes] if terminal else json_lines)]
        self._logger = structlog.wrap_logger(structlog.WriteLogger(stream), processors=processors)

    def send(self, record: Record) -> Sent:
        """Write one line."""
        fields: dict[str, Any] = {"level": _LEVELS[record.severity], "kind": record.kind}
        if record.engine is not None:
            fields |= {"engine": record.engine, "generation": record.generation}
        if record.reason is not None:
            fields["reason"] = record.reason
        fields |= {name: value for name, value in record.numbers.items() if value is not None}
        try:
            self._logger.msg(record.message, **fields)
        except (OSError, ValueError):
            return Sent.LOST  # the terminal or pipe is gone: nobody reads, and nobody must be stopped by it
        return Sent.TAKEN

    def close(self) -> None:
        """Leave the stream to whoever opened it."""


def _people_first(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Order the keys as a person reads them: when, how bad, what."""
    return {key: event[key] for key in ("timestamp", "level", "event")} | event


def _for_eyes(_logger: Any, _method: str, event: dict[str, Any]) -> str:
    severity = next(s for s, name in _LEVELS.items() if name == event["level"])
    colour = _COLOURS[severity]
    text = printable(event["event"])
    return f"{event['timestamp']} {colour}{text}{chr(27) + '[0m' if colour else ''}"


def printable(text: str) -> str:
    """Without control characters: what engines and pages say must not drive a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
