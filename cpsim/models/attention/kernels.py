"""The table of attention kernels: for every kernel and pass what is known of it before it is measured.

A kernel is added here, by one row for each pass, and to `cpsim.models.feasible` if it cannot do everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.models.attention.anatomy import (
    Anatomy,
    cudnn,
    flash2,
    flash2_listed,
    flash4,
    flash4_slices,
    flash4_sparse,
    flashinfer,
    flex,
    math,
)

Ints = NDArray[np.int64]
Tiles = tuple[int, int, int]
"""tile_q_causal, tile_q_full and tile_k of an anatomy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPass:
    """One pass of a kernel."""

    anatomy: Anatomy
    """At head dimension 128."""
    start: Mapping[str, float]
    """Parameters of `AttentionParams` that calls of it tell, and where a fit to them starts."""
    tiles: Mapping[int, Tiles] = field(default_factory=dict)
    """By head dimension, where they differ from those of 128."""
    rows_together: Mapping[int, int] = field(default_factory=dict)
    """By head dimension, `rows_together` of the anatomy where it is not 1."""

    @property
    def decides_alike(self) -> bool:
        """Whether pairs of blocks that a mask cuts cost the same, whatever the mask is."""
        return "celled_pair_s" not in self.start


_ALL: Final = {
    "pair_s": 1e-10,
    "block_s": 3e-6,
    "call_s": 5e-6,
    "traffic_s_per_byte": 2.8e-13,
    "busy_threshold": 0.8,
    "busy_power": 0.4,
}
_SEQUENCES: Final = {"block_shared_s": 1e-6, "block_causal_s": 3e-7}
_VARLEN: Final = {"block_varlen_s": 3e-7, "block_decode_s": 2e-7, "call_varlen_s": 2e-6}
_CHECKED: Final = {"unaligned_factor": 1.02, "unaligned_full_factor": 1.02}
_BACKWARD: Final = {"pair_s": 2.2e-10}
_FLASH4: Final = _ALL | _SEQUENCES | _VARLEN
_CUDNN: Final = _ALL | _SEQUENCES | _CHECKED
_FLASH2: Final = _FLASH4 | {"busy_threshold": 0.85, "busy_power": 0.13}
_FLASH2_FORWARD: Final = _FLASH2 | {
    "pair_s": 3.4e-10,
    "block_s": 2e-6,
    "block_causal_s": 4e-6,
    "block_decode_s": 1.5e-7,
    "call_s": 4e-6,
    "call_varlen_s": 1e-6,
    "alone_factor": 0.58,
    "split_pair_s": 3.8e-10,
    "split_call_s": 2e-6,
    "older_share": 0.57,
    "older_share_full": 0.57,
}
_FLASH2_BACKWARD: Final = _FLASH2 | _CHECKED | {"pair_s": 4.84e-10}
_FLASH2_TILES: Final = {64: (128, 128, 128), 256: (64, 64, 64)}
_FLASH4_TILES: Final = {64: (192, 192, 128), 256: (128, 128, 80)}
_FLASH4_BACKWARD_TILES: Final = {64: (128, 128, 128), 256: (64, 64, 64)}
_NAIVE: Final = {
    **{name: _ALL[name] for name in ("pair_s", "block_s", "call_s", "traffic_s_per_byte")},
    **_VARLEN,
    "block_shared_s": 1e-6,
    "unaligned_full_factor": 1.02,
    "odd_factor": 1.02,
}
_ON_CPU: Final = {
    "pair_s": 2e-8,
    "block_s": 2e-6,
    "block_shared_s": 1e-6,
    "block_varlen_s": 1e-5,
    "block_decode_s": 2e-7,
    "call_s": 3e-4,
    "call_varlen_s": 1e-5,
    "traffic_s_per_byte": 1e-10,
}
_LISTED: Final = _ALL | {"pair_s": 1.7e-10, "unaligned_factor": 1.02}
_LISTED_BACKWARD: Final = _LISTED | {"pair_s": 3.74e-10, "unaligned_factor": 1.3}
_PAIR_BY_PAIR: Final = {
    "partial_pair_s": 2.5e-11,
    "celled_pair_s": 1.6e-10,
    "banded_pair_s": 2.5e-9,
    "unaligned_partial_pair_s": 1e-10,
    "unaligned_celled_pair_s": 3e-10,
    "unaligned_banded_pair_s": 2.8e-9,
    "banded_factor": 1.3,
}
"""Parameters of a kernel whose function decides pair by pair in blocks that a mask cuts."""
_PASSES_OVER: Final = {"passed_s": 2e-7}
"""Parameters of a kernel that looks at every block, as it has no list."""
_GATHERED: Final = _ALL | {"block_shared_s": 1e-6, "block_decode_s": 2e-7}

