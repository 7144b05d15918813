"""What comes before a spawn, whoever spawns: gates, the private directory, the environment."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from supervisord.core.model import ExitClass, LaunchPlan
from supervisord.launcher import ports, spawn
from supervisord.launcher.base import MARK_ENGINE, MARK_GENERATION, MARK_STATE, GateError, LaunchError
from supervisord.launcher.statedir import PrivateDirs, User

FREE_BYTES_MIN: Final = 64 * 1024 * 1024

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NEVER_INHERITED: Final = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"}
)
"""What systemd says to the daemon is not said to an engine."""


class Prepared(NamedTuple):
    """All that a spawn needs. `user` is None when the engine runs as the daemon."""

    argv: tuple[str, ...]
    env: dict[str, str]
    user: User | None
    directory: Path


class Preparer:
    """Prepares spawns below one state directory."""

    def __init__(self, state_dir: Path, private: PrivateDirs) -> None:
        self._state_dir = state_dir
        self._private = private

    def prepare(self, plan: LaunchPlan, generation: int) -> Prepared:
        """Get everything ready. Raises GateError, LaunchError, OSError."""
        user = spawn.resolve_user(plan.user)
        argv = (spawn.resolve_program(plan.argv[0], plan.env), *plan.argv[1:])
        self._check_disk(plan)
        ports.check_free(plan.host, plan.port)
        directory = self._private.path(plan.engine, generation)
        self._private.make(directory, user)
        return Prepared(argv, self._environment(plan, generation, directory), user, directory)

    @contextlib.contextmanager
    def refusing(self, engine: str) -> Iterator[None]:
        """Turn an OSError into what a launch may raise: GateError, LaunchError."""
        try:
            yield
        except OSError as error:
            message = f"cannot start {engine}: {error.filename or self._state_dir}: {error.strerror}"
            if error.errno in _FULL:
                raise GateError("disk_full", f"{message}; free some space") from None
            raise LaunchError(ExitClass.RESOURCE, message) from None

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
