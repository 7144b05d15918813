"""The HTTP client towards an engine: every bound holds, nothing raises, the key goes nowhere else."""

from __future__ import annotations

import logging
import socket
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisord.engine.http import Answer, Client, Failure, Target
from tests.adapters.fake_http import FakeServer, Request, answer, hang_up, unused_port


def get(server: FakeServer, path: str = "/health", timeout_s: float = 10.0, **bounds: Any) -> Answer | Failure:
    client = Client(Target(server.host, server.port))
    try:
        return client.get(path, timeout_s=timeout_s, **bounds)
    finally:
        client.close()


def failure(result: Answer | Failure) -> Failure:
    assert isinstance(result, Failure), result
    return result


def test_answer_is_status_and_body() -> None:
    with FakeServer(lambda _: answer(200, "hello")) as server:
        assert get(server) == Answer(200, b"hello")


def test_request_asks_for_plain_bytes_and_ignores_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with FakeServer(lambda _: answer(204)) as server:
        assert get(server) == Answer(204, b"")
    assert server.requests[0].headers["accept-encoding"] == "identity"
    assert server.requests[0].headers["host"] == f"127.0.0.1:{server.port}"


def test_redirects_are_answers() -> None:
    with FakeServer(lambda _: answer(302, "", "Location: http://127.0.0.1:1/\r\n")) as server:
        assert get(server) == Answer(302, b"")
    assert len(server.requests) == 1


def test_errors_are_answers_and_are_not_repeated() -> None:
    with FakeServer(lambda _: answer(503, "", "Retry-After: 0\r\n")) as server:
        assert get(server) == Answer(503, b"")
    assert len(server.requests) == 1


def test_chunked_answers_and_answers_until_close() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with FakeServer(lambda _: chunked) as server:
        assert get(server) == Answer(200, b"abcde")
    with FakeServer(lambda _: server.send_and_close(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")) as server:
        assert get(server) == Answer(200, b"until the end")


def test_answers_that_have_no_body_and_interim_ones() -> None:
    replies = {
        "/204": b"HTTP/1.1 204 No Content\r\n\r\n",
        "/304": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n",
        "/100": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(200, "x"),
    }
    with FakeServer(lambda request: replies[request.path]) as server:
        client = Client(Target(server.host, server.port))
        assert client.get("/204", timeout_s=5) == Answer(204, b"")
        assert client.get("/304", timeout_s=5) == Answer(304, b"")
        assert client.get("/100", timeout_s=5) == Answer(200, b"x")
        client.close()
    assert [request.connection for request in server.requests] == [0, 0, 0]


@st.composite
def framed(draw: st.DrawFn) -> tuple[Answer, bytes]:
    """A correct answer and what it looks like on the wire, in one of the ways that HTTP/1.1 allows."""
    status, body = draw(st.sampled_from([200, 404, 503, 599])), draw(st.binary(max_size=200))
    cased = draw(st.sampled_from([str.lower, str.upper, str.title]))
    fields = draw(st.lists(st.sampled_from(["Date: now", "X: a:b", "X:", "Server: \xff"]), max_size=3))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    content = body
    if framing == "length":
        fields.append(f"{cased('content-length')}:{draw(st.sampled_from(['', ' ', '  ']))}{len(body)} ")
    elif framing == "chunked":
        fields.append(f"{cased('transfer-encoding')}: {cased('chunked')}")
        sizes = draw(st.lists(st.integers(1, 80), max_size=10))
        extension = draw(st.sampled_from([b"", b";a=b", b" ; a"]))
        content, left = b"", body
        for size in [*sizes, len(body)]:
            part, left = left[:size], left[size:]
            content += b"%x%b\r\n%b\r\n" % (len(part), extension, part) if part else b""
        content += b"000\r\n" + draw(st.sampled_from([b"", b"Trailer: x\r\n"])) + b"\r\n"
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n"]))
    reason = draw(st.sampled_from(["", " ", " OK", " Not \xe9"]))
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}{reason}", *fields, ""))
    return Answer(status, body), interim + head.encode("latin-1") + content


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=framed(), cuts=st.lists(st.integers(0, 600), max_size=4))
def test_every_framing_in_any_pieces(sent: tuple[Answer, bytes], cuts: list[int]) -> None:
    expected, raw = sent
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]

    def script(_: Request) -> None:
        for start, end in pairwise(edges):
            server.send_and_close(raw[start:end])
            time.sleep(0.001)

    with FakeServer(script) as server:
        assert get(server) == expected


