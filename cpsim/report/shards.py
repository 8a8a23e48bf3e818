"""A mask as a picture with the shards of the ranks drawn on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cpsim.masks import coarse_mask
from cpsim.report.figures import styled
from cpsim.report.masks import numbers
from cpsim.report.words import strategy_label
from cpsim.stripes import striped_positions

if TYPE_CHECKING:
    from cpsim.masks import Ints
    from cpsim.prediction import Candidate, Column
    from cpsim.schedule import Schedule
    from cpsim.workload import Workload

SIZE: Final = 200
"""Cells of the picture on each side."""
PLAIN: Final = [[0, "rgba(148,163,184,0.10)"], [0.001, "#bfdbfe"], [1, "#1d4ed8"]]
CHOSEN: Final = [[0, "rgba(234,88,12,0.18)"], [0.001, "#fdba74"], [1, "#c2410c"]]
"""Colours of rows of chosen ranks."""


def shard_columns(schedule: Schedule) -> dict[str, Column]:
    """Ranges of queries that every rank holds, ``rank``, ``first`` and ``end``, in positions.

    Positions are tokens, or those of striped orders (``cpsim.stripes``); of groups of heads the first group's.
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


def shards(workload: Workload, schedule: Schedule, ranks: Sequence[int]) -> Any:
    """The mask, queries from top to bottom and keys to the right, with a strip that says which rank holds what.

    Args:
        workload: whose mask it is.
        schedule: of a strategy that runs it.
        ranks: whose queries are drawn in another colour.
    """
    total = workload.num_tokens
    size = min(SIZE, total)
    edges = np.arange(size) * total // size
    share = coarse_mask(workload.slices(), total, size).astype(np.float32)
    owner = owners(schedule, edges)
    made = make_subplots(
        rows=2, cols=2, shared_xaxes=True, shared_yaxes=True, column_widths=[0.035, 0.965], row_heights=[0.035, 0.965],
        horizontal_spacing=0.01, vertical_spacing=0.01,
    )  # fmt: skip
    strip = {"colorscale": "Turbo", "showscale": False, "zmin": 0, "zmax": max(1, schedule.num_ranks - 1)}
    made.add_trace(go.Heatmap(z=owner[:, None], y=edges, x=[0], hovertemplate=_HELD, **strip), 2, 1)
    made.add_trace(go.Heatmap(z=owner[None, :], x=edges, y=[0], hovertemplate=_HELD_KEYS, **strip), 1, 2)
    chosen = np.isin(owner, list(ranks))[:, None]
    for rows, colours in ((~chosen, PLAIN), (chosen, CHOSEN)):
        made.add_trace(
            go.Heatmap(
                z=np.where(rows, share, np.float32(np.nan)), x=edges, y=edges, zmin=0, zmax=1,
                colorscale=colours, showscale=False, hoverongaps=False,
                hovertemplate="query %{y:,}, key %{x:,}: %{z:.1%} unmasked<extra></extra>",
            ), 2, 2,
        )  # fmt: skip
    made.update_yaxes(autorange="reversed", showgrid=False, zeroline=False)
    made.update_xaxes(showgrid=False, zeroline=False)
    for row, column in ((2, 1), (1, 2), (1, 1)):
        made.update_xaxes(showticklabels=False, row=row, col=column)
    made.update_yaxes(showticklabels=False, row=1)
    made.update_yaxes(title="query [tokens]", row=2, col=1)
    made.update_xaxes(title="key [tokens]", row=2, col=2)
    return styled(made, 700)


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
