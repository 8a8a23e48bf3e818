"""Attention masks as slices of (query range, key range, diagonal band), with exact areas; named ones: ``mask_shapes``.

A slice admits the pairs (q, k) with ``q_start <= q < q_end``, ``k_start <= k < k_end`` and
``low <= k - q <= high``. The four types of the literature are bands: FULL has none, CAUSAL (bottom-right
aligned) is ``high = k_end - q_end``, INVCAUSAL (top-left aligned) is ``low = k_start - q_start`` and
BICAUSAL has both; a sliding window is a band of its own. Bands have what types lack: the part of a slice that
falls into any rectangle is one slice again, so sharding a mask over ranks is plain intersection.

Reference: LongCA-bench (arXiv 2510.17896), section 3, for the types; Differs: bands instead of types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.runtime.compiled import bare, compiled

Ints = NDArray[np.int64]
Whole = NDArray[np.signedinteger[Any]]
"""Whole numbers, of 32 or 64 bits."""

UNBOUNDED: Final = 1 << 60
UNCUT: Final = -1
"""As a bound of a window: none, all keys on that side of a query's own are seen."""
"""Band limit that cuts nothing."""

FULL, CAUSAL, INVCAUSAL, BICAUSAL = range(4)
TYPE_NAMES: Final = ("full", "causal", "invcausal", "bicausal")


@dataclass(frozen=True, slots=True)
class Slices:
    """Columns of mask slices, each ``int64[M]``; read-only by convention.

    A mask lists disjoint slices ordered by ``q_start``.
    """

    q_start: Ints
    q_end: Ints
    k_start: Ints
    k_end: Ints
    low: Ints
    high: Ints

    def __len__(self) -> int:
        return len(self.q_start)

    def table(self) -> Ints:
        """A row (q_start, q_end, k_start, k_end, low, high) for every slice, ``int64[M, 6]``."""
        return np.stack([self.q_start, self.q_end, self.k_start, self.k_end, self.low, self.high], axis=1)

    def from_query(self, first: int) -> Slices:
        """What this query and later ones see."""
        table = self.table()[self.q_end > first]
        q_start, *others = table.T
        return Slices(np.maximum(q_start, first), *others)

    def areas(self) -> Ints:
        """Unmasked (query, key) pairs of every slice, ``int64[M]``, exact."""
        areas: Ints = slice_areas(self.q_start, self.q_end, self.k_start, self.k_end, self.low, self.high)
        return areas

    def types(self) -> list[str]:
        """The literature's name of every slice's type; bands that fit no type are called ``band``."""
        upper = self.high < self.k_end - 1 - self.q_start
        lower = self.low > self.k_start - self.q_end + 1
        aligned_up = self.high == self.k_end - self.q_end
        aligned_low = self.low == self.k_start - self.q_start
        known = (~upper | aligned_up) & (~lower | aligned_low)
        code = upper + 2 * lower
        return [TYPE_NAMES[c] if ok else "band" for c, ok in zip(code.tolist(), known.tolist(), strict=True)]


@compiled(inline="always")
def _pairs_up_to(num_q, num_k, diagonal):  # type: ignore[no-untyped-def]
    """Pairs (u, v) of a num_q x num_k rectangle with v - u <= diagonal."""
    last = num_q + diagonal
    total = 0
    total += last * (last + 1) // 2 if last > 0 else 0
    total -= diagonal * (diagonal + 1) // 2 if diagonal > 0 else 0
    last -= num_k
    diagonal -= num_k
    total -= last * (last + 1) // 2 if last > 0 else 0
    total += diagonal * (diagonal + 1) // 2 if diagonal > 0 else 0
    return total


@compiled(inline="always")
def slice_area(q_start, q_end, k_start, k_end, low, high):  # type: ignore[no-untyped-def]
    """Exact area of one slice; the band is clipped to the rectangle first so that nothing overflows."""
    num_q, num_k = q_end - q_start, k_end - k_start
    if num_q <= 0 or num_k <= 0:
        return 0
    shift = k_start - q_start
    upper = min(high - shift, num_k - 1)
    lower = max(low - shift, 1 - num_q)
    if upper < lower:
        return 0
    return _pairs_up_to(num_q, num_k, upper) - _pairs_up_to(num_q, num_k, lower - 1)


@compiled()
def slice_areas(q_start, q_end, k_start, k_end, low, high):  # type: ignore[no-untyped-def]
    """Exact areas of many slices, ``int64[M]``; see ``Slices`` for the columns."""
    areas = np.empty(len(q_start), np.int64)
    for i in range(len(q_start)):
        areas[i] = slice_area(q_start[i], q_end[i], k_start[i], k_end[i], low[i], high[i])
    return areas


