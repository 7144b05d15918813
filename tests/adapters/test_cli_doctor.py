"""`doctor` as it is called: the real probe over the simulated library, real files, no daemon or a scripted one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from supervisord.cli import doctor, main
from supervisord.doctor import facts
from supervisord.doctor.checks import CHECKS
from supervisord.doctor.examine import Result
from supervisord.doctor.findings import fail, not_checked, ok, warn
from tests.adapters.fake_daemon import FakeDaemon
from tests.adapters.fake_installation import FakeInstallation, open_home
from tests.sim.nvml import NvmlBox

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads(files("supervisord").joinpath("doctor.schema.json").read_text())
NOBODY = 65534


class Machine:
    """This machine, with other GPUs and a configuration."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.socket = str(folder / "none")
        self.configure("")

    def configure(self, engine: str) -> None:
        self.config.write_text(f'[supervisor]\nstate_dir = "{self.folder}/state"\nlisten = ""\n{engine}')
        self.config.chmod(0o644)

    def nvml(self, *kinds: str) -> NvmlBox:
        box = NvmlBox.make(self.folder / "nvml", *kinds)
        for name, value in box.env.items():
            self._monkeypatch.setenv(name, value)
        return box

    def run(self) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        """Exit code and findings by the name of their check; what is printed fits the schema."""
        code = main(["doctor", "--json", "--config", str(self.config), "--socket", self.socket])
        out, err = self._capsys.readouterr()
        assert err == ""
        document = json.loads(out)
        jsonschema.validate(document, SCHEMA)
        found: dict[str, list[dict[str, Any]]] = {}
        for check in document["checks"]:
            found.setdefault(check["name"], []).append(check)
        assert (code == 1) is any(check["verdict"] == "fail" for check in document["checks"])
        return code, found

    def verdicts(self) -> dict[str, set[str]]:
        """What each check comes to."""
        return {name: {check["verdict"] for check in found} for name, found in self.run()[1].items()}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Machine]:
    with open_home() as folder:
        yield Machine(folder, monkeypatch, capsys)


def engine(program: object, gpus: str = "0", **keys: str) -> str:
    lines = "".join(f"{name} = {value}\n" for name, value in keys.items())
    named = f'["{gpus}"]' if gpus else "[]"
    user = 'user = "root"\n' if os.geteuid() == 0 else ""
    return f'[engine.q]\ncommand = ["{program}", "serve"]\nmodel = "o/m"\nport = 65001\ngpus = {named}\n{user}{lines}'


# --- machines ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")
def test_this_machine_without_a_gpu(machine: Machine) -> None:
    _, found = machine.run()
    assert found["driver"][0]["message"] == "no NVIDIA GPU here, and no engine of the configuration needs one"
    assert not {"nvml", "gpus", "device_files", "persistenced", "vllm_cuda"} & found.keys()
    machine.configure(engine("/nowhere/vllm"))
    code, found = machine.run()
    assert code == 1
    assert found["driver"][0]["verdict"] == "fail"
    assert "engine q needs it" in found["driver"][0]["message"]
    assert found["nvml"][0]["verdict"] == "fail"
    assert found["engine_start"][0]["message"].startswith('cannot find the program "/nowhere/vllm" of engine.q')


def test_a_3090_and_a_gb10(machine: Machine) -> None:
    box = machine.nvml("rtx3090", "gb10")
    box.gpu(0).set(nvlinks=4, nvlinks_up=0)
    machine.configure(engine(FakeInstallation(machine.folder).program))
    _, found = machine.run()
    assert found["nvml"][0]["message"].endswith("driver 580.159.04, CUDA up to 13.0, 2 GPUs")
    assert found["gpus"][0]["message"] == "NVIDIA GeForce RTX 3090, NVIDIA GB10"
    assert found["persistence_mode"][0]["verdict"] == "ok"
    assert found["persistenced"][0]["verdict"] == "ok"
    assert found["gpu_recovery"][0]["verdict"] == "ok"
    assert "not connected" in found["nvlink"][0]["message"]
    assert found["vllm_version"][0]["message"] == "vLLM 0.32.0"
    box.gpu(1).set(retired_pending=1)
    box.gpu(0).set(ecc_uncorrected_volatile=2)
    _, found = machine.run()
    assert {check["subject"][:5] for check in found["gpu_memory_errors"]} == {"GPU 0", "GPU 1"}


