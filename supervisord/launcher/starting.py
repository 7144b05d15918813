"""From a launch plan to a recorded, running child: prepare, spawn, record, go."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from supervisord.core.model import LaunchPlan, Process
from supervisord.launcher import logs, procfs, spawn
from supervisord.launcher.preparing import Preparer
from supervisord.launcher.records import Record, Records
from supervisord.state import boot_id


class Started(NamedTuple):
    """A process that runs and is on record; the pidfd is the caller's."""

    record: Record
    pidfd: int


class Starter:
    """Starts engines as children of the daemon."""

    def __init__(self, preparer: Preparer, records: Records) -> None:
        self._preparer = preparer
        self._records = records
        self._boot_id = boot_id()

    def start(self, plan: LaunchPlan, generation: int, log_path: Path) -> Started:
        """Start an engine. Raises GateError, LaunchError: then nothing of it lives."""
        with self._preparer.refusing(plan.engine):
            return self._start(plan, generation, log_path)

    def _start(self, plan: LaunchPlan, generation: int, log_path: Path) -> Started:
        argv, env, user, directory = self._preparer.prepare(plan, generation)
        log, offset = logs.open_log(log_path, generation)
        try:
            held = spawn.spawn_held(argv, env, directory, log, user)
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


def _start_ticks(pid: int) -> int:
    stat = procfs.read_stat(pid)
    if stat is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return stat.start_ticks
