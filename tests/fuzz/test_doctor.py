"""What `doctor` looks at: files and answers of a machine where anything may be wrong, its GPUs, daemon and history."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import pytest

from supervisord.cli import doctor
from supervisord.core.spec import EngineSpec
from supervisord.doctor import running
from supervisord.doctor.checks import CHECKS
from supervisord.doctor.examine import Result, document
from supervisord.doctor.facts import Facts, Unknown
from supervisord.gpu.protocol import ProtocolError, decode_survey
from tests.adapters.doctor_box import DOWN, Sick
from tests.adapters.fake_installation import FakeInstallation
from tests.adapters.test_gpu_protocol import SWEEP
from tests.fuzz.trying import NASTY, bounded, fuzz, json_bytes, mutated, same_kinds

TORCH: Final = "__version__ = '2.8.0+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
UNIT: Final = {
    "LoadState": "loaded", "ActiveState": "failed", "SubState": "running", "UnitFileState": "enabled",
    "Result": "exit-code", "ExecMainStatus": "1", "NeedDaemonReload": "no", "TimeoutStopUSec": "1min 30s",
    "LimitNOFILE": "524288",
}  # fmt: skip
DAEMON: Final = {
    "supervisor": {"version": "1.0", "pid": 7, "launcher": "plain", "config_error": None, "gpu_trouble": None},
    "engines": [{"name": "q", "state": "ready", "pid": 41}],
    "gpus": [{"uuid": "GPU-1", "pci_id": "0000:1b:00.0", "index": 0, "quarantined": True,
    "reasons": [{"code": "x", "message": "m"}]}],
}  # fmt: skip
FILES: Final = {
    "/sys/module/nvidia/version": "580.159.04\n",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04\n",
    "/sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:1b:00.0/class": "0x030000\n",
    "/proc/41/comm": "vllm\n",
    "/proc/41/cmdline": "/v/bin/python3\0/v/bin/vllm\0serve\0org/model\0",
    "/proc/41/cgroup": "0::/vllm.slice/vllm-engine-q.service\n",
    "/proc/42/cmdline": "python3\0-m\0vllm.entrypoints.openai.api_server\0",
    "/proc/42/cgroup": "0::/user.slice/user-1000.slice/session-1.scope\n",
    "/etc/group": "root:x:0:\nvllm-admin:x:990:\nvideo:x:44:vllm\n",
    "/etc/systemd/system/vllm-a.service": "[Service]\nExecStart=/v/bin/vllm serve \\\n org/model --port 8000\n",
    "/etc/crontab": "*/5 * * * * root systemctl restart vllm\n",
    "/etc/cron.d/vllm": "# vllm\n0 3 * * * root pkill -f vllm\n",
    "/etc/supervisor/conf.d/a.conf": "[program:a]\ncommand=/v/bin/vllm serve org/model\n",
    "/etc/needrestart/conf.d/a.conf": "$nrconf{override_rc}{qr(^vllm-supervisor)} = 0;\n",
}
VERSION: Final = ("systemctl", "--version")
JOURNALD: Final = ("systemd-analyze", "cat-config", "systemd/journald.conf")
SAYS: Final = {VERSION: "systemd 252 (252.38-1)\n+PAM", JOURNALD: "[Journal]\nStorage=none\n"}
NAMES: Final = ("vllm-0.32.0.dist-info", "nvidia_cuda_runtime_cu12-12.8.90.dist-info", "flashinfer")


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    global BOX, PACKAGES  # noqa: PLW0603 (what is tried is no fixture of a function)
    folder = tmp_path_factory.mktemp("doctor")
    BOX = Sick(folder / "box")
    (BOX.root / "run/systemd/system").mkdir(parents=True)
    installation = FakeInstallation(folder / "home")
    PACKAGES = installation.packages
    (PACKAGES / "torch").mkdir()
    BOX.text = f"""
