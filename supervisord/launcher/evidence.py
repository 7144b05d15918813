"""What is kept of an engine before it is killed: states, kernel stacks, Python stacks (py-spy), last lines.

Bounded in time and size; nothing here may keep the kill from happening.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from supervisord.launcher import procfs

KEPT_FILES: Final = 20
STACK_S: Final = 2.0
"""py-spy may take so long for one process."""

STACKS_S: Final = 6.0
"""And so long for all of them: the kill waits, and what does not die within 30 s of it counts as unkillable."""

DEATH_S: Final = 1.0
"""After a SIGKILL it is waited for so long; one that hangs in the kernel is left to itself."""

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
    command = (program, "dump", "--nonblocking", "--pid", str(pid))
    try:
        # Into memory, not through a pipe: whoever holds a pipe's other end decides how long it is read.
        with open(os.memfd_create("py-spy"), "w+b") as output:  # noqa: PTH123 (it has no path)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)
            if not _ended(process, timeout_s):
                process.kill()
                _ended(process, DEATH_S)
                return ""
            output.seek(0)
            return output.read(_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _prune(directory: Path) -> None:
    for old in sorted(directory.glob("*.txt"), key=lambda path: path.stat().st_mtime)[:-KEPT_FILES]:
        old.unlink(missing_ok=True)
