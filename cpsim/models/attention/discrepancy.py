"""What the attention model leaves over: a Gaussian process of log(predicted / measured) over features of a call.

Kennedy and O'Hagan (2001), "Bayesian calibration of computer models", add to a physical model a Gaussian process of
its discrepancy. This one is the mean of such a process, restricted to few support points (subset of regressors,
Quinonero-Candela and Rasmussen 2005): radial kernels around them, so that it is 0 far away from what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsim.models.attention.blocks import FEATURES

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Discrepancy:
    """Sum of weights times exp(-distance^2 / 2), to be subtracted from the logarithm of a prediction."""

    lengths: tuple[float, ...]
    """Scale of each of FEATURES in a distance."""
    support: tuple[tuple[float, ...], ...]
    """Features of each support point."""
    weights: tuple[float, ...]
    """Weight of each support point."""

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Support [M, FEATURES], weights [M] and lengths [FEATURES]."""
        support = np.array(self.support, float).reshape(len(self.weights), len(FEATURES))
        return support, np.array(self.weights, float), np.array(self.lengths, float)


NONE = Discrepancy(lengths=(1.0,) * len(FEATURES), support=(), weights=())
"""No correction."""
