"""The control API: its contract, and what hostile, slow or clumsy clients can do to it (nothing)."""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.control import client, listen
from supervisord.control.listen import ListenError
from supervisord.control.routes import InJournal, Reloaded
from supervisord.control.server import CONNECTIONS_MAX, ControlServer
from supervisord.core.messages import Answer, Op
from supervisord.core.model import Stopped
from supervisord.http_wire import BODY_MAX_BYTES, HEAD_MAX_BYTES, RESPONSE_MAX_BYTES, HttpError, read_request
from tests.adapters.fake_daemon import FakeDaemon, engine

ME = f"uid {os.getuid()} pid {os.getpid()}"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine("qwen"), engine("llama", Stopped())) as running:
        yield running


def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.01)


def connect(daemon: FakeDaemon) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(daemon.socket)
    return sock


def read(sock: socket.socket) -> bytes:
    """Everything until the server closes; it may reset what it left unread."""
    data = b""
    try:
        while chunk := sock.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def raw(daemon: FakeDaemon, request: bytes, *, half_close: bool = False) -> tuple[int, dict[str, str], bytes]:
    with connect(daemon) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(request)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        answer = read(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["Content-Length"]) == len(body)
    return int(first.split()[1]), headers, body


def call(daemon: FakeDaemon, method: str, target: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    status, headers, answer = raw(daemon, head + body)
    assert headers["Content-Type"] == "application/json"
    return status, json.loads(answer)


# --- routes -----------------------------------------------------------------------------------------------------------


def test_status_is_the_document_and_the_serial_a_header(daemon: FakeDaemon) -> None:
    status, headers, body = raw(daemon, b"GET /v1/status HTTP/1.1\r\n\r\n")
    assert (status, headers["Status-Serial"]) == (200, "1")
    document = json.loads(body)
    assert document.keys() == {"version", "supervisor", "engines", "gpus"}
    assert [e["name"] for e in document["engines"]] == ["qwen", "llama"]


def test_status_waits_for_another_serial(daemon: FakeDaemon) -> None:
    started = time.monotonic()
    threading.Timer(0.2, lambda: daemon.enter("llama", Stopped())).start()
    reply = client.get(daemon.socket, "/v1/status?after=1&timeout=20", 30)
    assert reply.number("status-serial") == 2
    assert 0.15 < time.monotonic() - started < 10


def test_status_answers_at_once_when_the_serial_is_another_one_also_a_lower_one(daemon: FakeDaemon) -> None:
    for after in (0, 7_000):
        started = time.monotonic()
        client.get(daemon.socket, f"/v1/status?after={after}&timeout=20", 30)
        assert time.monotonic() - started < 5


def test_a_long_poll_ends_with_the_old_serial(daemon: FakeDaemon) -> None:
    assert client.get(daemon.socket, "/v1/status?after=1&timeout=0.1").number("status-serial") == 1


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(("body", "at_once"), [(b"", False), (b"{}", False), (b'{"now": true}', True)])
def test_a_request_reaches_the_daemon_with_its_actor(daemon: FakeDaemon, op: Op, body: bytes, at_once: bool) -> None:
    daemon.answer = (Answer.ACCEPTED, "qwen is being looked after")
    assert call(daemon, "POST", f"/v1/engines/qwen/{op.value}", body) == (
        202,
        {"answer": "accepted", "message": "qwen is being looked after"},
    )
    assert daemon.requests == [(op, "qwen", at_once, ME)]


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [((Answer.REFUSED, "cannot: no"), 409, "refused"), ((Answer.UNKNOWN_ENGINE, "cannot: who"), 404, "unknown_engine")],
)
def test_a_no_is_said(daemon: FakeDaemon, answer: tuple[Answer, str], status: int, code: str) -> None:
    daemon.answer = answer
    assert call(daemon, "POST", "/v1/engines/qwen/stop") == (status, {"error": code, "message": answer[1]})


