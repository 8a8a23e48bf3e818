"""A scheduler of our own: it knows which keys every server holds, and balances by what kernels cost.

The busiest server gives away queries until none has more than the mean and the tolerance. A task, or a part of one,
goes to a server that has keys of its document, or to the one with the least work. Of all such moves that one is made
which adds the fewest bytes for its work: queries travel twice, keys only where the receiver lacks them, and keys that
the giver no longer needs are not sent to it any more. Work that makes the receiver's call end later than its blocks
alone, because none was as long, counts less. Parts are multiples of 128 tokens of the beginning or the end of a task. A
server of which no such part fits anywhere keeps what it has.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.strategies.distca.items import lay_out, tasks_of
from cpsim.strategies.distca.kernel import Kernel, cost
from cpsim.strategies.distca.tasks import Tasks, TokenBytes, make_tasks

GRAIN: Final = 128
"""Tokens that parts of tasks are multiples of: a tile."""
HOME, SERVER, DOCUMENT, FIRST, TOKENS = range(5)
"""Columns of a task."""
MOVES: Final = 64
"""For every server, at most."""


def balanced(
    documents: Ints, num_servers: int, sizes: TokenBytes, tolerance: float, kernel: Kernel, offset: Ints | int = 0
) -> Tasks:
    """Tasks whose cost no server has more of than ``1 + tolerance`` times the mean, where parts fit elsewhere.

    Args:
        documents: lengths [tokens], ``[D]``, of one nano-batch.
        num_servers: n.
        sizes: both sizes matter; the log-sum-exp counts with O.
        tolerance: of the mean.
        kernel: of the pass that is planned.
        offset: tokens of every document that come before, in another nano-batch.
    """
    home = tasks_of(lay_out(documents, num_servers, offset))
    tasks = np.stack([home.home, home.server, home.document, home.first, home.tokens], axis=1)
    order = np.argsort(home.document, kind="stable")
    own = np.concatenate(([0], np.cumsum(np.bincount(home.document, minlength=len(documents))))), tasks[order]
    reach = np.zeros((len(documents), num_servers), np.int64)
    np.maximum.at(reach, (home.document, home.server), home.kv)
    if kernel.backward:  # the bundle, and dQ; K and V, and dK and dV
        nbytes = 4.0 * sizes.q + sizes.lse, 2.0 * sizes.kv
    else:
        nbytes = 2.0 * sizes.q + sizes.lse, float(sizes.kv)
    count, tasks = _balance(tasks, num_servers, tolerance, kernel.arrays(), kernel.tail_pairs, nbytes, own, reach)
    return make_tasks(*tasks[:count].T)


@compiled()
def _lacking(own, document, server, begin, end):  # type: ignore[no-untyped-def]
    """Keys of a document from one to another that are not a server's own."""
    start, pieces = own
    missing = end - begin
    for i in range(start[document], start[document + 1]):
        if pieces[i, HOME] == server:
            first, last = pieces[i, FIRST], pieces[i, FIRST] + pieces[i, TOKENS]
            missing -= max(0, min(end, last) - max(begin, first))
    return missing


@compiled()
def _fitting(kernel, task, target, from_end):  # type: ignore[no-untyped-def]
    """The most queries of one end of a task that cost no more than the target: all of them, or a multiple of 128."""
    first, tokens = task[FIRST], task[TOKENS]
    if cost(kernel, first, tokens) <= target:
        return tokens
    low, high = 0, tokens // GRAIN + 1
    while high - low > 1:
        middle = (low + high) // 2
        begin = first + tokens - middle * GRAIN if from_end else first
        if middle * GRAIN < tokens and cost(kernel, begin, middle * GRAIN) <= target:
            low = middle
        else:
            high = middle
    return low * GRAIN


@compiled()
def _reaches(tasks, count, server, reach):  # type: ignore[no-untyped-def]
    """How far a server's tasks of every task's document reach without that task, ``[count]``."""
    first, second = np.zeros(len(reach), np.int64), np.zeros(len(reach), np.int64)
    for i in range(count):
        if tasks[i, SERVER] == server:
            document, end = tasks[i, DOCUMENT], tasks[i, FIRST] + tasks[i, TOKENS]
            second[document] = max(second[document], min(first[document], end))
            first[document] = max(first[document], end)
    without = np.zeros(count, np.int64)
    for i in range(count):
        if tasks[i, SERVER] == server:
            document, end = tasks[i, DOCUMENT], tasks[i, FIRST] + tasks[i, TOKENS]
            without[i] = second[document] if end == first[document] else first[document]
    return without


