"""Tiles: the part of a mask that one attention kernel call covers, and the sequences that the call is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.masks.slices import UNCUT, Ints, RangeSets, Slices, Whole, restrict, slice_area, slices_of_product
from cpsim.masks.stripes import MANY, slices_of_stripes, stripe_table, striped
from cpsim.runtime.compiled import bare, compiled

MAX_LINEAR_SCAN: Final = 64
"""Slices of a mask row, up to which they are compared with all of their tile one by one."""
MAX_STORED_SLICES: Final = 1 << 21
"""Slices that tiles keep; of more than these, tiles know the sequences that they make alone."""


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
    calls: Sequences | None
    """What ``sequences`` answers, where it is known."""


@dataclass(frozen=True, eq=False)
class ListedTiles(Tiles):
    """Tiles whose slices are there."""

    start: Ints
    rows: NDArray[np.int32]
    row_area: Ints
    area: Ints
    mask: Slices
    calls: Sequences | None = None


@dataclass(frozen=True, eq=False)
class UnlistedTiles(Tiles):
    """Tiles of so many slices that these are listed when somebody asks for them, which predictions seldom do."""

    parts: tuple[Tiles | Products, ...]
    """What their tiles follow each other in."""
    area: Ints
    calls: Sequences

    @cached_property
    def _listed(self) -> Tiles:
        return _joined([part.listed() if isinstance(part, Products) else part for part in self.parts])

    start = property(lambda self: self._listed.start)
    rows = property(lambda self: self._listed.rows)
    row_area = property(lambda self: self._listed.row_area)
    mask = property(lambda self: self._listed.mask)


COLUMNS: Final = ("q_len", "k_len", "left", "right", "unseen", "area", "flags")
"""Of `Sequences`, after ``start``."""
CAUSAL, _REGULAR, _WINDOW, _PACKED = 1, 2, 4, 8
"""Flags of a sequence: `Sequences` says what they mean; keys of packed ones are apart, or overlap earlier ones."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of every tile's kernel call: tile t has entries ``start[t]:start[t + 1]``, ascending by query.

    A varlen call takes sequences whose mask is a full rectangle or a bottom-right aligned causal one. Where a kernel
    has windows it also takes bands, if one window says those of all sequences.
    """

    start: Ints
    q_len: NDArray[np.int32]
    k_len: NDArray[np.int32]
    left: NDArray[np.int32]
    """Keys before a query's own that it sees, UNCUT where all; the last query that sees a key has the last key as its
    own. Of sequences that are neither regular nor a window, UNCUT."""
    right: NDArray[np.int32]
    """Keys after a query's own that it sees, in the same way."""
    unseen: NDArray[np.int32]
    """Queries at the end of a window that see no key."""
    area: Ints
    flags: NDArray[np.uint8]
    """What ``causal``, ``regular``, ``window`` and ``in_place`` are read from."""

    @property
    def causal(self) -> NDArray[np.bool_]:
        """The diagonal cuts the sequence."""
        return self.flags & CAUSAL > 0

    @property
    def regular(self) -> NDArray[np.bool_]:
        """The mask of the sequence is exactly full or bottom-right causal, so every varlen kernel can run it."""
        return self.flags & _REGULAR > 0

    @property
    def window(self) -> NDArray[np.bool_]:
        """The mask of the sequence is a diagonal band that is neither, of keys that lie side by side."""
        return self.flags & _WINDOW > 0

    @cached_property
    def _of_tiles(self) -> tuple[Ints, Ints, NDArray[np.bool_], NDArray[np.bool_]]:
        """Queries, keys, ``one_call`` and ``in_place`` of every tile, in one pass over what may be millions."""
        return _of_tiles(self.start, self.q_len, self.k_len, self.flags)  # type: ignore[no-any-return]

    @property
    def one_call(self) -> NDArray[np.bool_]:
        """Whether, in every tile, all sequences are regular, and all causal or all full, so one varlen call can run
        them."""
        return self._of_tiles[2]

    @cached_property
    def one_window(self) -> NDArray[np.bool_]:
        """Whether, in every tile, one call with a window runs all sequences, and some of them need it."""
        return _one_window(self)[0]  # type: ignore[no-any-return]

    @cached_property
    def windows(self) -> NDArray[np.int32]:
        """Of tiles that are ``one_window``, keys before and after a query's own that the call's window leaves, UNCUT
        where all, ``[T, 2]``."""
        return _one_window(self)[1]  # type: ignore[no-any-return]

    @cached_property
    def alike(self) -> NDArray[np.bool_]:
        """Whether, in every tile, all sequences have as many queries and as many keys."""
        return _sequences_alike(self.start, self.q_len, self.k_len)  # type: ignore[no-any-return]

    @property
    def in_place(self) -> NDArray[np.bool_]:
        """Whether, in every tile, sequences read keys that lie side by side, and no key twice, so that keys need no
        packing."""
        return self._of_tiles[3]

    def queries(self) -> Ints:
        """Query rows of every tile's call."""
        return self._of_tiles[0]

    def keys(self) -> Ints:
        """Key rows that every tile's call reads, rows of overlapping sequences counted each time."""
        return self._of_tiles[1]

    def longest(self, tiles: NDArray[np.bool_]) -> tuple[int, int]:
        """Most queries and most keys of a sequence of some tiles, which are ``True``; 0 where there is none."""
        return _longest(self.start, self.q_len, tiles), _longest(self.start, self.k_len, tiles)


