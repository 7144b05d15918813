"""`start`, `stop`, `restart`, `drain`, `reset`: what is asked, what is waited for, what the exit code says."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.cli import main, render
from supervisord.cli.request import Goal
from supervisord.core.messages import Answer, Op
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Failed,
    FailedKind,
    Phase,
    Ready,
    Reason,
    Starting,
    Stopped,
    Stopping,
    Waiting,
    Warming,
)
from tests.adapters.fake_daemon import FakeDaemon, Script, engine

CAUSE = Reason("operator", "requested by uid 0 pid 1")
STOPPING = Stopping(After.STOP, CAUSE, 0, 0)
DRAINING = Draining(After.HOLD, None, CAUSE, 0)
STARTING = Starting(0, 0)
FAILED = Failed(FailedKind.CONFIG, "unknown flag --x")


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine("qwen"), engine("llama", Stopped())) as running:
        monkeypatch.setenv("VLLM_SUPERVISOR_SOCKET", running.socket)
        yield running


def enter(name: str, phase: Phase, **fields: Any) -> Script:
    return lambda daemon: daemon.enter(name, phase, **fields)


# --- without --wait ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op.value for op in Op])
@pytest.mark.parametrize("now", [False, True])
def test_the_request_is_sent_and_its_answer_shown(
    daemon: FakeDaemon, op: str, now: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = (Answer.ACCEPTED, "qwen is being \x1b[31mlooked after")
    assert main([op, "qwen", *(["--now"] if now else [])]) == 0
    assert [request[:3] for request in daemon.requests] == [(Op(op), "qwen", now)]
    assert capsys.readouterr() == ("qwen is being looked after\n", "")
    assert daemon.waits == 0


def test_a_refusal_is_5(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = (Answer.REFUSED, "cannot start qwen: it failed (config): unknown flag")
    for options in ([], ["--wait"]):
        assert main(["start", "qwen", *options]) == 5
        assert capsys.readouterr() == (
            "",
            "vllm-supervisor: cannot start qwen: it failed (config): unknown flag\n",
        )


@pytest.mark.parametrize("name", ["nobody", "QWEN", "no such", "../status", "é", "x\r\nY: z", "\udcff"])
def test_an_unknown_engine_is_5(daemon: FakeDaemon, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = (Answer.UNKNOWN_ENGINE, f"cannot start {name[:6]}: no such engine (known: qwen, llama)")
    assert main(["start", name]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vllm-supervisor: cannot ")
    assert err.rstrip("\n").isprintable()


def test_a_daemon_that_is_too_busy_is_6(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = TimeoutError()
    assert main(["stop", "qwen"]) == 6
    assert "cannot say whether stop qwen was accepted" in capsys.readouterr().err


def test_a_bug_of_the_daemon_is_70(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = ValueError("x")
    assert main(["stop", "qwen"]) == 70
    assert capsys.readouterr().err.startswith("vllm-supervisor: internal error ")


def test_without_a_daemon_it_is_3(tmp_path: Path) -> None:
    for options in ([], ["--wait"]):
        assert main(["stop", "qwen", "--socket", str(tmp_path / "none"), *options]) == 3


@pytest.mark.parametrize(
    "argv", [["stop"], ["stop", "a", "b"], ["stop", "a", "--timeout", "-1"], ["stop", "--wai", "a"]]
)
def test_a_line_that_makes_no_sense_is_64(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 64
    err = capsys.readouterr().err
    assert err.startswith("vllm-supervisor stop: cannot understand the command line: ")
    assert err.endswith("; try: vllm-supervisor stop --help\n")


# --- with --wait ------------------------------------------------------------------------------------------------------


WANTED = enter("llama", STARTING, wanted=True)
ENDING = enter("qwen", STOPPING, wanted=False)
AGAIN = enter("qwen", Ready(), generation=2)


def forget(daemon: FakeDaemon) -> None:
    daemon.forget("qwen")


@pytest.mark.parametrize(
    ("op", "name", "script", "code", "told"),
    [
        ("start", "llama", [WANTED, enter("llama", Warming(0)), enter("llama", Ready())], 0, "ready"),
        ("start", "qwen", [], 0, "ready"),
        ("start", "llama", [WANTED, enter("llama", FAILED)], 1, "failed: unknown flag --x"),
        ("start", "llama", [WANTED, enter("llama", Stopped(), wanted=False)], 1, "stopped"),
        ("start", "llama", [WANTED, enter("llama", Backoff(0, CAUSE)), enter("llama", Ready())], 0, "ready"),
        ("start", "llama", [WANTED, enter("llama", Ready((CAUSE,)))], 0, "degraded: requested by uid 0 pid 1"),
        ("stop", "qwen", [enter("qwen", DRAINING, wanted=False), ENDING, enter("qwen", Stopped())], 0, "stopped"),
        ("stop", "qwen", [ENDING, forget], 0, "no longer configured"),
        ("stop", "qwen", [ENDING, enter("qwen", FAILED)], 1, "failed: unknown flag --x"),
        ("stop", "qwen", [ENDING, AGAIN], 1, "ready"),
        ("restart", "qwen", [enter("qwen", STOPPING), enter("qwen", STARTING), AGAIN], 0, "ready"),
        ("restart", "qwen", [enter("qwen", STOPPING), forget], 1, "no longer configured"),
        ("drain", "qwen", [enter("qwen", DRAINING)], 0, "draining"),
        ("drain", "qwen", [enter("qwen", STOPPING), enter("qwen", Stopped())], 1, "stopped"),
        ("reset", "qwen", [enter("qwen", STARTING), enter("qwen", Ready())], 0, "ready"),
        ("reset", "llama", [], 0, "stopped"),
    ],
)
def test_it_waits_until_it_has_come_about_or_cannot(
    daemon: FakeDaemon,
    op: str,
    name: str,
    script: list[Script],
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon.script = list(script)
    assert main([op, name, "--wait"]) == code
    out, err = capsys.readouterr()
    assert (out if code == 0 else err).splitlines()[-1].endswith(f"{name}: {told}")
    assert daemon.script == []


def test_each_state_on_the_way_is_told_once(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.script = [
        enter("llama", Waiting(Reason("port_held", "port 8001 is held by 7 (nginx)"), 0), wanted=True),
        lambda daemon: daemon.put(),
        enter("llama", Waiting(Reason("gpu_memory_held", "pid 16653 (sleep) holds 20.0 GiB"), 0)),
        enter("llama", Warming(0, "prefill")),
        enter("llama", Warming(0, "decode")),
        enter("llama", Ready()),
    ]
    assert main(["start", "llama", "--wait"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "accepted",
        "llama: waiting: port_held: port 8001 is held by 7 (nginx)",
        "llama: waiting: gpu_memory_held: pid 16653 (sleep) holds 20.0 GiB",
        "llama: warming: prefill",
        "llama: ready",
    ]


def test_a_restart_is_not_over_before_it_began(daemon: FakeDaemon) -> None:
    """Also a daemon that answers before it publishes does not fool it."""
    daemon.script = [
        lambda _: None,
        enter("qwen", STOPPING),
        enter("qwen", Ready(), generation=2),
    ]
    assert main(["restart", "qwen", "--wait"]) == 0
    assert daemon.script == []


def test_waiting_ends_with_the_timeout(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.script = [enter("llama", STARTING, wanted=True)]
    started = time.monotonic()
    assert main(["start", "llama", "--wait", "--timeout", "0.3"]) == 6
    assert 0.2 < time.monotonic() - started < 10
    assert "cannot wait any longer for start of llama (--timeout): it is starting: " in capsys.readouterr().err


def test_who_waits_hears_something_now_and_then(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when nothing happens at all, as while the daemon's answer is the same."""
    monkeypatch.setattr("supervisord.cli.request._TELL_S", 0.05)
    daemon.script = [enter("llama", Warming(0, "prefill"), wanted=True)]
    assert main(["start", "llama", "--wait", "--timeout", "0.5"]) == 6
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["accepted", "llama: warming: prefill", "llama: warming: prefill"]
    assert 3 <= len(lines) <= 12


