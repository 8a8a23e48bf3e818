"""Ops of a transformer layer on views of an executor's memory: matrix products, and memory-bound ops, in Triton on a
GPU and in the plain PyTorch of `cpsim.real.run.layer_ops` elsewhere.

Legend of tensor suffixes: T tokens, C elements of a token, H heads, D head dimension. Matrices are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from cpsim.errors import InfeasibleError
from cpsim.real.run import layer_ops
from cpsim.schedule.transformer import LayerKind

with suppress(ImportError):  # CPU builds of PyTorch come without Triton
    import triton

    from cpsim.real.run import triton_layer

Launch = Callable[[], object]
NORM_BLOCKS = 528
"""Thread blocks that share the rows of a norm's weight gradient, at most: four for every SM."""


def lower(kind: LayerKind, given: Sequence[Tensor], made: Sequence[Tensor], *, adds: bool) -> Launch:
    """The call of any op but ``rotary``.

    Args:
        kind: of `cpsim.schedule.transformer`.
        given, made: what it reads and writes, in the order that is said there.
        adds: whether gradients of weights are added to what is there.
    """
    match kind:
        case "forward":
            return lambda: torch.mm(given[0], given[1].T, out=made[0])
        case "dgrad":
            return lambda: torch.mm(given[0], given[1], out=made[0])
        case "wgrad" if adds:
            return lambda: made[0].addmm_(given[0].T, given[1])
        case "wgrad":
            return lambda: torch.mm(given[0].T, given[1], out=made[0])
        case "add":
            return lambda: torch.add(given[0], given[1], out=made[0])
        case "rms_norm_bwd":
            return lambda: _rms_norm_bwd(*given, *made, adds=adds)
        case "rms_norm":
            return lambda: _rms_norm(*given, *made)
        case "swiglu":
            return lambda: _swiglu(*given, *made)
        case "swiglu_bwd":
            return lambda: _swiglu_bwd(*given, *made)
    raise InfeasibleError(f"the executor does not run {kind} yet")


def rotary(given: Sequence[Tensor], made: Sequence[Tensor], angles: tuple[Tensor, Tensor], kv_heads: int) -> Launch:
    """Rotated queries and keys from rows of QKV, with values; or gradients of these rows, rotated back.

    Args:
        given: QKV, or dQ and dKV.
        made: Q and KV, or dQKV.
        angles: cosines and sines ``[T, D / 2]``.
        kv_heads: heads of K.
    """
    back = len(given) == 2
    (joint,), (q, kv) = (made, given) if back else (given, made)
    cos, sin = angles
    return lambda: _rotary(joint, q, kv, cos, sin, kv_heads, back)


def angles(positions: Tensor, head_dim: int, base: float = 500_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, D / 2]`` of rotary positions in documents; in the dtype of ``positions``.

    Reference: Su et al., RoFormer (2021), section 3.2.2; Llama 3's base.
    """
    half = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float64)
    turns = positions.double()[:, None] * base ** (-2 * half / head_dim)
    return turns.cos().to(positions.dtype), turns.sin().to(positions.dtype)


def _rms_norm(x_TC: Tensor, weight_1C: Tensor, out_TC: Tensor) -> None:
    if not x_TC.is_cuda:
        out_TC.copy_(layer_ops.rms_norm(x_TC, weight_1C[0]))
        return
    columns = x_TC.shape[1]
    triton_layer.norm_kernel[(len(x_TC),)](
        x_TC, weight_1C, out_TC, layer_ops.EPS, columns, triton.next_power_of_2(columns), num_warps=8
    )


def _rms_norm_bwd(
    dout_TC: Tensor, x_TC: Tensor, weight_1C: Tensor, dx_TC: Tensor, dweight_1C: Tensor, *, adds: bool
) -> None:
    if not x_TC.is_cuda:
        dx, dweight = layer_ops.rms_norm_bwd(dout_TC, x_TC, weight_1C[0])
        dx_TC.copy_(dx)
        dweight_1C.copy_(dweight_1C + dweight if adds else dweight[None])
        return
    tokens, columns = x_TC.shape
    rows = triton.cdiv(tokens, NORM_BLOCKS)
    blocks = triton.cdiv(tokens, rows)
    partial = torch.empty(blocks, columns, dtype=torch.float32, device=x_TC.device)
    triton_layer.norm_bwd_kernel[(blocks,)](
        dout_TC,
        x_TC,
        weight_1C,
        dx_TC,
        partial,
        tokens,
        rows,
        layer_ops.EPS,
        columns,
        triton.next_power_of_2(columns),
        num_warps=8,
    )
    total = partial.sum(0, keepdim=True)
    dweight_1C.copy_(dweight_1C + total if adds else total)


def _swiglu(gate_up_TC: Tensor, out_TC: Tensor) -> None:
    if not out_TC.is_cuda:
        out_TC.copy_(layer_ops.swiglu(gate_up_TC))
        return
    tokens, columns = out_TC.shape
    triton_layer.swiglu_kernel[(tokens, triton.cdiv(columns, 2048))](gate_up_TC, out_TC, columns, 2048)


def _swiglu_bwd(dout_TC: Tensor, gate_up_TC: Tensor, dgate_up_TC: Tensor) -> None:
    if not dout_TC.is_cuda:
        dgate_up_TC.copy_(layer_ops.swiglu_bwd(dout_TC, gate_up_TC))
        return
    tokens, columns = dout_TC.shape
    triton_layer.swiglu_bwd_kernel[(tokens, triton.cdiv(columns, 2048))](
        dout_TC, gate_up_TC, dgate_up_TC, columns, 2048
    )


def _rotary(
    joint_TC: Tensor, q_TC: Tensor, kv_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, kv_heads: int, back: bool
) -> None:
    """``back``: from gradients of Q and KV to those of their rows."""
    half = cos_TD.shape[1]
    q_heads = q_TC.shape[1] // (2 * half)
    if joint_TC.is_cuda:
        block = triton.next_power_of_2(q_heads + 2 * kv_heads)
        triton_layer.rotary_kernel[(len(joint_TC),)](
            joint_TC, q_TC, kv_TC, cos_TD, sin_TD, q_heads, kv_heads, half, block, back, num_warps=8
        )
        return
    joint, q, kv = (x.view(len(x), -1, 2 * half) for x in (joint_TC, q_TC, kv_TC))
    sin = -sin_TD if back else sin_TD
    pairs = ((joint[:, :q_heads], q), (joint[:, q_heads : q_heads + kv_heads], kv[:, :kv_heads]))
    for one, other in pairs:
        into, source = (one, other) if back else (other, one)
        into.copy_(layer_ops.rotary(source, cos_TD, sin))
    one, other = joint[:, q_heads + kv_heads :], kv[:, kv_heads:]
    (one if back else other).copy_(other if back else one)
