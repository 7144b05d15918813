"""Which processes belong to an engine. Only proof counts, never a name: another vLLM may share the machine.

Proofs: being the recorded main process (pid and start time); its session, as long as the number of the session was
not free for anybody else; descent from a member; having been a member at an earlier count; and, for processes that
left session and parents behind, the marks in the environment that they were started with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from supervisord.core.model import Process
from supervisord.core.spec import ENGINE_NAME_PATTERN
from supervisord.launcher import procfs
from supervisord.launcher.base import MARK_ENGINE, MARK_GENERATION, MARK_STATE, generation_of
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

    @property
    def marks(self) -> frozenset[bytes]:
        """The environment that every process of the engine was started with."""
        return frozenset(map(os.fsencode, (f"{MARK_ENGINE}={self.engine}", f"{MARK_STATE}={self.state_dir}")))


class Family(NamedTuple):
    """The living processes of an engine. `certain`: nobody else can have escaped this look."""

    members: list[Stat]
    certain: bool


def look(census: Census, clues: Clues, *, everywhere: bool) -> Family:
    """Find the living processes of an engine.

    Orphans of a child of ours come to us (subreaper), so marks are looked for among our children; `everywhere` among
    all processes, for an engine that an earlier daemon started.

    A look is certain when nobody can have forked and ended between being listed and being looked at: such a one would
    be gone, or dead and still our child (`everywhere`: anybody's). Then whoever lives was met, or descends from one
    that was met alive. And nobody may be without an environment, as a process is for a moment while it is replaced.
    """
    ours = os.getpid()
    alive = {stat.pid: stat for stat in census.processes.values() if stat.alive and stat.pid != ours}
    proven = {stat.pid for stat in alive.values() if _is_proven(stat, census.processes, clues)}
    marks = clues.marks
    certain = census.whole and all(s.alive or not (everywhere or s.ppid == ours) for s in census.processes.values())
    for stat in alive.values():
        if stat.pid in proven or not (everywhere or stat.ppid == ours or _in_session(stat, clues)):
            continue
        found = census.marks(stat.pid)
        certain = certain and found is not None
        # A copy of the marks in the environment of another user's process proves nothing.
        if found is not None and marks <= found and procfs.uid_of(stat.pid) == clues.uid:
            proven.add(stat.pid)
    return Family(_with_descendants(alive, proven), certain)


class Marks(NamedTuple):
    """What the environment of a process says about whose it is."""

    engine: str
    generation: int


def state_dir_of(stat: Stat) -> str | None:
    """The state directory that the marks of a process name."""
    return _variables(stat).get(MARK_STATE)


def read_marks(stat: Stat, state_dir: str) -> Marks | None:
    """Read the marks of a process of some engine of this state directory."""
    variables = _variables(stat)
    engine = variables.get(MARK_ENGINE, "")
    if variables.get(MARK_STATE) != state_dir or not re.fullmatch(ENGINE_NAME_PATTERN, engine):
        return None
    return Marks(engine, generation_of(variables.get(MARK_GENERATION, "")))


def _variables(stat: Stat) -> dict[str, str]:
    return dict(text.partition("=")[::2] for text in map(os.fsdecode, procfs.marks(stat.pid) or ()))


def _is_proven(stat: Stat, processes: Mapping[int, Stat], clues: Clues) -> bool:
    if clues.known.get(stat.pid) == stat.start_ticks:
        return True
    if clues.process is None:
        return False
    main = processes.get(clues.process.pid)
    main_is_there = main is not None and main.start_ticks == clues.process.start_ticks
    if main_is_there and stat is main:
        return True
    number_was_ours = clues.reaped_ticks is not None and stat.start_ticks <= clues.reaped_ticks
    return _in_session(stat, clues) and (main_is_there or number_was_ours)


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
