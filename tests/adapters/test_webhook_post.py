"""One POST against receivers on loopback: good, slow, broken, hostile, and with certificates of their own."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from supervisord import __version__
from supervisord.core.spec import NotifySpec
from supervisord.webhook import post
from supervisord.webhook.outbox import Outcome
from tests.adapters.fake_http import FakeServer, Request, Script, answer, unused_port

TLS = Path(__file__).parents[1] / "data" / "tls"
SUBJECT_HASH = "ce275665.0"
"""openssl x509 -hash -in localhost.pem"""
MESSAGE = b'{"version": 1}'
SECRET = "0123456789abcdef"
SOON_S = 20.0
"""An exchange that is cut after 0.3 s is over by then, also on a busy machine."""


def spec_for(server: FakeServer, path: str = "/hook", scheme: str = "http", **fields: Any) -> NotifySpec:
    return NotifySpec(name="ops", url=f"{scheme}://{server.host}:{server.port}{path}", **fields)


def sent(script: Script, path: str = "/hook", timeout_s: float = 10.0, **fields: Any) -> Outcome:
    with FakeServer(script) as server:
        return post.send(spec_for(server, path, **fields), MESSAGE, timeout_s)


def headers_file(folder: Path, text: str) -> str:
    file = folder / "headers"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    return str(file)


def test_a_message_arrives_whole_and_once(tmp_path: Path) -> None:
    file = headers_file(tmp_path, f"Authorization: Bearer {SECRET}\n\nX-Team: gpu  night\n")
    with FakeServer(lambda _: answer(204)) as server:
        outcome = post.send(spec_for(server, "/hook?a=b%20c", headers_file=file), MESSAGE, 10)
        assert outcome == Outcome(ok=True, detail="HTTP 204")
        (request,) = server.requests
    assert (request.method, request.path, request.body) == ("POST", "/hook?a=b%20c", MESSAGE)
    expected = {
        "authorization": f"Bearer {SECRET}",
        "x-team": "gpu  night",
        "content-type": "application/json",
        "user-agent": f"vllm-supervisor/{__version__}",
        "accept-encoding": "identity",
        "connection": "close",
    }
    assert expected.items() <= request.headers.items()


@pytest.mark.parametrize(
    ("status", "again"),
    [(400, False), (401, False), (404, False), (410, False), (408, True), (429, True), (500, True), (503, True)],
)
def test_which_errors_are_tried_again(status: int, again: bool) -> None:
    outcome = sent(lambda _: answer(status, "no_service\nand more\n"))
    assert (outcome.ok, outcome.again, outcome.detail) == (False, again, f"HTTP {status}: no_service")


@pytest.mark.parametrize(
    ("asked", "wait_s"),
    [("17", 17.0), ("99999999999", 21600.0), ("-5", 0.0), ("soon", 0.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0)],
)
def test_how_long_a_receiver_asks_to_wait(asked: str, wait_s: float) -> None:
    assert sent(lambda _: answer(429, headers=f"Retry-After: {asked}\r\n")).wait_s == wait_s


def test_a_redirect_is_not_followed() -> None:
    with FakeServer(lambda _: answer(204)) as other:
        place = f"http://127.0.0.1:{other.port}/precious-token"
        outcome = sent(lambda _: answer(307, headers=f"Location: {place}\r\n"))
        assert other.requests == []
    assert (outcome.ok, outcome.again) == (False, False)
    assert outcome.detail == (
        f"HTTP 307, a redirect to http://127.0.0.1:{other.port}/...: none is followed; write where it leads into url"
    )


@pytest.mark.parametrize(
    ("location", "to"),
    [
        ("", ""),
        ("/hook/precious/", " to http://{here}/..."),
        ("precious/", " to http://{here}/..."),
        ("?key=precious", " to http://{here}/..."),
        ("//elsewhere.example/precious", " to http://elsewhere.example/..."),
        ("https://precious:precious@elsewhere.example:444", " to https://elsewhere.example:444/..."),
        ("https:precious", ""),
        ("mailto:precious", ""),
        ("https://[precious", ""),
    ],
)
def test_a_redirect_shows_no_more_than_scheme_and_host(location: str, to: str) -> None:
    """The usual one quotes our own path with a slash more."""
    with FakeServer(lambda _: answer(301, headers=f"Location: {location}\r\n")) as server:
        outcome = post.send(spec_for(server, "/hook/precious?key=precious"), MESSAGE, 10)
        to = to.format(here=f"{server.host}:{server.port}")
    assert outcome.detail == f"HTTP 301, a redirect{to}: none is followed; write where it leads into url"


@pytest.mark.parametrize("status", [200, 302, 404, 500])
def test_an_answer_is_not_read_to_its_end(status: int) -> None:
    """A page of gigabytes would fill the daemon's memory."""

    def script(_: Request) -> None:
        drip(server, f"HTTP/1.1 {status} X\r\nLocation: /b\r\n\r\n{'y' * 2000}".encode())

    with FakeServer(script) as server:
        outcome = post.send(spec_for(server), MESSAGE, SOON_S)
        assert server.closed_by_peer.wait(SOON_S)
    assert outcome.detail.startswith(f"HTTP {status}")


