"""Attention at the clock that every GPU settles at, and as slow as on the slowest GPU that others wait for; in a steady
state it is slower after seconds of load, and matrix products are, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import Ints
from cpsim.models.conditions import Conditions
from cpsim.models.power import settled_seconds
from cpsim.models.spread import expected_maximum
from cpsim.runtime.compiled import compiled, unsigned
from cpsim.schedule.schedule import (
    COLLECTIVE_KINDS,
    COMMUNICATION_KINDS,
    STREAMS,
    Int32,
    Kind,
    Pass,
    Schedule,
    is_one_of,
)
from cpsim.schedule.work import earliest, last_end

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_IS_ARRIVAL: Final = np.array([stream in ("recv", "grad_recv", "outer_recv") for stream in STREAMS])
"""Receive half of a batched send and receive: its kernel is counted on the send side."""
_POWER_OF: Final = {
    **dict.fromkeys(Kind, "memory-bound"),
    Kind.TRANSFER: "transfer",
    **dict.fromkeys(COLLECTIVE_KINDS, "collective"),
    **dict.fromkeys((Kind.ATTENTION, Kind.ATTENTION_BACKWARD, Kind.BARRIER), "none"),
    Kind.GEMM: "products",
    Kind.SELECT: "products",
}
"""What ops draw power as, beside the attention whose clock it sets."""
_LIMITED: Final = {"products": 1.0}
"""Large products draw what the power limit allows."""
SETTLED_AFTER: Final = 8
SETTLED: Final = 1e-3
SETTLED_S: Final = 1e-8
"""Rounds at most, and the change of an iteration's time, relative and in seconds, after which clocks are settled."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Seconds of every op at the clock of its GPU, and when each would run if nothing slowed another; ``[N]``."""

    duration_s: Floats
    start_s: Floats
    """At the full clock."""
    end_s: Floats


def settle(
    schedule: Schedule,
    pass_: Pass,
    endless_s: Floats,
    full_clock_s: Floats,
    release_s: Floats,
    before: tuple[Int32, Int32],
    paced: Bools,
    given: Conditions,
) -> Settled:
    """The clock that every GPU settles at, from what runs on it in an iteration and between two; where iterations run
    back to back, after seconds of it.

    Messages draw what their bytes do at the rate of a port, whatever paces them, and copies to and from the host what
    they do at the rate of memory. A GPU is idle as long as the slowed
    iteration leaves it; where others are what takes long, it may make up for its clock.

    Args:
        schedule: N ops of one pass.
        pass_: forward or backward.
        endless_s: seconds of every op; of attention those of an endless run, ``[N]``. They become those at the clock.
        full_clock_s: seconds of attention ops at the full clock, ``[A]``.
        release_s: when hosts have launched every op, ``[N]``.
        before: what every op waits for, see ``waits``.
        paced: ops that the network between nodes paces, ``[N]``.
        given: machine, kernel and code.
    """
    attends = attention_ops(schedule)
    if not len(attends):
        return Settled(endless_s, *earliest(*before, endless_s, release_s)[:2])
    drawn, endless = _drawn(schedule, endless_s, paced, given), endless_s[attends]
    duration, full = endless_s, full_clock_s
    duration[attends] = full
    start, end = earliest(*before, duration, release_s)[:2]
    ranks = ranks_of(schedule, attends)
    power = given.profile.attention_params(given.kernel, pass_).busy_power
    period = np.full(schedule.num_ranks, end.max())
    for _ in range(SETTLED_AFTER):
        duration[attends] = settled_seconds(full, endless, ranks, drawn, period + given.pause_s, power)
        slowed = np.bincount(ranks, duration[attends] - full, schedule.num_ranks)
        known, period = period, last_end(*before, duration, release_s) - slowed
        if (np.abs(known - period) <= SETTLED_S + SETTLED * np.abs(period)).all():
            break
    if np.isinf(given.ahead_s) and not given.reads:
        busy = (np.bincount(ranks, duration[attends], schedule.num_ranks) + drawn) / np.maximum(known, 1e-12)
        duty, products = np.minimum(busy, 1.0), np.flatnonzero(schedule.kind == Kind.GEMM)
        duration[attends] *= given.profile.sustained_factor(f"{given.kernel} {pass_}", duty)[ranks]
        duration[products] *= given.profile.sustained_factor("matrix products", duty)[ranks_of(schedule, products)]
    return Settled(duration, start, end)


