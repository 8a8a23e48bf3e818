"""DistCA's communication-aware greedy scheduler: as released, and as its paper describes it.

Servers with less work than the mean take items from those with more, one after the other, the emptiest first: always
that item, or part of one, which moves the fewest bytes for its work.

Reference: DistCA (arXiv 2510.18121), section 4.2 and appendix B; hao-ai-lab/DistCA at 2afd219, planner/planner.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.strategies.distca.items import (
    DOCUMENT,
    HEAD,
    HEADS,
    SERVER,
    TAIL,
    TAILS,
    lay_out,
    most_to_split,
    pairs_of,
    pairs_of_two,
    split,
    tasks_of,
)
from cpsim.strategies.distca.tasks import Tasks, TokenBytes

Floats = NDArray[np.float64]

GRAIN: Final = 128
"""Tokens that the paper's items are multiples of: a tile of the kernel."""


def released(
    documents: Ints,
    num_servers: int,
    sizes: TokenBytes,
    tolerance: float,
    offset: Ints | int = 0,
    homes: int | None = None,
) -> Tasks:
    """The released scheduler: work is pairs, parts are of any size, every item is charged the keys of its document.

    A recipient takes items until it lacks no more than ``tolerance`` of the mean; what is left over stays on donors,
    whose work no rule bounds.

    Args:
        documents: lengths [tokens], ``[D]``, of one nano-batch.
        num_servers: n.
        sizes: only the ratio of ``q`` to ``kv`` matters. Under pipeline parallelism the code charges keys with
            ``(heads / kv_heads)²`` times their bytes.
        tolerance: of the mean.
        offset: see ``lay_out``.
        homes: servers that documents lie on, the first ones; None: all.
    """
    items = lay_out(documents, homes or num_servers, offset)
    work = np.bincount(items[:, SERVER], [float(pairs_of(item)) for item in items], num_servers)
    surplus = work - work.sum() / num_servers
    recipients = np.argsort(surplus, kind="stable")
    recipients = recipients[surplus[recipients] < 0]
    threshold = work.sum() / num_servers * tolerance
    ends = np.asarray(documents + offset, np.int64)
    count, items = _released(items, ends, surplus, recipients, threshold, sizes.q, sizes.kv)
    return tasks_of(items[:count])


@compiled()
def _released(items, ends, surplus, recipients, threshold, q_bytes, kv_bytes):  # type: ignore[no-untyped-def]
    count = len(items)
    for recipient in recipients:
        need = -surplus[recipient]
        while need > threshold:
            best, best_bytes, most = -1, np.inf, 0.0
            for i in range(count):
                work, spare = pairs_of(items[i]), surplus[items[i, SERVER]]
                if spare <= 0 or work <= 0:
                    continue
                movable = min(spare, need, float(work))
                keys = ends[items[i, DOCUMENT]] + 1
                per_pair = (movable / pairs_of_two(items[i]) * q_bytes + keys * kv_bytes) / movable
                if per_pair < best_bytes:
                    best, best_bytes, most = i, per_pair, movable
            if best < 0:
                break
            donor, moved = items[best, SERVER], float(pairs_of(items[best]))
            if most >= moved:
                items[best, SERVER] = recipient
            else:
                queries = min(int(most / pairs_of_two(items[best])), most_to_split(items[best]))
                if queries <= 0:
                    break
                moved = float(queries * pairs_of_two(items[best]))
                items = split(items, count, best, queries, recipient)
                count += 1
            surplus[donor] -= moved
            surplus[recipient] += moved
            need -= moved
    return count, items


@dataclass(frozen=True, slots=True, eq=False)
class TimeTable:
    """Measured latencies of core attention: some queries after some context, both multiples of a kernel's tile."""

    queries: Floats
    """``[Q]``, ascending."""
    context: Floats
    """Keys ahead of the first query, ``[K]``, ascending from 0."""
    seconds: Floats
    """``[Q, K]``, in any unit."""

    @property
    def pairs_per_s(self) -> float:
        """The highest throughput that was measured: beyond the grid kernels are saturated."""
        pairs = self.queries[:, None] * (self.context + (self.queries[:, None] + 1) / 2)
        return float((pairs / self.seconds).max())

    def arrays(self) -> tuple[Floats, Floats, Floats, float]:
        """Columns as compiled code takes them."""
        return self.queries, self.context, self.seconds, self.pairs_per_s


