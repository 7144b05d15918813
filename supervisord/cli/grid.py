"""Tables that fit: of several layouts the widest that there is room for; what it leaves out goes on second lines."""

from __future__ import annotations

from supervisord.cli.render import BOLD, DIM, columns, pad, paint, shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Final

    Row = dict[str, str]

UNKNOWN: Final = "-"
_GAP: Final = "  "
_INDENT: Final = "    "
_COMMA: Final = ", "
_NAME_MIN: Final = 8


class Table:
    """Headers and layouts by key; the first key of a layout is its name, which is shortened before a column is cut off.

    `said` has words for a cell on a second line, such as "pid {}"; a key without stays off it. A key that stands in a
    layout under another name (`same`) counts as shown.
    """

    def __init__(self, headers: Row, layouts: Sequence[Sequence[str]], said: Row, same: Row) -> None:
        self._headers = headers
        self._layouts = layouts
        self._said = said
        self._same = same

    def lines(
        self,
        rows: list[Row],
        shades: list[Row],
        *,
        width: int,
        colour: bool,
        second: bool = True,
        without: Sequence[str] = (),
    ) -> Iterator[str]:
        """Return the header, then each row; `shades` are colours of its cells. `second`: with second lines.

        `without`: columns that mean nothing here.
        """
        layout, widths = self._fit(rows, width, without)
        head = _GAP.join(pad(self._headers[key], room) for key, room in zip(layout, widths, strict=True))
        yield paint(head, BOLD, colour)
        shown = {*layout, *(self._same.get(key, key) for key in layout), *without}
        left = [key for key in self._said if key not in shown] if second else []
        for row, shade in zip(rows, shades, strict=True):
            cells = []
            for key, room in zip(layout, widths, strict=True):
                text = pad(shorten(row[key], room), room)
                cells.append(paint(text, shade.get(key, ""), colour and key in shade))
            yield _GAP.join(cells)
            told = [self._said[key].format(row[key]) for key in left if row[key] != UNKNOWN]
            yield from (paint(line, DIM, colour) for line in _packed(told, width))

    def _fit(self, rows: list[Row], width: int, without: Sequence[str]) -> tuple[list[str], list[int]]:
        for layout in self._layouts:
            keys = [key for key in layout if key not in without]
            widths = [max(columns(text) for text in (self._headers[key], *(row[key] for row in rows))) for key in keys]
            over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
            if over <= 0:
                return keys, widths
        widths[0] = max(min(_NAME_MIN, widths[0]), widths[0] - over)
        return keys, widths


def _packed(parts: list[str], width: int) -> Iterator[str]:
    """Parts in as few lines as they fit on; one that is longer than a line is shortened."""
    line = ""
    for part in parts:
        text = shorten(part, width - len(_INDENT))
        if line and columns(line) + len(_COMMA) + columns(text) > width:
            yield line
            line = ""
        line = f"{line}{_COMMA}{text}" if line else f"{_INDENT}{text}"
    if line:
        yield line
