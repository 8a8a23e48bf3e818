"""flash-attn 2: the compiled extension itself, in which both of its Python interfaces end."""

from __future__ import annotations

from torch import Tensor

from cpsim.real.run.attention.call import Call, Grads, rows


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    import flash_attn_2_cuda as ext

    scale = q.shape[-1] ** -0.5
    if call.varlen:
        out, lse, *_ = ext.varlen_fwd(
            q,
            k,
            v,
            into,
            call.cu_q,
            call.cu_k,
            None,
            None,
            None,
            None,
            call.max_q,
            call.max_k,
            0.0,
            scale,
            False,
            call.causal,
            *call.window,
            0.0,
            False,
            None,
        )
        return out, lse
    target = None if into is None else rows(into, call)
    given = (rows(x, call) for x in (q, k, v))
    out, lse, *_ = ext.fwd(*given, target, None, 0.0, scale, call.causal, *call.window, 0.0, False, None)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    import flash_attn_2_cuda as ext

    scale = q.shape[-1] ** -0.5
    if call.varlen:
        dq, dk, dv, _ = ext.varlen_bwd(
            dout,
            q,
            k,
            v,
            out,
            lse,
            *(into or (None,) * 3),
            call.cu_q,
            call.cu_k,
            None,
            call.max_q,
            call.max_k,
            0.0,
            scale,
            False,
            call.causal,
            *call.window,
            0.0,
            False,
            None,
            None,
        )
        return dq, dk, dv
    dq, dk, dv, _ = ext.bwd(
        *(rows(x, call) for x in (dout, q, k, v, out)),
        lse.unflatten(1, (len(call.q_lens), -1)).transpose(0, 1).contiguous(),
        *((None,) * 3 if into is None else (rows(g, call) for g in into)),
        None,
        0.0,
        scale,
        call.causal,
        *call.window,
        0.0,
        False,
        None,
        None,
    )
    return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)
