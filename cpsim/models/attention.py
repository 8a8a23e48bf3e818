"""Attention kernels: the tiles that a kernel really visits, its thread blocks in waves over the SMs, its power limit.

One call is one kernel launch over one or more sequences. A call with one sequence uses the kernel's dense entry
point, with several the varlen one, as `real.attention` does.

    seconds = call + traffic / bandwidth + makespan(blocks) * slowdown(busy)

* A thread block owns one tile row (forward: queries, backward: keys) of one head and walks over the tiles of its row
  that the mask does not empty; tiles cut by the mask or by a sequence's end cost a whole tile. Heads that share keys
  are packed into one tile row by some kernels.
* Blocks start in launch order as SMs become free: few waves are replayed exactly, many are summed with their tail.
* Backward adds memory-bound passes: the products of out and dout, the fp32 accumulator of dq, and with shared heads
  those of dk and dv. Accumulators are passed over in whole tiles, so that short sequences move mostly padding.
* The main kernel itself cannot run faster than its own memory traffic, which matters to calls of short sequences.
* Busy tensor cores draw more than the power limit, so the clock falls where `busy` (the fraction of time that the
  SMs spend on tiles) passes a threshold.

Reference: Dao, FlashAttention-2 (2023), section 3.3 (work partitioning); tile sizes and launch orders as in the
sources of flash-attention 2.8.3 and flash-attn-4 4.0.0b36, head dimension 128, compute capability 9.0.
Differs: cuDNN's tiles are not public; its anatomy is the one that fits best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

REPLAYED_WAVES = 6
"""Calls of at most so many waves of blocks are scheduled block by block."""
KNOWN = 4096
"""Prices of single-sequence calls that are remembered."""
SHARPNESS = 12.0
"""How sharply the power limit sets in; the fit does not feel values of 8 to 20."""
TABLE_ABOVE = 256
"""Sequences above which flash-attn-4 looks a block's sequence up in a table, at the same price (interface.py)."""
L2_BYTES = 50 * 2**20
"""Second-level cache that flash-attn-4 assumes when it groups heads (tile_scheduler.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What a kernel's source says about one pass; nothing here is fitted."""

    backward: bool
    """Whether a block owns a tile row of keys and walks over queries."""
    tile_q_causal: int
    """Query rows of a tile under a causal mask [tokens, or tokens x packed heads]."""
    tile_q_full: int
    """The same without a mask."""
    tile_k: int
    """Key rows of a tile [tokens]."""
    packs_heads: bool
    """Whether query heads that share keys fill one tile row together."""
    heads_outermost: bool
    """Launch order: all sequences of one head first (True) or all heads of one sequence."""
    heavy_first: bool
    """Whether a causal call launches its longest rows first, across heads that fit the L2 cache."""
    blocks_per_sm: int
    """Thread blocks that one SM holds."""
    splits_keys: bool
    """Whether a dense call with few blocks splits the keys (flash-attn 2, num_splits_heuristic)."""
    grid_of_longest: bool
    """Whether a varlen call launches as many blocks for each sequence as the longest one needs."""
    accumulates_kv: bool
    """Whether shared heads accumulate dk and dv in fp32 (True), or write them per query head (False)."""


def _flash2(backward: bool) -> Anatomy:
    return Anatomy(
        backward=backward, tile_q_causal=64 if backward else 128, tile_q_full=64 if backward else 128,
        tile_k=128 if backward else 64, packs_heads=False, heads_outermost=True, heavy_first=False,
        blocks_per_sm=1 if backward else 2, splits_keys=not backward, grid_of_longest=True, accumulates_kv=False,
    )  # fmt: skip


def _flash4(backward: bool) -> Anatomy:
    return Anatomy(
        backward=backward, tile_q_causal=64 if backward else 128, tile_q_full=80 if backward else 128, tile_k=128,
        packs_heads=not backward, heads_outermost=False, heavy_first=not backward, blocks_per_sm=1,
        splits_keys=False, grid_of_longest=False, accumulates_kv=True,
    )  # fmt: skip


def _cudnn(backward: bool) -> Anatomy:
    return Anatomy(
        backward=backward, tile_q_causal=64 if backward else 128, tile_q_full=64 if backward else 128, tile_k=128,
        packs_heads=False, heads_outermost=True, heavy_first=True, blocks_per_sm=1, splits_keys=False,
        grid_of_longest=True, accumulates_kv=False,
    )  # fmt: skip


