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
from cpsim.models.profile import Profile
from cpsim.prediction.step.attention import PASSES, Attention
from cpsim.prediction.step.costs import Costs
from cpsim.prediction.step.frameworks import DEFAULT, Framework, framework
from cpsim.prediction.step.precision import check_gpu
from cpsim.prediction.step.step import Step, StepModel, cut, deal
from cpsim.strategies.others import CPSIM, implementation


@dataclass(frozen=True, slots=True)
class StepCase:
    """The step of a scenario; remembers what attention takes, for other ways to cut the same step."""

    scenario: Scenario
    cluster: Cluster
    profile: Profile
    _sequences: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    _attention: dict[tuple[int, int, str, str], Attention] = field(default_factory=dict)

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
            ScenarioError: tokens do not divide into microbatches.
        """
        tokens, places = self.scenario.num_tokens, parallel.dp * parallel.microbatches
        if self.scenario.context is None and tokens % places:
            raise ScenarioError(
                f"tokens: expected a multiple of dp x microbatches = {parallel.dp} x {parallel.microbatches}, "
                f"got {tokens}"
            )
        context = self.scenario.context or tokens // places
        if context not in self._sequences:
            self._sequences[context] = cut(workload_of(self.scenario).documents, context)
        return self._sequences[context]

    def model(self, parallel: Parallel, strategy: str, knobs: Mapping[str, Any]) -> StepModel:
        """The step cut in one way.

        Raises:
            InfeasibleError: the model or the cluster cannot be cut like this.
        """
        model, scenario = model_of(self.scenario), self.scenario
        parallel.check(model, self.cluster)
        self.framework.check(parallel, self.framework.compiled(scenario.compile))
        compiled = self.framework.compiled(scenario.compile)
        recipe = self.framework.recipe(scenario.precision, compiled)
        if recipe:
            check_gpu(recipe, self.cluster.gpu.name)
        costs = Costs(self.profile, parallel.tp, parallel.num_gpus)
        key = parallel.tp, parallel.cp, strategy, str(sorted(knobs.items()))
        if parallel.cp == 1 and strategy != "none":
            raise InfeasibleError(f"cp: strategy {strategy} needs several ranks, got cp = 1; use strategy none")
        if key not in self._attention:
            theirs = parallel.cp > 1 and scenario.implementation == CPSIM.name
            code = implementation(self.framework.attention if theirs else scenario.implementation)
            code = code.calling(scenario.kernel)
            code.check_kernel(scenario.kernel)
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
                mask=scenario.mask_name,
                mask_options=scenario.mask_options,
                slowest=slowest,
            )
        return StepModel(
            model=model,
            parallel=parallel,
            cluster=self.cluster,
            costs=costs,
            attention=self._attention[key],
            framework=self.framework,
            compiled=compiled,
            recipe=recipe if recipe is None or parallel.sharding == "fsdp" else recipe.unsharded(),
        )

    def simulate(self, parallel: Parallel, strategy: str, knobs: Mapping[str, Any]) -> Step:
        """Runs the step cut in one way.

        Raises:
            InfeasibleError: it cannot run; one line that says why.
        """
        return self.model(parallel, strategy, knobs).simulate(deal(self.sequences(parallel), parallel))
