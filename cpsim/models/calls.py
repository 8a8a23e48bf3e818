"""Seconds of the attention ops of a schedule, whatever form their kernel takes a mask in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.block_masks import Visits
from cpsim.masks import Ints
from cpsim.models.attention import ANATOMY, AttentionParams, calls, clocked_seconds, listed_calls, working_bytes
from cpsim.models.kernel_limits import dense_sequences, gathered_sequences, limits_of, tile_visits
from cpsim.schedule import ATTENTION_KINDS, Kind, Schedule, is_one_of
from cpsim.tiles import Tiles, sequences
from cpsim.workload import BYTES_PER_ELEMENT

Floats = NDArray[np.float64]
HOLD_STEP_S: Final = 1e-6
"""Holds that differ by less are alike."""


def attention_op_seconds(
    params: AttentionParams, kernel: str, dtype: str, head_dim: int, schedule: Schedule, ops: Ints | None = None
) -> Floats:
    """Seconds [2, ops] of attention ops, by default all: at the clock that the power limit leaves, and at the full one.

    The kernel takes them; see `check_calls`.
    """
    if ops is None:
        ops = np.flatnonzero(is_one_of(schedule.kind, ATTENTION_KINDS))
    head_bytes = head_dim * BYTES_PER_ELEMENT[dtype]
    if params.anatomy.lists_blocks:
        return _listed_seconds(params, schedule, ops, tile_visits(schedule, ops, head_bytes), head_dim)
    heads, seconds = schedule.heads[ops][:, [1, 3]], np.empty((2, len(ops)))
    own = None
    if limits_of(kernel).any_mask:
        made = gathered_sequences if params.anatomy.gathers_keys else dense_sequences
        own = made(schedule, ops, head_bytes)
    for shape in sorted(set(zip(*heads.T.tolist(), strict=True))):
        if own is None:
            of_tile = _seconds_of_tiles(params, schedule.tiles, *shape, head_dim)
        else:
            num_heads, num_kv_heads = (np.full(len(own[0]) - 1, number) for number in shape)
            of_tile = clocked_seconds(params, *own, num_heads, num_kv_heads, head_dim)
        mine = (heads == shape).all(axis=1)
        seconds[:, mine] = np.stack(of_tile)[:, schedule.tile[ops[mine]]]
    return seconds


def held_op_seconds(
    params: AttentionParams, head_dim: int, schedule: Schedule, ops: Ints, held: Ints, hold_s: Floats
) -> Floats:
    """Seconds [A] of attention ops [A] at the clock that the power limit leaves, where something holds SMs when they
    begin.

    Of kernels that take a tile as sequences; without holds the first row of `attention_op_seconds`. Ops that are alike
    are priced once.

    Args:
        params: of the kernel and pass.
        head_dim: of queries, keys and values.
        schedule: of the ops.
        ops: which ones.
        held: SMs that are held, ``[A]``.
        hold_s: for how long, ``[A]``; rounded to `HOLD_STEP_S`.
    """
    steps = np.round(hold_s / HOLD_STEP_S).astype(np.int64)
    kind, start, q_len, k_len, causal = _kinds(schedule.tiles)
    heads_of = schedule.heads[ops].astype(np.int64)
    shapes, shape = np.unique(heads_of[:, 1] << 32 | heads_of[:, 3], return_inverse=True)
    columns, looks = (kind[schedule.tile[ops]], shape, held, steps), np.zeros(len(ops), np.int64)
    for column in columns:  # one number for each look, which sorts faster than rows
        looks = looks * (column.max(initial=0) + 1) + column
    _, first, of_look = np.unique(looks, return_index=True, return_inverse=True)
    call, shape, held, steps = (column[first] for column in columns)
    heads, kv_heads = shapes[shape] >> 32, shapes[shape] & 0xFFFFFFFF
    num = np.diff(start)[call]
    begin = np.concatenate(([0], np.cumsum(num)))
    mine = np.repeat(start[call] - begin[:-1], num) + np.arange(begin[-1])
    given = begin, q_len[mine], k_len[mine], causal[mine], heads, kv_heads, head_dim, num > 1
    return calls(params, *given, held, np.asarray(steps * HOLD_STEP_S, np.float64))[0][of_look]


@lru_cache(maxsize=4)
def _kinds(tiles: Tiles) -> tuple[Ints, Ints, Ints, Ints, NDArray[np.bool_]]:
    """Tiles that look alike, as many do where documents are padded: the kind of each tile, and the sequences of each
    kind as offsets ``[K + 1]``, query and key lengths and whether they are causal."""
    given = sequences(tiles)
    looks = given.q_len << 32 | given.k_len << 1 | given.causal
    kinds: dict[bytes, int] = {}
    bounds = pairwise(given.start.tolist())
    of_tile = np.array([kinds.setdefault(looks[first:end].tobytes(), len(kinds)) for first, end in bounds])
    start = np.concatenate(([0], np.cumsum([len(kind) for kind in kinds]) // looks.itemsize))
    looks = np.frombuffer(b"".join(kinds), np.int64)
    return of_tile, start, looks >> 32, looks >> 1 & 0x7FFFFFFF, looks % 2 == 1


@lru_cache(maxsize=4)
def _seconds_of_tiles(
    params: AttentionParams, tiles: Tiles, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Floats, Floats]:
    """`clocked_seconds` of every tile; remembered, because different code runs the same tiles."""
    of_tile, start, q_len, k_len, causal = _kinds(tiles)
    heads, kv_heads = (np.full(len(start) - 1, number) for number in (num_heads, num_kv_heads))
    found = clocked_seconds(params, start, q_len, k_len, causal, heads, kv_heads, head_dim)
    return found[0][of_tile], found[1][of_tile]


def _listed_seconds(
    params: AttentionParams, schedule: Schedule, ops: Ints, masks: Mapping[int, Visits], head_dim: int
) -> Floats:
    """Seconds of a kernel that lists blocks; calls that are alike are priced once."""
    which = np.column_stack([schedule.tile[ops], schedule.heads[ops][:, [1, 3]]]).astype(np.int64)
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
        if (kernel, pass_) not in ANATOMY or kernel in ("math", "sdpa_math") or not len(ops):
            continue
        found, tile = sequences(schedule.tiles), schedule.tile[ops]
        heads, kv_heads = schedule.heads[ops, 1], schedule.heads[ops, 3]
        nbytes = working_bytes(kernel, pass_, found.queries()[tile], found.keys()[tile], heads, kv_heads, head_dim)
        np.maximum.at(most, schedule.lane_rank[schedule.lane_start[ops]], nbytes)
    return most
