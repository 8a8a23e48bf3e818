"""Collectives by NCCL's algorithms, from a description of what connects the GPUs: for machines that nobody measured.

A collective takes a call, a latency for every step that a byte goes through, the filling of a pipeline, and its bytes
over the narrowest link. NCCL has several algorithms:

* ring: every rank sends to the next. All bytes cross every boundary of a node once, on all its NICs together.
* tree: up and down a binary tree of nodes. Of two nodes each sends an array once, of more the busiest twice.
* NVLS: the NVLink switches add and multicast, inside a domain, and in trees instead of a chain of a node's GPUs.
* SHARP: the network's switches add, so that a node sends an array once, however many nodes there are.

Sizes are nccl-tests' S, see ``cpsim.models.network.collective``. Constants lie in ``cpsim/data/transports.json``; what
the law is worth on clusters that it was not fitted to, ``python -m studies.collectives`` says.

Reference: NCCL 2.28.9, src/graph/tuning.cc (steps and bandwidth of algorithms, and the model by which it chooses one),
src/device (loops of chunks over channels).
Differs: NCCL's protocols (LL, LL128, Simple) are one, as sizes from 1 MiB on hardly tell them apart; its choice is
followed by latencies and bandwidths alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.case.cluster import Cluster, Fabric
from cpsim.case.transports import Constants, Inside, Link, LinkName, Transport, constants
from cpsim.models.network.collective import COLLECTIVES, PROCESSOR_GPUS, CollectiveParams, Curve, wire_bytes
from cpsim.units import Entries

Floats = NDArray[np.float64]

SMALLEST_BYTES: Final = 2**20
"""Sizes from which the law was tested."""
PLANNED_RING_S: Final = 1.4 * 3.4e-6
PLANNED_RING_NETWORK_S: Final = 1.4 * 14e-6
PLANNED_CHAIN_S: Final = 4e-6
PLANNED_NVLS_S: Final = 25e-6
PLANNED_NETWORK_S: Final = 14e-6
"""Steps of rings, of rings between nodes, of chains, of all that NVLS does in a node, and of trees between nodes, as
NCCL's choice counts them for its protocol Simple."""
PLANNED_TREE_SHARE: Final = 0.85
"""Of a tree's bandwidth, as NCCL's choice counts it: 0.78 to 0.92 by pattern."""


CLOSE: Final = 0.1
"""How much slower, relative, NCCL may count an algorithm that it still takes on some machines: its tables of bandwidths
are rounded, and a machine's are not known better. Times of those that are closer are averaged, by how close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a collective runs: equal parts of nodes."""

    num_nodes: int
    per_node: int
    """Ranks of a node."""
    inside: Inside
    transport: Transport | None = None
    """None where there is one node."""
    node_bytes_per_s: float = np.inf
    """What the NICs of a node's ranks carry together in one direction, as collectives achieve it."""
    sharp: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the collective."""
        return self.num_nodes * self.per_node


class Way(NamedTuple):
    """An algorithm at some sizes."""

    planned: Floats
    """Seconds that NCCL's choice counts."""
    seconds: Floats
    port_bytes: Floats
    """What a rank sends over its port."""
    node_bytes: Floats
    """What a node sends to others."""


def seconds(kind: str, nbytes: ArrayLike, machine: Machine, given: Constants | None = None) -> Floats:
    """Seconds of a collective.

    Args:
        kind: one of COLLECTIVES.
        nbytes: S, any shape.
        machine: where it runs.
        given: constants; those that ship where there are none.

    Returns:
        Seconds, in the shape of nbytes; 0 for a single rank.
    """
    return way(kind, nbytes, machine, given).seconds


def way(kind: str, nbytes: ArrayLike, machine: Machine, given: Constants | None = None) -> Way:
    """The algorithm that NCCL takes at every size; arguments as of ``seconds``."""
    size = np.asarray(nbytes, np.float64)
    if machine.num_ranks == 1:
        return Way(*[np.zeros_like(size)] * 4)
    law = _Law(machine, given or constants())
    if kind == "all_to_all":
        return law.all_to_all(size)
    ways = [law.ring(kind, size)]
    if kind == "all_reduce" and machine.num_nodes > 1:
        ways.append(law.tree(size))
    elif kind == "all_reduce" and machine.inside.nvls:
        ways.append(law.nvls(size))
    planned = np.array([one.planned for one in ways])
    taken = np.maximum(0.0, 1.0 - (planned / planned.min(axis=0) - 1.0) / CLOSE)
    taken /= taken.sum(axis=0)
    return Way(*(np.asarray((taken * np.array(columns)).sum(axis=0)) for columns in zip(*ways, strict=True)))


