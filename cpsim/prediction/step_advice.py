"""How to cut a training step: degrees of parallelism, sharding, recomputation and strategies that fit into memory.

First every way to cut gets a bound: its time with attention spread evenly over context-parallel ranks, none of whose
communication shows. The best by their bounds are then simulated whole, until the others are slower by ``MARGIN`` than
the fastest one even so. Of the strategies of context parallelism that one is taken for each tensor- and
context-parallel degree which is fastest on the microbatch with the most work, for which the others wait; of the kinds
of recomputation the least that fits into memory, with the loss as a whole and in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from cpsim.case.parallel import Parallel, Recompute, Sharding
from cpsim.case.resolve import model_of
from cpsim.case.scenario import ParallelSection, Scenario
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.models.uncertainty import chances
from cpsim.prediction.case import Case, resolve
from cpsim.prediction.predict import step_prediction
from cpsim.prediction.results import Prediction, Refusal
from cpsim.prediction.step.frameworks import Framework
from cpsim.prediction.step.step import Step
from cpsim.prediction.step_changes import CHUNKS, RECOMPUTE
from cpsim.prediction.steps import SLOW_PLANS, StepCase
from cpsim.runtime.processes import Progress

MAX_STAGES: Final = 16
MARGIN: Final = 0.1
"""How much longer than the fastest step a bound may be for a way to cut to be simulated whole."""
NEAREST: Final = 5
"""Ways to cut that are simulated where none fits."""
ASPECTS: Final[Mapping[str, tuple[str, ...]]] = {
    "matrix products": ("matrix products",),
    "attention": ("attention fwd", "attention bwd"),
    "memory-bound ops": ("elementwise of layers", "memory-bound"),
    "communication": ("collective", "transfer", "collective between nodes", "transfer between nodes", "interference"),
}
"""What a GPU's time goes to, by cost models."""


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


