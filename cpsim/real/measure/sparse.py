"""Measures kernels of sparse attention: of NSA and MoBA as fla-core has them, of DeepSeek's by Triton and PyTorch.

    python -m cpsim.real.measure.sparse --seconds 95 --out h100-sparse.jsonl

Points are `op: sparse` with the keys kind, kernel, pass, queries, keys (tokens), num_heads, num_kv_heads, head_dim,
value_dim, block, chosen (blocks or keys of a query), pairs (of queries and keys, or blocks, over all heads' shared
selection) and nbytes (moved by gathers). Kinds:

    compress_attend   NSA: attention to the mean of every block that lies before a query (`fla`)
    choose_blocks     NSA: which blocks a query takes, from the same scores (`fla`)
    attend_blocks     NSA: attention to the chosen blocks (`fla`)
    pool              means of blocks of keys and values (`torch`)
    moba              MoBA, all of it: gates, choice, gathers, two calls of flash attention and their merge (`fla` over
                      PyTorch's flash attention)
    index             DSA: scores of the indexer, 64 heads of 128 (`triton`: one kernel; `torch`: products in tiles)
    choose_keys       the highest scores of each query (`torch`: torch.topk)
    gather_keys       chosen rows of keys (`torch`: index_select)
    attend_keys       DSA: absorbed MLA, 128 heads on chosen latents (`triton`, forward; `torch`, gathered, both passes)

Points `op: attention` of PyTorch's flash attention, causal and with NSA's window, stand beside them. Of the
variants that fla tunes some are tried. On a CPU, or with `--cpu`, plain references run on a few tiny sizes.

Legend of tensor suffixes: T tokens, H query heads, G key heads, D dimension, N blocks or keys, S chosen.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cpsim.real.measure.kernels import WRONG, Bench, benched, measure_attention
from cpsim.real.measure.shapes import Shape
from cpsim.real.run.timing import command_line, provenance

Op = Callable[[], object]
BLOCK, CHOSEN, WINDOW = 64, 16, 512
"""NSA's selection, arXiv 2502.11089, section 4.1: tokens of a block, blocks of a query, tokens of the window."""
HEADS, KV_HEADS = 64, 4
DIMS: Final = ((192, 128), (128, 128))
"""Dimensions of queries and values: the paper's, and the usual ones."""
LENGTHS: Final = (16384, 65536, 4096, 131072, 32768, 8192)
MOBA: Final = (
    (16384, 512, 3),
    (65536, 2048, 3),
    (16384, 2048, 3),
    (4096, 512, 3),
    (65536, 512, 3),
    (16384, 1024, 8),
    (131072, 4096, 12),
    (32768, 512, 3),
    (65536, 4096, 12),
)
"""Tokens, block and top-k of MoBA (arXiv 2502.13189, sections 3.1 and 3.3)."""
MOBA_HEADS: Final = 16
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
LATENT, ROPE, MLA_HEADS = 512, 64, 128
"""DeepSeek-V3.2 (arXiv 2512.02556): its indexer, its choice, and MLA with the latents as keys and values."""


@dataclass(frozen=True, slots=True)
class Nsa:
    """Tensors of one call of NSA, [1, T, heads, dimension]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    k_means: Tensor
    v_means: Tensor


def narrow(device: torch.device) -> torch.dtype:
    """Type of activations."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def nsa_tensors(tokens: int, heads: int, kv_heads: int, dims: tuple[int, int], block: int, device: torch.device) -> Nsa:
    """Random tensors; means are of whole blocks."""
    make = partial(torch.randn, device=device, dtype=narrow(device))
    k, v = make(1, tokens, kv_heads, dims[0]), make(1, tokens, kv_heads, dims[1])
    means = [x.unflatten(1, (-1, block)).mean(2) for x in (k, v)]
    return Nsa(make(1, tokens, heads, dims[0]), k, v, make(1, tokens, heads, dims[1]), *means)


def masked(q_THD: Tensor, k_NGD: Tensor, v_NGD: Tensor, seen_GTN: Tensor) -> Tensor:
    """Plain attention; a query that sees nothing has output 0."""
    share = q_THD.shape[1] // k_NGD.shape[1]
    k, v = (x.float().repeat_interleave(share, 1) for x in (k_NGD, v_NGD))
    scores = torch.einsum("thd,nhd->htn", q_THD.float(), k) / math.sqrt(q_THD.shape[2])
    scores = scores.masked_fill(~seen_GTN.repeat_interleave(share, 0), -math.inf)
    return torch.einsum("htn,nhd->thd", scores.softmax(-1).nan_to_num(0.0), v)


