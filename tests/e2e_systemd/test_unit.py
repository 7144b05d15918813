"""What the daemon's own unit and its sandbox let it do, and what people do past it with systemd's own commands."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tests.e2e_systemd.node import UNIT
from tests.e2e_systemd.packaged import SLICE, PackagedNode
from tests.sim.engine import wait_until
from tests.sim.nvml import NvmlBox

ENGINE_UNIT = "vllm-engine-a.service"
KMSG = Path("/dev/kmsg")


@pytest.fixture
def node(packaged: PackagedNode) -> PackagedNode:
    return packaged


def test_a_model_that_loads_longer_than_every_timeout_of_the_unit(node: PackagedNode) -> None:
    """READY=1 waits for it longer than a start may take; from then on it loads longer than the watchdog waits."""
    node.mood(ready_delay_s=22)
    node.configure("a", supervisor={"ready_timeout_s": 10})
    node.drop_in("[Service]\nTimeoutStartSec=5\nWatchdogSec=10\n")
    began = time.monotonic()
    node.systemctl("restart", UNIT)
    assert time.monotonic() - began > 9
    assert node.engine("a")["state"] == "starting"
    assert node.wait_state("a", "ready")["generation"] == 1
    assert node.machine.show(UNIT, "NRestarts", "ActiveState") == {"NRestarts": "0", "ActiveState": "active"}


@pytest.mark.parametrize("unit", [ENGINE_UNIT, SLICE])
def test_what_somebody_stops_past_the_daemon_stays_stopped(node: PackagedNode, unit: str) -> None:
    node.with_engine("a")
    node.systemctl("stop", unit)
    stopped = node.wait_state("a", "stopped")
    assert (stopped["wanted"], stopped["last_exit"]["class"]) == ("stopped", "stopped")
    assert node.left_of_engines() == ""
    node.systemctl("restart", UNIT)
    assert node.wait_state("a", "stopped")["wanted"] == "stopped"
    node.machine.run("vllm-supervisor", "start", "a", "--wait")
    assert node.engine("a")["generation"] == 2


def test_somebody_who_restarts_the_unit_of_an_engine_gets_one_engine(node: PackagedNode) -> None:
    """systemd starts generation 1 once more while the daemon puts it away: whoever is first, generation 2 is next."""
    (pid,) = node.with_engine("a")
    node.systemctl("restart", ENGINE_UNIT, check=False)
    engine = node.wait_state("a", "ready", 2)
    assert engine["pid"] != pid
    assert engine["last_exit"]["class"] == "stopped"
    assert node.machine.run("pgrep", "-u", "vllm", "-f", "/vllm serve").stdout.split() == [str(engine["pid"])]


def test_the_journal_answers_by_field_and_explains(node: PackagedNode) -> None:
    (pid,) = node.with_engine("a")
    node.kill(pid)
    node.wait_state("a", "ready", 2)
    node.machine.run("journalctl", "--sync")
    lines = node.machine.run("journalctl", "VLLM_ENGINE=a", "VLLM_EVENT=exited", "-o", "json").stdout.splitlines()
    (entry,) = map(json.loads, lines)
    assert entry["_SYSTEMD_UNIT"] == UNIT
    assert entry["VLLM_GENERATION"] == "1"
    assert int(entry["PRIORITY"]) <= 4
    explained = node.machine.run("journalctl", "-x", f"MESSAGE_ID={entry['MESSAGE_ID']}").stdout
    assert entry["MESSAGE"] in explained
    assert "vllm-supervisor why a" in explained


def test_gpus_are_seen_through_the_sandbox(node: PackagedNode) -> None:
    box = NvmlBox.make(node.machine.path("/srv/nvml"), "h200", "h200")
    env = {"SIM_NVML": "/srv/nvml", "LD_LIBRARY_PATH": "/srv/nvml"}
    gpu = box.gpu(1)
    # The kernel log is that of the whole machine, tests beside this one included: an address that nobody else has.
    domain = f"{random.randrange(0x1000, 0xFFFF):04x}"
    gpu.set(pci_id=f"{domain}:1b:00.0")
    node.machine.run("mknod", "-m", "0644", "/dev/kmsg", "c", "1", "11")
    node.drop_in("[Service]\n" + "".join(f"Environment={name}={value}\n" for name, value in env.items()))
    node.configure("a", env=env, gpus=[gpu.uuid])
    node.systemctl("restart", UNIT)
    node.wait_state("a", "ready")
    seen, used = json.loads(node.machine.run("vllm-supervisor", "gpu", "--json").stdout)["gpus"]
    assert (seen["name"], seen["persistence"]["actual"], seen["engines"]) == ("NVIDIA H200", "on", [])
    assert [holder["engine"] for holder in used["processes"]] == used["engines"] == ["a"]
    with KMSG.open("w") as log:
        log.write(f"<4>NVRM: Xid (PCI:{domain}:1b:00): 79, GPU has fallen off the bus.\n")
    waiting = node.wait_state("a", "waiting")
    assert waiting["reasons"][0]["code"] == "gpu_quarantined"
    assert "Xid 79" in waiting["reasons"][0]["message"]
    wait_until(lambda: node.left_of_engines() == "", 30, "the engine to be gone")
