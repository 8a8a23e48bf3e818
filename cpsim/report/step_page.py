"""Views of advice about a training step, and its report: one HTML file that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from cpsim.prediction.results import REFUSALS
from cpsim.prediction.step_advice import opened, reasons, words
from cpsim.report import front, step_timeline, validation
from cpsim.report.answer import evidence_text, launch
from cpsim.report.figures import Figure, bar_label, house, rows_height, strategy_colour, titled
from cpsim.report.memory import GB, limit
from cpsim.report.page import Group, folded, grouped_table, table
from cpsim.report.steps import candidate_row, grouped, memory_text, slower_text, step_recommendation
from cpsim.report.views import View, view_html
from cpsim.report.words import CLEAR, percent_text, seconds_text, strategy_label
from cpsim.runtime.files import write
from cpsim.units import format_bytes, short_count

if TYPE_CHECKING:
    from cpsim.prediction.results import Column
    from cpsim.prediction.step.memory import StageMemory
    from cpsim.prediction.step.opened import Opened
    from cpsim.prediction.step_advice import StepAdvice, StepCandidate

SHOWN: Final = 12
"""Ways to cut in the figures."""
HEAD: Final = ("strategy", "recompute", "tp", "pp", "dp", "cp", "s", "tokens/s", "MFU", "GB", "P(best)")
CAPTION: Final = (
    "s: time of a step. tokens/s: of each GPU. MFU: useful FLOP per second over the peak of the data sheet. GB: what "
    "the fullest GPU needs. P(best): share of draws of all cost parameters in which this is the fastest."
)
COLOURS: Final = {
    "matrix products": "#009e73",
    "attention": "#0072b2",
    "memory-bound ops": "#56b4e9",
    "communication": "#d55e00",
    "waiting for others": "#999999",
}
"""Of what a GPU does; as in reports of attention."""
KINDS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999", "#332288")
"""Of kinds of tensors, in their order."""


def write_step_report(path: Path, advice: StepAdvice) -> None:
    """Writes the report.

    Args:
        path: file to write.
        advice: what it is about.
    """
    write(path, step_report_html(advice))


def step_report_html(advice: StepAdvice) -> str:
    """The report as text."""
    sections, best = [], advice.foremost
    for title, name, view in (
        ("Text to paste", "paste", paste(advice)),
        ("Why", "why", time_view(advice)),
        ("Timeline", "timeline", timeline_view(opened(best), advice.scenario.gpus) if best else View()),
        ("Memory", "memory", memory_view(advice)),
    ):
        body = view_html(name, view)
        sections += [(title, name, body)] if body else []
    sections.insert(2 if advice.recommended else 1, ("Alternatives", "alternatives", alternatives(advice)))
    return front.answered_page(
        f"cpsim: a training step on {advice.scenario.gpus} GPUs of {advice.scenario.cluster}",
        "How to cut this training step?",
        advice.scenario,
        step_recommendation(advice, brief=True),
        step_front(advice),
        sections,
        advice.notes,
        known=bool(advice.candidates),
        with_plots=bool(advice.candidates or advice.nearest),
        closest=closest_html(advice),
    )


def step_front(advice: StepAdvice) -> str:
    """The numbers of what is recommended, or of what comes nearest to fitting, and the top of the ranking."""
    best = advice.foremost
    if best is None:
        return f"<p class=muted>{escape(advice.assumed)}</p>"
    title = "Fastest ways to cut the step" if advice.candidates else "What comes nearest to fitting"
    top = front.top_html(_top(advice, best), title, "")
    scenario = best.prediction.scenario
    checked = f"{evidence_text(scenario)} {validation.closest_text(scenario, best.parallel.cp)} {advice.assumed}"
    per_token_s = best.step.time_s / scenario.num_tokens
    return front.beside(_facts(advice, best), top, checked.removeprefix("Checked: "), per_token_s)


def _facts(advice: StepAdvice, best: StepCandidate) -> list[front.Fact]:
    one, need = best.prediction, best.step.needed_bytes
    rate = one.tokens_per_s_per_gpu or 0.0
    low, high = one.needed_interval
    clear = best.probability_best >= CLEAR or len(advice.tied) < 2
    sure = f"fastest with probability {percent_text(best.probability_best)}" if advice.candidates else "none does"
    choice = "does not fit" if not advice.candidates else "clear" if clear else f"close, {len(advice.tied)} tie"
    return [
        front.Fact(
            name="Time of a step",
            value=f"{seconds_text(one.time_s)} s",
            more=f"90 %: {seconds_text(one.time_s_low)}–{seconds_text(one.time_s_high)} s",
        ),
        front.Fact(
            name="Speed",
            value=f"{short_count(rate * one.scenario.gpus)} tokens/s",
            more=f"{rate:,.0f} a GPU, MFU {percent_text(one.mfu or 0)}",
        ),
        front.Fact(
            name="Memory",
            value=f"{need / GB:.1f} of {best.step.gpu_bytes / GB:.1f} GB",
            more=f"90 %: {low / GB:.1f}–{format_bytes(high)}",
            share=need / best.step.gpu_bytes,
        ),
        front.Fact(name="Choice", value=choice, more=sure),
    ]


def _top(advice: StepAdvice, best: StepCandidate) -> list[front.Line]:
    """What is recommended, then the fastest others."""
    shown = [best, *(one for one in advice.candidates or advice.nearest if one is not best)][: front.TOP]
    longest = max(one.step.time_s for one in shown)
    lines = []
    for place, one in enumerate(shown, 1):
        ties = len(advice.tied) > 1 and any(one is other for other in advice.tied)
        later = one.step.time_s / best.step.time_s - 1
        more = "" if one is best or abs(later) < 0.005 else f" {later:+.0%}".replace("%", " %")
        lines.append(
            front.Line(
                rank="1=" if ties else str(place),
                label=_label(one),
                time=f"{seconds_text(one.step.time_s)} s{more}",
                share=one.step.time_s / longest,
                colour=strategy_colour(str(one.prediction.scenario.strategy)),
            )
        )
    return lines


def _label(one: StepCandidate) -> str:
    return f"{words(one.parallel)}, {strategy_label(one.prediction.scenario)}"


def closest_html(advice: StepAdvice) -> str:
    """Published steps that are closest to what is recommended, or to what comes nearest to fitting."""
    best = advice.foremost
    return validation.closest_html(best.prediction.scenario, best.parallel.cp) if best else ""


def paste(advice: StepAdvice) -> View:
    """What to paste to run what is recommended."""
    best = advice.recommended
    found = launch(best) if best else None
    if found is None:
        return View()
    checked = "; reads back as meant" if not found.wrong else f"; our reader finds otherwise: {', '.join(found.wrong)}"
    text = f'<pre class="paste" tabindex="0">{escape(found.text.rstrip())}</pre>'
    return View(below=f"<p>{escape(found.what[0].upper() + found.what[1:] + checked)}.</p>{text}")


def time_view(advice: StepAdvice) -> View:
    """Where the time of the fastest ways goes, and why degrees are as they are."""
    shown = (advice.candidates or advice.nearest)[:SHOWN]
    if not shown:
        return View()
    lines = reasons(advice) if advice.candidates else []
    lines += [slower_text(advice)] if advice.slower else []
    below = f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
    caption = "What the mean GPU does in a step; what is recommended may be a simpler one that ties with the fastest."
    return View(plots=(time_bars(shown),), caption=caption, below=below, columns=lambda: step_columns(advice))


def memory_view(advice: StepAdvice) -> View:
    """The memory of the fullest GPU by kind."""
    shown = (advice.candidates or advice.nearest)[:SHOWN]
    if not shown:
        return View()
    best = advice.recommended or shown[0]
    several = len(best.step.memory) > 1
    plots = (memory_bars(shown), stage_bars(best)) if several else (memory_bars(shown),)
    caption = "Tensors by kind, and what NCCL's communicators and the CUDA context take, on the fullest GPU."
    caption += f" Below: on the GPUs of every stage of {_label(best)}, all of which hold as much." * several
    below = f"<p>{escape(_label(best))}. {escape(memory_text(best.step))}.</p>"
    return View(plots=plots, caption=caption, below=below, columns=lambda: step_columns(advice))


def timeline_view(found: Opened, gpus: int) -> View:
    """When every pass of a step on so many GPUs runs, and what its layers do."""
    return View(
        plots=(step_timeline.pipeline(found, gpus), step_timeline.layers(found)),
        caption=step_timeline.caption(found),
        below=step_timeline.buttons(found),
        columns=lambda: step_timeline.pass_columns(found),
    )


def alternatives(advice: StepAdvice) -> str:
    """The ranking, ties first, and why others are not in it."""
    tied = [one for one in advice.candidates if any(one is other for other in advice.tied)]
    later = [one for one in advice.candidates or advice.nearest if not any(one is other for other in tied)]
    several, title = len(tied) > 1, "" if advice.candidates else "What comes nearest to fitting"
    groups = [_group(advice, tied, "Cannot be told from the fastest" * several)]
    groups = [one for one in (*groups, _group(advice, later, title or "Slower" * several)) if one.rows]
    found = f"{grouped_table(HEAD, groups, num_text=2)}<p class=muted>{escape(CAPTION)}</p>" if groups else ""
    if advice.refused:
        rows = [(what, REFUSALS[one.kind], why) for one, what, why in grouped(advice.refused)]
        found += folded(f"Not ranked: {len(advice.refused)}", table(("degrees", "", "why"), rows, num_text=3))
    return found


def _group(advice: StepAdvice, some: Sequence[StepCandidate], title: str) -> Group:
    best = next((i for i, one in enumerate(some) if one is advice.recommended), None)
    colours = [strategy_colour(str(one.prediction.scenario.strategy)) for one in some]
    return Group(title=title, rows=[_row(one) for one in some], colours=colours, best=best)


def _row(one: StepCandidate) -> tuple[str, ...]:
    """Words first."""
    cells = candidate_row(one)
    return (*cells[4:6], *cells[:4], *cells[6:])


def step_columns(advice: StepAdvice) -> dict[str, Column]:
    """Candidates as columns, in SI units."""
    shown = advice.candidates or advice.nearest
    return {
        "parallel": np.array([words(one.parallel) for one in shown], dtype=str),
        "strategy": np.array([strategy_label(one.prediction.scenario) for one in shown], dtype=str),
        "time_s": np.array([one.step.time_s for one in shown]),
        "time_s_low": np.array([one.prediction.time_s_low for one in shown]),
        "time_s_high": np.array([one.prediction.time_s_high for one in shown]),
        "needed_bytes": np.array([one.step.needed_bytes for one in shown]),
        "probability_best": np.array([one.probability_best for one in shown]),
    }


def _stacked(
    labels: Sequence[str], parts: Sequence[dict[str, float]], colours: dict[str, str], axis: str, unit: str
) -> Figure:
    """A bar for every label, of parts by name."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": [row[name] for row in parts],
            "marker": {"color": colours[name]},
            "hovertemplate": "%{y}: " + name + " %{x:.3g} " + unit + "<extra></extra>",
        }
        for name in parts[0]
        if any(row[name] for row in parts)
    ]
    axes = {"xaxis": titled(axis), "yaxis": {"autorange": "reversed", "automargin": True}}
    return {"data": data, "layout": house(170 + rows_height(labels, 32), top=95) | axes | {"barmode": "stack"}}


