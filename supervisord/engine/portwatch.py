"""Waiting for a starting engine to answer: noticed within 100 ms, at 0.5 % of a core while nobody listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from supervisord.engine.http import Answer, Client, Target

_INTERVAL_S: Final = 0.05
_NOBODY_S: Final = 0.5
_CONNECT_S: Final = 1.0
_REQUEST_S: Final = 15.0
"""Total time of one /health: a loaded machine has needed 10 s for it."""
_HEALTH_BYTES: Final = 64 << 10
_OK: Final = 200


class Ownership(Protocol):
    """Who gets the connections to an address; what a launcher says. Neither: nobody could be found."""

    @property
    def ours(self) -> bool:
        """Processes of this engine."""

    @property
    def holder(self) -> str | None:
        """Somebody else, described: pid and name."""


def watch(
    host: str,
    port: int,
    owner: Callable[[], Ownership],
    cancelled: threading.Event,
    deadline_s: float,
    on_answer: Callable[[], None],
    on_foreign: Callable[[str], None],
) -> None:
    """Until /health is 200, then ask whose answer that was and report it once.

    Reports nothing when cancelled or after `deadline_s` seconds (and the one request that is then under way). While the
    owner cannot be found, it goes on. A bare connect comes first: refused, it costs a tenth of an HTTP client's try.
    """
    client = Client(Target(host, port), cancelled)
    give_up_at = time.monotonic() + deadline_s
    pause_s = 0.0
    while not cancelled.wait(pause_s) and time.monotonic() < give_up_at:
        pause_s = _INTERVAL_S
        if not client.listening(_CONNECT_S):
            continue
        answer = client.get("/health", timeout_s=_REQUEST_S, limit_bytes=_HEALTH_BYTES)
        if not isinstance(answer, Answer) or answer.status != _OK:
            continue
        found = owner()
        if cancelled.is_set():
            break
        if found.holder is not None:
            on_foreign(found.holder)
            break
        if found.ours:
            on_answer()
            break
        pause_s = _NOBODY_S  # looking for the owner reads all of /proc
    client.close()