KERNELS: Final = {
    ("fa2", "fwd"): KernelPass(anatomy=flash2(False), start=_FLASH2_FORWARD, tiles=_FLASH2_TILES),
    ("fa2", "bwd"): KernelPass(anatomy=flash2(True), start=_FLASH2_BACKWARD, tiles=_FLASH2_TILES),
    ("sdpa_flash", "fwd"): KernelPass(anatomy=flash2(False), start=_FLASH2_FORWARD, tiles=_FLASH2_TILES),
    ("sdpa_flash", "bwd"): KernelPass(anatomy=flash2(True), start=_FLASH2_BACKWARD, tiles=_FLASH2_TILES),
    ("fa3", "fwd"): KernelPass(anatomy=flash4(False), start=_FLASH4, tiles=_FLASH4_TILES),
    ("fa3", "bwd"): KernelPass(anatomy=flash4(True), start=_FLASH4 | _BACKWARD, tiles=_FLASH4_BACKWARD_TILES),
    ("fa4", "fwd"): KernelPass(anatomy=flash4(False), start=_FLASH4, tiles=_FLASH4_TILES),
    ("fa4", "bwd"): KernelPass(anatomy=flash4(True), start=_FLASH4 | _BACKWARD, tiles=_FLASH4_BACKWARD_TILES),
    ("ffa", "fwd"): KernelPass(anatomy=flash4_slices(False), start=_FLASH4, tiles=_FLASH4_TILES),
    ("ffa", "bwd"): KernelPass(anatomy=flash4_slices(True), start=_FLASH4 | _BACKWARD, tiles=_FLASH4_BACKWARD_TILES),
    ("ffa_fa4", "fwd"): KernelPass(anatomy=flash4_slices(False), start=_FLASH4, tiles=_FLASH4_TILES),
    ("ffa_fa4", "bwd"): KernelPass(
        anatomy=flash4_slices(True), start=_FLASH4 | _BACKWARD, tiles=_FLASH4_BACKWARD_TILES
    ),
    ("flash_mask", "fwd"): KernelPass(anatomy=flash2_listed(False), start=_LISTED | _PASSES_OVER, tiles=_FLASH2_TILES),
    ("flash_mask", "bwd"): KernelPass(
        anatomy=flash2_listed(True), start=_LISTED_BACKWARD | _PASSES_OVER, tiles=_FLASH2_TILES
    ),
    ("fa2_sparse", "fwd"): KernelPass(anatomy=flash2_listed(False), start=_LISTED, tiles=_FLASH2_TILES),
    ("cudnn", "fwd"): KernelPass(anatomy=cudnn(False), start=_CUDNN),
    ("cudnn", "bwd"): KernelPass(
        anatomy=cudnn(True),
        start=_CUDNN | _BACKWARD,
        tiles={256: (64, 64, 64)},
        rows_together={256: 2},  # 33 rows of 4 heads take 132 SMs two waves, 66 of 2 one (h200-waves.jsonl)
    ),
    ("flex", "fwd"): KernelPass(
        anatomy=flex(False),
        start=_LISTED | _PAIR_BY_PAIR | {"unaligned_celled_factor": 1.2, "block_banded_s": 2e-5},
        tiles={256: (64, 64, 32)},
    ),
    ("flex", "bwd"): KernelPass(
        anatomy=flex(True),
        start={
            **_LISTED_BACKWARD,
            **_PAIR_BY_PAIR,
            "block_shared_s": 1e-6,
            "banded_pair_s": 6e-10,
            "unaligned_partial_pair_s": 1.8e-10,
            "unaligned_celled_pair_s": 1.8e-10,
            "unaligned_banded_pair_s": 3.6e-10,
            "query_pair_s": 1.6e-10,
            "query_cut_share": 0.2,
            "unaligned_query_cut_share": 0.7,
        },
        tiles={256: (64, 64, 64)},
    ),
    ("fa4_sparse", "fwd"): KernelPass(anatomy=flash4_sparse(False), start=_LISTED),
    ("fa4_sparse", "bwd"): KernelPass(anatomy=flash4_sparse(True), start=_LISTED_BACKWARD),
    ("flashinfer", "fwd"): KernelPass(anatomy=flashinfer(packs_heads=False, tile_k=96), start=_GATHERED),
    ("flashinfer_fa2", "fwd"): KernelPass(anatomy=flashinfer(packs_heads=True, tile_k=64), start=_GATHERED),
    ("sdpa_math", "fwd"): KernelPass(anatomy=math(False), start=_NAIVE),
    ("sdpa_math", "bwd"): KernelPass(anatomy=math(True), start=_NAIVE | _BACKWARD),
    ("math", "fwd"): KernelPass(anatomy=math(False), start=_ON_CPU),
    ("math", "bwd"): KernelPass(anatomy=math(True), start=_ON_CPU),
}
"""By (kernel, pass)."""
UNMEASURED: Final = {
    "fa2_ranges": "DCP's flash-attn 2 publishes no times of calls; `python -m studies dcp` takes them as fa2's",
    "vsa": "LongCA-bench shows charts without numbers; package fastvideo-kernel runs it, on sm90",
    "triton_vsa": "LongCA-bench shows charts without numbers; package fastvideo-kernel runs it, from sm80 on",
    "sage": "SageAttention's bars have no numbers for Hopper; package sageattention runs it, in int8 and FP8, forward",
    "flash_mla": "a kernel of inference, whose README states 660 TFLOP/s of dense decoding on H800 and has no table; "
    "training runs keys of 192 and values of 128, with which cudnn was measured",
}
"""Kernels of benchmarks without a price, and where one could come from."""
NAIVE: Final = tuple(sorted({kernel for (kernel, _), row in KERNELS.items() if row.anatomy.holds_scores}))
"""Kernels that hold all scores in memory."""


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
    anatomy, row = KERNELS[kernel, pass_].anatomy, 4 * q * heads
    if pass_ == "fwd":
        return row * anatomy.keeps_maxima
    if anatomy.lists_blocks and anatomy.packs_heads:  # nothing to add up: each gradient has one owner
        return 2 * row
    sums = 8 * k * kv_heads * head_dim if anatomy.accumulates_kv else 4 * k * heads * head_dim
    return np.asarray(row * head_dim + 2 * row + sums * (heads > kv_heads))


def anatomy_at(kernel: str, pass_: str, head_dim: int) -> Anatomy:
    """A kernel's anatomy at a head dimension; where its tiles are not known, they are those of 128."""
    row = KERNELS[kernel, pass_]
    anatomy = replace(row.anatomy, rows_together=row.rows_together.get(head_dim, 1))
    if head_dim not in row.tiles:
        return anatomy
    tile_q_causal, tile_q_full, tile_k = row.tiles[head_dim]
    return replace(anatomy, tile_q_causal=tile_q_causal, tile_q_full=tile_q_full, tile_k=tile_k)
