"""The systemd launcher: every engine is a transient service in vllm.slice, which outlives the daemon.

The unit knows all that is needed to take an engine over, and how it ended. The kernel names its processes (cgroup), the
pidfd tells the end of the main one; systemd is asked only when an engine begins, has ended, or is put away.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from supervisord.core.model import ExitClass, Found, LaunchPlan, Process, Progress
from supervisord.launcher import killing, logs, outcome, procfs, service
from supervisord.launcher.base import MARK_STATE, Ended, LaunchError, ManagerError
from supervisord.launcher.cgroups import Cgroup
from supervisord.launcher.choice import PATTERN, SLICE, own_unit, service_of
from supervisord.launcher.common import SWEEP_S, CommonLauncher, Kept
from supervisord.launcher.dbus import BusError
from supervisord.launcher.entry import BytesRead
from supervisord.launcher.exits import Exit
from supervisord.launcher.logs import DistinctLines
from supervisord.launcher.output import Output
from supervisord.launcher.preparing import Prepared
from supervisord.launcher.procfs import Stat
from supervisord.launcher.service import Marks
from supervisord.launcher.units import Property, Units, UnitState, pauses
from supervisord.state import boot_id

STATUS_S: Final = 5.0
"""PID 1 hears of an end when the pidfd does; it may be busy with something else."""

JOB_S: Final = 3.0
"""How long the reason of our own end is asked for."""

WITHDRAW_S: Final = 120.0
"""For so long a start without an answer is taken back: PID 1 hangs, and begins with it when it does not any more."""

_WITHDRAW_EVERY_S: Final = 1.0


class Running(Kept):
    """One engine's unit. `invocation` names this run of it, and what it wrote in the journal."""

    def __init__(self, marks: Marks, cgroup: str, invocation: str, process: Process) -> None:
        super().__init__(marks.engine, marks.generation, process)
        self.marks = marks
        self.unit = service.unit_name(marks.engine)
        self.cgroup = Cgroup(cgroup)
        self.invocation = invocation
        self.main = process
        self.lines = DistinctLines()
        # Its progress bars come late or never through the journal, and no log of its own is among what it writes.
        self.bytes_read = BytesRead(procfs.moved_bytes).count


