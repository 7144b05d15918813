"""HTTP towards one engine: bounded in size and in total time, cancellable, and silent about secrets.

What the network or the other side does is a value here, never an exception. Timeouts of the common clients are per
read, so a peer that sends a byte a second holds them for ever; here every read gets what is left of the whole exchange.
"""

from __future__ import annotations

import errno
import http.client
import io
import ipaddress
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, ProtocolError

HEADERS_BYTES: Final = 64 << 10
ANSWER_BYTES: Final = 8 << 20
"""Default limit of a body. A metrics page is 50 KB a rank."""

_CHUNK_BYTES: Final = 64 << 10
_CANCEL_CHECK_S: Final = 0.25
_ABORT_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 s

# urllib3 logs headers that it cannot parse, with a traceback: text of a peer that nobody has filtered.
logging.getLogger("urllib3").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer, redirects included: nothing is followed."""

    status: int
    body: bytes

    def json_object(self) -> dict[str, Any]:
        """The JSON object in the body; {} when it is none."""
        try:
            value = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer. `detail` is our own sentence: it never quotes the peer or the API key.

    "refused": nobody listens. "timeout": not whole in time. "malformed": everything else that is no whole HTTP answer,
    a connection that broke included. "cancelled": our side gave up.
    """

    kind: Literal["refused", "timeout", "malformed", "cancelled"]
    detail: str


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


class _OverError(OSError):
    """The exchange is over; `_Bounds.failure` says why."""


@dataclass(slots=True)
class _Bounds:
    """What one exchange may still use up: time (monotonic seconds) and bytes."""

    timeout_s: float
    cancelled: threading.Event | None
    deadline: float = 0.0
    budget_bytes: int = 0
    received: bool = False
    failure: Failure | None = None

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    def wait_s(self) -> float:
        """How long the next operation may block, above 0. Raises when the exchange is over."""
        if self.cancelled is not None and self.cancelled.is_set():
            raise self.over("cancelled", "given up by the supervisor")
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise self.over("timeout", f"no whole answer within {self.timeout_s:g} s")
        return left_s if self.cancelled is None else min(left_s, _CANCEL_CHECK_S)

    def count(self, size: int) -> None:
        """`size` bytes came in."""
        self.received = self.received or size > 0
        self.budget_bytes -= size
        if self.budget_bytes < 0:
            raise self.over("malformed", "the answer is larger than the limit")

    def over(self, kind: Literal["timeout", "malformed", "cancelled", "refused"], detail: str) -> _OverError:
        self.failure = Failure(kind, detail)
        return _OverError(detail)


class _Socket(socket.socket):
    """A socket whose every operation obeys the bounds of the exchange under way."""

    bounds: _Bounds

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        size = self._bounded(partial(super().recv_into, buffer, nbytes, flags))
        self.bounds.count(size)
        return size

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data)
        while view:
            view = view[self._bounded(partial(super().send, view, flags)) :]

    def _bounded(self, operation: Callable[[], int]) -> int:
        while True:
            self.settimeout(self.bounds.wait_s())
            try:
                return operation()
            except TimeoutError:
                continue

    def dial(self, address: Any) -> None:
        """Connect. A refused loopback port costs 20 us this way.

        Somebody who keeps calling a port of the ephemeral range on which nobody listens is one day given that very port
        as the source, and is connected to itself (seen after 9,700 tries); such a socket would also keep the engine
        from binding its port. So it is dropped without a TIME_WAIT and counts as refused.
        """
        self.settimeout(self.bounds.wait_s())
        code = self.connect_ex(address)
        if code == errno.EWOULDBLOCK:  # not done within that time: wait on
            poller = select.poll()
            poller.register(self, select.POLLOUT)
            while not poller.poll(self.bounds.wait_s() * 1000):
                pass
            code = self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and self.getsockname() == self.getpeername():
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT_ON_CLOSE)
            code = errno.ECONNREFUSED
        if code:
            raise OSError(code, os.strerror(code))


