"""Fits the network between nodes to a file that `cpsim.real.measure.network --emulate-nodes` wrote (points of op
`fabric`).

The model is that of `cpsim.models.network.communication`: a latency, a rate of one flow, and NICs that the GPUs of a
node share evenly and that flows share fairly; over sockets, threads of the ranks that messages share instead. The
number of NICs is the one of 1, 2, 4 ... GPUs per node that explains best what concurrent flows and small groups
achieve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from cpsim.calibrate.measurement import Measurements, Point
from cpsim.case.cluster import Cluster, Fabric
from cpsim.errors import ProfileError
from cpsim.models.derive import DATA_SHEET
from cpsim.models.network.collective import COLLECTIVES, wire_bytes
from cpsim.models.network.nccl import SMALLEST_BYTES, machine_of, transport_of
from cpsim.models.network.nccl import seconds as law_seconds
from cpsim.models.profile import load_profile

Floats = NDArray[np.float64]
MIN_POINTS: Final = 10


STARTS: Final = ((1e-4, 3e9, 3e9, 5e9), (1e-4, 3.5e9, 3e9, 4e9), (1e-4, 8e9, 3e9, 5e9), (1e-4, 2e9, 3e9, 8e9))
"""Latency [s], rates of a flow, a NIC and a proxy [bytes/s] at which fits begin."""

LOWEST: Final = (1e-6, 1e7, 1e7, 1e7)
HIGHEST: Final = (1.0, 1e12, 1e12, 1e12)
"""What they may be."""


def fit_fabric(files: Sequence[Measurements], likely_nics: int | None = None, sockets: bool = False) -> Fabric:
    """The network between nodes that measurement files of one kind of machine describe.

    Args:
        files: with points of op `fabric`; their spread over machines is part of the uncertainty.
        likely_nics: of a node, where measurements explain other numbers no better.
        sockets: messages pass a thread of every rank, see ``Fabric.proxy_bandwidth_bytes_per_s``.

    Raises:
        ProfileError: there are too few points of a kind.
    """
    everything = [p for file in files for p in file.of("fabric")]
    points = [p for p in everything if "flows" not in p or _between_nodes(p)]
    flows, collectives = ([p for p in points if ("flows" in p) is wanted] for wanted in (True, False))
    if min(len(flows), len(collectives)) < MIN_POINTS:
        raise ProfileError(
            f"{_named(files)}: expected at least {MIN_POINTS} flows and collectives between nodes, got "
            f"{len(flows)} and {len(collectives)}; measure with --emulate-nodes, or name the "
            "transport, --transport roce, and fewer are enough"
        )
    per_node = int(points[0]["gpus_per_node"])
    choices = [n for n in range(1, per_node + 1) if per_node % n == 0]
    fits = [(*_fit(points, num_nics, sockets), num_nics) for num_nics in choices]
    # collectives of whole nodes do not tell NICs apart: of equals, the fewest
    favour = [0.95 if num_nics == likely_nics else 1.0 for *_, num_nics in fits]
    _, (network, residuals, num_nics) = min(
        zip(favour, fits, strict=True),
        key=lambda entry: float(f"{entry[0] * np.square(entry[1][1]).sum():.5g}"),
    )
    is_flow = np.array(["flows" in point for point in points])
    header, rows = files[0].header, len(points)
    nodes, how = points[0]["num_nodes"], "nccl-tests, " if "files" in header else ""
    return Fabric(
        nics_per_node=num_nics,
        latency_s=_round(network.latency_s),
        flow_bandwidth_bytes_per_s=_round(network.flow_rate),
        nic_bandwidth_bytes_per_s=_round(network.nic_rate),
        proxy_bandwidth_bytes_per_s=_round(network.proxy_rate) if sockets else None,
        sigma_log=_round(_spread(residuals[~is_flow])),
        flow_sigma_log=_round(_spread(residuals[is_flow])),
        grade="measured here",
        source=f"{_named(files)}: {how}{rows} points on {nodes} nodes of {per_node} {header['gpu']}, "
        f"{max(str(file.header['date']) for file in files)[:10]}, NCCL {header.get('nccl', '?')}",
    )


FREE: Final = {"nic_bandwidth_bytes_per_s": 0.2, "call_s": 0.5, "fill_s": 0.5}
"""What a described network's measurements change, and how far, in logarithms, lightly."""
WIDTH: Final = 0.1
"""Logarithm of an error from which on points count less."""
LEAST_SIGMA: Final = 0.05
"""Standard deviation, logarithmic, that no network's measurements fall below: machines of one type differ as much."""
OTHER_SIGMA: Final = 0.06
"""What collectives that were not measured miss more: an all-reduce of A3 Mega sets its all-gather to 5 %."""


