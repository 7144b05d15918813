"""Short answers over HTTP: a thread accepts, and a short-lived thread answers each of a bounded number of connections.

One request a connection, bounded in size and in total time (`http_wire`), so that no client can hold anything for long.
Nor can clients that do not come to the end of their requests keep others out: when all connections are taken, the one
that has been at its request for longest is turned away.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol

from supervisord.http_wire import RESPONSE_MAX_BYTES, HttpError, Request, Response, read_request, send

_ACCEPT_AGAIN_S: Final = 1.0
_MOMENT_S: Final = 0.02
"""Whoever means it has sent its request within this, and whoever has its answer has left."""
_ROOM_S: Final = 1.0
"""Who is turned away has left by then; normal is a millisecond."""

ErrorHook = Callable[[str, Exception], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """`deadline_s`: a request has to arrive within this time in all, and its response has to be taken within it.

    `pause_s`: between two connections, so that a flood costs a bounded part of a core; the rest waits in the backlog.
    """

    connections_max: int
    deadline_s: float
    pause_s: float = 0.0


class Site(Protocol):
    """What is served. Called on the threads of connections."""

    def answer(self, request: Request, connection: socket.socket) -> Response:
        """Answer; raises HttpError for what is answered with an error."""

    def error(self, error: HttpError) -> Response:
        """The form of an error."""


class HttpServer:
    """Serves a site on a listening socket. `close` never waits.

    `on_error` hears, on the server's threads, of what is our own trouble (a bug, no descriptors left), never of a
    client's: nobody can fill the log through the socket.
    """

    def __init__(self, name: str, listener: socket.socket, site: Site, limits: Limits, on_error: ErrorHook) -> None:
        self._name = name
        self._site = site
        self._limits = limits
        self._on_error = on_error
        self._slots = threading.BoundedSemaphore(limits.connections_max)
        self._reading: dict[socket.socket, float] = {}
        """Whose requests are not whole yet, the oldest first, and since when (monotonic seconds)."""
        self._lock = threading.Lock()
        self._listener: socket.socket | None = listener
        threading.Thread(target=self._accept, args=(listener,), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop accepting."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, close() alone does not
        listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._listener is listener:
                    self._on_error(f"accepting {self._name} connections", error)
                    time.sleep(_ACCEPT_AGAIN_S)  # no descriptors left: it passes, and must not spin
                continue
            self._hand_over(connection)
            if self._limits.pause_s:
                time.sleep(self._limits.pause_s)

    def _hand_over(self, connection: socket.socket) -> None:
        if not self._slots.acquire(timeout=self._patience_s()) and not self._make_room():
            with connection:
                self._turn_away(connection)
            return
        with self._lock:
            self._reading[connection] = time.monotonic()
        try:
            threading.Thread(target=self._serve, args=(connection,), name=f"{self._name}-client", daemon=True).start()
        except RuntimeError:  # no thread to be had
            with connection:
                self._turn_away(connection)
            self._leave(connection)

    def _patience_s(self) -> float:
        """How long a slot may be waited for: until who is at its request for longest has had its moment.

        A moment for every connection would be a pace, and one that a flood easily exceeds.
        """
        now = time.monotonic()
        with self._lock:
            since = next(iter(self._reading.values()), now)
        return max(0.0, since + _MOMENT_S - now)

    def _make_room(self) -> bool:
        """Take the slot of who has been at its request for longest; False: all are being answered."""
        with self._lock:
            oldest = next(iter(self._reading), None)
            if oldest is None:
                return False
            del self._reading[oldest]
            self._turn_away(oldest)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        return self._slots.acquire(timeout=_ROOM_S)

    def _turn_away(self, connection: socket.socket) -> None:
        text = "cannot serve this now: too many connections; try again"
        busy = HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "busy", text)
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send(self._site.error(busy).encode())

    def _leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._reading.pop(connection, None)
        self._slots.release()

    def _serve(self, connection: socket.socket) -> None:
        deadline_s = self._limits.deadline_s
        try:
            with connection:
                found = self._exchange(connection, time.monotonic() + deadline_s)
                if found:
                    send(connection, found, time.monotonic() + deadline_s)
        except OSError:
            pass  # the client left, or does not take its answer: its loss
        finally:
            self._leave(connection)

    def _exchange(self, connection: socket.socket, deadline: float) -> bytes:
        """The answer, encoded; empty when the peer left without a word, or was turned away."""
        request, failed = None, None
        try:
            request = read_request(connection, deadline)
        except HttpError as error:
            failed = error
        with self._lock:
            if connection not in self._reading:
                return b""
            del self._reading[connection]
        if failed is not None:
            return self._site.error(failed).encode()
        if request is None:
            return b""
        return self._answer(request, connection).encode(head_only=request.method == "HEAD")

    def _answer(self, request: Request, connection: socket.socket) -> Response:
        try:
            response = self._site.answer(request, connection)
            if len(response.body) > RESPONSE_MAX_BYTES:
                raise ValueError(f"a response of {len(response.body)} bytes")  # noqa: TRY301 - told like any other bug
        except HttpError as error:
            return self._site.error(error)
        except Exception as error:  # noqa: BLE001 - a bug behind one request must not take the rest down; it is logged
            number = secrets.token_hex(4)
            self._on_error(f"{self._name} request {number}", error)
            text = f"internal error {number}: the daemon's log says more under this number"
            return self._site.error(HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text))
        return response
