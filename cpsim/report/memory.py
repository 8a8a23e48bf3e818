"""Where the memory goes: peaks of all candidates, and the buffers of one."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cpsim.report.figures import BACKWARD, FORWARD, Figure, bar_label, house, rows_height, titled
from cpsim.report.lengths import best_of_strategies
from cpsim.report.words import strategy_label

if TYPE_CHECKING:
    from cpsim.prediction.results import Advice, Candidate, Column

GB: Final = 1e9


def peaks(advice: Advice, limit_bytes: int) -> Figure:
    """Peak memory of every strategy with its best knobs beside that of the GPU.

    Args:
        advice: whose candidates are shown.
        limit_bytes: memory of a GPU.
    """
    best = best_of_strategies(advice)
    labels = [bar_label(strategy_label(candidate.scenario)) for candidate in best]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "marker": {"color": colour},
            "x": [getattr(candidate, name).peak_memory_bytes / GB for candidate in best],
            "hovertemplate": "%{y}: " + name + " %{x:.3g} GB<extra></extra>",
        }
        for name, colour in (("forward", FORWARD), ("backward", BACKWARD))
    ]
    fullest = max((candidate.peak_memory_bytes for candidate in best), default=0)
    far = fullest <= limit_bytes / 4  # the line would squeeze the bars
    axes = {"xaxis": titled("memory [GB]"), "yaxis": {"autorange": "reversed", "automargin": True}}
    return {
        "data": data,
        "layout": house(150 + rows_height(labels, 42)) | axes | ({} if far else limit(limit_bytes / GB)),
    }


def limit(x: float) -> dict[str, Any]:
    """A line at the memory of the GPU."""
    words = {"text": "memory of the GPU", "showarrow": False, "xanchor": "right", "yanchor": "bottom"}
    line = {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash"}}
    return {"shapes": [line], "annotations": [words | {"x": x, "y": 1, "yref": "paper"}]}


def buffer_columns(candidate: Candidate) -> dict[str, Column]:
    """Buffers of the fullest GPU in each pass, largest first.

    Returns:
        ``pass``, ``rank``, ``buffer`` and ``nbytes``; buffers of one name are one row.
    """
    rows: list[tuple[str, int, str, int]] = []
    for prediction in (candidate.forward, candidate.backward):
        for pass_, timeline in prediction.timelines.items():
            schedule = timeline.schedule
            rank = int(np.argmax(schedule.memory()))
            mine = schedule.buffer_rank == rank
            sizes = np.bincount(schedule.buffer_name[mine], weights=schedule.buffer_nbytes[mine])
            largest = np.argsort(-sizes, kind="stable")
            rows += [(pass_, rank, schedule.buffer_names[i], int(sizes[i])) for i in largest if sizes[i]]
    columns = list(zip(*rows, strict=True)) or [()] * 4
    return {name: np.array(column) for name, column in zip(("pass", "rank", "buffer", "nbytes"), columns, strict=True)}


def buffers(candidate: Candidate) -> Figure:
    """The buffers of ``buffer_columns``, a row for each, the largest above; passes beside each other."""
    columns = buffer_columns(candidate)
    largest: dict[str, int] = {}
    for name, nbytes in zip(columns["buffer"].tolist(), columns["nbytes"].tolist(), strict=True):
        largest[name] = max(nbytes, largest.get(name, 0))
    names = sorted(largest, key=lambda name: -largest[name])
    data = []
    for pass_, words, colour in (("fwd", "forward", FORWARD), ("bwd", "backward", BACKWARD)):
        of_pass = columns["pass"] == pass_
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": words,
                "y": [escape(name) for name in columns["buffer"][of_pass].tolist()],
                "x": (columns["nbytes"][of_pass] / GB).tolist(),
                "marker": {"color": colour},
                "hovertemplate": "%{y}: %{x:.3g} GB in " + words + "<extra></extra>",
            }
        )
    rows = {"categoryorder": "array", "categoryarray": [escape(name) for name in names], "dtick": 1}
    axes = {
        "xaxis": titled("size of a buffer [GB]"),
        "yaxis": rows | {"autorange": "reversed", "automargin": True},
    }
    return {"data": data, "layout": house(150 + 24 * len(names)) | axes}
