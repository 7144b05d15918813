"""The systemd launcher: every engine is a transient service in vllm.slice, which outlives the daemon.

The unit knows all that is needed to take an engine over, and how it ended. The kernel names its processes (cgroup), the
pidfd tells the end of the main one; systemd is asked only when an engine begins, has ended, or is put away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from supervisord.core.model import ExitClass, Found, LaunchPlan, Process, Progress
from supervisord.launcher import evidence, killing, logs, outcome, ports, procfs, service
from supervisord.launcher.base import MARK_STATE, Ended, LaunchError, ManagerError, Ownership, StateDirError, telling
from supervisord.launcher.cgroups import Cgroup
from supervisord.launcher.choice import own_unit, service_of
from supervisord.launcher.dbus import BusError
from supervisord.launcher.entry import BytesRead
from supervisord.launcher.exits import Exit, ExitWatcher
from supervisord.launcher.logs import DistinctLines
from supervisord.launcher.preparing import Prepared, Preparer
from supervisord.launcher.procfs import Stat
from supervisord.launcher.service import Marks
from supervisord.launcher.statedir import PrivateDirs, make_directory
from supervisord.launcher.units import Units, UnitState, pauses
from supervisord.state import boot_id

SWEEP_S: Final = 5.0
STATUS_S: Final = 5.0
"""PID 1 hears of an end when the pidfd does; it may be busy with something else."""

JOB_S: Final = 3.0
"""How long the reason of our own end is asked for."""

_OWNERS_MAX: Final = 1000


class Running:
    """One engine's unit: changed on the engine's lane."""

    def __init__(self, marks: Marks, cgroup: str, process: Process, log: Path) -> None:
        self.marks = marks
        self.generation = marks.generation
        self.unit = service.unit_name(marks.engine)
        self.cgroup = Cgroup(cgroup)
        self.process = process
        self.pidfd: int | None = None
        self.ended = False
        self.log_offset = marks.log_offset
        self.lines = DistinctLines(log, marks.log_offset)
        self.bytes_read = BytesRead().count

    def members(self) -> list[Stat]:
        """Its living processes."""
        return [] if self.ended else self.cgroup.members()

    def end(self) -> None:
        """Nothing of it lives any more."""
        self.ended = True
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class SystemdLauncher:
    """Implements `base.Launcher`. Raises StateDirError.

    `on_exit` and `on_trouble` as for the plain launcher; what an end was is asked with `ended`.
    """

    name = "systemd"

    def __init__(
        self,
        state_dir: Path,
        on_exit: Callable[[str, int, int | None, int | None], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._state_dir = state_dir
        self._on_exit = on_exit
        self._on_trouble = on_trouble
        self._daemon = own_unit() or service.DAEMON
        self._boot_id = boot_id()
        self._entries: dict[str, Running] = {}
        self._owners: dict[int, tuple[int, tuple[str, int] | None]] = {}
        """By pid: its start time and whose it is."""
        self._environments, log_dir = state_dir / "environment", state_dir / "logs"
        try:
            make_directory(self._environments, 0o700)
            make_directory(log_dir, 0o750)
        except OSError as error:
            raise StateDirError(f"cannot make {error.filename} in supervisor.state_dir: {error.strerror}") from None
        self._private = PrivateDirs(state_dir)
        self._preparer = Preparer(state_dir, log_dir, self._private)
        self._exits = ExitWatcher(self._exited)

    def keeps_engines(self) -> bool:
        """Only the stop of the daemon's own unit ends its engines.

        A restart, no job at all (systemctl kill) and a lookup that fails keep them.
        """
        unit = own_unit()
        if unit is None:
            return True
        try:
            with Units(JOB_S) as units:
                seen = units.look(unit)
        except BusError as error:
            self._on_trouble(f"cannot ask why {unit} ends, so engines run on: {error}")
            return True
        return seen is None or seen.job != "stop"

    def close(self) -> None:
        """Stop watching."""
        self._exits.close()

    # --- beginning ----------------------------------------------------------------------------------------------

    def launch(self, plan: LaunchPlan, generation: int) -> Process:
        """Start the unit and begin to watch. Raises GateError or LaunchError: then nothing of it lives."""
        old = self._entries.get(plan.engine)
        if old is not None and not old.ended:
            message = f"cannot start {plan.engine}: generation {old.generation} of it has not been swept"
            raise LaunchError(ExitClass.RESOURCE, message)
        with self._preparer.refusing(plan.engine):
            prepared = self._preparer.prepare(plan, generation)
            os.close(prepared.log)  # systemd opens it by itself
            marks = Marks(plan.engine, generation, plan.plan_id, prepared.log_offset)
            self._write_environment(plan.engine, prepared)
        entry = self._start(marks, prepared)
        self._entries[plan.engine] = entry
        self._watch(entry)
        return entry.process

    def _write_environment(self, engine: str, prepared: Prepared) -> None:
        try:
            service.write_environment(self._environments / engine, prepared.env)
        except ValueError:
            message = f"cannot start {engine}: its environment holds text that is not UTF-8, which systemd refuses"
            raise LaunchError(ExitClass.CONFIG, message) from None

    def _start(self, marks: Marks, prepared: Prepared) -> Running:
        unit, deadline = service.unit_name(marks.engine), time.monotonic() + outcome.START_S
        told = service.properties(
            marks,
            prepared,
            log=self.log_path(marks.engine),
            env_file=self._environments / marks.engine,
            state_dir=str(self._state_dir),
            daemon=self._daemon,
        )
        try:
            with Units() as units:
                left = units.look(unit)
                if left is not None and (left.main_pid or not units.forget(unit, SWEEP_S)):
                    message = f"cannot start {marks.engine}: {unit} is there already; stop it (systemctl stop {unit})"
                    raise LaunchError(ExitClass.RESOURCE, message)
                units.start(unit, told)
                try:
                    seen = outcome.started(units, unit, deadline)
                except BusError:
                    units.kill(unit)
                    units.forget(unit, SWEEP_S)
                    raise
                if outcome.never_ran(seen):
                    units.forget(unit, SWEEP_S)
                    raise LaunchError(ExitClass.CONFIG, outcome.refusal(marks.engine, unit, seen))
        except BusError as error:
            raise LaunchError(ExitClass.RESOURCE, f"cannot start {marks.engine} as {unit}: {error}") from None
        return self._entry_of(marks, seen)

    def _entry_of(self, marks: Marks, seen: UnitState) -> Running:
        """A unit as it was seen; its main process may be gone by now, then its start time is 0."""
        pid = seen.main_pid or seen.exited_pid
        stat = procfs.read_stat(pid) if service_of(pid) == service.unit_name(marks.engine) else None
        process = Process(pid, stat.start_ticks if stat is not None else 0, self._boot_id)
        path = seen.cgroup or f"{service.SLICE}/{service.unit_name(marks.engine)}"
        return Running(marks, path, process, self.log_path(marks.engine))

    def _watch(self, entry: Running) -> None:
        """Hear of the end of the main process; if that has come already, now."""
        process = entry.process
        entry.pidfd = killing.open_exactly(process.pid, process.start_ticks) if process.start_ticks else None
        if entry.pidfd is None:
            self._on_exit(entry.marks.engine, entry.generation, None, None)
        else:
            self._exits.watch(entry.marks.engine, entry.generation, entry.pidfd, child=False)

    def recover(self) -> tuple[Found, ...]:
        """The units of an earlier daemon, those too whose engine ended meanwhile. Raises ManagerError, OSError."""
        found = []
        try:
            with Units() as units:
                for unit in units.names(service.PATTERN):
                    marks = service.read_marks(unit, units.environment(unit), str(self._state_dir))
                    seen = units.look(unit)
                    if marks is not None and seen is not None and seen.active != "inactive":
                        found.append(self._recovered(marks, seen))
        except BusError as error:
            raise ManagerError(f"cannot find out which engines run: {error}") from None
        self._tidy()
        return tuple(found)

    def _recovered(self, marks: Marks, seen: UnitState) -> Found:
        entry = self._entries[marks.engine] = self._entry_of(marks, seen)
        described = [procfs.describe(stat) for stat in entry.members()]
        if not entry.process.start_ticks:
            described.append(f"pid {entry.process.pid}, ended meanwhile")
        return Found(marks.engine, marks.generation, entry.process, tuple(described), marks.plan_id or None)

    def _tidy(self) -> None:
        """Remove the files of what lives no more."""
        kept = {self._private.path(engine, entry.marks.generation) for engine, entry in self._entries.items()}
        for path in self._private.others(kept):
            with self._telling("cannot remove an old temporary directory"):
                self._private.remove(path)
        for path in self._environments.iterdir():
            if path.name not in self._entries:
                with self._telling("cannot remove the environment of an engine that is gone"):
                    path.unlink()

    def generations(self) -> dict[str, int]:
        """The generation of each unit that was found."""
        return {engine: entry.generation for engine, entry in self._entries.items()}

    def adopt(self, engine: str, generation: int) -> None:
        """Take over what `recover` found, under this generation; the end of a main process that is gone is told."""
        entry = self._entries.get(engine)
        if entry is not None:
            entry.generation = generation
            self._watch(entry)

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

    def ended(self, engine: str, generation: int, code: int | None, number: int | None) -> Ended:
        """How a main process ended, from its unit."""
        entry = self._entry(engine, generation)
        if entry is None or entry.ended:
            return Ended(code, number)
        oom_kills = entry.cgroup.oom_kills()
        try:
            with Units() as units:
                for _ in pauses(time.monotonic() + STATUS_S):
                    seen = units.look(entry.unit)
                    if seen is None or seen.active == "inactive":
                        return Ended(code, number, stopped_by=outcome.stop_of(entry.unit))
                    if seen.main_pid != entry.process.pid and seen.exit_code:
                        return outcome.ended(seen, entry.unit, oom_kills)
        except BusError as error:
            self._on_trouble(f"cannot ask how {engine} ended: {error}")
        return Ended(code, number, oom_killed=oom_kills > 0)

    def sweep(self, engine: str, generation: int) -> tuple[str, ...]:
        """SIGKILL to everything of the unit, then the unit and its files. Returns what still lives after 5 s."""
        entry = self._entry(engine, generation)
        if entry is None or entry.ended:
            return ()
        remaining = killing.kill_all(lambda: self._doomed(entry), None, SWEEP_S)
        if not remaining:
            self._finish(entry)
        return tuple(procfs.describe(stat) for stat in remaining)

    @staticmethod
    def _doomed(entry: Running) -> tuple[list[Stat], bool]:
        return entry.members(), not entry.cgroup.populated()

    def _finish(self, entry: Running) -> None:
        """Nothing lives: the unit is put away, and its files."""
        try:
            with Units() as units:
                if not units.forget(entry.unit, SWEEP_S):
                    self._on_trouble(f"{entry.unit} is empty, and systemd does not put it away")
        except BusError as error:
            self._on_trouble(f"cannot put {entry.unit} away: {error}")
        with self._telling(f"cannot remove the temporary directory of {entry.marks.engine}"):
            self._private.remove(self._private.path(entry.marks.engine, entry.marks.generation))
        with self._telling(f"cannot remove the environment of {entry.marks.engine}"):
            (self._environments / entry.marks.engine).unlink(missing_ok=True)
        entry.end()

    def _exited(self, seen: Exit) -> None:
        self._on_exit(seen.engine, seen.generation, None, None)

    # --- looking ------------------------------------------------------------------------------------------------

    def members(self, engine: str) -> tuple[int, ...]:
        """Pids of the living processes of the engine."""
        entry = self._entries.get(engine)
        return tuple(stat.pid for stat in entry.members()) if entry is not None else ()

    def whose(self, pid: int) -> tuple[str, int] | None:
        """Engine and generation of a process; NVML lists one for a moment longer than it lives."""
        stat = procfs.read_stat(pid)
        if stat is None or not stat.alive:
            return self._owners.get(pid, (0, None))[1]
        ticks, owner = self._owners.get(pid, (-1, None))
        if ticks != stat.start_ticks:
            if len(self._owners) >= _OWNERS_MAX:
                self._owners.clear()
            entry = self._entries.get(service.engine_of(service_of(pid)) or "")
            owner = (entry.marks.engine, entry.generation) if entry is not None else None
            self._owners[pid] = (stat.start_ticks, owner)
        return owner

    def host_bytes(self, engine: str) -> int | None:
        """Anonymous host memory of the engine, None when nothing of it lives."""
        entry = self._entries.get(engine)
        if entry is None or entry.ended or not entry.cgroup.populated():
            return None
        return _anonymous_bytes(entry)

    def progress(self, engine: str) -> Progress:
        """How far its start has come: bytes, memory and log lines of all its processes."""
        entry = self._entries.get(engine)
        if entry is None or entry.ended:
            return Progress(0, 0, 0)
        return Progress(entry.bytes_read(entry.members()), _anonymous_bytes(entry), entry.lines.count())

    def owns_listener(self, engine: str, host: str, port: int) -> Ownership:
        """Who answers on the engine's address."""
        return ports.ownership(self.members(engine), host, port)

    def tail(self, engine: str, lines: int) -> tuple[str, ...]:
        """Last lines of output of this generation, oldest first, without control characters."""
        entry = self._entries.get(engine)
        return logs.tail(self.log_path(engine), entry.log_offset, lines) if entry is not None else ()

    def log_path(self, engine: str) -> Path:
        """Where the output goes."""
        return self._preparer.log_path(engine)

    def rotate_if_large(self, engine: str) -> bool:
        """Cut the log of a running engine at 256 MiB; say whether it was."""
        was_cut = False
        with self._telling(f"cannot keep the end of the log of {engine}"):
            was_cut = logs.cut(self.log_path(engine))
        entry = self._entries.get(engine)
        if was_cut and entry is not None:
            entry.log_offset = 0
        return was_cut

    # --- helpers ------------------------------------------------------------------------------------------------

    def _entry(self, engine: str, generation: int) -> Running | None:
        entry = self._entries.get(engine)
        return entry if entry is not None and entry.generation == generation else None

    def _telling(self, what: str) -> contextlib.AbstractContextManager[None]:
        return telling(self._on_trouble, what)


def state_dirs() -> list[str]:
    """The state directories that living engines' units name; empty when nobody can be asked."""
    try:
        with Units() as units:
            found = [units.environment(unit).get(MARK_STATE, "") for unit in units.names(service.PATTERN)]
    except BusError:
        return []
    return sorted(set(filter(None, found)))


def _anonymous_bytes(entry: Running) -> int:
    counted = entry.cgroup.anonymous_bytes()
    return counted if counted is not None else sum(procfs.anonymous_bytes(stat.pid) for stat in entry.members())
