"""What transfers and collectives of a schedule take alone, and what they put on links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.masks.slices import Ints, Whole
from cpsim.models.cost_models import GROUPS
from cpsim.models.network.collective import collective_seconds, transfer_seconds, wire_bytes
from cpsim.models.network.links import Flows, Links
from cpsim.models.network.nccl import Machine, inside_of, machine_of, way
from cpsim.models.network.pressure import Messages
from cpsim.schedule.schedule import COLLECTIVE_KINDS, Int8, Kind, Schedule, is_one_of

if TYPE_CHECKING:
    from cpsim.models.profile import Profile

Floats = NDArray[np.float64]

COLLECTIVE_NAMES: Final = {
    Kind.ALL_GATHER: "all_gather",
    Kind.REDUCE_SCATTER: "reduce_scatter",
    Kind.ALL_TO_ALL: "all_to_all",
    Kind.ALL_REDUCE: "all_reduce",
}


TO_ITSELF: Final = (
    "messages of a GPU to itself, not measured: on as many channels as NCCL has, as fast as to another GPU"
)
NO_FLOWS: Final = Flows(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, slots=True)
class MessageCosts:
    """What n ops that communicate cost alone."""

    op: Whole
    seconds: Floats
    group: Int8
    """Index into ``GROUPS`` of every op's cost model."""
    flows: Flows
    notes: tuple[str, ...] = ()
    """Sizes that were not measured."""