@pytest.mark.parametrize("before", range(60, 110, 3))
def test_a_secret_is_hidden_also_where_the_quotation_is_cut(before: int) -> None:
    outcome = sent(lambda _: answer(404, f"{'x' * before}{SECRET}"), f"/hook/{SECRET}")
    assert len(outcome.detail) <= len("HTTP 404: ") + 100
    assert SECRET[:3] not in outcome.detail


def test_a_secret_is_hidden_also_as_the_receiver_reads_it() -> None:
    outcome = sent(lambda _: answer(404, "no a:precious and no b precious"), "/hook/a%3Aprecious?key=b+precious")
    assert outcome.detail == "HTTP 404: no (hidden) and no (hidden)"


def test_what_an_answer_quotes_of_our_secrets_is_hidden(tmp_path: Path) -> None:
    file = headers_file(tmp_path, f"Authorization: Bearer {SECRET}\n")

    def script(request: Request) -> bytes:
        return answer(403, f"bad token {SECRET} at {request.path} \x1b[2J")

    outcome = sent(script, "/services/T0123456/precious", headers_file=file)
    assert outcome.detail == "HTTP 403: bad token (hidden) at /(hidden)/(hidden)/(hidden)  [2J"


# --- bounds -----------------------------------------------------------------------------------------------------------


def drip(server: FakeServer, head: bytes) -> None:
    """A byte now and then, for as long as anybody listens: no timeout for a read ever ends that."""
    server.sockets[-1].sendall(head)
    while not server.over.wait(0.05):
        server.sockets[-1].sendall(b"x")


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 500 X\r\nX-Long: "])
def test_an_exchange_is_over_in_time_whatever_comes(head: bytes) -> None:
    def script(_: Request) -> None:
        drip(server, head)

    with FakeServer(script) as server:
        began = time.monotonic()
        outcome = post.send(spec_for(server), MESSAGE, 0.3)
        took_s = time.monotonic() - began
        assert server.closed_by_peer.wait(SOON_S), "and the connection is closed"
    assert 0.3 <= took_s < SOON_S
    assert (outcome.ok, outcome.again) == (False, True)


def test_a_receiver_that_says_nothing() -> None:
    with FakeServer(lambda _: server.hang()) as server:
        outcome = post.send(spec_for(server), MESSAGE, 0.3)
    assert outcome == Outcome(ok=False, detail="no answer within 0.3 s", again=True)


def test_a_tls_handshake_that_never_ends() -> None:
    class Mute(FakeServer):
        def _serve(self, connection: Any, number: int) -> None:
            with connection:
                self.over.wait()

    with Mute(lambda _: None) as server:
        outcome = post.send(spec_for(server, scheme="https"), MESSAGE, 0.3)
    assert outcome == Outcome(ok=False, detail="no answer within 0.3 s", again=True)


def test_an_endless_answer_is_not_read() -> None:
    def script(_: Request) -> None:
        server.send_and_close(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            server.sockets[-1].sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")

    with FakeServer(script) as server:
        began = time.monotonic()
        assert post.send(spec_for(server), MESSAGE, 30).ok
        assert time.monotonic() - began < SOON_S
        assert server.closed_by_peer.wait(SOON_S)


@pytest.mark.parametrize("size", [b"-1", b"-9223372036854775809"])
def test_a_chunk_of_less_than_nothing_is_not_read(size: bytes) -> None:
    """http.client reads all that comes for the first, and does not know what to do about the second."""
    head = b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n"
    outcome = sent(lambda _: head + b"words\r\n0\r\n\r\n")
    assert outcome == Outcome(ok=False, detail="HTTP 500", again=True)
    said = sent(lambda _: head.replace(size, b"5") + b"words\r\n0\r\n\r\n")
    assert said == Outcome(ok=False, detail="HTTP 500: words", again=True)


def test_no_threads_stay() -> None:
    before = set(threading.enumerate())
    with FakeServer(lambda _: answer(200)) as server:
        for _ in range(5):
            assert post.send(spec_for(server), MESSAGE, 30).ok
    assert set(threading.enumerate()) <= before


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_nobody_there() -> None:
    spec = NotifySpec(name="ops", url=f"http://127.0.0.1:{unused_port()}/precious")
    outcome = post.send(spec, MESSAGE, 5)
    assert outcome == Outcome(ok=False, detail="no connection: Connection refused", again=True)


def test_no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    outcome = post.send(NotifySpec(name="ops", url="https://hooks.invalid/precious"), MESSAGE, 5)
    assert outcome == Outcome(ok=False, detail="cannot find its host: Name or service not known", again=True)


@pytest.mark.parametrize("raw", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 999999 X\r\n\r\n"])
def test_no_http(raw: bytes) -> None:
    def script(_: Request) -> None:
        server.send_and_close(raw)

    with FakeServer(script) as server:
        outcome = post.send(spec_for(server), MESSAGE, 5)
    assert (outcome.ok, outcome.again) == (False, True)
    assert "hook" not in outcome.detail


def test_the_environment_of_the_daemon_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert sent(lambda _: answer(200)).ok


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has 0 bytes"),
        ("Authorization Bearer precious\n", 'line 1 is not "NAME: VALUE"'),
        ("X-A: b\nHost: precious\n", "line 2 sets Host, which the supervisor sets itself"),
        ("X-A: \x01precious\n", "line 1"),
    ],
)
def test_headers_that_cannot_be_sent(text: str, words: str, tmp_path: Path) -> None:
    outcome = sent(lambda _: answer(200), headers_file=headers_file(tmp_path, text))
    assert (outcome.ok, outcome.again) == (False, True), "it is read anew each time, so it can be corrected"
    assert words in outcome.detail
    assert "precious" not in outcome.detail


