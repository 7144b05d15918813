"""`status`: table, JSON, watching, and what its exit code says."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from supervisord.cli import main, render
from supervisord.core import status
from supervisord.core.memory import MemoryWatch, Trend
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Engine,
    ExitClass,
    Failed,
    FailedKind,
    Gpu,
    LastExit,
    Node,
    Phase,
    Process,
    Progress,
    Ready,
    Reason,
    Sample,
    Starting,
    Stopped,
    Stopping,
    Waiting,
    Warming,
)
from supervisord.core.spec import NodeSpec
from supervisord.core.watch import Watch
from tests.adapters.fake_daemon import FakeDaemon, engine, stamp
from tests.adapters.fake_gpus import GIB, IDLE, MIXED, SOUND

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
NOW = 100_000.0
WALL = 1_800_000_000.0
BY_HAND = Reason("operator", "stop requested by uid 0 pid 1")


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine("qwen"), engine("llama", Stopped())) as running:
        monkeypatch.setenv("VLLM_SUPERVISOR_SOCKET", running.socket)
        yield running


def crashed(kind: ExitClass, advice: str, **how: int) -> LastExit:
    return LastExit(kind, how.get("code"), how.get("signal"), NOW - 200, 6, advice)


def at(name: str, phase: Phase, age_s: float = 75, **fields: Any) -> Engine:
    return engine(name, phase, since=NOW - age_s, **fields)


SEEN = Sample(NOW - 2, 200, None, 3, 12, 4000, 2320, 0.42)
WELL = [
    at("qwen", Ready(), 11_520, sample=SEEN, process=Process(1234567, 1, "b")),
    at("llama", Ready(), 400_000, generation=12, model="/srv/models/meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    at("embed", Stopped(), 4_000, model="BAAI/bge-m3"),
]
TROUBLE = [
    *WELL[:1],
    at("stale", Ready(), 3601, sample=replace(SEEN, at=NOW - 90, kv_usage=None, waiting=None)),
    at("busy", Ready((Reason("kv_pressure", "42 of 4000 blocks are free while 31 requests run and tokens flow"),)), 60),
    at("gate", Waiting(Reason("port_held", "port 8001 is held by 77 (nginx)"), NOW + 4), 12, generation=0),
    at("slow", Starting(NOW - 4, NOW + 900, Progress(3 << 30, 1 << 29, 214)), 31, process=Process(501, 1, "b")),
    at("new", Starting(NOW, NOW + 900), 0, launching=1, generation=0),
    at("warm", Warming(NOW + 200, "prefill, round 2 of at most 5"), 8),
    at("hold", Draining(After.HOLD, None, Reason("operator", "drain requested by uid 1000 pid 5"), NOW + 1), 700),
    at("ending", Stopping(After.STOP, BY_HAND, NOW + 50, NOW + 80), 1),
    at(
        "again",
        Backoff(NOW + 38, Reason("exited", "exit code 1 (crash): look at the last lines of its log")),
        2,
        generation=6,
        last_exit=crashed(ExitClass.CRASH, "look at the last lines of its log", code=1),
    ),
    at(
        "hacked",
        Failed(
            FailedKind.CRASH_LOOP,
            "6 failures in 3600 s; last: \x1b[31mred\x1b[0m \x1b]0;title\x07 bell\x07 \u202ergb\nline",
        ),
        86_400 * 3,
        generation=6,
        model="a\x1b[2Jb",
        last_exit=crashed(ExitClass.CUDA_APP, "an illegal memory access", signal=6),
    ),
]
LONG = [replace(e, spec=replace(e.spec, name=f"{'engine-with-a-very-long-na'}{i:06}")) for i, e in enumerate(WELL)]
ON_GPUS = [
    at("qwen", Ready(), 11_520, sample=SEEN, gpus=(SOUND.uuid,), devices=(SOUND.uuid,), gpu_bytes=int(58.1 * GIB)),
    at(
        "llama",
        Ready((Reason("gpu_throttled", "GPU 2: it runs slower"),)),
        400_000,
        gpus=("2",),
        gpu_bytes=int(21.9 * GIB),
        watch=Watch(
            NOW - 9000,
            NOW,
            gpu=MemoryWatch(trend=Trend(75.4, 70, 80, 75, 76, 2**34, 2**20, 7200), lows=((NOW - 60, 22 * GIB),)),
        ),
    ),
    at("small", Waiting(Reason("gpu_missing", "there is no GPU 9"), NOW + 4), 12, generation=0, gpus=("9",)),
]
SCENES: dict[str, tuple[list[Engine], tuple[Gpu, ...], str | None]] = {
    "well": (WELL, (), None),
    "trouble": (
        TROUBLE,
        (),
        "/etc/vllm-supervisor/config.toml: engine.qwen.port: cannot use 70000: it is more than 65535",
    ),
    "long": (LONG, (), None),
    "gpus": (ON_GPUS, MIXED, None),
    "empty": ([], (), None),
}


def document(scene: str) -> dict[str, Any]:
    engines, gpus, config_error = SCENES[scene]
    node = Node(
        spec=NodeSpec(),
        version="0.1.0",
        launcher="systemd",
        pid=4711,
        since=NOW - 273_600,
        engines={e.spec.name: e for e in engines},
        gpus={gpu.uuid: gpu for gpu in gpus},
        config_error=config_error,
    )
    return status.of(node, NOW, WALL, stamp)


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("scene", SCENES)
def test_the_table_is_as_it_was_agreed(scene: str, width: int) -> None:
    """To change it on purpose: remove the file, run this, read what was written."""
    text = render.table(document(scene), width=width, colour=False, now=WALL)
    path = GOLDEN / f"status-{scene}-{width}.txt"
    if not path.exists():
        path.write_text(text)
    assert text == path.read_text()
    assert all(len(line) <= width for line in text.splitlines())
    assert all(line.isprintable() for line in text.splitlines())


def test_a_narrow_terminal_keeps_what_tells_engines_apart() -> None:
    text = render.table(document("trouble"), width=40, colour=False, now=WALL)
    assert "MODEL" not in text
    assert "hacked" in text


def test_colours_are_beside_the_text_and_never_in_its_widths() -> None:
    plain = render.table(document("trouble"), width=100, colour=False, now=WALL)
    painted = render.table(document("trouble"), width=100, colour=True, now=WALL)
    assert "\x1b[31mbackoff " in painted
    assert "\x1b[32mready " in painted
    assert "\x1b[33mready " in painted
    assert [render.clean(line).rstrip() for line in painted.splitlines()] == plain.splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m0s"), (3600, "1h0m"), (11_520, "3h12m"), (440_000, "5d2h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("plain é 中", "plain é 中"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x\x1b]8;;http://x\x1b\\y", "xy"),
        ("a\x1bcb", "ab"),
        ("a\x1b", "a "),
        ("a\x07b\x9bc\x00d", "a b c d"),
        ("a\r\nb", "a  b"),
        ("a\tb", "a\tb"),
        ("\u202eevil\ud800\u200b", " evil  "),
    ],
)
def test_clean_text_cannot_drive_a_terminal(text: str, plain: str) -> None:
    assert render.clean(text) == plain


def test_width_and_colour_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert render.terminal() == (200, False)
    monkeypatch.setenv("COLUMNS", "99")
    assert render.terminal() == (99, False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert render.terminal() == (99, True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert render.terminal() == (99, False)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert render.terminal() == (99, False)
    monkeypatch.setenv("COLUMNS", "many")
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    assert render.terminal()[0] == 80


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "wanted", "code"),
    [
        (Ready(), True, 0),
        (Ready((BY_HAND,)), True, 0),
        (Stopped(), False, 0),
        (Stopping(After.STOP, BY_HAND, 0, 0), False, 0),
        (Starting(0, 0), True, 1),
        (Warming(0), True, 1),
        (Waiting(BY_HAND, 0), True, 1),
        (Backoff(0, BY_HAND), True, 1),
        (Failed(FailedKind.CONFIG, "x"), True, 1),
        (Draining(After.HOLD, None, BY_HAND, 0), True, 1),
    ],
)
def test_the_exit_code_says_whether_all_that_is_wanted_is_ready(
    daemon: FakeDaemon, phase: Phase, wanted: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.put(engine("qwen", phase, wanted=wanted))
    assert main(["status"]) == code
    assert main(["status", "--json"]) == code
    assert main(["status", "llama"]) == 0
    assert capsys.readouterr().err == ""


def test_the_table_is_printed(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    header, qwen, llama, _, ready, node = capsys.readouterr().out.splitlines()
    assert header.split() == ["ENGINE", "STATE", "SINCE", "PID", "GEN", "RESTARTS", "KV", "REQUESTS", "MODEL/REASON"]
    assert qwen.split() == ["qwen", "ready", "1m15s", "4711", "1", "0", "-", "-", "Qwen/Qwen3.5-9B"]
    assert llama.split()[:2] == ["llama", "stopped"]
    assert ready == "1 of 1 wanted engines ready"
    assert node == "vllm-supervisor 0.1.0, pid 99, up 1h1m, launcher plain"
    assert daemon.errors == []


def test_json_is_the_whole_document(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    main(["status", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"version", "supervisor", "engines", "gpus"}
    assert [e["name"] for e in found["engines"]] == ["qwen", "llama"]
    since = datetime.fromisoformat(found["engines"][0]["since"].replace("Z", "+00:00"))
    assert abs((datetime.now(timezone.utc) - since).total_seconds() - 75) < 30


def test_json_holds_nothing_that_drives_a_terminal(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.enter("qwen", Failed(FailedKind.CONFIG, "\x1b[2J\u202e\x9b"))
    main(["status", "--json"])
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert json.loads(out)["engines"][0]["reasons"][0]["message"] == "\x1b[2J\u202e\x9b"


def test_one_engine_with_its_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeDaemon(tmp_path, engine("qwen", gpus=("1",)), engine("llama"), gpus=MIXED) as daemon:
        assert main(["status", "qwen", "--json", "--socket", daemon.socket]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [e["name"] for e in found["engines"]] == ["qwen"]
    assert [g["uuid"] for g in found["gpus"]] == [IDLE.uuid]


def test_an_unknown_engine_is_5(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "qwne"]) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "vllm-supervisor: cannot show qwne: no such engine (known: qwen, llama)\n"


def test_without_a_daemon_it_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--json"], ["--watch"]):
        assert main(["--socket", f"{tmp_path}/none", "status", *options]) == 3
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == (
            f"vllm-supervisor: cannot reach the daemon at {tmp_path}/none: no such file or directory; "
            "start it with: systemctl start vllm-supervisor\n"
        )


def test_watching_in_a_pipe_prints_each_change(daemon: FakeDaemon) -> None:
    argv = [sys.executable, "-m", "supervisord", "status", "--watch", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["engines"][0]["state"] == "ready"
        daemon.enter("qwen", Stopped())
        assert json.loads(process.stdout.readline())["engines"][0]["state"] == "stopped"
        daemon.server.close()
        assert process.wait(20) == 3
        assert process.stderr is not None
        assert process.stderr.read().startswith("vllm-supervisor: cannot reach the daemon")


def terminal(monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon, lines: int) -> None:
    """Watch on a terminal with so many lines; qwen is stopped after the first view, and the second is the last."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("LINES", str(lines))
    monkeypatch.setenv("NO_COLOR", "1")
    pauses = iter([None, KeyboardInterrupt])

    def sleep(_: float) -> None:
        daemon.enter("qwen", Stopped(), wanted=False)
        pause = next(pauses)
        if pause is not None:
            raise pause

    monkeypatch.setattr("supervisord.cli.status.time", type("T", (), {"sleep": sleep, "time": staticmethod(time.time)}))


