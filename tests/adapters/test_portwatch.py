"""Waiting for an engine to answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from supervisord.engine.portwatch import Ownership, watch
from tests.adapters.fake_http import DEADLINE_S, FakeServer, Request, answer, unused_port, wait_for
from tests.sim.engine import running


@dataclass(frozen=True)
class Owner:
    ours: bool = False
    holder: str | None = None


OURS = Owner(ours=True)
NOBODY = Owner()


@dataclass
class Watching:
    """`watch` in a thread, and what it reported."""

    port: int
    owner: Callable[[], Ownership] = lambda: OURS
    host: str = "127.0.0.1"
    deadline_s: float = 60.0
    cancelled: threading.Event = field(default_factory=threading.Event)
    answers: list[float] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        watch(
            self.host,
            self.port,
            self.owner,
            self.cancelled,
            self.deadline_s,
            lambda: self.answers.append(time.monotonic()),
            self.foreign.append,
        )

    def ends(self) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


def test_answer_is_reported_once() -> None:
    with FakeServer(lambda _: answer(200)) as server:
        watching = Watching(server.port)
        watching.ends()
    assert len(watching.answers) == 1
    assert watching.foreign == []
    assert [request.path for request in server.requests] == ["/health"]


def test_answer_is_noticed_within_100_ms() -> None:
    """The best of five tries: a loaded machine may delay both sides."""
    delays = []
    for _ in range(5):
        port = unused_port()
        watching = Watching(port)
        time.sleep(0.12)
        assert watching.answers == []
        with FakeServer(lambda _: answer(200), port=port):
            listening_at = time.monotonic()
            watching.ends()
        delays.append(watching.answers[0] - listening_at)
    assert min(delays) < 0.1


def test_waits_through_refused_503_and_broken_answers() -> None:
    replies = iter([answer(503), None, b"SSH-2.0-x\r\n\r\n", answer(404), answer(200)])
    port = unused_port()
    watching = Watching(port)
    with FakeServer(lambda _: next(replies), port=port) as server:
        watching.ends()
    assert len(watching.answers) == 1
    assert len(server.requests) == 5


def test_slow_health_is_not_cut() -> None:
    with FakeServer(lambda _: answer(200) if not server.over.wait(1.5) else None) as server:
        watching = Watching(server.port)
        watching.ends()
    assert len(watching.answers) == 1
    assert len(server.requests) == 1


def test_foreign_listener() -> None:
    with FakeServer(lambda _: answer(200)) as server:
        watching = Watching(server.port, lambda: Owner(ours=True, holder="pid 7 (nginx)"))
        watching.ends()
    assert (watching.answers, watching.foreign) == ([], ["pid 7 (nginx)"])


def test_goes_on_while_nobody_is_found() -> None:
    owners = iter([NOBODY, OURS])
    with FakeServer(lambda _: answer(200)) as server:
        watching = Watching(server.port, lambda: next(owners))
        watching.ends()
    assert len(watching.answers) == 1
    assert len(server.requests) == 2


def test_owner_is_not_asked_before_there_is_an_answer() -> None:
    def owner() -> Ownership:
        asked.append(1)
        return OURS

    asked: list[int] = []
    watching = Watching(unused_port(), owner, deadline_s=0.3)
    watching.ends()
    assert (asked, watching.answers, watching.foreign) == ([], [], [])


def test_cancel_while_refused_and_while_a_request_hangs() -> None:
    def hang(request: Request) -> bytes | None:
        server.hang()
        return None

    with FakeServer(hang) as server:
        for port in (unused_port(), server.port):
            watching = Watching(port)
            if port == server.port:
                wait_for(lambda: server.requests)
            started = time.monotonic()
            watching.cancelled.set()
            watching.ends()
            assert time.monotonic() - started < 20
            assert (watching.answers, watching.foreign) == ([], [])


def test_cancel_while_the_owner_is_looked_for_reports_nothing() -> None:
    def owner() -> Ownership:
        watching.cancelled.set()
        return OURS

    port = unused_port()
    watching = Watching(port, owner)
    with FakeServer(lambda _: answer(200), port=port):
        watching.ends()
    assert watching.answers == []


def test_gives_up_at_the_deadline() -> None:
    started = time.monotonic()
    watching = Watching(unused_port(), deadline_s=0.4)
    watching.ends()
    assert 0.35 < time.monotonic() - started < 20
    assert watching.answers == []


def test_engine_that_listens_everywhere_and_on_ipv6() -> None:
    with FakeServer(lambda _: answer(200)) as server:
        watching = Watching(server.port, host="0.0.0.0")
        watching.ends()
        assert len(watching.answers) == 1
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(FakeServer(lambda _: answer(200), family=socket.AF_INET6, host="::1"))
        watching = Watching(server.port, host="::")
        watching.ends()
        assert len(watching.answers) == 1


def test_costs_little_while_refused() -> None:
    """0.3 to 0.5 % of a core, of which 0.15 is waking up 20 times a second; bound widely, the machine may be loaded."""
    cancelled = threading.Event()
    threading.Timer(1.5, cancelled.set).start()
    started_cpu, started = time.thread_time(), time.monotonic()
    watch("127.0.0.1", unused_port(), lambda: OURS, cancelled, 60, lambda: None, lambda _: None)
    assert (time.thread_time() - started_cpu) / (time.monotonic() - started) < 0.03


def test_simulated_engine_that_binds_early_and_listens_late(tmp_path: Path) -> None:
    with running(tmp_path, mood={"ready_delay_s": 0.6, "health_delay_s": 0.3}) as sim:
        watching = Watching(sim.port)
        time.sleep(0.3)
        assert watching.answers == []
        watching.ends()
        assert len(watching.answers) == 1
