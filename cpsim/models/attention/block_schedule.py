"""Thread blocks on the SMs of a GPU: when the last one of a call ends, where one or two share an SM.

Blocks start in launch order, each on the SM that has room first. Where an SM holds two blocks they alternate between
overhead, which leaves the tensor cores idle, and tiles; tiles of both at once take longer than one block's alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsim.runtime.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEPS = 2048
"""Time steps of a replay in which slots are counted."""
CARRY_BITS, TOGETHER = 52, 1024
"""Of fractions of such a step as integers, and how many blocks may add theirs to one at once."""
MOMENT_S = 1e-7
"""Ends of blocks that are so close come in any order."""
PAIRINGS = 8
"""Random pairings that the end of a call with two blocks on an SM is averaged over."""


@compiled()
def sum_of_runs(seconds: Floats, number: Ints, n: int) -> float:
    """Seconds of n runs of blocks, as if added up block by block, without making every addition.

    Two that add the same amount are followed by others that do, until the sum has another exponent, at `limit`.
    """
    total, limit = 0.0, 2.0**-100
    for run in range(n):
        cost, times = seconds[run], number[run]
        while times > 0:
            while total >= limit:
                limit *= 2.0
            once, more = total + cost, 1
            step = (once + cost) - once
            if once - total == step and total + 2.0 * step < limit:
                more = times
                if total + (times + 1.0) * step >= limit:
                    more = min(times, int((limit - total) / step) - 1)
            total, times = (total + more * step, times - more) if more > 1 else (once, times - 1)
    return total


@compiled()
def queue(
    cost: Floats, number: Ints, n: int, repeats: int, slots: int, left: Floats, held: int = 0, hold_s: float = 0.0
) -> float:
    """Makespan of list scheduling: `repeats` times n runs of blocks, `number` alike in each, each block on the slot
    that is free first.

    Slots are alike, so it is enough to count how many become free in each of STEPS time steps; what rounding takes
    from one block is given to the next. Neighbours that cost the same are placed together where several slots become
    free in one step, with the same result as one by one. Fills `left` [slots] with what remains of every slot's last
    block when the last block of all starts. Less than half of the slots may be `held` by something else for the first
    `hold_s`.
    """
    total, longest = sum_of_runs(cost, number, n), 0.0
    for run in range(n):
        longest = max(longest, cost[run])
    shortest = max(total * repeats / slots, longest)
    hold_s = min(hold_s, 2 * shortest)  # by then the other slots have done everything
    step = shortest / STEPS
    free = np.zeros((6 if held else 2) * STEPS + 5, np.int64)
    free[0] = slots - held
    free[int(hold_s / step)] += held
    now, end, carry = 0, 0, 0.0
    for _ in range(repeats):
        run = 0
        while run < n:
            in_steps, waiting = cost[run] / step, number[run]
            run += 1
            while run < n and cost[run] == cost[run - 1]:
                waiting += number[run]
                run += 1
            few = int(in_steps)
            share, carried = int((in_steps - few) * 2.0**CARRY_BITS), -1
            while waiting > 0:
                while free[now] == 0:
                    now += 1
                if carried < 0:
                    together, exact = 1, in_steps + carry
                    longer = int(exact >= few + 1)
                    carry = exact - (few + longer)
                    if few & (few + 1):  # all sums that follow have the same exponent, so that integers make them too
                        carried = int(carry * 2.0**CARRY_BITS)
                else:
                    together = min(waiting, free[now], TOGETHER)
                    carried += together * share
                    longer = carried >> CARRY_BITS
                    carried -= longer << CARRY_BITS
                free[now] -= together
                free[now + few] += together - longer
                free[now + few + 1] += longer
                end = max(end, now + few + (longer > 0))
                waiting -= together
            if carried >= 0:
                carry = carried * 2.0**-CARRY_BITS
    slot = 0
    left[:] = 0.0
    for at in range(now, end + 1):
        for _ in range(free[at]):
            left[slot] = (at - now) * step
            slot += 1
    return float(end * step)


@compiled()
def finish(left: Floats, num_sms: int, alone: float) -> float:
    """Seconds until the last two blocks of every SM have ended, `left` [2 x SMs] remaining if they stay together.

    Which blocks share an SM depends on the GPU: the mean over a few random pairings. What remains of the longer block
    of a pair after the shorter one's end takes `alone` times as long.
    """
    slots, mean, state = 2 * num_sms, 0.0, 1
    for _ in range(PAIRINGS):
        for i in range(slots - 1, 0, -1):  # shuffle
            state = state * 1103515245 + 12345 & 0x7FFFFFFF
            other = (state >> 8) % (i + 1)
            left[i], left[other] = left[other], left[i]
        end = 0.0
        for sm in range(num_sms):
            low, high = min(left[2 * sm], left[2 * sm + 1]), max(left[2 * sm], left[2 * sm + 1])
            end = max(end, low + (high - low) * alone)
        mean += end / PAIRINGS
    return mean


@compiled()
def overlap(idle: float, work: float, alone: float) -> float:
    """Slowdown of tiles on an SM that always holds two blocks out of step: `idle` and `work` are sums over blocks.

    A block finds the other one at its tiles for a share f of the time, f = work s / (idle + work s), which slows it
    by s = 1 + f (1 / alone - 1).
    """
    slow = 1.0
    for _ in range(20):
        slow = 1.0 + work * slow / (idle + work * slow) * (1.0 / alone - 1.0)
    return slow


@compiled()
def copy(source: Floats, target: Floats) -> None:
    """`target[:] = source`, [2, 2], for which numba compiles seconds of checks."""
    for slot in range(2):
        for part in range(2):
            target[slot, part] = source[slot, part]


@compiled()
def next_end(now: Floats, older: int, alone: float, share: float, then: Floats) -> float:
    """Seconds until a block of an SM ends; `now` and `then` are the idle and tile seconds left of both, [2, 2].

    While both are at their tiles they get 2 `alone` times as much done as one would, `share` of it in the older block.
    """
    copy(now, then)
    time, rate = 0.0, np.ones(2)
    while True:
        both = then[0, 0] == 0.0 and then[1, 0] == 0.0 and then[0, 1] > 0.0 and then[1, 1] > 0.0
        rate[older] = 2.0 * alone * share if both else 1.0
        rate[1 - older] = 2.0 * alone * (1.0 - share) if both else 1.0
        step = np.inf
        for slot in range(2):
            if then[slot, 0] > 0.0:
                step = min(step, then[slot, 0])
            elif then[slot, 1] > 0.0:
                step = min(step, then[slot, 1] / rate[slot])
        if step == np.inf:
            return step
        time += step
        ended = False
        for slot in range(2):
            if then[slot, 0] > 0.0:
                then[slot, 0] = max(0.0, then[slot, 0] - step)
                if then[slot, 0] < 1e-13:
                    then[slot, 0] = 0.0
                    ended |= then[slot, 1] == 0.0
            elif then[slot, 1] > 0.0:
                then[slot, 1] = max(0.0, then[slot, 1] - step * rate[slot])
                if then[slot, 1] < 1e-13:
                    then[slot, 1] = 0.0
                    ended = True
        if ended:
            return time


@compiled()
def second_blocks(n: int, num_sms: int) -> Ints:
    """Second blocks of every TPC, two SMs, of an H100 where n blocks do not fill the room for two on every SM.

    TPCs are counted as in `homes`. The foremost four get theirs first. Of the others, which come from nine groups in
    turn, every one gets a second block before any gets two, one group after another.
    """
    num = np.zeros((num_sms + 1) // 2, np.int64)
    left = max(0, n - num_sms)
    for turn in range(-2, 18):
        for tpc in range(len(num)):
            group = -1 if tpc < 4 else tpc - 4 if tpc < 8 else tpc % 8 if tpc < 48 else (tpc - 48) % 9
            room = min(2, num_sms - 2 * tpc) - num[tpc]
            if left > 0 and room > 0 and group == (turn % 9 if turn >= 0 else -1):
                num[tpc] += 1
                left -= 1
    return num


@compiled()
def homes(n: int, num_sms: int) -> Ints:
    """SM of each of the first n <= 2 x SMs blocks of a call, as an H100 and an H200 place them.

    Read from %smid (studies/probes/placement.py, data/points/*/placement). SMs are counted in the order in
    which they get their first block, which starts at another group of SMs from call to call; 2i and 2i + 1 are one TPC.
    Where blocks fill all room, the foremost SMs take their second ones early; fewer are spread over TPCs.
    """
    sm = np.empty(n, np.int64)
    if n < 2 * num_sms:
        first = min(n, num_sms)
        for i in range(first):
            sm[i] = i
        i = first
        for tpc, num in enumerate(second_blocks(n, num_sms)):
            for k in range(num):
                sm[i] = 2 * tpc + k
                i += 1
        return sm
    foremost, early = num_sms * 2 // 33, num_sms * 20 // 33
    for i in range(n):
        if i < early:
            sm[i] = i
        elif i < early + foremost:
            sm[i] = i - early
        else:
            sm[i] = i - foremost if i < num_sms + foremost else i - num_sms
    return sm


@compiled()
def sift_down(order: Ints, due: Floats) -> None:
    """Restores a binary heap of SMs, the earliest due first, of which only the first entry's time has changed."""
    parent, sm = 0, order[0]
    while True:
        child = 2 * parent + 1
        if child >= len(order):
            break
        if child + 1 < len(order) and due[order[child + 1]] < due[order[child]]:
            child += 1
        if due[order[child]] >= due[sm]:
            break
        order[parent] = order[child]
        parent = child
    order[parent] = sm


@compiled()
def pairs(
    idle: Floats,
    work: Floats,
    n: int,
    num_sms: int,
    alone: float,
    share: float,
    seed: int,
    held: int = 0,
    hold_s: float = 0.0,
) -> float:
    """Makespan of n blocks where an SM holds two: seconds of `idle` overhead and then of `work`, its tiles alone.

    The first blocks find their SMs all at once (`homes`), whether they have work or not; every other one goes to the
    SM that has room first. SMs that have it within MOMENT_S get one block each, in an order that `seed` gives. For the
    first `hold_s` some SMs are `held` by something else.
    """
    ours = num_sms - held
    queued = min(n, 2 * ours)
    num, then = np.zeros(num_sms, np.int64), np.zeros((num_sms, 2, 2))
    for i, sm in enumerate(homes(queued, ours)):
        then[sm, num[sm], 0], then[sm, num[sm], 1] = idle[i], work[i]
        num[sm] += 1
    older, now, state = np.zeros(num_sms, np.int64), np.zeros((2, 2)), seed
    due = np.empty(num_sms)
    for sm in range(num_sms):
        copy(then[sm], now)
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        due[sm] = next_end(now, 0, alone, share, then[sm]) if sm < ours else hold_s
        due[sm] += MOMENT_S * (state >> 8) / 2**23
    order = np.argsort(due)
    at, end = 0.0, 0.0
    while due[order[0]] < np.inf:
        sm = order[0]
        at = due[sm]
        if sm < ours or num[sm] > 0:
            end = at
        elif queued == n:  # nothing is left for it when it is free at last
            due[sm] = np.inf
            sift_down(order, due)
            continue
        num[sm] = 1
        copy(then[sm], now)
        free = 1 if now[0].any() else 0
        older[sm] = 1 - free
        if queued < n and not now[free].any():
            now[free, 0], now[free, 1] = idle[queued], work[queued]
            queued += 1
        if queued < n and not now[1 - free].any():
            older[sm], due[sm] = free, at + 1e-9
            copy(now, then[sm])
        else:
            due[sm] = at + next_end(now, older[sm], alone, share, then[sm])
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        due[sm] += MOMENT_S * (state >> 8) / 2**23
        sift_down(order, due)
    return end


@compiled()
def every_block(seconds: Floats, number: Ints, n: int, repeats: int) -> Floats:
    """Seconds of every block of n runs, `number` alike in each, `repeats` times."""
    made, at = np.empty(number[:n].sum() * repeats), 0
    for _ in range(repeats):
        for run in range(n):
            made[at : at + number[run]] = seconds[run]
            at += number[run]
    return made
