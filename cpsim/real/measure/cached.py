"""Measures memory-bound kernels on one GPU that find in the L2 cache what they work on, or part of it.

    python -m cpsim.real.measure.cached --out h200-cached.jsonl

The executor's kernels take turns over so few sets of tensors that some or all of them are still in the cache; `reused`
says how many bytes are touched from one use of a byte to the next, that use included. Besides samples between two
events, as of other kernels, every point has the mean of many calls in a row, `stream_s` of a stream and `graph_s` of a
CUDA graph: less a kernel's launch, that is how long it takes among others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cpsim.calibrate.measurement import Writer
from cpsim.real.measure.executor import DIM, HEADS, memory_bound, moved_bytes
from cpsim.real.run.timing import command_line, hold, provenance, time_ops

TOUCHED = {"copy": 4, "accumulate": 6, "merge": 6}
"""Bytes of memory that a kernel touches for every element."""
TOKENS = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
SETS = (1, 2, 4, 8, 16)
LARGEST = 4e8
FEW_SIZES = tuple(product(("copy", "merge"), (1024, 2048, 4096), (1, 2, 4)))
"""Kind, tokens and sets of few points, for a calibration of minutes."""
ROUNDS, LEAD_S = 8, 4e-3
FEW, MANY = 8, 40


def parameters(kind: str, tokens: int, num_sets: int) -> dict[str, Any]:
    """What a point measures: kind, bytes read and written, and bytes touched from one use of a byte to its next."""
    reused = num_sets * tokens * HEADS * DIM * TOUCHED[kind]
    return {"kind": kind, "nbytes": moved_bytes(kind, tokens), "reused": reused}


def measure(writer: Writer, kind: str, tokens: int, num_sets: int, device: torch.device) -> None:
    """Samples of one kernel in turns over so many sets, between two events; and of many in a row."""
    op, _ = memory_bound(kind, tokens, device, num_sets)
    for _ in range(num_sets):
        op()
    hold(LEAD_S, device)
    samples = time_ops(op, 20, device)
    rows = {f"{name}_s": in_a_row(op, device, captured=name == "graph") for name in ("stream", "graph")}
    writer.add("cached", samples, **parameters(kind, tokens, num_sets), **rows)


def repeat(op: Callable[[], object], num: int) -> None:
    """So many calls, one after the other."""
    for _ in range(num):
        op()


def in_a_row(op: Callable[[], object], device: torch.device, *, captured: bool) -> float:
    """Seconds of one of many calls in a stream or in a graph: what more of them take longer."""
    times = {}
    for num in (FEW, MANY):
        launch: Callable[[], None] = partial(repeat, op, num)
        if captured and device.type == "cuda":
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
            launch = graph.replay
        samples = []
        for _ in range(ROUNDS):
            hold(LEAD_S, device)
            samples += time_ops(launch, 1, device)
        times[num] = median(samples[1:])
    return (times[MANY] - times[FEW]) / (MANY - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cuda = device.type == "cuda"
    with args.out.open("w", encoding="utf-8") as file:
        header = provenance(device, 1, {}, command_line("python -m cpsim.real.measure.cached"), args.commit)
        writer = Writer(file, header | {"kernels": {"executor": header["commit"]}})
        for kind in TOUCHED:
            for tokens, num_sets in product(TOKENS if cuda else (16, 32), SETS):
                if parameters(kind, tokens, num_sets)["reused"] <= LARGEST:
                    measure(writer, kind, tokens, num_sets, device)
            print(f"{kind} done", flush=True)


if __name__ == "__main__":
    main()
