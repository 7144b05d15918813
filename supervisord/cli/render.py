"""The status document as a table for people, and the cleaning of text that engines had a hand in."""

from __future__ import annotations

import os
import re
import sys
from datetime import datetime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

    Document = dict[str, Any]

_HEADERS: Final[tuple[str, ...]] = (
    *("ENGINE", "STATE", "SINCE", "PID", "GEN", "RESTARTS", "KV", "REQUESTS"),
    *("GPU MEM", "MODEL/REASON"),
)
_STATE: Final = 1
_GAP: Final = 2
_ENGINE_MIN: Final = 8
_LAST_MIN: Final = 12
_NO_TERMINAL_WIDTH: Final = 200
_STALE_S: Final = 60.0
_PACE_MIN_MIB: Final = 1.0

GREEN: Final = "32"
YELLOW: Final = "33"
RED: Final = "31"
CYAN: Final = "36"
DIM: Final = "2"
BOLD: Final = "1"
_COLOURS: Final = {
    "ready": GREEN,
    "stopped": DIM,
    "waiting": YELLOW,
    "backoff": RED,
    "failed": RED,
}

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])")


def clean(text: str) -> str:
    """Text without terminal escapes, control and invisible characters; tabs stay."""
    if text.isprintable():
        return text
    plain = _ESCAPES.sub("", text)
    return "".join(c if c.isprintable() or c == "\t" else " " for c in plain)


def terminal() -> tuple[int, bool]:
    """Columns of stdout, and whether it takes colours (NO_COLOR: no-color.org)."""
    tty = sys.stdout.isatty()
    colour = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return int(columns), colour
    try:
        return (
            (os.get_terminal_size(sys.stdout.fileno()).columns or 80, colour) if tty else (_NO_TERMINAL_WIDTH, colour)
        )
    except OSError:
        return 80, colour


def rows() -> int | None:
    """Lines that the terminal of stdout has; None: nobody knows."""
    lines = os.environ.get("LINES", "")
    if lines.isascii() and lines.isdigit() and int(lines) > 0:
        return int(lines)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).lines or None
    except (OSError, ValueError):
        return None


def fitted(document: Document, room: int | None, *, width: int, colour: bool, now: float) -> str:
    """The view in so many lines (None: any number): where it does not fit, what is not ready comes first."""
    text = table(document, width=width, colour=colour, now=now)
    if room is None or text.count("\n") <= room:
        return text
    engines = sorted(document["engines"], key=_rest)
    lines = table({**document, "engines": engines}, width=width, colour=colour, now=now).splitlines(keepends=True)
    kept = max(0, room - 1)
    return "".join([*lines[:kept], f"... {len(lines) - kept} more lines\n"])


def _rest(engine: Document) -> int:
    """Engines in order of how little they need somebody."""
    if engine["wanted"] == "running" and engine["state"] != "ready":
        return 0
    return 1 if engine["health"] == "degraded" else 2


