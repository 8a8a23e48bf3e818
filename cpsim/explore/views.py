"""The view that a page is at: those of the report (``cpsim.report.views``), for the strategy and ranks chosen."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from cpsim.case.resolve import cluster_of
from cpsim.explore.controls import Control, State, shown_strategy, state_of
from cpsim.prediction.results import Advice
from cpsim.report import memory, step_page, validation, views
from cpsim.report.axes import Around
from cpsim.report.views import View
from cpsim.report.words import case_text, documents_text

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario
    from cpsim.explore.answers import Known
    from cpsim.prediction.results import Candidate, Column
    from cpsim.prediction.runs import Run
    from cpsim.prediction.step.opened import Opened
    from cpsim.prediction.step_advice import StepAdvice

PLOTS: Final = ("plot", "plot-2")
"""Places for figures; a view fills as many as it needs."""


def make_view(state: State, known: Known, runs: Sequence[Run], controls: Sequence[Control]) -> View:
    """The view that the page is at.

    Raises:
        ScenarioError: the page asks for something that is not there.
    """
    advice = known.advice
    match state.get("view"):
        case "checked":
            return checked_view()
        case "map":
            return views.best_map(around_of(state, advice.scenario), known.cells)
        case "measured":
            return _with_links(views.measured(advice.scenario, runs), advice.scenario, runs, controls)
        case "timeline" | "memory" | "mask" as name:
            if known.chosen is None:
                return View(caption=_why_not(state, advice))
            view: View = known.chosen
            if name == "memory":
                limit = cluster_of(advice.scenario).gpu.memory_bytes
                view = replace(view, plots=(memory.peaks(advice, limit), *view.plots[1:]))
            return view
        case _:
            ranking = views.ranking(advice)
            return replace(ranking, below=_offers(known) + ranking.below)


def checked_view(below: str = "") -> View:
    """Errors of everything that was compared; ``below`` is HTML under the figure."""
    columns = validation.validation_columns
    return View(plots=(validation.scatter(),), caption=validation.CAPTION, below=below, columns=columns)


def step_view(state: State, advice: StepAdvice, opened: Opened | None) -> View:
    """The view of a training step that the page is at; ``opened`` is what is recommended in time, where it is there."""
    match state.get("view"):
        case "checked":
            return checked_view(step_page.closest_html(advice))
        case "memory":
            return step_page.memory_view(advice)
        case "timeline":
            return step_page.timeline_view(opened, advice.scenario.gpus) if opened else View()
        case "paste":
            return step_page.paste(advice)
    why = step_page.time_view(advice)
    return replace(why, below=why.below + step_page.alternatives(advice))


def around_of(state: State, scenario: Scenario) -> Around:
    """The map that the page is at.

    Raises:
        ScenarioError: there is no such axis.
    """
    return Around(scenario=scenario, across=str(state.get("across")), up=str(state.get("up")))


def drawn(name: str, ranks: Sequence[int], chosen: Candidate) -> View:
    """A view of one strategy, ready to be sent from one process to another: without its data and timelines.

    Args:
        name: of ``cpsim.explore.answers.DETAILED``.
        ranks: those to show; a few that matter where there are none.
        chosen: the strategy, with its timelines.
    """
    forward, backward = (replace(one, timelines={}) for one in (chosen.forward, chosen.backward))
    view = _of_one(name, chosen, ranks)
    return replace(view, columns=dict, chosen=replace(chosen, forward=forward, backward=backward))


def data_of(name: str, ranks: Sequence[int], chosen: Candidate) -> str:
    """The data of the same view as CSV."""
    return csv_text(_of_one(name, chosen, ranks).columns())


def csv_text(columns: Mapping[str, Column]) -> str:
    """Columns as CSV with a line of names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return text.getvalue()


def chosen_case(advice: Advice, view: View) -> Scenario:
    """The case, with the strategy that the view is about."""
    if view.chosen is None:
        return advice.scenario
    chosen = view.chosen.scenario
    return advice.scenario.model_copy(update={"strategy": chosen.strategy, "knobs": chosen.knobs})


def _offers(known: Known) -> str:
    """Buttons for what is not tried unless somebody asks, as HTML."""
    words = " ".join(f'<button data-strategy="{escape(name)}">{escape(name)}</button>' for name in known.left_out)
    return f'<p class="muted ask">Not tried unless you ask, for the reasons below: {words}</p>' if words else ""


def _of_one(name: str, chosen: Candidate, ranks: Sequence[int]) -> View:
    """The view as far as one strategy knows it: peaks of memory are its own alone."""
    if name == "timeline":
        return views.timeline(chosen, ranks)
    if name == "mask":
        return views.mask(chosen.scenario, chosen, ranks)
    return views.memory_use(Advice(scenario=chosen.scenario, candidates=(chosen,), infeasible=(), notes=()), chosen)


def _why_not(state: State, advice: Advice) -> str:
    name = shown_strategy(state)
    reasons = [one.reason for one in advice.infeasible if one.scenario.strategy == name]
    return f"{name} cannot run: {reasons[0]}" if reasons else f"{name or 'No strategy'} has no answer yet."


def _with_links(view: View, here: Scenario, runs: Sequence[Run], controls: Sequence[Control]) -> View:
    """The view with links to all cases that were measured; those on the machine of this case are unfolded."""
    if not runs:
        return replace(view, below="<p>No runs were found: start with <code>cpsim explore --runs FOLDER</code>.</p>")
    links: dict[str, dict[str, str]] = {}
    for scenario in sorted((run.scenario for run in runs if _can_show(run.scenario)), key=_place):
        group = links.setdefault(_machine(scenario), {})
        group[_link(scenario, controls)] = f"{case_text(scenario)}; {documents_text(scenario)}"
    unfolded = _machine(here) if _machine(here) in links else next(iter(links), "")
    below = "".join(
        f"<details{' open' * (machine == unfolded)}><summary>{escape(machine)} ({len(group)})</summary><ul>"
        + "".join(f'<li><a href="{escape(to)}">{escape(text)}</a></li>' for to, text in group.items())
        + "</ul></details>"
        for machine, group in links.items()
    )
    return replace(view, below=f"{view.below}<h2>Cases with real runs</h2>{below}")


def _machine(scenario: Scenario) -> str:
    return f"{scenario.gpus} GPU{'s' * (scenario.gpus > 1)} of {scenario.cluster}, {scenario.kernel}"


def _place(scenario: Scenario) -> tuple[Any, ...]:
    """Sorts cases by machine, then by size."""
    return scenario.gpus, scenario.cluster, scenario.kernel, scenario.num_tokens, scenario.heads, scenario.mask_name


def _can_show(scenario: Scenario) -> bool:
    ours = scenario.implementation == "cpsim" and scenario.model is None
    return ours and scenario.pass_ == "fwd_bwd" and scenario.protocol == "synced"


def _link(scenario: Scenario, controls: Sequence[Control]) -> str:
    state = state_of(scenario.model_copy(update={"strategy": None}))
    written = {control.name: state[control.name] for control in controls if state[control.name] != ""}
    return "?" + urlencode(written | {"view": "measured"})
