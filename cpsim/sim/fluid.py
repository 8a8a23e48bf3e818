"""Event-driven simulation with shared links and interference, compiled.

A heap holds the end of every running op at its present speed, and the launch of every op that only waits for its
host. All events of one instant are taken together; then only the ranks and links of the ops that started or ended
are looked at again. A link matters only while the running ops could ask for more than it carries (it is *tight*);
ops that share tight links, directly or through others, form a group whose speeds are found by progressive filling.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cpsim.compiled import bare, inlined
from cpsim.masks import Ints
from cpsim.schedule import Int32, Schedule
from cpsim.sim.heap import pop, set_key
from cpsim.sim.work import LEAST_SPEED, Floats, Work, partners

# One record per op, lane entry, flow, rank and link. Lists are doubly linked through entries: `head` is the first
# entry, then `following`; -1 ends a list. Sets that are emptied after every instant are arrays, [0] the number of
# members and then the members, beside a flag in their records.

OP: Final = np.dtype(
    [
        ("duration", "f8"), ("left", "f8"), ("since", "f8"), ("speed", "f8"), ("limit", "f8"),
        ("first_lane", "i4"), ("first_flow", "i4"), ("first_after", "i4"), ("pending", "i4"),
        ("pressure", "i1"), ("running", "i1"), ("marked", "i1"), ("grouped", "i1"), ("padding", "i4"),
    ],
    align=True,
)  # fmt: skip
"""One cache line. ``left``: seconds of work at full speed as of ``since``; ``limit``: speed if links were infinitely
fast; ``pending``: predecessors still waited for. Entries of an op end where those of the next one begin, so there is
one record more than ops."""
LANE: Final = np.dtype(
    [
        ("rank", "i4"), ("op", "i4"), ("following", "i4"), ("preceding", "i4"),
        ("pending", "i4"), ("waiting", "i4"), ("partner", "i4"), ("padding", "i4"),
    ],
    align=True,
)  # fmt: skip
"""``pending``: predecessors on its rank still waited for, -1 in ops that never wait for other ranks; ``waiting``: its
op does so here; ``partner``: the other half of its rank's launch."""
FLOW: Final = np.dtype(
    [("link", "i4"), ("op", "i4"), ("following", "i4"), ("preceding", "i4"), ("nbytes", "f8")], align=True
)
RANK: Final = np.dtype([("head", "i4"), ("marked", "i4"), ("present", "i8"), ("waiting", "i8")], align=True)
"""``present``: running ops in two bits per pressure class: none, one, several; ``waiting``: one bit, some or none."""
LINK: Final = np.dtype(
    [
        ("head", "i4"), ("marked", "i4"), ("tight", "i4"), ("grouped", "i4"),
        ("capacity", "f8"), ("left", "f8"), ("load", "f8"),
    ],
    align=True,
)  # fmt: skip


def run(first: Ints, before: Int32, schedule: Schedule, work: Work) -> tuple[Floats, Floats, Int32]:
    """Simulate.

    Args:
        first, before: predecessors of every op, CSR.
        schedule, work: as ``simulate`` takes them.

    Returns:
        start, end and cause, ``[N]`` each, as in ``Timeline``; the end of an op that never starts is NaN.
    """
    after_start, after = _successors(first, before)
    num_ops, num_ranks = len(schedule), schedule.num_ranks
    ops, lanes = np.zeros(num_ops + 1, OP), np.zeros(len(schedule.lane_rank), LANE)
    widest = np.zeros(num_ops)
    flows = np.zeros(len(work.flow_link), FLOW)
    _fill_ops(ops, first, after_start, work.duration_s, work.pressure)
    _fill_entries(
        ops,
        lanes,
        flows,
        widest,
        schedule.lane_start,
        schedule.lane_rank,
        work.flow_start,
        work.flow_link,
        work.flow_bytes,
    )
    shares = _shares(work.slowdown), 1.0 - 1.0 / work.waiting
    lanes["partner"] = partners(schedule)
    _fill_pending(ops, lanes, first, before, bool(np.any(shares[1] > 0)))
    ranks, links = np.zeros(num_ranks, RANK), np.zeros(len(work.link_bytes_per_s), LINK)
    ranks["head"] = links["head"] = -1
    links["capacity"] = work.link_bytes_per_s
    start, end, cause = np.full(num_ops, np.nan), np.full(num_ops, np.nan), np.arange(num_ops, dtype=np.int32)
    _run(
        ops, lanes, flows, ranks, links, after, work.release_s, widest, *shares, start, end, cause,
        *_scratch(num_ops, num_ranks, len(links), len(shares[0])),
    )  # fmt: skip
    return start, end, cause


