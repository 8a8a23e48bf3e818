"""What an engine needs beside the schedule: how long every op takes, and how ops get into each other's way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cpsim.runtime.compiled import compiled, inlined, unsigned
from cpsim.schedule.schedule import STREAMS, Int8, Int32, Kind, Schedule

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
LEAST_SPEED: Final = 0.1
"""What interference leaves of an op's speed."""
FEW: Final = 16
"""Predecessors of an op that are looked at to find what need not be waited for besides: collectives of many ranks have
as many, and so have those that follow them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Costs of N ops on R links with C pressure classes.

    An op of duration d that runs alone takes d seconds. Otherwise it runs at a speed of at most 1:

    * Interference: classes of ops that run on one of its ranks beside it each take a share ``1 - 1 / slowdown[a, b]``
      of its speed, a its own pressure class; on the rank where most is taken, but 0.1 always remains.
    * Sharing: it moves ``flow_bytes`` over links while it runs, so at speed s it takes ``s * bytes / d`` of a link's
      rate. Links are shared max-min fairly: the byte rates of all ops (each measured on the link where it moves
      most) rise together until a link is full or an op runs at its own limit.

    Reference: Bertsekas and Gallager, "Data Networks", section 6.5.2 (progressive filling).
    """

    duration_s: Floats
    """Alone at full speed, ``[N]``."""
    release_s: Floats
    """When the hosts of all its ranks have launched it, ``[N]``."""
    flow_start: Int32
    flow_link: Int32
    flow_bytes: Floats
    """Bytes over each link, positive; CSR over ops."""
    link_bytes_per_s: Floats
    """``[R]``."""
    pressure: Int8
    """Pressure class, ``[N]``."""
    slowdown: Floats
    """At least 1, ``[C, C]``."""
    eager: Bools
    """Transfers that leave their sender before the receiver is there, ``[N]``: see ``waits``."""

    @property
    def constant(self) -> bool:
        """Every op runs at full speed whatever else runs."""
        return len(self.flow_link) == 0 and bool(np.all(self.slowdown == 1.0))


def free_work(duration_s: Floats, release_s: Floats) -> Work:
    """Work without links and interference."""
    return Work(
        duration_s=duration_s,
        release_s=release_s,
        flow_start=np.zeros(len(duration_s) + 1, np.int32),
        flow_link=np.zeros(0, np.int32),
        flow_bytes=np.zeros(0),
        link_bytes_per_s=np.zeros(0),
        pressure=np.zeros(len(duration_s), np.int8),
        slowdown=np.ones((1, 1)),
        eager=np.zeros(len(duration_s), np.bool_),
    )


_WAITS: Final[WeakKeyDictionary[Schedule, dict[bytes, tuple[Int32, Int32]]]] = WeakKeyDictionary()
"""What ``waits`` has found, by which transfers are eager: engines and draws ask for it again."""


def waits(schedule: Schedule, eager: Bools) -> tuple[Int32, Int32]:
    """Ops that must have ended before each op starts: its dependencies, the op before it on each of its lanes, and what
    the other half of a rank's launch waits for on that rank (`partners`); without most of those that another of them
    waits for itself, which say nothing new.

    What follows an `eager` transfer on its sender's rank only, such as the next message into the buffer that it was
    sent from, does not wait for the receiver. It waits for what the sender waited for, and for the other half of the
    sender's launch, what it receives in the same step; a transfer without this half is not taken as eager. The next
    message to the same receiver waits for it: buffers have room for one.

    Returns:
        CSR ``start[N + 1]`` and ``op[X]``; no op occurs twice among those of another.
    """
    key, found = eager.tobytes(), _WAITS.setdefault(schedule, {})
    if key not in found:
        s, num_lanes = schedule, int(schedule.num_ranks) * len(STREAMS)
        lane_start, rank, stream, dep_start, dep = unsigned(
            s.lane_start, s.lane_rank, s.lane_stream, s.dep_start, s.dep
        )
        first, before = _predecessors(lane_start, rank, stream, dep_start, dep, num_lanes)
        if (s.kind == Kind.TRANSFER).any():
            partner = partners(s)
            first, before = _launched(first, before, partner, s.lane_start, s.lane_rank)
            if eager.any():
                first, before = _sent(first, before, eager, partner, s.lane_start, s.lane_rank)
        first, before = _needed(first, before)
        found[key] = first, before.copy()  # a part of an array that was sized for the worst
    return found[key]


