"""What nccl-tests would print on a cluster, with intervals, and how a log of it compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.errors import ScenarioError, unknown_name
from cpsim.models.network.collective import COLLECTIVES, transfer_seconds, wire_bytes
from cpsim.models.network.communication import COLLECTIVE_NAMES, Communication
from cpsim.models.network.nccl import SMALLEST_BYTES
from cpsim.models.profile import Profile
from cpsim.prediction.case import profile_of

NINETY: Final = 1.645
"""Standard deviations on either side of a normal error that 90 of 100 do not pass."""
SENDRECV: Final = "sendrecv"
TESTS: Final = (*COLLECTIVES, SENDRECV)
OTHER_NAMES: Final = {"alltoall": "all_to_all", "ring": SENDRECV}
_OPS: Final = {name: op for op, name in COLLECTIVE_NAMES.items()}
SIZES: Final = tuple(2**k for k in range(20, 34))
"""1 MiB to 8 GiB."""
LINKS_ONLY: Final = "h200"
"""Profile of what has no links of its own, where a cluster describes them and names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One line of nccl-tests."""

    kind: str
    """One of TESTS."""
    num_gpus: int
    nbytes: int
    """S of nccl-tests."""
    time_s: float
    low_s: float
    """Of the 90 % interval."""
    high_s: float
    measured_s: float | None = None
    """In the log that it is compared with."""

    @property
    def algorithm_bytes_per_s(self) -> float:
        """S over the time."""
        return self.nbytes / self.time_s

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes on a rank's wire over the time."""
        wire = self.nbytes if self.kind == SENDRECV else float(wire_bytes(self.kind, self.nbytes, self.num_gpus))
        return wire / self.time_s

    @property
    def error(self) -> float:
        """Predicted over measured, less 1; NaN where nothing was measured."""
        return self.time_s / self.measured_s - 1 if self.measured_s else float("nan")

    @property
    def inside(self) -> bool:
        """Whether what was measured lies in the interval."""
        return self.measured_s is not None and self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, slots=True)
class Answer:
    """Collectives of a cluster."""

    cluster: Cluster
    sizes: tuple[Size, ...]
    notes: tuple[str, ...]


def kind_named(name: str) -> str:
    """One of TESTS, by its name here or in nccl-tests.

    Raises:
        ScenarioError: it is none.
    """
    plain = name.lower().removesuffix("_perf").replace("-", "_")
    found = OTHER_NAMES.get(plain, plain)
    if found not in TESTS:
        raise ScenarioError(unknown_name("kind", name, [*TESTS]))
    return found


def collectives(
    cluster: Cluster, kinds: Sequence[str] = TESTS, sizes: Sequence[int] = SIZES, profile: str | None = None
) -> Answer:
    """Times of collectives of all GPUs in use.

    Args:
        cluster: with its GPUs in use.
        kinds: of TESTS.
        sizes: nccl-tests' S [bytes].
        profile: instead of the cluster's.

    Raises:
        ScenarioError: one GPU, or no profile and no links.
    """
    if cluster.num_gpus < 2:
        raise ScenarioError(f"gpus: expected at least 2 for a collective, got {cluster.num_gpus}")
    communication = Communication(cluster, _links(cluster, profile))
    made = [_size(communication, kind, nbytes) for kind in kinds for nbytes in sizes]
    return Answer(cluster, tuple(made), _notes(communication, kinds, sizes))


def against(cluster: Cluster, points: Sequence[Mapping[str, Any]], profile: str | None = None) -> Answer:
    """The collectives of a log, predicted.

    Args:
        cluster: whose they are.
        points: of a log, as ``read_nccl_log`` makes them.
        profile: instead of the cluster's.

    Raises:
        ScenarioError: the log is of GPUs or nodes that the cluster does not have.
    """
    sizes: list[Size] = []
    notes: list[str] = []
    for (ranks, nodes, kind), some in _alike(points).items():
        mine = _of_log(cluster, ranks, nodes)
        communication = Communication(mine, _links(mine, profile))
        for point in some:
            measured = float(np.median(point["samples_s"]))
            sizes.append(replace(_size(communication, kind, int(point["nbytes"])), measured_s=measured))
        notes += _notes(communication, [kind], [int(point["nbytes"]) for point in some])
    return Answer(cluster, tuple(sizes), tuple(dict.fromkeys(notes)))


