"""The history over the control API: filters, pages, bounded waiting, and words for what cannot be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.control import client, routes
from supervisord.control.routes import NoHistoryError
from tests.adapters.fake_daemon import FakeDaemon, engine
from tests.adapters.test_control import call


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine("qwen")) as running:
        yield running


def ids(daemon: FakeDaemon, query: str) -> list[int]:
    status, found = call(daemon, "GET", f"/v1/events{query}")
    assert status == 200
    return [event["id"] for event in found["events"]]


def test_filters_and_pages(daemon: FakeDaemon) -> None:
    for n in range(150):
        daemon.tell(engine=("qwen", "gone", None)[n % 3])
    assert ids(daemon, "") == list(range(51, 151)), "the newest hundred"
    assert ids(daemon, "?limit=3") == [148, 149, 150]
    assert ids(daemon, "?limit=0") == list(range(51, 151))
    assert ids(daemon, "?after=0&limit=2") == [1, 2]
    assert ids(daemon, "?after=148") == [149, 150]
    assert ids(daemon, "?engine=gone&limit=2") == [146, 149]
    assert ids(daemon, "?since=1780023749.5") == [150]
    status, found = call(daemon, "GET", "/v1/events?after=10&limit=20")
    assert (status, found["last_id"], found["more"]) == (200, 30, True)
    assert daemon.errors == []


def test_the_number_of_events_is_bounded(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "EVENTS_MAX", 5)
    for _ in range(9):
        daemon.tell()
    assert len(ids(daemon, "?after=0&limit=999999")) == 5


def test_waiting_ends_with_an_event_of_this_engine(daemon: FakeDaemon) -> None:
    daemon.tell()
    threading.Timer(0.1, daemon.tell, kwargs={"engine": "llama"}).start()
    threading.Timer(0.3, daemon.tell).start()
    started = time.monotonic()
    found = client.get(daemon.socket, "/v1/events?engine=qwen&after=1&timeout=20", 30).document()
    assert [event["id"] for event in found["events"]] == [3]
    assert 0.25 < time.monotonic() - started < 15


def test_waiting_is_bounded(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.tell()
    found = client.get(daemon.socket, "/v1/events?after=1&timeout=0.1").document()
    assert found == {"events": [], "last_id": 1, "more": False}
    monkeypatch.setattr(routes, "LONG_POLL_MAX_S", 0.2)
    started = time.monotonic()
    client.get(daemon.socket, "/v1/events?after=1&timeout=9999")
    assert time.monotonic() - started < 9


@pytest.mark.parametrize(
    "query",
    [
        "?after=-1",
        "?after=x",
        "?limit=1.5",
        "?since=yesterday",
        "?since=nan",
        "?since=-5",
        "?since=1e9",
        "?timeout=inf",
        "?kind=exited",
        "?engine=qwen&engine=llama",
    ],
)
def test_a_query_that_makes_no_sense_is_refused(daemon: FakeDaemon, query: str) -> None:
    status, found = call(daemon, "GET", f"/v1/events{query}")
    assert (status, found["error"]) == (400, "malformed")


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("POST", "/v1/events", 405),
        ("POST", "/v1/engines/qwen/why", 405),
        ("GET", "/v1/events?engine=nobody", 404),
        ("GET", "/v1/events?engine=QWEN", 404),
        ("GET", "/v1/engines/nobody/why", 404),
        ("GET", "/v1/engines/QWEN/why", 404),
        ("GET", "/v1/engines/qwen/why?x=1", 400),
        ("GET", "/v1/events/1", 404),
    ],
)
def test_what_is_not_offered_is_said(daemon: FakeDaemon, method: str, target: str, status: int) -> None:
    found, document = call(daemon, method, target)
    assert found == status
    assert document["message"].startswith("cannot ")


@pytest.mark.parametrize("target", ["/v1/events", "/v1/engines/qwen/why"])
def test_a_history_that_cannot_be_read(daemon: FakeDaemon, target: str) -> None:
    daemon.no_history = NoHistoryError("cannot read the history: the disk is gone")
    status, found = call(daemon, "GET", target)
    assert (status, found) == (409, {"error": "refused", "message": "cannot read the history: the disk is gone"})
    daemon.no_history = TimeoutError()
    assert call(daemon, "GET", target)[0] == 504
    assert daemon.errors == []


def test_a_story(daemon: FakeDaemon) -> None:
    daemon.stories["qwen"] = {"engine": "qwen", "headline": "é \x1b", "rule": None, "outcome": "ready", "lines": []}
    assert call(daemon, "GET", "/v1/engines/qwen/why") == (200, daemon.stories["qwen"])
