"""Event-driven simulation with shared links and interference, compiled.

A heap holds the end of every running op at its present speed, and the launch of every op that only waits for its
host. All events of one instant are taken together; then only the ranks and links of the ops that started or ended
are looked at again. A link matters only while the running ops could ask for more than it carries (it is *tight*);
ops that share tight links, directly or through others, form a group whose speeds are found by progressive filling.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.runtime.compiled import bare, compiled, inlined, prefetch, unsigned
from cpsim.schedule.schedule import STREAMS, Int32, Schedule
from cpsim.schedule.work import LEAST_SPEED, Floats, Work
from cpsim.sim.heap import pop, set_key

# One record per op that waits for its host or runs, per flow of a running op, and per rank and link. Few are in use at
# a time, so that they stay in the processor's caches: who needs one takes the one that was given back last. Flows of a
# link are doubly linked: `head` is the first one, then `following`; those of an op by `next`; -1 ends a list. Sets that
# are emptied after every instant are arrays, [0] the number of members and then the members, beside a flag in their
# records.

OP: Final = np.dtype(
    [
        ("left", "f8"),
        ("since", "f8"),
        ("speed", "f8"),
        ("limit", "f8"),
        ("duration", "f8"),
        ("widest", "f8"),
        ("op", "u4"),
        ("flow", "i4"),
        ("pressure", "i1"),
        ("running", "i1"),
        ("marked", "i1"),
        ("grouped", "i1"),
        ("place", "i4"),
    ],
    align=True,
)
"""One cache line. ``left``: seconds of work at full speed as of ``since``; ``limit``: speed if links were infinitely
fast; ``widest``: most bytes over one link; ``op``: which it is; ``flow``: its first one; ``place``: in the heap, or of
a record that is not in use the next such."""
FLOW: Final = np.dtype(
    [
        ("rate", "f8"),
        ("nbytes", "f8"),
        ("link", "u4"),
        ("op", "u4"),
        ("following", "i4"),
        ("preceding", "i4"),
        ("next", "i4"),
    ],
    align=True,
)
"""``rate``: bytes a second at full speed; ``op``: record of its op; ``next``: flow of its op, or not in use."""
RANK: Final = np.dtype([("running", "i4"), ("marked", "i4"), ("present", "i8"), ("was_present", "i8")], align=True)
"""``running``: how many ops; ``present``: these in two bits per pressure class: none, one, several;
``was_present``: what it was at the end of the instant before."""
LINK: Final = np.dtype(
    [
        ("head", "i4"),
        ("marked", "i4"),
        ("tight", "i4"),
        ("grouped", "i4"),
        ("capacity", "f8"),
        ("left", "f8"),
        ("load", "f8"),
    ],
    align=True,
)
LINE: Final = 64
"""Bytes of a cache line."""
AHEAD: Final = 3
"""Ops of every rank after which a record is needed that is fetched from memory now, where ops start in list order."""


def run(first: Int32, before: Int32, schedule: Schedule, work: Work) -> tuple[Floats, Floats, Int32]:
    """Simulate.

    Args:
        first, before: predecessors of every op, CSR.
        schedule, work: as ``simulate`` takes them.

    Returns:
        start, end and cause, ``[N]`` each, as in ``Timeline``; the end of an op that never starts is NaN.
    """
    num_ops, num_ranks = len(schedule), schedule.num_ranks
    after, shares = np.empty(len(before), np.uint32), _shares_of(work.slowdown.tobytes(), len(work.slowdown))
    first, before, lane_start, lane_rank, flow_start = unsigned(
        first, before, schedule.lane_start, schedule.lane_rank, work.flow_start
    )
    after_start, pending = _successors(first, before, after), np.diff(first).view(np.int32)
    ranks, links = np.zeros(num_ranks, RANK), np.zeros(len(work.link_bytes_per_s), LINK)
    links["head"], links["capacity"] = -1, work.link_bytes_per_s
    start, end, cause = np.empty(num_ops), np.full(num_ops, np.nan), np.arange(num_ops, dtype=np.int32)
    ops = _records(num_ops + 1, OP)
    _run(
        (lane_start, lane_rank, flow_start, work.flow_link, work.flow_bytes, work.duration_s, work.release_s),
        work.pressure,
        (after_start, after, pending),
        (start, end, cause),
        ops,
        _records(len(work.flow_link) + 1, FLOW),
        np.array([-1, 0, -1, 0]),
        ranks,
        links,
        shares,
        ops["place"],
        *_scratch(num_ops, num_ranks, len(links), len(shares)),
    )
    return start, end, cause


def _records(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Records from the beginning of a cache line on; memory that is not written costs nothing."""
    room = np.empty(count * dtype.itemsize + LINE, np.uint8)
    first = -room.ctypes.data % LINE
    return room[first : first + count * dtype.itemsize].view(dtype)


