"""Processes as /proc shows them: who descends from whom, what they use, and in what namespace they are numbered."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.daemon.outside import pids as all_pids
from tests.sim.engine import alive

MARK = "VLLM_SIM_MARK"
"""In the environment of every process of an engine."""


def parent(pid: int) -> int:
    """0 when it has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def variables(pid: int) -> list[bytes]:
    """The environment that it was started with, or [] when it has gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def family(roots: Iterable[int]) -> list[int]:
    """The roots and their descendants, engines and what descends from them left out."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        children.setdefault(parent(pid), []).append(pid)
    found, look = [], list(roots)
    while look:
        pid = look.pop()
        if alive(pid) and not any(one.startswith(f"{MARK}=".encode()) for one in variables(pid)):
            found.append(pid)
            look += children.get(pid, [])
    return sorted(set(found))


def number_inside(pid: int) -> int:
    """How a process is numbered in its own namespace; 0 when it has gone."""
    try:
        found = re.search(r"^NSpid:.*\t(\d+)$", Path(f"/proc/{pid}/status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def kill(pids: Iterable[int]) -> None:
    """SIGKILL; who has gone has gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Memory:
    """Of some processes together. PSS divides what they share with others among all who share it."""

    rss_mib: float
    pss_mib: float
    processes: int


def memory(pids: Iterable[int]) -> Memory:
    """Now."""
    rss = pss = count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            rss += int(text.partition("Rss:")[2].split()[0])
            pss += int(text.partition("\nPss:")[2].split()[0])
            count += 1
    return Memory(rss / 1024, pss / 1024, count)


def cpu_s(pids: Iterable[int], name: Callable[[int, int, str], str]) -> dict[tuple[int, str], float]:
    """CPU time so far of each thread, by its number and its kind: `name` of process, thread and comm."""
    times = {}
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(OSError):  # it ended meanwhile
                kind = name(pid, int(task.name), (task / "comm").read_text().strip())
                times[int(task.name), kind] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return times


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def cpu_percent(
    pids: Callable[[], Iterable[int]], seconds: float, name: Callable[[int, int, str], str] = lambda *_: "all"
) -> tuple[float, dict[str, float]]:
    """CPU over a time, in percent of a core: all of it, and by kind of thread.

    A thread that begins or ends in that time is seen up to the last look at it, a second before.
    """
    began, before = time.monotonic(), cpu_s(pids(), name)
    latest = dict(before)
    while (left_s := began + seconds - time.monotonic()) > 0:
        time.sleep(min(1.0, left_s))
        latest |= cpu_s(pids(), name)
    took_s = time.monotonic() - began
    kinds: dict[str, float] = {}
    for thread, used_s in latest.items():
        kinds[thread[1]] = kinds.get(thread[1], 0.0) + (used_s - before.get(thread, 0.0)) / took_s * 100
    return sum(kinds.values()), kinds
