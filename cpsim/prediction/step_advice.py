"""How to cut a training step: degrees of parallelism, sharding, recomputation and strategies that fit into memory.

First every way to cut gets a bound: its time with attention spread evenly over context-parallel ranks, none of whose
communication shows. The best by their bounds are then simulated whole, until the others are slower by ``MARGIN`` than
the fastest one even so; where twice as many stages or context-parallel ranks lost, more of them are not tried. Of the
strategies of context parallelism that one is taken for each tensor- and context-parallel degree which is fastest on the
microbatch with the most work, for which the others wait; of what saves memory the cheapest that is enough: the loss in
parts, then more and more recomputation. Pipelines are tried with several chunks of layers on every stage, too, and
experts are shared as far as they go, within a node and in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.model import Model
from cpsim.case.parallel import Parallel, Sharding
from cpsim.case.resolve import model_of
from cpsim.case.scenario import ParallelSection, Scenario
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.models.uncertainty import chances
from cpsim.prediction.case import Case, resolve
from cpsim.prediction.predict import step_prediction
from cpsim.prediction.results import TIE, Prediction, Refusal, inseparable
from cpsim.prediction.step.opened import Opened
from cpsim.prediction.step.step import Step
from cpsim.prediction.step_changes import CHUNKS, RECOMPUTE, TILES
from cpsim.prediction.steps import SLOW_PLANS, StepCase
from cpsim.runtime.processes import Progress

MAX_STAGES: Final = 16
LAYER_CHUNKS: Final = (2, 4)
"""Chunks of layers that are tried beside one on stages of a pipeline, where the scenario does not say."""
UNEVEN: Final = (2, 4, 8, 16)
"""Stages that are tried where layers do not divide among them: the last one, which has the loss, gets fewer."""
MARGIN: Final = 0.07
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

    def effort(self) -> tuple[int, ...]:
        """What has to be set up: kinds of parallelism, savings of memory, knobs; then how many chunks and stages."""
        cut, scenario = self.parallel, self.prediction.scenario
        kinds = (cut.tp, cut.pp, cut.cp, cut.ep, cut.virtual_pp, cut.replicate, cut.loss_chunks, cut.mlp_chunks)
        several = sum(number > 1 for number in kinds)
        return several + (cut.recompute != "none"), len(scenario.knobs), cut.virtual_pp, cut.pp, cut.tp


@dataclass(frozen=True, slots=True)
class Refused:
    """Degrees that have no candidate."""

    degrees: str
    kind: Refusal
    reason: str
    needed_bytes: int = 0
    """Of what does not fit."""


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

    @property
    def tied(self) -> tuple[StepCandidate, ...]:
        """The fastest, and those that cannot be told from it, fastest first; see ``inseparable``."""
        if not self.candidates:
            return ()
        best = self.candidates[0].prediction.draws_s
        return tuple(one for one in self.candidates if inseparable(one.prediction.draws_s, best))

    @property
    def recommended(self) -> StepCandidate | None:
        """The simplest of those that cannot be told from the fastest, and take hardly longer."""
        near = [one for one in self.tied if one.step.time_s <= (1 + TIE) * self.candidates[0].step.time_s]
        return min(near, key=lambda one: (*one.effort(), one.step.time_s), default=None)

    @property
    def foremost(self) -> StepCandidate | None:
        """What is recommended, or comes nearest to fitting."""
        return self.recommended or next(iter(self.nearest), None)


@dataclass(frozen=True, slots=True)
class Bound:
    """A way to cut with the seconds that it takes at least."""

    seconds: float
    parallel: Parallel
    stronger: tuple[Parallel, ...] = field(compare=False)
    """The same with less memory, the cheapest first: where attention's own memory does not fit."""


