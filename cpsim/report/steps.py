"""Advice about training steps, for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.prediction.step_advice import Refused, StepAdvice, StepCandidate, reasons, words
from cpsim.report.fitted import Column, Fitted
from cpsim.report.records import prediction_record
from cpsim.report.tables import notes_view, refusals_view
from cpsim.report.words import percent_text, seconds_text, strategy_label
from cpsim.units import format_bytes

if TYPE_CHECKING:
    from cpsim.prediction.step.step import Step

SHOWN = 12
"""Candidates in a terminal."""
LEAST = 0.005
"""Share of the memory below which a kind is not named."""
COLUMNS = (
    Column("#", worth=9),
    Column("tp", worth=9),
    Column("pp", worth=9),
    Column("dp", worth=9),
    Column("cp", worth=9),
    Column("strategy", "left", worth=9),
    Column("recompute", "left", worth=9, stacks=True),
    Column("s", worth=9),
    Column("tok/s", worth=3),
    Column("MFU", worth=1),
    Column("GB", worth=4),
    Column("P(best)", worth=2),
)


def step_recommendation(advice: StepAdvice, brief: bool = False) -> str:
    """The recommendation in words, with how sure it is; or what comes nearest to fitting. Brief ones stand beside its
    numbers."""
    if best := advice.recommended:
        return _run(best, advice, brief)
    if advice.nearest:
        best = advice.nearest[0]
        needed, limit = (f"{nbytes / 1e9:.1f}" for nbytes in (best.step.needed_bytes, best.step.gpu_bytes))
        return (
            f"No way to cut this step fits into memory. Nearest: {_cut(best)}, which needs {needed} of {limit} GB and "
            f"would take {seconds_text(best.step.time_s)} s a step."
        )
    if not advice.refused:
        return f"{no_degrees(advice)}."
    return f"No way to cut this step can run: {len(advice.refused)} tried, each with its reason below."


def no_degrees(advice: StepAdvice) -> str:
    """Why there was nothing to try."""
    return (
        f"No degrees of {advice.scenario.gpus} GPUs give every replica whole sequences; use more tokens, a shorter "
        "context or other degrees"
    )


def _run(best: StepCandidate, advice: StepAdvice, brief: bool) -> str:
    p = best.prediction
    low, high = seconds_text(p.time_s_low), seconds_text(p.time_s_high)
    numbers = "" if brief else f": {seconds_text(best.step.time_s)} s a step (90 %: {low}–{high} s), {_rate(best)}"
    lead = f"Run {_cut(best)}{numbers}; "
    others = len(advice.tied) - 1
    if not others:
        return f"{lead}the fastest with probability {percent_text(best.probability_best)}."
    what = "1 other is" if others == 1 else f"{others} others are"
    simplest = "the fastest" if best is advice.candidates[0] else "the simplest"
    return f"{lead}{what} as fast as far as predictions can tell (= below), and this is {simplest} of them."


def _cut(one: StepCandidate) -> str:
    cut = one.parallel
    batches = f"{cut.microbatches} microbatch{'es' if cut.microbatches > 1 else ''}"
    return f"{words(cut)}, {strategy_label(one.prediction.scenario)}, {batches}, {_sharded(one)}"


def _sharded(one: StepCandidate) -> str:
    """Sharding, recomputation and chunks of the loss and the MLP in words."""
    cut = one.parallel
    groups = f" in {cut.replicate} groups" if cut.replicate > 1 else ""
    chunks = f", loss_chunks {cut.loss_chunks}" if cut.loss_chunks > 1 else ""
    chunks += f", mlp_chunks {cut.mlp_chunks}" if cut.mlp_chunks > 1 else ""
    return f"sharding {cut.sharding}{groups}, recompute {cut.recompute}{chunks}"


def _rate(one: StepCandidate) -> str:
    p = one.prediction
    return f"{p.tokens_per_s_per_gpu or 0:,.0f} tokens/s per GPU, MFU {percent_text(p.mfu or 0)}"


def step_advice_view(advice: StepAdvice, beside: Sequence[RenderableType] = ()) -> RenderableType:
    """What is assumed, recommendation, what goes with it, reasons, ranked candidates, what cannot run and why, notes.

    Args:
        advice: what to show.
        beside: what stands behind the recommendation.
    """
    style = "bold green" if advice.candidates else "bold red"
    parts: list[RenderableType] = [
        Text(advice.assumed),
        Text(step_recommendation(advice), style=style),
        *beside,
        Text(),
    ]
    if best := advice.recommended:
        parts += [_spent(best), *map(Text, reasons(advice)), Text()]
    elif advice.nearest:
        parts += [Text(f"{memory_text(advice.nearest[0].step)}."), Text()]
    shown = (advice.candidates or advice.nearest)[:SHOWN]
    if shown:
        parts += [_candidates(shown, advice), Text()]
    if advice.slower:
        parts += [Text(slower_text(advice), style="dim"), Text()]
    if advice.refused:
        parts += [refusals_view([(one.kind, what, why) for one, what, why in grouped(advice.refused)]), Text()]
    return Group(*parts, *notes_view(advice.notes))


def slower_text(advice: StepAdvice) -> str:
    """Ways to cut that need not be simulated whole."""
    count, (first, seconds) = len(advice.slower), advice.slower[0]
    more = "1 more fits and is slower" if count == 1 else f"{count} more fit and are slower"
    return f"{more}, as estimates say; the best of them ({words(first)}) would take about {seconds_text(seconds)} s."


def _spent(best: StepCandidate) -> Text:
    shares = (f"{percent_text(s / best.step.time_s)} {name}" for name, s in best.aspects().items())
    return Text(f"A GPU's time: {', '.join(shares)}. {memory_text(best.step)}.")


def memory_text(step: Step) -> str:
    """What the fullest GPU needs, and what for."""
    at = step.fullest
    parts = (f"{format_bytes(n)} {name}" for name, n in asdict(at).items() if n > LEAST * at.needed)
    return f"Memory: {format_bytes(at.needed)} of {format_bytes(step.gpu_bytes)}: {', '.join(parts)}"


def _candidates(shown: Sequence[StepCandidate], advice: StepAdvice) -> Fitted:
    tied, best = advice.tied, advice.recommended
    several = len(tied) > 1
    ranks = [
        f"{rank}{'=' if several and any(one is other for other in tied) else ''}" for rank, one in enumerate(shown, 1)
    ]
    rows = [(rank, *candidate_row(one)) for rank, one in zip(ranks, shown, strict=True)]
    return Fitted(COLUMNS, rows, ["green" if one is best else "" for one in shown])


def candidate_row(one: StepCandidate) -> tuple[str, ...]:
    """Cells under ``COLUMNS`` but the first."""
    cut, p = one.parallel, one.prediction
    extra = [f"{cut.replicate} groups"] * (cut.replicate > 1) + [f"{cut.loss_chunks} chunks"] * (cut.loss_chunks > 1)
    extra += [f"{cut.mlp_chunks} of the MLP"] * (cut.mlp_chunks > 1)
    return (
        str(cut.tp),
        f"{cut.pp} x {cut.virtual_pp}" if cut.virtual_pp > 1 else str(cut.pp),
        f"{cut.dp} (ep {cut.ep})" if cut.ep > 1 else str(cut.dp),
        str(cut.cp),
        strategy_label(p.scenario),
        ", ".join([cut.recompute, *extra]),
        seconds_text(one.step.time_s),
        f"{p.tokens_per_s_per_gpu or 0:,.0f}",
        percent_text(p.mfu or 0),
        f"{one.step.needed_bytes / 1e9:.1f}",
        percent_text(one.probability_best),
    )


def grouped(entries: Sequence[Refused]) -> list[tuple[Refused, str, str]]:
    """Refusals of one kind and reason as one row: the first of them, how many, and the reason."""
    rows: dict[tuple[str, str], list[Refused]] = {}
    for one in entries:
        alike = "" if one.kind == "does_not_fit" else one.reason.split(":")[0]
        rows.setdefault((one.kind, alike), []).append(one)
    found = []
    for some in rows.values():
        first = min(some, key=lambda one: one.needed_bytes)
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        found.append((first, f"{first.degrees}{more}", first.reason))
    return found


def step_advice_record(advice: StepAdvice) -> dict[str, Any]:
    """The whole of ``cpsim advise --step``: candidates fastest first; where none fits, ``nearest``."""
    return {
        "recommendation": step_recommendation(advice),
        "assumed": advice.assumed,
        "reasons": reasons(advice) if advice.candidates else [],
        "scenario": advice.scenario.to_dict(),
        "recommended": next((i for i, one in enumerate(advice.candidates) if one is advice.recommended), None),
        "tied": len(advice.tied),
        "candidates": [_record(one) for one in advice.candidates],
        "nearest": [_record(one) for one in advice.nearest],
        "slower": [{"parallel": words(cut), "time_s": seconds} for cut, seconds in advice.slower],
        "infeasible": [{"parallel": one.degrees, "error": one.reason, "kind": one.kind} for one in advice.refused],
        "notes": list(advice.notes),
    }


def _record(one: StepCandidate) -> dict[str, Any]:
    return prediction_record(one.prediction.scenario, one.prediction) | {
        "probability_best": one.probability_best,
        "spent_s": one.aspects(),
        "imbalance": one.step.imbalance,
    }
