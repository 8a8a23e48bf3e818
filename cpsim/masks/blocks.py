"""Masks as kernels with tables of blocks see them: which square blocks they visit, and what decides inside a block.

FlexAttention and its like read two lists for every row of blocks: *full* blocks, all of whose pairs are seen, and
*partial* ones, whose pairs a function of query and key decides one by one. Blocks at the end of queries or keys that
are cut off are partial.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import UNBOUNDED, UNCUT, Ints, Slices, slice_area
from cpsim.runtime.compiled import compiled

BLOCK: Final = 128
"""Tokens of a side of a block: FlexAttention's default."""
PARTIAL: Final = 1
FULL: Final = 2
RUNS, CELLS, BANDS = range(3)
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """The blocks that one kernel call visits."""

    num_q: int
    num_k: int
    of_queries: Ints
    """Partial and full blocks of every row of queries, ``int64[query blocks, 2]``."""
    of_keys: Ints
    """Partial and full blocks of every row of keys, ``int64[key blocks, 2]``."""
    rule: int
    """How pairs of partial blocks are decided: RUNS, CELLS or BANDS."""
    causal: bool = False
    """Whether no query sees a key after its own, where the last query's own key is the last one."""

    def partial_rule(self) -> int | None:
        """How pairs of partial blocks are decided; None where there are no partial blocks."""
        return self.rule if self.of_queries[:, 0].any() else None


def visits(slices: Slices, num_q: int, num_k: int) -> Visits:
    """The blocks of ``BLOCK x BLOCK`` tokens that a mask of disjoint slices touches."""
    table = table_of(slices)
    of_queries, of_keys = _counts(block_kinds(table, num_q, num_k, BLOCK))
    latest = np.minimum(slices.high, slices.k_end - 1 - slices.q_start).max(initial=num_k - num_q)
    return Visits(num_q, num_k, of_queries, of_keys, rule_of(table, num_q), bool(latest <= num_k - num_q))


@compiled()
def _counts(kinds):  # type: ignore[no-untyped-def]
    """Partial and full blocks of every row and of every column, ``int64[rows, 2]`` and ``int64[columns, 2]``."""
    of_rows, of_columns = np.zeros((kinds.shape[0], 2), np.int64), np.zeros((kinds.shape[1], 2), np.int64)
    for row in range(kinds.shape[0]):
        for column in range(kinds.shape[1]):
            if kinds[row, column]:
                of_rows[row, kinds[row, column] - PARTIAL] += 1
                of_columns[column, kinds[row, column] - PARTIAL] += 1
    return of_rows, of_columns


def rule_of(table: Ints, num_q: int) -> int:
    """The simplest rule that decides pairs of a mask: one run of keys for each query, rectangles, or bands in them."""
    if key_runs(table, num_q)[1]:
        return RUNS
    num_k = int(table[:, 3].max(initial=0))
    rectangles = (table[:, 4] <= -num_q).all() and (table[:, 5] >= num_k).all()
    return CELLS if rectangles else BANDS


def table_of(slices: Slices) -> Ints:
    """The slices as rows (q_start, q_end, k_start, k_end, low, high), ordered by query, ``int64[M, 6]``."""
    return slices.table()[np.argsort(slices.q_start, kind="stable")]


def causal_windows(causal: NDArray[np.bool_]) -> Ints:
    """Windows of sequences, each causal or full, ``[M, 2]``; see `sequence_slices`."""
    return np.column_stack([np.full(len(causal), UNCUT), np.where(causal, 0, UNCUT)])


def sequence_slices(q_lens: Ints, k_lens: Ints, window: Ints) -> Slices:
    """Packed sequences that see `window` keys before and after a query's own, all where it is UNCUT, ``[M, 2]``; the
    last query's own key is the last one."""
    q_end, k_end = np.cumsum(q_lens), np.cumsum(k_lens)
    left, right = window.T
    low = np.where(left == UNCUT, -UNBOUNDED, k_end - q_end - left)
    high = np.where(right == UNCUT, UNBOUNDED, k_end - q_end + right)
    return Slices(q_end - q_lens, q_end, k_end - k_lens, k_end, low, high)


