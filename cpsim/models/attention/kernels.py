"""Attention kernels: the tiles that a kernel really visits, its thread blocks in waves over the SMs, its power limit.

One call is one kernel launch over one or more sequences. A call with one sequence uses the kernel's dense entry
point, with several the varlen one, as `cpsim.real.run.attention` does.

    seconds = (call + traffic / bandwidth + makespan(blocks) * slowdown(busy)) / exp(discrepancy)

* A thread block owns one tile row (forward: queries, backward: keys) of one head and walks over the tiles of its row
  that the mask does not empty; tiles cut by the mask or by a sequence's end cost a whole tile. Heads that share keys
  are packed into one tile row by some kernels.
* Blocks start in launch order as SMs become free: up to 48 waves are replayed, more are summed with their tail.
* Two blocks on one SM (flash-attention 2, forward) hide each other's overhead, but slow each other's tiles, the
  younger block's more, or both alike, which depends on how the kernel was compiled: equal blocks then end together,
  and those that follow meet again. Which blocks meet is what an H100 does where there are few waves of them.
* Backward adds memory-bound passes: the products of out and dout, the fp32 accumulator of dq, and with shared heads
  those of dk and dv. Accumulators are passed over in whole tiles, so that short sequences move mostly padding.
* The main kernel itself cannot run faster than its own memory traffic, which matters to calls of short sequences.
  Loads of keys hide behind tiles; queries and outputs, which move when a block has no tiles, hardly do.
* Split keys launch a second kernel that combines the parts.
* Code that checks bounds is compiled apart, for a causal mask and for none. cuDNN needs it where keys are not whole
  tiles, flash-attention 2 where queries are not either, and in varlen calls; the matrix products of naive attention
  load scores by 16 bytes where keys are multiples of 8, and one by one where they are odd.
* Kernels that list blocks visit those of 128 x 128 tokens that the mask touches, whatever its shape. Deciding pair by
  pair in blocks that it cuts takes time, which depends on how the kernel was compiled: for runs of keys, rectangles or
  bands, and with or without checks of bounds. Backward, both who owns keys and who owns queries compute the scores.
* FlashInfer takes every row of blocks of a mask of rectangles as a sequence on keys gathered one by one.
* Other head dimensions have tiles and a few times of their own where points say so, of masks that cut blocks above all.
* Busy tensor cores draw more than the power limit, so the clock falls where `busy` (the fraction of time that the
  SMs spend on tiles) passes a threshold.

Reference: Dao, FlashAttention-2 (2023), section 3.3 (work partitioning); tile sizes and launch orders as in the
sources of flash-attention 2.8.3, flash-attn-4 4.0.0b36, FlashInfer 0.6.4 and PyTorch 2.11's FlexAttention, compute
capability 9.0.
Differs: cuDNN's tiles are not public; its anatomy is the one that fits best. flash-attention 3 has not been measured
here: flash-attn-4 for this architecture descends from it and lends its anatomy.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.masks.blocks import Visits, sequence_slices, visits
from cpsim.models.attention.blocks import FEATURES, price, price_listed
from cpsim.models.attention.discrepancy import NONE, Discrepancy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What a kernel's source says about one pass; nothing here is fitted."""

    backward: bool
    """Whether a block owns a tile row of keys and walks over queries."""
    tile_q_causal: int
    """Query rows of a tile under a causal mask [tokens, or tokens x packed heads]; 0: a call computes everything and
    masks it afterwards."""
    tile_q_full: int
    """The same without a mask."""
    tile_k: int
    """Key rows of a tile [tokens]."""
    packs_heads: bool
    """Whether query heads that share keys fill one tile row together."""
    heads_outermost: bool
    """Launch order: all sequences of one head first (True) or all heads of one sequence."""
    heavy_first: bool
    """Whether a causal call launches its longest rows first, across heads that fit the L2 cache."""
    blocks_per_sm: int
    """Thread blocks that one SM holds."""
    splits_keys: bool
    """Whether a dense call with few blocks splits the keys (flash-attn 2, num_splits_heuristic)."""
    grid_of_longest: bool
    """Whether a varlen call launches as many blocks for each sequence as the longest one needs."""
    accumulates_kv: bool
    """Whether shared heads accumulate dk and dv in fp32 (True), or write them per query head (False)."""
    lists_blocks: bool = False
    """Whether a block walks over a list of the blocks of 128 x 128 tokens that the mask, of any shape, touches."""
    aligns_keys: bool = False
    """Whether calls whose keys are whole tiles run code of their own, without checks of bounds."""
    aligns_queries: bool = False
    """Whether queries must be whole tiles, too, and the call a dense one."""
    gathers_keys: bool = False
    """Whether the rows of a mask of rectangles are the sequences, each with the keys that it sees gathered."""
    rows_together: int = 1
    """Tile rows of a head come in groups of so many, the last of which may have rows without keys of their own."""


