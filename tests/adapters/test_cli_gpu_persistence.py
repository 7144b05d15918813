"""`gpu persistence`: the real probe over the simulated library, without a daemon."""

from __future__ import annotations

import os
from pathlib import Path

import pynvml
import pytest

from supervisord.cli import gpu_persistence, main
from tests.sim.nvml import GIB, NvmlBox, SimGpu

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can set persistence mode, also in the simulated library")
FOREIGN = 4_194_304 - 7


class Machine:
    """A simulated machine, its configuration, and the command."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.config = folder / "config.toml"
        self.configure("")

    def make(self, *kinds: str) -> NvmlBox:
        box = NvmlBox.make(self._folder / "nvml", *kinds)
        for name, value in box.env.items():
            self._monkeypatch.setenv(name, value)
        return box

    def configure(self, text: str) -> None:
        self.config.write_text(text)
        self.config.chmod(0o644)

    def run(self, *options: str) -> tuple[int, list[str], list[str]]:
        """Exit code, lines of stdout, lines of stderr without the program's name."""
        code = main(["gpu", "persistence", "--config", str(self.config), *options])
        out, err = self._capsys.readouterr()
        return code, out.splitlines(), [line.removeprefix("vllm-supervisor: ") for line in err.splitlines()]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Machine:
    return Machine(tmp_path, monkeypatch, capsys)


def mode(gpu: SimGpu) -> str:
    return gpu.get("persistence")


@ROOT
def test_every_gpu_gets_what_the_policy_wants(machine: Machine) -> None:
    box = machine.make("rtx3090", "rtx4090", "a100", "gb10")
    ampere, ada, a100, gb10 = box.gpus()
    ampere.set(persistence=1)
    a100.set(persistence=1)
    left = "default for blackwell integrated: left as it is"
    assert machine.run() == (
        0,
        [
            f"GPU 0 ({ampere.uuid}), NVIDIA GeForce RTX 3090: wanted off, was on, now off; default for ampere geforce",
            f"GPU 1 ({ada.uuid}), NVIDIA GeForce RTX 4090: wanted on, was off, now on; default for ada geforce",
            f"GPU 2 ({a100.uuid}), NVIDIA A100-SXM4-80GB: wanted on, was on, now on; default for ampere datacenter",
            f"GPU 3 ({gb10.uuid}), NVIDIA GB10: wanted leave, was off, now off; {left}",
        ],
        [],
    )
    assert [mode(gpu) for gpu in box.gpus()] == ["0", "1", "1", "0"]
    code, lines, _ = machine.run()
    assert code == 0
    assert "wanted off, was off, now off" in lines[0]


@ROOT
def test_overrides_hold_over_the_policy(machine: Machine) -> None:
    box = machine.make("rtx3090", "rtx4090", "h200")
    first, second, third = box.gpus()
    machine.configure(
        f'[gpu]\npersistence = "off"\n[gpu.persistence_override]\n"{first.uuid}" = "on"\n"*4090*" = "leave"\n'
    )
    third.set(persistence=1)
    code, lines, errors = machine.run()
    assert (code, errors) == (0, [])
    assert [mode(gpu) for gpu in box.gpus()] == ["1", "0", "0"]
    assert f'wanted on, was off, now on; persistence_override."{first.uuid}"' in lines[0]
    assert (
        f'{second.uuid}), NVIDIA GeForce RTX 4090: wanted leave, was off, now off; persistence_override."*4090*"'
        in (lines[1])
    )


def test_a_dry_run_sets_nothing_and_says_whether_it_would(machine: Machine) -> None:
    ada, gb10, busy = machine.make("rtx4090", "gb10", "rtx3090").gpus()
    busy.set(persistence=1)
    busy.process(FOREIGN, GIB)
    expected = [
        f"GPU 0 ({ada.uuid}), NVIDIA GeForce RTX 4090: is off, would be set on; default for ada geforce",
        f"GPU 1 ({gb10.uuid}), NVIDIA GB10: is off, would be left; default for blackwell integrated: left as it is",
        f"GPU 2 ({busy.uuid}), NVIDIA GeForce RTX 3090: is on, wanted off; default for ampere geforce",
    ]
    told = [f"cannot set persistence mode of GPU 2 ({busy.uuid}): processes use it"]
    assert machine.run("--dry-run") == (1, expected, told)
    assert [mode(gpu) for gpu in (ada, gb10, busy)] == ["0", "0", "1"]


def test_a_dry_run_where_all_is_as_wanted(machine: Machine) -> None:
    (gpu,) = machine.make("rtx4090").gpus()
    gpu.set(persistence=1)
    line = f"GPU 0 ({gpu.uuid}), NVIDIA GeForce RTX 4090: is on, as wanted; default for ada geforce"
    assert machine.run("--dry-run") == (0, [line], [])