def _scratch(num_ops: int, num_ranks: int, num_links: int, num_classes: int) -> tuple[NDArray[Any], ...]:
    """What ``_run`` works with: a heap of ops and their keys; the ops that run on every rank, the latest one last,
    their number and limits by rank and class; a stack of ops that start now; and sets: ops, a group's ops, ranks,
    links, a group's links."""
    sets = [np.empty(size + 1, np.uint32) for size in (num_ops, num_ops, num_ops, num_ranks, num_links, num_links)]
    heap, key = np.empty(num_ops + 1, np.uint32), np.empty(num_ops + 1)
    for members in (heap, *sets):
        members[0] = 0
    beside, counts = np.empty((num_ranks, len(STREAMS)), np.uint32), np.zeros((num_ranks, num_classes), np.int32)
    return heap, key, beside, counts, np.zeros((num_ranks, num_classes)), *sets


@compiled(nogil=True, error_model="numpy")
def _successors(first, before, after):  # type: ignore[no-untyped-def]
    """The predecessor CSR the other way round: fills ``after`` and returns where every op's begin."""
    num_ops = len(first) - 1
    start = np.zeros(num_ops + 2, np.uint32)
    for op in before:
        start[op + 2] += 1
    for op in range(num_ops):
        start[op + 2] += start[op + 1]
    for op in range(num_ops):
        for entry in range(first[op], first[op + 1]):
            after[start[before[entry] + 1]] = op
            start[before[entry] + 1] += 1
    return start


@lru_cache(16)
def _shares_of(slowdown: bytes, num_classes: int) -> Floats:
    """Shares by the factors of ``Work.slowdown``: schedules of one case, and many cases, have the same."""
    return np.asarray(_shares(np.frombuffer(slowdown).reshape(num_classes, num_classes).copy()))


@compiled(nogil=True, error_model="numpy")
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


@inlined()
def _admit(ops, unused, op, duration, pressure):  # type: ignore[no-untyped-def]
    """A record for an op that waits for nothing but its host."""
    new = unused[0]
    if new >= 0:
        unused[0] = ops[new].place
    else:
        new = unused[1]
        unused[1] += 1
    ops[new].op, ops[new].left, ops[new].duration, ops[new].pressure = op, duration, duration, pressure
    ops[new].since = ops[new].speed = ops[new].limit = 0.0
    ops[new].running = ops[new].marked = ops[new].grouped = ops[new].place = 0
    ops[new].flow = -1
    return new


