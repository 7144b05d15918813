"""What engines wrote, asked of a stand-in for journalctl; with a real journald see tests/e2e_systemd."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from supervisord.launcher import bounded, output
from supervisord.launcher.bounded import BoundedError
from supervisord.launcher.output import Output

INVOCATION = "0123456789abcdef" * 2


class Journal:
    """A `journalctl` first on PATH whose script can be changed."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "journalctl"
        self.troubles: list[str] = []
        self.output = Output(self.troubles.append)

    def does(self, script: str) -> None:
        self._program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        self._program.chmod(0o755)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Journal(tmp_path)


def test_only_the_lines_of_this_run_of_the_unit_are_asked_for(journal: Journal) -> None:
    journal.does('echo "$@"')
    asked = f"--no-pager --quiet --output=cat --lines=200 _SYSTEMD_INVOCATION_ID={INVOCATION} _TRANSPORT=stdout\n"
    assert journal.output.read(INVOCATION) == asked.encode()
    assert journal.output.read("") == b"", "a match without a value is no match"
    assert journal.troubles == []


def test_a_journal_that_cannot_be_read_is_told_once_until_it_can(journal: Journal) -> None:
    journal.does("exit 1")
    for _ in range(3):
        assert journal.output.read(INVOCATION) == b""
    (told,) = journal.troubles
    assert told.startswith(f"cannot read the journal (journalctl _SYSTEMD_INVOCATION_ID={INVOCATION}): exit code 1; ")
    journal.does("echo back")
    assert journal.output.read(INVOCATION) == b"back\n"
    journal.does("exit 2")
    journal.output.read(INVOCATION)
    assert len(journal.troubles) == 2


def test_without_journalctl_nothing_else_breaks(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert journal.output.read(INVOCATION) == b""
    journal.output.settle()
    assert ["No such file or directory" in told for told in journal.troubles] == [True, True]


def test_a_journal_that_hangs_costs_an_answer(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "READ_S", 0.2)
    monkeypatch.setattr(output, "SETTLE_S", 0.2)
    journal.does("exec sleep 1000")
    began = time.monotonic()
    assert journal.output.read(INVOCATION) == b""
    journal.output.settle()
    assert time.monotonic() - began < 5
    read, settled = journal.troubles
    assert "no answer within 0.2 s" in read
    assert settled == "journald does not write down what it is sent (journalctl --sync): no answer within 0.2 s"


def test_a_flood_is_cut_to_its_end(journal: Journal) -> None:
    journal.does("head -c 3000000 /dev/zero; echo end")
    found = journal.output.read(INVOCATION)
    assert len(found) == 1024 * 1024
    assert found.endswith(b"\0end\n")


def test_whoever_keeps_the_output_open_holds_up_nothing(journal: Journal, tmp_path: Path) -> None:
    journal.does(f"sleep 60 & echo $! >{tmp_path}/pid; echo first")
    assert journal.output.read(INVOCATION) == b"first\n"
    assert journal.troubles == []
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # ours to bury, if a launcher of this process made it a subreaper
        os.waitpid(pid, 0)


def test_a_program_that_is_none(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no program", encoding="utf-8")
    with pytest.raises(BoundedError, match="Permission denied"):
        bounded.output_of((str(program),), 5, 10)
