"""The HTTP listener for gateways and Prometheus: what it says, to whom, and what nobody can do to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisord import http_server
from supervisord.core import status
from supervisord.core.messages import Severity
from supervisord.core.model import After, Backoff, Draining, Engine, Node, Ready, Reason, Stopped, Warming
from supervisord.core.spec import NodeSpec, SupervisorSpec
from supervisord.figures import Figures
from supervisord.http_server import Limits
from supervisord.http_wire import HEAD_MAX_BYTES, HttpError, read_request
from supervisord.launcher import ports
from supervisord.web import server as web
from supervisord.web.listen import ListenError, listen
from supervisord.web.metrics import Page, Source
from supervisord.web.server import Hooks, WebServer
from supervisord.web.site import Site, is_loopback
from tests.adapters.fake_daemon import engine, stamp
from tests.sim.engine import Answer, free_port, http, wait_until

CAUSE = Reason("operator", "somebody")
DEGRADED = Ready(found=(Reason("slo", "slow"),))


class Web:
    """The real server over a node that tests change. Told lines are kept."""

    def __init__(self, *engines: Engine, host: str = "127.0.0.1", **supervisor: Any) -> None:
        self.node = Node(spec=NodeSpec(supervisor=SupervisorSpec(**supervisor)), version="1.2.3")
        self.put(*engines)
        self.host = host
        self.port = free_port()
        self.told: list[tuple[str, str, Severity]] = []
        self.errors: list[tuple[str, Exception]] = []
        self.made = 0
        source = Source(lambda: self.node, self._document, Figures(), lambda: {"event": 3})
        self.booted = True
        site = Site(source.node, lambda: self.booted, Page(source), as_root=False)
        self.tries = 0
        self.server = WebServer((host, self.port), site, Hooks(self._tell, self._fail, self._holder))

    def put(self, *engines: Engine) -> None:
        """Publish these engines."""
        self.node = replace(self.node, engines={engine.spec.name: engine for engine in engines})

    def _holder(self, host: str, port: int) -> str | None:
        self.tries += 1
        return ports.holder(host, port)

    def _document(self, node: Node, now: float) -> Mapping[str, Any]:
        self.made += 1
        return status.of(node, now, time.time(), stamp)

    def _tell(self, kind: str, text: str, severity: Severity) -> None:
        self.told.append((kind, text, severity))

    def _fail(self, what: str, error: Exception) -> None:
        self.errors.append((what, error))

    def __enter__(self) -> Web:  # noqa: PYI034 (typing.Self came with Python 3.11)
        self.server.start()
        wait_until(lambda: self.told, 20, "a word of the server")
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()

    def get(self, path: str, method: str = "GET", host: str | None = None, **headers: str) -> Answer:
        """One request."""
        return http(method, f"http://{host or self.host}:{self.port}{path}", headers=headers, timeout_s=20)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), 20)


@pytest.fixture
def serve() -> Iterator[Callable[..., Web]]:
    with contextlib.ExitStack() as stack:
        yield lambda *engines, **options: stack.enter_context(Web(*engines, **options))


def read(sock: socket.socket) -> bytes:
    """Everything until the server closes; it may reset what it left unread."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            data += chunk
    return data


# --- /ready -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "code", "word"),
    [
        (Ready(), 200, "ready"),
        (DEGRADED, 200, "ready"),
        (Warming(9.0), 503, "warming"),
        (Draining(After.HOLD, None, CAUSE, 1.0), 503, "draining"),
        (Backoff(9.0, CAUSE), 503, "backoff"),
        (Stopped(), 503, "stopped"),
    ],
)
def test_an_engine_is_ready_or_says_its_state(serve: Callable[..., Web], phase: Any, code: int, word: str) -> None:
    served = serve(engine("qwen", phase))
    answer = served.get("/ready/qwen")
    assert (answer.status, answer.text) == (code, f"{word}\n")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["connection"] == "close"


