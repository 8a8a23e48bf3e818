"""A cluster file from what people have: five answers, `nvidia-smi topo -m`, `ibstat`, logs of nccl-tests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cpsim.calibrate.fabric import fit_described, port_of
from cpsim.calibrate.measurement import Measurements, Point
from cpsim.calibrate.nccl_logs import Said, missing, read_nccl_log
from cpsim.calibrate.topology import Nics, read_node
from cpsim.case.cluster import Cluster, Fabric, cluster_from, presets
from cpsim.case.gpu import AMD, gpu_of_driver, gpus
from cpsim.errors import CpsimError
from cpsim.models.network.nccl import SMALLEST_BYTES, SWITCHES_FROM

QUESTIONS: Final[Mapping[str, str]] = {
    "gpu": "Which GPU?",
    "gpus_per_node": "How many GPUs has a node (an NVLink domain, of NVL72)?",
    "inside": "What connects them? e.g. nvlink 450 GB/s nvls, pcie 32 GB/s; 'measured' as the GPU's profile has it",
    "nics": "How many NICs has a node, and how fast? e.g. 4 x 200G; 'none' for a single node",
    "transport": "What do they speak? infiniband, roce, efa, tcpxo, tcpx or ethernet",
}
"""By field of a cluster file."""
USUAL: Final[Mapping[str, str]] = {"gpus_per_node": "8", "inside": "measured", "nics": "none", "transport": "roce"}
"""What is taken where nobody says more."""
MEASURED, NONE = "measured", "none"
FIELDS: Final = {
    "nic_bandwidth_bytes_per_s": "one NIC, one direction, as collectives achieve it",
    "flow_bandwidth_bytes_per_s": "one message between two GPUs; sendrecv_perf measures it",
    "latency_s": "of one message between nodes",
    "call_s": "a collective's, beyond one inside a node",
    "fill_s": "a tree's pipeline, for every step",
    "sigma_log": "0.15: collectives are mostly within 25 %",
    "flow_sigma_log": "the same for single messages",
}
"""What a fabric's numbers are, in a file's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is known of a cluster; None where nothing is."""

    gpu: str | None = None
    gpus_per_node: str | None = None
    inside: str | None = None
    nics: str | None = None
    transport: str | None = None
    profile: str | None = None
    points: tuple[Point, ...] = ()
    """Of logs."""
    logs: tuple[str, ...] = ()
    """Their names."""
    notes: tuple[str, ...] = ()
    nics_seen: tuple[str, ...] = ()
    """NICs whose rate no file says, in words."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """By field: where it is from."""

    def known(self, **more: str | None) -> Found:
        """With what is said and not None, which comes before what files say."""
        given = {name: value for name, value in more.items() if value is not None}
        return replace(self, sources={**self.sources, **dict.fromkeys(given, "as said")}, **given)  # type: ignore[arg-type]

    def filled(self) -> Found:
        """With what is usual for everything but the GPU.

        Raises:
            CpsimError: nothing says which GPU it is.
        """
        if self.gpu is None:
            raise CpsimError(
                f"init: which GPU? --gpu {'|'.join(gpus())}; further --gpus-per-node 8, "
                "--inside 'nvlink 450 GB/s', --nics '4 x 200G', --transport roce, or files of nvidia-smi topo -m, "
                "ibstat, nccl-tests"
            )
        usual = {name: value for name, value in usual_of(self.gpu).items() if getattr(self, name) is None}
        return replace(self, sources={**dict.fromkeys(usual, "usual"), **self.sources}, **usual)  # type: ignore[arg-type]


def usual_of(gpu: str | None) -> dict[str, str]:
    """What is taken of a GPU's machines where nobody says more."""
    known = gpu_of_driver(gpu or "")
    return {**USUAL, **({"gpus_per_node": str(known.gpus_per_node)} if known else {})}


def gpu_name(driver: str) -> str:
    """The name in cluster files of what a driver or person calls a GPU; the same where none is known."""
    known = gpu_of_driver(driver)
    return driver if known is None else known.name


def read_files(paths: Sequence[Path], said: Said) -> Found:
    """What files say of a cluster.

    Raises:
        ProfileError: one of them is none of these kinds, or broken.
    """
    found = Found()
    for path in paths:
        node = read_node(path)
        if isinstance(node, Nics):
            nics = f"{node.count} x {node.line_bytes_per_s * 8 / 1e9:g}G"
            found = _from(found, path, nics=nics, transport=node.transport)
            found = replace(found, notes=(*found.notes, *node.notes))
        elif node is not None:
            port = node.port_bytes_per_s(said.gpu or found.gpu or "")
            known = gpu_of_driver(said.gpu or found.gpu or "")
            pcie = known.host_link_bytes_per_s / 1e9 if known else 32
            inside = f"nvlink {port / 1e9:g} GB/s" if node.links else f"pcie {pcie:g} GB/s"
            inside += " nvls" if node.links and port >= SWITCHES_FROM else ""
            inside = MEASURED if port and known and known.nvlink_bytes_per_s == port else inside
            found = _from(found, path, gpus_per_node=str(node.num_gpus), inside=inside)
            if node.num_nics:
                rate = f"{path}: {node.num_nics} NICs, of unknown rate: add the output of ibstat, or --nics"
                found = replace(found, nics_seen=(*found.nics_seen, f"{rate} '{node.num_nics} x 400G'"))
            if not node.links:
                bridges = f"NV{node.bridged} between some pairs is left out; " if node.bridged else ""
                why = f"as the data sheet of {known.name} says" if known else "16 lanes of 4.0"
                note = f"{path}: {bridges}PCIe taken to be {pcie:g} GB/s, {why}; say --inside 'pcie 16 GB/s' of others"
                found = replace(found, notes=(*found.notes, note))
        else:
            found = _from_log(found, path, said)
    return found


