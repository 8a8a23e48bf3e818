"""SMs that communications hold when attention begins: its first blocks find fewer of them.

A kernel of NCCL's holds one SM for every channel until its messages have arrived. Attention of many waves loses in
proportion, which is the slowdown that the interference model has. Attention of few waves loses whole blocks: those that
find no SM wait until one is free, and end late by a block's time, or by nothing where the last wave had room for them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cpsim.masks import Ints
from cpsim.models.attention import AttentionParams
from cpsim.models.collective import channels
from cpsim.models.pressure import Messages
from cpsim.schedule import Schedule

Floats = NDArray[np.float64]
FEW_WAVES: Final = 8
"""Waves of blocks up to which whole blocks matter: one more is a ninth of the time."""


def few_waves(params: AttentionParams, queries: Ints, keys: Ints, heads: Ints) -> NDArray[np.bool_]:
    """Which calls of a kernel and pass have few waves of blocks, by their tokens and query heads."""
    anatomy = params.anatomy
    rows = keys / anatomy.tile_k if anatomy.backward else queries / max(anatomy.tile_q_full, 1)
    return np.asarray(rows * heads <= FEW_WAVES * params.num_sms * anatomy.blocks_per_sm)


def held_sms(
    schedule: Schedule, messages: Messages, near: NDArray[np.bool_], ops: Ints, start_s: Floats, end_s: Floats
) -> tuple[Ints, Floats, Ints]:
    """What holds SMs of a GPU when kernels on it begin.

    Args:
        schedule: of all ops.
        messages: its transfers.
        near: which of them stay inside nodes, ``[T]``; others are paced by the network and on few channels.
        ops: kernels of one rank each, ``[A]``.
        start_s, end_s: of all ops, ``[N]``.

    Returns:
        SMs held at each kernel's start, ``[A]``; for how long from then on; and one of the transfers, or -1.
    """
    op = messages.op[near]
    number = channels(messages.nbytes[near], messages.num_ranks[near], messages.num_nodes[near])
    first = schedule.lane_start[op]
    which = np.tile(np.arange(len(op)), 2)
    lane = schedule.lane_rank[np.concatenate([first, first + 1])] * 128 + schedule.lane_stream[first][which]
    order = np.lexsort((start_s[op][which], lane))
    lane, which = lane[order], which[order]
    begin = np.flatnonzero(np.diff(lane, prepend=-1))
    kernel_rank = schedule.lane_rank[schedule.lane_start[ops]]
    lanes_of = np.searchsorted(lane[begin] // 128, np.arange(schedule.num_ranks + 1))
    held, until, by = _held(
        np.append(begin, len(lane)), lanes_of, start_s[op][which], end_s[op][which], number[which], kernel_rank,
        start_s[ops],
    )  # fmt: skip
    return held, until - start_s[ops], np.append(op[which], -1)[by]


@njit(cache=True)
def _held(begin, lanes_of, start, end, number, kernel_rank, kernel_start):  # type: ignore[no-untyped-def]
    """Messages are sorted by rank, stream and start; `begin` is where those of each stream begin, `lanes_of` which of
    these are each rank's.

    A send and a receive are halves of one launch, which holds the same SMs; launches on other streams hold others.
    One that starts at the same instant as the kernel was launched before it.
    """
    held, until, by = np.zeros(len(kernel_rank), np.int64), kernel_start.copy(), np.full(len(kernel_rank), -1)
    for i in range(len(kernel_rank)):
        for lane in range(lanes_of[kernel_rank[i]], lanes_of[kernel_rank[i] + 1]):
            last = begin[lane] + np.searchsorted(start[begin[lane] : begin[lane + 1]], kernel_start[i], side="right")
            most = 0
            for at in range(max(begin[lane], last - 2), last):
                if end[at] > kernel_start[i]:
                    most = max(most, number[at])
                    if end[at] > until[i]:
                        until[i], by[i] = end[at], at
            held[i] += most
    return held, until, by