def test_a_loop_that_does_not_answer_is_a_timeout(daemon: FakeDaemon) -> None:
    daemon.answer = daemon.outcome = TimeoutError()
    for target in ("/v1/engines/qwen/stop", "/v1/reload"):
        status, document = call(daemon, "POST", target)
        assert (status, document["error"]) == (504, "timeout")
    assert daemon.errors == []


def test_reload_tells_what_changes_or_every_problem(daemon: FakeDaemon) -> None:
    daemon.outcome = Reloaded(accepted=True, messages=("qwen: its launch plan changed",), engines=("qwen",))
    assert call(daemon, "POST", "/v1/reload") == (
        202,
        {"answer": "accepted", "messages": ["qwen: its launch plan changed"], "engines": ["qwen"]},
    )
    daemon.outcome = Reloaded(accepted=False, messages=("cannot use x", "cannot use y"))
    status, document = call(daemon, "POST", "/v1/reload")
    assert (status, document["error"], document["messages"]) == (
        422,
        "invalid_configuration",
        ["cannot use x", "cannot use y"],
    )
    assert daemon.reloads == [ME, ME]


def test_the_log_is_read_in_parts(daemon: FakeDaemon) -> None:
    daemon.logs["qwen"] = b"0123456789\xff\x1b["
    status, headers, body = raw(daemon, b"GET /v1/engines/qwen/log?limit=4 HTTP/1.1\r\n\r\n")
    assert (status, body) == (200, b"9\xff\x1b[")
    assert (headers["Log-Offset"], headers["Log-Next-Offset"], headers["Log-Generation"]) == ("9", "13", "1")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert raw(daemon, b"GET /v1/engines/qwen/log?offset=2&limit=3 HTTP/1.1\r\n\r\n")[2] == b"234"


def test_the_log_can_be_waited_for(daemon: FakeDaemon) -> None:
    daemon.logs["qwen"] = b"old"
    threading.Timer(0.2, lambda: daemon.logs.update(qwen=b"old, new")).start()
    assert client.get(daemon.socket, "/v1/engines/qwen/log?offset=3&wait=20", 30).body == b", new"
    assert client.get(daemon.socket, "/v1/engines/qwen/log?offset=8&wait=0.1", 30).body == b""


def test_the_log_of_nobody_and_the_log_in_the_journal(daemon: FakeDaemon) -> None:
    assert call(daemon, "GET", "/v1/engines/nobody/log")[0] == 404
    daemon.logs["qwen"] = InJournal("vllm-qwen")
    status, document = call(daemon, "GET", "/v1/engines/qwen/log")
    assert (status, document["error"], document["identifier"]) == (409, "in_journal", "vllm-qwen")


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/status/", 404),
        ("GET", "/v1/../v1/status", 404),
        ("POST", "/v1/status", 405),
        ("PUT", "/v1/status", 405),
        ("GET", "/v1/reload", 405),
        ("GET", "/v1/engines/qwen/stop", 405),
        ("POST", "/v1/engines/qwen/explode", 405),
        ("POST", "/v1/engines/QWEN/stop", 404),
        ("POST", "/v1/engines/%71wen/stop", 404),
        ("POST", f"/v1/engines/{'q' * 33}/stop", 404),
        ("POST", "/v1/engines//stop", 404),
        ("GET", "/v1/status?after=-1", 400),
        ("GET", "/v1/status?after=1e3", 400),
        ("GET", "/v1/status?after=" + "9" * 5000, 400),
        ("GET", "/v1/status?after=%D9%A1", 400),
        ("GET", "/v1/status?timeout=nan", 400),
        ("GET", "/v1/status?timeout=-1", 400),
        ("GET", "/v1/status?after", 400),
        ("GET", "/v1/status?a=1&b=2&c=3&d=4&e=5&f=6&g=7&h=8&i=9", 400),
        ("GET", "/v1/status?other=1", 400),
        ("GET", "/v1/status?after=1&after=2", 400),
        ("GET", "/v1/status?after=%FF", 400),
        ("POST", "/v1/reload?x=1", 400),
        ("GET", "/v1/engines/qwen/log?offset=x", 400),
    ],
)
def test_what_is_not_offered_is_said(daemon: FakeDaemon, method: str, target: str, status: int) -> None:
    found, document = call(daemon, method, target)
    assert found == status
    assert document["message"].startswith("cannot ")
    assert daemon.requests == []


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"1", b"\xff", b'{"now": 1}', b'{"later": true}', b"[" * 60_000, b'{"now": true, "x": 1}', b"\x00"],
)
def test_a_body_that_is_not_understood_changes_nothing(daemon: FakeDaemon, body: bytes) -> None:
    assert call(daemon, "POST", "/v1/engines/qwen/stop", body)[0] == 400
    assert daemon.requests == []


