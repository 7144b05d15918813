"""One thread, one epoll: timers, and as much HTTP/1.1 as uvicorn shows to a prober."""

from __future__ import annotations

import heapq
import select
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

REASONS = {
    200: "OK", 302: "Found", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
    405: "Method Not Allowed", 429: "Too Many Requests", 500: "Internal Server Error",
    502: "Bad Gateway", 503: "Service Unavailable",
}  # fmt: skip
_MAX_HEAD = 64 * 1024
_HIGH_WATER = 1 << 20


class Timer:
    """A call in the future; `cancel` forgets it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Calls back on readable descriptors and at times."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self._count += 1
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._count, timer))
        return timer

    def watch(self, fd: int, call: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        self._callbacks[fd] = call
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        if self._callbacks.pop(fd, None):
            self._epoll.unregister(fd)

    def run(self) -> None:
        while True:
            timeout_s = -1.0
            while self._timers and self._timers[0][2].call is None:
                heapq.heappop(self._timers)
            if self._timers:
                timeout_s = max(0.0, self._timers[0][0] - time.monotonic())
            for fd, events in self._epoll.poll(timeout_s):
                call = self._callbacks.get(fd)
                if call:
                    call(events)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                due = heapq.heappop(self._timers)[2].call
                if due:
                    due()


class Request:
    """One parsed request."""

    __slots__ = ("body", "headers", "method", "path", "query", "target")

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.target = target
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.body = body


class Connection:
    """A client; one request at a time, answers in order."""

    def __init__(self, server: HttpServer, sock: socket.socket, peer: Any) -> None:
        self.server = server
        self.sock = sock
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
        self.request: Request | None = None
        self.on_lost: Callable[[], None] | None = None
        self.drip: tuple[int, float] | None = None
        self.closed = False
        self._fd = sock.fileno()
        self._in = bytearray()
        self._out = bytearray()
        self._source: Iterator[bytes] | None = None
        self._chunked = False
        self._ending = False
        self._writing = False
        self._drip_timer: Timer | None = None
        self._idle = server.loop.later(server.keep_alive_s, self.close)

    # reading

    def on_event(self, events: int) -> None:
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            try:
                data = self.sock.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                data = None
            except OSError:
                data = b""
            if data == b"":
                self.close()
                return
            if data:
                self._in += data
                if self.request is None:
                    self._parse()
        if events & select.EPOLLOUT and not self.closed:
            self._flush()

    def _parse(self) -> None:
        end = self._in.find(b"\r\n\r\n")
        if end < 0:
            if len(self._in) > _MAX_HEAD:
                self._refuse()
            return
        lines = self._in[:end].decode("latin-1").split("\r\n")
        first = lines[0].split(" ")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        length = headers.get("content-length", "0")
        if len(first) != 3 or not length.isdigit() or "transfer-encoding" in headers:
            self._refuse()
            return
        total = end + 4 + int(length)
        if len(self._in) < total:
            if headers.get("expect", "").lower() == "100-continue" and not self._out:
                self._out += b"HTTP/1.1 100 Continue\r\n\r\n"
                self._flush()
            return
        body = bytes(self._in[end + 4 : total])
        del self._in[:total]
        self._idle.cancel()
        self.request = Request(first[0], first[1], headers, body)
        self.server.handle(self, self.request)

    def _refuse(self) -> None:
        self.request = Request("GET", "/", {"connection": "close"}, b"")
        self.respond(400, b"Invalid HTTP request received.", "text/plain; charset=utf-8")

    # writing

    def _head(self, status: int, headers: list[str]) -> bytes:
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        reason = REASONS.get(status, "Unknown")
        lines = [f"HTTP/1.1 {status} {reason}", f"date: {date}", "server: uvicorn", *headers]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def respond(self, status: int, body: bytes, kind: str = "application/json", extra: tuple[str, ...] = ()) -> None:
        headers = [f"content-length: {len(body)}", *extra]
        if body:
            headers.append(f"content-type: {kind}")
        head_only = self.request is not None and self.request.method == "HEAD"
        self.server.access(self, status)
        self._send(self._head(status, headers) + (b"" if head_only else body))
        self._done()

    def stream(self, status: int, kind: str, source: Iterator[bytes], length: int) -> None:
        """A long body, made as the client reads it."""
        self._source = source
        self.server.access(self, status)
        self._send(self._head(status, [f"content-length: {length}", f"content-type: {kind}"]))

    def start(self, status: int, kind: str) -> None:
        """Headers of a chunked answer; `chunk` and `end` follow."""
        self._chunked = True
        self.server.access(self, status)
        headers = [f"content-type: {kind}", "transfer-encoding: chunked"]
        self._send(self._head(status, headers))

    def chunk(self, data: bytes) -> None:
        self._send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self._send(b"0\r\n\r\n")
        self._done()

    def _done(self) -> None:
        self._ending = True
        self._settle()

    def _send(self, data: bytes) -> None:
        if self.closed:
            return
        self._out += data
        if not self._writing and self._drip_timer is None:
            self._flush()

    def _flush(self) -> None:
        if self.drip:
            self._flush_drop(*self.drip)
            return
        while True:
            if self._source and len(self._out) < _HIGH_WATER:
                data = next(self._source, None)
                if data is None:
                    self._source = None
                    self._ending = True
                else:
                    self._out += data
            if not self._out or not self._write(len(self._out)):
                break
        if not self.closed:
            self._want_write(bool(self._out))
            self._settle()

    def _flush_drop(self, size: int, interval_s: float) -> None:
        self._write(size)
        if self.closed:
            return
        if self._out:
            self._drip_timer = self.server.loop.later(interval_s, self._flush)
        else:
            self._drip_timer = None
            self._settle()

    def _write(self, size: int) -> bool:
        try:
            sent = self.sock.send(memoryview(self._out)[:size])
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.close()
            return False
        del self._out[:sent]
        return True

    def _want_write(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            events = select.EPOLLIN | (select.EPOLLOUT if wanted else 0)
            self.server.loop.change(self._fd, events)

    def _settle(self) -> None:
        """The answer has left: wait for the next request, or close."""
        if not self._ending or self._out or self._source or self.closed:
            return
        asked = self.request.headers.get("connection", "").lower() if self.request else ""
        self._ending = self._chunked = False
        self.request = None
        self.on_lost = self.drip = None
        self.server.served(self)
        if asked == "close" or self.server.closing:
            self.close()
            return
        self._idle = self.server.loop.later(self.server.keep_alive_s, self.close)
        if self._in:
            self._parse()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._idle.cancel()
        if self._drip_timer:
            self._drip_timer.cancel()
        self.server.loop.forget(self._fd)
        self.sock.close()
        self.server.connections.pop(self._fd, None)
        lost, self.on_lost = self.on_lost, None
        if lost:
            lost()


class HttpServer:
    """Accepts clients and hands their requests to `handle`."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.connections: dict[int, Connection] = {}
        self.keep_alive_s = 5.0
        self.closing = False
        self._listener: socket.socket | None = None

    def listen(self, sock: socket.socket) -> None:
        sock.listen(2048)
        sock.setblocking(False)
        self._listener = sock
        self.loop.watch(sock.fileno(), self._accept)

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self, sock, peer)
            self.connections[sock.fileno()] = connection
            self.loop.watch(sock.fileno(), connection.on_event)

    def refuse(self) -> None:
        """Stop listening and drop the clients that wait for nothing."""
        self.closing = True
        if self._listener:
            self.loop.forget(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in list(self.connections.values()):
            if connection.request is None:
                connection.close()

    # for the subclass

    def handle(self, connection: Connection, request: Request) -> None:
        raise NotImplementedError

    def access(self, connection: Connection, status: int) -> None:
        raise NotImplementedError

    def served(self, connection: Connection) -> None:
        raise NotImplementedError
