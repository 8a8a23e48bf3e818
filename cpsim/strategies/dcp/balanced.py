"""Variant ``cpsim``: tokens first, evenly to within a block; then computation, evenly to within ``eps``.

Token blocks fill ranks in two orders, as they come and folded like a zigzag. From each, blocks are swapped between
nodes, then between the GPUs of a node, where that lessens what the busiest receive and send while computation stays
with its queries; then computation alone moves, in bundles that are halved from whole rows to single blocks, until no
part has more than its share. Of what the starts lead to, that is kept which takes the least time
(``cpsim.strategies.dcp.timing``).

Reference: DCP (arXiv 2510.10620), section 4.2, for the problem. Differs: no hypergraph solver; two constraints are two
searches; what is minimized is not the total, but squares of what every node and GPU receives and sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.schedule.schedule import Pass
from cpsim.strategies.dcp.blocks import Blocks, Floats, Placement, judge
from cpsim.strategies.dcp.search import OUTSIDE, move_bundles, swap_homes, tally
from cpsim.strategies.dcp.timing import Rates, stage_by_time

NETWORK: Final = 8
"""Bytes over NVLink in the time of one over a GPU's part of the network: 450 over 50 GB/s for an H100, rounded."""
RESULT: Final = 4
"""Weight of a byte of results against one of inputs, which computation can hide."""
TRIES: Final = 1000
"""Swaps that are tried for every token block."""
EVENER: Final = 0.2
"""Share of ``eps``: how even computation is tried to be, too, where it decides the time."""
AIM: Final = 0.98
"""Share of ``eps``: where computation begins to have a price, which leaves a little beyond."""
SWEEPS: Final = 3
"""Over bundles of one size, at most."""
PRICE: Final = (300.0, 100.0, 1e6)
"""Price of a share of computation too much, in squares of all keys and values: when homes are swapped, when computation
moves, and when that must fit."""