def test_a_bug_is_told_by_number_and_never_by_traceback(daemon: FakeDaemon) -> None:
    daemon.answer = RuntimeError("secret detail")
    status, document = call(daemon, "POST", "/v1/engines/qwen/stop")
    assert (status, document["error"]) == (500, "internal")
    assert "secret" not in document["message"]
    [(what, error)] = daemon.errors
    assert str(error) == "secret detail"
    assert what.split()[-1] in document["message"]


def test_a_file_that_cannot_be_read_is_a_bug_too_and_gets_an_answer(daemon: FakeDaemon) -> None:
    daemon.answer = OSError(errno.EIO, "disk")
    assert call(daemon, "POST", "/v1/engines/qwen/stop")[0] == 500


def test_a_document_that_json_has_no_words_for_is_a_bug(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "status", lambda: (1, {"x": float("nan")}))
    assert call(daemon, "GET", "/v1/status")[0] == 500


def test_responses_are_bounded(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "status", lambda: (1, {"x": "y" * RESPONSE_MAX_BYTES}))
    assert call(daemon, "GET", "/v1/status")[0] == 500
    daemon.logs["qwen"] = b"x" * 1_000_000
    assert len(raw(daemon, b"GET /v1/engines/qwen/log?limit=999999 HTTP/1.1\r\n\r\n")[2]) == 256 * 1024


# --- abuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (b"GET /v1/status\r\n\r\n", 400),
        (b"GET /v1/status HTTP/2.0\r\n\r\n", 400),
        (b"GET  /v1/status HTTP/1.1\r\n\r\n", 400),
        (b"get /v1/status HTTP/1.1\r\n\r\n", 400),
        (b"GET http://x/v1/status HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/\x00status HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/\xffstatus HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/\x1b[31mstatus HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\nHost: x\n\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\nName : x\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\nX: \x07\r\n\r\n", 400),
        (b"POST /v1/reload HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/reload HTTP/1.1\r\nContent-Length: 0x1\r\n\r\n", 400),
        (b"POST /v1/reload HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST /v1/reload HTTP/1.1\r\nContent-Length: \r\n\r\n", 400),
        (b"POST /v1/reload HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /v1/reload HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BODY_MAX_BYTES + 1), 413),
        (b"POST /v1/reload HTTP/1.1\r\nContent-Length: 99999999999999999\r\n\r\n", 413),
        (b"GET /" + b"x" * (HEAD_MAX_BYTES + 1000) + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 5_000_000, 431),
        (bytes(range(128, 256)) + b"\r\n\r\n", 400),
    ],
)
def test_garbage_gets_an_error_and_reaches_nobody(daemon: FakeDaemon, request_: bytes, status: int) -> None:
    found, _, body = raw(daemon, request_)
    assert found == status
    assert json.loads(body)["message"].startswith("cannot read the request: ")
    assert body.isascii()
    assert (daemon.requests, daemon.reloads, daemon.errors) == ([], [], [])
    assert call(daemon, "GET", "/v1/status")[0] == 200


WORDS = rb"GET |POST |/v1/status|/v1/reload|?after=|1| HTTP/1.1|: |Content-Length|Transfer-Encoding|%|&|=|{| ".split(
    b"|"
)
PIECES = st.one_of(st.sampled_from([*WORDS, b"\r\n", b"\r\n\r\n", b"\n", b"\x00", b"\xff"]), st.binary(max_size=20))


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=20))
def test_whatever_is_sent_is_a_request_or_an_error(pieces: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(pieces))
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(HttpError):
            request = read_request(ours, time.monotonic() + 10)
            assert request is None or request.method.isascii()


