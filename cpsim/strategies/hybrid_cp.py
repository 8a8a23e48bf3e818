"""Hybrid context parallelism: every document on as few ranks as it needs, in rings of their own.

A document goes to a subgroup of a power of two consecutive ranks, or to all of them: the fewest that hold it at
``tokens_per_rank``, more of the same node where it would be most of the work. Subgroups of one size are rings apart,
one zigzag ring of all its documents each. Sizes follow one another, the largest first, so that documents of one rank,
which need no transfers, hide the last hops of the others. Documents that see each other, such as answers and their
question, count as one, and under a dense mask all do: that is the zigzag ring. A planner of batches may say instead
where every document goes, and when.

Reference: Megatron-LM, ``BalancedCPScheduler`` in core/pipeline_parallel/hybrid_cp_schedule.py (pull requests 2054 and
2282). Differs: documents of a subgroup share kernels and transfers instead of running one after another; no barriers;
subgroups are aligned and of sizes that divide the ranks; documents are widened to balance work, not only to fill ranks
without any, and inside nodes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError, shown
from cpsim.masks.slices import Ints, RangeSets
from cpsim.masks.tiles import join_tiles
from cpsim.runtime.compiled import compiled
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.others import CPSIM, HeldRingCode, Implementation
from cpsim.strategies.ring.grid import RingGrid, make_grid
from cpsim.strategies.ring.held import HeldRing, as_run
from cpsim.strategies.ring.loop import Ring
from cpsim.strategies.ring.ring import emit_rings, tiled, turned
from cpsim.strategies.ring.steps import Cut, Steps

Groups = tuple[tuple[int, ...], ...]
"""Size, number and turn of the subgroup of every document."""

SLACK: Final = 1.05
"""Work of a rank over the mean that is not worth a larger subgroup, as Megatron-LM's ``delta``."""


