"""Pipelines of stages over microbatches, simulated event by event for many replicas at once.

* ``1f1b``: stage s runs P - 1 - s forward passes ahead, then one forward and one backward in turn, then the rest. A
  stage starts a pass when its previous one has ended and its input has come; replicas know nothing of each other.
* ``same_phase``: all stages of all replicas run the same phase in a tick and wait for each other after it: M + P - 1
  ticks forward, P - 1 of them before the first backward one, and as many backward.

Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
section 2.2 (1F1B); DistCA (arXiv 2510.18121), section 4.4 and figure 8 (same phase).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pass = tuple[int, int, int]
"""0 or 1 for forward or backward, microbatch, stage."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What came out."""

    end_s: Floats
    """End of the last pass of every stage of every replica, ``[R, P]``."""
    path: tuple[tuple[int, Pass], ...]
    """(replica, pass) of the passes that the last end consists of, first to last; of ticks the longest pass of each."""
    hops: int
    """Times that the path waited for a transfer between stages."""

    @property
    def makespan_s(self) -> float:
        """End of the last pass of all [s]."""
        return float(self.end_s.max())


def one_f_one_b_order(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """Passes of a stage in the order in which it runs them."""
    ahead = min(num_stages - 1 - stage, num_microbatches)
    forward = [(0, m, stage) for m in range(num_microbatches)]
    backward = [(1, m, stage) for m in range(num_microbatches)]
    turns = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    return [*forward[:ahead], *turns, *backward[num_microbatches - ahead :]]


def one_f_one_b(seconds: Floats, hop_s: float) -> Pipeline:
    """Simulates 1F1B.

    Args:
        seconds: of every pass ``[2, R, M, P]``: forward or backward, replica, microbatch, stage.
        hop_s: a transfer of activations or their gradients to the next stage; a stage computes meanwhile.
    """
    _, _, microbatches, stages = seconds.shape
    end = np.zeros_like(seconds)
    orders = [one_f_one_b_order(stage, stages, microbatches) for stage in range(stages)]
    for which, m, stage, before, given in _in_time(orders, stages):
        start = end[before[0], :, before[1], before[2]] if before else np.zeros(seconds.shape[1])
        if given:
            start = np.maximum(start, end[given[0], :, given[1], given[2]] + hop_s * (given[2] != stage))
        end[which, :, m, stage] = start + seconds[which, :, m, stage]
    path, hops = _critical_path(end, orders, stages, hop_s)
    return Pipeline(end[1, :, -1, :], path, hops)


def _given(one: Pass, stages: int) -> Pass | None:
    """The pass whose output a pass needs."""
    which, m, stage = one
    if which == 0:
        return (0, m, stage - 1) if stage else None
    return (1, m, stage + 1) if stage < stages - 1 else (0, m, stage)


def _in_time(orders: list[list[Pass]], stages: int) -> Iterator[tuple[int, int, int, Pass | None, Pass | None]]:
    """All passes such that those they wait for come earlier: with the one before on the stage and the one given."""
    at, done = [0] * stages, set()
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(orders[s]):
                one = orders[s][at[s]]
                given = _given(one, stages)
                if given is not None and given not in done:
                    break
                yield (*one, orders[s][at[s] - 1] if at[s] else None, given)
                done.add(one)
                at[s] += 1


def _critical_path(
    end: Floats, orders: list[list[Pass]], stages: int, hop_s: float
) -> tuple[tuple[tuple[int, Pass], ...], int]:
    """Back from the last end, always to what a pass waited for."""
    replica, stage = (int(i) for i in np.unravel_index(np.argmax(end[1, :, -1, :]), end[1, :, -1, :].shape))
    before = {one: previous for order in orders for previous, one in zip([None, *order], order, strict=False)}
    one: Pass | None = orders[stage][-1]
    path, hops = [], 0
    while one is not None:
        path.append((replica, one))
        previous, given = before[one], _given(one, stages)
        ready = [
            (end[other[0], replica, other[1], other[2]] + hop_s * (other[2] != one[2]), other)
            for other in (previous, given)
            if other is not None
        ]
        following = max(ready)[1] if ready else None
        hops += following is not None and following[2] != one[2]
        one = following
    return tuple(reversed(path)), hops


def same_phase(seconds: Floats, hop_s: float) -> Pipeline:
    """Simulates ticks in which all stages of all replicas run the same phase; arguments as of ``one_f_one_b``."""
    _, replicas, microbatches, stages = seconds.shape
    ticks = microbatches + stages - 1
    path: list[tuple[int, Pass]] = []
    for tick in range(ticks + stages - 1):
        for which, first in ((0, 0), (1, stages - 1)):
            if 0 <= tick - first < ticks:
                path.append(_longest(seconds, which, tick - first))
    total = sum(float(seconds[one[0], replica, one[1], one[2]]) for replica, one in path)
    hops = 2 * ticks - 1 if stages > 1 else 0
    return Pipeline(np.full((replicas, stages), total + hops * hop_s), tuple(path), hops)


def _longest(seconds: Floats, which: int, tick: int) -> tuple[int, Pass]:
    """The longest pass of a tick, over replicas and stages."""
    _, _, microbatches, stages = seconds.shape
    found = []
    for stage in range(stages):
        m = tick - (stage if which == 0 else stages - 1 - stage)
        if 0 <= m < microbatches:
            replica = int(np.argmax(seconds[which, :, m, stage]))
            found.append((float(seconds[which, replica, m, stage]), replica, (which, m, stage)))
    _, replica, one = max(found)
    return replica, one
