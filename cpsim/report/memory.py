"""Where the memory goes: peaks of all candidates, and the buffers of one."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cpsim.report.figures import BACKWARD, FORWARD, blank, styled
from cpsim.report.lengths import best_of_strategies
from cpsim.report.words import strategy_label

if TYPE_CHECKING:
    from cpsim.prediction import Advice, Candidate, Column

GB: Final = 1e9


def peaks(advice: Advice, limit_bytes: int) -> Any:
    """Peak memory of every strategy with its best knobs beside that of the GPU.

    Args:
        advice: whose candidates are shown.
        limit_bytes: memory of a GPU.
    """
    best = best_of_strategies(advice)
    labels = [escape(strategy_label(candidate.scenario)) for candidate in best]
    made = blank()
    for name, colour in (("forward", FORWARD), ("backward", BACKWARD)):
        made.add_bar(
            y=labels,
            x=[getattr(candidate, name).peak_memory_bytes / GB for candidate in best],
            name=name,
            orientation="h",
            marker_color=colour,
            hovertemplate="%{y}: " + name + " %{x:.3g} GB<extra></extra>",
        )
    fullest = max((candidate.peak_memory_bytes for candidate in best), default=0)
    if fullest > limit_bytes / 4:  # further away the line would squeeze the bars
        made.add_vline(x=limit_bytes / GB, line_dash="dash", annotation_text="memory of the GPU")
    made.update_xaxes(title=f"memory of attention on the fullest GPU [GB], of {limit_bytes / GB:.0f} GB")
    made.update_yaxes(autorange="reversed", automargin=True)
    return styled(made, 150 + 42 * len(best))


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


def buffers(candidate: Candidate) -> Any:
    """The buffers of ``buffer_columns``, one bar a pass, stacked."""
    columns = buffer_columns(candidate)
    words = {"fwd": "forward", "bwd": "backward"}
    made = blank()
    for name in dict.fromkeys(columns["buffer"].tolist()):
        of_name = columns["buffer"] == name
        made.add_bar(
            y=[words[pass_] for pass_ in columns["pass"][of_name].tolist()],
            x=(columns["nbytes"][of_name] / GB).tolist(),
            name=escape(name),
            orientation="h",
            hovertemplate=escape(name) + ": %{x:.3g} GB in %{y}<extra></extra>",
        )
    made.update_layout(barmode="stack")
    made.update_xaxes(title="buffers on the fullest GPU [GB]")
    made.update_yaxes(autorange="reversed")
    return styled(made, 320)
