"""One machine for each test: a boot takes a third of a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e_systemd.machine import Machine, check
from tests.e2e_systemd.node import SupervisedNode
from tests.e2e_systemd.packaged import PackagedNode, Packages, build_packages


@pytest.fixture(scope="session")
def bootable() -> None:
    """Fails, saying what is missing, where no machine can be booted."""
    problem = check()
    assert problem is None, problem


@pytest.fixture
def machine(bootable: None) -> Iterator[Machine]:
    """A machine with systemd."""
    with Machine() as booted:
        yield booted


@pytest.fixture
def node(machine: Machine) -> SupervisedNode:
    """The daemon's unit in a machine, not started yet."""
    return SupervisedNode(machine)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """The package of this checkout under two versions."""
    return build_packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="session")
def installed_disk(bootable: None, packages: Packages) -> Iterator[Path]:
    """The disk of a machine that has the package: installing takes ten times as long as booting."""
    with Machine() as machine:
        node = PackagedNode(machine)
        node.bring(packages)
        node.dpkg("-i", "/srv/old.deb")
        machine.shut_down()
        yield machine.disk


@pytest.fixture
def packaged(installed_disk: Path) -> Iterator[PackagedNode]:
    """A machine that was booted with the package installed; the daemon runs."""
    with Machine(after=installed_disk) as machine:
        yield PackagedNode(machine)
