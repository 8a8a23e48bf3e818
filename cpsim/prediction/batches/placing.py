"""Documents of chosen group sizes on aligned groups of ranks, the largest first, in packs that memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.runtime.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COARSE: Final = (-np.inf, 0.0, 1.0, 2.0, 3.0, 4.0)
"""How far below the mean time of a rank documents are tried to be kept, in octaves; the first is no limit."""
FINE: Final = (0.5, 0.25, 0.125)
"""Steps around the best of these."""


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """What documents and packs take at every size of group; documents are the longest first."""

    num_ranks: int
    """Ranks that share the batch."""
    sizes: Ints
    """Ranks of a group, ascending, each a divisor of the next and of all ranks, ``[C]``."""
    tokens: Ints
    """Of a document on a rank, ``[C, D]``."""
    added_s: Floats
    """What a document adds to a pack, ``[C, D]``."""
    pack_s: Floats
    """What a pack takes besides, ``[C]``."""
    least: Ints
    """Index of the smallest size at which memory holds a document, ``[D]``."""
    cap: int
    """Tokens of a rank in a pack, at most."""
    alone: bool
    """Whether every document is a pack of its own."""

    def alone_s(self) -> Floats:
        """Seconds of every document as a pack of its own, ``[C, D]``."""
        return self.added_s + self.pack_s[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where documents are."""

    level: Ints
    """Index of the size of every document's group, ``[D]``."""
    group: Ints
    """Number of the group among those of its size, ``[D]``."""
    pack: Ints
    """Number of the pack, ``[D]``; those of larger groups come first."""
    load_s: Floats
    """Seconds of every rank, ``[R]``."""

    @property
    def time_s(self) -> float:
        """Seconds of the busiest rank."""
        return float(self.load_s.max())


def place(costs: Costs, level: Ints) -> Placed:
    """Documents to groups: the largest sizes first, in each the longest documents first, each to the group that ends
    first, into the first of its packs that has room.

    As sizes divide each other, all ranks of a group are free at the same time, so that none ever waits before the end.

    Args:
        costs: of documents.
        level: index of the size of every document's group, ``[D]``.
    """
    at, order = np.arange(len(level)), np.argsort(-level, kind="stable")
    added_s, tokens = costs.added_s[level, at], costs.tokens[level, at]
    free = 0 if costs.alone else costs.cap
    where = _placed(order, level, added_s, tokens, costs.num_ranks, costs.sizes, costs.pack_s, free)
    return Placed(level, *where)


@compiled()
def _placed(order, level, added_s, tokens, num_ranks, sizes, pack_s, cap):  # type: ignore[no-untyped-def]
    count = len(order)
    load, group, pack = np.zeros(num_ranks), np.empty(count, np.int64), np.empty(count, np.int64)
    free, after = np.empty(count, np.int64), np.empty(count, np.int64)
    num_packs, i = 0, 0
    while i < count:
        at = level[order[i]]
        size = sizes[at]
        ends = load[::size].copy()
        number = np.argsort(ends, kind="mergesort")  # a sorted list is a heap
        ends = ends[number]
        first, last = np.full(len(ends), -1), np.full(len(ends), -1)
        while i < count and level[order[i]] == at:
            d, g = order[i], number[0]
            p = first[g] if cap else -1
            while p >= 0 and free[p] < tokens[d]:
                p = after[p]
            more = added_s[d]
            if p < 0:
                p, more = num_packs, more + pack_s[at]
                free[p], after[p] = cap, -1
                if first[g] < 0:
                    first[g] = p
                else:
                    after[last[g]] = p
                last[g], num_packs = p, num_packs + 1
            free[p] -= tokens[d]
            group[d], pack[d] = g, p
            _sink(ends, number, ends[0] + more)
            i += 1
        for k in range(len(ends)):
            load[number[k] * size : (number[k] + 1) * size] = ends[k]
    return group, pack, load


@compiled()
def _sink(ends, number, value):  # type: ignore[no-untyped-def]
    """Gives the first entry of a heap a larger value."""
    at, moved, count = 0, number[0], len(ends)
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and ends[child + 1] < ends[child]:
            child += 1
        if ends[child] >= value:
            break
        ends[at], number[at] = ends[child], number[child]
        at = child
    ends[at], number[at] = value, moved


def search(costs: Costs, tries: int) -> Placed:
    """The best of some placements.

    Every document goes to the smallest group on which it takes no longer than some time. That time is looked for on a
    logarithmic scale; then documents of the busiest rank get larger groups one by one, as long as tries are left.

    Args:
        costs: of documents.
        tries: placements.
    """
    alone_s = costs.alone_s()
    alone_s[costs.least > np.arange(len(costs.sizes))[:, None]] = np.inf
    at = np.arange(alone_s.shape[1])
    mean_s = float((alone_s[costs.least, at] * costs.sizes[costs.least]).sum() / costs.num_ranks)
    found: dict[float, Placed] = {}
    for exponent in COARSE:
        _try(costs, alone_s, mean_s, exponent, found, tries)
    for step in FINE:
        centre = min(found, key=lambda exponent: found[exponent].time_s)
        for exponent in (centre - step, centre + step):
            _try(costs, alone_s, mean_s, exponent, found, tries)
    best = min(found.values(), key=lambda placed: placed.time_s)
    return _widened(costs, alone_s, best, tries - len(found))


def _try(costs: Costs, alone_s: Floats, mean_s: float, exponent: float, found: dict[float, Placed], tries: int) -> None:
    """The placement of documents that take at most 2**-exponent of the mean time, unless no tries are left."""
    if len(found) < tries and exponent not in found:
        fits = np.isfinite(alone_s) & (alone_s <= mean_s * 2.0**-exponent)
        level = np.where(fits.any(axis=0), fits.argmax(axis=0), alone_s.argmin(axis=0))
        found[exponent] = place(costs, level)


def _widened(costs: Costs, alone_s: Floats, best: Placed, tries: int) -> Placed:
    """With larger groups for the longest documents of busiest ranks, where that helps."""
    tried: set[tuple[int, int]] = set()
    while tries > 0:
        rank = int(best.load_s.argmax())
        level = best.level
        mine = np.flatnonzero((best.group == rank // costs.sizes[level]) & (level + 1 < len(costs.sizes)))
        open_ = [d for d in mine.tolist() if (d, int(level[d])) not in tried]
        if not open_:
            break
        longest = max(open_, key=lambda d: alone_s[level[d], d])
        tried.add((longest, int(level[longest])))
        wider = level.copy()
        wider[longest] += 1
        found, tries = place(costs, wider), tries - 1
        if found.time_s < best.time_s:
            best = found
    return best
