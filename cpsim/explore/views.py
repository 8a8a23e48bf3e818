"""What the page shows of one answer: for every view its figures and tables, its columns, and what they mean."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from dash import html

from cpsim.comparison import compare, group_key, predict_runs
from cpsim.explore.controls import Control, State, given_ranks, shown_strategy, state_of
from cpsim.report import figures, measured, memory, shards
from cpsim.report.frontier import MAP_CAPTION, cell_columns, cells, frontier
from cpsim.report.lengths import best_of_strategies
from cpsim.report.words import case_text, interval_text, ms_text, percent_text, strategy_label
from cpsim.units import format_bytes

if TYPE_CHECKING:
    from cpsim.explore.answers import Answers
    from cpsim.prediction import Advice, Candidate, Column
    from cpsim.runs import Run
    from cpsim.scenario import Scenario

PLOTS: Final = ("plot", "plot-2")
"""Places for figures; a view fills as many as it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one view shows."""

    plots: tuple[Any, ...] = ()
    caption: str = ""
    below: Any = ()
    """Dash components under the figures."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """The view's data, in SI units."""
    scenario: Scenario
    """The case, with the strategy that the view is about."""


def pieces(state: State, advice: Advice, answers: Answers) -> tuple[int, int]:
    """How many pieces of the view are there, and of how many."""
    if state.get("view") != "map":
        return 1, 1
    job = answers.frontier(advice, str(state.get("page")))
    return len(job.done), len(job.pieces)


def make(state: State, advice: Advice, answers: Answers, runs: Sequence[Run], known: Sequence[Control]) -> View:
    """The view that the page is at.

    Raises:
        ScenarioError: the page asks for something that is not there.
    """
    match state.get("view"):
        case "map":
            return _map(state, advice, answers)
        case "measured":
            return _measured(advice, runs, known)
        case "timeline" | "memory" | "mask" as name:
            chosen = _chosen(state, advice)
            if chosen is None:
                return View(scenario=advice.scenario, caption=_why_not(state, advice))
            of_one = {"timeline": _timeline, "memory": _memory, "mask": _mask}[name]
            return of_one(state, advice, answers.details(chosen))
        case _:
            return _ranking(advice)


