"""The compiled half of the attention model: seconds of calls, from those of their blocks, traffic and the clock.

`attention_tiles` counts the tiles of blocks, `block_schedule` finds when the last block ends. `g` is the kernel
(`attention.Compiled`), `t` the times of its blocks, `s` sums over one call.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.blocks import BANDS, BLOCK, CELLS
from cpsim.masks.slices import UNCUT
from cpsim.models.attention.block_schedule import every_block, finish, overlap, pairs, queue, sum_of_runs
from cpsim.models.attention.tiles import l2_group, num_rows, num_splits, split_tile, tile_rows, tiles_of_row
from cpsim.models.power import slowdown
from cpsim.runtime.compiled import bare, compiled

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
"""How well the main kernel's loads of keys hide behind its tiles: exponent of a smooth maximum."""
HIDING_ENDS = 1.2
"""How well loads of queries and outputs hide, which a block moves before and after its tiles: hardly."""
TABLE_ABOVE = 256
"""Sequences above which flash-attn-4 looks a block's sequence up in a table, at the same price (interface.py)."""
SEEDS, MOST_SEEDS = 4, 16
"""Orders, of blocks that end together, that calls are averaged over: more of smaller ones, to which it matters more."""


Sums = namedtuple(
    "Sums", "num rows longest_row tiles most least queries keys whole_queries masked windowed aligned odd idle work"
)
"""Sums over one call: sequences with work, tile rows of one head, those of the longest sequence, tiles of one head and
of its longest and shortest row, tokens, queries rounded up to tiles, four flags, idle and tile seconds of one head."""
Times = namedtuple("Times", "idle cut tile window_cut window_tile")
"""Seconds of a thread block: its overhead without tiles, what two or more tiles that the mask cuts add, one tile; under
a window, what tiles add that both of its ends cut, and one tile."""
FEATURES = (
    "waves",
    "tiles",
    "unevenness",
    "causal",
    "sequences",
    "heads",
    "sharing",
    "idleness",
    "traffic",
    "varlen",
    "split",
)
"""What the discrepancy may depend on; logarithms to base 2 of all but flags and the share of traffic. Of listed blocks
the share of partial ones stands for causal, the rule inside them for varlen. Where a kernel does not split keys,
lengths that are not whole tiles stand for split."""


@compiled()
def _cuts(tiles: float) -> float:
    """Masked tiles of a row, in pairs: the first tile of a row has nothing to overlap with."""
    return float(min(max(tiles - 1.0, 0.0), 2.0) / 2.0)


@compiled()
def _work(t, tiles, windowed):  # type: ignore[no-untyped-def]
    """Seconds of a block's tiles."""
    if windowed:
        return t.window_tile * tiles + t.window_cut * (min(max(tiles - 1.0, 0.0), 4.0) / 4.0)
    return t.tile * tiles + t.cut * _cuts(tiles)


@compiled()
def _is_window(left: int, right: int) -> bool:
    """Whether a mask is neither full nor causal."""
    return left >= 0 or right > 0


@compiled()
def _sums(g, t, q_len, k_len, window, begin, end, packed, tile_q, masked):  # type: ignore[no-untyped-def]
    num, rows, tiles, longest_row, most, least = 0, 0, 0, 0, 0, 1 << 60
    queries, keys, whole, aligned, odd, cuts = 0, 0, 0, True, False, 0.0
    in_windows, work = 0, 0.0
    for i in range(begin, end):
        left, right = window[i]
        r, n, high, low = tile_rows(q_len[i], k_len[i], left, right, tile_q, g.tile_k, packed, g.backward)
        if r == 0:
            continue
        num, rows, tiles, longest_row = num + 1, rows + r, tiles + n, max(longest_row, r)
        most, least = max(most, high), min(least, low)
        queries, keys = queries + q_len[i], keys + k_len[i]
        whole += (q_len[i] + tile_q - 1) // tile_q * tile_q
        aligned = aligned and (k_len[i] % g.tile_k == 0 or not g.aligns_keys)
        aligned = aligned and (q_len[i] % tile_q == 0 or not g.aligns_queries)
        odd = odd or k_len[i] % 2 == 1
        if _is_window(left, right):  # most rows are alike
            in_windows, work = in_windows + n, work + r * _work(t, n / r, True)
        else:
            cuts += r * (_cuts(low) + 4.0 * _cuts((low + high) / 2) + _cuts(high)) / 6
    return Sums(
        num,
        rows,
        longest_row,
        tiles,
        most,
        least,
        queries,
        keys,
        whole,
        masked,
        in_windows > 0,
        aligned and not (in_windows > 0 and g.aligns_queries),
        odd,
        t.idle * rows,
        t.tile * (tiles - in_windows) + t.cut * cuts + work,
    )