def _drawn(schedule: Schedule, seconds: Floats, paced: Bools, given: Conditions) -> Floats:
    """Seconds times load of everything but attention on every rank, relative to what the power limit allows."""
    loads = _LIMITED | dict(given.profile.load)
    load = np.array([loads.get(_POWER_OF[kind], 0.0) for kind in Kind])
    drawn = np.zeros(schedule.num_ranks)
    by_bytes = paced | (schedule.kind == Kind.TRANSFER)
    rates = given.profile.collective.port_bytes_per_s, given.profile.elementwise.bandwidth_bytes_per_s["copy"]
    lane_start, lane_rank, stream = unsigned(schedule.lane_start, schedule.lane_rank, schedule.lane_stream)
    by = by_bytes, schedule.over_host_link(), rates
    _add_drawn(drawn, load, schedule.kind, seconds, schedule.nbytes, by, lane_start, lane_rank, stream)
    return drawn


def slowest_of_many(schedule: Schedule, pass_: Pass, seconds: Floats, given: Conditions) -> Floats:
    """Seconds with attention as slow as on the slowest of the GPUs that have most of it: all wait for it in the end.

    GPUs of one type differ, and so does every call from the next; over the calls of a pass that partly cancels.
    """
    attends = attention_ops(schedule)
    if not len(attends):
        return seconds
    ranks = schedule.lane_rank[schedule.lane_start[attends]]
    mine = seconds[attends]
    busy = np.asarray(np.bincount(ranks, mine, schedule.num_ranks), np.float64)
    differs = mine * given.profile.attention_params(given.kernel, pass_).spread(mine)
    of_calls = np.sqrt(np.bincount(ranks, differs**2, schedule.num_ranks))[busy.argmax()] / busy.max()
    spread = float(np.hypot(given.profile.between_gpus(given.kernel, pass_), of_calls))
    slower = seconds.copy()
    slower[attends] *= 1 + spread * expected_maximum(_busiest(busy, busy.max() * (1 - 2 * spread), given))
    return slower


def _busiest(busy: Floats, least: float, given: Conditions) -> int:
    """GPUs that are busy for so long at least, those that others stand for included.

    Of a ring that stands for a longer one the count lies between those of its GPUs, since one of them is many there.
    """
    if given.alike == given.cluster.copies:
        return round(int((busy >= least).sum()) * given.alike)
    return round(float(np.interp(least, np.sort(busy), np.arange(len(busy), 0, -1))) * given.alike)


def with_faults(schedule: Schedule, seconds: Floats, given: Conditions) -> Floats:
    """Seconds with kernels of faulty GPUs as slow as these are; messages follow the rates of links."""
    slow = [fault for fault in given.cluster.faults if fault.part == "gpu"]
    if not slow:
        return seconds
    rate = np.ones(schedule.num_ranks)
    for fault in slow:
        rate[fault.number] *= fault.rate
    kernels = ~is_one_of(schedule.kind, (*COMMUNICATION_KINDS, Kind.BARRIER))
    slower = seconds.copy()
    slower[kernels] /= rate[schedule.lane_rank[schedule.lane_start[:-1][kernels]]]
    return slower


def attention_ops(schedule: Schedule) -> Ints:
    """Indices of the attention ops."""
    return np.flatnonzero(is_one_of(schedule.kind, (Kind.ATTENTION, Kind.ATTENTION_BACKWARD)))


def ranks_of(schedule: Schedule, ops: Ints) -> Ints:
    """The rank of each op of one rank."""
    return schedule.lane_rank[schedule.lane_start[ops]].astype(np.int64)


@compiled()
def _add_drawn(drawn, load, kind, seconds, nbytes, by, lane_start, lane_rank, lane_stream):  # type: ignore[no-untyped-def]
    """Add what ops draw to what their ranks do: by their seconds, by their bytes at the rate of a port where these take
    less, or by their bytes at the rate of memory."""
    at_most, over_host_link, (port, memory) = by
    for op in range(len(kind)):
        drawing = seconds[op]
        if at_most[op]:
            drawing = min(drawing, nbytes[op] / port)
        if over_host_link[op]:
            drawing = nbytes[op] / memory
        for entry in range(lane_start[op], lane_start[op + 1]):
            if not _IS_ARRIVAL[lane_stream[entry]]:
                drawn[lane_rank[entry]] += load[kind[op]] * drawing