def table(document: Document, *, width: int, colour: bool, now: float) -> str:
    """Return the whole view; `now` is epoch seconds. Ends with a newline."""
    lines = [*_engines(document["engines"], width, colour, now)]
    lines += _gpus(document, width, colour)
    lines += ["", *_node(document, width, colour, now)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def summary(engine: Document) -> str:
    """Say in one line where an engine is and why."""
    state = "degraded" if engine["health"] == "degraded" else engine["state"]
    gates = engine["state"] == "waiting"
    told = "; ".join(f"{r['code']}: {r['message']}" if gates else r["message"] for r in engine["reasons"])
    return clean(f"{state}: {told}" if told else state)


def unready(document: Document) -> list[str]:
    """Names of the engines that are wanted and not ready."""
    return [e["name"] for e in document["engines"] if e["wanted"] == "running" and e["state"] != "ready"]


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
    return datetime.fromtimestamp(_epoch(stamp)).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _engines(engines: list[Document], width: int, colour: bool, now: float) -> Iterator[str]:
    if not engines:
        yield "no engines are configured"
        return
    lines = [_HEADERS, *(_row(engine, now) for engine in engines)]
    widths = _fit(lines, width)
    if widths[-1] == 0 or not any(engine["gpus"] for engine in engines):
        lines = [_without_memory(line) for line in lines]
        widths = _fit(lines, width)
    yield paint(_line(lines[0], widths), BOLD, colour)
    for engine, row in zip(engines, lines[1:], strict=True):
        shade = YELLOW if engine["health"] == "degraded" else _COLOURS.get(engine["state"], CYAN)
        yield _line(row, widths, shade if colour else None)
        for told in _story(engine, now):
            yield from wrap(told, width)


def _row(engine: Document, now: float) -> tuple[str, ...]:
    codes = [r["code"] for r in engine["reasons"] if r["code"] != engine["state"]]
    return tuple(
        clean(cell)
        for cell in (
            engine["name"],
            engine["state"],
            _age(engine["since"], now),
            known(engine["pid"]),
            known(engine["generation"] or None),
            str(engine["restarts"]),
            _kv(engine["kv"]),
            _requests(engine["requests"]),
            _gpu_memory(engine["memory"]),
            codes[0] if codes else engine["model"],
        )
    )


def _without_memory(row: tuple[str, ...]) -> tuple[str, ...]:
    """GPU memory is shown where there are GPUs, and room for it."""
    return (*row[:-2], row[-1])


def _story(engine: Document, now: float) -> Iterator[str]:
    """Everything beyond the row that is worth a line."""
    told = []
    for reason in engine["reasons"]:
        prefix = "" if reason["code"] == engine["state"] else f"{reason['code']}: "
        told.append(f"{prefix}{reason['message']}")
    yield from told
    if engine["next_start_at"] is not None:
        what = "looked at again" if engine["state"] == "waiting" else "started again"
        yield f"{what} in {duration(_epoch(engine['next_start_at']) - now)}"
    last = engine["last_exit"]
    if last is not None and engine["state"] in {"waiting", "backoff", "failed"}:
        how = f"signal {last['signal']}" if last["signal"] is not None else f"code {known(last['code'])}"
        advice = "" if any(last["advice"] in text for text in told) else f": {last['advice']}"
        yield f"last exit: {last['class']}, {how}, generation {last['generation']}, {_age(last['at'], now)} ago{advice}"
    if engine["state"] == "failed":
        yield f"when that is mended: vllm-supervisor reset {engine['name']}"


def _gpus(document: Document, width: int, colour: bool) -> Iterator[str]:
    trouble = document["supervisor"]["gpu_trouble"]
    if not any(engine["gpus"] for engine in document["engines"]):
        trouble = None  # nobody here minds
    if document["gpus"] or trouble is not None:
        from supervisord.cli import render_gpus  # noqa: PLC0415 - only machines with GPUs pay for it

        yield ""
        yield from render_gpus.table(document["gpus"], trouble, width=width, colour=colour)


def _node(document: Document, width: int, colour: bool, now: float) -> Iterator[str]:
    daemon = document["supervisor"]
    wanted = sum(e["wanted"] == "running" for e in document["engines"])
    ready = wanted - len(unready(document))
    yield f"{ready} of {wanted} wanted engines ready"
    version, up = clean(daemon["version"]), _age(daemon["since"], now)
    yield f"vllm-supervisor {version}, pid {daemon['pid']}, up {up}, launcher {clean(daemon['launcher'])}"
    if daemon["config_error"] is not None:
        yield paint("the configuration on disk is not in force:", RED, colour)
        yield from wrap(daemon["config_error"], width)


def _fit(rows: list[tuple[str, ...]], width: int) -> list[int]:
    """Widths of the columns; the last is 0 (left out) when little of it would be seen."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    others = sum(widths[:-1]) + _GAP * (len(widths) - 1)
    left = width - others
    if left >= min(_LAST_MIN, widths[-1]):
        widths[-1] = min(widths[-1], left)
        return widths
    widths[-1] = 0
    over = others - _GAP - width
    if over > 0:
        widths[0] = max(min(_ENGINE_MIN, widths[0]), widths[0] - over)
    return widths


def _line(cells: tuple[str, ...], widths: list[int], shade: str | None = None) -> str:
    parts = []
    for index, (cell, room) in enumerate(zip(cells, widths, strict=True)):
        if room == 0:
            continue
        last = index == len(cells) - 1
        text = shorten(cell, room) if last else shorten(cell, room).ljust(room)
        parts.append(paint(text, shade, colour=True) if index == _STATE and shade is not None else text)
    return (" " * _GAP).join(parts)


def shorten(text: str, room: int) -> str:
    """Make text fit: of a path its last part if that fits, otherwise both ends (names differ in either)."""
    if len(text) <= room:
        return text
    tail = text.rpartition("/")[2]
    if 0 < len(tail) <= room:
        return tail
    right = (room - 2) // 2
    return f"{text[: room - 2 - right]}..{text[-right:]}"


def wrap(text: str, width: int, first: str = "  ", rest: str = "    ") -> list[str]:
    """Clean text in lines of this width, with indentations."""
    import textwrap  # noqa: PLC0415 - only needed when something is not well

    # Names of GPUs and models have hyphens, and are copied from here.
    return textwrap.wrap(
        clean(text), max(20, width), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def paint(text: str, shade: str, colour: bool) -> str:
    """Text in a colour, if the terminal takes one."""
    return f"\x1b[{shade}m{text}\x1b[0m" if colour else text


def known(value: object) -> str:
    """A value, or the sign for what is not known."""
    return "-" if value is None else str(value)


def _kv(kv: Document) -> str:
    usage, total, free = kv["usage"], kv["total_blocks"], kv["free_blocks"]
    if usage is None and total and free is not None:
        usage = (total - free) / total
    if usage is None:
        return "-"
    stale = kv["age_s"] is not None and kv["age_s"] > _STALE_S
    return f"{usage:.0%}{'?' if stale else ''}"


def _requests(requests: Document) -> str:
    if requests["running"] is None and requests["waiting"] is None:
        return "-"
    return f"{known(requests['running'])}+{known(requests['waiting'])}"


def _gpu_memory(memory: Document) -> str:
    """In use, and how fast it grows or shrinks."""
    used, creep = memory["gpu_mib"], memory["gpu_creep_mib_per_h"]
    if used is None:
        return "-"
    pace = "" if creep is None or abs(creep) < _PACE_MIN_MIB else f" {creep:+.0f}M/h"
    return f"{used / 1024:.1f}G{pace}"


def _age(stamp: str | None, now: float) -> str:
    return "-" if stamp is None else duration(now - _epoch(stamp))


def _epoch(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
