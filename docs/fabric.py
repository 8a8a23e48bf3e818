"""Writes the network of preset h200-2x2-sockets, and of the three pairs of H100 in validation/runs, from the committed
measurements of emulated nodes.

    torchrun --nproc-per-node 4 -m real.measure_network --emulate-nodes 2 --minutes 1.4 \
        --out cpsim/calibrate/data/h200x4-sockets.jsonl
    python docs/fabric.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from cpsim.calibrate.fabric import fit_fabric
from cpsim.calibrate.measurement import load

ROOT = Path(__file__).parent.parent
MEASURED = sorted((ROOT / "cpsim" / "calibrate" / "data").glob("h200x4-sockets*.jsonl"))
CLUSTERS = ROOT / "cpsim" / "data" / "clusters.json"
PRESET = "h200-2x2-sockets"
PAIRS = {
    "h100-2x1-sockets": "h100x2-sockets.jsonl", "h100-2x1-sockets-2": "h100x2-sockets-[234].jsonl",
    "h100-2x1-sockets-3": "h100x2-sockets-[56].jsonl",
}  # fmt: skip
"""Cluster files of `validation/runs`, and what was measured on that machine: sockets differ between machines."""


def with_fabric(text: str) -> str:
    """The file of presets with the fitted network of the preset."""
    made = fit_fabric([load(path) for path in MEASURED], sockets=True)
    fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if getattr(made, f.name) != f.default}
    before, rest = text.split(f'"name": "{PRESET}"', 1)
    head, rest = rest.split('"fabric": {', 1)
    tail = rest.split("\n   },", 1)[1]
    lines = ",\n".join(f'    "{name}": {json.dumps(value)}' for name, value in fields.items())
    return f'{before}"name": "{PRESET}"{head}"fabric": {{\n{lines}\n   }},{tail}'


def pair(path: Path, pattern: str) -> str:
    """The cluster file with the network fitted to measurements of its machine."""
    found = sorted(MEASURED[0].parent.glob(pattern))
    made = fit_fabric([load(file) for file in found], sockets=True)
    cluster = json.loads(path.read_text(encoding="utf-8")) | {"fabric": dataclasses.asdict(made)}
    return json.dumps(cluster, indent=1) + "\n"


if __name__ == "__main__":
    for name, pattern in PAIRS.items():
        file = ROOT / "validation" / "runs" / f"{name}.json"
        file.write_text(pair(file, pattern), encoding="utf-8")
    CLUSTERS.write_text(with_fabric(CLUSTERS.read_text(encoding="utf-8")), encoding="utf-8")
