"""Writes docs/cluster-files.md: examples, and every field of cluster and profile files from the classes that read them.

python docs/cluster_files.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from cpsim.case.cluster import Cluster, Fabric, Fault, Gpu, load_cluster
from cpsim.case.transports import Inside, constants
from cpsim.models.attention.params import AttentionParams
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.gemm import GemmParams
from cpsim.models.host import HostParams
from cpsim.models.network.collective import CollectiveParams, Curve
from cpsim.models.network.interference import InterferenceParams
from cpsim.models.profile import LayerCosts, Profile
from cpsim.prediction.collectives import collectives
from cpsim.units import Quantity

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cluster-files.md"
CLUSTER = {"": Cluster, "gpu": Gpu, "inside": Inside, "fabric": Fabric, "faults": Fault}
"""Classes by where their fields stand in a file."""
PROFILE = {
    "": Profile,
    "attention": AttentionParams,
    "collective": CollectiveParams,
    "collective curves": Curve,
    "elementwise": ElementwiseParams,
    "host": HostParams,
    "interference": InterferenceParams,
    "layers": LayerCosts,
    "layers.gemm": GemmParams,
}
EXAMPLES = {
    "Eight H100 and four NICs of 200 Gbit/s": ("h100-4x200g", 64, "all_gather"),
    "Eight L40S on PCIe": ("l40s-pcie", 8, "all_gather"),
    "Racks of 72 GB200": ("gb200-nvl72", 144, "all_reduce"),
}
"""By title: file, GPUs and the collective that is shown."""


def documented(kind: type) -> dict[str, str]:
    """What the text behind each field of a class says, in one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(text, str):
            found[before.target.id] = " ".join(text.split())
    return found


def type_words(hint: Any) -> str:
    """A type as people write values of it."""
    if get_origin(hint) is Annotated:
        base, *more = get_args(hint)
        quantity = next((m for m in more if isinstance(m, Quantity)), None)
        limits = [m for m in more if isinstance(m, FieldInfo)]
        if quantity is not None:
            return quantity.unit or "number"
        return type_words(base) if not limits else f"{type_words(base)}"
    inner = [one for one in get_args(hint) if one is not type(None)]
    origin = get_origin(hint)
    if str(origin) in ("typing.Literal", "Literal") or "Literal" in str(origin):
        return ", ".join(f"`{one}`" for one in inner)
    if origin is not None and "Union" in str(origin):
        return " or ".join(dict.fromkeys(type_words(one) for one in inner))
    if origin is tuple:
        return "list"
    if origin is not None:
        return "mapping"
    if dataclasses.is_dataclass(hint):
        return "fields below"
    return {"bool": "`true` or `false`", "int": "whole number", "float": "number", "str": "text"}.get(
        getattr(hint, "__name__", ""), "mapping"
    )


def default_words(one: dataclasses.Field[Any]) -> str:
    """What holds where a field is left out."""
    if one.default is dataclasses.MISSING:
        return "required" if one.default_factory is dataclasses.MISSING else "empty"
    if one.default is None:
        return "none"
    if one.default in ((), ""):
        return "empty"
    return f"`{json.dumps(one.default)}`" if isinstance(one.default, bool | int | float | str) else "none"


FILLED = {
    "name": "the file's",
    "num_gpus": "one node",
    "nic_bandwidth_bytes_per_s": "of `nics`",
    "nics_per_node": "of `nics`",
    "flow_bandwidth_bytes_per_s": "a share of a NIC",
    "latency_s": "100 µs",
    "sigma_log": "the transport's",
    "flow_sigma_log": "the transport's",
    "grade": "`data sheet`",
    "source": "which defaults hold",
}
"""Defaults of cluster files that no class has."""


def rows(kind: type, before: str, filled: dict[str, str]) -> list[str]:
    """A table of a class."""
    told, hints = documented(kind), get_type_hints(kind, include_extras=True)
    lines = ["| field | value | default | meaning |", "| --- | --- | --- | --- |"]
    for one in dataclasses.fields(kind):
        name = f"{before}.{one.name}" if before and " " not in before else one.name
        default = default_words(one)
        default = filled.get(one.name, default) if default == "required" else default
        meaning = re.sub(r"``([^`]*)``", r"`\1`", told.get(one.name, "")).replace("|", "\\|")
        lines.append(f"| `{name}` | {type_words(hints[one.name])} | {default} | {meaning} |")
    return lines


