"""How GPUs of one type differ, and calls on one of them.

Who waits for all, waits for the slowest. At the power limit none is much faster than most, but some are much slower,
and each is for a moment when its limiter reacts too strongly: that is Gumbel's distribution, of the largest of many.

Reference: Blom 1958, "Statistical Estimates and Transformed Beta-Variables" (expected normal order statistics);
Gumbel 1958, "Statistics of Extremes".
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Floats = NDArray[np.float64]


def _gumbel(log_share: Floats) -> Floats:
    """Quantiles of Gumbel's distribution of median 0 and deviation 1, by the logarithm of the share that is below."""
    return np.asarray((np.log(np.log(2.0)) - np.log(-log_share)) * (np.sqrt(6.0) / np.pi))


NINETIES: Final = float(np.diff(_gumbel(np.log([0.05, 0.95])))[0])
"""From the 5th to the 95th percentile of ``late``, in standard deviations."""


def late(normal: Floats) -> Floats:
    """How late hot GPUs are, in standard deviations: Gumbel's distribution of median 0, by standard normal draws."""
    return _gumbel(log_ndtr(normal))


@cache
def expected_maximum(num: int) -> float:
    """Expected maximum of so many independent normal variables, in standard deviations above their mean; within 0.02 or
    so."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0
