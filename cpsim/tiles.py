"""Tiles: the part of a mask that one attention kernel call covers, and the sequences that the call is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from cpsim.compiled import bare
from cpsim.masks import Ints, RangeSets, Slices, restrict, slice_area


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
    mask: Slices
    """What the mask rows are rows of."""


_CAUSAL, _REGULAR, _WINDOW, _PACKED = 1, 2, 4, 8
"""Flags of a sequence: `Sequences` says what they mean; keys of packed ones are apart, or overlap earlier ones."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of every tile's kernel call: tile t has entries ``start[t]:start[t + 1]``, ascending by query.

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
    window: NDArray[np.bool_]
    """The mask of the sequence is a diagonal band that is neither."""
    one_call: NDArray[np.bool_]
    """Of every tile: all sequences are regular, and all causal or all full, so one varlen call can run them."""
    in_place: NDArray[np.bool_]
    """Of every tile: sequences read keys that lie side by side, and no key twice, so that keys need no packing."""

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
    return Tiles(start, rows, areas, totals[start[1:]] - totals[start[:-1]], mask)


def join_tiles(tables: Sequence[Tiles]) -> Tiles:
    """Tiles of several tables of one mask, one table's after the other's; tile 0 stays empty."""
    first_row = np.concatenate(([0], np.cumsum([len(t.rows) for t in tables])))
    start = [t.start[2:] + row for t, row in zip(tables, first_row[:-1], strict=True)]
    return Tiles(
        np.concatenate(([0, 0], *start)),
        np.concatenate([t.rows for t in tables]),
        np.concatenate([t.row_area for t in tables]),
        np.concatenate(([0], *(t.area[1:] for t in tables))),
        tables[0].mask,
    )


def local_slices(tiles: Tiles, tile: int, place_q: Callable[[Ints], Ints], place_k: Callable[[Ints], Ints]) -> Slices:
    """The slices of a tile over rows of queries and keys; the places of tokens say which row is whose."""
    mask_row, q0, q1, k0, k1 = tiles.rows[tiles.start[tile] : tiles.start[tile + 1]].astype(np.int64).T
    at_q, at_k = place_q(q0), place_k(k0)
    shift = q0 - at_q - (k0 - at_k)
    low, high = tiles.mask.low[mask_row] + shift, tiles.mask.high[mask_row] + shift
    return Slices(at_q, at_q + q1 - q0, at_k, at_k + k1 - k0, low, high)


@lru_cache(maxsize=2)
def sequences(tiles: Tiles) -> Sequences:
    """Group every tile's slices into kernel sequences.

    Slices of one mask row form one sequence where their union is a full rectangle or a bottom-right causal
    staircase in local coordinates, as on a ring step; otherwise every query range is a sequence of its own that
    reads all the keys it sees, as in an all-gathered zigzag. Where mask rows share queries, so is every range of
    queries that the same rows cover: an answer, for example, sees its question and its own beginning.
    """
    start, lengths, flags, _ = _grouped(tiles, placed=False)
    q_len, k_len, area = lengths
    causal, regular = flags & _CAUSAL > 0, flags & _REGULAR > 0
    is_full = ~causal & (q_len > 1)
    one_call = ~_any(~regular, start) & ~(_any(causal, start) & _any(is_full, start))
    in_place = ~_any(flags & _PACKED > 0, start)
    return Sequences(start, q_len, k_len, area, causal, regular, flags & _WINDOW > 0, one_call, in_place)


def place_in(ranges: Ints) -> Callable[[Ints], Ints]:
    """The row of each token of a set of ranges, which lie one after the other."""
    before = np.concatenate(([0], np.cumsum(ranges[:, 1] - ranges[:, 0])))

    def place(tokens: Ints) -> Ints:
        at = np.searchsorted(ranges[:, 0], tokens, side="right") - 1
        return np.asarray(before[at] + tokens - ranges[at, 0])

    return place


@lru_cache(maxsize=2)
def sequence_places(tiles: Tiles) -> NDArray[np.int32]:
    """Where every sequence lies, ``[num_sequences, 4]``: it has the queries from column 2 to column 3 that the tile's
    rows from column 0 to column 1 have, and all keys that these see."""
    return _grouped(tiles, placed=True)[3].T


