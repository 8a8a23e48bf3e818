"""Tiles: the part of a mask that one attention kernel call covers, and the sequences that the call is made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from cpsim.masks import Ints, RangeSets, Slices, restrict


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Parts of the mask for many (query set) x (key set) products; tile 0 is empty.

    Tile t has slices ``start[t]:start[t + 1]``, ordered by mask row; the band of a slice is that of its mask row.
    """

    start: Ints
    rows: NDArray[np.int32]
    """``[M, 5]``: mask row, q_start, q_end, k_start, k_end."""
    row_area: Ints
    """Unmasked pairs of every slice, ``int64[M]``."""
    area: Ints
    """Unmasked pairs of every tile, ``int64[num_tiles]``."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of every tile's kernel call: tile t has entries ``start[t]:start[t + 1]``.

    A varlen call takes sequences whose mask is a full rectangle or a bottom-right aligned causal one.
    """

    start: Ints
    q_len: Ints
    k_len: Ints
    area: Ints
    causal: NDArray[np.bool_]
    """The diagonal cuts the sequence."""
    regular: NDArray[np.bool_]
    """The mask of the sequence is exactly full or bottom-right causal, so every varlen kernel can run it."""

    def queries(self) -> Ints:
        """Query rows of every tile's call."""
        return self._per_tile(self.q_len)

    def keys(self) -> Ints:
        """Key rows that every tile's call reads, rows of overlapping sequences counted each time."""
        return self._per_tile(self.k_len)

    def _per_tile(self, length: Ints) -> Ints:
        total = np.concatenate(([0], np.cumsum(length)))
        return total[self.start[1:]] - total[self.start[:-1]]


def make_tiles(mask: Slices, sets: RangeSets, query_set: ArrayLike, key_set: ArrayLike) -> Tiles:
    """Tiles of the products ``query_set[i] x key_set[i]``; product i becomes tile i + 1.

    Key ranges are cut to what the band admits, so a causal query range reads no later keys.
    """
    query, key = np.asarray(query_set, np.int64).ravel(), np.asarray(key_set, np.int64).ravel()
    start, rows, areas = restrict(mask, sets, sets, query, key)
    start = np.concatenate(([0], start))
    totals = np.concatenate(([0], np.cumsum(areas)))
    return Tiles(start, rows, areas, totals[start[1:]] - totals[start[:-1]])


@lru_cache(maxsize=2)
def sequences(tiles: Tiles) -> Sequences:
    """Group every tile's slices into kernel sequences.

    Slices of one mask row form one sequence where their union is a full rectangle or a bottom-right causal
    staircase in local coordinates, as on a ring step; otherwise every query range is a sequence of its own that
    reads all the keys it sees, as in an all-gathered zigzag.
    """
    columns = np.empty((len(tiles.rows), 5), np.int64)
    start, count = _sequences(tiles.start, tiles.rows, tiles.row_area, columns)
    q_len, k_len, area, causal, regular = columns[:count].T
    return Sequences(start, q_len.copy(), k_len.copy(), area.copy(), causal.astype(np.bool_), regular.astype(np.bool_))


@njit(cache=True)
def _is_regular(q_len, k_len, area):  # type: ignore[no-untyped-def]
    """1 for a full rectangle, 2 for a bottom-right causal one, 0 otherwise."""
    if area == q_len * k_len:
        return 1
    return 2 if k_len >= q_len and area == q_len * k_len - q_len * (q_len - 1) // 2 else 0


@njit(cache=True)
def _sequences(tile_start, rows, row_area, out):  # type: ignore[no-untyped-def]
    start = np.zeros(len(tile_start), np.int64)
    count = 0
    for tile in range(len(tile_start) - 1):
        first, last = tile_start[tile], tile_start[tile + 1]
        while first < last:
            end = first
            num_q, num_k, area = 0, 0, 0
            while end < last and rows[end, 0] == rows[first, 0]:
                stop = end
                keys = 0
                while stop < last and rows[stop, 0] == rows[first, 0] and rows[stop, 1] == rows[end, 1]:
                    keys += rows[stop, 4] - rows[stop, 3]
                    area += row_area[stop]
                    stop += 1
                num_q += rows[end, 2] - rows[end, 1]
                num_k = max(num_k, keys)
                end = stop
            whole = _is_regular(num_q, num_k, area)
            if whole > 0:
                out[count] = (num_q, num_k, area, whole - 1, 1)
                count += 1
            else:
                count = _split(rows, row_area, first, end, out, count)
            first = end
        start[tile + 1] = count
    return start, count


@njit(cache=True)
def _split(rows, row_area, first, end, out, count):  # type: ignore[no-untyped-def]
    """One sequence for every query range of ``rows[first:end]``."""
    while first < end:
        stop = first
        num_k, area = 0, 0
        while stop < end and rows[stop, 1] == rows[first, 1]:
            num_k += rows[stop, 4] - rows[stop, 3]
            area += row_area[stop]
            stop += 1
        num_q = rows[first, 2] - rows[first, 1]
        kind = _is_regular(num_q, num_k, area)
        out[count] = (num_q, num_k, area, int(area < num_q * num_k), int(kind > 0))
        count += 1
        first = stop
    return count
