"""Fits the network between nodes to a file that `real.measure_network --emulate-nodes` wrote (points of op `fabric`).

The model is that of `cpsim.models.price`: a latency, a rate of one flow, and NICs that the GPUs of a node share
evenly and that flows share fairly. The number of NICs is the one of 1, 2, 4 ... GPUs per node that explains best what
concurrent flows and small groups achieve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from cpsim.calibrate.measurement import Measurements, Point
from cpsim.cluster import Fabric
from cpsim.errors import ProfileError

Floats = NDArray[np.float64]
MIN_POINTS: Final = 10
ROUNDS: Final = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}


def fit_fabric(measurements: Measurements, likely_nics: int | None = None) -> Fabric:
    """The network between nodes that one measurement file describes.

    Args:
        measurements: with points of op `fabric`.
        likely_nics: of a node, where measurements explain other numbers no better.

    Raises:
        ProfileError: the file has too few points of a kind.
    """
    points = [p for p in measurements.of("fabric") if "flows" not in p or _between_nodes(p)]
    flows, collectives = ([p for p in points if ("flows" in p) is wanted] for wanted in (True, False))
    if min(len(flows), len(collectives)) < MIN_POINTS:
        raise ProfileError(
            f"{measurements.source}: expected at least {MIN_POINTS} flows and collectives between nodes, got "
            f"{len(flows)} and {len(collectives)}; measure with --emulate-nodes"
        )
    per_node = int(points[0]["gpus_per_node"])
    choices = [n for n in range(1, per_node + 1) if per_node % n == 0]
    fits = [(*_fit(points, num_nics), num_nics) for num_nics in choices]
    # collectives of whole nodes do not tell NICs apart
    favour = [0.95 if num_nics == likely_nics else 1.0 for *_, num_nics in fits]
    _, (rates, residuals, num_nics) = min(
        zip(favour, fits, strict=True), key=lambda entry: entry[0] * float(np.square(entry[1][1]).sum())
    )
    is_flow = np.array(["flows" in point for point in points])
    header, rows = measurements.header, len(points)
    nodes, how = points[0]["num_nodes"], "nccl-tests, " if "files" in header else ""
    return Fabric(
        nics_per_node=num_nics,
        latency_s=_round(rates[0]),
        flow_bandwidth_bytes_per_s=_round(rates[1]),
        nic_bandwidth_bytes_per_s=_round(rates[2]),
        sigma_log=_round(_spread(residuals[~is_flow])),
        flow_sigma_log=_round(_spread(residuals[is_flow])),
        grade="measured here",
        source=f"{measurements.source}: {how}{rows} points on {nodes} nodes of {per_node} {header['gpu']}, "
        f"{header['date'][:10]}, NCCL {header.get('nccl', '?')}",
    )


def seconds(point: Point, latency_s: float, flow_rate: float, nic_rate: float, num_nics: int) -> float:
    """What a point takes in the model.

    Args:
        point: of op `fabric`, a collective or flows of which one leaves its node.
        latency_s: of one message [s].
        flow_rate: of one flow, one direction [bytes/s].
        nic_rate: of one NIC, one direction [bytes/s].
        num_nics: NICs of a node.
    """
    nbytes, per_node = float(point["nbytes"]), int(point["gpus_per_node"])
    if "flows" in point:
        nics = [(rank // per_node, rank % per_node * num_nics // per_node, out) for flow in _between_nodes(point)
                for rank, out in zip(flow, (True, False), strict=True)]  # fmt: skip
        busiest = max(nics.count(nic) for nic in nics)
        return latency_s + nbytes / min(flow_rate, nic_rate / busiest)
    num_ranks, groups = int(point["num_ranks"]), int(point["num_groups"])
    members = num_ranks // int(point["num_nodes"])
    if point["kind"] == "all_to_all":
        far_bytes = nbytes * (num_ranks - members) / num_ranks * members
    else:
        far_bytes = nbytes * (num_ranks - 1) / num_ranks * ROUNDS[point["kind"]]
    share = num_nics * members / per_node  # NICs of the group's GPUs; a part of one where GPUs share it
    return max(latency_s + far_bytes / (share * nic_rate), far_bytes * groups / (num_nics * nic_rate))


def _between_nodes(point: Point) -> list[tuple[int, int]]:
    """Flows (sender, receiver) of a point that leave their node; the others meet no NIC."""
    per_node = int(point["gpus_per_node"])
    return [(a, b) for a, b in point["flows"] if a // per_node != b // per_node]


def _fit(points: Sequence[Point], num_nics: int) -> tuple[Floats, Floats]:
    """Latency, flow rate and NIC rate, and the residuals: logarithms of measured over modelled."""
    measured = np.log([np.median(point["samples_s"]) for point in points])

    def residuals(logs: Floats) -> Floats:
        latency_s, flow_rate, nic_rate = np.exp(logs).tolist()
        modelled = [seconds(point, latency_s, flow_rate, nic_rate, num_nics) for point in points]
        return np.asarray(measured - np.log(modelled))

    start = np.log([1e-4, 3e9, 3e9])
    found = least_squares(residuals, start, loss="soft_l1", f_scale=0.2)
    return np.exp(found.x), residuals(found.x)


def _spread(residuals: Floats) -> float:
    return max(0.01, float(np.sqrt(np.square(residuals).mean())))


def _round(value: float) -> float:
    return float(f"{value:.3g}")
