"""An answer at the door: what was read, what to run and paste, what it costs, and how well that was checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.case.formats import check_written, launch_text
from cpsim.errors import CpsimError
from cpsim.prediction.results import Infeasible
from cpsim.prediction.step.frameworks import DEFAULT
from cpsim.report.steps import step_advice_record, step_advice_view
from cpsim.report.words import percent_text, seconds_text, signed_percent
from cpsim.strategies.others import CPSIM

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario
    from cpsim.prediction.question import Question
    from cpsim.prediction.results import Prediction
    from cpsim.prediction.step_advice import StepAdvice, StepCandidate

WHAT = {
    "megatron": "arguments of Megatron-LM",
    "torchtitan": "torchtitan's TOML",
    "torch": "the same in words of torchtitan's TOML",
    "huggingface": "accelerate's configuration",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What training costs at the pace of a step."""

    gpu_hours_per_billion: float
    """GPU-hours of 10^9 tokens."""
    tokens: int
    """Of the training."""
    days: float
    """On all GPUs, without failures and pauses."""
    money: float | None
    """Of the training, in the currency of the price; None without one."""
    money_per_billion: float | None


def costs(prediction: Prediction, tokens: int, price: float | None) -> Costs:
    """What so many tokens cost at a predicted pace.

    Args:
        prediction: of a training step.
        tokens: of the training.
        price: of an hour of a GPU; None where it is not known.
    """
    hours = 1e9 / (prediction.tokens_per_s_per_gpu or 1e-9) / 3600
    in_all = hours * tokens / 1e9
    return Costs(
        gpu_hours_per_billion=hours,
        tokens=tokens,
        days=in_all / prediction.scenario.gpus / 24,
        money=None if price is None else price * in_all,
        money_per_billion=None if price is None else price * hours,
    )


def costs_text(found: Costs) -> str:
    """Costs in a sentence."""
    tokens = next(
        (f"{found.tokens / n:g} {word}" for n, word in ((1e12, "trillion"), (1e9, "billion")) if found.tokens >= n), ""
    )
    money = "" if found.money_per_billion is None else f" ({found.money_per_billion:,.0f} in money)"
    whole = "" if found.money is None else f", {found.money:,.0f} in money"
    return (
        f"Cost: {seconds_text(found.gpu_hours_per_billion)} GPU-hours per billion tokens{money}; "
        f"{tokens or f'{found.tokens:,}'} tokens take {seconds_text(found.days)} days without failures{whole}."
    )


