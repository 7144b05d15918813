"""`reload`: what changes, what is wrong, and when it is applied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.cli import main
from supervisord.control.routes import Reloaded
from supervisord.core.model import After, Failed, FailedKind, Ready, Reason, Stopped, Stopping
from tests.adapters.fake_daemon import FakeDaemon, engine

STOPPING = Stopping(After.START, Reason("reload", "reloaded by uid 0 pid 1"), 0, 0)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, engine("qwen"), engine("llama"), engine("spare", Stopped())) as running:
        monkeypatch.setenv("VLLM_SUPERVISOR_SOCKET", running.socket)
        yield running


def test_what_changes_is_told(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.outcome = Reloaded(
        accepted=True, messages=("qwen: its launch plan changed: it is restarted",), engines=("qwen",)
    )
    daemon.enter("qwen", STOPPING)
    assert main(["reload"]) == 0
    assert capsys.readouterr() == ("qwen: its launch plan changed: it is restarted\n", "")
    assert len(daemon.reloads) == 1
    assert daemon.waits == 0


@pytest.mark.parametrize("options", [[], ["--wait"]])
def test_nothing_may_change(daemon: FakeDaemon, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reload", *options]) == 0
    assert capsys.readouterr().out == "nothing changes\n"


def test_a_configuration_that_is_invalid_is_2_and_all_is_told(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.outcome = Reloaded(
        accepted=False, messages=("c.toml: engine.a.port: cannot use \x1b[1m0", "c.toml: x: cannot")
    )
    for options in ([], ["--wait"]):
        assert main(["reload", *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == [
            "vllm-supervisor: c.toml: engine.a.port: cannot use 0",
            "vllm-supervisor: c.toml: x: cannot",
            "vllm-supervisor: cannot reload: the configuration is invalid; the one before stays in force",
        ]


def test_with_wait_every_touched_engine_comes_to_rest(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.outcome = Reloaded(accepted=True, messages=("two engines",), engines=("qwen", "llama", "spare", "gone"))
    daemon.script = [
        lambda daemon: daemon.enter("qwen", STOPPING),
        lambda daemon: daemon.enter("llama", STOPPING),
        lambda daemon: daemon.enter("qwen", Ready()),
        lambda daemon: daemon.enter("llama", Ready()),
    ]
    assert main(["reload", "--wait"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "two engines",
        "qwen: stopping: reloaded by uid 0 pid 1",
        "qwen: ready",
        "llama: stopping: reloaded by uid 0 pid 1",
        "llama: ready",
        "spare: stopped",
        "gone: no longer configured",
    ]


def test_with_wait_an_engine_that_fails_is_1_and_the_others_are_followed(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.outcome = Reloaded(accepted=True, engines=("qwen", "llama"))
    daemon.enter("qwen", Failed(FailedKind.CONFIG, "unknown flag --x"))
    assert main(["reload", "--wait"]) == 1
    out, err = capsys.readouterr()
    assert err == "vllm-supervisor: cannot reload qwen: failed: unknown flag --x\n"
    assert out.endswith("llama: ready\n")


def test_with_wait_the_time_is_bounded(daemon: FakeDaemon) -> None:
    daemon.outcome = Reloaded(accepted=True, engines=("qwen",))
    daemon.enter("qwen", STOPPING)
    assert main(["reload", "--wait", "--timeout", "0.2"]) == 6


def test_a_busy_daemon_and_none(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.outcome = TimeoutError()
    assert main(["reload"]) == 6
    assert main(["reload", "--socket", str(tmp_path / "none")]) == 3