def as_in_paper(
    documents: Ints, num_servers: int, sizes: TokenBytes, tolerance: float, grid: TimeTable, offset: Ints | int = 0
) -> Tasks:
    """The paper's scheduler: work is measured latency, parts are multiples of 128 tokens, an item is charged the keys
    that it needs. Stops where servers are within the tolerance, or no move takes work off any more.

    The paper's grid has query by key lengths; ours has the context instead, since queries have at least as many keys.
    Its second rule to stop, that the work for a byte "stops improving", is read as: no part of 128 tokens fits.

    Args:
        documents, num_servers, sizes, tolerance, offset: as of ``released``; both sizes matter.
        grid: latencies.
    """
    items = lay_out(documents, num_servers, offset)
    count, items = _paper(items, num_servers, tolerance, grid.arrays(), sizes.q, sizes.kv)
    return tasks_of(items[:count])


@compiled()
def latency(grid: Any, first: Any, tokens: Any) -> Any:
    """Seconds of a range of queries: between four points of the grid, or saturated beyond it."""
    queries, context, seconds, pairs_per_s = grid
    if tokens <= 0:
        return 0.0
    if tokens > queries[-1] or first > context[-1]:
        return tokens * (first + (tokens + 1) / 2) / pairs_per_s
    i = min(max(np.searchsorted(queries, tokens) - 1, 0), len(queries) - 2)
    j = min(max(np.searchsorted(context, first) - 1, 0), len(context) - 2)
    x = max(tokens - queries[i], 0.0) / (queries[i + 1] - queries[i])
    y = (first - context[j]) / (context[j + 1] - context[j])
    low = seconds[i, j] * (1 - y) + seconds[i, j + 1] * y
    return low * (1 - x) + (seconds[i + 1, j] * (1 - y) + seconds[i + 1, j + 1] * y) * x


@compiled()
def _seconds(grid, item):  # type: ignore[no-untyped-def]
    return latency(grid, item[HEAD], item[HEADS]) + latency(grid, item[TAIL], item[TAILS])


@compiled()
def _part(item, work, movable):  # type: ignore[no-untyped-def]
    """Queries of head and of tail, each, that a part of at most some work has; all of them: -1."""
    if movable >= work:
        return -1
    most = most_to_split(item)
    return int(most * movable / work) // GRAIN * GRAIN


@compiled()
def _efficiency(item, work, movable, q_bytes, kv_bytes):  # type: ignore[no-untyped-def]
    """Work for every byte of the best part of an item."""
    queries = _part(item, work, movable)
    if queries == 0:
        return 0.0
    if queries < 0:
        end = item[TAIL] + item[TAILS] if item[TAILS] > 0 else item[HEAD] + item[HEADS]
        return work / ((item[HEADS] + item[TAILS]) * q_bytes + end * kv_bytes)
    begin = item[TAIL] if item[TAILS] > 0 else item[HEAD] + (item[HEADS] + 1) // 2
    taken = work * queries / most_to_split(item)
    return taken / (2 * queries * q_bytes + (begin + queries) * kv_bytes)


@compiled()
def _paper(items, num_servers, tolerance, grid, q_bytes, kv_bytes):  # type: ignore[no-untyped-def]
    count, work, load = len(items), np.zeros(len(items)), np.zeros(num_servers)
    for i in range(count):
        work[i] = _seconds(grid, items[i])
        load[items[i, SERVER]] += work[i]
    mean = load.mean()
    for recipient in np.argsort(load, kind="mergesort"):
        while mean - load[recipient] > tolerance * mean:
            best, best_efficiency = -1, 0.0
            for i in range(count):
                movable = min(load[items[i, SERVER]] - mean, mean - load[recipient])
                if movable > 0 and work[i] > 0:
                    efficiency = _efficiency(items[i], work[i], movable, q_bytes, kv_bytes)
                    if efficiency > best_efficiency:
                        best, best_efficiency = i, efficiency
            if best < 0:
                break
            donor, before = items[best, SERVER], work[best]
            queries = _part(items[best], before, min(load[donor] - mean, mean - load[recipient]))
            load[donor] -= before
            if queries < 0:
                items[best, SERVER] = recipient
                load[recipient] += before
                continue
            items = split(items, count, best, queries, recipient)
            work = np.append(work, _seconds(grid, items[count]))
            work[best] = _seconds(grid, items[best])
            load[donor] += work[best]
            load[recipient] += work[count]
            count += 1
    return count, items
