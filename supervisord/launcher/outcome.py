"""What the state of an engine's unit means: whether it began, and how it ended."""

from __future__ import annotations

from typing import Final

from supervisord.launcher.base import Ended
from supervisord.launcher.dbus import BusError
from supervisord.launcher.units import CLD_EXITED, Units, UnitState, pauses

START_S: Final = 30.0
"""From the order to the exec: milliseconds, unless PID 1 is busy or the disk hangs."""

_STARTS: Final = frozenset({"start", "restart", "try-restart"})
"""Types of jobs; one that restarts begins as a stop and goes on as a start."""

_EXEC_FAILED: Final = range(200, 250)
"""Exit codes of systemd itself, for what it could not do before the exec (systemd.exec(5))."""


def started(units: Units, unit: str, deadline: float) -> UnitState:
    """Wait until the program was executed, or could not be. Raises BusError."""
    for _ in pauses(deadline):
        seen = units.look(unit)
        if seen is None or (seen.job is None and seen.active == "inactive"):
            raise BusError("", "it was stopped while it started")
        if seen.job is None and seen.active != "activating":
            return seen
    raise BusError("", f"systemd did not start it within {START_S:g} s")


def never_ran(seen: UnitState) -> bool:
    """Whether systemd gave up before the engine's program was executed."""
    return not seen.main_pid and seen.exit_code == CLD_EXITED and seen.exit_status in _EXEC_FAILED


def refusal(engine: str, unit: str, seen: UnitState) -> str:
    """That in words."""
    return (
        f"cannot start {engine}: systemd could not execute it (status {seen.exit_status}, see systemd.exec(5)); "
        f"journalctl -u {unit} says why"
    )


def ended(seen: UnitState, unit: str, oom_kills: int) -> Ended:
    """How the main process of a unit ended."""
    by_itself = seen.exit_code == CLD_EXITED
    return Ended(
        seen.exit_status if by_itself else None,
        None if by_itself else seen.exit_status,
        oom_killed=oom_kills > 0 or seen.result == "oom-kill",
        stopped_by=stop_of(unit) if seen.was_stopped else None,
    )


def begins_again(seen: UnitState, main_pid: int) -> bool:
    """Whether somebody restarts a unit, whose process `main_pid` has ended: the job, or a process of its making."""
    return seen.job in _STARTS or seen.main_pid not in {0, main_pid}


def restart_of(unit: str) -> str:
    """What somebody did who restarted an engine past the daemon."""
    return f"systemctl restart {unit}"


def stop_of(unit: str) -> str:
    """What somebody did who stopped an engine past the daemon."""
    return f"systemctl stop {unit}, or of its slice"
