"""Writes the tables of docs/version-matrix.md from the records of all runs: python -m tests.e2e_matrix.page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.report import ROOT, Table, machine, write

RECORDS = ROOT / "tests" / "data" / "version-matrix"
PAGE = ROOT / "docs" / "version-matrix.md"

Seen = dict[str, Any]

RUN = "last run, at commit"

PYTHONS = ("Python", "its own tests", "verdict", RUN)


def where() -> str:
    """The machine, without the Python of the tests: rows name their own."""
    return machine().rpartition(", Python")[0]


def commit() -> str:
    """The supervisor's commit, with + when files differ from it: other files than docs/ and the records themselves."""

    def git(*args: str) -> str:
        done = subprocess.run(("git", "-C", str(ROOT), *args), check=False, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git(
        "status", "--porcelain", "--", ":/", ":(top,exclude)docs", f":(top,exclude){RECORDS.relative_to(ROOT)}"
    )
    return (git("rev-parse", "--short", "HEAD") or "no commit") + ("+" if changed else "")


def releases(records: Path = RECORDS) -> Table:
    """A row for each release of vLLM that was ever run."""
    seen = {path.stem.removeprefix("vllm-"): json.loads(path.read_text()) for path in records.glob("vllm-*.json")}
    rows = [(version, *_release(seen[version])) for version in sorted(seen, key=_order)]
    header = ("vLLM", *(title for title, _, _ in CELLS), "verdict", RUN)
    return Table("Releases of vLLM", header, tuple(rows), _runs(seen))


def pythons(records: Path = RECORDS) -> Table:
    """A row for each Python that this package was ever run with."""
    seen = {path.stem.removeprefix("python-"): json.loads(path.read_text()) for path in records.glob("python-*.json")}
    rows = [
        (seen[minor]["python"], seen[minor]["tests"], _verdict(seen[minor]), _last_run(seen[minor]))
        for minor in sorted(seen, key=_order)
    ]
    return Table("Pythons for the supervisor itself", PYTHONS, tuple(rows), _runs(seen))


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _runs(seen: dict[str, Seen]) -> tuple[str, ...]:
    """Where each row was seen; rows of one machine share a line."""
    runs: dict[str, list[str]] = {}
    for version in sorted(seen, key=_order):
        runs.setdefault(seen[version]["machine"], []).append(version)
    return tuple(f"{', '.join(versions)}: {run}" for run, versions in runs.items())


def _verdict(seen: Seen) -> str:
    if "failed" not in seen:
        return "FAILED: it did not come to an end"
    return f"FAILED: {', '.join(seen['failed'])}" if seen["failed"] else "works"


def _last_run(seen: Seen) -> str:
    """The first records hold no commit."""
    return f"{seen['date']}, {seen.get('commit', '-')}"


def _release(seen: Seen) -> tuple[str, ...]:
    """The cells of a row. A run that failed early saw less: what it did not see is a dash."""
    return (*(cell(seen) if key in seen else "-" for _, key, cell in CELLS), _verdict(seen), _last_run(seen))


def _listed(names: list[str], form: str = "{}") -> str:
    return form.format(", ".join(f"`{name}`" for name in names)) if names else ""


def _how(end: Seen) -> str:
    if end["code"] is None and end["signal"] is None:
        return "/health 503, killed by the supervisor"
    return f"exit {end['code']}" if end["signal"] is None else f"signal {end['signal']}"


def _death(seen: Seen) -> str:
    left = f"{seen['left']} LEFT" if seen["left"] else "nothing left"
    return f"{_how(seen)} after {seen['gone_s']} s, `{seen['class']}`; {seen['processes']} processes, {left}"


def _stop(end: Seen) -> str:
    return f"stream {end['stream']}; {_how(end)} after {end['term_s']} s"


CELLS: tuple[tuple[str, str, Callable[[Seen], str]], ...] = (
    ("Python, torch", "torch", lambda seen: f"{seen['python']}, {seen['torch']}"),
    ("flags (lacking)", "flags_lacking", lambda seen: f"{seen['flags']}{_listed(seen['flags_lacking'], ' ({})')}"),
    ("start to ready", "ready_s", lambda seen: f"{seen['ready_s']} s"),
    (
        "warm-up",
        "warmup",
        lambda seen: "{first_ms:.0f} > {settled_ms:.0f} ms, {rounds} rounds".format(**seen["warmup"]),
    ),
    ("signals missing", "signals_missing", lambda seen: _listed(seen["signals_missing"]) or "none"),
    ("EngineCore killed", "core_killed", lambda seen: _death(seen["core_killed"])),
    ("API server killed", "server_killed", lambda seen: _death(seen["server_killed"])),
    ("SIGTERM by others", "server_ended", lambda seen: _death(seen["server_ended"])),
    ("`stop --now` under a stream", "stop_now", lambda seen: _stop(seen["stop_now"])),
    ("`stop` under a stream", "drain", lambda seen: _stop(seen["drain"])),
)
"""Of a row: the column's title, what must have been seen for it, and its text."""


if __name__ == "__main__":
    write("releases", releases().markdown(), PAGE)
    write("pythons", pythons().markdown(), PAGE)
