"""How a scenario cuts a step, every choice made, and what the frameworks that run here cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend

from cpsim.case.model import Model
from cpsim.case.parallel import Parallel
from cpsim.case.resolve import cluster_of, model_of
from cpsim.case.scenario import ParallelSection, Scenario
from cpsim.errors import InfeasibleError
from cpsim.prediction.step.frameworks import DEFAULT, framework
from cpsim.real.run.node import Node

BACKENDS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What steps of a framework run with here."""

    shardings: tuple[str, ...] = ("none", "fsdp")
    recomputes: tuple[str, ...] = ("none", "full", "per_op")
    strategies: tuple[str, ...] = ("allgather", "ring", "zigzag_ring")
    """Of context parallelism."""
    kernels: tuple[str, ...] = (*BACKENDS, "fa2")
    recipes: tuple[str, ...] = ()
    """Of products in FP8."""
    experts: bool = False
    adapters: bool = False
    """Of one tensor-parallel rank."""
    parts_loss: bool = True
    windows: bool = False
    """Sliding windows, and sinks."""


RUNS: Final = {
    "torch": Runs(),
    "huggingface": Runs(),
    "megatron": Runs(
        shardings=("none", "zero1"),
        recomputes=("none", "full"),
        strategies=("zigzag_ring", "allgather", "ulysses"),
        kernels=("cudnn", "fa2"),
        recipes=("delayed", "current"),
        experts=True,
        adapters=True,
        parts_loss=False,
        windows=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A step of a framework on the processes of this launch."""

    scenario: Scenario
    model: Model
    parallel: Parallel
    compiled: bool
    """Whether every block and the loss are compiled."""
    batch: int
    """Sequences of a microbatch of a replica."""
    context: int
    """Tokens of a sequence, those of all context-parallel ranks."""
    dtype: torch.dtype
    """Of activations and of the weights in matrix products."""
    backend: SDPBackend
    """Attention kernel."""

    @property
    def is_fsdp(self) -> bool:
        """Whether weights are sharded over replicas; they are kept in fp32 then."""
        return self.parallel.sharding == "fsdp"

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the weights that the optimizer updates."""
        return torch.float32 if self.is_fsdp else self.dtype

    def mesh(self, node: Node) -> DeviceMesh | None:
        """Ranks by what weights know: groups of shards, shards, tensor parallelism; axes of one rank are left out."""
        shards = self.parallel.shards if self.is_fsdp else self.parallel.replicas
        sizes = {"replicate": self.parallel.replicas // shards, "shard": shards, "tp": self.parallel.tp}
        kept = {name: n for name, n in sizes.items() if n > 1 or (name == "shard" and self.is_fsdp)}
        return _mesh(node.device.type, tuple(kept.items())) if kept else None

    def context_mesh(self, node: Node) -> DeviceMesh:
        """The context-parallel ranks of this one."""
        sizes = {"dp": self.parallel.dp, "cp": self.parallel.cp, "tp": self.parallel.tp}
        return _mesh(node.device.type, tuple((name, n) for name, n in sizes.items() if n > 1))["cp"]


@cache
def _mesh(device: str, sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """Made once: one axis has the communicator of all processes, so that cases do not add up their memory."""
    names, shape = zip(*sizes, strict=True)
    return init_device_mesh(device, shape, mesh_dim_names=names)


def cut_of(scenario: Scenario, node: Node) -> Cut:
    """All choices of a scenario; what it leaves out is what the framework does.

    Raises:
        InfeasibleError: no framework here can run it.
    """
    known, given = framework(scenario.framework or DEFAULT), scenario.parallel or ParallelSection()
    parallel = known.cut(given, scenario.gpus, scenario.num_sequences)
    places = parallel.dp * parallel.microbatches
    context = scenario.context or scenario.num_tokens // (places * (parallel.batch or 1))
    cut = Cut(
        scenario=scenario,
        model=model_of(scenario),
        parallel=parallel,
        compiled=known.compiled(scenario.compile),
        batch=scenario.num_tokens // (places * context),
        context=context,
        dtype=torch.bfloat16 if node.cuda else torch.float32,
        backend=BACKENDS.get(scenario.kernel, SDPBackend.FLASH_ATTENTION) if node.cuda else SDPBackend.MATH,
    )
    parallel.check(cut.model, cluster_of(scenario))
    for reason in _reasons(cut, RUNS[known.name]):
        raise InfeasibleError(reason)
    return cut


def _reasons(cut: Cut, runs: Runs) -> list[str]:
    """Why a step cannot run, each in one line."""
    s, p, m = cut.scenario, cut.parallel, cut.model
    strategy = s.strategy or ("none" if p.cp == 1 else "allgather")
    in_bf16 = s.precision in (None, "bf16") or (isinstance(s.precision, dict) and s.precision["fp8"] in runs.recipes)
    wrong = {
        f"pp: steps run here without pipeline parallelism, got pp = {p.pp}; use 1": p.pp > 1,
        f"sharding: expected {_either(runs.shardings)}, got {p.sharding}": p.sharding not in runs.shardings,
        f"recompute: expected {_either(runs.recomputes)}, got {p.recompute}": p.recompute not in runs.recomputes,
        "trainable: steps run here train all weights; leave it out": s.trainable not in (None, "all")
        and not runs.adapters,
        f"tp: adapters run here with 1, got {p.tp}": s.trainable not in (None, "all") and p.tp > 1,
        "offload: steps run here keep activations on the GPU; leave it out": s.offload is not None,
        "window: steps run here without sliding windows and sinks; leave them out": (m.window > 0 or m.sinks)
        and not (runs.windows and p.cp == 1),
        f"kernel: expected {_either(runs.kernels)}, got {s.kernel}": s.kernel not in runs.kernels,
        f"mask: steps run here with causal, got {s.mask_name}": s.mask != "causal",
        f"tokens: expected a multiple of dp x microbatches x context = {p.dp} x {p.microbatches} x {cut.context}, "
        f"got {s.num_tokens}": cut.batch * cut.context * p.dp * p.microbatches != s.num_tokens,
        f"batch: expected {cut.batch} sequences of a microbatch, got {p.batch}": p.batch not in (None, cut.batch),
        f"strategy: {strategy} needs several ranks, got cp = 1; use none": p.cp == 1 and strategy != "none",
        f"strategy: expected {_either(runs.strategies)}, got {strategy}": p.cp > 1 and strategy not in runs.strategies,
        f"tokens: expected sequences that are multiples of 2 x cp x tp = {2 * p.cp * p.tp} tokens, "
        f"got {cut.context}": p.cp * p.tp > 1 and cut.context % (2 * p.cp * p.tp) != 0,
        f"replicate: expected sharding fsdp, got {p.sharding}": p.replicate > 1 and not cut.is_fsdp,
        "sharding: none, with tp and several replicas, cannot be run here; use fsdp": p.tp > 1
        and p.replicas > 1
        and "fsdp" in runs.shardings
        and not cut.is_fsdp,
        "tp_overlap: cannot be run here; leave it out": p.tp_overlap,
        f"precision: expected {_either(('bf16', *(f'fp8: {one}' for one in runs.recipes)))}, got {s.precision}": (
            not in_bf16
        ),
        f"loss_chunks: cannot be run with tp = {p.tp}; use 1": p.loss_chunks > 1 and p.tp > 1,
        f"mlp_chunks: steps run here with a whole MLP, got {p.mlp_chunks} chunks; use 1": p.mlp_chunks > 1,
        f"loss_chunks: expected 1, got {p.loss_chunks}": p.loss_chunks > 1 and not runs.parts_loss,
        f"loss_chunks: expected a divisor of {cut.context // p.cp} tokens, got {p.loss_chunks}": cut.context
        // p.cp
        % p.loss_chunks
        != 0,
        f"model: steps run here without experts, got {m.experts}; use a dense model": m.experts > 0
        and not runs.experts,
        "model: steps run here without latent attention and shared experts": bool(m.kv_rank or m.shared_experts),
        "model: steps run here without keys that layers share": bool(m.kv_shared_layers),
        f"heads: expected a divisor of them, got tp = {p.tp}": m.heads % p.tp != 0,
        "optimizer: steps run here with an optimizer and gradients that are summed": not p.optimizer
        or (p.replicas > 1 and p.gradients == "none"),
    }
    return [reason for reason, is_so in wrong.items() if is_so]


def _either(words: Sequence[str]) -> str:
    """E.g. ``none, full or per_op``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