def fit_described(files: Sequence[Measurements], cluster: Cluster, port_bytes_per_s: float) -> Fabric:
    """A network whose file states its transport, as measured collectives between nodes say it is.

    Any collectives are enough: they go by NCCL's algorithms, so that an all-reduce tells what gathers get, too.

    Args:
        files: with points of op `fabric`.
        cluster: with a fabric that has a transport: where constants begin.
        port_bytes_per_s: of a GPU, as its profile has it.

    Raises:
        ProfileError: there is no collective between nodes.
    """
    fabric = cluster.fabric
    assert fabric is not None
    transport = transport_of(fabric)
    assert transport is not None
    everything = [p for file in files for p in file.of("fabric")]
    points = [p for p in everything if "flows" not in p and p["kind"] in COLLECTIVES]
    points = [p for p in points if p["nbytes"] >= SMALLEST_BYTES]
    if not points:
        raise ProfileError(
            f"{_named(files)}: expected collectives of 1 MiB and more between nodes, got none; give logs of two "
            "nodes or more"
        )
    start = np.log([fabric.nic_bandwidth_bytes_per_s, transport.call_s, transport.fill_s])
    wide, measured = np.array(list(FREE.values())), np.log([np.median(p["samples_s"]) for p in points])

    def made(steps: Floats, as_written: Callable[[float], float] = float) -> Fabric:
        rate, call_s, fill_s = map(as_written, np.exp(start + wide * steps).tolist())
        return replace(fabric, nic_bandwidth_bytes_per_s=rate, call_s=call_s, fill_s=fill_s)

    def errors(steps: Floats) -> Floats:
        where = replace(cluster, fabric=made(steps), num_gpus=1)
        took = [
            float(
                law_seconds(p["kind"], p["nbytes"], machine_of(where, p["num_ranks"], p["num_nodes"], port_bytes_per_s))
            )
            for p in points
        ]
        return np.asarray(measured - np.log(took))

    def residuals(steps: Floats) -> Floats:
        off = errors(steps) / WIDTH
        return np.concatenate([np.sign(off) * np.sqrt(np.log1p(off * off)), steps])

    found = least_squares(residuals, np.zeros(len(FREE))).x
    best = made(found, _round)
    flows = [p for p in everything if "flows" in p and p["nbytes"] >= SMALLEST_BYTES]
    flow, flow_sigma = _flow(flows, best)
    nodes, kinds = points[0]["num_nodes"], ", ".join(dict.fromkeys(str(p["kind"]) for p in points))
    return replace(
        best,
        flow_bandwidth_bytes_per_s=_round(flow),
        sigma_log=_round(float(np.hypot(max(LEAST_SIGMA, _spread(errors(found))), OTHER_SIGMA))),
        flow_sigma_log=flow_sigma,
        grade="measured here",
        source=f"{_named(files)}: {len(points)} points of {kinds} on {nodes} nodes, by NCCL's algorithms over "
        f"{fabric.transport}" + ("" if flows else f"; flows not measured: {flow / 1e9:.3g} GB/s is a share of a NIC"),
    )


def _flow(flows: Sequence[Point], fabric: Fabric) -> tuple[float, float]:
    """Bandwidth [bytes/s] of one flow and its deviation: that of the largest ones measured, or what a fabric states."""
    most, sigma = fabric.nic_bandwidth_bytes_per_s, fabric.flow_sigma_log
    if not flows:
        return min(fabric.flow_bandwidth_bytes_per_s, most), sigma
    rates = [p["nbytes"] / max(1e-9, float(np.median(p["samples_s"])) - fabric.latency_s) for p in flows]
    largest = np.array([p["nbytes"] for p in flows]) >= max(p["nbytes"] for p in flows) / 8
    return min(_round(float(np.median(np.array(rates)[largest]))), most), max(LEAST_SIGMA, sigma / 2)


