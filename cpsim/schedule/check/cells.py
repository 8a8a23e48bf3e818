"""Blocks in units of cells: runs of tokens and heads that no block and no tile cuts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints
from cpsim.schedule.schedule import Schedule


class Cells:
    """Blocks in units of cells: runs of tokens and heads that no block and no tile cuts."""

    def __init__(self, s: Schedule, workload: Workload) -> None:
        self.s, self.num_tokens = s, workload.num_tokens
        self.num_heads = workload.num_heads, workload.num_kv_heads
        self.cached = workload.cached
        self.groups_per_kv, self.of_group = workload.groups_per_kv, workload.num_tokens // workload.head_groups
        ends = [s.sets.ranges.ravel(), s.tiles.rows[:, 1:].ravel(), [0, workload.cached, workload.num_tokens]]
        self.tokens = np.unique(np.concatenate([np.asarray(e, np.int64) for e in ends]))
        """Boundaries of the runs of tokens."""
        self.is_kv = np.array([t.endswith("kv") for t in s.block_tensors], bool)
        block_kv = self.is_kv[s.block_tensor]
        first, end = s.block_heads[:, 0], s.block_heads.sum(axis=1)
        self.heads = [
            np.unique(
                np.concatenate(
                    (
                        [0, total],
                        first[block_kv == kv],
                        end[block_kv == kv],
                        s.heads[:, 2 * kv],
                        s.heads[:, 2 * kv] + s.heads[:, 2 * kv + 1],
                    )
                )
            )
            for kv, total in enumerate(self.num_heads)
        ]
        """Boundaries of the runs of query heads and of key-value heads."""
        self._head_at = [{int(head): at for at, head in enumerate(heads)} for heads in self.heads]
        low, high = (
            np.where(block_kv, *(np.searchsorted(self.heads[kv], h) for kv in (1, 0))).tolist() for h in (first, end)
        )
        self.block_heads = [slice(a, b) for a, b in zip(low, high, strict=True)]
        self._rows: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        self._sets: dict[int, Ints] = {}
        self._tiles: dict[tuple[int, int], Ints] = {}

    def heads_of(self, index: int, tensor: str) -> slice:
        """Runs of heads of an attention op."""
        kv = tensor.endswith("kv")
        first, count = self.s.heads_of(index)[2 * kv : 2 * kv + 2].tolist()
        return slice(self._head_at[kv][first], self._head_at[kv][first + count])

    def of_attention(self, tensor: str) -> NDArray[np.bool_]:
        """Whether a cell is one of attention's tokens and heads, ``[runs of tokens, runs of heads]``; layers have
        wider rows, and weights other ones."""
        kv = tensor.endswith("kv")
        tokens = self.tokens[:-1]
        there = (tokens < self.num_tokens) & (kv or self.s.tokens(tokens) >= self.cached)
        there &= (not kv) | (tokens // self.of_group % self.groups_per_kv == 0)
        return np.logical_and.outer(there, self.heads[kv][:-1] < self.num_heads[kv])

    def of_set(self, token_set: int) -> Ints:
        """Runs of tokens of a set, ascending."""
        if token_set not in self._sets:
            self._sets[token_set] = self._runs(self.s.sets.of(token_set))
        return self._sets[token_set]

    def of_tile(self, tile: int, keys: bool) -> Ints:
        """Runs of tokens that the queries or the keys of a tile touch, ascending."""
        if (tile, keys) not in self._tiles:
            rows = self.s.tiles.rows[self.s.tiles.start[tile] : self.s.tiles.start[tile + 1]]
            self._tiles[tile, keys] = np.unique(self._runs(rows[:, 3:5] if keys else rows[:, 1:3]))
        return self._tiles[tile, keys]

    def common(self, one: int, other: int) -> tuple[Ints, Ints]:
        """Where the runs that two sets share are in the one and in the other."""
        if (one, other) not in self._rows:
            _, here, there = np.intersect1d(
                self.of_set(one), self.of_set(other), assume_unique=True, return_indices=True
            )
            self._rows[one, other] = here, there
        return self._rows[one, other]

    def _runs(self, ranges: NDArray[np.integer]) -> Ints:
        first, end = np.searchsorted(self.tokens, ranges).reshape(-1, 2).T
        length = end - first
        skipped = np.cumsum(length) - length
        return np.asarray(np.arange(length.sum()) + np.repeat(first - skipped, length), np.int64)


def places(runs: Ints, wanted: Ints) -> Ints | None:
    """Where some runs are among others, both ascending and without repetition; None where one of them is not."""
    at = runs.searchsorted(wanted)
    if len(wanted) and (at[-1] == len(runs) or not np.array_equal(runs[at], wanted)):
        return None
    return at
