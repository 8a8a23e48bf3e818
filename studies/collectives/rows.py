"""The published rows: which cluster each is of, how that is described, and which are left out."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpsim.case.transports import Inside
from cpsim.models.network.collective import wire_bytes
from cpsim.models.network.nccl import SMALLEST_BYTES, Machine

FOLDER: Final = Path(__file__).parent
FILES: Final = ("nccl_multinode.csv", "more.csv")
ONE_NODE: Final = "p5, one node"
"""Published as two nodes; its bus bandwidths are 1.75 times sizes over times, which is an all-reduce of 8 GPUs."""


@dataclass(frozen=True, slots=True)
class Description:
    """A cluster as its data sheets describe it."""

    port: float
    """Of a GPU, one direction [GB/s]."""
    nvls: bool
    nics: float = 0.0
    """All NICs of a node, line rate [GB/s]."""
    transport: str | None = None
    per_node: int = 8
    link: str = "nvlink"


@dataclass(frozen=True, slots=True)
class Row:
    """One published size."""

    file: str
    cluster: str
    kind: str
    nbytes: float
    seconds: float
    by_torch: bool
    """Timed by a program of PyTorch, whose hosts show at small sizes."""
    machine: Machine
    """Without what is between nodes, which is fitted."""
    transport: str | None
    """Between nodes, where there are several."""
    line_bytes_per_s: float
    """All NICs of a node."""


CLUSTERS: Final[Mapping[str, Description]] = {
    "GB200 NVL72": Description(900, True, per_node=72),
    "A3 High, Google": Description(450, False, 100, "tcpx"),
    "A3 High, dstack": Description(450, False, 100, "tcpx"),
    "A3 Mega, Google": Description(450, False, 200, "tcpxo"),
    "A3 Mega, ztan": Description(450, False, 200, "tcpxo"),
    "A3 Mega, dstack": Description(450, False, 200, "tcpxo"),
    "A4, dstack": Description(900, True, 400, "roce"),
    "p4de": Description(300, False, 50, "efa"),
    "p5": Description(450, True, 400, "efa"),
    "p5, EKS": Description(450, True, 400, "efa"),
    ONE_NODE: Description(450, True),
    "P6 B200, 4 nodes": Description(900, True, 400, "efa"),
    "P6 B200, one node": Description(900, True),
    "DGX-2, 16 nodes": Description(150, False, 100, "infiniband", per_node=16),
    "OCI A100": Description(300, False, 200, "roce"),
    "OCI MI300X": Description(448, False, 400, "roce", link="xgmi"),
    "H200, one node": Description(450, True),
    "B200, one node": Description(900, True),
}
"""Ports: NVLink 2 to 5; seven of MI300X's xGMI links. NVLS is off where the published environment says so (A3)."""


DISPUTED: Final[Mapping[str, tuple[str, str]]] = {
    "p5, EKS": ("p5", "the same machines with twice the time at 64 to 256 MiB, and no word on NCCL's version"),
    "A3 High, dstack": ("A3 High, Google", "the same machines with half of the line rate instead of 0.7 of it"),
}
"""Clusters that another publication of the same machines contradicts: which one, and how they differ."""


def read() -> tuple[list[Row], dict[str, int]]:
    """Rows of 1 MiB and more, and the numbers of those left out, by reason."""
    rows: list[Row] = []
    left: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    for name in FILES:
        with (FOLDER / name).open(encoding="utf-8", newline="") as file:
            for record in csv.DictReader(file):
                found = _row(name, record, seen)
                if isinstance(found, Row):
                    rows.append(found)
                else:
                    left[found] = left.get(found, 0) + 1
    return rows, left


def _row(file: str, record: Mapping[str, str], seen: set[tuple[str, ...]]) -> Row | str:
    kind, nbytes = record["collective"].split(" ")[0], float(record["bytes"])
    told = record["bytes"], record["time_us"], record["busbw_gb_s"]
    if record["gpu"] == "H200" and told in seen:
        return "rows of the B200 table again, under the name of H200"
    seen.update([told] if record["gpu"] == "B200" and record["nodes"] == "1" and record["time_us"] else [])
    if not record["gpus"]:
        return "the source does not say how many GPUs"
    if nbytes < SMALLEST_BYTES:
        return "below 1 MiB"
    cluster = _cluster(record)
    found, bus = CLUSTERS[cluster], float(record["busbw_gb_s"])
    nodes, ranks = int(record["nodes"]), int(record["gpus"])
    if cluster == ONE_NODE:
        nodes, ranks = 1, 8
    if found.per_node == 72:
        nodes = 1
    time = float(record["time_us"]) * 1e-6 if record["time_us"] else 0.0
    if kind == "all_reduce" and record["inplace_time_us"]:
        time = float(record["inplace_time_us"]) * 1e-6
    time = time or float(wire_bytes(kind, nbytes, ranks)) / bus / 1e9
    off = record["collective"] in ("all_reduce NVLS off (ring)", "all_reduce ring")
    inside = Inside(
        link=found.link,  # type: ignore[arg-type]
        port_bandwidth_bytes_per_s=found.port * 1e9,
        nvls=found.nvls and not off,
    )
    machine = Machine(num_nodes=nodes, per_node=ranks // nodes, inside=inside)
    transport = found.transport if nodes > 1 else None
    by_torch = "all_reduce_bench.py" in record["dtype"]
    return Row(file, cluster, kind, nbytes, time, by_torch, machine, transport, found.nics * 1e9)


def _cluster(record: Mapping[str, str]) -> str:
    network, source, nodes = record["network"], record["source"], record["nodes"]
    by = "dstack" if "dstack" in source else "ztan" if "ztan" in source else "Google"
    for words, name in (
        ("NVL72", "GB200 NVL72"),
        ("A3 High", f"A3 High, {by}"),
        ("A3 Mega", f"A3 Mega, {by}"),
        ("GCP A4", "A4, dstack"),
        ("p4de", "p4de"),
        ("EKS", "p5, EKS"),
        ("AWS Batch", ONE_NODE),
        ("AWS p5", "p5"),
        ("P6-B200", "P6 B200, one node" if nodes == "1" else "P6 B200, 4 nodes"),
        ("DGX-2", "DGX-2, 16 nodes"),
        ("BM.GPU4.8", "OCI A100"),
        ("OCI RoCE", "OCI MI300X"),
    ):
        if words in network:
            return name
    return f"{record['gpu']}, one node"
