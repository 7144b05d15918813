"""`doctor`: whether this machine has what vLLM and the supervisor need. Exit code 1 when something is missing."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from supervisord.cli import NO, OK, render
from supervisord.config import DEFAULT_PATH
from supervisord.control.client import DEFAULT_SOCKET
from supervisord.doctor.box import Box
from supervisord.doctor.examine import Result, document, examine, failed
from supervisord.doctor.facts import gather
from supervisord.doctor.findings import Verdict

_SHADES: Final = {
    Verdict.OK: render.GREEN,
    Verdict.WARN: render.YELLOW,
    Verdict.FAIL: render.RED,
    Verdict.NOT_CHECKED: render.DIM,
}
_WORDS: Final = {Verdict.OK: "ok", Verdict.WARN: "warn", Verdict.FAIL: "fail", Verdict.NOT_CHECKED: "-"}
_COUNTED: Final = {
    Verdict.FAIL: "failed",
    Verdict.WARN: "warned",
    Verdict.NOT_CHECKED: "not checked",
    Verdict.OK: "ok",
}
_WORD: Final = max(map(len, _WORDS.values()))
_NARROW: Final = 70
"""Below, names stand before their sentences and not in a column."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "doctor",
        description="Checks what this machine needs for vLLM and the supervisor, and says how to mend what is missing. "
        "Changes nothing, and needs neither the daemon nor root: what cannot be seen is not checked, and it says why. "
        "Exit code: 0, or 1 when a check failed.",
        epilog="A dash: not checked. Each check is described in docs/doctor.md.",
    )
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.add_argument("--config", metavar="FILE", type=Path, default=DEFAULT_PATH, help=f"default: {DEFAULT_PATH}")


def main(args: argparse.Namespace) -> int:
    """Check, and show what was found."""
    socket = args.socket if args.socket != DEFAULT_SOCKET else None
    results = examine(gather(Box(), args.config.absolute(), socket))
    if args.json:
        print(json.dumps(document(results), indent=2))
    else:
        width, colour = render.terminal()
        print(view(results, width=width, colour=colour), end="")
    return NO if failed(results) else OK


def view(results: Sequence[Result], *, width: int, colour: bool) -> str:
    """Everything by its heading but what failed: that stands at the end, where eyes and prompt are."""
    bad = [result for result in results if result.finding.verdict is Verdict.FAIL]
    others = [result for result in results if result.finding.verdict is not Verdict.FAIL]
    column = 0 if width < _NARROW else max((len(result.check.name) for result in results), default=0)
    lines: list[str] = []
    for heading, members in groupby(others, key=lambda result: result.check.group):
        lines += [render.paint(heading, render.BOLD, colour)]
        lines += [line for result in members for line in _lines(result, column, width, colour=colour)]
    if bad:
        lines += ["", render.paint("what failed", render.BOLD, colour)]
        lines += [line for result in bad for line in _lines(result, column, width, colour=colour)]
    return "".join(f"{line.rstrip()}\n" for line in [*lines, "", *render.wrap(_summary(results), width, "", "")])


def _lines(result: Result, column: int, width: int, *, colour: bool) -> Iterator[str]:
    check, finding = result
    verdict = finding.verdict
    about = f"{finding.subject}: " if finding.subject else ""
    note = "not checked: " if verdict is Verdict.NOT_CHECKED else ""
    name = f"{check.name:<{column}}  " if column else f"{check.name}: "
    indent = " " * (2 + _WORD + 2 + (len(name) if column else 0))
    head = f"  {_WORDS[verdict]:<{_WORD}}  "
    first, *rest = render.wrap(f"{about}{note}{finding.message}", width, head + name, indent)
    shown = render.paint(_WORDS[verdict], _SHADES[verdict], colour)
    yield first.replace(_WORDS[verdict], shown, 1)
    yield from rest
    if finding.remedy:
        yield from render.wrap(f"do: {finding.remedy}", width, indent, f"{indent}    ")


def _summary(results: Sequence[Result]) -> str:
    counts = Counter(result.finding.verdict for result in results)
    return ", ".join(f"{counts[verdict]} {word}" for verdict, word in _COUNTED.items())