@pytest.mark.parametrize("part", [b"GET /v1/sta", b"POST /v1/reload HTTP/1.1\r\nContent-Length: 9\r\n\r\nab"])
def test_a_request_that_breaks_off_is_an_error(daemon: FakeDaemon, part: bytes) -> None:
    assert raw(daemon, part, half_close=True)[0] == 400
    assert daemon.reloads == []


def test_a_client_that_says_nothing_and_leaves_gets_nothing(daemon: FakeDaemon) -> None:
    with connect(daemon) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert read(sock) == b""
    connect(daemon).close()
    assert call(daemon, "GET", "/v1/status")[0] == 200
    assert daemon.errors == []


def test_a_client_that_only_finished_sending_is_served_and_waited_for(daemon: FakeDaemon) -> None:
    threading.Timer(1.5, lambda: daemon.enter("llama", Stopped())).start()
    status, headers, _ = raw(daemon, b"GET /v1/status?after=1&timeout=20 HTTP/1.1\r\n\r\n", half_close=True)
    assert (status, headers["Status-Serial"]) == (200, "2")


def test_a_long_poll_ends_soon_after_its_client_left(daemon: FakeDaemon) -> None:
    sock = connect(daemon)
    sock.sendall(b"GET /v1/status?after=1&timeout=25 HTTP/1.1\r\n\r\n")
    until(lambda: daemon.waits)
    sock.close()
    until(lambda: not clients())
    assert daemon.waits <= 3


def clients() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "control-client"]


def test_a_client_that_drips_is_cut_off_in_total_time(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, deadline_s=0.5) as daemon, connect(daemon) as sock:
        started = time.monotonic()
        answer: list[bytes] = []
        reader = threading.Thread(target=lambda: answer.append(read(sock)), daemon=True)
        reader.start()
        while reader.is_alive():
            assert time.monotonic() - started < 10
            try:
                sock.sendall(b"G")
            except OSError:
                break
            time.sleep(0.02)
        reader.join(10)
        assert 0.4 < time.monotonic() - started < 5
        assert answer[0].startswith(b"HTTP/1.1 408 ")


def test_a_client_that_drips_its_body_is_cut_off_as_well(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, deadline_s=0.3) as daemon:
        assert raw(daemon, b"POST /v1/reload HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")[0] == 408
        assert daemon.reloads == []


def test_a_client_that_never_reads_is_let_go(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, engine("qwen"), deadline_s=0.3) as daemon:
        daemon.node = daemon.node.__class__(spec=daemon.node.spec, version="v" * 4_000_000)
        with connect(daemon) as sock:
            sock.sendall(b"GET /v1/status HTTP/1.1\r\n\r\n")
            until(clients)
            until(lambda: not clients())
        assert daemon.errors == []


def test_who_does_not_come_to_the_end_of_a_request_keeps_nobody_out(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, engine("qwen"), deadline_s=20) as daemon, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(daemon)) for _ in range(CONNECTIONS_MAX)]
        for sock in slow:
            sock.sendall(b"GET /v1/status HTTP/1.1\r\nX: ")
        until(lambda: len(clients()) == CONNECTIONS_MAX)
        started = time.monotonic()
        for _ in range(5):
            assert client.get(daemon.socket, "/v1/status").document()["version"] == 1
        assert time.monotonic() - started < 5
        answer = read(slow[0])
        assert b" 503 " in answer, "the oldest first"
        assert b"too many connections" in answer
        slow[-1].sendall(b"x\r\n\r\n")
        assert b" 200 " in read(slow[-1]), "and no more than there is need for"
        assert daemon.errors == []


