"""Which processes belong to an engine. Only proof counts, never a name: another vLLM may share the machine.

Proofs: being the recorded main process (pid and start time); its session, as long as the number of the session was
not free for anybody else; descent from a member; having been a member at an earlier count; and, for processes that
left session and parents behind, the marks in the environment that they were started with.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from supervisord.core.model import Process
from supervisord.core.spec import ENGINE_NAME_PATTERN
from supervisord.launcher import procfs
from supervisord.launcher.base import MARK_ENGINE, MARK_GENERATION, MARK_STATE
from supervisord.launcher.procfs import Census, Stat


@dataclass(frozen=True, slots=True)
class Clues:
    """What is known of an engine's processes.

    `reaped_ticks`: when we reaped the main process, our child; a session-mate older than that is ours.
    `known`: members at an earlier count, pid to start time. `uid`: whose processes they are.
    """

    engine: str
    state_dir: str
    uid: int
    process: Process | None
    reaped_ticks: int | None
    known: Mapping[int, int]


def members(processes: Mapping[int, Stat], clues: Clues, *, everywhere: bool) -> list[Stat]:
    """The living processes of an engine.

    Orphans of a child of ours come to us (subreaper), so marks are looked for among our children; `everywhere` among
    all processes, for an engine that an earlier daemon started.
    """
    ours = os.getpid()
    alive = {stat.pid: stat for stat in processes.values() if stat.alive and stat.pid != ours}
    proven = {stat.pid for stat in alive.values() if _is_proven(stat, processes, clues)}
    for stat in alive.values():
        candidate = everywhere or stat.ppid == ours or _in_session(stat, clues)
        if candidate and stat.pid not in proven and _is_marked(stat, clues):
            proven.add(stat.pid)
    return _with_descendants(alive, proven)


class Marks(NamedTuple):
    """What the environment of a process says about whose it is."""

    engine: str
    generation: int


def marks(stat: Stat, state_dir: str) -> Marks | None:
    """Read the marks of a process of some engine of this state directory."""
    variables = dict(text.partition("=")[::2] for text in map(os.fsdecode, procfs.environment(stat.pid)))
    engine, generation = variables.get(MARK_ENGINE, ""), variables.get(MARK_GENERATION, "")
    if variables.get(MARK_STATE) != state_dir or not re.match(ENGINE_NAME_PATTERN, engine):
        return None
    return Marks(engine, int(generation) if generation.isdecimal() else 0)


def _is_marked(stat: Stat, clues: Clues) -> bool:
    """A copy of the marks in the environment of another user's process proves nothing."""
    wanted = {os.fsencode(f"{MARK_ENGINE}={clues.engine}"), os.fsencode(f"{MARK_STATE}={clues.state_dir}")}
    return wanted <= procfs.environment(stat.pid) and procfs.uid_of(stat.pid) == clues.uid


def is_certain(census: Census, *, everywhere: bool) -> bool:
    """Whether nobody can have forked and ended between being listed and being looked at.

    Then every process that lives was seen, or descends from one that was seen alive: no members means none at all.
    Somebody who did that was gone when we looked, or dead and still our child (`everywhere`: anybody's).
    """
    ours = os.getpid()
    return census.whole and all(
        stat.alive or not (everywhere or stat.ppid == ours) for stat in census.processes.values()
    )


def _is_proven(stat: Stat, processes: Mapping[int, Stat], clues: Clues) -> bool:
    if clues.known.get(stat.pid) == stat.start_ticks:
        return True
    if not _in_session(stat, clues) or clues.process is None:
        return False
    main = processes.get(clues.process.pid)
    if main is not None and main.start_ticks == clues.process.start_ticks:
        return True
    return clues.reaped_ticks is not None and stat.start_ticks <= clues.reaped_ticks


def _in_session(stat: Stat, clues: Clues) -> bool:
    return clues.process is not None and stat.session == clues.process.pid


def _with_descendants(alive: Mapping[int, Stat], roots: Iterable[int]) -> list[Stat]:
    children: dict[int, list[int]] = {}
    for stat in alive.values():
        children.setdefault(stat.ppid, []).append(stat.pid)
    found: dict[int, Stat] = {}
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found[pid] = alive[pid]
            todo += children.get(pid, ())
    return list(found.values())


def reap_orphans(processes: Mapping[int, Stat], mains: set[int], known: Mapping[int, int]) -> None:
    """Bury dead orphans that came to us as subreaper, and nobody's child that somebody waits for.

    A process that we started ourselves is in our session or leads its own; any other session was made by an engine.
    """
    ours, session = os.getpid(), os.getsid(0)
    for stat in processes.values():
        if stat.alive or stat.ppid != ours or stat.pid in mains or stat.session == session:
            continue
        if stat.session != stat.pid or known.get(stat.pid) == stat.start_ticks:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, stat.pid, os.WEXITED | os.WNOHANG)