def time_bars(shown: Sequence[StepCandidate]) -> Figure:
    """Seconds of every candidate by what GPUs do."""
    return _stacked(_labels(shown), [one.aspects() for one in shown], COLOURS, "time of a step [s]", "s")


def memory_bars(shown: Sequence[StepCandidate]) -> Figure:
    """Memory of every candidate by kind, beside that of a GPU."""
    fullest = [one.step.fullest for one in shown]
    return _of_kinds(_labels(shown), fullest, "memory [GB]", shown[0].step.gpu_bytes)


def stage_bars(best: StepCandidate) -> Figure:
    """Memory of every rank by kind, beside that of a GPU: those of a stage hold as much."""
    stages = best.step.memory
    gpus = best.prediction.scenario.gpus
    labels = [step_timeline.stage_text(stage, len(stages), gpus) for stage in range(len(stages))]
    return _of_kinds(labels, stages, "memory [GB]", best.step.gpu_bytes)


def _labels(shown: Sequence[StepCandidate]) -> list[str]:
    """Degrees above, the strategy below."""
    return [
        "<br>".join(map(bar_label, (words(one.parallel), strategy_label(one.prediction.scenario)))) for one in shown
    ]


def _of_kinds(labels: Sequence[str], held: Sequence[StageMemory], axis: str, gpu_bytes: int) -> Figure:
    """Memory by kind of tensor, with a line at that of a GPU."""
    parts = [{name: nbytes / GB for name, nbytes in asdict(one).items()} for one in held]
    colours = {name: KINDS[i % len(KINDS)] for i, name in enumerate(parts[0])}
    made = _stacked(labels, parts, colours, axis, "GB")
    return made | {"layout": made["layout"] | limit(gpu_bytes / GB)}