def test_waiting_ends_when_the_daemon_does(daemon: FakeDaemon) -> None:

    def end(daemon: FakeDaemon) -> None:
        daemon.server.close()
        daemon.put()

    daemon.script = [WANTED, end]
    assert main(["start", "llama", "--wait"]) == 3


def test_an_interrupt_ends_only_the_waiting(daemon: FakeDaemon) -> None:
    argv = [sys.executable, "-m", "supervisord", "drain", "qwen", "--wait"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "accepted\n"
        assert process.stdout.readline() == "qwen: ready\n"
        process.send_signal(2)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130
    assert len(daemon.requests) == 1


def test_nothing_is_decided_on_the_way() -> None:
    with_state: dict[str, Any] = {"since": "a", "generation": 1, "health": None, "reasons": [], "wanted": "running"}
    on_the_way = {
        "start": {"waiting", "starting", "warming", "draining", "stopping", "backoff"},
        "stop": {"waiting", "starting", "warming", "ready", "draining", "stopping", "backoff"},
        "restart": {"waiting", "starting", "warming", "ready", "draining", "stopping", "backoff"},
        "drain": {"waiting", "starting", "warming", "ready", "stopping", "backoff"},
        "reset": {"waiting", "starting", "warming", "draining", "stopping", "backoff"},
        "reload": {"waiting", "starting", "warming", "draining", "stopping", "backoff"},
    }
    states = {"stopped", "waiting", "starting", "warming", "ready", "draining", "stopping", "backoff", "failed"}
    for op, expected in on_the_way.items():
        goal = Goal(op, "qwen", with_state)
        assert {state for state in states if goal.verdict({**with_state, "state": state}) is None} == expected, op
    assert render.summary({**with_state, "state": "warming"}) == "warming"