def port_of(cluster: Cluster) -> float:
    """What a GPU's port carries: as the cluster's file says, its profile measured it, or its GPU is described."""
    if cluster.inside is not None:
        return cluster.inside.port_bandwidth_bytes_per_s
    if cluster.profile in (None, DATA_SHEET):
        return cluster.gpu.port_bytes_per_s
    return load_profile(str(cluster.profile)).collective.port_bytes_per_s


class Network(NamedTuple):
    """What is fitted; rates in bytes/s, one direction."""

    latency_s: float
    """Latency of one message, seconds."""
    flow_rate: float
    nic_rate: float
    proxy_rate: float
    """Both directions together; infinite where messages pass the NICs."""


def seconds(point: Point, network: Network, num_nics: int) -> float:
    """What a point takes in the model.

    Args:
        point: of op `fabric`, a collective or flows of which one leaves its node.
        network: latency and rates.
        num_nics: NICs of a node.
    """
    nbytes, per_node = float(point["nbytes"]), int(point["gpus_per_node"])
    by_proxy = network.proxy_rate < np.inf
    if "flows" in point:
        ends = [(rank, out) for flow in _between_nodes(point) for rank, out in zip(flow, (True, False), strict=True)]
        if by_proxy:
            met: list[object] = [rank for rank, _ in ends]
        else:
            met = [(rank // per_node, rank % per_node * num_nics // per_node, out) for rank, out in ends]
        busiest = max(met.count(one) for one in met)
        shared = network.proxy_rate if by_proxy else network.nic_rate
        return network.latency_s + nbytes / min(network.flow_rate, shared / busiest)
    num_ranks, groups = int(point["num_ranks"]), int(point["num_groups"])
    members = num_ranks // int(point["num_nodes"])
    if point["kind"] == "all_to_all":
        far_bytes = nbytes * (num_ranks - members) / num_ranks * members
        if by_proxy:
            return network.latency_s + 2 * far_bytes / members / network.proxy_rate
    else:
        far_bytes = float(wire_bytes(point["kind"], nbytes, num_ranks))
    share = num_nics * members / per_node  # NICs of the group's GPUs; a part of one where GPUs share it
    alone = network.latency_s + far_bytes / (share * network.nic_rate)
    return max(alone, far_bytes * groups / (num_nics * network.nic_rate))


def _between_nodes(point: Point) -> list[tuple[int, int]]:
    """Flows (sender, receiver) of a point that leave their node; the others meet no NIC."""
    per_node = int(point["gpus_per_node"])
    return [(a, b) for a, b in point["flows"] if a // per_node != b // per_node]


def _fit(points: Sequence[Point], num_nics: int, sockets: bool) -> tuple[Network, Floats]:
    """The network, and the residuals: logarithms of measured over modelled."""
    measured = np.log([np.median(point["samples_s"]) for point in points])

    def network(logs: Floats) -> Network:
        latency_s, flow_rate, nic_rate, *proxy_rate = np.exp(logs).tolist()
        return Network(latency_s, flow_rate, nic_rate, proxy_rate[0] if sockets else np.inf)

    def residuals(logs: Floats) -> Floats:
        modelled = [seconds(point, network(logs), num_nics) for point in points]
        return np.asarray(measured - np.log(modelled))

    # what holds up a flow, its own rate or what it shares, is a choice of two, and a fit may end in the worse one
    free = 4 if sockets else 3
    within = (np.log(LOWEST[:free]), np.log(HIGHEST[:free]))
    fits = [
        least_squares(residuals, np.log(start[:free]), bounds=within, loss="soft_l1", f_scale=0.2, xtol=1e-12)
        for start in STARTS
    ]
    found = min(fits, key=lambda fit: float(fit.cost))
    best = network(found.x)
    shared = best.proxy_rate if sockets else best.nic_rate
    # where only what flows share holds one up, it could be as fast as one likes
    return best._replace(flow_rate=min(best.flow_rate, shared)), residuals(found.x)


def _named(files: Sequence[Measurements]) -> str:
    """Names of the files; the first, the number and the last of many."""
    names = [file.source for file in files]
    return ", ".join(names) if len(names) < 3 else f"{names[0]} ... {names[-1]} ({len(names)} files)"


def _spread(residuals: Floats) -> float:
    return max(0.01, float(np.sqrt(np.square(residuals).mean())))


def _round(value: float) -> float:
    return float(f"{value:.3g}")