@inlined()
def has(lane_rank, lane_start, op, rank):  # type: ignore[no-untyped-def]
    """Whether an op runs on a rank."""
    at, last = lane_start[op], lane_start[op + 1]
    while at < last and lane_rank[at] != rank:
        at += 1
    return at < last


@inlined()
def _keep_new(found, count, end, known, op):  # type: ignore[no-untyped-def]
    """Of the entries of an op, ``found[count:end]``, those whose mark in ``known`` is not yet the op, each where it
    occurs last; they move to the front and get the mark. Returns where they end."""
    at = end
    for entry in range(end - 1, count - 1, -1):
        if known[found[entry]] != op:
            known[found[entry]] = op
            at -= 1
            found[at] = found[entry]
    for entry in range(at, end):
        found[count + entry - at] = found[entry]
    return count + end - at


@compiled(nogil=True)
def _predecessors(lane_start, lane_rank, lane_stream, dep_start, dep, num_lanes):  # type: ignore[no-untyped-def]
    num_ops = len(lane_start) - 1
    last = np.full(num_lanes, -1, np.int32)
    start = np.empty(num_ops + 1, np.int32)
    op = np.empty(len(dep) + len(lane_rank), np.int32)
    count = 0
    start[0] = 0
    for i in range(num_ops):
        for d in range(dep_start[i], dep_start[i + 1]):
            op[count] = dep[d]
            count += 1
        for entry in range(lane_start[i], lane_start[i + 1]):
            lane = lane_rank[entry] * len(STREAMS) + lane_stream[entry]
            if last[lane] >= 0:
                op[count] = last[lane]
                count += 1
            last[lane] = i
        start[i + 1] = count
    return start, op[:count]


@compiled(nogil=True)
def _launched(first, before, partner, lane_start, lane_rank):  # type: ignore[no-untyped-def]
    """Predecessors with those of other halves of launches, as far as they are earlier in the list."""
    num_ops, count = len(first) - 1, 0
    start, known = np.zeros(num_ops + 1, np.int32), np.full(num_ops, -1, np.int32)
    found = np.empty(3 * len(before), np.int32)  # an op is a half of two launches
    for op in range(num_ops):
        end = count
        for one in before[first[op] : first[op + 1]]:
            found[end] = one
            end += 1
        count = _keep_new(found, count, end, known, op)
        for lane in range(lane_start[op], lane_start[op + 1]):
            other = partner[lane]
            for at in range(first[other], first[other + 1] if other < num_ops else first[other]):
                new = before[at]
                if new < op and known[new] != op and has(lane_rank, lane_start, new, lane_rank[lane]):
                    found[count], known[new] = new, op
                    count += 1
        start[op + 1] = count
    return start, found[:count]


