"""Tables that fit a terminal: columns that matter least are left out, and what is still too wide is stacked.

A cell is never cut. Of rows that are too wide for any choice of columns, the last words stand in a line of their own;
tables whose columns are all needed break lines between words, and become lists where even that is too wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column as Words
from rich.table import Table
from rich.text import Text

KEPT: Final = 9
GAP: Final = 2
"""Cells between columns."""


class Worded(Table):
    """A table that cuts no word: a column is as wide as its longest one or wider; where that does not fit, rows are
    lists of headers and cells."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows as lists."""
        ranges = [self._range(console, options, column) for column in self.columns]
        room = options.max_width - GAP * (len(ranges) - 1)
        if sum(least for least, _ in ranges) > room:
            yield from self._lists(console)
            return
        for column, width in zip(self.columns, _shared(ranges, room), strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _range(self, console: Console, options: ConsoleOptions, column: Words) -> tuple[int, int]:
        """The least width of a column, and what it would take in full; numbers stay whole."""
        wide = options.update(width=1000)
        heads = [Measurement.get(console, wide, column.header)] * self.show_header
        cells = [Measurement.get(console, wide, cell) for cell in column.cells]
        whole = column.justify == "right"
        least = [*(one.minimum for one in heads), *(one.maximum if whole else one.minimum for one in cells)]
        most = max((one.maximum for one in (*heads, *cells)), default=1)
        return most if column.no_wrap else max(least, default=1), most

    def _lists(self, console: Console) -> RenderResult:
        names = [console.render_str(str(column.header)).plain for column in self.columns]
        rows = zip(*(column.cells for column in self.columns), strict=True)
        for row in rows:
            first, *rest = (cell if isinstance(cell, Text) else console.render_str(str(cell)) for cell in row)
            words = [f"{name} {cell.plain}".strip() for name, cell in zip(names[1:], rest, strict=True) if cell.plain]
            yield Text(first.plain, style="bold")
            yield Padding(Text("; ".join(words).replace("\n", " ")), (0, 0, 0, GAP))


def _shared(ranges: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Widths of columns: those that need least are given it first."""
    widths = [least for least, _ in ranges]
    left = room - sum(widths)
    order = sorted(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0])
    for done, i in enumerate(order):
        more = min(ranges[i][1] - ranges[i][0], left // (len(order) - done))
        widths[i] += more
        left -= more
    return widths


def table(*columns: tuple[str, str]) -> Table:
    """An empty table in the house style; columns are (header, "left" or "right")."""
    made = Worded(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for header, side in columns:
        made.add_column(header, justify="right" if side == "right" else "left", header_style="bold dim")
    return made


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    header: str
    side: str = "right"
    worth: int = 0
    """Columns of less worth are left out first; those of worth ``KEPT`` never."""
    stacks: bool = False
    """Whether its cells move below the first words where the table is too wide even so."""
    breaks: bool = False
    """Whether what stands in brackets goes to the next line before any column is left out, rather than after."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A table that looks at the width of the terminal."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str]
    """Of every row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The columns that fit."""
        yield self.table(options.max_width)

    def table(self, width: int) -> Table:
        """The table for so many cells."""
        shown, rows = self.chosen(width)
        made = table(*((self.columns[i].header, self.columns[i].side) for i in shown))
        for column in made.columns:
            column.no_wrap = True
        for row, style in zip(rows, self.styles, strict=True):
            made.add_row(*(Text(row[i]) for i in shown), style=style)
        return made

    def chosen(self, width: int) -> tuple[list[int], list[list[str]]]:
        """Columns that are shown, and the cells of all rows, some of them with others below."""
        shown, rows = list(range(len(self.columns))), [list(row) for row in self.rows]
        broken = False
        while self._width(shown, rows) > width:
            least = min(shown, key=lambda i: (self.columns[i].worth, i))
            words = next(i for i in shown if self.columns[i].side == "left")
            last = self.columns[least].worth == KEPT
            if not broken and (last or self.columns[words].breaks):
                rows, broken = _broken(rows, words), True
            elif not last:
                shown.remove(least)
            elif stacked := [i for i in shown if self.columns[i].stacks and i != words]:
                shown.remove(stacked[0])
                for row in rows:
                    row[words] = "\n".join(filter(None, (row[words], row[stacked[0]])))
            else:
                break
        return shown, rows

    def _width(self, shown: Sequence[int], rows: Sequence[Sequence[str]]) -> int:
        widths = (max(map(_wide, [self.columns[i].header, *(row[i] for row in rows)])) for i in shown)
        return sum(widths) + GAP * (len(shown) - 1)


def _broken(rows: Sequence[list[str]], words: int) -> list[list[str]]:
    """Rows in which what stands in brackets is below the words before it."""
    return [[cell.replace(" (", "\n(") if i == words else cell for i, cell in enumerate(row)] for row in rows]


def _wide(cell: str) -> int:
    """Cells of the longest line of a text."""
    return max(map(cell_len, cell.split("\n")))
