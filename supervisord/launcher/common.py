"""What both launchers do alike: they differ in how an engine is begun, recognised and put away."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Generic, TypeVar

from supervisord.core.model import ExitClass, Process
from supervisord.launcher import evidence, killing, ports, procfs
from supervisord.launcher.base import LaunchError, Ownership, StateDirError, telling
from supervisord.launcher.exits import Exit, ExitWatcher
from supervisord.launcher.preparing import Preparer
from supervisord.launcher.procfs import Stat
from supervisord.launcher.statedir import PrivateDirs, make_directory

SWEEP_S: Final = 5.0

_OWNERS_MAX: Final = 1000


class Kept:
    """The latest generation of one engine. Changed on the engine's lane.

    `generation` is what the core calls it; for an adopted one it may be newer than what the process was started as.
    `process`: None when its main process is gone. `pidfd` names that.
    """

    def __init__(self, engine: str, generation: int, process: Process | None, pidfd: int | None = None) -> None:
        self.engine = engine
        self.generation = generation
        self.process = process
        self.pidfd = pidfd
        self.ended = False

    def end(self) -> None:
        """Nothing of it lives any more."""
        self.ended = True
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


K = TypeVar("K", bound=Kept)


class CommonLauncher(ABC, Generic[K]):
    """The common half of a `base.Launcher`.

    `on_exit(engine, generation, code, signal)` is called on the exit watcher's thread; `on_trouble(message)` hears of
    what went wrong without stopping anything, on the caller's. `directories` of the state directory, with their modes,
    are made. Raises StateDirError.
    """

    def __init__(
        self,
        state_dir: Path,
        on_exit: Callable[[str, int, int | None, int | None], None],
        on_trouble: Callable[[str], None],
        directories: Mapping[str, int],
    ) -> None:
        self._state_dir = state_dir
        self._on_exit = on_exit
        self._on_trouble = on_trouble
        self._entries: dict[str, K] = {}
        self._owners: dict[int, tuple[int, tuple[str, int] | None]] = {}
        """By pid: its start time and whose it is."""
        try:
            for name, mode in directories.items():
                make_directory(state_dir / name, mode)
        except OSError as error:
            raise StateDirError(f"cannot make {error.filename} in supervisor.state_dir: {error.strerror}") from None
        self._private = PrivateDirs(state_dir)
        self._preparer = Preparer(state_dir, self._private)
        self._exits = ExitWatcher(self._exited)

    def close(self) -> None:
        """Stop watching."""
        self._exits.close()

    def generations(self) -> dict[str, int]:
        """The last generation of each engine that is known, alive or not."""
        return {engine: entry.generation for engine, entry in self._entries.items()}

    # --- ending -------------------------------------------------------------------------------------------------

    def terminate(self, engine: str, generation: int) -> None:
        """SIGTERM to the main process; gone already: nothing to do."""
        entry = self._entry(engine, generation)
        if entry is not None and entry.pidfd is not None:
            with self._telling(f"cannot send SIGTERM to {engine}"), contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(entry.pidfd, signal.SIGTERM)

    def keep_evidence(self, engine: str, generation: int, reason: str, tail: tuple[str, ...]) -> None:
        """Write `<state_dir>/evidence/ENGINE.GENERATION.REASON.txt`; the newest 20 files are kept."""
        path = self._state_dir / "evidence" / f"{engine}.{generation}.{reason}.txt"
        with self._telling(f"cannot keep evidence of {engine}"):
            heading = f"engine {engine}, generation {generation}, killed for: {reason}"
            evidence.collect(path, heading, self.members(engine), tail)

    def sweep(self, engine: str, generation: int) -> tuple[str, ...]:
        """SIGKILL to everything of the engine, then its files. Returns what still lives after 5 s, described."""
        entry = self._entry(engine, generation)
        if entry is None or entry.ended:
            return ()
        main = entry.process.pid if entry.process is not None else None
        remaining = killing.kill_all(lambda: self._doomed(entry), main, SWEEP_S)
        if not remaining:
            self._finish(entry)
        return tuple(procfs.describe(stat) for stat in remaining)

    # --- looking ------------------------------------------------------------------------------------------------

    def members(self, engine: str) -> tuple[int, ...]:
        """Pids of the living processes of the engine."""
        entry = self._entries.get(engine)
        return tuple(stat.pid for stat in self._living(entry)) if entry is not None and not entry.ended else ()

    def owns_listener(self, engine: str, host: str, port: int) -> Ownership:
        """Who answers on the engine's address."""
        return ports.ownership(self.members(engine), host, port)

    def whose(self, pid: int) -> tuple[str, int] | None:
        """Engine and generation of a process; NVML lists one for a moment longer than it lives."""
        stat = procfs.read_stat(pid)
        if stat is None or not stat.alive:
            return self._owners.get(pid, (0, None))[1]
        ticks, owner = self._owners.get(pid, (-1, None))
        if ticks != stat.start_ticks:
            if len(self._owners) >= _OWNERS_MAX:
                self._owners.clear()
            owner = self._owner(stat)
            self._owners[pid] = (stat.start_ticks, owner)
        return owner

    # --- what each does in its own way --------------------------------------------------------------------------

    @abstractmethod
    def _living(self, entry: K) -> list[Stat]:
        """The living processes of an engine that has not ended."""

    @abstractmethod
    def _doomed(self, entry: K) -> tuple[list[Stat], bool]:
        """What is to be killed, and whether nothing can have escaped that look (killing.kill_all)."""

    @abstractmethod
    def _finish(self, entry: K) -> None:
        """Nothing lives: remove its files, and end the entry."""

    @abstractmethod
    def _owner(self, stat: Stat) -> tuple[str, int] | None:
        """Whose a living process is."""

    @abstractmethod
    def _exited(self, seen: Exit) -> None:
        """A main process that is watched has ended."""

    # --- helpers ------------------------------------------------------------------------------------------------

    def _entry(self, engine: str, generation: int) -> K | None:
        entry = self._entries.get(engine)
        return entry if entry is not None and entry.generation == generation else None

    def _check_swept(self, engine: str) -> None:
        """Raise LaunchError while an earlier generation may live."""
        old = self._entries.get(engine)
        if old is not None and not old.ended:
            message = f"cannot start {engine}: generation {old.generation} of it has not been swept"
            raise LaunchError(ExitClass.RESOURCE, message)

    def _remove_private(self, engine: str, path: Path) -> None:
        with self._telling(f"cannot remove the temporary directory of {engine}"):
            self._private.remove(path)

    def _remove_other_private(self, keep: set[Path]) -> None:
        for path in self._private.others(keep):
            with self._telling("cannot remove an old temporary directory"):
                self._private.remove(path)

    def _telling(self, what: str) -> contextlib.AbstractContextManager[None]:
        return telling(self._on_trouble, what)