def slices_of(rows: Sequence[tuple[int, int, int, int, int]]) -> Slices:
    """Slices from rows (q_start, q_end, k_start, k_end, type), type one of FULL, CAUSAL, INVCAUSAL, BICAUSAL."""
    q_start, q_end, k_start, k_end, kind = np.array(rows, np.int64).reshape(-1, 5).T
    high = np.where((kind == CAUSAL) | (kind == BICAUSAL), k_end - q_end, UNBOUNDED)
    low = np.where((kind == INVCAUSAL) | (kind == BICAUSAL), k_start - q_start, -UNBOUNDED)
    return Slices(q_start.copy(), q_end.copy(), k_start.copy(), k_end.copy(), low, high)


def dense_mask(slices: Slices, num_tokens: int) -> NDArray[np.bool_]:
    """The mask as a boolean matrix ``[num_tokens, num_tokens]``: the brute-force twin for tests and pictures."""
    allowed = np.zeros((num_tokens, num_tokens), bool)
    rows = zip(
        slices.q_start.tolist(),
        slices.q_end.tolist(),
        slices.k_start.tolist(),
        slices.k_end.tolist(),
        slices.low.tolist(),
        slices.high.tolist(),
        strict=True,
    )
    for q0, q1, k0, k1, low, high in rows:
        offset = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        allowed[q0:q1, k0:k1] |= (offset >= low) & (offset <= high)
    return allowed


def coarse_mask(slices: Slices, num_tokens: int, size: int) -> NDArray[np.float64]:
    """Share of unmasked pairs in every cell of a square grid, ``[size, size]``, queries by keys; exact."""
    edges = np.arange(size + 1) * num_tokens // size
    pairs = np.outer(np.diff(edges), np.diff(edges))
    return np.asarray(areas_between(slices, edges) / np.maximum(pairs, 1), np.float64)


def areas_between(slices: Slices, edges: Ints) -> Ints:
    """Unmasked pairs of every (query range) x (key range) of the grid of ``edges [n + 1]``, ``int64[n, n]``; exact."""
    areas: Ints = _areas_of_cells(slices.table(), edges)
    return areas


@compiled()
def _areas_of_cells(table, edges):  # type: ignore[no-untyped-def]
    areas = np.zeros((len(edges) - 1, len(edges) - 1), np.int64)
    for row in range(len(table)):
        q_start, q_end, k_start, k_end = table[row, 0], table[row, 1], table[row, 2], table[row, 3]
        low, high = table[row, 4], table[row, 5]
        i = np.searchsorted(edges, q_start, side="right") - 1
        first = np.searchsorted(edges, k_start, side="right") - 1
        while i < len(areas) and edges[i] < q_end:
            q0, q1 = max(edges[i], q_start), min(edges[i + 1], q_end)
            j = first
            while j < len(areas) and edges[j] < min(k_end, q1 + high):
                areas[i, j] += slice_area(q0, q1, max(edges[j], k_start), min(edges[j + 1], k_end), low, high)
                j += 1
            i += 1
    return areas


@bare()
def slices_of_product(mask, reach, q_ranges, k_ranges, rows, areas, count):  # type: ignore[no-untyped-def]
    """Append the non-empty intersections of one product; past the end of ``rows`` they are only counted."""
    if len(q_ranges) == 0 or len(k_ranges) == 0:
        return count
    q_from = k_from = 0
    first_k, last_k = k_ranges[0, 0], k_ranges[-1, 1]
    row = -1
    while row + 1 < len(mask):
        row += 1
        if reach[row] <= q_ranges[q_from, 0]:
            row = np.searchsorted(reach, q_ranges[q_from, 0], side="right")
            if row == len(mask):
                break
        if mask[row, 0] >= q_ranges[-1, 1]:
            break
        if mask[row, 2] >= last_k or mask[row, 3] <= first_k or mask[row, 1] <= q_ranges[q_from, 0]:
            continue
        while q_from < len(q_ranges) - 1 and q_ranges[q_from, 1] <= mask[row, 0]:
            q_from += 1
        if k_ranges[k_from, 0] > mask[row, 2]:
            k_from = 0
        while k_from < len(k_ranges) - 1 and k_ranges[k_from, 1] <= mask[row, 2]:
            k_from += 1
        low, high = mask[row, 4], mask[row, 5]
        seen_from = max(k_ranges[k_from, 0], mask[row, 2]) - high
        for q_at in range(q_from, len(q_ranges)):
            q0, q1 = max(q_ranges[q_at, 0], mask[row, 0], seen_from), min(q_ranges[q_at, 1], mask[row, 1])
            if q_ranges[q_at, 0] >= mask[row, 1]:
                break
            for k_at in range(k_from, len(k_ranges)):
                k0, k1 = max(k_ranges[k_at, 0], mask[row, 2]), min(k_ranges[k_at, 1], mask[row, 3])
                if k_ranges[k_at, 0] >= mask[row, 3] or k0 > high + q1 - 1:
                    break
                area = slice_area(q0, q1, k0, k1, low, high)
                if area > 0:
                    if count < len(rows):
                        rows[count, 0], areas[count] = row, area
                        rows[count, 1], rows[count, 2] = q0, q1
                        rows[count, 3], rows[count, 4] = max(k0, q0 + low), min(k1, q1 + high)
                    count += 1
    return count