@bare()
def _run(  # type: ignore[no-untyped-def]
    given,
    pressure,
    waiting,
    found,
    ops,
    flows,
    unused,
    ranks,
    links,
    shares,
    place,
    heap,
    key,
    beside,
    counts,
    limits,
    ready,
    new_ops,
    group_ops,
    new_ranks,
    new_links,
    group_links,
):
    """``unused``: the first record of an op that was given back, or -1, and how many there were; of flows alike."""
    lane_start, lane_rank, flow_start, flow_link, flow_bytes, duration, release = given
    after_start, after, pending = waiting
    start, end, cause = found
    ahead = AHEAD * len(ranks)
    lanes_ahead, flows_ahead = ahead * len(lane_rank) // (len(end) + 1), ahead * len(flow_link) // (len(end) + 1)
    after_ahead = ahead * len(after) // (len(end) + 1)
    for op in range(len(end)):
        if pending[op] == 0:
            set_key(heap, place, key, _admit(ops, unused, op, duration[op], pressure[op]), release[op])
    while heap[0] > 0:
        now = key[1]
        while ready[0] > 0 or (heap[0] > 0 and key[1] <= now):
            if ready[0] > 0:
                one = ready[ready[0]]
                ready[0] -= 1
            else:
                one = pop(heap, place, key)
            op = ops[one].op
            starts, lasts = not ops[one].running, ops[one].running or ops[one].left > 0
            if starts:
                start[op] = ops[one].since = now
                prefetch(lane_rank, lane_start[op] + lanes_ahead)
                prefetch(flow_link, flow_start[op] + flows_ahead)
                prefetch(flow_bytes, flow_start[op] + flows_ahead)
                prefetch(after, after_start[op] + after_ahead)
            if lasts:
                _enter_or_leave(
                    ops,
                    lane_start,
                    lane_rank,
                    flow_start,
                    flow_link,
                    flow_bytes,
                    flows,
                    unused,
                    ranks,
                    links,
                    one,
                    starts,
                    beside,
                    counts,
                    new_ops,
                    new_ranks,
                    new_links,
                )
            if not (starts and lasts):
                end[op] = now
                for entry in range(after_start[op], after_start[op + 1]):  # who waits for nothing else is admitted
                    follower = after[entry]
                    pending[follower] -= 1
                    if pending[follower] == 0:
                        new = _admit(ops, unused, follower, duration[follower], pressure[follower])
                        if release[follower] <= now:
                            cause[follower] = op
                            ready[0] += 1
                            ready[ready[0]] = new
                        else:
                            set_key(heap, place, key, new, release[follower])
                ops[one].place, unused[0] = unused[0], one
        _review_ranks(ops, ranks, shares, beside, limits, new_ops, new_ranks)
        _review_links(ops, flows, links, new_ops, new_links)
        for i in range(1, new_ops[0] + 1):
            one, limit = new_ops[i], 1.0
            op = ops[one].op
            for entry in range(lane_start[op], lane_start[op + 1]):
                limit = min(limit, limits[lane_rank[entry], ops[one].pressure])
            ops[one].limit = limit
        for i in range(1, new_ops[0] + 1):
            one = new_ops[i]
            if ops[one].running and ops[one].marked:
                if not _is_alone(ops, flows, links, one):
                    _set_speeds(ops, flows, links, group_ops, group_links, heap, place, key, one, now)
                elif ops[one].speed != ops[one].limit or ops[one].place == 0:
                    _settle(ops, one, now)
                    ops[one].speed = ops[one].limit
                    set_key(heap, place, key, one, now + max(ops[one].left, 0.0) / ops[one].speed)
            ops[one].marked = 0
        new_ops[0] = 0


@inlined()
def _take_out(members, member, count):  # type: ignore[no-untyped-def]
    """Take a member out of the first ``count``, which keep their order."""
    at = 0
    while members[at] != member:
        at += 1
    for following in range(at + 1, count):
        members[following - 1] = members[following]


@inlined()
def _enter_or_leave(  # type: ignore[no-untyped-def]
    ops,
    lane_start,
    lane_rank,
    flow_start,
    flow_link,
    flow_bytes,
    flows,
    unused,
    ranks,
    links,
    one,
    starts,
    beside,
    counts,
    new_ops,
    new_ranks,
    new_links,
):
    """Enter an op among those running on its ranks and links, or take it out; note what has to be reviewed."""
    ops[one].running = starts
    op, pressure, change = ops[one].op, ops[one].pressure, 1 if starts else -1
    if starts:
        _mark(ops, new_ops, one)
    for entry in range(lane_start[op], lane_start[op + 1]):
        rank = lane_rank[entry]
        counts[rank, pressure] += change
        ranks[rank].present &= ~(3 << 2 * pressure)
        ranks[rank].present |= min(counts[rank, pressure], 2) << 2 * pressure
        if starts:
            beside[rank, ranks[rank].running] = one
        else:
            _take_out(beside[rank], one, ranks[rank].running)
        ranks[rank].running += change
        _mark(ranks, new_ranks, rank)
    if starts:
        last = -1
        for entry in range(flow_start[op], flow_start[op + 1]):
            flow = unused[2]
            if flow >= 0:
                unused[2] = flows[flow].next
            else:
                flow = unused[3]
                unused[3] += 1
            link = flow_link[entry]
            flows[flow].link, flows[flow].op, flows[flow].next = link, one, -1
            flows[flow].nbytes, flows[flow].rate = flow_bytes[entry], flow_bytes[entry] / ops[one].duration
            if last < 0:
                ops[one].flow = flow
            else:
                flows[last].next = flow
            last = flow
            _enter(links, link, flows, flow)
            _mark(links, new_links, link)
    else:
        flow = ops[one].flow
        while flow >= 0:
            link, following = flows[flow].link, flows[flow].next
            _leave(links, link, flows, flow)
            _mark(links, new_links, link)
            flows[flow].next, unused[2] = unused[2], flow
            flow = following