@compiled(nogil=True)
def _sent(first, before, eager, partner, lane_start, lane_rank):  # type: ignore[no-untyped-def]
    """Predecessors without the receivers that nobody waits for."""
    num_ops, count = len(eager), 0
    start, known = np.zeros(num_ops + 1, np.int32), np.full(num_ops, -1, np.int32)
    found = np.empty(2 * len(before), np.int32)
    for op in range(num_ops):
        end = count
        for sent in before[first[op] : first[op + 1]]:
            lane = lane_start[sent]
            leaves = eager[sent] and max(sent, partner[lane]) < op
            leaves = leaves and not has(lane_rank, lane_start, op, lane_rank[lane + 1])
            more = start[sent + 1] - start[sent] if leaves else 0
            if end + 1 + more > len(found):
                found = np.concatenate((found, np.empty(len(found) + more, np.int32)))
            found[end] = partner[lane] if leaves else sent
            end += 1
            for entry in range(start[sent], start[sent] + more):
                if has(lane_rank, lane_start, found[entry], lane_rank[lane]):
                    found[end] = found[entry]
                    end += 1
        count = _keep_new(found, count, end, known, op)
        start[op + 1] = count
    return start, found[:count]


@compiled(nogil=True)
def _needed(first, before):  # type: ignore[no-untyped-def]
    """Predecessors without those that another one waits for, where that one waits for few."""
    num_ops, count = len(first) - 1, 0
    start, known = np.zeros(num_ops + 1, np.int32), np.full(num_ops, -1, np.int32)
    found = np.empty(len(before), np.int32)
    for op in range(num_ops):
        end = count
        for one in before[first[op] : first[op + 1]]:
            if start[one + 1] - start[one] <= FEW:
                for entry in range(start[one], start[one + 1]):
                    known[found[entry]] = op
            found[end] = one
            end += 1
        count = _keep_new(found, count, end, known, op)
        start[op + 1] = count
    return start, found[:count]


def earliest(first: Int32, before: Int32, duration_s: Floats, release_s: Floats) -> tuple[Floats, Floats, Int32]:
    """Start, end and cause of every op where nothing slows another: each starts at the last end that it waits for.

    `first` and `before` are the predecessors, all earlier in the list; `cause` is the op that a start waited for,
    or the op itself where that was its release.
    """
    first, before = unsigned(first, before)
    return _earliest(first, before, duration_s, release_s)  # type: ignore[no-any-return]


def last_end(first: Int32, before: Int32, duration_s: Floats, release_s: Floats) -> float:
    """The last end of those that ``earliest`` finds; 0 where there is no op."""
    first, before = unsigned(first, before)
    return float(_last_end(first, before, duration_s, release_s))


@compiled(nogil=True)
def _last_end(first, before, duration, release):  # type: ignore[no-untyped-def]
    end, last = np.empty(len(duration)), 0.0
    for op in range(len(duration)):
        at = release[op]
        for entry in range(first[op], first[op + 1]):
            at = max(at, end[before[entry]])
        end[op] = at + duration[op]
        last = max(last, end[op])
    return last


@compiled(nogil=True)
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
    """For every lane entry of a transfer the op that is the other half of its rank's launch, or one after all others.

    A rank's send and receive of one step are one launch: a batch, as `torch.distributed.batch_isend_irecv` makes it.
    """
    return np.asarray(
        _partners(
            schedule.kind == Kind.TRANSFER,
            schedule.step,
            schedule.lane_start,
            schedule.lane_rank,
            schedule.lane_stream,
            schedule.num_ranks,
        ),
        np.int32,
    )


@compiled(nogil=True)
def _partners(is_transfer, step, lane_start, lane_rank, lane_stream, num_ranks):  # type: ignore[no-untyped-def]
    num_ops = len(is_transfer)
    partner = np.full(len(lane_rank), num_ops, np.int32)
    latest = np.full((num_ranks, 2), -1, np.int32)  # transfer that every rank sends, receives
    for op in range(num_ops):
        if not is_transfer[op]:
            continue
        for side in range(2):
            entry = lane_start[op] + side
            before = latest[lane_rank[entry], 1 - side]
            latest[lane_rank[entry], side] = op
            if before < 0 or step[before] != step[op]:
                continue
            other = lane_start[before] + 1 - side
            if partner[other] == num_ops and lane_stream[lane_start[before]] == lane_stream[lane_start[op]]:
                partner[entry], partner[other] = before, op
    return partner
