"""Files in /dev/shm that an engine leaves when it is killed (`psm_*`, `sem.mp-*`, `vllm_offload_*`: gigabytes).

Names are learned from what the engine's processes map or open while they live, never guessed: other engines and other
programs use the same patterns.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from supervisord.launcher import procfs

DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 (nothing is made there, and removed only what an engine was seen to use)


def listing() -> frozenset[str]:
    """All names, to see cheaply whether there is anything new to look for."""
    try:
        return frozenset(os.listdir(DIRECTORY))  # noqa: PTH208 (once for each engine and poll: less than half the time)
    except OSError:
        return frozenset()


def in_use(pids: Iterable[int], uid: int) -> dict[str, int]:
    """Names with inodes of the regular files of a user that these processes map or have open."""
    names: set[str] = set()
    for pid in pids:
        names |= procfs.shared_memory(pid)
    return {name: inode for name in names if (inode := _inode(name, uid)) is not None}


def remove(known: Mapping[str, int], uid: int) -> None:
    """Unlink exactly the files known, as far as they are still those and nobody alive uses them. Raises OSError."""
    left = {name for name, inode in known.items() if _inode(name, uid) == inode}
    unsure = {name for name in left if not _remove_if_unused(DIRECTORY / name)}
    if unsure:
        for pid in procfs.pids():
            unsure -= procfs.shared_memory(pid)
        for name in unsure:
            with contextlib.suppress(FileNotFoundError):
                (DIRECTORY / name).unlink()


def _remove_if_unused(path: Path) -> bool:
    """Ask the kernel with a write lease, which it gives only for a file that nobody else has open or mapped (fcntl(2)).

    Says whether that answered the question: a lease on another user's file needs CAP_LEASE. While it is ours, whoever
    opens the file waits for us, and the kernel signals that; SIGURG is ignored, the usual SIGIO would end the daemon.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        path.unlink()
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _inode(name: str, uid: int) -> int | None:
    try:
        found = (DIRECTORY / name).lstat()
    except OSError:
        return None
    return found.st_ino if stat.S_ISREG(found.st_mode) and found.st_uid == uid else None
