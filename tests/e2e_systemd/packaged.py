"""The daemon as its package installs it: the real unit in its own sandbox."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.e2e_systemd.machine import Machine
from tests.e2e_systemd.node import CONFIG, UNIT, SupervisedNode
from tests.packaging.conftest import build

SLICE: Final = "vllm.slice"


class Packages(NamedTuple):
    """The package of this checkout under two versions."""

    old: Path
    new: Path


def build_packages(folder: Path) -> Packages:
    """Build both."""
    return Packages(build(folder, "--version", "0.1.0-1"), build(folder, "--version", "99.0-1"))


class PackagedNode(SupervisedNode):
    """A machine with the package instead of a unit of the tests."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def bring(self, packages: Packages) -> None:
        """Put both packages on the disk, /srv/old.deb and /srv/new.deb, and what the tests' engines read."""
        self.machine.path("/srv").mkdir(exist_ok=True)
        for package, name in zip(packages, packages._fields, strict=True):
            shutil.copy(package, self.machine.path(f"/srv/{name}.deb"))
        # An image builder's policy would keep services from being started.
        self.machine.write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 0\n", 0o755)
        self.machine.write("/etc/vllm-supervisor/mood.json", "{}")

    def dpkg(self, *argv: str, check: bool = True) -> str:
        """Run dpkg and return all that it said."""
        done = self.machine.run("dpkg", *argv, check=check, env={"DEBIAN_FRONTEND": "noninteractive"})
        return f"{done.stdout}{done.stderr}"

    def systemctl(self, *argv: str, check: bool = True) -> str:
        """Run systemctl and return what it printed."""
        return self.machine.run("systemctl", *argv, check=check).stdout.strip()

    def drop_in(self, text: str) -> None:
        """Add settings to the unit, for its next start."""
        self.machine.write(f"/etc/systemd/system/{UNIT}.d/test.conf", text)
        self.systemctl("daemon-reload")

    def configure(self, *engines: str, **keys: Any) -> None:
        """Write the configuration, for engines of the package's user."""
        super().configure(*engines, **{"user": "vllm", **keys})
        self.machine.run("chgrp", "vllm-admin", CONFIG)

    def with_engine(self, *names: str, **keys: Any) -> list[int]:
        """Configure engines by a reload and return their pids once they are ready."""
        self.configure(*names, **keys)
        self.systemctl("reload", UNIT)
        return [int(self.wait_state(name, "ready")["pid"]) for name in names]

    def left_of_engines(self) -> str:
        """Units of engines and processes of their user; empty when nothing is left."""
        units = self.systemctl("list-units", "--all", "--no-legend", "--plain", "vllm-engine-*")
        return units + self.machine.run("pgrep", "-a", "-u", "vllm", check=False).stdout
