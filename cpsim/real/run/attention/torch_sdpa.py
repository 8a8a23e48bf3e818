"""PyTorch's own kernels: its copy of flash-attn 2, and cuDNN's.

cuDNN runs dense calls; with a causal mask only equal lengths, because it aligns the mask to the top left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpsim.real.run.attention.call import Call, Grads, UnsupportedCall, all_placed, heads_first, placed

aten = torch.ops.aten


def flash_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    if call.varlen:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, False
        )
        return placed(out, into), lse
    out, lse, *_ = aten._flash_attention_forward(
        q[None], k[None], v[None], None, None, call.max_q, call.max_k, 0.0, call.causal, False
    )
    return placed(out[0], into), lse[0]


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # dropout state; there is no dropout
    if call.varlen:
        dq, dk, dv = aten._flash_attention_backward(
            dout, q, k, v, out, lse, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, unused, unused
        )
        return all_placed((dq, dk, dv), into)
    dq, dk, dv = aten._flash_attention_backward(
        dout[None],
        q[None],
        k[None],
        v[None],
        out[None],
        lse[None],
        None,
        None,
        call.max_q,
        call.max_k,
        0.0,
        call.causal,
        unused,
        unused,
    )
    return all_placed((dq[0], dk[0], dv[0]), into)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_cudnn(call)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        heads_first(q), heads_first(k), heads_first(v), None, True, 0.0, call.causal, False
    )
    return placed(out.transpose(1, 2)[0], into), lse.reshape(q.shape[1], q.shape[0])


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    _check_cudnn(call)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout seed and offset; there is no dropout
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        heads_first(dout),
        heads_first(q),
        heads_first(k),
        heads_first(v),
        heads_first(out),
        lse.reshape(1, q.shape[1], q.shape[0], 1),
        unused,
        unused,
        None,
        None,
        None,
        call.max_q,
        call.max_k,
        0.0,
        call.causal,
    )
    dq, dk, dv = (g.transpose(1, 2)[0] for g in grads)
    return all_placed((dq, dk, dv), into)


def _check_cudnn(call: Call) -> None:
    if call.varlen:
        raise UnsupportedCall("cudnn takes one dense sequence a call here, got a varlen call; use fa2 or fa4")
    if call.causal and call.max_q != call.max_k:
        raise UnsupportedCall(
            f"cudnn aligns causal masks to the top left, got {call.max_q} queries on {call.max_k} keys; use fa2 or fa4"
        )