def test_a_headers_file_that_is_not_there(tmp_path: Path) -> None:
    outcome = sent(lambda _: answer(200), headers_file=str(tmp_path / "none"))
    assert "No such file or directory" in outcome.detail


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "localhost.pem", TLS / "localhost.key")
    return context


def test_a_certificate_that_nobody_signed(tls: ssl.SSLContext) -> None:
    with FakeServer(lambda _: answer(200), tls=tls) as server:
        outcome = post.send(spec_for(server, scheme="https"), MESSAGE, 10)
        assert server.requests == []
    assert (outcome.ok, outcome.again) == (False, True)
    assert outcome.detail == (
        "its certificate is not trusted: self-signed certificate; install who signed it (update-ca-certificates), "
        "or name that file in ca_file"
    )


def test_a_certificate_that_the_operator_trusts(tls: ssl.SSLContext) -> None:
    with FakeServer(lambda _: answer(200), tls=tls) as server:
        assert post.send(spec_for(server, scheme="https", ca_file=str(TLS / "localhost.pem")), MESSAGE, 10).ok
        assert json.loads(server.requests[0].body) == {"version": 1}


def test_a_certificate_that_the_machine_trusts(
    tls: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory as update-ca-certificates keeps it: a file of all of them, and each under the hash of its subject."""
    monkeypatch.setattr(post, "CERTIFICATES", tmp_path)
    (tmp_path / "ca-certificates.crt").write_text("", encoding="utf-8")
    with FakeServer(lambda _: answer(200), tls=tls) as server:
        assert "not trusted" in post.send(spec_for(server, scheme="https"), MESSAGE, 10).detail
        (tmp_path / SUBJECT_HASH).symlink_to(TLS / "localhost.pem")
        assert post.send(spec_for(server, scheme="https"), MESSAGE, 10).ok


def test_a_certificate_of_another_host(tls: ssl.SSLContext) -> None:
    with FakeServer(lambda _: answer(200), tls=tls, host="127.0.0.2") as server:
        outcome = post.send(spec_for(server, scheme="https", ca_file=str(TLS / "localhost.pem")), MESSAGE, 10)
        assert server.requests == []
    assert "certificate is not valid for '127.0.0.2'" in outcome.detail


def test_plain_http_where_tls_was_meant() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:  # at once: what TLS sends first is random, and may or may not look like a line
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(65536)

        thread = threading.Thread(target=refuse)
        thread.start()
        url = f"https://127.0.0.1:{server.getsockname()[1]}/hook"
        outcome = post.send(NotifySpec(name="ops", url=url), MESSAGE, SOON_S)
        thread.join()
    assert (outcome.ok, outcome.again) == (False, True)
    assert outcome.detail.startswith("TLS failed: "), outcome


def test_certificates_that_are_none(tmp_path: Path, tls: ssl.SSLContext) -> None:
    (tmp_path / "ca.pem").write_text("nonsense", encoding="utf-8")
    with FakeServer(lambda _: answer(200), tls=tls) as server:
        for name, words in (("ca.pem", "TLS failed: no certificate"), ("missing.pem", "is no readable file")):
            outcome = post.send(spec_for(server, scheme="https", ca_file=str(tmp_path / name)), MESSAGE, 10)
            assert (outcome.ok, outcome.again) == (False, True)
            assert words in outcome.detail
