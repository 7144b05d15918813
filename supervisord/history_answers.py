"""What the control API answers from the history (the part of `control.routes.Handlers` that looks back)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from supervisord.control.routes import EventPage, NoHistoryError
from supervisord.core import story
from supervisord.history import History
from supervisord.history_read import UnreadableError, document
from supervisord.loop import Board


class HistoryAnswers:
    """Reads the history, and the node where that goes on."""

    def __init__(self, history: History, board: Board) -> None:
        self._history = history
        self._board = board

    def events(self, engine: str | None, since: float | None, after: int | None, limit: int) -> EventPage | None:
        """Read some events."""
        with _readable():
            page = self._history.page(engine, since, after, limit)
            if engine is not None and not page.events and not self._knows(engine):
                return None
        return EventPage(tuple(document(event, stamp(event.at)) for event in page.events), page.last_id, page.more)

    def wait_event(self, last_id: int, timeout_s: float) -> None:
        """Wait for the next event."""
        self._history.wait(last_id, timeout_s)

    def why(self, engine: str) -> Mapping[str, Any] | None:
        """Tell what happened to an engine last."""
        with _readable():
            found = self._history.page(engine, None, None, story.EVENTS).events
        _, node = self._board.read()
        known = node.engines.get(engine)
        if not found and known is None:
            return None
        return story.document(story.tell(engine, found, known, time.monotonic(), time.time()), stamp)

    def _knows(self, engine: str) -> bool:
        _, node = self._board.read()
        return engine in node.engines or self._history.knows(engine)


def stamp(at: float) -> str:
    """A time (epoch seconds) as the control API writes it: RFC 3339, UTC."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def _readable() -> Iterator[None]:
    """Trouble of the history in the words of the control API."""
    try:
        yield
    except UnreadableError as error:
        if error.slow:
            raise TimeoutError from None
        raise NoHistoryError(str(error)) from None
