"""Memory-bound kernels: a latency and a bandwidth for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict

from cpsim.units import CLOSED, ByName, Rate, Seconds

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseParams:
    """By kind."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    latency_s: ByName[Seconds]
    bandwidth_bytes_per_s: ByName[Rate]
    """Bytes read plus written in a second, on operands that the L2 cache does not hold."""


def elementwise_seconds(params: ElementwiseParams, kind: str, nbytes: ArrayLike) -> Floats:
    """Seconds to read and write `nbytes` in all: latency + nbytes / bandwidth."""
    bandwidth = params.bandwidth_bytes_per_s[kind]
    return np.asarray(params.latency_s[kind] + np.asarray(nbytes, np.float64) / bandwidth)