@compiled()
def _bytes_of(task, queries, from_end, server, without, nbytes, own, reach):  # type: ignore[no-untyped-def]
    """Bytes that a move adds."""
    document, giver, end = task[DOCUMENT], task[SERVER], task[FIRST] + task[TOKENS]
    moved_end = end if from_end else task[FIRST] + queries
    kept = end if queries < task[TOKENS] and not from_end else without
    if queries < task[TOKENS] and from_end:
        kept = max(without, end - queries)
    there = reach[document, server]
    keys = _lacking(own, document, server, there, moved_end) if moved_end > there else 0
    if kept < reach[document, giver]:
        keys -= _lacking(own, document, giver, kept, reach[document, giver])
    travels = (server != task[HOME]) - (giver != task[HOME])
    return queries * travels * nbytes[0] + keys * nbytes[1]


@compiled()
def _best_move(tasks, count, giver, load, longest, below, most, wary, kernel, tail, nbytes, own, reach):  # type: ignore[no-untyped-def]
    """The task, queries, whether of its end, and the server of the move with the fewest bytes for its work; and how far
    what the giver has left of the document reaches without the task."""
    without, emptiest = _reaches(tasks, count, giver, reach), np.argmin(load)
    best, queries, from_end, target, least = -1, 0, False, -1, np.inf
    for i in range(count):
        if tasks[i, SERVER] != giver:
            continue
        for server in range(len(load)):
            if server != emptiest and reach[tasks[i, DOCUMENT], server] == 0:
                continue
            later = tail * max(0, tasks[i, FIRST] + tasks[i, TOKENS] - longest[server])
            room = min(load[giver] - load.mean(), most - load[server] - later)
            if load[server] >= below or room <= later * wary:
                continue
            for end in (True, False):
                fits = _fitting(kernel, tasks[i], room, end)
                if fits == 0 or (fits == tasks[i, TOKENS] and not end):
                    continue
                begin = tasks[i, FIRST] + tasks[i, TOKENS] - fits if end else tasks[i, FIRST]
                work = cost(kernel, begin, fits) - later * wary
                added = _bytes_of(tasks[i], fits, end, server, without[i], nbytes, own, reach)
                if work > 0 and added / work < least:
                    best, queries, from_end, target, least = i, fits, end, server, added / work
    return best, queries, from_end, target, without[best]


@compiled()
def _copy(source, target):  # type: ignore[no-untyped-def]
    for i in range(len(source)):
        target[i] = source[i]


@compiled()
def _balance(tasks, num_servers, tolerance, kernel, tail, nbytes, own, reach):  # type: ignore[no-untyped-def]
    count, work, stuck = len(tasks), np.zeros(num_servers), np.zeros(num_servers, np.bool_)
    longest = np.zeros(num_servers, np.int64)
    for task in tasks:
        work[task[SERVER]] += cost(kernel, task[FIRST], task[TOKENS])
        longest[task[SERVER]] = max(longest[task[SERVER]], task[FIRST] + task[TOKENS])
    for _ in range(MOVES * num_servers):
        load = work + tail * longest
        mean = load.mean()
        giver = 0
        for server in range(1, num_servers):
            if (0.0 if stuck[server] else load[server]) > (0.0 if stuck[giver] else load[giver]):
                giver = server
        if stuck[giver] or load[giver] <= (1 + tolerance) * mean:
            break
        for below, most, wary in ((1.0, 1 + tolerance / 2, True), (1 + tolerance / 2, 1 + tolerance, False)):
            i, queries, from_end, server, without = _best_move(
                tasks, count, giver, load, longest, below * mean, most * mean, wary, kernel, tail, nbytes, own, reach
            )
            if i >= 0:
                break
        if i < 0:
            stuck[giver] = True
            continue
        if count == len(tasks):
            tasks = np.concatenate((tasks, np.empty_like(tasks)))
        task, new = tasks[i], tasks[count]
        work[giver] -= cost(kernel, task[FIRST], task[TOKENS])
        _copy(task, new)
        new[SERVER], new[TOKENS] = server, queries
        new[FIRST] += (task[TOKENS] - queries) * from_end
        task[FIRST] += queries * (not from_end)
        task[TOKENS] -= queries
        work[giver] += cost(kernel, task[FIRST], task[TOKENS])
        work[server] += cost(kernel, new[FIRST], queries)
        document, kept = task[DOCUMENT], task[FIRST] + task[TOKENS] if task[TOKENS] > 0 else 0
        reach[document, giver] = max(without, kept)
        reach[document, server] = max(reach[document, server], new[FIRST] + queries)
        for rank in (giver, server):
            longest[rank] = reach[:, rank].max()
        if task[TOKENS] == 0:
            _copy(new, task)
        else:
            count += 1
    return count, tasks
