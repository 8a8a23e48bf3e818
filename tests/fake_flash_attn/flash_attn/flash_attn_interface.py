"""The functions of FlashAttention 2 that other packages call, with the arguments that matter."""

import torch

from cpsim.real.run import attention

EMPTY = torch.empty(0)


def lengths(offsets):
    return torch.diff(offsets).tolist()


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    del max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, window_size_left, window_size_right, softcap
    del alibi_slopes, return_softmax
    call = attention.prepare(lengths(cu_seqlens_q), lengths(cu_seqlens_k), causal=causal, device="cpu")
    return *attention.forward("math", q, k, v, call), EMPTY, EMPTY


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    del dropout_p, softmax_scale, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
    call = attention.prepare([q.shape[1]], [k.shape[1]], causal=causal, device="cpu")
    out, lse = attention.forward("math", q[0], k[0], v[0], call)
    return out[None], lse[None], EMPTY, EMPTY


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
    zero_tensors=False,
):
    del max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, window_size_left, window_size_right, softcap
    del alibi_slopes, deterministic, rng_state, zero_tensors
    # The kernel writes the rows of its sequences only; buffers may be longer.
    q_lens, k_lens = lengths(cu_seqlens_q), lengths(cu_seqlens_k)
    nq, nk = sum(q_lens), sum(k_lens)
    call = attention.prepare(q_lens, k_lens, causal=causal, device="cpu")
    made = attention.backward("math", dout[:nq], q[:nq], k[:nk], v[:nk], out[:nq], softmax_lse[:, :nq], call)
    for grad, value in zip((dq, dk, dv), made, strict=True):
        grad[: len(value)].copy_(value)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
):
    del dropout_p, softmax_scale, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state
    call = attention.prepare([q.shape[1]], [k.shape[1]], causal=causal, device="cpu")
    made = attention.backward("math", dout[0], q[0], k[0], v[0], out[0], softmax_lse[0], call)
    for grad, value in zip((dq, dk, dv), made, strict=True):
        grad[0].copy_(value)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, None, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, None, ctx.causal)
        return *grads, None


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_others):
    del dropout_p, softmax_scale
    return _Function.apply(q, k, v, causal)
