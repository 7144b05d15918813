"""Telling people: at once in the log, for later in the history, and in sum in the metrics."""

from __future__ import annotations

from supervisord.core.messages import Record, Severity
from supervisord.figures import Figures
from supervisord.history import History
from supervisord.log import Journal


class Voice:
    """Never waits; for any thread."""

    def __init__(self, journal: Journal, history: History) -> None:
        self._journal = journal
        self._history = history
        self.figures = Figures()

    def write(self, record: Record) -> None:
        """Tell what was decided."""
        self._journal.write(record)
        self._history.record(record)
        self.figures.heard(record)

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

    def lost(self) -> dict[str, int]:
        """What did not reach the log and the history since the daemon started, by what it was."""
        events, observations = self._history.lost()
        return {"log_line": self._journal.dropped, "event": events, "observation": observations}

    def close(self) -> None:
        """Write out what is queued, within bounds."""
        self._history.close()
        self._journal.close()
