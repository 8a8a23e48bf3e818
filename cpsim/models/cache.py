"""What memory-bound kernels find in the GPU's L2 cache, because an op before them has just touched it.

A byte is still there if few others have been touched since: measured (`cpsim.real.measure.cached`, H200), all are where
less than half of the cache has been, none where as much as the whole cache has, and in between a share that falls
linearly. Kernels that find all of it take about half as long, but for their latency.

Attention calls are left as measured, on operands that are not in the cache: they take much longer than reading them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.runtime.compiled import compiled, unsigned
from cpsim.schedule.schedule import UPDATE, Schedule

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
    return _by_op(schedule, _access_bytes(schedule))


def shares_cached(schedule: Schedule, cache_bytes: float) -> Floats:
    """Share, ``[N]``, of what every op reads and writes that the cache holds when the op starts.

    Ops of a rank touch their blocks in list order; at first nothing is held. What is updated is read and written.
    """
    (buffer,), nbytes = unsigned(schedule.access_buffer), _access_bytes(schedule)
    reused = _reused(schedule.access_start, buffer, nbytes, schedule.buffer_rank, schedule.num_ranks)
    moved = nbytes * np.where(schedule.access_mode == UPDATE, 2, 1)
    held = _by_op(schedule, moved * share_cached(reused, cache_bytes))
    return np.asarray(held / np.maximum(_by_op(schedule, moved), 1.0))


def _by_op(schedule: Schedule, of_access: Floats) -> Floats:
    """Sums over the accesses of every op, ``[N]``."""
    return np.asarray(np.bincount(schedule.op_of_access(), of_access, len(schedule)))


@compiled()
def _reused(access_start, buffer, nbytes, buffer_rank, num_ranks):  # type: ignore[no-untyped-def]
    """Bytes that a rank touches from the last op on a buffer to the end of every access; infinite for the first."""
    reused = np.empty(len(buffer))
    touched = np.zeros(num_ranks)
    last = np.full(len(buffer_rank), -np.inf)
    for op in range(len(access_start) - 1):
        accesses = range(access_start[op], access_start[op + 1])
        for i in accesses:
            rank = buffer_rank[buffer[i]]
            touched[rank] += nbytes[i]
            reused[i] = touched[rank] - last[buffer[i]]
        for i in accesses:  # only now: an op may touch several blocks of one buffer
            last[buffer[i]] = touched[buffer_rank[buffer[i]]]
    return reused
