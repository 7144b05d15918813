"""A plain launcher in a state directory of its own, for tests; nothing of it is left afterwards."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from supervisord.core.model import LaunchPlan, Process
from supervisord.launcher import procfs
from supervisord.launcher.base import MARK_STATE
from supervisord.launcher.plain import PlainLauncher
from tests.sim.engine import free_port, processes_with_marker, wait_until

ENGINE = "qwen"
SLEEP = ("/bin/sleep", "1000")

Told = tuple[str, int, int | None, int | None]


class Box:
    """The launcher and what it said. `out` is a file that engines can write to as $OUT."""

    def __init__(self, state: Path, out: Path) -> None:
        self.state = state
        self.out = out
        self.troubles: list[str] = []
        self.exits: queue.SimpleQueue[tuple[float, Told]] = queue.SimpleQueue()
        self.launcher = PlainLauncher(state, self._on_exit, self.troubles.append)

    def _on_exit(self, *told: Any) -> None:
        self.exits.put((time.perf_counter(), told))

    def plan(self, *argv: str, env: dict[str, str] | None = None, **fields: Any) -> LaunchPlan:
        known = {"user": None, "host": "127.0.0.1", "port": free_port(), "plan_id": "plan-1"}
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OUT": str(self.out), **(env or {})}
        return LaunchPlan(engine=ENGINE, argv=argv, env=environment, **{**known, **fields})

    def launch(self, *argv: str, generation: int = 1, **fields: Any) -> Process:
        return self.launcher.launch(self.plan(*argv, **fields), generation)

    def shell(self, script: str, generation: int = 1, **fields: Any) -> Process:
        return self.launch("/bin/sh", "-c", script, generation=generation, **fields)

    def exit(self) -> Told:
        """The next end of a main process that is told."""
        return self.exits.get(timeout=10)[1]

    def written(self, lines: int = 1) -> list[str]:
        """What engines wrote to $OUT, once it has so many lines."""

        def read() -> list[str]:
            return self.out.read_text(encoding="utf-8").splitlines() if self.out.exists() else []

        return wait_until(lambda: read() if len(read()) >= lines else [], 10, f"{lines} lines in $OUT")

    def wait_members(self, count: int) -> tuple[int, ...]:
        """Pids of the engine's processes, once there are so many and all have become what they will be."""

        def members() -> tuple[int, ...]:
            found = self.launcher.members(ENGINE)
            return found if len(found) == count else ()

        return wait_until(members, 10, f"{count} members")

    def living(self) -> list[int]:
        """Everything that carries our marks."""
        return processes_with_marker(MARK_STATE, str(self.state))

    def private(self) -> list[str]:
        return sorted(path.name for path in (self.state / "tmp").iterdir())


def zombies() -> list[procfs.Stat]:
    """Dead children of ours that nobody buried, without leaders of sessions: these may be somebody's for a minute."""
    dead = [s for s in procfs.census().processes.values() if s.ppid == os.getpid() and not s.alive]
    return [stat for stat in dead if stat.session != stat.pid]


@contextmanager
def a_box(out: Path) -> Iterator[Box]:
    """Make one. Its state directory can be passed by every user, unlike those of pytest."""
    state = Path(tempfile.mkdtemp(prefix="sv-"))
    state.chmod(0o711)
    box = Box(state, out)
    # Once a launcher was here this process inherits orphans, those of tests of other files too.
    for stat in zombies():
        with suppress(ChildProcessError):
            os.waitpid(stat.pid, os.WNOHANG)
    try:
        yield box
        for generation in range(10):
            assert box.launcher.sweep(ENGINE, generation) == ()
        assert not box.living()
        assert zombies() == []
    finally:
        for pid in box.living():
            os.kill(pid, 9)
        box.launcher.close()
        shutil.rmtree(state)
