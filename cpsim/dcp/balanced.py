"""Variant ``cpsim``: tokens first, evenly to within a block; then computation, evenly to within ``eps``.

Token blocks fill ranks in two orders, as they come and folded like a zigzag. From each, blocks are swapped between
nodes, then between the GPUs of a node, where that lessens what the busiest receive and send while computation stays
with its queries; then computation alone moves, in bundles that are halved from whole rows to single blocks, until no
part has more than its share. The best of what the starts lead to is kept.

Reference: DCP (arXiv 2510.10620), section 4.2, for the problem. Differs: no hypergraph solver; two constraints are two
searches; what is minimized is not the total, but squares of what every node and GPU receives and sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from cpsim.dcp.blocks import Blocks, Placement, judge
from cpsim.dcp.search import OUTSIDE, move_bundles, swap_homes, tally
from cpsim.masks import Ints

NETWORK: Final = 8
"""Bytes over NVLink in the time of one over a GPU's part of the network: 450 over 50 GB/s for an H100, rounded."""
TRIES: Final = 1000
"""Swaps that are tried for every token block."""
SWEEPS: Final = 3
"""Over bundles of one size, at most."""
PRICE: Final = (300.0, 100.0, 1e6)
"""Of a share of computation too much, in squares of all keys and values: when homes are swapped, when computation
moves, and when that must fit."""


def place(blocks: Blocks, shape: tuple[int, int], eps: float, seed: int) -> Placement:
    """Homes and workers with even tokens and computation, and little traffic.

    Args:
        blocks: what to place.
        shape: (nodes, GPUs of each).
        eps: computation of a rank over the mean, at most, less 1, as far as blocks allow it.
        seed: of the swaps that are tried.
    """
    ranks = shape[0] * shape[1]
    starts = [even_fill(blocks.tokens, ranks, order) for order in (np.arange(len(blocks)), _folded(blocks))]
    found = [_Search(blocks, shape, eps, seed).run(start, swaps) for start in starts for swaps in (True, False)]
    return min(found, key=lambda placement: _busiest(blocks, placement, shape, eps))


