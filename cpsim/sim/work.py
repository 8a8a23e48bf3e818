"""What an engine needs beside the schedule: how long every op takes, and how ops get into each other's way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cpsim.compiled import unsigned
from cpsim.masks import Ints
from cpsim.schedule import Int8, Int32, Kind, Schedule

Floats = NDArray[np.float64]
LEAST_SPEED: Final = 0.1
"""What interference leaves of an op's speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Costs of N ops on R links with C pressure classes.

    An op of duration d that runs alone takes d seconds. Otherwise it runs at a speed of at most 1:

    * Interference: classes of ops that run on one of its ranks beside it each take a share ``1 - 1 / slowdown[a, b]``
      of its speed, a its own pressure class; on the rank where most is taken, but 0.1 always remains.
    * Waiting: an op of several ranks that has not started, though on one of them the hosts have launched it and what it
      waits for there has ended, takes ``1 - 1 / waiting[a, b]`` on that rank, unless its class runs there as well.
      What a rank sends and receives in one step is one launch (``partners``), for which both have to be ready.
    * Sharing: it moves ``flow_bytes`` over links while it runs, so at speed s it takes ``s * bytes / d`` of a link's
      rate. Links are shared max-min fairly: the byte rates of all ops (each measured on the link where it moves
      most) rise together until a link is full or an op runs at its own limit.

    Reference: Bertsekas and Gallager, "Data Networks", section 6.5.2 (progressive filling).
    """

    duration_s: Floats
    """Alone at full speed, ``[N]``."""
    release_s: Floats
    """When the hosts of all its ranks have launched it, ``[N]``."""
    flow_start: Ints
    flow_link: Int32
    flow_bytes: Floats
    """Bytes over each link, positive; CSR over ops."""
    link_bytes_per_s: Floats
    """``[R]``."""
    pressure: Int8
    """Pressure class, ``[N]``."""
    slowdown: Floats
    """At least 1, ``[C, C]``."""
    waiting: Floats
    """Likewise, by ops that wait for other ranks."""

    @property
    def constant(self) -> bool:
        """Every op runs at full speed whatever else runs."""
        return len(self.flow_link) == 0 and bool(np.all(self.slowdown == 1.0) and np.all(self.waiting == 1.0))


def free_work(duration_s: Floats, release_s: Floats) -> Work:
    """Work without links and interference."""
    return Work(
        duration_s=duration_s,
        release_s=release_s,
        flow_start=np.zeros(len(duration_s) + 1, np.int64),
        flow_link=np.zeros(0, np.int32),
        flow_bytes=np.zeros(0),
        link_bytes_per_s=np.zeros(0),
        pressure=np.zeros(len(duration_s), np.int8),
        slowdown=np.ones((1, 1)),
        waiting=np.ones((1, 1)),
    )


def predecessors(schedule: Schedule) -> tuple[Ints, Int32]:
    """Ops that must have ended before each op starts: its dependencies and the op before it on each of its lanes.

    Returns:
        CSR ``start[N + 1]`` and ``op[X]``; an op can occur twice.
    """
    if not schedule.before:
        s, num_lanes = schedule, int(schedule.num_ranks) * 128
        lane_start, rank, stream, dep_start, dep = unsigned(
            s.lane_start, s.lane_rank, s.lane_stream, s.dep_start, s.dep
        )
        schedule.before.append(_predecessors(lane_start, rank, stream, dep_start, dep, num_lanes))
    return schedule.before[0]


@njit(cache=True, nogil=True)
def _predecessors(lane_start, lane_rank, lane_stream, dep_start, dep, num_lanes):  # type: ignore[no-untyped-def]
    num_ops = len(lane_start) - 1
    last = np.full(num_lanes, -1, np.int32)
    start = np.empty(num_ops + 1, np.int64)
    op = np.empty(len(dep) + len(lane_rank), np.int32)
    count = 0
    start[0] = 0
    for i in range(num_ops):
        for d in range(dep_start[i], dep_start[i + 1]):
            op[count] = dep[d]
            count += 1
        for entry in range(lane_start[i], lane_start[i + 1]):
            lane = lane_rank[entry] * 128 + lane_stream[entry]
            if last[lane] >= 0:
                op[count] = last[lane]
                count += 1
            last[lane] = i
        start[i + 1] = count
    return start, op[:count]


def earliest(first: Ints, before: Int32, duration_s: Floats, release_s: Floats) -> tuple[Floats, Floats, Int32]:
    """Start, end and cause of every op where nothing slows another: each starts at the last end that it waits for.

    `first` and `before` are the predecessors, all earlier in the list; `cause` is the op that a start waited for,
    or the op itself where that was its release.
    """
    first, before = unsigned(first, before)
    return _earliest(first, before, duration_s, release_s)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _earliest(first, before, duration, release):  # type: ignore[no-untyped-def]
    num_ops = len(duration)
    start, end = np.empty(num_ops), np.empty(num_ops)
    cause = np.empty(num_ops, np.int32)
    for op in range(num_ops):
        at, by = release[op], op
        for entry in range(first[op], first[op + 1]):
            ended = end[before[entry]]
            by = before[entry] if ended >= at else by
            at = max(at, ended)
        start[op], end[op], cause[op] = at, at + duration[op], by
    return start, end, cause


def partners(schedule: Schedule) -> Int32:
    """For every lane entry of a transfer the entry that is the other half of its rank's launch, or -1.

    A rank's send and receive of one step are one launch: a batch, as `torch.distributed.batch_isend_irecv` makes it.
    """
    return np.asarray(_partners(
        schedule.kind == Kind.TRANSFER, schedule.step, schedule.lane_start, schedule.lane_rank, schedule.lane_stream,
        schedule.num_ranks,
    ), np.int32)  # fmt: skip


@njit(cache=True, nogil=True)
def _partners(is_transfer, step, lane_start, lane_rank, lane_stream, num_ranks):  # type: ignore[no-untyped-def]
    partner = np.full(len(lane_rank), -1, np.int32)
    latest = np.full((num_ranks, 2), -1, np.int32)  # transfer that every rank sends, receives
    for op in range(len(is_transfer)):
        if not is_transfer[op]:
            continue
        for side in range(2):
            entry = lane_start[op] + side
            before = latest[lane_rank[entry], 1 - side]
            latest[lane_rank[entry], side] = op
            if before < 0 or step[before] != step[op]:
                continue
            other = lane_start[before] + 1 - side
            if partner[other] < 0 and lane_stream[lane_start[before]] == lane_stream[lane_start[op]]:
                partner[entry], partner[other] = other, entry
    return partner