def test_the_seventeenth_of_those_that_wait_for_answers_is_turned_away_quickly(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, engine("qwen"), deadline_s=20) as daemon:
        waiting = [connect(daemon) for _ in range(CONNECTIONS_MAX)]
        for sock in waiting:
            sock.sendall(b"GET /v1/status?after=1&timeout=60 HTTP/1.1\r\n\r\n")
        until(lambda: daemon.waits >= CONNECTIONS_MAX)
        started = time.monotonic()
        for _ in range(34):
            status, _, body = raw(daemon, b"GET /v1/status HTTP/1.1\r\n\r\n")
            assert (status, json.loads(body)["error"]) == (503, "busy")
        assert time.monotonic() - started < 5
        assert len(clients()) == CONNECTIONS_MAX
        with pytest.raises(client.SlowError, match="too many connections"):
            client.get(daemon.socket, "/v1/status")
        for sock in waiting:
            threading.Timer(0.3, sock.close).start()
        until(lambda: len(clients()) < CONNECTIONS_MAX)
        assert client.get(daemon.socket, "/v1/status").document()["version"] == 1


def test_fifty_clients_at_once_are_all_served_in_the_end(daemon: FakeDaemon) -> None:
    served: list[int] = []

    def ask() -> None:
        served.append(client.get(daemon.socket, "/v1/status", 20).number("status-serial"))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert served == [1] * 50
    assert daemon.errors == []


# --- the socket -------------------------------------------------------------------------------------------------------


def server(path: Path) -> ControlServer:
    return ControlServer(str(path), FakeDaemon(path.parent), lambda *_: None)


def test_the_socket_is_for_its_owner_and_group_from_the_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        seen.append(stat.S_IMODE(self.stat().st_mode))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    path = tmp_path / "made" / "for it" / "c.sock"
    old = os.umask(0)
    try:
        running = server(path)
        running.start()
    finally:
        os.umask(old)
    assert seen == [0o660]
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert list(path.parent.iterdir()) == [path]
    running.close()
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to a group")
def test_the_socket_belongs_to_the_admin_group_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def getgrnam(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(gr_gid=4321)

    monkeypatch.setattr(grp, "getgrnam", getgrnam)
    running = server(tmp_path / "c.sock")
    running.start()
    assert (tmp_path / "c.sock").stat().st_gid == 4321
    assert asked == ["vllm-admin"]
    running.close()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with FakeDaemon(tmp_path) as daemon:
        assert client.get(daemon.socket, "/v1/status").document()["version"] == 1


def test_a_living_daemon_keeps_its_socket(daemon: FakeDaemon) -> None:
    with pytest.raises(ListenError, match="another instance answers there") as raised:
        server(Path(daemon.socket)).start()
    assert raised.value.busy
    assert client.get(daemon.socket, "/v1/status").document()["version"] == 1


def test_a_daemon_with_a_full_backlog_lives(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(path))
        full.listen(0)
        crowd = []
        for _ in range(4):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            sock.connect_ex(str(path))
            crowd.append(sock)
        with pytest.raises(ListenError, match="another instance") as raised:
            server(path).start()
        assert raised.value.busy
        for sock in crowd:
            sock.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "c.sock"
    match kind:
        case "file":
            path.write_text("mine")
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ListenError, match="not a socket is there; remove it"):
        server(path).start()
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_is_too_long_or_not_ours_is_said(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="longer than a socket's path may be"):
        server(tmp_path / ("x" * 108)).start()
    (tmp_path / "file").write_text("")
    with pytest.raises(ListenError, match=r"cannot listen on .*: File exists; see supervisor\.socket"):
        server(tmp_path / "file" / "c.sock").start()


def test_a_socket_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ListenError, match="No space left on device"):
        server(tmp_path / "c.sock").start()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_locks_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "_LOCK_S", 0.05)
    with listen._locked(tmp_path), pytest.raises(ListenError, match="holds a lock"):
        server(tmp_path / "c.sock").start()


