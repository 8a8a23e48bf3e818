"""SMs that communications hold when attention begins: its first blocks find fewer of them.

A kernel of NCCL's holds one SM for every channel until its messages have arrived. Attention of many waves loses in
proportion, which is the slowdown that the interference model has. Attention of few waves loses whole blocks: those that
find no SM wait until one is free, and end late by a block's time, or by nothing where the last wave had room for them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import Ints, Whole
from cpsim.models.attention.params import AttentionParams
from cpsim.models.network.pressure import Messages
from cpsim.runtime.compiled import compiled
from cpsim.schedule.schedule import STREAMS, Schedule

Floats = NDArray[np.float64]
FEW_WAVES: Final = 8
"""Waves of blocks up to which whole blocks matter: one more is a ninth of the time."""


def few_waves(params: AttentionParams, queries: Ints, keys: Ints, heads: Whole) -> NDArray[np.bool_]:
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
    op, alike = messages.op[near], messages.alike[near]
    begin, which = _by_lane(
        op, schedule.lane_start, schedule.lane_rank, schedule.lane_stream, start_s, schedule.num_ranks * len(STREAMS)
    )
    rank = schedule.lane_rank[schedule.lane_start[ops]]
    kernels = rank, start_s[ops]
    held, until, by = _held(begin, which, op, start_s, end_s, alike, messages.channels_of_kind, *kernels)
    return held, until - start_s[ops], by


@compiled()
def _by_lane(op, lane_start, lane_rank, lane_stream, start_s, num_lanes):  # type: ignore[no-untyped-def]
    """Messages of every lane (rank, stream of its sends) by their start: CSR offsets and messages, each one twice.

    What a rank sends on a lane starts in the order of the list, as what it receives does, so that these are merged.
    """
    begin = np.zeros((2, num_lanes + 1), np.int64)
    for i in range(len(op)):
        first = lane_start[op[i]]
        for end in range(2):
            begin[end, lane_rank[first + end] * len(STREAMS) + lane_stream[first] + 1] += 1
    for lane in range(num_lanes):
        for end in range(2):
            begin[end, lane + 1] += begin[end, lane]
    filled, found = begin.copy(), np.empty((2, len(op)), np.int32)
    for end in range(2):
        for i in range(len(op)):
            first = lane_start[op[i]]
            lane = lane_rank[first + end] * len(STREAMS) + lane_stream[first]
            found[end, filled[end, lane]] = i
            filled[end, lane] += 1
    which, at = np.empty(2 * len(op), np.int32), 0
    for lane in range(num_lanes):
        (sent, received), (last_sent, last_received) = begin[:, lane], begin[:, lane + 1]
        while sent < last_sent or received < last_received:
            end = 0 if received == last_received else 1
            if sent < last_sent and received < last_received:
                end = int(start_s[op[found[0, sent]]] > start_s[op[found[1, received]]])
            which[at], at = found[end, received if end else sent], at + 1
            sent, received = sent + 1 - end, received + end
    return begin[0] + begin[1], which


@compiled()
def _held(begin, which, op, start, end, alike, channels, kernel_rank, kernel_start):  # type: ignore[no-untyped-def]
    """Messages and their lanes are those of `_by_lane`.

    A send and a receive are halves of one launch, which holds the same SMs; launches on other streams hold others.
    One that starts at the same instant as the kernel was launched before it.
    """
    held, until, by = np.zeros(len(kernel_rank), np.int64), kernel_start.copy(), np.full(len(kernel_rank), -1)
    for i in range(len(kernel_rank)):
        for lane in range(kernel_rank[i] * len(STREAMS), (kernel_rank[i] + 1) * len(STREAMS)):
            first, last = begin[lane], begin[lane + 1]
            while first < last:  # the messages that started, of which the last two can be under way
                middle = (first + last) // 2
                if start[op[which[middle]]] <= kernel_start[i]:
                    first = middle + 1
                else:
                    last = middle
            most = 0
            for at in range(max(begin[lane], last - 2), last):
                message = which[at]
                if end[op[message]] > kernel_start[i]:
                    most = max(most, channels[alike[message]])
                    if end[op[message]] > until[i]:
                        until[i], by[i] = end[op[message]], op[message]
            held[i] += most
    return held, until, by