def test_nvswitches_without_a_fabric(machine: Machine) -> None:
    box = machine.nvml("h100", "h100")
    for gpu in box.gpus():
        gpu.set(nvlinks=18, nvlinks_up=18, fabric_state=1)
    _, found = machine.run()
    assert "the NVLink fabric of GPU 0 has not started" in found["fabric_manager"][0]["message"]
    box.gpu(0).set(fabric_state=3)
    box.gpu(1).set(fabric_state=3, nvlinks_up=17)
    _, found = machine.run()
    assert found["fabric_manager"][0]["verdict"] == "ok"
    assert found["nvlink"][0]["message"].startswith("17 of 18 NVLinks are up")


@pytest.mark.parametrize(
    ("code", "words"), [(18, "upgraded underneath"), (9, "not loaded"), (4, "no permission"), (999, "Unknown")]
)
def test_a_broken_driver(machine: Machine, code: int, words: str) -> None:
    machine.nvml("rtx3090").fault("nvmlInitWithFlags", code)
    machine.configure(engine("/nowhere/vllm"))
    result, found = machine.run()
    assert result == 1
    assert found["nvml"][0]["verdict"] == "fail"
    assert words in found["nvml"][0]["message"]
    if code == 18:
        assert found["driver_versions"][0]["verdict"] == "fail"
        assert "reboot" in found["driver_versions"][0]["remedy"]


def test_nvml_that_hangs_costs_its_own_answer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "NVML_S", 1.5)
    machine.nvml("rtx3090").fault("nvmlDeviceGetCount_v2", "hang 600")
    machine.configure(engine("/nowhere/vllm"))
    began = time.monotonic()
    code, found = machine.run()
    assert time.monotonic() - began < 60
    assert code == 1
    assert found["nvml"][0]["message"].startswith("NVML does not answer")
    assert found["gpus"][0]["verdict"] == "not_checked"
    assert found["disk"]


def test_an_old_driver_and_an_old_vllm(machine: Machine) -> None:
    machine.nvml("rtx3090").old_driver()
    installation = FakeInstallation(machine.folder)
    installation.release("0.8.5")
    torch = installation.packages / "torch"
    torch.mkdir()
    (torch / "version.py").write_text("__version__ = '2.6.0+cu124'\ncuda: Optional[str] = '12.4'\n")
    machine.configure(engine(installation.program))
    _, found = machine.run()
    assert found["vllm_version"][0]["verdict"] == "warn"
    assert found["vllm_cuda"][0]["verdict"] == "fail"
    assert "has CUDA 12.4, the driver goes up to 11.4" in found["vllm_cuda"][0]["message"]
    assert installation.asked() == []


def test_what_an_operator_closed_stays_closed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(facts, "look", lambda *arguments: asked.append(arguments))
    told = {
        "supervisor": {"gpu_trouble": {"code": "gpu_released", "message": "NVML is closed"}},
        "engines": [],
        "gpus": [],
    }
    monkeypatch.setattr(facts, "_daemon", lambda _: told)
    machine.configure(engine("/nowhere/vllm"))
    _, found = machine.run()
    assert (found["nvml"][0]["verdict"], found["nvml"][0]["message"]) == ("not_checked", "NVML is closed")
    assert asked == []


def test_beside_a_daemon(machine: Machine) -> None:
    with FakeDaemon(machine.folder) as daemon:
        machine.socket = daemon.socket
        _, found = machine.run()
    assert found["daemon"][0]["verdict"] in {"ok", "warn"}  # it is of version 0.1.0
    assert "does not run" not in found["daemon"][0]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[",
        b"\xff\xfe",
        b"[engine.q]\n",
        b"[supervisor]\nstate_dir = 5\n",
        b"engine = 3\n",
        b"[engine.q]\ncommand = []\n",
    ],
)
def test_no_configuration_makes_it_stumble(machine: Machine, content: bytes) -> None:
    machine.config.write_bytes(content)
    _, found = machine.run()
    assert not any("internal error" in check["message"] for checks in found.values() for check in checks)


