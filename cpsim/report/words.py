"""Short texts about scenarios and recommendations, shared by the terminal and the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from re import sub
from typing import TYPE_CHECKING, Any

from cpsim.case.resolve import model_of
from cpsim.prediction.step.frameworks import DEFAULT
from cpsim.strategies.others import CPSIM
from cpsim.units import MS_PER_S, format_bytes, format_count

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario
    from cpsim.prediction.results import Advice, Candidate, Infeasible

CLEAR = 0.8
"""A recommendation with at least this P(best) is called clear."""


def knobs_text(knobs: Mapping[str, Any]) -> str:
    """Knobs as people say them: words as they are, numbers with their name, e.g. ``zigzag, ulysses 8``."""
    return ", ".join(_knob_text(name.replace("_", " "), value) for name, value in knobs.items())


def _knob_text(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"{name} of {len(value)} documents"
    return value if isinstance(value, str) else f"{name} {value}"


def strategy_label(scenario: Scenario) -> str:
    """Strategy and knobs in one phrase, e.g. ``usp (ulysses 8)``."""
    knobs = knobs_text(scenario.knobs)
    return f"{scenario.strategy or 'any strategy'} ({knobs})" if knobs else str(scenario.strategy or "any strategy")


def signed_percent(share: float) -> str:
    """A relative error with its sign, e.g. ``-1.2 %``."""
    return f"{100 * share:+.1f} %"


def interval_text(low_s: float, high_s: float) -> str:
    """A 90 % interval in milliseconds, e.g. ``11.9–12.8``."""
    return f"{ms_text(low_s)}–{ms_text(high_s)}"


def ms_text(seconds: float) -> str:
    """Seconds in milliseconds with three significant digits or more, no unit."""
    value = seconds * MS_PER_S
    if value == 0:
        return "0"
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def seconds_text(seconds: float) -> str:
    """Seconds with three significant digits or more, no unit."""
    return f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"


def unbroken(text: str) -> str:
    """Text of a page in which numbers stay beside their units."""
    return sub(r"(\d) (%|ms|s|[kMG]B|GPUs?|TFLOP/s)(?!\w)", "\\1\u00a0\\2", text)


def percent_text(share: float) -> str:
    """A share of 0 to 1 in percent, e.g. ``12 %``."""
    return f"{share:.0%}".replace("%", " %")


def numbers_of(one: Candidate) -> tuple[str, ...]:
    """Cells of a candidate in tables of strategies: both passes, their sum with its interval, rate, exposed share,
    memory, and how probably it is the best."""
    return (
        ms_text(one.forward.time_s),
        ms_text(one.backward.time_s),
        ms_text(one.total_s),
        interval_text(one.total_s_low, one.total_s_high),
        f"{one.tflops_per_gpu:,.0f}",
        percent_text(one.exposed_share),
        format_bytes(one.peak_memory_bytes),
        percent_text(one.probability_best),
    )


def case_text(scenario: Scenario) -> str:
    """The case in one line: tokens, mask, heads, GPUs."""
    per_gpu = format_count(scenario.num_tokens / scenario.gpus)
    part = f"a {scenario.part or 'step'} of {model_text(scenario)}, " if scenario.model else ""
    cached = f", {format_count(scenario.cached)} of them cached" if scenario.cached else ""
    sinks = " with sinks" if scenario.sinks else ""
    code = f" in {scenario.implementation}" if scenario.implementation != CPSIM.name else ""
    return (
        f"{part}{format_count(scenario.num_tokens)} tokens ({per_gpu} per GPU){cached}, {mask_text(scenario)} mask, "
        f"{scenario.heads}:{scenario.kv_heads} heads of {scenario.head_dim}{sinks}, {scenario.dtype}, "
        f"{scenario.kernel}{code} on {scenario.gpus} GPU{'s' if scenario.gpus > 1 else ''} of {scenario.cluster}"
    )


def cut_text(scenario: Scenario) -> str:
    """Whose code runs a training step, and what the scenario says of how it is cut, e.g. ``torch, cp 8``."""
    said = scenario.parallel.model_dump(exclude_unset=True, exclude_none=True) if scenario.parallel else {}
    return ", ".join([scenario.framework or DEFAULT, *(f"{name} {value}" for name, value in said.items())])


def model_text(scenario: Scenario) -> str:
    """The model of a training step by name, or by size."""
    if isinstance(scenario.model, str):
        return scenario.model
    return f"a model of {model_of(scenario).size()}"


def mask_text(scenario: Scenario) -> str:
    """The mask and its options in one phrase, e.g. ``lambda (window 128)``."""
    options = knobs_text(dict(scenario.mask_options))
    return f"{scenario.mask_name} ({options})" if options else scenario.mask_name


def documents_text(scenario: Scenario) -> str:
    """How the tokens are divided into documents."""
    match scenario.documents:
        case None:
            return "one document of all tokens"
        case tuple() as lengths:
            shown = ", ".join(map(format_count, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
            return f"{len(lengths)} documents given: {shown}"
        case draw:
            limit = f", at most {format_count(draw.max_length)} tokens each" if draw.max_length else ""
            return f"drawn from {draw.distribution} with seed {draw.seed}{limit}"


def _least_lacking(advice: Advice) -> str:
    """Why nothing can run: of the strategy that lacks least, and how many others that is said of."""
    if not advice.infeasible:
        return "None was tried."
    why, count = least_lacking(advice.infeasible), len(advice.infeasible)
    alike = sum(one.reason == why.reason for one in advice.infeasible)
    who = f"{alike} of {count} tried" if alike > 1 else strategy_label(why.scenario)
    return f"{who}: {why.reason.rstrip('.')}."


def least_lacking(refused: Sequence[Infeasible]) -> Infeasible:
    """What would be needed least to have an answer: memory, then a measurement, then another strategy."""
    kinds = ["does_not_fit", "not_measured", "cannot", None]
    return min(refused, key=lambda one: kinds.index(one.kind))


def recommendation(advice: Advice, brief: bool = False) -> str:
    """The recommendation in words, with how sure it is; brief ones stand beside its numbers."""
    if not advice.candidates:
        return f"No strategy can run this case. {_least_lacking(advice)}"
    best = advice.recommended or advice.candidates[0]
    same = advice.alike(best)
    others = [one for one in advice.distinct if one is not best and not any(one is other for other in same)]
    chance = percent_text(best.probability_best)
    time = f"{ms_text(best.total_s)} ms forward and backward (90 %: {_interval(best)} ms)"
    numbers = "" if brief else f": {time}, {best.tflops_per_gpu:,.0f} TFLOP/s per GPU"
    if not others:
        why = "the only strategy that can" if advice.infeasible else "the only one asked about"
        return f"Run {strategy_label(best.scenario)}, {why}{numbers}."
    second = others[0]
    tied = [one for one in others if any(one is other for other in advice.tied)]
    run = f"Not measured, estimated from kernel {advice.stands_in}: run" if advice.stands_in else "Run"
    lead = f"{run} {strategy_label(best.scenario)}{numbers}"
    longer = f"{second.total_s / best.total_s - 1:.0%}".replace("%", " %")
    if not tied or best.probability_best >= CLEAR:
        comes = f"{strategy_label(second.scenario)} comes second and takes {longer} longer"
        return f"{lead}. It is the fastest with probability {chance}; {comes}."
    if best is not advice.candidates[0]:
        first = strategy_label(advice.candidates[0].scenario)
        return (
            f"{lead}; but it is close: {first} takes {ms_text(advice.candidates[0].total_s)} ms, which cannot be told "
            "from it (= below), and this is the simplest of them."
        )
    return (
        f"{lead}; but it is close: it is the fastest with probability {chance}, {strategy_label(second.scenario)} with "
        f"{percent_text(second.probability_best)} ({ms_text(second.total_s)} ms)."
    )


def _interval(candidate: Candidate) -> str:
    return interval_text(candidate.total_s_low, candidate.total_s_high)
