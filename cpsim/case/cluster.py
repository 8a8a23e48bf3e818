"""GPUs, nodes and the network between nodes. What happens inside a node comes from a measured profile."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, overload

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from cpsim.case.changes import TIMES, split_name, with_value
from cpsim.case.files import SCHEMA, explain_all, read_document, take_schema, together
from cpsim.case.gpu import Gpu, find_gpu, gpu_named, gpus
from cpsim.case.shorthand import filled, read_nics
from cpsim.case.transports import Inside, TransportName
from cpsim.errors import ScenarioError, nearest, shown
from cpsim.runtime.files import noted, while_unchanged
from cpsim.units import Flag, Quantity, Rate, Seconds

if TYPE_CHECKING:
    from cpsim.masks.slices import Whole

ACHIEVED: Final = 0.9
"""Of a network card's line rate where that alone is said: 45 of 50 GB/s, dgx-h100 (its ``source`` says where from)."""
_WORDS: Final = {
    "nics": "fabric.nics_per_node",
    "latency": "fabric.latency_s",
    "oversubscription": "fabric.oversubscription",
    "rails": "fabric.rails",
    "memory": "gpu.memory_bytes",
}
"""Short names of fields in changes."""
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network between nodes, as a program achieves it, headers and protocol included."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    nics_per_node: Count
    """The GPUs of a node are spread evenly over them."""
    nic_bandwidth_bytes_per_s: Rate
    """One NIC, one direction, while all NICs are busy: collectives."""
    flow_bandwidth_bytes_per_s: Rate
    """One point-to-point flow, one direction."""
    proxy_bandwidth_bytes_per_s: Rate | None = None
    """What one rank's thread copies of a stream's messages (transfers, all-to-alls), sent and received together, where
    the network is sockets. None where NICs read and write memory by themselves; messages then share the NICs like
    collectives."""
    latency_s: Annotated[float, Quantity("s", 0, 1)]
    """Latency of one message between nodes, the call's overhead included; seconds."""
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """A node's uplink carries nics_per_node * nic_bandwidth / oversubscription."""
    nodes_per_leaf: Count | None = None
    """Consecutive nodes under one leaf switch, or with ``rails`` under one for every NIC of a node; None: all."""
    spine_oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """A leaf's links to the spine carry what its NICs do, divided by this, in each direction."""
    rails: bool = False
    """Rail-optimised: the NICs of equal place share leaf switches, and NCCL hands what is for a GPU of another place
    to the GPU of that place on its own node (PXN)."""
    transport: TransportName | None = None
    """What the NICs speak. Collectives then go by NCCL's algorithms (``cpsim.models.network.nccl``); None: by rates and
    ``latency_s`` alone, as measured."""
    call_s: Seconds | None = None
    """What a collective takes beyond one inside a node, however few bytes; None: the transport's."""
    fill_s: Seconds | None = None
    """Filling a tree's pipeline, for every step of the tree; None: the transport's."""
    sharp: Flag = False
    """The network's switches add (InfiniBand SHARP); needs a transport."""
    sigma_log: Annotated[float, Quantity("", 1e-6, 3)]
    """Standard deviation of the logarithm of what collectives achieve: 0.1 is about 10 %."""
    flow_sigma_log: Annotated[float, Quantity("", 1e-6, 3)]
    """Standard deviation of the logarithm of the rate of point-to-point flows."""
    grade: Literal["measured here", "published", "data sheet"]
    """Where the numbers come from; predictions that rest on them say so."""
    source: Annotated[str, Field(min_length=1)]
    """Source of every number."""

    @property
    def uplink_bandwidth_bytes_per_s(self) -> float:
        """What all NICs of a node carry together in one direction."""
        return self.nics_per_node * self.nic_bandwidth_bytes_per_s / self.oversubscription

    def to_dict(self) -> dict[str, Any]:
        """Fields of a cluster file; what concerns transports where one is stated."""
        left_out = ("transport", "call_s", "fill_s", "sharp") if self.transport is None else ()
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A part that is slower than the others, as a what-if."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    part: Literal["gpu", "nvlink", "nic", "uplink"]
    """``gpu``: all its kernels; ``nvlink``: its port, ``nic`` and ``uplink`` (of a node) in both directions."""
    number: Annotated[int, Field(ge=0, le=10_000_000)]
    """Rank of the GPU; NICs are counted through all nodes; node of the uplink."""
    rate: Annotated[float, Field(gt=0, le=1)]
    """What is left of its speed."""

    def __str__(self) -> str:
        return f"{self.part} {self.number} at {self.rate:.0%}"


