"""LongCA-bench's study as tables, figures like the paper's, and lines for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from math import isfinite
from typing import Any, Final

import numpy as np
from plotly.subplots import make_subplots
from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.report.figures import PALETTE, styled
from cpsim.report.page import figure, page
from cpsim.report.page import table as html_table
from cpsim.report.tables import table
from studies.longca.findings import DENSE, DOCUMENT, Finding, findings
from studies.longca.reproduce import MASKS, MECHANISMS, OURS, PASSES, THEIRS, Row, Study
from studies.magi.reproduce import published

NAMES: Final = {
    "ulysses": "Ulysses",
    "ring_p2p": "Ring P2P",
    "ring_allgather": "Ring All-Gather",
    "usp": "USP",
    "loongtrain": "LoongTrain",
    "hybrid_cp": "hybrid CP",
}
TITLES: Final = {
    "full": "FULL",
    "causal": "CAUSAL",
    "full_document": "FULL DOCUMENT",
    "causal_document": "CAUSAL DOCUMENT",
}
WORDS: Final = {"fwd": "forward", "bwd": "backward"}
HEAD: Final = ("GPUs", *NAMES.values())
LEGEND: Final = (
    "Lines are simulated, solid: LongCA-bench's code, dotted: our executor; means over samples. Hollow circles are "
    "published: the paper has no numbers, but MagiAttention has run the same mechanisms with code of its own on 8 to "
    "64 H100; its documents differ, and its times are those of the slowest rank. Hover for ranges and differences."
)


def study_view(study: Study) -> RenderableType:
    """Throughputs, what our executor gains, what cannot run and why, findings."""
    parts: list[RenderableType] = [Text("TFLOP/s per GPU: LongCA-bench's code, our executor in brackets", style="bold")]
    for mask in MASKS:
        for pass_ in PASSES:
            made = table(*((name, "right") for name in HEAD))
            for row in throughput_rows(study, mask, pass_):
                made.add_row(*row)
            parts += [Text(f"\n{TITLES[mask]}, {WORDS[pass_]}"), made]
    gains = table(("our executor over LongCA-bench", "left"), *((f"{m}, {p}", "right") for m, p in GAINS))
    for gain in gain_rows(study):
        gains.add_row(*gain)
    lines = [Text(f"\n{line}", style="dim") for line in reason_lines(study)]
    judged = table(("", "left"), ("finding", "left"), ("simulated", "left"))
    for finding in findings(study):
        judged.add_row("yes" if finding.holds else "NO", finding.claim, _found(finding))
    return Group(*parts, Text(), gains, *lines, Text(), judged)


def throughput_rows(study: Study, mask: str, pass_: str) -> Iterator[tuple[str, ...]]:
    """One row for every number of GPUs; X where a mechanism cannot run, as in the paper."""
    for n in study.gpus:
        cells = []
        for mechanism in MECHANISMS:
            theirs, ours = (_mean(study, n, mask, pass_, mechanism, code) for code in (THEIRS, OURS))
            both = f"{theirs:.0f} ({ours:.0f})" if isfinite(theirs) else f"({ours:.0f})"
            cells.append(both if isfinite(ours) else "X")
        yield str(n), *cells


def _mean(study: Study, gpus: int, mask: str, pass_: str, mechanism: str, code: str) -> float:
    """As ``Study.mean``; NaN where the code does not have the mechanism."""
    if mechanism == "hybrid_cp" and code == THEIRS:
        return float("nan")
    return study.mean(gpus, mask, pass_, mechanism, code)


GAINS: Final = tuple((kind, pass_) for kind in ("dense", "DOCUMENT") for pass_ in PASSES)


def gain_rows(study: Study) -> Iterator[tuple[str, ...]]:
    """Throughput of our executor over that of the benchmark's code: mean over GPUs and masks, by mechanism; and of
    our best mechanism over their best one."""
    masks = {"dense": DENSE, "DOCUMENT": DOCUMENT}
    for mechanism in MECHANISMS[:5]:
        ratios = [
            [study.mean(n, k, p, mechanism, OURS) / study.mean(n, k, p, mechanism) for n in study.gpus for k in some]
            for some, p in ((masks[m], p) for m, p in GAINS)
        ]
        yield NAMES[mechanism], *(f"{np.nanmean(found):.2f}" for found in ratios)
    best = [
        np.mean([_best(study, n, k, p, OURS) / _best(study, n, k, p, THEIRS) for n in study.gpus for k in masks[m]])
        for m, p in GAINS
    ]
    yield "best of all", *(f"{ratio:.2f}" for ratio in best)


def _best(study: Study, gpus: int, mask: str, pass_: str, code: str) -> float:
    return float(np.nanmax([_mean(study, gpus, mask, pass_, mechanism, code) for mechanism in MECHANISMS]))


def _found(finding: Finding) -> str:
    return finding.found if finding.holds else f"{finding.found}. Why not: {finding.reason}"


def reason_lines(study: Study) -> list[str]:
    """Why cases cannot run."""
    return [f"X: {reason}" for reason in study.reasons()]


def study_lines(study: Study) -> str:
    """JSON Lines: every case and pass; times are absent where there is a reason."""
    return "".join(json.dumps(_record(asdict(row))) + "\n" for row in study.rows)


def _record(row: dict[str, Any]) -> dict[str, Any]:
    row["pass"] = row.pop("pass_")
    return {key: value for key, value in row.items() if value != "" and value == value}  # NaN differs from itself


def study_html(study: Study) -> str:
    """A page that opens offline: a figure for every mask, tables, findings."""
    judged = findings(study)
    lead = f"{sum(f.holds for f in judged)} of {len(judged)} findings come out of the simulation."
    sections = [f"<h1>LongCA-bench on 8 to 96 H100, simulated</h1><p class='lead fact'>{lead}</p>"]
    sections.append(f"<p class=muted>{escape(LEGEND)}</p>")
    sections += [figure(throughput_lines(study, mask), f"mask-{mask}", f"{TITLES[mask]}.") for mask in MASKS]
    rows = [("yes" if f.holds else "no", f.claim, _found(f)) for f in judged]
    sections.append("<h2>Findings</h2>" + html_table(("holds", "finding", "simulated"), rows, num_text=3))
    head = ("our executor over LongCA-bench", *(f"{m}, {p}" for m, p in GAINS))
    sections.append("<h2>What the best form gains</h2>" + html_table(head, gain_rows(study), num_text=1))
    for mask in MASKS:
        for pass_ in PASSES:
            made = html_table(HEAD, throughput_rows(study, mask, pass_), num_text=0)
            sections.append(f"<h2>{TITLES[mask]}, {WORDS[pass_]}: TFLOP/s per GPU, our executor in brackets</h2>{made}")
    sections += [f"<p class=muted>{escape(line)}</p>" for line in reason_lines(study)]
    return page("cpsim: LongCA-bench on 8 to 96 H100", sections, with_plots=True)


def throughput_lines(study: Study, mask: str) -> Any:
    """Throughput against GPUs, forward and backward: a line a mechanism, and what was published as hollow circles."""
    made = make_subplots(1, 2, subplot_titles=[WORDS[p] for p in PASSES], shared_yaxes=True, horizontal_spacing=0.04)
    for column, pass_ in enumerate(PASSES, 1):
        for mechanism, colour in zip(MECHANISMS, PALETTE, strict=False):
            for code in (OURS,) if mechanism == "hybrid_cp" else (THEIRS, OURS):
                cells = [study.cell(n, mask, pass_, mechanism, code) for n in study.gpus]
                values = [study.mean(n, mask, pass_, mechanism, code) for n in study.gpus]
                made.add_scatter(
                    row=1,
                    col=column,
                    x=[str(n) for n in study.gpus],
                    y=values,
                    legendgroup=mechanism,
                    name=NAMES[mechanism],
                    showlegend=column == 1 and (code == THEIRS or mechanism == "hybrid_cp"),
                    mode="lines+markers",
                    connectgaps=False,
                    hoverinfo="text",
                    line={"color": colour, "dash": "solid" if code == THEIRS else "dot", "width": 2},
                    marker={"size": 6 if code == THEIRS else 4},
                    text=[_hover(cell) for cell in cells],
                )
            made.add_scatter(row=1, col=column, **_published(study, mask, pass_, mechanism, colour))
    made.add_scatter(x=[None], y=[None], name="published", mode="markers", marker=_hollow("#64748b"))
    made.update_xaxes(title="GPUs", type="category", categoryarray=[str(n) for n in study.gpus])
    made.update_yaxes(title="TFLOP/s per GPU", rangemode="tozero", col=1)
    return styled(made, 440)


def _published(study: Study, mask: str, pass_: str, mechanism: str, colour: str) -> dict[str, Any]:
    """What MagiAttention measured of a mechanism, beside what is simulated of LongCA-bench's code."""
    name = {"hybrid_cp": "hybrid_dcp"}.get(mechanism, mechanism)
    rows = [
        row
        for row in published()
        if (row.strategy, row.mask, row.pass_) == (name, mask, pass_) and row.gpus in study.gpus
    ]
    code = OURS if mechanism == "hybrid_cp" else THEIRS
    off = [study.mean(row.gpus, mask, pass_, mechanism, code) / row.published - 1 for row in rows]
    return {
        "x": [str(row.gpus) for row in rows],
        "y": [row.published for row in rows],
        "legendgroup": mechanism,
        "name": f"{NAMES[mechanism]}, published",
        "showlegend": False,
        "mode": "markers",
        "marker": _hollow(colour),
        "hoverinfo": "text",
        "text": [
            f"{NAMES[mechanism]}, published, {row.gpus} GPUs<br>"
            f"{row.published:.0f} TFLOP/s, simulated {100 * error:+.0f} %"
            for row, error in zip(rows, off, strict=True)
        ],
    }


def _hollow(colour: str) -> dict[str, Any]:
    return {"symbol": "circle-open", "size": 11, "color": colour, "line": {"width": 2}}


def _hover(cell: Sequence[Row]) -> str:
    row, values = cell[0], [row.tflops_per_gpu for row in cell]
    span = f", {min(values):.0f} to {max(values):.0f} over {len(values)} samples" if len(values) > 1 else ""
    return f"{NAMES[row.mechanism]}, {row.implementation}, {row.gpus} GPUs<br>{np.mean(values):.0f} TFLOP/s{span}"
