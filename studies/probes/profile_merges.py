"""Which merges of ring-flash-attn TorchScript fuses, rank by rank of a zigzag ring, on one GPU.

    python -m studies.probes.profile_merges --out data/points/h200/merges.jsonl

A rank of R merges one output of all its rows after the other and then those of its tails. TorchScript compiles the
merge for the layouts that it meets first. So every rank is run anew: in calls of one shape, as in training, and in
calls each of which has another shape, as in benchmarks of documents. Kernels are counted by the profiler.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cpsim.real.others.autograd import forget_compiled
from cpsim.real.others.ring_flash import package
from cpsim.real.run.timing import command_line, packages, provenance

RINGS = (2, 4, 16)
SHAPES = ((6, 1344), (14, 524), (1, 6912), (4, 1640), (3, 1972), (9, 756))
"""Documents and tokens of each."""
HEADS, DIM = 4, 128
WARM_UP = 5


def merges(rank: int, ring: int, documents: int, tokens: int, device: torch.device) -> None:
    """All merges of a rank of a zigzag ring in one forward pass, of zeros."""
    update, out, lse = package().utils.update_out_and_lse, None, None
    for step in range(ring):
        rows, part = (tokens, None) if step <= rank else (tokens // 2, (slice(None), slice(tokens // 2, None)))
        block = torch.zeros(documents, rows, HEADS, DIM, device=device, dtype=torch.bfloat16)
        block_lse = torch.zeros(documents, HEADS, rows, device=device)
        out, lse = update(out, lse, block, block_lse, slice_=part)


def fused(rank: int, ring: int, documents: int, tokens: int, device: torch.device) -> int:
    """Fused merges of a call after some alike."""
    with torch.no_grad():
        for _ in range(WARM_UP):
            merges(rank, ring, documents, tokens, device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            merges(rank, ring, documents, tokens, device)
            torch.cuda.synchronize()
    kernels = (e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return sum("fused" in e.name for e in kernels)


def rows(device: torch.device) -> list[dict[str, Any]]:
    """Of every ring and rank, the fused merges of each call: one shape again and again, then all shapes in turn."""
    found = []
    for ring in RINGS:
        for rank in range(ring):
            for changing in (False, True):
                forget_compiled(package().utils._update_out_and_lse)
                calls = SHAPES if changing else SHAPES[:1] * 2
                counts = [fused(rank, ring, *shape, device) for shape in calls]
                found.append({"ring": ring, "rank": rank, "changing": changing, "merges": ring - 1, "fused": counts})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    device = torch.device("cuda")
    header = provenance(device, 1, packages(), command_line("python -m studies.probes.profile_merges"), args.commit)
    found = rows(device)
    for row in found:
        print(row)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in (header, *found)), encoding="utf-8")


if __name__ == "__main__":
    main()
