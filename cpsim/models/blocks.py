"""The compiled half of the attention model: tiles of every thread block, when the last block ends, traffic, clock.

Blocks start in launch order, each on the SM that has room first. Where an SM holds two blocks they alternate between
overhead, which leaves the tensor cores idle, and tiles; tiles of both at once take longer than one block's alone.

`g` is the kernel (`attention.Compiled`), `t` the times of its blocks, `s` sums over one call.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
from numpy.typing import NDArray

from cpsim.block_masks import BANDS, BLOCK, CELLS
from cpsim.compiled import compiled
from cpsim.models.power import slowdown

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

REPLAYED_WAVES = 48
"""Calls of at most so many waves of blocks are scheduled block by block."""
PAIRED_WAVES, FOLLOWED_WAVES = 6, 16
"""Calls of at most so many waves of pairs of blocks are followed from event to event: of blocks with work, and with
those without."""
KNOWN = 4093
"""Prices of single-sequence calls that are remembered; prime, because lengths are multiples of powers of 2."""
HIDING = 4.0
"""How well the main kernel's loads of keys and instructions hide behind its tiles: exponent of a smooth maximum."""
HIDING_ENDS = 1.2
"""The same for queries and outputs, which a block moves before and after its tiles: hardly."""
TABLE_ABOVE = 256
"""Sequences above which flash-attn-4 looks a block's sequence up in a table, at the same price (interface.py)."""
L2_BYTES = 50 * 2**20
"""Second-level cache that flash-attn-4 assumes when it groups heads (tile_scheduler.py)."""
STEPS = 2048
"""Time steps of a replay in which slots are counted."""
CARRY_BITS, TOGETHER = 52, 1024
"""Of fractions of such a step as integers, and how many blocks may add theirs to one at once."""
MOMENT_S = 1e-7
"""Ends of blocks that are so close come in any order."""
SEEDS, MOST_SEEDS = 4, 16
"""Such orders that calls are averaged over: more of smaller ones, which the order matters to more."""
PAIRINGS = 8
"""Random pairings that the end of a call with two blocks on an SM is averaged over."""


Sums = namedtuple(
    "Sums", "num rows longest_row tiles most least queries keys whole_queries masked aligned odd idle work"
)
"""Of one call: sequences with work, tile rows of one head, those of the longest sequence, tiles of one head and of its
longest and shortest row, tokens, queries rounded up to tiles, three flags, idle and tile seconds of one head."""
Times = namedtuple("Times", "idle cut tile")
"""Of a block: seconds without tiles, those of two tiles or more that the mask cuts, and of one tile by itself."""
FEATURES = (
    "waves", "tiles", "unevenness", "causal", "sequences", "heads", "sharing", "idleness", "traffic", "varlen", "split"
)  # fmt: skip
"""What the discrepancy may depend on; logarithms to base 2 of all but flags and the share of traffic. Of listed blocks
the share of partial ones stands for causal, the rule inside them for varlen. Where a kernel does not split keys,
lengths that are not whole tiles stand for split."""


