"""Striped token order: all tokens = 0 modulo the stride first, then all = 1, and so on.

Where a rank holds every P-th token, its shard is one range of *positions* in this order, and the part of a mask
between two stripes is a banded slice again, so that sharding and kernel sequences need not know about strides.

Reference: Brandon et al. 2023, "Striped Attention" (arXiv 2311.09431), section 3. Differs: any band, and lengths that
the stride does not divide.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cpsim.masks.slices import Ints, Slices, slice_area
from cpsim.runtime.compiled import bare

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
    table = mask.table()
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


def stripe_table(mask: Slices, bounds: Ints) -> tuple[Ints, Ints]:
    """What ``slices_of_stripes`` reads of a mask of tokens.

    Args:
        mask: its slices, ``[M]``.
        bounds: as ``stripe_bounds``.

    Returns:
        positions of the first and end queries and keys of every slice in every stripe, ``[stride, M, 4]``; and the
        limits of its band between numbers in two stripes by how far these are apart, ``[2 stride - 1, M, 2]``.
    """
    start = bounds[:-1, None, None]
    stripe, stride = np.arange(len(start))[:, None, None], max(1, len(start))
    ends = np.stack([mask.q_start, mask.q_end, mask.k_start, mask.k_end], axis=1)
    apart = np.arange(1 - stride, stride)[:, None]
    limits = np.stack([-((apart - mask.low) // stride), (mask.high - apart) // stride], axis=2)
    return start - (stripe - ends) // stride, limits


@bare()
def slices_of_stripes(places, limits, start, queries, keys, rows, areas, bands, count):  # type: ignore[no-untyped-def]
    """As ``slices_of_product``, of one range of positions in each of two stripes; mask rows are those of the tokens.

    Fills in the positions' ``bands``, (q_start, low, high), of the mask rows that have a slice.
    """
    if len(queries) == 0 or len(keys) == 0:
        return count
    (q_from, q_to), (k_from, k_to) = queries[0], keys[0]
    i, j = np.searchsorted(start, q_from, side="right") - 1, np.searchsorted(start, k_from, side="right") - 1
    shift, apart = start[j] - start[i], j - i + len(start) - 1
    for row in range(places.shape[1]):
        q0, q1 = max(places[i, row, 0], q_from), min(places[i, row, 1], q_to)
        k0, k1 = max(places[j, row, 2], k_from), min(places[j, row, 3], k_to)
        if q0 >= q1 or k0 >= k1:
            continue
        low, high = shift + limits[apart, row, 0], shift + limits[apart, row, 1]
        q0 = max(q0, k0 - high)
        area = slice_area(q0, q1, k0, k1, low, high)
        if area > 0:
            if count < len(rows):
                rows[count, 0], rows[count, 1], rows[count, 2] = row, q0, q1
                rows[count, 3], rows[count, 4], areas[count] = max(k0, q0 + low), min(k1, q1 + high), area
                bands[row, 0], bands[row, 1], bands[row, 2] = places[i, row, 0], low, high
            count += 1
    return count
