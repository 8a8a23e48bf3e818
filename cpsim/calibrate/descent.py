"""Least squares where the error jumps a little, as that of blocks in waves does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]


def descend(
    error: Callable[[Floats], Floats],
    start: Floats,
    bounds: tuple[Floats, Floats],
    steps: Sequence[float],
    max_evaluations: int,
) -> Floats:
    """Least squares of errors of logarithms, large ones counted less.

    Args:
        error: of parameters, which are logarithms.
        start: parameters.
        bounds: lowest and highest of each.
        steps: differences of logarithms for derivatives: wide ones see past jumps, so they come first.
        max_evaluations: of every step, without derivatives.

    Returns:
        The parameters where the last step ends.
    """
    x = start
    for step in steps:
        x = least_squares(
            error,
            x,
            bounds=bounds,
            loss="soft_l1",
            f_scale=0.03,
            diff_step=step / np.maximum(1, np.abs(x)),
            max_nfev=max_evaluations,
        ).x
    return x
