"""Measures what the executor adds to kernels and NCCL: launch times of its ops on the host, its memory-bound kernels.

    torchrun --nproc-per-node 4 -m real.measure_executor --out h200x4-executor.jsonl

Launch times: tiny cases of every strategy, so that the GPU is never behind; the time between two launches of one
program, by kind of op, waits for other streams and events included. Memory-bound kernels: random sizes on one GPU,
bytes counted as schedules count them. No time of a whole run is kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cpsim.calibrate.measurement import Writer
from cpsim.errors import InfeasibleError
from cpsim.scenario import scenario_from
from cpsim.schedule import Kind
from real import attention, elementwise
from real.check_executor import CASES
from real.implementations.cpsim import make
from real.node import Node
from real.timing import hold, provenance, soak, time_ops

KERNELS = ("fa2", "fa4", "cudnn", "sdpa_flash")
ITERATIONS = 30
MEMORY_BOUND = ("copy", "copy_heads", "accumulate", "accumulate_first", "merge", "merge_first", "merge_last")
HEADS, DIM = 32, 128


def launch_times(node: Node, kernels: tuple[str, ...]) -> dict[str, list[float]]:
    """Seconds of this rank's host per launch, by kind as measurement files name it."""
    found: dict[str, list[float]] = {}
    for kernel in kernels:
        for strategy, knobs in CASES:
            for pass_ in ("fwd", "bwd"):
                scenario = scenario_from({
                    "strategy": strategy, "knobs": knobs, "gpus": node.size, "cluster": "h200-4",
                    "tokens": 256 * node.size, "mask": "causal", "heads": 16, "kv_heads": 4, "head_dim": 128,
                    "kernel": kernel, "pass": pass_,
                })  # fmt: skip
                try:
                    program = make(scenario, pass_, node).executor.program  # type: ignore[arg-type]
                except InfeasibleError:
                    continue
                for i in range(ITERATIONS + 5):
                    node.synchronize()
                    node.gather(None)
                    marks: list[float] = [time.perf_counter()]
                    program.run(marks)
                    if i >= 5:
                        for kind, seconds in zip(program.kinds, np.diff(marks).tolist(), strict=True):
                            found.setdefault(_host_kind(kind, kernel), []).append(seconds)
    return found


def _host_kind(kind: Kind, kernel: str) -> str:
    passes = {Kind.ATTENTION: "fwd", Kind.ATTENTION_BACKWARD: "bwd"}
    return f"{kernel}_{passes[kind]}_executor" if kind in passes else kind.name.lower()


