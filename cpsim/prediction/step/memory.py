"""Peak memory of a training step on each pipeline stage, by what its program allocates and frees.

What is there all the time (weights, gradients' buffers, optimizer states) is a framework's fact; the rest are tensors
of the program, each allocated by the op that makes it and freed after the last one that reads it. Of microbatches in
flight all but one keep what lies between their passes.

Beside tensors, a process holds a CUDA context and NCCL's buffers. They count for whether a step fits, and are not part
of what PyTorch's allocator has. What else that has reserved does not count: it frees it before it gives up.

Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4;
Rajbhandari et al., "ZeRO" (2020), section 5.1; Zhao et al., "PyTorch FSDP" (2023), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.parallel import Parallel
from cpsim.prediction.step.program import GRADIENT, SHARD, Program, live_bytes

Ints = NDArray[np.int64]
KINDS: Final = ("weights", "gradients", "activations", "logits", "working")
"""What tensors of a program are."""
WORKSPACES: Final = 2 * 32 * 2**20
"""Bytes that PyTorch allocates for cuBLAS on Hopper, once for the thread that runs forward and once for autograd's
(ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize). Single steps of `data/runs/h100x2-1127h` that are predicted op
by op have 67 to 72 MB more than their tensors."""
CONTEXT: Final = 1_400_000_000
"""Bytes of a process without communication: what the driver says is used, less what the allocator has reserved. On one
H100 with torch 2.11 and CUDA 13.0, 1.38 to 1.40 GB after 37 steps of every kind (`data/runs/h100x2-1127h`)."""
COMMUNICATOR: Final = 300_000_000
"""More on two H100 whose processes sum, gather and scatter in one group: 0.29 to 0.30 GB (`h100x2-1127h`, `i`)."""
MESSAGES: Final = 470_000_000
"""More where ranks of a group also send to each other: 0.46 to 0.47 GB (the same)."""


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


def stage_memory(
    make: Callable[[int], Program],
    layers: int,
    in_flight: int,
    persistent: tuple[int, int, int],
    stays: tuple[str, ...],
) -> StageMemory:
    """Peak memory of one stage.

    Args:
        make: the program of so many layers.
        layers: of the stage.
        in_flight: microbatches whose forward pass has run and whose backward pass has not, at most.
        persistent: bytes of weights, gradients and optimizer states that are there all the time.
        stays: beginnings of names of tensors that stay until the optimizer's step.
    """
    few, more = 3, 4
    if layers <= more:
        program = make(layers)
        live = _live(program, stays)
        columns, kept = live, live[:, len(program.forward)]
    else:
        small, large = (make(count) for count in (few, more))
        a, b = _live(small, stays), _live(large, stays)
        grown = layers - more
        each = len(large.forward) - len(small.forward)
        alike = len(small.backward) - (len(large.backward) - len(small.backward))  # all but one layer
        forward_a, forward_b = len(small.forward), len(large.forward)
        # the last layers forward and the first ones backward, and the last ones backward
        parts = [(a[:, forward_a - 2 * each : forward_a + alike], b[:, forward_b - 2 * each : forward_b + alike])]
        parts += [(a[:, -alike:], b[:, -alike:])]
        columns = np.concatenate([late + grown * (late - early) for early, late in parts], axis=1)
        kept = b[:, forward_b] + grown * (b[:, forward_b] - a[:, forward_a])
    at = int(np.argmax(columns.sum(axis=0)))
    found = dict(zip(KINDS, columns[:, at].tolist(), strict=True))
    found["activations"] += (in_flight - 1) * int(kept[[KINDS.index("activations"), KINDS.index("logits")]].sum())
    weights, gradients, optimizer = persistent
    return StageMemory(
        weights=found["weights"] + weights,
        gradients=found["gradients"] + gradients,
        optimizer=optimizer,
        activations=found["activations"],
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
        return KINDS.index("activations" if name in kept else "working")

    nodes = [*program.forward, *program.backward]
    return live_bytes(nodes, stays, kind, len(KINDS))
