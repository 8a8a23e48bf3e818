"""Advice about training steps, for a terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cpsim.prediction.step_advice import StepAdvice, StepCandidate, reasons, words
from cpsim.report.records import prediction_record
from cpsim.report.tables import notes_view, table
from cpsim.report.words import CLEAR, percent_text, strategy_label
from cpsim.units import format_bytes

if TYPE_CHECKING:
    from cpsim.prediction.step.step import Step

SHOWN = 12
"""Candidates in a terminal."""


def step_recommendation(advice: StepAdvice) -> str:
    """The recommendation in words, with how sure it is."""
    if not advice.candidates:
        return f"No way to cut this step can run: {len(advice.infeasible)} tried, each with its reason below."
    best = advice.candidates[0]
    p, cut = best.prediction, best.parallel
    runs = f"{words(cut)}, {strategy_label(p.scenario)}, {cut.microbatches} microbatches, recompute {cut.recompute}"
    sure = "clearly" if best.probability_best >= CLEAR else "but it is close: fastest"
    return (
        f"Run {runs}: {best.step.time_s:.3g} s a step (90 %: {p.time_s_low:.3g}–{p.time_s_high:.3g} s), "
        f"{p.tflops_per_gpu:,.0f} TFLOP/s per GPU; {sure} with probability {percent_text(best.probability_best)}."
    )


def step_advice_view(advice: StepAdvice) -> RenderableType:
    """Recommendation, reasons, ranked candidates, what cannot run and why, notes."""
    style = "bold green" if advice.candidates else "bold red"
    parts: list[RenderableType] = [Text(step_recommendation(advice), style=style), Text()]
    if advice.candidates:
        parts += [_spent(advice.candidates[0]), *map(Text, reasons(advice)), Text(), _candidates(advice), Text()]
    if advice.infeasible:
        parts += [_infeasible(advice), Text()]
    return Group(*parts, *notes_view(advice.notes))


def _spent(best: StepCandidate) -> Text:
    shares = (f"{percent_text(s / best.step.time_s)} {name}" for name, s in best.aspects().items())
    return Text(f"A GPU's time: {', '.join(shares)}. {_memory(best.step)}.")


def _memory(step: Step) -> str:
    fullest = max(step.memory, key=lambda stage: stage.total)
    return (
        f"Memory: {format_bytes(fullest.total)}, of it {format_bytes(fullest.activations)} activations, "
        f"{format_bytes(fullest.weights + fullest.gradients + fullest.optimizer)} weights, gradients and optimizer"
    )


def _candidates(advice: StepAdvice) -> Table:
    made = table(
        ("#", "right"),
        ("tp", "right"),
        ("pp", "right"),
        ("dp", "right"),
        ("cp", "right"),
        ("strategy", "left"),
        ("micro", "right"),
        ("recompute", "left"),
        ("s", "right"),
        ("TFLOP/s", "right"),
        ("waiting", "right"),
        ("memory", "right"),
        ("P(best)", "right"),
    )
    for rank, one in enumerate(advice.candidates[:SHOWN], start=1):
        cut, waiting = one.parallel, one.aspects()["waiting for others"] / one.step.time_s
        made.add_row(
            str(rank),
            str(cut.tp),
            f"{cut.pp} x {cut.virtual_pp}" if cut.virtual_pp > 1 else str(cut.pp),
            f"{cut.dp} (ep {cut.ep})" if cut.ep > 1 else str(cut.dp),
            str(cut.cp),
            strategy_label(one.prediction.scenario),
            str(cut.microbatches),
            cut.recompute,
            f"{one.step.time_s:.2f}",
            f"{one.prediction.tflops_per_gpu:,.0f}",
            percent_text(waiting),
            format_bytes(one.step.peak_memory_bytes),
            percent_text(one.probability_best),
            style="green" if rank == 1 else "",
        )
    return made


def _infeasible(advice: StepAdvice) -> Table:
    """Reasons, each with how many ways to cut it rules out and the first of them."""
    made = table(("cannot run", "left"), ("why", "left"))
    kinds = Counter(reason.split(":")[0] for _, reason in advice.infeasible)
    for kind, count in kinds.most_common():
        first, reason = next(entry for entry in advice.infeasible if entry[1].split(":")[0] == kind)
        more = f" and {count - 1} more" if count > 1 else ""
        made.add_row(f"{first}{more}", Text(reason), style="dim")
    return made


def step_advice_record(advice: StepAdvice) -> dict[str, Any]:
    """The whole of ``cpsim advise --step``, candidates fastest first."""
    return {
        "recommendation": step_recommendation(advice),
        "reasons": reasons(advice) if advice.candidates else [],
        "scenario": advice.scenario.to_dict(),
        "candidates": [
            prediction_record(one.prediction.scenario, one.prediction)
            | {"probability_best": one.probability_best, "spent_s": one.aspects(), "imbalance": one.step.imbalance}
            for one in advice.candidates
        ],
        "infeasible": [{"parallel": cut, "error": reason} for cut, reason in advice.infeasible],
        "notes": list(advice.notes),
    }
