"""Who computes what in every step of the rings of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints, RangeSets, Whole
from cpsim.masks.tiles import Tiles, sequences
from cpsim.schedule.schedule import Mask
from cpsim.strategies.ring.grid import RingGrid
from cpsim.strategies.sizes import Accumulation, Sizes


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Who holds which tokens and computes what, the same forward and backward; arrays are ``[steps, shards]``."""

    sets: RangeSets
    """Shards (sets 0 to P-1), under zigzag their heads (P to 2P-1), and under zigzag and stripes their tails (last)."""
    scattered: NDArray[np.bool_]
    """Shards whose heads and tails are scattered over them and have to be packed for a kernel call, ``[shards]``."""
    tails: NDArray[np.bool_]
    """Only tail queries compute: under a causal mask they alone see later ranks' keys."""
    key_heads: NDArray[np.bool_]
    """Only head keys are used: under a causal mask no others of earlier ranks are seen."""
    query_set: Whole
    key_set: Whole
    tiles: Tiles
    tile: Whole
    """Index of the tile that is computed."""
    stride: int = 1
    """Stride of the order in which sets and tiles count."""
    first_set: int = 0
    """Where the sets are among those of a schedule of several cuts."""
    queries: int = 0
    """How far behind a shard the set of those of its tokens is that have queries; 0: all have."""


@dataclass(frozen=True, slots=True)
class Where:
    """Some steps and ranks, ``[n]`` each, and where these pairs are in arrays ``[steps, ranks]``."""

    s: Ints
    r: Ints
    flat: Ints

    @classmethod
    def true(cls, mask: Mask) -> Where:
        """Places where a mask is True, ``[steps, ranks]``."""
        flat = np.flatnonzero(mask)
        return cls(*np.divmod(flat, mask.shape[1]), flat)

    @classmethod
    def pairs(cls, s: Ints, r: Ints, num_ranks: int) -> Where:
        """These."""
        return cls(s, r, s * num_ranks + r)

    def of(self, table: NDArray[Any]) -> NDArray[Any]:
        """What an array ``[steps, ranks]`` has there, ``[n]``: ``table[s, r]`` in a fifth of its time."""
        return table.take(self.flat)


class Steps:
    """A cut of the tokens over the places of a ring, for all ranks of a grid; arrays ``[steps, ranks]``.

    Every tensor has a block for every part of the heads and set of the cut, and one of all tokens if it ``gathers``.
    """

    def __init__(self, workload: Workload, cut: Cut, grid: RingGrid, gathers: bool = False) -> None:
        at, shards = grid.shard, grid.num_shards
        self.workload, self.grid, self.cut, self.num_ranks = workload, grid, cut, len(at)
        self.ranks, self.number = np.arange(len(at)), np.arange(grid.num_places)[:, None]
        columns = slice(None) if len(at) == shards else at  # every rank has a shard of its own
        self.tails, self.key_heads = cut.tails[:, columns], cut.key_heads[:, columns]
        self.source = grid.source
        self.tile = cut.tile[:, columns]
        self.active = cut.tiles.area[self.tile] > 0
        self.scattered = cut.scattered[at]
        """Ranks whose heads and tails are scattered over their shards, ``[ranks]``."""
        self.packs = self.key_heads & self.active & self.scattered
        """Key heads are packed for the kernel."""
        tokens = cut.sets.num_tokens()
        self.shard_tokens, self.tokens, self.tail_rows = tokens[:shards], tokens[at], tokens[at - shards]
        """Tokens of every shard; of every rank, ``[ranks]``; and of the rank's tails."""
        self.queries = tokens[at + cut.queries]
        """Tokens of every rank that have queries, ``[ranks]``."""
        self.longest = self.shard_tokens[self.source].max(axis=0)
        """Tokens of the longest shard of every rank's ring, ``[ranks]``; rings without tokens do nothing."""
        self.head_rows = tokens[shards : 2 * shards]
        """Tokens of the heads of every shard, under zigzag."""
        self.unseen = ~self.active & (self.number == 0) & (self.tokens > 0)
        """Ranks whose queries see none of their own keys: sums of gradients of keys start with zeros."""
        query_set, key_set = cut.query_set[:, columns], cut.key_set[:, columns]
        self.q_rows, self.k_rows = tokens[query_set], tokens[key_set]
        calls = sequences(cut.tiles)
        self.seen = np.where(calls.one_call[self.tile], np.minimum(calls.keys()[self.tile], self.k_rows), self.k_rows)
        """Rows of keys that a kernel's queries see; where no kernel can run the call, all that it reads."""
        self.rows = Accumulation(self.active, self.q_rows, ~self.tails, self.tail_rows)
        self.sums = self.rows.sums
        self.tracks = grid.tracks
        self.moves = np.zeros_like(self.active)
        """Steps in which keys and values are sent on."""
        for track in self.tracks:
            self.moves[track.leaves] = self.longest > 0
        self.num_sets = len(cut.sets) + gathers
        first_set = grid.part * self.num_sets
        self.own_queries = first_set + at + cut.queries
        self.own, self.tail = first_set + at, first_set + len(cut.sets) - shards + at
        """Where a tensor's blocks of a rank's shard, and of its tails, are among all of its blocks; ``[ranks]``."""
        self.of_queries, self.of_keys = first_set + query_set, first_set + key_set
        self.of_source = first_set + self.source
        """Sets of what a kernel computes on, and of the shard that its keys are from."""
        heads, kv_heads = workload.num_heads // grid.num_parts, max(1, workload.num_kv_heads // grid.num_parts)
        first = grid.part * heads
        first_kv = first * workload.num_kv_heads // workload.num_heads
        self.heads = np.stack([first, np.full_like(first, heads), first_kv, np.full_like(first, kv_heads)], axis=1)
        """First query head, query heads, first key-value head, key-value heads; ``[ranks, 4]``."""
        self.sizes = Sizes(workload)
        self.q_bytes, self.kv_bytes = self.sizes.query(heads), self.sizes.kv(kv_heads)
        self.o_bytes = self.sizes.output(heads)
        """One token of O or dO."""
        self.lse_bytes = self.sizes.lse(heads)

    def lie_together(self) -> None:
        """No kernel needs heads or tails packed, however they lie."""
        self.scattered, self.packs = np.zeros_like(self.scattered), np.zeros_like(self.packs)

    def mask(self, steps: Ints) -> Mask:
        """All ranks whose rings have tokens in some steps."""
        made = np.zeros_like(self.active)
        made[steps] = self.longest > 0
        return made

    def heads_of(self, ranks: Ints) -> Ints:
        """The heads of some ranks; one row where there is one part."""
        return self.heads[ranks] if self.grid.num_parts > 1 else self.heads[0]

    def heads_of_parts(self, tensor: str) -> list[tuple[int, int]]:
        """(first head, heads) of every part of the heads."""
        columns = slice(2, 4) if tensor.endswith("kv") else slice(0, 2)
        owners = self.grid.ranks[0, : self.grid.part.max() + 1]
        return [(first, count) for first, count in self.heads[owners, columns].tolist()]
