"""Telling people: in the log, in the history for later, far away by webhooks, and in sum in the metrics."""

from __future__ import annotations

from collections.abc import Mapping

from supervisord.core.messages import Record, Severity
from supervisord.core.spec import NotifySpec
from supervisord.figures import Figures
from supervisord.history import History
from supervisord.log import Journal
from supervisord.webhook.notifier import Webhooks


class Voice:
    """Never waits; for any thread."""

    def __init__(self, journal: Journal, history: History, webhooks: Webhooks) -> None:
        self._journal = journal
        self._history = history
        self.figures = Figures()
        self.webhooks = webhooks

    def write(self, record: Record) -> None:
        """Tell what was decided."""
        self._journal.write(record)
        self._history.record(record)
        self.figures.heard(record)
        self.webhooks.offer(record)

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

    def notify(self, specs: Mapping[str, NotifySpec]) -> list[str]:
        """Tell these receivers from now on; what that changes, in sentences."""
        return self.webhooks.use(specs, self.write)

    def close(self) -> None:
        """Write out what is queued, within bounds."""
        self.webhooks.close()
        self._history.close()
        self._journal.close()


def tell_of_history(journal: Journal, webhooks: Webhooks, text: str) -> None:
    """Tell of trouble with the history to everybody but the history."""
    record = Record("history", text, Severity.WARNING)
    journal.write(record)
    webhooks.offer(record)
