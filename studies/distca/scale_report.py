"""DistCA's interim runs and stated speed-ups beside predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from statistics import mean
from typing import Any

import plotly.graph_objects as go
from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.report.figures import PALETTE, styled
from cpsim.report.page import figure, page
from cpsim.report.tables import table
from cpsim.report.words import ms_text, signed_percent
from studies.distca.scale import BAR, ITERATIONS, SPREAD, STAGES, STATED, Interim, Setting, SpeedUp

BASIS = (
    f"interim runs: neither plans nor samples are recorded; {STAGES} stages and the first {ITERATIONS} iterations, as "
    "in the one record that names its plan, and the fastest microbatches and context parallelism that fit into memory",
    f"speed-ups: the fastest wlb over distca, mean of {len(SPREAD)} iterations spread over 30; settings of the paper's "
    "tables 3 (no pipeline) and 4 (2 stages here); what it states is for all settings of a data set and model together",
    "document lengths are stand-ins; nothing is fitted to these numbers",
)


def scale_view(runs: Sequence[Interim], ratios: Sequence[SpeedUp]) -> RenderableType:
    """Interim runs, their mean errors, speed-ups, and what they rest on."""
    made = table(
        ("interim run", "left"),
        ("system", "left"),
        ("published ms", "right"),
        ("predicted", "right"),
        ("error", "right"),
        ("plan", "left"),
    )
    for run in runs:
        times = ms_text(run.published_s), ms_text(run.predicted_s)
        made.add_row(_words(run.setting), run.system, *times, signed_percent(run.error), run.plan)
    errors = table(("mean error", "left"), ("of all", "right"), ("to stay within", "right"))
    for name, error in mean_errors(runs).items():
        errors.add_row(name, f"{100 * error:.1f} %", f"{100 * BAR:.0f} %")
    gains = table(("stages, data, model", "left"), ("stated", "right"), ("predicted", "right"), ("median", "right"))
    for key, stated in STATED.items():
        found = sorted(one.predicted for one in ratios if _key(one.setting) == key and one.predicted)
        if found:
            span = f"{found[0]:.2f} to {found[-1]:.2f}"
            gains.add_row(f"{key[0]}, {key[1]}, {key[2]}", _span(*stated), span, f"{found[len(found) // 2]:.2f}")
    return Group(made, Text(), errors, Text(), gains, Text(), *(Text(f"- {note}") for note in BASIS))


def mean_errors(runs: Sequence[Interim]) -> dict[str, float]:
    """Mean of absolute errors, by system and of all."""
    systems = {name: [run for run in runs if run.system == name] for name in ("wlb", "distca")}
    return {name: mean(abs(run.error) for run in own) for name, own in ({**systems, "all": list(runs)}).items() if own}


def scale_record(runs: Sequence[Interim], ratios: Sequence[SpeedUp]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "basis": BASIS,
        "interim": [asdict(run) for run in runs],
        "speed_ups": [asdict(one) for one in ratios],
        "mean_errors": mean_errors(runs),
        "bar": BAR,
        "stated": [{"stages": s, "data": d, "model": m, "range": span} for (s, d, m), span in STATED.items()],
    }


def scale_html(runs: Sequence[Interim], ratios: Sequence[SpeedUp]) -> str:
    """A page that opens offline: published and predicted times, and speed-ups on 64 to 512 GPUs."""
    errors = ", ".join(f"{name} {100 * error:.1f} %" for name, error in mean_errors(runs).items())
    sections = [f"<h1>DistCA on 64 to 512 H200, simulated</h1><p class=lead>Mean errors: {errors}.</p>"]
    sections.append(figure(_times(runs), "interim", "Interim runs with pipelines: published and predicted times."))
    caption = "The fastest wlb over distca by GPUs; the band is what the paper states for all settings together."
    for (stages, data, model), stated in STATED.items():
        mine = [one for one in ratios if _key(one.setting) == (stages, data, model)]
        name = f"{model}, {data}, {stages} stage{'s' if stages > 1 else ''}"
        sections.append(figure(_gains(mine, stated), f"gain-{stages}-{data}-{model}", f"{name}. {caption}"))
    sections += [f"<p class=muted>{escape(note)}</p>" for note in BASIS]
    return page("cpsim: DistCA on 64 to 512 H200", sections, with_plots=True)


def _times(runs: Sequence[Interim]) -> Any:
    labels = [f"{_words(run.setting)}, {run.system}" for run in runs]
    made = go.Figure()
    made.add_bar(name="published", x=labels, y=[run.published_s for run in runs], marker_color=PALETTE[7])
    made.add_bar(name="predicted", x=labels, y=[run.predicted_s for run in runs], marker_color=PALETTE[0])
    made.update_yaxes(title="seconds an iteration")
    return styled(made, 560)


def _gains(ratios: Sequence[SpeedUp], stated: tuple[float, float]) -> Any:
    made = go.Figure()
    made.add_hrect(y0=stated[0], y1=stated[1], fillcolor=PALETTE[2], opacity=0.12, line_width=0)
    for context, colour in zip(sorted({one.setting.context for one in ratios}), PALETTE, strict=False):
        own = [one for one in ratios if one.setting.context == context]
        made.add_scatter(
            x=[str(one.setting.gpus) for one in own],
            y=[one.predicted for one in own],
            mode="lines+markers",
            name=f"{context // 1024}K",
            line={"color": colour},
        )
    made.update_xaxes(title="GPUs", type="category")
    made.update_yaxes(title="speed-up")
    return styled(made, 340)


def _key(setting: Setting) -> tuple[int, str, str]:
    return setting.stages, setting.data, setting.model


def _words(setting: Setting) -> str:
    return f"{setting.data} {setting.model}, {setting.gpus} GPUs, {setting.context // 1024}K x {setting.sequences}"


def _span(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}" if low >= 1 else f"up to {high:.2f}"