@dataclass(frozen=True, slots=True)
class Refused:
    """Degrees that have no candidate."""

    degrees: str
    kind: Refusal
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdvice:
    """Ways to cut the step, fastest first, and why others are not among them."""

    scenario: Scenario
    assumed: str
    """Whose code, and how it shards, in words."""
    candidates: tuple[StepCandidate, ...]
    """Those that fit, fastest first."""
    nearest: tuple[StepCandidate, ...]
    """Where none fits: those that need the least memory, that first."""
    slower: tuple[tuple[Parallel, float], ...]
    """Those that were not simulated whole, with the seconds that they take at least; fastest first."""
    refused: tuple[Refused, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """A way to cut with the seconds that it takes at least."""

    seconds: float
    parallel: Parallel
    stronger: tuple[Parallel, ...] = field(compare=False)
    """The same with more recomputation, the least first: where attention's own memory does not fit."""


@dataclass(slots=True)
class _Search:
    """What was found so far."""

    case: Case
    steps: StepCase
    found: dict[str, tuple[Parallel, Prediction, Step]] = field(default_factory=dict)
    """By degrees: the fastest that fits."""
    refused: dict[str, Refused] = field(default_factory=dict)

    @property
    def section(self) -> ParallelSection:
        return self.case.scenario.parallel or ParallelSection()

    def refuse(self, parallel: Parallel, kind: Refusal, reason: str) -> None:
        self.refused[words(parallel)] = Refused(words(parallel), kind, reason)

    def fastest_s(self) -> float:
        return min((step.time_s for _, _, step in self.found.values()), default=float("inf"))

    def bounds(self, layout: Parallel) -> list[Bound]:
        """Ways to cut with these degrees that may fit; what is wrong with them is noted where none does."""
        try:
            fitting = [kept for kept in map(self._fitting, self._loss_and_sharding(layout)) if kept]
            if not fitting:
                least = self.steps.least_memory(self.smallest(layout))
                limit = self.case.cluster.gpu.memory_bytes
                self.refuse(layout, "does_not_fit", f"needs {least / 1e9:.1f} of {limit / 1e9:.1f} GB at least")
            fewest = {(one[0].sharding, one[0].replicate, one[0].recompute): one for one in reversed(fitting)}
            return [Bound(self.steps.bound_s(one[0]), one[0], tuple(one[1:])) for one in fewest.values()]
        except InfeasibleError as reason:
            self.refuse(layout, "cannot", str(reason))
            return []

    def smallest(self, layout: Parallel) -> Parallel:
        """The way to cut with these degrees that needs the least memory."""
        *_, last = self._loss_and_sharding(layout)
        return replace(last, recompute=self._kinds()[-1], replicate=self.section.replicate)

    def try_whole(self, bound: Bound) -> None:
        """Simulates one way to cut, with more recomputation where it turns out not to fit."""
        name = words(bound.parallel)
        try:
            strategy, knobs = self.steps.best_strategy(bound.parallel)
            for parallel in (bound.parallel, *bound.stronger):
                step = self.steps.simulate(parallel, strategy, knobs)
                if step.fits:
                    break
            else:
                self.refuse(parallel, "does_not_fit", step.too_large().removeprefix("does not fit: "))
                return
        except InfeasibleError as reason:
            self.refuse(bound.parallel, "cannot", str(reason))
            return
        if name not in self.found or step.time_s < self.found[name][2].time_s:
            self.found[name] = parallel, self.predicted(parallel, step, strategy, knobs), step

    def predicted(self, parallel: Parallel, step: Step, strategy: str, knobs: Mapping[str, object]) -> Prediction:
        """A simulated step with the scenario that asks for it."""
        said = {name: getattr(parallel, name) for name in ParallelSection.model_fields}
        update = {"strategy": strategy, "knobs": dict(knobs), "parallel": self.section.model_copy(update=said)}
        scenario = self.case.scenario.model_copy(update=update)
        return step_prediction(replace(self.case, scenario=scenario), step)

    def _kinds(self) -> list[Recompute]:
        known = self.steps.framework.recomputes
        return [self.section.recompute] if self.section.recompute else [one for one in RECOMPUTE if one in known]

    def _loss_and_sharding(self, layout: Parallel) -> Iterator[Parallel]:
        """What is left open beside degrees and recomputation; the last needs the least memory."""
        chunks = (layout.loss_chunks, CHUNKS) if self.section.loss_chunks is None else (layout.loss_chunks,)
        nodes = layout.replicas * layout.tp // self.case.cluster.gpus_per_node
        for parts in dict.fromkeys(chunks):
            for sharding in self._shardings(layout):
                for replicate in dict.fromkeys((nodes if _hybrid(self.section, sharding, nodes) else 1, 1)):
                    groups = self.section.replicate if self.section.replicate > 1 else replicate
                    yield replace(layout, sharding=sharding, replicate=groups, loss_chunks=parts)

    def _shardings(self, layout: Parallel) -> list[Sharding]:
        """All that shard, where the framework does if nothing is said."""
        known = self.steps.framework.shardings
        if self.section.sharding or layout.replicas == 1 or self.steps.framework.sharding == "none":
            return [layout.sharding]
        return [one for one in known if one != "none"]

    def _fitting(self, parallel: Parallel) -> list[Parallel]:
        """From the least recomputation that may fit on."""
        kinds = [replace(parallel, recompute=kind) for kind in self._kinds()]
        limit = self.case.cluster.gpu.memory_bytes
        if self.steps.least_memory(kinds[-1]) > limit:
            return []
        first = next(i for i, one in enumerate(kinds) if self.steps.least_memory(one) <= limit)
        return kinds[first:]


def _hybrid(section: ParallelSection, sharding: Sharding, nodes: int) -> bool:
    """Whether sharding within nodes is worth a try."""
    return sharding == "fsdp" and section.replicate == 1 and nodes > 1


def advise_step(scenario: Scenario, progress: Progress | None = None) -> StepAdvice:
    """Tries all ways to cut a training step; what the scenario says of ``parallel`` is kept.

    Args:
        scenario: a training step.
        progress: called after every way to cut, when it is done with.

    Raises:
        ScenarioError: the scenario has no model or asks for something that is not there.
        ProfileError: there are no costs for its GPU or kernel.
    """
    if scenario.model is None:
        raise ScenarioError("model: advise --step needs a model, e.g. model: llama3-8b; or leave --step out")
    if scenario.part is not None:
        raise ScenarioError(f"part: advise --step is of whole steps, got {scenario.part}; leave --step out")
    case = resolve(scenario.model_copy(update={"strategy": scenario.strategy or "none"}))
    search = _Search(case, StepCase(scenario, case.cluster, case.profile))
    layouts = list(_layouts(scenario, case, search.steps.framework))
    slower = _simulate_best(search, layouts, progress)
    nearest = [] if search.found else _nearest(search, layouts)
    found = list(search.found.values())
    notes = dict.fromkeys(_notes(scenario, layouts))
    notes |= dict.fromkeys(note for _, p, _ in found or nearest for note in p.notes)
    refused = [one for name, one in search.refused.items() if name not in search.found]
    return StepAdvice(
        scenario=scenario,
        assumed=_assumed(search, layouts),
        candidates=tuple(sorted(_ranked(found), key=lambda one: one.step.time_s)),
        nearest=_ranked(nearest),
        slower=tuple(slower),
        refused=tuple(refused),
        notes=tuple(notes),
    )


def _simulate_best(
    search: _Search, layouts: Sequence[Parallel], progress: Progress | None
) -> list[tuple[Parallel, float]]:
    """Simulates ways to cut by their bounds until the rest are slower; returns those."""
    tell, bounds = progress or (lambda _done, _total: None), list[Bound]()
    total = 2 * len(layouts)
    for done, layout in enumerate(layouts, 1):
        bounds += search.bounds(layout)
        tell(done, total)
    bounds.sort(key=lambda one: one.seconds)
    for i, bound in enumerate(bounds):
        if bound.seconds > (1 + MARGIN) * search.fastest_s():
            tell(total, total)
            rest = {words(one.parallel): (one.parallel, one.seconds) for one in reversed(bounds[i:])}
            return [one for name, one in reversed(rest.items()) if name not in search.found]
        search.try_whole(bound)
        tell(len(layouts) + (i + 1) * len(layouts) // len(bounds), total)
    return []


def _nearest(search: _Search, layouts: Sequence[Parallel]) -> list[tuple[Parallel, Prediction, Step]]:
    """The steps that need the least memory."""
    names = {name for name, one in search.refused.items() if one.kind == "does_not_fit"}
    smallest = [search.smallest(layout) for layout in layouts if words(layout) in names]
    found = []
    for parallel in sorted(smallest, key=search.steps.least_memory)[:NEAREST]:
        try:
            strategy, knobs = search.steps.best_strategy(parallel)
            step = search.steps.simulate(parallel, strategy, knobs)
        except InfeasibleError as reason:
            search.refuse(parallel, "cannot", str(reason))
            continue
        found.append((parallel, search.predicted(parallel, step, strategy, knobs), step))
    return sorted(found, key=lambda one: one[2].needed_bytes)


def _assumed(search: _Search, layouts: Sequence[Parallel]) -> str:
    """Whose code, and how it shards."""
    code, scenario = search.steps.framework, search.case.scenario
    kinds = dict.fromkeys(kind for layout in layouts for kind in search._shardings(layout))
    compiled = "" if code.compiles is None else ", compiled" if code.compiled(scenario.compile) else ", not compiled"
    more = "" if scenario.framework else "; `framework` names another"
    sharding = " or ".join(kinds) or code.sharding
    return f"Assumes {code.name} ({code.source}), sharding {sharding}{compiled}{more}."


def _notes(scenario: Scenario, search: Sequence[Parallel]) -> Iterator[str]:
    """What a reader must know about the search."""
    lengths = sorted({scenario.num_tokens // (parallel.dp * parallel.microbatches) for parallel in search})
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
    return ", ".join(f"{name} {getattr(parallel, name)}" for name in ("tp", "pp", "dp", "cp"))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _layouts(scenario: Scenario, case: Case, framework: Framework) -> Iterator[Parallel]:
    """All degrees that the scenario leaves open."""
    section, gpus, model = scenario.parallel or ParallelSection(), scenario.gpus, model_of(scenario)
    sequences = scenario.num_tokens // scenario.context if scenario.context else 1
    stages = [pp for pp in _divisors(model.layers) if pp <= (MAX_STAGES if framework.pipelines else 1)]
    for tp in [section.tp] if section.tp else _divisors(case.cluster.gpus_per_node):
        for pp in [section.pp] if section.pp else stages:
            for cp in [section.cp] if section.cp else _divisors(gpus // (tp * pp)):
                fixed = section.model_copy(update={"tp": tp, "pp": pp, "cp": cp})
                try:
                    parallel = framework.cut(fixed, gpus, sequences)
                except ScenarioError:
                    continue
                if sequences % (parallel.dp * parallel.microbatches) == 0 or scenario.context is None:
                    yield parallel


def _ranked(found: Sequence[tuple[Parallel, Prediction, Step]]) -> tuple[StepCandidate, ...]:
    """In the order in which they are given."""
    if not found:
        return ()
    wins = chances(np.array([prediction.draws_s for _, prediction, _ in found]))
    return tuple(
        StepCandidate(parallel=parallel, prediction=prediction, step=step, probability_best=float(won))
        for (parallel, prediction, step), won in zip(found, wins, strict=True)
    )


def reasons(advice: StepAdvice) -> list[str]:
    """Why the first candidate: of every degree, what the best other value would take and what for."""
    best, *others = advice.candidates
    lines = []
    for degree in ("tp", "pp", "cp"):
        mine = getattr(best.parallel, degree)
        lead = f"{degree} {mine}: the best with another {degree}"
        rival = next((one for one in others if getattr(one.parallel, degree) != mine), None)
        if rival is not None:
            lines.append(f"{lead} {_against(best, rival)}")
        elif least := _least(advice.slower, degree, mine):
            more = least[1] / best.step.time_s - 1
            lines.append(f"{lead} ({words(least[0])}) takes at least {100 * more:.0f} % longer")
    return lines


def _least(slower: Iterable[tuple[Parallel, float]], degree: str, mine: int) -> tuple[Parallel, float] | None:
    return next((one for one in slower if getattr(one[0], degree) != mine), None)


def _against(best: StepCandidate, rival: StepCandidate) -> str:
    spent = best.aspects()
    more = rival.step.time_s / best.step.time_s - 1
    extra = {name: seconds - spent[name] for name, seconds in rival.aspects().items()}
    what = max(extra, key=lambda name: extra[name])
    return f"({words(rival.parallel)}) takes {100 * more:.1f} % longer, most of it {what} ({extra[what]:+.2f} s a GPU)"
