"""PyTorch's own kernels: its copy of flash-attn 2, and cuDNN's.

cuDNN runs dense calls; what PyTorch has no arguments for goes through cuDNN's frontend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpsim.masks.slices import UNCUT
from cpsim.real.run.attention import cudnn_graphs
from cpsim.real.run.attention.call import Call, Grads, UnsupportedCall, all_placed, batched, placed, rows

aten = torch.ops.aten


def _window(call: Call) -> dict[str, Any]:
    left, right = (None if side == UNCUT else side for side in call.window)
    return {"window_size_left": left, "window_size_right": right} if call.is_window else {}


def flash_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    if call.varlen:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, False, **_window(call)
        )
        return placed(out, into), lse
    given = (rows(x, call) for x in (q, k, v))
    out, lse, *_ = aten._flash_attention_forward(
        *given, None, None, call.max_q, call.max_k, 0.0, call.causal, False, **_window(call)
    )
    return placed(out.flatten(0, 1), into), lse.transpose(0, 1).flatten(1)


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # dropout state; there is no dropout
    sizes, rest = (call.max_q, call.max_k, 0.0, call.causal, unused, unused), _window(call)
    if call.varlen:
        dq, dk, dv = aten._flash_attention_backward(dout, q, k, v, out, lse, call.cu_q, call.cu_k, *sizes, **rest)
        return all_placed((dq, dk, dv), into)
    given = (rows(x, call) for x in (dout, q, k, v, out))
    lse = lse.unflatten(1, (len(call.q_lens), -1)).transpose(0, 1).contiguous()
    dq, dk, dv = aten._flash_attention_backward(*given, lse, None, None, *sizes, **rest)
    return all_placed((dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)), into)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_cudnn(call)
    if _needs_frontend(q, v, call):
        return cudnn_graphs.forward(q, k, v, call, into)
    given = (batched(x, call) for x in (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*given, None, True, 0.0, call.causal, False)
    lse = lse.reshape(len(call.q_lens), q.shape[1], -1).transpose(0, 1)
    return placed(out.transpose(1, 2).flatten(0, 1), into), lse.reshape(q.shape[1], q.shape[0])


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    _check_cudnn(call)
    if _needs_frontend(q, v, call):
        return cudnn_graphs.backward(dout, q, k, v, out, lse, call, into)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout seed and offset; there is no dropout
    given = (batched(x, call) for x in (dout, q, k, v, out))
    lse = lse.unflatten(1, (len(call.q_lens), -1)).transpose(0, 1).contiguous()[..., None]
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *given, lse, unused, unused, None, None, None, call.max_q, call.max_k, 0.0, call.causal
    )
    dq, dk, dv = (g.transpose(1, 2).flatten(0, 1) for g in grads)
    return all_placed((dq, dk, dv), into)


def _check_cudnn(call: Call) -> None:
    if call.varlen:
        raise UnsupportedCall("cudnn takes sequences of one length as a batch here, got a varlen call; use fa2 or fa4")
    if call.causal and call.max_q != call.max_k:
        raise UnsupportedCall(
            f"cudnn aligns causal masks to the top left, got {call.max_q} queries on {call.max_k} keys; use fa2 or fa4"
        )


def _needs_frontend(q: Tensor, v: Tensor, call: Call) -> bool:
    """PyTorch's operator has no argument for a window."""
    return call.is_window or q.shape[2] != v.shape[2]