def _alike(points: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int, str], list[Mapping[str, Any]]]:
    """Points by ranks, nodes and test."""
    found: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    for point in points:
        nodes = int(point.get("num_nodes", 1))
        ranks = int(point["num_ranks"]) if "num_ranks" in point else nodes * int(point["gpus_per_node"])
        kind = kind_named(SENDRECV if "flows" in point else point["kind"])
        found.setdefault((ranks, nodes, kind), []).append(point)
    return found


def _of_log(cluster: Cluster, ranks: int, nodes: int) -> Cluster:
    """The cluster with the GPUs of a log in use."""
    if ranks != nodes * cluster.gpus_per_node and (nodes > 1 or ranks > cluster.gpus_per_node):
        raise ScenarioError(
            f"cluster: the log has {ranks} GPUs on {nodes} node{'s' if nodes > 1 else ''}, {cluster.name} "
            f"{cluster.gpus_per_node} a node; name the cluster that it is of"
        )
    return cluster.with_gpus(ranks)


def _links(cluster: Cluster, name: str | None) -> Profile:
    name = name or cluster.profile or (LINKS_ONLY if cluster.inside is not None else None)
    if name is None:
        raise ScenarioError(
            f"profile: nobody has measured {cluster.gpu.name} of cluster {cluster.name} yet; say what is inside a "
            "node, e.g. inside: nvlink 450 GB/s, or name the profile of a machine to assume"
        )
    return profile_of(cluster, name)


def _size(communication: Communication, kind: str, nbytes: int) -> Size:
    cluster, profile = communication.cluster, communication.profile
    between = cluster.num_nodes > 1
    fabric = cluster.fabric
    if kind == SENDRECV:
        seconds = float(transfer_seconds(profile.collective, nbytes, cluster.num_gpus, cluster.num_nodes))
        if between and fabric is not None:
            seconds = max(seconds, fabric.latency_s + nbytes / fabric.flow_bandwidth_bytes_per_s)
        sigma = fabric.flow_sigma_log if between and fabric is not None else profile.sigma["transfer"]
    else:
        seconds, _, _, decides = communication.collective(
            _OPS[kind], float(nbytes), cluster.num_gpus, cluster.num_nodes
        )
        inside = profile.sigma.get(f"collective {kind}", profile.sigma["collective"])
        sigma = fabric.sigma_log if decides and fabric is not None else inside
    wide = float(np.exp(NINETY * sigma))
    return Size(
        kind=kind,
        num_gpus=cluster.num_gpus,
        nbytes=nbytes,
        time_s=seconds,
        low_s=seconds / wide,
        high_s=seconds * wide,
    )


def _notes(communication: Communication, kinds: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """What the times rest on, and what was not measured."""
    cluster, profile, fabric = communication.cluster, communication.profile, communication.cluster.fabric
    notes: list[str] = []
    for kind, op in ((kind, _OPS[kind]) for kind in kinds if kind != SENDRECV):
        if communication.by_law(op, cluster.num_nodes):
            continue
        notes += profile.collective_notes(kind, float(max(sizes)), min(cluster.num_gpus, cluster.gpus_per_node))
    if cluster.num_nodes > 1 and fabric is not None:
        by = f", NCCL's algorithms over {fabric.transport}" if fabric.transport else ", rates and a latency alone"
        notes.append(f"network between nodes of {cluster.name}: {fabric.grade}{by}")
        if fabric.transport and min(sizes) < SMALLEST_BYTES:
            notes.append("below 1 MiB NCCL's algorithms between nodes were not tested")
    if cluster.inside is not None:
        notes.append(profile.grade.rpartition("; ")[2])
    return tuple(dict.fromkeys(notes))
