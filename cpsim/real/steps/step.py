"""A training step as a runner: microbatches through a model, gradients over replicas, and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from cpsim.real.others.torch_cp import rotation, set_balance
from cpsim.real.run.node import Node
from cpsim.real.steps.cut import Cut

LEARNING_RATE = 1e-5


class StepModel(nn.Module):
    """A model whose forward pass ends with the loss: ``forward(tokens, targets)``, both ``[batch, tokens]`` int64."""

    def blocks(self) -> nn.ModuleList:
        """Its layers, which are compiled, checkpointed and sharded one by one."""
        raise NotImplementedError

    def positions(self) -> list[Tensor]:
        """Tables ``[tokens, head_dim]`` of positions, which context parallelism cuts as it does tokens."""
        raise NotImplementedError


class Steps(Protocol):
    """Whole steps, part by part; see `cpsim.real.run.runner.Runner`."""

    loss: Tensor
    """Mean of this replica's microbatches, of the last step."""

    @property
    def blocks(self) -> nn.ModuleList:
        """Layers."""

    def prepare(self) -> None:
        """What comes before every step."""

    def launch(self) -> None:
        """One step: the three parts below."""

    def clear(self) -> None:
        """Gradients of the last step go."""

    def backward(self) -> None:
        """Forward and backward passes of all microbatches, and sums of gradients."""

    def update(self) -> None:
        """The optimizer's."""


class StepRunner:
    """Launches whole steps; see `cpsim.real.run.runner.Runner`."""

    def __init__(self, model: StepModel, cut: Cut, node: Node) -> None:
        """
        Args:
            model: on this rank's device with weights of `cut.weights_dtype`, its blocks compiled; tensor parallelism
                is applied already.
            cut: how.
            node: this rank.
        """
        self.cut, self.node, self.inner = cut, node, model
        self.model: nn.Module = _spread(model, cut, node)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.batches = _batches(cut, node)
        self.loss = torch.zeros((), device=node.device)
        """Mean of this replica's microbatches, of the last step."""
        if node.cuda:  # what set-up needed once is not the step's
            torch.cuda.empty_cache()

    def prepare(self) -> None:
        """Nothing: tokens stay the same."""

    @property
    def blocks(self) -> nn.ModuleList:
        """Layers."""
        return self.inner.blocks()

    def launch(self) -> None:
        """One step."""
        self.clear()
        self.backward()
        self.update()

    def clear(self) -> None:
        """Gradients of the last step go."""
        self.optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        """AdamW."""
        self.optimizer.step()

    def backward(self) -> None:
        """Forward and backward passes of all microbatches.

        Gradients of DDP are summed with the last microbatch; FSDP reduces those of each, as torchtitan does.
        """
        losses = []
        for number, (tokens, targets) in enumerate(self.batches, 1):
            with ExitStack() as contexts:
                for context in self._contexts(tokens, targets, last=number == len(self.batches)):
                    contexts.enter_context(context)
                loss = self.model(tokens, targets) / len(self.batches)
                loss.backward()
                losses.append(loss.detach())
                del loss
        self.loss = torch.stack(losses).sum()

    def _contexts(self, tokens: Tensor, targets: Tensor, last: bool) -> Iterator[AbstractContextManager[Any]]:
        yield sdpa_kernel(self.cut.backend)
        if self.cut.parallel.tp > 1:
            yield loss_parallel()
        if isinstance(self.model, DistributedDataParallel) and not last:
            yield self.model.no_sync()
        if self.cut.parallel.cp > 1:
            yield self._context_parallel(tokens, targets)

    @contextmanager
    def _context_parallel(self, tokens: Tensor, targets: Tensor) -> Iterator[None]:
        rotate, balanced = rotation(self.cut.scenario)
        set_rotate_method(rotate)
        set_balance(balanced)
        tables = self.inner.positions()
        dims = [1, 1, *(0 for _ in tables)]
        with context_parallel(
            self.cut.context_mesh(self.node), buffers=[tokens, targets, *tables], buffer_seq_dims=dims
        ):
            yield


def _spread(model: StepModel, cut: Cut, node: Node) -> nn.Module:
    """The model over its replicas: FSDP2 (each block, then the rest), or DDP, or itself where there is one."""
    mesh = cut.mesh(node)
    if cut.is_fsdp:
        assert mesh is not None
        axes = ("replicate", "shard") if cut.parallel.replicate > 1 else ("shard",)
        how: dict[str, Any] = {
            "mesh": mesh[axes] if mesh.mesh_dim_names != axes else mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=cut.dtype, reduce_dtype=torch.float32),
        }
        for block in model.blocks():
            fully_shard(block, **how)
        fully_shard(model, **how)
        return model
    if cut.parallel.replicas == 1:
        return model
    ids = [node.device.index] if node.cuda else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _batches(cut: Cut, node: Node) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets of this replica's microbatches, the same however the step is cut."""
    p = cut.parallel
    replica = node.rank // (p.tp * p.cp)
    shape = 2, p.dp, p.microbatches, cut.batch, cut.context
    drawn = torch.randint(cut.model.vocab, shape, generator=torch.Generator().manual_seed(1))
    mine = drawn[:, replica].to(node.device)
    return [(mine[0, i].clone(), mine[1, i].clone()) for i in range(p.microbatches)]