def _flash2(backward: bool) -> Anatomy:
    return Anatomy(
        backward=backward,
        tile_q_causal=64 if backward else 128,
        tile_q_full=64 if backward else 128,
        tile_k=128 if backward else 64,
        packs_heads=False,
        heads_outermost=True,
        heavy_first=False,
        blocks_per_sm=1 if backward else 2,
        splits_keys=not backward,
        grid_of_longest=True,
        accumulates_kv=False,
        aligns_keys=backward,
        aligns_queries=backward,
    )


def _flash4(backward: bool) -> Anatomy:
    return Anatomy(
        backward=backward,
        tile_q_causal=64 if backward else 128,
        tile_q_full=80 if backward else 128,
        tile_k=128,
        packs_heads=not backward,
        heads_outermost=False,
        heavy_first=not backward,
        blocks_per_sm=1,
        splits_keys=False,
        grid_of_longest=False,
        accumulates_kv=True,
    )


def _cudnn(backward: bool) -> Anatomy:
    return Anatomy(
        backward=backward,
        tile_q_causal=64 if backward else 128,
        tile_q_full=64 if backward else 128,
        tile_k=128,
        packs_heads=False,
        heads_outermost=True,
        heavy_first=False,
        blocks_per_sm=1,
        splits_keys=False,
        grid_of_longest=True,
        accumulates_kv=False,
        aligns_keys=True,
    )


def _math(backward: bool) -> Anatomy:
    """Plain PyTorch: matrix products of one sequence after another, and passes over all scores.

    Its tiles are what the loads of matrix products need to be aligned: 8 elements, or 16 bytes. Rows of scores are as
    long as there are keys, so that queries do not count.
    """
    return Anatomy(
        backward=backward,
        tile_q_causal=0,
        tile_q_full=8,
        tile_k=8,
        packs_heads=False,
        heads_outermost=False,
        heavy_first=False,
        blocks_per_sm=1,
        splits_keys=False,
        grid_of_longest=False,
        accumulates_kv=False,
        aligns_keys=True,
    )


def _flex(backward: bool) -> Anatomy:
    """The Triton kernels of PyTorch's FlexAttention with its default sizes for head dimension 128.

    Backward, some blocks own keys, for all heads that share them, and then others own queries.
    """
    return Anatomy(
        backward=backward,
        tile_q_causal=128,
        tile_q_full=128,
        tile_k=128,
        packs_heads=backward,
        heads_outermost=True,
        heavy_first=False,
        blocks_per_sm=1,
        splits_keys=False,
        grid_of_longest=False,
        accumulates_kv=False,
        lists_blocks=True,
    )


def _flash4_sparse(backward: bool) -> Anatomy:
    """flash-attn 4 with lists of blocks; backward, blocks own keys for one head."""
    return replace(
        _flex(backward),
        packs_heads=not backward,
        heads_outermost=False,
        accumulates_kv=True,
    )


def _flashinfer(packs_heads: bool, tile_k: int) -> Anatomy:
    """FlashInfer's block-sparse kernels: every row of blocks is a sequence on gathered keys; no backward pass."""
    return Anatomy(
        backward=False,
        tile_q_causal=128,
        tile_q_full=128,
        tile_k=tile_k,
        packs_heads=packs_heads,
        heads_outermost=True,
        heavy_first=False,
        blocks_per_sm=1,
        splits_keys=False,
        grid_of_longest=False,
        accumulates_kv=False,
        gathers_keys=True,
    )


def flash2_ranges(backward: bool) -> Anatomy:
    """flash-attn 2.6.3 with up to two ranges of keys for every query, DCP's kernel.

    Forward it always runs the kernel that splits keys, in one split, so that nothing combines parts: a block of 64
    queries walks over tiles of 128 keys from the first that it sees to the last, and skips those between its two
    ranges. Backward a block of 128 keys walks over all queries from the first that sees one of them to the last.

    Reference: chenyu-jiang/flash-attention, branch bblock at a786cd0 (csrc/flash_attn: flash_api.cpp, run_mha_fwd;
    src/flash_fwd_kernel.h, compute_attn_1rowblock_splitkv; src/flash_bwd_kernel.h, compute_dq_dk_dv_1colblock).
    """
    listed = replace(_flash2(backward), splits_keys=False, lists_blocks=True)
    return listed if backward else replace(listed, tile_q_causal=64, tile_q_full=64, tile_k=128)


