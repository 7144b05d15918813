"""The same package on other releases of Debian: their systemd, their dpkg, their Python."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e_systemd.machine import REPOSITORY, Machine
from tests.e2e_systemd.node import CONFIG, UNIT
from tests.e2e_systemd.packaged import PackagedNode, Packages

SUITES = os.environ.get("VLLM_SUPERVISOR_TEST_SUITES", "trixie").split()
MAKE_S = 900


@pytest.fixture(scope="module", params=SUITES)
def root(request: pytest.FixtureRequest) -> Path:
    """The root of a release; the first time it is made, which takes a network and half a minute."""
    done = subprocess.run(
        [REPOSITORY / "scripts/make-root", request.param],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=MAKE_S,
    )
    assert done.returncode == 0, f"cannot make the root of Debian {request.param}: its own words are above"
    return Path(done.stdout.strip())


@pytest.fixture
def node(bootable: None, root: Path, packages: Packages) -> Iterator[PackagedNode]:
    with Machine(root) as machine:
        fresh = PackagedNode(machine)
        fresh.bring(packages)
        yield fresh


@pytest.mark.timeout(MAKE_S + 300)
def test_install_start_adopt_upgrade_stop_reboot_purge(node: PackagedNode) -> None:
    machine = node.machine
    told = machine.run("sh", "-c", "cat /etc/debian_version; systemctl --version | head -n 1; /usr/bin/python3 -V")
    print(*told.stdout.splitlines(), sep="; ")
    said = node.dpkg("-i", "/srv/old.deb")
    assert "warning" not in said.lower(), said
    assert machine.run("systemd-analyze", "verify", "--man=no", UNIT, "vllm.slice", check=False).stderr == ""
    assert machine.run("dpkg", "-V", "vllm-supervisor").stdout == ""

    pids = node.with_engine("a", "b")
    assert node.status()["supervisor"]["launcher"] == "systemd"
    asking = node.asking(8101)
    for step in (
        lambda: node.systemctl("restart", UNIT),
        lambda: node.kill(node.pid),
        lambda: node.dpkg("-i", "/srv/new.deb"),
        lambda: node.dpkg("-i", "/srv/old.deb"),
    ):
        daemon = node.pid
        step()
        node.wait_new_daemon(daemon)
        assert [node.wait_state(name, "ready", 1)["pid"] for name in ("a", "b")] == pids
    answers, failures = asking.end()
    assert answers > 0
    assert failures == "[]"

    node.kill(pids[1])
    assert node.wait_state("b", "ready", 2)["last_exit"]["signal"] == 9
    with machine.path(CONFIG).open("a") as file:
        file.write("\n[engine.a.argz]\n")
    assert machine.run("systemctl", "reload", UNIT, check=False).returncode != 0
    node.configure("a")
    node.systemctl("reload", UNIT)
    node.systemctl("stop", UNIT)
    assert node.left_of_engines() == ""
    machine.reboot()
    assert node.wait_state("a", "ready")["generation"] == 2
    node.dpkg("-P", "vllm-supervisor")
    assert node.left_of_engines() == ""
    found = machine.run(
        "find", "/etc", "/usr", "/var/lib", "/run/vllm-supervisor", "-xdev", "-name", "*vllm*", check=False
    ).stdout
    assert [path for path in found.splitlines() if "/usr/lib/python" not in path] == []
