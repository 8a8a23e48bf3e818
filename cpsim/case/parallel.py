"""How a training step is spread over GPUs: tensor, context, data and pipeline parallelism.

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline parallelism, as Megatron-LM does,
so that tensor-parallel groups are neighbours in a node and pipeline stages are farthest apart.

Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
section 3; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from cpsim.case.cluster import Cluster
from cpsim.case.model import Model
from cpsim.errors import InfeasibleError

Fp8 = Literal["tensorwise", "rowwise", "delayed", "current", "mxfp8", "nvfp4"]
Precision = Literal["bf16", "fp8", "nvfp4"] | Mapping[Literal["fp8", "attention"], str]
"""Of linear layers; ``fp8`` alone is the recipe that the framework takes. A mapping may say that attention is in FP8,
too."""
Recompute = Literal["none", "selective", "mlp", "full", "per_op"]
Sharding = Literal["none", "zero1", "zero2", "fsdp"]
PipelineSchedule = Literal["1f1b", "same_phase"]
Gradients = Literal["none", "exposed", "overlapped"]
Dispatcher = Literal["alltoall", "flex"]
CudaGraphs = Literal["none", "attention", "layers"]
LossFusion = Literal["none", "native", "te"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Degrees of parallelism and what goes with them."""

    tp: int
    """Tensor-parallel ranks, with sequence parallelism."""
    pp: int
    """Pipeline stages."""
    dp: int
    """Data-parallel replicas."""
    cp: int
    """Context-parallel ranks."""
    microbatches: int
    """Microbatches of one replica in a step."""
    recompute: Recompute
    """Activations that are computed again in the backward pass: none; those of attention's kernel (`selective`), which
    flash attention has none of; those of the MLP; all of a layer; or all but results of attention and of every second
    matrix product (`per_op`)."""
    schedule: PipelineSchedule
    """Order of microbatches in pipeline stages: one forward, one backward; or all stages in one phase at a time."""
    gradients: Gradients
    """Summing gradients over replicas: not at all, after the last backward pass, or beside it."""
    optimizer: bool
    """Whether a step updates the weights."""
    sharding: Sharding = "zero1"
    """What replicas have of the weights: all (`none`); all, but each a part of the optimizer's states (`zero1`), and of
    gradients (`zero2`); or each a part of everything, gathered layer by layer (`fsdp`)."""
    replicate: int = 1
    """Groups of replicas that are sharded each for itself, as hybrid sharding does; 1: one group of all."""
    loss_chunks: int = 1
    """Parts in which logits and loss are computed, one after the other."""
    batch: int | None = None
    """Sequences of a microbatch of one replica; None is what tokens, replicas, microbatches and context leave."""
    ep: int = 1
    """Ranks that share the experts of a layer, among those that data and context parallelism give the same weights."""
    virtual_pp: int = 1
    """Chunks of layers on each stage; more than one is interleaved 1F1B."""
    layers_first: int | None = None
    """Layers of the first stage; None is as many as on others."""
    layers_last: int | None = None
    """Layers of the last stage; None is as many as on others."""
    embedding_as_layer: bool = False
    """Whether the embedding counts as a layer of the first chunk where layers are divided."""
    loss_as_layer: bool = False
    """Whether logits and loss count as a layer of the last chunk where layers are divided."""
    layout: tuple[int, ...] | None = None
    """Layers of every virtual stage, in the order of the model, where they are divided by no rule."""
    tp_overlap: bool = False
    """Whether tensor parallelism exchanges chunks beside matrix products of other chunks."""
    ep_overlap: bool = False
    """Whether experts exchange tokens beside layers of another microbatch."""
    dispatcher: Dispatcher = "alltoall"
    """How tokens reach their experts: once for each of them (`alltoall`), or once for each rank that has some of them
    (`flex`: DeepEP, HybridEP)."""
    cuda_graphs: CudaGraphs = "none"
    """What hosts launch as CUDA graphs: nothing, attention and routers (`attention`), or whole layers (`layers`)."""
    loss_fusion: LossFusion | None = None
    """Kernels of Megatron's cross entropy: op by op (`none`), compiled (`native`), or Transformer Engine's (`te`); None
    is what the framework does."""
    mlp_chunks: int = 1
    """Chunks of a rank's tokens in which the MLP runs, one after the other; the backward pass computes each again."""

    @property
    def num_gpus(self) -> int:
        """GPUs in use."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: those of data and context parallelism together."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Replicas that share what is sharded."""
        return self.replicas // self.replicate

    @property
    def virtual_stages(self) -> int:
        """Chunks of layers on all stages, in the order of the model: chunk c of stage s is number c * pp + s."""
        return self.pp * self.virtual_pp

    @property
    def alone(self) -> float:
        """Share of passes of a step beside which no other microbatch runs the other way: the first forward ones and the
        last backward ones of the first stage.

        Reference: Megatron-Core, pipeline_parallel/schedules.py, get_pp_rank_microbatches (warm-up).
        """
        warm = 2 * (self.pp - 1) + (self.virtual_pp - 1) * self.pp + 1
        return min(1.0, warm / (self.microbatches * self.virtual_pp))

    def chunk_layers(self, layers: int) -> tuple[int, ...]:
        """Layers of every virtual stage, of so many in all.

        Raises:
            InfeasibleError: they do not divide; one line that says what to name.
        """
        return _chunk_layers(self, layers)

    def _check_chunks(self) -> None:
        """Whether stages can hold several chunks of layers."""
        if self.virtual_pp == 1:
            return
        if self.pp == 1:
            raise InfeasibleError(
                f"virtual_pp: expected several stages, got pp = 1 and {self.virtual_pp} chunks of each"
            )
        if self.schedule != "1f1b":
            raise InfeasibleError(f"virtual_pp: expected schedule 1f1b, got {self.schedule}; use virtual_pp = 1")
        if self.microbatches % self.pp:
            raise InfeasibleError(
                f"virtual_pp: expected microbatches to be a multiple of pp = {self.pp}, got {self.microbatches}; "
                "change microbatches or use virtual_pp = 1"
            )

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.replicas // self.ep

    def _check_experts(self, model: Model, cluster: Cluster) -> None:
        """Whether experts can be shared like this."""
        if not model.experts:
            if self.ep > 1:
                raise InfeasibleError(f"ep: expected a model with experts, got ep = {self.ep} and a dense one; use 1")
            return
        for name, number in (("experts", model.experts), ("dp x cp", self.replicas)):
            if number % self.ep:
                raise InfeasibleError(f"ep: expected a divisor of {name} = {number}, got {self.ep}")
        per_node = min(cluster.gpus_per_node, cluster.num_gpus) // self.tp
        if per_node % self.ep and self.ep % per_node:
            raise InfeasibleError(
                f"ep: expected a divisor or a multiple of {per_node} GPUs of a node with tp = {self.tp}, got {self.ep}"
            )

    def check(self, model: Model, cluster: Cluster) -> None:
        """Whether the model can be cut like this on that cluster.

        Raises:
            InfeasibleError: it cannot; one line that says why.
        """
        if cluster.gpus_per_node % self.tp:
            raise InfeasibleError(f"tp: expected a divisor of {cluster.gpus_per_node} GPUs of a node, got {self.tp}")
        inner = ("expert_ffn" if model.experts else "ffn", model.inner)
        for name, number in (("kv_heads", model.kv_heads), inner, ("vocab", model.vocab)):
            if number % self.tp:
                raise InfeasibleError(f"tp: expected a divisor of {name} = {number}, got {self.tp}")
        if self.replicas % self.replicate:
            raise InfeasibleError(
                f"replicate: expected a divisor of dp x cp = {self.replicas} replicas, got {self.replicate}"
            )
        self._check_chunks()
        self.chunk_layers(model.layers)
        self.group(cluster, self.cp)
        self.group(cluster, self.replicas)
        self._check_experts(model, cluster)

    def expert_group(self, cluster: Cluster) -> Cluster:
        """The part of the cluster that replicas of the same experts see; see ``group``."""
        return self.group(cluster, self.expert_replicas, min(self.tp * self.ep, cluster.gpus_per_node))

    def group(self, cluster: Cluster, size: int, stride: int | None = None) -> Cluster:
        """The part of the cluster that every `stride`-th GPU sees: `size` of them, with their share of the network.

        Args:
            cluster: all of it.
            size: GPUs of the group.
            stride: None is `tp`.

        Raises:
            InfeasibleError: they do not fill nodes.
        """
        stride = stride or self.tp
        per_node = cluster.gpus_per_node // stride
        if size > per_node and size % per_node:
            raise InfeasibleError(
                f"cp and dp: groups of {size} GPUs with tp = {self.tp} do not fill nodes of {cluster.gpus_per_node}; "
                f"use at most {per_node} or a multiple of it"
            )
        fabric = cluster.fabric
        if fabric is not None:
            nics = max(1, fabric.nics_per_node // stride)
            rate = fabric.nic_bandwidth_bytes_per_s * fabric.nics_per_node / (nics * stride)
            fabric = replace(fabric, nics_per_node=nics, nic_bandwidth_bytes_per_s=rate)
        return replace(cluster, gpus_per_node=per_node, num_gpus=size, fabric=fabric)


@lru_cache(256)
def _chunk_layers(cut: Parallel, layers: int) -> tuple[int, ...]:
    """Layers of every virtual stage.

    Reference: Megatron-Core, transformer/transformer_block.py, get_num_layers_to_build.
    """
    if cut.layout:
        return _laid_out(cut, cut.layout, layers)
    if cut.layers_first or cut.layers_last:
        return _with_own_ends(cut, layers)
    counted = layers + cut.embedding_as_layer + cut.loss_as_layer
    ends = " with embedding or loss" if counted > layers else ""
    if counted % cut.pp:
        raise InfeasibleError(
            f"pp: expected a divisor of {counted} layers{ends}, got {cut.pp}; for stages with unequal layers name "
            "layers_first and layers_last, or embedding_as_layer and loss_as_layer"
        )
    if counted % cut.virtual_stages:
        stage = counted // cut.pp
        raise InfeasibleError(
            f"virtual_pp: expected a divisor of {stage} layers of a stage{ends}, got {cut.virtual_pp}"
        )
    found = [counted // cut.virtual_stages] * cut.virtual_stages
    found[0] -= cut.embedding_as_layer
    found[-1] -= cut.loss_as_layer
    if min(found) < 0:
        raise InfeasibleError(f"pp: expected at least a layer for each of {cut.pp} stages, got {layers}")
    return tuple(found)


def _laid_out(cut: Parallel, layout: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Layers of every virtual stage, where all are named."""
    rules = ("layers_first", "layers_last", "embedding_as_layer", "loss_as_layer")
    for name in rules:
        if getattr(cut, name):
            raise InfeasibleError(f"layout: cannot go with {name}; leave one of them out")
    if len(layout) != cut.virtual_stages:
        raise InfeasibleError(
            f"layout: expected pp x virtual_pp = {cut.pp} x {cut.virtual_pp} numbers of layers, got {len(layout)}"
        )
    if sum(layout) != layers:
        raise InfeasibleError(f"layout: expected a sum of {layers} layers, got {sum(layout)}")
    return layout


def _with_own_ends(cut: Parallel, layers: int) -> tuple[int, ...]:
    """Layers of every virtual stage, where the first or the last stage has a number of its own."""
    if cut.embedding_as_layer or cut.loss_as_layer:
        raise InfeasibleError("layers_first, layers_last: cannot go with embedding_as_layer or loss_as_layer")
    if cut.pp == 1:
        raise InfeasibleError("layers_first, layers_last: expected several stages, got pp = 1; leave them out")
    own = {0: cut.layers_first, cut.pp - 1: cut.layers_last}
    given = {stage: number for stage, number in own.items() if number}
    left, among = layers - sum(given.values()), cut.pp - len(given)
    if left < among or (left % among if among else left):
        said = " + ".join(map(str, given.values()))
        raise InfeasibleError(
            f"layers_first, layers_last: expected {layers} layers less these to be a multiple of {among} other stages, "
            f"got {layers} - {said} = {left}"
            if among
            else f"layers_first, layers_last: expected a sum of {layers} layers, got {said}"
        )
    stages = [given.get(stage) or left // among for stage in range(cut.pp)]
    for number in stages:
        if number % cut.virtual_pp:
            raise InfeasibleError(f"virtual_pp: expected a divisor of {number} layers of a stage, got {cut.virtual_pp}")
    return tuple(number // cut.virtual_pp for _ in range(cut.virtual_pp) for number in stages)