COPIED: Final = 0.872
"""Of the data sheet's PCIe, what pinned copies reach one way: 54.9 of 63.0 GB/s on an H200, and 47.0 each way where
both are busy (data/points/h200/host-link.json)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs; ranks fill one node after another."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Name
    """In answers and reports."""
    num_gpus: Count
    """GPUs in use: any part of one node, or whole nodes."""
    gpus_per_node: Count
    """GPUs of a node, or of an NVLink domain that spans hosts."""
    gpu: Gpu
    """In files a name, e.g. h100, or its fields."""
    fabric: Fabric | None = None
    """None where there is only one node."""
    inside: Inside | None = None
    """What connects the GPUs of a node, where that is another than the profile measured, e.g. `pcie 32 GB/s`; None: as
    the profile measured it."""
    profile: Name | None = None
    """Profile whose measurements describe this machine; None where nobody has measured it."""
    host: Annotated[float, Field(ge=0.1, le=10)] | Name | None = None
    """How much longer its hosts take to launch than the profile's, or a file of ``cpsim calibrate --host``."""
    host_link_bytes_per_s: Rate | None = None
    """Between a GPU and its host, each way; None is most of PCIe x16 of the GPU's data sheet, see ``host_link``."""
    notes: str = ""
    """For readers."""
    faults: tuple[Fault, ...] = ()
    """Slow parts, each with the share of its speed that is left, e.g. `[{part: nic, number: 7, rate: 0.5}]`."""
    copies: Annotated[int, Field(ge=1, le=1)] = 1
    """Replication factor of a folded cluster; always 1 in files."""

    def __post_init__(self) -> None:
        if self.num_gpus <= self.gpus_per_node:
            return
        if self.fabric is None:
            raise ScenarioError(
                f"gpus: {self.name} is one machine of {self.gpus_per_node} GPUs: expected at most "
                f"{self.gpus_per_node}, got {self.num_gpus}; choose a cluster with a fabric, e.g. dgx-h200"
            )
        if self.num_gpus % self.gpus_per_node:
            below = self.num_gpus // self.gpus_per_node * self.gpus_per_node
            raise ScenarioError(
                f"gpus: {self.name} has nodes of {self.gpus_per_node}: expected at most {self.gpus_per_node} "
                f"or a multiple of it, got {self.num_gpus}; use {below} or {below + self.gpus_per_node}"
            )

    @property
    def num_nodes(self) -> int:
        """Nodes in use; a part of a node counts as one."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def host_link(self) -> float:
        """Bytes per second each way between a GPU and its host: what the file says, or what copies reach of the GPU's
        PCIe."""
        return self.host_link_bytes_per_s or COPIED * self.gpu.host_link_bytes_per_s

    @overload
    def node_of(self, rank: int) -> int: ...
    @overload
    def node_of(self, rank: Whole) -> Whole: ...
    def node_of(self, rank: int | Whole) -> int | Whole:
        """Node of a rank, or of every rank of an array."""
        return rank // self.gpus_per_node

    @property
    def all_gpus(self) -> int:
        """GPUs in use, those that others stand for included."""
        return self.num_gpus * self.copies

    def can_fold(self, copies: int) -> bool:
        """Whether every ``copies`` consecutive GPUs are of one node and have equal shares of its NICs."""
        gpus, nics = self.gpus_per_node, self.fabric.nics_per_node if self.fabric else self.gpus_per_node
        if self.faults or (self.fabric and self.fabric.rails):
            return False
        if self.num_gpus % gpus or gpus % copies or (gpus % nics and nics % gpus):
            return False
        per_nic = max(1, gpus // nics)
        return per_nic % copies == 0 or copies % per_nic == 0

    def folded(self, copies: int) -> Cluster:
        """The cluster as it looks to one of every ``copies`` consecutive GPUs that all do the same at the same time.

        GPUs that share a link then have equal rates, so that each of n has an n-th of it to itself.
        """
        assert self.can_fold(copies)
        fabric, per_node = self.fabric, self.gpus_per_node // copies
        if fabric is not None:
            sharing = min(copies, max(1, self.gpus_per_node // fabric.nics_per_node))
            nics, rate = min(fabric.nics_per_node, per_node), fabric.nic_bandwidth_bytes_per_s / sharing
            wider = nics * rate * copies / (fabric.nics_per_node * fabric.nic_bandwidth_bytes_per_s)
            fabric = replace(
                fabric,
                nics_per_node=nics,
                nic_bandwidth_bytes_per_s=rate,
                oversubscription=max(1.0, fabric.oversubscription * wider),
                spine_oversubscription=max(1.0, fabric.spine_oversubscription * wider),
            )
        return replace(
            self, num_gpus=self.num_gpus // copies, gpus_per_node=per_node, fabric=fabric, copies=self.copies * copies
        )

    def with_gpus(self, num_gpus: int) -> Cluster:
        """This cluster with another number of GPUs in use.

        Raises:
            ScenarioError: they do not fill nodes, or a fault is not of a part in use.
        """
        cluster = replace(self, num_gpus=num_gpus)
        nics = self.fabric.nics_per_node if self.fabric else 0
        parts = {
            "gpu": num_gpus,
            "nvlink": num_gpus,
            "nic": nics * cluster.num_nodes,
            "uplink": cluster.num_nodes if nics else 0,
        }
        for fault in self.faults:
            if fault.number >= parts[fault.part]:
                raise ScenarioError(
                    f"faults: expected the number of one of the {parts[fault.part]} of kind {fault.part} that "
                    f"{num_gpus} GPUs of {self.name} use, counted from 0, got {fault.number}; leave it out"
                )
        return cluster

    def to_dict(self) -> dict[str, Any]:
        """Fields of a cluster file."""
        fields = {"schema": SCHEMA, **asdict(self), "faults": [asdict(fault) for fault in self.faults]}
        fields |= {"gpu": self.gpu.to_dict(), "fabric": self.fabric.to_dict() if self.fabric else None}
        left_out = {"copies", *(name for name in ("faults", "inside") if not fields[name])}
        return {name: value for name, value in fields.items() if name not in left_out}


@cache
def presets() -> dict[str, Cluster]:
    """The shipped clusters by name, each with one node in use."""
    shipped = json.loads(Path(__file__).parent.with_name("data").joinpath("clusters.json").read_text(encoding="utf-8"))
    clusters = (_cluster(_with_known_gpu(filled(entry, []))) for entry in shipped["clusters"])
    return {cluster.name: cluster for cluster in clusters}


@while_unchanged
def load_cluster(name_or_path: str) -> Cluster:
    """A preset by name, one node of a GPU by the GPU's, or a cluster file (YAML or JSON) by path.

    Behind any of these may stand what is changed of it, e.g. ``dgx-h100 nic=2x``; see ``cpsim.case.changes``. One node
    is in use unless a file says more. A file holds the fields of ``Cluster``; its ``gpu`` may be the name of a GPU,
    e.g. ``h200``, and files of a profile and a host are looked up beside it. Letters of names may have any case.

    Raises:
        ScenarioError: neither a preset, nor a GPU, nor a valid file.
    """
    path = noted(Path(name_or_path))
    if (known := presets().get(name_or_path.lower())) is not None:
        return known
    if not os.path.isfile(path):
        base, changes = split_name(name_or_path)
        if changes:
            return _with_changes(load_cluster(base), changes)
        if (gpu := find_gpu(name_or_path)) is not None:
            return node_of_gpus(gpu)
        close = nearest(name_or_path, (*presets(), *gpus()))
        hint = f"{close}; " if close.startswith("did") else ""
        raise ScenarioError(
            f"cluster: {shown(name_or_path)} is neither a preset, nor a GPU, nor a file; {hint}presets are "
            f"{', '.join(presets())}; GPUs {', '.join(gpus())}"
        )
    try:
        if isinstance(fields := read_document(path), list):
            raise ScenarioError(f"expected one cluster, got a list of {len(fields)}")
        cluster = cluster_from({"name": path.stem} | fields if isinstance(fields, dict) else fields)
    except ScenarioError as error:
        raise ScenarioError(f"cluster: {path}: {error}") from None
    for field in ("profile", "host"):
        if isinstance(name := getattr(cluster, field), str) and os.path.isfile(beside := noted(path.parent / name)):
            cluster = replace(cluster, **{field: str(beside)})  # type: ignore[arg-type]
    return cluster


def cluster_from(fields: dict[str, Any]) -> Cluster:
    """A cluster of the fields of a file.

    Raises:
        ScenarioError: they are not those of a cluster; says everything that is wrong.
    """
    problems: list[str] = []
    data = filled(take_schema(fields, "cluster"), problems)
    try:
        data = _with_known_gpu(data)
    except ScenarioError as error:
        problems.append(str(error))
        data = data | {"gpu": next(iter(presets().values())).gpu.to_dict()}  # so that the rest is checked, too
    try:
        cluster = _validated(data)
    except ValidationError as error:
        problems += _explained(error)
    if problems:
        raise ScenarioError(together(problems))
    return cluster


def with_transport(cluster: Cluster, transport: str) -> Cluster:
    """A cluster whose network is of a transport.

    Raises:
        ScenarioError: there is no such transport, or no network.
    """
    if cluster.fabric is None:
        raise ScenarioError(
            f"transport: {cluster.name} has no network between nodes; say its NICs, e.g. nics: 4 x 200G"
        )
    fabric = cluster.fabric.to_dict() | {"transport": transport.lower()}
    return _cluster(take_schema(cluster.to_dict(), "cluster") | {"fabric": fabric})


def node_of_gpus(gpu: Gpu) -> Cluster:
    """One node of a GPU as it is sold, without a network between nodes."""
    count = gpu.gpus_per_node
    notes = f"one node of {count} {gpu.name}: {'NVLink' if gpu.nvlink_bytes_per_s else 'PCIe'} inside"
    return Cluster(name=gpu.name, num_gpus=count, gpus_per_node=count, gpu=gpu, profile=gpu.name, notes=notes)


OF_POWER: Final = ("power_w", "num_sms", "boost_clock_hz", "peak_flops_per_s")
UNSAID: Final = {"sustained_flops_per_s": None, "fp8_flops_per_s": None, "fp4_flops_per_s": None}
"""What does not hold of a known GPU where one of OF_POWER is another."""


def _with_known_gpu(data: dict[str, Any]) -> dict[str, Any]:
    """Fields of a cluster with those of a known GPU, where its name or some of its fields are given."""
    match data.get("gpu"):
        case str(name):
            return data | {"gpu": gpu_named(name).to_dict()}
        case {"name": str(name), **said} if (known := find_gpu(name)) is not None:
            fields = known.to_dict()
            other = any(field in said and said[field] != fields.get(field) for field in OF_POWER)
            return data | {"gpu": fields | (UNSAID if other else {}) | {"name": name, **said}}
    return data


def _cluster(data: dict[str, Any]) -> Cluster:
    try:
        return _validated(data)
    except ValidationError as error:
        raise ScenarioError(together(_explained(error))) from None


def _explained(error: ValidationError) -> list[str]:
    return explain_all(error, [field.name for field in fields(Cluster)])


def _validated(data: dict[str, Any]) -> Cluster:
    if "num_gpus" not in data:
        per_node = data.get("gpus_per_node")
        data = data | {"num_gpus": per_node if type(per_node) is int and per_node > 0 else 1}
    return _adapter().validate_json(json.dumps(data, default=str))


@cache
def _adapter() -> TypeAdapter[Cluster]:
    return TypeAdapter(Cluster)


def _with_changes(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    """A cluster with other values.

    Raises:
        ScenarioError: there is no such field, or no such value.
    """
    for change in changes:
        field, _, value = change.partition("=")
        cluster = _with_nics(cluster, value) if field == "nic" else _with_field(cluster, field, value)
    return cluster


def _with_field(cluster: Cluster, field: str, value: str) -> Cluster:
    """One field changed, which may be one of the GPU or the network."""
    parts = {"fabric": [one.name for one in fields(Fabric)], "gpu": [one.name for one in fields(Gpu)]}
    plain = [one.name for one in fields(Cluster) if one.name not in ("copies", "num_gpus", *parts)]
    known = [*_WORDS, "nic", *plain, *(f"{part}.{name}" for part, names in parts.items() for name in names)]
    if field not in known:
        raise ScenarioError(f"set: cluster.{field} is unknown; {nearest(field, known)}")
    path = _WORDS.get(field, field).split(".")
    if path[0] == "fabric":
        _check_fabric(cluster, field)
    changed = with_value(cluster.to_dict(), path, value, f"cluster.{field}")
    return _cluster({name: entry for name, entry in changed.items() if name != "schema"})


def _check_fabric(cluster: Cluster, field: str) -> Fabric:
    if cluster.fabric is None:
        raise ScenarioError(f"set: cluster.{field}: {cluster.name} is one machine without a network; choose another")
    return cluster.fabric


def _with_nics(cluster: Cluster, value: str) -> Cluster:
    """Another rate of network cards, and number of them."""
    fabric = _check_fabric(cluster, "nic")
    if times := TIMES.fullmatch(value):
        many = float(times[1])
        faster = replace(
            fabric,
            nic_bandwidth_bytes_per_s=fabric.nic_bandwidth_bytes_per_s * many,
            flow_bandwidth_bytes_per_s=fabric.flow_bandwidth_bytes_per_s * many,
            source=f"{many:g} times the rates of: {fabric.source}",
        )
        return replace(cluster, fabric=faster)
    try:
        count, line = read_nics(value if "x" in value.lower() else f"{fabric.nics_per_node} x {value}")
    except ScenarioError:
        raise ScenarioError(f"set: cluster.nic: expected 2x, 200G or 4x200G, got {shown(value)}") from None
    rate = ACHIEVED * line
    said = replace(
        fabric,
        nics_per_node=count,
        nic_bandwidth_bytes_per_s=rate,
        flow_bandwidth_bytes_per_s=min(rate, fabric.flow_bandwidth_bytes_per_s),
        sigma_log=max(fabric.sigma_log, 0.2),
        grade="data sheet",
        source=f"{value} a node as was said, {ACHIEVED:.0%} of it achieved; the rest as {cluster.name}",
    )
    return replace(cluster, fabric=said)


def described(cluster: Cluster) -> str:
    """A cluster in a line."""
    gpu, fabric = cluster.gpu, cluster.fabric
    node = f"{cluster.gpus_per_node} {gpu.name} of {gpu.memory_bytes / 1e9:.0f} GB a node"
    if fabric is None:
        return node
    return f"{node}, {fabric.nics_per_node} NICs of {fabric.nic_bandwidth_bytes_per_s / 1e9:.3g} GB/s ({fabric.grade})"