def close_all(server: FakeServer) -> None:
    for connection in server.sockets:
        hang_up(connection)


def test_refused() -> None:
    client = Client(Target("127.0.0.1", unused_port()))
    assert client.get("/health", timeout_s=5) == Failure("refused", "connection refused")
    assert not client.listening(5)


def test_listening() -> None:
    with FakeServer(lambda _: None) as server:
        assert Client(Target(server.host, server.port)).listening(5)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "a..b"])
def test_host_names_that_are_none_are_no_exception(host: str) -> None:
    client = Client(Target(host, 80))
    result = failure(client.get("/", timeout_s=5))
    assert result.kind == "malformed"
    assert result.detail.startswith("cannot connect: ")
    assert not client.listening(1)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("::", "::1"),
        ("0:0:0:0:0:0:0:0", "::1"),
        ("[::]", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("192.0.2.7", "192.0.2.7"),
        ("gpu-box", "gpu-box"),
    ],
)
def test_connect_host(host: str, expected: str) -> None:
    assert Target(host, 1).connect_host == expected


@pytest.mark.parametrize("host", ["::", "[::1]", "::1"])
def test_ipv6(host: str) -> None:
    with FakeServer(lambda _: answer(200), family=socket.AF_INET6, host="::1") as server:
        client = Client(Target(host, server.port))
        assert client.get("/health", timeout_s=5) == Answer(200, b"")
        client.close()
    assert server.requests[0].headers["host"] == f"[::1]:{server.port}"


# --- time ---------------------------------------------------------------------------------------------------------


def test_silence_ends_at_the_deadline() -> None:
    with FakeServer(lambda _: server.hang()) as server:
        started = time.monotonic()
        assert get(server, timeout_s=0.5) == Failure("timeout", "no whole answer within 0.5 s")
        assert 0.45 < time.monotonic() - started < 20


@pytest.mark.parametrize(
    "beginning", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"HTTP/1.1 200 OK\r\n"]
)
def test_drip_feed_ends_at_the_deadline(beginning: bytes) -> None:
    """A byte every 50 ms, in the status line, in the headers and in the body: no single read ever times out."""

    def drip(request: Request) -> None:
        connection = server.sockets[request.connection]
        connection.sendall(beginning)
        while not server.over.wait(0.05):
            connection.sendall(b"x")

    with FakeServer(drip) as server:
        started = time.monotonic()
        assert failure(get(server, timeout_s=0.6)).kind == "timeout"
        assert 0.55 < time.monotonic() - started < 20


def test_peer_that_does_not_read_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(Target("127.0.0.1", listener.getsockname()[1]))
        started = time.monotonic()
        result = client.post("/v1/completions", {"prompt": "x" * (32 << 20)}, timeout_s=0.5)
        assert failure(result).kind == "timeout"
        assert time.monotonic() - started < 20
        client.close()


def test_slow_answer_within_the_deadline_is_an_answer() -> None:
    with FakeServer(lambda _: answer(200, "late") if not server.over.wait(0.4) else None) as server:
        assert get(server, timeout_s=10) == Answer(200, b"late")