def test_the_node_is_ready_when_all_that_is_wanted_is(serve: Callable[..., Web]) -> None:
    served = serve(engine("a"), engine("b", DEGRADED), engine("c", Stopped()))
    assert (served.get("/ready").status, served.get("/ready").text) == (200, "ready\n")
    served.put(engine("a"), engine("b", Warming(9.0)))
    assert (served.get("/ready").status, served.get("/ready").text) == (503, "warming\n")
    served.put()
    assert (served.get("/ready").status, served.get("/ready").text) == (503, "stopped\n")


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/ready/nobody", 404),
        ("GET", "/ready/", 404),
        ("GET", "/ready/qwen/more", 404),
        ("GET", "/", 404),
        ("GET", "/v1/status", 404),
        ("POST", "/ready", 405),
        ("DELETE", "/ready/qwen", 405),
        ("PUT", "/metrics", 405),
    ],
)
def test_there_is_nothing_else(serve: Callable[..., Web], method: str, path: str, code: int) -> None:
    answer = serve(engine("qwen")).get(path, method)
    assert answer.status == code
    assert answer.text.startswith("unknown" if path in {"/ready/", "/ready/nobody"} else "cannot ")
    assert ("allow" in answer.headers) is (code == 405)


@pytest.mark.parametrize("path", ["/ready", "/ready/qwen", "/ready/nobody", "/metrics"])
def test_head_is_get_without_a_body(serve: Callable[..., Web], path: str) -> None:
    served = serve(engine("qwen"))
    with served.connect() as sock:
        sock.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = read(sock).partition(b"\r\n\r\n")
    got = served.get(path)
    assert body == b""
    assert f"Content-Length: {len(got.body)}".encode() in head or path == "/metrics"
    assert int(head.split()[1]) == got.status


# --- who may read metrics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("2001:db8::1", False),
    ],
)
def test_this_machine_by_its_address(peer: str, loopback: bool) -> None:
    assert is_loopback(peer) is loopback


