"""`status`: where every engine is. Exit code 0 when all wanted engines are ready, 1 when some are not."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial

from supervisord.cli import NO, OK, render, render_status
from supervisord.control.client import ANSWER_S, RefusedError, get

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any, Final, NoReturn

    Document = dict[str, Any]

_REFRESH_S: Final = 2.0
_PAUSE_S: Final = 0.2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "status",
        description="Shows what is wrong and what to do about it, then engines and GPUs. Exit code: 0 all wanted "
        "engines are ready (degraded is ready), 1 some are not, 3 the daemon does not run.",
        epilog="SINCE: time in this state. GEN: number of the last spawn. RESTARTS: how many, and when it last "
        "failed. KV BLOCKS: the bar is what is used (free?: seen more than a minute ago). RUN+WAIT: requests. TTFT "
        "P95: time to the first token against ttft_p95_ms. MEM: in use, and how fast it grows. WARM-UP: first answer > "
        "settled. HITS: of the prefix cache. HELD BY: memory by engine. What a narrow terminal has no room for is on "
        "second lines.",
    )
    parser.add_argument("engine", nargs="?", metavar="ENGINE", help="show all that is known of this one")
    parser.add_argument("--json", action="store_true", help="the whole document, for programs")
    parser.add_argument("--watch", action="store_true", help="keep showing, until q or Ctrl-C")


def main(args: argparse.Namespace) -> int:
    """Show the status once, or until interrupted."""
    if args.watch and not args.json and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from supervisord.cli.watch import Watch  # noqa: PLC0415 - threads and a terminal, for those who watch

        return Watch(args.socket, args.engine, partial(_select, name=args.engine)).run()
    if args.watch:
        _print_changes(args)
    document = _select(get(args.socket, "/v1/status").document(), args.engine)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        print(_text(document, args.engine), end="")
    return NO if render.unready(document) else OK


def _select(document: Document, name: str | None) -> Document:
    """Cut the document down to one engine and its GPUs."""
    if name is None:
        return document
    engines = [engine for engine in document["engines"] if engine["name"] == name]
    if not engines:
        known = ", ".join(engine["name"] for engine in document["engines"]) or "none"
        raise RefusedError(f"cannot show {name}: no such engine (known: {known})", "unknown_engine", document)
    return {**document, "engines": engines, "gpus": [gpu for gpu in document["gpus"] if name in gpu["engines"]]}


def _text(document: Document, engine: str | None) -> str:
    width, colour = render.terminal()
    show = render_status.view
    if engine is not None:
        from supervisord.cli.render_engine import view as show  # noqa: PLC0415 - for one engine
    return show(document, width=width, colour=colour, now=time.time())


def _print_changes(args: argparse.Namespace) -> NoReturn:
    """Print the status again whenever it has changed, for a pipe or a file; ends only by an exception."""
    seen: int | None = None
    target = "/v1/status"
    while True:
        reply = get(args.socket, target, ANSWER_S + _REFRESH_S)
        serial = reply.number("status-serial")
        target = f"/v1/status?after={serial}&timeout={_REFRESH_S}"
        document = _select(reply.document(), args.engine)
        if serial != seen:
            text = json.dumps(document, separators=(",", ":")) if args.json else _text(document, args.engine)
            print(text, flush=True)
        seen = serial
        time.sleep(_PAUSE_S)  # a busy node changes many times a second
