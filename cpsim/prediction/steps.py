"""Scenarios of whole training steps: how documents reach replicas, and what the step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpsim.case.cluster import Cluster
from cpsim.case.parallel import Parallel
from cpsim.case.resolve import model_of, workload_of
from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.names import MASK_NAMES, Options
from cpsim.models.profile import Profile
from cpsim.prediction.step.attention import PASSES, Attention
from cpsim.prediction.step.costs import Costs
from cpsim.prediction.step.frameworks import DEFAULT, Framework, framework
from cpsim.prediction.step.step import Step, StepModel, cut, deal
from cpsim.strategies.others import CPSIM, Implementation, implementation
from cpsim.strategies.others.facts import DENSE


@dataclass(frozen=True, slots=True)
class StepCase:
    """The step of a scenario; remembers what attention takes, for other ways to cut the same step."""

    scenario: Scenario
    cluster: Cluster
    profile: Profile
    _sequences: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], dict[tuple[object, ...], Any]] = field(default_factory=dict)
    _attention: dict[tuple[int, int, str, str, bool], Attention] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """Packed sequences of the step, where they have a length of their own; otherwise one."""
        return self.scenario.num_tokens // self.scenario.context if self.scenario.context else 1

    def parallel(self) -> Parallel:
        """How the scenario cuts the step; what it leaves out is as its framework has it, or as plain as can be."""
        return self.framework.cut(self.scenario.parallel, self.scenario.gpus, self.num_sequences)

    @property
    def framework(self) -> Framework:
        """Whose code runs it."""
        return framework(self.scenario.framework or DEFAULT)

    def sequences(self, parallel: Parallel) -> list[tuple[int, ...]]:
        """Documents of every packed sequence.

        Raises:
            ScenarioError: tokens do not divide into microbatches, or are not what batch says.
        """
        tokens, given, batch = self.scenario.num_tokens, self.scenario.context, parallel.batch
        places = parallel.dp * parallel.microbatches * (batch or 1)
        product = "dp x microbatches" + " x batch" * (batch is not None)
        degrees = f"{parallel.dp} x {parallel.microbatches}" + f" x {batch}" * (batch is not None)
        if given is None and tokens % places:
            raise ScenarioError(f"tokens: expected a multiple of {product} = {degrees}, got {tokens}")
        if given is not None and batch is not None and places != tokens // given:
            raise ScenarioError(
                f"batch: expected {product} = {tokens // given} sequences of {given} tokens, got {degrees} = {places}; "
                "leave batch or microbatches out"
            )
        context = given or tokens // places
        if self._apart(parallel):
            return [(context,)] * (tokens // context)
        if context not in self._sequences:
            self._sequences[context] = cut(workload_of(self.scenario).documents, context)
        return self._sequences[context]

    def _apart(self, parallel: Parallel) -> bool:
        """Whether a microbatch has several sequences under a mask that knows no documents: they do not see each
        other all the same."""
        places, tokens = parallel.dp * parallel.microbatches, self.scenario.num_tokens
        several = places * self.scenario.context < tokens if self.scenario.context else (parallel.batch or 1) > 1
        return several and MASK_NAMES[self.scenario.mask_name].documents == "ignored"

    def _mask(self, parallel: Parallel, code: Implementation) -> tuple[str, Options]:
        """The mask of attention in a microbatch, and its options.

        Raises:
            InfeasibleError: sequences of a microbatch cannot be kept apart.
        """
        name, options = self.scenario.mask_name, self.scenario.mask_options
        if not self._apart(parallel):
            return name, options
        if name not in DENSE or (parallel.cp > 1 and code.name != CPSIM.name):
            what = f"mask {name}" if name not in DENSE else f"{code.name} and cp = {parallel.cp}"
            raise InfeasibleError(
                f"batch: several sequences of a microbatch cannot be predicted with {what}; use a microbatch for each"
            )
        return f"{name}_document", ()

    def model(self, parallel: Parallel, strategy: str, knobs: Mapping[str, Any]) -> StepModel:
        """The step cut in one way.

        Raises:
            InfeasibleError: the model or the cluster cannot be cut like this.
        """
        model, scenario = model_of(self.scenario), self.scenario
        parallel.check(model, self.cluster)
        self.framework.check(parallel, model)
        costs = Costs(self.profile, parallel.tp, parallel.num_gpus)
        key = parallel.tp, parallel.cp, strategy, str(sorted(knobs.items())), self._apart(parallel)
        if parallel.cp == 1 and strategy != "none":
            raise InfeasibleError(f"cp: strategy {strategy} needs several ranks, got cp = 1; use strategy none")
        if key not in self._attention:
            theirs = parallel.cp > 1 and scenario.implementation == CPSIM.name
            code = implementation(self.framework.attention if theirs else scenario.implementation)
            code = code.calling(scenario.kernel, theirs and self.framework.compiled(scenario.compile))
            code.check_kernel(scenario.kernel)
            mask, options = self._mask(parallel, code)
            slowest = {p: costs.slowest(self.profile.between_gpus(scenario.kernel, p)) for p in PASSES}
            self._attention[key] = Attention(
                model=model,
                tp=parallel.tp,
                cluster=parallel.group(self.cluster, parallel.cp),
                profile=self.profile,
                strategy=strategy,
                knobs=knobs,
                code=code,
                kernel=scenario.kernel,
                mask=mask,
                mask_options=options,
                slowest=slowest,
            )
        return StepModel(
            model=model,
            parallel=parallel,
            cluster=self.cluster,
            costs=costs,
            attention=self._attention[key],
            framework=self.framework,
            compiled=self.framework.compiled(scenario.compile),
            _known=self._passes.setdefault(self._alike(parallel), {}),
        )

    def _alike(self, parallel: Parallel) -> tuple[object, ...]:
        """What the time of a pass depends on, of how a step is cut, beside its tokens and layers."""
        shards = (parallel.shards, parallel.replicate) if parallel.sharding == "fsdp" else ()
        return parallel.tp, parallel.ep, parallel.recompute, parallel.loss_chunks, *shards

    def simulate(self, parallel: Parallel, strategy: str, knobs: Mapping[str, Any]) -> Step:
        """Runs the step cut in one way.

        Raises:
            InfeasibleError: it cannot run; one line that says why.
        """
        return self.model(parallel, strategy, knobs).simulate(deal(self.sequences(parallel), parallel))
