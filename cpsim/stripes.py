"""Striped token order: all tokens = 0 modulo the stride first, then all = 1, and so on.

Where a rank holds every P-th token, its shard is one range of *positions* in this order, and the part of a mask
between two stripes is a banded slice again, so that sharding, tiles and kernel sequences need not know about strides.

Reference: Brandon et al. 2023, "Striped Attention" (arXiv 2311.09431), section 3. Differs: any band, and lengths that
the stride does not divide.
"""

from __future__ import annotations

import numpy as np

from cpsim.masks import Ints, Slices


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


def striped(mask: Slices, num_tokens: int, stride: int) -> Slices:
    """A mask in positions: for every slice its non-empty parts in all pairs of stripes.

    Token ``i + stride * u`` is number u of stripe i, so ``low <= k - q <= high`` between stripes i and j is a band of
    ``v - u``: the limits less j - i, divided by the stride, and rounded into the band.
    """
    start = stripe_bounds(num_tokens, stride)[:-1]
    stripe = np.arange(stride)
    query, key = stripe[:, None, None], stripe  # [query stripe, mask row, key stripe]
    shift, apart = start[key] - start[query], key - query
    parts = np.broadcast_arrays(
        *(start[query] - (query - edge[:, None]) // stride for edge in (mask.q_start, mask.q_end)),
        *(start[key] - (key - edge[:, None]) // stride for edge in (mask.k_start, mask.k_end)),
        shift - (apart - mask.low[:, None]) // stride,
        shift + (mask.high[:, None] - apart) // stride,
    )
    columns = np.stack(parts).reshape(len(parts), -1)
    return Slices(*columns[:, Slices(*columns).areas() > 0])
