"""What the attention model leaves over: a Gaussian process of log(predicted / measured) over features of a call.

Kennedy and O'Hagan (2001), "Bayesian calibration of computer models", add to a physical model a Gaussian process of
its discrepancy. This one is the mean of such a process, restricted to few support points (subset of regressors,
Quinonero-Candela and Rasmussen 2005): radial kernels around them, so that it is 0 far away from what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from cpsim.models.attention.blocks import FEATURES
from cpsim.units import CLOSED

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Discrepancy:
    """Sum of weights times exp(-distance^2 / 2), to be subtracted from the logarithm of a prediction."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    lengths: tuple[Annotated[float, Field(gt=1e-4, lt=1e4)], ...]
    """Scale of each of FEATURES in a distance."""
    support: tuple[tuple[Annotated[float, Field(gt=-1e4, lt=1e4)], ...], ...]
    """Features of each support point."""
    weights: tuple[Annotated[float, Field(gt=-10, lt=10)], ...]
    """Weight of each support point."""

    def __post_init__(self) -> None:
        widths = {len(self.lengths), *map(len, self.support)}
        if widths != {len(FEATURES)} or len(self.support) != len(self.weights):
            raise ValueError(f"expected {len(FEATURES)} features of each of {len(self.weights)} points")

    def __hash__(self) -> int:
        """Of a few of thousands of numbers: kernels are looked up by it at every price."""
        return hash((self.lengths, self.weights[:4]))

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Support [FEATURES, M], weights [M] and lengths [FEATURES]; remembered, so do not write to them."""
        return _arrays(self)


@lru_cache(maxsize=32)
def _arrays(one: Discrepancy) -> tuple[Floats, Floats, Floats]:
    support = np.array(one.support, float).reshape(len(one.weights), len(FEATURES))
    return np.ascontiguousarray(support.T), np.array(one.weights, float), np.array(one.lengths, float)


NONE = Discrepancy(lengths=(1.0,) * len(FEATURES), support=(), weights=())
"""No correction."""
