"""How long a placement takes, roughly, and the stages that make it shortest; for variant ``cpsim``.

Inputs come one after another: those of a node over its network, those of a GPU from its node over NVLink, at the same
time. Sources take turns, and what most work waits for comes first. A stage ends at a moment: it computes on what has
come since the one before, while what comes until the next is on its way, in one exchange of all ranks.

Reference: DCP (arXiv 2510.10620), section 4.3, for stages. Differs: cut by time, not by shares of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.masks.slices import Ints
from cpsim.schedule.schedule import Pass
from cpsim.strategies.dcp.blocks import Blocks, Bools, Floats, Placement

MOMENTS: Final = 24
"""At which a stage may end."""
STAGE_S: Final = 100e-6
"""What one more stage takes: latency of a network and launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What planning needs to know of a machine."""

    flops_per_s: float
    """FLOP/s of attention on one GPU."""
    port_bytes_per_s: float
    """Rate of a GPU's NVLink, in one direction."""
    node_bytes_per_s: float
    """Rate of a node's network, in one direction."""
    node_latency_s: float
    """What an exchange takes longer that reaches other nodes."""

    @classmethod
    def of(cls, cluster: Cluster) -> Rates:
        """From data sheets: attention at 0.6 of the peak, NVLink at an eighth of the memory (A100 to B200: 7 to 11)."""
        gpu, fabric = cluster.gpu, cluster.fabric
        port = gpu.memory_bandwidth_bytes_per_s / 8
        return cls(
            flops_per_s=0.6 * gpu.peak_flops_per_s,
            port_bytes_per_s=port,
            node_bytes_per_s=fabric.uplink_bandwidth_bytes_per_s if fabric else cluster.gpus_per_node * port,
            node_latency_s=fabric.latency_s if fabric else 0.0,
        )