def slice_windows(mask: Slices) -> Ints:
    """Queries and keys of every slice of a mask, and the keys before and after a query's own that it sees where the
    last query's own key is the last one, ``int64[M, 4]``: the inverse of ``sequence_slices``."""
    q0, q1, k0, k1, low, high = mask.table().T
    k0, k1 = np.maximum(k0, q0 + low), np.minimum(k1, q1 + high)
    q0, q1 = np.maximum(q0, k0 - high), np.minimum(q1, k1 - low)
    left = np.where(low <= k0 - q1 + 1, UNCUT, k1 - q1 - low)
    right = np.where(high >= k1 - 1 - q0, UNCUT, high - k1 + q1)
    table: Ints = np.stack([q1 - q0, k1 - k0, left, right], axis=1)[(q0 < q1) & (k0 < k1)]
    return table


@compiled()
def block_kinds(table, num_q, num_k, size):  # type: ignore[no-untyped-def]
    """0, PARTIAL or FULL for every block of ``size x size`` tokens, ``uint8[query blocks, key blocks]``.

    ``table`` is that of disjoint slices; several of them may fill a block together.
    """
    num_rows, num_columns = (num_q + size - 1) // size, (num_k + size - 1) // size
    kinds = np.zeros((num_rows, num_columns), np.uint8)
    area = np.zeros(num_columns, np.int64)
    reach = np.zeros(len(table), np.int64)  # the last query of this slice and those before it
    for i in range(len(table)):
        reach[i] = max(table[i, 1], reach[i - 1] if i else 0)
    for row in range(num_rows):
        area[:] = 0
        begin, end = row * size, min((row + 1) * size, num_q)
        i = np.searchsorted(reach, begin, side="right")
        while i < len(table) and table[i, 0] < end:
            q0, q1, low, high = max(begin, table[i, 0]), min(end, table[i, 1]), table[i, 4], table[i, 5]
            k0, k1 = max(table[i, 2], q0 + low), min(table[i, 3], q1 + high)
            i += 1
            if q0 >= q1 or k0 >= k1:
                continue
            full_from = full_to = (k1 - 1) // size + 1
            if q1 - q0 == size:  # keys that all queries see
                full_from = (max(k0, q1 - 1 + low) + size - 1) // size
                full_to = max(full_from, min(k1, q0 + high + 1) // size)
                kinds[row, full_from:full_to] = FULL
            for column in range(k0 // size, (k1 - 1) // size + 1):
                if full_from <= column < full_to:
                    continue
                part = slice_area(q0, q1, max(k0, column * size), min(k1, (column + 1) * size), low, high)
                area[column] += part
                if area[column] == size * size:
                    kinds[row, column] = FULL
                elif part > 0:
                    kinds[row, column] = PARTIAL
    return kinds


@compiled()
def key_runs(table, num_q):  # type: ignore[no-untyped-def]
    """First key and end of the keys that every query sees, ``int32[2, num_q]``, and whether these are all in one run.

    A query that sees no key has an empty run.
    """
    runs = np.zeros((2, num_q), np.int32)
    seen = np.zeros(num_q, np.int64)
    for i in range(len(table)):
        for q in range(table[i, 0], table[i, 1]):
            k0, k1 = max(table[i, 2], q + table[i, 4]), min(table[i, 3], q + table[i, 5] + 1)
            if k0 >= k1:
                continue
            runs[0, q] = k0 if seen[q] == 0 else min(runs[0, q], k0)
            runs[1, q] = max(runs[1, q], k1)
            seen[q] += k1 - k0
    for q in range(num_q):
        if seen[q] != runs[1, q] - runs[0, q]:
            return runs, False
    return runs, True


def band_cells(table: Ints, num_q: int, num_k: int) -> tuple[Int32s, Int32s, Int32s, Int32s]:
    """Any mask as a grid of cells with one or two bands each.

    Returns:
        The cell of every query ``int32[num_q]`` and of every key ``int32[num_k]``, the kind of every cell
        ``int32[query cells, key cells]``, and of every kind the lowest and highest ``k - q`` of its first band and of
        its second one, ``int32[4, kinds]``; a band that admits nothing has limits 1 and 0.

    Raises:
        ValueError: more than two slices share a rectangle.
    """
    q_edges, k_edges = np.unique(table[:, :2]), np.unique(table[:, 2:4])
    far = num_q + num_k
    bands, of_slice = np.unique(np.clip(table[:, 4:], -far, far), axis=0, return_inverse=True)
    bands = np.concatenate([[[1, 0]], bands])
    layers = np.zeros((2, len(q_edges) + 1, len(k_edges) + 1), np.int32)
    at = np.concatenate([np.searchsorted(q_edges, table[:, :2]), np.searchsorted(k_edges, table[:, 2:4])], axis=1) + 1
    if not _fill(layers, at, of_slice.reshape(-1) + 1):
        raise ValueError("expected at most two slices of a mask in one rectangle, got more")
    pairs, cells = np.unique(layers[0].astype(np.int64) * len(bands) + layers[1], return_inverse=True)
    limits = np.concatenate([bands[pairs // len(bands)], bands[pairs % len(bands)]], axis=1).T
    of_q = np.searchsorted(q_edges, np.arange(num_q), side="right")
    of_k = np.searchsorted(k_edges, np.arange(num_k), side="right")
    cells = cells.reshape(layers[0].shape)
    return of_q.astype(np.int32), of_k.astype(np.int32), cells.astype(np.int32), limits.astype(np.int32)


def rectangles(table: Ints, num_q: int, num_k: int) -> tuple[NDArray[np.bool_], Ints, Ints]:
    """A mask of whole rectangles as a grid.

    Returns:
        Which blocks are seen ``bool[rows, columns]``, and the tokens of every row and of every column.

    Raises:
        ValueError: some slice is no whole rectangle.
    """
    q_edges = np.unique([0, num_q, *table[:, :2].ravel()])
    k_edges = np.unique([0, num_k, *table[:, 2:4].ravel()])
    if (table[:, 1] - 1 + table[:, 4] > table[:, 2]).any() or (table[:, 0] + table[:, 5] < table[:, 3] - 1).any():
        raise ValueError("expected a mask of rectangles, got one that cuts them")
    seen = np.zeros((len(q_edges) - 1, len(k_edges) - 1), np.bool_)
    _see(seen, np.searchsorted(q_edges, table[:, :2]), np.searchsorted(k_edges, table[:, 2:4]))
    return seen, np.diff(q_edges), np.diff(k_edges)


@compiled()
def _see(seen, rows, columns):  # type: ignore[no-untyped-def]
    """Marks every rectangle from a row and a column to others, ``rows`` and ``columns`` being ``int64[M, 2]``."""
    for i in range(len(rows)):
        seen[rows[i, 0] : rows[i, 1], columns[i, 0] : columns[i, 1]] = True


def row_sequences(table: Ints, num_q: int, num_k: int) -> tuple[Ints, Ints]:
    """The rows of a mask of whole rectangles as sequences: queries of each, and the keys that they see.

    Raises:
        ValueError: some slice is no whole rectangle.
    """
    seen, rows, columns = rectangles(table, num_q, num_k)
    keys = seen @ columns
    return rows[keys > 0], keys[keys > 0]


@compiled()
def _fill(layers, at, band):  # type: ignore[no-untyped-def]
    """Writes every slice's band into its rectangle, of the second one where there is a first; whether that is all."""
    for i in range(len(at)):
        for row in range(at[i, 0], at[i, 1]):
            for column in range(at[i, 2], at[i, 3]):
                layer = 0 if layers[0, row, column] == 0 else 1
                if layers[layer, row, column]:
                    return False
                layers[layer, row, column] = band[i]
    return True
