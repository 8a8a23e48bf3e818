"""Striped token order: all tokens = 0 modulo the stride first, then all = 1, and so on.

Where a rank holds every P-th token, its shard is one range of *positions* in this order, and the part of a mask
between two stripes is a banded slice again, so that sharding, tiles and kernel sequences need not know about strides.

Reference: Brandon et al. 2023, "Striped Attention" (arXiv 2311.09431), section 3. Differs: any band, and lengths that
the stride does not divide.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cpsim.compiled import bare
from cpsim.masks import Ints, Slices, slice_area

MANY: Final = 1 << 24
"""Parts of a mask up to which room is made for all that there could be."""


def stripe_bounds(num_tokens: int, stride: int) -> Ints:
    """First position of every stripe and the end of the last one, ``int64[stride + 1]``."""
    whole, longer = divmod(num_tokens, stride)
    stripes = np.arange(stride + 1)
    return stripes * whole + np.minimum(stripes, longer)


def striped_tokens(positions: Ints, num_tokens: int, stride: int) -> Ints:
    """Tokens at positions of the striped order, in the shape of ``positions``."""
    bounds = stripe_bounds(num_tokens, stride)
    stripe = np.searchsorted(bounds, positions, side="right") - 1
    return np.asarray(stripe + (positions - bounds[stripe]) * stride, np.int64)


def striped_positions(tokens: Ints, num_tokens: int, stride: int) -> Ints:
    """Positions in the striped order of tokens, in the shape of ``tokens``; the inverse of ``striped_tokens``."""
    return np.asarray(stripe_bounds(num_tokens, stride)[tokens % stride] + tokens // stride, np.int64)


def striped(mask: Slices, num_tokens: int, stride: int) -> Slices:
    """A mask in positions: for every slice its non-empty parts in all pairs of stripes.

    Token ``i + stride * u`` is number u of stripe i, so ``low <= k - q <= high`` between stripes i and j is a band of
    ``v - u``: the limits less j - i, divided by the stride, and rounded into the band.
    """
    start = stripe_bounds(num_tokens, stride)[:-1]
    table = np.stack([mask.q_start, mask.q_end, mask.k_start, mask.k_end, mask.low, mask.high], axis=1)
    columns = np.empty((6, min(len(mask) * stride**2, MANY)), np.int64)  # memory that is not written costs nothing
    count = _striped(table, start, columns)
    if count > columns.shape[1]:
        columns = np.empty((6, count), np.int64)
        _striped(table, start, columns)
    return Slices(*columns[:, :count])


@bare()
def _striped(mask, start, columns):  # type: ignore[no-untyped-def]
    """Fill the columns of ``striped`` as far as they reach, ordered by query stripe, slice and key stripe; returns the
    number of rows wanted."""
    stride, count = len(start), 0
    for i in range(stride):
        for row in range(len(mask)):
            q0, q1 = start[i] - (i - mask[row, 0]) // stride, start[i] - (i - mask[row, 1]) // stride
            if q0 >= q1:
                continue
            for j in range(stride):
                k0, k1 = start[j] - (j - mask[row, 2]) // stride, start[j] - (j - mask[row, 3]) // stride
                shift, apart = start[j] - start[i], j - i
                low, high = shift - (apart - mask[row, 4]) // stride, shift + (mask[row, 5] - apart) // stride
                if slice_area(q0, q1, k0, k1, low, high) > 0:
                    if count < columns.shape[1]:
                        columns[0, count], columns[1, count] = q0, q1
                        columns[2, count], columns[3, count] = k0, k1
                        columns[4, count], columns[5, count] = low, high
                    count += 1
    return count