def test_cancel_ends_a_hanging_request() -> None:
    cancelled = threading.Event()
    with FakeServer(lambda _: server.hang()) as server:
        threading.Timer(0.2, cancelled.set).start()
        started = time.monotonic()
        result = Client(Target(server.host, server.port), cancelled).get("/health", timeout_s=60)
        assert failure(result).kind == "cancelled"
        assert time.monotonic() - started < 20


# --- size ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        answer(200, b"x" * 5000),
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n" + b"x" * 5000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + b"x" * 500_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 500_000,
    ],
    ids=["honest", "claims 100 TB", "chunk of 4 GB", "until close"],
)
def test_body_is_bounded(reply: bytes) -> None:
    with FakeServer(lambda _: reply) as server:
        assert "larger than" in failure(get(server, limit_bytes=4000)).detail


def test_body_of_exactly_the_limit_is_fine() -> None:
    with FakeServer(lambda _: answer(200, b"x" * 4000)) as server:
        assert get(server, limit_bytes=4000) == Answer(200, b"x" * 4000)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 10_000_000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1_000_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 200_000,
        b"H" * 10_000_000,
    ],
    ids=["one line", "many lines", "endless 100", "no HTTP"],
)
def test_headers_are_bounded(reply: bytes) -> None:
    with FakeServer(lambda _: reply) as server:
        assert failure(get(server)).kind == "malformed"


# --- what is not HTTP ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 \xff\xfe\r\n\r\n",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nabc",
        b"HTTP/2 200\r\nContent-Length: 0\r\n\r\n",
        b"200 OK\r\n\r\n",
    ],
)
def test_malformed(reply: bytes) -> None:
    with FakeServer(lambda _: server.send_and_close(reply)) as server:
        result = failure(get(server))
    assert result.kind == "malformed"
    assert result.detail in {"the answer is not HTTP", "the connection was closed before the answer was whole"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reply=st.binary(max_size=300), head=st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]))
def test_any_bytes_end_in_a_value(reply: bytes, head: bytes) -> None:
    with FakeServer(lambda _: server.send_and_close(head + reply)) as server:
        result = get(server, timeout_s=5)
    assert isinstance(result, Answer) or result.kind == "malformed"


def test_nothing_of_the_peer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    reply = b"HTTP/1.1 200 OK\r\nfolded\x1b[31m\r\n : x\r\nContent-Length: 0\r\n\r\n"
    with caplog.at_level(logging.DEBUG), FakeServer(lambda _: server.send_and_close(reply)) as server:
        get(server, timeout_s=2)
    assert caplog.records == []


# --- kept-alive connections -----------------------------------------------------------------------------------------


def test_connection_is_kept() -> None:
    with FakeServer(lambda _: answer(200, "x")) as server:
        client = Client(Target(server.host, server.port))
        for _ in range(5):
            assert client.get("/health", timeout_s=5) == Answer(200, b"x")
        client.close()
        assert [request.connection for request in server.requests] == [0] * 5


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxHTTP/1.1 500 stale\r\n\r\n",
    ],
    ids=["close", "HTTP/1.0", "more than was asked for"],
)
def test_connection_is_not_kept_when_it_cannot_be(reply: bytes) -> None:
    with FakeServer(lambda _: reply) as server:
        client = Client(Target(server.host, server.port))
        assert [client.get("/health", timeout_s=5) for _ in range(3)] == [Answer(200, b"x")] * 3
        client.close()
        assert [request.connection for request in server.requests] == [0, 1, 2]


def test_idle_connection_that_the_engine_closed_is_replaced() -> None:
    """uvicorn closes idle connections after 5 s, which is also the interval of our looks."""
    with FakeServer(lambda request: answer(200, "x") if len(server.requests) != 2 else None) as server:
        client = Client(Target(server.host, server.port))
        assert client.get("/health", timeout_s=5) == Answer(200, b"x")
        assert client.get("/health", timeout_s=5) == Answer(200, b"x")  # the second request found it closing
        close_all(server)
        assert client.get("/health", timeout_s=5) == Answer(200, b"x")  # and now it was closed before
        client.close()
        assert [request.connection for request in server.requests] == [0, 0, 1, 2]


