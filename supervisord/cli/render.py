"""What every command needs to show something: the terminal, clean text, widths, times.

Text that engines had a hand in cannot drive a terminal, and takes the columns that it is given: wide characters count
two, combining ones none.
"""

from __future__ import annotations

import os
import re
import sys
from datetime import datetime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Final

    Document = dict[str, Any]

_NO_TERMINAL_WIDTH: Final = 200
_WRAP_MIN: Final = 16
"""Columns of text beside an indentation, also where the terminal has no room for them."""
_MIB_PER_GIB: Final = 1024
_COMBINING_MAX: Final = 4
"""Marks on one character that are somebody's language; more of them are drawn over the lines above and below."""

GREEN: Final = "32"
YELLOW: Final = "33"
RED: Final = "31"
CYAN: Final = "36"
DIM: Final = "2"
BOLD: Final = "1"

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])")
_SIZE: Final = re.compile(r"[0-9]{1,4}")

# --- the terminal -----------------------------------------------------------------------------------------------------


def terminal() -> tuple[int, bool]:
    """Columns of stdout, and whether it takes colours (NO_COLOR: no-color.org)."""
    tty = sys.stdout.isatty()
    colour = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if columns := _stated("COLUMNS"):
        return columns, colour
    try:
        return (
            (os.get_terminal_size(sys.stdout.fileno()).columns or 80, colour) if tty else (_NO_TERMINAL_WIDTH, colour)
        )
    except OSError:
        return 80, colour


def rows() -> int | None:
    """Lines that the terminal of stdout has; None: nobody knows."""
    if lines := _stated("LINES"):
        return lines
    try:
        return os.get_terminal_size(sys.stdout.fileno()).lines or None
    except (OSError, ValueError):
        return None


def _stated(name: str) -> int:
    """A size that the environment names; 0: none that a terminal could have."""
    text = os.environ.get(name, "")
    return int(text) if _SIZE.fullmatch(text) else 0


# --- text -------------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Text without terminal escapes, control and invisible characters; tabs stay."""
    if text.isprintable():
        return text
    plain = _ESCAPES.sub("", text)
    return "".join(c if c.isprintable() or c == "\t" else " " for c in plain)


def cell(text: str) -> str:
    """Clean text for a table: no tabs, and no towers of combining marks."""
    plain = clean(text).replace("\t", " ")
    return plain if plain.isascii() else _without_towers(plain)


def columns(text: str) -> int:
    """How many columns of a terminal clean text takes."""
    return len(text) if text.isascii() else sum(map(_width, text))


def pad(text: str, room: int) -> str:
    """Fill text up to so many columns."""
    return text + " " * (room - columns(text))


def shorten(text: str, room: int) -> str:
    """Make text fit: of a path its last part if that fits, otherwise both ends (names differ in either)."""
    if columns(text) <= room:
        return text
    tail = text.rpartition("/")[2]
    if 0 < columns(tail) <= room:
        return tail
    right = (room - 2) // 2
    return f"{_first(text, room - 2 - right)}..{_first(text[::-1], right)[::-1]}"


def clip(text: str, room: int) -> str:
    """As much of the beginning of a sentence as fits."""
    return text if columns(text) <= room else f"{_first(text, room - 2)}.."


def wrap(text: str, width: int, first: str = "  ", rest: str = "    ") -> list[str]:
    """Clean text in lines of this width, with indentations. Only blanks part it: names are copied from here."""
    lines: list[str] = []
    line, room = first, max(_WRAP_MIN, width - len(first))
    for word in cell(text).split():
        size = columns(word)
        while True:
            gap = 0 if line in {first, rest} else 1
            if gap + size <= room:
                line, room = f"{line}{' ' * gap}{word}", room - gap - size
                break
            if not gap:  # longer than a line
                part = _first(word, room) or word[0]
                line, word = f"{line}{part}", word[len(part) :]  # noqa: PLW2901 (the rest of it)
                size -= columns(part)
            lines.append(line)
            line, room = rest, max(_WRAP_MIN, width - len(rest))
    return [*lines, line] if line.strip() else lines


def _width(char: str) -> int:
    from unicodedata import category, east_asian_width  # noqa: PLC0415 - few texts are not ASCII

    if category(char) in {"Mn", "Me"}:
        return 0
    return 2 if east_asian_width(char) in {"W", "F"} else 1


def _first(text: str, room: int) -> str:
    """As much of its beginning as fits."""
    for index, char in enumerate(text):
        room -= _width(char)
        if room < 0:
            return text[:index]
    return text


def _without_towers(text: str) -> str:
    kept, height = [], 0
    for char in text:
        height = 0 if _width(char) else height + 1
        if height <= _COMBINING_MAX:
            kept.append(char)
    return "".join(kept)


def paint(text: str, shade: str, colour: bool) -> str:
    """Text in a colour, if the terminal takes one."""
    return f"\x1b[{shade}m{text}\x1b[0m" if colour else text


def known(value: object) -> str:
    """A value, or the sign for what is not known."""
    return "-" if value is None else str(value)


def bar(used: float | None, total: float | None, cells: int) -> str:
    """A picture of how much of something is in use; empty when that is not known."""
    if used is None or not total:
        return ""
    full = round(cells * max(0.0, min(1.0, used / total)))
    return f"[{'#' * full}{'.' * (cells - full)}]"


def gib(mib: float | None) -> str:
    """A size in a few characters."""
    return "-" if mib is None else f"{mib / 1024:.1f}G" if mib >= _MIB_PER_GIB else f"{mib:.0f}M"


def joined(lines: Iterable[str]) -> str:
    """Lines as one text, without blanks at their ends."""
    return "".join(f"{line.rstrip()}\n" for line in lines)


# --- times ------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Write a time span with its two largest units."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if parts or count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"


def local(stamp: str) -> str:
    """An RFC 3339 time as the clock on the wall here shows it."""
    return datetime.fromtimestamp(epoch(stamp)).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def clock(wall: float) -> str:
    """The time of day here, of epoch seconds."""
    return datetime.fromtimestamp(wall).astimezone().strftime("%H:%M:%S")


def age(stamp: str | None, now: float) -> str:
    """How long ago an RFC 3339 time was; `now` is epoch seconds."""
    return "-" if stamp is None else duration(now - epoch(stamp))


def epoch(stamp: str) -> float:
    """Epoch seconds of an RFC 3339 time."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


# --- engines in a few words -------------------------------------------------------------------------------------------


def summary(engine: Document) -> str:
    """Say in one line where an engine is and why."""
    state = "degraded" if engine["health"] == "degraded" else engine["state"]
    gates = engine["state"] == "waiting"
    told = "; ".join(f"{r['code']}: {r['message']}" if gates else r["message"] for r in engine["reasons"])
    return clean(f"{state}: {told}" if told else state)


def unready(document: Document) -> list[str]:
    """Names of the engines that are wanted and not ready."""
    return [e["name"] for e in document["engines"] if e["wanted"] == "running" and e["state"] != "ready"]
