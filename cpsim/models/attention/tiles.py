"""Tiles of an attention call: how many its thread blocks visit, and how flash-attn groups heads and splits keys."""

from __future__ import annotations

import math

from cpsim.runtime.compiled import compiled

L2_BYTES = 50 * 2**20
"""Second-level cache that flash-attn-4 assumes when it groups heads (tile_scheduler.py)."""


@compiled()
def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum of floor((a i + b) / m) for i in 0..n-1, in O(log m); a, b >= 0."""
    total = 0
    while True:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a %= m
        b %= m
        top = a * n + b
        if top < m:
            return total
        n, b, m, a = top // m, top % m, a, m


@compiled()
def tile_rows(
    q: int, k: int, left: int, right: int, tile_q: int, tile_k: int, packed: int, backward: bool
) -> tuple[int, int, int, int]:
    """Tile rows of one sequence and head: their number, visited tiles in all, in the longest and in the shortest.

    The last query's own key is the last one: `left` keys before a query's own and `right` ones after it are seen, or
    all where it is UNCUT, so that a causal mask has a `right` of 0.
    """
    if right >= 0:
        q = min(q, k + right)  # rows above see no key
    if q <= 0 or k <= 0:
        return 0, 0, 0, 0
    if q * packed <= tile_q and k <= tile_k:
        return 1, 1, 1, 1
    if left >= 0 or right > 0:
        rows, total, most, least = _rows_in_window(q, k, left, right, tile_q, tile_k, packed, backward)
        return rows, total, most, least
    causal = right == 0
    if backward:
        rows, full = (k + tile_k - 1) // tile_k, (q + tile_q - 1) // tile_q
        if not causal:
            return rows, rows * full, full, full
        uncut = min(rows, (k - q) // tile_k + 1)
        skipped = 0
        if rows > uncut:
            skipped = floor_sum(rows - uncut, tile_q, tile_k, uncut * tile_k - (k - q))
        return rows, rows * full - skipped, full, full - max(0, ((rows - 1) * tile_k - (k - q)) // tile_q)
    rows, full = (q * packed + tile_q - 1) // tile_q, (k + tile_k - 1) // tile_k
    if not causal:
        return rows, rows * full, full, full
    seen = tile_q - 1 + (k - q) * packed  # packed rows up to the last key that row block 0 sees
    before_last = rows - 1
    total = full
    if before_last > 0:
        total += before_last + floor_sum(before_last, packed * tile_k, tile_q, seen)
    return rows, total, full, min(full, seen // (packed * tile_k) + 1)


@compiled()
def num_rows(q: int, k: int, right: int, tile_q: int, tile_k: int, packed: int, backward: bool) -> int:
    """The first of what `tile_rows` returns."""
    if right >= 0:
        q = min(q, k + right)
    if q <= 0 or k <= 0:
        return 0
    return (k + tile_k - 1) // tile_k if backward else (q * packed + tile_q - 1) // tile_q


@compiled()
def _rows_in_window(
    q: int, k: int, left: int, right: int, tile_q: int, tile_k: int, packed: int, backward: bool
) -> tuple[int, int, int, int]:
    """As `tile_rows`, row by row."""
    rows = (k + tile_k - 1) // tile_k if backward else (q * packed + tile_q - 1) // tile_q
    total, most, least = 0, 0, 1 << 60
    for row in range(rows):
        tiles = tiles_of_row(row, q, k, left, right, tile_q, tile_k, packed, backward)
        total, most, least = total + tiles, max(most, tiles), min(least, tiles)
    return rows, total, most, least


@compiled()
def tiles_of_row(
    row: int, q: int, k: int, left: int, right: int, tile_q: int, tile_k: int, packed: int, backward: bool
) -> int:
    """Visited tiles of one tile row: those between the first and the last that its window touches.

    Reference: flash-attention 2.8.3, csrc/flash_attn/src/flash_fwd_kernel.h (n_block_min, n_block_max) and
    flash_bwd_kernel.h (m_block_min, m_block_max); flash-attn-4 4.0.0b36, flash_attn/cute/block_info.py.
    """
    if right >= 0:
        q = min(q, k + right)
    if backward:
        end = q if left < 0 else min(q, max(0, (row + 1) * tile_k - (k - q) + left))
        begin = 0 if right < 0 else max(0, row * tile_k - (k - q) - right)
        return max(0, (end + tile_q - 1) // tile_q - begin // tile_q)
    last = min(q - 1, (row * tile_q + tile_q - 1) // packed)
    end = k if right < 0 else min(k, last + k - q + right + 1)
    begin = 0 if left < 0 else max(0, row * tile_q // packed + k - q - left)
    return (end + tile_k - 1) // tile_k - begin // tile_k


@compiled()
def l2_group(heads: int, k: int, head_dim: float) -> int:
    """Heads whose keys and values fit the L2 cache together, a power of two."""
    group = 1
    while group * 2 <= heads and group * 2 * k * head_dim * 4 <= L2_BYTES:
        group *= 2
    return group


@compiled()
def num_splits(num_blocks: int, slots: int, tiles: int) -> int:
    """flash-attn 2's num_splits_heuristic (csrc/flash_attn/flash_api.cpp)."""
    if num_blocks >= 0.8 * slots:
        return 1
    best = 0.0
    for which in range(2):
        for splits in range(1, min(128, slots, tiles) + 1):
            if splits > 1 and -(-tiles // splits) == -(-tiles // (splits - 1)):
                continue
            waves = num_blocks * splits / slots
            efficiency = waves / math.ceil(waves)
            if which == 0:
                best = max(best, efficiency)
            elif efficiency >= 0.85 * best:
                return splits
    return 1


@compiled()
def split_tile(head_dim: float) -> int:
    """Keys of a tile of flash-attn 2's split kernel (csrc/flash_attn/flash_api.cpp, set_params_splitkv)."""
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
