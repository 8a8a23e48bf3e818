"""The report: one HTML file that holds everything it shows, plotly included, and opens offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cpsim.report import figures, views
from cpsim.report.axes import Around
from cpsim.report.frontier import Cell
from cpsim.report.lengths import best_of_strategies
from cpsim.report.page import figure, page, table
from cpsim.report.words import case_text, documents_text, knobs_text, recommendation
from cpsim.runtime.files import write

if TYPE_CHECKING:
    from cpsim.prediction.results import Advice, Prediction
    from cpsim.prediction.runs import Run
    from cpsim.report.views import View

NUM_TIMELINES: Final = 2


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
    sections = [_heading(advice)]
    sections += [_section(name, found) for name, found in _views(advice, best, runs)]
    if lengths:
        sections.append(_lengths(lengths))
    sections.append(_scenario(advice))
    title = f"cpsim: {advice.scenario.cluster}, {advice.scenario.gpus} GPUs"
    return page(title, sections, with_plots=bool(advice.candidates))


def _views(advice: Advice, best: Sequence[Cell], runs: Sequence[Run]) -> Iterator[tuple[str, list[View]]]:
    """Views of the explorer by name; timelines are of several strategies."""
    yield "ranking", [views.ranking(advice)]
    if not advice.candidates:
        return
    if best:
        yield "map", [views.best_map(Around(scenario=advice.scenario), best)]
    yield "timeline", [views.timeline(one, ()) for one in best_of_strategies(advice)[:NUM_TIMELINES]]
    yield "memory", [views.memory_use(advice, advice.candidates[0])]
    yield "mask", [views.mask(advice.scenario, advice.candidates[0], ())]
    if runs:
        yield "measured", [views.measured(advice.scenario, runs)]


def _section(name: str, found: Sequence[View]) -> str:
    """Views under one title; the caption of several figures is under the last one, tables are below."""
    parts = [f"<h2>{views.TITLES[name]}</h2>"]
    for number, view in enumerate(found, 1):
        ids = [f"{name}-{number}" if len(found) > 1 else name, f"{name}-below"][: len(view.plots)]
        captions = [""] * (len(view.plots) - 1) + [view.caption]
        parts += [figure(*plot) for plot in zip(view.plots, ids, captions, strict=False)]
        parts += [f"<p class=muted>{escape(view.caption)}</p>"] if view.caption and not view.plots else []
        parts.append(view.below)
    return "".join(parts)


def _heading(advice: Advice) -> str:
    kind = "lead" if advice.candidates else "lead none"
    notes = "".join(f"<li>{escape(note)}</li>" for note in advice.notes)
    known = f'<h2>Know this before you rely on it</h2><ul class="notes">{notes}</ul>' if notes else ""
    return (
        f"<h1>Which context-parallel strategy?</h1><p class=muted>{escape(case_text(advice.scenario))}</p>"
        f'<p class="{kind}">{escape(recommendation(advice))}</p>{known}'
    )


def _lengths(lengths: Sequence[Prediction]) -> str:
    caption = (
        "The same case with fewer and more tokens on every GPU, every strategy with the knobs that are best "
        "for the case. Drawn documents are drawn anew with the same seed, given ones are scaled. Bands: 90 % "
        "intervals. A strategy has no point where it cannot run."
    )
    return f"<h2>Other sequence lengths</h2>{figure(figures.lengths(lengths), 'lengths', caption)}"


def _scenario(advice: Advice) -> str:
    fields = advice.scenario.to_dict() | {"documents": documents_text(advice.scenario)}
    words = ((name, knobs_text(v) if isinstance(v, dict) else str(v)) for name, v in fields.items())
    rows = [(name, value) for name, value in words if value]
    return f"<h2>Scenario</h2>{table(('field', 'value'), rows, num_text=2)}"