def even_fill(tokens: Ints, num_ranks: int, order: Ints) -> Ints:
    """Rank of every block: consecutive blocks of an order together, and the most and the fewest tokens of a rank no
    further apart than a block."""
    home = np.empty(len(tokens), np.int64)
    before = np.cumsum(tokens[order]) - tokens[order]
    middle = before + tokens[order] / 2
    home[order] = np.minimum(middle * num_ranks // tokens.sum(), num_ranks - 1)
    held = np.bincount(home, tokens, num_ranks).astype(np.int64)
    while (gap := held.max() - held.min()) > tokens.max():
        most, fewest = int(held.argmax()), int(held.argmin())
        mine = np.flatnonzero(home == most)
        x = mine[np.abs(2 * tokens[mine] - gap).argmin()]
        home[x] = fewest
        held[[most, fewest]] += np.array([-1, 1]) * tokens[x]
    return home


def _folded(blocks: Blocks) -> Ints:
    """Blocks in an order in which the first and the last of a document are together, then the second and the last but
    one, and so on."""
    count = np.bincount(blocks.document)[blocks.document]
    nth = np.arange(len(blocks)) - np.searchsorted(blocks.document, blocks.document)
    return np.lexsort((np.arange(len(blocks)), np.minimum(nth, count - 1 - nth) / count))


def _busiest(blocks: Blocks, placement: Placement, shape: tuple[int, int], eps: float) -> tuple[float, float]:
    """Computation beyond its share, and bytes of the busiest node and GPU, weighted."""
    quality = judge(blocks, placement, shape[0] * shape[1], shape[1], "fwd")
    far = quality.between_nodes.reshape(shape * 2).sum(axis=(1, 3))
    ports = [np.stack([moved.sum(axis=0), moved.sum(axis=1)]).max() for moved in (far, quality.moved)]
    return round(max(quality.imbalance - 1 - eps, 0.0), 2), float(ports[0] * NETWORK / shape[1] + ports[1])


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of the problem that one search sees."""

    home: Ints
    """Part of every token block, or OUTSIDE."""
    mine: Ints
    """Computation blocks."""
    num_parts: int
    cap: float
    """Load of a part, at most."""


class _Search:
    """From one start; loads are in shares, what a rank would have if all had the same."""

    def __init__(self, blocks: Blocks, shape: tuple[int, int], eps: float, seed: int) -> None:
        self.blocks, self.shape, self.eps, self.seed = blocks, shape, eps, seed
        self.load = blocks.area * (shape[0] * shape[1] / blocks.area.sum())
        self.keys = (blocks.tokens * blocks.num_groups * blocks.kv_bytes).astype(np.float64)
        groups = blocks.num_groups
        units = len(blocks) * groups
        self.sides = np.stack([blocks.query * groups + blocks.group, units + blocks.key * groups + blocks.group])
        (q_in, q_out), (k_in, k_out) = blocks.query_bytes("fwd"), blocks.key_bytes("fwd")
        tokens = np.repeat(blocks.tokens, groups)
        self.bytes_in = np.concatenate([tokens * q_in, tokens * k_in]).astype(np.float64)
        self.bytes_out = np.concatenate([tokens * q_out, tokens * k_out]).astype(np.float64)

    def run(self, start: Ints, swaps: bool) -> Placement:
        """Improve a start, with homes swapped or as they are."""
        (nodes, per_node), b = self.shape, self.blocks
        rank, worker = start.copy(), np.empty(b.computations, np.int64)
        whole = _Part(rank // per_node, np.arange(b.computations), nodes, per_node * (1 + self.eps / 2))
        if swaps and nodes > 1:
            self.swap(whole, rank)
        node = self.compute(whole)
        for n in range(nodes):
            local = np.where(whole.home == n, rank - n * per_node, OUTSIDE)
            part = _Part(local, np.flatnonzero(node == n), per_node, 1 + self.eps)
            if swaps and per_node > 1:
                self.swap(part, rank)
            worker[part.mine] = n * per_node + self.compute(part)
        return Placement(rank, worker, "local search")

    def swap(self, part: _Part, rank: Ints) -> None:
        """Swap homes, in ``part.home`` and ``rank``, with the computation of their queries."""
        b, mine = self.blocks, part.mine[part.home[self.blocks.query[part.mine]] != OUTSIDE]
        seen = np.unique(b.query[mine] * len(b) + b.key[mine])
        row_start = np.searchsorted(seen, np.arange(len(b) + 1) * len(b))
        movable = np.flatnonzero(part.home != OUTSIDE)
        if len(np.unique(part.home[movable])) < 2:
            return
        held = np.bincount(rank, b.tokens, self.shape[0] * self.shape[1]).astype(np.int64)
        load = np.bincount(b.query[mine], self.load[mine], len(b))
        rng = np.random.default_rng(self.seed)
        pairs = movable[rng.integers(len(movable), size=(TRIES * len(movable), 2))]
        swap_homes(
            part.home, rank, held, b.tokens.max(), b.tokens, row_start, seen % len(b), self.keys, load, part.cap,
            self.price(part, PRICE[0]), pairs, 1 - rng.random(len(pairs)),
        )  # fmt: skip

    def compute(self, part: _Part) -> Ints:
        """Part of every computation block of ``part.mine``: that of its queries, and then where it costs least."""
        b, mine = self.blocks, part.mine
        if not len(mine):
            return np.zeros(0, np.int64)
        load, home = self.load[mine], np.tile(np.repeat(part.home, b.num_groups), 2)
        away, back = self.bytes_in, np.where(home == OUTSIDE, NETWORK, 1) * self.bytes_out
        worker = self.first_guess(part, load)
        order = np.empty(len(b), np.int64)
        order[np.lexsort((np.arange(len(b)), part.home))] = np.arange(len(b))
        sides = np.ascontiguousarray(self.sides[:, mine])
        state = tally(worker, sides, home, away, back, load, part.num_parts)
        for price in PRICE[1:]:
            if price == PRICE[2] and state[3].max() <= part.cap:
                break
            for bundle in self.bundles(order[b.query[mine]], order[b.key[mine]], b.group[mine]):
                move_bundles(
                    *bundle, worker, state, sides, home, away, back, load, part.cap, self.price(part, price), SWEEPS
                )
        return worker

    def first_guess(self, part: _Part, load: ArrayLike) -> Ints:
        """With its queries; rows of other nodes' queries go to the parts with the least load."""
        query, load = self.blocks.query[part.mine], np.asarray(load)
        worker = part.home[query]
        held = np.bincount(worker[worker != OUTSIDE], load[worker != OUTSIDE], part.num_parts)
        for row in np.unique(query[worker == OUTSIDE]):
            worker[query == row] = held.argmin()
            held[held.argmin()] += load[query == row].sum()
        return worker

    def bundles(self, query: Ints, key: Ints, group: Ints) -> list[tuple[Ints, Ints]]:
        """Bundles of computation blocks as CSR: rows times runs of keys, and squares, of all groups and of one; from
        all keys down to single blocks."""
        longest = int(np.ceil(np.log2(max(key.max() + 1, 2))))
        sizes = [(q, 1 << k) for k in range(longest, -1, -1) for q in ((1, 1 << k) if k else (1,))]
        return [_grouped(query // q, key // k, part) for q, k in sizes for part in (np.zeros_like(group), group)]

    def price(self, part: _Part, factor: float) -> float:
        """Of the square of a load beyond the cap, in bytes squared."""
        share = float(self.keys.sum()) * part.num_parts / (self.shape[0] * self.shape[1])
        return factor * share**2


def _grouped(*keys: Ints) -> tuple[Ints, Ints]:
    """Equal rows of keys together: CSR start and members."""
    members = np.lexsort(keys[::-1])
    rows = np.stack([key[members] for key in keys])
    change = np.flatnonzero((rows[:, 1:] != rows[:, :-1]).any(axis=0)) + 1
    return np.concatenate(([0], change, [len(members)])), members
