"""Units of systemd, as far as engines need them (org.freedesktop.systemd1(5))."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from jeepney import DBusAddress

from supervisord.launcher.dbus import CALL_S, NONSENSE, Bus, BusError, Call

ENDED_JUST_NOW: Final = "ended just now"
"""A job that was there at the first answer and not at the second: look again."""

CLD_EXITED: Final = 1
"""si_code of a process that exited by itself; others were ended by a signal (waitid(2))."""

_NAME: Final = "org.freedesktop.systemd1"
_MANAGER: Final = DBusAddress("/org/freedesktop/systemd1", _NAME, f"{_NAME}.Manager")
_PROPERTIES: Final = "org.freedesktop.DBus.Properties"
_FIRST_LOOK_S: Final = 0.001
_LAST_LOOK_S: Final = 0.02

_STATE: Final = (
    ("Unit", "Job", "(uo)"),
    ("Unit", "ActiveState", "s"),
    ("Service", "MainPID", "u"),
    ("Service", "ExecMainPID", "u"),
    ("Service", "ExecMainCode", "i"),
    ("Service", "ExecMainStatus", "i"),
    ("Service", "Result", "s"),
    ("Service", "ControlGroup", "s"),
    ("Unit", "ActiveExitTimestampMonotonic", "t"),
    ("Service", "ExecMainExitTimestampMonotonic", "t"),
    ("Unit", "InvocationID", "ay"),
)
"""What a UnitState is made of, with its types.

PID 1 works on between two answers: without a job, what is read after it is settled.
"""

Property = tuple[str, tuple[str, Any]]
"""Name, and D-Bus signature with value."""


class UnitState(NamedTuple):
    """A loaded service.

    `active`: active, activating, deactivating, inactive, failed. `job`: start, stop, restart, ... or None.
    `main_pid` is 0 when the main process is gone; then `exit_code` (an si_code, 0: none ended yet) and `exit_status`
    say how `exited_pid` ended. `cgroup`: below the root of the hierarchy, "" when there is none. Times: 0 when unset.
    `invocation`: 32 hexadecimal digits that name this run of it, "" when there is none.
    """

    active: str
    job: str | None
    main_pid: int
    exited_pid: int
    exit_code: int
    exit_status: int
    result: str
    cgroup: str
    left_active_us: int
    exited_us: int
    invocation: str

    @property
    def was_stopped(self) -> bool:
        """Whether systemd began to stop it while the main process still lived, because somebody asked for that.

        One that ends by itself leaves the active state afterwards, or never (RemainAfterExit). Memory pressure makes
        systemd stop a unit too.
        """
        return 0 < self.left_active_us < self.exited_us and self.result != "oom-kill"


class Units:
    """The service manager, for one errand of one thread. All methods raise BusError."""

    def __init__(self, timeout_s: float = CALL_S) -> None:
        self._bus = Bus(timeout_s)

    def __enter__(self) -> Units:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self._bus.close()

    def start(self, name: str, properties: Sequence[Property]) -> None:
        """Make a transient unit and queue its start."""
        self._manage("StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", list(properties), [])

    def kill(self, name: str) -> None:
        """SIGKILL to every process of a unit."""
        self._manage("KillUnit", "ssi", name, "all", signal.SIGKILL)

    def forget(self, name: str, within_s: float) -> bool:
        """Stop a unit and reset its failure until systemd has forgotten it; False when it did not in time."""
        try:
            # An engine is before the daemon: while the daemon itself is being stopped, its stop would wait for that.
            self._manage("StopUnit", "ss", name, "ignore-dependencies")
            for _ in pauses(time.monotonic() + within_s):
                seen = self.look(name)
                if seen is None:
                    return True
                if seen.job is None and seen.active == "failed":
                    self._manage("ResetFailedUnit", "s", name)
        except BusError as error:
            if not error.gone:
                raise
            return True
        return False

    def look(self, name: str) -> UnitState | None:
        """How a unit is; None when systemd does not know it."""
        try:
            (job, job_path), active, *rest, invocation = self._get(self._path(name), _STATE)
        except BusError as error:
            if not error.gone:
                raise
            return None
        rest.append(bytes(invocation).hex())
        return UnitState(active, self._job_type(job_path) if job else None, *rest)

    def _job_type(self, path: str) -> str:
        try:
            return str(self._get(path, [("Job", "JobType", "s")])[0])
        except BusError as error:
            if not error.gone:
                raise
            return ENDED_JUST_NOW

    def environment(self, name: str) -> Mapping[str, str]:
        """What a unit says in Environment=; empty when it is not known."""
        try:
            (pairs,) = self._get(self._path(name), [("Service", "Environment", "as")])
        except BusError as error:
            if not error.gone:
                raise
            return {}
        return dict(pair.partition("=")[::2] for pair in pairs)

    def names(self, pattern: str) -> list[str]:
        """Loaded units whose names match a glob."""
        (rows,) = self._manage("ListUnitsByPatterns", "asas", [], [pattern], told="a(ssssssouso)")
        return [row[0] for row in rows]

    def _path(self, name: str) -> str:
        (path,) = self._manage("GetUnit", "s", name, told="o")
        return str(path)

    def _get(self, path: str, wanted: Sequence[tuple[str, str, str]]) -> list[Any]:
        try:
            at = DBusAddress(path, _NAME, _PROPERTIES)
        except ValueError:  # no path of an object
            raise BusError("", f"cannot ask systemd (Get): {NONSENSE}") from None
        answers = self._bus.calls([Call(at, "Get", "ss", (f"{_NAME}.{kind}", key), "v") for kind, key, _ in wanted])
        for (_, key, types), ((told, _),) in zip(wanted, answers, strict=True):
            if told != types:
                raise BusError("", f"cannot ask systemd (Get {key}): {NONSENSE}")
        return [value for ((_, value),) in answers]

    def _manage(self, method: str, signature: str, *body: object, told: str | None = None) -> tuple[Any, ...]:
        return self._bus.call(Call(_MANAGER, method, signature, body, told))


def pauses(deadline: float) -> Iterator[None]:
    """Come back at once, then after growing pauses, until the deadline has passed."""
    pause_s = _FIRST_LOOK_S
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_LOOK_S)
        yield
