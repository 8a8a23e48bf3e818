"""What every op of a schedule presses on the others of its GPU with, as the interference model names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.cluster import Cluster
from cpsim.masks import Ints
from cpsim.models.collective import channels
from cpsim.schedule import Int8, Kind, Schedule

Floats = NDArray[np.float64]

LIKE_PRODUCTS: Final = "fa4 fwd"
"""What products lose beside communication was measured with this kernel: it keeps tensor cores as busy."""
_PRESSURE_OF: Final = {
    Kind.GEMM: LIKE_PRODUCTS,
    Kind.ATTENTION: "attention fwd",
    Kind.ATTENTION_BACKWARD: "attention bwd",
    Kind.ALL_GATHER: "all_gather",
    Kind.REDUCE_SCATTER: "reduce_scatter",
    Kind.ALL_TO_ALL: "all_to_all",
    Kind.ALL_REDUCE: "reduce_scatter",
}
"""What presses on other ops of a GPU, as the interference model names it; other kinds are memory-bound, and those of
transfers say how many channels they run on."""


@dataclass(frozen=True, slots=True)
class Messages:
    """All T transfers of a schedule; arrays ``[T]``."""

    op: Ints
    nbytes: Floats
    num_ranks: Ints
    """Of the process group."""
    num_nodes: Ints
    """That it spans."""

    @classmethod
    def of(cls, schedule: Schedule, cluster: Cluster, unbatched: bool) -> Messages:
        """Those of a schedule; ``unbatched``: every two ranks have a process group of their own."""
        group, ranks = schedule.process_groups()
        op = np.flatnonzero(group >= 0)
        ends = schedule.lane_rank[schedule.lane_start[op][:, None] + np.arange(2)].astype(np.int64)
        if unbatched:
            far = cluster.node_of(ends[:, 0]) != cluster.node_of(ends[:, 1])
            sizes = np.stack([np.full(len(op), 2), 1 + far])
        else:
            nodes = [len(np.unique(cluster.node_of(np.array(members)))) for members in ranks]
            sizes = np.array([[len(members) for members in ranks], nodes], np.int64)[:, group[op]]
        return cls(op, schedule.nbytes[op].astype(np.float64), sizes[0], sizes[1])


def pressures(schedule: Schedule, messages: Messages, paced: NDArray[np.bool_]) -> tuple[Int8, list[str]]:
    """Pressure class of every op, ``[N]``, and the names of the classes: few, as engines need them.

    All transfers of a lane count as its largest one; those of another lane are another kernel. Ops that are ``paced``
    by the network between nodes press on nothing.
    """
    names: list[str] = []
    pressure = np.zeros(len(schedule), np.int8)
    for kind in set(np.unique(schedule.kind).tolist()) - {Kind.TRANSFER}:
        name = _PRESSURE_OF.get(Kind(kind), "memory-bound")
        names += [name] if name not in names else []
        pressure[schedule.kind == kind] = names.index(name)
    lane = schedule.lane_stream[schedule.lane_start[messages.op]]
    number = channels(messages.nbytes, messages.num_ranks, messages.num_nodes)
    near = ~paced[messages.op]
    for one in np.unique(lane[near]):
        pressure[messages.op[lane == one]] = len(names)
        names.append(f"transfer {number[near & (lane == one)].max()}")
    if paced.any():
        pressure[paced] = len(names)
        names.append("none")
    return pressure, names
