"""Staged incidents: three commands show what is needed to name the cause and the remedy, and lead into the runbook.

What is compared are codes, numbers, names and commands, not sentences. The machines of each fixture have all their
incidents at once, as bad days do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.harness import Daemon
from tests.daemon.outside import titled
from tests.daemon.sims import Sim, section
from tests.daemon.staging import Clients, small_disk
from tests.docs.pages import RUNBOOK, entries
from tests.sim.nvml import GIB, NvmlBox

COMMANDS_MAX = 3
PROBE = {"timeout_s": 2, "canary_after_s": 1, "canary_deadline_s": 1}


def screens(daemon: Daemon, *commands: str) -> str:
    """What these commands print, with each run of white space as one space: lines are wrapped where they do not fit."""
    assert len(commands) <= COMMANDS_MAX
    shown = [daemon.cli(*command.split()) for command in commands]
    for done in shown:
        assert done.stderr == ""
    return " ".join(" ".join(done.stdout for done in shown).split())


def expect(text: str, *words: str) -> None:
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"


def runbook(text: str, code: str, *words: str) -> None:
    """The code is a word of the screen, and the runbook's entry for it tells these things."""
    assert re.search(rf"(?<![\w-]){re.escape(code)}(?![\w-])", text), f"{code} is not in: {text}"
    entry = " ".join(entries(RUNBOOK)[code].split())
    expect(entry, *words)


@contextlib.contextmanager
def lasting(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has nothing to do with us, and ends with the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


# --- a machine without GPUs -------------------------------------------------------------------------------------------

LISTENER = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def stranger() -> Iterator[tuple[int, int]]:
    """Pid and port of somebody else who listens."""
    with lasting("python3", "-c", LISTENER) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, stranger: tuple[int, int]) -> Iterator[Daemon]:
    """A daemon and seven engines; each has its own bad day."""
    folder = tmp_path_factory.mktemp("incidents")
    restart = {"backoff_initial_s": 0.05, "backoff_max_s": 0.1, "max_restarts": 2}
    broken = {"start_error": {"line": "RuntimeError: nobody knows why", "code": 1}}
    sims = {
        "flag": Sim(folder, "flag", mood={"start_error": {"capture": "badflag"}}),
        "held": Sim(folder, "held"),
        "lost": Sim(folder, "lost", model="/srv/models/not-there"),
        "loop": Sim(folder, "loop", mood=broken, restart=restart),
        "core": Sim(folder, "core", mood={"dead_503_s": 0.1}),
        "hang": Sim(folder, "hang", mood={"tokens_per_s": 100}, probe=PROBE, restart={"stall_after_s": 3}),
        "leak": Sim(folder, "leak", probe=PROBE, restart={"free_blocks_min": 100, "free_blocks_for_s": 2}),
    }
    sims["held"].port = stranger[1]
    with Daemon(section(*sims.values())) as daemon:
        daemon.start()
        for name in ("core", "hang", "leak"):
            daemon.wait_state(name, "ready")
        clients = Clients(sims["hang"].port)
        daemon.wait_engine("hang", lambda engine: bool(engine["requests"]["running"]), 30, "to be busy")
        os.kill(titled(daemon.engine_processes("hang"), "VLLM::EngineCore"), signal.SIGSTOP)
        os.kill(titled(daemon.engine_processes("core"), "VLLM::EngineCore"), signal.SIGKILL)
        sims["leak"].mood.patch(free_blocks=3)
        daemon.wait_event("verdict", "leak")
        sims["leak"].mood.clear()
        daemon.wait_event("verdict", "hang")
        clients.stop()
        yield daemon


def test_a_flag_that_this_vllm_does_not_know(node: Daemon) -> None:
    node.wait_state("flag", "failed")
    text = screens(node, "status flag", "why flag")
    expect(text, "exit code 2", "--no-such-flag", "reload")
    runbook(text, "config", "check-config", "vllm-supervisor reload")


def test_a_port_that_somebody_else_holds(node: Daemon, stranger: tuple[int, int]) -> None:
    node.wait_state("held", "waiting")
    text = screens(node, "status held", "why held")
    expect(text, f"port {stranger[1]}", f"pid {stranger[0]} (python3", "another `port`")
    runbook(text, "port_held", "ss -ltnp", "`port`")


def test_a_model_that_is_not_there(node: Daemon) -> None:
    node.wait_state("lost", "failed")
    text = screens(node, "status lost", "why lost")
    expect(text, "/srv/models/not-there", "reload")
    runbook(text, "config", "`model`")


