"""DistCA's interim runs, and stated speed-ups, beside predicted ones."""

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
from studies.distca.scale import (
    BAR,
    ITERATIONS,
    SPREAD,
    STAGES,
    STATED,
    SYSTEMS,
    Fit,
    Interim,
    Known,
    Setting,
    SpeedUp,
    Wall,
    worth,
)

NOT_FITTED = "nothing is fitted to these numbers"
BASIS = (
    f"interim runs: mean of the first {ITERATIONS} iterations, and the fastest of the plans that their script tried; "
    "which of them finished is not recorded",
    "distca's interim runs of prolong are predicted with documents of pretrain: its program took no data set then, and "
    "its times of both are alike",
    "interim runs of wlb compute attention again, with its gathers, those of distca the MLP; keys go to servers of "
    "distca once for each task",
    NOT_FITTED,
)
RATIOS = (
    f"the fastest wlb over distca, mean of {len(SPREAD)} iterations spread over 30; "
    "settings of the paper's tables 3 and 4; what it states is for all settings of a data set and model together",
    f"with pipelines {STAGES} stages, and microbatches of later scripts for wlb; distca has any microbatches",
    NOT_FITTED,
)
STAND_INS = (
    "document lengths are stand-ins; --lengths dist_prolong.json --pretrain dist_wlbllm.json take the original ones"
)


def scale_view(
    runs: Sequence[Interim], known: Sequence[Known], fits: Sequence[Fit], walls: Sequence[Wall], listed: bool
) -> RenderableType:
    """Interim runs, their errors, what assumptions are worth, runs of known plans, what fitted into memory, how long
    runs took with all that they did, and what all rest on.

    Args:
        runs, known, fits, walls: with predictions.
        listed: whether lists of documents were given.
    """
    made = table(
        ("interim run", "left"),
        ("system", "left"),
        ("published ms", "right"),
        ("predicted", "right"),
        ("error", "right"),
        ("fastest plan", "left"),
        ("other plans", "right"),
    )
    for run in runs:
        first, *others = run.outcomes
        times = ms_text(run.published_s), ms_text(first.time_s)
        rest = ", ".join(ms_text(other.time_s) for other in others)
        made.add_row(_words(run.setting), run.system, *times, signed_percent(run.error), str(first.plan), rest)
    errors = table(("mean error", "left"), ("of all", "right"), ("signed", "right"), ("to stay within", "right"))
    for name, (error, signed) in mean_errors(runs).items():
        errors.add_row(name, f"{100 * error:.1f} %", signed_percent(signed), f"{100 * BAR:.0f} %")
    parts = made, errors, _worth(runs), _known(known), _fits(fits), _walls(walls)
    notes = [Text(f"- {note}") for note in basis(listed)]
    return Group(*(one for part in parts for one in (part, Text())), *notes)


def speed_ups_view(ratios: Sequence[SpeedUp], listed: bool) -> RenderableType:
    """Speed-ups by pipeline stages, data set and model, and what they rest on.

    Args:
        ratios: speed-ups.
        listed: whether lists of documents were given.
    """
    gains = table(("stages, data, model", "left"), ("stated", "right"), ("predicted", "right"), ("median", "right"))
    for key, stated in STATED.items():
        found = sorted(one.predicted for one in ratios if _key(one.setting) == key and one.predicted)
        if found:
            span = f"{found[0]:.2f} to {found[-1]:.2f}"
            gains.add_row(f"{key[0]}, {key[1]}, {key[2]}", _span(*stated), span, f"{found[len(found) // 2]:.2f}")
    return Group(gains, Text(), *(Text(f"- {note}") for note in basis(listed, RATIOS)))


def basis(listed: bool, facts: Sequence[str] = BASIS) -> list[str]:
    """What all predictions rest on, in words; by default those of interim runs."""
    return [*facts, *([] if listed else [STAND_INS])]


def _worth(runs: Sequence[Interim]) -> RenderableType:
    made = table(("interim runs, if", "left"), ("runs", "right"), ("mean error", "right"), ("signed", "right"))
    for system, assumed in worth(runs).items():
        for name, errors in assumed.items():
            if errors:
                mean_error = f"{100 * mean(map(abs, errors)):.1f} %"
                made.add_row(f"{system}: {name}", str(len(errors)), mean_error, signed_percent(mean(errors)))
    return made


