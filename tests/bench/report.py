"""Tables of figures, and docs/benchmarks.md, whose parts are written anew one by one."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Table:
    """A table of the page: cells are finished text, notes come under it as a list."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The table under its title (a third-level heading)."""
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"### {self.title}\n\n{table}\n" + (f"\n{notes}" if notes else "")


def quantile(values: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def spread(values: Sequence[float], unit: str, digits: int = 1) -> str:
    """Median with the range and the number of values, as one cell."""
    return (
        f"{statistics.median(values):.{digits}f} {unit}"
        f" ({min(values):.{digits}f} to {max(values):.{digits}f}, n = {len(values)})"
    )


def machine() -> str:
    """What a reader must know of the machine to compare: processor, cores, memory, kernel, Python."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^model name\s*: (.+)$", info, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    gib = int(memory[1]) / 1024**2 if memory else 0
    return (
        f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB,"
        f" Linux {platform.release()}, Python {platform.python_version()}"
    )


def commit(root: Path = ROOT) -> str:
    """The commit that is measured, with + when files differ from it: not those of docs, whose page is just written."""

    def git(*argv: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *argv], check=False, capture_output=True, text=True
        ).stdout.strip()

    differs = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return git("describe", "--always", "--exclude=*") + ("+" if differs else "") or "no commit"


class Part:
    """One part of the page while it is measured: the machine's load is taken before and after."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begun = time.time()
        self._load = os.getloadavg()[0]

    def text(self, tables: Sequence[Table]) -> str:
        """The part as it stands in the page."""
        date = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self._begun))
        head = (
            f"Measured {date} UTC in {(time.time() - self._begun) / 60:.0f} min at commit {commit()}; {machine()};"
            f" load {self._load:.1f} before, {os.getloadavg()[0]:.1f} after. `scripts/bench {self.name}` repeats it.\n"
        )
        return "\n".join([head, *(table.markdown() for table in tables)])


def write(name: str, text: str, page: Path = PAGE) -> None:
    """Put the text between the part's marks in the page.

    Raises:
        ValueError: The page has no such part.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    old = page.read_text(encoding="utf-8")
    before, found, rest = old.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        msg = f"cannot write the part {name} of {page}: it has no lines {begin.strip()} and {end.strip()}"
        raise ValueError(msg)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