def link_of(inside: Inside, count: int, known: Constants) -> Link:
    """What connects so many GPUs of a node."""
    across = inside.link == "pcie" and count > PROCESSOR_GPUS
    return known.links["pcie across processors" if across else inside.link]


@dataclass(frozen=True, slots=True)
class _Law:
    machine: Machine
    known: Constants

    @property
    def _link(self) -> Link:
        return link_of(self.machine.inside, self.machine.per_node, self.known)

    @property
    def _call_s(self) -> float:
        transport = self.machine.transport
        return self.known.call_s + (transport.call_s if transport else 0.0)

    @property
    def _nvls_bytes_per_s(self) -> float:
        """What the switches add of a domain or node: a port sends an array once, and its part of the sum once more."""
        port = self.machine.inside.port_bandwidth_bytes_per_s
        efficiency = self.known.generation(port).efficiency
        return port * self.known.nvls_share * efficiency / (1 + 1 / self.machine.per_node)

    def ring(self, kind: str, size: Floats) -> Way:
        machine, laps = self.machine, 2 if kind == "all_reduce" else 1
        inside = machine.inside.port_bandwidth_bytes_per_s * self._link.ring_share
        between = machine.node_bytes_per_s if machine.num_nodes > 1 else np.inf
        rate = min(inside if machine.per_node > 1 else np.inf, between)
        near, far = laps * (machine.num_ranks - machine.num_nodes), laps * (machine.num_nodes - 1)
        wire = wire_bytes(kind, size, machine.num_ranks)
        wire_s = wire / rate
        planned = near * PLANNED_RING_S + far * PLANNED_RING_NETWORK_S
        steps_s = near * self._link.hop_s + far * self.known.network_hop_s
        crosses = wire if machine.num_nodes > 1 else np.zeros_like(wire)
        return Way(planned + wire_s, self._call_s + steps_s + wire_s, wire, crosses)

    def nvls(self, size: Floats) -> Way:
        machine = self.machine
        loop = self.known.generation(machine.inside.port_bandwidth_bytes_per_s).loop_bytes * machine.num_ranks
        took = self._call_s + (size + np.minimum(size, loop)) / self._nvls_bytes_per_s
        return Way(took - self._call_s, took, size * (1 + 1 / machine.num_ranks), np.zeros_like(size))

    def tree(self, size: Floats) -> Way:
        machine, transport = self.machine, self.machine.transport
        assert transport is not None
        chain = 2 * (machine.per_node - 1)
        if machine.per_node == 1:
            within, steps, near_s, planned_s = np.inf, 0, 0.0, 0.0
        elif machine.inside.nvls:
            within, steps, near_s, planned_s = self._nvls_bytes_per_s, 2, 2 * self._link.hop_s, PLANNED_NVLS_S
        else:
            rings = machine.inside.port_bandwidth_bytes_per_s * self._link.ring_share
            within, steps = rings / 2 * self.known.chain_share, chain
            near_s, planned_s = chain * self.known.chain_hop_s, chain * PLANNED_CHAIN_S
        arrays = 1 if machine.sharp or machine.num_nodes == 2 else 2
        depth = 2 if machine.sharp else 2 * int(np.ceil(np.log2(machine.num_nodes)))
        wire_s = size / min(within, machine.node_bytes_per_s / arrays)
        fill_s = transport.fill_s * (depth + steps) * np.minimum(1.0, size / self.known.fill_bytes)
        latency = self._call_s + near_s + depth * self.known.network_hop_s
        planned = planned_s + depth * PLANNED_NETWORK_S + wire_s / PLANNED_TREE_SHARE
        port_bytes = size * (2.0 if not machine.inside.nvls else 1 + 1 / machine.per_node)
        return Way(planned, latency + fill_s + wire_s, port_bytes, size * arrays)

    def all_to_all(self, size: Floats) -> Way:
        """Messages: those inside the node and those to other nodes at the same time."""
        machine, transport, share = self.machine, self.machine.transport, size / self.machine.num_ranks
        near = share * (machine.per_node - 1)
        took = self._call_s + near / (machine.inside.port_bandwidth_bytes_per_s * self._link.messages_share)
        far = share * (machine.num_ranks - machine.per_node) * machine.per_node
        if transport is not None:
            crossing = far / (machine.node_bytes_per_s * transport.messages_share)
            took = np.maximum(took, self._call_s + self.known.network_hop_s + crossing)
        return Way(took, took, near, far)


