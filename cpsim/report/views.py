"""What there is to see of a recommendation: the same views for the report and for the explorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cpsim.case.resolve import cluster_of, workload_of
from cpsim.prediction.compare import compare, group_key, predict_runs
from cpsim.prediction.results import REFUSALS
from cpsim.report import figures, front, memory, shards
from cpsim.report.axes import Around
from cpsim.report.frontier import MAP_CAPTION, blanks_html, cell_columns, frontier
from cpsim.report.lengths import best_of_strategies
from cpsim.report.measured import measured as measured_figure
from cpsim.report.measured import measured_columns
from cpsim.report.page import Group, figure, folded, grouped_table, table
from cpsim.report.words import case_text, numbers_of, strategy_label
from cpsim.units import format_bytes

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario
    from cpsim.prediction.results import Advice, Candidate, Column, Infeasible
    from cpsim.prediction.runs import Run
    from cpsim.report.figures import Figure
    from cpsim.report.frontier import Cell

TITLES: Final = {
    "ranking": "Why and alternatives",
    "map": "Where it changes",
    "timeline": "Timeline",
    "memory": "Memory",
    "mask": "Mask",
    "measured": "Real runs",
    "paste": "Text to paste",
    "checked": "Checked",
}
"""All views by name, in their order."""
RANKING_HEAD: Final = (
    "strategy",
    "forward ms",
    "backward ms",
    "total ms",
    "90 % interval",
    "TFLOP/s a GPU",
    "exposed",
    "memory",
    "P(best)",
)
REASONS_HEAD: Final = ("strategy", "what", "why")
RANKING_CAPTION: Final = (
    "Attention of one layer, every strategy with all settings worth trying. Exposed: share of the time in which the "
    "slowest GPU communicates or waits for data and computes nothing. Memory: most bytes on one GPU. P(best): share of "
    "draws of all cost parameters in which it is the fastest. Highlighted: what is recommended."
)
NO_BREAK: Final = "\u00a0"
SLOW_S: Final = 0.1
"""From here on the time that planning a batch takes is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One thing to see."""

    plots: tuple[Figure, ...] = ()
    caption: str = ""
    below: str = ""
    """HTML under the figures: tables."""
    columns: Callable[[], Mapping[str, Column]] = dict
    """The view's data, in SI units."""
    chosen: Candidate | None = None
    """The strategy that the view is about, where it is about one."""


def view_html(name: str, view: View) -> str:
    """A view as a part of a report; the caption of several figures is under the last one, tables are below."""
    captions = [""] * (len(view.plots) - 1) + [view.caption]
    names = [name, f"{name}-below"][: len(view.plots)]
    parts = [figure(*plot) for plot in zip(view.plots, names, captions, strict=False)]
    parts += [f"<p class=muted>{escape(view.caption)}</p>"] if view.caption and not view.plots else []
    return "".join((*parts, view.below))


def ranking(advice: Advice) -> View:
    """Where the time of the fastest ways goes, every way with its interval and P(best), and why others cannot run."""
    best = best_of_strategies(advice)
    below = _alternatives(advice) if best else ""
    if advice.infeasible:
        count = len(advice.infeasible)
        below += folded(f"Not ranked: {count}, each with its reason", _reasons(advice.infeasible), is_open=not best)
    if not best:
        return View(below=below, columns=advice.columns)
    chosen = advice.recommended or best[0]
    return View(
        plots=(front.why(best[: front.WHY]),), caption=front.path_text(chosen), below=below, columns=advice.columns
    )


