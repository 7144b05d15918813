"""What the unified cgroup hierarchy says of an engine's unit: who is in it, and how much memory they have."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from supervisord.launcher import procfs
from supervisord.launcher.procfs import Stat

ROOT: Final = Path("/sys/fs/cgroup")


class Cgroup:
    """One cgroup, by its path below the root. One that is gone is empty."""

    def __init__(self, path: str) -> None:
        self._directory = ROOT / path.lstrip("/")

    def populated(self) -> bool:
        """Whether anybody lives in it or below; exact, also while processes fork."""
        return "populated 1" in _lines(self._directory / "cgroup.events")

    def members(self) -> list[Stat]:
        """Its living processes."""
        with contextlib.suppress(OSError):
            pids = {pid for path in self._directory.rglob("cgroup.procs") for pid in _lines(path)}
            stats = [procfs.read_stat(int(pid)) for pid in pids if pid != "0"]
            return [stat for stat in stats if stat is not None and stat.alive]
        return []

    def anonymous_bytes(self) -> int | None:
        """Anonymous memory of all of it in one read; None without the memory controller."""
        return _number(self._directory / "memory.stat", "anon")

    def oom_kills(self) -> int:
        """Processes of it that the kernel has killed for want of memory, as long as it exists."""
        return _number(self._directory / "memory.events", "oom_kill") or 0


def _number(path: Path, name: str) -> int | None:
    found = (line.split() for line in _lines(path))
    return next((int(words[1]) for words in found if words[0] == name), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