[supervisor]
state_dir = "{installation.state_dir}"
[engine.q]
command = ["{installation.program}", "serve"]
model = "org/model"
port = 8001
gpus = ["0", "GPU-1"]
"""


BOX: Sick
PACKAGES: Path


@fuzz(60, slow=4)
def test_machines(rng: random.Random) -> None:
    """Of each two files, answers or names one is not as it should be."""
    seen = b""
    for place, text in FILES.items():
        data = mutated([text.encode()], rng) if rng.random() < 0.5 else text.encode()
        BOX.write(place, "").write_bytes(data)
        seen += data
    name = mutated([b"vllm", b"a) S (b"], rng)[:15]  # all else in this file is the kernel's
    BOX.write("/proc/41/stat", "").write_bytes(b"41 (" + name + b") S 1 41 41 0 -1 1 0 0 0 1 1 0 0 20 0 1 0 99 1 1 1\n")
    torch = mutated([TORCH.encode()], rng)
    (PACKAGES / "torch" / "version.py").write_bytes(torch)
    names = [_name(mutated([name.encode() for name in NAMES], rng)) for _ in range(3)]
    folders = [path for name in dict.fromkeys(names) if name and not (path := PACKAGES / name).exists()]
    for path in folders:
        path.mkdir()
    BOX.says = {command: mutated([text.encode()], rng).decode(errors="replace") for command, text in SAYS.items()}
    BOX.unit = {key: rng.choice((value, *NASTY)) if rng.random() < 0.3 else value for key, value in UNIT.items()}
    BOX.daemon = rng.choice((DOWN, Unknown("no", "denied"), same_kinds(DAEMON, rng)))
    with bounded("doctor: machine", seen + torch + repr((names, BOX.says, BOX.unit, BOX.daemon)).encode(), 100e-6):
        _examined(BOX.facts(), rng)
    for path in folders:
        path.rmdir()


def _name(data: bytes) -> str:
    """A name that a file may have."""
    text = data.replace(b"\0", b"").replace(b"/", b"")[:200].decode(errors="ignore")
    return text if text.strip(".") else ""


def _examined(facts: Facts, rng: random.Random) -> None:
    """Every check finds something or nothing, and all of it can be shown."""
    results = [Result(check, finding) for check in CHECKS for finding in check.ask(facts)]
    shown = doctor.view(results, width=rng.choice((1, 40, 100, 200)), colour=False)
    assert all(line.isprintable() for line in shown.split("\n"))
    for found in json.loads(json.dumps(document(results)))["checks"]:
        assert all(str(value).isprintable() for value in found.values())


LINKED: Final = {
    "nvlinks": 18, "nvlinks_up": 17, "fabric_state": 3, "fabric_status": 0, "retired_pending": False,
}  # fmt: skip
SURVEYED: Final = {**SWEEP, "cuda": 13000, "gpus": [{**gpu, **LINKED} for gpu in SWEEP["gpus"]]}


@fuzz(150, slow=2)
def test_gpus(rng: random.Random) -> None:
    data = json_bytes([SURVEYED], rng)
    with bounded("doctor: GPUs", data):
        try:
            survey = decode_survey(data, 1000.0)
        except ProtocolError:
            return
        BOX.readings, BOX.depths, BOX.cuda, BOX.problem = survey.sweep.gpus, survey.depths, survey.cuda, None
        facts = BOX.facts()
        results = [Result(check, finding) for check in CHECKS if check.group == "GPUs" for finding in check.ask(facts)]
        assert all(line.isprintable() for line in doctor.view(results, width=80, colour=False).split("\n"))


STARTS: Final[list[dict[str, Any]]] = [
    {"kind": "answering", "generation": 1, "numbers": {"took_s": 50.5}},
    {"kind": "answering", "generation": 2, "numbers": {"took_s": 60}},
    {"kind": "exited", "generation": 3, "reason": "start_timeout", "numbers": {}},
]


@fuzz(200)
def test_start_times(rng: random.Random) -> None:
    """Events as the daemon or the file of its history gives them."""
    events = same_kinds(same_kinds(STARTS, rng), rng)
    with bounded("doctor: events", repr(events)):
        found = running._judged(EngineSpec(name="q", model="m", port=1), events, "engine q")
        assert found.message