def stage_by_time(
    blocks: Blocks, placement: Placement, shape: tuple[int, int], rates: Rates, num_stages: int, pass_: Pass
) -> tuple[Ints, float]:
    """Stage of every computation block, ``[C]``, and seconds until all are computed and results are home.

    Args:
        blocks, placement: what runs where.
        shape: (nodes, GPUs of each).
        rates: of the machine.
        num_stages: at most.
        pass_: forward and backward move different bytes.
    """
    ranks = shape[0] * shape[1]
    units, home = blocks.units, np.tile(np.repeat(placement.home, blocks.num_groups), 2)
    there, back = map(blocks.unit_bytes, blocks.query_bytes(pass_), blocks.key_bytes(pass_))
    needs, work = np.zeros((len(home), ranks), np.bool_), np.zeros((len(home), ranks))
    needs[units, placement.worker] = True
    np.add.at(work, (units, placement.worker), blocks.area)
    arrival = _arrivals(needs, home, there, work, shape, rates)
    ready = arrival[units, placement.worker].max(axis=0)
    moments = ready.max(initial=0.0) * np.linspace(0, 1, MOMENTS + 1) ** 2
    at = np.searchsorted(moments, ready)
    flops = blocks.area * (2.0 if pass_ == "fwd" else 5.0) * blocks.q_bytes  # of two bytes an element
    busy = np.zeros((ranks, MOMENTS + 1))
    np.add.at(busy, (placement.worker, at), flops / rates.flops_per_s)
    ends, seconds = _cut(moments, busy, num_stages)
    far = needs & (home[:, None] // shape[1] != np.arange(ranks) // shape[1])
    seconds += rates.node_latency_s * bool(far.any())  # of the first inputs; computation hides that of others
    return np.searchsorted(ends, at), seconds + _results_s(needs, home, back, shape, rates, pass_)


def _arrivals(needs: Bools, home: Ints, nbytes: Ints, work: Floats, shape: tuple[int, int], rates: Rates) -> Floats:
    """When every rank has every unit that it needs, ``[units, ranks]`` in seconds; 0 at home.

    Args:
        needs: which ranks compute on every unit, ``[units, ranks]``.
        home: rank of every unit.
        nbytes: of every unit.
        work: that waits for every unit on every rank, ``[units, ranks]``.
    """
    per_node, arrival = shape[1], np.zeros(needs.shape)
    for node in range(shape[0]):
        inside = slice(node * per_node, (node + 1) * per_node)
        far = np.flatnonzero(needs[:, inside].any(axis=1) & (home // per_node != node))
        come = _one_by_one(nbytes[far], home[far] // per_node, work[far, inside].sum(axis=1))
        arrival[far, inside] = come[:, None] / rates.node_bytes_per_s
    for rank in range(needs.shape[1]):
        near = np.flatnonzero(needs[:, rank] & (home != rank) & (home // per_node == rank // per_node))
        arrival[near, rank] = _one_by_one(nbytes[near], home[near], work[near, rank]) / rates.port_bytes_per_s
    return arrival


def _one_by_one(nbytes: Ints, source: Ints, work: Floats) -> Floats:
    """Bytes that have come with every unit: sources take turns, each with what most work per byte waits for first."""
    order = np.lexsort((-work / nbytes, source))
    count = np.bincount(source)[source]
    turn = np.empty(len(nbytes))
    turn[order] = (np.arange(len(nbytes)) - np.searchsorted(source[order], source[order]) + 0.5) / count[order]
    by_turn = np.argsort(turn, kind="stable")
    come = np.empty(len(nbytes))
    come[by_turn] = np.cumsum(nbytes[by_turn])
    return come


def _cut(moments: Floats, work: Floats, num_stages: int) -> tuple[Ints, float]:
    """Moments at which stages end, as indices, and seconds until all is computed.

    Cuts are added one at a time, wherever they help most, as long as they help.

    Args:
        moments: seconds of communication, ascending.
        work: seconds of every rank on what has come between a moment and the one before, ``[ranks, moments]``.
        num_stages: at most.
    """
    ends = [len(moments) - 1]
    best = _seconds(ends, moments, work)
    for _ in range(num_stages - 1):
        tries = [sorted({*ends, moment}) for moment in range(len(moments))]
        times = [_seconds(cuts, moments, work) for cuts in tries]
        if min(times) >= best:
            break
        best, ends = min(times), tries[int(np.argmin(times))]
    return np.array(ends), best


def _seconds(ends: list[int], moments: Floats, work: Floats) -> float:
    """Until all is computed: inputs of a stage are packed before the stage before it is computed on."""
    done, come, start = np.zeros(len(work)), 0.0, 0.0
    for first, last in zip([-1, *ends[:-1]], ends, strict=True):
        length = moments[last] - (moments[first] if first >= 0 else 0.0)
        come = max(come, start) + (length + STAGE_S if length > 0 else 0.0)
        start = float(done.max())
        done = np.maximum(done, come) + work[:, first + 1 : last + 1].sum(axis=1)
    return float(done.max())


def _results_s(needs: Bools, home: Ints, nbytes: Ints, shape: tuple[int, int], rates: Rates, pass_: Pass) -> float:
    """Seconds in which partial results go home, after all stages; arguments as of ``_arrivals``.

    Forward there are as many exchanges as some queries have other ranks, since outputs of a row are merged one by one.
    """
    given = needs & (home[:, None] != np.arange(needs.shape[1])) & (nbytes > 0)[:, None]
    unit, rank = np.nonzero(given)
    moved = np.zeros((needs.shape[1], needs.shape[1]))
    np.add.at(moved, (rank, home[unit]), nbytes[unit])
    node = np.arange(len(moved)) // shape[1]
    far = np.where(node[:, None] != node, moved, 0.0).reshape(shape * 2).sum(axis=(1, 3))
    exchanges = int(given.sum(axis=1).max()) if pass_ == "fwd" else 2 * bool(given.any())
    return exchanges * (STAGE_S + rates.node_latency_s * bool(far.any())) + max(
        float(np.maximum(sent.sum(axis=0), sent.sum(axis=1)).max() / rate)
        for sent, rate in ((far, rates.node_bytes_per_s), (moved, rates.port_bytes_per_s))
    )
