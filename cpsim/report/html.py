"""The report: one HTML file that holds everything it shows, plotly included, and opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cpsim.report import figures, memory, shards
from cpsim.report.frontier import MAP_CAPTION, Cell, cells, frontier
from cpsim.report.lengths import best_of_strategies
from cpsim.report.page import figure, page, table
from cpsim.report.words import (
    case_text,
    documents_text,
    interval_text,
    knobs_text,
    ms_text,
    percent_text,
    recommendation,
    strategy_label,
)
from cpsim.units import format_bytes

if TYPE_CHECKING:
    from cpsim.prediction import Advice, Prediction

NUM_TIMELINES: Final = 2


def write_report(
    path: Path, advice: Advice, lengths: Sequence[Prediction], best: Sequence[Cell] = ()
) -> None:  # fmt: skip
    """Write the report of a recommendation.

    Args:
        path: file to write.
        advice: the recommendation.
        lengths: predictions of the same candidates at several sequence lengths.
        best: the map of best strategies around the case; none leaves it out.
    """
    path.write_text(report_html(advice, lengths, best), encoding="utf-8")


def report_html(advice: Advice, lengths: Sequence[Prediction], best: Sequence[Cell] = ()) -> str:
    """The report as text; see ``write_report``."""
    sections = [_heading(advice)]
    if advice.candidates:
        sections += [_ranking(advice), _timelines(advice), _mask(advice), _memory(advice)]
    if best:
        sections.append(_frontier(advice, best))
    if lengths:
        sections.append(_lengths(lengths))
    if advice.infeasible:
        sections.append(_infeasible(advice))
    sections.append(_scenario(advice))
    title = f"cpsim: {advice.scenario.cluster}, {advice.scenario.gpus} GPUs"
    return page(title, sections, with_plots=bool(advice.candidates))


def _heading(advice: Advice) -> str:
    kind = "lead" if advice.candidates else "lead none"
    notes = "".join(f"<li>{escape(note)}</li>" for note in advice.notes)
    known = f'<h2>Know this before you rely on it</h2><ul class="notes">{notes}</ul>' if notes else ""
    return (
        f"<h1>Which context-parallel strategy?</h1><p class=muted>{escape(case_text(advice.scenario))}</p>"
        f'<p class="{kind}">{escape(recommendation(advice))}</p>{known}'
    )


def _ranking(advice: Advice) -> str:
    head = (
        "", "strategy", "forward ms", "backward ms", "total ms", "90 % interval", "TFLOP/s a GPU", "exposed",
        "memory", "P(best)",
    )  # fmt: skip
    rows = [
        (
            str(rank),
            strategy_label(candidate.scenario),
            ms_text(candidate.forward.time_s),
            ms_text(candidate.backward.time_s),
            ms_text(candidate.total_s),
            interval_text(candidate.total_s_low, candidate.total_s_high),
            f"{candidate.tflops_per_gpu:,.0f}",
            percent_text(candidate.exposed_share),
            format_bytes(candidate.peak_memory_bytes),
            percent_text(candidate.probability_best),
        )
        for rank, candidate in enumerate(advice.candidates, start=1)
    ]
    caption = (
        "Attention of one layer. Exposed: share of the time in which the slowest GPU communicates or waits "
        "for data and computes nothing. Memory: most bytes of buffers on one GPU. P(best): share of draws of "
        "all cost parameters in which the strategy is the fastest."
    )
    bars = figure(figures.bars(advice), "bars", caption)
    return f"<h2>Ranking</h2>{table(head, rows, num_text=2, best=True)}{bars}"


def _timelines(advice: Advice) -> str:
    parts = ["<h2>What the GPUs do</h2>"]
    best = best_of_strategies(advice)[:NUM_TIMELINES]
    for number, candidate in enumerate(best, start=1):
        made, words = figures.timeline(candidate, figures.shown_ranks(candidate))
        caption = f"{strategy_label(candidate.scenario)}: {words}."
        parts.append(figure(made, f"timeline-{number}", caption))
    return "".join(parts)


def _mask(advice: Advice) -> str:
    chosen = advice.candidates[0]
    schedule = chosen.forward.timelines["fwd"].schedule
    workload, ranks = advice.scenario.workload(), figures.shown_ranks(chosen)
    made = figure(shards.shards(workload, schedule, ranks), "mask", shards.caption(workload, chosen, ranks))
    return f"<h2>Mask and shards</h2>{made}"


def _memory(advice: Advice) -> str:
    peaks = memory.peaks(advice, advice.scenario.resolve_cluster().gpu.memory_bytes)
    best = advice.candidates[0]
    above = "Most bytes on one GPU, every strategy with its best settings; what kernels work with counts, too."
    below = f"The buffers of {strategy_label(best.scenario)} on its fullest GPU; all are there for the whole pass."
    bars = figure(peaks, "memory", above) + figure(memory.buffers(best), "buffers", below)
    return f"<h2>Memory</h2>{bars}"


def _frontier(advice: Advice, best: Sequence[Cell]) -> str:
    made = figure(frontier(cells(advice.scenario), best), "map", MAP_CAPTION)
    return f"<h2>Where the best strategy changes</h2>{made}"


def _lengths(lengths: Sequence[Prediction]) -> str:
    caption = (
        "The same case with fewer and more tokens on every GPU, every strategy with the knobs that are best "
        "for the case. Drawn documents are drawn anew with the same seed, given ones are scaled. Bands: 90 % "
        "intervals. A strategy has no point where it cannot run."
    )
    return f"<h2>Other sequence lengths</h2>{figure(figures.lengths(lengths), 'lengths', caption)}"


def _infeasible(advice: Advice) -> str:
    rows = [(strategy_label(entry.scenario), entry.reason) for entry in advice.infeasible]
    return f"<h2>Cannot run</h2>{table(('strategy', 'why'), rows, num_text=2)}"


def _scenario(advice: Advice) -> str:
    fields = advice.scenario.to_dict() | {"documents": documents_text(advice.scenario)}
    words = ((name, knobs_text(v) if isinstance(v, dict) else str(v)) for name, v in fields.items())
    rows = [(name, value) for name, value in words if value]
    return f"<h2>Scenario</h2>{table(('field', 'value'), rows, num_text=2)}"
