"""The real daemon and its GPU probe over the simulated NVML library; simulated engines allocate through it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.harness import DEADLINE_S, Daemon, Document
from tests.daemon.sims import Sim, section
from tests.sim.engine import alive, wait_until
from tests.sim.nvml import GIB, NvmlBox, SimGpu

HUNG_S = 30
"""A sweep that hangs is given up after 5 s; two that hang one after the other are telemetry that does not answer."""


OURS_ALONE = "nvmlDeviceGetPersistenceMode"
"""A call that engines do not make: one that hangs for everybody would hang their starts too."""


class GpuNode:
    """A machine with GPUs, and a daemon on it."""

    def __init__(self, folder: Path, box: NvmlBox, *sims: Sim, head: str = "") -> None:
        self.folder = folder
        self.box = box
        self.sims = {sim.name: sim for sim in sims}
        self.daemon = Daemon(f"{head}\n{section(*sims)}", env=box.env)

    def gpu(self, gpu: SimGpu) -> Document:
        """One GPU of the status document."""
        found: Document = next(g for g in self.daemon.status()["gpus"] if g["uuid"] == gpu.uuid)
        return found

    def wait_gpu(self, gpu: SimGpu, test: Callable[[Document], bool], what: str) -> Document:
        """Wait until a GPU is as wanted."""

        def look() -> Document:
            gpus = [g for g in self.daemon.status()["gpus"] if g["uuid"] == gpu.uuid]
            return gpus[0] if gpus and test(gpus[0]) else {}

        return wait_until(look, DEADLINE_S, f"{gpu.uuid}: {what}", every_s=0.05)

    def wait_waiting(self, name: str, code: str) -> Document:
        """Wait until an engine waits at a gate; its reason."""
        engine = self.daemon.wait_engine(
            name,
            lambda e: e["state"] == "waiting" and e["reasons"][0]["code"] == code,
            DEADLINE_S,
            f"to wait for {code}",
        )
        reason: Document = engine["reasons"][0]
        return reason

    def devices(self, name: str) -> list[str]:
        """CUDA_VISIBLE_DEVICES of each start of an engine."""
        return [start["env"]["CUDA_VISIBLE_DEVICES"] for start in self.sims[name].starts()]


Make = Callable[..., Any]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., GpuNode]]:
    """Make a node: kinds of GPUs, and its engines as functions of the machine."""
    made: list[contextlib.ExitStack] = []

    def make(kinds: list[str], *engines: Callable[[NvmlBox], Sim], head: str = "") -> GpuNode:
        box = NvmlBox.make(tmp_path / "nvml", *kinds)
        node = GpuNode(tmp_path, box, *(engine(box) for engine in engines), head=head)
        stack = contextlib.ExitStack()
        made.append(stack)
        stack.enter_context(node.daemon)
        return node

    yield make
    for stack in made:
        stack.close()


def engine(folder: Path, name: str, *numbers: int, part: float = 0.9, **settings: Any) -> Callable[[NvmlBox], Sim]:
    """An engine on some GPUs of the machine."""

    def make(box: NvmlBox) -> Sim:
        args = {"gpu-memory-utilization": part, **settings.pop("args", {})}
        if len(numbers) > 1:
            args["tensor-parallel-size"] = len(numbers)
        return Sim(folder, name, gpus=[box.gpu(number).uuid for number in numbers], args=args, **settings)

    return make


def holders(gpu: SimGpu) -> list[int]:
    return sorted(gpu.processes())


def test_an_engine_on_its_gpu_from_start_to_end(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    a = node(["h200", "h200"], engine(tmp_path, "a", 1))
    a.daemon.start()
    ready = a.daemon.wait_state("a", "ready")
    assert a.devices("a") == ["1"]
    used = a.daemon.wait_engine("a", lambda e: (e["memory"]["gpu_mib"] or 0) > 100_000, DEADLINE_S, "to hold memory")
    gpu = a.wait_gpu(a.box.gpu(1), lambda g: bool(g["processes"]), "to list its process")
    assert gpu["engines"] == ["a"]
    assert [process["engine"] for process in gpu["processes"]] == ["a"]
    assert used["memory"]["gpu_mib"] == pytest.approx(gpu["processes"][0]["memory_mib"])
    assert a.gpu(a.box.gpu(0))["processes"] == []
    a.daemon.request("restart", "a", "--now", "--wait")
    again = a.daemon.wait_state("a", "ready", generation=2)
    assert again["pid"] != ready["pid"]
    assert a.daemon.stop() == 0
    assert holders(a.box.gpu(1)) == []


def test_two_engines_on_one_gpu_start_one_after_the_other(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    """Started together, both would take what the other was going to (measured on a real GPU)."""
    two = node(["h200"], engine(tmp_path, "a", 0, part=0.45), engine(tmp_path, "b", 0, part=0.45))
    two.daemon.start()
    blocks = {name: full_blocks(two, name, 1) for name in ("a", "b")}
    assert blocks["a"] == blocks["b"]
    # Both die at once: again one after the other, again both with all their blocks.
    for name in ("a", "b"):
        os.kill(two.daemon.engine(name)["pid"], signal.SIGKILL)
    assert {name: full_blocks(two, name, 2) for name in ("a", "b")} == blocks


def full_blocks(node: GpuNode, name: str, generation: int) -> int:
    """Blocks of an engine that is ready."""

    def test(e: Document) -> bool:
        known = e["kv"]["total_blocks"] is not None
        return e["state"] == "ready" and e["generation"] == generation and known

    found: int = node.daemon.wait_engine(name, test, DEADLINE_S, "to be ready with its blocks")["kv"]["total_blocks"]
    return found


def test_a_foreign_holder_is_named_and_waited_for(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    one = node(["h200"], engine(tmp_path, "a", 0))
    with subprocess.Popen(["/bin/sleep", "1000"]) as stranger:
        one.box.gpu(0).process(stranger.pid, 70 * GIB)
        one.daemon.start()
        reason = one.wait_waiting("a", "gpu_memory_held")
        assert f"pid {stranger.pid} (sleep) holds 70.0 GiB" in reason["message"]
        assert one.sims["a"].starts() == []
        stranger.kill()
    one.daemon.wait_state("a", "ready")
    assert one.daemon.engine("a")["restarts"] == 0


def test_memory_that_does_not_come_back_holds_the_next_start(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    one = node(["h200"], engine(tmp_path, "a", 0))
    gpu = one.box.gpu(0)
    one.daemon.start()
    one.daemon.wait_state("a", "ready")
    one.wait_gpu(gpu, lambda g: [p["engine"] for p in g["processes"] or ()] == ["a"], "to list its process")
    gpu.set(hold="1")
    pid = one.daemon.engine("a")["pid"]
    os.kill(pid, signal.SIGKILL)
    stays = one.daemon.wait_event("gpu_memory_stays", "a")
    assert "did not come back" in stays["event"]
    assert len(one.sims["a"].starts()) == 1
    one.wait_waiting("a", "gpu_memory_held")
    gpu.set(hold=None)
    one.daemon.wait_state("a", "ready", generation=2)


def test_calls_that_never_return(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    """NVML hangs: the daemon answers, restarts an engine and ends in time, and hears again when the driver recovers."""
    one = node(["h200"], engine(tmp_path, "a", 0))
    one.daemon.start()
    one.daemon.wait_state("a", "ready")
    one.box.gpu(0).fault(OURS_ALONE, "hang 600")
    one.box.set(release_ms=0)  # which is counted from the first look after a death: nobody looks now
    wait_until(
        lambda: (one.daemon.status()["supervisor"]["gpu_trouble"] or {}).get("code") == "gpu_telemetry_unresponsive",
        HUNG_S + DEADLINE_S,
        "telemetry to be called unresponsive",
    )
    one.daemon.wait_engine("a", lambda e: e["health"] == "degraded", DEADLINE_S, "to be degraded")
    os.kill(one.daemon.engine("a")["pid"], signal.SIGKILL)
    one.daemon.wait_state("a", "ready", generation=2)
    assert one.devices("a") == ["0", "0"]
    began = time.monotonic()
    assert one.daemon.cli("status").returncode == 0
    assert time.monotonic() - began < 10
    assert one.daemon.stop(60) == 0


def test_telemetry_comes_back(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    one = node(["h200"], engine(tmp_path, "a", 0))
    one.daemon.start()
    one.daemon.wait_state("a", "ready")
    one.box.gpu(0).fault(OURS_ALONE, "hang 600")
    one.daemon.wait_event("gpu_probe_hangs", timeout_s=HUNG_S)
    one.box.gpu(0).fault(OURS_ALONE, None)
    swept = len(one.daemon.events("gpu_probe_hangs"))
    wait_until(lambda: one.daemon.status()["supervisor"]["gpu_trouble"] is None, DEADLINE_S, "the next probe")
    assert len(one.daemon.events("gpu_probe_hangs")) == swept
    assert one.daemon.engine("a")["generation"] == 1


def test_a_lost_gpu_takes_only_its_engine_along(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    """It is no longer counted, without any Xid: indices shift, and the engine behind it keeps its own GPU."""
    two = node(["h200", "h200"], engine(tmp_path, "a", 0), engine(tmp_path, "b", 1))
    two.daemon.start()
    two.daemon.wait_state("a", "ready")
    before = two.daemon.wait_state("b", "ready")
    lost = two.box.gpu(0)
    lost.vanish()
    reason = two.wait_waiting("a", "gpu_quarantined")
    assert "gpu clear" in reason["message"]
    assert two.gpu(lost)["quarantined"]
    assert (two.daemon.engine("b")["generation"], two.daemon.engine("b")["pid"]) == (1, before["pid"])
    two.daemon.request("restart", "b", "--now", "--wait")
    assert two.devices("b") == ["1", "0"], "the same GPU has another index now"
    two.daemon.wait_state("b", "ready", generation=2)
    assert holders(two.box.gpu(1)) != []
    # A daemon that is killed does not forget it.
    two.daemon.kill()
    two.daemon.start()
    two.wait_waiting("a", "gpu_quarantined")
    lost.come_back()
    two.wait_gpu(lost, lambda g: g["memory_total_mib"] is not None, "to answer again")
    assert two.gpu(lost)["quarantined"]
    two.daemon.request("gpu", "clear", lost.uuid)
    two.daemon.wait_state("a", "ready")


def test_a_hardware_fault_is_quarantined_at_once(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    two = node(["h200", "h200"], engine(tmp_path, "a", 0), engine(tmp_path, "b", 1))
    two.daemon.start()
    two.daemon.wait_state("a", "ready")
    two.daemon.wait_state("b", "ready")
    two.box.xid(two.box.gpu(0), 79)
    told = two.daemon.wait_event("gpu_quarantined")
    assert told["level"] == "critical"
    assert "Xid 79 (fallen off the bus)" in told["event"]
    two.wait_waiting("a", "gpu_quarantined")
    assert two.daemon.engine("b")["generation"] == 1
    why = two.daemon.request("why", "a")
    assert "Xid 79" in why


def test_tensor_parallel_on_two_gpus(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    tp = node(["h200", "h200", "h200"], engine(tmp_path, "a", 2, 0))
    tp.daemon.start()
    tp.daemon.wait_state("a", "ready")
    assert tp.devices("a") == ["2,0"], "in the order of the configuration"
    for number in (0, 2):
        tp.wait_gpu(tp.box.gpu(number), lambda g: [p["engine"] for p in g["processes"]] == ["a"], "to hold a worker")
    assert holders(tp.box.gpu(1)) == []
    os.kill(holders(tp.box.gpu(0))[0], signal.SIGKILL)
    tp.daemon.wait_state("a", "ready", generation=2)
    for number in (0, 2):
        assert all(alive(pid) for pid in holders(tp.box.gpu(number)))


def test_processes_on_a_gpu_that_was_not_given(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    one = node(["h200", "h200"], engine(tmp_path, "a", 0))
    one.daemon.start()
    one.daemon.wait_state("a", "ready")
    one.box.gpu(1).process(one.daemon.engine("a")["pid"], 2 * GIB)
    verdict = one.daemon.wait_event("verdict", "a")
    assert verdict["reason"] == "wrong_gpu"
    one.daemon.wait_state("a", "ready", generation=2)


@pytest.mark.parametrize("number", [1, 2])
def test_where_cuda_counts_a_gpu_that_was_lost_before_the_daemon_began(
    node: Callable[..., GpuNode], tmp_path: Path, number: int
) -> None:
    """NVML cannot say its name, the simulated CUDA counts it: one engine meets it or goes astray, and none after it."""
    kinds = ["h200", "h200", "h200", "h200"]
    one = node(kinds, engine(tmp_path, "a", number), engine(tmp_path, "b", 3, autostart=False))
    one.box.gpu(0).lose()
    one.daemon.start()
    one.daemon.wait_state("a", "ready", generation=2)
    assert one.devices("a") == [str(number - 1), str(number)]
    one.daemon.cli("start", "b")
    one.wait_gpu(one.box.gpu(3), lambda g: [p["engine"] for p in g["processes"]] == ["b"], "to hold a worker")
    assert (one.devices("b"), one.daemon.engine("b")["generation"]) == (["3"], 1)


@pytest.mark.parametrize(
    ("code", "words"), [(9, "not loaded"), (18, "upgraded"), (4, "permission"), (999, "container")]
)
def test_a_driver_that_is_not_ready(node: Callable[..., GpuNode], tmp_path: Path, code: int, words: str) -> None:
    one = node(["h200"], engine(tmp_path, "a", 0))
    one.box.fault("nvmlInitWithFlags", code)
    one.daemon.start()
    wait_until(
        lambda: words in (one.daemon.status()["supervisor"]["gpu_trouble"] or {}).get("message", ""),
        DEADLINE_S,
        "the trouble to be told",
    )
    reason = one.wait_waiting("a", "driver_not_ready")
    assert words in reason["message"]
    one.box.fault("nvmlInitWithFlags", None)
    one.daemon.wait_state("a", "ready")


def test_a_gpu_that_is_not_there(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    def missing(_: NvmlBox) -> Sim:
        return Sim(tmp_path, "a", gpus=["GPU-00000000-1111-2222-3333-444444444444"])

    one = node(["h200"], missing)
    one.daemon.start()
    reason = one.wait_waiting("a", "gpu_missing")
    assert one.box.gpu(0).uuid in reason["message"], "what there is instead"


def test_persistence_is_set_and_a_conflict_is_told(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can set persistence mode")
    one = node(["h200", "rtx3090"], engine(tmp_path, "a", 0))
    h200 = one.box.gpu(0)
    one.daemon.start()
    one.wait_gpu(h200, lambda g: g["persistence"]["actual"] == "on", "to have persistence mode")
    assert one.gpu(one.box.gpu(1))["persistence"]["actual"] == "off"
    for count in (2, 3):
        h200.set(persistence=0)
        one.daemon.wait_event("persistence_set", count=count)
    h200.set(persistence=0)
    one.daemon.wait_event("persistence_conflict")
    assert one.gpu(h200)["persistence"]["actual"] == "off"


def test_release_closes_nvml(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    one = node(["h200"], engine(tmp_path, "a", 0))
    one.daemon.start()
    one.daemon.wait_state("a", "ready")
    assert probes(one.daemon) != []
    one.daemon.request("gpu", "release")
    wait_until(lambda: probes(one.daemon) == [], DEADLINE_S, "the probe to end")
    assert one.daemon.status()["supervisor"]["gpu_trouble"]["code"] == "gpu_released"
    assert one.daemon.engine("a")["generation"] == 1
    one.daemon.request("gpu", "clear", one.box.gpu(0).uuid)
    wait_until(lambda: probes(one.daemon) != [], DEADLINE_S, "the probe to be there again")


def probes(daemon: Daemon) -> list[int]:
    """Probe processes of a daemon that live."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(stat[1]) == daemon.pid and b"helper.py" in (entry / "cmdline").read_bytes() and stat[0] != "Z":
                found.append(int(entry.name))
    return found


def test_a_machine_without_gpus_pays_nothing(tmp_path: Path) -> None:
    sim = Sim(tmp_path, "a")
    with Daemon(section(sim)) as daemon:
        daemon.start()
        daemon.wait_state("a", "ready")
        assert daemon.status()["gpus"] == []
        if not Path("/dev/nvidiactl").exists():
            assert probes(daemon) == []


def test_the_probe_ends_with_the_daemon(node: Callable[..., GpuNode], tmp_path: Path) -> None:
    one = node(["h200"], engine(tmp_path, "a", 0))
    one.daemon.start()
    one.daemon.wait_state("a", "ready")
    (pid,) = probes(one.daemon)
    one.daemon.kill()
    wait_until(lambda: not alive(pid), DEADLINE_S, "the probe to end")
    one.daemon.start()
    one.daemon.wait_state("a", "ready")
