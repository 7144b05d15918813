"""The listening Unix socket: right mode and group from the first moment, never stolen from a living daemon."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BACKLOG: Final = 64
SOCKET_MODE: Final = 0o660
_ANSWER_S: Final = 1.0
_LOCK_S: Final = 2.0
_SUN_PATH_MAX: Final = 107


class ListenError(Exception):
    """The control socket cannot be opened; the message says why and what to do.

    `busy`: another daemon answers on it.
    """

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


def listen(path: str, group: str) -> socket.socket:
    """Listen on `path`, readable and writable by root and `group` (if it exists and we may give it away).

    The socket is made under another name and renamed when it is ready, so nobody sees it half-made. The folder is
    locked meanwhile: of two daemons that start at once, one finds the other's socket answering. Raises ListenError.
    """
    place = Path(path)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    if max(len(os.fsencode(place)), len(os.fsencode(temporary))) > _SUN_PATH_MAX:
        raise ListenError(
            f"cannot listen on {path}: longer than a socket's path may be ({_SUN_PATH_MAX} bytes, with the temporary "
            "name beside it); set supervisor.socket to a shorter one"
        )
    try:
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _locked(place.parent):
            _check_free(place)
            return _bind(place, temporary, group)
    except OSError as error:
        raise ListenError(f"cannot listen on {path}: {error.strerror}; see supervisor.socket") from error


def _bind(place: Path, temporary: Path, group: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        temporary.unlink(missing_ok=True)
        sock.bind(str(temporary))
        temporary.chmod(SOCKET_MODE)
        if os.geteuid() == 0:
            with contextlib.suppress(KeyError):
                os.chown(temporary, -1, grp.getgrnam(group).gr_gid)
        sock.listen(BACKLOG)
        temporary.rename(place)
    except OSError:
        sock.close()
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return sock


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ListenError(f"cannot listen in {folder}: another process holds a lock on it") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _check_free(place: Path) -> None:
    """Raise unless there is nothing at `place`, or a socket on which nobody answers."""
    try:
        mode = place.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"cannot listen on {place}: something that is not a socket is there; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        code = probe.connect_ex(str(place))
    # Refused is the one proof that nobody listens; a full backlog (EAGAIN) is a living daemon.
    if code not in {errno.ECONNREFUSED, errno.ENOENT}:
        raise ListenError(f"cannot listen on {place}: another instance answers there; stop it first", busy=True)
