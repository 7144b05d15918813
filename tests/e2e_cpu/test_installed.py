"""A real vLLM as a service of the installed package: restarted and upgraded under load, then stopped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e_cpu.conftest import RealVllm
from tests.e2e_systemd.machine import Machine, check
from tests.e2e_systemd.node import UNIT
from tests.e2e_systemd.packaged import PackagedNode, build_packages

READY_S = 240
"""Starts take 20 s on a quiet machine and up to 170 s on a busy one."""

COMPLETION = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 8, "ignore_eos": True}


def places(vllm: RealVllm) -> list[Path]:
    """What an engine reads: its environment, the Python that this is made of, its model."""
    asked = [str(vllm.command.parent / "python"), "-c", "import sys; print(sys.prefix); print(sys.base_prefix)"]
    environment, python = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return [Path(environment), *([Path(python)] if not python.startswith("/usr") else []), vllm.model]


@pytest.fixture
def node(vllm: RealVllm, tmp_path: Path) -> Iterator[PackagedNode]:
    problem = check()
    assert problem is None, problem
    shown = places(vllm)
    with Machine(shown=shown) as machine:
        # Below root's home, most often: engines of another user have to get there.
        machine.run("chmod", "a+x", *sorted({str(parent) for path in shown for parent in path.parents}))
        installed = PackagedNode(machine)
        installed.bring(build_packages(tmp_path))
        installed.dpkg("-i", "/srv/old.deb")
        yield installed


def test_a_real_engine_does_not_notice_its_supervisor(node: PackagedNode, vllm: RealVllm) -> None:
    node.configure(
        "a",
        command=[str(vllm.command), "serve"],
        model=str(vllm.model),
        stop_timeout_s=20,
        args={
            "served-model-name": "tiny",
            "max-model-len": 1024,
            "block-size": 32,
            "max-num-seqs": 8,
            "max-num-batched-tokens": 2048,
            "enforce-eager": True,
        },
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        warmup={"max_rounds": 2},
    )
    node.systemctl("reload", UNIT)
    engine = node.wait_state("a", "ready", 1, READY_S)
    assert node.status()["supervisor"]["launcher"] == "systemd"
    assert node.machine.run("stat", "-c", "%U", f"/proc/{engine['pid']}").stdout == "vllm\n"

    asking = node.asking(8101, "/v1/completions", COMPLETION)
    for step in (
        lambda: node.systemctl("restart", UNIT),
        lambda: node.kill(node.pid),
        lambda: node.dpkg("-i", "/srv/new.deb"),
    ):
        daemon = node.pid
        step()
        node.wait_new_daemon(daemon)
        after = node.wait_state("a", "ready", 1)
        assert (after["pid"], after["restarts"]) == (engine["pid"], 0)
    answers, failures = asking.end()
    assert answers > 0
    assert failures == "[]"

    node.systemctl("stop", UNIT)
    assert node.left_of_engines() == ""
    assert node.machine.run("ls", "/dev/shm").stdout == ""