def _reasons(refused: Sequence[Infeasible]) -> str:
    """Why strategies cannot run; those with one reason in one row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in refused:
        what = REFUSALS[one.kind].replace(" ", NO_BREAK)
        alike.setdefault((what, one.reason), []).append(strategy_label(one.scenario))
    return table(REASONS_HEAD, [(", ".join(names), *why) for why, names in alike.items()], num_text=3)


def _alternatives(advice: Advice) -> str:
    """The ranking, those that cannot be told from the fastest first."""
    tied = [one for one in advice.candidates if any(one is other for other in advice.tied)]
    later = [one for one in advice.candidates if not any(one is other for other in tied)]
    several = len(tied) > 1
    groups = [_group(advice, tied, "Cannot be told from the fastest" * several)]
    groups += [_group(advice, later, "Slower" * several)] if later else []
    return f"<p class=muted>{escape(RANKING_CAPTION)}</p>{grouped_table(RANKING_HEAD, groups, num_text=1)}"


def _group(advice: Advice, some: Sequence[Candidate], title: str) -> Group:
    best = next((i for i, one in enumerate(some) if one is advice.recommended), None)
    colours = [figures.strategy_colour(str(one.scenario.strategy)) for one in some]
    return Group(title=title, rows=[_ranked(one) for one in some], colours=colours, best=best)


def _ranked(one: Candidate) -> tuple[str, ...]:
    planning = max(one.forward.planning_s, one.backward.planning_s)
    planned = f", planned in {planning:.1f} s" if planning >= SLOW_S else ""
    return strategy_label(one.scenario) + planned, *numbers_of(one)


def best_map(around: Around, found: Sequence[Cell]) -> View:
    """The best strategy of every cell of a map, as far as cells are found."""
    return View(
        plots=(frontier(around, found),),
        caption=MAP_CAPTION,
        below=blanks_html(around, found),
        columns=lambda: cell_columns(around, found),
    )


def timeline(chosen: Candidate, ranks: Sequence[int]) -> View:
    """What some GPUs do, stream by stream; a few that matter where no ranks are given."""
    ranks = ranks or figures.shown_ranks(chosen)
    figure, words = figures.timeline(chosen, ranks)
    caption = f"{strategy_label(chosen.scenario)}: {words}. Drag to zoom, double-click to reset."
    return View(plots=(figure,), caption=caption, columns=lambda: _op_columns(chosen, ranks), chosen=chosen)


def _op_columns(chosen: Candidate, ranks: Sequence[int]) -> dict[str, Column]:
    rows: list[dict[str, Any]] = [
        {"pass": pass_, **row}
        for prediction in (chosen.forward, chosen.backward)
        for pass_, found in prediction.timelines.items()
        for row in found.rows(ranks)
    ]
    return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def memory_use(advice: Advice, chosen: Candidate) -> View:
    """Peaks of all strategies, and the buffers of one."""
    limit = cluster_of(advice.scenario).gpu.memory_bytes
    caption = (
        f"Above: most bytes on one GPU of {format_bytes(limit)}, what kernels work with included, every strategy with "
        f"its best settings. Below: the buffers of {strategy_label(chosen.scenario)} on its fullest GPU; all are there "
        "for the whole pass."
    )
    return View(
        plots=(memory.peaks(advice, limit), memory.buffers(chosen)),
        caption=caption,
        columns=lambda: memory.buffer_columns(chosen),
        chosen=chosen,
    )


def mask(scenario: Scenario, chosen: Candidate, ranks: Sequence[int]) -> View:
    """The mask as a picture, with who holds which queries and keys."""
    workload, schedule = workload_of(scenario), chosen.forward.timelines["fwd"].schedule
    ranks = ranks or figures.shown_ranks(chosen)
    return View(
        plots=(shards.shards(workload, schedule, ranks),),
        caption=shards.caption(workload, chosen, ranks),
        columns=lambda: shards.shard_columns(schedule),
        chosen=chosen,
    )


def measured(scenario: Scenario, runs: Sequence[Run]) -> View:
    """Predictions beside real runs of the same case, however they were computed."""
    mine = [run for run in runs if group_key(run.scenario) == group_key(scenario)]
    pairs = compare(predict_runs(mine, jobs=1), mine).pairs
    if not pairs:
        return View(caption=f"Nobody has run this case for real: {case_text(scenario)}.")
    caption = "Real runs of this very case, none of which was fitted: our executor and other people's code."
    return View(plots=(measured_figure(pairs),), caption=caption, columns=lambda: measured_columns(pairs))
