"""A TCP connection whose every operation obeys the bounds of the exchange under way: time, bytes, and our giving up.

Timeouts of the common clients are per read, so a peer that sends a byte a second holds them for ever; here every read
gets what is left of the whole exchange.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, Literal

CHUNK_BYTES: Final = 64 << 10
"""What is received at once, at most."""

_CANCEL_CHECK_S: Final = 0.25
_ABORT_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 s

Kind = Literal["refused", "timeout", "malformed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer. `detail` is our own sentence: it never quotes the peer or the API key.

    "refused": nobody listens. "timeout": not whole in time. "malformed": everything else that is no whole HTTP answer,
    a connection that broke included. "cancelled": our side gave up.
    """

    kind: Kind
    detail: str


class OverError(OSError):
    """The exchange is over; `Bounds.failure` says why."""


@dataclass(slots=True)
class Bounds:
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

    def over(self, kind: Kind, detail: str) -> OverError:
        """To be raised: this is why it is over."""
        self.failure = Failure(kind, detail)
        return OverError(detail)


class Connection:
    """One kept-alive connection, and what has come over it unread. `bounds` belong to the exchange under way."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._addresses: list[tuple[socket.AddressFamily, Any]] | None = None
        self._sock: socket.socket | None = None
        self._unread = bytearray()
        self.bounds = Bounds(0.0, None)

    @property
    def host_header(self) -> bytes:
        """Where it goes to, for the header of that name."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}".encode("ascii", "replace")

    def usable(self) -> bool:
        """Whether it is open, and the engine has neither closed it nor said anything unasked for."""
        if self._sock is None or self._unread:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close it; the next exchange opens another one."""
        sock, self._sock = self._sock, None
        self._unread.clear()
        if sock is not None:
            sock.close()

    # --- opening ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, if it is not open. Raises OverError."""
        if self._sock is not None:
            return
        try:
            self._sock = self.dial()
        except ConnectionRefusedError:
            raise self.bounds.over("refused", "connection refused") from None
        except OverError:
            raise
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise self.bounds.over("malformed", f"cannot connect: {reason}") from None

    def dial(self) -> socket.socket:
        """A connected socket. Raises OSError. A name is looked up once: a starting engine is called often."""
        if self._addresses is None:
            try:
                found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            except UnicodeError:
                raise OSError(errno.EINVAL, "that is no host name") from None
            self._addresses = [(family, address) for family, _, _, _, address in found]
        problem = OSError("no address")
        for family, address in self._addresses:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                self._dial(sock, address)
            except OSError as error:
                sock.close()
                problem = error
                if isinstance(error, OverError):
                    break
            else:
                return sock
        raise problem

    def _dial(self, sock: socket.socket, address: Any) -> None:
        """Connect. A refused loopback port costs 20 us this way.

        Somebody who keeps calling a port of the ephemeral range on which nobody listens is one day given that very port
        as the source, and is connected to itself (seen after 9,700 tries); such a socket would also keep the engine
        from binding its port. So it is dropped without a TIME_WAIT and counts as refused.
        """
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._wait(sock, select.POLLOUT)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and sock.getsockname() == sock.getpeername():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT_ON_CLOSE)
            code = errno.ECONNREFUSED
        if code:
            raise OSError(code, os.strerror(code))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _wait(self, sock: socket.socket, event: int) -> None:
        poller = select.poll()
        poller.register(sock, event)
        while not poller.poll(self.bounds.wait_s() * 1000):
            pass

    # --- talking, over an open one: everything raises OSError -----------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send all of it."""
        sock, view = self._opened(), memoryview(data)
        while view:
            self.bounds.wait_s()
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                self._wait(sock, select.POLLOUT)

    def line(self) -> bytes:
        """The next line, without its end."""
        seen = 0
        while (end := self._unread.find(b"\n", seen)) < 0:
            seen = len(self._unread)
            self._receive()
        return self.take(end + 1).rstrip(b"\r\n")

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        while len(self._unread) < size:
            self._receive()
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return data

    def rest(self) -> bytes:
        """All that comes until the other side closes."""
        with contextlib.suppress(ClosedError):
            while True:
                self._receive()
        return self.take(len(self._unread))

    def _receive(self) -> None:
        sock = self._opened()
        self._wait(sock, select.POLLIN)
        with contextlib.suppress(BlockingIOError):
            data = sock.recv(CHUNK_BYTES)
            self.bounds.count(len(data))
            if not data:
                raise ClosedError
            self._unread += data

    def _opened(self) -> socket.socket:
        if self._sock is None:
            raise ClosedError
        return self._sock


class ClosedError(ConnectionError):
    """The other side has closed the connection."""