@dataclass(frozen=True, slots=True)
class Communication:
    """Prices of communication on a cluster."""

    cluster: Cluster
    profile: Profile
    messages: int = 1
    """Number of messages that a transfer is sent as, one after the other."""

    def collective(self, kind: Kind, nbytes: float, num_ranks: int, num_nodes: int) -> tuple[float, float, float, bool]:
        """Seconds, bytes per rank over NVLink, bytes per rank between nodes, whether the latter decide.

        Between nodes a ring collective crosses every node boundary once with everything, over all NICs of the node;
        an all-to-all sends every rank's share for other nodes over that rank's part of the NICs. Where the cluster's
        file describes what connects its GPUs, NCCL's algorithms say all of it.
        """
        name, params = COLLECTIVE_NAMES[kind], self.profile.collective
        if num_ranks == 1:
            return 0.0, 0.0, 0.0, False
        if self.by_law(kind, num_nodes):
            machine = machine_of(self.cluster, num_ranks, num_nodes, params.port_bytes_per_s)
            _, seconds, near, node = (float(value) for value in way(name, nbytes, machine))
            return seconds, near, node / machine.per_node, num_nodes > 1
        if num_nodes == 1 and kind == Kind.ALL_REDUCE and num_ranks > max(params.curves[name]):
            return self._more_ranks(nbytes, num_ranks)
        if num_nodes == 1:
            seconds = float(collective_seconds(params, name, np.array([nbytes]), num_ranks)[0])
            return seconds, float(wire_bytes(name, nbytes, num_ranks)), 0.0, False
        fabric = self.cluster.fabric
        assert fabric is not None
        per_node = num_ranks // num_nodes
        nics = fabric.nics_per_node * per_node / self.cluster.gpus_per_node
        rate_per_rank = nics * fabric.nic_bandwidth_bytes_per_s / fabric.oversubscription / per_node
        if kind == Kind.ALL_TO_ALL:
            far, near = nbytes * (num_ranks - per_node) / num_ranks, nbytes * (per_node - 1) / num_ranks
        else:
            near = float(wire_bytes(name, nbytes, num_ranks))
            far = near / per_node
        inside = 0.0
        if per_node > 1:
            same_wire = near / float(wire_bytes(name, 1.0, per_node))
            inside = float(collective_seconds(params, name, np.array([same_wire]), per_node)[0])
        if kind == Kind.ALL_TO_ALL and fabric.proxy_bandwidth_bytes_per_s:
            rate_per_rank = fabric.proxy_bandwidth_bytes_per_s / 2  # it sends as much as it receives
        between = fabric.latency_s + far / rate_per_rank
        return max(inside, between), near, far, between >= inside

    def _more_ranks(self, nbytes: float, num_ranks: int) -> tuple[float, float, float, bool]:
        """An all-reduce inside a node among more GPUs than were measured, as ``collective``.

        NVLink switches add for larger groups. What was measured grows as NCCL's algorithms say.
        """
        params = self.profile.collective
        inside, most = inside_of(self.cluster, params.port_bytes_per_s), max(params.curves["all_reduce"])
        more, fewer = (
            way("all_reduce", nbytes, Machine(num_nodes=1, per_node=n, inside=inside)) for n in (num_ranks, most)
        )
        measured = float(collective_seconds(params, "all_reduce", np.array([nbytes]), most)[0])
        return measured * float(more.seconds / fewer.seconds), float(more.port_bytes), 0.0, False

    def by_law(self, kind: Kind, num_nodes: int) -> bool:
        """Whether a description prices a collective, and no measurement of it; sockets carry messages by threads."""
        fabric = self.cluster.fabric
        if num_nodes == 1 or fabric is None:
            return self.cluster.inside is not None
        by_proxy = kind == Kind.ALL_TO_ALL and fabric.proxy_bandwidth_bytes_per_s is not None
        return fabric.transport is not None and not by_proxy

    def transfers(self, schedule: Schedule, messages: Messages, links: Links) -> MessageCosts:
        """Messages between two ranks, inside nodes and between them."""
        ops, nbytes = messages.op, messages.nbytes
        first = schedule.lane_start[ops]
        source, target = schedule.lane_rank[first], schedule.lane_rank[first + 1]
        crosses = links.crosses(source, target)
        seconds = transfer_seconds(self.profile.collective, *messages.kinds, self.messages)[messages.alike]
        if self.cluster.fabric is not None:
            fabric = self.cluster.fabric
            seconds = np.where(crosses, fabric.latency_s + nbytes / fabric.flow_bandwidth_bytes_per_s, seconds)
        group = np.where(crosses, GROUPS.index("transfer between nodes"), GROUPS.index("transfer")).astype(np.int8)
        notes = self.profile.transfer_notes(nbytes[~crosses])
        if (source == target).any():
            notes = (*notes, TO_ITSELF)
        return MessageCosts(ops, seconds, group, links.transfers(ops, source, target, nbytes), notes)

    def collectives(self, schedule: Schedule, links: Links) -> list[MessageCosts]:
        """All collectives, those whose ranks send each other unequal parts included."""
        even = is_one_of(schedule.kind, COLLECTIVE_KINDS)
        if not even.any():
            return []
        uneven = np.unique(schedule.routes[:, 0])
        found = self._all_routed(schedule, uneven.tolist(), links)
        even[uneven] = False
        for kind, nbytes, nodes, ops, ranks in self._alike(schedule, np.flatnonzero(even)):
            num_ranks = ranks.shape[1] * schedule.copies
            seconds, near, far, between = self.collective(kind, float(nbytes), num_ranks, nodes)
            name, size = COLLECTIVE_NAMES[kind], num_ranks // nodes
            notes = () if self.by_law(kind, nodes) else tuple(self.profile.collective_notes(name, nbytes, size))
            flows = NO_FLOWS if num_ranks == 1 else links.collectives(ops, ranks, near, far, kind == Kind.ALL_TO_ALL)
            group = np.full(len(ops), GROUPS.index("collective between nodes" if between else "collective"), np.int8)
            found.append(MessageCosts(ops, np.full(len(ops), seconds), group, flows, notes))
        return found

    def _all_routed(self, schedule: Schedule, ops: list[int], links: Links) -> list[MessageCosts]:
        """All-to-alls of unequal parts; notes, which are those of the largest by number of GPUs, with the last one."""
        largest: dict[int, float] = {}
        found = []
        for op in ops:
            costs, most, size = self._routed(schedule, op, links)
            found.append(costs)
            if most:
                largest[most] = max(size, largest.get(most, 0.0))
        notes = [
            note for most, size in largest.items() for note in self.profile.collective_notes("all_to_all", size, most)
        ]
        return [*found[:-1], replace(found[-1], notes=tuple(notes))] if found else []

    def _alike(self, schedule: Schedule, ops: Ints) -> Iterator[tuple[Kind, int, int, Ints, Ints]]:
        """Collectives that cost the same: kind, bytes and nodes, the ops and their ranks ``[n, g]``; the first one's
        kind first."""
        start, size = schedule.lane_start[ops], np.diff(schedule.lane_start)[ops]
        rank = schedule.lane_rank[np.repeat(start - np.cumsum(size) + size, size) + np.arange(size.sum())]
        node = np.repeat(np.arange(len(ops)), size) * self.cluster.num_nodes + self.cluster.node_of(rank)
        nodes = np.bincount(np.unique(node) // self.cluster.num_nodes, minlength=len(ops))
        looks = np.stack([schedule.kind[ops], schedule.nbytes[ops], size, nodes])
        code = np.zeros(len(ops), np.int64)
        for column in looks:  # numbers instead of rows, which take longer to sort
            values, which = np.unique(column, return_inverse=True)
            code = code * len(values) + which
        _, first, of_op = np.unique(code, return_index=True, return_inverse=True)
        for i in np.argsort(first).tolist():
            mine, (kind, nbytes, width, spanned) = of_op == i, looks[:, first[i]].tolist()
            ranks = schedule.lane_rank[start[mine][:, None] + np.arange(width)].astype(np.int64)
            yield Kind(kind), nbytes, spanned, ops[mine], ranks

    def _routed(self, schedule: Schedule, op: int, links: Links) -> tuple[MessageCosts, int, float]:
        """An uneven all-to-all: as long as an even one whose ranks send what the busiest rank sends or receives inside
        its node, or as the busiest NIC or uplink takes.

        Returns:
            its costs; the GPUs and the bytes of the even one inside a node, 0 where there is none.
        """
        mine = slice(*np.searchsorted(schedule.routes[:, 0], [op, op + 1]).tolist())
        source, target = schedule.routes[mine, 1:].T.astype(np.int64)
        leaves = source != target
        source, target, nbytes = source[leaves], target[leaves], schedule.route_nbytes[mine][leaves].astype(np.float64)
        near = ~links.crosses(source, target)
        flows, seconds, most, size, name = links.routed(op, source, target, nbytes), 0.0, 0, 0.0, "collective"
        if near.any():
            ranks = schedule.lane_rank[schedule.lane_start[op] : schedule.lane_start[op + 1]].astype(np.int64)
            most = int(np.unique(self.cluster.node_of(ranks), return_counts=True)[1].max())
            wire = max(np.bincount(end[near], nbytes[near]).max() for end in (source, target))
            size = wire * most / (most - 1)
            seconds = float(collective_seconds(self.profile.collective, "all_to_all", np.array([size]), most)[0])
        fabric = self.cluster.fabric
        if fabric is not None and not near.all():
            outside = flows.link >= 2 * self.cluster.num_gpus
            rate = links.capacity_bytes_per_s()[flows.link[outside]]
            between = fabric.latency_s + float((flows.nbytes[outside] / rate).max())
            name = "collective between nodes" if between >= seconds else "collective"
            seconds = max(seconds, between)
        group = np.array([GROUPS.index(name)], np.int8)
        return MessageCosts(np.array([op]), np.array([seconds]), group, flows), most, size
