"""What every rank holds, fetches and computes in every stage, as masks of cells.

A cell is a token block of a head group; cells are ordered by group, then token, as positions are (``by_group``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import Ints, RangeSets, Slices, restrict, sets_of
from cpsim.masks.tiles import ListedTiles, Tiles, join_tiles, sequences
from cpsim.strategies.dcp.blocks import Blocks, Bools, first_of_nodes


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Who gets what from whom in one stage; masks ``[ranks, cells]``."""

    far: Bools
    """Cells that arrive from their home in another node."""
    near: Bools
    """Cells that arrive from a rank of the same node."""
    source: Ints
    """Rank that it comes from, ``[ranks, cells]``."""


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """K kernel calls, ordered by stage, part and rank."""

    rank: Ints
    stage: Ints
    part: Ints
    """0 or 1: a kernel takes causal or full sequences, so a rank may need two calls."""
    query: Bools
    """Cells of its queries, ``[K, cells]``."""
    key: Bools
    """Cells of its keys, ``[K, cells]``."""
    tile: Ints
    """Index into ``tiles``."""
    tiles: Tiles


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of some blocks."""

    blocks: Blocks

    def edges(self) -> Ints:
        """First position of every cell, and the end of the last one, ``[cells + 1]``."""
        b = self.blocks
        total = int(b.tokens.sum())
        return np.append((np.arange(b.num_groups)[:, None] * total + b.first).ravel(), b.num_groups * total)

    def per_group(self, of_block: Ints) -> Ints:
        """A value of every cell from one of every token block."""
        return np.tile(of_block, self.blocks.num_groups)

    @property
    def sides(self) -> Ints:
        """Cell of every computation's queries, and of its keys, ``[2, C]``."""
        b = self.blocks
        return np.stack([b.group * len(b) + b.query, b.kv_group * len(b) + b.key])

    @property
    def with_keys(self) -> Bools:
        """Whether a cell's keys are its own, or those of an earlier head group, ``[cells]``."""
        b = self.blocks
        return np.repeat(np.arange(b.num_groups) % b.groups_per_kv == 0, len(b))

    def needs(self, worker: Ints, stage: Ints, num_ranks: int) -> Bools:
        """Cells whose queries, and whose keys, every rank reads in every stage, ``[2, stages, ranks, cells]``."""
        b = self.blocks
        found = np.zeros((2, int(stage.max()) + 1, num_ranks, len(b) * b.num_groups), np.bool_)
        for side, cells in enumerate(self.sides):
            found[side, stage, worker, cells] = True
        return found


