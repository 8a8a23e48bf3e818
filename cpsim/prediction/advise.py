"""Recommendations: the ways to run a case, each predicted, ranked with the probability of being the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from cpsim.case.load import ScenarioLike, as_scenario
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError, InfeasibleError, NotMeasuredError, ScenarioError
from cpsim.models.uncertainty import chances
from cpsim.prediction.case import check_names, resolve
from cpsim.prediction.nearest import stand_ins, unmeasured, widened
from cpsim.prediction.predict import TOO_LARGE, prediction_of, predictions_of
from cpsim.prediction.results import Advice, Candidate, Infeasible, Prediction, refused
from cpsim.runtime.processes import Progress
from cpsim.strategies import CACHED, STRATEGIES, Knobs
from cpsim.strategies.others import implementation


def advise(case: ScenarioLike, progress: Progress | None = None) -> Advice:
    """Try every strategy and its sensible knobs, or only the case's strategy where it names one.

    Where the case names somebody else's implementation, the strategies are those that it has. On one GPU there is
    nothing to choose between: ``none`` is all that is tried.

    Args:
        case: a scenario, its fields, or the file that holds it.
        progress: called after everything that is tried.

    Returns:
        the candidates, fastest first, and why the others cannot run; ``Advice.columns`` are the candidates as a table.

    Raises:
        ScenarioError: the case asks for something that is not there.
        ProfileError: there are no costs for its GPU or kernel.

    Examples:
        >>> case = {"gpus": 4, "cluster": "h200-4", "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8}
        >>> advice = advise(case)
        >>> advice.candidates[0].scenario.strategy
        'ulysses'
        >>> sorted(advice.columns())[:3]
        ['backward_s', 'exposed_share', 'forward_s']
    """
    scenario = as_scenario(case)
    if scenario.cached is not None:
        raise ScenarioError(
            "cached: advise ranks by both passes together, and cached tokens have a forward pass alone; predict "
            f"{', '.join(CACHED[1:])} one by one, or compare them with cpsim sweep"
        )
    try:
        found = _advise(scenario, progress)
        if not unmeasured(found):
            return found
        why = next(one.reason for one in found.infeasible if one.kind == "not_measured")
    except NotMeasuredError as error:
        if (other := _of_stand_in(scenario, progress, str(error))) is not None:
            return other
        raise
    return _of_stand_in(scenario, progress, why) or found


def _of_stand_in(scenario: Scenario, progress: Progress | None, why: str) -> Advice | None:
    """What the nearest kernel that was measured makes of a case; None where no other helps."""
    for other in stand_ins(scenario):
        with suppress(CpsimError):
            found = _advise(other, progress)
            if found.candidates:
                return widened(scenario, found, why)
    return None


def _advise(scenario: Scenario, progress: Progress | None) -> Advice:
    """Tries all strategies with the kernel of the case."""
    asked = candidates_of(scenario)
    tried = []
    for done, way in enumerate(asked, 1):
        tried.append(evaluate(way))
        if progress:
            progress(done, len(asked))
    advice = rank(scenario, tried)
    return replace(advice, notes=(*advice.notes, *dict.fromkeys(_sensitivity(advice.candidates))))


Evaluated = tuple[Prediction, Prediction, Prediction] | Infeasible
"""Forward pass, backward pass and both of a candidate, or why it cannot run."""


def candidates_of(scenario: Scenario) -> list[Scenario | Infeasible]:
    """What ``advise`` tries for a case: strategies with their knobs, or why a strategy is not worth trying.

    Raises:
        ScenarioError: the scenario is a training step, or asks for something that is not there.
        ProfileError: there are no costs for its GPU.
    """
    found: list[Scenario | Infeasible] = []
    for name in strategies_to_try(scenario):
        case = scenario.model_copy(update={"strategy": name, "pass_": "fwd_bwd"})
        try:
            found += [case.model_copy(update={"knobs": dict(knobs)}) for knobs in settings(case)]
        except InfeasibleError as reason:
            asked = scenario.strategy is not None
            found.append(case if asked else Infeasible(scenario=case, reason=str(reason)))
    return found


def strategies_to_try(scenario: Scenario) -> list[str]:
    """Names of the strategies that ``advise`` tries.

    Raises:
        ScenarioError: the scenario is a training step, or names something unknown.
    """
    if scenario.model is not None and scenario.part is None:
        raise ScenarioError("model: this is a training step; ask with advise --step, or leave the model out")
    check_names(scenario)
    theirs = implementation(scenario.implementation).calling(scenario.kernel).strategies
    if scenario.strategy is not None:
        return [scenario.strategy]
    return ["none"] if scenario.gpus == 1 else [name for name in STRATEGIES if theirs is None or name in theirs]


def evaluate(way: Scenario | Infeasible) -> Evaluated:
    """One of ``candidates_of``, predicted.

    Raises:
        ScenarioError: it asks for something that is not there.
        ProfileError: there are no costs for its kernel.
    """
    if isinstance(way, Infeasible):
        return way
    try:
        return predictions_of(resolve(way))
    except InfeasibleError as reason:
        return refused(way, reason)
    except MemoryError:
        return Infeasible(scenario=way, reason=TOO_LARGE, kind=None)


def rank(scenario: Scenario, tried: Sequence[Evaluated]) -> Advice:
    """The recommendation that follows from what was tried so far; notes on what faults of a cluster cost are left to
    ``advise``."""
    found = [one for one in tried if not isinstance(one, Infeasible)]
    notes = dict.fromkeys(note for _, _, both in found for note in both.notes)
    if scenario.pass_ != "fwd_bwd":
        notes[f"ranked by both passes together; pass {scenario.pass_} alone is what `cpsim predict` tells"] = None
    return Advice(
        scenario=scenario,
        candidates=_rank(found),
        infeasible=tuple(one for one in tried if isinstance(one, Infeasible)),
        notes=tuple(notes),
    )


def _sensitivity(candidates: Sequence[Candidate]) -> Iterator[str]:
    """What a cluster's faults cost every candidate, and which would be the best without them, in words."""
    if not candidates:
        return
    case = resolve(candidates[0].scenario)
    if not case.cluster.faults:
        return
    healthy = replace(case, cluster=replace(case.cluster, faults=()))
    whole = (c.scenario.model_copy(update={"pass_": "fwd_bwd"}) for c in candidates)
    without = [prediction_of(replace(healthy, scenario=scenario)).time_s for scenario in whole]
    yield "slower by faults: " + ", ".join(
        f"{_name(c)} {c.total_s / seconds - 1:.0%}" for c, seconds in zip(candidates, without, strict=True)
    )
    best = candidates[int(np.argmin(without))]
    also = "also" if best is candidates[0] else "instead"
    yield f"without faults {also} the best: {_name(best)}"


def _name(candidate: Candidate) -> str:
    scenario = candidate.forward.scenario
    return " ".join([str(scenario.strategy), *(f"{knob}={value}" for knob, value in sorted(scenario.knobs.items()))])


def settings(scenario: Scenario) -> Sequence[Knobs]:
    """Knobs that are worth trying for a scenario with a strategy; its own where it has some.

    Raises:
        InfeasibleError: none is; the message says why.
    """
    case = resolve(scenario)
    if scenario.knobs:
        return (scenario.knobs,)
    if case.code.strategies is not None:
        return ({},)
    return STRATEGIES[str(scenario.strategy)].knobs(case.workload, case.cluster)


def _rank(found: Sequence[tuple[Prediction, Prediction, Prediction]]) -> tuple[Candidate, ...]:
    if not found:
        return ()
    wins = chances(np.array([both.draws_s for _, _, both in found]))
    candidates = [
        Candidate(
            forward=forward,
            backward=backward,
            total_s=both.time_s,
            total_s_low=both.time_s_low,
            total_s_high=both.time_s_high,
            tflops_per_gpu=both.tflops_per_gpu,
            exposed_share=both.exposed_comm_s / both.time_s,
            peak_memory_bytes=both.peak_memory_bytes,
            probability_best=float(won),
            draws_s=both.draws_s,
        )
        for (forward, backward, both), won in zip(found, wins, strict=True)
    ]
    return tuple(sorted(candidates, key=lambda c: (c.total_s, len(c.scenario.knobs))))
