"""Writes the network of preset h200-2x2-sockets, and of every machine in data/runs whose own sockets were measured,
from the committed measurements of emulated nodes.

    torchrun --nproc-per-node 4 -m cpsim.real.measure.network --emulate-nodes 2 --minutes 1.4 \
        --out data/points/h200/h200x4-sockets.jsonl
    python docs/fabric.py
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from cpsim.calibrate.fabric import fit_fabric
from cpsim.calibrate.measurement import load
from cpsim.calibrate.recipes import DATA, runs_file
from cpsim.case.cluster import Fabric

ROOT = Path(__file__).parent.parent
CLUSTERS = ROOT / "cpsim" / "data" / "clusters.json"
MEASURED = sorted((DATA / "points").rglob("h200x4-sockets*.jsonl"))
PRESET = "h200-2x2-sockets"
MACHINES = {
    "h100-2x2-sockets": "h100x4-sockets-1.jsonl",
    "h100-2x1-sockets": "h100x2-sockets.jsonl",
    "h100-2x1-sockets-2": "h100x2-sockets-[234].jsonl",
    "h100-2x1-sockets-3": "h100x2-sockets-[56].jsonl",
    "h200-2x2-sockets-1122a": "h200x4-sockets-[12].jsonl",
    "h200-2x2-sockets-1122b": "h200x4-sockets-3.jsonl",
    "h200-2x2-sockets-1122d": "h200x4-sockets-[45].jsonl",
}
"""Cluster files of `data/runs`, and what was measured on that machine: sockets differ between machines."""


def network(files: Iterable[Path]) -> Fabric:
    """What is fitted to measurements."""
    return fit_fabric([load(path) for path in files], sockets=True)


def with_fabric(text: str) -> str:
    """The file of presets with the fitted network of the preset."""
    made = network(MEASURED)
    fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if getattr(made, f.name) != f.default}
    before, rest = text.split(f'"name": "{PRESET}"', 1)
    head, rest = rest.split('"fabric": {', 1)
    tail = rest.split("\n   },", 1)[1]
    lines = ",\n".join(f'    "{name}": {json.dumps(value)}' for name, value in fields.items())
    return f'{before}"name": "{PRESET}"{head}"fabric": {{\n{lines}\n   }},{tail}'


def of_machine(name: str) -> str:
    """A cluster file of `data/runs` with the network of its machine."""
    made = network(sorted((DATA / "points").rglob(MACHINES[name])))
    cluster = json.loads(runs_file(f"{name}.json").read_text(encoding="utf-8"))
    return json.dumps(cluster | {"fabric": made.to_dict()}, indent=1) + "\n"


if __name__ == "__main__":
    for name in MACHINES:
        runs_file(f"{name}.json").write_text(of_machine(name), encoding="utf-8")
    CLUSTERS.write_text(with_fabric(CLUSTERS.read_text(encoding="utf-8")), encoding="utf-8")
