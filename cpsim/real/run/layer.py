"""One transformer layer of one tensor-parallel rank, alone: its kernels and its memory, without communication.

The layer keeps what Megatron-LM keeps under sequence parallelism: linear layers cut by columns keep their shard of the
input and gather it again backward. Gathering copies the shard `tp` times and scattering keeps the first of `tp` parts,
so that every tensor has its size and no second GPU is needed; values are those of ranks that all hold the same.

Legend of tensor suffixes: T tokens, S tokens of this rank's shard (T / tp), C elements of a token, H heads,
D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cpsim.case.model import Model
from cpsim.real.run import attention, layer_ops

RECOMPUTE = ("none", "mlp", "full")
"""What runs again in the backward pass: nothing, the MLP with its norm, or the whole layer."""


def gather(x_SC: Tensor, tp: int) -> Tensor:
    """All tokens from a shard."""
    return x_SC.repeat(tp, 1) if tp > 1 else x_SC


def scatter(x_TC: Tensor, tp: int) -> Tensor:
    """This rank's shard of what would be the sum over the ranks."""
    return x_TC[: len(x_TC) // tp].clone() if tp > 1 else x_TC


class Column(Function):
    """Linear layer cut by columns: gathers its input, and once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        return gather(x, tp) @ weight.T

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx = scatter(dout @ weight, ctx.tp)
        return dx, dout.T @ gather(x, ctx.tp), None


class Row(Function):
    """Linear layer cut by rows: scatters the sum of its outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        return scatter(x @ weight.T, tp)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dout = gather(dout, ctx.tp)
        return dout @ weight, dout.T @ x, None


class Pointwise(Function):
    """A memory-bound op of `layer_ops` that keeps its inputs."""

    @staticmethod
    def forward(
        ctx: Any, op: Callable[..., Tensor], op_bwd: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.op_bwd = op_bwd
        return op(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        grads = ctx.op_bwd(dout, *ctx.saved_tensors)
        return None, None, *(grads if isinstance(grads, tuple) else (grads,))


class Rotary(Function):
    """Rotates queries and keys of all heads."""

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.op, ctx.angles = op, (cos, sin)
        return op(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.angles
        return None, ctx.op(dout, cos, -sin), None, None


class Attention(Function):
    """A kernel of `cpsim.real.run.attention`."""

    @staticmethod
    def forward(ctx: Any, kernel: str, call: attention.Call, *qkv: Tensor) -> Tensor:
        q, k, v = qkv
        out, lse = attention.forward(kernel, q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.call = kernel, call
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return None, None, *attention.backward(ctx.kernel, dout.contiguous(), q, k, v, out, lse, ctx.call)


def apply(function: Any, *inputs: object) -> Tensor:
    """Result of an autograd function, whose own ``apply`` has no types."""
    made: Tensor = function.apply(*inputs)
    return made


class Layer:
    """Weights and forward pass of one layer."""

    def __init__(
        self, model: Model, tp: int, device: torch.device, dtype: torch.dtype, *, kernel: str, compiled: bool
    ) -> None:
        """
        Args:
            model: dimensions.
            tp: tensor-parallel ranks; heads of both kinds and the MLP are cut by it.
            device: where; memory is measured on a GPU.
            dtype: of weights and activations.
            kernel: attention kernel of `cpsim.real.run.attention`.
            compiled: whether memory-bound ops are compiled.
        """
        make = partial(torch.randn, device=device, dtype=dtype)
        self.model, self.tp, self.kernel = model, tp, kernel
        self.linear = {k: (make(o, i) * i**-0.5).requires_grad_() for k, (i, o) in model.linears(tp).items()}
        self.norms = [torch.ones(model.hidden, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
        self.op = layer_ops.compiled if compiled else layer_ops.OPS.__getitem__

    def weights(self) -> list[Tensor]:
        """All parameters."""
        return [*self.linear.values(), *self.norms]

    def __call__(self, x_SC: Tensor, call: attention.Call, angles: tuple[Tensor, Tensor], recompute: str) -> Tensor:
        """Output of the layer.

        Args:
            x_SC: this rank's shard of the tokens.
            call: sequences of all tokens.
            angles: cosines and sines ``[T, D / 2]``, fp32.
            recompute: of RECOMPUTE.
        """
        if recompute == "full":
            out: Tensor = self._again(self._layer, x_SC, call, angles, "none")
            return out
        return self._layer(x_SC, call, angles, recompute)

    def _again(self, f: Any, *inputs: Any) -> Any:
        with set_checkpoint_early_stop(False):  # as Megatron-LM, which runs the last product again too
            return checkpoint(f, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _layer(self, x: Tensor, call: attention.Call, angles: tuple[Tensor, Tensor], recompute: str) -> Tensor:
        x = x + self._attend(x, call, angles)
        mlp: Tensor = self._again(self._mlp, x) if recompute == "mlp" else self._mlp(x)
        return x + mlp

    def _norm(self, x: Tensor, which: int) -> Tensor:
        ops = self.op("rms_norm"), self.op("rms_norm_bwd")
        return apply(Pointwise, *ops, x, self.norms[which])

    def _attend(self, x: Tensor, call: attention.Call, angles: tuple[Tensor, Tensor]) -> Tensor:
        m, heads, kv = self.model, self.model.heads // self.tp, self.model.kv_heads // self.tp
        qkv = apply(Column, self._norm(x, 0), self.linear["qkv"], self.tp)
        q, k, v = qkv.view(len(qkv), heads + 2 * kv, m.head_dim).split((heads, kv, kv), 1)
        q, k = (apply(Rotary, self.op("rotary"), part, *angles) for part in (q, k))
        out = apply(Attention, self.kernel, call, q, k, v.contiguous())
        return apply(Row, out.flatten(1), self.linear["proj"], self.tp)

    def _mlp(self, x: Tensor) -> Tensor:
        inner = apply(Column, self._norm(x, 1), self.linear["gate_up"], self.tp)
        inner = apply(Pointwise, self.op("swiglu"), self.op("swiglu_bwd"), inner)
        return apply(Row, inner, self.linear["down"], self.tp)