@dataclass(slots=True)
class _Search:
    """What was found so far."""

    case: Case
    steps: StepCase
    found: dict[str, tuple[Parallel, Prediction, Step]] = field(default_factory=dict)
    """By degrees: the fastest that fits."""
    refused: dict[str, Refused] = field(default_factory=dict)
    bound_s: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Bounds by degrees; see ``_ranks``."""
    known_s: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Seconds by the same degrees."""
    slower: list[Bound] = field(default_factory=list)
    """Those that were not simulated whole."""

    @property
    def section(self) -> ParallelSection:
        return self.case.scenario.parallel or ParallelSection()

    @property
    def named(self) -> bool:
        """Whether the scenario names its framework, so that no other's settings are of use."""
        return self.case.scenario.framework is not None

    def refuse(self, parallel: Parallel, reason: InfeasibleError) -> None:
        self.refused[words(parallel)] = Refused(words(parallel), "cannot", str(reason))

    def too_large(self, parallel: Parallel, needed: int) -> None:
        reason = f"needs {needed / 1e9:.1f} of {self.case.cluster.gpu.memory_bytes / 1e9:.1f} GB, or more"
        self.refused[words(parallel)] = Refused(words(parallel), "does_not_fit", reason, needed)

    def limit_s(self) -> float:
        """What is slower need not be simulated."""
        return (1 + MARGIN) * min((step.time_s for _, _, step in self.found.values()), default=float("inf"))

    def loses_s(self, parallel: Parallel) -> float:
        """Seconds with half the context-parallel ranks, where doubling them to that many lost; more lose more."""
        tp, pp, cp, *same = _ranks(parallel)
        half, quarter = (self.known_s.get((tp, pp, cp // n, *same), 0.0) for n in (2, 4))
        return half if 0 < quarter < half else 0.0

    def bounds(self, layout: Parallel) -> list[Bound]:
        """Ways to cut with these degrees that may fit; what is wrong with them is noted where none does."""
        try:
            if layout.cp > 1 and self.steps.scenario.strategy == "none":
                raise InfeasibleError(f"cp: strategy none runs on one rank, got cp = {layout.cp}; use 1")
            fitting = self._fitting(layout)
            if not fitting:
                self.too_large(layout, self.steps.least_memory(self.smallest(layout)))
            tp, pp, *same = _ranks(layout)
            half, quarter = (self.bound_s.get((tp, pp // n, *same), 0.0) for n in (2, 4))
            lost = half if 0 < quarter < half else 0.0  # to have more stages loses more
            found = [Bound(lost or self.steps.bound_s(one), one, tuple(stronger)) for one, *stronger in fitting]
            self.bound_s[_ranks(layout)] = min((one.seconds for one in found), default=0.0)
            return found
        except InfeasibleError as reason:
            self.refuse(layout, reason)
            return []

    def smallest(self, layout: Parallel) -> Parallel:
        """The way to cut with these degrees that needs the least memory."""
        return replace([*self._sharded(layout)][-1], **self._cheaper(layout)[-1])

    def try_whole(self, bound: Bound) -> None:
        """Simulates one way to cut, with less memory where it turns out not to fit."""
        name = words(bound.parallel)
        try:
            strategy, knobs = self.steps.best_strategy(bound.parallel)
            if self.found:
                about = self.steps.bound_s(bound.parallel, (strategy, knobs))
                self.known_s[_ranks(bound.parallel)] = about
                if about > self.limit_s():
                    self.slower.append(Bound(about, bound.parallel, ()))
                    return
            for parallel in (bound.parallel, *bound.stronger):
                step = self.steps.simulate(parallel, strategy, knobs)
                if step.fits:
                    break
            else:
                self.too_large(parallel, step.needed_bytes)
                return
        except InfeasibleError as reason:
            self.refuse(bound.parallel, reason)
            return
        if name not in self.found or step.time_s < self.found[name][2].time_s:
            self.known_s[_ranks(parallel)] = step.time_s
            self.found[name] = parallel, self.predicted(parallel, step, strategy, knobs), step

    def rest(self) -> list[tuple[Parallel, float]]:
        """By degrees, fastest first: those without a candidate that are slower."""
        least = {words(one.parallel): one for one in sorted(self.slower, key=lambda one: -one.seconds)}
        ordered = sorted(least.items(), key=lambda item: item[1].seconds)
        return [(one.parallel, one.seconds) for name, one in ordered if name not in self.found]

    def predicted(self, parallel: Parallel, step: Step, strategy: str, knobs: Mapping[str, object]) -> Prediction:
        """A simulated step with the scenario that asks for it."""
        said = {name: getattr(parallel, name) for name in ParallelSection.model_fields}
        update = {"strategy": strategy, "knobs": dict(knobs), "parallel": self.section.model_copy(update=said)}
        scenario = self.case.scenario.model_copy(update=update)
        return step_prediction(replace(self.case, scenario=scenario), step)

    def _cheaper(self, layout: Parallel) -> list[dict[str, Any]]:
        """Recomputation and parts of the loss, the cheapest first; the last needs the least memory."""
        known = self.steps.framework.recomputes
        kinds = [self.section.recompute] if self.section.recompute else [one for one in RECOMPUTE if one in known]
        if self.section.ep_overlap and not self.section.recompute:
            kinds = kinds[:1]  # nothing is exchanged again
        parts = self.section.loss_chunks is None and (self.steps.framework.parts_loss or not self.named)
        chunks = [layout.loss_chunks, *(CHUNKS if parts else ())]
        found = [{"recompute": kind, "loss_chunks": parts} for kind in kinds for parts in dict.fromkeys(chunks)]
        tiles = self.named and self.section.mlp_chunks is None and self.steps.framework.tiles_mlp and layout.tp == 1
        return [*found, {**found[-1], "mlp_chunks": TILES}] if tiles else found

    def _sharded(self, layout: Parallel) -> Iterator[Parallel]:
        """Kinds of sharding, and groups of it; the last needs the least memory."""
        nodes = layout.replicas * layout.tp // self.case.cluster.gpus_per_node
        for sharding in self.shardings(layout):
            hybrid = sharding == "fsdp" and self.section.replicate == 1 and nodes > 1
            if hybrid and self.named:  # groups are of whole context-parallel groups
                hybrid = layout.dp % nodes == 0
            for replicate in (nodes, 1) if hybrid else (self.section.replicate,):
                yield replace(layout, sharding=sharding, replicate=replicate)

    def shardings(self, layout: Parallel) -> list[Sharding]:
        """All that shard, where the framework does if nothing is said."""
        code = self.steps.framework
        if self.section.sharding or code.sharding == "none":
            return [layout.sharding]
        if layout.replicas == 1:
            return [layout.sharding]
        return [one for one in code.shardings if one != "none"]

    def _fitting(self, layout: Parallel) -> list[list[Parallel]]:
        """Ways to cut that may fit, of each kind of sharding from the cheapest on: the loss in parts, then more
        recomputation."""
        limit, found = self.case.cluster.gpu.memory_bytes, []
        for parallel in self._sharded(layout):
            ways = [replace(parallel, **how) for how in self._cheaper(layout)]
            for i, one in enumerate(ways):
                if self.steps.least_memory(one) <= limit:
                    found.append(ways[i:])
                    break
        return found


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
    scenario = scenario.model_copy(update={"kernel": case.scenario.kernel})
    search = _Search(case, StepCase(scenario, case.cluster, case.profile))
    layouts = list(_layouts(search.steps))
    _simulate_best(search, layouts, progress)
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
        slower=tuple(search.rest()),
        refused=tuple(refused),
        notes=tuple(notes),
    )


def opened(one: StepCandidate) -> Opened:
    """A way to cut the step in time: when all passes run, and what layers do meanwhile."""
    scenario = one.prediction.scenario
    case = resolve(scenario)
    steps = StepCase(scenario, case.cluster, case.profile)
    return steps.opened(one.parallel, str(scenario.strategy), scenario.knobs)


def _simulate_best(search: _Search, layouts: Sequence[Parallel], progress: Progress | None) -> None:
    """Simulates the way to cut with the least bound, and then all whose bounds are not slower than the fastest one."""
    tell, bounds = progress or (lambda _done, _total: None), list[Bound]()
    total = 2 * len(layouts)
    for done, layout in enumerate(layouts, 1):
        bounds += search.bounds(layout)
        tell(done, total)
    within = search.case.cluster.gpus_per_node
    bounds.sort(key=lambda one: (one.parallel.tp * one.parallel.cp > within, one.seconds))  # fast links first
    if bounds:
        search.try_whole(bounds[0])
    for i, bound in enumerate(sorted(bounds[1:], key=lambda one: (one.parallel.cp, one.seconds))):
        least = max(bound.seconds, search.loses_s(bound.parallel))
        if least > search.limit_s():
            search.slower.append(replace(bound, seconds=least))
        else:
            search.try_whole(bound)
        tell(len(layouts) + i * len(layouts) // len(bounds), total)
    tell(total, total)


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
            search.refuse(parallel, reason)
            continue
        found.append((parallel, search.predicted(parallel, step, strategy, knobs), step))
    return sorted(found, key=lambda one: one[2].needed_bytes)


def _assumed(search: _Search, layouts: Sequence[Parallel]) -> str:
    """Whose code, and how it shards."""
    code, scenario = search.steps.framework, search.case.scenario
    shared = [layout for layout in layouts if layout.replicas > 1] or layouts
    kinds = dict.fromkeys(kind for layout in shared for kind in search.shardings(layout))
    compiled = "" if code.compiles is None else ", compiled" if code.compiled(scenario.compile) else ", not compiled"
    more = "" if scenario.framework else "; `framework` names another"
    sharding = " or ".join(kinds) or code.sharding
    return f"Assumes {code.name} ({code.source}), sharding {sharding}{compiled}{more}."


def _notes(scenario: Scenario, search: Sequence[Parallel]) -> Iterator[str]:
    """What a reader must know about the search."""
    lengths = sorted({scenario.num_tokens // (p.dp * p.microbatches * (p.batch or 1)) for p in search})
    if scenario.context is None and lengths and lengths[0] < scenario.num_tokens:
        several = f" to {lengths[-1]:,}" if len(lengths) > 1 else ""
        yield (
            f"context: not given, so every layout cuts all tokens, and documents with them, into sequences of its own, "
            f"here of {lengths[0]:,}{several} tokens; name a context to compare layouts at equal work"
        )
    if scenario.strategy is None and not scenario.framework and any(parallel.cp > 1 for parallel in search):
        yield f"not tried, since planning takes seconds: {', '.join(SLOW_PLANS)}; name it as strategy to try it"


def words(parallel: Parallel) -> str:
    """Degrees in one phrase, e.g. ``tp 8, pp 2, dp 4, cp 2``."""
    said = ", ".join(f"{name} {getattr(parallel, name)}" for name in ("tp", "pp", "dp", "cp"))
    more = (f", {name} {getattr(parallel, name)}" for name in ("ep", "virtual_pp") if getattr(parallel, name) > 1)
    return said + "".join(more)


def _stages(section: ParallelSection, layers: int) -> dict[int, int | None]:
    """Numbers of stages into which layers divide as the scenario says, or into which all but the last one do; with the
    layers of that one where it has fewer."""
    if section.layout:
        return dict.fromkeys(_divisors(len(section.layout)))
    if section.layers_first or section.layers_last:
        return dict.fromkeys(range(2, MAX_STAGES + 1), section.layers_last)
    counted = layers + bool(section.embedding_as_layer) + bool(section.loss_as_layer)
    found: dict[int, int | None] = dict.fromkeys(_divisors(counted))
    if counted == layers:
        left = {pp: layers - (pp - 1) * -(-layers // pp) for pp in UNEVEN if pp not in found}
        found |= {pp: last for pp, last in left.items() if last > 0}
    return dict(sorted(found.items()))


def _ranks(parallel: Parallel) -> tuple[int, ...]:
    """Degrees of tensor, pipeline, context and expert parallelism, and chunks of layers."""
    return parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.virtual_pp


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _layouts(steps: StepCase) -> Iterator[Parallel]:
    """All degrees that the scenario leaves open."""
    scenario, cluster, framework = steps.scenario, steps.cluster, steps.framework
    section, gpus, model = scenario.parallel or ParallelSection(), scenario.gpus, model_of(scenario)
    last = _stages(section, model.layers)
    stages = [pp for pp in last if pp <= (MAX_STAGES if framework.pipelines else 1)]
    for tp in [section.tp] if section.tp else _divisors(cluster.gpus_per_node):
        for pp in [section.pp] if section.pp else stages:
            for cp in [section.cp] if section.cp else _divisors(gpus // (tp * pp)):
                own: dict[str, object] = {"layers_last": last.get(pp, section.layers_last)}
                if section.layout:
                    own["virtual_pp"] = len(section.layout) // pp
                fixed = section.model_copy(update={"tp": tp, "pp": pp, "cp": cp, **own})
                try:
                    parallel = framework.cut(fixed, gpus, scenario.num_sequences)
                except ScenarioError:
                    continue
                places = parallel.dp * parallel.microbatches
                batch, rest = divmod(scenario.num_sequences, places)
                even = rest == 0 and section.batch in (None, batch)
                if even or scenario.context is None:
                    for one in _shared(parallel, model, cluster) if not section.ep else [parallel]:
                        yield one
                        if not (section.virtual_pp or section.layout):
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
    for chunks in LAYER_CHUNKS:
        cut = replace(parallel, virtual_pp=chunks)
        with suppress(InfeasibleError):
            cut.chunk_layers(layers)
            yield cut


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
    """Why the one that is recommended: of every degree, what the best other value would take and what for."""
    best = advice.recommended
    assert best is not None
    others = [one for one in advice.candidates if one is not best]
    lines = []
    for degree in ("tp", "pp", "cp"):
        mine = getattr(best.parallel, degree)
        lead = f"{degree} {mine}: the best with another {degree}"
        rival = next((one for one in others if getattr(one.parallel, degree) != mine), None)
        if rival is not None:
            lines.append(f"{lead} {_against(best, rival)}")
        elif least := _least(advice.slower, degree, mine):
            more = least[1] / best.step.time_s - 1
            lines.append(f"{lead} ({words(least[0])}) takes about {100 * more:.0f} % longer or more")
    return lines


def _least(slower: Iterable[tuple[Parallel, float]], degree: str, mine: int) -> tuple[Parallel, float] | None:
    return next((one for one in slower if getattr(one[0], degree) != mine), None)


def _against(best: StepCandidate, rival: StepCandidate) -> str:
    spent = best.aspects()
    more = rival.step.time_s / best.step.time_s - 1
    extra = {name: seconds - spent[name] for name, seconds in rival.aspects().items()}
    what = (max if more >= 0 else min)(extra, key=lambda name: extra[name])
    took = f"{100 * abs(more):.1f} % {'longer' if more >= 0 else 'less'}"
    return f"({words(rival.parallel)}) takes {took}, most of it {what} ({extra[what]:+.2f} s a GPU)"