def transports() -> list[str]:
    """A table of transports."""
    lines = [
        "| transport | share of line rate | collective's call | standard deviation | from |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, one in constants().transports.items():
        lines.append(
            f"| `{name}` | {one.share:.0%} | {one.call_s * 1e6:.0f} µs | ± {one.sigma_log:.0%} | {one.source} |"
        )
    lines += ["", "| link | share of a port, rings | standard deviation | from |", "| --- | --- | --- | --- |"]
    for name, link in constants().links.items():
        lines.append(f"| `{name}` | {link.ring_share:.0%} | ± {link.sigma_log:.0%} | {link.source} |")
    return lines


def example(title: str, name: str, gpus: int, kind: str) -> list[str]:
    """A file and what it means."""
    path = ROOT / "examples" / "clusters" / f"{name}.yaml"
    cluster = load_cluster(str(path)).with_gpus(gpus)
    answer = collectives(cluster, [kind], [2**24, 2**30])
    said = [
        f"{size.nbytes // 2**20:,} MiB in {size.time_s * 1e3:.2f} ms ({size.low_s * 1e3:.2f} to "
        f"{size.high_s * 1e3:.2f}), bus bandwidth {size.bus_bytes_per_s / 1e9:.1f} GB/s"
        for size in answer.sizes
    ]
    return [
        f"### {title}",
        "",
        f"`examples/clusters/{name}.yaml`:",
        "",
        "```yaml",
        path.read_text(encoding="utf-8").rstrip(),
        "```",
        "",
        f"`cpsim collectives --cluster examples/clusters/{name}.yaml --gpus {gpus} --kind {kind}`: {'; '.join(said)}.",
        "",
    ]


def page() -> str:
    """The page."""
    examples = "\n".join(line for title, one in EXAMPLES.items() for line in example(title, *one))
    parts = [HEAD.format(examples=examples)]
    parts += ["\n".join(transports()), CLUSTER_FIELDS]
    for before, kind in CLUSTER.items():
        title = f"### `{before}`" if before else "### The file"
        parts.append("\n".join([title, "", *rows(kind, before, FILLED if kind in (Cluster, Fabric) else {})]))
    parts.append(PROFILE_FIELDS)
    for before, kind in PROFILE.items():
        title = f"### `{before}`" if before else "### The profile"
        parts.append("\n".join([title, "", *rows(kind, before, {})]))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


HEAD = """# Cluster and profile files

Written by `python docs/cluster_files.py` from the code that reads these files.

A **cluster file** says which GPUs a machine has and what connects them; scenarios name it, `cluster: my-cluster.yaml`.
A **profile** holds what was measured of a GPU; `cpsim calibrate` and `cpsim fit` write it. `cpsim init cluster` writes
a cluster file from five answers, or from the output of `nvidia-smi topo -m`, `ibstat` and nccl-tests.

- Numbers are in bytes, seconds and FLOP/s, or carry their unit: `400 Gb/s` (bits), `50 GB/s` (bytes), `80 GiB`, `3 us`.
- Names of GPUs, links and transports may be in letters of any case. All problems of a file are listed at once.
- `nics: 4 x 200G`, at the top or under `fabric`, is enough for a network: `transport` is then `roce`, and the fabric's
  `source` lists every default that was taken. Several NICs of a GPU (`32 x 100G` for 8 GPUs) count as one.
- `inside: nvlink 450 GB/s nvls` says what connects the GPUs of a node: a link, one port's rate in one direction (half
  of what is advertised for both), and whether NVLink switches add. Without it the profile's own links hold.
- A profile `data-sheet` scales H200's kernels to a GPU that nobody measured; say what is `inside`, or its links stay.

## Examples

{examples}
## What a description is worth

Collectives of clusters that state a `transport`, or what is `inside`, go by NCCL's algorithms: ring, tree, NVLS,
SHARP. `python -m studies.collectives` leaves published clusters out one at a time. Intervals of 90 % are 1.645 times as
wide as the standard deviation shown.
"""
CLUSTER_FIELDS = """## Fields of a cluster file

*Required* fields have no default. Those of `gpu` are needed only where a GPU is described instead of named.
"""
PROFILE_FIELDS = """## Fields of a profile

A profile is JSON with `format: cpsim-profile` and a `schema`. A `base` names another profile whose parts hold where
this one has none. People read profiles, and rarely write them.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
