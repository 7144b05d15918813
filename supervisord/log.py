"""Telling people: structlog in front, a bounded queue behind it. Logging never blocks the loop; losses are counted.

On a terminal one line for eyes, elsewhere one JSON object a line.
"""

from __future__ import annotations

import sys
from queue import Full, Queue
from threading import Thread
from typing import Any, Final, TextIO

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


class Journal:
    """Writes records in a thread of its own."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        terminal = self._stream.isatty()
        self._queue: Queue[Record | None] = Queue(_QUEUE)
        self.dropped = 0
        self._reported = 0
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal)
        json_lines = [_people_first, structlog.processors.JSONRenderer()]
        processors: list[Any] = [stamp, *([_for_eyes] if terminal else json_lines)]
        self._logger = structlog.wrap_logger(structlog.WriteLogger(self._stream), processors=processors)
        self._thread = Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue a record; when the reader of the log is too slow it is dropped and counted."""
        try:
            self._queue.put_nowait(record)
        except Full:
            self.dropped += 1

    def tell(self, kind: str, message: str, severity: Severity = Severity.INFO) -> None:
        """Write something that is not a decision of the core."""
        self.write(Record(kind=kind, message=message, severity=severity))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write out what is queued, within bounds."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            if not self._emit(record):
                self.dropped += 1
            self._emit_losses()

    def _emit_losses(self) -> None:
        lost = self.dropped - self._reported
        if lost:
            self._reported += lost
            self._emit(
                Record("log_lost", f"{lost} log lines were dropped: the log is read too slowly", Severity.WARNING)
            )

    def _emit(self, record: Record) -> bool:
        fields: dict[str, Any] = {"level": _LEVELS[record.severity], "kind": record.kind}
        if record.engine is not None:
            fields |= {"engine": record.engine, "generation": record.generation}
        if record.reason is not None:
            fields["reason"] = record.reason
        fields |= {name: value for name, value in record.numbers.items() if value is not None}
        try:
            self._logger.msg(record.message, **fields)
        except (OSError, ValueError):
            return False  # the terminal or pipe is gone: nobody reads, and nobody must be stopped by it
        return True


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
    return "".join(c if c.isprintable() else " " for c in text)