def test_of_two_that_start_at_once_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    servers = [server(path) for _ in range(4)]
    outcomes: list[str] = []

    def start(one: ControlServer) -> None:
        try:
            one.start()
            outcomes.append("runs")
        except ListenError as error:
            outcomes.append("busy" if error.busy else str(error))

    threads = [threading.Thread(target=start, args=(one,), daemon=True) for one in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for one in servers:
        one.close()
    assert sorted(outcomes) == ["busy", "busy", "busy", "runs"]
    assert not path.exists()


def test_a_socket_that_somebody_else_made_meanwhile_is_left_to_them(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    first = server(path)
    first.start()
    path.unlink()
    second = server(path)
    second.start()
    first.close()
    assert path.exists()
    second.close()
    second.close()
    assert not path.exists()


def test_accepting_goes_on_when_descriptors_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisord.http_server._ACCEPT_AGAIN_S", 0.01)
    real = socket.socket.accept
    trouble = [OSError(errno.EMFILE, "Too many open files")] * 2

    def accept(sock: socket.socket) -> Any:
        if trouble:
            raise trouble.pop()
        return real(sock)

    with FakeDaemon(tmp_path) as daemon:
        monkeypatch.setattr(socket.socket, "accept", accept)
        for _ in range(3):
            assert raw(daemon, b"GET /v1/status HTTP/1.1\r\n\r\n")[0] == 200
        assert [what for what, _ in daemon.errors] == ["accepting control connections"] * 2


def test_accepting_goes_on_when_there_is_no_thread_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "control-client":
            raise RuntimeError("can't start new thread")
        real(thread)

    with FakeDaemon(tmp_path) as daemon:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            for _ in range(CONNECTIONS_MAX + 1):
                assert raw(daemon, b"GET /v1/status HTTP/1.1\r\n\r\n")[0] == 503
        assert raw(daemon, b"GET /v1/status HTTP/1.1\r\n\r\n")[0] == 200


# --- the client -------------------------------------------------------------------------------------------------------


def peer(path: Path, answer: bytes) -> threading.Thread:
    """A daemon that is none: it says `answer` to whoever comes, once."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.recv(65536)
            with contextlib.suppress(BrokenPipeError):
                sock.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"", client.UnreachableError, "closed the connection"),
        (b"hello", client.ControlError, "no HTTP response"),
        (b"HTTP/1.1 abc\r\n\r\n", client.ControlError, "no HTTP response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", client.ControlError, "not whole"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", client.ControlError, "not whole"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", client.ControlError, "not JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{", client.ControlError, "not JSON"),
        (b"HTTP/1.1 418 x\r\nContent-Length: 0\r\n\r\n", client.ControlError, "HTTP status 418"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * 9_000_000, client.ControlError, "not whole"),
    ],
)
def test_the_client_trusts_no_answer(tmp_path: Path, answer: bytes, error: type[Exception], message: str) -> None:
    path = tmp_path / "c.sock"
    thread = peer(path, answer)
    with pytest.raises(error, match=message):
        client.get(str(path), "/v1/status").document()
    thread.join(10)


def test_the_client_misses_a_number(tmp_path: Path) -> None:
    peer(tmp_path / "c.sock", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nN: x\r\n\r\n{}")
    reply = client.get(str(tmp_path / "c.sock"), "/")
    with pytest.raises(client.ControlError, match="no number in its header n"):
        reply.number("n")


def test_the_client_waits_so_long_and_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen(0)
        for _ in range(3):  # after the first two its backlog is full
            with pytest.raises(client.SlowError, match="did not come in time"):
                client.get(str(path), "/v1/status", 0.1)


def test_the_client_says_that_nobody_listens(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / "file" / "none", tmp_path / ("x" * 200)):
        with pytest.raises(client.UnreachableError, match="start it with: systemctl start vllm-supervisor"):
            client.get(str(path), "/v1/status")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "a\r\nX: y", "..", "a?b=c"])
def test_only_a_name_goes_into_a_path(name: str) -> None:
    with pytest.raises(client.RefusedError, match="cannot find an engine"):
        client.engine_target(name, "log")
    assert client.engine_target("Qwen-3_5", "log") == "/v1/engines/Qwen-3_5/log"


def test_a_number_of_thousands_of_digits_is_none() -> None:
    assert client.Reply({"log-offset": "7"}, b"").number("log-offset") == 7
    with pytest.raises(client.ControlError, match="no number in its header log-offset"):
        client.Reply({"log-offset": "7" * 5000}, b"").number("log-offset")