def _one_window(found: Sequences):  # type: ignore[no-untyped-def]
    columns = (found.q_len, found.k_len, found.left, found.right, found.unseen, found.flags)
    return _windows_of_tiles(found.start, *columns)


@compiled()
def _windows_of_tiles(start, q_len, k_len, left, right, unseen, flags):  # type: ignore[no-untyped-def]
    """Whether one window runs each tile, and which, [T, 2]: the narrowest bounds of its sequences, if they leave of all
    others what theirs do."""
    num = len(start) - 1
    fits, window = np.zeros(num, np.bool_), np.full((num, 2), UNCUT, np.int32)
    for tile in range(num):
        bounds, needed, possible = window[tile], False, True
        for i in range(start[tile], start[tile + 1]):
            possible &= flags[i] & (_REGULAR | _WINDOW) > 0
            needed |= flags[i] & _WINDOW > 0
            for side, bound in enumerate((left[i], right[i])):
                if bound != UNCUT and (bounds[side] == UNCUT or bound < bounds[side]):
                    bounds[side] = bound
        for i in range(start[tile], start[tile + 1]):
            queries = q_len[i] - unseen[i]
            possible &= left[i] == bounds[0] or (left[i] == UNCUT and bounds[0] >= k_len[i] - 1)
            possible &= right[i] == bounds[1] or (right[i] == UNCUT and bounds[1] >= queries - 1)
        fits[tile] = possible and needed
    return fits, window


@compiled()
def _sequences_alike(start, q_len, k_len):  # type: ignore[no-untyped-def]
    alike = np.ones(len(start) - 1, np.bool_)
    for tile in range(len(alike)):
        for i in range(start[tile] + 1, start[tile + 1]):
            alike[tile] &= q_len[i] == q_len[i - 1] and k_len[i] == k_len[i - 1]
    return alike


@compiled()
def _longest(start, length, tiles):  # type: ignore[no-untyped-def]
    most = 0
    for tile in range(len(tiles)):
        if tiles[tile]:
            for i in range(start[tile], start[tile + 1]):
                most = max(most, length[i])
    return most


@compiled()
def _totals(start, length):  # type: ignore[no-untyped-def]
    """Sum of every tile's lengths."""
    total = np.zeros(len(start) - 1, np.int64)
    for tile in range(len(total)):
        for i in range(start[tile], start[tile + 1]):
            total[tile] += length[i]
    return total


@compiled()
def _of_tiles(start, q_len, k_len, flags):  # type: ignore[no-untyped-def]
    num = len(start) - 1
    queries, keys = np.zeros(num, np.int64), np.zeros(num, np.int64)
    one_call, in_place = np.ones(num, np.bool_), np.ones(num, np.bool_)
    for tile in range(num):
        causal, full, regular, packed = False, False, True, False
        for i in range(start[tile], start[tile + 1]):
            queries[tile] += q_len[i]
            keys[tile] += k_len[i]
            is_causal = flags[i] & CAUSAL > 0
            causal |= is_causal
            full |= not is_causal and q_len[i] > 1
            regular &= flags[i] & _REGULAR > 0
            packed |= flags[i] & _PACKED > 0
        one_call[tile], in_place[tile] = regular and not (causal and full), not packed
    return queries, keys, one_call, in_place