def _scratch(num_ops: int, num_ranks: int, num_links: int, num_classes: int) -> tuple[NDArray[Any], ...]:
    """What ``_run`` works with: a heap of ops, their places in it and keys, counts of running and of waiting ops by
    rank and class, a stack of ops that start now, and sets: ops, a group's ops, ranks, links, a group's links."""
    sets = [np.zeros(size + 1, np.int64) for size in (num_ops, num_ops, num_ops, num_ranks, num_links, num_links)]
    heap, place, key = np.zeros(num_ops + 1, np.int32), np.zeros(num_ops, np.int32), np.zeros(num_ops + 1)
    return heap, place, key, np.zeros((2, num_ranks, num_classes), np.int32), *sets


@bare()
def _fill_ops(ops, first, after_start, duration, pressure):  # type: ignore[no-untyped-def]
    for op in range(len(pressure)):
        ops[op].first_after, ops[op + 1].first_after = after_start[op], after_start[op + 1]
        ops[op].pending, ops[op].pressure = first[op + 1] - first[op], pressure[op]
        ops[op].duration = ops[op].left = duration[op]


@bare()
def _fill_entries(  # type: ignore[no-untyped-def]
    ops, lanes, flows, widest, lane_start, lane_rank, flow_start, flow_link, flow_bytes
):
    for op in range(len(widest)):
        ops[op].first_lane, ops[op + 1].first_lane = lane_start[op], lane_start[op + 1]
        ops[op].first_flow, ops[op + 1].first_flow = flow_start[op], flow_start[op + 1]
        for entry in range(lane_start[op], lane_start[op + 1]):
            lanes[entry].rank, lanes[entry].op = lane_rank[entry], op
        for entry in range(flow_start[op], flow_start[op + 1]):
            flows[entry].link, flows[entry].op, flows[entry].nbytes = flow_link[entry], op, flow_bytes[entry]
            widest[op] = max(widest[op], flow_bytes[entry])


@njit(cache=True, nogil=True, error_model="numpy")
def _successors(first, before):  # type: ignore[no-untyped-def]
    """The predecessor CSR the other way round."""
    num_ops = len(first) - 1
    start = np.zeros(num_ops + 2, np.int64)
    for op in before:
        start[op + 2] += 1
    start = np.cumsum(start)
    after = np.empty(len(before), np.int32)
    for op in range(num_ops):
        for entry in range(first[op], first[op + 1]):
            after[start[before[entry] + 1]] = op
            start[before[entry] + 1] += 1
    return start[: num_ops + 1], after


@bare()
def _fill_pending(ops, lanes, first, before, disturbs):  # type: ignore[no-untyped-def]
    """Predecessors on each rank of ops that may wait for other ranks, if any of them ``disturbs`` meanwhile."""
    for op in range(len(first) - 1):
        waits = disturbs and _spans_ranks(ops, lanes, op)
        for entry in range(ops[op].first_lane, ops[op + 1].first_lane):
            if not waits:
                lanes[entry].pending = -1
                continue
            for at in range(first[op], first[op + 1]):
                lanes[entry].pending += _runs_on(ops, lanes, before[at], lanes[entry].rank)


@inlined()
def _spans_ranks(ops, lanes, op):  # type: ignore[no-untyped-def]
    several = False
    for entry in range(ops[op].first_lane + 1, ops[op + 1].first_lane):
        several = several or lanes[entry].rank != lanes[entry - 1].rank
    return several


@inlined()
def _runs_on(ops, lanes, op, rank):  # type: ignore[no-untyped-def]
    found = False
    for entry in range(ops[op].first_lane, ops[op + 1].first_lane):
        found = found or lanes[entry].rank == rank
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def _shares(slowdown):  # type: ignore[no-untyped-def]
    """What running ops take of an op's speed, ``[class of the op, what is present on its rank, itself included]``."""
    num_classes = len(slowdown)
    table = np.zeros((num_classes, 4**num_classes))
    for own in range(num_classes):
        for present in range(4**num_classes):
            for other in range(num_classes):
                if (present >> (2 * other)) & 3 > (other == own):
                    table[own, present] += 1.0 - 1.0 / slowdown[own, other]
    return table


