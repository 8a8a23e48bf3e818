"""Peak memory of a training step on each pipeline stage, by what its program allocates and frees.

What is there all the time (weights, gradients' buffers, optimizer states) is a framework's fact; the rest are tensors
of the program, each allocated by the op that makes it and freed after the last one that reads it. Of microbatches in
flight, and of chunks of layers where a stage has several, all but one keep what lies between their passes.

Beside tensors, a process holds a CUDA context and NCCL's buffers. They count for whether a step fits, and are not part
of what PyTorch's allocator has. What else that has reserved does not count: it frees it before it gives up.

Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4;
Rajbhandari et al., "ZeRO" (2020), section 5.1; Zhao et al., "PyTorch FSDP" (2023), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.gpu import Gpu
from cpsim.case.parallel import Parallel
from cpsim.prediction.step.pipeline import Pass, most_in_flight
from cpsim.prediction.step.program import BACK, GRADIENT, SHARD, HostCopy, Program, live_bytes

Ints = NDArray[np.int64]
KINDS: Final = ("weights", "gradients", "activations", "logits", "working")
"""What tensors of a program are."""
CONTEXT: Final = 1_400_000_000
"""Bytes of a process without communication: what the driver says is used, less what the allocator has reserved. On one
H100 with torch 2.11 and CUDA 13.0, 1.38 to 1.40 GB after 37 steps of every kind (`data/runs/h100x2-1127h`)."""
COMMUNICATOR: Final = 300_000_000
"""More on two H100 whose processes sum, gather and scatter in one group: 0.29 to 0.30 GB (`h100x2-1127h`, `i`)."""
MESSAGES: Final = 470_000_000
"""More where ranks of a group also send to each other: 0.46 to 0.47 GB (the same)."""


def workspaces(gpu: Gpu, *, engine: bool) -> int:
    """Bytes of workspaces that matrix products have all the time.

    PyTorch gives cuBLAS one for each thread that launches products, Python's and autograd's: 32 MiB, on older GPUs
    8.1 MiB. Transformer Engine has one more: 32 MiB, on older GPUs 4 MiB.

    Source: PyTorch 2.8, aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize); Transformer Engine 2.4,
    pytorch/module/base.py (get_cublas_workspace_size_bytes).

    Args:
        gpu: whose, Ampere and Ada being older.
        engine: whether linear layers are Transformer Engine's.
    """
    older = gpu.architecture in ("ampere", "ada")
    each = 4096 * 1024 * 2 + 16 * 1024 * 8 if older else 32 * 2**20
    return 2 * each + engine * (4 if older else 32) * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on each rank of a stage, where its memory is fullest."""

    weights: int
    """Its own, and those that are gathered."""
    gradients: int
    """Of weights."""
    optimizer: int
    activations: int
    """Kept for the backward passes of the microbatches in flight."""
    logits: int
    """Logits and what the loss makes of them."""
    working: int
    """What passes allocate while they run."""
    communicators: int = 0
    """NCCL's buffers; no tensors."""
    context: int = 0
    """The CUDA context with its kernels; no tensors."""

    @property
    def total(self) -> int:
        """All tensors: what PyTorch's allocator has."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.working

    @property
    def needed(self) -> int:
        """Tensors and what is held beside them."""
        return self.total + self.communicators + self.context


def communicators(parallel: Parallel) -> int:
    """Bytes of NCCL's buffers on a rank: of every group that it talks to, and for messages in rings and pipelines.

    Measured with two ranks of a node; assumed to be as much in larger groups, whose channels are as many.
    """
    replicas = parallel.replicas if parallel.replicas > parallel.cp else 1
    groups = sum(size > 1 for size in (parallel.tp, parallel.cp, replicas, parallel.pp, parallel.replicate))
    return COMMUNICATOR * groups + MESSAGES * ((parallel.cp > 1) + (parallel.pp > 1))


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """What the program of a chunk of layers holds of one microbatch, bytes by kind, ``[len(KINDS)]``."""

    peak: Ints
    """Where it holds most."""
    kept: int
    """Activations and logits that stay between its two passes."""


def mean_memory(parts: Sequence[tuple[float, ChunkMemory]]) -> ChunkMemory:
    """Memory of a chunk whose layers differ, by the share of each kind and the memory if all were of that kind.

    What layers hold adds up; what one has while it runs is that of the kind that has most.
    """
    peaks = np.array([part.peak for _, part in parts])
    peak = np.array([share for share, _ in parts]) @ peaks
    working = KINDS.index("working")
    peak[working] = peaks[:, working].max()
    return ChunkMemory(peak.round().astype(np.int64), round(sum(share * part.kept for share, part in parts)))


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a program holds while every op runs."""

    live: Ints
    """Bytes by kind, ``[len(KINDS), N]``."""
    forward: int
    """Ops of the forward pass."""
    offloaded: bool
    """Whether activations leave for the host."""