@dataclass(frozen=True, slots=True)
class Products:
    """What tiles are made of: product i of a query set and a key set is tile i + 1."""

    mask: Slices
    """In tokens."""
    sets: RangeSets
    """In tokens, or in positions of stripes."""
    query: Whole
    key: Whole
    stripes: Ints | None
    """First position of every stripe and the end of the last one; None: sets are in tokens. A set of positions has one
    range, inside of a stripe."""

    def listed(self) -> Tiles:
        """The tiles with all their slices."""
        mask = self.mask if self.stripes is None else striped(self.mask, int(self.stripes[-1]), len(self.stripes) - 1)
        query, key = self.query.astype(np.int64, copy=False), self.key.astype(np.int64, copy=False)
        start, rows, areas = restrict(mask, self.sets, self.sets, query, key)
        return _listed(np.concatenate(([0], start)), rows, areas, mask)


def _listed(start: Ints, rows: NDArray[np.int32], areas: Ints, mask: Slices) -> ListedTiles:
    return ListedTiles(start, rows, areas, np.asarray(_totals(start, areas), np.int64), mask)


def make_tiles(
    mask: Slices, sets: RangeSets, query_set: ArrayLike, key_set: ArrayLike, stripes: Ints | None = None
) -> Tiles:
    """Tiles of the products ``query_set[i] x key_set[i]``; product i becomes tile i + 1.

    Key ranges are cut to what the band admits, so a causal query range reads no later keys.

    Args:
        mask: in tokens.
        sets: in tokens, or in positions of stripes.
        query_set, key_set: of every product.
        stripes: see ``Products``.
    """
    query, key = np.asarray(query_set, np.int64).ravel(), np.asarray(key_set, np.int64).ravel()
    table = mask.table()
    places, limits = stripe_table(mask, np.zeros(1, np.int64) if stripes is None else stripes)
    first = np.zeros(0, np.int64) if stripes is None else stripes[:-1]
    given = table, np.maximum.accumulate(mask.q_end), places, limits, first, sets.start, sets.ranges, query, key
    bands = np.stack([mask.q_start, mask.low, mask.high], axis=1)
    num_ranges = np.diff(sets.start)
    most = int(num_ranges[query].sum() + num_ranges[key].sum() + 4 * len(query) + len(mask))  # nearly always enough
    if stripes is not None:
        most = max(most, min(len(query) * len(mask), MANY))
    room = min(most, MAX_STORED_SLICES)
    start, made, area = (np.zeros(len(query) + 1 + extra, np.int64) for extra in (1, 1, 0))
    while True:  # memory that is not written costs nothing
        rows, areas = np.empty((room, 5), np.int32), np.empty(room, np.int64)
        out = (*_empty(most, placed=False), np.zeros(1, np.int64))
        used, longest, wraps, count = _fill(given, bands, rows, areas, out, start, made, area)
        if longest <= room and count <= most:
            break
        room, most = max(room, longest), max(most, count)
    calls = _made(made, out, count)
    if wraps or stripes is not None:
        products = Products(mask, sets, np.asarray(query_set).ravel(), np.asarray(key_set).ravel(), stripes)
        return UnlistedTiles((products,), area, calls)
    return ListedTiles(start, rows[:used], areas[:used], area, mask, calls)


def join_tiles(tables: Sequence[Tiles]) -> Tiles:
    """Tiles of several tables of one mask, one table's after the other's; tile 0 stays empty."""
    known = [sequences(table) for table in tables]
    columns = ([getattr(calls, name) for calls in known] for name in COLUMNS)
    calls = Sequences(_joined_start([calls.start for calls in known]), *map(np.concatenate, columns))
    if any(isinstance(table, UnlistedTiles) for table in tables):
        area = np.concatenate(([0], *(table.area[1:] for table in tables)))
        parts = [part for table in tables for part in (table.parts if isinstance(table, UnlistedTiles) else (table,))]
        return UnlistedTiles(tuple(parts), area, calls)
    return replace(_joined(tables), calls=calls)


def _joined(tables: Sequence[Tiles]) -> ListedTiles:
    start = _joined_start([table.start for table in tables])
    rows, areas = (np.concatenate([getattr(table, name) for table in tables]) for name in ("rows", "row_area"))
    return _listed(start, rows, areas, tables[0].mask)


def _joined_start(starts: Sequence[Ints]) -> Ints:
    """Offsets of tiles whose entries follow those of the tables before them."""
    before = np.concatenate(([0], np.cumsum([start[-1] for start in starts])))
    return np.concatenate(([0, 0], *(start[2:] + first for start, first in zip(starts, before[:-1], strict=True))))