@inlined()
def _review_ranks(ops, ranks, shares, beside, limits, new_ops, new_ranks):  # type: ignore[no-untyped-def]
    """Limits of what runs on ranks where other classes of ops run than before; mark the ops whose limit there
    changes."""
    for i in range(1, new_ranks[0] + 1):
        rank = new_ranks[i]
        ranks[rank].marked = 0
        present = ranks[rank].present
        if present == ranks[rank].was_present:
            continue
        ranks[rank].was_present = present
        changed, own = 0, 0
        while present >> (2 * own):
            if (present >> (2 * own)) & 3:
                limit = max(1.0 - shares[own, present], LEAST_SPEED)
                changed |= (limit != limits[rank, own]) << own
                limits[rank, own] = limit
            own += 1
        for at in range(ranks[rank].running - 1, -1 if changed else ranks[rank].running - 1, -1):
            if (changed >> ops[beside[rank, at]].pressure) & 1:
                _mark(ops, new_ops, beside[rank, at])
    new_ranks[0] = 0


@inlined()
def _review_links(ops, flows, links, new_ops, new_links):  # type: ignore[no-untyped-def]
    """Mark the ops on links that are or were tight."""
    for i in range(1, new_links[0] + 1):
        link = new_links[i]
        links[link].marked = 0
        demand, flow = 0.0, links[link].head
        while flow >= 0:
            demand += flows[flow].rate
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
    alone, flow = True, ops[op].flow
    while flow >= 0:
        alone = alone and not links[flows[flow].link].tight
        flow = flows[flow].next
    return alone


@bare()
def _set_speeds(ops, flows, links, group_ops, group_links, heap, place, key, op, now):  # type: ignore[no-untyped-def]
    """New speeds and ends of an op and of all that share tight links with it."""
    _collect_group(ops, flows, links, group_ops, group_links, op)
    for j in range(1, group_ops[0] + 1):
        _settle(ops, group_ops[j], now)
    _fill(ops, flows, links, group_ops, group_links)
    for j in range(1, group_ops[0] + 1):
        member = group_ops[j]
        ops[member].marked = ops[member].grouped = 0
        set_key(heap, place, key, member, now + max(ops[member].left, 0.0) / ops[member].speed)
    for j in range(1, group_links[0] + 1):
        links[group_links[j]].grouped = 0


@bare()
def _collect_group(ops, flows, links, group_ops, group_links, op):  # type: ignore[no-untyped-def]
    """The ops that share tight links with ``op``, directly or through others, the most bytes of each over one link, and
    those links."""
    group_ops[0] = group_links[0] = 0
    _group(ops, group_ops, op)
    at = 0
    while at < group_ops[0]:
        at += 1
        member, most = group_ops[at], 0.0
        mine = ops[member].flow
        while mine >= 0:
            link, most = flows[mine].link, max(most, flows[mine].nbytes)
            mine = flows[mine].next
            if not links[link].tight or links[link].grouped:
                continue
            _group(links, group_links, link)
            flow = links[link].head
            while flow >= 0:
                _group(ops, group_ops, flows[flow].op)
                flow = flows[flow].following
        ops[member].widest = most


@bare()
def _fill(ops, flows, links, group_ops, group_links):  # type: ignore[no-untyped-def]
    """Progressive filling over the group's tight links; -1 marks speeds not yet found."""
    num_open = group_ops[0]
    for i in range(1, num_open + 1):
        ops[group_ops[i]].speed = -1.0
    while num_open > 0:
        level = _next_level(ops, flows, links, group_ops, group_links)
        for i in range(1, group_ops[0] + 1):
            op = group_ops[i]
            if ops[op].speed >= 0:
                continue
            cap = ops[op].limit * ops[op].widest / ops[op].duration
            closes, flow = cap <= level, ops[op].flow
            while flow >= 0:
                link = flows[flow].link
                if links[link].tight and links[link].left <= level * links[link].load * (1 + 1e-12):
                    closes = True
                flow = flows[flow].next
            if closes:
                ops[op].speed = min(level, cap) * ops[op].duration / ops[op].widest
                num_open -= 1


@bare()
def _next_level(ops, flows, links, group_ops, group_links):  # type: ignore[no-untyped-def]
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
            level = min(level, ops[op].limit * ops[op].widest / ops[op].duration)
        flow = ops[op].flow
        while flow >= 0:
            link = flows[flow].link
            if ops[op].speed >= 0:
                links[link].left -= ops[op].speed * flows[flow].nbytes / ops[op].duration
            else:
                links[link].load += flows[flow].nbytes / ops[op].widest
            flow = flows[flow].next
    for i in range(1, group_links[0] + 1):
        link = group_links[i]
        if links[link].load > 0:
            level = min(level, links[link].left / links[link].load)
    return level
