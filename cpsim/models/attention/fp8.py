"""Attention in FP8: how much faster cuDNN's kernels are than its own in bf16, by GPU and pass.

Source: NVIDIA/cudnn-frontend@3929da2, benchmark/sdpa_benchmark_training/results/llama3.1 (GB200 and GB300, cuDNN 9.22)
and h200_919_only_cudnn (H200, cuDNN 9.19): causal, 8,192 tokens, 64:8 heads of 128, ``fp8`` over ``bfloat16``. On H200
the backward kernel is slower than that in bf16 from 8,192 tokens on, and 1.07 times as fast without a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from cpsim.errors import NotMeasuredError

Pass = Literal["fwd", "bwd"]
FASTER: Final[Mapping[str, Mapping[Pass, float]]] = {
    "h100": {"fwd": 964 / 644, "bwd": 430 / 541},
    "h200": {"fwd": 964 / 644, "bwd": 430 / 541},
    "b200": {"fwd": 2047 / 1574, "bwd": 1454 / 1332},
    "gb200": {"fwd": 2047 / 1574, "bwd": 1454 / 1332},
    "b300": {"fwd": 2897 / 1856, "bwd": 1781 / 1435},
    "gb300": {"fwd": 2897 / 1856, "bwd": 1781 / 1435},
}
"""H100 has H200's tensor cores, and B200 and B300 those of GB200 and GB300."""
FP8_ATTENTION: Final = (
    "attention in FP8: not measured here, cuDNN's kernels in bf16 times what NVIDIA publishes of both"
)


def faster(gpu: str) -> Mapping[Pass, float]:
    """By pass, on a GPU.

    Raises:
        NotMeasuredError: nobody has published it.
    """
    found = FASTER.get(gpu.lower())
    if found is None:
        raise NotMeasuredError(f"precision: attention in FP8 was not measured on {gpu}, on {', '.join(FASTER)} it was")
    return found