def local_slices(tiles: Tiles, tile: int, place_q: Callable[[Ints], Ints], place_k: Callable[[Ints], Ints]) -> Slices:
    """The slices of a tile over rows of queries and keys; the places of tokens say which row is whose."""
    mask_row, q0, q1, k0, k1 = tiles.rows[tiles.start[tile] : tiles.start[tile + 1]].astype(np.int64).T
    at_q, at_k = place_q(q0), place_k(k0)
    shift = q0 - at_q - (k0 - at_k)
    low, high = tiles.mask.low[mask_row] + shift, tiles.mask.high[mask_row] + shift
    return Slices(at_q, at_q + q1 - q0, at_k, at_k + k1 - k0, low, high)


def share_of(mask: Slices, q_ranges: ArrayLike, k_ranges: ArrayLike) -> Slices:
    """A mask over some of its queries and keys, which then lie one after the other.

    Args:
        mask: disjoint slices, ordered by query.
        q_ranges, k_ranges: disjoint ascending ranges of tokens, ``[R, 2]`` each.
    """
    q, k = (np.asarray(ranges, np.int64).reshape(-1, 2) for ranges in (q_ranges, k_ranges))
    sets = RangeSets(np.array([0, len(q), len(q) + len(k)]), np.concatenate([q, k]))
    return local_slices(make_tiles(mask, sets, [0], [1]), 1, place_in(q), place_in(k))


def sequences(tiles: Tiles) -> Sequences:
    """Group every tile's slices into kernel sequences.

    Slices of one mask row form one sequence where their union is a full rectangle or a bottom-right causal
    staircase in local coordinates, as on a ring step; otherwise every query range is a sequence of its own that
    reads all the keys it sees, as in an all-gathered zigzag. Where mask rows share queries, so is every range of
    queries that the same rows cover: an answer, for example, sees its question and its own beginning.
    """
    return _found(tiles) if tiles.calls is None else tiles.calls


@lru_cache(maxsize=2)
def _found(tiles: Tiles) -> Sequences:
    return _made(*_grouped(tiles, placed=False))


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
    _, out, count = _grouped(tiles, placed=True)
    return out[3][:, :count].T


_Out = tuple[NDArray[np.int32], Ints, NDArray[np.uint8], NDArray[np.int32], Ints]
"""Sequences in the making: ``[5, most]`` queries, keys, bounds of windows and unseen queries, areas, flags, places or
nothing, and where the last keys ended."""


def _empty(most: int, *, placed: bool) -> tuple[NDArray[np.int32], Ints, NDArray[np.uint8], NDArray[np.int32]]:
    lengths, places = np.empty((5, most), np.int32), np.empty((4, most * placed), np.int32)
    return lengths, np.empty(most, np.int64), np.empty(most, np.uint8), places


def _made(start: Ints, out: _Out, count: int) -> Sequences:
    q_len, k_len, left, right, unseen = out[0][:, :count]
    return Sequences(start, q_len, k_len, left, right, unseen, out[1][:count], out[2][:count])


def _grouped(tiles: Tiles, *, placed: bool) -> tuple[Ints, _Out, int]:
    mask = tiles.mask
    out = (*_empty(2 * len(tiles.rows), placed=placed), np.zeros(1, np.int64))
    bands = np.stack([mask.q_start, mask.low, mask.high], axis=1)
    start, count = _sequences(tiles.start, tiles.rows, tiles.row_area, bands, out)
    return start, out, count


@compiled()
def _fill(given, bands, rows, areas, out, start, made, area):  # type: ignore[no-untyped-def]
    """Slices, sequences and area of every product.

    Where slices do not fit into ``rows`` those of the next tile take the place of the first ones. Returns the rows in
    use, those of the longest tile, how often that happened, and the number of sequences.
    """
    table, reach, places, limits, stripes, set_start, ranges, pair_q, pair_k = given
    at, longest, wraps, count = 0, 0, 0, 0
    for product in range(len(pair_q)):
        q, k = pair_q[product], pair_k[product]
        queries, keys = ranges[set_start[q] : set_start[q + 1]], ranges[set_start[k] : set_start[k + 1]]
        for _ in range(2):
            if len(stripes):
                end = slices_of_stripes(places, limits, stripes, queries, keys, rows, areas, bands, at)
            else:
                end = slices_of_product(table, reach, queries, keys, rows, areas, at)
            if end <= len(rows) or at == 0:
                break
            at, wraps = 0, wraps + 1
        longest = max(longest, end - at)
        if end <= len(rows):
            area[product + 1] = areas[at:end].sum()
            count = _of_tile(rows, areas, at, end, bands, out, count)
            at = end
        start[product + 2], made[product + 2] = at, count
    return at, longest, wraps, count


