"""Ending processes for certain."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from typing import Final

from supervisord.launcher import procfs
from supervisord.launcher.procfs import Stat

_LOOK_AGAIN_S: Final = 0.1
"""While victims die, new children of theirs are looked for this often."""


def kill_all(find: Callable[[], tuple[list[Stat], bool]], main: int | None, timeout_s: float) -> list[Stat]:
    """SIGKILL to whatever `find` gives until it gives nothing; return what is left at the deadline.

    The second value of `find` says whether nothing can have escaped it; otherwise it has to give nothing twice. Victims
    that are our children are buried, except `main`, whose status somebody waits for.
    """
    deadline = time.monotonic() + timeout_s
    was_empty = False
    while True:
        victims, certain = find()
        if not victims:
            if certain or was_empty:
                return []
            was_empty = True
            continue
        was_empty = False
        if time.monotonic() >= deadline:
            return victims
        _kill(victims, main)


def _kill(victims: Iterable[Stat], main: int | None) -> None:
    """Signal each, parents first so that they do not react to the end of a child; wait a little until they are gone."""
    pidfds: dict[int, int] = {}
    try:
        for victim in sorted(victims, key=lambda stat: (stat.start_ticks, stat.pid)):
            pidfd = open_exactly(victim.pid, victim.start_ticks)
            if pidfd is not None:
                pidfds[pidfd] = victim.pid
                # A victim of another user may refuse us; it is then reported as what remains.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _wait(pidfds)
        for pidfd, pid in pidfds.items():
            if pid != main:
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def open_exactly(pid: int, start_ticks: int) -> int | None:
    """A pidfd of exactly this process: opened first, verified then, so that a reused pid cannot be hit."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    stat = procfs.read_stat(pid)
    if stat is None or stat.start_ticks != start_ticks:
        os.close(pidfd)
        return None
    return pidfd


def _wait(pidfds: Iterable[int]) -> None:
    deadline = time.monotonic() + _LOOK_AGAIN_S
    poll = select.poll()
    left = set(pidfds)
    for pidfd in left:
        poll.register(pidfd, select.POLLIN)
    while left and (wait_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(wait_s * 1000):
            poll.unregister(pidfd)
            left.discard(pidfd)