@bare()
def _restrict(mask, reach, q_start, q_ranges, k_start, k_ranges, pair_q, pair_k, start, rows, areas):  # type: ignore[no-untyped-def]
    """Fill ``start``, ``rows`` and ``areas`` as far as they reach; returns the number of rows wanted."""
    count = 0
    for pair in range(len(pair_q)):
        q, k = pair_q[pair], pair_k[pair]
        queries, keys = q_ranges[q_start[q] : q_start[q + 1]], k_ranges[k_start[k] : k_start[k + 1]]
        count = slices_of_product(mask, reach, queries, keys, rows, areas, count)
        start[pair + 1] = count
    return count


@dataclass(frozen=True, slots=True)
class RangeSets:
    """Sets of disjoint, ascending token ranges: set i is ``ranges[start[i]:start[i + 1]]``.

    ``start`` is ``int64[num_sets + 1]``, ``ranges`` is ``int64[R, 2]`` of [first, end) tokens.
    """

    start: Ints
    ranges: Ints

    def __len__(self) -> int:
        return len(self.start) - 1

    def num_tokens(self) -> Ints:
        """Tokens of every set, ``int64[num_sets]``."""
        total = np.concatenate(([0], np.cumsum(self.ranges[:, 1] - self.ranges[:, 0])))
        return total[self.start[1:]] - total[self.start[:-1]]

    def of(self, index: int) -> Ints:
        """The ranges of one set, ``int64[r, 2]``."""
        return self.ranges[self.start[index] : self.start[index + 1]]


def sets_of(cells: NDArray[np.bool_], edges: Ints) -> RangeSets:
    """Sets of the cells that are True, ``[sets, cells]``; those that touch are joined.

    Args:
        edges: first token of every cell, and the end of the last one.
    """
    return RangeSets(*_runs(np.ascontiguousarray(cells, np.bool_), np.asarray(edges, np.int64)))


@compiled()
def _runs(cells, edges):  # type: ignore[no-untyped-def]
    """Start of every set's ranges and the ranges of runs of cells that are True."""
    start, count = np.zeros(len(cells) + 1, np.int64), 0
    for row in range(len(cells)):
        before = False
        for here in cells[row]:
            count += here and not before
            before = here
        start[row + 1] = count
    ranges, at = np.empty((count, 2), np.int64), 0
    for row in range(len(cells)):
        before = False
        for i, here in enumerate(cells[row]):
            if here and not before:
                ranges[at, 0] = edges[i]
            elif before and not here:
                ranges[at, 1] = edges[i]
                at += 1
            before = here
        if before:
            ranges[at, 1] = edges[cells.shape[1]]
            at += 1
    return start, ranges


def restrict(
    mask: Slices, q_sets: RangeSets, k_sets: RangeSets, pair_q: Ints, pair_k: Ints
) -> tuple[Ints, NDArray[np.int32], Ints]:
    """The parts of a mask that fall into many (query set) x (key set) products.

    Args:
        mask: disjoint slices, ordered by query.
        q_sets, k_sets: token range sets.
        pair_q, pair_k: ``int64[N]`` set indices of each product.

    Returns:
        ``start int64[N + 1]``, ``rows int32[M, 5]`` of (mask row, q_start, q_end, k_start, k_end) and
        ``areas int64[M]``, all positive; product i has rows ``start[i]:start[i + 1]``, ordered by mask row. The
        band of a row is that of its mask row; its key range is cut to what the band admits, and its query range
        begins with the first query that the band lets see the first key.
    """
    table = mask.table()
    reach = np.maximum.accumulate(mask.q_end)  # where it is low, no row so far has later queries
    products = (table, reach, q_sets.start, q_sets.ranges, k_sets.start, k_sets.ranges, pair_q, pair_k)
    start = np.zeros(len(pair_q) + 1, np.int64)
    # A guess that is nearly always enough: memory that is not written costs nothing.
    count = int(np.diff(q_sets.start)[pair_q].sum() + np.diff(k_sets.start)[pair_k].sum() + 4 * len(pair_q) + len(mask))
    while True:
        rows, areas = np.empty((count, 5), np.int32), np.empty(count, np.int64)
        wanted = _restrict(*products, start, rows, areas)
        if wanted <= count:
            return start, rows[:wanted], areas[:wanted]
        count = wanted
