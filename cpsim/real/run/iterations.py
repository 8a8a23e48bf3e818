"""Times the iterations of a runner on all ranks together; every number is agreed, so that ranks decide alike.

Protocols, as scenarios name them:

    synced     all GPUs are idle and all hosts start at one moment, so the launches of the hosts count
    streamed   iterations run back to back, and nobody waits for anybody but through the work itself: the steady state

and one more, which no scenario has:

    held       as synced, then every GPU is kept waiting for a while and meets the others on the device, so that hosts
               launch ahead

Inputs are not in the L2 cache when a synced iteration starts, as for kernels that are measured alone. Its time is that
from a CUDA event on the current stream right before the launch until one right after it (on a CPU: wall clock), of the
slowest rank. Of streamed iterations it is that from one event to the next; the first ones, in which hosts get ahead, do
not count.

Warm-up: as in a training job the clock has come down to what the power limit allows, which takes tens of
milliseconds of load. So at least `WARMUP` iterations and `SOAK_S` of them, then as many again until the median of the
last ones is within `STABLE` of that of the ones before, or until they have taken `WARMUP_S`; the first iteration of
all, which compiles, does not count.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, Final, Protocol, TypeVar

import torch

from cpsim.models.host import HELD_S
from cpsim.prediction.runs import PassRun
from cpsim.real.run.node import Node
from cpsim.real.run.runner import KnowsAttention, Runner
from cpsim.real.run.timing import Clock, hold

LEADING: Final = 5
"""Streamed iterations in which hosts get ahead."""
WARMUP: Final = 5
SOAK_S: Final = 0.25
STEADY_S: Final = 1.5
"""The same of streamed iterations: the limiter of power looks at a second or so, and first reacts too strongly."""
SWING_S: Final = 1.0
"""Streamed iterations last at least so long, too, as the limiter goes on swinging (`studies.probes.swings`)."""
WARMUP_S: Final = 0.8
STABLE: Final = 0.03
MAX_SOAK: Final = 300
"""Iterations after which short passes, which do not heat a GPU, are warm."""
MIN_ITERATIONS, MAX_ITERATIONS = 5, 50

T = TypeVar("T")


class Together(Protocol):
    """Does a step on every rank and returns all ranks' results, by rank; where one fails, all raise."""

    def __call__(self, step: Callable[[], T]) -> list[T]: ...


def time_pass(
    runner: Runner, node: Node, together: Together, protocol: str, seconds: float, lead_s: float = HELD_S
) -> PassRun:
    """Warms a runner up and measures it.

    Args:
        runner: ready to be launched.
        node: this rank.
        together: exchanges results and failures of the ranks.
        protocol: `synced`, `streamed` or `held`.
        seconds: measured iterations to aim for, at least 5 and at most 50 of them.
        lead_s: how long GPUs are held [s].
    """

    def batch(num: int) -> list[tuple[float, ...]]:
        """Seconds of `num` iterations: one tuple of all ranks' times for each."""
        if protocol == "streamed":
            ranks = together(lambda: stream(runner, node, num))
        else:
            ranks = together(lambda: [iteration(runner, node, protocol, lead_s) for _ in range(num)])
        return list(zip(*ranks, strict=True))

    if node.cuda:  # at first ops are launched one by one; what a captured program allocates is not counted again
        torch.cuda.reset_peak_memory_stats(node.device)
    gc.collect()  # now: in a gap before the measured iterations the clock would recover
    warmup = [max(times) for times in batch(WARMUP)]
    soak = (STEADY_S if protocol == "streamed" else SOAK_S) if node.cuda else 0.0
    while not _is_warm(warmup, soak):
        left = (soak - sum(warmup[1:])) / median(warmup[1:])
        warmup += [max(times) for times in batch(min(MAX_SOAK, max(WARMUP, round(left))))]
    first = _peaks(node)[0]
    if node.cuda:  # from now on memory is the steady state's: an optimizer has its states
        torch.cuda.reset_peak_memory_stats(node.device)
    each = median(warmup[-WARMUP:])
    num = min(MAX_ITERATIONS, max(MIN_ITERATIONS, round(seconds / each)))
    if node.cuda and protocol == "streamed":
        num = max(num, math.ceil(SWING_S / each))
    gc.disable()  # a collection amid the launches would count as theirs
    try:
        samples = batch(num)
    finally:
        gc.enable()
    ends = together(lambda: (_peaks(node), Clock(node.local).read() if node.cuda else {}, first))
    peaks = zip(*(peak for peak, _, _ in ends), strict=True)
    attention = together(runner.attention_s) if isinstance(runner, KnowsAttention) else []
    return PassRun(
        samples_s=tuple(map(max, samples)),
        rank_time_s=tuple(median(times) for times in zip(*samples, strict=True)),
        warmup_s=tuple(warmup),
        peak_memory_bytes=max(max(first, peak[0]) for peak, _, first in ends),
        memory_bytes=dict(zip(("allocated", "reserved", "used"), peaks, strict=True)) if node.cuda else {},
        clock={name: [clock[name] for _, clock, _ in ends] for name in ends[0][1]},
        attention_s=tuple(attention),
    )


def keep_waiting(node: Node, lead_s: float = HELD_S) -> None:
    """Every GPU waits for so long, and for the others, while hosts launch what follows."""
    hold(lead_s, node.device)
    node.barrier()


def iteration(runner: Runner, node: Node, protocol: str, lead_s: float = HELD_S) -> float:
    """Seconds of one iteration on this rank."""
    runner.prepare()
    node.evict()
    node.meet()
    if not node.cuda:
        start = time.perf_counter()
        runner.launch()
        return time.perf_counter() - start
    if protocol == "held":
        keep_waiting(node, lead_s)
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    runner.launch()
    events[1].record()
    node.synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3


def stream(runner: Runner, node: Node, num: int) -> list[float]:
    """Seconds of iterations on this rank, one after the other without a pause."""
    runner.prepare()
    node.meet()
    marks: list[Any] = []
    for i in range(LEADING + num + 1):
        if node.cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
        if i < LEADING + num:
            runner.launch()
    node.synchronize()
    return [a.elapsed_time(b) / 1e3 if node.cuda else b - a for a, b in pairwise(marks)][LEADING:]


def _is_warm(seconds: list[float], soak: float) -> bool:
    if sum(seconds[1:]) < soak and len(seconds) < MAX_SOAK:
        return False
    if sum(seconds[1:]) > WARMUP_S:
        return True
    before, last = median(seconds[-2 * WARMUP : -WARMUP] or [float("inf")]), median(seconds[-WARMUP:])
    return abs(last / before - 1) < STABLE


def _peaks(node: Node) -> tuple[int, int, int]:
    """Most bytes allocated and reserved since the last reset, and bytes of the GPU in use as the driver sees them now,
    each without what measuring needs; 0 on a CPU."""
    if not node.cuda:
        return 0, 0, 0
    free, total = torch.cuda.mem_get_info(node.device)
    peaks = torch.cuda.max_memory_allocated(node.device), torch.cuda.max_memory_reserved(node.device), total - free
    allocated, reserved, used = (int(peak) - node.own_memory_bytes for peak in peaks)
    return allocated, reserved, used
