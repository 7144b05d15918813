"""`status --watch`: what a picture holds, as golden files; and the terminal before, meanwhile and afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.cli import frame, render, watch
from supervisord.control.client import ANSWER_S
from supervisord.core.model import Failed, FailedKind
from tests.adapters.fake_daemon import FakeDaemon, engine, stamp
from tests.adapters.test_cli_status import GOLDEN, SCENES, WALL, document, size
from tests.sim.engine import wait_until

DEADLINE_S = 60.0
_GAP = r"(?:\x1b\[K\r\n| )+"
SEEN_AGO = f"what{_GAP}follows{_GAP}was{_GAP}seen{_GAP}([0-9]+)s{_GAP}ago"
"""Wherever the line is broken: that depends on the length of the socket's path."""
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
EVENTS = [
    {"at": stamp(WALL - 60 + n), "severity": severity, "kind": "x", "message": f"{n} \x1b[2J{message}"}
    for n, (severity, message) in enumerate(
        [
            ("info", "qwen answers after 21.3 s"),
            ("notice", "qwen is ready: first answer 28 ms, settled 10 ms after 3 rounds"),
            ("error", f"llama ended by itself while ready: exit code 1 (crash): {'words ' * 40}"),
            ("warning", "llama is started again in 2.5 s"),
            ("info", "llama started: generation 4, pid 17550"),
        ]
    )
]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine("qwen"), engine("llama")) as running:
        yield running


# --- the picture ------------------------------------------------------------------------------------------------------


def history(scene: str, now: float = 1000.0) -> frame.History:
    """Five minutes, in which free blocks fall, tokens come and go, and memory creeps."""
    found, past = document(scene), frame.History()
    for second in range(301):
        for one in found["engines"]:
            one["kv"] = {**one["kv"], "free_blocks": 4000 - 10 * second, "total_blocks": 4000}
            one["tokens_per_s"] = float((second * 7) % 90)
            one["memory"] = {**one["memory"], "gpu_mib": 20_000.0 + 5 * second, "host_mib": 900.0}
        past.add(found, now - 300 + second)
    return past


def picture(scene: str, width: int, rows: int, **changes: Any) -> list[str]:
    options: dict[str, Any] = {"colour": False, "marks": frame.BLOCKS, "times": (1000.0, WALL), "trouble": None}
    options |= changes
    trouble, past = options.pop("trouble"), options.pop("history", None) or history(scene)
    return frame.frame(document(scene), past, EVENTS, trouble, size=(width, rows), **options)


@pytest.mark.parametrize(("width", "rows"), [(80, 24), (80, 50), (200, 60)])
@pytest.mark.parametrize("scene", ["well", "load", "trouble"])
def test_the_picture_is_as_it_was_agreed(scene: str, width: int, rows: int) -> None:
    """To change it on purpose: remove the file, run this, read what was written."""
    text = "".join(f"{line.rstrip()}\n" for line in picture(scene, width, rows))
    path = GOLDEN / f"watch-{scene}-{width}x{rows}.txt"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("rows", [2, 5, 10, 24, 37, 80])
@pytest.mark.parametrize("width", [60, 80, 133, 250])
def test_it_fills_the_screen_and_nothing_more(scene: str, width: int, rows: int) -> None:
    lines = picture(scene, width, rows, trouble="cannot reach the daemon at /run/x: connection refused")
    assert len(lines) == rows
    assert all(size(line) <= width for line in lines)
    assert lines[-1].endswith("08:00:00, q ends"), "the foot stays where it is"
    assert all(line.isprintable() for line in lines)


def test_second_lines_go_first_then_details_then_those_who_need_nobody() -> None:
    def texts(rows: int) -> str:
        return "\n".join(picture("trouble", 80, rows))

    ample, short, brief, least = (texts(rows) for rows in (75, 60, 40, 20))
    assert "pid 1234567" in ample
    assert "pid 1234567" not in short
    assert "do: find out why" in short
    assert "do: find out why" not in brief
    assert "qwen    ready" in brief
    assert re.search(r"\.\.\. \d+ more lines", least)
    assert "hacked: failed" in least
    cut = "\n".join(picture("trouble", 80, 24))
    assert re.search("hacked +failed +3d0h", cut)
    assert "qwen    ready" not in cut, "it needs nobody"


def test_events_and_sparks_are_at_the_foot() -> None:
    lines = picture("load", 120, 60)
    assert lines[-6:-1] == [render.clip(f"07:59:0{n}  {n} {text}", 120) for n, text in enumerate(_messages())]
    assert lines[-7] == "EVENTS"
    (header,) = [line for line in lines if line.startswith("LAST 5 MIN")]
    assert header.split() == ["LAST", "5", "MIN", "KV", "FREE", "TOKENS/S", "GPU", "MEM"]


def _messages() -> list[str]:
    return [str(event["message"]).partition("\x1b[2J")[2] for event in EVENTS]


def spark(past: frame.History, now: float = 1000.0, marks: str = frame.BLOCKS) -> str:
    return past.lines(["qwen"], now, width=80, colour=False, marks=marks)[1]


