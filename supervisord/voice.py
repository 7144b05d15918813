"""Telling people: at once in the log, and for later in the history."""

from __future__ import annotations

from supervisord.core.messages import Record, Severity
from supervisord.history import History
from supervisord.log import Journal


class Voice:
    """Never waits; for any thread."""

    def __init__(self, journal: Journal, history: History) -> None:
        self._journal = journal
        self._history = history

    def write(self, record: Record) -> None:
        """Tell what was decided."""
        self._journal.write(record)
        self._history.record(record)

    def tell(
        self,
        kind: str,
        message: str,
        severity: Severity = Severity.INFO,
        *,
        engine: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Tell something that is not a decision of the core."""
        self.write(Record(kind=kind, message=message, severity=severity, engine=engine, reason=reason))

    def close(self) -> None:
        """Write out what is queued, within bounds."""
        self._history.close()
        self._journal.close()
