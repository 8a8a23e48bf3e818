"""Scenarios of whole training steps: how documents reach replicas, and what the step takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.parallel import Parallel
from cpsim.case.resolve import lora_of, model_of, workload_of
from cpsim.case.scenario import Scenario
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.names import MASK_NAMES, Options
from cpsim.models.attention.fp8 import faster
from cpsim.models.profile import Profile
from cpsim.prediction.step.adapters import adapted, frozen_recipe
from cpsim.prediction.step.attention import CAUSAL, PASSES, Attended, Attention
from cpsim.prediction.step.costs import Costs
from cpsim.prediction.step.frameworks import DEFAULT, Framework, framework
from cpsim.prediction.step.memory import StageMemory
from cpsim.prediction.step.offload import check as check_offload
from cpsim.prediction.step.opened import Opened
from cpsim.prediction.step.precision import Recipe, check_gpu
from cpsim.prediction.step.recurrent import Mixed, mixed
from cpsim.prediction.step.step import Known, Step, StepModel, cut, deal
from cpsim.strategies import STRATEGIES
from cpsim.strategies.others import CPSIM, Implementation, implementation
from cpsim.strategies.others.facts import DENSE, DOCUMENTS, Support

SLOW_PLANS: Final = ("dcp",)
"""Strategies that plan every batch for seconds are tried only where the scenario names them."""
FAR: Final = 1.15
"""Strategies that take so many times as long as the best are not tried on more ranks."""
Floats = NDArray[np.float64]
Choice = tuple[str, Mapping[str, Any]]
"""Strategy and knobs."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """The step of a scenario; remembers what attention takes, for other ways to cut the same step."""

    scenario: Scenario
    cluster: Cluster
    profile: Profile
    _sequences: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    _attention: dict[tuple[int, int, str, str, bool], Attention | Mixed] = field(default_factory=dict)
    _best: dict[tuple[int, int], Choice] = field(default_factory=dict)
    _slow: dict[str, int] = field(default_factory=dict)
    """Strategies with knobs that were far from the best, and on how many ranks."""
    _known: dict[tuple[object, ...], Known] = field(default_factory=dict)
    """Programs of ways to cut whose passes are alike."""
    _memory: dict[Parallel, dict[tuple[int, ...], StageMemory]] = field(default_factory=dict)
    """Memory of stages."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", self.profile.in_layers())

    def parallel(self) -> Parallel:
        """How the scenario cuts the step; what it leaves out is as its framework has it, or as plain as can be."""
        return self.framework.cut(self.scenario.parallel, self.scenario.gpus, self.scenario.num_sequences)

    @property
    def framework(self) -> Framework:
        """Whose code runs it.

        Raises:
            InfeasibleError: it cannot train adapters, or has no such cross entropy.
        """
        known, lora = framework(self.scenario.framework or DEFAULT), lora_of(self.scenario)
        if self.scenario.parallel is not None:
            known = known.with_loss(self.scenario.parallel.loss_fusion)
        if lora is None:
            return known
        recipe = known.recipe(self.scenario.precision, known.compiled(self.scenario.compile)) if known.recipes else None
        return adapted(known, lora, frozen_recipe(recipe, self.cluster.gpu) if recipe else None)

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
        model, scenario, their = model_of(self.scenario), self.scenario, self.framework
        compiled = their.compiled(scenario.compile)
        parallel.check(model, self.cluster)
        their.check(parallel, model, compiled)
        recipe = self._recipe(their, compiled)
        if model.recurrent and (scenario.offload or scenario.attends_in_fp8):
            raise InfeasibleError("model: steps with a state are predicted without offload and with attention in bf16")
        if scenario.offload:
            check_offload(their, parallel)
        costs = Costs(self.profile, parallel.tp, parallel.num_gpus)
        key = parallel.tp, parallel.cp, strategy, str(sorted(knobs.items())), self._apart(parallel)
        if parallel.cp == 1 and strategy != "none":
            raise InfeasibleError(f"cp: strategy {strategy} needs several ranks, got cp = 1; use strategy none")
        offer = self._offer(strategy)
        if model.sinks and offer is not None and not offer.sinks:
            raise InfeasibleError(
                f"sinks: {their.name} has none with {strategy}; Transformer Engine joins them with a2a"
            )
        if key not in self._attention:
            code = self._code(parallel)
            code.check_kernel(scenario.kernel)
            mask, options = self._mask(parallel, code)
            slowest = {p: costs.slowest(self.profile.between_gpus(scenario.kernel, p)) for p in PASSES}
            attends = Attention(
                model=replace(model, recurrent=None, attention_layers=0, bare_layers=0, kv_shared_layers=0),
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
                fp8=faster(self.cluster.gpu.name) if scenario.attends_in_fp8 else None,
            )
            self._attention[key] = mixed(attends, model, their.exchange) if model.recurrent else attends
        return StepModel(
            model=model,
            parallel=parallel,
            cluster=self.cluster,
            costs=costs,
            attention=self._attention[key],
            framework=their,
            compiled=compiled,
            offload=scenario.offload is not None,
            recipe=recipe if recipe is None or parallel.sharding == "fsdp" else recipe.unsharded(),
            _known=self._known.setdefault(self._alike(parallel), Known()),
            _memory=self._memory.setdefault(parallel, {}),
        )

    def _recipe(self, their: Framework, compiled: bool) -> Recipe | None:
        """How linear layers compute in FP8, if the scenario asks for it.

        Raises:
            InfeasibleError: the framework or the GPU cannot, or not with what else is asked for.
        """
        recipe = their.recipe(self.scenario.precision, compiled)
        if recipe is None:
            return None
        check_gpu(recipe, self.cluster.gpu)
        if self.scenario.offload:
            raise InfeasibleError("precision: steps with offload are predicted in bf16; leave it out")
        return None if their.lora else recipe.on(self.cluster.gpu)  # frozen layers have theirs

    def _alike(self, parallel: Parallel) -> tuple[object, ...]:
        """What the time of a pass depends on, of how a step is cut, beside its tokens and layers."""
        shards = (parallel.shards, parallel.replicate) if parallel.sharding == "fsdp" else ()
        alone = parallel.alone if parallel.ep_overlap else 1.0
        experts, chunks = (parallel.ep, parallel.dispatcher, alone), (parallel.loss_chunks, parallel.mlp_chunks)
        return parallel.tp, parallel.tp_overlap, *experts, parallel.recompute, *chunks, *shards

    def _code(self, parallel: Parallel) -> Implementation:
        """Whose attention runs."""
        theirs = parallel.cp > 1 and self.scenario.implementation == CPSIM.name
        code = implementation(self.framework.attention if theirs else self.scenario.implementation)
        if self.framework.engine and self.scenario.framework and code is CPSIM:
            code = replace(code, direct=("cudnn",))  # Transformer Engine calls it without PyTorch
        return code.calling(self.scenario.kernel, theirs and self.framework.compiled(self.scenario.compile))

    def least_memory(self, parallel: Parallel) -> int:
        """Bytes that the fullest GPU needs at least, whatever the strategy.

        Raises:
            InfeasibleError: the model or the cluster cannot be cut like this.
        """
        batch, model = deal(self.sequences(parallel), parallel), self.model(parallel, "none", {})
        tokens = model.most_tokens(batch)
        ends = {0, parallel.pp - 1}  # stages between have fewer microbatches in flight than the first
        return max(model.stage_memory(tokens, stage).needed for stage in ends)

    def bound_s(self, parallel: Parallel, choice: Choice | None = None) -> float:
        """Seconds of a step without simulating attention of every microbatch.

        Args:
            parallel: how it is cut.
            choice: strategy and knobs; microbatches lie between those with the most and the least work. None: every
                rank has the same share of attention, and nothing of its communication shows.

        Raises:
            InfeasibleError: the model or the cluster cannot be cut like this.
        """
        batch, model = deal(self.sequences(parallel), parallel), self.model(parallel, "none", {})
        alone = replace(parallel, cp=1, dp=parallel.dp * parallel.cp)
        if self.scenario.mask_name not in CAUSAL:
            return model.time_s(batch, [[Attended(({}, {}), 0, 0.0, 0) for _ in replica] for replica in batch])
        attention = self.model(alone, "none", {}).attention
        found = [attention.of(replica) for replica in batch]
        alone_s = np.array([[one.seconds for one in replica] for replica in found])
        share = np.full(alone_s.shape, 1 / parallel.cp)
        if choice is not None:
            microbatches = [documents for replica in batch for documents in replica]
            ends = [microbatches[int(at)] for at in (alone_s.argmin(), alone_s.argmax())]
            those = self.model(parallel, *choice).attention.of(ends)
            ours_s = np.interp(alone_s, [alone_s.min(), alone_s.max()], [one.seconds for one in those])
            share = np.maximum(share, ours_s / alone_s)
        shared = [list(map(_shared, *rows)) for rows in zip(found, share.tolist(), strict=True)]
        return model.time_s(batch, shared)

    def best_strategy(self, parallel: Parallel) -> Choice:
        """The strategy that is fastest on the microbatch with the most work, or the one that the scenario names.

        Raises:
            InfeasibleError: none can run.
        """
        if parallel.cp == 1:
            return "none", {}
        key = parallel.tp, parallel.cp
        if key not in self._best:
            self._best[key] = self._choose(parallel)
        return self._best[key]

    def _choose(self, parallel: Parallel) -> Choice:
        heaviest, refused = self._heaviest(parallel), list[str]()
        found = self._tried(parallel, heaviest, refused) or self._tried(parallel, heaviest, refused, slow_too=True)
        if not found:
            raise InfeasibleError(f"cp: no strategy runs on {parallel.cp} ranks; {refused[0]}")
        best_s, _, best = min(found)
        for seconds, _, choice in found:
            if seconds > FAR * best_s:
                self._slow[str(choice)] = min(parallel.cp, self._slow.get(str(choice), parallel.cp))
        return best

    def _tried(
        self, parallel: Parallel, microbatch: tuple[int, ...], refused: list[str], slow_too: bool = False
    ) -> list[tuple[float, int, Choice]]:
        """Seconds of one microbatch by strategy, with numbers that break ties; why others cannot run is added."""
        found: list[tuple[float, int, Choice]] = []
        for name in self._strategies(parallel):
            try:
                for knobs in self._settings(parallel, name, microbatch):
                    if not slow_too and self._slow.get(str((name, dict(knobs))), parallel.cp + 1) <= parallel.cp:
                        continue
                    (attended,) = self.model(parallel, name, knobs).attention.of([microbatch])
                    found.append((attended.seconds, len(found), (name, dict(knobs))))
            except InfeasibleError as reason:
                refused.append(f"{name}: {reason}")
        return found

    def _heaviest(self, parallel: Parallel) -> tuple[int, ...]:
        """The microbatch with the most work."""
        batch = deal(self.sequences(parallel), parallel)
        return max((m for replica in batch for m in replica), key=lambda m: sum(n * n for n in m))

    def _settings(self, parallel: Parallel, name: str, microbatch: tuple[int, ...]) -> Iterable[Mapping[str, Any]]:
        """Knobs of a strategy that are worth a try."""
        if self.scenario.knobs:
            return [self.scenario.knobs]
        attention = self.model(parallel, name, {}).attention
        workload = attention.workload(microbatch)
        known = STRATEGIES[name].knobs(workload, attention.cluster)
        if self.scenario.implementation != CPSIM.name and self._code(parallel).strategies is not None:
            return [{}]  # their code has settings of its own
        return known if (offer := self._offer(name)) is None else self._offered(name, offer, known, workload, parallel)

    def _offer(self, name: str) -> Support | None:
        """What the framework that the scenario names has of a strategy; None where nothing restricts it."""
        ours = self.scenario.framework and self.scenario.implementation == CPSIM.name
        return self.framework.offers.get(name) if ours else None

    def _offered(
        self, name: str, offer: Support, known: Iterable[Mapping[str, Any]], workload: Workload, parallel: Parallel
    ) -> list[Mapping[str, Any]]:
        """Those knobs that the framework has; it gathers and sends all heads at once. Its data loader pads documents to
        whole chunks, which are so small that they are left out.

        Raises:
            InfeasibleError: it has the strategy, and not for this workload.
        """
        if workload.mask in DOCUMENTS:
            offer = replace(offer, chunks=0)
        replace(offer, whole_heads=False).check(self.framework.name, name, workload, parallel.cp)
        found, last = list[Mapping[str, Any]](), None
        for knobs in known:
            own = {knob: value for knob, value in knobs.items() if knob in (*offer.knobs, "ulysses")}
            if own in found or any(value not in offer.knobs.get(knob, (value,)) for knob, value in own.items()):
                continue
            try:
                offer.check(self.framework.name, name, workload, int(own.get("ulysses", parallel.cp)))
                found.append(own)
            except InfeasibleError as reason:
                last = reason
        if last is not None and not found:
            raise last
        return found

    def _strategies(self, parallel: Parallel) -> list[str]:
        """Those to choose from: the scenario's, or all that the code has and that are planned at once."""
        if self.scenario.strategy:
            return [self.scenario.strategy]
        theirs = self._code(parallel).strategies
        known = [name for name in STRATEGIES if name not in ("none", *SLOW_PLANS)]
        if any(map(self._offer, known)):
            known = [name for name in known if self._offer(name)]
        return [name for name in known if theirs is None or name in theirs]

    def simulate(self, parallel: Parallel, strategy: str, knobs: Mapping[str, Any]) -> Step:
        """Runs the step cut in one way.

        Raises:
            InfeasibleError: it cannot run; one line that says why.
        """
        return self.model(parallel, strategy, knobs).simulate(deal(self.sequences(parallel), parallel))

    def opened(self, parallel: Parallel, strategy: str, knobs: Mapping[str, Any]) -> Opened:
        """When everything of the step runs, cut in one way.

        Raises:
            InfeasibleError: it cannot run; one line that says why.
        """
        return self.model(parallel, strategy, knobs).opened(deal(self.sequences(parallel), parallel))


def _shared(attended: Attended, share: float) -> Attended:
    """Attention of one GPU, of which a rank has a share."""
    forward, backward = ({name: s * share for name, s in parts.items()} for parts in attended.parts)
    kinds = tuple(_shared(one, share) for one in attended.kinds)
    return replace(attended, parts=(forward, backward), notes=(), kinds=kinds)