NAIVE = ("math", "sdpa_math")
"""Kernels that hold all scores in memory."""
_MAKE = {
    "fa2": _flash2,
    "fa3": _flash4,
    "fa4": _flash4,
    "cudnn": _cudnn,
    "sdpa_flash": _flash2,
    "flex": _flex,
    "fa4_sparse": _flash4_sparse,
    "sdpa_math": _math,
    "math": _math,
}
ANATOMY: dict[tuple[str, str], Anatomy] = {
    (kernel, "bwd" if backward else "fwd"): make(backward)
    for kernel, make in _MAKE.items()
    for backward in (False, True)
} | {
    ("flashinfer", "fwd"): _flashinfer(packs_heads=False, tile_k=96),
    ("flashinfer_fa2", "fwd"): _flashinfer(packs_heads=True, tile_k=64),
}
"""By (kernel, pass)."""
_FLASH2_TILES = {64: (128, 128, 128), 256: (64, 64, 64)}
_TILES: dict[tuple[str, str], dict[int, tuple[int, int, int]]] = {
    ("fa2", "fwd"): _FLASH2_TILES,
    ("fa2", "bwd"): _FLASH2_TILES,
    ("sdpa_flash", "fwd"): _FLASH2_TILES,
    ("sdpa_flash", "bwd"): _FLASH2_TILES,
    ("fa4", "fwd"): {64: (192, 192, 128), 256: (128, 128, 80)},
    ("fa4", "bwd"): {64: (128, 128, 128), 256: (64, 64, 64)},
    ("cudnn", "bwd"): {256: (64, 64, 64)},
    ("flex", "fwd"): {256: (64, 64, 32)},
    ("flex", "bwd"): {256: (64, 64, 64)},
}
"""Tiles (tile_q_causal, tile_q_full, tile_k) where they differ from those of head dimension 128."""
_ROWS_TOGETHER = {("cudnn", "bwd", 256): 2}
"""33 rows of 4 heads take 132 SMs two waves, 66 of 2 one (data/points/h200/h200-waves.jsonl)."""


def working_bytes(
    kernel: str,
    pass_: str,
    q_tokens: ArrayLike,
    k_tokens: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    head_dim: int,
) -> Ints:
    """Bytes that calls allocate beyond what they are given and leave, where they run in blocks.

    From the kernels' sources: backward an fp32 accumulator of dq, products of out and dout, and fp32 or per-head sums
    of dk and dv where heads share them.

    Args:
        kernel, pass_: not naive attention, whose scores come on top.
        q_tokens, k_tokens: rows of every call.
        heads, kv_heads: of every call.
        head_dim: elements.
    """
    q, k, heads, kv_heads = (np.asarray(x, np.int64) for x in (q_tokens, k_tokens, heads, kv_heads))
    anatomy, row = ANATOMY[kernel, pass_], 4 * q * heads
    if pass_ == "fwd":
        return row * (kernel == "flex")
    if anatomy.lists_blocks and anatomy.packs_heads:  # nothing to add up: each gradient has one owner
        return 2 * row
    sums = 8 * k * kv_heads * head_dim if anatomy.accumulates_kv else 4 * k * heads * head_dim
    return np.asarray(row * head_dim + 2 * row + sums * (heads > kv_heads))


