"""Who talks over HTTP: clients of the control API and the listener, the daemon itself, receivers of notifications."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

import pytest

from supervisord import http_server
from supervisord.control import client
from supervisord.control.client import ControlError, Reply
from supervisord.core import status
from supervisord.core.messages import Record
from supervisord.core.model import Node
from supervisord.core.spec import NodeSpec, NotifySpec, SupervisorSpec
from supervisord.figures import Figures
from supervisord.http_server import HttpServer, Limits
from supervisord.http_wire import BODY_MAX_BYTES, HEAD_MAX_BYTES, HttpError, read_request
from supervisord.web.metrics import Page, Source
from supervisord.web.site import Site
from supervisord.webhook import post
from supervisord.webhook.notice import Notice, body
from tests.adapters.fake_daemon import FakeDaemon, engine, stamp
from tests.fuzz.trying import bounded, fuzz, mutated, nasty, pumped

REQUESTS: Final = (
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/status?after=5&timeout=0.001 HTTP/1.0\r\n\r\n",
    b'POST /v1/engines/qwen/restart HTTP/1.1\r\nContent-Length: 12\r\nContent-Type: a/json\r\n\r\n{"now":true}',
    b'POST /v1/gpus/clear HTTP/1.1\r\nContent-Length: 19\r\n\r\n{"gpu": "GPU-1a2b"}',
    b"POST /v1/gpus/release HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    b"POST /v1/reload HTTP/1.1\r\n\r\n",
    b"GET /v1/engines/qwen/log?offset=0&limit=100&wait=0 HTTP/1.1\r\n\r\n",
    b"GET /v1/engines/qwen/why HTTP/1.1\r\nA: b\r\nA: c\r\n\r\n",
    b"GET /v1/events?engine=qwen&since=1.5&after=3&limit=10&timeout=0 HTTP/1.1\r\n\r\n",
)
OF_THE_LISTENER: Final = (
    b"GET /ready HTTP/1.1\r\nHost: a\r\nUser-Agent: HAProxy\r\n\r\n",
    b"HEAD /ready/qwen HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer token\r\nAccept-Encoding: gzip\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAuthorization: bearer  other\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0; escaping=allow-utf-8\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: text/plain; version=1.0.0; escaping=underscores\r\n\r\n",
)


class Served:
    """A server that answers on a socket pair, in the caller's thread. `errors`: what it would have told as bugs."""

    def __init__(self, site: http_server.Site) -> None:
        self.errors: list[tuple[str, Exception]] = []
        listener = socket.socket()
        self._server = HttpServer("fuzz", listener, site, Limits(2, 5.0), lambda *error: self.errors.append(error))
        self._server.close()
        self.errors.clear()

    def answer(self, data: bytes) -> bytes:
        """What it says to these bytes; nothing follows them."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            return self._server._exchange(ours, time.monotonic() + 5.0)


@pytest.fixture(scope="module", autouse=True)
def servers(tmp_path_factory: pytest.TempPathFactory) -> None:
    global CONTROL, LISTENER, DAEMON  # noqa: PLW0603 (what is tried is no fixture of a function)
    DAEMON = FakeDaemon(tmp_path_factory.mktemp("c"), engine("qwen"))
    DAEMON.logs["qwen"] = b"a log\n" * 100
    CONTROL = Served(DAEMON.server)
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("token")
    token.chmod(0o600)
    node = Node(
        spec=NodeSpec(supervisor=SupervisorSpec(metrics_token_file=str(token))), engines={"qwen": engine("qwen")}
    )
    source = Source(lambda: node, lambda n, at: status.of(n, at, time.time(), stamp), Figures(), dict)
    LISTENER = Served(_FromAnywhere(lambda: node, lambda: True, Page(source), as_root=False))


class _FromAnywhere(Site):
    """Clients come over a socket pair; `peer` is what they would have for an address."""

    peer: tuple[str, int] = ("127.0.0.1", 1)

    def _admit(self, request: Any, connection: socket.socket) -> None:
        assert connection is not None
        peer: Any = self
        super()._admit(request, peer)

    def getpeername(self) -> tuple[str, int]:
        return self.peer


CONTROL: Served
LISTENER: Served
DAEMON: FakeDaemon


def _is_answer(answer: bytes) -> None:
    if not answer:
        return
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    assert first.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in first
    length = next(line for line in lines if line.startswith(b"Content-Length: "))
    assert int(length.partition(b" ")[2]) in {len(rest), int(length.partition(b" ")[2]) if not rest else -1}


@fuzz(500)
def test_control_api(rng: random.Random) -> None:
    data = mutated(REQUESTS, rng)
    with bounded("control API", data):
        _is_answer(CONTROL.answer(data))
        assert CONTROL.errors == []
        assert DAEMON.errors == []


@fuzz(500)
def test_listener(rng: random.Random) -> None:
    data = mutated(OF_THE_LISTENER, rng)
    if rng.random() < 0.3:  # what clients want is read by a library
        words = (
            b"application/openmetrics-text",
            b"text/plain",
            b"version",
            b"=",
            b";",
            b",",
            b"q",
            b"1.0.0",
            b"0.0.4",
            b"escaping",
            b"allow-utf-8",
            b"dots",
            b" ",
            b"*/*",
            nasty(rng).replace(b"\n", b""),
        )
        data = (
            b"GET /metrics HTTP/1.1\r\nAccept: "
            + b"".join(rng.choice(words) for _ in range(rng.randrange(12)))
            + b"\r\n\r\n"
        )
    _FromAnywhere.peer = (rng.choice(("127.0.0.1", "::1", "::ffff:127.0.0.1", "203.0.113.5", "fe80::1%eth0")), 1)
    with bounded("listener", data):
        _is_answer(LISTENER.answer(data))
        assert LISTENER.errors == []


PARTS: Final = (
    b"a",
    b" ",
    b"\t",
    b":",
    b"a: b\r\n",
    b"\r\n",
    b"\n",
    b"%",
    b"&",
    b"=",
    b"a=b&",
    b"/",
    b"?",
    b"\xff",
    b"a:",
    b": ",
    b";",
    b",",
    b"q=1,",
)


def test_requests_of_one_thing_over_and_over() -> None:
    for piece in pumped(PARTS, HEAD_MAX_BYTES - 200):
        for head in (
            b"",
            b"GET /metrics HTTP/1.1\r\n",
            b"GET /metrics HTTP/1.1\r\nAccept: ",
            b"GET /",
            b"GET /v1/events?",
        ):
            for end in (b"", b"\r\n\r\n", b" HTTP/1.1\r\n\r\n"):
                with bounded("requests, pumped", piece, 5e-6):
                    _is_answer(LISTENER.answer(head + piece + end))
                    _is_answer(CONTROL.answer(head + piece + end))
    assert LISTENER.errors == []
    assert CONTROL.errors == []


def test_bodies_of_one_thing_over_and_over() -> None:
    for piece in pumped(
        (b"[", b"{", b'{"a":', b"1", b'"', b"\\", b" ", b",", b"-", b"e9", b"\xff"), BODY_MAX_BYTES - 100
    ):
        for path in (b"/v1/reload", b"/v1/gpus/clear", b"/v1/engines/qwen/stop"):
            with bounded("bodies, pumped", piece, 5e-6):
                _is_answer(
                    CONTROL.answer(b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (path, len(piece), piece))
                )
    assert CONTROL.errors == []


@fuzz(300)
def test_reading_requests(rng: random.Random) -> None:
    """The reader alone, also when what it is sent comes in pieces."""
    data = mutated((*REQUESTS, *OF_THE_LISTENER), rng)
    with bounded("request reader", data):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            try:
                request = read_request(ours, time.monotonic() + 5)
            except HttpError as error:
                assert error.status in HTTPStatus
                return
            assert request is None or (len(request.body) <= BODY_MAX_BYTES and request.method.isascii())


# --- the daemon's answers ---------------------------------------------------------------------------------------------

ANSWERS: Final = (
    b'HTTP/1.1 200 OK\r\nContent-Type: a/json\r\nContent-Length: 12\r\nStatus-Serial: 7\r\n\r\n{"events":1}',
    b'HTTP/1.1 404 Not Found\r\nContent-Length: 41\r\n\r\n{"error":"unknown_engine","message":"no"}',
    b'HTTP/1.1 504 No\r\nContent-Length: 34\r\n\r\n{"error":"timeout","message":"no"}',
)


@fuzz(300)
def test_answers_of_a_daemon(rng: random.Random) -> None:
    data = mutated(ANSWERS, rng)
    with bounded("daemon's answer", data), pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_exchange", lambda *_: data)
        patch.setattr(client, "_BUSY_RETRY_S", 0.0)
        try:
            reply = client.get("/nowhere", "/v1/status")
            assert isinstance(reply, Reply)
            reply.number("status-serial")
            reply.document()
        except ControlError as error:
            assert str(error)


# --- receivers --------------------------------------------------------------------------------------------------------

RECEIVED: Final = (
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 429 Too Many\r\nRetry-After: 120\r\nContent-Length: 4\r\n\r\nslow",
    b"HTTP/1.1 503 No\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n\r\n",
    b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: https://u:p@other.example/path?key=1\r\n\r\n",
    b"HTTP/1.0 400 Bad\r\nContent-Type: a/b; charset=utf-16\r\nContent-Encoding: gzip\r\nSet-Cookie: a=b\r\n\r\nno",
)
RECEIVER: Final = NotifySpec(
    name="n", url="http://hooks.example:8080/secret-part/x?token=abcdefgh", events=("problems",)
)


@contextmanager
def receiving(data: bytes) -> Iterator[None]:
    """Every connection to a receiver gets these bytes, and then the end."""
    open_: list[socket.socket] = []

    def connect(_: Any, host: str, port: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        open_.append(theirs)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.setblocking(False)
        ours.settimeout(5.0)
        theirs.send(data or b"\r\n")
        theirs.shutdown(socket.SHUT_WR)
        assert (host, port) == ("hooks.example", 8080)
        return ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post._Exchange, "connect", connect)
        try:
            yield
        finally:
            for sock in open_:
                sock.close()


@fuzz(250)
def test_answers_of_receivers(rng: random.Random) -> None:
    data = mutated(RECEIVED, rng)
    if rng.random() < 0.3:
        words = (
            b"Wed",
            b",",
            b" ",
            b"21",
            b"Oct",
            b"99",
            b"2026",
            b":",
            b"07:28:00",
            b"GMT",
            b"+",
            b"-",
            b"0",
            b"(",
            b")",
            nasty(rng),
        )
        when = b"".join(rng.choice(words) for _ in range(rng.randrange(10))).replace(b"\n", b"")
        data = b"HTTP/1.1 503 No\r\nRetry-After: " + when + b"\r\nContent-Length: 0\r\n\r\n"
    with bounded("receiver's answer", data), receiving(data):
        outcome = post.send(RECEIVER, b"{}", 5.0)
        assert outcome.wait_s == outcome.wait_s
        assert len(outcome.detail) < 400
        assert "abcdefgh" not in outcome.detail


@fuzz(150)
def test_messages_to_receivers(rng: random.Random) -> None:
    text = nasty(rng).decode("utf-8", "replace") * rng.choice((1, 50))
    numbers: dict[str, Any] = {
        "code": rng.choice((1, 1.5, float("nan"), float("inf"), "x" * 9999, text, None, 10**400)),
        "gpu": text,
    }
    record = Record("exited", text, engine=text, generation=10**30, reason=text, numbers=numbers)
    with bounded("message", text):
        written = json.loads(body(Notice("a", 1.8e9, record), "host"))
        assert all(line.isprintable() for line in written["message"].split("\n"))
