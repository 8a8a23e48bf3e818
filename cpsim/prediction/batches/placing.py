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
PATIENT, WARM = 200, 0.2
"""With more changes than these, a plan may become more uneven by such a share at first, and by less and less."""
POWER: Final = 8
"""How uneven ranks are is the norm of their times with this exponent: of 1 the mean, of infinity the busiest."""
ENOUGH: Final = 2e-3
"""Over a bound that no plan is below, at which none better is looked for."""


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
    return Placed(level, *_placed(np.argsort(-level, kind="stable"), level, *_columns(costs)))


def _columns(costs: Costs) -> tuple[object, ...]:
    cap = 0 if costs.alone else costs.cap
    return costs.added_s, costs.tokens, costs.num_ranks, costs.sizes, costs.pack_s, cap


@compiled()
def _placed(order, level, added_s, tokens, num_ranks, sizes, pack_s, cap):  # type: ignore[no-untyped-def]
    count = len(level)
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
            p, more = _packed(g, tokens[at, d], num_packs, cap, first, last, free, after), added_s[at, d]
            if p == num_packs:
                num_packs, more = num_packs + 1, more + pack_s[at]
            group[d], pack[d] = g, p
            _sink(ends, number, ends[0] + more)
            i += 1
        for k in range(len(ends)):
            load[number[k] * size : (number[k] + 1) * size] = ends[k]
    return group, pack, load


@compiled()
def _packed(group, tokens, new, cap, first, last, free, after):  # type: ignore[no-untyped-def]
    """Puts a document into the first pack of a group that has room, or else into a new one, whose number is `new`."""
    p = first[group] if cap else -1
    while p >= 0 and free[p] < tokens:
        p = after[p]
    if p < 0:
        p = new
        free[p], after[p] = cap, -1
        if first[group] < 0:
            first[group] = p
        else:
            after[last[group]] = p
        last[group] = p
    free[p] -= tokens
    return p


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


def search(costs: Costs, placements: int, changes: int) -> Placed:
    """The best plan of some.

    Every document goes to the smallest group on which it takes no longer than some time, which is looked for on a
    logarithmic scale. Then documents of the busiest rank get larger groups. From the best placement on, single
    documents are moved, mostly those of the busiest rank; at first plans may become slower by that.

    Args:
        costs: of documents.
        placements: that are tried.
        changes: plans that are tried from there on.
    """
    alone_s = costs.alone_s()
    alone_s[costs.least > np.arange(len(costs.sizes))[:, None]] = np.inf
    at = np.arange(alone_s.shape[1])
    mean_s = float((alone_s[costs.least, at] * costs.sizes[costs.least]).sum() / costs.num_ranks)
    enough_s = bound_s(costs) * (1 + ENOUGH)
    found: dict[float, Placed] = {}
    for step in (None, *FINE):
        best = min(found, key=lambda exponent: found[exponent].time_s) if found else 0.0
        for exponent in COARSE if step is None else (best - step, best + step):
            if len(found) < placements and all(placed.time_s > enough_s for placed in found.values()):
                found[exponent] = _within(costs, alone_s, mean_s * 2.0**-exponent)
    start = min(found.values(), key=lambda placed: placed.time_s)
    start = _widened(costs, alone_s, start, placements - len(found), enough_s)
    return Placed(*_changed(start.level, start.group, changes, enough_s, costs.least, *_columns(costs)))


def bound_s(costs: Costs) -> float:
    """Seconds that no plan is below: those of the longest document, or of all on as few ranks as pays, evenly."""
    share = 1.0 if costs.alone else costs.tokens / costs.cap
    least_s = costs.added_s + costs.pack_s[:, None] * share
    forbidden = costs.least > np.arange(len(costs.sizes))[:, None]
    work_s = np.where(forbidden, np.inf, least_s * costs.sizes[:, None]).min(axis=0).sum() / costs.num_ranks
    return max(float(work_s), float(np.where(forbidden, np.inf, costs.alone_s()).min(axis=0).max()))


