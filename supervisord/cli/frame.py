"""One picture of `status --watch`: the view, how numbers went lately, and the last events, in a screen of this size.

Pure: what is drawn depends on the arguments alone. The foot stays where it is, whatever happens above it.
"""

from __future__ import annotations

from collections import deque

from supervisord.cli import render, render_status
from supervisord.cli.render import BOLD, DIM, RED, cell, clip, columns, pad, paint, shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Final

    Document = dict[str, Any]
    Moment = tuple[float, float | None, float | None, float | None, float | None]
    """When; free KV blocks, all of them, tokens a second, MiB of memory."""

WINDOW_S: Final = 300.0
BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII: Final = "_.-=+*%#"
"""The same for terminals that do not speak UTF-8."""
EVENTS_MAX: Final = 12
_EVENTS_FIRST: Final = 3
_SAMPLE_EVERY_S: Final = 1.0
_NAME_MAX: Final = 16
_CELLS_MAX: Final = 40
_VALUE: Final = 7
_IDLE_RATE: Final = 10.0
"""Tokens a second: canaries and the like draw no mountain."""
_STEADY_MIB: Final = 512.0
"""Less growth than this, the margin of the creep rules, draws no mountain."""
_SEVERITIES: Final = {"critical": RED, "error": RED, "warning": render.YELLOW}


class History:
    """Samples of the engines for as long as somebody watches, at most one a second."""

    def __init__(self) -> None:
        self._moments: dict[str, deque[Moment]] = {}
        self._last = float("-inf")
        self.on_gpus = False

    def add(self, document: Document, now: float) -> None:
        """Remember what a document says; `now` is monotonic."""
        if now - self._last < _SAMPLE_EVERY_S:
            return
        self._last = now
        engines = document["engines"]
        self.on_gpus = any(engine["gpus"] for engine in engines)
        self._moments = {engine["name"]: self._moments.get(engine["name"], deque()) for engine in engines}
        for engine in engines:
            kv, memory = engine["kv"], engine["memory"]
            mib = memory["gpu_mib"] if self.on_gpus else memory["host_mib"]
            moments = self._moments[engine["name"]]
            moments.append((now, kv["free_blocks"], kv["total_blocks"], engine["tokens_per_s"], mib))
            while moments[0][0] < now - WINDOW_S:
                moments.popleft()

    def lines(self, names: Sequence[str], now: float, *, width: int, colour: bool, marks: str) -> list[str]:
        """Return a header and a line for each of these engines."""
        room = min(_NAME_MAX, max(columns(title) for title in (*names, _TITLE)))
        each = (width - room) // len(_METRICS) - 2
        cells = max(1, min(_CELLS_MAX, each - 1 - _VALUE))
        size = cells + 1 + _VALUE
        titles = ["KV FREE", "TOKENS/S", "GPU MEM" if self.on_gpus else "HOST MEM"]
        lines = [paint(f"{pad(_TITLE, room)}  {'  '.join(pad(title, size) for title in titles)}", BOLD, colour)]
        for name in names:
            moments = self._moments.get(name, ())
            parts = [pad(_spark(moments, now, cells, marks, *metric), size) for metric in _METRICS]
            lines.append(f"{pad(shorten(name, room), room)}  {'  '.join(parts)}".rstrip())
        return lines


