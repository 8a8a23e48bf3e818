"""How to cut a training step: tries degrees of parallelism and strategies that fit into memory, and says why.

Every way to cut is simulated whole. Of the strategies of context parallelism that one is taken for each tensor- and
context-parallel degree which is fastest on the microbatch with the most work, for which the others wait; of the kinds
of recomputation the least that fits into memory. Pipelines are tried with several chunks of layers on every stage, too,
and experts are shared as far as they go, within a node and in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.model import Model
from cpsim.case.parallel import Parallel, Recompute
from cpsim.case.resolve import model_of
from cpsim.case.scenario import ParallelSection, Scenario
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.models.uncertainty import chances
from cpsim.prediction.case import Case, resolve
from cpsim.prediction.predict import step_prediction
from cpsim.prediction.results import Prediction
from cpsim.prediction.step.frameworks import Framework
from cpsim.prediction.step.step import Step, deal
from cpsim.prediction.steps import StepCase
from cpsim.runtime.processes import Progress
from cpsim.strategies import STRATEGIES

MAX_STAGES: Final = 16
CHUNKS: Final = (2, 4)
"""Chunks of layers that are tried beside one on stages of a pipeline, where the scenario does not say."""
RECOMPUTE: Final[tuple[Recompute, ...]] = ("none", "selective", "per_op", "mlp", "full")
SLOW_PLANS: Final = ("dcp",)
"""Strategies that plan every batch for seconds are tried only where the scenario names them."""
ASPECTS: Final[Mapping[str, tuple[str, ...]]] = {
    "matrix products": ("matrix products",),
    "attention": ("attention fwd", "attention bwd"),
    "memory-bound ops": ("elementwise of layers", "memory-bound"),
    "communication": ("collective", "transfer", "collective between nodes", "transfer between nodes", "interference"),
}
"""What a GPU's time goes to, by cost models."""
Choice = tuple[str, Mapping[str, Any]]
"""Strategy and knobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCandidate:
    """One way to cut the step."""

    parallel: Parallel
    prediction: Prediction
    step: Step
    probability_best: float
    """Share of parameter draws in which it is the fastest, 0 to 1."""

    def aspects(self) -> dict[str, float]:
        """Seconds of the mean GPU by what it does, waiting for others included; their sum is the step's time."""
        busy = self.step.busy
        spent = {name: sum(busy[part] for part in parts) for name, parts in ASPECTS.items()}
        return spent | {"waiting for others": self.step.time_s - sum(spent.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdvice:
    """Ways to cut the step, fastest first, and why others cannot run."""

    scenario: Scenario
    candidates: tuple[StepCandidate, ...]
    infeasible: tuple[tuple[str, str], ...]
    """Degrees and reason."""
    notes: tuple[str, ...]


def advise_step(scenario: Scenario, progress: Progress | None = None) -> StepAdvice:
    """Tries all ways to cut a training step; degrees that the scenario names are kept.

    Raises:
        ScenarioError: the scenario has no model or asks for something that is not there.
        ProfileError: there are no costs for its GPU or kernel.
    """
    if scenario.model is None:
        raise ScenarioError("model: advise --step needs a model, e.g. model: llama3-8b; or leave --step out")
    if scenario.part is not None:
        raise ScenarioError(f"part: advise --step is of whole steps, got {scenario.part}; leave --step out")
    case = resolve(scenario.model_copy(update={"strategy": scenario.strategy or "none"}))
    steps = StepCase(scenario, case.cluster, case.profile)
    search = list(_layouts(scenario, case, steps.framework))
    found: list[tuple[Parallel, Prediction, Step]] = []
    infeasible: dict[str, str] = {}
    chosen: dict[tuple[int, int], Choice] = {}
    for done, parallel in enumerate(search, 1):
        try:
            found.append(_try(parallel, case, steps, chosen))
        except InfeasibleError as reason:
            infeasible[words(parallel)] = str(reason)
        if progress:
            progress(done, len(search))
    notes = dict.fromkeys(_notes(scenario, search)) | dict.fromkeys(note for _, p, _ in found for note in p.notes)
    return StepAdvice(
        scenario=scenario, candidates=_ranked(found), infeasible=tuple(infeasible.items()), notes=tuple(notes)
    )


def _notes(scenario: Scenario, search: Sequence[Parallel]) -> Iterator[str]:
    """What a reader must know about the search."""
    lengths = sorted({scenario.num_tokens // (p.dp * p.microbatches * (p.batch or 1)) for p in search})
    if scenario.context is None and lengths and lengths[0] < scenario.num_tokens:
        several = f" to {lengths[-1]:,}" if len(lengths) > 1 else ""
        yield (
            f"context: not given, so every layout cuts all tokens, and documents with them, into sequences of its own, "
            f"here of {lengths[0]:,}{several} tokens; name a context to compare layouts at equal work"
        )
    if scenario.strategy is None and any(parallel.cp > 1 for parallel in search):
        yield f"not tried, since planning takes seconds: {', '.join(SLOW_PLANS)}; name it as strategy to try it"


def words(parallel: Parallel) -> str:
    """Degrees in one phrase, e.g. ``tp 8, pp 2, dp 4, cp 2``."""
    said = ", ".join(f"{name} {getattr(parallel, name)}" for name in ("tp", "pp", "dp", "cp"))
    more = (f", {name} {getattr(parallel, name)}" for name in ("ep", "virtual_pp") if getattr(parallel, name) > 1)
    return said + "".join(more)


def _stages(section: ParallelSection, layers: int) -> list[int]:
    """Numbers of stages into which layers divide as the scenario says."""
    if section.layers_first or section.layers_last:
        return list(range(2, MAX_STAGES + 1))
    return _divisors(layers + bool(section.embedding_as_layer) + bool(section.loss_as_layer))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _kinds(framework: Framework) -> tuple[Recompute, ...]:
    """What a framework can compute again, the least first."""
    return tuple(kind for kind in RECOMPUTE if kind in framework.recomputes)


def _layouts(scenario: Scenario, case: Case, framework: Framework) -> Iterator[Parallel]:
    """All ways to cut that the scenario leaves open, without recomputation unless it asks for some."""
    section, gpus, model = scenario.parallel or ParallelSection(), scenario.gpus, model_of(scenario)
    sequences = scenario.num_tokens // scenario.context if scenario.context else 1
    stages = [pp for pp in _stages(section, model.layers) if pp <= (MAX_STAGES if framework.pipelines else 1)]
    for tp in [section.tp] if section.tp else _divisors(case.cluster.gpus_per_node):
        for pp in [section.pp] if section.pp else stages:
            for cp in [section.cp] if section.cp else _divisors(gpus // (tp * pp)):
                fixed = section.model_copy(update={"tp": tp, "pp": pp, "cp": cp})
                try:
                    parallel = framework.cut(fixed, gpus, sequences)
                except ScenarioError:
                    continue
                places = parallel.dp * parallel.microbatches
                even = sequences % places == 0 and section.batch in (None, sequences // places)
                if even or scenario.context is None:
                    for one in _shared(parallel, model, case.cluster) if not section.ep else [parallel]:
                        yield one
                        if not section.virtual_pp:
                            yield from _chunked(one, model.layers)


def _shared(parallel: Parallel, model: Model, cluster: Cluster) -> list[Parallel]:
    """The same with experts shared as far as they go within a node, and in all."""
    most = gcd(model.experts, parallel.replicas) if model.experts else 1
    within = gcd(most, max(1, cluster.gpus_per_node // parallel.tp))
    return [replace(parallel, ep=ep) for ep in sorted({within, most})]


def _chunked(parallel: Parallel, layers: int) -> Iterator[Parallel]:
    """The same with several chunks of layers on each stage, where they divide."""
    if parallel.pp == 1 or parallel.microbatches % parallel.pp or parallel.schedule != "1f1b":
        return
    for chunks in CHUNKS:
        cut = replace(parallel, virtual_pp=chunks)
        with suppress(InfeasibleError):
            cut.chunk_layers(layers)
            yield cut


def _try(
    parallel: Parallel, case: Case, steps: StepCase, chosen: dict[tuple[int, int], Choice]
) -> tuple[Parallel, Prediction, Step]:
    """Simulates one way to cut with the least recomputation that fits into memory."""
    section = case.scenario.parallel or ParallelSection()
    if (parallel.tp, parallel.cp) not in chosen:
        parallel.check(model_of(case.scenario), case.cluster)
        chosen[parallel.tp, parallel.cp] = _choice(parallel, steps)
    strategy, knobs = chosen[parallel.tp, parallel.cp]
    kinds = (section.recompute,) if section.recompute else _kinds(steps.framework)
    for recompute in kinds:
        cut = replace(parallel, recompute=recompute)
        step = steps.simulate(cut, strategy, knobs)
        if step.fits:
            break
    else:
        raise InfeasibleError(f"{step.too_large()}; it would take {step.time_s:.3g} s")
    full = section.model_copy(
        update={
            "tp": cut.tp,
            "pp": cut.pp,
            "dp": cut.dp,
            "cp": cut.cp,
            "microbatches": cut.microbatches,
            "recompute": cut.recompute,
            "ep": cut.ep if cut.ep > 1 else section.ep,
            "virtual_pp": cut.virtual_pp if cut.virtual_pp > 1 else section.virtual_pp,
        }
    )
    scenario = case.scenario.model_copy(update={"strategy": strategy, "knobs": dict(knobs), "parallel": full})
    return cut, step_prediction(replace(case, scenario=scenario), step), step


def _choice(parallel: Parallel, steps: StepCase) -> Choice:
    """The strategy that is fastest on the microbatch with the most work, or the one that the scenario names."""
    scenario = steps.scenario
    if parallel.cp == 1:
        return "none", {}
    batch = deal(steps.sequences(parallel), parallel)
    heaviest = max((m for replica in batch for m in replica), key=lambda m: sum(n * n for n in m))
    choices: list[tuple[float, int, Choice]] = []
    refused: list[str] = []
    names = [scenario.strategy] if scenario.strategy else [n for n in STRATEGIES if n not in ("none", *SLOW_PLANS)]
    for name in names:
        try:
            attention = steps.model(parallel, name, scenario.knobs).attention
            workload = attention.workload(heaviest)
            for knobs in [scenario.knobs] if scenario.knobs else STRATEGIES[name].knobs(workload, attention.cluster):
                attended = steps.model(parallel, name, knobs).attention.of([heaviest])[0]
                seconds = sum(sum(parts.values()) for parts in attended.parts)
                choices.append((seconds, len(choices), (str(name), dict(knobs))))
        except InfeasibleError as reason:
            refused.append(f"{name}: {reason}")
    if not choices:
        raise InfeasibleError(f"cp: no strategy runs on {parallel.cp} ranks; {refused[0]}")
    return min(choices)[2]


def _ranked(found: Sequence[tuple[Parallel, Prediction, Step]]) -> tuple[StepCandidate, ...]:
    if not found:
        return ()
    wins = chances(np.array([prediction.draws_s for _, prediction, _ in found]))
    candidates = [
        StepCandidate(parallel=parallel, prediction=prediction, step=step, probability_best=float(won))
        for (parallel, prediction, step), won in zip(found, wins, strict=True)
    ]
    return tuple(sorted(candidates, key=lambda c: c.step.time_s))


def reasons(advice: StepAdvice) -> list[str]:
    """Why the first candidate: of every degree, what the best other value would take and what for."""
    best, *others = advice.candidates
    spent, lines = best.aspects(), []
    for degree in ("tp", "pp", "cp"):
        mine = getattr(best.parallel, degree)
        rival = next((c for c in others if getattr(c.parallel, degree) != mine), None)
        if rival is None:
            continue
        more = rival.step.time_s / best.step.time_s - 1
        extra = {name: seconds - spent[name] for name, seconds in rival.aspects().items()}
        what = max(extra, key=lambda name: extra[name])
        lines.append(
            f"{degree} {mine}: the best with another {degree} ({words(rival.parallel)}) takes {100 * more:.1f} % "
            f"longer, most of it {what} ({extra[what]:+.2f} s a GPU)"
        )
    return lines