def place(blocks: Blocks, shape: tuple[int, int], rates: Rates, eps: float, num_stages: int, seed: int) -> Placement:
    """Homes and workers with even tokens and computation, and little traffic.

    Args:
        blocks: what to place.
        shape: (nodes, GPUs of each).
        rates: of the machine.
        eps: computation of a rank over the mean, at most, less 1, as far as blocks allow it.
        num_stages: at most.
        seed: of the swaps that are tried.
    """
    nodes, gpus = shape
    starts: list[tuple[Ints, Ints, bool]] = []
    for order in (np.arange(len(blocks)), _folded(blocks)):
        home = even_fill(blocks.tokens, nodes * gpus, order)
        anchor = _anchors(blocks, home // gpus if nodes > 1 else home)
        both = [blocks.query] if np.array_equal(anchor, blocks.query) else [blocks.query, anchor]
        starts += [(home, goes_with, swaps) for goes_with in both for swaps in (True, False)]
    found = [_Search(blocks, anchor, shape, eps, seed).run(home, swaps) for home, anchor, swaps in starts]
    costs = [cost(blocks, placement, shape, rates, eps, num_stages) for placement in found]
    best = min(range(len(found)), key=costs.__getitem__)
    home, anchor, swaps = starts[best]
    evener = _Search(blocks, anchor, shape, eps * EVENER, seed).run(home, swaps)
    return evener if cost(blocks, evener, shape, rates, eps, num_stages) < costs[best] else found[best]


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


def _anchors(b: Blocks, home: Ints) -> Ints:
    """Token block that every computation block may go with, ``[C]``: that of its queries, or of its keys where these
    are many that no other queries of a part see, so that the queries may be less to move.

    Args:
        b: what is placed.
        home: part of every token block.
    """
    pair = np.unique(b.query * len(b) + b.key)
    query, key = pair // len(b), pair % len(b)
    away = home[query] != home[key]
    readers, parts = np.zeros((2, len(b), home.max() + 1), np.int64)
    np.add.at(readers, (key, home[query]), 1)
    alone = away & (readers[key, home[query]] == 1)
    saved = np.bincount(query[alone], b.tokens[key[alone]], len(b)) * sum((*b.key_bytes("fwd"), *b.key_bytes("bwd")))
    parts[query[away], home[key[away]]] = 1
    spent = parts.sum(axis=1) * b.tokens * sum((*b.query_bytes("fwd"), *b.query_bytes("bwd")))
    return np.where((saved > spent)[b.query], b.key, b.query)


def cost(
    blocks: Blocks, placement: Placement, shape: tuple[int, int], rates: Rates, eps: float, num_stages: int
) -> tuple[float, float]:
    """Computation beyond what a rank may have, in whole percents, and seconds of both passes."""
    quality = judge(blocks, placement, shape[0] * shape[1], shape[1], "fwd")
    beyond = round(max(quality.imbalance - 1 - eps, 0.0), 2)
    passes: tuple[Pass, ...] = ("fwd", "bwd")
    return beyond, sum(stage_by_time(blocks, placement, shape, rates, num_stages, p)[1] for p in passes)


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
    """Computation that goes with some token blocks at first; loads are in shares, what a rank would have if all had
    the same.

    Args:
        blocks, shape, eps, seed: as of ``place``.
        anchor: token block that every computation block goes with, at first.
    """

    def __init__(self, blocks: Blocks, anchor: Ints, shape: tuple[int, int], eps: float, seed: int) -> None:
        self.anchor = anchor
        self.blocks, self.shape, self.eps, self.seed = blocks, shape, AIM * eps, seed
        self.load = blocks.area * (shape[0] * shape[1] / max(blocks.area.sum(), 1))
        self.units = blocks.units
        queries, keys = (np.add(side("fwd"), side("bwd")) for side in (blocks.query_bytes, blocks.key_bytes))
        self.bytes_in, self.bytes_out = (blocks.unit_bytes(q, k) * 1.0 for q, k in zip(queries, keys, strict=True))
        self.keys = (blocks.tokens * (blocks.num_groups // blocks.groups_per_kv) * sum(keys)).astype(np.float64)

    def run(self, start: Ints, swaps: bool) -> Placement:
        """Improve a start, the rank of every token block, with homes swapped or as they are."""
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
        b, mine = self.blocks, part.mine[part.home[self.anchor[part.mine]] != OUTSIDE]
        here = mine[self.anchor[mine] == b.query[mine]]
        seen = np.unique(b.query[here] * len(b) + b.key[here])
        row_start = np.searchsorted(seen, np.arange(len(b) + 1) * len(b))
        movable = np.flatnonzero(part.home != OUTSIDE)
        if len(np.unique(part.home[movable])) < 2:
            return
        held = np.bincount(rank, b.tokens, self.shape[0] * self.shape[1]).astype(np.int64)
        load = np.bincount(self.anchor[mine], self.load[mine], len(b))
        rng = np.random.default_rng(self.seed)
        pairs = movable[rng.integers(len(movable), size=(TRIES * len(movable), 2))]
        swap_homes(
            part.home,
            rank,
            held,
            b.tokens.max(),
            b.tokens,
            row_start,
            seen % len(b),
            self.keys,
            load,
            part.cap,
            self.price(part, PRICE[0]),
            pairs,
            1 - rng.random(len(pairs)),
        )

    def compute(self, part: _Part) -> Ints:
        """Part of every computation block of ``part.mine``: that of its queries, and then where it costs least."""
        b, mine = self.blocks, part.mine
        if not len(mine):
            return np.zeros(0, np.int64)
        load, home = self.load[mine], np.tile(np.repeat(part.home, b.num_groups), 2)
        away, back = self.bytes_in, RESULT * np.where(home == OUTSIDE, NETWORK, 1) * self.bytes_out
        worker = self.first_guess(part, load)
        order = np.empty(len(b), np.int64)
        order[np.lexsort((np.arange(len(b)), part.home))] = np.arange(len(b))
        sides = np.ascontiguousarray(self.units[:, mine])
        state = tally(worker, sides, home, away, back, load, part.num_parts)
        bundles = self.bundles(order[b.query[mine]], order[b.key[mine]], b.group[mine])
        for price in PRICE[1:]:
            if price == PRICE[2] and state[3].max() <= part.cap:
                break
            how = part.cap, self.price(part, price), SWEEPS
            move_bundles(*bundles, worker, state, sides, home, away, back, load, *how)
        return worker

    def first_guess(self, part: _Part, load: Floats) -> Ints:
        """With what it goes with; rows for which that is outside go to the parts with the least load."""
        query = self.blocks.query[part.mine]
        worker = part.home[self.anchor[part.mine]]
        held = np.bincount(worker[worker != OUTSIDE], load[worker != OUTSIDE], part.num_parts)
        for row in np.unique(query[worker == OUTSIDE]):
            alone = (query == row) & (worker == OUTSIDE)
            worker[alone] = held.argmin()
            held[held.argmin()] += load[alone].sum()
        return worker

    def bundles(self, query: Ints, key: Ints, group: Ints) -> tuple[Ints, Ints]:
        """Ways to bundle computation blocks, as ``move_bundles`` takes them: rows times runs of keys, and squares, of
        all groups and of one; from all keys down to single blocks."""
        longest = int(np.ceil(np.log2(max(key.max() + 1, 2))))
        sizes = [(q, 1 << k) for k in range(longest, -1, -1) for q in ((1, 1 << k) if k else (1,))]
        both = np.array(sizes)[:, :, None]
        pair = query // both[:, 0] * (key.max() + 1) + key // both[:, 1]
        ways = np.stack([pair, pair * (group.max() + 1) + group], axis=1).reshape(-1, len(query))
        members = np.argsort(ways, axis=1, kind="stable")
        return np.take_along_axis(ways, members, axis=1), members

    def price(self, part: _Part, factor: float) -> float:
        """Price of the square of a load beyond the cap, in bytes squared."""
        share = float(self.keys.sum()) * part.num_parts / (self.shape[0] * self.shape[1])
        return factor * share**2
