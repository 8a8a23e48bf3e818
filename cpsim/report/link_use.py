"""How much every GPU sends, and how much leaves every node, over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cpsim.schedule.schedule import COLLECTIVE_KINDS, Kind, Schedule, is_one_of

if TYPE_CHECKING:
    from cpsim.prediction.results import Column
    from cpsim.sim.timeline import Timeline


def link_use(timeline: Timeline, gpus_per_node: int) -> dict[str, dict[int, Column]]:
    """Rates as steps.

    Args:
        timeline: of a pass.
        gpus_per_node: ranks fill one node after another.

    Returns:
        ``"gpu"`` and ``"node"`` to ``float64[K, 2]`` by rank and by node: from which moment [s] on how many bytes a
        second are sent, the last rate 0. An op sends at its mean rate: of a collective every rank (n-1)/n of its
        bytes, to its neighbours in rings and to all in all-to-alls.
    """
    op, source, nbytes, leaving = _sent(timeline.schedule, gpus_per_node)
    start, end = timeline.start_s[op], timeline.end_s[op]
    rate = nbytes / np.maximum(end - start, 1e-12)
    node = source // gpus_per_node
    return {
        "gpu": {int(rank): _steps(start, end, rate, source == rank) for rank in np.unique(source)},
        "node": {int(n): _steps(start, end, rate * leaving, node == n) for n in np.unique(node[leaving > 0])},
    }


def _sent(schedule: Schedule, gpus_per_node: int) -> tuple[Column, Column, Column, Column]:
    """Op, source rank, bytes, and the share of them that leaves the node, of everything that is sent."""
    moves = np.flatnonzero(schedule.kind == Kind.TRANSFER)
    first = schedule.lane_start[moves]
    source, target = schedule.lane_rank[first].astype(np.int64), schedule.lane_rank[first + 1].astype(np.int64)
    sent = [(moves, source, schedule.nbytes[moves], _apart(source, target, gpus_per_node))]
    if len(schedule.routes):
        op, source, target = schedule.routes.T.astype(np.int64)
        elsewhere = source != target
        columns = (op, source, schedule.route_nbytes, _apart(source, target, gpus_per_node))
        sent.append(tuple(column[elsewhere] for column in columns))
    even = is_one_of(schedule.kind, COLLECTIVE_KINDS)
    even[schedule.routes[:, 0]] = False
    sent += [_collective(schedule, int(op), gpus_per_node) for op in np.flatnonzero(even)]
    op, source, nbytes, leaving = (np.concatenate(columns) for columns in zip(*sent, strict=True))
    return op, source, nbytes, leaving


def _apart(source: Column, target: Column, gpus_per_node: int) -> Column:
    return np.asarray(source // gpus_per_node != target // gpus_per_node, np.float64)


def _collective(schedule: Schedule, op: int, gpus_per_node: int) -> tuple[Column, Column, Column, Column]:
    ranks = np.array(schedule.ranks_of(op))
    share = (2 if schedule.kind[op] == Kind.ALL_REDUCE else 1) * (len(ranks) - 1) / max(1, len(ranks))
    if schedule.kind[op] == Kind.ALL_TO_ALL:
        others = [(ranks // gpus_per_node != rank // gpus_per_node).sum() for rank in ranks]
        leaving = np.array(others) / max(1, len(ranks) - 1)
    else:
        leaving = _apart(ranks, np.roll(ranks, -1), gpus_per_node)
    return np.full(len(ranks), op), ranks, np.full(len(ranks), share * schedule.nbytes[op]), leaving


def _steps(start: Column, end: Column, rate: Column, mine: Column) -> Column:
    """The sum of rates over time, a row for every moment in which it changes."""
    moments = np.concatenate([start[mine], end[mine]])
    changes = np.concatenate([rate[mine], -rate[mine]])
    at, which = np.unique(moments, return_inverse=True)
    total = np.cumsum(np.bincount(which, weights=changes))
    total[-1:] = 0.0  # what remains is rounding
    return np.stack([at, np.maximum(total, 0.0)], axis=1)
