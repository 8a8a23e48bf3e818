"""Memory-bound kernels: a latency and a bandwidth for each kind, and what the L2 cache saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

OF_SMS = ("dcp_copy", "dcp_gradients", "dcp_sum")
"""Kernels of programs so small, of 128 elements, that they take as long as SMs take to start them, whatever the memory:
on H200 copies reach 0.84 TB/s, a fifth of what others do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseParams:
    """By kind."""

    latency_s: Mapping[str, float]
    bandwidth_bytes_per_s: Mapping[str, float]
    """Of bytes read plus written, on operands that the cache does not hold."""
    cache_bytes: float = 0.0
    """Of the L2 cache; 0 where it is not known, and saves nothing."""
    cache_gain: float = 0.0
    """Of nbytes / bandwidth, what is saved where the cache holds all operands."""


def elementwise_seconds(params: ElementwiseParams, kind: str, nbytes: ArrayLike, cached: ArrayLike = 0.0) -> Floats:
    """Seconds to read and write `nbytes` in all: latency + nbytes / bandwidth * (1 - cache_gain * cached).

    `cached` is the share of them that the cache holds, see `cpsim.models.cache`; in the shape of both.
    """
    slow = 1 - params.cache_gain * np.asarray(cached, np.float64)
    bandwidth = params.bandwidth_bytes_per_s[kind]
    return np.asarray(params.latency_s[kind] + np.asarray(nbytes, np.float64) / bandwidth * slow)
