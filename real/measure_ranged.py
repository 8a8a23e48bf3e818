"""What ranges of keys cost in DCP's flash-attn 2: its kernels with two ranges for every query, and causal ones.

    python -m real.measure_ranged --library ranged --out ranged.jsonl

``--library`` is the folder that ``real/ranged/build.sh`` makes. Sequences are DCP's: a block of queries of one head,
and some blocks of keys. Under every mask with ranges; and once with causal masking, which sees what the first one does.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cpsim.calibrate.measurement import Writer
from real.measure_kernels import Bench
from real.timing import provenance

DIM = 128
SHAPES = tuple((block, keys, count) for block in (1024, 2048, 4096) for keys in (1, 2, 8) for count in (16, 64))
"""Queries of a sequence, blocks of as many keys that it has, and sequences."""
SINK, WINDOW = 64, 4096
"""Keys that all queries see, and last ones that every query sees, of `lambda`."""
MASKS = ("causal", "full", "lambda")


def load(folder: Path) -> ModuleType:
    """The library's Python functions."""
    spec = importlib.util.spec_from_file_location("ranged", folder / "ranged.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"--library: expected a folder with ranged.py, got {folder}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ranges(mask: str, block: int, keys: int, count: int, device: torch.device) -> Tensor:
    """First key and end of two ranges for every query, ``[2, 2, count * block]``; queries are the last of the keys."""
    made = torch.zeros(4 * count * block + 64, dtype=torch.int32, device=device)[: 4 * count * block]
    found = made.view(2, 2, count, block)
    position = torch.arange(block, dtype=torch.int32, device=device) + (keys - 1) * block
    found[:, 1] = keys * block if mask == "full" else position + 1
    if mask == "lambda":
        found[0, 1] = (position + 1).clamp(max=SINK)
        found[1, 0] = (position + 1 - WINDOW).clamp(min=0)
    return made.view(2, 2, count * block)


def measure(code: ModuleType, bench: Bench, block: int, keys: int, count: int) -> None:
    """Forward and backward of one shape under every mask, with ranges and without."""
    device, num_k = bench.device, keys * block
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    q, dout = (random(count * block, 1, DIM) for _ in range(2))
    k, v = (random(count * num_k, 1, DIM) for _ in range(2))
    cu_q, cu_k = (torch.arange(0, count + 1, dtype=torch.int32, device=device) * n for n in (block, num_k))
    whole = q, k, v
    for mask, ranged in [*((mask, True) for mask in MASKS), ("causal", False)]:
        how: dict[str, Any] = {"causal": not ranged}
        if ranged:
            how["attn_range"] = ranges(mask, block, keys, count, device)
        forward = partial(code.forward, *whole, cu_q, cu_k, block, num_k, **how)
        out, lse = forward()
        backward = partial(code.backward, dout, *whole, out, lse, cu_q, cu_k, block, num_k, **how)
        point = {"mask": mask, "ranged": ranged, "block": block, "keys": num_k, "sequences": count}
        bench.point("ranged", partial(bench.samples, forward), pass_="fwd", **point)
        bench.point("ranged", partial(bench.samples, backward), pass_="bwd", **point)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="folder with ranged.py and libranged.so")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    code, started, device = load(args.library), time.monotonic(), torch.device("cuda", 0)
    with args.out.open("w", encoding="utf-8") as file:
        kernels = {"fa2_ranges": "chenyu-jiang/flash-attention at a786cd0"}
        writer = Writer(file, provenance(device, 1, kernels, "python -m real.measure_ranged", args.commit))
        bench = Bench(writer, device)
        for block, keys, count in SHAPES:
            measure(code, bench, block, keys, count)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