@compiled()
def _sequences(tile_start, rows, row_area, bands, out):  # type: ignore[no-untyped-def]
    """Fill ``out``; ``bands`` has (q_start, low, high) of every mask row. Returns CSR start and the number of
    sequences."""
    start = np.zeros(len(tile_start), np.int64)
    count = 0
    for tile in range(len(tile_start) - 1):
        count = _of_tile(rows, row_area, tile_start[tile], tile_start[tile + 1], bands, out, count)
        start[tile + 1] = count
    return start, count


@compiled()
def _of_tile(rows, row_area, first, last, bands, out, count):  # type: ignore[no-untyped-def]
    """Sequences of the slices of one tile; the number of sequences so far."""
    out[4][0] = 0
    tile, sorted_keys = (first, last), (out[0][0][:0], out[0][1][:0])
    if (
        last - first > MAX_LINEAR_SCAN
        and (rows[first : last - MAX_LINEAR_SCAN, 0] == rows[first + MAX_LINEAR_SCAN : last, 0]).any()
    ):
        sorted_keys = _sorted_keys(rows[first:last])
    while first < last:
        first, end, count = _of_single_rows(rows, row_area, first, tile, bands, sorted_keys, out, count)
        if first < last:
            count = _of_several_rows(rows, first, end, bands, out, count)
            first = end
    return count


@bare()
def _of_single_rows(rows, row_area, first, tile, bands, sorted_keys, out, count):  # type: ignore[no-untyped-def]
    """Sequences of slices whose queries no other mask row has, up to slices of several mask rows that share queries:
    the first and the end of these, or twice the end of the tile, and the number of sequences so far."""
    last = tile[1]
    while first < last:
        end, reach, row = first, rows[first, 2], rows[first, 0]
        while end < last and (rows[end, 0] == row or bands[rows[end, 0], 0] < reach):
            reach = max(reach, rows[end, 2])
            end += 1
        if rows[end - 1, 0] != row:
            return first, end, count
        band = (bands[row, 1], bands[row, 2])
        if end == first + 1:
            count = _of_one_slice(rows, row_area[first], first, band, out, count)
        else:
            count = _of_one_row(rows, row_area, first, end, (*band, *tile), sorted_keys, out, count)
        first = end
    return last, last, count


@bare()
def _of_one_slice(rows, area, first, band, out, count):  # type: ignore[no-untyped-def]
    q0, q1, k0, k1 = rows[first, 1], rows[first, 2], rows[first, 3], rows[first, 4]
    num_q, num_k = q1 - q0, k1 - k0
    stair = band[0] <= k0 - q1 + 1 and _is_stair(num_q, num_k, area)
    kind = 1 if area == num_q * num_k else 2 * int(stair)
    return _put(out, count, (num_q, num_k, area), kind, (first, first + 1), (q0, q1, k0, k1), band, 1)


@bare()
def _put(out, count, sizes, kind, rows, tokens, band, pieces):  # type: ignore[no-untyped-def]
    """Write one sequence if there is room: (queries, keys, area), 1 for full, 2 for bottom-right causal and 0 for
    others, (first row, end row), (q_from, q_to, k_from, k_to), and (low, high) of a sequence of one slice."""
    num_q, num_k, area = sizes
    lengths, areas, flags, places, last = out
    flag = CAUSAL if area < num_q * num_k else 0
    one = rows[1] == rows[0] + 1 and pieces == 1
    flag |= _REGULAR if kind > 0 else _WINDOW if one else 0
    flag |= _PACKED if pieces > 1 or tokens[2] < last[0] else 0
    last[0] = tokens[3]
    if count < len(flags):
        left, right, unseen = UNCUT, UNCUT, 0
        if kind == 2:
            right = 0
        elif flag & _WINDOW:
            left, right, unseen = _window(tokens, band)
        lengths[0, count], lengths[1, count], areas[count], flags[count] = num_q, num_k, area, flag
        lengths[2, count], lengths[3, count], lengths[4, count] = left, right, unseen
    if count < places.shape[1]:
        places[0, count], places[1, count] = rows
        places[2, count], places[3, count] = tokens[0], tokens[1]
    return count + 1


