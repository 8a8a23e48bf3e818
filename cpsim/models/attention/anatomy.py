"""What the sources of attention kernels say of their tiles, thread blocks and launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import ConfigDict

from cpsim.units import CLOSED, Flag, Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What a kernel's source says about one pass; nothing here is fitted."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    backward: Flag
    """Whether a block owns a tile row of keys and walks over queries."""
    tile_q_causal: Annotated[int, Quantity("rows", 0, 1e5)]
    """Query rows of a tile under a causal mask [tokens, or tokens x packed heads]; 0: a call computes everything and
    masks it afterwards."""
    tile_q_full: Annotated[int, Quantity("rows", 1, 1e5)]
    """Query rows of a tile without a mask."""
    tile_k: Annotated[int, Quantity("rows", 1, 1e5)]
    """Key rows of a tile [tokens]."""
    packs_heads: Flag
    """Whether query heads that share keys fill one tile row together."""
    heads_outermost: Flag
    """Launch order: all sequences of one head first (True) or all heads of one sequence."""
    heavy_first: Flag
    """Whether a causal call launches its longest rows first, across heads that fit the L2 cache."""
    blocks_per_sm: Annotated[int, Quantity("blocks", 1, 1e3)]
    """Thread blocks that one SM holds."""
    splits_keys: Flag
    """Whether a dense call with few blocks splits the keys (flash-attn 2, num_splits_heuristic)."""
    grid_of_longest: Flag
    """Whether a varlen call launches as many blocks for each sequence as the longest one needs."""
    accumulates_kv: Flag
    """Whether shared heads accumulate dk and dv in fp32 (True), or write them per query head (False)."""
    lists_blocks: Flag = False
    """Whether a block walks over a list of the blocks of 128 x 128 tokens that the mask, of any shape, touches."""
    aligns_keys: Flag = False
    """Whether calls whose keys are whole tiles run code of their own, without checks of bounds."""
    aligns_queries: Flag = False
    """Whether queries must be whole tiles, too, and the call a dense one without a window."""
    gathers_keys: Flag = False
    """Whether the rows of a mask of rectangles are the sequences, each with the keys that it sees gathered."""
    takes_slices: Flag = False
    """Whether any mask is a list of banded slices, each of which runs as a sequence of its own."""
    rows_together: Annotated[int, Quantity("rows", 1, 1e3)] = 1
    """Tile rows of a head come in groups of so many, the last of which may have rows without keys of their own."""
    keeps_maxima: Flag = False
    """Whether a forward call allocates the largest score of every row, in fp32, beside its results."""

    @property
    def holds_scores(self) -> bool:
        """Whether all scores of a call lie in memory at once: naive attention."""
        return self.tile_q_causal == 0


def flash2(backward: bool) -> Anatomy:
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


def flash4(backward: bool) -> Anatomy:
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


def flash4_slices(backward: bool) -> Anatomy:
    """MagiAttention's kernels on the code of flash-attn 3 and 4: slices (query range, key range, band), whose results
    are added up where they share queries."""
    return replace(flash4(backward), takes_slices=True)


def cudnn(backward: bool) -> Anatomy:
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


def math(backward: bool) -> Anatomy:
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


def flex(backward: bool) -> Anatomy:
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
        keeps_maxima=not backward,
    )


def flash4_sparse(backward: bool) -> Anatomy:
    """flash-attn 4 with lists of blocks; backward, blocks own keys for one head."""
    return replace(
        flex(backward),
        packs_heads=not backward,
        heads_outermost=False,
        accumulates_kv=True,
        keeps_maxima=False,
    )


def flashinfer(packs_heads: bool, tile_k: int) -> Anatomy:
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


def flash2_listed(backward: bool) -> Anatomy:
    """Kernels on the code of flash-attn 2 that skip blocks which the mask leaves out."""
    return replace(flash2(backward), splits_keys=False, lists_blocks=True)


def flash2_ranges(backward: bool) -> Anatomy:
    """flash-attn 2.6.3 with up to two ranges of keys for every query, DCP's kernel.

    Forward it always runs the kernel that splits keys, in one split, so that nothing combines parts: a block of 64
    queries walks over tiles of 128 keys from the first that it sees to the last, and skips those between its two
    ranges. Backward a block of 128 keys walks over all queries from the first that sees one of them to the last.

    Reference: chenyu-jiang/flash-attention, branch bblock at a786cd0 (csrc/flash_attn: flash_api.cpp, run_mha_fwd;
    src/flash_fwd_kernel.h, compute_attn_1rowblock_splitkv; src/flash_bwd_kernel.h, compute_dq_dk_dv_1colblock).
    """
    listed = flash2_listed(backward)
    return listed if backward else replace(listed, tile_q_causal=64, tile_q_full=64, tile_k=128)
