"""The ledger as tables, a page that opens offline, and a record for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.report.figures import PALETTE, house, log_axis
from cpsim.report.page import figure, folded, page, section
from cpsim.report.page import table as html_table
from cpsim.report.tables import table
from cpsim.report.words import signed_percent
from studies.public.findings import finding_lines, finding_of
from studies.public.ledger import GROUPS, Change, Compared, Ledger, Score, bars, portable, scores

HEAD: Final = ("rows", "mean", "signed", "worst", "inside", "sites differ by")
UNITS: Final = {"time": (1.0, "s"), "memory": (1e9, "GB")}
SYMBOLS: Final = {"time": "circle", "memory": "square-open"}
BAR: Final = {"steps, bf16, dense": 0.07, "steps, fp8, dense": 0.10, "steps, experts or fp4": 0.15, "memory": 0.06}
"""Largest mean errors that are aimed at."""


def ledger_view(found: Ledger, worst: int, change: Change | None) -> RenderableType:
    """Rows, worst first; errors by group; what is left out; what has changed."""
    parts: list[RenderableType] = [_rows(sorted(found.compared, key=lambda one: -abs(one.error))[:worst])]
    for what, by in GROUPS.items():
        for quantity in UNITS:
            some = found.of(quantity)  # type: ignore[arg-type]
            if some:
                parts += [Text(), _scores(f"{quantity} by {what}", scores(some, by))]
    parts += [Text(), _scores("bars", bars(found)), Text()]
    parts += [Text(line) for line in (*finding_lines(found.compared), *refused_lines(found))]
    if change is not None:
        parts += [Text(), Text(change_line(change))]
    return Group(*parts)


def _rows(some: Sequence[Compared]) -> RenderableType:
    made = table(
        ("row", "left"),
        ("what ran", "left"),
        ("published", "right"),
        ("predicted", "right"),
        ("error", "right"),
        ("", "left"),
    )
    for one in some:
        made.add_row(*row_cells(one))
    return made


def row_cells(one: Compared) -> tuple[str, ...]:
    """Key, name, published, predicted, error, and where it lies in the interval."""
    scale, unit = UNITS[one.quantity]
    where = {True: "inside", False: "far outside" if one.far else "outside", None: ""}[one.inside]
    return (
        one.row.key,
        one.row.name,
        f"{one.published / scale:.4g} {unit}",
        f"{one.predicted / scale:.4g} {unit}",
        signed_percent(one.error),
        where,
    )


def score_cells(found: Score) -> tuple[str, ...]:
    """As ``HEAD``."""
    percents = ["" if share is None else f"{100 * share:.0f} %" for share in (found.inside,)]
    floor = "" if found.floor is None else f"{100 * found.floor:.1f} %"
    return (
        str(found.rows),
        f"{100 * found.mean:.1f} %",
        signed_percent(found.signed),
        signed_percent(found.worst),
        *percents,
        floor,
    )


def _scores(what: str, found: Mapping[str, Score]) -> RenderableType:
    made = table((what, "left"), *((name, "right") for name in HEAD))
    for name, one in found.items():
        bar = f" (at most {100 * BAR[name]:.0f} %)" if what == "bars" and name in BAR else ""
        made.add_row(name + bar, *score_cells(one))
    return made


def refused_lines(found: Ledger) -> list[str]:
    """Rows without a prediction: how many of what kind, and why."""
    counted = Counter((row.kind, one.refusal, one.why) for row, one in found.refused)
    return [f"{count} of {kind}, {refusal}: {why}" for (kind, refusal, why), count in counted.items()]


def change_line(change: Change) -> str:
    """What has changed since the committed table."""
    return (
        f"since ledger.csv: {change.moved} errors moved, {change.new} new, {change.gone} gone; mean error of those in "
        f"both {100 * change.before:.2f} -> {100 * change.now:.2f} %"
    )


def ledger_record(found: Ledger, change: Change | None) -> dict[str, Any]:
    """All of it for machines: seconds, bytes, shares."""
    return {
        "rows": [_record(one) for one in found.compared],
        "refused": [
            _about(one.row) | {"refusal": one.refusal, "why": one.why}
            for one in (_Refused(row, why.refusal, why.why) for row, why in found.refused)
        ],
        "scores": {
            quantity: {
                what: {name: asdict(one) for name, one in scores(found.of(quantity), by).items()}  # type: ignore[arg-type]
                for what, by in GROUPS.items()
                if found.of(quantity)  # type: ignore[arg-type]
            }
            for quantity in UNITS
        },
        "bars": {name: asdict(one) for name, one in bars(found).items()},
        "changed": None if change is None else asdict(change),
    }


class _Refused:
    def __init__(self, row: Any, refusal: str, why: str) -> None:
        self.row, self.refusal, self.why = row, refusal, why


def _about(row: Any) -> dict[str, Any]:
    names = ("key", "kind", "name", "gpu", "gpus", "cp", "framework", "precision", "source")
    return {name: getattr(row, name) for name in names}


def _record(one: Compared) -> dict[str, Any]:
    numbers = ("quantity", "published", "predicted", "low", "high", "error", "inside", "said", "error_said", "floor")
    return (
        _about(one.row)
        | {name: getattr(one, name) for name in numbers}
        | {"far": one.far, "finding": (finding := finding_of(one)) and (finding.cause or f"open: {finding.about}")}
        | {"assumed": one.row.assumed, "ambiguous": one.row.ambiguous, "scenario": portable(one.row)}
    )


def ledger_html(found: Ledger, notes: Sequence[str]) -> str:
    """One scatter, tables, and what is not understood."""
    times = found.of("time")
    every = bars(found)
    lead = f"{len(found.compared)} published values of {len({one.row.key for one in found.compared})} rows, predicted"
    if times:
        share = every["all times"]
        lead += f": times {100 * share.mean:.1f} % off on average, {signed_percent(share.signed)} signed"
    sections = [f'<h1>Published runs, predicted</h1><p class="lead fact">{escape(lead)}.</p>']
    caption = "Time of a step or call; hover for the row. On the line, predicted and published agree."
    sections.append(figure(_scatter(times), "scatter", caption))
    rows = [(name, *score_cells(one)) for name, one in every.items()]
    sections.append(section("Errors", "errors", html_table(("what", *HEAD), rows, num_text=1)))
    lines = (*notes, *finding_lines(found.compared))
    sections.append(section("What is not understood", "open", "".join(f"<p>{escape(line)}</p>" for line in lines)))
    parts = []
    for what, by in GROUPS.items():
        rows = [(name, *score_cells(one)) for name, one in scores(times, by).items()] if times else []
        parts.append(f"<h3>By {escape(what)}</h3>" + html_table((what, *HEAD), rows, num_text=1))
    sections.append(section("Errors of times, by what ran", "groups", "".join(parts)))
    head = ("row", "what ran", "published", "predicted", "error", "in the interval")
    cells = [row_cells(one) for one in sorted(found.compared, key=lambda one: -abs(one.error))]
    rows_html = html_table(head, cells, num_text=2)
    sections.append(section("All values", "rows", folded(f"All {len(cells)} values, worst first", rows_html)))
    refused = "".join(f"<p class=muted>{escape(line)}</p>" for line in refused_lines(found))
    sections.append(section("Without a prediction", "refused", refused))
    links = {"Errors": "errors", "Not understood": "open", "By what ran": "groups", "All values": "rows"}
    return page(
        "cpsim: published runs, predicted", sections, with_plots=True, links=links | {"Not predicted": "refused"}
    )


def _scatter(some: Sequence[Compared]) -> Any:
    gpus = list(dict.fromkeys(one.row.gpu for one in some))
    data: list[dict[str, Any]] = []
    for i, gpu in enumerate(gpus):
        mine = [one for one in some if one.row.gpu == gpu]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": gpu,
                "x": [one.published for one in mine],
                "y": [one.predicted for one in mine],
                "text": [f"{escape(one.row.name)}<br>{signed_percent(one.error)}" for one in mine],
                "hovertemplate": "%{text}<br>published %{x:.4g} s, predicted %{y:.4g} s<extra></extra>",
                "marker": {"color": PALETTE[i % len(PALETTE)], "size": 8, "opacity": 0.75},
            }
        )
    if some:
        ends = [min(one.published for one in some) / 1.5, max(one.published for one in some) * 1.5]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": ends,
                "y": ends,
                "showlegend": False,
                "hoverinfo": "skip",
                "line": {"width": 1},
            }
        )
    axes = {
        "xaxis": log_axis("published [s]", [one.published for one in some]),
        "yaxis": log_axis("predicted [s]", [one.predicted for one in some]),
    }
    return {"data": data, "layout": house(620) | axes}
