"""A virtual machine with a kernel of its own: what namespaces of this one cannot have, its memory controller above all.

It boots, runs one command as a service, and is gone. Its disk is made from the root of a Debian release that holds a
kernel; nothing is installed from a network, of which it has none. Without KVM the processor is emulated: everything
takes ten to twenty times as long.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.e2e_systemd.machine import REPOSITORY

KERNEL: Final = "linux-image-cloud-amd64"
MAKE_S: Final = 900
RUN_S: Final = 600
_MEMORY_MIB: Final = 1024
_DISK: Final = "2G"
_QEMU: Final = "qemu-system-x86_64"
_NEEDED: Final = ((_QEMU, "qemu-system-x86"), ("mkfs.ext4", "e2fsprogs"), ("unshare", "util-linux"))
_PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
"""mkfs is not on everybody's, not even root's."""

_SERVICE: Final = "under-test.service"
_KERNEL_LINE: Final = (
    f"root=/dev/vda rw init=/lib/systemd/systemd console=ttyS0 quiet panic=-1 systemd.unit={_SERVICE} "
    "systemd.mask=systemd-udevd.service systemd.mask=systemd-udev-trigger.service"
)
"""Nothing is started that the command does not start; the devices that it needs are there without udev."""

_UNIT: Final = """
[Unit]
Description=What is looked at
After=dbus.service
Wants=dbus.service
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart={command}
"""

_MAKE_DISK: Final = r"""
set -eu
mount -t overlay overlay -o "lowerdir=$2:$1" "$3"
mkfs.ext4 -q -d "$3" "$4" "$5"
"""
"""In a mount namespace of its own: the disk holds what is in the first folder, and the root of the release."""


def check() -> str | None:
    """Why there can be no virtual machine here, in one sentence; None when there can."""
    if os.geteuid() != 0:
        return "cannot boot a virtual machine for these tests: only root can make its disk; run them as root"
    if platform.machine() != "x86_64":
        return (
            f"cannot boot a virtual machine for these tests: they know x86_64 alone, and this is {platform.machine()}"
        )
    for program, package in _NEEDED:
        if shutil.which(program, path=_PATH) is None:
            return (
                f"cannot boot a virtual machine for these tests: there is no {program}; install Debian's package "
                f"{package}, or run scripts/test --qemu as root, which does"
            )
    return None


def make_root(suite: str) -> Path:
    """The root of a release with a kernel; the first time it is made, which takes a network and a minute."""
    done = subprocess.run(
        [REPOSITORY / "scripts/make-root", suite, KERNEL],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=MAKE_S,
    )
    assert done.returncode == 0, f"cannot make the root of Debian {suite}: its own words are above"
    return Path(done.stdout.strip())


def run_in_machine(root: Path, files: Mapping[str, Path], command: str) -> Any:
    """Boot `root` with copies of these files and folders at these places, run a command, return what it answered.

    The command writes its answer, one JSON line, into /dev/ttyS1. When it ends, the machine is switched off.
    """
    with tempfile.TemporaryDirectory(prefix="vs-qemu.", dir="/tmp") as home:
        place = Path(home)
        console, answer = place / "console", place / "answer"
        _make_disk(root, files, command, place)
        begun = time.monotonic()
        argv = [
            # Not even killed tests leave it behind.
            *("setpriv", "--pdeathsig", "KILL", _QEMU),
            *("-accel", _accelerator()),
            *("-smp", "2", "-m", str(_MEMORY_MIB), "-nodefaults", "-display", "none", "-no-reboot"),
            *("-kernel", str(root / "vmlinuz"), "-initrd", str(root / "initrd.img")),
            *("-append", _KERNEL_LINE),
            *("-drive", f"file={place / 'disk'},if=virtio,format=raw,cache=unsafe"),
            *("-serial", f"file:{console}", "-serial", f"file:{answer}"),
        ]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as qemu:
            try:
                said = qemu.communicate(timeout=RUN_S)[1]
            except subprocess.TimeoutExpired:
                said = f"it still ran after {RUN_S} s"
            finally:
                qemu.kill()
        print(f"{time.monotonic() - begun:.0f} s in the virtual machine")
        told = answer.read_text(encoding="utf-8", errors="replace") if answer.exists() else ""
        shown = console.read_text(encoding="utf-8", errors="replace")[-6000:] if console.exists() else ""
    assert told.endswith("\n"), f"the virtual machine gave no answer: {said}\n{shown}"
    return json.loads(told)


def _accelerator() -> str:
    """KVM where the processor has it: a /dev/kvm without that emulates too, and not all that a kernel does."""
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    return "kvm" if {"vmx", "svm"} & set(flags) and os.access("/dev/kvm", os.R_OK | os.W_OK) else "tcg"


def _make_disk(root: Path, files: Mapping[str, Path], command: str, place: Path) -> None:
    added, merged = place / "added", place / "merged"
    merged.mkdir()
    for path, source in files.items():
        target = added / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    units = added / "etc/systemd/system"
    units.mkdir(parents=True)
    (units / _SERVICE).write_text(_UNIT.format(command=command), encoding="utf-8")
    paths = [str(path) for path in (added, root, merged, place / "disk")]
    made = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _MAKE_DISK, "make-disk", *paths, _DISK],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PATH": _PATH},
    )
    assert made.returncode == 0, f"cannot make the disk of a virtual machine: {made.stderr}"
