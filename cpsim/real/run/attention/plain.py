"""Plain PyTorch with a matrix of all scores: products in fp32 or better, or in the working type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cpsim.masks.slices import UNCUT
from cpsim.real.run.attention.call import Call, Grads


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None, *, narrow: bool = False
) -> tuple[Tensor, Tensor]:
    """``narrow``: matrix products in the working type."""
    out = q.new_empty(*q.shape[:2], v.shape[2]) if into is None else into
    lses, wide = [], _product_type(q.dtype, narrow)
    for at_q, at_k, seen in _sequences(q, k, call):
        out[at_q], lse = _forward(q[at_q], k[at_k], v[at_k], seen, wide)
        lses.append(lse)
    return out, torch.cat(lses, dim=1)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    into: Grads | None,
    *,
    narrow: bool = False,
) -> Grads:
    """``narrow``: matrix products in the working type."""
    dq, dk, dv = into or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    wide = _product_type(q.dtype, narrow)
    for at_q, at_k, seen in _sequences(q, k, call):
        dq[at_q], dk[at_k], dv[at_k] = _backward(
            dout[at_q], q[at_q], k[at_k], v[at_k], out[at_q], lse[:, at_q], seen, wide
        )
    return dq, dk, dv


def _product_type(dtype: torch.dtype, narrow: bool) -> torch.dtype:
    return dtype if narrow else torch.promote_types(dtype, torch.float32)


def _sequences(q: Tensor, k: Tensor, call: Call) -> list[tuple[slice, slice, Tensor]]:
    """Queries, keys and the mask [q, k] of every sequence."""
    if call.mask is not None:
        return [(slice(0, len(q)), slice(0, len(k)), call.visible)]
    parts, q0, k0 = [], 0, 0
    for nq, nk in zip(call.q_lens, call.k_lens, strict=True):
        seen, (left, right) = torch.ones(nq, nk, dtype=torch.bool, device=q.device), call.window
        seen = seen if left == UNCUT else seen.triu(nk - nq - left)
        seen = seen if right == UNCUT else seen.tril(nk - nq + right)
        parts.append((slice(q0, q0 + nq), slice(k0, k0 + nk), seen))
        q0, k0 = q0 + nq, k0 + nk
    return parts


def _scores(q: Tensor, k: Tensor, visible: Tensor, wide: torch.dtype) -> Tensor:
    """Scaled and masked scores [H, q, k] in fp32 or better."""
    k = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k).to(torch.promote_types(wide, torch.float32))
    return (scores / math.sqrt(q.shape[-1])).masked_fill(~visible, float("-inf"))


def _forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, visible, wide)
    lse = scores.logsumexp(dim=-1)
    p = torch.exp(scores - torch.where(lse.isfinite(), lse, 0)[..., None]).to(wide)
    wide_v = v.to(wide).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", p, wide_v).to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Tensor, wide: torch.dtype
) -> Grads:
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    scores = _scores(q, k, visible, wide)
    p = torch.exp(scores - torch.where(lse.isfinite(), lse, 0)[..., None].to(scores.dtype))
    do, o = dout.to(wide), out.to(wide)
    k_all = k.to(wide).repeat_interleave(group, dim=1)
    v_all = v.to(wide).repeat_interleave(group, dim=1)
    delta = (do * o).sum(-1, dtype=scores.dtype).T[..., None]
    ds = (p * (torch.einsum("qhd,khd->hqk", do, v_all) - delta) * scale).to(wide)
    dq = torch.einsum("hqk,khd->qhd", ds, k_all).to(q.dtype)
    per_head = torch.einsum("hqk,qhd->khd", ds, q.to(wide)), torch.einsum("hqk,qhd->khd", p.to(wide), do)
    dk, dv = (full.unflatten(1, (-1, group)).sum(2).to(k.dtype) for full in per_head)
    return dq, dk, dv