@pytest.fixture
def from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer comes from another machine."""
    monkeypatch.setattr("supervisord.web.site.is_loopback", lambda _: False)


def test_metrics_are_for_this_machine(serve: Callable[..., Web]) -> None:
    answer = serve(engine("qwen")).get("/metrics")
    assert answer.status == 200
    assert 'vllm_supervisor_engine_ready{engine="qwen"} 1.0' in answer.text


@pytest.mark.usefixtures("from_afar")
def test_others_get_no_metrics_but_readiness(serve: Callable[..., Web]) -> None:
    served = serve(engine("qwen"))
    assert served.get("/ready/qwen").status == 200
    answer = served.get("/metrics", Authorization="Bearer x")
    assert answer.status == 403
    assert "supervisor.metrics_token_file is not set" in answer.text


@pytest.mark.usefixtures("from_afar")
def test_others_get_metrics_with_the_token(serve: Callable[..., Web], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    served = serve(engine("qwen"), metrics_token_file=str(token))
    for wrong in (
        {},
        {"Authorization": "Bearer s3cre"},
        {"Authorization": "Basic s3cret"},
        {"Authorization": "s3cret"},
    ):
        answer = served.get("/metrics", **wrong)
        assert (answer.status, answer.headers.get("www-authenticate")) == (401, "Bearer")
        assert "s3cre" not in answer.text
    assert served.get("/metrics", Authorization="Bearer s3cret").status == 200
    token.write_text("another\n")  # is read anew: no restart for a new token
    assert served.get("/metrics", Authorization="bearer another").status == 200
    assert served.get("/metrics", Authorization="Bearer s3cret").status == 401


@pytest.mark.usefixtures("from_afar")
@pytest.mark.parametrize("content", [None, "", "two words", "x" * 5000])
def test_without_a_readable_token_nobody_gets_them(
    serve: Callable[..., Web], tmp_path: Path, content: str | None
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    served = serve(engine("qwen"), metrics_token_file=str(token))
    answer = served.get("/metrics", Authorization=f"Bearer {(content or '')[:100]}")
    assert answer.status == 403
    assert "check-config says why" in answer.text
    assert served.errors == []


# --- addresses --------------------------------------------------------------------------------------------------------


def test_a_port_that_is_held_is_told_with_its_holder_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "RETRY_S", 0.02)
    waiting = Web(engine("qwen"))
    with socket.create_server(("127.0.0.1", waiting.port)) as other, waiting:
        wait_until(lambda: waiting.tries > 5, 20, "it to try again")
        ((kind, text, severity),) = waiting.told
        assert (kind, severity) == ("web_failed", Severity.WARNING)
        name = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
        where = f"cannot serve /ready and /metrics on 127.0.0.1:{waiting.port} (supervisor.listen)"
        assert text.startswith(
            f"{where}: the port is held by pid {os.getpid()} ({name}); stop that one, or set another"
        )
        assert "engines are supervised without" in text
        other.close()
        wait_until(lambda: len(waiting.told) == 2, 20, "the end of the trouble")
        where = f"serves /ready and /metrics on 127.0.0.1:{waiting.port}"
        assert waiting.told[1] == ("web_listening", where, Severity.NOTICE)
        assert waiting.get("/ready").status == 200


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("192.0.2.1", "Cannot assign requested address; set an address of this machine"),
        ("no-such-host.invalid", "; set an address of this machine"),
        ("x" * 64 + ".invalid", "; set an address of this machine"),
    ],
)
def test_an_address_that_is_not_ours(host: str, why: str) -> None:
    with pytest.raises(ListenError) as caught:
        listen(host, 9401, lambda _host, _port: None)
    assert str(caught.value).startswith("cannot serve /ready and /metrics on ")
    assert str(caught.value).endswith(why)


@pytest.mark.parametrize(
    ("host", "peers"), [("::1", ["[::1]"]), ("0.0.0.0", ["127.0.0.1"]), ("localhost", ["localhost"])]
)
def test_kinds_of_addresses(serve: Callable[..., Web], host: str, peers: list[str]) -> None:
    served = serve(engine("qwen"), host=host)
    assert {served.get("/metrics", host=peer).status for peer in peers} == {200}


def test_all_addresses_of_both_kinds(serve: Callable[..., Web]) -> None:
    served = serve(engine("qwen"), host="::")
    assert [served.get("/metrics", host=peer).status for peer in ("127.0.0.1", "[::1]")] == [200, 200]


def test_a_daemon_that_does_not_know_yet_what_lives_says_so(serve: Callable[..., Web]) -> None:
    """An engine that an earlier daemon left would be called stopped."""
    served = serve(engine("qwen"))
    served.booted = False
    for path, text in (
        ("/ready", "starting\n"),
        ("/ready/qwen", "starting\n"),
        ("/metrics", "cannot give metrics yet: the daemon is starting\n"),
    ):
        answer = served.get(path)
        assert (answer.status, answer.text) == (503, text)
    assert served.get("/ready", "POST").status == 405
    assert served.made == 0
    served.booted = True
    assert [served.get(path).status for path in ("/ready", "/ready/qwen", "/metrics")] == [200, 200, 200]


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_slow_clients_hold_nothing_for_long(serve: Callable[..., Web], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LIMITS", Limits(connections_max=4, deadline_s=0.5))
    served = serve(engine("qwen"))
    with contextlib.ExitStack() as stack:
        drips = [stack.enter_context(served.connect()) for _ in range(4)]
        over, ends = threading.Event(), []

        def drip(sock: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    sock.sendall(b"G")
            ends.append(sock)

        for sock in drips:
            threading.Thread(target=drip, args=(sock,), daemon=True).start()
        assert served.get("/ready/qwen").status == 200, "whoever is at it for longest makes room"
        wait_until(lambda: len(ends) == 4, 20, "the slow ones to be sent away")
        over.set()
        first, *others = map(read, drips)
        assert b"too many connections" in first
        assert all(b" 408 " in answer for answer in others)


def test_a_flood_of_idle_clients_keeps_nobody_waiting(
    serve: Callable[..., Web], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would be waited for on its own: 64 moments of a second, where two are enough."""
    monkeypatch.setattr(http_server, "_MOMENT_S", 1.0)
    monkeypatch.setattr(web, "LIMITS", replace(web.LIMITS, deadline_s=60.0))
    served = serve(engine("qwen"))
    with contextlib.ExitStack() as stack:
        for _ in range(3 * web.LIMITS.connections_max):
            stack.enter_context(served.connect())
        assert served.get("/ready/qwen").status == 200