def test_sparks_fall_rise_and_creep() -> None:
    name, free, tokens, memory = re.split(r" {2,}", spark(history("load")))
    assert name == "qwen"
    pictured, value = free.split()
    assert value == "1000"
    assert pictured[0] == "█"
    assert list(pictured) == sorted(pictured, reverse=True)
    assert len(set(tokens.split()[0])) > 2
    pictured, value = memory.split()
    assert value == "21.00G"
    assert list(pictured) == sorted(pictured)
    assert (pictured[0], pictured[-1]) == ("▁", "█")


def test_what_is_not_known_is_a_gap_and_a_dash() -> None:
    found, past = document("load"), frame.History()
    past.add(found, 990.0)
    found["engines"][0] |= {"tokens_per_s": None, "kv": {**found["engines"][0]["kv"], "free_blocks": None}}
    past.add(found, 1000.0)
    line = spark(past)
    assert line.count(" -") == 2
    assert past.lines(["nobody"], 1000.0, width=80, colour=False, marks=frame.ASCII)[1].split() == [
        "nobody",
        "-",
        "-",
        "-",
    ]


def test_memory_that_hardly_grows_draws_no_mountain() -> None:
    found, past = document("load"), frame.History()
    for second in range(300):
        found["engines"][0]["memory"] = {**found["engines"][0]["memory"], "gpu_mib": 20_000.0 + second / 10}
        past.add(found, 700.0 + second)
    assert set(re.split(r" {2,}", spark(past))[-1].split()[0]) == {"▁"}


def test_samples_are_bounded() -> None:
    found, past = document("load"), frame.History()
    for tick in range(20_000):
        past.add(found, tick / 10)
    assert len(past._moments["qwen"]) <= frame.WINDOW_S + 1
    past.add({**found, "engines": []}, 5000.0)
    assert past._moments == {}


def test_cells_only_shift() -> None:
    """What was drawn once does not change any more: the picture does not shimmer."""
    past = history("load")
    before, after = (re.findall(f"[{frame.BLOCKS}]+", spark(past, now))[1] for now in (1000.0, 1025.0))
    assert len(before) > 8
    assert before.endswith(after)
    assert len(after) < len(before)


def test_a_terminal_without_utf_8() -> None:
    text = "\n".join(picture("load", 80, 60, marks=frame.ASCII))
    assert text.isascii()


def test_trouble_stands_above_everything() -> None:
    assert picture("well", 80, 24, trouble="cannot reach the daemon")[0] == "cannot reach the daemon"


# --- the terminal -----------------------------------------------------------------------------------------------------


class Terminal:
    """A terminal with the command on it, in a process group of its own, as a shell would start it."""

    def __init__(self, socket: str, *args: str, rows: int = 24, columns: int = 90) -> None:
        self.ours, theirs = pty.openpty()
        self.seen = ""
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.ours)
        env = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "NO_COLOR"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "supervisord", "--socket", socket, "status", "--watch", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**env, "TERM": "xterm", "NO_COLOR": "1", "PYTHONUTF8": "1"},
            preexec_fn=os.setpgrp,  # noqa: PLW1509 (process_group came with 3.11; in an orphaned group nobody can be stopped)
        )
        os.close(theirs)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait(self, pattern: str) -> str:
        """Read until this appears, and return all that came since the last call."""
        until = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.seen, re.DOTALL):
            assert time.monotonic() < until, f"waited for {pattern!r}: {self.seen[-3000:]!r}"
            self._read()
        seen, self.seen = self.seen, ""
        return seen

    def end(self) -> str:
        """All that is left, after its end."""
        until = time.monotonic() + DEADLINE_S
        while self._read():
            assert time.monotonic() < until, f"it does not end: {self.seen[-3000:]!r}"
        self.process.wait(DEADLINE_S)
        return self.seen

    def _read(self) -> bool:
        """Take what has come, for a moment; False when nobody has the other end open any more."""
        ready, _, _ = select.select([self.ours], [], [], 0.05)
        chunk = b""
        with contextlib.suppress(OSError):  # EIO
            chunk = os.read(self.ours, 65536) if ready else b""
        self.seen += chunk.decode(errors="replace")
        return bool(chunk) or not ready

    def __enter__(self) -> Terminal:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self.ours)

    def quiet(self) -> bool:
        """Whether what is typed is not shown."""
        return not termios.tcgetattr(self.ours)[3] & termios.ECHO


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), ("q", 0)])
def test_the_terminal_is_left_as_it_was(daemon: FakeDaemon, how: signal.Signals | str, code: int) -> None:
    with Terminal(daemon.socket) as terminal:
        first = terminal.wait("q ends")
        assert first.startswith(f"{ENTER}\x1b[?25l\x1b[H2 of 2 wanted engines ready")
        assert terminal.quiet()
        if isinstance(how, str):
            os.write(terminal.ours, b"x" + how.encode())
        else:
            terminal.process.send_signal(how)
        rest = terminal.end()
        assert terminal.process.returncode == code
        assert rest.endswith(f"\x1b[?25h{LEAVE}")
        assert termios.tcgetattr(terminal.ours) == terminal.before
    assert daemon.errors == []


