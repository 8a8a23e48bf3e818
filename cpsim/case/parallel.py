"""How a training step is spread over GPUs: tensor, context, data and pipeline parallelism.

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline parallelism, as Megatron-LM does,
so that tensor-parallel groups are neighbours in a node and pipeline stages are farthest apart.

Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
section 3; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cpsim.case.cluster import Cluster
from cpsim.case.model import Model
from cpsim.errors import InfeasibleError

Fp8 = Literal["tensorwise", "rowwise", "delayed", "current", "mxfp8"]
Precision = Literal["bf16", "fp8"] | Mapping[Literal["fp8"], Fp8]
"""Of linear layers; ``fp8`` alone is the recipe that the framework takes."""
Recompute = Literal["none", "selective", "mlp", "full", "per_op"]
Sharding = Literal["none", "zero1", "zero2", "fsdp"]
PipelineSchedule = Literal["1f1b", "same_phase"]
Gradients = Literal["none", "exposed", "overlapped"]


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
    tp_overlap: bool = False
    """Whether tensor parallelism exchanges chunks beside matrix products of other chunks."""

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

    def check(self, model: Model, cluster: Cluster) -> None:
        """Whether the model can be cut like this on that cluster.

        Raises:
            InfeasibleError: it cannot; one line that says why.
        """
        if cluster.gpus_per_node % self.tp:
            raise InfeasibleError(f"tp: expected a divisor of {cluster.gpus_per_node} GPUs of a node, got {self.tp}")
        for name, number in (("kv_heads", model.kv_heads), ("ffn", model.ffn), ("vocab", model.vocab)):
            if number % self.tp:
                raise InfeasibleError(f"tp: expected a divisor of {name} = {number}, got {self.tp}")
        if self.replicas % self.replicate:
            raise InfeasibleError(
                f"replicate: expected a divisor of dp x cp = {self.replicas} replicas, got {self.replicate}"
            )
        if model.layers % self.pp:
            raise InfeasibleError(f"pp: expected a divisor of {model.layers} layers, got {self.pp}")
        self.group(cluster, self.cp)
        self.group(cluster, self.replicas)

    def group(self, cluster: Cluster, size: int) -> Cluster:
        """The part of the cluster that every `tp`-th GPU sees: `size` of them, with their share of the network.

        Raises:
            InfeasibleError: they do not fill nodes.
        """
        per_node = cluster.gpus_per_node // self.tp
        if size > per_node and size % per_node:
            raise InfeasibleError(
                f"cp and dp: groups of {size} GPUs with tp = {self.tp} do not fill nodes of {cluster.gpus_per_node}; "
                f"use at most {per_node} or a multiple of it"
            )
        fabric = cluster.fabric
        if fabric is not None:
            nics = max(1, fabric.nics_per_node // self.tp)
            rate = fabric.nic_bandwidth_bytes_per_s * fabric.nics_per_node / (nics * self.tp)
            fabric = replace(fabric, nics_per_node=nics, nic_bandwidth_bytes_per_s=rate)
        return replace(cluster, gpus_per_node=per_node, num_gpus=size, fabric=fabric)
