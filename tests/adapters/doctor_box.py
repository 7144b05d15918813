"""A machine for tests of `doctor`: a folder in the place of /, accounts, and answers of commands, NVML and daemon."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisord.config import survey
from supervisord.config_users import Account
from supervisord.core.gpu_samples import GpuReading, GpuSweep
from supervisord.doctor.box import Box
from supervisord.doctor.checks import CHECKS
from supervisord.doctor.facts import Facts, Unknown
from supervisord.doctor.findings import Finding, Verdict
from supervisord.gpu.protocol import Depths, Survey

GIB = 1024**3
DRIVER = "580.159.04"
DOWN = Unknown("cannot reach the daemon", "down")


def gpu(index: int = 0, **values: Any) -> GpuReading:
    """An RTX 3090, or what `values` make of it."""
    known: dict[str, Any] = {
        "name": "NVIDIA GeForce RTX 3090",
        "architecture": 7,
        "compute": (8, 6),
        "brand": 5,
        "total_bytes": 24 * GIB,
        "persistence": False,
    }
    return GpuReading(f"GPU-0000000{index}-aaaa", f"0000:{0x1B + index:02x}:00.0", index, **{**known, **values})


@dataclass
class Sick:
    """Facts to be spoiled: everything is well on it at first, and an attribute can be changed."""

    folder: Path
    uid: int = field(default_factory=os.geteuid)
    readings: tuple[GpuReading, ...] = (gpu(),)
    depths: tuple[Depths, ...] | None = None
    cuda: tuple[int, int] | None = (13, 0)
    problem: int | None = None
    nvml: Unknown | None = None
    daemon: Mapping[str, Any] | Unknown = DOWN
    unit: Mapping[str, str] | Unknown = field(default_factory=lambda: Unknown("no systemd", "absent"))
    config: Unknown | None = None
    as_root: bool = False
    text: str = ""
    says: dict[tuple[str, ...], str] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = self.folder / "root"
        self.home = self.folder / "home" / "vllm"
        self.home.mkdir(parents=True)
        for place in ("dev/shm", "proc", "etc", "sys"):
            (self.root / place).mkdir(parents=True)
        self.write("/sys/module/nvidia/version", f"{DRIVER}\n")
        self.library(DRIVER)
        self.card("0000:1b:00.0", "0x030000")
        for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
            self.write(f"/dev/{name}", "").chmod(0o666)

    def write(self, place: str, text: str) -> Path:
        path = self.root / place.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def library(self, version: str | None) -> None:
        folder = self.root / "usr/lib/x86_64-linux-gnu"
        shutil.rmtree(folder, ignore_errors=True)
        if version is not None:
            folder.mkdir(parents=True)
            (folder / f"libnvidia-ml.so.{version}").touch()
            (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")

    def card(self, pci_id: str, kind: str) -> None:
        self.write(f"/sys/bus/pci/devices/{pci_id}/vendor", "0x10de\n")
        self.write(f"/sys/bus/pci/devices/{pci_id}/class", f"{kind}\n")

    def process(self, pid: int, comm: str, command: Sequence[str] = (), cgroup: str = "/") -> None:
        self.write(f"/proc/{pid}/comm", f"{comm[:15]}\n")
        self.write(f"/proc/{pid}/cmdline", "\0".join(command))
        self.write(f"/proc/{pid}/cgroup", f"0::{cgroup}\n")

    def account(self, name: str, uid: int = 4242, groups: tuple[int, ...] = ()) -> Account:
        self.accounts[name] = Account(name, uid, uid, str(self.home), "/bin/sh", frozenset({uid, *groups}))
        return self.accounts[name]

    def without_driver(self, *, cards: bool = True) -> None:
        shutil.rmtree(self.root / "sys/module")
        shutil.rmtree(self.root / "dev")
        (self.root / "dev/shm").mkdir(parents=True)
        self.library(None)
        self.problem = 9
        if not cards:
            shutil.rmtree(self.root / "sys/bus")

    def facts(self) -> Facts:
        path = self.folder / "config.toml"
        path.write_text(self.text)
        path.chmod(0o644)
        depths = self.depths if self.depths is not None else tuple(Depths() for _ in self.readings)
        readings = self.readings if self.problem is None else ()
        sweep = GpuSweep(1.0, readings, self.problem, slow=True, driver=DRIVER, took_ms=5.0)
        cuda = self.cuda if self.problem is None else None
        return Facts(
            box=Box(self.root, self.uid, lambda argv: self.says.get(tuple(argv)), self.accounts.get),
            config_path=path,
            socket=str(self.folder / "socket"),
            as_root=self.as_root,
            # Trust is a matter of the configuration's own tests; who the daemon is, of `as_root`.
            config=self.config or survey(path, trust=False),
            daemon=self.daemon,
            gpus=self.nvml or Survey(sweep, cuda, depths[: len(readings)]),
            unit=self.unit,
        )

    def ask(self, name: str) -> list[Finding]:
        """What one check finds."""
        check = next(check for check in CHECKS if check.name == name)
        return list(check.ask(self.facts()))

    def one(self, name: str) -> tuple[Verdict, str, str]:
        """The only finding of a check: verdict, message with its subject, remedy."""
        (finding,) = self.ask(name)
        about = f"{finding.subject}: " if finding.subject else ""
        return finding.verdict, about + finding.message, finding.remedy
