"""`plan` and `check-config` with the flags of the installed vLLM, the GPUs of the daemon, and profiles."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.cli import check_config, plan
from supervisord.config_users import own_account
from supervisord.control.client import Reply, UnreachableError
from tests.adapters.fake_installation import FakeInstallation, open_home

GPUS = """{"gpus": [
  {"uuid": "GPU-1a2b3c4d", "index": 0, "pci_id": "0000:01:00.0", "generation": "ampere", "class": "geforce"},
  {"uuid": "GPU-5e6f7a8b", "index": 1, "pci_id": "0000:02:00.0", "generation": "ada", "class": "geforce"},
  {"uuid": "GPU-9c0d1e2f", "index": 2, "pci_id": null, "generation": null, "class": null}
]}"""


@pytest.fixture
def fake() -> Iterator[FakeInstallation]:
    with open_home() as home:
        yield FakeInstallation(home)


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Reply]:
    """What the daemon's status says; while it is empty no daemon runs."""
    found: list[Reply] = []

    def get(*_: Any, **__: Any) -> Reply:
        if not found:
            raise UnreachableError
        return found[0]

    monkeypatch.setattr(check_config, "get", get)
    return found


def configure(fake: FakeInstallation, text: str = "", *, args: str = "", gpu: str = "GPU-1a2b3c4d") -> Path:
    path = fake.home / "config.toml"
    path.write_text(
        f"""
[supervisor]
state_dir = "{fake.state_dir}"
[engine.qwen]
command = ["{fake.program}", "serve"]
user = "{own_account().name}"
model = "org/model-9b"
port = 8001
gpus = ["{gpu}"]
{text}
[engine.qwen.args]
{args}
"""
    )
    path.chmod(0o600)
    return path


def run(module: Any, *words: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())
    code: int = module.main(parser.parse_args(list(words)))
    return code


def run_plan(path: Path) -> int:
    return run(plan, "plan", "--config", str(path))


def run_check(path: Path) -> int:
    return run(check_config, "check-config", str(path))


