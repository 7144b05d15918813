"""The control API about GPUs: what is asked of the daemon, and what is refused before it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.control import client
from supervisord.control.client import ControlError, RefusedError, SlowError
from supervisord.core.messages import Answer, GpuOp
from tests.adapters.fake_daemon import FakeDaemon
from tests.adapters.test_control import call

ME = f"uid {os.getuid()} pid {os.getpid()}"
UUID = "GPU-5135c0de-0000-4000-8000-000000000000"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as running:
        yield running
        assert running.errors == []


def clear(daemon: FakeDaemon, body: object) -> tuple[int, dict[str, Any]]:
    return call(daemon, "POST", "/v1/gpus/clear", json.dumps(body).encode())


@pytest.mark.parametrize("name", [UUID, "0000:1b:00.0", "1b:00", "0", "127", "GPU-zz11"])
def test_clear_reaches_the_daemon_with_its_actor(daemon: FakeDaemon, name: str) -> None:
    daemon.answer = (Answer.ACCEPTED, "GPU 0 is trusted again")
    assert clear(daemon, {"gpu": name}) == (202, {"answer": "accepted", "message": "GPU 0 is trusted again"})
    assert daemon.gpu_requests == [(GpuOp.CLEAR, name, ME)]


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_release_reaches_the_daemon_with_its_actor(daemon: FakeDaemon, body: bytes) -> None:
    assert call(daemon, "POST", "/v1/gpus/release", body) == (202, {"answer": "accepted", "message": "accepted"})
    assert daemon.gpu_requests == [(GpuOp.RELEASE, None, ME)]


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ((Answer.REFUSED, "cannot clear GPUs: no driver"), 409, "refused"),
        ((Answer.UNKNOWN_ENGINE, "cannot clear GPU 7: it is not known"), 404, "unknown_gpu"),
    ],
)
def test_a_no_is_said(daemon: FakeDaemon, answer: tuple[Answer, str], status: int, code: str) -> None:
    daemon.answer = answer
    assert clear(daemon, {"gpu": "7"}) == (status, {"error": code, "message": answer[1]})
    with pytest.raises(RefusedError, match=answer[1]):
        client.post(daemon.socket, "/v1/gpus/clear", {"gpu": "7"})


def test_a_loop_that_does_not_answer_is_a_timeout(daemon: FakeDaemon) -> None:
    daemon.answer = TimeoutError()
    status, document = clear(daemon, {"gpu": "7"})
    assert (status, document["error"]) == (504, "timeout")
    assert document["message"].startswith("cannot say whether clear of GPU 7 was accepted")
    with pytest.raises(SlowError, match="release of GPUs"):
        client.post(daemon.socket, "/v1/gpus/release")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "GPU-" + "a" * 61,
        "GPU 0",
        "0/1",
        "0\n",
        "٣",
        "0000:1b:00.0 ",
    ],
)
def test_what_cannot_be_a_name_reaches_nobody(daemon: FakeDaemon, name: str) -> None:
    status, document = clear(daemon, {"gpu": name})
    assert (status, document["error"]) == (404, "unknown_gpu")
    assert daemon.gpu_requests == []


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"x", b'{"gpu": 0}', b'{"gpu": null}', b'{"gpu": "0", "now": true}', b'{"GPU": "0"}']
)
def test_a_malformed_body_is_refused(daemon: FakeDaemon, body: bytes) -> None:
    status, document = call(daemon, "POST", "/v1/gpus/clear", body)
    assert (status, document["error"]) == (400, "malformed")
    assert daemon.gpu_requests == []


def test_release_takes_no_arguments(daemon: FakeDaemon) -> None:
    assert call(daemon, "POST", "/v1/gpus/release", b'{"gpu": "0"}')[0] == 400
    assert call(daemon, "POST", "/v1/gpus/release?gpu=0")[0] == 400
    assert daemon.gpu_requests == []


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/v1/gpus/clear", 405),
        ("POST", "/v1/gpus/reset", 405),
        ("DELETE", "/v1/gpus/release", 405),
        ("GET", "/v1/gpus", 404),
        ("POST", "/v1/gpus/0/clear", 404),
    ],
)
def test_other_paths_and_methods(daemon: FakeDaemon, method: str, target: str, status: int) -> None:
    assert call(daemon, method, target)[0] == status
    assert daemon.gpu_requests == []


def test_a_bug_behind_the_route_is_no_answer_of_the_daemon(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        daemon.answer = RuntimeError("a bug")
        with pytest.raises(ControlError, match="internal"):
            client.post(daemon.socket, "/v1/gpus/release")
        assert len(daemon.errors) == 1
