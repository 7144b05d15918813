"""HTTP towards one engine: bounded in size and in total time, cancellable, and silent about secrets.

What the network or the other side does is a value here, never an exception. An engine is asked every few seconds, so
the little HTTP/1.1 that this takes is spoken here; libraries cost several times as much (docs/decisions/003).
"""

from __future__ import annotations

import ipaddress
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from supervisord.engine.wire import CHUNK_BYTES, Bounds, Connection, OverError
from supervisord.engine.wire import Failure as Failure  # noqa: PLC0414 (the other half of what an exchange ends in)

HEADERS_BYTES: Final = 64 << 10
ANSWER_BYTES: Final = 8 << 20
"""Default limit of a body. A metrics page is 50 KB a rank."""
JSON_BYTES: Final = 1 << 20
"""Longest JSON that is read: as values it takes up to twenty times as much memory."""

_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_INFORMATIONAL: Final = range(100, 200)
_BODILESS: Final = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer, redirects included: nothing is followed."""

    status: int
    body: bytes

    @property
    def is_too_long(self) -> bool:
        """Whether it would not be read as JSON for its length."""
        return len(self.body) > JSON_BYTES

    def json_object(self) -> dict[str, Any]:
        """The JSON object in the body; {} when it is none, or too long."""
        try:
            value = json.loads(self.body) if self.body and not self.is_too_long else {}
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Target:
    """Where an engine listens. The key goes to /v1/* only: vLLM guards nothing else with it."""

    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)

    @property
    def connect_host(self) -> str:
        """Where to connect: an engine that listens on every address is reached through loopback of that family."""
        host = self.host.strip("[]") or "0.0.0.0"  # noqa: S104 - compared, not bound
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host
        if not address.is_unspecified:
            return host
        return "::1" if isinstance(address, ipaddress.IPv6Address) else "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Head:
    """Status, and how the body is framed. `length` is None when it is chunked or goes on until the connection ends."""

    status: int
    length: int | None
    chunked: bool
    keeps: bool
    """Whether the connection can be used again."""


def _read_head(connection: Connection) -> _Head:
    """The head of the answer; those that only announce it (1xx) are skipped. Raises OSError."""
    while True:
        match = _STATUS.fullmatch(connection.line())
        if match is None:
            raise _not_http(connection.bounds)
        fields: dict[bytes, bytes] = {}
        while line := connection.line():
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip(b" \t").lower()
            if name in _FRAMING and fields.get(name, value) != value:
                raise _not_http(connection.bounds)
            fields[name] = value
        status = int(match[2])
        if status not in _INFORMATIONAL:
            return _head(connection.bounds, status, fields, closes=match[1] == b"0")


def _head(bounds: Bounds, status: int, fields: Mapping[bytes, bytes], *, closes: bool) -> _Head:
    coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
    if coding not in {None, b"chunked"} or (length is not None and not _LENGTH.fullmatch(length)):
        raise _not_http(bounds)
    if status in _BODILESS:
        coding, length = None, b"0"
    return _Head(
        status=status,
        length=None if coding is not None or length is None else int(length),
        chunked=coding is not None,
        keeps=not closes and b"close" not in fields.get(b"connection", b"") and (coding or length) is not None,
    )


def _read_body(connection: Connection, head: _Head, limit_bytes: int) -> bytes:
    """The body that follows a head. Raises OSError."""
    bounds = connection.bounds
    if head.length is not None:
        return connection.take(_within(bounds, head.length, limit_bytes))
    if not head.chunked:
        body = connection.rest()
        _within(bounds, len(body), limit_bytes)
        return body
    chunks, total = [], 0
    while True:
        match = _CHUNK_SIZE.fullmatch(connection.line())
        if match is None:
            raise _not_http(bounds)
        size = int(match[1], 16)
        if size == 0:
            break
        total = _within(bounds, total + size, limit_bytes)
        chunks.append(connection.take(size))
        if connection.line():
            raise _not_http(bounds)
    while connection.line():
        pass  # trailers
    return b"".join(chunks)


def _within(bounds: Bounds, size: int, limit_bytes: int) -> int:
    if size > limit_bytes:
        raise bounds.over("malformed", f"the answer is larger than {limit_bytes} bytes")
    return size


def _not_http(bounds: Bounds) -> OverError:
    return bounds.over("malformed", "the answer is not HTTP")


class Client:
    """Exchanges with one engine over one kept-alive connection; for one thread at a time.

    `cancelled` ends an exchange under way within a quarter of a second, also one that hangs.
    """

    def __init__(self, target: Target, cancelled: threading.Event | None = None) -> None:
        self._connection = Connection(target.connect_host, target.port)
        self._cancelled = cancelled
        self._key = target.api_key

    def listening(self, timeout_s: float) -> bool:
        """Whether somebody accepts connections; no HTTP."""
        self._connection.bounds = Bounds(timeout_s, self._cancelled)
        try:
            self._connection.dial().close()
        except OSError:
            return False
        return True

    def get(self, path: str, *, timeout_s: float, limit_bytes: int = ANSWER_BYTES) -> Answer | Failure:
        """GET, whole within `timeout_s`. An idle connection that the engine has closed meanwhile is replaced once."""
        bounds = Bounds(timeout_s, self._cancelled)
        request = self._request("GET", path, None)
        kept_alive = self._connection.usable()
        if not kept_alive:
            self.close()
        result = self._exchange(bounds, request, limit_bytes)
        if kept_alive and isinstance(result, Failure) and result.kind == "malformed" and not bounds.received:
            bounds.failure = None
            result = self._exchange(bounds, request, limit_bytes)
        return result

    def post(
        self,
        path: str,
        payload: Mapping[str, Any],
        *,
        timeout_s: float,
        limit_bytes: int = ANSWER_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> Answer | Failure:
        """POST JSON, once, over a connection of its own: trying again could run the work twice."""
        self.close()
        request = self._request("POST", path, json.dumps(payload).encode(), headers)
        result = self._exchange(Bounds(timeout_s, self._cancelled), request, limit_bytes)
        self.close()
        return result

    def close(self) -> None:
        """Give the connection back; the next exchange opens one."""
        self._connection.close()

    def _request(
        self, method: str, path: str, payload: bytes | None, extra: Mapping[str, str] | None = None
    ) -> bytes | None:
        """The whole request; None when the key cannot be sent."""
        fields = {"User-Agent": "vllm-supervisor", "Accept-Encoding": "identity", **(extra or {})}
        if self._key is not None and path.startswith("/v1/"):
            if "\r" in self._key or "\n" in self._key:
                return None
            fields["Authorization"] = f"Bearer {self._key}"
        if payload is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()
        host = self._connection.host_header
        return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b\r\n%b" % (method.encode(), path.encode(), host, lines, payload or b"")

    def _exchange(self, bounds: Bounds, request: bytes | None, limit_bytes: int) -> Answer | Failure:
        if request is None:
            return Failure("malformed", "cannot send the request: the API key holds a line break")
        connection = self._connection
        connection.bounds = bounds
        bounds.budget_bytes = HEADERS_BYTES + CHUNK_BYTES  # a part of the body comes along with the headers
        try:
            connection.open()
            connection.send(request)
            head = _read_head(connection)
            bounds.budget_bytes = limit_bytes + HEADERS_BYTES
            body = _read_body(connection, head, limit_bytes)
        except OSError:
            self.close()
            return bounds.failure or Failure("malformed", "the connection was closed before the answer was whole")
        if not head.keeps:
            self.close()
        return Answer(head.status, body)