def test_a_crash_loop(node: Daemon) -> None:
    node.wait_state("loop", "failed")
    text = screens(node, "status loop", "why loop", "logs loop")
    expect(text, "max_restarts", "3 failures", "RuntimeError: nobody knows why", "vllm-supervisor reset loop")
    runbook(text, "crash_loop", "vllm-supervisor logs", "vllm-supervisor reset")


def test_an_engine_core_that_was_killed(node: Daemon) -> None:
    node.wait_state("core", "ready", generation=2)
    text = screens(node, "status core", "why core", "logs core")
    expect(text, "exit code 0", "generation 2", "EngineDeadError")
    runbook(text, "exited", "exit code 0")
    runbook(text, "crash", "vllm-supervisor logs")


def test_a_hang_while_health_says_200(node: Daemon) -> None:
    node.wait_state("hang", "ready", generation=2)
    text = screens(node, "status hang", "why hang")
    expect(text, "running", "stall_after_s 3", "evidence/hang.1.stalled.txt", "SIGKILL", "generation 2")
    runbook(text, "stalled", "evidence", "stall_after_s")


def test_kv_blocks_that_leaked(node: Daemon) -> None:
    node.wait_state("leak", "ready", generation=2)
    text = screens(node, "status leak", "why leak")
    expect(text, "3 of", "free_blocks_min 100", "3 of 3 canaries", "generation 2")
    runbook(text, "free_blocks", "free_blocks_min")


# --- GPUs -------------------------------------------------------------------------------------------------------------


class GpuNode:
    """A daemon with three GPUs: one fell off the bus, one is full, one is too small."""

    def __init__(self, folder: Path) -> None:
        self.box = NvmlBox.make(folder / "nvml", "rtx3090", "rtx3090", "rtx3090")
        uuids = [self.box.gpu(number).uuid for number in range(3)]
        out = {"line": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "code": 1}
        self.sims = [
            Sim(folder, "bus", gpus=[uuids[0]]),
            Sim(folder, "full", gpus=[uuids[1]]),
            Sim(folder, "small", gpus=[uuids[2]], mood={"start_error": out}),
        ]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, GpuNode, int]]:
    machine = GpuNode(tmp_path_factory.mktemp("gpus"))
    with lasting("/bin/sleep", "1000") as tenant, Daemon(section(*machine.sims), env=machine.box.env) as daemon:
        machine.box.gpu(1).process(tenant.pid, 20 * GIB)
        daemon.start()
        daemon.wait_state("bus", "ready")
        machine.box.xid(machine.box.gpu(0), 79)
        yield daemon, machine, tenant.pid


def test_a_gpu_that_fell_off_the_bus(gpus: tuple[Daemon, GpuNode, int]) -> None:
    daemon, machine, _ = gpus
    daemon.wait_state("bus", "waiting")
    text = screens(daemon, "status bus", "why bus", "gpu")
    clear = f"vllm-supervisor gpu clear {machine.box.gpu(0).uuid}"
    expect(text, "Xid 79 (fallen off the bus)", "reboot", clear)
    runbook(text, "gpu_quarantined", "vllm-supervisor gpu clear")
    runbook(text, "gpu_fault", "79", "reboot")


def test_gpu_memory_that_somebody_else_holds(gpus: tuple[Daemon, GpuNode, int]) -> None:
    daemon, _, tenant = gpus
    daemon.wait_state("full", "waiting")
    text = screens(daemon, "status full", "why full", "gpu")
    expect(text, f"pid {tenant} (sleep) holds 20.0 GiB", "gpu-memory-utilization")
    runbook(text, "gpu_memory_held", "nvidia-smi", "gpu-memory-utilization")


def test_a_start_that_runs_out_of_gpu_memory(gpus: tuple[Daemon, GpuNode, int]) -> None:
    daemon, _, _ = gpus
    daemon.wait_state("small", "waiting")
    text = screens(daemon, "status small", "why small", "logs small")
    expect(text, "exit code 1", "CUDA out of memory. Tried to allocate 2.00 GiB", "max-num-seqs", "max-model-len")
    runbook(text, "resource", "max-num-seqs", "max-model-len", "fp8")


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk(tmp_path: Path) -> None:
    daemon = Daemon(section(Sim(tmp_path, "a")))
    with daemon, small_disk(daemon.state_dir, 96):
        daemon.start()
        pid = daemon.wait_state("a", "ready")["pid"]
        with contextlib.suppress(OSError), (daemon.state_dir / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        os.kill(pid, signal.SIGKILL)
        daemon.wait_state("a", "waiting")
        text = screens(daemon, "status a", "why a")
        expect(text, "MiB free", "64 MiB are needed", str(daemon.state_dir), "free some space")
        runbook(text, "disk_full", "df -h", "64 MiB")
        assert daemon.stop() == 0
