"""`why ENGINE`: the story of its last restart, failure or wait, in a dozen lines."""

from __future__ import annotations

import json
from datetime import datetime, timezone

from supervisord.cli import OK, render
from supervisord.control.client import engine_target, get

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any, Final

    Document = dict[str, Any]

_TEXT_MIN: Final = 40
_TEXT_MAX: Final = 100
_BOLD: Final = "1"
_COLOURS: Final = {"ready": "32", "failed": "31", "backoff": "31", "waiting": "33"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "why",
        description="Tells why an engine was restarted, failed or waits: what was SEEN, which RULE with its numbers, "
        "what was DONE, how it is NOW, and what to DO.",
    )
    parser.add_argument("engine", metavar="ENGINE")
    parser.add_argument("--json", action="store_true", help="the same for programs")


def main(args: argparse.Namespace) -> int:
    """Print the story."""
    found = get(args.socket, engine_target(args.engine, "why")).document()
    if args.json:
        print(json.dumps(found, indent=2))
        return OK
    width, colour = render.terminal()
    print(story(found, width=width, colour=colour, now=datetime.now(timezone.utc).timestamp()), end="")
    return OK


def story(found: Document, *, width: int, colour: bool, now: float) -> str:
    """Lay it out for people, with local times; `now` is epoch seconds. Ends with a newline."""
    shade = _COLOURS.get(found["outcome"], _BOLD)
    lines = [render.paint(line, shade, colour) for line in render.wrap(found["headline"], width, "", "  ")]
    lines += [*_body(found["lines"], width, colour, now)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _body(lines: list[Document], width: int, colour: bool, now: float) -> Iterator[str]:
    times = [_when(line["at"], now) for line in lines]
    room = max(map(len, times))
    indent = " " * (len("SEEN") + 2 + room + 2)
    told, before = "", ""
    for line, at in zip(lines, times, strict=True):
        section, moment = line["section"], f"{line['section']}{at}"
        head = section if section != told else ""
        shown = at if moment != before else ""
        told, before = section, moment if at else before
        text_width = max(_TEXT_MIN, min(_TEXT_MAX, width - len(indent)))
        first, *rest = render.wrap(line["text"], text_width, "", "") or [""]
        yield f"{render.paint(f'{head:<4}', _BOLD, colour and bool(head))}  {shown:<{room}}  {first}"
        yield from (f"{indent}{text}" for text in rest)


def _when(stamp: str | None, now: float) -> str:
    """The local time of today, with the date if it was another day."""
    if stamp is None:
        return ""
    at, today = render.local(stamp), datetime.fromtimestamp(now).astimezone().strftime("%Y-%m-%d")
    return at.removeprefix(f"{today} ")
