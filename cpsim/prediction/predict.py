"""Predictions and recommendations: a scenario in, times with intervals out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.scenario import Asked, Scenario, as_scenario
from cpsim.errors import CpsimError, InfeasibleError, ScenarioError
from cpsim.models.cost_models import GROUPS
from cpsim.models.profile import load_profile
from cpsim.models.standin import DATA_SHEET, from_data_sheet
from cpsim.prediction.passes import Case, run_pass
from cpsim.prediction.results import Advice, Candidate, Column, Infeasible, Prediction, prediction_columns
from cpsim.prediction.step.costs import PARTS
from cpsim.prediction.step.step import Step
from cpsim.prediction.steps import StepCase
from cpsim.prediction.uncertainty import Draws
from cpsim.runtime.processes import Progress, mapped
from cpsim.strategies import STRATEGIES, Knobs
from cpsim.strategies.others import implementation

SHEET_BASE: Final = "h200"
"""The profile that is scaled for GPUs that nobody has measured."""
TOO_LARGE: Final = "expected a schedule that fits into this machine's memory; give fewer documents or GPUs"
CHUNK: Final = 8
"""Scenarios that a worker process takes at a time."""


def predict(case: Asked) -> Prediction:
    """Predict one case.

    Args:
        case: a scenario with a strategy, its fields, or the file that holds it.

    Returns:
        the time of the slowest rank with its 90 % interval, and the timelines that it was read from.

    Raises:
        ScenarioError: it has no strategy, or asks for something that is not there.
        InfeasibleError: the strategy cannot run it; the message says why.
        ProfileError: there are no costs for its GPU or kernel.

    Examples:
        >>> case = {"gpus": 4, "cluster": "h200-4", "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8}
        >>> answer = predict(case | {"strategy": "zigzag_ring"})
        >>> answer.time_s_low < answer.time_s < answer.time_s_high
        True
    """
    return _predict_scenario(as_scenario(case))


def _predict_scenario(scenario: Scenario) -> Prediction:
    case = look_up(scenario)
    if scenario.model is None or scenario.part == "layer":
        return _predict(case)
    steps = StepCase(scenario, case.cluster, case.profile)
    return step_prediction(case, steps.simulate(steps.parallel(), str(scenario.strategy), scenario.knobs))


def predict_many(
    scenarios: Sequence[Scenario | CpsimError], jobs: int | None = None, progress: Progress | None = None
) -> list[Prediction | Infeasible | CpsimError]:
    """Predict many scenarios, on several processes; a bad one never loses the others.

    Args:
        scenarios: scenarios, or the errors that stand in their place.
        jobs: processes; None uses all cores.
        progress: called after every chunk.

    Returns:
        one entry per scenario, in order. Predictions of several processes come without timelines.
    """
    chunks = [scenarios[i : i + CHUNK] for i in range(0, len(scenarios), CHUNK)]
    several = min(jobs or os.cpu_count() or 1, len(chunks)) > 1

    def count(done: int, _: int) -> None:
        if progress:
            progress(min(done * CHUNK, len(scenarios)), len(scenarios))

    results = mapped(_stripped if several else _chunk, chunks, jobs, count)
    return [entry for chunk in results for entry in chunk]


def sweep(
    cases: Iterable[Asked | CpsimError], jobs: int | None = 1, progress: Progress | None = None
) -> dict[str, Column]:
    """Predict many cases into columns, one row per case, in order; a bad one never loses the others.

    Args:
        cases: cases with a strategy, or the errors that stand in their place, as ``grid`` and ``load_scenarios``
            make them.
        jobs: processes; None uses all cores. Scripts that ask for several need ``if __name__ == "__main__"``.
        progress: called after every chunk.

    Returns:
        Columns of equal length, numpy arrays that ``pandas.DataFrame`` and ``polars.DataFrame`` take as they are:
        the case (``strategy``, ``knobs``, ``gpus``, ``tokens`` ...), what is predicted in SI units (``time_s``,
        ``time_s_low``, ``time_s_high``, ``tflops_per_gpu``, ``exposed_comm_s``, ``bytes_sent_per_gpu``,
        ``peak_memory_bytes``, ``planning_s``) and ``error``. Where there is an error, numbers are NaN; of a case that
        cannot be read, ``gpus`` and ``tokens`` are 0 and words are empty.

    Examples:
        >>> from cpsim.case.scenario import grid
        >>> case = {"gpus": 4, "cluster": "h200-4", "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8}
        >>> columns = sweep(grid(case, {"strategy": ["ring", "zigzag_ring"], "mask": ["full", "causal"]}))
        >>> columns["mask"].tolist()
        ['full', 'causal', 'full', 'causal']
        >>> bool(columns["time_s"].argmin() == 3)
        True
    """
    asked = [_or_error(case) for case in cases]
    return prediction_columns(asked, predict_many(asked, jobs, progress))


def _or_error(case: Asked | CpsimError) -> Scenario | CpsimError:
    try:
        return case if isinstance(case, CpsimError) else as_scenario(case)
    except CpsimError as error:
        return error


def _chunk(scenarios: Sequence[Scenario | CpsimError]) -> list[Prediction | Infeasible | CpsimError]:
    return [_try(s) for s in scenarios]


def _stripped(scenarios: Sequence[Scenario | CpsimError]) -> list[Prediction | Infeasible | CpsimError]:
    return [_without_timelines(entry) for entry in _chunk(scenarios)]


def _without_timelines(result: Prediction | Infeasible | CpsimError) -> Prediction | Infeasible | CpsimError:
    return replace(result, timelines={}) if isinstance(result, Prediction) else result


def _try(scenario: Scenario | CpsimError) -> Prediction | Infeasible | CpsimError:
    if isinstance(scenario, CpsimError):
        return scenario
    try:
        return _predict_scenario(scenario)
    except InfeasibleError as reason:
        return Infeasible(scenario=scenario, reason=str(reason))
    except CpsimError as error:
        return error
    except MemoryError:
        return CpsimError(TOO_LARGE)


def advise(case: Asked, progress: Progress | None = None) -> Advice:
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
    asked = ways(scenario)
    tried = []
    for done, way in enumerate(asked, 1):
        tried.append(try_way(way))
        if progress:
            progress(done, len(asked))
    advice = rank(scenario, tried)
    return replace(advice, notes=(*advice.notes, *dict.fromkeys(_sensitivity(advice.candidates))))


Tried = tuple[Prediction, Prediction] | Infeasible
"""Forward and backward of one way to run a case, or why it cannot be run so."""


def ways(scenario: Scenario) -> list[Scenario | Infeasible]:
    """All ways to run a case that ``advise`` tries: strategies with their knobs, or why a strategy is not worth trying.

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
        ScenarioError: the scenario is a training step, or its implementation is unknown.
    """
    if scenario.model is not None and scenario.part is None:
        raise ScenarioError("model: this is a training step; ask with advise --step, or leave the model out")
    theirs = implementation(scenario.implementation).strategies
    if scenario.strategy is not None:
        return [scenario.strategy]
    return ["none"] if scenario.gpus == 1 else [name for name in STRATEGIES if theirs is None or name in theirs]


def try_way(way: Scenario | Infeasible) -> Tried:
    """One of ``ways``, predicted.

    Raises:
        ScenarioError: it asks for something that is not there.
        ProfileError: there are no costs for its kernel.
    """
    if isinstance(way, Infeasible):
        return way
    case = look_up(way)
    try:
        forward, backward = (
            _predict(replace(case, scenario=way.model_copy(update={"pass_": pass_}))) for pass_ in ("fwd", "bwd")
        )
    except InfeasibleError as reason:
        return Infeasible(scenario=way, reason=str(reason))
    except MemoryError:
        return Infeasible(scenario=way, reason=TOO_LARGE)
    return forward, backward


def rank(scenario: Scenario, tried: Sequence[Tried]) -> Advice:
    """The recommendation that follows from what was tried so far; that of ``advise`` where all ``ways`` were,
    but for notes on what faults of the cluster cost.
    """
    found = [one for one in tried if not isinstance(one, Infeasible)]
    notes = dict.fromkeys(note for pair in found for prediction in pair for note in prediction.notes)
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
    case = look_up(candidates[0].scenario)
    if not case.cluster.faults:
        return
    healthy = replace(case, cluster=replace(case.cluster, faults=()))
    without = [
        sum(_predict(replace(healthy, scenario=p.scenario)).time_s for p in (c.forward, c.backward)) for c in candidates
    ]
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
    return _knobs(str(scenario.strategy), look_up(scenario))


def _knobs(name: str, case: Case) -> Sequence[Knobs]:
    if case.scenario.knobs:
        return (case.scenario.knobs,)
    if case.code.strategies is not None:
        return ({},)
    return STRATEGIES[name].knobs(case.workload, case.cluster)


def _rank(found: Sequence[tuple[Prediction, Prediction]]) -> tuple[Candidate, ...]:
    if not found:
        return ()
    draws = np.array([np.add(f.draws_s, b.draws_s) for f, b in found])
    wins = np.bincount(np.argmin(draws, axis=0), minlength=len(found)) / draws.shape[1]
    flops = sum(one.tflops_per_gpu * one.time_s for one in found[0])  # of every candidate: the case's
    candidates = [
        Candidate(
            forward=forward,
            backward=backward,
            total_s=forward.time_s + backward.time_s,
            total_s_low=float(np.quantile(drawn, 0.05)),
            total_s_high=float(np.quantile(drawn, 0.95)),
            tflops_per_gpu=flops / (forward.time_s + backward.time_s),
            exposed_share=(forward.exposed_comm_s + backward.exposed_comm_s) / (forward.time_s + backward.time_s),
            peak_memory_bytes=max(forward.peak_memory_bytes, backward.peak_memory_bytes),
            probability_best=float(won),
        )
        for (forward, backward), drawn, won in zip(found, draws, wins, strict=True)
    ]
    return tuple(sorted(candidates, key=lambda c: c.total_s))


def look_up(scenario: Scenario) -> Case:
    if scenario.strategy is None:
        raise ScenarioError(
            f"strategy: expected one of {', '.join(STRATEGIES)}, got no strategy; name one, or ask `cpsim advise`"
        )
    implementation(scenario.implementation)
    cluster = scenario.resolve_cluster()
    name = scenario.profile or cluster.profile
    if name is None:
        raise ScenarioError(
            f"profile: nobody has measured {cluster.gpu.name} of cluster {cluster.name} yet; name the profile of a "
            f"machine to assume, e.g. profile: h200, or {DATA_SHEET} for {SHEET_BASE}'s scaled by data sheets"
        )
    special = cluster.faults or (cluster.fabric and cluster.fabric.spine_oversubscription > 1)
    if special and scenario.model is not None and scenario.part is None:
        raise ScenarioError(
            f"cluster: faults and leaf switches of {cluster.name} are for attention alone; expected neither with a "
            "model, since the step model would ignore them: leave them, or the model, out"
        )
    profile = from_data_sheet(cluster.gpu, load_profile(SHEET_BASE)) if name == DATA_SHEET else load_profile(name)
    return Case(scenario, scenario.workload(), cluster, profile)


def _predict(case: Case) -> Prediction:
    scenario, cluster = case.scenario, case.cluster
    case.code.check_kernel(scenario.kernel)
    drawn = Draws(scenario, cluster, case.profile)
    passes = {pass_: run_pass(case, pass_, drawn) for pass_ in scenario.passes}
    done = list(passes.values())
    parts = {name: sum(p.parts_s[name] for p in done) for name in GROUPS}
    notes: dict[str, None] = dict.fromkeys((*_grades(case), *scenario.notes(), *_faults(cluster)))
    notes.update(dict.fromkeys(note for p in done for note in p.notes))
    planning = done[-1].planning
    total = sum(p.time_s for p in done)
    draws = np.sum([p.draws_s for p in done], axis=0) * drawn.noise()
    late = planning.exposed_s(total)
    parts, total, draws = parts | {"planning": late}, total + late, draws + late
    notes.update(dict.fromkeys(planning.notes))
    flops = scenario.flops(case.workload)
    notes.update(dict.fromkeys(_network_notes(cluster)))
    return Prediction(
        scenario=scenario,
        time_s=total,
        time_s_low=float(np.quantile(draws, 0.05)),
        time_s_high=float(np.quantile(draws, 0.95)),
        draws_s=tuple(draws.tolist()),
        tflops_per_gpu=flops / cluster.num_gpus / total / 1e12,
        exposed_comm_s=sum(p.exposed_s for p in done),
        bytes_sent_per_gpu=float(np.sum([p.sent for p in done], axis=0).max()),
        peak_memory_bytes=max(p.memory_bytes for p in done),
        planning_s=planning.seconds,
        parts_s={name: seconds for name, seconds in parts.items() if seconds > 0},
        notes=tuple(notes),
        timelines={pass_: p.timeline for pass_, p in passes.items() if p.timeline is not None},
    )


def step_prediction(case: Case, step: Step) -> Prediction:
    """A simulated training step as a prediction, with its interval; it has no timelines."""
    scenario = case.scenario
    drawn = Draws(scenario, case.cluster, case.profile)
    draws = drawn.along({name: step.parts[name] for name in PARTS}) * drawn.noise()
    return Prediction(
        scenario=scenario,
        time_s=step.time_s,
        time_s_low=float(np.quantile(draws, 0.05)),
        time_s_high=float(np.quantile(draws, 0.95)),
        draws_s=tuple(draws.tolist()),
        tflops_per_gpu=step.flops / scenario.gpus / step.time_s / 1e12,
        exposed_comm_s=sum(seconds for name, seconds in step.parts.items() if name.startswith(("coll", "transfer"))),
        bytes_sent_per_gpu=step.sent,
        peak_memory_bytes=step.peak_memory_bytes,
        planning_s=0.0,
        parts_s={name: seconds for name, seconds in step.parts.items() if seconds > 0},
        notes=tuple(dict.fromkeys((*_grades(case), *scenario.notes(), *step.notes, *_network_notes(case.cluster)))),
        timelines={},
    )


def _grades(case: Case) -> tuple[str, ...]:
    """What the costs rest on, in words."""
    profile = case.profile
    grade = f"costs on the GPU: profile {profile.name}, {profile.grade}"
    other = case.cluster.gpu.name.lower() not in profile.gpu.lower()
    if case.cluster.profile is not None and case.scenario.profile is not None and other:
        return (grade, f"profile {profile.name} describes another machine than cluster {case.cluster.name}")
    return (grade,)


def _faults(cluster: Cluster) -> tuple[str, ...]:
    return (f"faults: {', '.join(map(str, cluster.faults))}",) if cluster.faults else ()


def _network_notes(cluster: Cluster) -> tuple[str, ...]:
    fabric = cluster.fabric
    if fabric is None or cluster.num_nodes == 1:
        return ()
    return (f"network between nodes of {cluster.name}: {fabric.grade} ({fabric.source})",)
