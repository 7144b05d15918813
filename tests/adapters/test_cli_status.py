"""`status`: table, JSON, watching, and what its exit code says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unicodedata import combining, east_asian_width

import jsonschema
import pytest

from supervisord.cli import main, render, render_engine, render_status
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
from tests.adapters.fake_gpus import GIB, IDLE, LOST, MIXED, SOUND

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
WIDE = [
    at("kanji", Ready(), model="\u901a\u4e49\u5343\u95ee/\u6a21\u578b-9B\t\u3042"),
    at("tower", Failed(FailedKind.CONFIG, "Z" + "\u0335\u0310" * 40 + "algo \u95ee" * 30), model="e\u0301te\u0301"),
]
"""Characters of two columns, and of none."""
SCENES: dict[str, tuple[list[Engine], tuple[Gpu, ...], str | None]] = {
    "well": (WELL, (), None),
    "trouble": (
        TROUBLE,
        (),
        "/etc/vllm-supervisor/config.toml: engine.qwen.port: cannot use 70000: it is more than 65535",
    ),
    "long": (LONG, (), None),
    "gpus": (ON_GPUS, MIXED, None),
    "load": (ON_GPUS, MIXED, None),
    "wide": (WIDE, (), None),
    "empty": ([], (), None),
}
LOAD = {
    "tokens_per_s": 1234.5,
    "ttft_p95_ms": 812.4,
    "prefix_hit_rate": 0.763,
    "draft_acceptance_rate": 0.61,
    "warmup": {"first_ms": 3310.2, "settled_ms": 410.7, "rounds": 3},
    "memory": {
        "gpu_mib": 59_494.4,
        "host_mib": 6_400.0,
        "gpu_creep_mib_per_h": 0.4,
        "host_creep_mib_per_h": -12.0,
        "exhausted_in_s": 400_000.0,
    },
    "ranks": [
        {"rank": "0", "running": 3, "waiting": 0, "total_blocks": 4000, "free_blocks": 2320, "usage": 0.42},
        {"rank": "1", "running": 0, "waiting": 12, "total_blocks": 4000, "free_blocks": 3100, "usage": 0.22},
    ],
}
"""What an engine under load says on top."""


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
    found = status.of(node, NOW, WALL, stamp)
    if scene == "load":
        found["engines"][0] |= LOAD
    return found


def size(text: str) -> int:
    """Columns of a line."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