def _grouped(tiles: Tiles, *, placed: bool) -> tuple[Ints, Ints, NDArray[np.uint8], NDArray[np.int32]]:
    mask, most = tiles.mask, 2 * len(tiles.rows)  # memory that is not written costs nothing
    out = np.empty((3, most), np.int64), np.empty(most, np.uint8), np.empty((4, most * placed), np.int32)
    bands = np.stack([mask.q_start, mask.low, mask.high], axis=1)
    start, count = _sequences(tiles.start, tiles.rows, tiles.row_area, bands, (*out, np.zeros(1, np.int64)))
    return start, out[0][:, :count], out[1][:count], out[2][:, :count]


@njit(cache=True)
def _any(flags, start):  # type: ignore[no-untyped-def]
    """Whether any of a tile's sequences has the flag, ``[num_tiles]``."""
    found = np.zeros(len(start) - 1, np.bool_)
    for tile in range(len(found)):
        for flag in flags[start[tile] : start[tile + 1]]:
            if flag:
                found[tile] = True
                break
    return found


@njit(cache=True)
def _sequences(tile_start, rows, row_area, bands, out):  # type: ignore[no-untyped-def]
    """Fill ``out``, which is lengths (q_len, k_len, area), flags, places or nothing, and where the last keys ended.

    ``bands`` has (q_start, low, high) of every mask row. Returns CSR start and the number of sequences.
    """
    start = np.zeros(len(tile_start), np.int64)
    count = 0
    for tile in range(len(tile_start) - 1):
        first, last = tile_start[tile], tile_start[tile + 1]
        out[3][0] = 0
        while first < last:
            end, reach = first, rows[first, 2]
            while end < last and (rows[end, 0] == rows[first, 0] or bands[rows[end, 0], 0] < reach):
                reach = max(reach, rows[end, 2])
                end += 1
            if rows[end - 1, 0] == rows[first, 0]:
                row = bands[rows[first, 0], 1], tile_start[tile], last
                count = _of_one_row(rows, row_area, first, end, row, out, count)
            else:
                count = _of_several_rows(rows, first, end, bands, out, count)
            first = end
        start[tile + 1] = count
    return start, count


@bare()
def _put(out, count, sizes, kind, rows, tokens, pieces):  # type: ignore[no-untyped-def]
    """Write one sequence: (queries, keys, area), 1 for full, 2 for bottom-right causal and 0 for others, (first row,
    end row), (q_from, q_to, k_from, k_to)."""
    num_q, num_k, area = sizes
    lengths, flags, places, last = out
    lengths[0, count], lengths[1, count], lengths[2, count] = num_q, num_k, area
    flag = _CAUSAL if area < num_q * num_k else 0
    flag |= _REGULAR if kind > 0 else _WINDOW if pieces == 1 else 0
    flag |= _PACKED if pieces > 1 or tokens[2] < last[0] else 0
    flags[count], last[0] = flag, tokens[3]
    if places.shape[1] > 0:
        places[0, count], places[1, count] = rows
        places[2, count], places[3, count] = tokens[0], tokens[1]
    return count + 1


@bare()
def _query_range(rows, row_area, first, end):  # type: ignore[no-untyped-def]
    """The rows that share the first one's query range: their end, queries, keys and area."""
    stop, num_k, area = first, 0, 0
    while stop < end and rows[stop, 1] == rows[first, 1]:
        num_k += rows[stop, 4] - rows[stop, 3]
        area += row_area[stop]
        stop += 1
    return stop, rows[first, 2] - rows[first, 1], num_k, area


@bare()
def _is_stair(num_q, num_k, area):  # type: ignore[no-untyped-def]
    """Every query sees one key more than the one before it, and the last one ``num_k``, where all see the first."""
    return num_k >= num_q and area == num_q * num_k - num_q * (num_q - 1) // 2


@bare()
def _of_one_row(rows, row_area, first, end, row, out, count):  # type: ignore[no-untyped-def]
    """Sequences of the slices of one mask row, ``row`` = (its ``low``, first and end row of the tile): one, or one for
    every query range."""
    low, of_tile = row[0], rows[row[1] : row[2]]
    num_q, num_k, area = 0, 0, 0
    k_from, k_to = rows[first, 3], rows[first, 4]
    for i in range(first, end):
        k_from, k_to = min(k_from, rows[i, 3]), max(k_to, rows[i, 4])
    at = first
    while at < end:
        at, queries, keys, part = _query_range(rows, row_area, at, end)
        num_q, num_k, area = num_q + queries, max(num_k, keys), area + part
    uncut = low <= k_from - rows[end - 1, 2] + 1
    kind = int(uncut and area == num_q * num_k)
    if kind == 0 and uncut and num_k >= num_q:
        kind = 2 * int(_are_stairs(rows, row_area, first, end, num_k - num_q))
    if kind > 0 and _keys_grow(rows, first, end):
        tokens = rows[first, 1], rows[end - 1, 2], k_from, k_to
        return _put(out, count, (num_q, num_k, area), kind, (first, end), tokens, 1)
    at = first
    while at < end:
        stop, num_q, num_k, area = _query_range(rows, row_area, at, end)
        stair = low <= rows[at, 3] - rows[at, 2] + 1 and _is_stair(num_q, num_k, area)
        kind = 1 if area == num_q * num_k else 2 * int(stair)
        tokens = rows[at, 1], rows[at, 2], rows[at, 3], rows[stop - 1, 4]
        pieces = 1 + int(stop - at > 1 and _is_between(of_tile, rows[at:stop]))
        count = _put(out, count, (num_q, num_k, area), kind, (at, stop), tokens, pieces)
        at = stop
    return count


