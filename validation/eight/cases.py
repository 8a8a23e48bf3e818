"""Writes the cases of one run on eight GPUs of one host: cases.jsonl, and the same machine as 2 x 4 and 4 x 2 nodes.

    python validation/eight/cases.py
    cpsim predict validation/eight/cases.jsonl --out validation/eight/predictions.jsonl   # before the run
    sh validation/eight/run.sh OUT                                                        # ten minutes at most

Cases come in groups that differ in strategy, knobs and implementation only. `--tokens 16 --folder DIR` makes them small
enough for eight processes on CPUs: `sh validation/eight/run.sh OUT DIR --cpu`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from cpsim.cluster import load_cluster

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from cases import (  # noqa: E402
    GATHER,
    GATHER_DOCUMENT,
    GATHER_ZIGZAG,
    HYBRID,
    RING,
    ULYSSES,
    USP,
    USP_BASIC,
    ZIGZAG,
    Case,
    each,
    lengths,
    text,
)

GPUS = 8
USP_4: Case = {"strategy": "usp", "knobs": {"ulysses": 4}}
LOONGTRAIN_2: Case = {"strategy": "loongtrain", "knobs": {"ulysses": 1, "inner_ring": 2}}
LOONGTRAIN_4: Case = {"strategy": "loongtrain", "knobs": {"ulysses": 1, "inner_ring": 4}}
LOONGTRAIN_HEADS: Case = {"strategy": "loongtrain", "knobs": {"ulysses": 2, "inner_ring": 2}}
NODES = (2, 4)


def problem(tokens_per_gpu: int, mask: str = "causal", cluster: str = "dgx-h200", **more: object) -> Case:
    """What to compute, without whom."""
    shape = {"tokens_per_gpu": tokens_per_gpu, "mask": mask, "heads": 32, "kv_heads": 8}
    return {"gpus": GPUS, "cluster": cluster, "kernel": "fa2", **shape, **more}


def one_machine(k: int) -> Iterator[Case]:
    """Eight GPUs on NVLink; a multiple of `k` tokens on each."""
    rings = (ULYSSES, RING, ZIGZAG, GATHER_ZIGZAG, USP, USP_4, LOONGTRAIN_2, LOONGTRAIN_4, LOONGTRAIN_HEADS)
    for tokens in (4, 8, 16, 32):
        yield from each(problem(tokens * k), rings)
    yield from each(problem(8 * k, "full"), (ULYSSES, RING, GATHER, USP_BASIC))
    for tokens in (8, 32):
        documents = problem(tokens * k, "causal_document", documents=lengths(GPUS, tokens * k))
        yield from each(documents, (ULYSSES, ZIGZAG, GATHER_DOCUMENT, USP, HYBRID))
    for tokens in (4, 8, 32):
        yield from each(problem(tokens * k), (ZIGZAG, RING, GATHER), "ring-flash-attn")
        yield from each(problem(tokens * k), (ULYSSES, USP), "yunchang")


def several_nodes(k: int, cluster: str) -> Iterator[Case]:
    """The same GPUs as nodes that sockets link."""
    ways = (ULYSSES, ZIGZAG, GATHER_ZIGZAG, USP, USP_4, LOONGTRAIN_2, LOONGTRAIN_4)
    yield from each(problem(8 * k, cluster=cluster), ways)
    yield from each(problem(8 * k, "causal_document", cluster, documents=lengths(GPUS, 8 * k)), (ZIGZAG, HYBRID))


def cluster_of(num_nodes: int) -> Case:
    """Nodes of one machine, linked as those of `h200-2x2-sockets` are."""
    fabric = load_cluster("h200-2x2-sockets").fabric
    assert fabric is not None
    each_node = GPUS // num_nodes
    values = ((f, getattr(fabric, f.name)) for f in dataclasses.fields(fabric))
    linked = {f.name: value for f, value in values if value != f.default}
    name = f"h200-{num_nodes}x{each_node}-sockets"
    return {"name": name, "gpus_per_node": each_node, "gpu": "h200", "profile": "h200", "fabric": linked,
            "notes": f"{num_nodes} emulated nodes of {each_node} GPUs in one machine"}  # fmt: skip


def files(k: int = 1024) -> dict[str, str]:
    """What the folder's files hold, by name."""
    made = {"cases.jsonl": text(one_machine(k))}
    for num_nodes in NODES:
        cluster = cluster_of(num_nodes)
        made[f"{cluster['name']}.json"] = json.dumps(cluster, indent=1) + "\n"
        made[f"nodes-{num_nodes}.jsonl"] = text(several_nodes(k, f"{cluster['name']}.json"))
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024, help="what sizes are multiples of")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    for name, content in files(args.tokens).items():
        (args.folder / name).write_text(content, encoding="utf-8")