def test_a_bug_in_one_source_leaves_the_others(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> object:
        raise ValueError("odd")

    monkeypatch.setattr(facts, "survey", breaks)
    monkeypatch.setattr(facts, "look", breaks)
    code, found = machine.run()
    assert code == 1
    assert "internal error: ValueError: odd" in found["configuration"][0]["message"]
    assert found["disk"]


@pytest.mark.parametrize("path", ["loop", "file/below", "x" * 300])
def test_a_path_that_cannot_be(machine: Machine, path: str) -> None:
    (machine.folder / "loop").symlink_to("loop")
    (machine.folder / "file").touch()
    machine.config = machine.folder / path
    code, found = machine.run()
    assert code == 1
    assert found["configuration"][0]["verdict"] == "fail"


def test_no_configuration(machine: Machine) -> None:
    machine.config.unlink()
    code, found = machine.run()
    assert code == 1
    assert found["configuration"][0]["message"].startswith("there is no configuration")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_as_nobody(machine: Machine) -> None:
    closed = machine.folder / "closed"
    closed.mkdir(mode=0o700)
    machine.configure(engine(FakeInstallation(closed).program, gpus=""))
    found = as_nobody(machine)
    assert "/closed/venv/bin/vllm" in found["engine_start"]["message"]
    assert found["engine_start"]["verdict"] == "not_checked"
    assert found["engine_start"]["remedy"] == "run this as root"
    assert "vllm_version" not in found
    machine.config.chmod(0o600)
    found = as_nobody(machine)
    assert found["configuration"]["verdict"] == "not_checked"
    assert found["configuration"]["remedy"] == "run this as root, or as a member of vllm-admin"


def as_nobody(machine: Machine) -> dict[str, dict[str, Any]]:
    # Once before, so that all is imported: nobody may not get at the interpreter's own files.
    script = f"""import contextlib, io, os, sys
from supervisord.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main()
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
sys.exit(main())"""
    command = [sys.executable, "-c", script, "doctor", "--json", "--config", str(machine.config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.stderr == ""
    checks = json.loads(done.stdout)["checks"]
    assert not any("internal error" in check["message"] for check in checks)
    return {check["name"]: check for check in checks}


# --- what people see --------------------------------------------------------------------------------------------------


def results() -> list[Result]:
    by_name = {check.name: check for check in CHECKS}
    return [
        Result(by_name["driver"], ok("NVIDIA driver 580.159.04 is loaded")),
        Result(by_name["nvml"], fail("the NVIDIA driver was upgraded underneath", "reboot")),
        Result(by_name["disk"], warn("5.0 of 100 GiB are free on the disk of /var", "free some space: du -xh /var")),
        Result(by_name["gpu_quarantine"], not_checked("only the daemon knows")),
        Result(by_name["port"], fail("it is held by pid 7 (nginx)", "stop that one", "engine qwen")),
    ]


WIDE = """NVIDIA driver
  ok    driver          NVIDIA driver 580.159.04 is loaded
machine
  warn  disk            5.0 of 100 GiB are free on the disk of /var
                        do: free some space: du -xh /var
GPUs
  -     gpu_quarantine  not checked: only the daemon knows

what failed
  fail  nvml            the NVIDIA driver was upgraded underneath
                        do: reboot
  fail  port            engine qwen: it is held by pid 7 (nginx)
                        do: stop that one

2 failed, 1 warned, 1 not checked, 1 ok
"""


def test_what_fails_stands_last() -> None:
    assert doctor.view(results(), width=100, colour=False) == WIDE


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    text = doctor.view(results(), width=width, colour=False)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "engine qwen: it is held by pid 7" in words


def test_colours_change_nothing_else() -> None:
    coloured = doctor.view(results(), width=100, colour=True)
    assert "\x1b[31mfail\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == WIDE


def test_text_of_others_cannot_drive_the_terminal() -> None:
    odd = [Result(CHECKS[0], fail("pid 7 (\x1b]0;title\x07\x1b[2J)", "end\x1b[31m it", "engine \x1b[1m"))]
    assert "\x1b" not in doctor.view(odd, width=100, colour=False)


def test_the_table_for_people_on_this_machine(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--config", str(machine.config), "--socket", machine.socket])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert re.search(r"^\d+ failed, \d+ warned, \d+ not checked, \d+ ok$", out, re.MULTILINE)
