"""From a launch plan to a recorded, running process: gates, files, spawn, record, go."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, NamedTuple

from supervisord.core.model import ExitClass, LaunchPlan, Process
from supervisord.launcher import logs, ports, procfs, spawn
from supervisord.launcher.base import MARK_ENGINE, MARK_GENERATION, MARK_STATE, GateError, LaunchError
from supervisord.launcher.records import Record, Records
from supervisord.launcher.statedir import PrivateDirs
from supervisord.state import boot_id

FREE_BYTES_MIN: Final = 64 * 1024 * 1024

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NEVER_INHERITED: Final = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"}
)
"""What systemd says to the daemon is not said to an engine."""


class Started(NamedTuple):
    """A process that runs and is on record; the pidfd is the caller's."""

    record: Record
    pidfd: int


class Starter:
    """Starts engines below one state directory."""

    def __init__(self, state_dir: Path, log_dir: Path, records: Records, private: PrivateDirs) -> None:
        self._state_dir = state_dir
        self._log_dir = log_dir
        self._records = records
        self._private = private
        self._boot_id = boot_id()

    def log_path(self, engine: str) -> Path:
        """Where the output of an engine goes."""
        return self._log_dir / f"{engine}.log"

    def start(self, plan: LaunchPlan, generation: int) -> Started:
        """Start an engine. Raises GateError, LaunchError: then nothing of it lives."""
        try:
            return self._start(plan, generation)
        except OSError as error:
            message = f"cannot start {plan.engine}: {error.filename or self._state_dir}: {error.strerror}"
            if error.errno in _FULL:
                raise GateError("disk_full", f"{message}; free some space") from None
            raise LaunchError(ExitClass.RESOURCE, message) from None

    def _start(self, plan: LaunchPlan, generation: int) -> Started:
        user = spawn.resolve_user(plan.user)
        argv = (spawn.resolve_program(plan.argv[0], plan.env), *plan.argv[1:])
        self._check_disk(plan)
        ports.check_free(plan.host, plan.port)
        directory = self._private.path(plan.engine, generation)
        self._private.make(directory, user)
        log, offset = logs.open_log(self.log_path(plan.engine), generation)
        try:
            held = spawn.spawn_held(argv, self._environment(plan, generation, directory), directory, log, user)
        finally:
            os.close(log)
        try:
            process = Process(held.pid, _start_ticks(held.pid), self._boot_id)
            uid = user.uid if user is not None else os.geteuid()
            record = Record(plan.engine, generation, plan.plan_id, uid, process, str(directory), offset)
            self._records.put(record)
            held.release()
        except OSError:
            held.abandon()
            raise
        return Started(record, held.pidfd)

    def _environment(self, plan: LaunchPlan, generation: int, directory: Path) -> dict[str, str]:
        env = {name: value for name, value in plan.env.items() if name not in _NEVER_INHERITED}
        env.setdefault("TMPDIR", str(directory))
        return env | {
            "VLLM_RPC_BASE_PATH": str(directory),
            # setproctitle would otherwise overwrite the environment, and with it the marks.
            "SPT_NOENV": "1",
            MARK_ENGINE: plan.engine,
            MARK_GENERATION: str(generation),
            MARK_STATE: str(self._state_dir),
        }

    def _check_disk(self, plan: LaunchPlan) -> None:
        for place in {str(self._state_dir), plan.env.get("TMPDIR", str(self._state_dir))}:
            found = os.statvfs(place)
            free = found.f_bavail * found.f_frsize
            if free < FREE_BYTES_MIN:
                raise GateError(
                    "disk_full",
                    f"cannot start {plan.engine}: {free // 2**20} MiB free on {place}, "
                    f"{FREE_BYTES_MIN // 2**20} MiB are needed; free some space",
                )


def _start_ticks(pid: int) -> int:
    stat = procfs.read_stat(pid)
    if stat is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return stat.start_ticks
