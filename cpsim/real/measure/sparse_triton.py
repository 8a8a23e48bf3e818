"""Triton kernels of DeepSeek's sparse attention, which `cpsim.real.measure.sparse` times: packages lack them.

Written after the formulas of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1), forward only.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def index_kernel(
    q,
    k,
    weight,
    out,
    num_q,
    num_k,
    heads: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Scores of an indexer, out [num_q, num_k]: sum over heads of weight [num_q, heads] * relu(q k).

    q is [num_q, heads, dim] and k [num_k, dim], one for all heads.
    """
    r = tl.program_id(0) * rows + tl.arange(0, rows)
    c = tl.program_id(1) * columns + tl.arange(0, columns)
    d = tl.arange(0, dim)
    keys = tl.load(k + c[None, :] * dim + d[:, None], mask=c[None, :] < num_k, other=0.0)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for h in range(heads):
        at = (r.to(tl.int64)[:, None] * heads + h) * dim + d[None, :]
        queries = tl.load(q + at, mask=r[:, None] < num_q, other=0.0)
        scores = tl.maximum(tl.dot(queries, keys), 0.0)
        total += scores * tl.load(weight + r * heads + h, mask=r < num_q, other=0.0)[:, None]
    inside = (r[:, None] < num_q) & (c[None, :] < num_k)
    tl.store(out + r.to(tl.int64)[:, None] * num_k + c[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def chosen_kernel(
    q,
    kv,
    chosen,
    out,
    lse,
    scale,
    num_heads: tl.constexpr,
    latent: tl.constexpr,
    rope: tl.constexpr,
    top_k: tl.constexpr,
    heads: tl.constexpr,
    keys: tl.constexpr,
):
    """Attention of every query to its chosen keys, as MLA runs it with the latents as keys and values.

    q is [queries, num_heads, latent + rope], kv [tokens, latent + rope], chosen [queries, top_k] of tokens;
    out [queries, num_heads, latent] and lse [queries, num_heads].
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * heads + tl.arange(0, heads)
    d, e, n = tl.arange(0, latent), tl.arange(0, rope), tl.arange(0, keys)
    width: tl.constexpr = latent + rope
    row = (t * num_heads + h[:, None]) * width
    q_latent, q_rope = tl.load(q + row + d[None, :]), tl.load(q + row + latent + e[None, :])
    top = tl.full((heads,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((heads,), dtype=tl.float32)
    acc = tl.zeros((heads, latent), dtype=tl.float32)
    for first in range(0, top_k, keys):
        token = tl.load(chosen + t * top_k + first + n).to(tl.int64) * width
        k_latent = tl.load(kv + token[:, None] + d[None, :])
        k_rope = tl.load(kv + token[:, None] + latent + e[None, :])
        scores = tl.dot(q_latent, tl.trans(k_latent)) + tl.dot(q_rope, tl.trans(k_rope))
        scores *= scale
        new = tl.maximum(top, tl.max(scores, 1))
        p, old = tl.exp(scores - new[:, None]), tl.exp(top - new)
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None] + tl.dot(p.to(k_latent.dtype), k_latent)
        top = new
    at = (t * num_heads + h[:, None]) * latent + d[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty))
    tl.store(lse + t * num_heads + h, top + tl.log(total))