@inlined()
def _limit(running, waiting, own, present, waits):  # type: ignore[no-untyped-def]
    """Speed of an op of class ``own`` beside what is present on its rank and what waits there."""
    left = 1.0 - running[own, present]
    other = 0
    while waits >> other:
        if (waits >> other) & 1 and (present >> (2 * other)) & 3 == 0:
            left -= waiting[own, other]
        other += 1
    return max(left, LEAST_SPEED)


@inlined()
def _mark(records, members, item):  # type: ignore[no-untyped-def]
    if not records[item].marked:
        records[item].marked = 1
        members[0] += 1
        members[members[0]] = item


@inlined()
def _group(records, members, item):  # type: ignore[no-untyped-def]
    if not records[item].grouped:
        records[item].grouped = 1
        members[0] += 1
        members[members[0]] = item


@inlined()
def _enter(lists, which, entries, entry):  # type: ignore[no-untyped-def]
    following = lists[which].head
    entries[entry].following, entries[entry].preceding = following, -1
    if following >= 0:
        entries[following].preceding = entry
    lists[which].head = entry


@inlined()
def _leave(lists, which, entries, entry):  # type: ignore[no-untyped-def]
    following, preceding = entries[entry].following, entries[entry].preceding
    if preceding >= 0:
        entries[preceding].following = following
    else:
        lists[which].head = following
    if following >= 0:
        entries[following].preceding = preceding


@bare()
def _run(  # type: ignore[no-untyped-def]
    ops, lanes, flows, ranks, links, after, release, widest, running, waiting, start, end, cause,
    heap, place, key, counts, ready, new_ops, group_ops, new_ranks, new_links, group_links,
):  # fmt: skip
    for op in range(len(release)):
        if ops[op].pending == 0 or _is_ready_somewhere(ops, lanes, op):
            set_key(heap, place, key, op, release[op])
    while heap[0] > 0:
        now = key[1]
        while ready[0] > 0 or (heap[0] > 0 and key[1] <= now):
            if ready[0] > 0:
                op = ready[ready[0]]
                ready[0] -= 1
            else:
                op = pop(heap, place, key)
            if ops[op].pending > 0:
                _begin_waiting(ops, lanes, ranks, op, counts, new_ranks)
                continue
            starts = not ops[op].running
            if starts:
                _end_waiting(ops, lanes, ranks, op, counts, new_ranks)
                start[op] = ops[op].since = now
            if ops[op].duration > 0:
                _enter_or_leave(ops, lanes, flows, ranks, links, op, starts, counts, new_ops, new_ranks, new_links)
            if not (starts and ops[op].duration > 0):
                end[op] = now
                _release_followers(
                    ops, lanes, ranks, after, release, heap, place, key, ready, cause, counts, new_ranks, op, now
                )
        _review_ranks(ops, lanes, ranks, running, waiting, counts, new_ops, new_ranks)
        _review_links(ops, flows, links, new_ops, new_links)
        for i in range(1, new_ops[0] + 1):
            op = new_ops[i]
            limit = 1.0
            for entry in range(ops[op].first_lane, ops[op + 1].first_lane):
                rank = lanes[entry].rank
                here = _limit(running, waiting, ops[op].pressure, ranks[rank].present, ranks[rank].waiting)
                limit = min(limit, here)
            ops[op].limit = limit
        for i in range(1, new_ops[0] + 1):
            op = new_ops[i]
            if ops[op].running and ops[op].marked:
                if not _is_alone(ops, flows, links, op):
                    _set_speeds(ops, flows, links, widest, group_ops, group_links, heap, place, key, op, now)
                elif ops[op].speed != ops[op].limit or place[op] == 0:
                    _settle(ops, op, now)
                    ops[op].speed = ops[op].limit
                    set_key(heap, place, key, op, now + max(ops[op].left, 0.0) / ops[op].speed)
            ops[op].marked = 0
        new_ops[0] = 0


@inlined()
def _enter_or_leave(  # type: ignore[no-untyped-def]
    ops, lanes, flows, ranks, links, op, starts, counts, new_ops, new_ranks, new_links
):
    """Enter an op among those running on its ranks and links, or take it out; note what has to be reviewed."""
    ops[op].running = starts
    pressure, change = ops[op].pressure, 1 if starts else -1
    if starts:
        _mark(ops, new_ops, op)
    for entry in range(ops[op].first_lane, ops[op + 1].first_lane):
        rank = lanes[entry].rank
        counts[0, rank, pressure] += change
        if starts:
            _enter(ranks, rank, lanes, entry)
        else:
            _leave(ranks, rank, lanes, entry)
        _mark(ranks, new_ranks, rank)
    for entry in range(ops[op].first_flow, ops[op + 1].first_flow):
        link = flows[entry].link
        if starts:
            _enter(links, link, flows, entry)
        else:
            _leave(links, link, flows, entry)
        _mark(links, new_links, link)


