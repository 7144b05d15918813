"""What a receiver is told: one event as JSON (docs/notifications.md). Its names are those of `events --json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final

from supervisord.core.messages import Record
from supervisord.log import printable

VERSION: Final = 1
MESSAGE_CHARS: Final = 4000
_VALUE_CHARS: Final = 500

Subject = tuple[str | float | int | None, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """An event to be told. `at`: epoch seconds; `repeated`: so many like it came before it and were not sent."""

    id: str
    at: float
    record: Record
    repeated: int = 0

    @property
    def subject(self) -> Subject:
        """What it is about: an event with the same subject, soon after, is a repetition."""
        record = self.record
        about = record.engine or record.numbers.get("gpu") or record.numbers.get("receiver")
        return record.kind, about, record.reason or (None if about else record.message)


def body(notice: Notice, node: str) -> bytes:
    """The message; ASCII, at most some tens of KiB whatever the event holds."""
    record = notice.record
    message = _clean(record.message, MESSAGE_CHARS)
    severity = record.severity.name.lower()
    more = f" ({notice.repeated} more like this before)" if notice.repeated else ""
    document = {
        "version": VERSION,
        "id": notice.id,
        "at": datetime.fromtimestamp(notice.at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "node": node,
        "severity": severity,
        "kind": record.kind,
        "engine": record.engine,
        "generation": record.generation,
        "reason": record.reason,
        "message": message,
        "numbers": {name: _plain(value) for name, value in record.numbers.items()},
        "repeated": notice.repeated,
        "text": f"{node}: {severity}: {message}{more}",
    }
    return json.dumps(document, allow_nan=False).encode("ascii")


def _plain(value: Any) -> Any:
    """What JSON has a word for."""
    if isinstance(value, str):
        return _clean(value, _VALUE_CHARS)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _clean(text: str, most: int) -> str:
    """Short enough, and without control characters but newlines: what engines say must not drive a terminal."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "\n".join(map(printable, cut.split("\n")))
