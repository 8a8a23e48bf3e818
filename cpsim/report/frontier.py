"""Where the best strategy changes: a map over any two of sequence length, GPUs, documents, network and heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cpsim.errors import CpsimError, NotMeasuredError
from cpsim.prediction.results import REFUSALS, Refusal
from cpsim.prediction.shortlist import NEAR, Shortlist, shortlist
from cpsim.report.axes import Around, Spot
from cpsim.report.lengths import best_of_strategies
from cpsim.report.page import folded, table
from cpsim.report.words import least_lacking, ms_text, percent_text, strategy_label
from cpsim.units import format_count

if TYPE_CHECKING:
    from cpsim.prediction.results import Advice, Column
    from cpsim.report.figures import Figure
    from cpsim.runtime.processes import Progress

MAP_CAPTION: Final = (
    "What `cpsim advise` recommends in each cell, forward and backward, with all strategies and settings tried anew. "
    f"Hatched: another strategy is within {percent_text(NEAR - 1)} and cannot be told from it. Cells without a "
    "strategy say why, here and below. Hover for settings, ties and reasons; the outlined cell is the case. Given "
    "documents are scaled."
)
SMALLEST: Final = 8
"""Letters in cells, which are all as small as the narrowest needs, but not smaller than this [px]."""
BLANKS: Final[dict[Refusal | None, tuple[str, str]]] = {
    "does_not_fit": ("#475569", "x"),
    "not_measured": ("#94a3b8", "."),
    "cannot": ("#cbd5e1", ""),
    None: ("#e2e8f0", "-"),
}
"""Colour and pattern of cells without an answer, by why; the first that holds of a strategy is the cell's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The answer of one cell."""

    spot: Spot
    strategy: str = ""
    """Empty where none can run."""
    label: str = ""
    """The strategy with its settings."""
    time_s: float = float("nan")
    """Forward and backward."""
    tied: tuple[str, ...] = ()
    """Others that cannot be told from it, with their settings."""
    is_close: bool = False
    """Whether one of these is another strategy."""
    stands_in: str | None = None
    """The kernel whose answer this is, where that of the case was not measured."""
    kind: Refusal | None = None
    """Why there is no answer."""
    reason: str = ""


def best_in(spot: Spot, first: Sequence[str]) -> Cell:
    """The best way to run one cell, which is that of ``advise``.

    Args:
        spot: one of ``Around.spots``.
        first: strategies that are probably fast.
    """
    if spot.scenario is None:
        return Cell(spot=spot, kind="cannot", reason=spot.note)
    try:
        found = shortlist(spot.scenario, first)
    except CpsimError as error:
        return Cell(
            spot=spot, kind="not_measured" if isinstance(error, NotMeasuredError) else "cannot", reason=str(error)
        )
    best = found.recommended
    if best is None:
        return _blank(spot, found)
    others = [one for one in found.tied if one is not best]
    return Cell(
        spot=spot,
        strategy=str(best.scenario.strategy),
        label=strategy_label(best.scenario),
        time_s=best.total_s,
        tied=tuple(f"{strategy_label(one.scenario)} {ms_text(one.total_s)} ms" for one in others),
        is_close=any(one.scenario.strategy != best.scenario.strategy for one in others),
        stands_in=found.stands_in,
    )


def _blank(spot: Spot, found: Shortlist) -> Cell:
    """A cell that nothing can run: what is lacking least is why."""
    why = least_lacking(found.refused)
    return Cell(spot=spot, kind=why.kind, reason=f"{strategy_label(why.scenario)}: {why.reason}")


def likely(advice: Advice) -> list[str]:
    """Strategies of a recommendation, fastest first: they are tried first in cells around its case."""
    return [str(best.scenario.strategy) for best in best_of_strategies(advice)]


def predict_cells(advice: Advice, progress: Progress | None = None) -> list[Cell]:
    """The map around the case of a recommendation, on all cores."""
    from cpsim.runtime.processes import mapped

    spots = Around(scenario=advice.scenario).spots()
    return mapped(partial(best_in, first=likely(advice)), spots, None, progress)


def cell_columns(around: Around, found: Sequence[Cell]) -> dict[str, Column]:
    """Cells as columns, in SI units."""
    right, up = around.values
    places: dict[str, list[Any]] = {
        around.across: [right[cell.spot.at[0]] for cell in found],
        around.up: [up[cell.spot.at[1]] for cell in found],
    }
    answers = {
        "strategy": [cell.strategy for cell in found],
        "label": [cell.label for cell in found],
        "time_s": [cell.time_s for cell in found],
        "tied": ["; ".join(cell.tied) for cell in found],
        "kind": [cell.kind or "" for cell in found],
        "reason": [cell.reason for cell in found],
    }
    return {name: np.array(values) for name, values in (places | answers).items()}


def frontier(around: Around, found: Sequence[Cell]) -> Figure:
    """The map, as far as its cells are found: a colour for every best strategy, with its time.

    Args:
        around: the whole map.
        found: the cells that are answered, in any order.
    """
    from cpsim.report.figures import house
    from cpsim.strategies import STRATEGIES

    data = [
        _trace(around, name, [cell for cell in found if cell.strategy == name])
        for name in STRATEGIES
        if any(cell.strategy == name for cell in found)
    ]
    blanks = [cell for cell in found if not cell.strategy]
    data += [_blank_trace(kind, some) for kind in BLANKS if (some := [cell for cell in blanks if cell.kind == kind])]
    axes = {
        name: _ticks(axis.title, map(axis.text, values))
        for name, axis, values in zip(("xaxis", "yaxis"), around.axes, around.values, strict=True)
    }
    layout = house(190 + 62 * len(around.values[1])) | axes | {"barmode": "overlay", "bargap": 0}
    layout["uniformtext"] = {"minsize": SMALLEST, "mode": "show"}
    return {"data": data or [{"type": "bar", "x": [], "y": []}], "layout": layout | {"shapes": _outline(around)}}


