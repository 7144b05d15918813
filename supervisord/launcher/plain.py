"""The plain launcher: engines are child processes of the daemon, each in a session of its own.

The daemon's end does not end them by itself; what a killed daemon leaves is found by the next one through the identity
records and the marks in the environment of every process.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from supervisord.core.model import Found, LaunchPlan, Process, Progress
from supervisord.launcher import family, killing, logs, procfs, sharedmem
from supervisord.launcher.base import Ended
from supervisord.launcher.common import CommonLauncher
from supervisord.launcher.entry import Entry
from supervisord.launcher.exits import Exit
from supervisord.launcher.family import Family
from supervisord.launcher.orphans import Orphans
from supervisord.launcher.procfs import Census, Stat
from supervisord.launcher.records import DIRECTORY, Record, Records
from supervisord.launcher.starting import Starter
from supervisord.state import boot_id

_CENSUS_S: Final = 1.0
"""Samples of several engines share a census of this age."""

_PR_SET_CHILD_SUBREAPER: Final = 36


class PlainLauncher(CommonLauncher[Entry]):
    """Implements `base.Launcher`."""

    name = "plain"

    def __init__(
        self,
        state_dir: Path,
        on_exit: Callable[[str, int, int | None, int | None], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        super().__init__(state_dir, on_exit, on_trouble, {DIRECTORY: 0o700, "logs": 0o750})
        self._census = Census(-_CENSUS_S, {}, whole=False)
        self._records = Records(state_dir / DIRECTORY)
        self._starter = Starter(self._preparer, self._records)
        self._orphans = Orphans()
        # Orphans of our children become our children: only so can they be found, and buried.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def keeps_engines(self) -> bool:
        """No: they are children of the daemon, and its end is theirs."""
        return False

    # --- beginning ----------------------------------------------------------------------------------------------

    def launch(self, plan: LaunchPlan, generation: int) -> Process:
        """Spawn and begin to watch. Raises GateError or LaunchError: then nothing of it lives."""
        self._check_swept(plan.engine)
        record, pidfd = self._starter.start(plan, generation, self.log_path(plan.engine))
        self._entries[record.engine] = Entry(record, pidfd, self.log_path(record.engine))
        # The record outlives the daemon already; the disk is only waited for when the engine is on its way.
        with self._telling(f"cannot write the identity record of {record.engine} to the disk"):
            self._records.sync(record.engine)
        self._exits.watch(record.engine, generation, pidfd, child=True)
        return record.process

    def recover(self) -> tuple[Found, ...]:
        """What an earlier daemon left, those too whose main process ended meanwhile in this boot.

        What ended before loses its files. Broken records are told, never fatal.
        """
        with self._telling("cannot remove unfinished identity records"):
            self._records.remove_unfinished()
        records, problems = self._records.load()
        for problem in problems:
            self._on_trouble(problem)
        census, boot = procfs.census(), boot_id()
        found = []
        for record in [*records, *self._unrecorded({record.engine for record in records}, census)]:
            entry = self._entries[record.engine] = Entry(record, None, self.log_path(record.engine))
            entry.forget_main_unless_alive(boot, census)
            alive = self._family(entry, census, everywhere=True).members
            if alive or entry.vanished:
                entry.ended = False  # whatever its record says
                found.append(_found(entry, alive))
            elif not entry.ended:
                self._finish(entry)
        self._remove_other_private({Path(e.record.private_dir) for e in self._entries.values() if not e.ended})
        return tuple(found)

    def _unrecorded(self, recorded: set[str], census: Census) -> list[Record]:
        """Records for processes that carry our marks and have none, because somebody removed it."""
        found: dict[str, Record] = {}
        for stat in census.processes.values():
            marks = family.read_marks(stat, str(self._state_dir)) if stat.alive and stat.pid != os.getpid() else None
            uid = procfs.uid_of(stat.pid)
            if marks is not None and uid is not None and marks.engine not in recorded | found.keys():
                directory = str(self._private.path(*marks))
                found[marks.engine] = Record(*marks, "", uid, Process(0, 0, ""), directory, 0)
        return list(found.values())

    def adopt(self, engine: str, generation: int) -> None:
        """Take over what `recover` found, under this generation; the end of a main process that is gone is told."""
        entry = self._entries.get(engine)
        if entry is None:
            return
        entry.generation = generation
        if entry.vanished:
            self._on_exit(engine, generation, None, None)
        if entry.process is None:
            return
        entry.pidfd = killing.open_exactly(entry.process.pid, entry.process.start_ticks)
        if entry.pidfd is None:
            self._on_exit(engine, generation, None, None)
            return
        stat = procfs.read_stat(entry.process.pid)
        entry.child = stat is not None and stat.ppid == os.getpid()
        self._exits.watch(engine, generation, entry.pidfd, child=entry.child)

    # --- ending -------------------------------------------------------------------------------------------------

    def _doomed(self, entry: Entry) -> Family:
        found = self._family(entry, procfs.census(), everywhere=not entry.child)
        self._note_shared_memory(entry, found.members)
        return found

    def _finish(self, entry: Entry) -> None:
        """Nothing lives: remove its files, and say in the record that this was done."""
        record = entry.record
        with self._telling(f"cannot remove what {entry.engine} left in {sharedmem.DIRECTORY}"):
            sharedmem.remove(entry.shared_memory, record.uid)
        self._remove_private(entry.engine, Path(record.private_dir))
        self._note(entry, {"ended": True})
        entry.end()

    def _exited(self, seen: Exit) -> None:
        entry = self._entry(seen.engine, seen.generation)
        if entry is not None:
            entry.reaped_ticks = seen.reaped_ticks
        self._on_exit(seen.engine, seen.generation, seen.code, seen.signal)

    def ended(self, _engine: str, _generation: int, code: int | None, number: int | None) -> Ended:
        """Nothing more is known than the exit watcher told."""
        return Ended(code, number)

    # --- looking ------------------------------------------------------------------------------------------------

    def _living(self, entry: Entry) -> list[Stat]:
        return self._family(entry, procfs.census(), everywhere=False).members

    def _owner(self, stat: Stat) -> tuple[str, int] | None:
        """By the marks that it was started with; those in another user's process prove nothing."""
        marks = family.read_marks(stat, str(self._state_dir))
        entry = self._entries.get(marks.engine) if marks is not None else None
        if marks is None or entry is None or procfs.uid_of(stat.pid) != entry.record.uid:
            return None
        return marks.engine, entry.generation if marks.generation == entry.record.generation else marks.generation

    def host_bytes(self, engine: str) -> int | None:
        """Anonymous host memory of the engine, None when nothing of it lives."""
        entry = self._entries.get(engine)
        found = self._sample(entry) if entry is not None else []
        return sum(procfs.anonymous_bytes(stat.pid) for stat in found) if found else None

    def progress(self, engine: str) -> Progress:
        """How far its start has come: bytes, memory and log lines of all its processes."""
        entry = self._entries.get(engine)
        if entry is None:
            return Progress(0, 0, 0)
        found = self._sample(entry)
        memory = sum(procfs.anonymous_bytes(stat.pid) for stat in found)
        return Progress(entry.bytes_read(found), memory, entry.lines.count())

    def tail(self, engine: str, lines: int) -> tuple[str, ...]:
        """Last lines of output of this generation, oldest first, without control characters."""
        entry = self._entries.get(engine)
        return logs.tail(self.log_path(engine), entry.log_offset, lines) if entry is not None else ()

    def log_path(self, engine: str) -> Path:
        """Where the output goes."""
        return self._state_dir / "logs" / f"{engine}.log"

    def rotate_if_large(self, engine: str) -> bool:
        """Cut the log of a running engine at 256 MiB; say whether it was."""
        was_cut = False
        with self._telling(f"cannot keep the end of the log of {engine}"):
            was_cut = logs.cut(self.log_path(engine))
        entry = self._entries.get(engine)
        if was_cut and entry is not None:
            entry.log_offset = 0
            self._note(entry, {"log_offset": 0})
        return was_cut

    # --- helpers ------------------------------------------------------------------------------------------------

    def _sample(self, entry: Entry) -> list[Stat]:
        if entry.ended:
            return []
        census = self._census
        if time.monotonic() - census.at > _CENSUS_S:
            census = self._census = procfs.census()
        found = self._family(entry, census, everywhere=False).members
        self._note_shared_memory(entry, found)
        return found

    def _family(self, entry: Entry, census: Census, *, everywhere: bool) -> Family:
        entries = list(self._entries.values())
        mains = {other.process.pid for other in entries if other.process is not None}
        known = {pid: ticks for other in entries for pid, ticks in other.known.items()}
        self._orphans.bury(census, mains, known)
        found = family.look(census, entry.clues(str(self._state_dir)), everywhere=everywhere)
        entry.remember(census, found.members)
        return found

    def _note_shared_memory(self, entry: Entry, members: list[Stat]) -> None:
        if members and entry.unlooked(sharedmem.listing()):
            new = entry.note(sharedmem.in_use((stat.pid for stat in members), entry.record.uid))
            if new:
                self._note(entry, {"shared_memory": new})

    def _note(self, entry: Entry, facts: dict[str, object]) -> None:
        with self._telling(f"cannot add to the identity record of {entry.engine}"):
            self._records.add(entry.engine, entry.record.generation, facts)


def _found(entry: Entry, alive: list[Stat]) -> Found:
    record, described = entry.record, [procfs.describe(stat) for stat in alive]
    process = entry.process
    if entry.vanished:
        process = record.process
        described.append(f"pid {process.pid}, ended meanwhile")
    return Found(entry.engine, entry.generation, process, tuple(described), record.plan_id or None)


def state_dirs() -> list[str]:
    """The state directories that living processes name; whoever reads there decides whether to believe it."""
    found = {family.state_dir_of(stat) for stat in procfs.census().processes.values() if stat.alive}
    return sorted(filter(None, found))


def living(state_dir: Path) -> list[str]:
    """Engines that a killed daemon left and that did not end, by their identity records."""
    try:
        records, _ = Records(state_dir / DIRECTORY).load()
    except OSError:
        return []
    census, boot, found = procfs.census(), boot_id(), []
    for record in records:
        entry = Entry(record, None, Path())
        entry.forget_main_unless_alive(boot, census)
        if not record.ended and family.look(census, entry.clues(str(state_dir)), everywhere=True).members:
            found.append(record.engine)
    return found
