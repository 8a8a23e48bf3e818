"""Pipelines of stages over microbatches, simulated event by event for many replicas at once.

* ``1f1b``: stage s runs P - 1 - s forward passes ahead, then one forward and one backward in turn, then the rest. A
  stage starts a pass when its previous one has ended and its input has come; replicas know nothing of each other.
* Interleaved ``1f1b``: a stage holds V chunks of layers, and chunk c of stage s is virtual stage c * P + s of P * V.
  Microbatches run in groups of P, each group through one chunk after the other, backward in the opposite order of
  chunks. Stage s runs 2 (P - 1 - s) + (V - 1) P passes ahead, then one forward and one backward in turn, then the rest.
  Where all passes take alike, the bubble is (P - 1) / (V M) of the time that passes take.
* ``same_phase``: all stages of all replicas run the same phase in a tick and wait for each other after it: M + P - 1
  ticks forward, P - 1 of them before the first backward one, and as many backward.

Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
section 2.2 (1F1B and its interleaved form); Megatron-Core, pipeline_parallel/schedules.py (numbers of passes ahead,
order of chunks); DistCA (arXiv 2510.18121), section 4.4 and figure 8 (same phase).
Differs: transfers between stages run beside passes throughout; in the warm-up and the last backward passes of the
interleaved form Megatron-Core waits for them unless overlap_p2p_comm_warmup_flush is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsim.runtime.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pass = tuple[int, int, int]
"""0 or 1 for forward or backward, microbatch, stage; where stages hold several chunks of layers, virtual stage."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What came out."""

    end_s: Floats
    """End of the last pass of every stage of every replica, ``[R, P]``."""
    path: tuple[tuple[int, Pass], ...]
    """(replica, pass) of the passes that the last end consists of, first to last; of ticks the longest pass of each."""
    hops: int
    """Times that the path waited for a transfer between stages."""
    done_s: Floats
    """End of every pass, ``[2, R, M, P * chunks]``."""

    @property
    def makespan_s(self) -> float:
        """End of the last pass of all [s]."""
        return float(self.end_s.max())


def one_f_one_b_order(stage: int, num_stages: int, num_microbatches: int, chunks: int = 1) -> list[Pass]:
    """Passes of a stage in the order in which it runs them.

    Args:
        stage: 0 is the first.
        num_stages: of the pipeline.
        num_microbatches: a multiple of ``num_stages`` where there are several chunks.
        chunks: of layers on the stage.
    """
    ahead, runs = num_stages - 1 - stage, [(m, 0) for m in range(num_microbatches)]
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * num_stages
        groups = range(0, num_microbatches, num_stages)
        runs = [(first + m, chunk) for first in groups for chunk in range(chunks) for m in range(num_stages)]
    ahead = min(ahead, len(runs))
    forward = [(0, m, chunk * num_stages + stage) for m, chunk in runs]
    backward = [(1, m, (chunks - 1 - chunk) * num_stages + stage) for m, chunk in runs]
    turns = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    return [*forward[:ahead], *turns, *backward[len(runs) - ahead :]]


