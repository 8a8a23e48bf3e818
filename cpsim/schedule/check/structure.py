"""Columns are consistent, ops are on their lanes, dependencies and buffers are within reach."""

from __future__ import annotations

from typing import Final

import numpy as np

from cpsim.errors import ScheduleError
from cpsim.runtime.compiled import compiled
from cpsim.schedule.check.fault import fail
from cpsim.schedule.schedule import (
    ATTENTION_KINDS,
    MEMORY_BOUND_KINDS,
    READ,
    STREAMS,
    UPDATE,
    Kind,
    Schedule,
    is_one_of,
)

ONE_LANE: Final = (*ATTENTION_KINDS, *MEMORY_BOUND_KINDS, Kind.GEMM, Kind.SELECT)


def check_columns(s: Schedule) -> None:
    """Lengths and index ranges of all columns."""
    num_ops = len(s)
    for name, pairs in (("lane", len(s.lane_rank)), ("dep", len(s.dep)), ("access", len(s.access_buffer))):
        start = getattr(s, f"{name}_start")
        if len(start) != num_ops + 1 or start[0] != 0 or start[-1] != pairs or (np.diff(start) < 0).any():
            raise ScheduleError(f"columns: {name}_start does not partition {pairs} entries over {num_ops} ops")
    for column, limit in (
        ("kind", len(Kind)),
        ("tile", len(s.tiles.area)),
        ("lane_rank", s.num_ranks),
        ("lane_stream", len(STREAMS)),
        ("dep", num_ops),
        ("access_buffer", len(s.buffer_rank)),
        ("access_block", len(s.block_set)),
        ("access_mode", UPDATE + 1),
        ("buffer_rank", s.num_ranks),
        ("buffer_name", len(s.buffer_names)),
        ("block_set", len(s.sets)),
        ("block_tensor", len(s.block_tensors)),
    ):
        values = getattr(s, column)
        if len(values) and not (values.min() >= 0 and values.max() < limit):
            raise ScheduleError(f"columns: {column} has entries outside 0 to {limit - 1}")
    for column in ("step", "tile", "nbytes", "heads"):
        if len(getattr(s, column)) != num_ops or (getattr(s, column) < 0).any():
            raise ScheduleError(f"columns: {column} has negative entries or another length than {num_ops} ops")
    for held in (s.inputs, s.outputs):
        if len(held) and (held.min() < 0 or (held.max(axis=0) >= [len(s.buffer_rank), len(s.block_set)]).any()):
            raise ScheduleError("columns: inputs or outputs name buffers or blocks that do not exist")


def check_lanes(s: Schedule) -> None:
    """Lanes of every kind of op, directions of dependencies, owners of buffers."""
    num_lanes = np.diff(s.lane_start)
    if (num_lanes == 0).any():
        raise ScheduleError(f"op {int(np.flatnonzero(num_lanes == 0)[0])}: has no lanes")
    wrong = is_one_of(s.kind, ONE_LANE) & (num_lanes != 1)
    if wrong.any():
        fail(s, int(np.flatnonzero(wrong)[0]), "runs on one lane by its kind, but has several")
    wrong = (s.kind == Kind.TRANSFER) & (num_lanes != 2)
    if wrong.any():
        fail(s, int(np.flatnonzero(wrong)[0]), "a transfer needs 2 lanes, source first")
    index, why = _first_bad_lane(
        s.kind,
        s.lane_start,
        s.lane_rank,
        s.lane_stream,
        s.dep_start,
        s.dep,
        s.access_start,
        s.access_buffer,
        s.access_mode,
        s.buffer_rank,
        int(Kind.TRANSFER),
        int(Kind.BARRIER),
        READ,
    )
    if why:
        fail(s, index, _LANE_FAULTS[why])


_LANE_FAULTS: Final = (
    "",
    "has two lanes on one rank",
    "depends on itself or on a later op",
    "depends on an op with which it shares no rank",
    "touches a buffer of a rank that is not its own",
    "a transfer reads at its source and writes at its target",
)


@compiled()
def _first_bad_lane(  # type: ignore[no-untyped-def]
    kind,
    lane_start,
    lane_rank,
    lane_stream,
    dep_start,
    dep,
    access_start,
    access_buffer,
    access_mode,
    buffer_rank,
    transfer,
    barrier,
    read,
):
    """(op, index into ``_LANE_FAULTS``) of the first op that is not where it should be; (0, 0) if none is."""
    seen = np.full(lane_rank.max() + 1, -1)
    for op in range(len(kind)):
        mine = lane_rank[lane_start[op] : lane_start[op + 1]]
        for rank in mine:
            if seen[rank] == op and kind[op] != barrier:
                to_itself = kind[op] == transfer and lane_stream[lane_start[op]] != lane_stream[lane_start[op] + 1]
                for a in range(access_start[op], access_start[op + 1]):
                    to_itself &= buffer_rank[access_buffer[a]] == rank
                if not to_itself:
                    return op, 1
            seen[rank] = op
        for d in dep[dep_start[op] : dep_start[op + 1]]:
            if d >= op:
                return op, 2
            shared = False
            for rank in lane_rank[lane_start[d] : lane_start[d + 1]]:
                shared |= seen[rank] == op
            if not shared:
                return op, 3
        for a in range(access_start[op], access_start[op + 1]):
            owner = buffer_rank[access_buffer[a]]
            if owner >= len(seen) or seen[owner] != op:
                return op, 4
            if kind[op] == transfer and owner != mine[0 if access_mode[a] == read else 1]:
                return op, 5
    return 0, 0
