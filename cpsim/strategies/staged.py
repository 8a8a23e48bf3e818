"""Attention in stages: a rank's queries with its own keys, then with those of others as they arrive, stage by stage.

What strategies of this kind have in common, however keys travel: kernels, and sums of their partial results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints, RangeSets
from cpsim.masks.tiles import Tiles, sequence_places, sequences
from cpsim.schedule.builder import Access, Builder
from cpsim.schedule.schedule import Int32, Kind, Mask
from cpsim.strategies import sharding
from cpsim.strategies.sharding import cells_of, edges_of
from cpsim.strategies.sizes import Sizes


class Staged:
    """A schedule under construction; arrays are ``[ranks]``, or ``[stages, ranks]`` with a rank's own keys first.

    Args:
        workload: the case.
        sets: of which set ``r`` is rank r's own tokens, and set ``(1 + s) P + r`` the keys that it sees in stage s.
        tiles: tile ``1 + s P + r``.
        num_ranks: P.
        stages: the first of a rank's own keys.
    """

    def __init__(self, workload: Workload, sets: RangeSets, tiles: Tiles, num_ranks: int, stages: int) -> None:
        self.ranks, self.tile = np.arange(num_ranks), 1 + np.arange(stages * num_ranks).reshape(-1, num_ranks)
        self.active = tiles.area[self.tile] > 0
        self.b, sizes = Builder(num_ranks, sets, tiles), Sizes(workload)
        self.calls = sequences(tiles)
        self.tokens = sets.num_tokens()
        self.own = self.tokens[:num_ranks]
        self.heads = np.array([0, workload.num_heads, 0, workload.num_kv_heads])
        self.q_bytes, self.kv_bytes = sizes.query(workload.num_heads), sizes.kv(workload.num_kv_heads)
        self.o_bytes, self.lse_bytes = sizes.output(workload.num_heads), sizes.lse(workload.num_heads)
        self.kv_wide, self.wide = sizes.accumulator(self.kv_bytes), sizes.accumulator
        self.sums = self.active & (np.cumsum(self.active, axis=0) > 1)
        """Stages whose partial result is added to earlier ones; the kernel of the first writes the result itself."""

    def attend(self, kind: Kind, stage: int, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """The kernels of a stage."""
        r = np.flatnonzero(self.active[stage])
        self.b.add(
            kind,
            (r, "compute"),
            step=stage,
            tile=self.tile[stage, r],
            heads=self.heads,
            reads=[(buffer[r], block[r]) for buffer, block in reads],
            writes=[(buffer[r], block[r]) for buffer, block in writes],
        )

    def sum(self, kind: Kind, stage: int, moved: Ints, total: Access, partial: Int32) -> None:
        """Add a partial result of queries to earlier ones."""
        r = np.flatnonzero(self.sums[stage])
        self.b.add(
            kind,
            (r, "compute"),
            step=stage,
            heads=self.heads,
            nbytes=moved[stage, r],
            reads=[(partial[r], total[1][r])],
            updates=[(total[0][r], total[1][r])],
        )

    def summed_bytes(self, row: int, lse: int = 0) -> Ints:
        """Bytes that every sum reads and writes, ``int64[stages, ranks]``: of queries that see a key of its stage.

        Sums of a row are in fp32 until the last one, which writes the final type.

        Args:
            row: bytes of one.
            lse: of its log-sum-exp.
        """
        wide = self.wide(row)
        sees, rank, length = self.seeing
        direct = sees & (self.active & ~self.sums)[:, rank]
        nth = np.cumsum(sees, axis=0)
        narrow = (nth == 2) & direct.any(axis=0)
        old = np.where(nth == 1, 0, np.where(narrow, row, wide) + lse)
        new = np.where(nth == nth[-1], row, wide) + lse
        moved = np.where(sees & ~direct, length * (row + lse + old + new), 0)
        total = np.zeros(self.active.shape, np.int64)
        np.add.at(total.T, rank, moved.T)
        return total

    @cached_property
    def seeing(self) -> tuple[Mask, Ints, Ints]:
        """Runs of queries that see keys of the same stages: of which, ``[stages, runs]``; their rank; their length."""
        own = sharding.part(self.b.sets, 0, len(self.ranks))
        queries = sequence_places(self.b.tiles)[:, 2:].astype(np.int64)
        seen = RangeSets(self.calls.start[1 :: len(self.ranks)], queries)
        edges = edges_of(own, seen)
        return cells_of(seen, edges), cells_of(own, edges).argmax(axis=0), np.diff(edges)

    def begin(self, total: Access, made: Access) -> None:
        """Sums of gradients of keys start with those of a rank's own queries, or with zeros."""
        for where, reads in ((self.active[0], [made]), (~self.active[0], [])):
            r = np.flatnonzero(where)
            nbytes = self.own[r] * self.kv_wide + self.rows_of(0)[r] * self.kv_bytes * len(reads)
            self.b.add(
                Kind.ACCUMULATE,
                (r, "compute"),
                heads=self.heads,
                nbytes=nbytes,
                reads=[(buffer[r], block[r]) for buffer, block in reads],
                writes=[(total[0][r], total[1][r])],
            )

    def given(self, tensor: str, width: int) -> Access:
        """A rank's own tokens as an input."""
        made = self.b.buffers(tensor, self.own * width), self.own_blocks(tensor)
        self.b.input(*made)
        return made

    def result(self, tensor: str, row: int, lse: int = 0) -> tuple[Access, Int32]:
        """A result with room for its sums, and buffers of partial results; bytes of a row and its log-sum-exp."""
        room = self.wide(row) if self.sums.any() else 0
        made = self.b.buffers(tensor, self.own * (row + lse + room)), self.own_blocks(tensor)
        self.b.output(*made)
        return made, self.b.buffers(f"{tensor} partial", self.own * (row + lse))

    def target(self, result: Access, partial: Int32, stage: int) -> Access:
        """What kernels write on the query side: the first one the result."""
        return np.where(self.sums[stage], partial, result[0]), result[1]

    def tokens_of(self, stage: int) -> Ints:
        """Tokens of the keys of a stage."""
        return self.tokens[self.key_sets(stage)]

    def rows_of(self, stage: int) -> Ints:
        """Rows of these as kernels read them: some several times where their sequences share them."""
        tile, tokens = self.tile[stage], self.tokens_of(stage)
        return np.where(self.calls.one_call[tile], np.maximum(self.calls.keys()[tile], tokens), tokens)

    def own_blocks(self, tensor: str) -> Int32:
        return self.b.blocks(tensor, self.ranks, self.heads_of(tensor))

    def key_sets(self, stage: int) -> Ints:
        """Sets of the keys of a stage."""
        return self.ranks + (1 + stage) * len(self.ranks)

    def blocks(self, tensor: str, stage: int) -> Int32:
        return self.b.blocks(tensor, self.key_sets(stage), self.heads_of(tensor))

    def heads_of(self, tensor: str) -> tuple[int, int]:
        """All heads of a tensor."""
        first, count = (self.heads[2:] if tensor.endswith("kv") else self.heads[:2]).tolist()
        return first, count