def test_fresh_connection_that_breaks_is_not_tried_again() -> None:
    with FakeServer(lambda _: None) as server:
        assert failure(get(server)).kind == "malformed"
    assert len(server.requests) == 1


def test_bytes_that_nobody_asked_for_do_not_answer_the_next_request() -> None:
    stale = b"HTTP/1.1 500 stale\r\nContent-Length: 0\r\n\r\n" * 1000
    with FakeServer(lambda request: answer(200, request.path) + stale) as server:
        client = Client(Target(server.host, server.port))
        for path in ("/a", "/b", "/c"):
            assert client.get(path, timeout_s=5) == Answer(200, path.encode())
        client.close()


def test_post_is_sent_once_over_a_fresh_connection() -> None:
    with FakeServer(lambda request: answer(200, "x") if request.method == "GET" else None) as server:
        client = Client(Target(server.host, server.port))
        client.get("/health", timeout_s=5)
        assert failure(client.post("/v1/completions", {"a": 1}, timeout_s=5)).kind == "malformed"
        assert [request.method for request in server.requests] == ["GET", "POST"]
        assert server.requests[1].json == {"a": 1}
        assert server.requests[1].connection == 1


def test_never_connects_to_itself() -> None:
    """The kernel hands the called port out as source port sooner or later; seen after 9,700 calls."""
    port = 44_444 if Client(Target("127.0.0.1", 44_444)).listening(1) is False else 45_554
    client = Client(Target("127.0.0.1", port))
    assert not any(client.listening(1) for _ in range(20_000))


# --- the key ------------------------------------------------------------------------------------------------------


def test_key_goes_to_v1_only() -> None:
    with FakeServer(lambda _: answer(200)) as server:
        client = Client(Target(server.host, server.port, "sesame"))
        for path in ("/health", "/metrics", "/version", "/v1/models", "/pooling"):
            client.get(path, timeout_s=5)
        client.post("/v1/completions", {}, timeout_s=5)
        client.close()
    sent = {request.path: request.headers.get("authorization") for request in server.requests}
    assert sent == dict.fromkeys(("/health", "/metrics", "/version", "/pooling")) | {
        "/v1/models": "Bearer sesame",
        "/v1/completions": "Bearer sesame",
    }


def test_key_is_in_no_message() -> None:
    with FakeServer(lambda _: answer(200)) as server:
        result = failure(Client(Target(server.host, server.port, "ses\name")).get("/v1/models", timeout_s=5))
    assert result.kind == "malformed"
    assert "ses" not in result.detail
    assert "name" not in result.detail
    assert "sesame" not in repr(Target("h", 1, "sesame"))


def test_key_that_is_not_ascii() -> None:
    with FakeServer(lambda _: answer(200)) as server:
        client = Client(Target(server.host, server.port, "schlüssel"))
        assert client.get("/v1/models", timeout_s=5) == Answer(200, b"")
        client.close()


def test_full_backlog_ends_at_the_deadline_and_when_cancelled() -> None:
    """A server that no longer accepts drops what does not fit into its backlog: connecting hangs."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        started = time.monotonic()
        assert failure(Client(Target(*address)).get("/health", timeout_s=0.7)).kind == "timeout"
        assert 0.6 < time.monotonic() - started < 20
        cancelled = threading.Event()
        threading.Timer(0.3, cancelled.set).start()
        assert failure(Client(Target(*address), cancelled).get("/health", timeout_s=60)).kind == "cancelled"
        for filler in fillers:
            filler.close()


def test_json_that_is_too_long_is_none() -> None:
    """As values it would take twenty times as much memory."""
    assert Answer(200, b'{"a":1' + b" " * 1000 + b"}").json_object() == {"a": 1}
    assert Answer(200, b'{"a":1' + b" " * (1 << 20) + b"}").json_object() == {}