def _known(known: Sequence[Known]) -> RenderableType:
    made = table(
        ("known plan", "left"),
        ("published s", "left"),
        ("predicted", "left"),
        ("error of the mean", "right"),
    )
    for run in known:
        times = (" ".join(f"{seconds:.1f}" for seconds in times) for times in (run.published_s, run.predicted_s))
        made.add_row(f"{run.system}, {_words(run.setting)}, {run.plan}", *times, signed_percent(run.error))
    return made


def _fits(fits: Sequence[Fit]) -> RenderableType:
    made = table(("memory of distca's 34B", "left"), ("fitted", "left"), ("GB", "right"), ("nothing again", "right"))
    for run in sorted(fits, key=lambda run: run.memory_bytes):
        sizes = (f"{nbytes / 1e9:.0f}" for nbytes in (run.memory_bytes, run.kept_bytes))
        made.add_row(f"{_words(run.setting)}, {run.plan}", "yes" if run.fitted else "no", *sizes)
    return made


def _walls(walls: Sequence[Wall]) -> RenderableType:
    made = table(("distca's 34B, start to start", "left"), ("s", "right"), ("iterations", "right"), ("rest", "right"))
    for run in walls:
        times = (f"{seconds:.0f}" for seconds in (run.wall_s, run.predicted_s, run.wall_s - run.predicted_s))
        made.add_row(f"{_words(run.setting)}, {run.plan}", *times)
    return made


def mean_errors(runs: Sequence[Interim]) -> dict[str, tuple[float, float]]:
    """Mean of absolute errors and of errors, by system and of all."""
    by_name: dict[str, list[float]] = {name: [run.error for run in runs if run.system == name] for name in SYSTEMS}
    every = by_name | {"all": [run.error for run in runs]}
    return {name: (mean(map(abs, errors)), mean(errors)) for name, errors in every.items() if errors}


def scale_record(
    runs: Sequence[Interim], known: Sequence[Known], fits: Sequence[Fit], walls: Sequence[Wall], listed: bool
) -> dict[str, Any]:
    """The same for machines."""
    return {
        "basis": basis(listed),
        "interim": [asdict(run) | {"predicted_s": run.predicted_s} for run in runs],
        "known": [asdict(run) for run in known],
        "fits": [asdict(run) for run in fits],
        "walls": [asdict(run) for run in walls],
        "mean_errors": {name: error for name, (error, _) in mean_errors(runs).items()},
        "signed_errors": {name: signed for name, (_, signed) in mean_errors(runs).items()},
        "worth": worth(runs),
        "bar": BAR,
    }


def speed_ups_record(ratios: Sequence[SpeedUp], listed: bool) -> dict[str, Any]:
    """The same for machines."""
    return {
        "basis": basis(listed, RATIOS),
        "speed_ups": [asdict(one) for one in ratios],
        "stated": [{"stages": s, "data": d, "model": m, "range": span} for (s, d, m), span in STATED.items()],
    }


def scale_html(runs: Sequence[Interim], listed: bool) -> str:
    """A page that opens offline: published and predicted times."""
    errors = ", ".join(f"{name} {100 * error:.1f} %" for name, (error, _) in mean_errors(runs).items())
    sections = [f"<h1>DistCA's interim runs, simulated</h1><p class='lead fact'>Mean errors: {errors}.</p>"]
    sections.append(figure(_times(runs), "interim", "Interim runs with pipelines: published and predicted times."))
    return _page("cpsim: DistCA's interim runs", sections, basis(listed))


def speed_ups_html(ratios: Sequence[SpeedUp], listed: bool) -> str:
    """A page that opens offline: speed-ups on 64 to 512 GPUs."""
    sections = ["<h1>DistCA on 64 to 512 H200, simulated</h1>"]
    caption = "The fastest wlb over distca by GPUs; the band is what the paper states for all settings together."
    for (stages, data, model), stated in STATED.items():
        mine = [one for one in ratios if _key(one.setting) == (stages, data, model)]
        name = f"{model}, {data}, {stages} stage{'s' if stages > 1 else ''}"
        sections.append(figure(_gains(mine, stated), f"gain-{stages}-{data}-{model}", f"{name}. {caption}"))
    return _page("cpsim: DistCA on 64 to 512 H200", sections, basis(listed, RATIOS))


def _page(title: str, sections: Sequence[str], notes: Sequence[str]) -> str:
    return page(title, [*sections, *(f"<p class=muted>{escape(note)}</p>" for note in notes)], with_plots=True)


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
