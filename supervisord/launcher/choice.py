"""Where this process and others run, as systemd sees it; needs no bus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from supervisord.launcher.cgroups import ROOT, Cgroup

BOOTED: Final = Path("/run/systemd/system")
"""There when PID 1 is systemd (sd_booted(3))."""

UNIFIED: Final = Path("/sys/fs/cgroup/cgroup.controllers")

SLICE: Final = "vllm.slice"
PATTERN: Final = "vllm-engine-*.service"

_SUFFIX: Final = ".service"
_OF_A_USER: Final = "/user.slice/"


def under_systemd() -> bool:
    """Whether "auto" means the systemd launcher: we are root, and a service of the system's manager."""
    return no_systemd() is None and own_unit() is not None


def no_systemd() -> str | None:
    """Why engines cannot be services of systemd here; None when they can."""
    if os.geteuid() != 0:
        return "only root may start services"
    if not BOOTED.is_dir():
        return "systemd does not run this machine"
    if not UNIFIED.exists():
        return "it needs the unified cgroup hierarchy (cgroup v2)"
    return None


def own_unit() -> str | None:
    """The system service that this process runs in; None outside of one (a terminal, a user's service manager)."""
    return service_of("self") if BOOTED.is_dir() else None


def service_of(pid: int | str) -> str | None:
    """The system service that a process runs in; None when it is gone or in none."""
    path = _cgroup_of(pid) or ""
    name = path.rpartition("/")[2]
    return name if name.endswith(_SUFFIX) and not path.startswith(_OF_A_USER) else None


def living_units() -> list[str]:
    """The services of engines that have processes, whoever started them."""
    return sorted(path.name for path in (ROOT / SLICE).glob(PATTERN) if Cgroup(f"{SLICE}/{path.name}").populated())


def _cgroup_of(pid: int | str) -> str | None:
    """The cgroup of a process in the unified hierarchy."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), None)
