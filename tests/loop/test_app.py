"""The composition root: what a reload sets in motion besides the core."""

from __future__ import annotations

import io
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord import app
from supervisord.applied import Chosen
from supervisord.config import load
from supervisord.core.messages import Booted, Due, Observation, Op, Reconfigured, Requested, WindowOpened
from supervisord.core.model import Node
from supervisord.engine.profiles import Profiles
from supervisord.history import History
from supervisord.log import Journal
from supervisord.voice import Voice
from supervisord.webhook.notifier import Webhooks

CONFIG = """
[supervisor]
state_dir = "{state}"
socket = "{state}/s"
launcher = "plain"
poll_interval_s = {interval}

{engines}
"""
ENGINE = """
[engine.new]
command = ["/bin/true"]
model = "some/model"
port = 8001
restart.maintenance_window = "* * * * * 1h"
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: engines' sockets below it have 106 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="vs.", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def history(home: Path) -> History:
    return History(home, lambda _: None)


@pytest.fixture
def voice(history: History) -> Iterator[Voice]:
    made = Voice(Journal(io.StringIO()), history, Webhooks())
    yield made
    made.close()


def test_a_reload_that_the_loop_answers_late_is_applied_whole(
    home: Path, history: History, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "ANSWER_S", 0.05)
    path = home / "config.toml"
    path.write_text(CONFIG.format(state=home, interval=300, engines=""), encoding="utf-8")
    path.chmod(0o600)
    spec = load(path, trust=False).spec
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    daemon = app.Daemon(path, Chosen(spec, Profiles(())), voice, history)
    daemon._schedule.start()
    try:
        path.write_text(CONFIG.format(state=home, interval=150, engines=ENGINE), encoding="utf-8")
        with pytest.raises(TimeoutError):
            daemon.reload("a test")
        assert daemon._schedule._interval_s == 150
        seen: list[Observation] = []
        while not any(isinstance(one, WindowOpened) for one in seen):
            seen.append(daemon._inbox.get(timeout=10))
        # A window is told after the engine, which is new.
        assert [type(one) for one in seen if not isinstance(one, Due)] == [Reconfigured, WindowOpened]
    finally:
        daemon._close()


def test_what_an_earlier_daemon_left_is_known_before_anybody_is_heard(
    home: Path, history: History, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would start a twin, a SIGTERM would leave everything behind, and a status would call it stopped."""
    path = home / "config.toml"
    path.write_text(CONFIG.format(state=home, interval=300, engines=ENGINE), encoding="utf-8")
    path.chmod(0o600)
    daemon = app.Daemon(path, Chosen(load(path, trust=False).spec, Profiles(())), voice, history)
    begun: list[Observation] = []
    wait, states = daemon._board.wait, list[str]()

    def heard() -> None:
        daemon._inbox.put(Requested(1, Op.START, "new", "uid 1000"))

    def first_turn(after: int, timeout_s: float) -> tuple[int, Node]:
        daemon._loop.turn(begun[0])
        return wait(after, timeout_s)

    def run() -> None:
        begun.extend(daemon._inbox.get() for _ in range(daemon._inbox.qsize()))
        monkeypatch.setattr(daemon._board, "wait", first_turn)
        states.append(daemon.status()[1]["engines"][0]["state"])

    monkeypatch.setattr(daemon._control, "start", heard)
    monkeypatch.setattr(daemon._loop, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert daemon.run() == 0
    assert [type(one) for one in begun[:2]] == [Booted, Requested]
    assert states == ["starting"], "not what it was before the first turn"