def plan_hybrid_cp(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    code: Implementation = CPSIM,
    *,
    tokens_per_rank: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """Every document in a ring of as few ranks as it needs.

    Ranks have about equal work, not equally many tokens: one with a part of a long document holds fewer.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation; others run the documents of a subgroup one after another.
        tokens_per_rank: of one document, at most, unless all ranks share it; default: all tokens over all ranks.
        groups: ``(size, number, turn)`` of every document: ranks of its subgroup, which of those of that size it is,
            and its turn. Documents of one turn and subgroup share kernels; turns follow each other. None chooses.

    Raises:
        ScenarioError: a knob has no such value.
    """
    limit, given = _checked(workload, cluster, tokens_per_rank), _read_groups(workload, cluster, groups)
    if isinstance(code.ring, HeldRingCode):
        return _one_by_one(workload, cluster, pass_, limit, given, code.ring)
    rings = _rings(workload, cluster, limit, given)
    b = Builder(cluster.num_gpus, sharding.stack(*(cut.sets for _, cut in rings)), rings[0][1].tiles)
    casts: list[Callable[[], object]] = []
    for grid, cut in rings:
        ring = Ring(b, Steps(workload, cut, grid), None)
        ring.put_off = casts
        emit_rings(ring, pass_)
    while casts:  # rings hold this list and casts hold rings, with all that they are made from
        casts.pop(0)()
    return b.build()


def _one_by_one(
    workload: Workload, cluster: Cluster, pass_: Pass, tokens_per_rank: int, groups: Groups | None, code: HeldRingCode
) -> Schedule:
    """Rounds of one document in every subgroup, of no more ranks than it needs."""
    rings = _rings(workload, cluster, tokens_per_rank, groups, rounds=True)
    sets, tiles = sharding.stack(*(cut.sets for _, cut in rings)), rings[0][1].tiles
    b = Builder(cluster.num_gpus, sets, tiles, narrow_sums=True)
    for grid, cut in rings:
        grid = as_run(grid, pass_, code)
        ring = HeldRing(b, Steps(workload, turned(cut) if grid.backwards else cut, grid), code)
        if grid.num_places > 1:
            emit_rings(ring, pass_)
        else:
            ring.alone(pass_)
    return b.build()


def hybrid_cp_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying: the default, and half of it, which spreads long documents over more ranks.

    Raises:
        InfeasibleError: none is, all ranks share all documents.
    """
    default = _checked(workload, cluster, None)
    sizes, wider = (_placed(workload, cluster, limit)[1] for limit in (default, -(-default // 2)))
    if sizes.min() == cluster.num_gpus:
        raise InfeasibleError(
            "not tried: every document needs all ranks, which is the zigzag ring; name strategy hybrid_cp to predict it"
        )
    return ({}, {"tokens_per_rank": -(-default // 2)})[: 1 + int((sizes != wider).any())]


def _checked(workload: Workload, cluster: Cluster, asked: int | None) -> int:
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ScenarioError(f"knobs.tokens_per_rank: expected a positive integer, got {asked!r}")
    return asked or -(-workload.num_tokens // cluster.num_gpus)


def subgroup_sizes(num_ranks: int) -> Ints:
    """Powers of two that divide the ranks, and all of them; ascending."""
    powers = 2 ** np.arange(num_ranks.bit_length())
    return np.unique(np.append(powers[num_ranks % powers == 0], num_ranks))


@lru_cache(maxsize=4)
def _placed(
    workload: Workload, cluster: Cluster, tokens_per_rank: int, slack: float = SLACK
) -> tuple[Ints, Ints, Ints]:
    """Boundaries of the documents, ``[D + 1]``, and of each the size and the number of its subgroup, ``[D]``."""
    mask = workload.slices()
    bounds, sizes = sharding.documents_of(mask, workload.num_tokens), subgroup_sizes(cluster.num_gpus)
    work = np.diff(np.concatenate(([0], np.cumsum(mask.areas())))[np.searchsorted(mask.q_start, bounds)])
    least = np.searchsorted(sizes[:-1] * tokens_per_rank, np.diff(bounds))
    usual, order = np.searchsorted(sizes, cluster.gpus_per_node, side="right"), np.argsort(-work, kind="stable")
    level, group = _place(work.astype(np.float64), order, least, sizes, usual, slack)
    return bounds, sizes[level], group


@compiled()
def _place(work, order, least, sizes, usual, slack):  # type: ignore[no-untyped-def]
    """Index of the size, and number, of the subgroup of every document, in ``order``: each to the smallest size at
    which the busiest rank of some subgroup stays within the mean work, else to where that is least; to one of the
    first ``usual`` sizes unless it has to be larger."""
    num_ranks = sizes[-1]
    load, limit = np.zeros(num_ranks), slack * work.sum() / num_ranks
    level, group = np.zeros(len(work), np.int64), np.zeros(len(work), np.int64)
    for d in order:
        lowest = np.inf
        for i in range(least[d], max(least[d] + 1, usual)):
            for g in range(num_ranks // sizes[i]):
                busiest = load[g * sizes[i] : (g + 1) * sizes[i]].max() + work[d] / sizes[i]
                if busiest < lowest:
                    lowest, level[d], group[d] = busiest, i, g
            if lowest <= limit:
                break
        size = sizes[level[d]]
        for rank in range(group[d] * size, (group[d] + 1) * size):
            load[rank] += work[d] / size
    return level, group


def _read_groups(workload: Workload, cluster: Cluster, groups: Sequence[Sequence[int]] | None) -> Groups | None:
    """Where documents go, as given."""
    if groups is None:
        return None
    count, ranks = len(sharding.documents_of(workload.slices(), workload.num_tokens)) - 1, cluster.num_gpus
    is_list = isinstance(groups, Sequence) and all(isinstance(one, Sequence) and len(one) == 3 for one in groups)
    if not is_list or len(groups) != count or not all(type(n) is int and n >= 0 for one in groups for n in one):
        raise ScenarioError(
            f"knobs.groups: expected (size, number, turn) for each of {count} documents, got {shown(groups)}"
        )
    for size, number, _ in groups:
        if size < 1 or ranks % size or number >= ranks // size:
            raise ScenarioError(
                f"knobs.groups: expected a size that divides {ranks} ranks and one of its groups, counted from 0, got "
                f"size {size} and number {number}"
            )
    return tuple(map(tuple, groups))


@lru_cache(maxsize=2)
def _rings(
    workload: Workload, cluster: Cluster, tokens_per_rank: int, groups: Groups | None, rounds: bool = False
) -> list[tuple[RingGrid, Cut]]:
    """The rings of every turn and size of subgroup that has documents; all have one table of tiles. The largest comes
    first, unless turns are given, which come first then.

    With ``rounds`` there are several of a size, with one document of every subgroup each, and none is widened.
    """
    if groups is not None:
        bounds = sharding.documents_of(workload.slices(), workload.num_tokens)
        size, group, turn = np.array(groups, np.int64).T
    else:
        bounds, size, group = _placed(workload, cluster, tokens_per_rank, np.inf if rounds else SLACK)
        turn = _turns(size * len(size) * cluster.num_gpus + group) if rounds else np.zeros_like(size)
    keys = set(zip(size.tolist(), turn.tolist(), strict=True))
    order = sorted(keys, key=lambda key: (-key[0], key[1]) if groups is None else (key[1], -key[0]))
    num_ranks, mask, rings = cluster.num_gpus, workload.slices(), []
    causal, first_set, first_tile = sharding.is_causal(mask), 0, 0
    for one, at in order:
        mine = np.flatnonzero((size == one) & (turn == at))
        grid = make_grid(num_ranks, num_ranks // one, "context_first", apart=True)
        shards = zigzag_of_subgroups(bounds[mine], np.diff(bounds)[mine], group[mine], one, num_ranks)
        several = np.bincount(group[mine], minlength=num_ranks // one)[grid.ring] > 1
        later, earlier = (grid.source > grid.shard) & causal, (grid.source < grid.shard) & causal
        cut = tiled(mask, sharding.stack(*shards), grid.source, several, later, earlier)
        rings.append((grid, replace(cut, first_set=first_set, tile=cut.tile + first_tile)))
        first_set, first_tile = first_set + len(cut.sets), first_tile + grid.source.size
    tiles = join_tiles([cut.tiles for _, cut in rings])
    return [(grid, replace(cut, tiles=tiles)) for grid, cut in rings]


def _turns(keys: Ints) -> Ints:
    """How many earlier entries equal each."""
    seen: dict[int, int] = {}
    turns = []
    for key in keys.tolist():
        turns.append(seen.get(key, 0))
        seen[key] = turns[-1] + 1
    return np.array(turns, np.int64)


def zigzag_of_subgroups(
    start: Ints, length: Ints, group: Ints, size: int, num_ranks: int
) -> tuple[RangeSets, RangeSets, RangeSets]:
    """Every rank's tokens of the documents of its subgroup, and of these the heads and the tails; P sets each.

    Args:
        start, length, group: of every document, in order of tokens: first token, tokens, and number of its subgroup.
        size: ranks of a subgroup.
        num_ranks: P.
    """
    order = np.argsort(group, kind="stable")
    packed = np.concatenate(([0], np.cumsum(length[order])))
    chunks = sharding.document_zigzag(packed, size)
    document = np.searchsorted(packed, chunks.ranges[:, 0], side="right") - 1
    tokens = chunks.ranges + (start[order] - packed[:-1])[document, None]
    chunk = np.repeat(np.arange(2 * size), np.diff(chunks.start))
    rank = group[order][document] * size + chunk % size
    heads, tails = (_by_rank(rank[half], tokens[half], num_ranks) for half in (chunk < size, chunk >= size))
    return sharding.union(heads, tails), heads, tails


def _by_rank(rank: Ints, ranges: Ints, num_ranks: int) -> RangeSets:
    """Ranges, ascending for every rank, as the sets of their ranks."""
    start = np.concatenate(([0], np.cumsum(np.bincount(rank, minlength=num_ranks))))
    return RangeSets(start, ranges[np.argsort(rank, kind="stable")])