def fetches(needs: Bools, home: Ints, gpus_per_node: int) -> Iterator[Fetch]:
    """What ranks fetch in every stage, when every cell crosses to a node once and stays where it has arrived.

    Args:
        needs: ``[stages, ranks, cells]``.
        home: rank of every cell.
    """
    num_ranks = needs.shape[1]
    rank = np.arange(num_ranks)[:, None]
    held = home == rank
    for wants in needs:
        lacks = wants & ~held
        there, relay = (first_of_nodes(mask.T, home, gpus_per_node).T for mask in (held, lacks))
        source = np.where(there >= 0, there, relay)[np.arange(num_ranks) // gpus_per_node]
        far = lacks & (source == rank)
        yield Fetch(far, lacks & ~far, source)
        held = held | lacks


def routes(fetched: Bools, source: Ints, tokens: Ints, nbytes: int) -> Ints:
    """Bytes from every rank to every other, ``[ranks, ranks]``.

    Args:
        fetched: cells that every rank gets, ``[ranks, cells]``.
        source: rank that each comes from, ``[cells]`` or ``[ranks, cells]``.
        tokens: of every cell.
        nbytes: of a token.
    """
    moved = np.zeros((len(fetched), len(fetched)), np.int64)
    rank, cell = np.nonzero(fetched)
    np.add.at(moved, (np.broadcast_to(source, fetched.shape)[rank, cell], rank), tokens[cell] * nbytes)
    return moved


def given(fetched: Bools, source: Ints) -> Bools:
    """Cells that every rank gives to others, ``[ranks, cells]``; arguments as of ``routes``."""
    gives = np.zeros_like(fetched)
    rank, cell = np.nonzero(fetched)
    gives[np.broadcast_to(source, fetched.shape)[rank, cell], cell] = True
    return gives


def make_calls(cells: Cells, mask: Slices, worker: Ints, stage: Ints, any_mask: bool = False) -> Calls:
    """Every rank's kernel calls of every stage: one of any mask, or where that takes no varlen kernel but two calls of
    whole and of cut blocks do, these, unless the kernel takes any mask."""
    b, num_cells = cells.blocks, len(cells.blocks) * cells.blocks.num_groups
    place = stage * (int(worker.max()) + 1) + worker
    who, of = np.unique(place, return_inverse=True)
    of_queries, of_keys = cells.sides
    row = of * num_cells + of_queries
    rows, of_row = np.unique(row, return_inverse=True)
    keys = np.zeros((len(rows), num_cells), np.bool_)
    keys[of_row, of_keys] = True
    cuts = np.zeros(len(rows), np.int64)
    np.maximum.at(cuts, of_row, b.area < b.tokens[b.query] * b.tokens[b.key])
    call, query = np.divmod(rows, num_cells)
    # queries that see the same whole blocks are one rectangle; of cut blocks each is a product of its own
    alike: dict[tuple[int, int, bytes], int] = {}
    marks = np.where(cuts, query, -1).tolist()
    product = np.array(
        [
            alike.setdefault((c, mark, seen.tobytes()), len(alike))
            for c, mark, seen in zip(call.tolist(), marks, np.packbits(keys, axis=1), strict=True)
        ]
    )
    first = np.unique(product, return_index=True)[1]
    queries = np.zeros((len(first), num_cells), np.bool_)
    queries[product, query] = True
    parts = _restricted(mask, sets_of(queries, cells.edges()), sets_of(keys[first], cells.edges()))
    call, cut = call[first], cuts[first]
    whole, halves = _tiles(mask, parts, call, len(who)), _tiles(mask, parts, 2 * call + cut, 2 * len(who))
    one, one_half = sequences(whole).one_call[1:], sequences(halves).one_call[1:].reshape(-1, 2)
    empty = halves.area[1:].reshape(-1, 2) == 0
    apart = ~one & (one_half | empty).all(axis=1) & (not any_mask)
    tile = np.where(apart[call], 1 + len(who) + 2 * call + cut, 1 + call)
    order = np.argsort(tile, kind="stable")
    used, first_of = np.unique(tile[order], return_index=True)
    found = [np.logical_or.reduceat(seen[order], first_of) for seen in (queries, keys[first])]
    one_of = order[first_of]
    at_stage, rank = np.divmod(who[call[one_of]], int(worker.max()) + 1)
    part = np.where(apart[call[one_of]], cut[one_of], 0)
    order = np.lexsort((rank, part, at_stage))
    tiles = join_tiles((whole, halves))
    return Calls(rank[order], at_stage[order], part[order], found[0][order], found[1][order], used[order], tiles)


def _restricted(mask: Slices, queries: RangeSets, keys: RangeSets) -> tuple[Ints, NDArray[np.int32], Ints]:
    """Product, row and area of the parts of a mask in products of query and key sets."""
    number = np.arange(len(queries))
    start, rows, areas = restrict(mask, queries, keys, number, number)
    return np.repeat(number, np.diff(start)), rows, areas


def _tiles(mask: Slices, parts: tuple[Ints, NDArray[np.int32], Ints], tile_of: Ints, num_tiles: int) -> Tiles:
    """Tiles that several products belong to each, ``tile_of [products]``; product p goes to tile ``tile_of[p] + 1``."""
    product, rows, areas = parts
    tile = tile_of[product]
    order = np.lexsort((rows[:, 3], rows[:, 1], rows[:, 0], tile))
    start = np.concatenate(([0], np.searchsorted(tile[order], np.arange(num_tiles + 1))))
    area = np.bincount(tile, areas, num_tiles).astype(np.int64)
    return ListedTiles(start, rows[order], areas[order], np.concatenate(([0], area)), mask)
