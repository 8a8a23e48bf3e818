"""A mask as a picture with the shards of the ranks drawn on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from plotly.colors import sequential

from cpsim.masks.slices import coarse_mask
from cpsim.masks.stripes import striped_positions
from cpsim.report.figures import Figure, house, titled
from cpsim.report.masks import numbers
from cpsim.report.words import strategy_label

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cpsim.case.workload import Workload
    from cpsim.masks.slices import Ints
    from cpsim.prediction.results import Candidate, Column
    from cpsim.schedule.schedule import Schedule

SIZE: Final = 200
"""Cells of the picture on each side."""
PLAIN: Final = [[0, "rgba(148,163,184,0.10)"], [0.001, "#bfdbfe"], [1, "#1d4ed8"]]
CHOSEN: Final = [[0, "rgba(234,88,12,0.18)"], [0.001, "#fdba74"], [1, "#c2410c"]]
"""Colours of rows of chosen ranks."""
RANKS: Final = [[i / (len(sequential.Turbo) - 1), colour] for i, colour in enumerate(sequential.Turbo)]
"""Colours from the first rank to the last."""


def shard_columns(schedule: Schedule) -> dict[str, Column]:
    """Ranges of queries that every rank holds, ``rank``, ``first`` and ``end``, in positions.

    Positions are tokens, or those of striped orders (``cpsim.masks.stripes``); of groups of heads the first group's.
    """
    queries = schedule.block_tensor[schedule.inputs[:, 1]] == schedule.block_tensors.index("q")
    buffers, blocks = schedule.inputs[queries].T
    limit = schedule.num_tokens // schedule.head_groups
    rows = [
        (rank, first, end)
        for rank, block in zip(schedule.buffer_rank[buffers].tolist(), blocks.tolist(), strict=True)
        for first, end in schedule.sets.of(int(schedule.block_set[block])).tolist()
        if first < limit
    ]
    table = np.array(sorted(rows, key=lambda row: row[1]), dtype=np.int64).reshape(-1, 3)
    return dict(zip(("rank", "first", "end"), table.T, strict=True))


def owners(schedule: Schedule, tokens: Ints) -> Ints:
    """The rank that holds the query of every token, in the shape of ``tokens``."""
    columns = shard_columns(schedule)
    positions = striped_positions(tokens, schedule.num_tokens, schedule.stride)
    return columns["rank"][np.searchsorted(columns["first"], positions, side="right") - 1]


def shards(workload: Workload, schedule: Schedule, ranks: Sequence[int]) -> Figure:
    """The mask, queries from top to bottom and keys to the right, with a strip that says which rank holds what.

    Args:
        workload: whose mask it is.
        schedule: of a strategy that runs it.
        ranks: whose queries are drawn in another colour.
    """
    total = workload.num_tokens
    size = min(SIZE, total)
    edges = np.arange(size) * total // size
    share = coarse_mask(workload.slices(), total, size).round(4)
    owner = owners(schedule, edges)
    tokens = edges.tolist()
    strip = {
        "type": "heatmap",
        "colorscale": RANKS,
        "showscale": False,
        "zmin": 0,
        "zmax": max(1, schedule.num_ranks - 1),
    }
    held = owner.tolist()
    left = {"z": [[rank] for rank in held], "y": tokens, "x": [0], "xaxis": "x", "yaxis": "y", "hovertemplate": _HELD}
    top = {"z": [held], "x": tokens, "y": [0], "xaxis": "x2", "yaxis": "y2", "hovertemplate": _HELD_KEYS}
    chosen = np.isin(owner, list(ranks))[:, None]
    masks = [
        {
            "type": "heatmap",
            "z": _cells(share, rows),
            "x": tokens,
            "y": tokens,
            "xaxis": "x2",
            "yaxis": "y",
            "zmin": 0,
            "zmax": 1,
            "colorscale": colours,
            "showscale": False,
            "hoverongaps": False,
            "hovertemplate": "query %{y:,}, key %{x:,}: %{z:.1%} unmasked<extra></extra>",
        }
        for rows, colours in ((~chosen, PLAIN), (chosen, CHOSEN))
    ]
    return {"data": [strip | left, strip | top, *masks], "layout": house(700, top=20) | _AXES}


def _cells(share: NDArray[np.float64], rows: NDArray[np.bool_]) -> list[list[float | None]]:
    """Shares of chosen rows, of the others nothing, which plotly draws as gaps."""
    return [line if wanted else [None] * len(line) for line, wanted in zip(share.tolist(), rows[:, 0], strict=True)]


def caption(workload: Workload, candidate: Candidate, ranks: Sequence[int]) -> str:
    """What ``shards`` shows, in words."""
    striped = candidate.forward.timelines["fwd"].schedule.stride > 1
    alternate = " Ranks alternate token by token; strips show the first token of each cell." * striped
    return (
        f"{numbers(workload)}. Strips: which rank of {strategy_label(candidate.scenario)} holds the queries and keys. "
        f"Orange: rows of ranks {', '.join(map(str, ranks))}.{alternate}"
    )


_HELD: Final = "queries from %{y:,} on: rank %{z}<extra></extra>"
_HELD_KEYS: Final = "keys from %{x:,} on: rank %{z}<extra></extra>"
_PLAIN_AXIS: Final = {"showgrid": False, "zeroline": False}
_STRIP: Final = _PLAIN_AXIS | {"showticklabels": False, "ticks": ""}
_AXES: Final = {
    "xaxis": _STRIP | {"domain": [0, 0.03], "anchor": "y"},
    "xaxis2": titled("key [tokens]", **_PLAIN_AXIS, domain=[0.04, 1], anchor="y"),
    "yaxis": titled(
        "query [tokens]", **_PLAIN_AXIS, domain=[0, 0.96], anchor="x", autorange="reversed", automargin=True
    ),
    "yaxis2": _STRIP | {"domain": [0.97, 1], "anchor": "x2"},
}
"""A strip to the left and one above; the mask shares its axes with both."""