def anatomy_at(kernel: str, pass_: str, head_dim: int) -> Anatomy:
    """A kernel's anatomy at a head dimension; where its tiles are not known, they are those of 128."""
    anatomy = replace(ANATOMY[kernel, pass_], rows_together=_ROWS_TOGETHER.get((kernel, pass_, head_dim), 1))
    tiles = _TILES.get((kernel, pass_), {}).get(head_dim)
    if tiles is None:
        return anatomy
    return replace(anatomy, tile_q_causal=tiles[0], tile_q_full=tiles[1], tile_k=tiles[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """One kernel and pass on one GPU type: its anatomy and the fitted times, all in seconds of one thread block."""

    anatomy: Anatomy
    num_sms: int
    head_dim: int
    """Measured head dimension; those without points of their own scale traffic and tiles in proportion."""
    pair_s: float
    """Per (query, key) pair of a visited tile."""
    block_s: float
    """Per block: prologue and epilogue."""
    block_shared_s: float
    """Per block more, where query heads share keys; of listed blocks that own keys, for each of their query heads."""
    block_causal_s: float
    """Per block more, under a causal mask; tile time, which a second block on the SM slows."""
    block_varlen_s: float
    """Per block more, in a varlen call."""
    block_decode_s: float
    """Per block and 32 sequences more, in a varlen call (finding its sequence), or per launched block without work."""
    call_s: float
    """Per call: launches on the GPU, pipeline fill."""
    call_varlen_s: float
    """Per varlen call more."""
    traffic_s_per_byte: float
    """Memory-bound passes around the main kernel."""
    busy_threshold: float
    """Busy fraction at which the power limit sets in."""
    busy_power: float
    """Time grows with (busy / threshold) to this power above it."""
    alone_factor: float
    """Time of a block that has its SM to itself, relative to one that shares it."""
    split_pair_s: float
    """Per pair where keys are split."""
    split_call_s: float
    """Per call more where keys are split: the kernel that combines the parts."""
    unaligned_factor: float
    """Slowdown of code that checks bounds, which lengths that are no multiples of the tile sizes need, under a causal
    mask; of listed blocks under any, backward of those that own keys."""
    unaligned_full_factor: float = 1.0
    """The same without a mask."""
    odd_factor: float = 1.0
    """Slowdown more of an odd number of keys, whose scores naive attention loads one by one."""
    unaligned_celled_factor: float = 1.0
    """Slowdown more there of a kernel that can decide by rectangles."""
    partial_pair_s: float = 0.0
    """Per pair more in a listed block that the mask cuts, where runs of keys decide; backward, of blocks that own
    keys."""
    celled_pair_s: float = 0.0
    """The same where rectangles decide."""
    banded_pair_s: float = 0.0
    """The same where bands in rectangles decide."""
    unaligned_partial_pair_s: float = 0.0
    unaligned_celled_pair_s: float = 0.0
    unaligned_banded_pair_s: float = 0.0
    """The same three where lengths are no multiples of the tile sizes."""
    banded_factor: float = 1.0
    """Slowdown of full and cut blocks alike in a kernel that can decide by bands; backward, of those that own keys."""
    block_banded_s: float = 0.0
    """Per thread block more in such a kernel."""
    query_cut_share: float = 0.5
    """Of what cut blocks take more, what they take where a backward block owns queries."""
    unaligned_query_cut_share: float = 0.5
    """The same where lengths are no multiples of the tile sizes."""
    query_pair_s: float = 0.0
    """Per pair of a listed block that a backward block owning queries visits."""
    calls_s: tuple[float, ...] = ()
    """Times of calls, ascending, by which `calls_spread` goes; none where calls were measured once each."""
    calls_spread: tuple[float, ...] = ()
    """Standard deviation, relative, of the time of equal calls on one GPU."""
    discrepancy: Discrepancy = NONE
    """What the times above leave over."""
    head_dims: tuple[AttentionParams, ...] = ()
    """The same kernel at other measured head dimensions, ascending."""

    def at(self, head_dim: int) -> AttentionParams:
        """The parameters that hold at a head dimension: kernels round it up to one that they are compiled for."""
        measured = sorted((self, *self.head_dims), key=lambda params: params.head_dim)
        return next((params for params in measured if params.head_dim >= head_dim), measured[-1])

    def spread(self, seconds: Floats) -> Floats:
        """Standard deviation, relative, between equal calls on one GPU that take so long; 0 where it is not known."""
        if not self.calls_s:
            return np.zeros(len(seconds))
        return np.interp(np.log(np.maximum(seconds, self.calls_s[0])), np.log(self.calls_s), self.calls_spread)

    def everywhere(self, change: Callable[[AttentionParams], AttentionParams]) -> AttentionParams:
        """The same change made at every measured head dimension."""
        return replace(change(self), head_dims=tuple(map(change, self.head_dims)))


FITTED = tuple(f.name for f in fields(AttentionParams) if f.type == "float")
PER_PAIR = ("pair_s", "split_pair_s", "query_pair_s")
"""Those that grow with the head dimension; deciding about a pair does not."""


def attention_seconds(
    params: AttentionParams,
    op_start: Ints,
    q_len: Ints,
    k_len: Ints,
    causal: Bools,
    num_heads: Ints,
    num_kv_heads: Ints,
    head_dim: int,
    varlen: Bools | None = None,
) -> Floats:
    """Seconds of N kernel calls of one kernel and pass.

    Args:
        params: of that kernel and pass.
        op_start: [N+1] offsets of each call's sequences.
        q_len: [M] queries of each sequence, tokens.
        k_len: [M] keys of each sequence, tokens; at least q_len under a causal mask.
        causal: [M] whether the mask is causal, aligned to the bottom right; otherwise full. One call is causal if
            any of its sequences is.
        num_heads: [N] query heads.
        num_kv_heads: [N] key and value heads.
        head_dim: of queries, keys and values.
        varlen: [N] whether the call is told the lengths of its sequences; by default where it has several.

    Returns:
        [N] seconds; 0 for calls without work.
    """
    varlen = np.diff(op_start) > 1 if varlen is None else varlen
    return calls(params, op_start, q_len, k_len, causal, num_heads, num_kv_heads, head_dim, varlen)[0]


def clocked_seconds(
    params: AttentionParams,
    op_start: Ints,
    q_len: Ints,
    k_len: Ints,
    causal: Bools,
    num_heads: Ints,
    num_kv_heads: Ints,
    head_dim: int,
    varlen: bool = False,
) -> tuple[Floats, Floats]:
    """As `attention_seconds`: [N] seconds of calls without a pause, which the power limit slows, and without it.

    With ``varlen`` calls of one sequence are varlen ones, too.

    The second leaves the whole call as much faster as its tiles are at the full clock; calls short enough for their
    overhead to matter do not meet the limit.
    """
    arguments = op_start, q_len, k_len, causal, num_heads, num_kv_heads, head_dim, (np.diff(op_start) > 1) | varlen
    seconds, _, slower = calls(params, *arguments)
    return seconds, seconds / slower


def calls(
    params: AttentionParams,
    op_start: Ints,
    q_len: Ints,
    k_len: Ints,
    causal: Bools,
    num_heads: Ints,
    num_kv_heads: Ints,
    head_dim: int,
    varlen: Bools,
    held: Ints | None = None,
    hold_s: Floats | None = None,
) -> tuple[Floats, Floats, Floats]:
    """As `attention_seconds`, with features [N, FEATURES] and slowdown by the power limit [N] of every call.

    Something else, such as a kernel of NCCL's, may hold `held` SMs [N] for the first `hold_s` [N] of each call.
    """
    params = params.at(head_dim)
    if params.anatomy.lists_blocks:
        masks = [_sequence_visits(q_len[a:b], k_len[a:b], causal[a:b]) for a, b in pairwise(op_start.tolist())]
        return listed_calls(params, masks, num_heads, num_kv_heads, head_dim)
    seconds, features, slower = price(
        _compiled(params, head_dim),
        params.discrepancy.arrays(),
        np.asarray(op_start, np.int64),
        np.asarray(q_len, np.int64),
        np.asarray(k_len, np.int64),
        np.asarray(causal, np.bool_) & (params.anatomy.tile_q_causal > 0),
        np.ascontiguousarray(num_heads, np.int64),
        np.ascontiguousarray(num_kv_heads, np.int64),
        np.asarray(varlen, np.bool_),
        np.zeros(len(varlen), np.int64) if held is None else held,
        np.zeros(len(varlen)) if hold_s is None else hold_s,
    )
    return seconds, features, slower


def _sequence_visits(q_len: Ints, k_len: Ints, causal: Bools) -> Visits:
    return visits(sequence_slices(q_len, k_len, causal), int(q_len.sum()), int(k_len.sum()))


def listed_calls(
    params: AttentionParams, masks: Sequence[Visits], num_heads: Ints, num_kv_heads: Ints, head_dim: int
) -> tuple[Floats, Floats, Floats]:
    """As `calls`, of N calls of a kernel that lists blocks: what each one visits, and its heads [N]."""
    params = params.at(head_dim)
    g, discrepancy = _compiled(params, head_dim), params.discrepancy.arrays()
    looks = np.zeros((len(masks), len(FEATURES)))
    found = np.ones((2, len(masks)))
    for i, mask in enumerate(masks):
        found[:, i] = price_listed(
            g,
            discrepancy,
            mask.of_queries,
            mask.of_keys,
            mask.num_q,
            mask.num_k,
            mask.rule,
            int(num_heads[i]),
            int(num_kv_heads[i]),
            looks[i],
        )
    return found[0], looks, found[1]


_ANATOMY = tuple(f.name for f in fields(Anatomy))
Compiled = namedtuple("Compiled", (*_ANATOMY, "num_sms", "slots", "head_dim", *FITTED))  # type: ignore[misc]
"""Everything about a kernel that compiled code reads; times per pair are those of the head dimension."""


def _compiled(params: AttentionParams, head_dim: int) -> Any:
    scale = head_dim / params.head_dim
    values: dict[str, Any] = {name: getattr(params.anatomy, name) for name in _ANATOMY}
    values |= {name: float(getattr(params, name)) for name in FITTED}
    for name in PER_PAIR:
        values[name] *= scale
    values |= {"num_sms": params.num_sms, "slots": params.num_sms * params.anatomy.blocks_per_sm}
    return Compiled(**values, head_dim=float(head_dim))  # type: ignore[call-arg]
