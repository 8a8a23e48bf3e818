"""The fast engine: the same meaning as the reference, compiled.

Without links and interference a start is the maximum of ends (max-plus), one pass in list order. Otherwise ops are
followed event by event: a heap holds the end of every running op at its present speed, and an event touches only
the ranks and links of the ops that started or ended.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cpsim.errors import ScheduleError
from cpsim.schedule import Schedule
from cpsim.sim.timeline import Timeline
from cpsim.sim.work import Work, predecessors


def simulate(schedule: Schedule, work: Work) -> Timeline:
    """Run a schedule; equal to ``simulate_reference`` bit for bit at constant rates, to 1e-9 otherwise.

    Raises:
        ScheduleError: some op never starts; the message shows its ranks, streams and text.
    """
    first, before = predecessors(schedule)
    backward = bool(np.all(before < np.repeat(np.arange(len(schedule)), np.diff(first))))
    if work.constant and backward:
        start, end, cause = _max_plus(first, before, work.duration_s, work.release_s)
        return Timeline(schedule, start, end, cause)
    start, end, cause, num_ended = _fluid(
        first, before, schedule.num_ranks, schedule.lane_start, schedule.lane_rank, work.duration_s,
        work.release_s, work.flow_start, work.flow_link, work.flow_bytes, work.link_bytes_per_s, work.pressure,
        work.slowdown,
    )  # fmt: skip
    if num_ended < len(schedule):
        waiting = int(np.flatnonzero(np.isnan(end))[0])
        raise ScheduleError(f"deadlock: this op never starts: {schedule.op(waiting)}")
    return Timeline(schedule, start, end, cause)


@njit(cache=True, nogil=True)
def _max_plus(first, before, duration, release):  # type: ignore[no-untyped-def]
    num_ops = len(duration)
    start, end = np.empty(num_ops), np.empty(num_ops)
    cause = np.empty(num_ops, np.int32)
    for op in range(num_ops):
        at, by = release[op], op
        for entry in range(first[op], first[op + 1]):
            if end[before[entry]] >= at:
                at, by = end[before[entry]], before[entry]
        start[op], end[op], cause[op] = at, at + duration[op], by
    return start, end, cause


@njit(cache=True, nogil=True)
def _successors(first, before):  # type: ignore[no-untyped-def]
    """The predecessor CSR the other way round."""
    num_ops = len(first) - 1
    start = np.zeros(num_ops + 2, np.int64)
    for op in before:
        start[op + 2] += 1
    for op in range(num_ops):
        start[op + 2] += start[op + 1]
    after = np.empty(len(before), np.int32)
    for op in range(num_ops):
        for entry in range(first[op], first[op + 1]):
            after[start[before[entry] + 1]] = op
            start[before[entry] + 1] += 1
    return start[: num_ops + 1], after


# An indexed binary heap of ops, smallest key first. heap[0] counts its entries; heap[1:] are ops; place[op] is the
# op's position, 0 when it is not in the heap.


@njit(cache=True, nogil=True, inline="always")
def _sift_up(heap, place, key, at):  # type: ignore[no-untyped-def]
    op = heap[at]
    while at > 1 and key[op] < key[heap[at >> 1]]:
        heap[at] = heap[at >> 1]
        place[heap[at]] = at
        at >>= 1
    heap[at] = op
    place[op] = at


@njit(cache=True, nogil=True, inline="always")
def _sift_down(heap, place, key, at):  # type: ignore[no-untyped-def]
    op, count = heap[at], heap[0]
    while 2 * at <= count:
        child = 2 * at
        if child < count and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[child]] >= key[op]:
            break
        heap[at] = heap[child]
        place[heap[at]] = at
        at = child
    heap[at] = op
    place[op] = at


@njit(cache=True, nogil=True)
def _set_key(heap, place, key, op, value):  # type: ignore[no-untyped-def]
    """Insert an op, or move it to its new key."""
    if place[op] == 0:
        heap[0] += 1
        heap[heap[0]] = op
        place[op] = heap[0]
        key[op] = value
        _sift_up(heap, place, key, place[op])
        return
    earlier = value < key[op]
    key[op] = value
    if earlier:
        _sift_up(heap, place, key, place[op])
    else:
        _sift_down(heap, place, key, place[op])


@njit(cache=True, nogil=True)
def _pop(heap, place, key):  # type: ignore[no-untyped-def]
    op = heap[1]
    place[op] = 0
    last = heap[heap[0]]
    heap[0] -= 1
    if heap[0] > 0:
        heap[1] = last
        _sift_down(heap, place, key, 1)
    return op


# What runs on a rank, in two bits per pressure class: none, one op, or several. _limits holds the speed of an op of
# every class beside every such set.


@njit(cache=True, nogil=True)
def _limits(slowdown):  # type: ignore[no-untyped-def]
    """Speed under interference, ``[class of the op, what runs on its rank, itself included]``."""
    num_classes = len(slowdown)
    table = np.ones((num_classes, 4**num_classes))
    for own in range(num_classes):
        for running in range(4**num_classes):
            worst = 1.0
            for other in range(num_classes):
                if (running >> (2 * other)) & 3 > (other == own):
                    worst = max(worst, slowdown[own, other])
            table[own, running] = 1.0 / worst
    return table


@njit(cache=True, nogil=True, inline="always")
def _limit(op, lane_start, lane_rank, present, pressure, limits):  # type: ignore[no-untyped-def]
    """Speed of a running op under interference alone."""
    limit = 1.0
    for entry in range(lane_start[op], lane_start[op + 1]):
        limit = min(limit, limits[pressure[op], present[lane_rank[entry]]])
    return limit


@njit(cache=True, nogil=True, inline="always")
def _is_shared(op, tight, flow_start, flow_link):  # type: ignore[no-untyped-def]
    """Whether an op uses a link that could fill."""
    for entry in range(flow_start[op], flow_start[op + 1]):
        if tight[flow_link[entry]]:
            return True
    return False


@njit(cache=True, nogil=True)
def _link_is_tight(link, head, following, flow_op, flow_bytes, duration, capacity):  # type: ignore[no-untyped-def]
    """Whether the running ops could ask for more than the link carries."""
    demand, flow = 0.0, head[link]
    while flow >= 0:
        demand += flow_bytes[flow] / duration[flow_op[flow]]
        flow = following[flow]
    return demand > capacity[link] * (1 + 1e-12)


@njit(cache=True, nogil=True)
def _component(seed, ops, links, seen, seen_link, tight, head, following, flow_op, flow_start, flow_link):  # type: ignore[no-untyped-def]
    """Collect the ops that share tight links with ``seed``, directly or not, and those links."""
    num_ops, num_links, at = 1, 0, 0
    ops[0] = seed
    seen[seed] = True
    while at < num_ops:
        op = ops[at]
        at += 1
        for entry in range(flow_start[op], flow_start[op + 1]):
            link = flow_link[entry]
            if not tight[link] or seen_link[link]:
                continue
            seen_link[link] = True
            links[num_links] = link
            num_links += 1
            flow = head[link]
            while flow >= 0:
                if not seen[flow_op[flow]]:
                    seen[flow_op[flow]] = True
                    ops[num_ops] = flow_op[flow]
                    num_ops += 1
                flow = following[flow]
    return num_ops, num_links


@njit(cache=True, nogil=True)
def _fill(ops, links, tight, limit, speed, left, load, flow_start, flow_link, flow_bytes, widest, duration, capacity):  # type: ignore[no-untyped-def]
    """Progressive filling over one component's tight links; writes the speed of its ops."""
    for link in links:
        left[link], load[link] = capacity[link], 0.0
    for op in ops:
        speed[op] = -1.0
        for entry in range(flow_start[op], flow_start[op + 1]):
            if tight[flow_link[entry]]:
                load[flow_link[entry]] += flow_bytes[entry] / widest[op]
    num_open = len(ops)
    while num_open > 0:
        level = np.inf
        for link in links:
            if load[link] > 1e-9:
                level = min(level, left[link] / load[link])
        for op in ops:
            if speed[op] < 0:
                level = min(level, limit[op] * widest[op] / duration[op])
        closing = 0
        for op in ops:
            if speed[op] >= 0:
                continue
            cap = limit[op] * widest[op] / duration[op]
            closes = cap <= level
            for entry in range(flow_start[op], flow_start[op + 1]):
                link = flow_link[entry]
                if tight[link] and load[link] > 1e-9 and left[link] <= level * load[link] * (1 + 1e-12):
                    closes = True
            if closes:
                speed[op] = min(level, cap) * duration[op] / widest[op]
                closing += 1
        for link in links:
            left[link], load[link] = capacity[link], 0.0
        for op in ops:
            for entry in range(flow_start[op], flow_start[op + 1]):
                link = flow_link[entry]
                if not tight[link]:
                    continue
                if speed[op] >= 0:
                    left[link] -= speed[op] * flow_bytes[entry] / duration[op]
                else:
                    load[link] += flow_bytes[entry] / widest[op]
        num_open -= closing