def occupancy(program: Program, stays: tuple[str, ...]) -> Occupancy:
    """What a program holds; tensors whose names begin with one of ``stays`` stay until the optimizer's step."""
    offloaded = any(isinstance(node.what, HostCopy) for node in program.forward)
    return Occupancy(_live(program, stays), len(program.forward), offloaded)


def chunk_memory(occupied: Callable[[int], Occupancy], layers: int) -> ChunkMemory:
    """Memory of one chunk of layers.

    Args:
        occupied: by the program of so many layers.
        layers: of the chunk.
    """
    few, more = 4, 5
    if layers <= more:
        found = occupied(layers)
        columns, kept = found.live, found.live[:, found.forward]
    else:
        small, large = occupied(few), occupied(more)
        a, b = small.live, large.live
        grown = layers - more
        each = large.forward - small.forward
        backward_a, backward_b = a.shape[1] - small.forward, b.shape[1] - large.forward
        # all but two layers: what a layer makes may live until the end of the next one
        alike = backward_a - 2 * (backward_b - backward_a)
        first = alike - 2 * small.offloaded  # layer 0 brings none back
        # the last layers forward and the first ones backward, and the last ones backward
        parts = [
            (
                a[:, small.forward - 2 * each : small.forward + first],
                b[:, large.forward - 2 * each : large.forward + first],
            )
        ]
        parts += [(a[:, -alike:], b[:, -alike:])]
        columns = np.concatenate([late + grown * (late - early) for early, late in parts], axis=1)
        kept = b[:, large.forward] + grown * (b[:, large.forward] - a[:, small.forward])
    at = int(np.argmax(columns.sum(axis=0)))
    return ChunkMemory(columns[:, at], int(kept[[KINDS.index("activations"), KINDS.index("logits")]].sum()))


def stage_memory(chunks: Mapping[int, ChunkMemory], order: list[Pass], persistent: tuple[int, int, int]) -> StageMemory:
    """Peak memory of one stage.

    Args:
        chunks: of the stage, by virtual stage.
        order: passes of the stage.
        persistent: bytes of weights, gradients and optimizer states that are there all the time.
    """
    beside = most_in_flight(order, {stage: chunk.kept for stage, chunk in chunks.items()})
    fullest = max(beside, key=lambda stage: int(chunks[stage].peak.sum()) + beside[stage])
    found = dict(zip(KINDS, chunks[fullest].peak.tolist(), strict=True))
    weights, gradients, optimizer = persistent
    return StageMemory(
        weights=found["weights"] + weights,
        gradients=found["gradients"] + gradients,
        optimizer=optimizer,
        activations=found["activations"] + beside[fullest],
        logits=found["logits"],
        working=found["working"],
    )


def _live(program: Program, stays: tuple[str, ...]) -> Ints:
    """Bytes of every kind while every op runs, ``[len(KINDS), N]``."""
    made = {name for node in program.forward for name in node.makes}
    later = {name for node in program.backward for name in node.reads}
    kept = made & later

    def kind(name: str) -> int:
        if name.startswith(("weights", "flat")):
            return KINDS.index("weights")
        if name.startswith((GRADIENT, SHARD, "sums")):
            return KINDS.index("gradients")
        if "logits" in name:
            return KINDS.index("logits")
        return KINDS.index("activations" if name in kept or name.endswith(BACK) else "working")

    nodes = [*program.forward, *program.backward]
    return live_bytes(nodes, stays, kind, len(KINDS))
