"""`logs`: what an engine wrote, from its file through the daemon or, where engines are services, from the journal."""

from __future__ import annotations

import argparse
import codecs
import os
import sys

from supervisord.cli import DENIED, NO, OK, complain, render
from supervisord.control.client import ANSWER_S, RefusedError, engine_target, get

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from supervisord.control.client import Reply

JOURNALS: Final = ("/var/log/journal", "/run/log/journal")
"""Where journald keeps what it was told (systemd-journald.service(8))."""
_OF_ENGINES: Final = "_SYSTEMD_SLICE=vllm.slice"
_LINES: Final = 200
_CHUNK_BYTES: Final = 64 * 1024
_TAIL_MAX_BYTES: Final = 16 * 1024 * 1024
_WAIT_S: Final = 20.0
_LINE_MAX: Final = 64 * 1024


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "logs", description="Shows the last lines that an engine wrote, without colours and control characters."
    )
    parser.add_argument("engine", metavar="ENGINE")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what it writes next")
    parser.add_argument(
        "-n", "--lines", type=_count, default=_LINES, metavar="N", help=f"so many lines (default: {_LINES})"
    )


def main(args: argparse.Namespace) -> int:
    """Print the end of the log, and with --follow what comes after it."""
    target = engine_target(args.engine, "log")
    try:
        data, offset = _tail(args.socket, target, args.lines)
    except RefusedError as error:
        if error.code != "in_journal":
            raise
        return _journal(str(error.document.get("identifier", "")), args.lines, follow=args.follow)
    out = Lines()
    out.feed(data)
    while args.follow:
        sys.stdout.flush()
        reply = get(args.socket, f"{target}?offset={offset}&limit={_CHUNK_BYTES}&wait={_WAIT_S}", ANSWER_S + _WAIT_S)
        out.feed(reply.body)
        offset = reply.number("log-next-offset")
    out.end()
    return OK


class Lines:
    """Prints a stream of bytes line by line, cleaned; a carriage return (progress bars) ends a line too."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Print the lines that are whole now."""
        text = self._rest + self._decoder.decode(data)
        *lines, self._rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            print(render.clean(line))
        if len(self._rest) > _LINE_MAX:
            self.end()

    def end(self) -> None:
        """Print what is left of a line that was never ended."""
        if self._rest:
            print(render.clean(self._rest))
            self._rest = ""


def _tail(socket: str, target: str, lines: int) -> tuple[bytes, int]:
    """Return the last lines of the log, and the offset where they end."""
    reply = get(socket, f"{target}?limit={_CHUNK_BYTES}")
    data, start, end = reply.body, reply.number("log-offset"), reply.number("log-next-offset")
    while start > 0 and data.count(b"\n") <= lines and len(data) < _TAIL_MAX_BYTES:
        size = min(_CHUNK_BYTES, start)
        earlier: Reply = get(socket, f"{target}?offset={start - size}&limit={size}")
        if earlier.number("log-offset") != start - size or len(earlier.body) != size:
            break  # the log was rotated meanwhile
        data, start = earlier.body + data, start - size
    kept = data.splitlines(keepends=True)
    return b"".join(kept[len(kept) - min(lines, len(kept)) :]), end


def _journal(identifier: str, lines: int, *, follow: bool) -> int:
    """Show the log from journald, cleaned like any other."""
    import subprocess  # noqa: PLC0415 - needed only on a node whose engines log to journald

    if not _may_read_journal():
        complain(
            f"cannot show the log of {identifier}: only root and members of the groups systemd-journal and adm may "
            "read the journal; use sudo, or become one: usermod -aG systemd-journal YOU, and log in again"
        )
        return DENIED
    # The slice too: anybody may write to the journal under any identifier.
    argv = ["journalctl", "--no-pager", "--output=cat", f"--identifier={identifier}", f"--lines={lines}", _OF_ENGINES]
    try:
        process = subprocess.Popen([*argv, *(["--follow"] if follow else [])], stdout=subprocess.PIPE, bufsize=0)
    except OSError as error:
        complain(f"cannot run journalctl, which has the log of {identifier}: {error.strerror}")
        return NO
    out = Lines()
    with process:
        assert process.stdout is not None  # noqa: S101 - asked for above
        try:
            while data := process.stdout.read(_CHUNK_BYTES):
                out.feed(data)
                sys.stdout.flush()
        finally:
            process.terminate()
    out.end()
    return OK if process.returncode == 0 else NO


def _may_read_journal() -> bool:
    """Whether journald lets us; if not, journalctl would show an empty log, or that of ourselves."""
    from pathlib import Path  # noqa: PLC0415 - costs as much as the rest of the command, and few are turned away

    found = [path for folder in JOURNALS for path in Path(folder).glob("*/system.journal")]
    return not found or any(os.access(path, os.R_OK) for path in found)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 7:  # noqa: PLR2004 - more lines than any tail holds
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)
