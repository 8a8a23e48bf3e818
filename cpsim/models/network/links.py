"""Links of a cluster, and what collectives and transfers put on them.

Inside a node every GPU has an NVLink port in each direction; between nodes there are NICs shared by the GPUs of a
node, where nodes are oversubscribed an uplink of each, and where leaf switches are, their links to the spine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster, Fault
from cpsim.masks.slices import Whole
from cpsim.runtime.compiled import compiled
from cpsim.schedule.schedule import Int8, Int32

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Flows:
    """Bytes that ops move over links: entries (op, link, bytes) in any order."""

    op: Whole
    link: Whole
    nbytes: Floats


@dataclass(frozen=True, slots=True)
class Links:
    """Numbering of the links of a cluster, each kind in both directions, out before in: NVLink ports of ranks, NICs,
    uplinks of nodes, and links of leaf switches to the spine where these could fill.

    Where the network is sockets, proxy threads come last: all messages that a rank sends or receives on a stream pass
    one, and no NIC.
    """

    cluster: Cluster
    port_bytes_per_s: float
    """One NVLink port, one direction."""
    num_streams: int = 1
    """Streams of a rank: each has a communicator of its own, and that a proxy thread."""

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """NVLink ports, NICs, uplinks and leaves, in one direction."""
        fabric, nodes = self.cluster.fabric, self.cluster.num_nodes
        if fabric is None:
            return self.cluster.num_gpus, 0, 0, 0
        uplinks = nodes if fabric.oversubscription > 1 or self._faulty("uplink") else 0
        leaves = 0
        if fabric.nodes_per_leaf is not None and fabric.spine_oversubscription > 1:
            leaves = -(-nodes // fabric.nodes_per_leaf) * (fabric.nics_per_node if fabric.rails else 1)
        return self.cluster.num_gpus, fabric.nics_per_node * nodes, uplinks, leaves

    def _faulty(self, part: str) -> list[Fault]:
        return [fault for fault in self.cluster.faults if fault.part == part]

    def capacity_bytes_per_s(self) -> Floats:
        """Capacity of every link, ``[R]``."""
        fabric, sizes = self.cluster.fabric, self._sizes
        rates = [self.port_bytes_per_s, 0.0, 0.0, 0.0]
        if fabric:
            leaf = (fabric.nodes_per_leaf or 0) * (1 if fabric.rails else fabric.nics_per_node)
            leaf_rate = leaf * fabric.nic_bandwidth_bytes_per_s / fabric.spine_oversubscription
            rates[1:] = fabric.nic_bandwidth_bytes_per_s, fabric.uplink_bandwidth_bytes_per_s, leaf_rate
        each = [np.full(2 * count, rate) for count, rate in zip(sizes, rates, strict=True)]
        for part, capacity in zip(("nvlink", "nic", "uplink"), each, strict=False):
            for fault in self._faulty(part):
                capacity[[fault.number, len(capacity) // 2 + fault.number]] *= fault.rate
        if fabric and fabric.proxy_bandwidth_bytes_per_s:
            each.append(np.full(self.num_streams * sizes[0], fabric.proxy_bandwidth_bytes_per_s))
        return np.concatenate(each)

    @property
    def _proxies(self) -> bool:
        return self.cluster.fabric is not None and self.cluster.fabric.proxy_bandwidth_bytes_per_s is not None

    def on_streams(self, flows: Flows, stream: Int8) -> Flows:
        """These flows, which pass the proxy threads of the first stream, through those of their own: of every op,
        ``[ops]``."""
        if not self._proxies:
            return flows
        threads = flows.link >= 2 * sum(self._sizes)
        of_stream = stream[flows.op].astype(np.int64) * self.cluster.num_gpus
        moved = np.where(threads, flows.link + of_stream, flows.link)
        return Flows(flows.op, moved, flows.nbytes)

    def nic_of(self, rank: Whole) -> Whole:
        """The NIC that a rank uses: the GPUs of a node are spread evenly over its NICs."""
        fabric = self.cluster.fabric
        assert fabric is not None
        node, local = np.divmod(rank, self.cluster.gpus_per_node)
        nic: Whole = node * fabric.nics_per_node + local * fabric.nics_per_node // self.cluster.gpus_per_node
        return nic

    def leaf_of(self, nic: Whole) -> Whole:
        """The leaf switch of a NIC."""
        fabric = self.cluster.fabric
        assert fabric is not None
        assert fabric.nodes_per_leaf is not None
        node, place = np.divmod(nic, fabric.nics_per_node)
        group: Whole = node // fabric.nodes_per_leaf
        return group * fabric.nics_per_node + place if fabric.rails else group

    def crosses(self, source: Whole, target: Whole) -> NDArray[np.bool_]:
        """Whether two ranks are on different nodes."""
        return np.asarray(self.cluster.node_of(source) != self.cluster.node_of(target))

    def transfers(self, op: Whole, source: Whole, target: Whole, nbytes: Floats) -> Flows:
        """Flows of point-to-point transfers, arrays ``[n]``; what a GPU sends to itself is on no link."""
        crosses = self.crosses(source, target)
        near, far = np.flatnonzero(~crosses & (source != target)), np.flatnonzero(crosses)
        parts = self._ported(op[near], source[near], target[near], nbytes[near])
        op, source, target, nbytes = op[far], source[far], target[far], nbytes[far]
        ranks, nics, uplinks, leaves = self._sizes
        base = 2 * (ranks + nics)
        if self._proxies and len(far):
            proxy = base + 2 * (uplinks + leaves)
            parts += [(op, proxy + source, nbytes), (op, proxy + target, nbytes)]
        elif len(far):
            handed = self._handed_to(source, target)
            passes = handed != source
            parts += self._ported(op[passes], source[passes], handed[passes], nbytes[passes])
            out, into = self.nic_of(handed), self.nic_of(target)
            parts += [(op, 2 * ranks + out, nbytes), (op, 2 * ranks + nics + into, nbytes)]
            if leaves:
                parts += self._spined(op, self.leaf_of(out), self.leaf_of(into), nbytes)
        if uplinks and len(far):
            out, into = self.cluster.node_of(source), self.cluster.node_of(target)
            parts += [(op, base + out, nbytes), (op, base + uplinks + into, nbytes)]
        return _join(parts)

    def _ported(self, op: Whole, source: Whole, target: Whole, nbytes: Floats) -> list[tuple[Whole, Whole, Floats]]:
        """Flows over NVLink."""
        return [(op, source, nbytes), (op, self.cluster.num_gpus + target, nbytes)]

    def _spined(self, op: Whole, out: Whole, into: Whole, nbytes: Floats) -> list[tuple[Whole, Whole, Floats]]:
        """Flows from leaf to leaf, of those that are not the same."""
        ranks, nics, uplinks, leaves = self._sizes
        base, apart = 2 * (ranks + nics + uplinks), out != into
        return [(op[apart], base + out[apart], nbytes[apart]), (op[apart], base + leaves + into[apart], nbytes[apart])]

    def _handed_to(self, source: Whole, target: Whole) -> Whole:
        """The rank of the source's node whose NIC takes what is for a target: with rails that of the target's place."""
        fabric, per_node = self.cluster.fabric, self.cluster.gpus_per_node
        if fabric is None or not fabric.rails:
            return source
        place = self.nic_of(target) % fabric.nics_per_node
        same = self.nic_of(source) % fabric.nics_per_node == place
        return np.where(same, source, source // per_node * per_node + target % per_node)

    def routed(self, op: int, source: Whole, target: Whole, nbytes: Floats) -> Flows:
        """Flows of one uneven all-to-all, every link once; arrays ``[n]``."""
        flows = self.transfers(np.full(len(source), op), source, target, nbytes)
        total = np.bincount(flows.link, flows.nbytes).astype(np.float64)
        link = np.flatnonzero(total)
        return Flows(np.full(len(link), op), link, total[link])

    def collectives(self, op: Whole, ranks: Whole, near_bytes: float, far_bytes: float, messages: bool) -> Flows:
        """Flows of collectives that are alike.

        Args:
            op: their indices, ``[n]``.
            ranks: of each, ``[n, g]``.
            near_bytes: bytes that every rank sends over NVLink.
            far_bytes: bytes that every rank sends to other nodes, spread over the NICs of its node.
            messages: whether they are made of messages, as an all-to-all, and not of rings.
        """
        num_ranks, nics, uplinks, leaves = self._sizes
        each, all_ranks = np.repeat(op, ranks.shape[1]), ranks.ravel()
        parts: list[tuple[Whole, Whole, float | Floats]]
        parts = [(each, all_ranks, near_bytes), (each, num_ranks + all_ranks, near_bytes)]
        if far_bytes > 0:
            base = 2 * (num_ranks + nics)
            if messages and self._proxies:
                parts.append((each, base + 2 * (uplinks + leaves) + all_ranks, 2 * far_bytes))
            else:
                of_op, nic, count = _counted(op, self.nic_of(ranks))
                parts += [
                    (of_op, 2 * num_ranks + nic, far_bytes * count),
                    (of_op, 2 * num_ranks + nics + nic, far_bytes * count),
                ]
                parts += self._between_leaves(op, ranks, far_bytes, messages) if leaves else []
            if uplinks:
                of_op, node, count = _counted(op, self.cluster.node_of(ranks))
                parts += [
                    (of_op, base + node, far_bytes * count),
                    (of_op, base + uplinks + node, far_bytes * count),
                ]
        return _join([(of_op, link, np.broadcast_to(nbytes, link.shape)) for of_op, link, nbytes in parts])

    def _between_leaves(
        self, op: Whole, ranks: Whole, far_bytes: float, messages: bool
    ) -> list[tuple[Whole, Whole, float | Floats]]:
        """What collectives send from leaf to leaf: of messages each rank's share for the ranks of other groups of
        nodes, of rings, which enter and leave every group of nodes once, what one node sends."""
        num_ranks, nics, uplinks, leaves = self._sizes
        fabric, base, (count, size) = self.cluster.fabric, 2 * (num_ranks + nics + uplinks), ranks.shape
        assert fabric is not None
        assert fabric.nodes_per_leaf is not None
        node, row = self.cluster.node_of(ranks), np.arange(count)[:, None]
        group = row * self.cluster.num_nodes + node // fabric.nodes_per_leaf
        members = np.bincount(group.ravel())[group].astype(np.float64)
        per_node = size / len(np.unique(node[0]))
        to_others = far_bytes * (size - members) / (size - per_node)
        sent = to_others if messages else np.where(members < size, far_bytes * per_node / members, 0.0)
        leaf = row * leaves + self.leaf_of(self.nic_of(ranks))
        total = np.bincount(leaf.ravel(), sent.ravel()).astype(np.float64)
        used = np.flatnonzero(total)
        which, leaf = np.divmod(used, leaves)
        return [(op[which], base + leaf, total[used]), (op[which], base + leaves + leaf, total[used])]


def _counted(op: Whole, values: Whole) -> tuple[Whole, Whole, Floats]:
    """Distinct values of every op, ``[n, g]``: the op, the value and how often it has it."""
    most = int(values.max()) + 1
    distinct, counts = np.unique(np.arange(len(op))[:, None] * most + values, return_counts=True)
    which, value = np.divmod(distinct, most)
    return op[which], value, counts.astype(np.float64)


def _join(parts: list[tuple[Whole, Whole, Floats]]) -> Flows:
    return Flows(*(np.concatenate([p[i] for p in parts]) for i in range(3)))


def as_columns(flows: Sequence[Flows], num_ops: int) -> tuple[Int32, Int32, Floats]:
    """CSR over ops of all flows of positive size, otherwise in their order: start ``[num_ops + 1]``, link and bytes."""
    columns = [
        (
            f.op.astype(np.int32, copy=False),
            f.link.astype(np.int32, copy=False),
            f.nbytes.astype(np.float64, copy=False),
        )
        for f in flows
    ]
    start = np.zeros(num_ops + 1, np.int32)
    for op, _, nbytes in columns:
        _count(start, op, nbytes)
    np.cumsum(start, dtype=np.int32, out=start)
    filled, links, sizes = start.copy(), np.empty(start[-1], np.int32), np.empty(start[-1])
    for some in columns:
        _put(filled, links, sizes, *some)
    return start, links, sizes


@compiled()
def _count(start, op, nbytes):  # type: ignore[no-untyped-def]
    """Add up flows of positive size of every op, where those of the next one start."""
    for i in range(len(op)):
        start[op[i] + 1] += nbytes[i] > 0


@compiled()
def _put(filled, links, sizes, op, link, nbytes):  # type: ignore[no-untyped-def]
    """Put flows of positive size behind those that their ops have."""
    for i in range(len(op)):
        if nbytes[i] > 0:
            links[filled[op[i]]], sizes[filled[op[i]]] = link[i], nbytes[i]
            filled[op[i]] += 1