def _widened(costs: Costs, alone_s: Floats, best: Placed, placements: int, enough_s: float) -> Placed:
    """With the next larger groups for the longest documents of the busiest rank, one by one, where that helps."""
    tried: set[tuple[int, int]] = set()
    for _ in range(placements):
        level, rank = best.level, int(best.load_s.argmax())
        mine = np.flatnonzero((best.group == rank // costs.sizes[level]) & (level + 1 < len(costs.sizes)))
        open_ = [d for d in mine.tolist() if (d, int(level[d])) not in tried]
        if not open_ or best.time_s <= enough_s:
            break
        longest = max(open_, key=lambda d: alone_s[level[d], d])
        tried.add((longest, int(level[longest])))
        wider = level.copy()
        wider[longest] += 1
        best = min(best, place(costs, wider), key=lambda placed: placed.time_s)
    return best


def _within(costs: Costs, alone_s: Floats, limit_s: float) -> Placed:
    """The placement of documents that take at most so long by themselves."""
    fits = np.isfinite(alone_s) & (alone_s <= limit_s)
    return place(costs, np.where(fits.any(axis=0), fits.argmax(axis=0), alone_s.argmin(axis=0)))


@compiled()
def _changed(level, group, changes, enough_s, least, added_s, tokens, num_ranks, sizes, pack_s, cap):  # type: ignore[no-untyped-def]
    """The best plan found by moves of single documents, some of which make it slower for a while; chance is always the
    same."""
    columns = added_s, tokens, num_ranks, sizes, pack_s, cap
    count, chance = len(level), np.array([88172645463325252], np.uint64)
    pack, load = _loaded(level, group, *columns)
    best, scale = (level, group, pack, load), load.max()
    uneven = ((load / scale) ** POWER).sum()
    mine = np.empty(count, np.int64)
    for i in range(changes):
        if best[3].max() <= enough_s:
            break
        busiest, num_mine = load.argmax(), 0
        for d in range(count):
            if busiest // sizes[level[d]] == group[d]:
                mine[num_mine] = d
                num_mine += 1
        new_level, new_group = level.copy(), group.copy()
        for _ in range(1 + _below(chance, 2)):
            d = _below(chance, count) if _below(chance, 4) == 0 else mine[_below(chance, num_mine)]
            new_level[d] = at = least[d] + _below(chance, len(sizes) - least[d])
            idlest = _below(chance, 2) == 0
            new_group[d] = load.argmin() // sizes[at] if idlest else _below(chance, num_ranks // sizes[at])
        new_pack, new_load = _loaded(new_level, new_group, *columns)
        slack = 1 + WARM * (1 - i / changes) * (changes > PATIENT)
        new_uneven = ((new_load / scale) ** POWER).sum()
        if new_uneven <= uneven * slack**POWER:
            level, group, pack, load, uneven = new_level, new_group, new_pack, new_load, new_uneven
        if load.max() < best[3].max():
            best = level, group, pack, load
    return best


@compiled()
def _loaded(level, group, added_s, tokens, num_ranks, sizes, pack_s, cap):  # type: ignore[no-untyped-def]
    """Packs of documents whose groups are given, and what ranks take."""
    count, start = len(level), np.zeros(len(sizes) + 1, np.int64)
    start[1:] = np.cumsum(num_ranks // sizes)
    load, pack = np.zeros(num_ranks), np.empty(count, np.int64)
    free, after = np.empty(count, np.int64), np.empty(count, np.int64)
    first, last, num_packs = np.full(start[-1], -1), np.full(start[-1], -1), 0
    for d in range(count):
        at, size = level[d], sizes[level[d]]
        g = start[at] + group[d]
        p, more = _packed(g, tokens[at, d], num_packs, cap, first, last, free, after), added_s[at, d]
        if p == num_packs:
            num_packs, more = num_packs + 1, more + pack_s[at]
        pack[d] = p
        load[group[d] * size : (group[d] + 1) * size] += more
    return pack, load


@compiled()
def _below(state, count):  # type: ignore[no-untyped-def]
    """A pseudo-random number from 0 to ``count`` - 1 (Marsaglia 2003, xorshift)."""
    state[0] ^= state[0] << np.uint64(13)
    state[0] ^= state[0] >> np.uint64(7)
    state[0] ^= state[0] << np.uint64(17)
    return np.int64(state[0] % np.uint64(count))
