"""What is kept before a kill: all of it where it can be read, bounded in time and size, and never in the way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from supervisord.launcher import bounded, evidence


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sleep", "100"])
    yield process
    process.kill()
    process.wait(10)


def program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `py-spy` first on PATH."""
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_file_with_heading_last_lines_and_processes(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, 'echo "stack of $4 ($1 $2)"', monkeypatch)
    path = tmp_path / "evidence" / "a.3.stalled.txt"
    evidence.collect(
        path, "engine a, generation 3, killed for: stalled", [sleeper.pid, 2**22 + 1], ["line 1", "line 2"]
    )
    text = path.read_text(encoding="utf-8")
    assert text.startswith(
        "engine a, generation 3, killed for: stalled\n\n== last lines of its output\nline 1\nline 2\n"
    )
    assert f"-- /proc/{sleeper.pid}/status\nName:\tsleep" in text
    assert f"-- Python stacks (py-spy)\nstack of {sleeper.pid} (dump --nonblocking)" in text
    assert str(2**22 + 1) not in text, "a process that is gone has nothing to tell"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_without_py_spy_the_rest_is_kept(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    evidence.collect(tmp_path / "e" / "a.txt", "x", [sleeper.pid], [])
    text = (tmp_path / "e" / "a.txt").read_text(encoding="utf-8")
    assert "status" in text
    assert "py-spy" not in text


def test_stacks_are_bounded_in_all(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(evidence, "STACK_S", 0.2)
    monkeypatch.setattr(evidence, "STACKS_S", 0.5)
    began = time.monotonic()
    evidence.collect(tmp_path / "e" / "a.txt", "x", [sleeper.pid] * 50, [])
    assert 0.5 <= time.monotonic() - began < 5
    assert (tmp_path / "e" / "a.txt").read_text(encoding="utf-8").count("/status") == 50
    assert evidence.STACKS_S < 30


def test_a_py_spy_that_cannot_run_or_says_too_much_does_no_harm(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "py-spy").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    evidence.collect(tmp_path / "e" / "a.txt", "x", [sleeper.pid], [])
    assert "py-spy" not in (tmp_path / "e" / "a.txt").read_text(encoding="utf-8")
    program(tmp_path, "head -c 10000000 /dev/zero | tr '\\0' 'x'", monkeypatch)
    evidence.collect(tmp_path / "e" / "b.txt", "x", [sleeper.pid], ["\udcff broken"])
    assert (tmp_path / "e" / "b.txt").stat().st_size < 200_000


def test_the_newest_twenty_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    folder.mkdir()
    for number in range(25):
        path = folder / f"a.{number}.stalled.txt"
        path.write_text("x", encoding="utf-8")
        os.utime(path, (number, number))
    (folder / "other").write_text("x", encoding="utf-8")
    evidence.collect(folder / "a.99.stalled.txt", "x", [], [])
    kept = {path.name for path in folder.iterdir()}
    assert kept == {f"a.{number}.stalled.txt" for number in range(6, 25)} | {"a.99.stalled.txt", "other"}


def test_where_nothing_can_be_written_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("in the way", encoding="utf-8")
    with pytest.raises(OSError, match="e"):
        evidence.collect(tmp_path / "e" / "a.txt", "x", [], [])


class Immortal:
    """A process that hangs in the kernel: neither a signal nor waiting ends it."""

    started: ClassVar[list[Immortal]] = []

    def __init__(self, command: tuple[str, ...], **pipes: Any) -> None:
        self.command = command
        self.pipes = pipes
        self.killed = False
        self.started.append(self)

    def wait(self, timeout: float) -> int:
        time.sleep(timeout)
        raise subprocess.TimeoutExpired(self.command, timeout)

    def kill(self) -> None:
        self.killed = True


def test_a_py_spy_that_survives_its_kill_is_left_to_itself(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "never run", monkeypatch)
    monkeypatch.setattr(evidence, "STACK_S", 0.2)
    monkeypatch.setattr(bounded, "DEATH_S", 0.2)
    monkeypatch.setattr(subprocess, "Popen", Immortal)
    began = time.monotonic()
    evidence.collect(tmp_path / "e" / "a.txt", "x", [sleeper.pid], ["last line"])
    assert time.monotonic() - began < 5
    (immortal,) = Immortal.started
    assert immortal.killed
    assert subprocess.PIPE not in immortal.pipes.values()
    assert immortal.pipes["stdout"].closed
    text = (tmp_path / "e" / "a.txt").read_text(encoding="utf-8")
    assert "last line" in text
    assert "py-spy" not in text


def test_whoever_inherited_the_output_of_py_spy_holds_up_nothing(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, f"sleep 30 & echo $! >{tmp_path}/child; echo stack", monkeypatch)
    began = time.monotonic()
    try:
        evidence.collect(tmp_path / "e" / "a.txt", "x", [sleeper.pid], [])
        assert time.monotonic() - began < 5
        assert "\nstack\n" in (tmp_path / "e" / "a.txt").read_text(encoding="utf-8")
    finally:
        os.kill(int((tmp_path / "child").read_text(encoding="utf-8")), signal.SIGKILL)