# --- the view --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("scene", SCENES)
def test_the_view_is_as_it_was_agreed(scene: str, width: int) -> None:
    """To change it on purpose: remove the file, run this, read what was written."""
    text = render_status.view(document(scene), width=width, colour=False, now=WALL)
    path = GOLDEN / f"status-{scene}-{width}.txt"
    if not path.exists():
        path.write_text(text)
    assert text == path.read_text()
    assert all(size(line) <= width for line in text.splitlines())
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize("width", [80, 200])
def test_the_view_of_one_engine_is_as_it_was_agreed(width: int) -> None:
    found = document("load")
    found["engines"], found["gpus"] = found["engines"][:1], found["gpus"][:1]
    text = render_engine.view(found, width=width, colour=False, now=WALL)
    path = GOLDEN / f"status-one-{width}.txt"
    if not path.exists():
        path.write_text(text)
    assert text == path.read_text()
    assert all(size(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("scene", SCENES)
def test_the_document_is_valid(scene: str) -> None:
    schema = json.loads((Path(status.__file__).parents[1] / "status.schema.json").read_text())
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    checker.validate(document(scene))
    if scene == "load":
        text = json.dumps(document(scene), indent=2) + "\n"
        path = GOLDEN / "status-load.json"
        if not path.exists():
            path.write_text(text)
        assert text == path.read_text()


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("width", range(20, 130, 11))
def test_no_width_breaks_it(scene: str, width: int) -> None:
    """The columns of a table have a least width; sentences keep to that of the terminal."""
    for line in render_status.view(document(scene), width=width, colour=False, now=WALL).splitlines():
        assert size(line) <= max(width, 44)


def test_what_is_wrong_comes_first_and_the_worst_of_it_first() -> None:
    first, blank, title, *rest = render_status.view(document("trouble"), width=200, colour=False, now=WALL).splitlines()
    assert first.startswith("3 of 11 wanted engines ready, 1 failed, 1 backoff, 1 waiting, 1 degraded, 1 stopping")
    assert (blank, title) == ("", "WRONG")
    heads = [line.split(":")[0].strip() for line in rest if re.match("  [a-z]", line)]
    assert heads[:5] == ["hacked", "the configuration on disk is not in force", "gate", "again", "busy"]
    assert heads[5:] == ["slow", "new", "warm", "hold", "ending"], "on their way"


def test_advice_for_each_reason() -> None:
    text = render_status.view(document("trouble"), width=200, colour=False, now=WALL)
    assert "do: see its last lines: vllm-supervisor logs again" in text, "that of its class of exit"
    assert "do: find out why in: vllm-supervisor logs hacked; then: vllm-supervisor reset hacked" in text
    assert "drain requested by uid 1000 pid 5; back into traffic: vllm-supervisor start hold" in text


def test_the_same_advice_is_given_once() -> None:
    text = render_status.view(document("gpus"), width=200, colour=False, now=WALL)
    assert text.count("do: look at its cooling and its power supply") == 1


def test_an_engine_behind_a_quarantined_gpu_points_to_it() -> None:
    gate = Reason("gpu_quarantined", f"GPU 3 ({LOST.uuid}) is quarantined: Xid 79: then: vllm-supervisor gpu clear X")
    node = Node(
        NodeSpec(),
        engines={"small": at("small", Waiting(gate, NOW + 4), gpus=(LOST.uuid,))},
        gpus={LOST.uuid: LOST},
    )
    text = render_status.view(status.of(node, NOW, WALL, stamp), width=200, colour=False, now=WALL)
    assert f"gpu_quarantined: GPU 3 ({LOST.uuid}) is quarantined, see there\n" in text
    assert text.count("gpu clear") == 1
    alone = render_status.view(status.of(replace(node, gpus={}), NOW, WALL, stamp), width=300, colour=False, now=WALL)
    assert "Xid 79" in alone


def test_a_limit_that_is_missed_is_marked() -> None:
    text = render_status.view(document("load"), width=200, colour=True, now=WALL)
    assert "\x1b[33m812/500 ms!" in text
    found = document("load")
    found["engines"][0]["slo"]["ttft_p95_ms"] = None
    assert "812 ms " in render_status.view(found, width=200, colour=False, now=WALL)


def test_the_colour_of_the_verdict() -> None:
    for scene, shade in (("well", "32"), ("gpus", "31"), ("trouble", "31"), ("empty", "32")):
        assert render_status.view(document(scene), width=300, colour=True, now=WALL).startswith(f"\x1b[{shade}m"), scene
    found = document("well")
    found["engines"][0] |= {"health": "degraded", "reasons": [{"code": "slo", "message": "slow"}]}
    assert render_status.view(found, width=300, colour=True, now=WALL).startswith("\x1b[33m")


def test_colours_are_beside_the_text_and_never_in_its_widths() -> None:
    plain = render_status.view(document("trouble"), width=100, colour=False, now=WALL)
    painted = render_status.view(document("trouble"), width=100, colour=True, now=WALL)
    assert "\x1b[31mbackoff " in painted
    assert "\x1b[32mready " in painted
    assert "\x1b[33mdegraded" in painted
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
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, "9" * 5000)
    assert render.terminal()[0] == 80
    assert render.rows() is None


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


def test_the_view_is_printed(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    verdict, _, header, qwen, llama, _, node = capsys.readouterr().out.splitlines()
    assert verdict == "1 of 1 wanted engines ready, 1 not wanted"
    assert header.split()[:9] == ["ENGINE", "STATE", "SINCE", "PID", "GEN", "RESTARTS", "KV", "BLOCKS", "RUN+WAIT"]
    assert header.split()[9:] == ["TOK/S", "TTFT", "P95", "HOST", "MEM", "WARM-UP", "HITS", "MODEL"]
    assert qwen.split() == ["qwen", "ready", "1m15s", "4711", "1", "0", *"-------", "Qwen/Qwen3.5-9B"]
    assert llama.split()[:2] == ["llama", "stopped"]
    assert node == "vllm-supervisor 0.1.0, pid 99, up 1h1m, launcher plain"
    assert daemon.errors == []


def test_one_engine_gets_all_that_is_known_of_it(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "qwen"]) == 0
    out = capsys.readouterr().out
    assert "engine qwen\n  model        Qwen/Qwen3.5-9B, port 8001\n" in out
    assert "llama" not in out


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


def test_an_interrupt_is_silent(daemon: FakeDaemon) -> None:
    argv = [sys.executable, "-m", "supervisord", "status", "--watch"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1 of 1 wanted engines ready, 1 not wanted\n"
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
