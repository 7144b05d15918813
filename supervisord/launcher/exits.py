"""Hearing of the end of main processes: one thread waits on their pidfds.

A pidfd names a process and never its successor under the same number. It becomes readable when the whole process is
gone, also for a process that is not our child; only a child's status can be read.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from threading import Thread
from typing import Final, NamedTuple

from supervisord.launcher import procfs

_CLOSE_S: Final = 1.0
_TRACED_S: Final = 0.002


class Exit(NamedTuple):
    """How a main process ended. `code` and `signal` are None when nobody could read them.

    `reaped_ticks`: until then (unit of `procfs.Stat.start_ticks`) its pid was not free for anybody else. None for a
    process that was not our child.
    """

    engine: str
    generation: int
    code: int | None
    signal: int | None
    reaped_ticks: int | None


class _Watched(NamedTuple):
    engine: str
    generation: int
    child: bool


class ExitWatcher:
    """Calls `on_exit` once for every watched process, on a thread of its own."""

    def __init__(self, on_exit: Callable[[Exit], None]) -> None:
        self._on_exit = on_exit
        self._watched: dict[int, _Watched] = {}
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = Thread(target=self._run, name="exits", daemon=True)
        self._thread.start()

    def watch(self, engine: str, generation: int, pidfd: int, *, child: bool) -> None:
        """Begin to watch; the descriptor stays the caller's. An end that has already come is told too."""
        own = os.dup(pidfd)
        self._watched[own] = _Watched(engine, generation, child)
        self._epoll.register(own, select.EPOLLIN)

    def close(self) -> None:
        """Stop watching; nothing is called any more. Bounded."""
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            return
        self._epoll.close()
        os.close(self._wake)
        for descriptor in self._watched:
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._wake:
                    return
                self._end(descriptor)

    def _end(self, descriptor: int) -> None:
        watched = self._watched[descriptor]
        code = number = ticks = None
        if watched.child:
            ticks = procfs.now_ticks()
            status = _reap(descriptor)
            if status is None:
                # A tracer (strace, gdb) gets the status first; the descriptor stays readable, so epoll comes back.
                time.sleep(_TRACED_S)
                return
            code, number = status
        self._epoll.unregister(descriptor)
        os.close(descriptor)
        del self._watched[descriptor]
        self._on_exit(Exit(watched.engine, watched.generation, code, number, ticks))


def _reap(pidfd: int) -> tuple[int | None, int | None] | None:
    """Exit code or signal of a child that ended; None while its status is not ours to read yet."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None, None
    if info is None:
        return None
    return (info.si_status, None) if info.si_code == os.CLD_EXITED else (None, info.si_status)