def seen_blocks(chosen_TGS: Tensor, tokens: int, block: int) -> Tensor:
    """[G, T, keys] of the keys in chosen blocks, none after the query."""
    blocks = torch.zeros(*chosen_TGS.shape[:2], tokens // block + 1, dtype=torch.bool, device=chosen_TGS.device)
    blocks.scatter_(2, chosen_TGS.long() % (tokens // block + 1), True)  # -1, of none, is the one behind the last
    keys = blocks[:, :, :-1].repeat_interleave(block, 2).transpose(0, 1)
    return keys & torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).tril()


def whole_blocks(tokens: int, block: int, device: torch.device) -> Tensor:
    """[T, N]: blocks whose last token a query sees."""
    ends = torch.arange(1, tokens // block + 1, device=device) * block
    return ends[None] <= torch.arange(1, tokens + 1, device=device)[:, None]


def plain_choice(x: Nsa, chosen: int, block: int) -> Tensor:
    """Blocks [T, G, S] with the highest sums of a group's softmax weights, -1 where there are fewer."""
    tokens, groups = x.q.shape[1], x.k.shape[2]
    q = x.q[0].float().unflatten(1, (groups, -1))
    scores = torch.einsum("tghd,ngd->tghn", q, x.k_means[0].float()) / math.sqrt(q.shape[-1])
    seen = whole_blocks(tokens, block, q.device)[:, None]
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1).nan_to_num(0.0).sum(2)
    own = torch.arange(tokens, device=q.device) // block
    weights.scatter_(2, own[:, None, None].expand(-1, groups, 1), 1e3)
    best = weights.topk(min(chosen, weights.shape[2]), dim=2)
    return best.indices.masked_fill(best.values <= 0, -1)


def pairs_chosen(tokens: int, chosen: int, block: int) -> int:
    """Pairs of queries and keys where a query takes its own block up to itself and `chosen` - 1 whole earlier ones."""
    own = torch.arange(tokens) // block
    return int((torch.arange(tokens) % block + 1 + own.clamp(max=chosen - 1) * block).sum())


def pairs_blocks(tokens: int, block: int) -> int:
    """Pairs of queries and whole blocks before them."""
    return int(((torch.arange(tokens) + 1) // block).sum())


def measure(bench: Bench, kind: str, kernel: str, make: Callable[[], dict[str, Op]], **of: Any) -> None:
    """Points of the ops that `make` gives, by pass; what making them ends with counts as an error of the first."""
    ops: dict[str, Op] = {}

    def first() -> list[float]:
        ops.update(make())
        return bench.samples(ops["fwd"])

    bench.point("sparse", first, kind=kind, kernel=kernel, **{"pass": "fwd"}, **of)
    if "bwd" in ops:
        bench.point("sparse", lambda: bench.samples(ops["bwd"]), kind=kind, kernel=kernel, **{"pass": "bwd"}, **of)


def graph_op(make_out: Callable[[], Tensor], inputs: Sequence[Tensor]) -> dict[str, Op]:
    """Both passes of what autograd differentiates; the backward pass runs again and again on one graph."""
    for x in inputs:
        x.requires_grad_(True)
    out = make_out()
    dout = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return make_out()

    return {"fwd": forward, "bwd": lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)}


def plain_compress(x: Nsa, block: int) -> dict[str, Op]:
    seen = whole_blocks(x.q.shape[1], block, x.q.device)[None].expand(x.k.shape[2], -1, -1)
    inputs = [x.q, x.k_means, x.v_means]
    return graph_op(lambda: masked(x.q[0], x.k_means[0], x.v_means[0], seen), inputs)


def fla_compress(x: Nsa, block: int) -> dict[str, Op]:
    from fla.ops.nsa import compression

    scale, tokens = x.q.shape[-1] ** -0.5, x.q.shape[1]
    given = x.q, x.k_means, x.v_means
    out, lse = compression.parallel_nsa_compression_fwd(*given, tokens, block, scale)
    return {
        "fwd": partial(compression.parallel_nsa_compression_fwd, *given, tokens, block, scale),
        "bwd": partial(compression.parallel_nsa_compression_bwd, *given, out, lse, x.dout, block, scale),
    }


def fla_choice(x: Nsa, chosen: int, block: int) -> Tensor:
    """Blocks [1, T, G, S]."""
    from fla.ops.nsa import compression, parallel

    scale, tokens = x.q.shape[-1] ** -0.5, x.q.shape[1]
    _, lse = compression.parallel_nsa_compression_fwd(x.q, x.k_means, x.v_means, tokens, block, scale)
    found: Tensor = parallel.parallel_nsa_topk(x.q, x.k_means, tokens, lse, chosen, block, scale)
    return found


def fla_choose(x: Nsa, chosen: int, block: int) -> dict[str, Op]:
    from fla.ops.nsa import compression, parallel

    scale, tokens = x.q.shape[-1] ** -0.5, x.q.shape[1]
    _, lse = compression.parallel_nsa_compression_fwd(x.q, x.k_means, x.v_means, tokens, block, scale)
    return {"fwd": partial(parallel.parallel_nsa_topk, x.q, x.k_means, tokens, lse, chosen, block, scale)}


def fla_attend(x: Nsa, chosen_TGS: Tensor, chosen: int, block: int) -> dict[str, Op]:
    from fla.ops.nsa import parallel

    scale = x.q.shape[-1] ** -0.5
    given = x.q, x.k, x.v
    out, lse = parallel.parallel_nsa_fwd(*given, chosen_TGS, chosen, block, scale)
    return {
        "fwd": partial(parallel.parallel_nsa_fwd, *given, chosen_TGS, chosen, block, scale),
        "bwd": partial(parallel.parallel_nsa_bwd, *given, out, lse, x.dout, chosen_TGS, chosen, block, scale),
    }


def plain_attend(x: Nsa, chosen_TGS: Tensor, block: int) -> dict[str, Op]:
    seen = seen_blocks(chosen_TGS[0], x.q.shape[1], block)
    return graph_op(lambda: masked(x.q[0], x.k[0], x.v[0], seen), [x.q, x.k, x.v])


def measure_nsa(bench: Bench, tokens: int, dims: tuple[int, int], heads: int = HEADS, block: int = BLOCK) -> None:
    """The four kernels of NSA."""
    fla, device = bench.cuda, bench.device
    kv_heads = max(1, heads * KV_HEADS // HEADS)
    kernel, chosen = "fla" if fla else "plain", min(CHOSEN, tokens // block)
    of: dict[str, Any] = {
        "queries": tokens,
        "keys": tokens,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dims[0],
        "value_dim": dims[1],
        "block": block,
        "chosen": chosen,
    }
    x = nsa_tensors(tokens, heads, kv_heads, dims, block, device)
    num_blocks = pairs_blocks(tokens, block)
    compress = partial(fla_compress if fla else plain_compress, x, block)
    measure(bench, "compress_attend", kernel, compress, pairs=num_blocks, **of)
    choose = partial(fla_choose, x, chosen, block)
    plain_choose: Callable[[], dict[str, Op]] = lambda: {"fwd": partial(plain_choice, x, chosen, block)}  # noqa: E731
    measure(bench, "choose_blocks", kernel, choose if fla else plain_choose, pairs=num_blocks, **of)
    pairs = pairs_chosen(tokens, chosen, block)

    def attend() -> dict[str, Op]:
        if fla:
            return fla_attend(x, fla_choice(x, chosen, block), chosen, block)
        return plain_attend(x, plain_choice(x, chosen, block)[None], block)

    measure(bench, "attend_blocks", kernel, attend, pairs=pairs, **of)


def pool_op(tokens: int, heads: int, dim: int, block: int, bench: Bench) -> dict[str, Op]:
    """Means of keys and values."""
    kv = torch.randn(2, tokens, heads, dim, device=bench.device, dtype=narrow(bench.device))
    return {"fwd": lambda: kv.unflatten(1, (-1, block)).mean(2)}


def flash_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, None, None]:
    """flash-attn's function of this signature, by PyTorch's copy of its kernel."""
    given = q, k, v, cu_seqlens_q.int(), cu_seqlens_k.int()
    sizes = max_seqlen_q, max_seqlen_k
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *given, *sizes, dropout_p, causal, False, scale=softmax_scale
    )
    return out, lse, None, None


def flash_varlen_backward(
    *,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    **_: Any,
) -> None:
    """flash-attn's function of this signature, by PyTorch's copy of its kernel; it needs a copy of every gradient."""
    unused = torch.empty(2, dtype=torch.int64, device=q.device)
    cu = cu_seqlens_q.int(), cu_seqlens_k.int(), max_seqlen_q, max_seqlen_k
    found = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse, *cu, 0.0, causal, unused, unused, scale=softmax_scale
    )
    for into, grad in zip((dq, dk, dv), found, strict=True):
        into.copy_(grad)


def moba_choice(q_THD: Tensor, k_THD: Tensor, block: int, top_k: int) -> Tensor:
    """Blocks [T, H, S] of every query and head: its own, and the earlier ones whose mean key is nearest; -1 of none."""
    tokens = len(q_THD)
    means = k_THD.unflatten(0, (-1, block)).mean(1).float()
    gates = torch.einsum("thd,nhd->thn", q_THD.float(), means)
    own = torch.arange(tokens, device=q_THD.device) // block
    before = torch.arange(len(means), device=q_THD.device)[None] < own[:, None]
    gates = gates.masked_fill(~before[:, None], -math.inf)
    best = gates.topk(min(top_k - 1, len(means)), dim=2)
    others = best.indices.masked_fill(best.values.isinf(), -1)
    return torch.cat([others, own[:, None, None].expand(-1, q_THD.shape[1], 1)], 2)


def moba_op(tokens: int, heads: int, dim: int, block: int, top_k: int, bench: Bench) -> dict[str, Op]:
    """All of MoBA on one sequence."""
    device = bench.device
    q, k, v = (torch.randn(1, tokens, heads, dim, device=device, dtype=narrow(device)) for _ in range(3))
    if not bench.cuda:
        seen = seen_blocks(moba_choice(q[0], k[0], block, top_k), tokens, block)
        return graph_op(lambda: masked(q[0], k[0], v[0], seen), [q, k, v])
    from fla.ops.moba import parallel

    parallel._flash_attn_varlen_forward = flash_varlen_forward
    parallel._flash_attn_varlen_backward = flash_varlen_backward
    parallel.flash_attn_varlen_func = flash_varlen_forward
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return graph_op(lambda: parallel.parallel_moba(q, k, v, cu, tokens, block, top_k), [q, k, v])


def measure_moba(bench: Bench, tokens: int, block: int, top_k: int, heads: int = MOBA_HEADS, dim: int = 128) -> None:
    """MoBA, and the means of its blocks."""
    of: dict[str, Any] = {"queries": tokens, "keys": tokens, "num_heads": heads, "num_kv_heads": heads}
    of |= {"head_dim": dim, "value_dim": dim, "block": block, "chosen": top_k}
    kernel, pairs = "fla" if bench.cuda else "plain", pairs_chosen(tokens, top_k, block)
    measure(bench, "moba", kernel, partial(moba_op, tokens, heads, dim, block, top_k, bench), pairs=pairs, **of)
    nbytes = 4 * tokens * heads * dim * (1 + 1 / block)
    measure(bench, "pool", "torch", partial(pool_op, tokens, heads, dim, block, bench), nbytes=nbytes, **of)


def index_tensors(queries: int, keys: int, heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and weights of an indexer."""
    make = partial(torch.randn, device=device, dtype=narrow(device))
    return make(queries, heads, dim), make(keys, dim), torch.rand(queries, heads, device=device)


def plain_index(q_THD: Tensor, k_ND: Tensor, weight_TH: Tensor, tile: int = 2048) -> Tensor:
    """Scores [T, N]: products in tiles of keys, their positive parts added up over heads."""
    tiles = [
        torch.einsum("thn,th->tn", torch.einsum("thd,nd->thn", q_THD, part).relu(), weight_TH.to(q_THD.dtype))
        for part in k_ND.split(tile)
    ]
    return torch.cat(tiles, 1).float()


def triton_index(q_THD: Tensor, k_ND: Tensor, weight_TH: Tensor) -> Tensor:
    """Scores [T, N], by one kernel."""
    from cpsim.real.measure.sparse_triton import index_kernel

    queries, heads, dim = q_THD.shape
    out = torch.empty(queries, len(k_ND), device=q_THD.device)
    rows, columns = 128, 128
    grid = -(-queries // rows), -(-len(k_ND) // columns)
    index_kernel[grid](
        q_THD, k_ND, weight_TH, out, queries, len(k_ND), heads, dim, rows, columns, num_warps=8, num_stages=2
    )
    return out


def _forward_only(function: Callable[..., Tensor], *given: Any) -> dict[str, Op]:
    return {"fwd": partial(function, *given)}


def measure_index(
    bench: Bench, queries: int, keys: int, kernel: str, heads: int = INDEX_HEADS, dim: int = INDEX_DIM
) -> None:
    """Scores of an indexer."""
    x = index_tensors(queries, keys, heads, dim, bench.device)
    of = {"queries": queries, "keys": keys, "pairs": queries * keys, "num_heads": heads, "num_kv_heads": 1}
    way = triton_index if kernel == "triton" else plain_index
    measure(bench, "index", kernel, partial(_forward_only, way, *x), head_dim=dim, **of)


def measure_choice(bench: Bench, queries: int, keys: int) -> None:
    """The highest scores of every query."""
    scores = torch.randn(queries, keys, device=bench.device)
    top_k = min(TOP_K, keys // 2)
    of = {"queries": queries, "keys": keys, "pairs": queries * keys, "chosen": top_k}
    measure(bench, "choose_keys", "torch", lambda: {"fwd": lambda: scores.topk(top_k, sorted=False)}, **of)


def random_keys(queries: int, keys: int, top_k: int, device: torch.device) -> Tensor:
    """[T, S] of distinct keys, in order: one of every so many."""
    step = keys // top_k
    firsts = torch.arange(top_k, device=device) * step
    return (firsts + torch.randint(step, (queries, top_k), device=device)).int()


def gathered_attention(q_THD: Tensor, kv_ND: Tensor, chosen_TS: Tensor, latent: int) -> Tensor:
    """Absorbed MLA on gathered latents: products of batches of 64 queries."""
    outs = []
    for q, chosen in zip(q_THD.split(64), chosen_TS.split(64), strict=True):
        kv = kv_ND.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)
        weights = (torch.bmm(q, kv.transpose(1, 2)) * q_THD.shape[2] ** -0.5).softmax(-1)
        outs.append(torch.bmm(weights, kv[..., :latent]))
    return torch.cat(outs)


def triton_attention(q_THD: Tensor, kv_ND: Tensor, chosen_TS: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    """Absorbed MLA on chosen latents, by one kernel: outputs and log-sum-exps."""
    from cpsim.real.measure.sparse_triton import chosen_kernel

    queries, heads, width = q_THD.shape
    out = q_THD.new_empty(queries, heads, latent)
    lse = torch.empty(queries, heads, device=q_THD.device)
    rest = {"num_heads": heads, "latent": latent, "rope": width - latent, "top_k": chosen_TS.shape[1]}
    size = min(64, heads)
    chosen_kernel[(queries, heads // size)](
        q_THD, kv_ND, chosen_TS, out, lse, width**-0.5, **rest, heads=size, keys=32, num_warps=8, num_stages=2
    )
    return out, lse


def chosen_tensors(
    bench: Bench, queries: int, keys: int, heads: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Queries, latents, and chosen ones of every query; what the points say of them."""
    make = partial(torch.randn, device=bench.device, dtype=narrow(bench.device))
    of: dict[str, Any] = {"queries": queries, "keys": keys, "chosen": top_k, "pairs": queries * top_k}
    of |= {"num_heads": heads, "num_kv_heads": 1, "head_dim": LATENT + ROPE, "value_dim": LATENT}
    chosen = random_keys(queries, keys, top_k, bench.device)
    return make(queries, heads, LATENT + ROPE), make(keys, LATENT + ROPE), chosen, of


def measure_chosen(bench: Bench, queries: int, keys: int) -> None:
    """DSA's attention to chosen keys, as one kernel."""
    q, kv, chosen, of = chosen_tensors(bench, queries, keys, MLA_HEADS, TOP_K)
    fused = partial(triton_attention, q, kv, chosen, LATENT)
    measure(bench, "attend_keys", "triton", lambda: {"fwd": fused}, **of)


def measure_gathered(bench: Bench, queries: int, keys: int, heads: int = MLA_HEADS, top_k: int = TOP_K) -> None:
    """Gathers of chosen latents, alone and with attention to what was gathered."""
    q, kv, chosen, of = chosen_tensors(bench, queries, keys, heads, top_k)
    rows = chosen[: max(1, 2**27 // (kv[0].nbytes * top_k))].flatten()
    gathered = {"queries": len(rows) // top_k, "keys": keys, "chosen": top_k, "width": kv.shape[1]}
    moved = 2 * len(rows) * kv[0].nbytes
    measure(bench, "gather_keys", "torch", lambda: {"fwd": lambda: kv.index_select(0, rows)}, nbytes=moved, **gathered)
    out_of = partial(gathered_attention, q, kv, chosen, LATENT)
    measure(bench, "attend_keys", "torch", partial(graph_op, out_of, [q, kv]), **of)


def measure_dense(bench: Bench, tokens: int, dims: tuple[int, int], window: bool) -> None:
    """PyTorch's flash attention, causal or with NSA's window; it has one dimension for queries and values."""
    shape = Shape(
        family="dense",
        num_heads=HEADS if bench.cuda else 4,
        num_kv_heads=KV_HEADS if bench.cuda else 1,
        head_dim=dims[0] if bench.cuda else 16,
        causal=not window,
        varlen=False,
        q_lens=(tokens,),
        k_lens=(tokens,),
        window=(min(WINDOW, tokens // 2) - 1, 0) if window else None,
    )
    measure_attention(bench, "sdpa_flash" if bench.cuda else "math", shape)


def relative(got: Tensor, want: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def check(bench: Bench, names: Sequence[str]) -> None:
    """What the kernels compute, on small calls, against plain PyTorch in fp32."""
    device = bench.device
    x = nsa_tensors(512, 32, 2, (128, 128), 64, device)

    def blocks() -> float:
        chosen = fla_choice(x, 4, 64)
        seen = seen_blocks(chosen[0], 512, 64)
        out = fla_attend(x, chosen, 4, 64)["fwd"]()
        assert isinstance(out, tuple)
        return relative(out[0][0], masked(x.q[0], x.k[0], x.v[0], seen))

    def compress() -> float:
        out = fla_compress(x, 64)["fwd"]()
        assert isinstance(out, tuple)
        seen = whole_blocks(512, 64, device)[None].expand(2, -1, -1)
        return relative(out[0][0, 64:], masked(x.q[0], x.k_means[0], x.v_means[0], seen)[64:])

    def index() -> float:
        q, k, weight = index_tensors(300, 500, 64, 128, device)
        return relative(triton_index(q, k, weight), plain_index(q.float(), k.float(), weight))

    def attend() -> float:
        q = torch.randn(64, 128, LATENT + ROPE, device=device, dtype=narrow(device))
        kv = torch.randn(1024, LATENT + ROPE, device=device, dtype=narrow(device))
        chosen = random_keys(64, 1024, 256, device)
        want = gathered_attention(q.float(), kv.float(), chosen, LATENT)
        return relative(triton_attention(q, kv, chosen, LATENT)[0], want)

    def moba() -> float:
        q, k, v = (torch.randn(1, 1024, 4, 128, device=device, dtype=narrow(device)) for _ in range(3))
        from fla.ops.moba import parallel

        moba_op(128, 4, 128, 64, 2, bench)  # puts PyTorch's kernel in
        cu = torch.tensor([0, 1024], dtype=torch.int32, device=device)
        got = parallel.parallel_moba(q, k, v, cu, 1024, 128, 3)
        seen = seen_blocks(moba_choice(q[0], k[0], 128, 3), 1024, 128)
        return relative(got[0], masked(q[0], k[0], v[0], seen))

    ways = {"attend_blocks": blocks, "compress_attend": compress, "index": index, "attend_keys": attend, "moba": moba}
    for name in names:
        try:
            error = ways[name]()
        except Exception as failure:
            message = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
            print(f"check {name}: {message}")
            bench.writer.add("error", failed="check", kind=name, message=message)
            continue
        print(f"check {name}: {error:.1e}", "" if error < WRONG else "WRONG")
        bench.writer.add("check", kind=name, relative_errors=[error])


TUNED: Final = {
    "fwd_kernel": ({"num_warps": 2, "num_stages": 2}, {"num_warps": 4, "num_stages": 2}),
    "bwd_kernel_dq": ({"num_warps": 4, "num_stages": 2},),
    "bwd_kernel_dkv": ({"BQ": 4, "num_warps": 4, "num_stages": 2},),
    "kernel_topk": ({"num_warps": 2},),
    "compression_fwd_kernel": ({"num_warps": 2},),
    "compression_bwd_kernel_dq": ({"num_warps": 4},),
    "compression_bwd_kernel_dkv": ({"BQ": 1, "num_warps": 4}, {"BQ": 2, "num_warps": 4, "num_stages": 3}),
}
"""Variants of fla's kernels that are compiled and tried: all of them would take minutes."""


def cut_variants() -> None:
    """Leaves fla's tuners the variants of `TUNED`."""
    from fla.ops.nsa import compression, parallel

    for name, wanted in TUNED.items():
        kernel = getattr(compression if name.startswith("compression") else parallel, f"parallel_nsa_{name}")
        tuner = kernel.fn
        tuner.configs = [config for config in tuner.configs if any(_is(config, one) for one in wanted)] or tuner.configs


def _is(config: Any, wanted: dict[str, int]) -> bool:
    return all(config.kwargs.get(name, getattr(config, name, None)) == value for name, value in wanted.items())


def tasks(only: Collection[str]) -> Iterator[partial[None]]:
    """Measurements of these kinds: first what PyTorch compiles nothing for, then what Triton compiles."""
    return chain.from_iterable(found() for name, found in TASKS.items() if name in only)


def _torch_tasks() -> Iterator[partial[None]]:
    for tokens in LENGTHS[:4]:
        yield partial(measure_index, queries=min(4096, tokens), keys=tokens, kernel="torch")
        yield partial(measure_choice, queries=min(4096, tokens), keys=tokens)
        yield partial(measure_gathered, queries=512, keys=tokens)
    for tokens in (16384, 4096, 65536):
        yield partial(measure_dense, tokens=tokens, dims=DIMS[1], window=True)
    yield partial(measure_dense, tokens=16384, dims=DIMS[1], window=False)


def _moba_tasks() -> Iterator[partial[None]]:
    yield partial(check, names=("moba",))
    for tokens, block, top_k in MOBA:
        yield partial(measure_moba, tokens=tokens, block=block, top_k=top_k)


def _triton_tasks() -> Iterator[partial[None]]:
    yield partial(check, names=("index", "attend_keys"))
    for tokens in LENGTHS[:4]:
        yield partial(measure_index, queries=min(4096, tokens), keys=tokens, kernel="triton")
        yield partial(measure_chosen, queries=min(4096, tokens), keys=tokens)


def _nsa_tasks() -> Iterator[partial[None]]:
    yield partial(check, names=("compress_attend", "attend_blocks"))
    for dims in (DIMS[1], DIMS[0]):
        for tokens in LENGTHS:
            yield partial(measure_nsa, tokens=tokens, dims=dims)


TASKS: Final = {"torch": _torch_tasks, "moba": _moba_tasks, "triton": _triton_tasks, "nsa": _nsa_tasks}


def try_out(bench: Bench) -> None:
    """A few tiny sizes of plain references."""
    measure_nsa(bench, 128, (24, 16), heads=16, block=8)
    measure_index(bench, 32, 128, "torch", heads=4, dim=16)
    measure_choice(bench, 32, 128)
    measure_gathered(bench, 64, 128, heads=4, top_k=16)
    measure_moba(bench, 128, 16, 3, heads=2, dim=16)
    for window in (False, True):
        measure_dense(bench, 128, (16, 16), window)


def _fla_version() -> str:
    try:
        return version("fla-core")
    except PackageNotFoundError:
        return "missing"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=95.0, help="after so many nothing more is begun")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(TASKS), help="which of these to measure")
    parser.add_argument("--cpu", action="store_true", help="plain references on a few tiny sizes, to try the script")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    versions = {"fla": _fla_version(), "sdpa_flash": f"PyTorch {torch.__version__}"}
    header = provenance(device, 1, versions, command_line("python -m cpsim.real.measure.sparse"), args.commit)
    with benched(args.out, header, device, started) as bench:
        if not cuda:
            try_out(bench)
        elif _fla_version() != "missing":
            cut_variants()
        for task in tasks(args.only.split(",")) if cuda else ():
            if time.monotonic() - started > args.seconds:
                break
            before = time.monotonic()
            try:
                task(bench)
            except torch.OutOfMemoryError as error:  # of the tensors of a task
                print(f"out of memory: {str(error)[:100]}", flush=True)
            torch.cuda.empty_cache()
            print(f"{task.func.__name__} {task.keywords}: {time.monotonic() - before:.1f} s", flush=True)


if __name__ == "__main__":
    main()
