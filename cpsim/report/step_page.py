"""The report of ``cpsim advise --step``: one HTML file that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cpsim.prediction.results import REFUSALS
from cpsim.prediction.step_advice import reasons, words
from cpsim.report.figures import Figure, house, titled
from cpsim.report.memory import GB, limit
from cpsim.report.page import figure, page, table
from cpsim.report.steps import candidate_row, grouped, slower_text, step_recommendation
from cpsim.report.words import case_text, documents_text, strategy_label
from cpsim.runtime.files import write

if TYPE_CHECKING:
    from cpsim.prediction.step_advice import StepAdvice, StepCandidate

SHOWN: Final = 12
"""Ways to cut in the figures."""
HEAD: Final = ("strategy", "recompute", "tp", "pp", "dp", "cp", "s", "tokens/s", "MFU", "GB", "P(best)")
CAPTION: Final = (
    "Time of a step. tokens/s: of each GPU. MFU: useful FLOP per second over the peak of the data sheet. GB: what the "
    "fullest GPU needs. P(best): share of draws of all cost parameters in which this is the fastest."
)


def write_step_report(path: Path, advice: StepAdvice) -> None:
    """Writes the report.

    Args:
        path: file to write.
        advice: what it is about.
    """
    write(path, step_report_html(advice))


def step_report_html(advice: StepAdvice) -> str:
    """The report as text."""
    shown = advice.candidates or advice.nearest
    sections = [_heading(advice)]
    if shown:
        title = "Ways to cut the step" if advice.candidates else "What comes nearest to fitting"
        ranked = table(HEAD, map(_row, shown), num_text=2, best=bool(advice.candidates))
        sections.append(f"<h2>{title}</h2>{ranked}<p class=muted>{escape(CAPTION)}</p>{_why(advice)}")
        sections.append(f"<h2>Time</h2>{figure(time_bars(shown[:SHOWN]), 'time', 'What the mean GPU does in a step.')}")
        caption = "Tensors by kind, and what NCCL's communicators and the CUDA context take, on the fullest GPU."
        sections.append(f"<h2>Memory</h2>{figure(memory_bars(shown[:SHOWN]), 'memory', caption)}")
    if advice.refused:
        rows = [(what, REFUSALS[one.kind], why) for one, what, why in grouped(advice.refused)]
        sections.append(f"<h2>Not ranked</h2>{table(('degrees', '', 'why'), rows, num_text=3)}")
    title = f"cpsim: a training step on {advice.scenario.gpus} GPUs of {advice.scenario.cluster}"
    return page(title, sections, with_plots=bool(shown))


def _heading(advice: StepAdvice) -> str:
    kind = "lead" if advice.candidates else "lead none"
    notes = "".join(f"<li>{escape(note)}</li>" for note in advice.notes)
    known = f'<h2>Know this before you rely on it</h2><ul class="notes">{notes}</ul>' if notes else ""
    case = f"{case_text(advice.scenario)}; {documents_text(advice.scenario)}"
    return (
        f"<h1>How to cut this training step?</h1><p class=muted>{escape(case)}</p><p>{escape(advice.assumed)}</p>"
        f'<p class="{kind}">{escape(step_recommendation(advice))}</p>{known}'
    )


def _row(one: StepCandidate) -> tuple[str, ...]:
    """Words first."""
    cells = candidate_row(one)
    return (*cells[4:6], *cells[:4], *cells[6:])


def _why(advice: StepAdvice) -> str:
    lines = reasons(advice) if advice.candidates else []
    lines += [slower_text(advice)] if advice.slower else []
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _labels(shown: Sequence[StepCandidate]) -> list[str]:
    return [escape(f"{words(one.parallel)}, {strategy_label(one.prediction.scenario)}") for one in shown]


def _stacked(shown: Sequence[StepCandidate], parts: Sequence[dict[str, float]], axis: str, unit: str) -> Figure:
    """A bar for every candidate, of parts by name."""
    labels = _labels(shown)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": [row[name] for row in parts],
            "hovertemplate": "%{y}: " + name + " %{x:.3g} " + unit + "<extra></extra>",
        }
        for name in parts[0]
        if any(row[name] for row in parts)
    ]
    axes = {"xaxis": titled(axis), "yaxis": {"autorange": "reversed", "automargin": True}}
    return {"data": data, "layout": house(190 + 34 * len(shown)) | axes | {"barmode": "stack"}}


def time_bars(shown: Sequence[StepCandidate]) -> Figure:
    """Seconds of every candidate by what GPUs do."""
    return _stacked(shown, [one.aspects() for one in shown], "time of a step [s]", "s")


def memory_bars(shown: Sequence[StepCandidate]) -> Figure:
    """Memory of every candidate by kind, beside that of a GPU."""
    parts = [{name: nbytes / GB for name, nbytes in asdict(one.step.fullest).items()} for one in shown]
    made = _stacked(shown, parts, "memory of the fullest GPU [GB]", "GB")
    return made | {"layout": made["layout"] | limit(shown[0].step.gpu_bytes / GB)}