def test_what_stands_in_the_way_is_named(machine: Machine) -> None:
    busy, mig, gb10, fine = machine.make("rtx3090", "h100", "gb10", "h200").gpus()
    machine.configure('[gpu.persistence_override]\n"NVIDIA GB10" = "on"\n')
    busy.set(persistence=1)
    busy.process(FOREIGN, GIB)
    mig.set(mig_mode=1)
    fine.set(persistence=1)
    code, lines, errors = machine.run()
    assert code == 1
    assert len(lines) == 4
    never = "on a GPU that shares memory with the CPU it is never changed"
    assert errors == [
        f"cannot set persistence mode of GPU 0 ({busy.uuid}): processes use it",
        f"cannot set persistence mode of GPU 1 ({mig.uuid}): MIG is on",
        f"cannot set persistence mode of GPU 2 ({gb10.uuid}): {never}",
    ]
    assert [mode(gpu) for gpu in (busy, mig, gb10)] == ["1", "0", "0"]


@pytest.mark.parametrize(
    ("answer", "code", "why"),
    [(pynvml.NVML_ERROR_NO_PERMISSION, 4, "it needs root"), (pynvml.NVML_ERROR_UNKNOWN, 1, "NVML code 999")],
)
def test_a_refusal_of_the_driver_is_told(machine: Machine, answer: int, code: int, why: str) -> None:
    (gpu,) = machine.make("h200").gpus()
    gpu.fault("nvmlDeviceSetPersistenceMode", answer)
    found, lines, errors = machine.run()
    assert found == code
    assert "wanted on, was off, now off" in lines[0]
    assert errors == [f"cannot set persistence mode of GPU 0 ({gpu.uuid}): {why}"]


def test_it_is_read_back(machine: Machine) -> None:
    (gpu,) = machine.make("h200").gpus()
    gpu.fault("nvmlDeviceSetPersistenceMode", pynvml.NVML_SUCCESS)
    code, lines, errors = machine.run()
    assert code == 1
    assert "wanted on, was off, now off" in lines[0]
    assert errors[0].endswith("it was set, and is something else again (nvidia-persistenced?)")


@ROOT
def test_a_lost_gpu_does_not_keep_the_others_from_theirs(machine: Machine) -> None:
    lost, fine = machine.make("h200", "h200").gpus()
    lost.lose()
    code, lines, errors = machine.run()
    assert code == 1
    assert mode(fine) == "1"
    assert "wanted on, was off, now on" in lines[1]
    assert errors == ["cannot set persistence mode of GPU 0 (UUID unknown): it does not answer (NVML code 15)"]


def test_a_gpu_without_the_mode_is_left(machine: Machine) -> None:
    (gpu,) = machine.make("h200").gpus()
    gpu.set(persistence=None)
    code, lines, errors = machine.run()
    assert (code, errors) == (0, [])
    assert lines[0].endswith("wanted leave, was -, now -; this GPU has no such mode")


def test_a_mode_that_cannot_be_read_is_not_set(machine: Machine) -> None:
    (gpu,) = machine.make("h200").gpus()
    gpu.fault("nvmlDeviceGetPersistenceMode", pynvml.NVML_ERROR_UNKNOWN)
    code, lines, errors = machine.run()
    assert code == 1
    assert "wanted on, was -, now -" in lines[0]
    assert errors[0].endswith("how it is now cannot be read")


@pytest.mark.parametrize(
    ("problem", "code", "text"),
    [
        (9, 1, "the NVIDIA driver is not loaded"),
        (18, 1, "the NVIDIA driver was upgraded underneath"),
        (4, 4, "cannot open the NVIDIA devices: no permission"),
        (77, 1, "NVML fails with code 77"),
    ],
)
def test_without_a_driver_the_reason_is_said(machine: Machine, problem: int, code: int, text: str) -> None:
    machine.make("h200").fault("nvmlInitWithFlags", problem)
    found, lines, errors = machine.run()
    assert (found, lines) == (code, [])
    assert errors[0].startswith(f"cannot set persistence mode: {text}")


def test_a_machine_without_gpus_is_fine(machine: Machine) -> None:
    machine.make()
    assert machine.run() == (0, ["no GPUs"], [])


def test_a_driver_that_hangs_is_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_persistence, "PATIENCE_S", 1.0)
    machine.make("h200").fault("nvmlDeviceGetCount_v2", "hang 60")
    code, lines, errors = machine.run()
    assert (code, lines) == (6, [])
    assert errors[0].startswith("cannot set persistence mode: NVML has not answered for 1 s")


def test_a_probe_that_cannot_start_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.make("h200")
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    code, lines, errors = machine.run()
    assert (code, lines) == (1, [])
    assert errors[0].startswith("cannot set persistence mode: cannot start ")


def test_an_invalid_configuration_is_2_and_nothing_is_touched(machine: Machine) -> None:
    (gpu,) = machine.make("h200").gpus()
    machine.configure('[gpu]\npersistence = "of"\n')
    code, lines, errors = machine.run()
    assert (code, lines) == (2, [])
    assert 'did you mean "off"?' in errors[0]
    assert mode(gpu) == "0"
    machine.config.unlink()
    assert machine.run()[0] == 2


def test_it_needs_no_daemon_and_no_model(machine: Machine) -> None:
    (gpu,) = machine.make("h200").gpus()
    gpu.set(persistence=1)
    user = 'user = "nobody"\n' if os.geteuid() == 0 else ""
    machine.configure(f'[engine.qwen]\nmodel = "/not/mounted/yet"\nport = 8001\n{user}')
    assert machine.run("--dry-run")[0] == 0