SWITCHES_FROM: Final = 4e11
"""Port's rate from which on NVLink switches add, where a cluster file does not say it: H100 and later."""


def inside_of(cluster: Cluster, port_bytes_per_s: float) -> Inside:
    """What connects the GPUs of a node: what its file says, or ports that carry what a profile measured."""
    gpu = cluster.gpu
    link: LinkName = "pcie" if gpu.pcie_bytes_per_s and not gpu.nvlink_bytes_per_s else "nvlink"
    line = port_bytes_per_s / constants().links[link].ring_share
    return cluster.inside or Inside(
        link=link,
        port_bandwidth_bytes_per_s=line,
        nvls=line >= SWITCHES_FROM and cluster.gpus_per_node * cluster.copies > 2,
    )


def transport_of(fabric: Fabric) -> Transport | None:
    """A fabric's transport, with what its file states instead; None where it states none."""
    if fabric.transport is None:
        return None
    named = constants().transports[fabric.transport]
    call_s = named.call_s if fabric.call_s is None else fabric.call_s
    return replace(named, call_s=call_s, fill_s=named.fill_s if fabric.fill_s is None else fabric.fill_s)


def machine_of(cluster: Cluster, num_ranks: int, num_nodes: int, port_bytes_per_s: float) -> Machine:
    """Where a collective of a cluster runs.

    Args:
        cluster: the whole.
        num_ranks, num_nodes: of the collective.
        port_bytes_per_s: of a GPU, as a profile measured it.
    """
    inside, per_node, fabric = inside_of(cluster, port_bytes_per_s), num_ranks // num_nodes, cluster.fabric
    if fabric is None or num_nodes == 1:
        return Machine(num_nodes=1, per_node=per_node, inside=inside)
    share = per_node / cluster.gpus_per_node
    return Machine(
        num_nodes=num_nodes,
        per_node=per_node,
        inside=inside,
        transport=transport_of(fabric),
        node_bytes_per_s=fabric.uplink_bandwidth_bytes_per_s * share,
        sharp=fabric.sharp,
    )


LARGEST_BYTES: Final = 2**36
CHANNELS: Final = (1, 2, 4, 8, 16, 32)
CHANNEL_BYTES_PER_S: Final = 20e9
"""One channel of messages over NVLink: 17 to 20 GB/s on H200, the same code on one SM elsewhere."""
MESSAGE_S: Final = 14e-6
"""The smallest message, as measured on H200."""


def collective_params(inside: Inside, most: int) -> CollectiveParams:
    """Curves of a node by the law, for what reads curves.

    Args:
        inside: what connects its GPUs.
        most: GPUs of a node.
    """
    link = constants().links[inside.link]
    sizes = np.geomspace(2**10, LARGEST_BYTES, 53)
    counts = sorted({*(n for n in range(2, most + 1) if n <= 8 or n % 8 == 0), most})
    port = inside.port_bandwidth_bytes_per_s * link.ring_share
    curves = {
        kind: {
            n: _curve(wire_bytes(kind, sizes, n), seconds(kind, sizes, Machine(num_nodes=1, per_node=n, inside=inside)))
            for n in counts
        }
        for kind in COLLECTIVES
    }
    rings = {n: _curve(sizes, MESSAGE_S + sizes / min(n * CHANNEL_BYTES_PER_S, port)) for n in CHANNELS}
    laps = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 0, "all_reduce": 2}
    hops = Entries({kind: laps[kind] * link.hop_s for kind in COLLECTIVES})
    across = link_of(inside, most, constants())
    return CollectiveParams(
        curves=Entries(curves),
        hop_s=hops,
        rings=rings,
        port_bytes_per_s=port,
        crossing_bytes_per_s=None if across == link else inside.port_bandwidth_bytes_per_s * across.ring_share,
    )


def _curve(nbytes: Floats, took: Floats) -> Curve:
    return Curve(nbytes=tuple(nbytes.tolist()), seconds=tuple(np.maximum.accumulate(took).tolist()))