@bare()
def _window(tokens, band):  # type: ignore[no-untyped-def]
    """Keys before and after a query's own that a band leaves of (q_from, q_to, k_from, k_to), and queries at the end
    that see none."""
    q0, q1, k0, k1 = tokens
    seen = min(q1, k1 - band[0])
    left, right = k1 - seen - band[0], band[1] - k1 + seen
    return UNCUT if left >= k1 - k0 - 1 else left, UNCUT if right >= seen - q0 - 1 else right, q1 - seen


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
def _of_one_row(rows, row_area, first, end, row, sorted_keys, out, count):  # type: ignore[no-untyped-def]
    """Sequences of the slices of one mask row, ``row`` = (its band, first and end row of the tile): one, or one for
    every query range. For ``sorted_keys`` see `_is_between`."""
    low, band, of_tile = row[0], (row[0], row[1]), rows[row[2] : row[3]]
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
        return _put(out, count, (num_q, num_k, area), kind, (first, end), tokens, band, 1)
    at = first
    while at < end:
        stop, num_q, num_k, area = _query_range(rows, row_area, at, end)
        stair = low <= rows[at, 3] - rows[at, 2] + 1 and _is_stair(num_q, num_k, area)
        kind = 1 if area == num_q * num_k else 2 * int(stair)
        tokens = rows[at, 1], rows[at, 2], rows[at, 3], rows[stop - 1, 4]
        pieces = 1 + int(stop - at > 1 and _is_between(of_tile, sorted_keys, rows[at:stop]))
        count = _put(out, count, (num_q, num_k, area), kind, (at, stop), tokens, band, pieces)
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


@compiled()
def _ascending(values):  # type: ignore[no-untyped-def]
    """Indices of values in ascending order, equal ones as they come; numba takes seconds to compile NumPy's sorts."""
    order, merged, width = np.arange(len(values)), np.empty(len(values), np.int64), 1
    while width < len(values):
        for first in range(0, len(values), 2 * width):
            left, middle, end = first, min(first + width, len(values)), min(first + 2 * width, len(values))
            right = middle
            for at in range(first, end):
                if right == end or (left < middle and values[order[left]] <= values[order[right]]):
                    merged[at] = order[left]
                    left += 1
                else:
                    merged[at] = order[right]
                    right += 1
        order, merged, width = merged, order, 2 * width
    return order


@compiled()
def _sorted_keys(of_tile):  # type: ignore[no-untyped-def]
    """First keys of all slices of a tile in ascending order, and how far the keys of the slices up to each reach."""
    order = _ascending(of_tile[:, 3])
    start, end = np.empty(len(order), np.int32), np.empty(len(order), np.int32)
    for i, row in enumerate(order):
        start[i], end[i] = of_tile[row, 3], max(of_tile[row, 4], end[i - 1] if i else 0)
    return start, end


@bare()
def _is_between(of_tile, sorted_keys, seen):  # type: ignore[no-untyped-def]
    """Whether other queries of a tile see keys between those that some queries, of consecutive rows, see; by looking at
    all slices of the tile, or at what `_sorted_keys` tells of them, where it does."""
    for gap in range(len(seen) - 1):
        before, after = seen[gap, 4], seen[gap + 1, 3]
        if len(sorted_keys[0]):
            at = np.searchsorted(sorted_keys[0], after)
            if at > 0 and sorted_keys[1][at - 1] > before:
                return True
            continue
        for row in of_tile:
            if row[3] < after and row[4] > before:
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


@compiled()
def _of_several_rows(rows, first, end, bands, out, count):  # type: ignore[no-untyped-def]
    """One sequence for every range of queries that the same slices of several mask rows cover."""
    order, bounds = first + _ascending(rows[first:end, 1]), np.concatenate((rows[first:end, 1], rows[first:end, 2]))
    edges = bounds[_ascending(bounds)]
    active, num_active, later = np.empty(end - first, np.int64), 0, 0
    for edge in range(len(edges) - 1):
        q0, q1 = edges[edge], edges[edge + 1]
        if q0 == q1:
            continue
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
    return _put(out, count, (q1 - q0, num_k, area), kind, group, (q0, q1, k_from, k_to), (0, 0), pieces)