class SystemdLauncher(CommonLauncher[Running]):
    """Implements `base.Launcher`; how an engine ended is asked with `ended`, `on_exit` does not know."""

    name = "systemd"

    def __init__(
        self,
        state_dir: Path,
        on_exit: Callable[[str, int, int | None, int | None], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        super().__init__(state_dir, on_exit, on_trouble, {"environment": 0o700})
        self._environments = state_dir / "environment"
        self._daemon = own_unit() or service.DAEMON
        self._boot_id = boot_id()
        self._output = Output(on_trouble)

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

    # --- beginning ----------------------------------------------------------------------------------------------

    def launch(self, plan: LaunchPlan, generation: int) -> Process:
        """Start the unit and begin to watch. Raises GateError or LaunchError: then nothing of it lives."""
        self._check_swept(plan.engine)
        with self._preparer.refusing(plan.engine):
            prepared = self._preparer.prepare(plan, generation)
            self._write_environment(plan.engine, prepared)
        entry = self._entries[plan.engine] = self._start(Marks(plan.engine, generation, plan.plan_id), prepared)
        self._watch(entry)
        return entry.main

    def _write_environment(self, engine: str, prepared: Prepared) -> None:
        try:
            service.write_environment(self._environments / engine, prepared.env)
        except ValueError:
            message = f"cannot start {engine}: its environment holds text that is not UTF-8, which systemd refuses"
            raise LaunchError(ExitClass.CONFIG, message) from None

    def _start(self, marks: Marks, prepared: Prepared) -> Running:
        unit = service.unit_name(marks.engine)
        told = service.properties(
            marks,
            prepared,
            env_file=self._environments / marks.engine,
            state_dir=str(self._state_dir),
            daemon=self._daemon,
        )
        try:
            with Units() as units:
                if not self._is_free(units, unit):
                    message = f"cannot start {marks.engine}: {unit} is there already; stop it (systemctl stop {unit})"
                    raise LaunchError(ExitClass.RESOURCE, message)
                seen = self._begin(units, unit, told)
                if outcome.never_ran(seen):
                    units.forget(unit, SWEEP_S)
                    raise LaunchError(ExitClass.CONFIG, outcome.refusal(marks.engine, unit, seen))
        except BusError as error:
            raise LaunchError(ExitClass.RESOURCE, f"cannot start {marks.engine} as {unit}: {error}") from None
        return self._entry_of(marks, seen)

    def _is_free(self, units: Units, unit: str) -> bool:
        """Whether the name can be used now; what lives under it must be ours, left by a start without an answer."""
        left = units.look(unit)
        if left is None:
            return True
        if not left.main_pid:
            return units.forget(unit, SWEEP_S)
        ours = service.read_marks(unit, units.environment(unit), str(self._state_dir)) is not None
        return ours and self._withdraw(unit)

    def _begin(self, units: Units, unit: str, told: Sequence[Property]) -> UnitState:
        """Order the start, and wait for what comes of it. Raises BusError: then nothing of it lives."""
        deadline = time.monotonic() + outcome.START_S
        try:
            units.start(unit, told)
        except BusError as error:
            if not error.name:  # no answer; a refusal has a name
                self._withdraw(unit)
            raise
        try:
            return outcome.started(units, unit, deadline)
        except BusError:
            self._withdraw(unit)
            raise

    def _withdraw(self, unit: str) -> bool:
        """End a unit of ours, whenever PID 1 comes to it; what it was asked for before comes first."""
        until = time.monotonic() + WITHDRAW_S
        while True:
            with contextlib.suppress(BusError), Units() as units:
                with contextlib.suppress(BusError):
                    units.kill(unit)
                if units.forget(unit, SWEEP_S):
                    return True
            if time.monotonic() >= until:
                self._on_trouble(f"cannot end {unit}, whose start got no answer from systemd: systemctl stop {unit}")
                return False
            time.sleep(_WITHDRAW_EVERY_S)

    def _entry_of(self, marks: Marks, seen: UnitState) -> Running:
        """A unit as it was seen; its main process may be gone by now, then its start time is 0."""
        pid = seen.main_pid or seen.exited_pid
        stat = procfs.read_stat(pid) if service_of(pid) == service.unit_name(marks.engine) else None
        process = Process(pid, stat.start_ticks if stat is not None else 0, self._boot_id)
        path = seen.cgroup or f"{SLICE}/{service.unit_name(marks.engine)}"
        return Running(marks, path, seen.invocation, process)

    def _watch(self, entry: Running) -> None:
        """Hear of the end of the main process; if that has come already, now."""
        main = entry.main
        entry.pidfd = killing.open_exactly(main.pid, main.start_ticks) if main.start_ticks else None
        if entry.pidfd is None:
            self._on_exit(entry.engine, entry.generation, None, None)
        else:
            self._exits.watch(entry.engine, entry.generation, entry.pidfd, child=False)

    def recover(self) -> tuple[Found, ...]:
        """The units of an earlier daemon, those too whose engine ended meanwhile. Raises ManagerError, OSError."""
        found = []
        try:
            with Units() as units:
                for unit in units.names(PATTERN):
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
        described = [procfs.describe(stat) for stat in entry.cgroup.members()]
        if not entry.main.start_ticks:
            described.append(f"pid {entry.main.pid}, ended meanwhile")
        return Found(marks.engine, marks.generation, entry.main, tuple(described), marks.plan_id or None)

    def _tidy(self) -> None:
        """Remove the files of what lives no more."""
        self._remove_other_private({self._private.path(*entry.marks[:2]) for entry in self._entries.values()})
        for path in self._environments.iterdir():
            if path.name not in self._entries:
                with self._telling("cannot remove the environment of an engine that is gone"):
                    path.unlink()

    def adopt(self, engine: str, generation: int) -> None:
        """Take over what `recover` found, under this generation; the end of a main process that is gone is told."""
        entry = self._entries.get(engine)
        if entry is not None:
            entry.generation = generation
            self._watch(entry)

    # --- ending -------------------------------------------------------------------------------------------------

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
                    if seen is not None and outcome.begins_again(seen, entry.main.pid):
                        return Ended(code, number, stopped_by=outcome.restart_of(entry.unit), again=True)
                    if seen is None or seen.active == "inactive":
                        return Ended(code, number, stopped_by=outcome.stop_of(entry.unit))
                    if seen.main_pid != entry.main.pid and seen.exit_code:
                        return outcome.ended(seen, entry.unit, oom_kills)
        except BusError as error:
            self._on_trouble(f"cannot ask how {engine} ended: {error}")
        return Ended(code, number, oom_killed=oom_kills > 0)

    def _doomed(self, entry: Running) -> tuple[list[Stat], bool]:
        return entry.cgroup.members(), not entry.cgroup.populated()

    def _finish(self, entry: Running) -> None:
        """Nothing lives: the unit is put away, and its files."""
        try:
            with Units() as units:
                if not units.forget(entry.unit, SWEEP_S):
                    self._on_trouble(f"{entry.unit} is empty, and systemd does not put it away")
        except BusError as error:
            self._on_trouble(f"cannot put {entry.unit} away: {error}")
        self._remove_private(entry.engine, self._private.path(*entry.marks[:2]))
        with self._telling(f"cannot remove the environment of {entry.engine}"):
            (self._environments / entry.engine).unlink(missing_ok=True)
        entry.end()

    def _exited(self, seen: Exit) -> None:
        self._on_exit(seen.engine, seen.generation, None, None)

    # --- looking ------------------------------------------------------------------------------------------------

    def _living(self, entry: Running) -> list[Stat]:
        return entry.cgroup.members()

    def _owner(self, stat: Stat) -> tuple[str, int] | None:
        entry = self._entries.get(service.engine_of(service_of(stat.pid)) or "")
        return (entry.engine, entry.generation) if entry is not None else None

    def host_bytes(self, engine: str) -> int | None:
        """Anonymous host memory of the engine, None when nothing of it lives."""
        entry = self._entries.get(engine)
        if entry is None or entry.ended or not entry.cgroup.populated():
            return None
        return _anonymous_bytes(entry.cgroup)

    def progress(self, engine: str) -> Progress:
        """How far its start has come: bytes, memory and log lines of all its processes."""
        entry = self._entries.get(engine)
        if entry is None or entry.ended:
            return Progress(0, 0, 0)
        *lines, _ = logs.split(self._output.read(entry.invocation))  # journalctl ends each with a newline
        return Progress(
            entry.bytes_read(entry.cgroup.members()), _anonymous_bytes(entry.cgroup), entry.lines.add(lines)
        )

    def tail(self, engine: str, lines: int) -> tuple[str, ...]:
        """Last lines of output of this generation, oldest first, without control characters."""
        entry = self._entries.get(engine)
        if entry is None:
            return ()
        self._output.settle()
        return logs.last_lines(self._output.read(entry.invocation), lines)

    def log_path(self, _engine: str) -> None:
        """No file: journald has it."""

    def rotate_if_large(self, _engine: str) -> bool:
        """No file, nothing to shorten."""
        return False


def living() -> list[tuple[str, list[str]]]:
    """The state directories that the units of engines name, with the engines; empty when nobody can be asked."""
    found: dict[str, list[str]] = {}
    try:
        with Units() as units:
            for unit in units.names(PATTERN):
                state_dir, engine = units.environment(unit).get(MARK_STATE), service.engine_of(unit)
                if state_dir and engine is not None:
                    found.setdefault(state_dir, []).append(engine)
    except BusError:
        return []
    return sorted(found.items())


def engines_of(units: Iterable[str], state_dir: Path) -> list[str]:
    """The engines of this state directory among these units. Raises ManagerError."""
    try:
        with Units() as bus:
            marks = [service.read_marks(unit, bus.environment(unit), str(state_dir)) for unit in units]
    except BusError as error:
        raise ManagerError(f"cannot find out whose engines run: {error}") from None
    return [mark.engine for mark in marks if mark is not None]


def _anonymous_bytes(cgroup: Cgroup) -> int:
    counted = cgroup.anonymous_bytes()
    return counted if counted is not None else sum(procfs.anonymous_bytes(stat.pid) for stat in cgroup.members())
