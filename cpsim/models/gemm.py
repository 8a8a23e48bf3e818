"""Matrix products of linear layers under sustained load: tiles in waves over the SMs, and memory traffic.

    seconds = call + max(waves * (step_s * steps + tile_s), traffic / bandwidth) + sums of parts

* A thread block owns a tile of the result and walks over k in steps; cuBLAS chooses among tile sizes and may cut k into
  parts, whose results are added up in fp32 afterwards; parts beyond the steps of k are empty. The time is that of the
  best choice.
* Large products meet the power limit. SMs that a last, partial wave leaves idle draw little, so that the clock of the
  others rises: a partial wave costs between its share of a wave and a whole one.

The three products of a linear layer differ in which axis of their operands is contiguous; measured, they take alike
within 1 %.

Reference: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantization); tile sizes as in
CUTLASS 3's persistent kernels of compute capability 9.0.
Differs: cuBLAS's heuristics are not public; the best of the choices below stands for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict

from cpsim.units import CLOSED, Quantity, Seconds, SecondsPerByte, Share

Floats = NDArray[np.float64]

TILES: Final = ((128, 256), (256, 128), (128, 128))
"""Rows and columns of a tile."""
SPLITS: Final = (1, 2, 4, 8)
"""Parts of k."""
STEP: Final = 64
"""Elements of k that a tile takes at a time."""
ELEMENT_BYTES: Final = 2
SUM_BYTES: Final = 4
FP8_BYTES: Final = 1
FP8_RATE: Final = 1.9
"""How much faster tensor cores step along k in FP8 than in bf16; launches, fills and ends of tiles are those in bf16.

Source: 1.86 and 1.93, measured on an H100 and an H200 (``python -m studies.products``); 1.94, with which the twelve
products of a layer in Transformer Engine's table take 1.90 times less than in bf16, as published for H200 NVL
(NVIDIA/TransformerEngine, docs/examples/gemm_profiling: 31.968 and 16.785 ms, quantized before); 1.92 on B300 there.
NVIDIA's data sheets say 2: 1979 and 989 TFLOP/s of H100 and H200, 4500 and 2250 of B200.
"""
FP8_KERNELS: Final[Mapping[str, float]] = {
    "tensorwise": 1.0,
    "exact": 1.09,
    "rowwise": 1.04,
    "mxfp8": 1.05,
    "nvfp4": 3.764 / 6.812,
}
"""How much longer steps of a kernel take than cuBLAS's with one scale for each operand; ``exact`` is the same without
Hopper's fast accumulation, as backward passes use it.

Source: exact and rowwise, measured on an H100 (``python -m studies.products``); rowwise also CUTLASS over cuBLAS on
H100, mean of four shapes (pytorch/FBGEMM pull request 2764); mxfp8, 7.161 over 6.812 ms of a layer's products on B300,
and nvfp4, 3.764 there (NVIDIA/TransformerEngine, docs/examples/gemm_profiling, quantized before), which is 0.34 of
B300's peak in FP4 and 0.5 of B200's.
"""
FP8_SIGMA: Final = 0.12
"""Standard deviation, relative, of products in FP8: of other published ratios to bf16, 1.70 (H100 SXM at 700 W, 765 and
1297 TFLOP/s, NVIDIA/cutlass issue 1662) is 0.11 off, in logarithms; data sheets are 0.05 off."""

GROUPED_SIGMA: Final = 0.19
"""Standard deviation, relative, of products of experts, which are priced as the sum of each expert's own: of the points
measured on an H100 and an H200 (``python -m studies.products``), whose small groups take half of that and whose large
ones a tenth more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmParams:
    """One GPU type; times in seconds."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    num_sms: Annotated[int, Quantity("SMs", 1, 1e5)]
    flop_s: Annotated[float, Quantity("s per FLOP", 1e-17, 1e-6)]
    """Per FLOP of one SM, at the clock of a GPU that does nothing else."""
    tile_s: Seconds
    """Per tile: prologue and epilogue, as far as no other tile hides them."""
    call_s: Seconds
    """Per call: launch on the GPU, pipeline fill."""
    tail_share: Share
    """What the idle part of the last wave costs: 1 at a fixed clock, 0 where power alone counts."""
    traffic_s_per_byte: SecondsPerByte
    """Seconds per byte of operands and result."""
    fp8_ratio: Annotated[float, Quantity("", 0, 100)] = 2.0
    """Peak of tensor cores in FP8 over that in bf16; 0 where they have none."""


FITTED: Final = ("flop_s", "tile_s", "call_s", "tail_share")


def in_fp8(params: GemmParams, kernel: str) -> GemmParams:
    """The same GPU in FP8; see ``FP8_RATE``.

    Args:
        params: in bf16.
        kernel: a key of ``FP8_KERNELS``.
    """
    return replace(params, flop_s=params.flop_s / (FP8_RATE * params.fp8_ratio / 2) * FP8_KERNELS[kernel])


def gemm_seconds(
    params: GemmParams, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, operand_bytes: int = ELEMENT_BYTES
) -> Floats:
    """Seconds of products [m, k] x [k, n] with results in bf16, each run without a pause.

    Args:
        params: of the GPU.
        m, n, k: sizes.
        operand_bytes: of an element of the operands.

    Returns:
        Seconds, in the common shape; 0 where a size is 0.
    """
    m, n, k = (np.asarray(x, np.float64) for x in np.broadcast_arrays(m, n, k))
    traffic = ((m * k + k * n) * operand_bytes + m * n * ELEMENT_BYTES) * params.traffic_s_per_byte
    steps = np.ceil(k / STEP)
    best = np.full(m.shape, np.inf)
    for rows, columns in TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        for parts in SPLITS:
            full = tiles * parts / params.num_sms
            waves = np.maximum(full, 1.0) + params.tail_share * (np.ceil(full) - np.maximum(full, 1.0))
            tile_s = np.ceil(steps / parts) * (2 * rows * columns * STEP * params.flop_s) + params.tile_s
            sums = (parts > 1) * (parts + 1) * m * n * SUM_BYTES * params.traffic_s_per_byte
            best = np.minimum(best, np.maximum(waves * tile_s, traffic) + sums)
    return np.where(m * n * k > 0, params.call_s + best, 0.0)