def memory_bound(kind: str, tokens: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """The op on so many tokens, and its bytes read and written; inputs rotate past the cache."""
    row, itemsize = HEADS * DIM, 2
    num_sets = int(np.clip(np.ceil(240e6 / (tokens * row * 8)), 1, 16))
    # memory of each set: [bf16 rows | bf16 rows | fp32 rows], offsets in heads of either type
    per_set = tokens * HEADS * 4
    memory = torch.randn(num_sets * per_set * DIM * itemsize // 4, device=device).view(torch.bfloat16)
    narrow, wide = memory.view(-1, DIM), memory.view(torch.float32).view(-1, DIM)
    steps = np.arange(tokens) * HEADS

    def table(offset: int) -> torch.Tensor:
        return torch.from_numpy((steps + offset).astype(np.int32)).to(device)

    lse = [torch.randn(HEADS, tokens, device=device) for _ in range(2)]
    column = torch.arange(tokens, dtype=torch.int32, device=device)
    ops: list[Callable[[], object]] = []
    for i in range(num_sets):
        first, second = table(i * per_set), table(i * per_set + tokens * HEADS)
        acc = table(i * per_set // 2 + tokens * HEADS)
        if kind.startswith("merge"):
            old = (second, None) if kind == "merge_first" else (None, acc)
            target = (second, None) if kind == "merge_last" else (None, acc)
            merge = elementwise.Merge(
                num_heads=HEADS, part=first, part_column=column, old=old, target=target, column=column
            )
            ops.append(lambda t=merge: elementwise.merge_rows(narrow, wide, *lse, t))
            continue
        width, source, target_rows = HEADS, first, second
        if kind == "copy_heads":  # as around an all-to-all: 4 ranks' heads of a token go to 4 places
            width = HEADS // 4
            pieces = np.arange(4)
            source = _spread(steps[:, None] + pieces * width, i * per_set, device)
            target_rows = _spread((pieces * tokens + np.arange(tokens)[:, None]) * width, i * per_set, device)
            target_rows += tokens * HEADS
        wide_target = kind.startswith("accumulate")
        tables = elementwise.Sum(
            width=width, source=source[None], source_wide=False, old=(None, acc if kind == "accumulate" else None),
            target=(None, acc) if wide_target else (target_rows, None),
        )  # fmt: skip
        ops.append(lambda t=tables: elementwise.sum_rows(narrow, wide, t))
    turn = iter(range(10**9))
    per_element = {"copy": 4, "copy_heads": 4, "accumulate": 10, "accumulate_first": 6, "merge": 10, "merge_first": 8,
                   "merge_last": 8}[kind]  # fmt: skip
    nbytes = tokens * row * per_element + (tokens * HEADS * 12 if kind.startswith("merge") else 0)
    return lambda: ops[next(turn) % num_sets](), nbytes


def _spread(offsets: np.ndarray, base: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy((offsets.ravel() + base).astype(np.int32)).to(device)


def measure_memory_bound(node: Node, writer: Writer, num: int) -> None:
    """Every kind at random sizes, the queue kept full."""
    rng = np.random.default_rng(1)
    for kind in MEMORY_BOUND:
        for _ in range(num):
            tokens = int(np.exp(rng.uniform(np.log(64), np.log(65536 if node.cuda else 256))))
            op, nbytes = memory_bound(kind, tokens, node.device)
            op()
            soak(op, 0.01 if node.cuda else 1e-4, 2e-5)
            hold(2e-3, node.device)
            samples = time_ops(op, 16 if node.cuda else 2, node.device)
            name = kind.split("_")[0]
            writer.add("elementwise", samples, kind=name, nbytes=nbytes, variant=kind, kernel="executor")


def graph_times(node: Node) -> dict[str, list[float]]:
    """Seconds from a graph's launch to its end, for chains of tiny kernels: on one stream, and across two.

    The GPU is idle at the launch, as at the start of a synced iteration.
    """
    found: dict[str, list[float]] = {}
    if not node.cuda:
        return found
    op, _ = memory_bound("copy", 64, node.device)
    side, events = torch.cuda.Stream(), [torch.cuda.Event() for _ in range(2)]

    def across() -> None:
        main = torch.cuda.current_stream()
        events[0].record(main)
        side.wait_event(events[0])
        with torch.cuda.stream(side):
            op()
        events[1].record(side)
        main.wait_event(events[1])

    for name, call in (("chain", op), ("across", across)):
        for length in (1, 4, 16, 64, 256):
            call()
            node.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(length):
                    call()
            samples = []
            for _ in range(25):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                node.synchronize()
                start.record()
                graph.replay()
                end.record()
                node.synchronize()
                samples.append(start.elapsed_time(end) / 1e3)
            found[f"graph_{name}_{length}"] = samples[5:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, default=14, help="sizes of every memory-bound kernel")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    with Node() as node:
        kernels = KERNELS if node.cuda else ("fa2",)
        versions = {k: attention.kernel_version(k) for k in kernels} if node.cuda else {}
        header = provenance(node.device, node.size, versions, "torchrun -m real.measure_executor", args.commit)
        times = node.gather(launch_times(node, kernels) | graph_times(node))
        if node.rank == 0:
            writer = Writer(args.out.open("w", encoding="utf-8"), header)
            for kind in sorted({kind for mine in times for kind in mine}):
                for rank, mine in enumerate(times):
                    samples = mine.get(kind, [])
                    if samples:
                        writer.add("host", samples[:: max(1, len(samples) // 200)], kind=kind, rank=rank)
                print(f"{kind:24s} {np.median(np.concatenate([t.get(kind, []) for t in times])) * 1e6:7.1f} us")
            measure_memory_bound(node, writer, args.sizes)
        node.gather(None)


if __name__ == "__main__":
    main()
