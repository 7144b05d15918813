"""Starting a process that waits until its identity is recorded.

Between the birth of a process and the record of it lies a moment in which the daemon can die. So the child, a shell,
holds before the engine's program is executed, until the daemon says go over a pipe. If the daemon dies or gives up, the
pipe ends, and so does the child: nothing lives of which nobody knows.
"""

from __future__ import annotations

import errno
import os
import pwd
import resource
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from supervisord.core.model import ExitClass
from supervisord.launcher.base import LaunchError
from supervisord.launcher.statedir import User

OOM_SCORE_ADJ: Final = 100
"""The kernel should rather end an engine than the daemon that would start it again."""

OPEN_FILES: Final = 65536

_UMASK: Final = 0o027
_HELD: Final = (
    f'ulimit -c 0; ulimit -S -n "$1"; echo {OOM_SCORE_ADJ} >/proc/self/oom_score_adj; shift; exec 2>&1; '
    'IFS= read -r go || exit 125; exec "$@" </dev/null'
)
"""Limits first (each may be refused, silently), then hold. `exec` keeps the pid, and with it the identity."""

_SCARCE: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class Held:
    """A child that waits for the word. Exactly one of `release` and `abandon` ends that.

    `pidfd` goes to whom it was released for.
    """

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.pidfd = -1
        self._pipe = pipe

    def release(self) -> None:
        """Let it become the engine. Raises OSError when it is gone; `abandon` then buries it."""
        os.write(self._pipe, b"go\n")
        os.close(self._pipe)

    def abandon(self) -> None:
        """End and bury it. It was not reaped yet, so its pid is still its own."""
        os.close(self._pipe)
        if self.pidfd >= 0:
            os.close(self.pidfd)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def spawn_held(argv: tuple[str, ...], env: Mapping[str, str], directory: Path, log: int, user: User | None) -> Held:
    """Start the child in a session of its own, with its output in the log. Raises LaunchError.

    The caller's thread must not block signals: the engine would inherit that.
    """
    ours, theirs = -1, -1
    try:
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        child = subprocess.Popen(
            ("/bin/sh", "-c", _HELD, "sh", _open_files(), *argv),
            stdin=theirs,
            stdout=log,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=env,
            start_new_session=True,
            umask=_UMASK,
            user=user.uid if user is not None else None,
            group=user.gid if user is not None else None,
            extra_groups=user.groups if user is not None else None,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        if ours >= 0:
            os.close(ours)
        raise _cannot(argv, error) from None
    finally:
        if theirs >= 0:
            os.close(theirs)
    # The exit watcher reaps it; with a return code set, `subprocess` never tries to.
    child.returncode = 0
    held = Held(child.pid, ours)
    try:
        held.pidfd = os.pidfd_open(child.pid)
    except OSError as error:
        held.abandon()
        raise _cannot(argv, error) from None
    return held


def resolve_program(program: str, env: Mapping[str, str]) -> str:
    """Absolute path of a program, searched in the engine's own PATH. Raises LaunchError."""
    path = env.get("PATH", os.defpath)
    found = shutil.which(program, path=path)
    if found is None:
        where = "" if "/" in program else f" in PATH ({path})"
        raise LaunchError(
            ExitClass.CONFIG,
            f"cannot start {program}: there is no such program{where}; install it, or set command to where it is",
        )
    return str(Path(found).absolute())


def resolve_user(name: str | None) -> User | None:
    """Whom to switch to; None when that is who we are. Raises LaunchError."""
    if name is None:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise LaunchError(
            ExitClass.CONFIG, f"cannot run as {name}: there is no such user; create it, or set another user"
        ) from None
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise LaunchError(ExitClass.CONFIG, f"cannot run as {name}: only a daemon that runs as root can switch users")
    return User(name, entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(name, entry.pw_gid)))


def _open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return str(max(soft, OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)))


def _cannot(argv: tuple[str, ...], error: Exception) -> LaunchError:
    scarce = isinstance(error, OSError) and error.errno in _SCARCE
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return LaunchError(ExitClass.RESOURCE if scarce else ExitClass.CONFIG, f"cannot start {argv[0]}: {why}")