def complaints(err: str) -> list[str]:
    """The lines on stderr, without the one that root gets for running these tests."""
    return [line for line in err.splitlines() if "owns the machine" not in line]


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_plan_without_a_daemon(fake: FakeInstallation, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(configure(fake, args="max-num-seqs = 9")) == 0
    out, err = capsys.readouterr()
    assert complaints(err) == []
    lines = squeezed(out)
    for line in (
        "flags checked against the 317 that this vLLM has",
        "profile auto: common",
        "the kind of the GPUs is not known here: only what holds for all GPUs",
        "--enable-prefix-caching profile common (shipped)",
        f"--max-num-seqs config: {fake.home}/config.toml: engine.qwen.args.max-num-seqs",
    ):
        assert line in lines, line
    assert "--gpu-memory-utilization" not in out


@pytest.mark.parametrize("gpu", ["GPU-1a2b3c4d", "0", "0000:01:00.0", "00000000:01:00.0", "01:00.0"])
def test_plan_with_the_gpus_of_the_daemon(
    fake: FakeInstallation, answers: list[Reply], gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.append(Reply({}, GPUS.encode()))
    run_plan(configure(fake, gpu=gpu))
    lines = squeezed(capsys.readouterr().out)
    assert "profile auto: common, geforce-prefill, ampere-geforce" in lines
    assert "--gpu-memory-utilization profile ampere-geforce (shipped)" in lines


@pytest.mark.parametrize(
    ("answer", "gpu"),
    [(GPUS, "GPU-ffffffff"), (GPUS, "GPU-9c0d1e2f"), ("{}", "0"), ('{"gpus": [1]}', "0"), ("[", "0")],
)
def test_plan_for_gpus_that_the_daemon_does_not_know(
    fake: FakeInstallation, answers: list[Reply], answer: str, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.append(Reply({}, answer.encode()))
    assert run_plan(configure(fake, gpu=gpu)) == 0
    assert "profile auto: common" in squeezed(capsys.readouterr().out)


def test_hardware_is_judged_where_it_is_known(
    fake: FakeInstallation, answers: list[Reply], capsys: pytest.CaptureFixture[str]
) -> None:
    path = configure(fake, args='quantization = "fp8"')
    assert run_check(path) == 0
    assert "FP8" not in capsys.readouterr().err
    answers.append(Reply({}, GPUS.encode()))
    for command in (run_check, run_plan):
        assert command(path) == 0
        err = capsys.readouterr().err
        assert f'warning: engine.qwen.args.quantization = "fp8" in {path}: Ampere GPUs have no FP8 units' in err


def test_flags_that_the_installed_vllm_lacks_are_refused(
    fake: FakeInstallation, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configure(fake, args='speculative-model = "x"\nmax-modal-len = 5\naggregate-engine-logging = false')
    model = (
        f'cannot use engine.qwen.args.speculative-model = "x" in {path}: vLLM 0.32.0 has no --speculative-model; write '
        'it into the table speculative-config: { model = "...", num_speculative_tokens = 5 }'
    )
    length = (
        f"cannot use engine.qwen.args.max-modal-len = 5 in {path}: vLLM 0.32.0 has no --max-modal-len; "
        "did you mean max-model-len?"
    )
    logging = (
        f"cannot use engine.qwen.args.aggregate-engine-logging = false in {path}: this vLLM has no "
        "--no-aggregate-engine-logging; remove it: without it the flag is off, or has its default"
    )
    expected = [model, length, logging]
    assert run_check(path) == 2
    assert complaints(capsys.readouterr().err) == [*expected, f"cannot use the configuration {path}: 3 problems"]
    assert run_plan(path) == 2
    assert set(complaints(capsys.readouterr().err)) == set(expected)


def test_profiles_beside_the_configuration(fake: FakeInstallation, capsys: pytest.CaptureFixture[str]) -> None:
    path = configure(fake, 'profile = "mine"')
    assert run_check(path) == 2
    known = 'cannot use engine.qwen.profile = "mine" in {}: there is no such profile; known here: common'
    assert capsys.readouterr().err.startswith(known.format(path))
    own = fake.home / "profiles.toml"
    own.write_text("[mine.args]\nseed = 1\n")
    own.chmod(0o600)
    assert run_check(path) == 0
    assert run_plan(path) == 0
    lines = squeezed(capsys.readouterr().out)
    assert "profile mine: mine" in lines
    assert f"--seed profile mine ({own})" in lines
    own.write_text("[mine]\nflags = 1\n")
    for command in (run_check, run_plan):
        assert command(path) == 2
        assert capsys.readouterr().err.startswith(f"cannot use mine.flags = 1 in {own}: there is no such key")


def test_flags_that_cannot_be_read_are_a_warning(fake: FakeInstallation, capsys: pytest.CaptureFixture[str]) -> None:
    fake.says('sys.exit("no libcuda")')
    path = configure(fake, args="max-modal-len = 5")
    for command in (run_check, run_plan):
        assert command(path) == 0
        out, err = capsys.readouterr()
        (warning,) = complaints(err)
        assert warning == (
            "warning: cannot read the flags of the vLLM of engine qwen: "
            f"{fake.program} serve --help=all: it exited with 1: no libcuda; they are not checked"
        )
        assert ("flags not checked: " in " ".join(out.split())) is (command is run_plan)
    assert run_check(configure(fake, args="swap-space = 5")) == 2
    assert "vLLM 0.32.0 has no --swap-space" in capsys.readouterr().err


def test_a_vllm_that_is_not_there_yet(fake: FakeInstallation, capsys: pytest.CaptureFixture[str]) -> None:
    fake.program.unlink()
    assert run_check(configure(fake)) == 0
    (warning,) = complaints(capsys.readouterr().err)
    assert warning.startswith("warning: engine qwen would not start: cannot find the program")
