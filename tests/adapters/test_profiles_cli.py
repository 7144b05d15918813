"""`plan` and `check-config` with the flags of the installed vLLM, the GPUs of the daemon, and profiles."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.cli import check_config, machine, plan
from supervisord.config_users import own_account
from supervisord.control.client import Reply, UnreachableError
from tests.adapters.fake_installation import FakeInstallation, open_home

GPUS = """{"supervisor": {"driver": "580.1", "gpu_trouble": null}, "gpus": [
  {"uuid": "GPU-1a2b3c4d", "index": 0, "pci_id": "0000:01:00.0", "generation": "ampere", "class": "geforce",
   "name": "RTX 3090", "persistence": {"wanted": "on"}},
  {"uuid": "GPU-5e6f7a8b", "index": 1, "pci_id": "0000:02:00.0", "generation": "ada", "class": "geforce",
   "persistence": {"wanted": "leave"}},
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

    monkeypatch.setattr(machine, "get", get)
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
    assert complaints(capsys.readouterr().err)[0].startswith(known.format(path))
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
        assert complaints(capsys.readouterr().err)[0].startswith(
            f"cannot use mine.flags = 1 in {own}: there is no such key"
        )


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
    for command in (run_check, run_plan):
        assert command(configure(fake)) == 2
        assert complaints(capsys.readouterr().err)[0].startswith("cannot find the program")


def test_an_error_of_a_flag_hides_no_warning_of_another(
    fake: FakeInstallation, answers: list[Reply], capsys: pytest.CaptureFixture[str]
) -> None:
    answers.append(Reply({}, GPUS.encode()))
    path = configure(fake, args='quantization = "fp8"\nblock-size = 17\nmax-modal-len = 5\ndisable-log-stats = true')
    assert run_check(path) == 2
    *lines, count = complaints(capsys.readouterr().err)
    for line, key in zip(lines, ("block-size", "quantization", "disable-log-stats", "max-modal-len"), strict=True):
        assert f"engine.qwen.args.{key} = " in line
    assert [line.startswith("warning: ") for line in lines] == [True, True, False, False]
    assert count.endswith(": 2 problems")


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_warned_of(
    fake: FakeInstallation, answers: list[Reply], capsys: pytest.CaptureFixture[str]
) -> None:
    path = configure(fake, gpu="GPU-1a2b3c4e")
    assert run_check(path) == 0
    assert "no such GPU" not in capsys.readouterr().err
    answers.append(Reply({}, GPUS.encode()))
    for command in (run_check, run_plan):
        assert command(path) == 0
        (warning,) = complaints(capsys.readouterr().err)
        assert warning == (
            f'warning: engine.qwen.gpus = "GPU-1a2b3c4e" in {path}: there is no such GPU on this machine; known: '
            "GPU 0 (GPU-1a2b3c4d), GPU 1 (GPU-5e6f7a8b), GPU 2 (GPU-9c0d1e2f)"
        )


@pytest.mark.parametrize("gpu", ["GPU-1A2B3C4D", "gpu-1a2b3c4d", "01:00.0", "MIG-1a2b3c4d-0000"])
def test_gpus_that_are_there_by_any_name(
    fake: FakeInstallation, answers: list[Reply], gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.append(Reply({}, GPUS.encode()))
    assert run_check(configure(fake, gpu=gpu)) == 0
    assert complaints(capsys.readouterr().err) == []


@pytest.mark.parametrize(
    "blind",
    [
        ('"driver": "580.1"', '"driver": null'),
        ('"gpu_trouble": null', '"gpu_trouble": {"code": "x", "message": "y"}'),
        ('"supervisor"', '"other"'),
    ],
)
def test_what_a_daemon_does_not_see_is_not_missed(
    fake: FakeInstallation, answers: list[Reply], blind: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    answers.append(Reply({}, GPUS.replace(*blind).encode()))
    assert run_check(configure(fake, gpu="GPU-1a2b3c4e")) == 0
    assert complaints(capsys.readouterr().err) == []


def test_plan_shows_the_indices_of_now(
    fake: FakeInstallation, answers: list[Reply], capsys: pytest.CaptureFixture[str]
) -> None:
    path = configure(fake, gpu='02:00.0", "GPU-1a2b3c4d')

    def shown() -> str:
        run_plan(path)
        (line,) = [line for line in squeezed(capsys.readouterr().out) if line.startswith("CUDA_VISIBLE_DEVICES=")]
        return line

    by_name = "02:00.0,GPU-1a2b3c4d"
    unresolved = f"CUDA_VISIBLE_DEVICES={by_name} (supervisor: from gpus; each launch puts their indices there)"
    assert shown() == unresolved
    answers.append(Reply({}, GPUS.encode()))
    found = f"CUDA_VISIBLE_DEVICES=1,0 (supervisor: the indices of gpus ({by_name}) now; each launch looks them up)"
    assert shown() == found
    answers[0] = Reply({}, GPUS.replace('"wanted": "on"', '"wanted": null', 1).encode())
    assert shown() == unresolved  # one of them does not answer


TWO = """
[engine.other]
command = ["{program}", "serve"]
user = "{user}"
model = "org/model-9b"
port = 8002
gpus = ["{gpu}"]
[engine.other.args]
gpu-memory-utilization = 0.6
"""


def share(fake: FakeInstallation, other: str, args: str = "gpu-memory-utilization = 0.6") -> Path:
    path = configure(fake, args=args)
    text = TWO.format(program=fake.program, user=own_account().name, gpu=other)
    path.write_text(path.read_text() + text)
    return path


@pytest.mark.parametrize("other", ["01:00.0", "0"])
def test_engines_that_share_a_gpu_under_two_names(
    fake: FakeInstallation, answers: list[Reply], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = share(fake, other)
    assert run_check(path) == 0
    told = f"engine.other.gpus in {path}: qwen and other name their GPUs in different ways (UUID, PCI id, index)"
    assert len([line for line in complaints(capsys.readouterr().err) if line.startswith(f"warning: {told}")]) == 1
    answers.append(Reply({}, GPUS.encode()))
    for command in (run_check, run_plan):
        assert command(path) == 2
        lines = complaints(capsys.readouterr().err)
        told = f"cannot use engine.other.gpus in {path}: qwen and other share a GPU and claim 0.6 + 0.6 of its memory"
        assert len([line for line in lines if line.startswith(told)]) == 1
        assert not any("in different ways" in line for line in lines)
    assert run_check(share(fake, other, args="")) == 0  # what vLLM would take by default is no more than a warning
    assert "warning: engine.other.gpus" in (err := capsys.readouterr().err)
    assert "claim 0.9 + 0.6 of its memory" in err


@pytest.mark.parametrize("other", ["02:00.0", "GPU-5e6f7a8b"])
def test_engines_on_gpus_of_their_own(
    fake: FakeInstallation, answers: list[Reply], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.append(Reply({}, GPUS.encode()))
    assert run_check(share(fake, other)) == 0
    assert complaints(capsys.readouterr().err) == []


def test_small_claims_under_any_names_are_no_matter(fake: FakeInstallation, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(share(fake, "01:00.0", args="gpu-memory-utilization = 0.4")) == 0
    assert complaints(capsys.readouterr().err) == []


def test_overrides_of_persistence_that_mean_no_gpu(
    fake: FakeInstallation, answers: list[Reply], capsys: pytest.CaptureFixture[str]
) -> None:
    path = configure(fake)
    names = ("GPU-1a2b3c4d", "00000000:02:00.0", "*3090", "GPU-1a2b3c4e", "03:00.0", "NVIDIA A100*")
    table = "\n".join(f'"{name}" = "on"' for name in names)
    path.write_text(f"{path.read_text()}\n[gpu.persistence_override]\n{table}\n")
    assert run_check(path) == 0
    assert complaints(capsys.readouterr().err) == []
    answers.append(Reply({}, GPUS.encode()))
    assert run_check(path) == 0
    known = "GPU 0 (GPU-1a2b3c4d) RTX 3090, GPU 1 (GPU-5e6f7a8b), GPU 2 (GPU-9c0d1e2f)"
    warnings = complaints(capsys.readouterr().err)
    for warning, key in zip(warnings, ("GPU-1a2b3c4e", '"03:00.0"', '"NVIDIA A100*"'), strict=True):
        told = f'gpu.persistence_override.{key} = "on" in {path}: it means no GPU of this machine; known: {known}'
        assert warning == f"warning: {told}"
