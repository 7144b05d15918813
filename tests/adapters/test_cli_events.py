"""`events`: the newest, those since a time, those of an engine, those to come; for people and for programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from supervisord.cli import events, main
from supervisord.control.routes import NoHistoryError
from tests.adapters.fake_daemon import FakeDaemon, engine

STAMP = "2026-05-29T03:00:01.000Z"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine("qwen")) as running:
        monkeypatch.setenv("VLLM_SUPERVISOR_SOCKET", running.socket)
        yield running


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_lines_for_people(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.tell("exited", "qwen ended by itself while ready: exit code 0", severity="error")
    daemon.tell("spawned", "qwen \x1b[31mstarted\x1b[0m: generation 2\n", severity="info")
    assert main(["events"]) == 0
    assert capsys.readouterr() == (
        (
            f"2026-05-29 03:00:01  error     {'exited':26}  qwen ended by itself while ready: exit code 0\n"
            f"2026-05-29 03:00:02  info      {'spawned':26}  qwen started: generation 2 \n"
        ),
        "",
    )
    assert daemon.errors == []


EVENT = {"at": STAMP, "severity": "error", "kind": "exited", "message": "x \x1b[32mgreen\x1b[0m " + "words " * 20}


@pytest.mark.parametrize(("width", "kind"), [(80, ""), (119, ""), (120, f"{'exited':26}  ")])
def test_on_a_terminal_sentences_keep_to_their_column(
    width: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = events.OnTerminal(width, colour=False)
    shown.show(EVENT)
    shown.show({**EVENT, "message": "short"})
    shown.show({**EVENT, "at": "2026-05-30T00:00:01.000Z", "message": "a day later"})
    day, first, *rest, short, next_day, last = capsys.readouterr().out.splitlines()
    head = f"03:00:01  error     {kind}"
    assert (day, next_day) == ("2026-05-29", "2026-05-30")
    assert first.startswith(f"{head}x green words")
    assert rest
    assert all(line.startswith(" " * len(head) + "words") and len(line) <= width for line in rest)
    assert (short, last) == (f"{head}short", f"00:00:01  error     {kind}a day later")


def test_colour_only_on_a_terminal_that_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    events.OnTerminal(200, colour=True).show({**EVENT, "message": "red"})
    assert capsys.readouterr().out.splitlines()[1] == f"\x1b[31m03:00:01  error     {'exited':26}  red\x1b[0m"
    events.OnTerminal(200, colour=True).show({**EVENT, "severity": "info", "message": "plain"})
    assert "\x1b" not in capsys.readouterr().out.splitlines()[1]
    assert "\x1b" not in events.line(EVENT)


def test_every_kind_fits_into_its_column() -> None:
    source = Path(events.__file__).parents[1]
    told = re.compile(r"(?:record|tell)\(\s*\"([a-z_]+)\"")
    kinds = {kind for file in source.rglob("*.py") for kind in told.findall(file.read_text(encoding="utf-8"))}
    assert len(kinds) > 30
    assert max(map(len, kinds)) <= events._KIND_WIDTH


def test_objects_for_programs(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.tell("restart", "again", reason="exited", numbers={"delay_s": 1.5})
    daemon.tell("daemon_started", "\x1b runs", engine=None, generation=None)
    assert main(["events", "--json"]) == 0
    out = capsys.readouterr().out
    first, second = map(json.loads, out.splitlines())
    keys = ["id", "at", "severity", "kind", "engine", "generation", "reason", "message", "numbers"]
    assert sorted(first) == sorted(second) == sorted(keys)
    assert (first["at"], first["numbers"], second["engine"]) == (STAMP, {"delay_s": 1.5}, None)
    assert "\x1b" not in out


def test_without_since_the_newest_ones(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(150):
        daemon.tell(message=str(n))
    assert main(["events"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [str(n) for n in range(50, 150)]


def test_with_since_all_of_them_page_by_page(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(events, "_PAGE", 7)
    for n in range(40):
        daemon.tell(message=str(n))
    assert main(["events", "--since", "2026-05-29T03:00:11Z"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [str(n) for n in range(10, 40)]
    assert main(["events", "--since", "2026-05-30"]) == 0
    assert capsys.readouterr() == ("", "")


def test_of_one_engine(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(4):
        daemon.tell(message=str(n), engine=("qwen", "gone")[n % 2])
    assert main(["events", "--engine", "qwen"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["0", "2"]
    assert main(["events", "--engine", "gone"]) == 0, "not configured any more, but in the history"
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["1", "3"]


@pytest.mark.parametrize("options", [[], ["--json"], ["--engine", "qwen"]])
def test_following_goes_on_until_interrupted(daemon: FakeDaemon, options: list[str]) -> None:
    daemon.tell(message="one")
    argv = [sys.executable, "-m", "supervisord", "events", "-f", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "one" in process.stdout.readline()
        daemon.tell(message="of another", engine="llama")
        daemon.tell(message="two")
        if not {"--engine"} & set(options):
            assert "of another" in process.stdout.readline()
        assert "two" in process.stdout.readline()
        process.send_signal(2)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604_800), ("1w", 604_800), ("1d12h", 129_600), ("1.5h", 5400)],
)
def test_since_so_long_ago(text: str, ago_s: float) -> None:
    assert abs(events._since(text) - (time.time() - ago_s)) < 5


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-05-29T03:00:01Z", "2026-05-29T03:00:01+00:00"),
        ("2026-05-29T03:00:01+02:00", "2026-05-29T01:00:01+00:00"),
        ("2026-05-29T03:00:01", "2026-05-29T03:00:01+00:00"),
        ("2026-05-29 03:00:01", "2026-05-29T03:00:01+00:00"),
        ("2026-05-29", "2026-05-29T00:00:00+00:00"),
        ("1960-01-01", "1970-01-01T00:00:00+00:00"),
        ("999999999w", "1970-01-01T00:00:00+00:00"),
    ],
)
def test_since_a_time(text: str, at: str) -> None:
    assert events._since(text) == datetime.fromisoformat(at).timestamp()


@pytest.mark.parametrize(
    "text", ["", "2", "h", "2 h", "-2h", "1e3s", "yesterday", "2026-13-01", "99999-01-01", "2h3", "٣h"]
)
def test_since_what_is_no_time_is_64(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", f"--since={text}"]) == 64
    assert "is no time: write 2h, 30m, 7d, " in capsys.readouterr().err


def test_exit_codes(daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> str:
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert main(["events"]) == 0, "an empty history is no error"
    assert told() == ""
    assert main(["events", "--engine", "nobody"]) == 5
    assert told() == "vllm-supervisor: cannot show the events of nobody: no such engine, and none in the history\n"
    assert main(["events", "--engine", "a&limit=1"]) == 5
    assert "cannot find an engine 'a&limit=1'" in told()
    daemon.no_history = NoHistoryError("cannot read the history: the disk is gone")
    assert main(["events"]) == 5
    assert told() == "vllm-supervisor: cannot read the history: the disk is gone\n"
    daemon.no_history = TimeoutError()
    assert main(["events"]) == 6
    assert told().startswith("vllm-supervisor: cannot read the history in time")
    assert main(["events", "--socket", str(tmp_path / "none")]) == 3
    told()
    assert daemon.errors == []
