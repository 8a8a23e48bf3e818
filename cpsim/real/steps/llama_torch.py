"""A plain Llama in PyTorch: SDPA, SwiGLU, RMSNorm, rotary positions, no biases.

Tensor parallelism is DTensor's with sequence parallelism, as torchtitan's Llama has it: norms on shards of the tokens,
linear layers by columns and by rows, the embedding by rows, the output by columns with a parallel loss: logits stay
cut by words. That loss is not compiled.

Legend of tensor suffixes: B sequences, T tokens, C elements of a token, H heads, D head dimension.

Reference: pytorch/torchtitan, models/llama3 (parallelize) and distributed/activation_checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cpsim.case.model import Model
from cpsim.real.run.compiling import compile_anew
from cpsim.real.run.node import Node
from cpsim.real.steps.cut import Cut
from cpsim.real.steps.step import StepModel

THETA = 500_000.0
KEPT = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
"""Ops whose results `per_op` keeps beside every second matrix product."""


def rotate(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotates heads by position, the first half of elements against the second."""
    first, second = x_BTHD.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x_BTHD * cos_TD[:, None] + turned * sin_TD[:, None]


class Attention(nn.Module):
    """Projections and PyTorch's own attention."""

    def __init__(self, m: Model) -> None:
        super().__init__()
        self.head_dim, self.grouped = m.head_dim, m.heads != m.kv_heads
        self.wq = nn.Linear(m.hidden, m.heads * m.head_dim, bias=False)
        self.wk = nn.Linear(m.hidden, m.kv_heads * m.head_dim, bias=False)
        self.wv = nn.Linear(m.hidden, m.kv_heads * m.head_dim, bias=False)
        self.wo = nn.Linear(m.heads * m.head_dim, m.hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x_BTC).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        found: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return found


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, m: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(m.hidden, m.ffn, bias=False)
        self.up = nn.Linear(m.hidden, m.ffn, bias=False)
        self.down = nn.Linear(m.ffn, m.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        found: Tensor = self.down(functional.silu(self.gate(x_BTC)) * self.up(x_BTC))
        return found


class Block(nn.Module):
    """One layer, which may be computed again in the backward pass."""

    def __init__(self, m: Model, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.ffn_norm = nn.RMSNorm(m.hidden), nn.RMSNorm(m.hidden)
        self.attention, self.ffn = Attention(m), FeedForward(m)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.recompute == "none":
            return self._layer(x_BTC, cos, sin)
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.recompute == "per_op":
            how["context_fn"] = partial(create_selective_checkpoint_contexts, per_op_policy())
        out: Tensor = checkpoint(self._layer, x_BTC, cos, sin, **how)
        return out

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


def per_op_policy() -> Callable[..., CheckpointPolicy]:
    """Keeps results of attention, of reduce-scatters and of every second matrix product, the first of them."""
    met = Counter[bool]()

    def policy(ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op == torch.ops.aten.mm.default:
            met[ctx.is_recompute] += 1
            kept = met[ctx.is_recompute] % 2 == 1
        else:
            kept = op in KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


class Llama(StepModel):
    """The model with its loss, which is computed in so many chunks of the tokens."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        m = cut.model
        self.embedding = nn.Embedding(m.vocab, m.hidden)
        self.layers = nn.ModuleList(Block(m, cut.parallel.recompute) for _ in range(m.layers))
        self.norm = nn.RMSNorm(m.hidden)
        self.output = nn.Linear(m.hidden, m.vocab, bias=False)
        self.copies, self.chunks = cut.compiled, cut.parallel.loss_chunks
        self.loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        rates = THETA ** -(torch.arange(0, m.head_dim, 2, dtype=torch.float32) / m.head_dim)
        angles = torch.outer(torch.arange(cut.context, dtype=torch.float32), rates).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(cut.dtype), angles.sin().to(cut.dtype)
        """No buffers, which DDP would give all ranks alike: context-parallel ones have different positions."""
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def blocks(self) -> nn.ModuleList:
        return self.layers

    def positions(self) -> list[Tensor]:
        return [self.cos, self.sin]

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        if self.copies and isinstance(x, AsyncCollectiveTensor):
            x = x.clone()  # compiled code gives what is still on its way a gradient that DTensor does not take
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        if self.chunks == 1:
            return self.loss(self.output(x), targets_BT)
        parts = zip(x.chunk(self.chunks, 1), targets_BT.chunk(self.chunks, 1), strict=True)
        losses = [checkpoint(self._chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.stack(losses).mean()

    def _chunk(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.output(x), targets)


def make(cut: Cut, node: Node) -> Llama:
    """The model of a cut on this rank, cut by tensor parallelism and compiled."""
    compile_anew()
    torch.manual_seed(0)
    with torch.device(node.device):
        model = Llama(cut).to(cut.weights_dtype)
    if cut.parallel.tp > 1:
        mesh = cut.mesh(node)
        assert mesh is not None
        _parallelize(model, mesh["tp"])
    if cut.compiled:
        torch._dynamo.config.optimize_ddp = False  # which cuts a block at DDP's buckets, and knows no checkpoints
        for number, block in enumerate(model.layers):
            model.layers[number] = torch.compile(block)  # type: ignore[assignment]
        if cut.parallel.tp == 1:
            model.loss = torch.compile(cross_entropy)
    return model


def _parallelize(model: Llama, mesh: DeviceMesh) -> None:
    columns, rows = ColwiseParallel, partial(RowwiseParallel, output_layouts=Shard(1))
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for block in model.layers:
        attention_input = (Shard(1), None, None), (Replicate(), None, None)
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=attention_input[0], desired_input_layouts=attention_input[1]),
            **{f"attention.{name}": columns() for name in ("wq", "wk", "wv")},
            "attention.wo": rows(),
            "ffn_norm": SequenceParallel(),
            "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"ffn.{name}": columns() for name in ("gate", "up")},
            "ffn.down": rows(),
        }
        parallelize_module(block, mesh, plan)