def test_watching_on_a_terminal_draws_over_what_was_there(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(monkeypatch, daemon, 24)
    assert main(["status", "--watch"]) == 130
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("\x1b[?1049h\x1b[H")
    assert captured.out.endswith("\x1b[J\x1b[?1049l")
    first, second = captured.out.removesuffix("\x1b[?1049l").split("\x1b[H")[1:]
    assert "qwen    ready" in first
    assert "qwen    stopped" in second
    assert second.endswith("\x1b[J")
    assert all(line.endswith("\x1b[K") for line in second.splitlines()[:-1])


def test_watching_shows_what_fits_and_what_is_not_ready_first(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(monkeypatch, daemon, 5)
    daemon.put(engine("late", Warming(0, "prefill")), engine("ill", Ready((BY_HAND,))))
    assert main(["status", "--watch"]) == 130
    for view in capsys.readouterr().out.split("\x1b[H")[1:]:
        lines = view.split("\x1b[K\n")[:-1]
        assert [line.split()[0] for line in lines] == ["ENGINE", "late", "prefill", "..."]
        assert lines[-1].endswith(" more lines")
    terminal(monkeypatch, daemon, 7)
    assert main(["status", "--watch"]) == 130
    rows = capsys.readouterr().out.split("\x1b[H")[-1].split("\x1b[K\n")[:-1]
    assert [line.split()[0] for line in rows] == ["ENGINE", "late", "prefill", "ill", "operator:", "..."]


def test_a_view_that_fits_keeps_the_order_of_the_configuration() -> None:
    document_ = document("trouble")
    text = render.table(document_, width=80, colour=False, now=WALL)
    count = text.count("\n")
    for room in (None, count, count + 1):
        assert render.fitted(document_, room, width=80, colour=False, now=WALL) == text
    for room in (1, 2, count - 1):
        lines = render.fitted(document_, room, width=80, colour=False, now=WALL).splitlines()
        assert len(lines) == room
        assert lines[-1] == f"... {count - room + 1} more lines"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_gets_its_screen_back(daemon: FakeDaemon, number: signal.Signals) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "supervisord", "status", "--watch"]
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while b"\x1b[J" not in seen:
            seen += os.read(ours, 4096)
        process.send_signal(number)
        with contextlib.suppress(OSError):  # EIO: nobody has the other end open any more
            while chunk := os.read(ours, 4096):
                seen += chunk
        assert process.wait(20) == 128 + number
    os.close(ours)
    assert seen.startswith(b"\x1b[?1049h\x1b[H")
    assert seen.endswith(b"\x1b[?1049l")


def test_an_interrupt_is_silent(daemon: FakeDaemon) -> None:
    argv = [sys.executable, "-m", "supervisord", "status", "--watch"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ENGINE")
        process.send_signal(2)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")
    assert daemon.errors == []


def test_a_reader_that_leaves_is_no_error(daemon: FakeDaemon) -> None:
    argv = [sys.executable, "-m", "supervisord", "status", "--watch"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        ticker = threading.Timer(0.1, daemon.put)
        ticker.start()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(20) == 141