@compiled()
def _runs(  # type: ignore[no-untyped-def]
    g, t, q_len, k_len, window, begin, end, packed, heads, tile_q, empties, idle, work, number
):
    """Number of runs of blocks that are alike, of a call in launch order: of one head, or of all heads of a sequence.

    `empties` is how many blocks are launched for each sequence, if not 0. Fills in the `idle` and `work` seconds of a
    block of each run, and their `number`.
    """
    n = 0
    for i in range(begin, end):
        left, right = window[i]
        cut, windowed = left >= 0 or right >= 0, _is_window(left, right)
        rows = num_rows(q_len[i], k_len[i], right, tile_q, g.tile_k, packed, g.backward)
        if rows == 0:
            continue
        rows = (rows + g.rows_together - 1) // g.rows_together * g.rows_together
        if (rows == 1 or not cut) and empties <= rows:  # all blocks are alike
            tiles = tiles_of_row(0, q_len[i], k_len[i], left, right, tile_q, g.tile_k, packed, g.backward)
            idle[n], work[n] = t.idle, _work(t, tiles, windowed)
            number[n] = rows if g.heads_outermost else rows * heads
            n += 1
            continue
        turned = cut and g.heavy_first and not g.backward
        group = l2_group(heads, k_len[i], g.head_dim) if turned and not g.heads_outermost else 1
        for head in range(0, 1 if g.heads_outermost else heads, group):
            together = min(group, heads - head)
            for row in range(rows):
                at = rows - 1 - row if turned else row
                tiles = tiles_of_row(at, q_len[i], k_len[i], left, right, tile_q, g.tile_k, packed, g.backward)
                idle[n], work[n], number[n] = t.idle, _work(t, tiles, windowed), together
                n += 1
            if empties > rows:
                idle[n], work[n], number[n] = g.block_decode_s, 0.0, empties - rows
                n += 1
    return n