def test_changes_events_and_sizes_are_drawn_over_what_was_there(daemon: FakeDaemon) -> None:
    daemon.tell(message="qwen was the first \x1b[2J event")
    with Terminal(daemon.socket) as terminal:
        terminal.wait("qwen was the first   ?event.*q ends")
        daemon.enter("qwen", Failed(FailedKind.CONFIG, "no such model"))
        seen = terminal.wait(r"qwen: failed for 0s: config: no such model.*\x1b\[J")
        assert seen.count(ENTER) == 0
        daemon.tell(message="and this is news")
        terminal.wait("and this is news")
        terminal.resize(10, 60)
        seen = terminal.wait(r"\x1b\[H[^\x1b]{1,60}\x1b\[K(?:\r\n[^\x1b]{0,60}\x1b\[K){9}\x1b\[J")
        assert "\x1b[2J" not in seen


def test_a_daemon_that_goes_and_comes_back(daemon: FakeDaemon, tmp_path: Path) -> None:
    with Terminal(daemon.socket, columns=400) as terminal:  # the path of the socket may be long
        terminal.wait("q ends")
        daemon.server.close()
        seen = terminal.wait(f"cannot reach the daemon.*{SEEN_AGO}.*q ends")
        assert re.search("qwen +ready", seen)
        with FakeDaemon(tmp_path, engine("other")):
            terminal.wait(r"\x1b\[H1 of 1 wanted engines ready.*other +ready.*q ends")
            os.write(terminal.ours, b"q")
            terminal.end()
            assert terminal.process.returncode == 0


def test_a_daemon_that_hangs_is_told_before_anybody_believes_an_old_picture(daemon: FakeDaemon) -> None:
    awake = threading.Event()

    def hang(_: FakeDaemon) -> None:
        awake.wait(DEADLINE_S)

    daemon.script = [hang] * 20  # until it is told to go on, however slow the terminal is meanwhile
    with Terminal(daemon.socket) as terminal:
        seen = terminal.wait(f"cannot get an answer from the daemon.*{SEEN_AGO}.*q ends")
        told = re.search(SEEN_AGO, seen)
        assert told is not None
        assert float(told[1]) < ANSWER_S, "the patience of other commands is for those who see nothing meanwhile"
        assert re.search("qwen +ready", seen)
        awake.set()
        terminal.wait(r"\x1b\[H2 of 2 wanted engines ready.*q ends")


def test_only_one_engine(daemon: FakeDaemon) -> None:
    daemon.tell(message="of qwen")
    daemon.tell(message="of llama", engine="llama")
    with Terminal(daemon.socket, "llama") as terminal:
        seen = terminal.wait("of llama.*q ends")
        assert "qwen" not in seen
        daemon.forget("llama")
        terminal.wait("cannot show llama: no such engine")


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_again(daemon: FakeDaemon) -> None:
    with Terminal(daemon.socket) as terminal:
        terminal.wait("q ends")
        terminal.process.send_signal(signal.SIGTSTP)
        stat = Path(f"/proc/{terminal.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", DEADLINE_S, "it to be stopped")
        seen = terminal.wait(re.escape(LEAVE))
        assert ENTER not in seen
        assert not terminal.quiet()
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait(f"{re.escape(ENTER)}.*q ends")
        assert terminal.quiet()


@pytest.mark.parametrize(("socket", "code"), [("none", 3), ("engine", 5)])
def test_with_nothing_to_show_the_terminal_stays_as_it_is(daemon: FakeDaemon, socket: str, code: int) -> None:
    args = [] if socket == "none" else ["nobody"]
    with Terminal(daemon.socket if args else f"{daemon.socket}.none", *args) as terminal:
        seen = terminal.end()
        assert seen.startswith("vllm-supervisor: cannot ")
        assert "\x1b" not in seen
        assert terminal.process.returncode == code


def test_a_dumb_terminal_gets_plain_text(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "supervisord", "--socket", daemon.socket, "status", "--watch"]
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"}) as process:
        os.close(theirs)
        seen = b""
        while b"launcher" not in seen:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
    os.close(ours)
    assert b"\x1b" not in seen


def test_a_bug_in_a_thread_is_told_by_the_command() -> None:
    view = watch.Watch("/none", None, lambda found: found)

    def broken() -> None:
        raise IndexError

    view._run(broken)
    with pytest.raises(IndexError):
        view._wait()


@pytest.mark.parametrize("values", [(2.0**64, 2**64 + 1), (-1.7e308, 1.7e308), (1e-320, 0.0), (10**30, 1)])
def test_numbers_of_any_size_have_a_picture(values: tuple[float, float]) -> None:
    moments = [(float(at), value, value, value, value) for at, value in enumerate(values)]
    for metric in frame._METRICS:
        assert frame._spark(moments, 2.0, 10, frame.ASCII, *metric)