def _spark(
    moments: Sequence[Moment] | deque[Moment],
    now: float,
    cells: int,
    marks: str,
    place: int,
    bounds: Callable[[list[float], Moment], tuple[float, float]],
    written: Callable[[float], str],
) -> str:
    """Cells of equal time, the newest last, then the value now. Cells begin at whole multiples: they only shift."""
    size_s = WINDOW_S / cells
    newest = int(now // size_s)
    found: dict[int, float] = {}
    for moment in moments:
        value = moment[place]
        if value is not None:
            found[newest - int(moment[0] // size_s)] = value
    if not found:
        return pad("", cells) + " -"
    low, high = bounds(list(found.values()), moments[-1])
    span = high - low
    flat = not 0.0 < span < float("inf")  # also where the numbers are larger than they are exact
    picture = ""
    for back in range(cells - 1, -1, -1):
        value = found.get(back)
        share = 0.0 if value is None or flat else (value - low) / span
        picture += " " if value is None else marks[max(0, min(len(marks) - 1, int(share * len(marks))))]
    last = moments[-1][place]
    return f"{picture} {'-' if last is None else written(last)}"


def _of_pool(values: list[float], last: Moment) -> tuple[float, float]:
    return 0.0, last[2] or max(values)


def _from_zero(values: list[float], _: Moment) -> tuple[float, float]:
    return 0.0, max(_IDLE_RATE, *values)


def _of_growth(values: list[float], _: Moment) -> tuple[float, float]:
    low = min(values)
    return low, max(low + _STEADY_MIB, *values)


_TITLE: Final = f"LAST {WINDOW_S / 60:.0f} MIN"
_METRICS: Final = (
    (1, _of_pool, "{:.0f}".format),
    (3, _from_zero, "{:.0f}".format),
    (4, _of_growth, lambda mib: f"{mib / 1024:.2f}G"),
)


def frame(
    document: Document,
    history: History,
    events: Sequence[Document],
    trouble: str | None,
    *,
    size: tuple[int, int],
    colour: bool,
    marks: str,
    times: tuple[float, float],
) -> list[str]:
    """At most as many lines as the screen has. `size`: columns and rows; `times`: monotonic and epoch seconds.

    `trouble`: why nothing newer is known.
    """
    (width, rows), (now, wall) = size, times
    room = rows - 1
    body = _body(document, trouble, room, width=width, colour=colour, wall=wall)
    names = [engine["name"] for engine in document["engines"] if engine["pid"] is not None]
    told = min(len(events), EVENTS_MAX)
    left = room - len(body)
    first = min(told, _EVENTS_FIRST, max(0, left - 2))
    left -= first + 2 if first else 0
    sparks: list[str] = []
    if names and left >= 3:  # noqa: PLR2004 (a blank, a header and an engine)
        sparks = ["", *history.lines(names[: left - 2], now, width=width, colour=colour, marks=marks)]
        left -= len(sparks)
    shown = first + max(0, min(told - first, left)) if first else 0
    lines = [*body, *sparks]
    below = ["", paint("EVENTS", BOLD, colour), *_events(events[-shown:], width, colour)] if shown else []
    gap = room - len(lines) - len(below)
    return [*lines, *[""] * gap, *below, paint(_foot(document, width, wall), DIM, colour)][:rows]


def _body(document: Document, trouble: str | None, room: int, *, width: int, colour: bool, wall: float) -> list[str]:
    """What fits above the events: second lines go first, then the details of what is wrong, then who needs nobody."""
    alarm = [] if trouble is None else [paint(line, RED, colour) for line in render.wrap(trouble, width, "", "  ")]
    for second, brief in ((True, False), (False, False), (False, True)):
        top = [*alarm, *render_status.top(document, width=width, colour=colour, now=wall, brief=brief), ""]
        body = [*top, *render_status.tables(document, width=width, colour=colour, now=wall, second=second)]
        if len(body) <= room - _EVENTS_FIRST - 2:
            return body
    if len(body) <= room:
        return body
    ordered = {**document, "engines": sorted(document["engines"], key=render_status.rest)}
    body = [*top, *render_status.tables(ordered, width=width, colour=colour, now=wall, second=False)]
    kept = max(0, room - 1)
    return [*body[:kept], f"... {len(body) - kept} more lines"]


def _foot(document: Document, width: int, wall: float) -> str:
    clock = f"{render.clock(wall)}, q ends"
    text = clip(render_status.node(document, wall), width - len(clock) - 2)
    return f"{pad(text, width - len(clock))}{clock}"


def _events(events: Sequence[Document], width: int, colour: bool) -> list[str]:
    """Local times and sentences, the newest last."""
    lines = []
    for event in events:
        at = render.local(event["at"])[len("2026-05-29 ") :]
        text = clip(cell(f"{at}  {event['message']}"), width)
        shade = _SEVERITIES.get(event["severity"], "")
        lines.append(paint(text, shade, colour and bool(shade)))
    return lines
