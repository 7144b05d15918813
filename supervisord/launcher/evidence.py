"""What is kept of an engine before it is killed: states, kernel stacks, Python stacks (py-spy), last lines.

Bounded in time and size; nothing here may keep the kill from happening.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from supervisord.launcher import bounded, procfs
from supervisord.launcher.bounded import BoundedError

KEPT_FILES: Final = 20
STACK_S: Final = 2.0
"""py-spy may take so long for one process."""

STACKS_S: Final = 6.0
"""And so long for all of them: the kill waits, and what does not die within 30 s of it counts as unkillable."""

_FILE_BYTES: Final = 64 * 1024
_PROC_FILES: Final = ("status", "wchan", "stack")


def collect(path: Path, heading: str, pids: Sequence[int], tail: Iterable[str]) -> None:
    """Write one file. Raises OSError."""
    parts = [heading, "", "== last lines of its output", *tail]
    until = time.monotonic() + STACKS_S
    for pid in pids:
        stat = procfs.read_stat(pid)
        if stat is not None:
            parts += ["", f"== {procfs.describe(stat)}", *_of_process(pid, until)]
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8", errors="replace")
    _prune(path.parent)


def _of_process(pid: int, until: float) -> Iterable[str]:
    for name in _PROC_FILES:
        text = _read(Path(f"/proc/{pid}/{name}"))
        if text:
            yield f"-- /proc/{pid}/{name}"
            yield text
    stacks = _python_stacks(pid, min(STACK_S, until - time.monotonic()))
    if stacks:
        yield "-- Python stacks (py-spy)"
        yield stacks


def _python_stacks(pid: int, timeout_s: float) -> str:
    program = shutil.which("py-spy")
    if program is None or timeout_s <= 0:
        return ""
    try:
        output = bounded.output_of((program, "dump", "--nonblocking", "--pid", str(pid)), timeout_s, _FILE_BYTES)
    except BoundedError:
        return ""
    return output.decode("utf-8", "replace")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _prune(directory: Path) -> None:
    for old in sorted(directory.glob("*.txt"), key=lambda path: path.stat().st_mtime)[:-KEPT_FILES]:
        old.unlink(missing_ok=True)
