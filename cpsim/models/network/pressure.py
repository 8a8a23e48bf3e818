"""What every op of a schedule presses on the others of its GPU with, as the interference model names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.masks.slices import Ints
from cpsim.models.network.collective import channels
from cpsim.schedule.schedule import Int8, Int32, Kind, Schedule

Floats = NDArray[np.float64]

LIKE_PRODUCTS: Final = "fa4 fwd"
"""What products lose beside communication was measured with this kernel: it keeps tensor cores as busy."""
_PRESSURE_OF: Final = {
    Kind.GEMM: LIKE_PRODUCTS,
    Kind.SELECT: LIKE_PRODUCTS,
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
    """All T transfers of a schedule; arrays ``[T]``. Few differ in size and process group: these are the K kinds."""

    op: Int32
    alike: Int32
    """Which kind each one is of."""
    kinds: tuple[Floats, Ints, Ints]
    """Bytes, ranks of the process group and nodes that it spans; ``[K]`` each."""
    channels_of_kind: Ints
    """Thread blocks that those of a kind run on, ``[K]``."""

    @property
    def nbytes(self) -> Floats:
        """Bytes of each one."""
        return self.kinds[0][self.alike]

    @property
    def channels(self) -> Ints:
        """Thread blocks that each one runs on."""
        return self.channels_of_kind[self.alike]

    @classmethod
    def of(cls, schedule: Schedule, cluster: Cluster, unbatched: bool, in_batch: int) -> Messages:
        """Messages of a schedule; ``unbatched``: every two ranks have a process group of their own.

        A transfer is sent as ``in_batch`` messages, one after the other.
        """
        group, ranks = schedule.process_groups()
        op = np.flatnonzero(group >= 0).astype(np.int32)
        nbytes = schedule.nbytes[op]
        if unbatched:
            first = schedule.lane_start[op]
            source, target = (schedule.lane_rank[first + end] for end in (0, 1))
            within = cluster.node_of(source) != cluster.node_of(target)
            sizes = np.array([[2, 2], [1, 2]])
        else:
            within = group[op]
            node = cluster.node_of(np.arange(schedule.num_ranks)).tolist()
            nodes = [len({node[rank] for rank in members}) for members in ranks]
            sizes = np.array([[len(members) for members in ranks], nodes], np.int64)
        code = nbytes * sizes.shape[1] + within
        codes, alike = np.unique(code, return_inverse=True)
        size, which = np.divmod(codes, max(1, sizes.shape[1]))
        kinds = size.astype(np.float64), sizes[0, which], sizes[1, which]
        blocks = channels(kinds[0] / in_batch, *kinds[1:])
        return cls(op, alike.astype(np.int32), kinds, blocks)


def pressures(schedule: Schedule, messages: Messages, paced: NDArray[np.bool_]) -> tuple[Int8, list[str]]:
    """Pressure class of every op, ``[N]``, and the names of the classes: few, as engines need them.

    All transfers of a lane count as its largest one; those of another lane are another kernel. Ops that are ``paced``
    by the network between nodes, and copies to and from the host's memory, press on nothing.
    """
    names: list[str] = []
    class_of = np.zeros(len(Kind), np.int8)
    for kind in sorted(set(schedule.kinds()) - {Kind.TRANSFER}):
        name = _PRESSURE_OF.get(kind, "memory-bound")
        names += [name] if name not in names else []
        class_of[kind] = names.index(name)
    pressure = class_of[schedule.kind]
    lane = schedule.lane_stream[schedule.lane_start[messages.op]]
    near = ~paced[messages.op]
    for one in np.flatnonzero(np.bincount(lane[near])):
        mine = lane == one
        pressure[messages.op[mine]] = len(names)
        names.append(f"transfer {messages.channels_of_kind[messages.alike[near & mine]].max()}")
    alone = paced | schedule.over_host_link()
    if alone.any():
        pressure[alone] = len(names)
        names.append("none")
    return pressure, names
