"""The state directory: who may use it, and the private directory of each engine below it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from supervisord.core.model import ExitClass
from supervisord.launcher.base import LaunchError, StateDirBusy, StateDirError

LOCK: Final = "lock"
"""In the state directory; locked by the daemon that uses it, whose pid it holds."""


@dataclass(frozen=True, slots=True)
class User:
    """Whom an engine runs as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def lock_state_dir(path: Path) -> FileIO:
    """Make the state directory and take it: it is ours until the file is closed, or the daemon dies.

    Raises StateDirBusy, StateDirError.
    """
    descriptor = -1
    try:
        make_directory(path, 0o711)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Fixed width and in place: on a full disk an old lock file can still be taken.
        os.pwrite(descriptor, b"%-10d\n" % os.getpid(), 0)
    except BlockingIOError:
        pid = _locker(descriptor)
        os.close(descriptor)
        by = f"vllm-supervisor with pid {pid}" if pid is not None else "another vllm-supervisor"
        raise StateDirBusy(
            pid, f"cannot use {path}: {by} uses it; stop that one, or set another supervisor.state_dir"
        ) from None
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise StateDirError(
            f"cannot use {path} as supervisor.state_dir: {error.strerror}; it must be a directory on a disk "
            "with free space that the daemon may write"
        ) from None
    return FileIO(descriptor, "r+")


def is_taken(path: Path) -> bool:
    """Whether a daemon runs with this state directory; not taken when nobody can tell."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    with FileIO(descriptor) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _locker(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else None


def make_directory(path: Path, mode: int) -> None:
    """Make a directory of the daemon's own, whatever its umask is. One that exists is left as it is. Raises OSError."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)


class PrivateDirs:
    """A temporary directory for every generation: `<state_dir>/tmp/<engine>.<generation>`, its last four digits.

    Four, because vLLM puts sockets there, whose paths may have 107 bytes. The parent belongs to the daemon, so no
    engine can put a link where a name of ours stands.
    """

    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir / "tmp"

    def path(self, engine: str, generation: int) -> Path:
        """Where the directory of a generation is."""
        return self._root / f"{engine}.{generation % 10000}"

    def make(self, path: Path, user: User | None) -> None:
        """Make it, empty, for a user (None: ours). Raises OSError, LaunchError when the user cannot get there."""
        make_directory(self._root, 0o711)
        remove_tree(path)
        path.mkdir(mode=0o700)
        if user is not None:
            os.chown(path, user.uid, user.gid)
            _check_way(path, user)

    def remove(self, path: Path) -> None:
        """Remove it with all that is in it. Raises OSError."""
        if path.parent == self._root:
            remove_tree(path)

    def others(self, keep: set[Path]) -> list[Path]:
        """Directories of generations that are not to be kept."""
        return [path for path in self._root.iterdir() if path not in keep] if self._root.is_dir() else []


def remove_tree(path: Path) -> None:
    """Remove a directory without following links that its user put there. Raises OSError; absent is fine."""
    with contextlib.suppress(FileNotFoundError):
        try:
            shutil.rmtree(path)
        except RecursionError:
            raise OSError(errno.ELOOP, "nested too deeply", str(path)) from None


def _check_way(path: Path, user: User) -> None:
    for parent in path.parents:
        found = parent.stat()
        if found.st_uid == user.uid:
            bit = 0o100
        elif found.st_gid in user.groups:
            bit = 0o010
        else:
            bit = 0o001
        if not found.st_mode & bit:
            raise LaunchError(
                ExitClass.CONFIG,
                f"cannot give {user.name} the directory {path}: {user.name} may not pass {parent} "
                f"(mode {found.st_mode & 0o7777:04o}); choose another supervisor.state_dir, or allow it",
            )