class _Connection(HTTPConnection):
    """One kept-alive connection. `bounds` belong to the exchange under way and are set before each."""

    bounds: _Bounds
    _addresses: list[tuple[socket.AddressFamily, Any]] | None = None

    def _new_conn(self) -> socket.socket:
        try:
            return self.dial()
        except ConnectionRefusedError:
            raise self.bounds.over("refused", "connection refused") from None
        except _OverError:
            raise
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise self.bounds.over("malformed", f"cannot connect: {reason}") from None

    def dial(self) -> socket.socket:
        """A connected socket. Raises OSError. A name is looked up once: a starting engine is called often."""
        if self._addresses is None:
            try:
                found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            except UnicodeError:
                raise OSError(errno.EINVAL, "that is no host name") from None
            self._addresses = [(family, address) for family, _, _, _, address in found]
        problem = OSError("no address")
        for family, address in self._addresses:
            sock = _Socket(family, socket.SOCK_STREAM)
            sock.bounds = self.bounds
            try:
                sock.dial(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                sock.close()
                problem = error
                if isinstance(error, _OverError):
                    break
            else:
                return sock
        raise problem

    def adopt(self, bounds: _Bounds) -> None:
        """Start an exchange under these bounds."""
        self.bounds = bounds
        if isinstance(self.sock, _Socket):
            self.sock.bounds = bounds


class Client:
    """Exchanges with one engine over one kept-alive connection; for one thread at a time.

    `cancelled` ends an exchange under way within a quarter of a second, also one that hangs.
    """

    def __init__(self, target: Target, cancelled: threading.Event | None = None) -> None:
        self._connection = _Connection(target.connect_host, target.port)
        self._cancelled = cancelled
        self._key = None if target.api_key is None else f"Bearer {target.api_key}".encode()

    def listening(self, timeout_s: float) -> bool:
        """Whether somebody accepts connections; no HTTP."""
        self._connection.adopt(_Bounds(timeout_s, self._cancelled))
        try:
            self._connection.dial().close()
        except OSError:
            return False
        return True

    def get(self, path: str, *, timeout_s: float, limit_bytes: int = ANSWER_BYTES) -> Answer | Failure:
        """GET, whole within `timeout_s`. An idle connection that the engine has closed meanwhile is replaced once."""
        bounds = _Bounds(timeout_s, self._cancelled)
        if not self._connection.is_connected:  # closed, or something unasked for waits in it
            self.close()
        kept_alive = not self._connection.is_closed
        result = self._exchange(bounds, "GET", path, None, limit_bytes)
        if kept_alive and isinstance(result, Failure) and result.kind == "malformed" and not bounds.received:
            bounds.failure = None
            result = self._exchange(bounds, "GET", path, None, limit_bytes)
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
        body = json.dumps(payload).encode()
        bounds = _Bounds(timeout_s, self._cancelled)
        result = self._exchange(bounds, "POST", path, body, limit_bytes, headers)
        self.close()
        return result

    def close(self) -> None:
        """Give the connection back; the next exchange opens one."""
        self._connection.close()

    def _headers(self, path: str) -> dict[str, Any]:
        headers: dict[str, Any] = {"User-Agent": "vllm-supervisor", "Accept-Encoding": "identity"}
        if self._key is not None and path.startswith("/v1/"):
            headers["Authorization"] = self._key
        return headers

    def _exchange(
        self,
        bounds: _Bounds,
        method: str,
        path: str,
        payload: bytes | None,
        limit_bytes: int,
        extra: Mapping[str, str] | None = None,
    ) -> Answer | Failure:
        headers = {**self._headers(path), **(extra or {})}
        if payload is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connection
        connection.adopt(bounds)
        bounds.budget_bytes = HEADERS_BYTES + io.DEFAULT_BUFFER_SIZE  # reading headers takes a buffer of the body along
        sent = False
        try:
            connection.request(method, path, payload, headers, preload_content=False, decode_content=False)
            sent = True
            response = connection.getresponse()
            bounds.budget_bytes = limit_bytes + HEADERS_BYTES
            body = bytearray()
            while chunk := response.read(min(_CHUNK_BYTES, limit_bytes + 1 - len(body))):
                body += chunk
                if len(body) > limit_bytes:
                    raise bounds.over("malformed", f"the answer is larger than {limit_bytes} bytes")
        except (OSError, HTTPError, http.client.HTTPException, ValueError) as error:
            self.close()
            return bounds.failure or _failure(error, sent=sent)
        return Answer(response.status, bytes(body))


def _failure(error: Exception, *, sent: bool) -> Failure:
    """An exchange broke off for a reason that the bounds do not know."""
    if isinstance(error, ConnectionError | ProtocolError):
        return Failure("malformed", "the connection was closed before the answer was whole")
    if not sent:
        return Failure("malformed", "cannot send the request: the API key holds a line break")
    return Failure("malformed", "the answer is not HTTP")