def same_phase_order(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """Passes of a stage in the order in which ``same_phase`` runs them: a microbatch waits for the last stage, and its
    gradient for all stages in between, so that stage s holds up to 2 (P - 1 - s) + 1 of them."""
    ticks = [
        (which, tick - back)
        for tick in range(num_microbatches + 2 * num_stages)
        for which, back in ((0, stage), (1, 2 * (num_stages - 1) - stage))
    ]
    return [(which, m, stage) for which, m in ticks if 0 <= m < num_microbatches]


def one_f_one_b(seconds: Floats, hop_s: float, chunks: int = 1) -> Pipeline:
    """Simulates 1F1B.

    Args:
        seconds: of every pass ``[2, R, M, P * chunks]``: forward or backward, replica, microbatch, virtual stage.
        hop_s: a transfer of activations or their gradients to the next stage; a stage computes meanwhile.
        chunks: of layers on every stage; more than one is the interleaved form.
    """
    _, _, microbatches, virtual = seconds.shape
    end, stages = np.zeros_like(seconds), virtual // chunks
    orders = _orders(stages, microbatches, chunks)
    _fill(end, seconds, _table(stages, microbatches, chunks), hop_s)
    last = end[1, :, -1, :stages]  # of the first chunk of every stage
    return Pipeline(last, *_critical_path(end, last, orders, hop_s), end)


@lru_cache(512)
def _orders(stages: int, microbatches: int, chunks: int) -> list[list[Pass]]:
    """Passes of every stage, in order."""
    return [one_f_one_b_order(stage, stages, microbatches, chunks) for stage in range(stages)]


@lru_cache(512)
def _table(stages: int, microbatches: int, chunks: int) -> Ints:
    """All passes as they follow each other, ``[N, 9]``: the pass, the one before it on its stage, and the one whose
    output it needs, each by direction, microbatch and virtual stage; -1 where there is none."""
    none = (-1, -1, -1)
    found = [
        (which, m, stage, *(before or none), *(given or none))
        for which, m, stage, before, given in _in_time(_orders(stages, microbatches, chunks), stages * chunks)
    ]
    return np.array(found, np.int64).reshape(-1, 9)


@compiled()
def _fill(end, seconds, table, hop_s):  # type: ignore[no-untyped-def]
    """Ends of passes, of all replicas."""
    for i in range(len(table)):
        which, m, stage = table[i, 0], table[i, 1], table[i, 2]
        for r in range(seconds.shape[1]):
            start = 0.0
            if table[i, 3] >= 0:
                start = end[table[i, 3], r, table[i, 4], table[i, 5]]
            if table[i, 6] >= 0:
                ready = end[table[i, 6], r, table[i, 7], table[i, 8]]
                if table[i, 8] != stage:
                    ready += hop_s
                start = max(start, ready)
            end[which, r, m, stage] = start + seconds[which, r, m, stage]


def most_in_flight(order: list[Pass], sizes: Mapping[int, int]) -> dict[int, int]:
    """What passes of other microbatches or chunks hold at most while a virtual stage runs.

    Args:
        order: passes of one stage.
        sizes: what a microbatch holds of a virtual stage between its two passes.

    Returns:
        for every virtual stage in the order, the largest sum of sizes beside its own.
    """
    held, most = 0, dict[int, int]()
    for which, _, stage in order:
        held += sizes[stage] * (which == 0)
        most[stage] = max(most.get(stage, 0), held - sizes[stage])
        held -= sizes[stage] * (which == 1)
    return most


def _given(one: Pass, virtual: int) -> Pass | None:
    """The pass whose output a pass needs."""
    which, m, stage = one
    if which == 0:
        return (0, m, stage - 1) if stage else None
    return (1, m, stage + 1) if stage < virtual - 1 else (0, m, stage)


def _in_time(orders: list[list[Pass]], virtual: int) -> Iterator[tuple[int, int, int, Pass | None, Pass | None]]:
    """All passes such that those they wait for come earlier: with the one before on the stage and the one given."""
    stages = len(orders)
    at, done = [0] * stages, set()
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(orders[s]):
                one = orders[s][at[s]]
                given = _given(one, virtual)
                if given is not None and given not in done:
                    break
                yield (*one, orders[s][at[s] - 1] if at[s] else None, given)
                done.add(one)
                at[s] += 1


def _critical_path(
    end: Floats, last: Floats, orders: list[list[Pass]], hop_s: float
) -> tuple[tuple[tuple[int, Pass], ...], int]:
    """Back from the last end, always to what a pass waited for."""
    replica, stage = (int(i) for i in np.unravel_index(np.argmax(last), last.shape))
    before = {one: previous for order in orders for previous, one in zip([None, *order], order, strict=False)}
    one: Pass | None = orders[stage][-1]
    path, hops = [], 0
    while one is not None:
        path.append((replica, one))
        ready = []
        for other, sent in ((before[one], False), (_given(one, end.shape[-1]), True)):
            if other is not None:
                hop = sent and other[2] != one[2]
                ready.append((end[other[0], replica, other[1], other[2]] + hop_s * hop, other, hop))
        _, one, hop = max(ready) if ready else (0.0, None, False)
        hops += hop
    return tuple(reversed(path)), hops


def same_phase(seconds: Floats, hop_s: float) -> Pipeline:
    """Simulates ticks in which all stages of all replicas run the same phase; arguments as of ``one_f_one_b``."""
    _, replicas, microbatches, stages = seconds.shape
    ticks = microbatches + stages - 1
    path: list[tuple[int, Pass]] = []
    done, total = np.zeros_like(seconds), 0.0
    hops = 2 * ticks - 1 if stages > 1 else 0
    for tick in range(ticks + stages - 1):
        for which, first in ((0, 0), (1, stages - 1)):
            if 0 <= tick - first < ticks:
                for m, stage in _in_tick(which, tick - first, microbatches, stages):
                    done[which, :, m, stage] = total + min(len(path), hops) * hop_s + seconds[which, :, m, stage]
                replica, one = _longest(seconds, which, tick - first)
                path.append((replica, one))
                total += float(seconds[one[0], replica, one[1], one[2]])
    return Pipeline(np.full((replicas, stages), total + hops * hop_s), tuple(path), hops, done)


def _in_tick(which: int, tick: int, microbatches: int, stages: int) -> list[tuple[int, int]]:
    """Microbatches and stages that run a phase in a tick."""
    found = [(tick - (stage if which == 0 else stages - 1 - stage), stage) for stage in range(stages)]
    return [(m, stage) for m, stage in found if 0 <= m < microbatches]


def _longest(seconds: Floats, which: int, tick: int) -> tuple[int, Pass]:
    """The longest pass of a tick, over replicas and stages."""
    _, _, microbatches, stages = seconds.shape
    found = []
    for m, stage in _in_tick(which, tick, microbatches, stages):
        replica = int(np.argmax(seconds[which, :, m, stage]))
        found.append((float(seconds[which, replica, m, stage]), replica, (which, m, stage)))
    _, replica, one = max(found)
    return replica, one
