"""How GPUs of one type differ, and calls on one of them.

Who waits for all, waits for the slowest. Under seconds of load every GPU is much slower for a moment when its limiter
reacts too strongly, and never much faster. Gumbel's distribution, of the largest of many, has that shape: its skewness
is 1.14, that of measured fifths of a second 1.3 (H100) and 1.0 (H200). The means of GPUs differ by 1 %, both ways.

Reference: Blom 1958, "Statistical Estimates and Transformed Beta-Variables" (expected normal order statistics);
Gumbel 1958, "Statistics of Extremes".
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def _gumbel(above: Floats) -> Floats:
    """Quantiles of Gumbel's distribution of median 0 and deviation 1, by the share that is above."""
    return np.asarray((np.log(np.log(2.0)) - np.log(-np.log1p(-above))) * (np.sqrt(6.0) / np.pi))


NINETIES: Final = float(np.diff(_gumbel(np.array([0.95, 0.05])))[0])
"""From the 5th to the 95th percentile of ``late``, in standard deviations."""


def late(normal: Floats) -> Floats:
    """How late GPUs under seconds of load are, in standard deviations, by standard normal draws ``[n]``: Gumbel's
    distribution of median 0."""
    return _gumbel(np.array([math.erfc(x / math.sqrt(2.0)) / 2 for x in normal]))


@cache
def expected_maximum(num: int) -> float:
    """Expected maximum of so many independent normal variables, in standard deviations above their mean; within 0.02 or
    so."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0
