"""The clock that a power limit leaves: it follows what a GPU does over tens of milliseconds, idle time included.

Attention kernels are measured without a pause, where busy tensor cores draw more than the limit and the clock falls
(``cpsim.models.attention.blocks``: time grows as ``slowdown(busy)``). In a schedule a GPU also waits for others,
communicates and, between two iterations, idles, so the limiter sees a smaller mean load and lets the clock higher: of a
causal ring without zigzag the first ranks keep the full clock and the last one does not.

Memory-bound kernels and NCCL draw power, too; how much of what the limit allows is measured. Only attention is
slowed. In whole steps every kernel takes what it takes alone after seconds of load: kernels in turns share a clock, so
that products gain what attention loses, and together take as long (1.2 % longer on an H100, 0.4 % on an H200, mean
1.8 and 1.0 %: ``python -m studies.mixes``), since under the limit time is energy over power.

Assumes that an iteration is short against the tens of milliseconds over which the limiter averages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsim.runtime.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHARPNESS = 12.0
"""How sharply the limit sets in; the fit does not feel values of 8 to 20."""


@compiled()
def slowdown(load, power):  # type: ignore[no-untyped-def]
    """Time relative to that at the full clock; ``load`` is relative to the one at which the limit sets in."""
    return (1.0 + load**SHARPNESS) ** (power / SHARPNESS)


def load_of(slower: Floats, power: float) -> Floats:
    """The inverse of ``slowdown``; 0 for loads that the limit does not feel."""
    exponent = np.minimum(np.log(slower) * (SHARPNESS / power), 600.0)  # a float ends at e**709
    return np.asarray(np.maximum(np.expm1(exponent), 0.0) ** (1.0 / SHARPNESS))


def settled_seconds(
    full_s: Floats, endless_s: Floats, rank: Ints, others_s: Floats, period_s: Floats | float, power: float
) -> Floats:
    """Seconds of N attention ops of one kernel and pass, at the clock that their GPUs settle at.

    Args:
        full_s: [N] at the full clock.
        endless_s: [N] where the op runs again and again without a pause.
        rank: [N] GPU of each op.
        others_s: [num_ranks] other ops of each GPU: seconds times their load, relative to what the limit allows.
        period_s: of an iteration at the full clock, with the idle time between two; [num_ranks] or of all.
        power: exponent of the slowdown (``busy_power`` of the kernel); 0 where the kernel never meets the limit.

    Returns:
        [N] seconds.
    """
    if power <= 1e-3 or len(full_s) == 0:
        return endless_s
    load = load_of(endless_s / full_s, power)
    mean = (np.bincount(rank, load * full_s, len(others_s)) + others_s) / period_s
    return np.asarray(full_s * slowdown(mean, power)[rank])
