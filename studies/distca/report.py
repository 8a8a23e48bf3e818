"""DistCA's published runs beside predicted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import mean
from typing import Any

import plotly.graph_objects as go
from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.case.cluster import load_cluster
from cpsim.report.figures import PALETTE, styled
from cpsim.report.page import figure, page
from cpsim.report.tables import table
from cpsim.report.words import ms_text, signed_percent
from studies.distca.reproduce import BARS, CLUSTER, RATIO, TOLERANCE, Row, mean_errors, ratios

Ablations = Mapping[str, Sequence[float]]
"""Time over that as measured, by choice and setting."""


def distca_view(rows: Sequence[Row], ablations: Ablations, lengths: str | None) -> RenderableType:
    """Runs; ratios; mean errors and their bars; ablations; what predictions rest on.

    Args:
        rows: runs with predictions.
        ablations: of `distca` in the same settings.
        lengths: file of the original list of documents; None where another one stood in for it.
    """
    notes = [Text(f"- {note}") for note in basis(lengths)]
    return Group(
        _runs(rows, lengths is not None),
        Text(),
        _ratios(rows),
        Text(),
        _errors(rows),
        Text(),
        _ablations(rows, ablations),
        Text(),
        *notes,
    )


def basis(lengths: str | None) -> list[str]:
    """What all predictions rest on, in words."""
    fabric = load_cluster(CLUSTER).fabric
    assert fabric is not None
    drawn = (
        "document lengths: a stand-in with ProLong's published histogram, since its list is not shipped; iterations "
        "agree in distribution only, so means are compared; --lengths dist_prolong.json takes the original list"
    )
    return [
        f"document lengths: those of {lengths}, iteration by iteration" if lengths else drawn,
        f"exchanges, and gathers between nodes: {fabric.nic_bandwidth_bytes_per_s / 1e9:.1f} GB/s for each GPU and "
        f"{ms_text(fabric.latency_s)} ms, as cluster {CLUSTER} has it ({fabric.grade}; {fabric.source})",
        "not charged: packing and unpacking around exchanges, the host, the allocator; memory of distca is not checked",
        "nothing is fitted to these runs",
    ]


def distca_html(rows: Sequence[Row], ablations: Ablations, lengths: str | None) -> str:
    """A page that opens offline: published and predicted times of every run, and what ablations cost."""
    errors = ", ".join(f"{name} {_percent(error)}" for name, error in mean_errors(rows).items())
    labels = [f"{_setting(*row.setting)}, {row.system}, CP {row.cp}" for row in rows]
    times, settings = go.Figure(), [_setting(*row.setting) for row in rows if row.system == "distca"]
    times.add_bar(name="published", x=labels, y=[mean(row.published_s) for row in rows], marker_color=PALETTE[7])
    times.add_bar(name="predicted", x=labels, y=[mean(row.predicted_s) for row in rows], marker_color=PALETTE[0])
    times.update_yaxes(title="seconds an iteration")
    shares = go.Figure()
    for (name, found), colour in zip(ablations.items(), PALETTE, strict=False):
        shares.add_bar(name=name, x=settings, y=[100 * (share - 1) for share in found], marker_color=colour)
    shares.update_yaxes(title="time over that as measured, %")
    sections = [f"<h1>DistCA's 34B runs on 256 H200, simulated</h1><p class='lead fact'>Mean errors: {errors}.</p>"]
    sections.append(figure(styled(times, 560), "runs", "Published and predicted times, means over iterations."))
    caption = (
        "Distca without exchanges, with exchanges after computation instead of in the other nano-batch's shadow "
        f"(single stream), and with other tolerances than {TOLERANCE:g}; predicted."
    )
    sections.append(figure(styled(shares, 420), "ablations", caption))
    sections += [f"<p class=muted>{escape(note)}</p>" for note in basis(lengths)]
    return page("cpsim: DistCA's 34B runs on 256 H200", sections, with_plots=True)


def _runs(rows: Sequence[Row], same: bool) -> RenderableType:
    """Errors by iteration only where iterations are the same."""
    by_iteration = (("by iteration", "right"),) if same else ()
    made = table(
        ("MaxDocLen x sequences", "left"),
        ("system", "left"),
        ("CP", "right"),
        ("published ms", "right"),
        ("predicted", "right"),
        ("error", "right"),
        *by_iteration,
    )
    for row in rows:
        times = (ms_text(mean(times)) for times in (row.published_s, row.predicted_s))
        own = (_percent(row.iteration_error),) if same else ()
        made.add_row(_setting(*row.setting), row.system, str(row.cp), *times, signed_percent(row.error), *own)
    return made


def _ratios(rows: Sequence[Row]) -> RenderableType:
    made = table((RATIO, "left"), ("published", "right"), ("predicted", "right"), ("error", "right"), ("CP", "right"))
    for ratio in ratios(rows):
        best = " and ".join(map(str, dict.fromkeys((ratio.published_cp, ratio.predicted_cp))))
        made.add_row(
            _setting(ratio.context, ratio.sequences),
            f"{ratio.published:.3f}",
            f"{ratio.predicted:.3f}",
            signed_percent(ratio.error),
            best,
        )
    return made


def _errors(rows: Sequence[Row]) -> RenderableType:
    made = table(("mean error", "left"), ("of all", "right"), ("to stay within", "right"))
    for name, error in mean_errors(rows).items():
        made.add_row(name, _percent(error), f"{100 * BARS[name]:.0f} %" if name in BARS else "")
    return made


def _ablations(rows: Sequence[Row], ablations: Ablations) -> RenderableType:
    settings = [_setting(*row.setting) for row in rows if row.system == "distca"]
    made = table(("distca, predicted", "left"), *((setting, "right") for setting in settings))
    for name, shares in ablations.items():
        made.add_row(name, *(signed_percent(share - 1) for share in shares))
    return made


def _setting(context: int, sequences: int) -> str:
    return f"{context // 1024}K x {sequences}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def distca_record(rows: Sequence[Row], ablations: Ablations, lengths: str | None) -> dict[str, Any]:
    """The same for machines."""
    return {
        "basis": basis(lengths),
        "rows": [
            {
                "context": row.context,
                "sequences": row.sequences,
                "system": row.system,
                "cp": row.cp,
                "published_s": round(mean(row.published_s), 4),
                "predicted_s": round(mean(row.predicted_s), 4),
                "predicted_iterations_s": [round(seconds, 4) for seconds in row.predicted_s],
            }
            for row in rows
        ],
        "ratios": [
            {
                "context": ratio.context,
                "sequences": ratio.sequences,
                "published": round(ratio.published, 4),
                "predicted": round(ratio.predicted, 4),
                "published_cp": ratio.published_cp,
                "predicted_cp": ratio.predicted_cp,
            }
            for ratio in ratios(rows)
        ],
        "mean_errors": {name: round(error, 4) for name, error in mean_errors(rows).items()},
        "bars": BARS,
        "ablations": {name: [round(share, 4) for share in shares] for name, shares in ablations.items()},
    }
