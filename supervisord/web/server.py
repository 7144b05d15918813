"""Serving the site, as soon as its address can be had: a port that somebody else holds never stops supervision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from typing import Final

from supervisord.core.messages import Severity
from supervisord.http_server import ErrorHook, HttpServer, Limits, Site
from supervisord.web.listen import Holder, ListenError, listen, named

LIMITS: Final = Limits(connections_max=32, deadline_s=5.0, pause_s=0.005)
"""At most 200 connections a second are taken, so a flood costs a tenth of a core."""
RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the server needs of the daemon.

    `tell` (kind, message, severity) hears of trouble with the address when it begins or changes, and of its end;
    `on_error`: see HttpServer; `holder`: see listen.
    """

    tell: Callable[[str, str, Severity], None]
    on_error: ErrorHook
    holder: Holder


class WebServer:
    """Begins to listen in a thread of its own, again and again until that works. `close` never waits.

    `address`: host and port; None: nothing is served.
    """

    def __init__(self, address: tuple[str, int] | None, site: Site, hooks: Hooks) -> None:
        self._address = address
        self._site = site
        self._hooks = hooks
        self._closing = Event()
        self._server: HttpServer | None = None

    def start(self) -> None:
        """Begin."""
        if self._address is not None:
            Thread(target=self._open, args=self._address, name="web-open", daemon=True).start()

    def close(self) -> None:
        """End serving."""
        self._closing.set()
        if self._server is not None:
            self._server.close()

    def _open(self, host: str, port: int) -> None:
        told: ListenError | None = None
        while not self._closing.is_set():
            try:
                listener = listen(host, port, self._hooks.holder)
            except ListenError as error:
                if told is None or error.number != told.number:
                    told = error
                    text = f"{error}; engines are supervised without, and it is tried again every {RETRY_S:g} s"
                    self._hooks.tell("web_failed", text, Severity.WARNING)
                self._closing.wait(RETRY_S)
                continue
            self._server = HttpServer("web", listener, self._site, LIMITS, self._hooks.on_error)
            severity = Severity.NOTICE if told is not None else Severity.INFO
            self._hooks.tell("web_listening", f"serves /ready and /metrics on {named(host, port)}", severity)
            if self._closing.is_set():
                self._server.close()
            return