@compiled()
def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum of floor((a i + b) / m) for i in 0..n-1, in O(log m); a, b >= 0."""
    total = 0
    while True:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a %= m
        b %= m
        top = a * n + b
        if top < m:
            return total
        n, b, m, a = top // m, top % m, a, m


@compiled()
def tile_rows(
    q: int, k: int, causal: bool, tile_q: int, tile_k: int, packed: int, backward: bool
) -> tuple[int, int, int, int]:
    """Tile rows of one sequence and head: their number, visited tiles in all, in the longest and in the shortest."""
    if causal:
        q = min(q, k)  # rows above see no key
    if q <= 0 or k <= 0:
        return 0, 0, 0, 0
    if q * packed <= tile_q and k <= tile_k:
        return 1, 1, 1, 1
    if backward:
        rows, full = (k + tile_k - 1) // tile_k, (q + tile_q - 1) // tile_q
        if not causal:
            return rows, rows * full, full, full
        uncut = min(rows, (k - q) // tile_k + 1)
        skipped = 0
        if rows > uncut:
            skipped = floor_sum(rows - uncut, tile_q, tile_k, uncut * tile_k - (k - q))
        return rows, rows * full - skipped, full, full - max(0, ((rows - 1) * tile_k - (k - q)) // tile_q)
    rows, full = (q * packed + tile_q - 1) // tile_q, (k + tile_k - 1) // tile_k
    if not causal:
        return rows, rows * full, full, full
    seen = tile_q - 1 + (k - q) * packed  # packed rows up to the last key that row block 0 sees
    before_last = rows - 1
    total = full
    if before_last > 0:
        total += before_last + floor_sum(before_last, packed * tile_k, tile_q, seen)
    return rows, total, full, min(full, seen // (packed * tile_k) + 1)


@compiled()
def tiles_of_row(row: int, q: int, k: int, causal: bool, tile_q: int, tile_k: int, packed: int, backward: bool) -> int:
    """Visited tiles of one tile row."""
    if causal:
        q = min(q, k)
    if backward:
        full = (q + tile_q - 1) // tile_q
        return full - max(0, (row * tile_k - (k - q)) // tile_q) if causal else full
    if not causal:
        return (k + tile_k - 1) // tile_k
    last = min(q - 1, (row * tile_q + tile_q - 1) // packed)
    return (last + k - q) // tile_k + 1


@compiled()
def parts_fetched(q: int, k: int, tile_q: int, tile_k: int) -> int:
    """Parts of code that the tile rows of a causal sequence run after that for tiles which the mask can cut: one for
    the tile before those, whose bounds are checked, too, and one for all others."""
    q, parts = min(q, k), 0
    for more in range(2):
        keys = ((tile_q + tile_k - 1) // tile_k + more) * tile_k
        unseeing = max(0, keys - (k - q))  # queries before the first that sees more
        if q > unseeing:
            parts += (q + tile_q - 1) // tile_q - unseeing // tile_q
    return parts


@compiled()
def l2_group(heads: int, k: int, head_dim: float) -> int:
    """Heads whose keys and values fit the L2 cache together, a power of two."""
    group = 1
    while group * 2 <= heads and group * 2 * k * head_dim * 4 <= L2_BYTES:
        group *= 2
    return group


@compiled()
def num_splits(num_blocks: int, slots: int, tiles: int) -> int:
    """flash-attn 2's num_splits_heuristic (csrc/flash_attn/flash_api.cpp)."""
    if num_blocks >= 0.8 * slots:
        return 1
    best = 0.0
    for which in range(2):
        for splits in range(1, min(128, slots, tiles) + 1):
            if splits > 1 and -(-tiles // splits) == -(-tiles // (splits - 1)):
                continue
            waves = num_blocks * splits / slots
            efficiency = waves / math.ceil(waves)
            if which == 0:
                best = max(best, efficiency)
            elif efficiency >= 0.85 * best:
                return splits
    return 1


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
) -> float:  # fmt: skip
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
def next_end(now: Floats, older: int, alone: float, share: float, then: Floats) -> float:
    """Seconds until a block of an SM ends; `now` and `then` are the idle and tile seconds left of both, [2, 2].

    While both are at their tiles they get 2 `alone` times as much done as one would, `share` of it in the older block.
    """
    then[:] = now
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

    Read from %smid (real/measure_placement.py, cpsim/calibrate/data/placement). SMs are counted in the order in which
    they get their first block, which starts at another group of SMs from call to call; 2i and 2i + 1 are one TPC.
    Where blocks fill all room, the foremost SMs take their second ones early; fewer are spread over TPCs.
    """
    sm = np.empty(n, np.int64)
    if n < 2 * num_sms:
        first = min(n, num_sms)
        sm[:first] = np.arange(first)
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
    idle: Floats, work: Floats, n: int, num_sms: int, alone: float, share: float, seed: int,
    held: int = 0, hold_s: float = 0.0,
) -> float:  # fmt: skip
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
        now[:] = then[sm]
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
        now[:] = then[sm]
        free = 1 if now[0].any() else 0
        older[sm] = 1 - free
        if queued < n and not now[free].any():
            now[free, 0], now[free, 1] = idle[queued], work[queued]
            queued += 1
        if queued < n and not now[1 - free].any():
            older[sm], then[sm], due[sm] = free, now, at + 1e-9
        else:
            due[sm] = at + next_end(now, older[sm], alone, share, then[sm])
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        due[sm] += MOMENT_S * (state >> 8) / 2**23
        sift_down(order, due)
    return end


@compiled()
def _cuts(tiles: float) -> float:
    """Masked tiles of a row, in pairs: the first tile of a row has nothing to overlap with."""
    return float(min(max(tiles - 1.0, 0.0), 2.0) / 2.0)


@compiled()
def _sums(g, t, q_len, k_len, causal, begin, end, packed, tile_q, masked):  # type: ignore[no-untyped-def]
    num, rows, tiles, longest_row, most, least = 0, 0, 0, 0, 0, 1 << 60
    queries, keys, whole, aligned, odd, cuts = 0, 0, 0, True, False, 0.0
    for i in range(begin, end):
        r, n, high, low = tile_rows(q_len[i], k_len[i], causal[i], tile_q, g.tile_k, packed, g.backward)
        if r == 0:
            continue
        num, rows, tiles, longest_row = num + 1, rows + r, tiles + n, max(longest_row, r)
        most, least = max(most, high), min(least, low)
        queries, keys = queries + q_len[i], keys + k_len[i]
        whole += (q_len[i] + tile_q - 1) // tile_q * tile_q
        aligned = aligned and (k_len[i] % g.tile_k == 0 or not g.aligns_keys)
        aligned = aligned and (q_len[i] % tile_q == 0 or not g.aligns_queries)
        odd = odd or k_len[i] % 2 == 1
        cuts += r * (_cuts(low) + 4.0 * _cuts((low + high) / 2) + _cuts(high)) / 6
    return Sums(
        num, rows, longest_row, tiles, most, least, queries, keys, whole, masked, aligned, odd,
        t.idle * rows, t.tile * tiles + t.cut * cuts,
    )  # fmt: skip


@compiled()
def _replay(  # type: ignore[no-untyped-def]
    g, t, q_len, k_len, causal, begin, end, packed, heads, tile_q, empties, slow, share, held, hold_s, idle, work,
    number, left,
):  # fmt: skip
    """Schedules every block of a call in launch order: those of one head at a time, or of all heads of a sequence.

    `empties` tells how many blocks are launched for each sequence if not 0, and that all are followed from event to
    event; `slow` is how much slower tiles are where SMs always hold two blocks, the older of which gets its `share`
    done; `held` SMs are taken for the first `hold_s`. `idle`, `work`, `number` (runs of blocks that are alike) and
    `left` are scratch.
    """
    n = 0
    for i in range(begin, end):
        rows = tile_rows(q_len[i], k_len[i], causal[i], tile_q, g.tile_k, packed, g.backward)[0]
        if rows == 0:
            continue
        rows = (rows + g.rows_together - 1) // g.rows_together * g.rows_together
        if (rows == 1 or not causal[i]) and empties <= rows:  # all blocks are alike
            tiles = tiles_of_row(0, q_len[i], k_len[i], causal[i], tile_q, g.tile_k, packed, g.backward)
            idle[n], work[n] = t.idle, t.tile * tiles + t.cut * _cuts(tiles)
            number[n] = rows if g.heads_outermost else rows * heads
            n += 1
            continue
        turned = causal[i] and g.heavy_first and not g.backward
        group = l2_group(heads, k_len[i], g.head_dim) if turned and not g.heads_outermost else 1
        for head in range(0, 1 if g.heads_outermost else heads, group):
            together = min(group, heads - head)
            for row in range(rows):
                at = rows - 1 - row if turned else row
                tiles = tiles_of_row(at, q_len[i], k_len[i], causal[i], tile_q, g.tile_k, packed, g.backward)
                idle[n], work[n], number[n] = t.idle, t.tile * tiles + t.cut * _cuts(tiles), together
                n += 1
            if empties > rows:
                idle[n], work[n], number[n] = g.block_decode_s, 0.0, empties - rows
                n += 1
    repeats = heads if g.heads_outermost else 1
    if g.blocks_per_sm == 1:
        for run in range(n):
            idle[run] += work[run]
        return queue(idle, number, n, repeats, g.num_sms, left, held, hold_s)
    launched = number[:n].sum() * repeats
    if not empties and launched > PAIRED_WAVES * g.slots:
        all_idle, all_work = sum_of_runs(idle, number, n), sum_of_runs(work, number, n)
        together = all_idle + all_work * slow
        alone = (all_idle + all_work) / together
        idle[:n] += work[:n] * slow
        makespan = queue(idle, number, n, repeats, g.slots, left, 2 * held, hold_s)
        return makespan - left.max() + finish(left, g.num_sms, alone)
    idles, works = _blocks(idle, number, n, repeats), _blocks(work, number, n, repeats)
    mean, seeds = 0.0, min(max(SEEDS, SEEDS * PAIRED_WAVES * g.slots // launched), MOST_SEEDS)
    for seed in range(seeds):
        mean += pairs(idles, works, len(idles), g.num_sms, g.alone_factor, share, seed + 1, held, hold_s) / seeds
    return mean


@compiled()
def _blocks(seconds: Floats, number: Ints, n: int, repeats: int) -> Floats:
    """Seconds of every block of n runs, `repeats` times."""
    made, at = np.empty(number[:n].sum() * repeats), 0
    for _ in range(repeats):
        for run in range(n):
            made[at : at + number[run]] = seconds[run]
            at += number[run]
    return made


@compiled()
def _tail(g, t, q_len, k_len, causal, begin, end, packed, heads, tile_q, total):  # type: ignore[no-untyped-def]
    """When the last long block ends: the work before it spread over all slots, and then its own time."""
    done, latest = 0.0, 0.0
    for i in range(begin, end):
        rows, tiles, longest, _ = tile_rows(q_len[i], k_len[i], causal[i], tile_q, g.tile_k, packed, g.backward)
        if rows == 0:
            continue
        mine = rows * (t.idle + t.cut) + t.tile * tiles
        long = t.idle + t.cut * _cuts(longest) + t.tile * longest
        if g.heads_outermost:
            before = total / heads * (heads - 1) + done
            if not g.backward and not g.heavy_first:
                before += mine - long
        elif g.backward or not causal[i]:
            before = heads * done + (heads - 1) * mine
        else:
            group = l2_group(heads, k_len[i], g.head_dim)
            before = heads * done + ((heads + group - 1) // group - 1) * group * mine + (group - 1) * long
        latest = max(latest, before / g.slots + long)
        done += mine
    return latest


@compiled()
def _many_waves(g, t, s, heads, latest):  # type: ignore[no-untyped-def]
    """Makespan of many waves: an even share of everything, half a wave of the shortest blocks and of the longest."""
    total = heads * (s.idle + s.work)
    even = total / g.slots
    short = t.idle + t.cut * _cuts(s.least) + t.tile * s.least
    typical = total / (s.rows * heads)
    return max(even + short / 2, latest - (typical + short) / 4)


@compiled()
def split_tile(head_dim: float) -> int:
    """Keys of a tile of flash-attn 2's split kernel (csrc/flash_attn/flash_api.cpp, set_params_splitkv)."""
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64


