"""Other planners of batches, by what their papers say, with cpsim's prices: baselines like FlexSP, WLB-LLM and DCP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappush, heapreplace
from typing import Final

import numpy as np

from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints
from cpsim.prediction.batches.placing import Costs
from cpsim.prediction.batches.plan import costs_of
from cpsim.prediction.batches.prices import Prices
from cpsim.strategies.distca.packing import wlb_pack
from studies.plan.timetable import Timetable, Turn

MORE: Final = 4
"""Microbatches beyond the fewest that are tried."""
BISECTIONS: Final = 12
WIDER: Final = 4
"""Groups of WLB-LLM are tried up to so many times as large as the longest document needs."""


def wlb_tables(prices: Prices, lengths: Sequence[int]) -> Iterator[Timetable]:
    """WLB-LLM's packing at every size of groups: documents to microbatches of about equal work, each at most as long as
    memory allows, and microbatches to groups, which never wait for each other.

    Work of a document is x² + x, as DistCA's "WLB-ideal" has it, where x is its length over that at which attention
    takes as long as all else.

    Reference: WLB-LLM (arXiv 2503.17924), section 4; cpsim.strategies.distca.packing.
    """
    found = np.asarray(lengths, np.int64)
    able = [size for size in prices.sizes().tolist() if found.max() <= prices.most_tokens * size]
    for size in [size for size in able if size <= WIDER * able[0]]:
        cap, count = prices.most_tokens * size, prices.num_ranks // size
        fewest = -(-int(found.sum()) // (cap * count))
        for microbatches in range(fewest, fewest + MORE + 1):
            if microbatches * count > len(found):
                break
            group = wlb_pack(found, microbatches * count, int(found.sum()) // (microbatches * count), even_at(prices))
            if np.bincount(group, found, microbatches * count).max() <= cap:
                yield _dealt(prices.num_ranks, size, found, group)
                break


def even_at(prices: Prices) -> int:
    """Tokens of the document whose attention takes as long as all else, on the smallest group that holds it."""
    for size in prices.sizes().tolist():
        column, rest = prices.column(size), prices.rest_table()
        longer = column.seconds > rest.of((column.length // size).astype(np.int64))
        if longer.any():
            return int(column.length[longer.argmax()])
    return int(column.length[-1])


def _dealt(num_ranks: int, size: int, lengths: Ints, group: Ints) -> Timetable:
    """Microbatches to groups of ranks, those with the most work first, each to the group with the least."""
    packs = [np.flatnonzero(group == g) for g in range(int(group.max()) + 1)]
    work = [float((lengths[pack].astype(float) ** 2).sum()) for pack in packs]
    load, turns = np.zeros(num_ranks // size), list[Turn]()
    for g in np.argsort(work)[::-1].tolist():
        if len(packs[g]):
            place = int(load.argmin())
            load[place] += work[g]
            turns.append(Turn(place * size, size, tuple(packs[g].tolist())))
    return Timetable(num_ranks, (tuple(turns),))


def flexsp_tables(prices: Prices, lengths: Sequence[int]) -> Iterator[Timetable]:
    """FlexSP's plan, for several numbers of microbatches: documents of like length share a microbatch, in which every
    rank is in one group, and the sizes of groups are such that the slowest ends as early as can be.

    Reference: FlexSP (arXiv 2412.01523), sections 4 and 5. Differs: its integer program is replaced by bisection on the
    time, with documents to the smallest groups that keep to it, the longest first; costs are cpsim's.
    """
    found = np.asarray(lengths, np.int64)
    order = np.argsort(-found, kind="stable")
    costs = costs_of(prices, found[order], prices.sizes(), alone=False)
    fewest = -(-int(found.sum()) // (prices.most_tokens * prices.num_ranks))
    for microbatches in range(fewest, fewest + MORE + 1):
        ends = np.cumsum(found[order])
        chunk = np.minimum(ends * microbatches // (ends[-1] + 1), microbatches - 1)
        parts = [np.flatnonzero(chunk == m) for m in range(microbatches)]
        try:
            yield Timetable(
                prices.num_ranks,
                tuple(_microbatch(costs, part, order[part]) for part in parts if len(part)),
            )
        except InfeasibleError:
            continue


def _microbatch(costs: Costs, documents: Ints, numbers: Ints) -> tuple[Turn, ...]:
    """Groups of one microbatch, each with its documents.

    Raises:
        InfeasibleError: ranks do not hold them.
    """
    alone = costs.alone_s()[:, documents]
    low, high, best = 0.0, float(alone.max() * len(documents)), None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2 if best is not None else high
        groups = _groups(costs, documents, middle)
        if groups is None and best is None:
            raise InfeasibleError("flexsp: documents do not fit into one microbatch")
        low, high = (middle, high) if groups is None else (low, middle)
        best = best if groups is None else groups
    assert best is not None
    turns, first = list[Turn](), 0
    for level, members in sorted(best, key=lambda group: -group[0]):
        turns.append(Turn(first, int(costs.sizes[level]), tuple(numbers[members].tolist())))
        first += int(costs.sizes[level])
    return tuple(turns)


def _groups(costs: Costs, documents: Ints, limit: float) -> list[tuple[int, list[int]]] | None:
    """Sizes of groups and their documents, where each group ends within a time; None where ranks do not suffice."""
    fits = (costs.alone_s()[:, documents] <= limit) & (costs.least[documents] <= np.arange(len(costs.sizes))[:, None])
    if not fits.any(axis=0).all():
        return None
    level, left, found = fits.argmax(axis=0), costs.num_ranks, list[tuple[int, list[int]]]()
    for at in range(len(costs.sizes) - 1, -1, -1):
        here = np.flatnonzero(level == at)
        added, tokens = costs.added_s[at, documents[here]].tolist(), costs.tokens[at, documents[here]].tolist()
        ends, held, own = list[tuple[float, int]](), list[int](), list[list[int]]()
        for i, more, filled in zip(here.tolist(), added, tokens, strict=True):
            end, place = ends[0] if ends else (limit, -1)
            if end + more <= limit and held[place] + filled <= costs.cap:
                heapreplace(ends, (end + more, place))
                held[place] += filled
                own[place].append(i)
                continue
            left -= int(costs.sizes[at])
            if left < 0:
                return None
            heappush(ends, (float(costs.pack_s[at]) + more, len(own)))
            held.append(filled)
            own.append([i])
        found += [(at, members) for members in own]
    return found


def dcp_seconds(prices: Prices, lengths: Sequence[int]) -> float:
    """Seconds of a batch where DCP places attention of every microbatch on all ranks, in blocks: as many microbatches
    as memory asks for, documents as they come, with as many tokens for each rank of a microbatch.

    Args:
        prices: with strategy ``dcp``.
        lengths: tokens of every document.
    """
    size, ends = prices.num_ranks, np.cumsum(lengths)
    count = -(-int(ends[-1]) // (prices.most_tokens * size))
    part = np.minimum(ends * count // (ends[-1] + 1), count - 1)
    packs = [tuple(np.asarray(lengths)[part == m].tolist()) for m in range(count)]
    return float(prices.seconds([pack for pack in packs if pack], size).sum())


def best_of(prices: Prices, lengths: Sequence[int], tables: Iterator[Timetable]) -> Timetable:
    """The timetable that is fastest by the planner's prices.

    Raises:
        InfeasibleError: there is none.
    """
    found = list(tables)
    if not found:
        raise InfeasibleError("no plan fits into memory")
    return min(found, key=lambda table: table.time_s([priced(prices, lengths, turns) for turns in table.rounds]))


def priced(prices: Prices, lengths: Sequence[int], turns: Sequence[Turn]) -> list[float]:
    """Seconds of turns by the table of prices."""
    rest, known = prices.rest_table(), np.asarray(lengths, np.int64)

    def seconds(turn: Turn) -> float:
        column, own = prices.column(turn.size), known[list(turn.documents)]
        return float(column.pack_s + column.of(own).sum() + rest.of(np.array([-(-own.sum() // turn.size)]))[0])

    return [seconds(turn) for turn in turns]
