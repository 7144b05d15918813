"""What the daemon counts of itself."""

from __future__ import annotations

import io
from pathlib import Path
from queue import SimpleQueue

import pytest

from supervisord.core.messages import Due, Record, What
from supervisord.core.model import Node
from supervisord.core.spec import NodeSpec
from supervisord.figures import Figures
from supervisord.history import History
from supervisord.log import Journal
from supervisord.loop import Inbox, Loop
from supervisord.voice import Voice
from supervisord.webhook.notifier import Webhooks
from tests.loop.test_loop import Recorder


def hear(figures: Figures, *records: tuple[str, str | None]) -> None:
    for kind, reason in records:
        figures.heard(Record(kind, "", engine="a", reason=reason))


def test_durations_are_cumulative_by_bound() -> None:
    figures = Figures()
    for seconds in (0.0, 0.0001, 0.0002, 0.05, 7.0):
        figures.turned(seconds)
    seen = figures.turns()
    assert seen.bounds_s == (0.0001, 0.001, 0.01, 0.1, 1.0, float("inf"))
    assert seen.counts == (2, 3, 3, 4, 4, 5)
    assert seen.sum_s == pytest.approx(7.0503)


def test_a_restart_has_the_reason_for_which_the_last_process_ended() -> None:
    figures = Figures()
    hear(figures, ("spawned", None))
    assert figures.restarts() == {}, "a first start is none"
    hear(figures, ("exited", "exited"), ("restart", "exited"), ("spawned", None))
    hear(figures, ("verdict", "stalled"), ("killing", "stalled"), ("spawned", None))
    hear(figures, ("stopping", "operator"), ("killing", None), ("stopped", "operator"), ("spawned", None))
    hear(figures, ("exited", "exited"), ("spawned", None), ("spawned", None))
    assert figures.restarts() == {"a": {"exited": 2, "stalled": 1, "operator": 1}}


def test_an_engine_that_is_gone_is_forgotten() -> None:
    figures = Figures()
    figures.looked("a", 0.1)
    figures.heard(Record("trouble", "of nobody"))
    hear(figures, ("exited", "exited"), ("spawned", None), ("stopping", "reload"))
    assert figures.looks()["a"].counts[-1] == 1
    hear(figures, ("removed", None))
    assert (figures.looks(), figures.restarts()) == ({}, {})


def test_the_loop_tells_how_long_a_turn_took() -> None:
    took: list[float] = []
    times = iter((10.0, 10.25))
    inbox: Inbox = SimpleQueue()
    loop = Loop(Node(spec=NodeSpec()), inbox, Recorder(), clock=lambda: next(times), timed=took.append)
    loop.turn(Due(What.WATCHDOG))
    assert took == [0.25]


def test_losses_are_counted_by_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path, lambda _: None)
    voice = Voice(Journal(io.StringIO()), history, Webhooks())
    assert voice.lost() == {"log_line": 0, "event": 0, "observation": 0}
    monkeypatch.setattr("supervisord.history.QUEUE_MAX", 0)
    voice.write(Record("ready", "a is ready", engine="a"))
    assert voice.lost() == {"log_line": 0, "event": 1, "observation": 0}
    voice.close()
    assert voice.lost()["event"] == 1, "also after it was told"