@inlined()
def _is_ready_somewhere(ops, lanes, op):  # type: ignore[no-untyped-def]
    """Whether an op that may wait for other ranks waits for nothing on one of its ranks."""
    ready = False
    for entry in range(ops[op].first_lane, ops[op + 1].first_lane):
        ready = ready or lanes[entry].pending == 0
    return ready


@inlined()
def _begin_waiting(ops, lanes, ranks, op, counts, new_ranks):  # type: ignore[no-untyped-def]
    for entry in range(ops[op].first_lane, ops[op + 1].first_lane):
        partner = lanes[entry].partner
        launched = lanes[entry].pending == 0 and (partner < 0 or lanes[partner].pending <= 0)
        if launched and not lanes[entry].waiting:
            lanes[entry].waiting = 1
            counts[1, lanes[entry].rank, ops[op].pressure] += 1
            _mark(ranks, new_ranks, lanes[entry].rank)


@inlined()
def _end_waiting(ops, lanes, ranks, op, counts, new_ranks):  # type: ignore[no-untyped-def]
    for entry in range(ops[op].first_lane, ops[op + 1].first_lane):
        if lanes[entry].waiting:
            lanes[entry].waiting = 0
            counts[1, lanes[entry].rank, ops[op].pressure] -= 1
            _mark(ranks, new_ranks, lanes[entry].rank)


@inlined()
def _release_followers(  # type: ignore[no-untyped-def]
    ops, lanes, ranks, after, release, heap, place, key, ready, cause, counts, new_ranks, op, now
):
    """Whoever waited for nothing else than the end of ``op`` starts as soon as its host has launched it.

    One that still waits for other ranks is launched where it waits for nothing.
    """
    for entry in range(ops[op].first_after, ops[op + 1].first_after):
        follower = after[entry]
        ops[follower].pending -= 1
        for at in range(ops[follower].first_lane, ops[follower + 1].first_lane):
            if lanes[at].pending > 0 and _runs_on(ops, lanes, op, lanes[at].rank):
                lanes[at].pending -= 1
                other = lanes[lanes[at].partner].op if lanes[at].pending == 0 and lanes[at].partner >= 0 else -1
                if other >= 0 and ops[other].pending > 0 and release[other] <= now:
                    _begin_waiting(ops, lanes, ranks, other, counts, new_ranks)
        if ops[follower].pending == 0 and release[follower] <= now:
            cause[follower] = op
            if place[follower] == 0:  # not launched at this instant
                ready[0] += 1
                ready[ready[0]] = follower
        elif ops[follower].pending == 0 or (release[follower] > now and _is_ready_somewhere(ops, lanes, follower)):
            set_key(heap, place, key, follower, release[follower])
        else:
            _begin_waiting(ops, lanes, ranks, follower, counts, new_ranks)


@inlined()
def _review_ranks(ops, lanes, ranks, running, waiting, counts, new_ops, new_ranks):  # type: ignore[no-untyped-def]
    """Mark the ops on ranks where other classes of ops run or wait than before, if that changes their limit there."""
    for i in range(1, new_ranks[0] + 1):
        rank = new_ranks[i]
        ranks[rank].marked = 0
        present, waits = 0, 0
        for c in range(counts.shape[2]):
            present |= min(counts[0, rank, c], 2) << (2 * c)
            waits |= min(counts[1, rank, c], 1) << c
        before, waited = ranks[rank].present, ranks[rank].waiting
        if present == before and waits == waited:
            continue
        ranks[rank].present, ranks[rank].waiting = present, waits
        entry = ranks[rank].head
        while entry >= 0:
            pressure = ops[lanes[entry].op].pressure
            was = _limit(running, waiting, pressure, before, waited)
            if _limit(running, waiting, pressure, present, waits) != was:
                _mark(ops, new_ops, lanes[entry].op)
            entry = lanes[entry].following
    new_ranks[0] = 0