def test_a_burst_of_quick_clients_turns_nobody_away(serve: Callable[..., Web], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MOMENT_S", 60.0)
    monkeypatch.setattr(web, "LIMITS", Limits(connections_max=4, deadline_s=20.0))
    served = serve(engine("qwen"))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(served.connect()) for _ in range(5)]
        time.sleep(0.3)  # for whoever would be turned away now
        for sock in clients:
            sock.sendall(b"GET /ready/qwen HTTP/1.1\r\n\r\n")
        assert all(b" 200 " in read(sock) for sock in clients)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET /ready HTTP/1.1\r\nX: " + b"x" * HEAD_MAX_BYTES + b"\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET http://x/ready HTTP/1.1\r\n\r\n", 400),
        (b"POST /ready HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
    ],
)
def test_what_is_no_request_is_refused(serve: Callable[..., Web], request_: bytes, code: int) -> None:
    served = serve(engine("qwen"))
    with served.connect() as sock:
        with contextlib.suppress(OSError):
            sock.sendall(request_)
        answer = read(sock)
    assert int(answer.split()[1]) == code
    assert answer.partition(b"\r\n\r\n")[2].startswith(b"cannot read the request: ")
    assert served.errors == []


@pytest.mark.parametrize("value", [b" " * 16_000, b" x" * 8_000, b"\t" * 16_000, b"a=" * 8_000])
@pytest.mark.parametrize("end", [b"\x01", b""])
def test_no_request_takes_long_to_read(value: bytes, end: bytes) -> None:
    """While a pattern is matched the loop stands still."""
    began = time.process_time()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"GET /ready HTTP/1.1\r\nA:" + value + end + b"\r\n\r\n")
        with contextlib.suppress(HttpError):
            read_request(ours, time.monotonic() + 20)
    assert time.process_time() - began < 0.2


def test_a_connection_gets_one_answer(serve: Callable[..., Web]) -> None:
    served = serve(engine("qwen"))
    with served.connect() as sock:
        sock.sendall(b"GET /ready HTTP/1.1\r\nConnection: keep-alive\r\n\r\n" * 3)
        assert read(sock).count(b"HTTP/1.1 200 OK") == 1


def test_many_scrapers_cost_no_more_than_one(serve: Callable[..., Web], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisord.web.metrics.KEEP_S", 3600.0)
    served = serve(engine("qwen"))
    pages = {served.get("/metrics").body for _ in range(5)}
    open_metrics = "application/openmetrics-text; version=1.0.0"
    pages |= {served.get("/metrics", Accept=open_metrics).body for _ in range(5)}
    assert (len(pages), served.made) == (2, 2)


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain; version=x",
        "application/openmetrics-text; version=1.x.0",
        "application/openmetrics-text; version=" + "9" * 5000,
        "text/plain; version==; escaping=x",
        ";,=" * 1000,
    ],
)
def test_a_wish_that_makes_no_sense_gets_the_page_all_the_same(serve: Callable[..., Web], accept: str) -> None:
    served = serve(engine("qwen"))
    found = served.get("/metrics", Accept=accept)
    assert found.status == 200
    assert "vllm_supervisor_ready" in found.text
    assert served.errors == []


def test_forms_of_the_page_are_few(serve: Callable[..., Web], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version number is a form of its own, and each form is made anew."""
    monkeypatch.setattr("supervisord.web.metrics.KEEP_S", 3600.0)
    served = serve(engine("qwen"))
    for minor in range(20):
        served.get("/metrics", Accept=f"application/openmetrics-text; version=1.{minor}.0")
    assert served.made <= 9


def test_a_flood_is_taken_in_at_a_bounded_pace(serve: Callable[..., Web]) -> None:
    served = serve(engine("qwen"))
    began, count = time.monotonic(), 60
    for _ in range(count):
        assert served.get("/ready/qwen").status == 200
    assert time.monotonic() - began >= (count - 1) * web.LIMITS.pause_s


def test_a_bug_behind_a_request_is_told_and_the_rest_goes_on(
    serve: Callable[..., Web], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(engine("qwen"))
    monkeypatch.setattr("supervisord.web.metrics.add_gpus", lambda *_: 1 // 0)
    answer = served.get("/metrics")
    assert answer.status == 500
    assert answer.text.startswith("internal error ")
    assert [(what.split()[0], type(error)) for what, error in served.errors] == [("web", ZeroDivisionError)]
    assert served.get("/ready").status == 200


def test_closing_needs_no_client_and_no_port() -> None:
    served = Web(engine("qwen"))
    with served, served.connect():
        pass
    with pytest.raises(OSError, match="refused"):
        served.connect()
    served.server.close()


def test_the_metrics_cost_little_memory() -> None:
    """Of a daemon that may have 60 MiB."""
    program = """
import supervisord.effects, supervisord.control.server, supervisord.schedule
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before = rss()
import supervisord.web.server, supervisord.web.site
print(rss() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 5 * 1024**2