@cache
def _checked() -> dict[str, Any]:
    path = Path(__file__).parent.with_name("data").joinpath("checked.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["steps"]
    return found


def evidence_text(scenario: Scenario) -> str:
    """How well such a prediction has been checked, in a sentence; numbers are those of ``docs/checked.py``."""
    name = scenario.framework or DEFAULT
    kind = f"{name} with experts" if scenario._has_experts else name
    row = _checked().get(kind)
    if row is None:
        return f"Checked: no published step of {kind} was compared; take this as an estimate."
    low, high = row["gpus"]
    far = [] if row["cp"] > 1 or _cp(scenario) == 1 else ["none of them with context parallelism"]
    longest = row["context"][1]
    context = scenario.context or 0
    far += [f"sequences of at most {longest:,} tokens"] if context > longest else []
    far += [f"at most {high} GPUs"] if scenario.gpus > high else []
    more = f" ({', '.join(far)})" if far else ""
    return (
        f"Checked: {row['steps']} published steps of {kind} on {low} to {high} GPUs{more} were predicted "
        f"{percent_text(row['mean_error'])} off on average, worst {percent_text(row['worst_error'])}, mean sign "
        f"{signed_percent(row['sign'])}."
    )


def _cp(scenario: Scenario) -> int:
    return (scenario.parallel.cp or 1) if scenario.parallel else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to paste."""

    text: str
    what: str
    """Whose words these are."""
    wrong: tuple[str, ...]
    """Where our reader does not find in them what was meant."""


def launch(one: StepCandidate) -> Launch | None:
    """What to paste to run a candidate; None where the framework has no words for it."""
    scenario = one.prediction.scenario
    if scenario.framework is None and scenario.implementation != CPSIM.name:
        return None  # a step of one framework with attention of another
    try:
        text = launch_text(scenario, one.parallel)
        wrong = check_written(text, scenario, one.parallel)
    except CpsimError:
        return None
    return Launch(text=text, what=WHAT[scenario.framework or DEFAULT], wrong=wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Advice about a training step with what goes with it."""

    question: Question
    advice: StepAdvice
    given: Prediction | Infeasible | CpsimError | None
    """The step as the file has it."""
    tokens: int
    price: float | None
    saved: Path | None = None

    @property
    def best(self) -> StepCandidate | None:
        """What is recommended."""
        return self.advice.recommended


def given_text(answer: Answer) -> str | None:
    """How the step as the file has it compares, in a sentence."""
    from cpsim.prediction.results import Prediction

    given, best = answer.given, answer.best
    if given is None:
        return None
    if not isinstance(given, Prediction):
        why = given.reason if isinstance(given, Infeasible) else str(given)
        return f"As the file has it: no prediction: {why}."
    fits = "" if given.fits else ", and does not fit into memory"
    took = f"As the file has it: {seconds_text(given.time_s)} s a step{fits}"
    if best is None:
        return f"{took}."
    gain = given.time_s / best.step.time_s - 1
    return f"{took}; the recommended one is {percent_text(abs(gain))} {'faster' if gain >= 0 else 'slower'}."


def waste_text(answer: Answer) -> str | None:
    """What packing wastes, in a sentence."""
    waste = answer.question.waste
    if waste is None:
        return None
    return (
        "Packing: documents one after another, cut where a sequence ends, waste nothing (predicted here); whole "
        f"documents, best fit first, waste {percent_text(waste.packed)}; a sequence for every document, padded, wastes "
        f"{percent_text(waste.padded)}."
    )


def answer_view(answer: Answer) -> RenderableType:
    """The whole answer for a terminal."""
    read = [Text(line, style="dim") for line in answer.question.read]
    lines = [given_text(answer), waste_text(answer)]
    if best := answer.best:
        lines += [
            costs_text(costs(best.prediction, answer.tokens, answer.price)),
            evidence_text(best.prediction.scenario),
        ]
    beside = [*(Text(line) for line in lines if line), *_pasted(answer)]
    return Group(*read, *([Text()] if read else []), step_advice_view(answer.advice, beside))


def _pasted(answer: Answer) -> list[RenderableType]:
    best = answer.best
    found = launch(best) if best else None
    if found is None:
        return []
    head = Text(f"Paste ({found.what})" + ("; reads back as meant" if not found.wrong else ""), style="bold")
    return [Text(), head, Text(found.text.rstrip(), style="cyan", no_wrap=True, overflow="ignore")]


def answer_record(answer: Answer) -> dict[str, Any]:
    """The whole answer as JSON."""
    best = answer.best
    found = launch(best) if best else None
    cost = costs(best.prediction, answer.tokens, answer.price) if best else None
    return step_advice_record(answer.advice) | {
        "read": list(answer.question.read),
        "given": given_text(answer),
        "launch": {"what": found.what, "text": found.text, "wrong": list(found.wrong)} if found else None,
        "cost": None
        if cost is None
        else {
            "gpu_hours_per_billion_tokens": cost.gpu_hours_per_billion,
            "tokens": cost.tokens,
            "days": cost.days,
            "money": cost.money,
            "money_per_billion_tokens": cost.money_per_billion,
        },
        "waste": None
        if answer.question.waste is None
        else {"cut": 0.0, "packed": answer.question.waste.packed, "padded": answer.question.waste.padded},
        "checked": evidence_text(best.prediction.scenario) if best else None,
    }