@compiled()
def _split(g, t, s, heads, splits, share, held, hold_s, idle, work):  # type: ignore[no-untyped-def]
    """Makespan of flash-attn 2's split kernel: tiles of 64 queries, a block for every row and split."""
    tile_k = split_tile(g.head_dim)
    rows, columns = (s.queries + 63) // 64, (s.keys + tile_k - 1) // tile_k
    splits = min(splits, len(idle) // (rows * heads))
    per_split = (columns + splits - 1) // splits
    tile = g.split_pair_s * 64 * tile_k * g.alone_factor
    n = 0
    for part in range(splits):
        for row in range(rows):
            seen = columns
            if s.masked:
                seen = min(columns, ((row + 1) * 64 + s.keys - s.queries + tile_k - 1) // tile_k)
            tiles = max(0, min(seen, (part + 1) * per_split) - part * per_split)
            idle[n], work[n] = t.idle if tiles else g.block_decode_s, tile * tiles
            n += 1
    for head in range(1, heads):
        idle[head * n : (head + 1) * n], work[head * n : (head + 1) * n] = idle[:n], work[:n]
    return pairs(idle, work, n * heads, g.num_sms, g.alone_factor, share, 1, held, hold_s)


@compiled()
def _traffic(g, s, num_heads, num_kv_heads, varlen):  # type: ignore[no-untyped-def]
    """Bytes that the main kernel moves beside its tiles, at the ends of its blocks, and those of passes around it."""
    q, k = s.queries * num_heads * g.head_dim, s.keys * num_kv_heads * g.head_dim
    if not g.backward:
        return 4.0 * k, 4.0 * q, 0.0  # reads k, v; reads q, writes out
    shared, whole_q = num_heads // num_kv_heads, s.whole_queries * num_heads * g.head_dim
    around = q * 6.0 + whole_q * 8.0  # read out, dout, write dq; zero, read dq in fp32, in whole tiles
    beside = q * 4.0 + whole_q * 8.0 + k * 4.0  # read q, dout, k, v; add to dq; write dk, dv or add to them
    if shared > 1 and g.accumulates_kv:  # dk and dv: zeroed and read in fp32, in whole tiles, written in bf16
        room = s.keys + s.num * g.tile_k if varlen else s.rows * g.tile_k
        around += k * 4.0 + (room + s.rows * g.tile_k) * num_kv_heads * g.head_dim * 8.0
        beside += s.rows * g.tile_k * num_kv_heads * g.head_dim * 16.0
    else:
        written, summed = _key_gradients(k, shared)
        beside, around = beside + written, around + summed
    return beside, 0.0, around


@compiled()
def _key_gradients(k, shared):  # type: ignore[no-untyped-def]
    """Bytes of dk and dv of k elements that a kernel writes for each head that shares them, and of their sums."""
    per_head = 4.0 * k * shared
    return per_head, (per_head + 4.0 * k) * (shared > 1)


@compiled()
def _prelude(g, s, num_heads, varlen):  # type: ignore[no-untyped-def]
    """Seconds before the main kernel: the launch; backward, also the products of out and dout, and dq zeroed."""
    first = (s.queries + s.whole_queries) * num_heads * g.head_dim * 4.0 if g.backward else 0.0
    return g.call_s + g.call_varlen_s * varlen + g.traffic_s_per_byte * first


@compiled()
def hidden(seconds: float, others: float, how_well: float) -> float:
    """Seconds of what hides others behind it: their smooth maximum."""
    return float((seconds**how_well + others**how_well) ** (1.0 / how_well))


@compiled()
def _waits(g, q_len, k_len, causal, begin, end, heads, tile_q, num_blocks, makespan):  # type: ignore[no-untyped-def]
    """Seconds that a causal varlen call waits for instructions."""
    if num_blocks <= g.slots:  # the first blocks are in step and share what is fetched
        return 0.0
    parts = 0
    for i in range(begin, end):
        parts += parts_fetched(q_len[i], k_len[i], tile_q, g.tile_k) if causal[i] else 0
    fetch = g.fetch_s * heads * parts / g.num_sms
    return (hidden(makespan, fetch, HIDING) - makespan) * (1.0 - g.slots / num_blocks)


@compiled()
def correction(look, support, weights, lengths):  # type: ignore[no-untyped-def]
    """log(predicted / measured) to expect where features are `look`; see `discrepancy`."""
    total = 0.0
    for i in range(len(weights)):
        distance = 0.0
        for j in range(len(look)):
            distance += ((look[j] - support[i, j]) / lengths[j]) ** 2
        total += weights[i] * np.exp(-0.5 * distance)
    return total


@compiled()
def _times(g, shared, masked, varlen, num, tile_q):  # type: ignore[no-untyped-def]
    """Times of a call's blocks, and the seconds of one without a row."""
    per_empty, per_block = g.block_decode_s, g.block_s + g.block_shared_s * shared
    if varlen and not g.grid_of_longest:
        per_empty = g.block_varlen_s + g.block_decode_s * min(num, TABLE_ABOVE) / 32.0
    if varlen:
        per_block += g.block_varlen_s if g.grid_of_longest else per_empty
    tile = g.pair_s * tile_q * g.tile_k
    return Times(per_block, g.block_causal_s * masked * g.alone_factor, tile * g.alone_factor), per_empty


@compiled()
def _empty_blocks(g, s, packed, heads, tile_q, varlen):  # type: ignore[no-untyped-def]
    """Blocks without a row, of grids that are made for the longest sequence or for any lengths with these sums."""
    if not varlen:
        return 0
    if g.grid_of_longest:
        return heads * (s.num * s.longest_row - s.rows)
    length, per_row = (s.keys, g.tile_k) if g.backward else (s.queries * packed, tile_q)
    return heads * max(0, (length + s.num * (per_row - 1)) // per_row - s.rows)


@compiled()
def _in_order(  # type: ignore[no-untyped-def]
    g, t, s, q_len, k_len, causal, begin, end, packed, heads, tile_q, varlen, masked, share, held, hold_s, empty,
    per_empty, scratch, number,
):  # fmt: skip
    """Makespan of a grid of one block for every row: of few waves a replay, of many a bound."""
    num_blocks = s.rows * heads
    slow = overlap(s.idle, s.work, g.alone_factor) if g.blocks_per_sm == 2 else 1.0
    few = num_blocks <= PAIRED_WAVES * g.slots and num_blocks + empty <= FOLLOWED_WAVES * g.slots
    follow = few and g.grid_of_longest and varlen
    if num_blocks <= REPLAYED_WAVES * g.slots:
        empties = s.longest_row if follow else 0
        makespan = _replay(
            g, t, q_len, k_len, causal, begin, end, packed, heads, tile_q, empties, slow, share, held, hold_s,
            scratch[0], scratch[1], number, scratch[2, : g.slots],
        )  # fmt: skip
    else:
        paired = Times(t.idle, t.cut * slow, t.tile * slow)
        if slow != 1.0:
            s = _sums(g, paired, q_len, k_len, causal, begin, end, packed, tile_q, masked)
        latest = 0.0
        if s.num > 1 or masked:
            total = heads * (s.idle + s.work)
            latest = _tail(g, paired, q_len, k_len, causal, begin, end, packed, heads, tile_q, total)
        makespan = _many_waves(g, paired, s, heads, latest)
    if not follow:
        makespan += empty * per_empty / g.slots
    if g.fetch_s > 0.0 and varlen and masked:
        makespan += _waits(g, q_len, k_len, causal, begin, end, heads, tile_q, num_blocks, makespan)
    return makespan


@compiled()
def _call(  # type: ignore[no-untyped-def]
    g, q_len, k_len, causal, begin, end, num_heads, num_kv_heads, varlen, held, hold_s, scratch, number, look
):
    """Seconds of one call by physics alone and how much the power limit slows it; fills in its features, `look`.

    Something else holds `held` SMs for the first `hold_s` after the call begins.
    """
    shared, masked = num_heads > num_kv_heads, causal[begin:end].any()
    packed = num_heads // num_kv_heads if g.packs_heads else 1
    heads = num_kv_heads if g.packs_heads else num_heads
    tile_q = g.tile_q_causal if masked else g.tile_q_full
    t, per_empty = _times(g, shared, masked, varlen, end - begin, tile_q)
    share = g.older_share if masked else g.older_share_full
    s = _sums(g, t, q_len, k_len, causal, begin, end, packed, tile_q, masked)
    if s.num == 0:
        return 0.0, 1.0
    hold_s -= _prelude(g, s, num_heads, varlen) if held else 0.0
    if hold_s <= 0.0:
        held = 0
    splits, extra, busy, work = 1, 0.0, 0.0, heads * g.pair_s * tile_q * g.tile_k * s.tiles
    if g.splits_keys and not varlen:
        tile_k = split_tile(g.head_dim)
        splits = num_splits((s.queries + 63) // 64 * heads, g.slots, (s.keys + tile_k - 1) // tile_k)
    if splits > 1:
        makespan = _split(g, t, s, heads, splits, share, held, hold_s, scratch[0], scratch[1])
        partial = splits * s.queries * num_heads * g.head_dim
        extra = g.split_call_s + g.traffic_s_per_byte * partial * 8  # fp32, written and read
    else:
        empty = _empty_blocks(g, s, packed, heads, tile_q, varlen)
        makespan = _in_order(
            g, t, s, q_len, k_len, causal, begin, end, packed, heads, tile_q, varlen, masked, share, held, hold_s,
            empty, per_empty, scratch, number,
        )  # fmt: skip
        busy = work / g.slots / makespan
    slower = slowdown(busy / g.busy_threshold, g.busy_power)
    makespan *= slower
    if not s.aligned or (varlen and g.aligns_queries):
        makespan *= g.unaligned_factor if masked else g.unaligned_full_factor
    if s.odd:
        makespan *= g.odd_factor
    beside, ends, around = _traffic(g, s, num_heads, num_kv_heads, varlen)
    makespan = hidden(makespan, g.traffic_s_per_byte * beside, HIDING)
    makespan = hidden(makespan, g.traffic_s_per_byte * ends, HIDING_ENDS)
    seconds = makespan + extra + g.call_s + g.call_varlen_s * varlen + g.traffic_s_per_byte * around
    mean = s.tiles / s.rows
    look[0] = np.log2(s.rows * heads / g.slots)
    look[1] = np.log2(mean)
    look[2] = np.log2(s.most / mean)
    look[3] = masked
    look[4] = np.log2(s.num)
    look[5] = np.log2(num_heads)
    look[6] = np.log2(num_heads / num_kv_heads)
    look[7] = np.log2(makespan * g.slots / work)
    look[8] = g.traffic_s_per_byte * beside / seconds
    look[9] = varlen
    look[10] = splits > 1 or (not s.aligned and not g.splits_keys)
    return seconds, slower


@compiled()
def price(  # type: ignore[no-untyped-def]
    g, discrepancy, op_start, q_len, k_len, causal, num_heads, num_kv_heads, varlen, held, hold_s
):
    """[N] seconds, their features [N, FEATURES], and how much the power limit slows them [N].

    `discrepancy` is (support, weights, lengths); `held` SMs [N] are taken for the first `hold_s` [N] of each call.
    """
    seconds, slower = np.zeros(len(op_start) - 1), np.ones(len(op_start) - 1)
    looks = np.zeros((len(seconds), len(FEATURES)))
    scratch = np.empty((3, (REPLAYED_WAVES + 1) * g.slots))
    number = np.empty(scratch.shape[1], np.int64)
    known = np.zeros((KNOWN, 5), np.int64)  # calls with one sequence repeat a lot: remember the last ones
    known_op = np.zeros(KNOWN, np.int64)
    for op in range(len(seconds)):
        begin, end = op_start[op], op_start[op + 1]
        if end - begin == 1 and held[op] == 0:
            q, k, kind = q_len[begin], k_len[begin], 2 * causal[begin] + varlen[op] + 4
            slot = (q * 1000003 + k * 8191 + kind * 131 + num_heads[op] * 31 + num_kv_heads[op]) % KNOWN
            key = known[slot]
            same = key[0] == q and key[1] == k and key[2] == kind
            if same and key[3] == num_heads[op] and key[4] == num_kv_heads[op]:
                seconds[op], slower[op] = seconds[known_op[slot]], slower[known_op[slot]]
                looks[op] = looks[known_op[slot]]
                continue
            known[slot] = (q, k, kind, num_heads[op], num_kv_heads[op])
            known_op[slot] = op
        seconds[op], slower[op] = _call(
            g, q_len, k_len, causal, begin, end, num_heads[op], num_kv_heads[op], varlen[op], held[op], hold_s[op],
            scratch, number, looks[op],
        )  # fmt: skip
        seconds[op] /= np.exp(correction(looks[op], discrepancy[0], discrepancy[1], discrepancy[2]))
    return seconds, looks, slower


@compiled()
def _listed_rows(g, of_queries, of_keys, rule, unaligned, shared, cost):  # type: ignore[no-untyped-def]
    """Seconds of every block of one head, or of one key head and all that share it, in launch order.

    Thread blocks of smaller tiles share a row of listed blocks. Fills in `cost`; returns the number of thread blocks
    and how many of the seconds are tiles.
    """
    pair_s, block_s, loop_s, share = g.pair_s, g.block_s, g.block_shared_s, g.query_cut_share
    cut = (g.partial_pair_s, g.celled_pair_s, g.banded_pair_s)[rule]
    if unaligned:
        slower = g.unaligned_factor * (g.unaligned_celled_factor if rule == CELLS else 1.0)
        pair_s, loop_s, share = pair_s * slower, loop_s * slower, g.unaligned_query_cut_share
        cut = (g.unaligned_partial_pair_s, g.unaligned_celled_pair_s, g.unaligned_banded_pair_s)[rule]
    if rule == BANDS:
        pair_s, block_s = pair_s * g.banded_factor, block_s + g.block_banded_s
    n, tiles = 0, 0.0
    if g.backward:
        together, parts = shared if g.packs_heads else 1, BLOCK // g.tile_k
        for row in range(len(of_keys) * parts):
            partial, full = of_keys[row // parts]
            work = together * BLOCK * g.tile_k * ((pair_s + cut) * partial + pair_s * full)
            loops = together * loop_s if partial + full > 0 else 0.0
            cost[n], tiles, n = block_s + loops + work, tiles + work, n + 1
        if not g.packs_heads:
            return n, tiles
        pair_s, cut = g.query_pair_s, cut * share
    parts = BLOCK // g.tile_q_full
    for _ in range(shared if g.backward else 1):
        for row in range(len(of_queries) * parts):
            partial, full = of_queries[row // parts]
            work = BLOCK * g.tile_q_full * ((pair_s + cut) * partial + pair_s * full)
            cost[n], tiles, n = block_s + work, tiles + work, n + 1
    return n, tiles


@compiled()
def price_listed(g, discrepancy, of_queries, of_keys, num_q, num_k, rule, num_heads, num_kv_heads, look):  # type: ignore[no-untyped-def]
    """Seconds of one call that visits listed blocks, and how much the power limit slows it; fills in its features.

    Of many waves only the last ones are replayed: before them all SMs are busy. Where an SM holds two blocks, few waves
    are followed from event to event.
    """
    shared = num_heads // num_kv_heads
    repeats = num_kv_heads if g.backward and g.packs_heads else num_heads
    cost = np.empty(
        (shared if g.backward else 1) * len(of_queries) * (BLOCK // g.tile_q_full) + len(of_keys) * (BLOCK // g.tile_k)
    )
    unaligned = num_q % BLOCK > 0 or num_k % BLOCK > 0
    n, tiles = _listed_rows(g, of_queries, of_keys, rule, unaligned, shared, cost)
    visited = of_queries.sum()
    if visited == 0:
        return 0.0, 1.0
    if g.blocks_per_sm == 2 and n * repeats <= PAIRED_WAVES * g.slots:
        once, idle = np.ones(n, np.int64), np.full(n, g.block_s)
        idles, works = _blocks(idle, once, n, repeats), _blocks((cost[:n] - idle) * g.alone_factor, once, n, repeats)
        makespan = pairs(idles, works, n * repeats, g.num_sms, g.alone_factor, g.older_share, 1)
    else:
        last = min(repeats, max(1, REPLAYED_WAVES * g.slots // n))
        before = cost[:n].sum() * (repeats - last) / g.slots
        makespan = before + queue(cost, np.ones(n, np.int64), n, last, g.slots, np.empty(g.slots))
    busy = tiles * repeats / g.slots / makespan
    slower = slowdown(busy / g.busy_threshold, g.busy_power)
    makespan *= slower
    q, k = num_q * num_heads * g.head_dim, num_k * num_kv_heads * g.head_dim
    beside, around = 4.0 * (q + k), 0.0
    if g.backward:  # reads q, dout, k, v; writes dq, dk, dv; around it reads out and dout
        beside, around = 6.0 * q + 8.0 * k, 4.0 * q
    if g.backward and g.accumulates_kv:  # dq, and dk and dv of shared heads, added up in fp32: zeroed, added to, read
        fp32 = 8.0 * (q + 2.0 * k * (shared > 1))
        beside, around = beside + fp32, around + fp32
    elif g.backward and not g.packs_heads:  # dq is added up in fp32
        written, summed = _key_gradients(k, shared)
        beside, around = 12.0 * q + 4.0 * k + written, 14.0 * q + summed
    makespan = hidden(makespan, g.traffic_s_per_byte * beside, HIDING)
    seconds = makespan + g.call_s + g.traffic_s_per_byte * around
    partial = of_queries[:, 0].sum() / visited
    mean = cost[:n].sum() / n
    look[0] = np.log2(n * repeats / g.slots)
    look[1] = np.log2(visited / len(of_queries))
    look[2] = np.log2(cost[:n].max() / mean)
    look[3] = partial
    look[5] = np.log2(num_heads)
    look[6] = np.log2(shared)
    look[7] = np.log2(makespan * g.slots / (tiles * repeats))
    look[8] = g.traffic_s_per_byte * beside / seconds
    look[9] = rule
    look[10] = unaligned
    return seconds / np.exp(correction(look, discrepancy[0], discrepancy[1], discrepancy[2])), slower