def blanks_html(around: Around, found: Sequence[Cell]) -> str:
    """Why cells have no answer, folded; nothing where all have one."""
    blanks = [cell for cell in found if not cell.strategy]
    if not blanks:
        return ""
    rows = [(_at(around, cell), REFUSALS[cell.kind].replace(" ", "\u00a0"), cell.reason) for cell in blanks]
    title = f"Cells without an answer: {len(blanks)}, each with its reason"
    return folded(title, table(("cell", "what", "why"), rows, num_text=3))


def _at(around: Around, cell: Cell) -> str:
    """Where a cell is, in words."""
    return ", ".join(
        f"{axis.title}: {axis.text(values[place])}"
        for axis, values, place in zip(around.axes, around.values, cell.spot.at, strict=True)
    )


def _trace(around: Around, name: str, here: Sequence[Cell]) -> dict[str, Any]:
    """Cells in which one strategy is the best."""
    from cpsim.report.figures import ink_on, strategy_colour

    ground = strategy_colour(name)
    ink = ink_on(ground)
    shapes = ["/" if cell.is_close else "" for cell in here]
    marker = _marker(ground, shapes)
    texts = [f"<b>{escape(name)}</b><br>{ms_text(cell.time_s)} ms" for cell in here]
    hover = [_cell_text(around, cell) for cell in here]
    return _tiles(name, here, marker, texts, hover) | {"textfont": {"color": ink, "size": 12}}


def _blank_trace(kind: Refusal | None, here: Sequence[Cell]) -> dict[str, Any]:
    """Cells without an answer of one kind."""
    from cpsim.report.figures import ink_on

    ground, shape = BLANKS[kind]
    marker = _marker(ground, [shape] * len(here))
    hover = [f"{REFUSALS[kind]}: {_wrapped(cell.reason)}" for cell in here]
    texts = [REFUSALS[kind].replace(" ", "<br>", 1)] * len(here)
    return _tiles(REFUSALS[kind], here, marker, texts, hover) | {"textfont": {"color": ink_on(ground), "size": 12}}


def _marker(ground: str, shapes: Sequence[str]) -> dict[str, Any]:
    """The look of cells of a colour, with a faint pattern or none on each."""
    from cpsim.report.figures import ink_on

    pattern = {"shape": list(shapes), "bgcolor": ground, "fgcolor": ink_on(ground), "fgopacity": 0.3, "size": 9}
    return {"color": ground, "line": {"color": "white", "width": 2}, "pattern": pattern | {"solidity": 0.15}}


def _tiles(name: str, here: Sequence[Cell], marker: Any, texts: Sequence[str], hover: Sequence[str]) -> dict[str, Any]:
    """Cells as bars of one unit on each side."""
    return {
        "type": "bar",
        "name": name,
        "width": 1.0,
        "x": [cell.spot.at[0] for cell in here],
        "y": [1.0] * len(here),
        "base": [cell.spot.at[1] - 0.5 for cell in here],
        "marker": marker,
        "text": list(texts),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "inside",
        "customdata": list(hover),
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _ticks(title: str, texts: Iterable[str]) -> dict[str, Any]:
    from cpsim.report.figures import titled

    labels = list(texts)
    return titled(
        title,
        range=[-0.5, len(labels) - 0.5],
        showgrid=False,
        zeroline=False,
        fixedrange=True,
        tickvals=list(range(len(labels))),
        ticktext=labels,
    )


def _outline(around: Around) -> list[dict[str, Any]]:
    """A frame around the case itself, where it is a cell."""
    own = {"tokens": around.scenario.num_tokens, "gpus": around.scenario.gpus, "kv_heads": around.scenario.kv_heads}
    own |= {"network": 1}
    places = [
        list(values).index(own[name]) if name in own and own[name] in values else None
        for name, values in zip((around.across, around.up), around.values, strict=True)
    ]
    if None in places:
        return []
    x, y = (float(place or 0) for place in places)
    corners = {"x0": x - 0.47, "x1": x + 0.47, "y0": y - 0.46, "y1": y + 0.46}
    return [{"type": "rect", "line": {"width": 3}, **corners}]


def _cell_text(around: Around, cell: Cell) -> str:
    """What a cell says when one points at it."""
    lines = [_at(around, cell), *([escape(cell.spot.note)] if cell.spot.note else [])]
    lines.append(f"<b>{escape(cell.label)}</b>: {ms_text(cell.time_s)} ms")
    if cell.stands_in:
        lines.append(f"not measured: estimated from kernel {escape(cell.stands_in)}")
    if cell.tied:
        lines.append("cannot be told from it:")
        lines += [escape(one) for one in cell.tied[:6]]
        lines += [f"and {format_count(len(cell.tied) - 6)} more"] if len(cell.tied) > 6 else []
    return "<br>".join(lines)


def _wrapped(text: str, width: int = 60) -> str:
    """Escaped text in lines of so many letters."""
    from textwrap import wrap

    return "<br>".join(map(escape, wrap(text, width)))