def csv_text(columns: Mapping[str, Column]) -> str:
    """Columns as CSV with a line of names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return text.getvalue()


def notes(advice: Advice) -> Any:
    """What a reader must know before relying on the answer."""
    return html.Ul([html.Li(note) for note in advice.notes]) if advice.notes else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], num_text: int) -> Any:
    """A table; columns from ``num_text`` on are numbers."""
    side = ["" if i < num_text else "n" for i in range(len(head))]
    top = html.Tr([html.Th(cell, className=kind) for cell, kind in zip(head, side, strict=True)])
    lines = [html.Tr([html.Td(cell, className=kind) for cell, kind in zip(row, side, strict=True)]) for row in rows]
    return html.Div(html.Table([html.Thead(top), html.Tbody(lines)]), className="scroll")


def _ranking(advice: Advice) -> View:
    head = ("strategy", "forward ms", "backward ms", "total ms", "90 % interval", "TFLOP/s a GPU", "exposed", "memory",
            "P(best)")  # fmt: skip
    rows = [
        (
            strategy_label(one.scenario), ms_text(one.forward.time_s), ms_text(one.backward.time_s),
            ms_text(one.total_s), interval_text(one.total_s_low, one.total_s_high), f"{one.tflops_per_gpu:,.0f}",
            percent_text(one.exposed_share), format_bytes(one.peak_memory_bytes), percent_text(one.probability_best),
        )
        for one in advice.candidates
    ]  # fmt: skip
    cannot = [(strategy_label(entry.scenario), entry.reason) for entry in advice.infeasible]
    below = [_table(head, rows, 1)] if rows else []
    if cannot:
        below += [html.H2("Cannot run"), _table(("strategy", "why"), cannot, 2)]
    best = best_of_strategies(advice)
    return View(
        plots=(figures.bars_of(best),) if best else (),
        caption="Every strategy with its best settings; the table below has them all. Attention of one layer.",
        below=below,
        columns=advice.columns(),
        scenario=advice.scenario,
    )


def _map(state: State, advice: Advice, answers: Answers) -> View:
    found = answers.frontier(advice, str(state.get("page"))).done
    return View(
        plots=(frontier(cells(advice.scenario), found),), caption=MAP_CAPTION, columns=cell_columns(found),
        scenario=advice.scenario,
    )  # fmt: skip


def _chosen(state: State, advice: Advice) -> Candidate | None:
    """The candidate whose details are shown: the best settings of the strategy that was chosen."""
    name = shown_strategy(state)
    return next((one for one in advice.candidates if name in (None, one.scenario.strategy)), None)


def _why_not(state: State, advice: Advice) -> str:
    name = shown_strategy(state)
    reasons = [f"{name} cannot run: {one.reason}" for one in advice.infeasible if one.scenario.strategy == name]
    return reasons[0] if reasons else f"{name or 'No strategy'} is not among those that could be tried yet."


def _timeline(state: State, advice: Advice, chosen: Candidate) -> View:
    ranks = given_ranks(state, advice.scenario.gpus) or figures.shown_ranks(chosen)
    figure, words = figures.timeline(chosen, ranks)
    rows = [
        {"pass": pass_, **row}
        for prediction in (chosen.forward, chosen.backward)
        for pass_, timeline in prediction.timelines.items()
        for row in timeline.rows(ranks)
    ]
    return View(
        plots=(figure,), caption=f"{strategy_label(chosen.scenario)}: {words}. Drag to zoom, double-click to reset.",
        columns=_transposed(rows), scenario=_of(advice, chosen),
    )  # fmt: skip


def _memory(state: State, advice: Advice, chosen: Candidate) -> View:
    del state
    limit = advice.scenario.resolve_cluster().gpu.memory_bytes
    caption = (
        "Above: most bytes on one GPU, what kernels work with included, every strategy with its best settings. "
        f"Below: the buffers of {strategy_label(chosen.scenario)} on its fullest GPU; all are there for the whole pass."
    )
    return View(
        plots=(memory.peaks(advice, limit), memory.buffers(chosen)), caption=caption,
        columns=memory.buffer_columns(chosen), scenario=_of(advice, chosen),
    )  # fmt: skip


def _mask(state: State, advice: Advice, chosen: Candidate) -> View:
    workload, schedule = advice.scenario.workload(), chosen.forward.timelines["fwd"].schedule
    ranks = given_ranks(state, advice.scenario.gpus) or figures.shown_ranks(chosen)
    caption = shards.caption(workload, chosen, ranks)
    return View(
        plots=(shards.shards(workload, schedule, ranks),), caption=caption, columns=shards.shard_columns(schedule),
        scenario=_of(advice, chosen),
    )  # fmt: skip


def _measured(advice: Advice, runs: Sequence[Run], known: Sequence[Control]) -> View:
    mine = [run for run in runs if group_key(run.scenario) == group_key(advice.scenario)]
    pairs = compare(predict_runs(mine, jobs=1), mine).pairs
    caption = "Real runs of this very case, none of which was fitted: our executor and other people's code."
    if not pairs:
        caption = f"Nobody has run this case for real: {case_text(advice.scenario)}."
    links = {_link(run.scenario, known): case_text(run.scenario) for run in runs if _can_show(run.scenario)}
    below = [html.H2("Cases with real runs"), html.Ul([html.Li(html.A(text, href=to)) for to, text in links.items()])]
    if not runs:
        below = [html.P("No runs were found: start with `cpsim explore --runs FOLDER`.")]
    return View(
        plots=(measured.measured(pairs),) if pairs else (), caption=caption, below=below,
        columns=measured.measured_columns(pairs), scenario=advice.scenario,
    )  # fmt: skip


def _can_show(scenario: Scenario) -> bool:
    return scenario.implementation == "cpsim" and scenario.pass_ == "fwd_bwd" and scenario.protocol == "synced"


def _link(scenario: Scenario, known: Sequence[Control]) -> str:
    state = state_of(scenario.model_copy(update={"strategy": None}))
    written = {control.name: state[control.name] for control in known if state[control.name] != ""}
    return "?" + urlencode(written | {"view": "measured"})


def _of(advice: Advice, chosen: Candidate) -> Scenario:
    return advice.scenario.model_copy(update={"strategy": chosen.scenario.strategy, "knobs": chosen.scenario.knobs})


def _transposed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    import numpy as np

    return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}
