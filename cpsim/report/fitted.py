"""Tables that fit a terminal: columns that matter least are left out, and what is still too wide is stacked.

A cell is never cut. Of rows that are too wide for any choice of columns, the last words stand in a line of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from cpsim.report.tables import table

GAP: Final = 2
"""Cells between columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    header: str
    side: str = "right"
    worth: int = 0
    """Columns of less worth are left out first; of worth 9 never."""
    stacks: bool = False
    """Whether its cells move to a line of their own where the table is too wide even so."""


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
        shown, stacked = self.chosen(width)
        made = table(*((self.columns[i].header, self.columns[i].side) for i in shown))
        for column in made.columns:
            column.no_wrap = True
        words_at = next((at for at, i in enumerate(shown) if self.columns[i].side == "left"), len(shown) - 1)
        for row, style in zip(self.rows, self.styles, strict=True):
            cells = [row[i] for i in shown]
            if stacked:
                cells[words_at] = "\n".join(filter(None, [cells[words_at], *(row[i] for i in stacked)]))
            made.add_row(*(Text(cell) for cell in cells), style=style)
        return made

    def chosen(self, width: int) -> tuple[list[int], list[int]]:
        """Columns that are shown, and those whose cells are stacked under the first words."""
        shown, stacked = list(range(len(self.columns))), list[int]()
        while self._width(shown, stacked) > width:
            least = min(shown, key=lambda i: (self.columns[i].worth, i))
            if self.columns[least].worth < 9:
                shown.remove(least)
                continue
            more = next((i for i in shown if self.columns[i].stacks and i != self._words(shown)), None)
            if more is None:
                break
            shown.remove(more)
            stacked.append(more)
        return shown, stacked

    def _words(self, shown: Sequence[int]) -> int:
        return next((i for i in shown if self.columns[i].side == "left"), -1)

    def _width(self, shown: Sequence[int], stacked: Sequence[int]) -> int:
        widths = {i: max(map(cell_len, [self.columns[i].header, *(row[i] for row in self.rows)])) for i in shown}
        first = self._words(shown)
        if stacked and first in widths:
            widths[first] = max(widths[first], *(cell_len(row[i]) for i in stacked for row in self.rows))
        return sum(widths.values()) + GAP * (len(shown) - 1)