ANATOMY: dict[tuple[str, str], Anatomy] = {
    (kernel, "bwd" if backward else "fwd"): make(backward)
    for kernel, make in {"fa2": _flash2, "fa4": _flash4, "cudnn": _cudnn, "sdpa_flash": _flash2}.items()
    for backward in (False, True)
}
"""By (kernel, pass)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """One kernel and pass on one GPU type: its anatomy and the fitted times, all in seconds of one thread block."""

    anatomy: Anatomy
    num_sms: int
    head_dim: int
    """Measured head dimension; another one scales tiles and traffic in proportion."""
    pair_s: float
    """Per (query, key) pair of a visited tile."""
    block_s: float
    """Per block: prologue and epilogue."""
    block_shared_s: float
    """Per block more, where query heads share keys."""
    block_causal_s: float
    """Per block more, under a causal mask."""
    block_varlen_s: float
    """Per block more, in a varlen call."""
    block_decode_s: float
    """Per block and 32 sequences more, in a varlen call (finding its sequence), or per launched block without work."""
    call_s: float
    """Per call: launches on the GPU, pipeline fill."""
    call_varlen_s: float
    """Per varlen call more."""
    traffic_s_per_byte: float
    """Memory-bound passes around the main kernel."""
    busy_threshold: float
    """Busy fraction at which the power limit sets in."""
    busy_power: float
    """Time grows with (busy / threshold) to this power above it."""
    alone_factor: float
    """Time of a block that has its SM to itself, relative to one that shares it."""
    split_pair_s: float
    """Per pair where keys are split."""
    unaligned_factor: float
    """Slowdown where lengths are no multiples of the tile sizes."""


FITTED = tuple(f.name for f in fields(AttentionParams) if f.name not in ("anatomy", "num_sms", "head_dim"))


def attention_seconds(
    params: AttentionParams,
    op_start: Ints, q_len: Ints, k_len: Ints, causal: Bools,
    num_heads: Ints, num_kv_heads: Ints, head_dim: int,
) -> Floats:  # fmt: skip
    """Seconds of N kernel calls of one kernel and pass.

    Args:
        params: of that kernel and pass.
        op_start: [N+1] offsets of each call's sequences.
        q_len: [M] queries of each sequence, tokens.
        k_len: [M] keys of each sequence, tokens; at least q_len under a causal mask.
        causal: [M] whether the mask is causal, aligned to the bottom right; otherwise full. One call is causal if
            any of its sequences is.
        num_heads: [N] query heads.
        num_kv_heads: [N] key and value heads.
        head_dim: of queries, keys and values.

    Returns:
        [N] seconds; 0 for calls without work.
    """
    return call_seconds(
        params, op_start, q_len, k_len, causal, num_heads, num_kv_heads, head_dim, np.diff(op_start) > 1
    )


def call_seconds(
    params: AttentionParams,
    op_start: Ints, q_len: Ints, k_len: Ints, causal: Bools,
    num_heads: Ints, num_kv_heads: Ints, head_dim: int, varlen: Bools,
) -> Floats:  # fmt: skip
    """As `attention_seconds`, with `varlen` [N] telling which entry point each call uses."""
    a = params.anatomy
    shape = (
        a.backward, a.tile_q_causal, a.tile_q_full, a.tile_k, a.packs_heads, a.heads_outermost, a.heavy_first,
        a.splits_keys, a.grid_of_longest, a.accumulates_kv, a.blocks_per_sm, params.num_sms,
    )  # fmt: skip
    times = tuple(float(getattr(params, name)) for name in FITTED)
    seconds: Floats = _price(
        np.asarray(op_start, np.int64), np.asarray(q_len, np.int64), np.asarray(k_len, np.int64),
        np.asarray(causal, np.bool_), np.asarray(num_heads, np.int64), np.asarray(num_kv_heads, np.int64),
        np.asarray(varlen, np.bool_), head_dim / params.head_dim, float(head_dim), shape, times,
    )  # fmt: skip
    return seconds


@njit(cache=True)
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


@njit(cache=True)
def tile_rows(
    q: int, k: int, causal: bool, tile_q: int, tile_k: int, packed: int, backward: bool
) -> tuple[int, int, int, int]:
    """Tile rows of one sequence and head: their number, visited tiles in all, in the longest and in the shortest."""
    if causal:
        q = min(q, k)  # rows above see no key
    if q <= 0 or k <= 0:
        return 0, 0, 0, 0
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


@njit(cache=True)
def tiles_of_row(
    row: int, q: int, k: int, causal: bool, tile_q: int, tile_k: int, packed: int, backward: bool
) -> int:
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


@njit(cache=True)
def _l2_group(heads: int, k: int, head_dim: float) -> int:
    """Heads whose keys and values fit the L2 cache together, a power of two."""
    group = 1
    while group * 2 <= heads and group * 2 * k * head_dim * 4 <= L2_BYTES:
        group *= 2
    return group


@njit(cache=True)
def _greedy(cost: Floats, n: int, slots: int) -> float:
    """Makespan of list scheduling: every block goes to the slot that is free first."""
    free = np.zeros(slots)
    end = 0.0
    for i in range(n):
        value = free[0] + cost[i]
        end = max(end, value)
        at = 0
        while True:
            child = 2 * at + 1
            if child >= slots:
                break
            if child + 1 < slots and free[child + 1] < free[child]:
                child += 1
            if free[child] >= value:
                break
            free[at] = free[child]
            at = child
        free[at] = value
    return end


@njit(cache=True)
def _pairs(cost: Floats, lone: Floats, n: int, num_sms: int, empty: float) -> float:
    """Makespan where an SM holds two blocks: `cost` is each one's time beside another, `lone` its time by itself.

    The second blocks go to the SMs in an order that has nothing to do with the first ones'. Of the last blocks, an
    SM takes a second one only if other SMs are not about to have room for them, as measured.
    """
    offset = int(0.618 * num_sms)
    last = np.zeros(num_sms, np.bool_)
    first, second = np.zeros(num_sms), np.zeros(num_sms)  # remaining seconds beside another block
    gain = np.ones((2, num_sms))  # how much faster each would run by itself
    now, due = np.zeros(num_sms), np.full(num_sms, np.inf)
    for i in range(min(n, num_sms)):
        first[i], gain[0, i] = cost[i], cost[i] / lone[i]
    for i in range(num_sms, min(n, 2 * num_sms)):
        sm = (i * 7 + offset) % num_sms
        second[sm] = cost[i] * (1.002 if cost[i] > empty else 1.0)
        gain[1, sm] = cost[i] / lone[i]
    for sm in range(num_sms):
        due[sm] = _due(first[sm], second[sm], gain[0, sm], gain[1, sm])
    order = np.argsort(due)
    queued, end = min(n, 2 * num_sms), 0.0
    while True:
        sm = order[0]
        at = due[sm]
        if at == np.inf:
            return end
        end = at
        step = at - now[sm]
        if second[sm] == 0.0:
            step *= gain[0, sm]
        elif first[sm] == 0.0:
            step *= gain[1, sm]
        first[sm] = max(0.0, first[sm] - step)
        second[sm] = max(0.0, second[sm] - step)
        if first[sm] <= 1e-12:
            first[sm] = 0.0
        if second[sm] <= 1e-12:
            second[sm] = 0.0
        for _ in range(2):
            if queued == n:
                break
            if last[sm]:
                room = 0
                for other in range(num_sms):
                    room += not last[other] and due[other] < at + 0.05 * cost[queued]
                if room >= n - queued:
                    break
            if first[sm] == 0.0 or second[sm] == 0.0:
                if first[sm] == 0.0:
                    first[sm], gain[0, sm] = cost[queued], cost[queued] / lone[queued]
                else:
                    second[sm], gain[1, sm] = cost[queued], cost[queued] / lone[queued]
                queued += 1
                last[sm] = queued > n - num_sms
        now[sm] = at
        due[sm] = at + _due(first[sm], second[sm], gain[0, sm], gain[1, sm])
        parent = 0
        while True:  # sift down: only the first entry's time has changed
            child = 2 * parent + 1
            if child >= num_sms:
                break
            if child + 1 < num_sms and due[order[child + 1]] < due[order[child]]:
                child += 1
            if due[order[child]] >= due[sm]:
                break
            order[parent] = order[child]
            parent = child
        order[parent] = sm


@njit(cache=True)
def _due(first: float, second: float, first_gain: float, second_gain: float) -> float:
    """Seconds until the next of two blocks on one SM ends; 0 remaining means that there is none."""
    if first > 0.0 and second > 0.0:
        return min(first, second)
    if first == 0.0 and second == 0.0:
        return np.inf
    return first / first_gain if second == 0.0 else second / second_gain


@njit(cache=True)
def _row(block: float, cut: float, tile: float, alone: float, tiles: float) -> float:
    """Seconds of a block with so many tiles; `cut` is that of two and more tiles cut by the mask.

    Where an SM holds two blocks (alone < 1), one's overhead hides behind the other's tiles: the tensor cores need
    `tile` for each tile of a pair, the block itself its overhead and alone * tile; a smooth maximum of both.
    """
    own = block + cut * min(max(tiles - 1.0, 0.0), 2.0) / 2.0
    if alone == 1.0:
        return own + tile * tiles
    return float(((tile * tiles) ** 4 + (own + alone * tile * tiles) ** 4) ** 0.25)


@njit(cache=True)
def _rows(
    block: float, cut: float, tile: float, alone: float, rows: int, tiles: int, most: int, least: int
) -> float:
    """Seconds of all rows of a sequence, their tiles evenly spread from least to most (Simpson's rule)."""
    if alone == 1.0 and cut == 0.0:
        return block * rows + tile * tiles
    low, high = _row(block, cut, tile, alone, least), _row(block, cut, tile, alone, most)
    middle = _row(block, cut, tile, alone, (least + most) / 2.0)
    mean = (low + 4.0 * middle + high) / 6.0
    return rows * mean + tile * (tiles - rows * (least + most) / 2.0)


@njit(cache=True)
def _replay(
    begin: int, end: int, q_len: Ints, k_len: Ints, causal: Bools, tile_q: int, tile_k: int, packed: int,
    heads: int, backward: bool, outermost: bool, heavy_first: bool, num_sms: int, per_sm: int, block: float,
    cut: float, tile: float, head_dim: float, alone: float, empty: float, grid_rows: int, cost: Floats, lone: Floats,
) -> float:  # fmt: skip
    """Schedules every block of a call in launch order; `cost` and `lone` are scratch for them.

    `grid_rows` blocks are launched for each sequence if it is not 0, those without work take `empty` seconds.
    """
    n = 0
    for i in range(begin, end):
        rows = tile_rows(q_len[i], k_len[i], causal[i], tile_q, tile_k, packed, backward)[0]
        turned = causal[i] and heavy_first and not backward
        group = _l2_group(heads, k_len[i], head_dim) if turned and not outermost else 1
        for head in range(0, 1 if outermost else heads, group):
            together = min(group, heads - head)
            for row in range(rows):
                at = rows - 1 - row if turned else row
                tiles = tiles_of_row(at, q_len[i], k_len[i], causal[i], tile_q, tile_k, packed, backward)
                for _ in range(together):
                    lone[n] = _row(block, cut, alone * tile, 1.0, tiles)
                    cost[n] = _row(block, cut, tile, alone, tiles)
                    n += 1
            for _ in range(rows, grid_rows if rows else 0):
                cost[n], lone[n] = empty, empty
                n += 1
    if outermost:
        for head in range(1, heads):
            cost[head * n : (head + 1) * n] = cost[:n]
            lone[head * n : (head + 1) * n] = lone[:n]
        n *= heads
    return _pairs(cost, lone, n, num_sms, empty) if per_sm == 2 else _greedy(cost, n, num_sms)


@njit(cache=True)
def _tail(
    begin: int, end: int, q_len: Ints, k_len: Ints, causal: Bools, tile_q: int, tile_k: int, packed: int,
    heads: int, backward: bool, outermost: bool, heavy_first: bool, slots: int, block: float, cut: float,
    tile: float, alone: float, head_dim: float, total: float,
) -> float:  # fmt: skip
    """When the last long block ends: the work before it spread over all slots, and then its own time."""
    done, latest = 0.0, 0.0
    for i in range(begin, end):
        rows, tiles, longest, least = tile_rows(q_len[i], k_len[i], causal[i], tile_q, tile_k, packed, backward)
        mine = _rows(block, cut, tile, alone, rows, tiles, longest, least)
        long = _row(block, cut, tile, alone, longest)
        if rows == 0:
            continue
        if outermost:
            before = total / heads * (heads - 1) + done
            if not backward and not heavy_first:
                before += mine - long
        elif backward or not causal[i]:
            before = heads * done + (heads - 1) * mine
        else:
            group = _l2_group(heads, k_len[i], head_dim)
            before = heads * done + ((heads + group - 1) // group - 1) * group * mine + (group - 1) * long
        latest = max(latest, before / slots + long)
        done += mine
    return latest


@njit(cache=True)
def _num_splits(num_blocks: int, slots: int, tiles: int) -> int:
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


@njit(cache=True)
def _price(op_start, q_len, k_len, causal, num_heads, num_kv_heads, varlen, scale, head_dim, shape, times):  # type: ignore[no-untyped-def]
    """[N] seconds; see call_seconds for the arguments."""
    (backward, tile_q_causal, tile_q_full, tile_k, packs, outermost, heavy_first,
     splits_keys, grid_of_longest, accumulates_kv, blocks_per_sm, num_sms) = shape  # fmt: skip
    (pair_s, block_s, block_shared_s, block_causal_s, block_varlen_s, block_decode_s, call_s, call_varlen_s,
     traffic_s, busy_threshold, busy_power, alone_factor, split_pair_s, unaligned_factor) = times  # fmt: skip
    slots = num_sms * blocks_per_sm
    seconds = np.zeros(len(op_start) - 1)
    scratch = np.empty((2, REPLAYED_WAVES * slots + 1))
    known = np.zeros((KNOWN, 5), np.int64)  # calls with one sequence repeat a lot: remember the last ones
    known_s = np.zeros(KNOWN)
    for op in range(len(seconds)):
        begin, end = op_start[op], op_start[op + 1]
        slot = -1
        if end - begin == 1:
            q, k = q_len[begin], k_len[begin]
            kind = 2 * causal[begin] + varlen[op] + 4
            slot = (q * 1000003 + k * 8191 + kind * 131 + num_heads[op] * 31 + num_kv_heads[op]) % KNOWN
            key = known[slot]
            same = key[0] == q and key[1] == k and key[2] == kind
            if same and key[3] == num_heads[op] and key[4] == num_kv_heads[op]:
                seconds[op] = known_s[slot]
                continue
        shared = num_heads[op] > num_kv_heads[op]
        packed = num_heads[op] // num_kv_heads[op] if packs else 1
        heads = num_kv_heads[op] if packs else num_heads[op]
        masked = False
        for i in range(begin, end):
            masked = masked or causal[i]
        tile_q = tile_q_causal if masked else tile_q_full
        tile = pair_s * tile_q * tile_k * scale
        rows, tiles, queries, keys, num, longest_row = 0, 0, 0, 0, 0, 0
        most, least, squares, aligned = 0, 1 << 60, 0.0, True
        whole_queries = 0  # each sequence's rounded up to tiles
        alone = alone_factor if blocks_per_sm > 1 else 1.0
        block, cut = block_s + block_shared_s * shared, block_causal_s * masked
        decode = block_decode_s
        if varlen[op] and not grid_of_longest:
            decode = block_varlen_s + block_decode_s * min(end - begin, TABLE_ABOVE) / 32.0
        if varlen[op]:
            block += block_varlen_s if grid_of_longest else decode
        time = 0.0
        for i in range(begin, end):
            r, t, high, low = tile_rows(q_len[i], k_len[i], causal[i], tile_q, tile_k, packed, backward)
            if r == 0:
                continue
            num += 1
            rows, tiles, queries, keys = rows + r, tiles + t, queries + q_len[i], keys + k_len[i]
            most, least, longest_row = max(most, high), min(least, low), max(longest_row, r)
            whole_queries += (q_len[i] + tile_q - 1) // tile_q * tile_q
            mine = _rows(block, cut, tile, alone, r, t, high, low)
            time += mine
            squares += mine * mine / r + r * (tile * (high - low)) ** 2 / 12.0
            aligned = aligned and q_len[i] % tile_q == 0 and k_len[i] % tile_k == 0
        if num == 0:
            continue
        empty = 0
        if varlen[op] and grid_of_longest:
            empty = heads * (num * longest_row - rows)
        elif varlen[op]:  # as many as any lengths with these sums could need
            length, per_row = (keys, tile_k) if backward else (queries * packed, tile_q)
            empty = heads * max(0, (length + num * (per_row - 1)) // per_row - rows)
        num_blocks = rows * heads
        total = heads * time
        work = heads * tile * tiles
        elements_q = queries * num_heads[op] * head_dim
        elements_k = keys * num_kv_heads[op] * head_dim
        extra = 0.0
        splits = 1
        if splits_keys and not varlen[op]:
            half_rows = (queries + 63) // 64 * heads
            split_tiles = (keys + 127) // 128
            splits = _num_splits(half_rows, slots, split_tiles)
        if splits > 1:
            of_split = -(-split_tiles // splits) * 64 * 128 * split_pair_s * scale
            per_block = block_s + block_shared_s * shared + of_split
            seen = 1.0 - 0.5 * queries / keys if masked else 1.0  # a row's share of the keys; other splits are empty
            makespan = math.ceil(half_rows * min(splits, seen * splits + 0.5) / slots) * per_block
            extra = traffic_s * splits * elements_q * 8  # fp32 partial outputs, written and read
            work = 0.0
        else:
            launched = num_blocks + (empty if grid_of_longest else 0)
            replayed = launched <= REPLAYED_WAVES * slots
            if replayed and num == 1 and not masked:
                cost, lone = _row(block, cut, tile, alone, most), _row(block, cut, alone * tile, 1.0, most)
                whole, rest = num_blocks // slots, num_blocks % slots
                makespan = whole * cost + (0.0 if rest == 0 else lone if rest <= num_sms else cost)
            elif replayed:
                makespan = _replay(
                    begin, end, q_len, k_len, causal, tile_q, tile_k, packed, heads, backward, outermost,
                    heavy_first, num_sms, blocks_per_sm, block, cut, tile, head_dim, alone, block_decode_s,
                    longest_row if grid_of_longest else 0, scratch[0], scratch[1],
                )  # fmt: skip
            else:
                short, long = _row(block, cut, tile, alone, least), _row(block, cut, tile, alone, most)
                waves = num_blocks / slots
                makespan = max(long, total / slots + (math.ceil(waves) - waves) * short)
                latest = 0.0
                if num > 1 or masked:
                    typical = squares / time
                    latest = _tail(
                        begin, end, q_len, k_len, causal, tile_q, tile_k, packed, heads, backward, outermost,
                        heavy_first, slots, block, cut, tile, alone, head_dim, total,
                    )  # fmt: skip
                    latest -= (typical + short) / 2
                even = total / slots  # what remains after it runs more and more by itself
                makespan = even + max((makespan - even) * alone, (latest - even) * (1.0 + alone) / 2.0)
            if not (replayed and grid_of_longest):
                makespan += empty * decode / slots
        busy = work / slots / makespan
        makespan *= (1.0 + (busy / busy_threshold) ** SHARPNESS) ** (busy_power / SHARPNESS)
        if not aligned:
            makespan *= unaligned_factor
        nbytes = 0.0
        if not backward:  # reading q, k, v and writing out goes on beside the tiles
            moved = traffic_s * 4.0 * (elements_q + elements_k)
            makespan = (makespan**4 + moved**4) ** 0.25
        else:
            # read out, dout, write dq; zero, read dq in fp32, in whole tiles
            whole_q = whole_queries * num_heads[op] * head_dim
            nbytes = elements_q * 6.0 + whole_q * 8.0
            # beside the tiles: read q, dout, k, v; add to dq; write dk, dv or add to them
            through = elements_q * 4.0 + whole_q * 8.0 + elements_k * 4.0
            if shared and accumulates_kv:  # dk and dv: zeroed and read in fp32, in whole tiles, written in bf16
                room = keys + num * tile_k if varlen[op] else rows * tile_k
                nbytes += elements_k * 4.0 + (room + rows * tile_k) * num_kv_heads[op] * head_dim * 8.0
                through += rows * tile_k * num_kv_heads[op] * head_dim * 16.0
            elif shared:
                nbytes += keys * num_heads[op] * head_dim * 4.0 + elements_k * 4.0  # per-head dk, dv summed
                through += keys * num_heads[op] * head_dim * 4.0
            else:
                through += elements_k * 4.0
            makespan = (makespan**4 + (traffic_s * through) ** 4) ** 0.25
        seconds[op] = makespan + extra + call_s + call_varlen_s * varlen[op] + traffic_s * nbytes
        if slot >= 0:
            known[slot] = (q_len[begin], k_len[begin], kind, num_heads[op], num_kv_heads[op])
            known_s[slot] = seconds[op]
    return seconds
