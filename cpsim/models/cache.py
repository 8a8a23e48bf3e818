"""What memory-bound kernels find in the GPU's L2 cache, because an op before them has just touched it.

A byte is still there if few others have been touched since: measured (`real.measure_cached`, H200), all are where less
than half of the cache has been, none where as much as the whole cache has, and in between a share that falls linearly.
Kernels that find all of it take about half as long, but for their latency.

Attention calls are left as measured, on operands that are not in the cache: they take much longer than reading them.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from cpsim.compiled import unsigned
from cpsim.schedule import UPDATE, Schedule

Floats = NDArray[np.float64]

PLANES = {"kv": 2, "dkv": 2}
"""Vectors of a token and head that a tensor of the schedule holds; others have one."""


def share_cached(reused: ArrayLike, cache_bytes: float) -> Floats:
    """Share of some bytes that the cache holds when `reused` bytes are touched from one use of a byte to its next."""
    reused = np.asarray(reused, np.float64)
    return np.asarray(np.clip(2 * (1 - reused / cache_bytes), 0, 1) if cache_bytes else np.zeros_like(reused))


def _access_bytes(schedule: Schedule) -> Floats:
    """Bytes of memory that every access of every op touches, in their order; the largest block fills its buffer."""
    tokens, heads = schedule.sets.num_tokens()[schedule.block_set], schedule.block_heads[:, 1]
    planes = np.array([PLANES.get(tensor, 1) for tensor in schedule.block_tensors])[schedule.block_tensor]
    vectors = (tokens * heads * planes).astype(np.float64)[schedule.access_block]
    largest = np.zeros(len(schedule.buffer_nbytes))
    np.maximum.at(largest, schedule.access_buffer, vectors)
    share = vectors / np.maximum(largest[schedule.access_buffer], 1.0)
    return np.asarray(schedule.buffer_nbytes[schedule.access_buffer] * share)


def touched_bytes(schedule: Schedule) -> Floats:
    """Bytes of memory that every op touches, ``[N]``."""
    owner = np.repeat(np.arange(len(schedule)), np.diff(schedule.access_start))
    return np.asarray(np.bincount(owner, _access_bytes(schedule), len(schedule)))


def shares_cached(schedule: Schedule, cache_bytes: float) -> Floats:
    """Share, ``[N]``, of what every op reads and writes that the cache holds when the op starts.

    Ops of a rank touch their blocks in list order; at first nothing is held.
    """
    (buffer,) = unsigned(schedule.access_buffer)
    return np.asarray(
        _shares(schedule.access_start, buffer, schedule.access_mode, _access_bytes(schedule), schedule.buffer_rank,
                schedule.num_ranks, cache_bytes)
    )  # fmt: skip


@njit(cache=True)
def _shares(access_start, buffer, mode, nbytes, buffer_rank, num_ranks, cache_bytes):  # type: ignore[no-untyped-def]
    """`shares_cached`; what is updated counts twice in an op, read and written, and once among what is touched."""
    num_ops = len(access_start) - 1
    shares = np.zeros(num_ops)
    touched = np.zeros(num_ranks)
    last = np.full(len(buffer_rank), -np.inf)
    for op in range(num_ops):
        cached = moved = 0.0
        accesses = range(access_start[op], access_start[op + 1])
        for i in accesses:
            rank = buffer_rank[buffer[i]]
            weight = 2 * nbytes[i] if mode[i] == UPDATE else nbytes[i]
            reused = touched[rank] - last[buffer[i]] + nbytes[i]
            cached += weight * min(max(2 * (1 - reused / cache_bytes), 0.0), 1.0)
            moved += weight
            touched[rank] += nbytes[i]
        for i in accesses:  # only now: an op may touch several blocks of one buffer
            last[buffer[i]] = touched[buffer_rank[buffer[i]]]
        if moved > 0:
            shares[op] = cached / moved
    return shares
