"""`events`: what was decided and why. Without --since the newest of the history, with -f what comes next too."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from datetime import datetime

from supervisord.cli import OK, render
from supervisord.control.client import ANSWER_S, engine_name, get

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

    Document = dict[str, Any]

_NEWEST: Final = 100
_PAGE: Final = 500
_WAIT_S: Final = 25.0
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGO: Final = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,3})?[smhdw])+")
_PART: Final = re.compile(r"([0-9.]{1,13})([smhdw])")
_KIND_WIDTH: Final = len("gpu_telemetry_unresponsive")
_SEVERITY_WIDTH: Final = 8
_KIND_FROM: Final = 120
"""Columns of a terminal from which on the kind leaves enough to the sentence."""
_COLOURS: Final = {"critical": "1;31", "error": "31", "warning": "33", "notice": "32", "debug": "2"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "events",
        description=f"Shows what was decided, oldest first: the newest {_NEWEST}, or all since a time.",
        epilog="T: so long ago (30m, 2h, 1d12h), a date (2026-05-29) or a time (2026-05-29T03:00:00Z; without a zone: "
        "local). --json writes one object a line.",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes next")
    parser.add_argument("--engine", metavar="E", help="only those of this engine")
    parser.add_argument("--since", type=_since, metavar="T", help="from this time on")
    parser.add_argument("--json", action="store_true", help="one object a line, for programs")


def main(args: argparse.Namespace) -> int:
    """Print page after page; with --follow for ever."""
    show = _printer(as_json=args.json)
    shared = "" if args.engine is None else f"&engine={engine_name(args.engine)}"
    first = f"limit={_NEWEST}" if args.since is None else f"limit={_PAGE}&since={args.since:.3f}"
    query, wait_s = first, 0.0
    while True:
        page = get(args.socket, f"/v1/events?{query}{shared}", ANSWER_S + wait_s).document()
        for event in page["events"]:
            show(event)
        if not page["more"]:
            if not args.follow:
                return OK
            print(end="", flush=True)
            wait_s = _WAIT_S
        query = f"after={page['last_id']}&limit={_PAGE}&timeout={wait_s:g}"


def _printer(*, as_json: bool) -> Callable[[Document], None]:
    """How an event is printed: for programs, on a terminal, or as one line for pipes and files."""
    if as_json:
        return lambda event: print(json.dumps(event))
    if sys.stdout.isatty():
        width, colour = render.terminal()
        return OnTerminal(width, colour=colour).show
    return lambda event: print(line(event))


def line(event: Document) -> str:
    """One event in one line: local time, how bad, what kind, the sentence."""
    what = f"{event['severity']:<{_SEVERITY_WIDTH}}  {event['kind']:<{_KIND_WIDTH}}  {event['message']}"
    return render.clean(f"{render.local(event['at'])}  {what}")


class OnTerminal:
    """Events for eyes: a line for each day, sentences that keep to their column, the kind where there is room."""

    def __init__(self, width: int, *, colour: bool) -> None:
        self._width = width
        self._colour = colour
        self._day = ""

    def show(self, event: Document) -> None:
        """Print one event."""
        day, at = render.local(event["at"]).split(" ")
        if day != self._day:
            self._day = day
            print(render.paint(day, render.BOLD, self._colour))
        kind = f"{event['kind']:<{_KIND_WIDTH}}  " if self._width >= _KIND_FROM else ""
        head = f"{at}  {event['severity']:<{_SEVERITY_WIDTH}}  {kind}"
        shade = _COLOURS.get(event["severity"], "")
        for text in render.wrap(event["message"], self._width, head, " " * len(head)):
            print(render.paint(text, shade, self._colour and bool(shade)))


def _since(text: str) -> float:
    """Epoch seconds of what --since says."""
    if _AGO.fullmatch(text):
        ago_s = sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(text))
        return max(0.0, time.time() - ago_s)
    try:
        return max(0.0, datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError, OSError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no time: write 2h, 30m, 7d, 2026-05-29 or 2026-05-29T03:00:00Z")
