"""Replicas side by side, each with its own documents: how DistCA's baselines place attention.

``per_sequence`` cuts the packed tokens into one sequence for every replica, and each into 2 P zigzag chunks for the P
ranks of its context-parallel group, whatever the documents are. ``wlb`` gives every replica documents of as much work,
and cuts each document over the group. Groups gather keys and values first; a group of one rank computes alone.

Reference: DistCA (arXiv 2510.18121), section 6.1; WLB-LLM (OSDI 2025), section 4. Differs: packed anew for every case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import Ints, RangeSets
from cpsim.schedule.schedule import Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.allgather import plan_groups
from cpsim.strategies.distca.packing import BREAKPOINTS, wlb_pack
from cpsim.strategies.single import plan_apart


def plan_wlb(
    workload: Workload, cluster: Cluster, pass_: Pass, *, cp: int | None = None, breakpoint: int = BREAKPOINTS["8b"]
) -> Schedule:
    """Documents to replicas by work, and every document over its replica's ranks.

    Args:
        workload, cluster, pass_: the case.
        cp: ranks of a replica; default all GPUs.
        breakpoint: document length at which attention takes as long as all else of a layer [tokens].

    Raises:
        ScenarioError: a knob has no such value.
        InfeasibleError: ranks of a replica get unequal shards, or a replica nothing.
    """
    size = _size(cp, cluster)
    if type(breakpoint) is not int or breakpoint < 1:
        raise ScenarioError(f"knobs.breakpoint: expected tokens, a positive integer, got {breakpoint!r}")
    bounds, count = sharding.documents_of(workload.slices(), workload.num_tokens), cluster.num_gpus // size
    lengths = np.diff(bounds)
    group = wlb_pack(lengths, count, workload.num_tokens // count, breakpoint)
    shards = []
    for replica in range(count):
        mine = np.flatnonzero(group == replica)
        if not len(mine):
            raise InfeasibleError(f"wlb: {len(lengths)} documents are too few for {count} replicas; raise cp")
        shards.append(_head_tail(bounds[mine], lengths[mine], size))
    return _side_by_side(workload, pass_, sharding.stack(*shards), count)


def plan_per_sequence(workload: Workload, cluster: Cluster, pass_: Pass, *, cp: int | None = None) -> Schedule:
    """Tokens to replicas in order, zigzag within each.

    Args:
        workload, cluster, pass_: the case.
        cp: ranks of a replica; default all GPUs.

    Raises:
        ScenarioError: a knob has no such value.
        InfeasibleError: a document lies in two sequences, or ranks of a replica get unequal shards.
    """
    size = _size(cp, cluster)
    count = cluster.num_gpus // size
    cuts = np.arange(count + 1) * workload.num_tokens // count
    across = np.setdiff1d(cuts, sharding.documents_of(workload.slices(), workload.num_tokens))
    if len(across):
        raise InfeasibleError(
            f"per_sequence: the document at token {across[0]} lies in two sequences; cut it, or raise cp"
        )
    shards = [_head_tail(cuts[i : i + 1], np.diff(cuts)[i : i + 1], size) for i in range(count)]
    return _side_by_side(workload, pass_, sharding.stack(*shards), count)


def replica_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """None: replicas of a step are its own affair.

    Raises:
        InfeasibleError: always; who names the strategy gets it.
    """
    del workload, cluster
    raise InfeasibleError("a baseline of DistCA's, tried where it is asked for; see allgather, which gathers likewise")


def _size(cp: int | None, cluster: Cluster) -> int:
    size = cluster.num_gpus if cp is None else cp
    if type(size) is not int or size < 1 or cluster.num_gpus % size:
        raise ScenarioError(f"knobs.cp: expected a divisor of {cluster.num_gpus} GPUs, got {cp!r}")
    return size


def _head_tail(first: Ints, length: Ints, num_ranks: int) -> RangeSets:
    """Zigzag shards of spans of tokens, which need not follow each other."""
    bounds = np.concatenate(([0], np.cumsum(length)))
    chunks = sharding.document_zigzag(bounds, num_ranks)
    span = np.searchsorted(bounds, chunks.ranges[:, 0], side="right") - 1
    there = RangeSets(chunks.start, chunks.ranges + (first - bounds[:-1])[span][:, None])
    return sharding.union(sharding.part(there, 0, num_ranks), sharding.part(there, num_ranks, num_ranks))


def _side_by_side(workload: Workload, pass_: Pass, shards: RangeSets, count: int) -> Schedule:
    return plan_apart(workload, pass_, shards) if len(shards) == count else plan_groups(workload, pass_, shards, count)
