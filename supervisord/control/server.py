"""The control server: the API of `routes` on a Unix socket."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from pathlib import Path
from typing import Final

from supervisord.control import listen
from supervisord.control.routes import Handlers, error_response, respond
from supervisord.http_server import ErrorHook, HttpServer, Limits
from supervisord.http_wire import HttpError, Request, Response

CONNECTIONS_MAX: Final = 16
CLIENT_DEADLINE_S: Final = 10.0
ADMIN_GROUP: Final = "vllm-admin"

_UCRED: Final = struct.Struct("3i")


class ControlServer:
    """Serves the control API. `start` raises listen.ListenError; `close` never waits. `on_error`: see HttpServer."""

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
        self._limits = Limits(CONNECTIONS_MAX, client_deadline_s)
        self._server: HttpServer | None = None
        self._identity: tuple[int, int] | None = None

    def start(self) -> None:
        """Open the socket and serve it."""
        listener = listen.listen(str(self._path), ADMIN_GROUP)
        self._identity = _identity(self._path)
        self._server = HttpServer("control", listener, self, self._limits, self._on_error)

    def close(self) -> None:
        """Stop accepting and remove the socket, unless another daemon's is there by now."""
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:
                self._path.unlink()
        server.close()

    # --- http_server.Site ---------------------------------------------------------------------------------------

    def answer(self, request: Request, connection: socket.socket) -> Response:
        """Answer one request, with the peer as the actor."""
        return respond(request, self._handlers, _actor(connection), lambda: _gone(connection))

    def error(self, error: HttpError) -> Response:
        """The form of an error."""
        return error_response(error)


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
