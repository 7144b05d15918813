"""`status`: where every engine is. Exit code 0 when all wanted engines are ready, 1 when some are not."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time

from supervisord.cli import NO, OK, render
from supervisord.control.client import ANSWER_S, RefusedError, get

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any, Final, NoReturn

    Document = dict[str, Any]

_REFRESH_S: Final = 2.0
_PAUSE_S: Final = 0.2
_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"
_OTHER_SCREEN: Final = "\x1b[?1049h"
_OWN_SCREEN: Final = "\x1b[?1049l"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "status",
        description="Shows engines and GPUs. Exit code: 0 all wanted engines are ready (degraded is ready), 1 some are "
        "not, 3 the daemon does not run.",
        epilog="SINCE: time in this state. GEN: number of the last spawn. KV: use of the KV cache (42%?: seen more "
        "than a minute ago). REQUESTS: running+waiting.",
    )
    parser.add_argument("engine", nargs="?", metavar="ENGINE", help="show only this engine")
    parser.add_argument("--json", action="store_true", help="the whole document, for programs")
    parser.add_argument("--watch", action="store_true", help="keep showing, until interrupted")


def main(args: argparse.Namespace) -> int:
    """Show the status once, or until interrupted."""
    if args.watch:
        _watch(args)
    document = _select(get(args.socket, "/v1/status").document(), args.engine)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        width, colour = render.terminal()
        print(render.table(document, width=width, colour=colour, now=time.time()), end="")
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


def _watch(args: argparse.Namespace) -> NoReturn:
    """Show every change, and fresh ages on a terminal; ends only by an exception."""
    live = sys.stdout.isatty() and not args.json
    with _other_screen() if live else contextlib.nullcontext():
        seen: int | None = None
        target = "/v1/status"
        while True:
            reply = get(args.socket, target, ANSWER_S + _REFRESH_S)
            serial = reply.number("status-serial")
            target = f"/v1/status?after={serial}&timeout={_REFRESH_S}"
            document = _select(reply.document(), args.engine)
            if live or serial != seen:
                _show(document, as_json=args.json, live=live)
            seen = serial
            time.sleep(_PAUSE_S)  # a busy node changes many times a second, a reader's eyes do not


@contextlib.contextmanager
def _other_screen() -> Iterator[None]:
    """Draw on the terminal's other screen: what was on its own comes back at the end."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        print(_OTHER_SCREEN, end="", flush=True)
        yield
    finally:
        print(_OWN_SCREEN, end="", flush=True)
        signal.signal(signal.SIGTERM, before)


def _show(document: Document, *, as_json: bool, live: bool) -> None:
    if as_json:
        print(json.dumps(document, separators=(",", ":")), flush=True)
        return
    width, colour = render.terminal()
    rows = render.rows() if live else None
    # The last row stays free: a line feed there would scroll.
    text = render.fitted(document, rows and rows - 1, width=width, colour=colour, now=time.time())
    if live:
        text = _HOME + text.replace("\n", f"{_CLEAR_LINE}\n") + _CLEAR_BELOW
    print(text, end="" if live else "\n", flush=True)
