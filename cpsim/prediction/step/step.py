"""A whole training step: every microbatch on every stage of every replica, from prices of ops to time and memory.

Layers of a stage are alike and so are GPUs of a tensor-parallel group, so that each is priced once; microbatches differ
by their documents, and who waits for whom is simulated. Context-parallel ranks wait for each other in every layer,
pipeline stages by microbatch, replicas at the end of the step, where gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.model import Model
from cpsim.case.parallel import Parallel
from cpsim.errors import InfeasibleError
from cpsim.models.network.collective import transfer_seconds
from cpsim.models.network.communication import Communication
from cpsim.prediction.step.attention import PASSES, Attended, Attention
from cpsim.prediction.step.costs import PARTS, Costs, Parts, stacked
from cpsim.prediction.step.frameworks import MEGATRON, Framework, Held, Sizes
from cpsim.prediction.step.layer import BF16, FP32, Collective, Copy, ElementwisePass, Ops, flops, sent_bytes
from cpsim.prediction.step.memory import StageMemory, stage_memory, workspaces
from cpsim.prediction.step.pipeline import Pipeline, one_f_one_b, same_phase
from cpsim.prediction.step.precision import FP8, FP8_NOTE, Recipe, kept_in_fp8
from cpsim.prediction.step.program import ENDS, GRADIENT, SHARD, LayerCode, Node, Nodes, Program, Shards, program
from cpsim.prediction.step.timing import Prices, of_layers
from cpsim.schedule.schedule import Kind
from cpsim.schedule.transformer import OP_BYTES

Floats = NDArray[np.float64]
Batch = Sequence[Sequence[tuple[int, ...]]]
"""Document lengths [tokens] of every microbatch of every replica: ``batch[replica][microbatch]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step takes."""

    time_s: float
    parts: Parts
    """Seconds by cost model along the critical path, which `time_s` consists of."""
    busy: Parts
    """Seconds by cost model that the mean GPU spends in its own passes."""
    memory: tuple[StageMemory, ...]
    """Memory of every pipeline stage."""
    gpu_bytes: int
    """Memory of a GPU."""
    flops: float
    """FLOP of all GPUs: matrix products and exact mask area, forward and backward, nothing counted twice."""
    sent: float
    """Bytes that the busiest GPU sends."""
    imbalance: float
    """Work of the busiest replica over that of the mean one."""
    notes: tuple[str, ...]

    @property
    def idle_share(self) -> float:
        """Share of the time that a GPU waits for others, on average."""
        return max(0.0, 1.0 - sum(self.busy.values()) / self.time_s)

    @property
    def peak_memory_bytes(self) -> int:
        """On the fullest GPU."""
        return max(stage.total for stage in self.memory)

    @property
    def fits(self) -> bool:
        """Whether a GPU has that much."""
        return self.peak_memory_bytes <= self.gpu_bytes

    def too_large(self) -> str:
        """What a step that does not fit needs, in words."""
        stage = max(range(len(self.memory)), key=lambda s: self.memory[s].total)
        at = self.memory[stage]
        return (
            f"does not fit: stage {stage} needs {at.total / 1e9:.1f} of {self.gpu_bytes / 1e9:.1f} GB on one GPU "
            f"({at.activations / 1e9:.1f} activations, {(at.weights + at.gradients + at.optimizer) / 1e9:.1f} weights, "
            f"gradients and optimizer, {(at.logits + at.working) / 1e9:.1f} logits and what runs)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A model on a cluster, cut in one way, in one framework's code."""

    model: Model
    parallel: Parallel
    cluster: Cluster
    costs: Costs
    attention: Attention
    framework: Framework = MEGATRON
    compiled: bool = False
    recipe: Recipe | None = None
    """How linear layers compute in FP8."""
    _known: dict[tuple[object, ...], Floats] = field(default_factory=dict)
    _layers: dict[int, tuple[bool, float]] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.parallel.sharding == "fsdp"

    @property
    def held(self) -> Held:
        """What is held of every parameter."""
        return self.framework.held(self.parallel.sharding)

    def memory(self, batch: Batch, attended: Sequence[Sequence[Attended]] = ()) -> tuple[StageMemory, ...]:
        """Peak memory of every stage, for the largest microbatch; without attention's own where that is not known."""
        tokens = max(self._tokens(documents) for replica in batch for documents in replica)
        ends = [(one.exchange, one.kept) for replica in attended for one in replica] or [(0, 0)]
        exchange, kept = (max(sizes) for sizes in zip(*ends, strict=True))
        return tuple(self.stage_memory(tokens, stage, exchange, kept) for stage in range(self.parallel.pp))

    def stage_memory(self, tokens: int, stage: int, exchange: int = 0, kept: int = 0) -> StageMemory:
        """Peak memory of one stage.

        Args:
            tokens: of the largest microbatch on a context-parallel rank.
            stage: 0 is the first.
            exchange: bytes that attention allocates beyond its inputs and output, gathered keys for example.
            kept: bytes that attention of a layer keeps beyond its inputs and output.
        """
        cut, held = self.parallel, self.held
        parameters = self._parameters(stage)
        states = -(-parameters // cut.shards) if cut.sharding != "none" else parameters
        mine = -(-parameters // cut.shards) if cut.sharding == "fsdp" else parameters
        buckets = cut.replicas > 1 and not self.sharded  # gradients are views of them
        summed = held.gradient or held.made_gradient * (cut.microbatches > 1 or buckets)
        copies = 2 * FP8 * self._linear_parameters() if self.recipe and self.recipe.weight_step else 0
        found = stage_memory(
            self._programs(tokens, stage, exchange, kept),
            self.model.layers // cut.pp,
            min(cut.microbatches, cut.pp - stage),
            (held.weight * mine + copies, summed * mine, held.states * states * cut.optimizer),
            () if summed else (SHARD,) if self.sharded else (GRADIENT,),
        )
        always = workspaces(self.cluster.gpu.name, engine=self.framework.engine)
        return replace(found, working=found.working + always)

    def simulate(self, batch: Batch, attended: Sequence[Sequence[Attended]] | None = None) -> Step:
        """Runs one step.

        Args:
            batch: as many replicas and microbatches as `parallel` says.
            attended: attention of every microbatch, where a planner has placed it; None is that of the strategy.

        Raises:
            InfeasibleError: attention cannot run like this.
        """
        if attended is None:
            attended = [self.attention.of(replica) for replica in batch]
        seconds = self._passes(batch, attended)
        tokens = max(self._tokens(documents) for replica in batch for documents in replica)
        hop_s, ops = self._hop_seconds(tokens), Ops(self.model, self.parallel.tp, tokens)
        run = one_f_one_b if self.parallel.schedule == "1f1b" else same_phase
        pipeline = run(seconds.sum(axis=-1), hop_s)
        end, last = self._updates(pipeline, seconds)
        parts = self._path(pipeline, seconds, hop_s) + last
        work = seconds.sum(axis=(0, 2, 3, 4))
        return Step(
            time_s=end,
            parts=dict(zip(PARTS, parts.tolist(), strict=True)),
            busy=dict(zip(PARTS, (seconds.sum(axis=(0, 2)).mean(axis=(0, 1)) + last).tolist(), strict=True)),
            memory=self.memory(batch, attended),
            gpu_bytes=self.cluster.gpu.memory_bytes,
            flops=self._flops(batch, attended),
            sent=self._sent(batch, attended),
            imbalance=float(work.max() / work.mean()),
            notes=tuple(
                dict.fromkeys(
                    (
                        *self.costs.notes(ops.forward() + ops.backward() + ops.loss()),
                        *((FP8_NOTE,) if self.recipe else ()),
                        *(note for replica in attended for one in replica for note in one.notes),
                    )
                )
            ),
        )

    def program(self, tokens: int, stage: int = 0) -> Program:
        """What a GPU of a stage runs for a microbatch of so many tokens on a context-parallel rank."""
        return self._programs(tokens, stage)(self.model.layers // self.parallel.pp)

    def _tokens(self, documents: Sequence[int]) -> int:
        """Tokens of a microbatch on a context-parallel rank."""
        return -(-sum(documents) // self.parallel.cp)

    def _parameters(self, stage: int, part: str = "") -> int:
        """Parameters of a stage on one tensor-parallel rank; or of one part of it, see ``program.program``."""
        tp, pp = self.parallel.tp, self.parallel.pp
        words = self.model.vocab // tp * self.model.hidden
        ends = {"first": words * (stage == 0), "last": words * (stage == pp - 1)}
        each = self.model.layer_parameters(tp)
        if not part:
            return each * (self.model.layers // pp) + sum(ends.values())
        return ends.get(part, sum(ends.values()) if part == "root" else each)

    def _programs(self, tokens: int, stage: int, exchange: int = 0, kept: int = 0) -> Callable[[int], Program]:
        """The program of a stage by its number of layers."""
        sizes, code, recompute = Sizes(self.model, self.parallel.tp, tokens), self.framework, self.parallel.recompute
        runs = code.runs(sizes, self.compiled, self.recipe, self.parallel.tp_overlap)
        layer = _with_exchange(runs, exchange, kept)
        first = code.first(sizes, self.compiled) if stage == 0 else None
        last = code.last(sizes, self.compiled, self.parallel.loss_chunks) if stage == self.parallel.pp - 1 else None
        keeps = code.keeps(recompute, layer, sizes, self.compiled)
        keeps = kept_in_fp8(keeps, layer.backward) if self.recipe else keeps
        shards = self._shards(stage) if self.sharded else None
        return lambda layers: program(layer, first, last, layers, keeps, shards, code.again_to.get(recompute, ()))

    def _shards(self, stage: int) -> Shards:
        """Gathers in the working type, each copied to where ops read it; sums in fp32, from copies, over the replicas
        that share the weights, and then over groups of replicas."""

        def gather(name: str) -> Nodes:
            part = name.split()[0]
            each = FP8 if self.recipe and self.recipe.shards and part not in (*ENDS, "root") else BF16
            nbytes = each * self._parameters(stage, part)
            own = (FP32 + 3 * each) * (self._parameters(stage, part) // self.parallel.shards)
            return (
                Node(ElementwisePass("copy", own), (), {}, "gather", calls=2),  # cast, and copied side by side
                Node(Collective("all_gather", nbytes), (), {f"flat {name}": nbytes}, "gather"),
                Node(ElementwisePass("copy", 2 * nbytes), (f"flat {name}",), {f"weights {name}": nbytes}),
            )

        def scatter(name: str, gradients: Sequence[str]) -> Nodes:
            parameters = self._parameters(stage, name)
            copy = ElementwisePass("strided", (BF16 + FP32) * parameters)
            sums, mine = FP32 * parameters, FP32 * (parameters // self.parallel.shards)
            again = (Node(Collective("all_reduce", mine), (f"shard {name}",), {}, "scatter"),)
            return (
                Node(copy, tuple(gradients), {f"sums {name}": sums}),
                Node(Collective("reduce_scatter", sums), (f"sums {name}",), {f"shard {name}": mine}, "scatter"),
                *(again if self.parallel.replicate > 1 else ()),
            )

        return Shards(gather=gather, scatter=scatter, root=self.framework.root)

    def _passes(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> Floats:
        """Seconds of every pass by cost model, ``[2, R, M, P, len(PARTS)]``."""
        stages = self.parallel.pp
        seconds = np.zeros((2, len(batch), len(batch[0]), stages, len(PARTS)))
        like = {0: 0, stages - 1: stages - 1}
        for r, replica in enumerate(batch):
            for m, documents in enumerate(replica):
                tokens = self._tokens(documents)
                for stage in range(stages):
                    seconds[:, r, m, stage] = self._pass(tokens, like.get(stage, 1), attended[r][m])
        return seconds

    def _pass(self, tokens: int, stage: int, attended: Attended) -> Floats:
        """Seconds of both passes of a stage by cost model, ``[2, len(PARTS)]``.

        Where nothing runs beside layers that takes as long as their attention lets it, attention only adds.
        """
        layers, plain = self.model.layers // self.parallel.pp, not (self.sharded or self.framework.launches)
        key = tokens, stage, None if plain else str(attended.parts)
        if key not in self._known:
            parts: tuple[Parts, Parts] = ({}, {}) if plain else attended.parts
            make = self._programs(tokens, stage)
            self._known[key] = of_layers(make, self._prices(parts), layers)
        found = self._known[key]
        if not plain:
            return found
        forward, backward = stacked(attended.parts)
        again = forward * self._layer(tokens)[0]
        return np.asarray(found + layers * np.stack([forward, backward + again]))

    def _layer(self, tokens: int) -> tuple[bool, float]:
        """Whether attention of a layer runs again before the backward pass, and bytes that a rank sends to others of
        its tensor-parallel group in both passes."""
        if tokens not in self._layers:
            layer = self._programs(tokens, -1)(1)
            again = any(node.what == "fwd" for node in layer.backward)
            nodes = [node for node in (*layer.forward, *layer.backward) if node.stream == "comm"]
            talks = [node.what for node in nodes if isinstance(node.what, Collective | Copy)]
            self._layers[tokens] = again, sent_bytes(talks, self.parallel.tp)
        return self._layers[tokens]

    def _prices(self, attention: tuple[Parts, Parts]) -> Prices:
        group = self.parallel.group(self.cluster, self.parallel.shards)
        host, names = self.costs.profile.host, self.framework.launches.get(self.compiled, {})
        return Prices(
            costs=self.costs,
            kernel=self.attention.kernel,
            attention=dict(zip(PASSES, attention, strict=True)),
            sharded=lambda op: self.collective(group, Kind[op.kind.upper()], op.nbytes),
            launch_s={
                stream: tuple(host.measured([f"{name}{place}", name]) or 0.0 for place in ("", " in bwd"))
                for stream, name in names.items()
            },
        )

    def _hop_seconds(self, tokens: int) -> float:
        """Activations of a shard to the same rank of the next stage."""
        nbytes = BF16 * tokens // self.parallel.tp * self.model.hidden
        fabric, far = self.cluster.fabric, self.parallel.num_gpus // self.parallel.pp >= self.cluster.gpus_per_node
        if fabric is None or not far:
            return float(transfer_seconds(self.costs.profile.collective, nbytes, 2))
        share = fabric.uplink_bandwidth_bytes_per_s / self.cluster.gpus_per_node
        return fabric.latency_s + nbytes / min(share, fabric.flow_bandwidth_bytes_per_s)

    def _path(self, pipeline: Pipeline, seconds: Floats, hop_s: float) -> Floats:
        """Seconds of the pipeline's critical path by cost model, ``[len(PARTS)]``."""
        parts = np.sum([seconds[which, r, m, stage] for r, (which, m, stage) in pipeline.path], axis=0)
        far = self.parallel.num_gpus // self.parallel.pp >= self.cluster.gpus_per_node
        parts[PARTS.index("transfer between nodes" if far else "transfer")] += pipeline.hops * hop_s
        return np.asarray(parts)

    def _updates(self, pipeline: Pipeline, seconds: Floats) -> tuple[float, Floats]:
        """End of the step, and what follows the last backward pass by cost model, of the stage that ends last."""
        ends = []
        for stage in range(self.parallel.pp):
            backward = float(seconds[1, :, -1, stage].sum(axis=-1).max())
            update = self._update(stage, backward)
            ends.append((float(pipeline.end_s[:, stage].max()) + float(update.sum()), stage, update))
        end, _, update = max(ends, key=lambda one: one[:2])
        return end, update - self._ahead(end, pipeline, update)

    def _ahead(self, end: float, pipeline: Pipeline, update: Floats) -> Floats:
        """What of the update other stages hide, so that parts of the path sum to the time."""
        hidden = pipeline.makespan_s + float(update.sum()) - end
        return np.asarray(update * (hidden / update.sum()) if update.sum() else update)

    def _update(self, stage: int, backward_s: float) -> Floats:
        """Seconds of gradients' sums and of the optimizer on a stage, ``[len(PARTS)]``."""
        cut, held, parameters = self.parallel, self.held, self._parameters(stage)
        parts: list[Parts] = []
        group = cut.group(self.cluster, cut.replicas)
        parted = cut.sharding != "none" and cut.optimizer
        if cut.gradients != "none" and cut.sharding != "fsdp":
            summing = Kind.REDUCE_SCATTER if parted else Kind.ALL_REDUCE
            where, exposed = self.collective(group, summing, (held.gradient or held.made_gradient) * parameters)
            if self.framework.divides and cut.replicas > 1:
                parts.append(self.costs.seconds([ElementwisePass("copy", 2 * held.made_gradient * parameters)]))
            if cut.gradients == "overlapped":  # what comes last is not: the embedding, or a layer
                last = max(self._parameters(stage, name) for name in ("first", "layers")) / parameters
                exposed = max(exposed - backward_s, exposed * last)
            parts.append({where: exposed})
        if cut.optimizer:
            mine = -(-parameters // cut.shards) if parted else parameters
            if self.recipe:
                parts.append(self.costs.seconds(self._casts_of_step()))
            norm = [ElementwisePass("norm", OP_BYTES["norm"] * mine)] if held.clipped else []
            parts.append(self.costs.seconds([*norm, ElementwisePass("adam", held.optimizer * mine)]))
            if parted and cut.sharding != "fsdp":
                where, exposed = self.collective(group, Kind.ALL_GATHER, held.weight * parameters)
                parts.append({where: exposed})
        return np.asarray(stacked(parts).sum(axis=0))

    def _linear_parameters(self) -> int:
        """Parameters of a stage's layers that compute in FP8, on one tensor-parallel rank."""
        each = self.model.layer_parameters(self.parallel.tp) - 2 * self.model.hidden
        return each * (self.model.layers // self.parallel.pp)

    def _casts_of_step(self) -> list[ElementwisePass]:
        """What an update of the weights brings about in FP8: their cast, or the scales of the next ones."""
        assert self.recipe is not None
        linears = self._linear_parameters()
        casts = [ElementwisePass("copy", self.recipe.weight_step * linears)] if self.recipe.weight_step else []
        scales = ElementwisePass("norm", OP_BYTES["norm"] * (linears // self.parallel.shards))
        return [*casts, *([scales] if self.recipe.shards else [])]

    def collective(self, group: Cluster, kind: Kind, nbytes: int) -> tuple[str, float]:
        """Cost model and seconds of a collective among replicas."""
        communication = Communication(group, self.costs.profile)
        seconds, _, _, between = communication.collective(kind, float(nbytes), group.num_gpus, group.num_nodes)
        return "collective between nodes" if between else "collective", seconds

    def _sent(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> float:
        """Bytes that the busiest GPU sends: among tensor-parallel ranks, in attention, to other stages, to replicas."""
        layers, tp, stages = self.model.layers // self.parallel.pp, self.parallel.tp, self.parallel.pp
        hops = 0 if stages == 1 else 1 if stages == 2 else 2
        most = 0.0
        for replica, found in zip(batch, attended, strict=True):
            total = 0.0
            for documents, one in zip(replica, found, strict=True):
                total += layers * (one.sent + self._layer(self._tokens(documents))[1])
                total += hops * BF16 * self._tokens(documents) // tp * self.model.hidden
            most = max(most, total)
        cut, held = self.parallel, self.held
        parameters, share = self._parameters(0), 1 - 1 / cut.replicas
        if self.sharded:  # gathered forward and backward, scattered once, in every microbatch
            each = 1 - 1 / cut.shards
            low = self._linear_parameters() if self.recipe and self.recipe.shards else 0
            gathered = 2 * (BF16 * (parameters - low) + FP8 * low)
            return most + each * cut.microbatches * (gathered + FP32 * parameters)
        parted = cut.sharding != "none" and cut.optimizer
        gradients = (held.gradient or held.made_gradient) * parameters
        summed = gradients * (cut.gradients != "none") * (1 if parted else 2)
        return most + share * (summed + held.weight * parameters * parted)

    def _flops(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> float:
        total = 0.0
        for replica, found in zip(batch, attended, strict=True):
            for documents, one in zip(replica, found, strict=True):
                ops = Ops(self.model, 1, sum(documents))
                pairs = 4.0 * one.area * self.model.heads * self.model.head_dim
                total += self.model.layers * (3 * flops(ops.forward()) + 3.5 * pairs) + 3 * flops(ops.loss())
        return total


def _with_exchange(code: LayerCode, exchange: int, kept: int) -> LayerCode:
    """A layer whose attention allocates so many bytes beyond its inputs and output, and keeps so many."""

    def more(node: Node) -> Node:
        if node.what == "fwd":
            return replace(node, makes={**node.makes, "exchange": exchange, "beside": kept})
        if node.what == "bwd":
            return replace(node, reads=(*node.reads, "beside"), makes={**node.makes, "dexchange": exchange})
        return node

    if not (exchange or kept):
        return code
    forward, backward = (tuple(map(more, side)) for side in (code.forward, code.backward))
    return LayerCode(forward=forward, backward=backward, kept=code.kept | {"beside"})


def deal(sequences: Sequence[tuple[int, ...]], parallel: Parallel) -> Batch:
    """Sequences to replicas and microbatches in order: each microbatch of a replica gets equally many.

    Raises:
        InfeasibleError: they do not divide.
    """
    places = parallel.dp * parallel.microbatches
    if len(sequences) % places:
        raise InfeasibleError(
            f"microbatches: expected {len(sequences)} sequences to divide into dp x microbatches = {parallel.dp} x "
            f"{parallel.microbatches} = {places} parts"
        )
    each = len(sequences) // places
    parts = [sum(sequences[i * each : (i + 1) * each], ()) for i in range(places)]
    return [parts[replica :: parallel.dp] for replica in range(parallel.dp)]


def cut(documents: Sequence[int], sequence: int) -> list[tuple[int, ...]]:
    """Documents one after the other in sequences of so many tokens; what overflows opens the next one."""
    edges = np.union1d(np.cumsum(documents), np.arange(sequence, sum(documents) + 1, sequence))
    lens, which = np.diff(edges, prepend=0), (edges - 1) // sequence
    return [tuple(lens[which == i].tolist()) for i in range(int(which[-1]) + 1)]