@njit(cache=True, nogil=True)
def _fluid(  # type: ignore[no-untyped-def]
    first, before, num_ranks, lane_start, lane_rank, duration, release, flow_start, flow_link, flow_bytes,
    capacity, pressure, slowdown,
):  # fmt: skip
    num_ops, num_links = len(duration), len(capacity)
    after_start, after = _successors(first, before)
    pending = first[1:] - first[:-1]
    start, end = np.full(num_ops, np.nan), np.full(num_ops, np.nan)
    cause = np.arange(num_ops).astype(np.int32)
    heap, place, key = np.zeros(num_ops + 1, np.int32), np.zeros(num_ops, np.int32), np.zeros(num_ops)
    running = np.zeros(num_ops, np.bool_)
    left, speed, limit, since = duration.copy(), np.zeros(num_ops), np.ones(num_ops), np.zeros(num_ops)
    limits = _limits(slowdown)
    counts = np.zeros((num_ranks, slowdown.shape[0]), np.int32)
    present = np.zeros(num_ranks, np.int64)
    # Ops running on a rank, as a list through its lane entries; flows on a link, as a list through its flows.
    rank_head = np.full(num_ranks, -1, np.int64)
    rank_next, rank_previous = np.full(len(lane_rank), -1, np.int64), np.full(len(lane_rank), -1, np.int64)
    lane_op = np.empty(len(lane_rank), np.int32)
    head = np.full(num_links, -1, np.int64)
    following, preceding = np.full(len(flow_link), -1, np.int64), np.full(len(flow_link), -1, np.int64)
    flow_op = np.empty(len(flow_link), np.int32)
    widest = np.zeros(num_ops)
    for op in range(num_ops):
        for entry in range(lane_start[op], lane_start[op + 1]):
            lane_op[entry] = op
        for entry in range(flow_start[op], flow_start[op + 1]):
            flow_op[entry] = op
            widest[op] = max(widest[op], flow_bytes[entry])
    tight, dirty_link = np.zeros(num_links, np.bool_), np.zeros(num_links, np.bool_)
    dirty_rank, dirty_op = np.zeros(num_ranks, np.bool_), np.zeros(num_ops, np.bool_)
    seen, seen_link = np.zeros(num_ops, np.bool_), np.zeros(num_links, np.bool_)
    links_left, links_load = np.zeros(num_links), np.zeros(num_links)
    ranks, links, ops = (
        np.empty(num_ranks, np.int64),
        np.empty(num_links, np.int64),
        np.empty(num_ops, np.int64),
    )
    group_ops, group_links = np.empty(num_ops, np.int64), np.empty(num_links, np.int64)
    for op in range(num_ops):
        if pending[op] == 0:
            _set_key(heap, place, key, op, release[op])
    num_ended = 0
    while heap[0] > 0:
        now = key[heap[1]]
        num_dirty_ranks = num_dirty_links = num_dirty_ops = 0
        while heap[0] > 0 and key[heap[1]] <= now:
            op = _pop(heap, place, key)
            starts = not running[op]
            if starts:
                start[op] = since[op] = now
                if duration[op] > 0:
                    running[op] = True
                    dirty_op[op] = True
                    ops[num_dirty_ops] = op
                    num_dirty_ops += 1
            else:
                running[op] = False
            if duration[op] > 0:
                for entry in range(lane_start[op], lane_start[op + 1]):
                    rank = lane_rank[entry]
                    counts[rank, pressure[op]] += 1 if starts else -1
                    if starts:
                        rank_next[entry], rank_previous[entry] = rank_head[rank], -1
                        if rank_head[rank] >= 0:
                            rank_previous[rank_head[rank]] = entry
                        rank_head[rank] = entry
                    else:
                        if rank_previous[entry] >= 0:
                            rank_next[rank_previous[entry]] = rank_next[entry]
                        else:
                            rank_head[rank] = rank_next[entry]
                        if rank_next[entry] >= 0:
                            rank_previous[rank_next[entry]] = rank_previous[entry]
                    if not dirty_rank[rank]:
                        dirty_rank[rank] = True
                        ranks[num_dirty_ranks] = rank
                        num_dirty_ranks += 1
                for entry in range(flow_start[op], flow_start[op + 1]):
                    link = flow_link[entry]
                    if starts:
                        following[entry], preceding[entry] = head[link], -1
                        if head[link] >= 0:
                            preceding[head[link]] = entry
                        head[link] = entry
                    else:
                        if preceding[entry] >= 0:
                            following[preceding[entry]] = following[entry]
                        else:
                            head[link] = following[entry]
                        if following[entry] >= 0:
                            preceding[following[entry]] = preceding[entry]
                    if not dirty_link[link]:
                        dirty_link[link] = True
                        links[num_dirty_links] = link
                        num_dirty_links += 1
            if starts and duration[op] > 0:
                continue
            end[op] = now
            num_ended += 1
            for entry in range(after_start[op], after_start[op + 1]):
                follower = after[entry]
                pending[follower] -= 1
                if pending[follower] == 0:
                    if release[follower] <= now:
                        cause[follower] = op
                    _set_key(heap, place, key, follower, max(now, release[follower]))
        # Interference: only ranks whose set of running classes changed.
        for i in range(num_dirty_ranks):
            rank = ranks[i]
            dirty_rank[rank] = False
            mask = 0
            for c in range(counts.shape[1]):
                mask |= min(counts[rank, c], 2) << (2 * c)
            if mask == present[rank]:
                continue
            present[rank] = mask
            entry = rank_head[rank]
            while entry >= 0:
                if not dirty_op[lane_op[entry]]:
                    dirty_op[lane_op[entry]] = True
                    ops[num_dirty_ops] = lane_op[entry]
                    num_dirty_ops += 1
                entry = rank_next[entry]
        # Sharing: links that are or were tight drag in everything that shares them.
        for i in range(num_dirty_links):
            link = links[i]
            dirty_link[link] = False
            was = tight[link]
            tight[link] = _link_is_tight(link, head, following, flow_op, flow_bytes, duration, capacity)
            if not (was or tight[link]):
                continue
            flow = head[link]
            while flow >= 0:
                if not dirty_op[flow_op[flow]]:
                    dirty_op[flow_op[flow]] = True
                    ops[num_dirty_ops] = flow_op[flow]
                    num_dirty_ops += 1
                flow = following[flow]
        for i in range(num_dirty_ops):
            op = ops[i]
            if not running[op]:
                continue
            limit[op] = _limit(op, lane_start, lane_rank, present, pressure, limits)
            if not _is_shared(op, tight, flow_start, flow_link):
                dirty_op[op] = False
                if speed[op] != limit[op] or place[op] == 0:
                    left[op] -= speed[op] * (now - since[op])
                    since[op], speed[op] = now, limit[op]
                    _set_key(heap, place, key, op, now + max(left[op], 0.0) / speed[op])
        for i in range(num_dirty_ops):
            op = ops[i]
            if not running[op] or not dirty_op[op]:
                dirty_op[op] = False
                continue
            num_group, num_shared = _component(
                op, group_ops, group_links, seen, seen_link, tight, head, following, flow_op, flow_start,
                flow_link,
            )  # fmt: skip
            for j in range(num_group):
                member = group_ops[j]
                left[member] -= speed[member] * (now - since[member])
                since[member] = now
            _fill(
                group_ops[:num_group], group_links[:num_shared], tight, limit, speed, links_left, links_load,
                flow_start, flow_link, flow_bytes, widest, duration, capacity,
            )  # fmt: skip
            for j in range(num_group):
                member = group_ops[j]
                seen[member] = dirty_op[member] = False
                _set_key(heap, place, key, member, now + max(left[member], 0.0) / speed[member])
            for j in range(num_shared):
                seen_link[group_links[j]] = False
    return start, end, cause, num_ended
