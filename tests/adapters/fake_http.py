"""A scripted HTTP server on loopback: every request goes to one function, which may also misbehave on the socket."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 20.0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    """Number of the connection that it came over, from 0."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def answer(status: int, body: bytes | str | dict[str, Any] | None = b"", headers: str = "") -> bytes:
    """A whole HTTP answer; a dict is sent as JSON."""
    if isinstance(body, dict):
        body = json.dumps(body)
    if isinstance(body, str):
        body = body.encode()
    content = body or b""
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{headers}\r\n".encode() + content


Script = Callable[[Request], bytes | None]
"""The bytes to send, or None to close the connection."""


@dataclass
class FakeServer:
    """Use as a context manager. `script` may block: every connection has its own thread. `requests` in order."""

    script: Script
    family: socket.AddressFamily = socket.AF_INET
    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    closed_by_peer: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    sockets: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> FakeServer:  # noqa: PYI034 (typing.Self is 3.11)
        self.listener = socket.socket(self.family, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind((self.host, self.port))
        self.listener.listen(64)
        self.port = self.listener.getsockname()[1]
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.sockets:
            hang_up(connection)
        for thread in self.threads:
            thread.join(DEADLINE_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.sockets.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection, len(self.sockets) - 1), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        if self.tls is not None:
            try:
                connection = self.sockets[number] = self.tls.wrap_socket(connection, server_side=True)
            except OSError:  # the client does not trust us
                self.closed_by_peer.set()
                return
        with connection, connection.makefile("rb") as stream:
            with contextlib.suppress(OSError):
                while (request := _read(stream, number)) is not None:
                    self.requests.append(request)
                    reply = self.script(request)
                    if reply is None:
                        hang_up(connection)
                        return
                    connection.sendall(reply)
            self.closed_by_peer.set()

    def hang(self) -> None:
        """For scripts: no answer while the server lives."""
        self.over.wait()

    def send_and_close(self, raw: bytes) -> None:
        """For scripts: these bytes over the newest connection, then the end."""
        self.sockets[-1].sendall(raw)


def hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read(stream: Any, number: int) -> Request | None:
    line = stream.readline().decode("latin-1").split()
    if len(line) != 3:
        return None
    headers = {}
    while (header := stream.readline().decode("latin-1").strip()) != "":
        name, _, value = header.partition(":")
        headers[name.lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", "0")))
    return Request(line[0], line[1], headers, body, number)


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)
