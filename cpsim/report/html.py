"""The report: one HTML file that holds everything it shows, plotly included, and opens offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpsim.report import figures, front, views
from cpsim.report.axes import Around
from cpsim.report.frontier import Cell
from cpsim.report.page import figure, table
from cpsim.report.words import documents_text, knobs_text, recommendation
from cpsim.runtime.files import write

if TYPE_CHECKING:
    from cpsim.prediction.results import Advice, Prediction
    from cpsim.prediction.runs import Run


def write_report(
    path: Path, advice: Advice, lengths: Sequence[Prediction], best: Sequence[Cell] = (), runs: Sequence[Run] = ()
) -> None:
    """Write the report of a recommendation: what ``cpsim explore`` shows, and other sequence lengths.

    Args:
        path: file to write.
        advice: the recommendation.
        lengths: predictions of the same candidates at several sequence lengths.
        best: the map of best strategies around the case; none leaves it out.
        runs: real runs, among which those of the case are looked for; none leaves them out.
    """
    write(path, report_html(advice, lengths, best, runs))


def report_html(
    advice: Advice, lengths: Sequence[Prediction], best: Sequence[Cell] = (), runs: Sequence[Run] = ()
) -> str:
    """The report as text; see ``write_report``."""
    sections = [*_views(advice, best, runs)]
    if lengths:
        sections.append(("Other sequence lengths", "lengths", _lengths(lengths)))
    sections.append(("Scenario", "scenario", _scenario(advice)))
    return front.answered_page(
        f"cpsim: {advice.scenario.cluster}, {advice.scenario.gpus} GPUs",
        "Which context-parallel strategy?",
        advice.scenario,
        recommendation(advice, brief=True),
        front.front_html(advice),
        sections,
        advice.notes,
        known=bool(advice.candidates),
        with_plots=bool(advice.candidates),
    )


def _views(advice: Advice, best: Sequence[Cell], runs: Sequence[Run]) -> Iterator[tuple[str, str, str]]:
    """Sections with the views of the explorer: their titles, ids and HTML."""
    ranking = views.ranking(advice)
    if ranking.plots:
        yield "Why", "why", figure(ranking.plots[0], "why", ranking.caption)
    yield "Alternatives", "alternatives", ranking.below
    chosen = advice.recommended
    if chosen is None:
        return
    if best:
        yield views.TITLES["map"], "map", views.view_html("map", views.best_map(Around(scenario=advice.scenario), best))
    yield views.TITLES["timeline"], "timeline", views.view_html("timeline", views.timeline(chosen, ()))
    yield views.TITLES["memory"], "memory", views.view_html("memory", views.memory_use(advice, chosen))
    yield views.TITLES["mask"], "mask", views.view_html("mask", views.mask(advice.scenario, chosen, ()))
    if runs:
        yield views.TITLES["measured"], "measured", views.view_html("measured", views.measured(advice.scenario, runs))


def _lengths(lengths: Sequence[Prediction]) -> str:
    caption = (
        "The same case with fewer and more tokens on every GPU, every strategy with the knobs that are best "
        "for the case. Drawn documents are drawn anew with the same seed, given ones are scaled. Bands: 90 % "
        "intervals. A strategy has no point where it cannot run."
    )
    return figure(figures.lengths(lengths), "lengths", caption)


def _scenario(advice: Advice) -> str:
    fields = advice.scenario.to_dict() | {"documents": documents_text(advice.scenario)}
    words = ((name, knobs_text(v) if isinstance(v, dict) else str(v)) for name, v in fields.items())
    return table(("field", "value"), [(name, value) for name, value in words if value], num_text=2)