@bare()
def _keys_grow(rows, first, end):  # type: ignore[no-untyped-def]
    """Whether every query range sees what the one before it does: a tile need not be a product of two sets."""
    at, before = first, first
    while at < end:
        stop = at
        while stop < end and rows[stop, 1] == rows[at, 1]:
            stop += 1
        there = at
        for i in range(before, at):
            while there < stop and rows[there, 4] < rows[i, 4]:
                there += 1
            if there == stop or rows[there, 3] > rows[i, 3]:
                return False
        at, before = stop, at
    return True


@bare()
def _is_between(of_tile, seen):  # type: ignore[no-untyped-def]
    """Whether other queries of a tile see keys between those that some queries, of consecutive rows, see."""
    for gap in range(len(seen) - 1):
        for row in of_tile:
            if row[3] < seen[gap + 1, 3] and row[4] > seen[gap, 4]:
                return True
    return False


@bare()
def _are_stairs(rows, row_area, first, end, more):  # type: ignore[no-untyped-def]
    """Whether the queries of all ranges, one after the other, see ``more + 1``, ``more + 2`` ... keys."""
    at = first
    while at < end:
        at, num_q, keys, area = _query_range(rows, row_area, at, end)
        more += num_q
        if keys != more or not _is_stair(num_q, keys, area):
            return False
    return True


@njit(cache=True)
def _of_several_rows(rows, first, end, bands, out, count):  # type: ignore[no-untyped-def]
    """One sequence for every range of queries that the same slices of several mask rows cover."""
    order = first + np.argsort(rows[first:end, 1], kind="mergesort")
    edges = np.unique(np.concatenate((rows[first:end, 1], rows[first:end, 2])))
    active, num_active, later = np.empty(end - first, np.int64), 0, 0
    for edge in range(len(edges) - 1):
        q0, q1 = edges[edge], edges[edge + 1]
        kept = 0
        for i in range(num_active):
            if rows[active[i], 2] > q0:
                active[kept] = active[i]
                kept += 1
        num_active = kept
        while later < len(order) and rows[order[later], 1] <= q0:
            active[num_active] = order[later]
            num_active += 1
            later += 1
        count = _of_range(rows, active[:num_active], q0, q1, bands, (first, end), out, count)
    return count


@bare()
def _of_range(rows, active, q0, q1, bands, group, out, count):  # type: ignore[no-untyped-def]
    """The sequence of some queries and what they see of the active slices, unless that is nothing.

    It is causal where all is full but the last keys, and these are causal.
    """
    num_k, area, pieces, num_full = 0, 0, 0, 0
    k_from, k_to, stair = rows[active[0], 4] if len(active) else 0, 0, False
    for row in active:
        low, high = bands[rows[row, 0], 1], bands[rows[row, 0], 2]
        k0, k1 = max(rows[row, 3], q0 + low), min(rows[row, 4], q1 + high)
        here = slice_area(q0, q1, k0, k1, low, high)
        if here == 0:
            continue
        num_k, area, pieces = num_k + k1 - k0, area + here, pieces + 1
        num_full += int(here == (q1 - q0) * (k1 - k0))
        if k1 > k_to:
            stair = low <= k0 - q1 + 1 and _is_stair(q1 - q0, k1 - k0, here)
        k_from, k_to = min(k_from, k0), max(k_to, k1)
    if pieces == 0:
        return count
    kind = 1 if num_full == pieces else 2 * int(stair and num_full == pieces - 1)
    return _put(out, count, (q1 - q0, num_k, area), kind, group, (q0, q1, k_from, k_to), pieces)