def _from(found: Found, path: Path, **more: str) -> Found:
    return replace(found.known(**more), sources={**found.sources, **dict.fromkeys(more, path.name)})


def _from_log(found: Found, path: Path, said: Said) -> Found:
    log = read_nccl_log(path, said)
    of_nodes = [point for point in log.points if point["op"] == "fabric"]
    per_node = of_nodes[0]["gpus_per_node"] if of_nodes else log.header["num_gpus"]
    more = {"gpu": gpu_name(log.header["gpu"])}
    if found.gpus_per_node is None or of_nodes:
        more["gpus_per_node"] = str(per_node)
    notes = [f"{path}: {words}" for words in log.notes]
    return replace(
        _from(found, path, **more),
        points=(*found.points, *log.points),
        logs=(*found.logs, path.name),
        notes=(*found.notes, *notes),
    )


def described(found: Found, name: str) -> tuple[Cluster, list[str]]:
    """The cluster, and what else to know.

    Args:
        found: with everything filled in.
        name: of the cluster.

    Raises:
        CpsimError: answers that a cluster file cannot hold.
    """
    notes = [*found.notes, *(found.nics_seen if found.nics is None or found.nics.lower() == NONE else ())]
    cluster = cluster_from(short_fields(found, name))
    between = [p for p in found.points if p["op"] == "fabric" and "flows" not in p and p["nbytes"] >= SMALLEST_BYTES]
    if between and cluster.fabric is None:
        notes.append("logs of several nodes: say --nics, e.g. '8 x 400G', and they set the network between nodes")
    elif between:
        header = {"gpu": cluster.gpu.name, "files": list(found.logs), "date": ""}
        measured = Measurements(source=", ".join(found.logs), header=header, points=found.points)
        cluster = replace(cluster, fabric=fit_described([measured], cluster, port_of(cluster)))
        notes += [words for words in missing(found.points) if not words.startswith("no all_gather")]
    if any(p["op"] != "fabric" for p in found.points):
        notes.append("logs of one node make a profile's links: cpsim import, then cpsim fit --base")
    return cluster, notes


def short_fields(found: Found, name: str) -> dict[str, Any]:
    """What a cluster file says of these answers."""
    gpu = gpu_name(found.gpu or "")
    shipped = (cluster.profile for cluster in presets().values() if cluster.gpu.name == gpu)
    profile = found.profile or next(shipped, None) or "data-sheet"
    made: dict[str, Any] = {"name": name, "gpus_per_node": _whole(found.gpus_per_node), "gpu": gpu, "profile": profile}
    if found.inside and found.inside.lower() != MEASURED:
        made["inside"] = found.inside
    if found.nics and found.nics.lower() != NONE:
        made["fabric"] = {"nics": found.nics, "transport": (found.transport or USUAL["transport"]).lower()}
    return made


def _whole(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 8 else text


def as_file(found: Found, cluster: Cluster, command: str) -> str:
    """The cluster file, with comments.

    Args:
        found: what it follows from.
        cluster: as ``described`` makes it.
        command: that writes it.
    """
    short = short_fields(found, cluster.name)
    where = {name: f"  # {found.sources[name]}" if name in found.sources else "" for name in QUESTIONS}
    lines = [
        f"# Written by `{command}`. docs/cluster-files.md has all fields.",
        f"name: {_quoted(cluster.name)}",
        f"gpus_per_node: {cluster.gpus_per_node}{where['gpus_per_node']}",
        f"gpu: {_quoted(short['gpu'])}{where['gpu']}",
        f"profile: {_quoted(short['profile'])}  # whose kernels are taken",
    ]
    if cluster.inside is not None:
        lines += ["# one GPU's port in one direction; `nvls` where NVLink switches add", f"inside: {short['inside']}"]
        lines[-1] += where["inside"]
    else:
        gpu = cluster.gpu
        links = f"{'xgmi' if gpu.architecture in AMD else 'nvlink'} {gpu.port_bytes_per_s / 1e9:g} GB/s"
        link = links if gpu.nvlink_bytes_per_s else "pcie without p2p 16 GB/s"
        lines += ["# links inside a node are the profile's; others would be, e.g.:", f"# inside: {link}"]
    if cluster.fabric is None:
        lines += ["# one node; a network between nodes would be, e.g.:", "# fabric: {nics: 4 x 200G, transport: roce}"]
    else:
        lines += ["fabric:", *_fabric_lines(short["fabric"], cluster.fabric, where)]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A text as YAML reads it back."""
    return (
        text if re.fullmatch(r"[A-Za-z][\w./-]*", text) and text not in ("null", "true", "false") else json.dumps(text)
    )


def _fabric_lines(short: Mapping[str, str], fabric: Fabric, where: Mapping[str, str]) -> list[str]:
    """A fabric's lines: numbers that were measured, and defaults as comments."""
    lines = [f"  nics: {short['nics']}{where['nics']}", f"  transport: {fabric.transport}{where['transport']}"]
    measured = fabric.grade == "measured here"
    if not measured:
        lines.append("  # defaults, which you may state:")
    for name, words in FIELDS.items():
        value = getattr(fabric, name)
        if value is not None:
            lines.append(f"  {'' if measured else '# '}{name}: {value:.4g}  # {words}")
    if measured:
        lines += [f"  grade: {fabric.grade}", f"  source: {json.dumps(fabric.source)}"]
    return lines
