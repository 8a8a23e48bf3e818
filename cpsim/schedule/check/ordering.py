"""Races: conflicting accesses that nothing orders, found by vector clocks over lanes."""

from __future__ import annotations

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.schedule.check.fault import fail
from cpsim.schedule.schedule import STREAMS, Kind, Schedule


def check_order(s: Schedule, conflicts: Ints) -> None:
    """Every conflict's earlier op ends before its later op starts, as the rank of the buffer sees it."""
    if not len(conflicts):
        return
    conflicts = conflicts[np.argsort(conflicts[:, 1], kind="stable")]
    lanes, lane = np.unique(s.lane_rank.astype(np.int64) * len(STREAMS) + s.lane_stream, return_inverse=True)
    is_transfer = s.kind == Kind.TRANSFER
    node_start = np.concatenate(([0], np.cumsum(1 + is_transfer)))
    bad = _first_unordered(
        s.lane_start,
        s.lane_rank,
        lane.astype(np.int64),
        len(lanes),
        node_start,
        s.dep_start,
        s.dep,
        conflicts,
    )
    if bad >= 0:
        earlier, later, rank = conflicts[bad].tolist()
        fail(
            s,
            later,
            f"races on rank {rank} with op {earlier}, which nothing orders before it: {s.op(earlier)}",
        )


@compiled(inline="always")
def _side(lane_start, lane_rank, node_start, op, rank):  # type: ignore[no-untyped-def]
    """(node, lane entry) of an op as one of its ranks sees it; a transfer has a node at either end."""
    for at in range(lane_start[op], lane_start[op + 1]):
        if lane_rank[at] == rank:
            return min(node_start[op] + at - lane_start[op], node_start[op + 1] - 1), at
    return -1, -1


@compiled()
def _first_unordered(lane_start, lane_rank, lane, num_lanes, node_start, dep_start, dep, conflicts):  # type: ignore[no-untyped-def]
    """Index of the first conflict that vector clocks leave unordered, or -1.

    ``clock[n, l]`` is the last position on lane l that ends before node n does.
    """
    clock = np.full((node_start[-1], num_lanes), -1, np.int32)
    place = np.empty(len(lane), np.int32)
    last = np.full(num_lanes, -1)
    reached = np.zeros(num_lanes, np.int32)
    next_conflict = 0
    for op in range(len(lane_start) - 1):
        first, end = lane_start[op], lane_start[op + 1]
        for at in range(first, end):
            place[at] = reached[lane[at]]
            reached[lane[at]] += 1
            node = min(node_start[op] + at - first, node_start[op + 1] - 1)
            if node > node_start[op]:
                clock[node] = np.maximum(clock[node], clock[node - 1])
            if last[lane[at]] >= 0:
                clock[node] = np.maximum(clock[node], clock[last[lane[at]]])
            for d in dep[dep_start[op] : dep_start[op + 1]]:
                before, _ = _side(lane_start, lane_rank, node_start, d, lane_rank[at])
                if before >= 0:
                    clock[node] = np.maximum(clock[node], clock[before])
        while next_conflict < len(conflicts) and conflicts[next_conflict, 1] == op:
            earlier, _, rank = conflicts[next_conflict]
            node, _ = _side(lane_start, lane_rank, node_start, op, rank)
            _, at = _side(lane_start, lane_rank, node_start, earlier, rank)
            if clock[node, lane[at]] < place[at]:
                return next_conflict
            next_conflict += 1
        for at in range(first, end):
            node = min(node_start[op] + at - first, node_start[op + 1] - 1)
            clock[node, lane[at]] = place[at]
            last[lane[at]] = node
            if node > node_start[op]:
                clock[node, lane[first]] = place[first]
    return -1
