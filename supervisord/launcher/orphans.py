"""Burying dead orphans of engines, which come to the daemon as their subreaper, and stealing nobody's exit status."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Final

from supervisord.launcher.procfs import Census

UNCLAIMED_S: Final = 60.0
"""Whoever started a process waits for it sooner than this."""


class Orphans:
    """Remembers the dead children that may be somebody's."""

    def __init__(self) -> None:
        self._unclaimed: dict[tuple[int, int], float] = {}

    def bury(self, census: Census, mains: set[int], known: Mapping[int, int]) -> None:
        """Reap what is certainly an engine's, and what nobody has waited for in a minute.

        A process that the daemon started itself is in its session, or leads one of its own: any other session was made
        by an engine. `mains`: left to the exit watcher. `known`: members of engines, pid to start time.
        """
        ours, session = os.getpid(), os.getsid(0)
        unclaimed: dict[tuple[int, int], float] = {}
        for stat in census.processes.values():
            if stat.alive or stat.ppid != ours or stat.session == session or stat.pid in mains:
                continue
            key = (stat.pid, stat.start_ticks)
            since = self._unclaimed.get(key, census.at)
            an_engines = stat.session != stat.pid or known.get(stat.pid) == stat.start_ticks
            if an_engines or census.at - since > UNCLAIMED_S:
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, stat.pid, os.WEXITED | os.WNOHANG)
            else:
                unclaimed[key] = since
        self._unclaimed = unclaimed