@inlined()
def _review_links(ops, flows, links, new_ops, new_links):  # type: ignore[no-untyped-def]
    """Mark the ops on links that are or were tight."""
    for i in range(1, new_links[0] + 1):
        link = new_links[i]
        links[link].marked = 0
        demand, flow = 0.0, links[link].head
        while flow >= 0:
            demand += flows[flow].nbytes / ops[flows[flow].op].duration
            flow = flows[flow].following
        was_tight = links[link].tight
        links[link].tight = demand > links[link].capacity * (1 + 1e-12)
        flow = links[link].head
        while flow >= 0 and (was_tight or links[link].tight):
            _mark(ops, new_ops, flows[flow].op)
            flow = flows[flow].following
    new_links[0] = 0


@inlined()
def _settle(ops, op, now):  # type: ignore[no-untyped-def]
    """Account for the work done at the old speed."""
    ops[op].left -= ops[op].speed * (now - ops[op].since)
    ops[op].since = now


@inlined()
def _is_alone(ops, flows, links, op):  # type: ignore[no-untyped-def]
    """Whether none of an op's links could fill."""
    alone = True
    for entry in range(ops[op].first_flow, ops[op + 1].first_flow):
        alone = alone and not links[flows[entry].link].tight
    return alone


@bare()
def _set_speeds(ops, flows, links, widest, group_ops, group_links, heap, place, key, op, now):  # type: ignore[no-untyped-def]
    """New speeds and ends of an op and of all that share tight links with it."""
    _collect_group(ops, flows, links, group_ops, group_links, op)
    for j in range(1, group_ops[0] + 1):
        _settle(ops, group_ops[j], now)
    _fill(ops, flows, links, widest, group_ops, group_links)
    for j in range(1, group_ops[0] + 1):
        member = group_ops[j]
        ops[member].marked = ops[member].grouped = 0
        set_key(heap, place, key, member, now + max(ops[member].left, 0.0) / ops[member].speed)
    for j in range(1, group_links[0] + 1):
        links[group_links[j]].grouped = 0


@bare()
def _collect_group(ops, flows, links, group_ops, group_links, op):  # type: ignore[no-untyped-def]
    """The ops that share tight links with ``op``, directly or through others, and those links."""
    group_ops[0] = group_links[0] = 0
    _group(ops, group_ops, op)
    at = 0
    while at < group_ops[0]:
        at += 1
        for entry in range(ops[group_ops[at]].first_flow, ops[group_ops[at] + 1].first_flow):
            link = flows[entry].link
            if not links[link].tight or links[link].grouped:
                continue
            _group(links, group_links, link)
            flow = links[link].head
            while flow >= 0:
                _group(ops, group_ops, flows[flow].op)
                flow = flows[flow].following


@bare()
def _fill(ops, flows, links, widest, group_ops, group_links):  # type: ignore[no-untyped-def]
    """Progressive filling over the group's tight links; -1 marks speeds not yet found."""
    num_open = group_ops[0]
    for i in range(1, num_open + 1):
        ops[group_ops[i]].speed = -1.0
    while num_open > 0:
        level = _next_level(ops, flows, links, widest, group_ops, group_links)
        for i in range(1, group_ops[0] + 1):
            op = group_ops[i]
            if ops[op].speed >= 0:
                continue
            cap = ops[op].limit * widest[op] / ops[op].duration
            closes = cap <= level
            for entry in range(ops[op].first_flow, ops[op + 1].first_flow):
                link = flows[entry].link
                if links[link].tight and links[link].left <= level * links[link].load * (1 + 1e-12):
                    closes = True
            if closes:
                ops[op].speed = min(level, cap) * ops[op].duration / widest[op]
                num_open -= 1


@bare()
def _next_level(ops, flows, links, widest, group_ops, group_links):  # type: ignore[no-untyped-def]
    """Byte rate at which the next link fills or the next op runs at its own limit.

    ``left`` becomes what ops with a known speed leave of a link, ``load`` the weight of the other ones.
    """
    for i in range(1, group_links[0] + 1):
        link = group_links[i]
        links[link].left, links[link].load = links[link].capacity, 0.0
    level = np.inf
    for i in range(1, group_ops[0] + 1):
        op = group_ops[i]
        if ops[op].speed < 0:
            level = min(level, ops[op].limit * widest[op] / ops[op].duration)
        for entry in range(ops[op].first_flow, ops[op + 1].first_flow):
            link = flows[entry].link
            if ops[op].speed >= 0:
                links[link].left -= ops[op].speed * flows[entry].nbytes / ops[op].duration
            else:
                links[link].load += flows[entry].nbytes / widest[op]
    for i in range(1, group_links[0] + 1):
        link = group_links[i]
        if links[link].load > 0:
            level = min(level, links[link].left / links[link].load)
    return level
