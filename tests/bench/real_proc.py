"""What a process and a state directory take, as the system sees them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def process(pid: int) -> dict[str, float]:
    """Memory, descriptors, threads and processor time of a process."""
    status = _fields(Path(f"/proc/{pid}/status"))
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return {
        "rss_kib": status["VmRSS"],
        "pss_kib": rollup["Pss"],
        "anonymous_kib": rollup["Anonymous"],
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        "threads": status["Threads"],
        "cpu_s": (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
    }


def children(pid: int) -> list[int]:
    """Processes that this one started."""
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text(encoding="ascii").split()
    ]


def files(state_dir: Path) -> dict[str, int]:
    """Bytes of the state directory: the history, the engines' output, everything else."""
    sizes = {"history": 0, "logs": 0, "other": 0}
    for path in state_dir.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            kind = "logs" if path.parent.name == "logs" else "other"
            sizes["history" if path.name.startswith("history") else kind] += path.is_file() and path.stat().st_size
    return sizes


def _fields(path: Path) -> dict[str, int]:
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(rest.split()[0])
    return found
