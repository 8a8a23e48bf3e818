"""The report: one HTML file that holds everything it shows, plotly included, and opens offline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cpsim.report import figures
from cpsim.report.lengths import best_of_strategies
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
    from cpsim.prediction import Advice, Candidate, Prediction

NUM_TIMELINES: Final = 2
STYLE: Final = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #111827; background: #f8fafc; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.5rem 5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; }
.lead { font-size: 1.15rem; background: #ecfdf5; border-left: 4px solid #059669; padding: .9rem 1.1rem; }
.none { background: #fef2f2; border-color: #dc2626; }
.muted, figcaption { color: #6b7280; font-size: .9rem; } figure { margin: .6rem 0 1.4rem; }
.card { background: white; border: 1px solid #e5e7eb; border-radius: 8px; padding: .8rem 1rem; }
.card { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; white-space: nowrap; font-size: .82rem; color: #6b7280; }
th { border-bottom: 2px solid #e5e7eb; }
th, td { padding: .4rem .6rem; vertical-align: top; } td { border-bottom: 1px solid #f1f5f9; }
.n { text-align: right; white-space: nowrap; } tr.best td { background: #f0fdf4; font-weight: 600; }
.notes { background: #fffbeb; border-left: 4px solid #d97706; padding: .8rem 2.2rem; }
.notes li { margin: .3rem 0; }
"""


def write_report(path: Path, advice: Advice, lengths: Sequence[Prediction]) -> None:
    """Write the report of a recommendation.

    Args:
        path: file to write.
        advice: the recommendation.
        lengths: predictions of the same candidates at several sequence lengths.
    """
    path.write_text(report_html(advice, lengths), encoding="utf-8")


def report_html(advice: Advice, lengths: Sequence[Prediction]) -> str:
    """The report as text; see ``write_report``."""
    sections = [_heading(advice)]
    if advice.candidates:
        sections += [_ranking(advice), _timelines(advice)]
    if lengths:
        sections.append(_lengths(lengths))
    if advice.infeasible:
        sections.append(_infeasible(advice))
    sections.append(_scenario(advice))
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>cpsim: {escape(advice.scenario.cluster)}, {advice.scenario.gpus} GPUs</title>"
        f"<style>{STYLE}</style>{_plotly() if advice.candidates else ''}</head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def _figure(made: Any, name: str, caption: str) -> str:
    plot = made.to_html(
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        div_id=name,
        config={"displaylogo": False, "responsive": True},
    )
    return f'<figure class="card">{plot}<figcaption>{escape(caption)}</figcaption></figure>'


def _heading(advice: Advice) -> str:
    kind = "lead" if advice.candidates else "lead none"
    notes = "".join(f"<li>{escape(note)}</li>" for note in advice.notes)
    known = f'<h2>Know this before you rely on it</h2><ul class="notes">{notes}</ul>' if notes else ""
    return (
        f"<h1>Which context-parallel strategy?</h1><p class=muted>{escape(case_text(advice.scenario))}</p>"
        f'<p class="{kind}">{escape(recommendation(advice))}</p>{known}'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], num_text: int, best: bool = False) -> str:
    """A table of escaped cells; columns from ``num_text`` on are numbers; ``best`` marks the first row."""
    side = [""] * num_text + [' class="n"'] * (len(head) - num_text)
    top = "".join(f"<th{s}>{escape(cell)}</th>" for s, cell in zip(side, head, strict=True))
    lines = [
        f"<tr{' class=best' if best and i == 0 else ''}>"
        + "".join(f"<td{s}>{escape(cell)}</td>" for s, cell in zip(side, row, strict=True))
        + "</tr>"
        for i, row in enumerate(rows)
    ]
    return f'<div class="card"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


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
    bars = _figure(figures.bars(advice), "bars", caption)
    return f"<h2>Ranking</h2>{_table(head, rows, num_text=2, best=True)}{bars}"


def shown_ranks(candidate: Candidate) -> list[int]:
    """A few ranks for a timeline: the first two, a middle one and the last."""
    last = candidate.scenario.gpus - 1
    return sorted({0, min(1, last), (last + 1) // 2, last})


def _timelines(advice: Advice) -> str:
    parts = ["<h2>What the GPUs do</h2>"]
    best = best_of_strategies(advice)[:NUM_TIMELINES]
    for number, candidate in enumerate(best, start=1):
        made, words = figures.timeline(candidate, shown_ranks(candidate))
        caption = f"{strategy_label(candidate.scenario)}: {words}."
        parts.append(_figure(made, f"timeline-{number}", caption))
    return "".join(parts)


def _lengths(lengths: Sequence[Prediction]) -> str:
    caption = (
        "The same case with fewer and more tokens on every GPU, every strategy with the knobs that are best "
        "for the case. Drawn documents are drawn anew with the same seed, given ones are scaled. Bands: 90 % "
        "intervals. A strategy has no point where it cannot run."
    )
    return f"<h2>Other sequence lengths</h2>{_figure(figures.lengths(lengths), 'lengths', caption)}"


def _infeasible(advice: Advice) -> str:
    rows = [(strategy_label(entry.scenario), entry.reason) for entry in advice.infeasible]
    return f"<h2>Cannot run</h2>{_table(('strategy', 'why'), rows, num_text=2)}"


def _scenario(advice: Advice) -> str:
    fields = advice.scenario.to_dict() | {"documents": documents_text(advice.scenario)}
    words = ((name, knobs_text(v) if isinstance(v, dict) else str(v)) for name, v in fields.items())
    rows = [(name, value) for name, value in words if value]
    return f"<h2>Scenario</h2>{_table(('field', 'value'), rows, num_text=2)}"
