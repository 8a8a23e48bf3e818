"""Which rank holds which tokens: pure functions from a mask's documents to token range sets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import Ints, RangeSets, Slices
from cpsim.masks.stripes import stripe_bounds
from cpsim.masks.tiles import Tiles


def contiguous(num_tokens: int, num_ranks: int) -> RangeSets:
    """Rank r holds tokens ``[r N // P, (r + 1) N // P)``: equally many where P divides N."""
    bounds = np.arange(num_ranks + 1) * num_tokens // num_ranks
    return RangeSets(np.arange(num_ranks + 1), np.stack([bounds[:-1], bounds[1:]], axis=1))


def striped_shards(num_tokens: int, num_ranks: int) -> tuple[RangeSets, RangeSets]:
    """Every rank's stripe, and the stripe without its first token, as positions in the order of stride P."""
    bounds = stripe_bounds(num_tokens, num_ranks)
    first, end, start = bounds[:-1], bounds[1:], np.arange(num_ranks + 1)
    tails = np.stack([np.minimum(first + 1, end), end], axis=1)
    return RangeSets(start, np.stack([first, end], axis=1)), RangeSets(start, tails)


def document_contiguous(bounds: Ints, num_ranks: int) -> RangeSets:
    """Rank r holds chunk r of every document's P chunks, as ``contiguous`` cuts it.

    Args:
        bounds: document boundaries ``int64[D + 1]``, from 0 to the number of tokens.
    """
    first, length = bounds[None, :-1], np.diff(bounds)[None, :]
    ranks = np.arange(num_ranks)[:, None]
    ranges = np.stack([first + length * ranks // num_ranks, first + length * (ranks + 1) // num_ranks], axis=2)
    there = ranges[..., 0] < ranges[..., 1]
    return RangeSets(np.concatenate(([0], np.cumsum(there.sum(axis=1)))), ranges[there])


def zigzag(num_tokens: int, num_ranks: int) -> RangeSets:
    """Rank r holds chunks r and 2P - 1 - r of the packed sequence: set r heads, set P + r tails."""
    return document_zigzag(np.array([0, num_tokens]), num_ranks)


def document_zigzag(bounds: Ints, num_ranks: int) -> RangeSets:
    """Every document in 2P chunks; rank r holds chunks r and 2P - 1 - r of each: set r heads, set P + r tails.

    No padding: lengths that 2P does not divide are spread so that every rank holds equally many tokens in all,
    ``floor((c + r) / P)`` of the first c tokens (Hermite's identity makes that exact).

    Args:
        bounds: document boundaries ``int64[D + 1]``, from 0 to the number of tokens.

    Returns:
        2P sets; empty chunks are left out of them.

    Reference: Zhu, ring-flash-attention (zigzag); LongCA-bench section 5.0. Differs: no padding.
    """
    rank = np.arange(num_ranks)[:, None]
    held = np.diff((bounds[None, :] + rank) // num_ranks, axis=1)
    head = held // 2
    tail = held - head
    head_start = bounds[:-1] + np.cumsum(head, axis=0) - head
    after = np.cumsum(tail[::-1], axis=0)[::-1] - tail
    tail_start = bounds[:-1] + head.sum(axis=0) + after
    first = np.concatenate([head_start, tail_start]).ravel()
    length = np.concatenate([head, tail]).ravel()
    there = length > 0
    per_set = there.reshape(2 * num_ranks, -1).sum(axis=1)
    ranges = np.stack([first, first + length], axis=1)[there]
    return RangeSets(np.concatenate(([0], np.cumsum(per_set))), ranges)


def zigzag_shards(bounds: Ints, num_ranks: int) -> tuple[RangeSets, RangeSets, RangeSets]:
    """Every rank's tokens under ``document_zigzag``, and of these the heads and the tails; P sets each."""
    chunks = document_zigzag(bounds, num_ranks)
    heads, tails = part(chunks, 0, num_ranks), part(chunks, num_ranks, num_ranks)
    return union(heads, tails), heads, tails


def union(first: RangeSets, second: RangeSets) -> RangeSets:
    """Set i holds the ranges of set i of both, ascending; ranges that touch are joined."""
    both = stack(first, second)
    return joined(both, np.tile(np.arange(len(first)), 2), len(first))


def joined(sets: RangeSets, group: Ints, count: int) -> RangeSets:
    """Set g of ``count`` holds the ranges of all sets of group g, ascending; ranges that touch are joined."""
    owner = np.repeat(group, np.diff(sets.start))
    order = np.lexsort((sets.ranges[:, 0], owner))
    owner, ranges = owner[order], sets.ranges[order]
    joins = (owner[1:] == owner[:-1]) & (ranges[1:, 0] == ranges[:-1, 1])
    opens, closes = np.concatenate(([True], ~joins)), np.concatenate((~joins, [True]))
    per_set = np.bincount(owner[opens], minlength=count)
    ends = np.stack([ranges[opens, 0], ranges[closes, 1]], axis=1)
    return RangeSets(np.concatenate(([0], np.cumsum(per_set))), ends)


def stack(*groups: RangeSets) -> RangeSets:
    """All sets of all groups, one group after the other."""
    offsets = np.concatenate(([0], np.cumsum([len(g.ranges) for g in groups])))
    starts = [g.start[:-1] + offset for g, offset in zip(groups, offsets, strict=False)]
    ranges = np.concatenate([g.ranges for g in groups])
    return RangeSets(np.concatenate([*starts, offsets[-1:]]), ranges)


def behind(sets: RangeSets, first: Ints) -> RangeSets:
    """What every set has at its ``first`` position and later ones."""
    owner = np.repeat(np.arange(len(sets)), np.diff(sets.start))
    start, end = np.maximum(sets.ranges[:, 0], first[owner]), sets.ranges[:, 1]
    kept = start < end
    per_set = np.bincount(owner[kept], minlength=len(sets))
    return RangeSets(np.concatenate(([0], np.cumsum(per_set))), np.stack([start, end], axis=1)[kept])


def with_queries(sets: RangeSets, num_shards: int, cached: int, stride: int = 1) -> tuple[RangeSets, int]:
    """Sets, of which the first are shards, with those of the shards' tokens that have queries behind them, where some
    are cached and have none; and how far each of these is behind its shard.

    Args:
        sets: in positions of stripes where the ``stride`` is not 1.
        num_shards: of the sets.
        cached: first tokens of all.
        stride: of the order.
    """
    if not cached:
        return sets, 0
    shards, first = part(sets, 0, num_shards), np.full(num_shards, cached)
    if stride > 1:
        first = shards.ranges[:, 0] - (np.arange(stride) - cached) // stride
    return stack(sets, behind(shards, first)), len(sets)


def part(sets: RangeSets, first: int, count: int) -> RangeSets:
    """Sets ``first`` to ``first + count``, on their own."""
    start = sets.start[first : first + count + 1]
    return RangeSets(start - start[0], sets.ranges[start[0] : start[-1]])


def split(sets: RangeSets, count: int, least: int = 0) -> RangeSets:
    """Every set in ``count`` runs of its tokens, equally long where ``count`` divides them: set i in i count + j.

    Runs have ``least`` tokens, if there are so many left.
    """
    size = sets.num_tokens()
    cuts = np.arange(count + 1) * size[:, None] // count
    cuts = np.minimum(np.maximum(cuts, np.arange(count + 1) * least), size[:, None])
    length = sets.ranges[:, 1] - sets.ranges[:, 0]
    before = np.concatenate(([0], np.cumsum(length)))
    start = (before[sets.start[:-1], None] + cuts).ravel()
    first, last = start.reshape(-1, count + 1)[:, :-1].ravel(), start.reshape(-1, count + 1)[:, 1:].ravel()
    low, high = np.searchsorted(before, first, "right") - 1, np.searchsorted(before, last, "left")
    held = np.where(last > first, high - low, 0)
    owner = np.repeat(np.arange(len(first)), held)
    run = np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held) + low[owner]
    begin = np.maximum(before[run], first[owner]) - before[run] + sets.ranges[run, 0]
    end = np.minimum(before[run + 1], last[owner]) - before[run] + sets.ranges[run, 0]
    return RangeSets(np.concatenate(([0], np.cumsum(held))), np.stack([begin, end], axis=1))


def edges_of(*groups: RangeSets) -> Ints:
    """Tokens at which some range begins or ends."""
    return np.unique(np.concatenate([group.ranges.ravel() for group in groups]))


def cells_of(sets: RangeSets, edges: Ints) -> NDArray[np.bool_]:
    """Which runs of tokens between two edges are in every set, ``[sets, edges - 1]``."""
    steps = np.zeros((len(sets), len(edges)), np.int64)
    owner = np.repeat(np.arange(len(sets)), np.diff(sets.start))
    np.add.at(steps, (owner, np.searchsorted(edges, sets.ranges[:, 0])), 1)
    np.add.at(steps, (owner, np.searchsorted(edges, sets.ranges[:, 1])), -1)
    return np.asarray(np.cumsum(steps, axis=1)[:, :-1] > 0)


def seen_keys(tiles: Tiles, count: int) -> RangeSets:
    """Keys that the tiles 1 to ``count`` read, each key once."""
    starts = tiles.start[1 : count + 2]
    rows = tiles.rows[starts[0] : starts[-1], 3:].astype(np.int64)
    if not len(rows):
        return RangeSets(np.zeros(count + 1, np.int64), rows)
    apart = int(rows.max()) + 1  # tiles one behind the other, so that all are sorted and joined at once
    rows += apart * np.repeat(np.arange(count), np.diff(starts))[:, None]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    opens = np.flatnonzero(np.concatenate(([True], rows[1:, 0] > reach[:-1])))
    tile, begins = np.divmod(rows[opens, 0], apart)
    ends = reach[np.append(opens[1:], len(rows)) - 1] - apart * tile
    return RangeSets(np.searchsorted(tile, np.arange(count + 1)), np.stack([begins, ends], axis=1))


def documents_of(mask: Slices, num_tokens: int) -> Ints:
    """Boundaries of the token spans that share no mask row, ``int64[D + 1]``: the documents of document masks, with
    the padding behind them.
    """
    reach_start = np.minimum.accumulate(np.minimum(mask.q_start, mask.k_start)[::-1])[::-1]
    reach_end = np.maximum.accumulate(np.maximum(mask.q_end, mask.k_end))
    cuts = reach_start[1:] >= reach_end[:-1]
    return np.concatenate(([0], reach_start[1:][cuts], [num_tokens]))


def spans(bounds: Ints, least: int) -> Ints:
    """Boundaries of runs of documents, each of which ends where it has ``least`` tokens.

    Args:
        bounds: document boundaries ``int64[D + 1]``, from 0 to the number of tokens.
        least: tokens of a run, but for the last one.
    """
    kept = [0]
    for bound in bounds[1:-1].tolist():
        if bound - kept[-1] >= least and bounds[-1] - bound >= least:
            kept.append(bound)
    return np.array([*kept, bounds[-1]])


def is_causal(mask: Slices) -> bool:
    """No query sees a later key."""
    return bool(np.all(np.minimum(mask.high, mask.k_end - 1 - mask.q_start) <= 0))
