"""Stages: which computations of a rank run while which inputs of later ones arrive.

Both rules start with what needs no communication. A stage may then move no more than a share of all bytes, and the rank
that has least work in it chooses next, until nothing more fits; the last stage takes what is left. The paper limits
every pair of ranks, and a rank for which nothing fits is done while others go on. DCP's code limits what every rank
sends to other nodes, takes a rank's computations in order of work, and ends the stage with the first rank for which
nothing fits, so that most work ends up in the last one.

Reference: DCP (arXiv 2510.10620), listing 3; chenyu-jiang/dcp at 942a2c7, core/pipeline.py. Differs from that code: a
block comes from its home or from a rank of the own node, never from a third one; nothing is prefetched beyond what the
stage computes on.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.schedule.schedule import Pass
from cpsim.strategies.dcp.blocks import Blocks, Placement, judge
from cpsim.strategies.dcp.placing import Settings
from cpsim.strategies.dcp.timing import Rates, stage_by_time

SLACK: Final = 1.2
"""Bytes that a rank may send to other nodes in a stage over the mean, in DCP's code."""


def stage_blocks(
    blocks: Blocks, placement: Placement, shape: tuple[int, int], rates: Rates, settings: Settings, pass_: Pass
) -> Ints:
    """Stage of every computation block, from 0, ``[C]``.

    Args:
        blocks, placement: what runs where.
        shape: (nodes, GPUs of each).
        rates: of the machine; only variant ``cpsim`` looks at them.
        settings: variant, and stages: all of them (``paper``), or those after the first (``released``).
        pass_: forward and backward move different bytes.
    """
    if settings.variant == "cpsim":
        stage, _ = stage_by_time(blocks, placement, shape, rates, settings.stages, pass_)
        return np.unique(stage, return_inverse=True)[1].astype(np.int64)
    quality = judge(blocks, placement, shape[0] * shape[1], shape[1], pass_)
    released = settings.variant == "released"
    num_stages = settings.stages + released
    if released:
        share = SLACK * quality.between_nodes.sum() / len(quality.moved) / settings.stages
        limit = np.full((len(quality.moved), 1), share)
    else:
        limit = quality.moved / settings.stages
    order = np.lexsort((-blocks.area, placement.worker))
    first = np.searchsorted(placement.worker[order], np.arange(len(quality.moved) + 1))
    inputs = [blocks.query_bytes(pass_)[0], blocks.key_bytes(pass_)[0]]
    stages: Ints = _stage(
        order,
        first,
        np.ascontiguousarray(blocks.sides.T),
        np.repeat(placement.home, blocks.num_groups),
        np.repeat(blocks.tokens, blocks.num_groups)[:, None] * np.array(inputs),
        blocks.area,
        limit,
        shape[0],
        num_stages,
    )
    return np.unique(stages, return_inverse=True)[1].astype(np.int64)  # without stages that nothing runs in


@compiled()
def _fits(unit, rank, home, nbytes, held, near, sent, limit):  # type: ignore[no-untyped-def]
    """Whether the inputs of a computation stay within the limits; if so, they are on their way."""
    per_node = -(-held.shape[2] // near.shape[2])
    by_pair, fits = limit.shape[1] > 1, True
    for sign in (1, -1):  # what does not fit is taken back
        for side in range(2):
            u = unit[side]
            source, to = home[u], rank if by_pair else 0
            if held[side, u, rank] or (not by_pair and near[side, u, rank // per_node]):
                continue
            sent[source, to] += sign * nbytes[u, side]
            fits &= sent[source, to] <= limit[source, to]
        if fits:
            for side in range(2):
                held[side, unit[side], rank] = near[side, unit[side], rank // per_node] = True
            break
    return fits


@compiled()
def _stage(order, first, units, home, nbytes, area, limit, num_nodes, num_stages):  # type: ignore[no-untyped-def]
    """Stage of every computation; ``order[first[r]:first[r + 1]]`` are those of rank r."""
    num_ranks = len(first) - 1
    per_node = -(-num_ranks // num_nodes)
    held = np.zeros((2, len(home), num_ranks), np.bool_)
    near = np.zeros((2, len(home), num_nodes), np.bool_)
    for u in range(len(home)):
        held[:, u, home[u]] = near[:, u, home[u] // per_node] = True
    stage, left = np.full(len(units), num_stages - 1), np.ones(len(units), np.bool_)
    for rank in range(num_ranks):
        for i in order[first[rank] : first[rank + 1]]:
            if held[0, units[i, 0], rank] and held[1, units[i, 1], rank]:
                stage[i], left[i] = 0, False
    for s in range(1, num_stages - 1):
        _fill(s, order, first, units, home, nbytes, area, limit, held, near, stage, left)
    return stage


@compiled()
def _fill(s, order, first, units, home, nbytes, area, limit, held, near, stage, left):  # type: ignore[no-untyped-def]
    """Put computations that are left into stage s."""
    num_ranks = len(first) - 1
    sent, work = np.zeros(limit.shape), np.zeros(num_ranks)
    done, at, found = np.zeros(num_ranks, np.bool_), first[:-1].copy(), np.zeros(num_ranks, np.bool_)
    while not done.all():
        rank = np.argmin(np.where(done, np.inf, work))
        waits = False
        while at[rank] < first[rank + 1]:
            i = order[at[rank]]
            at[rank] += 1
            if left[i] and _fits(units[i], rank, home, nbytes, held, near, sent, limit):
                stage[i], left[i], found[rank] = s, False, True
                work[rank] += area[i]
                break
            waits |= left[i]
        else:
            if found[rank]:  # what has come since may be what others lacked
                at[rank], found[rank] = first[rank], False
                continue
            if waits and limit.shape[1] == 1:
                return
            done[rank] = True
