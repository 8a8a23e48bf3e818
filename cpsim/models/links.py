"""Links of a cluster, and what collectives and transfers put on them.

Inside a node every GPU has an NVLink port in each direction; between nodes there are NICs shared by the GPUs of a
node, and where the network is oversubscribed an uplink per node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsim.cluster import Cluster
from cpsim.masks import Ints
from cpsim.schedule import Int32

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Flows:
    """Bytes that ops move over links: entries (op, link, bytes) in any order."""

    op: Ints
    link: Ints
    nbytes: Floats


@dataclass(frozen=True, slots=True)
class Links:
    """Numbering of the links of a cluster: NVLink out and in per rank, NIC out and in, uplink out and in per node.

    Where the network is sockets, every rank's proxy thread comes last: all messages that it sends or receives pass it,
    and no NIC.
    """

    cluster: Cluster
    port_bytes_per_s: float
    """One NVLink port, one direction."""

    @property
    def _sizes(self) -> tuple[int, int, int]:
        fabric = self.cluster.fabric
        nics = fabric.nics_per_node * self.cluster.num_nodes if fabric else 0
        uplinks = self.cluster.num_nodes if fabric and fabric.oversubscription > 1 else 0
        return self.cluster.num_gpus, nics, uplinks

    def capacity_bytes_per_s(self) -> Floats:
        """Capacity of every link, ``[R]``."""
        ranks, nics, uplinks = self._sizes
        fabric = self.cluster.fabric
        rates = [(2 * ranks, self.port_bytes_per_s)]
        if fabric:
            rates += [(2 * nics, fabric.nic_bandwidth_bytes_per_s)]
            rates += [(2 * uplinks, fabric.uplink_bandwidth_bytes_per_s)]
            rates += [(ranks, fabric.proxy_bandwidth_bytes_per_s)] if fabric.proxy_bandwidth_bytes_per_s else []
        return np.concatenate([np.full(count, rate) for count, rate in rates])

    @property
    def _proxies(self) -> bool:
        return self.cluster.fabric is not None and self.cluster.fabric.proxy_bandwidth_bytes_per_s is not None

    def nic_of(self, rank: Ints) -> Ints:
        """The NIC that a rank uses: the GPUs of a node are spread evenly over its NICs."""
        fabric = self.cluster.fabric
        assert fabric is not None
        node, local = np.divmod(rank, self.cluster.gpus_per_node)
        nic: Ints = node * fabric.nics_per_node + local * fabric.nics_per_node // self.cluster.gpus_per_node
        return nic

    def crosses(self, source: Ints, target: Ints) -> NDArray[np.bool_]:
        """Whether two ranks are on different nodes."""
        return np.asarray(self.cluster.node_of(source) != self.cluster.node_of(target))

    def transfers(self, op: Ints, source: Ints, target: Ints, nbytes: Floats) -> Flows:
        """Flows of point-to-point transfers, arrays ``[n]``."""
        far = self.crosses(source, target)
        near = ~far
        ranks, nics, uplinks = self._sizes
        parts = [(op[near], source[near], nbytes[near]), (op[near], ranks + target[near], nbytes[near])]
        if far.any():
            base = 2 * (ranks + nics)
            if self._proxies:
                out, into = (base + 2 * uplinks + end[far] for end in (source, target))
            else:
                out, into = 2 * ranks + self.nic_of(source[far]), 2 * ranks + nics + self.nic_of(target[far])
            parts += [(op[far], out, nbytes[far]), (op[far], into, nbytes[far])]
            if uplinks:
                out, into = self.cluster.node_of(source[far]), self.cluster.node_of(target[far])
                parts += [(op[far], base + out, nbytes[far]), (op[far], base + uplinks + into, nbytes[far])]
        return _join(parts)

    def routed(self, op: int, source: Ints, target: Ints, nbytes: Floats) -> Flows:
        """Flows of one uneven all-to-all, every link once; arrays ``[n]``."""
        flows = self.transfers(np.full(len(source), op), source, target, nbytes)
        total = np.bincount(flows.link, flows.nbytes).astype(np.float64)
        link = np.flatnonzero(total)
        return Flows(np.full(len(link), op), link, total[link])

    def collective(self, op: int, ranks: Ints, near_bytes: float, far_bytes: float, messages: bool) -> Flows:
        """Flows of one collective.

        Args:
            op: its index.
            ranks: its ranks, ``[g]``.
            near_bytes: bytes that every rank sends over NVLink.
            far_bytes: bytes that every rank sends to other nodes, spread over the NICs of its node.
            messages: whether it is made of messages, as an all-to-all, and not of rings.
        """
        num_ranks, nics, uplinks = self._sizes
        parts: list[tuple[Ints, float | Floats]] = [(ranks, near_bytes), (num_ranks + ranks, near_bytes)]
        if far_bytes > 0:
            base = 2 * (num_ranks + nics)
            if messages and self._proxies:
                parts.append((base + 2 * uplinks + ranks, 2 * far_bytes))
            else:
                nic, count = _counted(self.nic_of(ranks))
                parts += [
                    (2 * num_ranks + nic, far_bytes * count),
                    (2 * num_ranks + nics + nic, far_bytes * count),
                ]
            if uplinks:
                node, count = _counted(self.cluster.node_of(ranks))
                parts += [(base + node, far_bytes * count), (base + uplinks + node, far_bytes * count)]
        return _join([(np.full(len(link), op), link, np.broadcast_to(nbytes, link.shape)) for link, nbytes in parts])


def _counted(values: Ints) -> tuple[Ints, Floats]:
    """Distinct values, and how often each occurs."""
    distinct, counts = np.unique(values, return_counts=True)
    return distinct, counts.astype(np.float64)


def _join(parts: list[tuple[Ints, Ints, Floats]]) -> Flows:
    return Flows(*(np.concatenate([p[i] for p in parts]) for i in range(3)))


def as_columns(flows: list[Flows], num_ops: int) -> tuple[Ints, Int32, Floats]:
    """CSR over ops of all flows of positive size: start ``[num_ops + 1]``, link and bytes."""
    if not flows:
        return np.zeros(num_ops + 1, np.int64), np.zeros(0, np.int32), np.zeros(0)
    op, link, nbytes = (np.concatenate([getattr(f, name) for f in flows]) for name in ("op", "link", "nbytes"))
    there = nbytes > 0
    op, link, nbytes = op[there], link[there], nbytes[there]
    order = np.argsort(op, kind="stable")
    start = np.concatenate(([0], np.cumsum(np.bincount(op, minlength=num_ops))))
    return start, link[order].astype(np.int32), nbytes[order].astype(np.float64)
