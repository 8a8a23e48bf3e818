"""The best plan of a small batch, by trying all: every document on every group of every size, in every pack."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsim.prediction.batches.placing import Costs
from cpsim.runtime.compiled import compiled


def best_time_s(costs: Costs, upper_s: float) -> float:
    """Seconds of the busiest rank under the best plan of all: by branch and bound, the longest documents first.

    Args:
        costs: of documents; ten of them on eight ranks take a second.
        upper_s: of a plan that is known.
    """
    size = costs.sizes
    group_start = np.concatenate(([0], np.cumsum(costs.num_ranks // size)))
    alone_s = costs.alone_s()
    alone_s[costs.least > np.arange(len(size))[:, None]] = np.inf
    cheapest = (alone_s * size[:, None]).min(axis=0) if costs.alone else _least_added(costs)
    ahead = np.append(np.cumsum(cheapest[::-1])[::-1], 0.0) / costs.num_ranks
    cap = 0 if costs.alone else costs.cap
    state = _State(costs.num_ranks, int(group_start[-1]), costs.tokens.shape[1])
    found: float = _best(
        0, upper_s, costs.added_s, costs.tokens, costs.pack_s, costs.least, size, group_start, ahead, cap, *state.arrays
    )
    return found


class _State:
    """Loads of ranks, packs of groups, and free tokens of packs, while the search goes down."""

    def __init__(self, num_ranks: int, num_groups: int, num_documents: int) -> None:
        self.arrays = (
            np.zeros(num_ranks),
            np.zeros(num_groups, np.int64),
            np.zeros((num_groups, num_documents), np.int64),
        )


def _least_added(costs: Costs) -> NDArray[np.float64]:
    """Rank-seconds that every document adds at least, ``[D]``."""
    allowed = np.where(costs.least <= np.arange(len(costs.sizes))[:, None], costs.added_s, np.inf)
    return np.asarray((allowed * costs.sizes[:, None]).min(axis=0))


@compiled()
def _best(d, upper, added, tokens, pack_s, least, sizes, group_start, ahead, cap, load, packs, free):  # type: ignore[no-untyped-def]
    """The least time of the busiest rank, below ``upper`` or ``upper`` itself, with documents from ``d`` on open."""
    if d == tokens.shape[1]:
        return min(upper, load.max())
    if max(load.max(), load.mean() + ahead[d]) >= upper - 1e-12:
        return upper
    for level in range(least[d], len(sizes)):
        size = sizes[level]
        for g in range(len(load) // size):
            if _alike(load, sizes, level, g):
                continue
            at = group_start[level] + g
            ranks = slice(g * size, (g + 1) * size)
            for p in range(packs[at] + 1):
                new = p == packs[at]
                if not new and (cap == 0 or free[at, p] < tokens[level, d]):
                    continue
                more = added[level, d] + (pack_s[level] if new else 0.0)
                before = load[ranks].copy()
                packs[at] += new
                was = free[at, p]
                free[at, p] = (cap if new else was) - tokens[level, d]
                load[ranks] += more
                upper = _best(
                    d + 1, upper, added, tokens, pack_s, least, sizes, group_start, ahead, cap, load, packs, free
                )
                load[ranks] = before
                packs[at] -= new
                free[at, p] = was
    return upper


@compiled()
def _alike(load, sizes, level, g):  # type: ignore[no-untyped-def]
    """Whether a group lies in an idle block of ranks whose neighbour in the same larger block is idle, too: then plans
    with the two exchanged take as long."""
    first = g * sizes[level]
    for above in range(level, len(sizes)):
        size = sizes[above]
        block = first // size
        parent = sizes[above + 1] if above + 1 < len(sizes) else len(load)
        if load[block * size : (block + 1) * size].max() > 0:
            return False
        neighbour = (block - 1) * size
        if block * size % parent and load[neighbour : neighbour + size].max() == 0:
            return True
    return False
