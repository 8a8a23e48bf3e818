"""Seconds of the attention ops of a schedule, whatever form their kernel takes a mask in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import mean_head_bytes
from cpsim.masks.blocks import Visits
from cpsim.masks.slices import UNCUT, Ints, Whole
from cpsim.masks.tiles import CAUSAL, Sequences, Tiles, sequences
from cpsim.models.attention.kernels import KERNELS, NAIVE, working_bytes
from cpsim.models.attention.params import AttentionParams, calls, clocked_seconds, listed_calls
from cpsim.models.feasible import dense_sequences, gathered_sequences, limits_of, sliced_sequences, tile_visits
from cpsim.runtime.compiled import bare, compiled
from cpsim.schedule.schedule import ATTENTION_KINDS, Kind, Schedule, is_one_of

Floats = NDArray[np.float64]
HOLD_STEP_S: Final = 1e-6
"""Holds that differ by less are alike."""
AT_ONCE: Final = 1 << 18
"""Sequences that are priced together."""


def attention_op_seconds(
    params: AttentionParams,
    kernel: str,
    dtype: str,
    head_dim: int,
    schedule: Schedule,
    ops: Ints | None = None,
    varlen: bool = False,
    value_dim: int = 0,
    visited: Mapping[int, Visits] | None = None,
) -> Floats:
    """Seconds [2, ops] of attention ops, by default all: at the clock that the power limit leaves, and at the full one.

    The kernel takes them; see `check_calls`. With ``varlen`` calls of one sequence are varlen ones, too. ``visited`` is
    what `tile_visits` answers, where it is at hand.
    """
    if ops is None:
        ops = np.flatnonzero(is_one_of(schedule.kind, ATTENTION_KINDS))
    head_bytes = mean_head_bytes(head_dim, value_dim, dtype)
    if params.anatomy.lists_blocks:
        visited = tile_visits(schedule, ops, head_bytes) if visited is None else visited
        return _listed_seconds(params, schedule, ops, visited, head_dim)
    shapes, shape_of = head_shapes(schedule, ops)
    seconds = np.empty((2, len(ops)))
    own, window = None, None
    if params.anatomy.takes_slices:
        own, window = sliced_sequences(schedule, ops, head_bytes)
    elif limits_of(kernel).any_mask:
        made = gathered_sequences if params.anatomy.gathers_keys else dense_sequences
        own = made(schedule, ops, head_bytes)
    for i, shape in enumerate(shapes.tolist()):
        mine = np.flatnonzero(shape_of == i)
        which = schedule.tile[ops[mine]]
        if own is None:
            kind, found = _seconds_of_tiles(params, schedule.tiles, *shape, head_dim, value_dim, varlen)
            which = kind[which]
        else:
            num_heads, num_kv_heads = (np.full(len(own[0]) - 1, number) for number in shape)
            found = clocked_seconds(
                params, *own, num_heads, num_kv_heads, head_dim, params.anatomy.takes_slices, window, value_dim
            )
        for clock in range(2):
            seconds[clock, mine] = found[clock][which]
    return seconds


def head_shapes(schedule: Schedule, ops: Ints) -> tuple[Ints, Ints]:
    """Query and key-value heads that some ops have, ``[shapes, 2]`` in ascending order, and which of these each has."""
    both = schedule.heads_of(ops)[:, 1].astype(np.int64) << 32 | schedule.heads_of(ops)[:, 3]
    if len(both) and (both == both[0]).all():
        return np.array([[both[0] >> 32, both[0] & 0xFFFFFFFF]]), np.zeros(len(ops), np.int64)
    shapes, of_op = np.unique(both, return_inverse=True)
    return np.stack([shapes >> 32, shapes & 0xFFFFFFFF], axis=1), of_op


def held_op_seconds(
    params: AttentionParams,
    schedule: Schedule,
    ops: Ints,
    held: Ints,
    hold_s: Floats,
    varlen: bool = False,
    *,
    head_dim: int,
    value_dim: int = 0,
) -> Floats:
    """Seconds [A] of attention ops [A] at the clock that the power limit leaves, where something holds SMs when they
    begin.

    Of kernels that take a tile as sequences; without holds the first row of `attention_op_seconds`. Ops that are alike
    are priced once.

    Args:
        params: of the kernel and pass.
        schedule: of the ops.
        ops: which ones.
        held: SMs that are held, ``[A]``.
        hold_s: for how long, ``[A]``; rounded to `HOLD_STEP_S`.
        varlen: calls of one sequence are varlen ones, too.
        head_dim: of queries and keys.
        value_dim: of values and outputs; 0: as ``head_dim``.
    """
    steps = np.round(hold_s / HOLD_STEP_S).astype(np.int64)
    kind, tile_of_kind = _kinds(schedule.tiles)
    shapes, shape = head_shapes(schedule, ops)
    columns: tuple[Whole, ...] = kind[schedule.tile[ops]], shape, held, steps
    looks = np.zeros(len(ops), np.int64)
    for column in columns:  # one number for each look, which sorts faster than rows
        looks = looks * (column.max(initial=0) + 1) + column
    _, first, of_look = np.unique(looks, return_index=True, return_inverse=True)
    call, shape, held, steps = (column[first] for column in columns)
    heads, kv_heads = shapes[shape].T
    (start, q_len, k_len, causal), window = _sequences_of(sequences(schedule.tiles), tile_of_kind[call])
    given = start, q_len, k_len, causal, heads, kv_heads, head_dim, (np.diff(start) > 1) | varlen
    hold_s = np.asarray(steps * HOLD_STEP_S, np.float64)
    return calls(params, *given, held, hold_s, window=window, value_dim=value_dim)[0][of_look]


def full_clock_op_seconds(
    params: AttentionParams, schedule: Schedule, ops: Ints, varlen: bool, head_dim: int, value_dim: int
) -> Floats:
    """The second row of `attention_op_seconds` for a few ops [A] of a kernel that takes a tile as sequences."""
    given, window = _sequences_of(sequences(schedule.tiles), schedule.tile[ops].astype(np.int64))
    heads = schedule.heads_of(ops)[:, 1].astype(np.int64), schedule.heads_of(ops)[:, 3].astype(np.int64)
    return clocked_seconds(params, *given, *heads, head_dim, varlen, window, value_dim)[1]


@lru_cache(maxsize=4)
def _kinds(tiles: Tiles) -> tuple[NDArray[np.int32], Ints]:
    """Tiles that look alike, as many do where documents are padded: the kind of each tile, and a tile of each kind."""
    found = sequences(tiles)
    kind, first = _alike(found.start, found.q_len, found.k_len, found.flags & CAUSAL, found.left, found.right)
    return kind, first.copy()


@compiled()
def _alike(start, q_len, k_len, causal, left, right):  # type: ignore[no-untyped-def]
    """Tiles with the same sequences are of one kind, whose first one is remembered; by a hash table."""
    num = len(start) - 1
    kind, first, count = np.empty(num, np.int32), np.empty(num, np.int64), 0
    room = 4 * num + 1
    table = np.full(room, -1, np.int32)
    for tile in range(num):
        code = np.uint64(14695981039346656037)
        for i in range(start[tile], start[tile + 1]):
            code = (code ^ np.uint64(q_len[i])) * np.uint64(1099511628211)
            code = (code ^ np.uint64(k_len[i] * 2 + causal[i])) * np.uint64(1099511628211)
            code = (code ^ np.uint64(left[i] * 31 + right[i] + 32)) * np.uint64(1099511628211)
            code ^= code >> np.uint64(32)
        at = code % np.uint64(room)
        while table[at] >= 0 and not _same(start, q_len, k_len, causal, left, right, first[table[at]], tile):
            at = (at + np.uint64(1)) % np.uint64(room)
        if table[at] < 0:
            table[at], first[count] = count, tile
            count += 1
        kind[tile] = table[at]
    return kind, first[:count]


@bare()
def _same(start, q_len, k_len, causal, left, right, one, other):  # type: ignore[no-untyped-def]
    num = start[one + 1] - start[one]
    if start[other + 1] - start[other] != num:
        return False
    for i in range(num):
        a, b = start[one] + i, start[other] + i
        if q_len[a] != q_len[b] or k_len[a] != k_len[b] or causal[a] != causal[b]:
            return False
        if left[a] != left[b] or right[a] != right[b]:
            return False
    return True


def _sequences_of(found: Sequences, tiles: Ints) -> tuple[tuple[Ints, Ints, Ints, NDArray[np.bool_]], Ints]:
    """Sequences of some tiles as kernels are priced: offsets, query and key lengths, whether they are causal; and the
    windows of their calls."""
    start = np.concatenate(([0], np.cumsum(np.diff(found.start)[tiles])))
    q_len, k_len, causal = np.empty(start[-1], np.int64), np.empty(start[-1], np.int64), np.empty(start[-1], np.bool_)
    window = np.empty((start[-1], 2), np.int64)
    lengths = found.start, found.q_len, found.k_len, found.unseen, found.flags
    _pick(*lengths, found.one_window, found.windows, tiles, start, q_len, k_len, causal, window)
    return (start, q_len, k_len, causal), window


@compiled()
def _pick(  # type: ignore[no-untyped-def]
    first, queries, keys, unseen, flags, one_window, windows, tiles, start, q_len, k_len, causal, window
):
    """Fills in what begins with ``q_len``: of the sequences of some tiles, which go to ``start``."""
    for i in range(len(tiles)):
        tile, at = tiles[i], start[i]
        for one in range(first[tile], first[tile + 1]):
            q_len[at], k_len[at], causal[at] = queries[one] - unseen[one], keys[one], flags[one] & CAUSAL > 0
            if one_window[tile]:
                window[at, 0], window[at, 1] = windows[tile, 0], windows[tile, 1]
            else:
                window[at, 0], window[at, 1] = UNCUT, 0 if causal[at] else UNCUT
            at += 1


@lru_cache(maxsize=4)
def _seconds_of_tiles(
    params: AttentionParams,
    tiles: Tiles,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    varlen: bool,
) -> tuple[NDArray[np.int32], tuple[Floats, Floats]]:
    """The kind of every tile, and `clocked_seconds` of the kinds; remembered, because different code runs the same
    tiles."""
    (of_tile, tile_of_kind), found = _kinds(tiles), sequences(tiles)
    before = np.cumsum(np.diff(found.start)[tile_of_kind])
    edges = np.flatnonzero(np.diff(before // AT_ONCE)) + 1  # so many that they need little memory
    seconds = []
    for some in np.split(tile_of_kind, edges):
        heads, kv_heads = (np.full(len(some), number) for number in (num_heads, num_kv_heads))
        found_here, window = _sequences_of(found, some)
        seconds.append(clocked_seconds(params, *found_here, heads, kv_heads, head_dim, varlen, window, value_dim))
    slow, fast = (np.concatenate(column) for column in zip(*seconds, strict=True))
    return of_tile, (slow, fast)


def _listed_seconds(
    params: AttentionParams, schedule: Schedule, ops: Ints, masks: Mapping[int, Visits], head_dim: int
) -> Floats:
    """Seconds of a kernel that lists blocks; calls that are alike are priced once."""
    which = np.column_stack([schedule.tile[ops], schedule.heads_of(ops)[:, [1, 3]]]).astype(np.int64)
    alike, of_op = np.unique(which, axis=0, return_inverse=True)
    visited = [masks[tile] for tile in alike[:, 0].tolist()]
    seconds, _, slower = listed_calls(params, visited, alike[:, 1], alike[:, 2], head_dim)
    return np.stack([seconds, seconds / slower])[:, of_op.reshape(-1)]


def working_memory(schedule: Schedule, kernel: str, head_dim: int) -> Ints:
    """Most bytes that a rank's attention calls allocate besides buffers, ``int64[num_ranks]``; 0 of naive attention and
    of kernels that nobody has measured."""
    most = np.zeros(schedule.num_ranks, np.int64)
    for kind, pass_ in ((Kind.ATTENTION, "fwd"), (Kind.ATTENTION_BACKWARD, "bwd")):
        ops = np.flatnonzero(schedule.kind == kind)
        if (kernel, pass_) not in KERNELS or kernel in NAIVE or not len(ops):
            continue
        found, tile = sequences(schedule.tiles), schedule.tile[ops]
        heads, kv_heads = schedule.heads_of(ops)[:, 1], schedule.heads_of(ops)[:, 3]
        nbytes = working_bytes(kernel, pass_, found.queries()[tile], found.keys()[tile], heads, kv_heads, head_dim)
        np.maximum.at(most, schedule.lane_rank[schedule.lane_start[ops]], nbytes)
    return most
