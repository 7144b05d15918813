"""`logs`: the last lines, what follows, and never a byte that drives a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.cli import logs, main
from supervisord.control import client
from supervisord.control.routes import InJournal
from tests.adapters.fake_daemon import FakeDaemon, engine


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine("qwen")) as running:
        monkeypatch.setenv("VLLM_SUPERVISOR_SOCKET", running.socket)
        yield running


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], "1\n2\n3\n"),
        (["-n", "2"], "2\n3\n"),
        (["--lines=1"], "3\n"),
        (["-n", "0"], ""),
        (["-n", "99"], "1\n2\n3\n"),
    ],
)
def test_the_last_lines(daemon: FakeDaemon, options: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.logs["qwen"] = b"1\n2\n3\n"
    assert main(["logs", "qwen", *options]) == 0
    assert capsys.readouterr() == (shown, "")


def test_no_log_is_no_error(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "qwen"]) == 0
    assert capsys.readouterr() == ("", "")
    assert daemon.errors == []


def test_many_lines_are_fetched_in_parts(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{i} {'é' * 50}" for i in range(3000)]
    daemon.logs["qwen"] = "".join(f"{line}\n" for line in lines).encode()
    assert main(["logs", "qwen", "-n", "2500"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[500:]


def test_a_log_that_is_rotated_meanwhile_gives_what_is_there(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.logs["qwen"] = b"x\n" * 40_000
    real = client.get

    def get(socket: str, target: str) -> object:
        reply = real(socket, target)
        daemon.logs["qwen"] = b"new\n"
        return reply

    monkeypatch.setattr("supervisord.cli.logs.get", get)
    assert main(["logs", "qwen", "-n", "35000"]) == 0
    assert capsys.readouterr().out == "x\n" * 32_768


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\x1b[36m(EngineCore pid=7)\x1b[0;0m INFO\n", "(EngineCore pid=7) INFO\n"),
        (b"Loading:  0%\rLoading: 50%\rdone\r\n", "Loading:  0%\nLoading: 50%\ndone\n"),
        (b"no end", "no end\n"),
        (b"bad \xff\xfe utf-8\n", "bad \ufffd\ufffd utf-8\n"),
        (b"title \x1b]0;owned\x07 bell \x07 nul \x00\n", "title  bell   nul  \n"),
        (b"col\tumn\n", "col\tumn\n"),
    ],
)
def test_what_engines_write_is_cleaned(
    daemon: FakeDaemon, written: bytes, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.logs["qwen"] = written
    assert main(["logs", "qwen"]) == 0
    assert capsys.readouterr().out == shown


def test_a_line_that_never_ends_is_shown_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    out = logs.Lines()
    out.feed(b"x" * 70_000)
    assert capsys.readouterr().out == "x" * 70_000 + "\n"
    out.feed(b"\xc3")
    out.feed(b"\xa9\n")
    assert capsys.readouterr().out == "é\n"


def test_following_goes_on_until_interrupted(daemon: FakeDaemon) -> None:
    daemon.logs["qwen"] = b"one\ntwo\n"
    argv = [sys.executable, "-m", "supervisord", "logs", "qwen", "-f", "-n", "1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "two\n"
        daemon.logs["qwen"] = b"one\ntwo\nthree\nfo"
        assert process.stdout.readline() == "three\n"
        daemon.logs["qwen"] = b"one\ntwo\nthree\nfour\n"
        assert process.stdout.readline() == "four\n"
        daemon.logs["qwen"] = b"anew\n"
        assert process.stdout.readline() == "anew\n"
        process.send_signal(2)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize("name", ["nobody", "no such"])
def test_an_unknown_engine_is_5(daemon: FakeDaemon, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", name]) == 5
    assert capsys.readouterr().err.startswith("vllm-supervisor: cannot ")
    assert daemon.errors == []


@pytest.mark.parametrize("lines", ["-1", "x", "1.5", "99999999", "٣"])
def test_a_number_of_lines_that_is_none_is_64(lines: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "qwen", f"-n{lines}"]) == 64
    assert "is not a number of lines" in capsys.readouterr().err


def test_without_a_daemon_it_is_3(tmp_path: Path) -> None:
    assert main(["logs", "qwen", "--socket", str(tmp_path / "none")]) == 3


# --- journald ---------------------------------------------------------------------------------------------------------


def journalctl(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put another journalctl first on PATH."""
    program = folder / "journalctl"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1)])
def test_a_log_in_the_journal_is_read_from_there(
    daemon: FakeDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    expected: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon.logs["qwen"] = InJournal("vllm-qwen")
    journalctl(tmp_path, f'printf "%s\\n\\033[31mred\\033[0m" "$*"; exit {code}', monkeypatch)
    assert main(["logs", "qwen", "-n", "7"]) == expected
    assert (
        capsys.readouterr().out
        == "--no-pager --output=cat --identifier=vllm-qwen --lines=7 _SYSTEMD_SLICE=vllm.slice\nred\n"
    )


def test_following_the_journal_ends_both(daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.logs["qwen"] = InJournal("vllm-qwen")
    journalctl(tmp_path, 'echo "$$ $*"; exec sleep 600', monkeypatch)
    argv = [sys.executable, "-m", "supervisord", "logs", "qwen", "-f"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, *options = process.stdout.readline().split()
        assert options[-1] == "--follow"
        process.send_signal(2)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130
    assert not Path(f"/proc/{pid}").exists()


def test_a_journal_that_others_may_read_is_not_shown_as_an_empty_log(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.logs["qwen"] = InJournal("vllm-qwen")
    journalctl(tmp_path, "echo shown", monkeypatch)
    files = [tmp_path / place / "id" / "system.journal" for place in ("var", "run")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(logs, "JOURNALS", tuple(str(file.parents[1]) for file in files))
    readable = {files[1]}
    monkeypatch.setattr(os, "access", lambda path, _: path in readable)
    assert main(["logs", "qwen"]) == 0
    readable.clear()
    assert main(["logs", "qwen"]) == 4
    told = capsys.readouterr()
    assert told.out == "shown\n"
    assert "cannot show the log of vllm-qwen: only root and members of the groups systemd-journal" in told.err


def test_a_machine_without_journalctl(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.logs["qwen"] = InJournal("vllm-qwen")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["logs", "qwen"]) == 1
    assert "cannot run journalctl, which has the log of vllm-qwen: No such file" in capsys.readouterr().err
