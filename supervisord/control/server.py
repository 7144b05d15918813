"""The control server: a thread that accepts, and one short-lived thread for each of at most 16 connections."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

from supervisord.control import listen
from supervisord.control.routes import Handlers, error_response, respond
from supervisord.control.wire import RESPONSE_MAX_BYTES, HttpError, Request, Response, read_request, send

CONNECTIONS_MAX: Final = 16
CLIENT_DEADLINE_S: Final = 10.0
"""A request has to arrive within this time in all, and its response has to be taken within it."""
ADMIN_GROUP: Final = "vllm-admin"

_ACCEPT_AGAIN_S: Final = 1.0
_UCRED: Final = struct.Struct("3i")

ErrorHook = Callable[[str, Exception], None]


class ControlServer:
    """Serves the control API on a Unix socket. `start` raises listen.ListenError; `close` never waits.

    `on_error` hears, on the server's threads, of what is our own trouble (a bug, no descriptors left), never of a
    client's: nobody can fill the log through the socket.
    """

    def __init__(
        self,
        path: str,
        handlers: Handlers,
        on_error: ErrorHook,
        *,
        client_deadline_s: float = CLIENT_DEADLINE_S,
    ) -> None:
        self._path = Path(path)
        self._handlers = handlers
        self._on_error = on_error
        self._client_deadline_s = client_deadline_s
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None

    def start(self) -> None:
        """Open the socket and serve it."""
        self._listener = listen.listen(str(self._path), ADMIN_GROUP)
        self._identity = _identity(self._path)
        threading.Thread(target=self._accept, args=(self._listener,), name="control", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and remove the socket, unless another daemon's is there by now."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:
                self._path.unlink()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, close() alone does not
        listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._listener is listener:
                    self._on_error("accepting control connections", error)
                    time.sleep(_ACCEPT_AGAIN_S)  # no descriptors left: it passes, and must not spin
                continue
            if not self._slots.acquire(blocking=False):
                _turn_away(connection)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="control-client", daemon=True).start()
            except RuntimeError:  # no thread to be had
                self._slots.release()
                _turn_away(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                response = self._exchange(connection)
                if response is not None:
                    send(connection, response.encode(), time.monotonic() + self._client_deadline_s)
        except OSError:
            pass  # the client left, or does not take its answer: its loss
        finally:
            self._slots.release()

    def _exchange(self, connection: socket.socket) -> Response | None:
        try:
            request = read_request(connection, time.monotonic() + self._client_deadline_s)
        except HttpError as error:
            return error_response(error)
        if request is None:
            return None
        return self._answer(request, _actor(connection), lambda: _gone(connection))

    def _answer(self, request: Request, actor: str, gone: Callable[[], bool]) -> Response:
        try:
            return _bounded(respond(request, self._handlers, actor, gone))
        except HttpError as error:
            return error_response(error)
        except Exception as error:  # noqa: BLE001 - a bug behind one request must not take the API down; it is logged
            number = secrets.token_hex(4)
            self._on_error(f"control request {number}", error)
            text = f"internal error {number}: the daemon's log says more under this number"
            return error_response(HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text))


def _bounded(response: Response) -> Response:
    if len(response.body) > RESPONSE_MAX_BYTES:
        raise ValueError(f"a response of {len(response.body)} bytes")
    return response


def _turn_away(connection: socket.socket) -> None:
    busy = HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "cannot serve this now: too many connections; try again")
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(error_response(busy).encode())


def _actor(connection: socket.socket) -> str:
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return f"uid {uid} pid {pid}"


def _gone(connection: socket.socket) -> bool:
    """Whether the peer closed; one that only finished sending is still there."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
