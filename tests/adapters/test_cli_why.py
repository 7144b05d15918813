"""`why`: what people read at three in the morning, as golden files; and its exit codes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from supervisord.cli import main, render, why
from supervisord.control.routes import NoHistoryError
from supervisord.core import story
from tests.adapters.fake_daemon import FakeDaemon, engine, stamp
from tests.core.tales import QWEN, TALES, WALL0

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine(QWEN)) as running:
        monkeypatch.setenv("VLLM_SUPERVISOR_SOCKET", running.socket)
        yield running


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def document(name: str) -> dict[str, Any]:
    return story.document(TALES[name]().story(), stamp)


@pytest.mark.parametrize("name", TALES)
def test_the_story_is_as_it_was_agreed(name: str) -> None:
    """To change it on purpose: remove the file, run this, read what was written."""
    tale = TALES[name]()
    text = why.story(story.document(tale.story(), stamp), width=110, colour=False, now=tale.wall)
    path = GOLDEN / f"why-{name}.txt"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert all(len(line) <= 120 for line in text.splitlines())
    assert len(text.splitlines()) <= 16


def test_times_of_another_day_carry_their_date() -> None:
    found = document("exit-zero")
    assert "SEEN  05:14:21  qwen ended" in why.story(found, width=100, colour=False, now=WALL0)
    tomorrow = why.story(found, width=100, colour=False, now=WALL0 + 86_400)
    assert "SEEN  2026-05-29 05:14:21  qwen ended" in tomorrow


def test_times_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    assert "SEEN  07:14:21  qwen ended" in why.story(document("exit-zero"), width=100, colour=False, now=WALL0)


def test_narrow_terminals_and_colours() -> None:
    found = document("bad-configuration")
    narrow = why.story(found, width=30, colour=False, now=WALL0)
    assert all(len(line) <= 60 for line in narrow.splitlines()[1:])
    painted = why.story(found, width=100, colour=True, now=WALL0)
    assert painted.startswith("\x1b[31m5m0s ago: qwen ended by itself")
    assert "\x1b[1mSEEN\x1b[0m" in painted
    plain = "".join(f"{render.clean(line).rstrip()}\n" for line in painted.splitlines())
    assert plain == why.story(found, width=100, colour=False, now=WALL0)


def test_what_engines_wrote_cannot_drive_the_terminal() -> None:
    found = document("uneventful")
    found["headline"] = "a\x1b[2Jb"
    found["lines"][0]["text"] = "c\x1b]0;owned\x07d\ne"
    text = why.story(found, width=100, colour=False, now=WALL0)
    assert text.splitlines()[0] == "ab"
    assert "cd e" in text
    assert "\x1b" not in text


def test_the_command(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.stories[QWEN] = document("killed")
    assert main(["why", QWEN]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "7.0 s ago: qwen ended by itself (SIGKILL, crash); it is starting"
    assert err == ""
    assert main(["why", QWEN, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == daemon.stories[QWEN]
    assert list(found) == ["engine", "headline", "rule", "outcome", "lines"]
    assert list(found["lines"][0]) == ["section", "at", "text"]
    at = datetime.fromisoformat(found["lines"][0]["at"].replace("Z", "+00:00"))
    assert at.tzinfo == timezone.utc
    assert daemon.errors == []


def test_exit_codes(daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> str:
        return capsys.readouterr().err

    assert main(["why", "nobody"]) == 5
    assert told() == "vllm-supervisor: cannot tell about nobody: no such engine, and none in the history\n"
    assert main(["why", "no/body"]) == 5
    assert "cannot find an engine 'no/body'" in told()
    assert main(["why"]) == 64
    told()
    daemon.no_history = NoHistoryError("cannot read the history: the disk is gone")
    assert main(["why", QWEN]) == 5
    assert told() == "vllm-supervisor: cannot read the history: the disk is gone\n"
    daemon.no_history = TimeoutError()
    assert main(["why", QWEN]) == 6
    assert told().startswith("vllm-supervisor: cannot read the history in time")
    assert main(["why", QWEN, "--socket", str(tmp_path / "none")]) == 3
    told()
    assert daemon.errors == []
