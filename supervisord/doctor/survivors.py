"""Which processes are engines: as the daemon says, or, when it is down or hangs, as its records and units do.

They go on serving, and the next daemon adopts them: whoever ends them because no daemon owns them ends the service.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from supervisord.doctor.box import Box, text_of
from supervisord.doctor.facts import Facts, Unknown
from supervisord.launcher.records import DIRECTORY, SUFFIX, RecordError, parse
from supervisord.launcher.service import engine_of

_START_TICKS: Final = 19
"""Field of /proc/PID/stat, counted from the state (proc(5))."""


def pids_of(facts: Facts) -> dict[str, set[int]] | None:
    """Main processes by engine, and all of its unit; None: whoever knows it may not be asked."""
    if not isinstance(facts.daemon, Unknown):
        told = facts.daemon["engines"]
        return {str(one.get("name")): {one["pid"]} for one in told if isinstance(one.get("pid"), int)}
    if facts.daemon.code == "denied":
        return None
    folder = Path(facts.node.supervisor.state_dir, DIRECTORY)
    try:
        records = [path for path in folder.iterdir() if path.suffix == SUFFIX]
    except FileNotFoundError:
        records = []
    except OSError:
        return None
    found: dict[str, set[int]] = {}
    for name, pid in (*_of_units(facts.box), *_of_records(facts.box, records)):
        found.setdefault(name, set()).add(pid)
    return found


def _of_units(box: Box) -> Iterator[tuple[str, int]]:
    for pid in box.pids():
        group = (box.text(f"/proc/{pid}/cgroup") or "").strip()
        yield from ((name, pid) for name in map(engine_of, group.split("/")) if name is not None)


def _of_records(box: Box, paths: list[Path]) -> Iterator[tuple[str, int]]:
    """What is written there may have ended long ago, and its number be somebody else's now."""
    for path in paths:
        try:
            record = parse(path.stem, (text_of(path) or "").encode())
        except RecordError:
            continue
        fields = (box.text(f"/proc/{record.process.pid}/stat") or "").rpartition(") ")[2].split()
        if not record.ended and fields[_START_TICKS : _START_TICKS + 1] == [str(record.process.start_ticks)]:
            yield record.engine, record.process.pid
