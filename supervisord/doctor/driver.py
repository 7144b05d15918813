"""Checks of the NVIDIA driver: module, library, NVML, device files, the daemons beside it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from supervisord.config_users import Account, may
from supervisord.core import persistence, telemetry
from supervisord.core.gpu_inventory import label
from supervisord.doctor.box import Box
from supervisord.doctor.facts import Facts, Unknown, cards, kernel_version, switches
from supervisord.doctor.findings import Finding, count, fail, listed, not_checked, ok, warn

MISMATCH: Final = 18
NO_LIBRARY: Final = 12
NO_PERMISSION: Final = 4
"""NVML codes of initialising."""

FABRIC_NOT_STARTED: Final = 1
FABRIC_IN_PROGRESS: Final = 2
FABRIC_COMPLETED: Final = 3
"""NVML_GPU_FABRIC_STATE_*."""

_LIBRARY: Final = "libnvidia-ml.so.1"
_FOLDERS: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
)
_VERSION: Final = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)$")
_NODE: Final = re.compile(r"nvidia[0-9]+")
_CONTROL: Final = ("nvidiactl", "nvidia-uvm")
_RELOAD: Final = (
    "reboot; or end every process that uses a GPU, then: "
    "rmmod nvidia_drm nvidia_modeset nvidia_uvm nvidia; modprobe nvidia"
)
_INSTALL: Final = "modprobe nvidia; dmesg | grep -i nvrm says why that fails; no driver yet: ubuntu-drivers install"
_NOUVEAU: Final = "write `blacklist nouveau` into /etc/modprobe.d/nouveau.conf, update-initramfs -u, reboot"
_FABRIC_REMEDY: Final = "systemctl enable --now nvidia-fabricmanager; its version must be that of the driver"
_GROUP_MAY: Final = 0o060
_READ_WRITE: Final = os.R_OK | os.W_OK


def loaded(facts: Facts) -> Iterator[Finding]:
    """Whether the kernel has a driver."""
    version, found = kernel_version(facts.box), cards(facts.box)
    if not facts.needs_driver:
        yield ok(f"no NVIDIA GPU here{', and no engine of the configuration needs one' if facts.whole else ''}")
    elif version is not None:
        kind = " (open)" if "Open" in (facts.box.text("/proc/driver/nvidia/version") or "") else ""
        yield ok(f"NVIDIA driver {version}{kind} is loaded")
    elif not isinstance(facts.gpus, Unknown) and facts.gpus.sweep.problem is None:
        yield ok(f"NVIDIA driver {facts.gpus.sweep.driver} answers; its module cannot be seen from here")
    else:
        why = (
            f"though the PCI bus has {count(len(found), 'NVIDIA GPU')}"
            if found
            else "and the PCI bus has no NVIDIA GPU"
        )
        who = f"; engine {listed(spec.name for spec in facts.gpu_engines)} needs it" if facts.gpu_engines else ""
        other = facts.box.path("/sys/module/nouveau").is_dir()
        taken = "; nouveau is, and holds them" if other and found else ""
        yield fail(f"the NVIDIA driver is not loaded, {why}{taken}{who}", _NOUVEAU if taken else _INSTALL)


def versions(facts: Facts) -> Iterator[Finding]:
    """Whether the module in the kernel and the library on disk are of one version."""
    kernel, library = kernel_version(facts.box), library_version(facts.box)
    said = not isinstance(facts.gpus, Unknown) and facts.gpus.sweep.problem == MISMATCH
    if said or (kernel and library and kernel != library):
        unseen = "(version not to be seen from here)"
        text = f"the kernel runs driver {kernel or unseen}, the library {_LIBRARY} is of {library or unseen}"
        yield fail(f"{text}: no new process can use a GPU, those that run keep working", _RELOAD)
    elif kernel and library:
        yield ok(f"module and library are both {kernel}")
    elif facts.has_driver:
        yield not_checked(f"the version of the {'module' if library else 'library'} cannot be seen from here")


def nvml(facts: Facts) -> Iterator[Finding]:
    """Whether NVML answers, and in time."""
    if not facts.needs_driver:
        return
    seen = facts.gpus
    if isinstance(seen, Unknown):
        if seen.code == "released":
            yield not_checked(seen.why)
        elif seen.code in {"hangs", "late"}:
            yield fail(seen.why, "dmesg | grep -i nvrm; a reboot is likely to be needed")
        else:
            yield fail(seen.why, "vllm-supervisor has to be installed with its libraries; dmesg | tail")
        return
    sweep = seen.sweep
    if sweep.problem is not None:
        yield fail(telemetry.no_driver(sweep.problem).message, _remedy(sweep.problem))
        return
    cuda = f", CUDA up to {seen.cuda[0]}.{seen.cuda[1]}" if seen.cuda is not None else ""
    yield ok(f"NVML answers in {sweep.took_ms:.0f} ms: driver {sweep.driver}{cuda}, {count(len(sweep.gpus), 'GPU')}")


def _remedy(problem: int) -> str:
    known = {
        MISMATCH: _RELOAD,
        NO_LIBRARY: "install the driver's libraries of the same version (Ubuntu: libnvidia-compute-NNN), then ldconfig",
        NO_PERMISSION: "ls -l /dev/nvidia*; usermod -aG GROUP USER for the group that they belong to",
    }
    return known.get(problem, "nvidia-smi; dmesg | grep -i nvrm")


def devices(facts: Facts) -> Iterator[Finding]:
    """Whether every user of an engine may open the device files that it needs."""
    if not facts.has_driver or facts.box.path("/dev/dxg").exists():  # WSL has that one device and no others
        return
    there = facts.box.names("/dev")
    nodes = [name for name in there if _NODE.fullmatch(name)]
    missing = [f"/dev/{name}" for name in _CONTROL if name not in there]
    if len(nodes) < len(cards(facts.box)):
        missing.append(f"/dev/nvidiaN of {len(cards(facts.box)) - len(nodes)} GPUs")
    if missing:
        helper = facts.box.path("/usr/bin/nvidia-modprobe")
        made = helper.exists() and bool(helper.stat().st_mode & stat.S_ISUID)
        text = f"{listed(missing)} cannot be found"
        if made:
            yield warn(f"{text}; nvidia-modprobe makes it at the first use", "nvidia-modprobe -u -c 0")
        else:
            yield fail(f"{text}: CUDA cannot begin", "modprobe nvidia_uvm; nvidia-modprobe -u -c 0 (as root)")
    paths = [facts.box.path(f"/dev/{name}") for name in (*_CONTROL, *nodes) if name in there]
    for who in _users(facts):
        closed = [path for path in paths if not may(who, str(path), _READ_WRITE)]
        if closed:
            names = listed(f"/dev/{path.name}" for path in closed)
            yield fail(f"user {who.name} may not open {names}", _grant(closed[0], who))
        elif paths and not missing:
            yield ok(f"user {who.name} may open {count(len(paths), 'device file')} of NVIDIA")


def _grant(path: Path, who: Account) -> str:
    status = path.stat()
    if status.st_mode & _GROUP_MAY == _GROUP_MAY and status.st_gid:
        return f"usermod -aG {_group(status.st_gid)} {who.name}, then restart its engines"
    mode = f"{status.st_mode & 0o777:04o}"
    return f"chmod 0666 /dev/nvidia* (now {mode}), and for good: options nvidia NVreg_DeviceFileMode=0666 in modprobe.d"


def _group(gid: int) -> str:
    import grp  # noqa: PLC0415 (needed only for this remedy)

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def groups(facts: Facts) -> Iterator[Finding]:
    """Whether users of engines are in the groups that devices for computing belong to."""
    if not facts.has_driver:
        return
    known = {name: gid for name in ("video", "render") if (gid := facts.box.group(name)) is not None}
    for who in _users(facts):
        lacking = [name for name, gid in known.items() if gid not in who.groups and who.uid != 0]
        if lacking:
            text = f"user {who.name} is not in {' and '.join(lacking)}: it depends on device files open to everybody"
            yield warn(text, f"usermod -aG {','.join(lacking)} {who.name}, then restart its engines")
        elif known:
            yield ok(f"user {who.name} is in {' and '.join(known)}" if who.uid else "engines run as root")


def _users(facts: Facts) -> list[Account]:
    """Each user of engines with GPUs, once."""
    users = {who.uid: who for spec in facts.gpu_engines if (who := facts.user_of(spec)) is not None}
    return list(users.values())


def persistenced(facts: Facts) -> Iterator[Finding]:
    """Whether nvidia-persistenced runs, where persistence mode is wanted."""
    if not facts.has_driver:
        return
    # From within a container only its socket is to be seen.
    if facts.box.process("nvidia-persistenced") or facts.box.path("/run/nvidia-persistenced/socket").exists():
        yield ok("nvidia-persistenced runs")
        return
    wanted = [gpu for gpu in facts.inventory.values() if persistence.wanted(gpu, facts.node.gpu)[0]]
    if wanted:
        text = f"nvidia-persistenced does not run, and persistence mode is wanted on for {listed(map(label, wanted))}"
        remedy = "systemctl enable --now nvidia-persistenced; until then the supervisor sets the driver's older flag"
        yield warn(text, remedy)
    else:
        yield ok("nvidia-persistenced does not run; no GPU here needs persistence mode")


def fabric(facts: Facts) -> Iterator[Finding]:
    """Whether the fabric is up on machines with NVSwitches: without it CUDA says "system not yet initialized" (802)."""
    found = switches(facts.box)
    states = [(reading, depth) for reading, depth in facts.readings if depth.fabric_state]
    if not found and not states:
        return
    runs = facts.box.process("nv-fabricmanager")
    down = [(reading, depth) for reading, depth in states if not _fabric_up(depth.fabric_state, depth.fabric_status)]
    if down:
        reading, depth = down[0]
        word = {FABRIC_NOT_STARTED: "has not started", FABRIC_IN_PROGRESS: "is being set up"}.get(
            depth.fabric_state or 0, f"failed with NVML code {depth.fabric_status}"
        )
        text = f"the NVLink fabric of GPU {reading.index} {word}; CUDA would fail with error 802"
        if not runs:
            text += "; nvidia-fabricmanager does not run"
        if found:
            yield fail(text, _FABRIC_REMEDY)
        else:
            yield warn(f"{text}; this machine has no NVSwitch of its own", "look at the fabric manager of the rack")
    elif states:
        yield ok(f"the NVLink fabric of {count(len(states), 'GPU')} is up")
    elif runs:
        yield ok(f"nvidia-fabricmanager runs for {count(len(found), 'NVSwitch', 'NVSwitches')}")
    else:
        text = f"nvidia-fabricmanager does not run, and this machine has {count(len(found), 'NVSwitch', 'NVSwitches')}"
        yield fail(f"{text}: CUDA would fail with error 802", _FABRIC_REMEDY)


def _fabric_up(state: int | None, status: int | None) -> bool:
    return state == FABRIC_COMPLETED and not status


def library_version(box: Box) -> str | None:
    """Version of the NVML library, which the name of its file holds."""
    extra = os.environ.get("LD_LIBRARY_PATH", "") if box.root == Path("/") else ""
    for folder in (*filter(None, extra.split(":")), *_FOLDERS):
        found = _VERSION.search(os.path.realpath(box.path(folder) / _LIBRARY))
        if found is not None:
            return found[1]
    return None