@compiled()
def _replay(  # type: ignore[no-untyped-def]
    g,
    t,
    q_len,
    k_len,
    window,
    begin,
    end,
    packed,
    heads,
    tile_q,
    empties,
    slow,
    share,
    held,
    hold_s,
    idle,
    work,
    number,
    left,
):
    """Makespan of every block of a call in launch order.

    `empties` as of `_runs`; if not 0, all blocks are followed from event to event. `slow` is how much slower tiles are
    where SMs always hold two blocks, the older of which gets its `share` done; `held` SMs are taken for the first
    `hold_s`. `idle`, `work`, `number` and `left` are scratch.
    """
    n = _runs(g, t, q_len, k_len, window, begin, end, packed, heads, tile_q, empties, idle, work, number)
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
        for run in range(n):
            idle[run] += work[run] * slow
        makespan = queue(idle, number, n, repeats, g.slots, left, 2 * held, hold_s)
        return makespan - left.max() + finish(left, g.num_sms, alone)
    idles, works = every_block(idle, number, n, repeats), every_block(work, number, n, repeats)
    mean, seeds = 0.0, min(max(SEEDS, SEEDS * PAIRED_WAVES * g.slots // launched), MOST_SEEDS)
    for seed in range(seeds):
        mean += pairs(idles, works, len(idles), g.num_sms, g.alone_factor, share, seed + 1, held, hold_s) / seeds
    return mean


@compiled()
def _tail(g, t, q_len, k_len, window, begin, end, packed, heads, tile_q, total):  # type: ignore[no-untyped-def]
    """When the last long block ends: the work before it spread over all slots, and then its own time."""
    done, latest = 0.0, 0.0
    for i in range(begin, end):
        left, right = window[i]
        rows, tiles, longest, _ = tile_rows(q_len[i], k_len[i], left, right, tile_q, g.tile_k, packed, g.backward)
        if rows == 0:
            continue
        windowed = _is_window(left, right)
        if windowed:
            mine, long = rows * (t.idle + _work(t, tiles / rows, True)), t.idle + _work(t, longest, True)
        else:
            mine = rows * (t.idle + t.cut) + t.tile * tiles
            long = t.idle + t.cut * _cuts(longest) + t.tile * longest
        if g.heads_outermost:
            before = total / heads * (heads - 1) + done
            if not g.backward and not g.heavy_first:
                before += mine - long
        elif g.backward or (left < 0 and right < 0):
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
    if s.windowed:
        short = t.idle + _work(t, s.least, True)
    typical = total / (s.rows * heads)
    return max(even + short / 2, latest - (typical + short) / 4)


@compiled()
def _split(g, t, s, left, right, heads, splits, share, held, hold_s, idle, work):  # type: ignore[no-untyped-def]
    """Makespan of flash-attn 2's split kernel: tiles of 64 queries, a block for every row and split."""
    tile_k = split_tile(g.head_dim)
    rows, columns = (s.queries + 63) // 64, (s.keys + tile_k - 1) // tile_k
    splits = min(splits, len(idle) // (rows * heads))
    per_split = (columns + splits - 1) // splits
    tile = g.split_pair_s * 64 * tile_k * g.alone_factor
    n = 0
    for part in range(splits):
        for row in range(rows):
            seen, first = columns, 0
            if right >= 0:
                seen = min(columns, ((row + 1) * 64 + s.keys - s.queries + right + tile_k - 1) // tile_k)
            if left >= 0:
                first = max(0, row * 64 + s.keys - s.queries - left) // tile_k
            tiles = max(0, min(seen, (part + 1) * per_split) - max(first, part * per_split))
            idle[n], work[n] = t.idle if tiles else g.block_decode_s, tile * tiles
            n += 1
    for head in range(1, heads):
        for i in range(n):
            idle[head * n + i], work[head * n + i] = idle[i], work[i]
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
def correction(look, support, weights, lengths):  # type: ignore[no-untyped-def]
    """log(predicted / measured) to expect where features are `look`; see `discrepancy`."""
    distance, total = np.zeros(len(weights)), 0.0
    for j in range(len(look)):
        for i in range(len(weights)):  # the inner loop, so that several are computed at once
            distance[i] += ((look[j] - support[j, i]) / lengths[j]) ** 2
    for i in range(len(weights)):
        total += weights[i] * np.exp(-0.5 * distance[i])
    return total


@compiled()
def _times(g, shared, masked, windowed, varlen, num, tile_q):  # type: ignore[no-untyped-def]
    """Times of a call's blocks, and the seconds of one without a row."""
    sharing = g.block_shared_s * (g.shared_window_factor if windowed else 1.0)
    per_empty, per_block = g.block_decode_s, g.block_s + sharing * shared
    if varlen and not g.grid_of_longest:
        per_empty = g.block_varlen_s + g.block_decode_s * min(num, TABLE_ABOVE) / 32.0
    if varlen:
        per_block += g.block_varlen_s if g.grid_of_longest else per_empty
    tile, window_tile = g.pair_s * tile_q * g.tile_k, (g.pair_s + g.window_pair_s) * tile_q * g.tile_k
    window_cut = g.block_window_s if g.block_window_s > 0.0 else 2.0 * g.block_causal_s  # at both ends
    cuts = g.block_causal_s * masked * g.alone_factor, window_cut * g.alone_factor
    return Times(per_block, cuts[0], tile * g.alone_factor, cuts[1], window_tile * g.alone_factor), per_empty


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
    g,
    t,
    s,
    q_len,
    k_len,
    window,
    begin,
    end,
    packed,
    heads,
    tile_q,
    varlen,
    masked,
    share,
    held,
    hold_s,
    empty,
    per_empty,
    scratch,
    number,
):
    """Makespan of a grid of one block for every row: of few waves a replay, of many a bound."""
    num_blocks = s.rows * heads
    slow = overlap(s.idle, s.work, g.alone_factor) if g.blocks_per_sm == 2 else 1.0
    few = num_blocks <= PAIRED_WAVES * g.slots and num_blocks + empty <= FOLLOWED_WAVES * g.slots
    follow = few and g.grid_of_longest and varlen
    if num_blocks <= REPLAYED_WAVES * g.slots:
        empties = s.longest_row if follow else 0
        makespan = _replay(
            g,
            t,
            q_len,
            k_len,
            window,
            begin,
            end,
            packed,
            heads,
            tile_q,
            empties,
            slow,
            share,
            held,
            hold_s,
            scratch[0],
            scratch[1],
            number,
            scratch[2, : g.slots],
        )
    else:
        paired = Times(t.idle, t.cut * slow, t.tile * slow, t.window_cut * slow, t.window_tile * slow)
        if slow != 1.0:
            s = _sums(g, paired, q_len, k_len, window, begin, end, packed, tile_q, masked)
        latest = 0.0
        if s.num > 1 or masked:
            total = heads * (s.idle + s.work)
            latest = _tail(g, paired, q_len, k_len, window, begin, end, packed, heads, tile_q, total)
        makespan = _many_waves(g, paired, s, heads, latest)
    if not follow:
        makespan += empty * per_empty / g.slots
    return makespan


@compiled()
def _call(  # type: ignore[no-untyped-def]
    g, q_len, k_len, window, begin, end, num_heads, num_kv_heads, varlen, held, hold_s, scratch, number, look
):
    """Seconds of one call by physics alone and how much the power limit slows it; fills in its features, `look`.

    Something else holds `held` SMs for the first `hold_s` after the call begins.
    """
    shared, masked = num_heads > num_kv_heads, (window[begin:end] >= 0).any()
    packed = num_heads // num_kv_heads if g.packs_heads else 1
    heads = num_kv_heads if g.packs_heads else num_heads
    tile_q = g.tile_q_causal if masked else g.tile_q_full
    windowed = _is_window(window[begin, 0], window[begin, 1])  # of all sequences of a call alike
    t, per_empty = _times(g, shared, masked, windowed, varlen, end - begin, tile_q)
    share = g.older_share if masked else g.older_share_full
    s = _sums(g, t, q_len, k_len, window, begin, end, packed, tile_q, masked)
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
        left, right = window[begin]
        makespan = _split(g, t, s, left, right, heads, splits, share, held, hold_s, scratch[0], scratch[1])
        partial = splits * s.queries * num_heads * g.head_dim
        extra = g.split_call_s + g.traffic_s_per_byte * partial * 8  # fp32, written and read
    else:
        empty = _empty_blocks(g, s, packed, heads, tile_q, varlen)
        makespan = _in_order(
            g,
            t,
            s,
            q_len,
            k_len,
            window,
            begin,
            end,
            packed,
            heads,
            tile_q,
            varlen,
            masked,
            share,
            held,
            hold_s,
            empty,
            per_empty,
            scratch,
            number,
        )
        busy = work / g.slots / makespan
    slower = slowdown(busy / g.busy_threshold, g.busy_power)
    makespan *= slower
    if not s.aligned or (varlen and g.aligns_queries):
        makespan *= g.unaligned_factor if masked else g.unaligned_full_factor
    if s.odd:
        makespan *= g.odd_factor
    if not masked:
        makespan *= g.full_factor
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
    g, discrepancy, op_start, q_len, k_len, window, num_heads, num_kv_heads, varlen, held, hold_s
):
    """[N] seconds, their features [N, FEATURES], and how much the power limit slows them [N].

    `discrepancy` is (support, weights, lengths); `held` SMs [N] are taken for the first `hold_s` [N] of each call.
    """
    seconds, slower = np.zeros(len(op_start) - 1), np.ones(len(op_start) - 1)
    looks = np.zeros((len(seconds), len(FEATURES)))
    scratch = np.empty((3, (REPLAYED_WAVES + 1) * g.slots))
    number = np.empty(scratch.shape[1], np.int64)
    known = np.zeros((KNOWN, 6), np.int64)  # calls with one sequence repeat a lot: remember the last ones
    known_op = np.zeros(KNOWN, np.int64)
    for op in range(len(seconds)):
        begin, end = op_start[op], op_start[op + 1]
        if end - begin == 1 and held[op] == 0:
            q, k, left, right = q_len[begin], k_len[begin], window[begin, 0], window[begin, 1]
            kind = 2 * (right - UNCUT) + varlen[op] + 4
            slot = (q * 1000003 + k * 8191 + kind * 131 + left * 37 + num_heads[op] * 31 + num_kv_heads[op]) % KNOWN
            key = known[slot]
            same = key[0] == q and key[1] == k and key[2] == kind and key[5] == left
            if same and key[3] == num_heads[op] and key[4] == num_kv_heads[op]:
                seconds[op], slower[op] = seconds[known_op[slot]], slower[known_op[slot]]
                for i in range(looks.shape[1]):
                    looks[op, i] = looks[known_op[slot], i]
                continue
            key[0], key[1], key[2], key[3], key[4], key[5] = q, k, kind, num_heads[op], num_kv_heads[op], left
            known_op[slot] = op
        seconds[op], slower[op] = _call(
            g,
            q_len,
            k_len,
            window,
            begin,
            end,
            num_heads[op],
            num_kv_heads[op],
            varlen[op],
            held[op],
            hold_s[op],
            scratch,
            number,
            looks[op],
        )
        seconds[op] /= np.exp(correction(looks[op], discrepancy[0], discrepancy[1], discrepancy[2]))
    return seconds, looks, slower


@bare()
def _passed(g, of_rows, num_own, num_others, causal, row, backward):  # type: ignore[no-untyped-def]
    """Seconds in which a thread block of a row passes over blocks that it looks at and that the mask leaves out."""
    if g.passed_s == 0.0:
        return 0.0
    looked, after = (num_others + BLOCK - 1) // BLOCK, num_others - num_own
    if causal and backward:  # keys: queries from the first that sees one of them on
        looked -= max(0, row * BLOCK + after) // BLOCK
    elif causal:
        looked = min(looked, (min((row + 1) * BLOCK, num_own) + after + BLOCK - 1) // BLOCK)
    bounds = 0.5 if causal else 1.0  # hidden rows have an end on one side of the diagonal, or on both
    return g.passed_s * bounds * max(0, looked - of_rows[row, 0] - of_rows[row, 1])


@compiled()
def _listed_rows(g, of_queries, of_keys, num_q, num_k, rule, causal, unaligned, shared, cost):  # type: ignore[no-untyped-def]
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
            loops += together * _passed(g, of_keys, num_k, num_q, causal, row // parts, True)
            cost[n], tiles, n = block_s + loops + work, tiles + work, n + 1
        if not g.packs_heads:
            return n, tiles
        pair_s, cut = g.query_pair_s, cut * share
    parts = BLOCK // g.tile_q_full
    for _ in range(shared if g.backward else 1):
        for row in range(len(of_queries) * parts):
            partial, full = of_queries[row // parts]
            work = BLOCK * g.tile_q_full * ((pair_s + cut) * partial + pair_s * full)
            passed = _passed(g, of_queries, num_q, num_k, causal, row // parts, False)
            cost[n], tiles, n = block_s + passed + work, tiles + work, n + 1
    return n, tiles


@compiled()
def _listed_traffic(g, q, k, shared):  # type: ignore[no-untyped-def]
    """Bytes that a call of listed blocks moves beside its tiles, and around them, of q and k elements."""
    if not g.backward:
        return 4.0 * (q + k), 0.0
    beside, around = 6.0 * q + 8.0 * k, 4.0 * q  # reads q, dout, k, v; writes dq, dk, dv; around it reads out and dout
    if g.accumulates_kv:  # dq, and dk and dv of shared heads, added up in fp32: zeroed, added to, read
        fp32 = 8.0 * (q + 2.0 * k * (shared > 1))
        return beside + fp32, around + fp32
    if not g.packs_heads:  # dq is added up in fp32
        written, summed = _key_gradients(k, shared)
        return 12.0 * q + 4.0 * k + written, 14.0 * q + summed
    return beside, around


@compiled()
def price_listed(  # type: ignore[no-untyped-def]
    g, discrepancy, of_queries, of_keys, num_q, num_k, rule, causal, num_heads, num_kv_heads, look
):
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
    n, tiles = _listed_rows(g, of_queries, of_keys, num_q, num_k, rule, causal, unaligned, shared, cost)
    visited = of_queries.sum()
    if visited == 0:
        return 0.0, 1.0
    if g.blocks_per_sm == 2 and n * repeats <= PAIRED_WAVES * g.slots:
        once, idle = np.ones(n, np.int64), np.full(n, g.block_s)
        idles = every_block(idle, once, n, repeats)
        works = every_block((cost[:n] - idle) * g.alone_factor, once, n, repeats)
        makespan = pairs(idles, works, n * repeats, g.num_sms, g.alone_factor, g.older_share, 1)
    else:
        last = min(repeats, max(1, REPLAYED_WAVES * g.slots // n))
        before = cost[:n].sum() * (repeats - last) / g.slots
        makespan = before + queue(cost, np.ones(n, np.int64), n, last, g.slots, np.empty(g.slots))
    busy = tiles * repeats / g.slots / makespan
    slower = slowdown(busy / g.busy_threshold, g.busy_power)
    makespan *= slower
    beside, around = _listed_traffic(g, num_q * num_heads * g.head_dim, num_k * num_kv_heads * g.head_dim, shared)
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
