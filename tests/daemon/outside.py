"""What can be seen of a daemon and its engines from outside: /proc, and nothing of the supervisor's own code."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.sim.engine import alive, title_of

_STATE = b"SUPERVISED_STATE="
_ENGINE = b"SUPERVISED_ENGINE="
_GENERATION = b"SUPERVISED_GENERATION="


class Seen(NamedTuple):
    """A living process of an engine: whose it says it is in the environment that it was started with."""

    pid: int
    engine: str
    generation: int


def pids() -> Iterator[int]:
    """Everybody but us."""
    for name in os.listdir("/proc"):  # noqa: PTH208 (called hundreds of times a second)
        if name.isdigit() and int(name) != os.getpid():
            yield int(name)


def engine_processes(state_dir: Path) -> list[Seen]:
    """Living processes of all engines of one state directory."""
    return Looker(state_dir).look()


def marks_of(pid: int, state_dir: Path) -> Seen | None:
    """What a process says, if it is one of an engine of this state directory."""
    variables = _environment(pid)
    if _STATE + os.fsencode(state_dir) not in variables:
        return None
    engine = next((v[len(_ENGINE) :] for v in variables if v.startswith(_ENGINE)), b"?")
    generation = next((v[len(_GENERATION) :] for v in variables if v.startswith(_GENERATION)), b"0")
    return Seen(pid, engine.decode(), int(generation))


def processes_using(prefix: str) -> list[int]:
    """Living processes with an open file whose path begins with `prefix`."""
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            folder = f"/proc/{pid}/fd"
            links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]  # noqa: PTH115, PTH208 (quick)
            if any(link.startswith(prefix) for link in links) and alive(pid):
                found.append(pid)
    return found


def titled(found: list[int], title: str) -> int:
    """The one process among these whose title begins with `title`."""
    matching = [pid for pid in found if title_of(pid).startswith(title)]
    assert len(matching) == 1, f"{len(matching)} processes are called {title!r}: {[title_of(pid) for pid in found]}"
    return matching[0]


def rss_mib(pid: int) -> float:
    """Resident memory."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def everything_on_command_lines() -> str:
    """Command lines of all processes: what any user of the machine can read."""
    return "\n".join(title_of(pid) for pid in pids())


class Watcher:
    """Looks at the engines of a state directory all the time; keeps every sight of two generations of one engine."""

    def __init__(self, state_dir: Path) -> None:
        self._looker = Looker(state_dir)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.twins: list[str] = []
        self.looks = 0
        self.highest: dict[str, int] = {}

    def __enter__(self) -> Watcher:  # noqa: PYI034 (typing.Self came with Python 3.11)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._end.wait(0.01):
            self.looks += 1
            self.twins += twins(self._looker.look(), self.highest)


class Looker:
    """Engine processes again and again, cheaply: what a process was started with is read once.

    A process of nobody is read again after a moment: it may have been between fork and exec.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._known: dict[int, tuple[float, Seen | None]] = {}

    def look(self) -> list[Seen]:
        """Living processes of all engines."""
        now = time.monotonic()
        here = set(pids())
        self._known = {pid: known for pid, known in self._known.items() if pid in here}
        for pid in here:
            at, seen = self._known.get(pid, (0.0, None))
            if seen is None and now - at > 0.2:
                self._known[pid] = (now, marks_of(pid, self._state_dir))
        return [seen for _, seen in self._known.values() if seen is not None and alive(seen.pid)]


def twins(found: list[Seen], highest: dict[str, int]) -> list[str]:
    """Engines of which two generations live, checked again: a list of processes is not of one moment."""
    for seen in found:
        highest[seen.engine] = max(seen.generation, highest.get(seen.engine, 0))
    old = [seen for seen in found if seen.generation < highest[seen.engine]]
    return [f"{seen} beside generation {highest[seen.engine]}" for seen in old if alive(seen.pid)]


def _environment(pid: int) -> frozenset[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # noqa: PTH123 (quick)
            return frozenset(file.read().split(b"\0"))
    except OSError:
        return frozenset()
