"""What DCP's executor calls: its Triton kernels, on the GPU and on the host, and its all-to-all.

    torchrun --nproc-per-node 1 -m real.measure_dcp --code dcp/dcp/ops/fused_ops.py --out dcp.jsonl

``--code`` is a file of chenyu-jiang/dcp, at 942a2c7. Copies of blocks, merges of partial outputs, sums of gradients and
copies of fresh gradients of keys, in blocks of one head as its benchmark has them: seconds by bytes
(`op: elementwise`), and wall seconds of a call in steps as its executor makes them (`op: host`).
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cpsim.calibrate.measurement import ROUNDS, Writer
from real.measure_host import in_turns, write
from real.measure_kernels import Bench
from real.node import Node
from real.timing import provenance

Call = Callable[[], object]
DIM, TILE, MERGE_TILE = 128, 128, 64
"""Of a head; elements that a program of a copy or sum has, and tokens that one of a merge has, in DCP's executor."""
BLOCKS = (1024, 2048, 4096)
"""Tokens of a block, as the benchmark tries them."""
COUNTS = (4, 16, 64, 256)
"""Blocks of one head that a call makes."""
PARTS = (2, 4, 8)
"""Results that are merged or summed into one."""
STEPS = (
    ("eager", "dcp_copy", "dcp_all_to_all", "dcp_merge"),
    ("eager", "dcp_copy", "dcp_all_to_all", "dcp_sum", "dcp_gradients"),
)  # fmt: skip
"""A stage forward, and one backward."""


def load(path: Path) -> ModuleType:
    """DCP's kernels; Triton reads their source from the file."""
    spec = importlib.util.spec_from_file_location("dcp_fused_ops", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--code: expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(values: list[Any], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def copy(code: ModuleType, block: int, count: int, device: torch.device) -> tuple[Call, int]:
    """Blocks out of one buffer into another; the call, and bytes read and written."""
    size = block * DIM
    source, made = (torch.zeros(count, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    ints = partial(numbers, device=device)
    pointers = [ints([t.data_ptr()] * count, dtype=torch.int64) for t in (source, made)]
    offsets, strides = ints(list(range(count))), ints([size] * count)
    whole = pointers[0], offsets, strides, pointers[1], offsets, strides, ints([size] * count)
    return _keeping(partial(code.fused_copy_bf16_varlen, *whole, size, TILE), source, made), 4 * count * size


def gradients(code: ModuleType, block: int, count: int, device: torch.device) -> tuple[Call, int]:
    """Fresh gradients of keys and values set to zero, and copied where they are kept, as after a kernel's call."""
    fresh, kept = (torch.zeros(count, block, 2, 1, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    ints = partial(numbers, device=device)
    pointers = [ints([t[i].data_ptr() for i in range(count)], dtype=torch.int64) for t in (fresh, kept)]
    move = partial(code.fused_copy_bf16_varlen_dkv, *pointers, ints([block] * count), block, 2 * DIM, DIM)

    def call() -> None:
        fresh.zero_()
        move()

    return _keeping(call, kept), 3 * count * block * 2 * DIM * 2


def sums(code: ModuleType, block: int, count: int, parts: int, device: torch.device) -> tuple[Call, int]:
    """Gradients of some computations, of queries, summed into those of the first."""
    size = block * DIM
    held = torch.zeros(count * parts, size, device=device, dtype=torch.bfloat16)
    ints = partial(numbers, device=device)
    pointer = ints([held.data_ptr()] * count, dtype=torch.int64)
    offsets, stride = ints([[i * parts + j for j in range(parts)] for i in range(count)]), ints([size] * count)
    first, same = ints([i * parts for i in range(count)]), ints([parts] * count)
    whole = pointer, offsets, stride, same, pointer, first, stride, ints([size] * count)
    call = partial(code.fused_blockwise_sum, *whole, torch.bfloat16, parts, size, TILE)
    return _keeping(call, held), 2 * count * (parts + 1) * size


def merge(code: ModuleType, block: int, count: int, parts: int, device: torch.device) -> tuple[Call, int]:
    """Partial outputs merged into the first, with their log-sum-exps."""
    number = count * parts
    out = torch.zeros(number, block, 1, DIM, device=device, dtype=torch.bfloat16)
    lse = torch.zeros(1, number, block, device=device)
    ints = partial(numbers, device=device)
    table = ints([[i * parts + j for j in range(parts)] for i in range(count)])
    offsets = ints([i * parts * block for i in range(count)])
    call = partial(
        code.flash_attn_update_out_lse, out, out, lse, lse, 1, table, offsets, ints([block] * count),
        ints([parts] * count), block, block * DIM, DIM, block, 1, number * block, number * block, DIM, parts,
        MERGE_TILE,
    )  # fmt: skip
    return call, count * (parts + 1) * block * (2 * DIM + 4)


def all_to_all(device: torch.device) -> Call:
    """Parts of given sizes, and the wait for them, as its executor writes it."""
    size = 1024 * DIM
    sent, got = (torch.zeros(size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def call() -> None:
        dist.all_to_all_single(got, sent, [size], [size], async_op=True).wait()

    return call


def _keeping(call: Call, *tensors: Tensor) -> Call:
    """A call that keeps alive what it has pointers to."""

    def kept(_tensors: tuple[Tensor, ...] = tensors) -> object:
        return call()

    return kept


def measure_kernels(code: ModuleType, bench: Bench) -> None:
    """Seconds of all kernels over bytes."""
    device = bench.device
    for block, count in product(BLOCKS, COUNTS):
        jobs = [("dcp_copy", 1, partial(copy, code, block, count, device)),
                ("dcp_gradients", 1, partial(gradients, code, block, count, device))]  # fmt: skip
        jobs += [("dcp_sum", parts, partial(sums, code, block, count, parts, device)) for parts in PARTS]
        jobs += [("dcp_merge", parts, partial(merge, code, block, count, parts, device)) for parts in PARTS]
        for kind, parts, make in jobs:
            call, nbytes = make()
            bench.point(
                "elementwise", partial(bench.samples, call), kind=kind, nbytes=nbytes, block=block, blocks=count,
                parts=parts,
            )  # fmt: skip
            torch.cuda.empty_cache()


def measure_host(code: ModuleType, node: Node, writer: Writer) -> None:
    """Wall seconds of calls in the steps of a pass."""
    device, wide = node.device, torch.zeros(512, 32, DIM, device=node.device)
    made: dict[str, Call] = {
        "eager": lambda: wide[256:].copy_(wide[:256]),
        "dcp_copy": copy(code, 1024, 8, device)[0],
        "dcp_merge": merge(code, 1024, 8, 2, device)[0],
        "dcp_sum": sums(code, 1024, 8, 2, device)[0],
        "dcp_gradients": gradients(code, 1024, 8, device)[0],
        "dcp_all_to_all": all_to_all(device),
    }
    for call in [*made.values()] * 5:
        call()
    for step in STEPS:
        samples = [in_turns([made[name] for name in step] * ROUNDS, node) for _ in range(30)][10:]
        for i, name in enumerate(step):
            times = [t for mine in samples for t in mine[i :: len(step)]]
            write(writer, name, "copy_slice" if name == "eager" else "", "in steps", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=Path, required=True, help="DCP's dcp/ops/fused_ops.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    code, started = load(args.code), time.monotonic()
    with Node() as node, args.out.open("w", encoding="utf-8") as file:
        header = provenance(node.device, 1, {"dcp": "942a2c7"}, "python -m real.measure_dcp", args.commit)
        writer = Writer(file, header)
        measure_host(code, node, writer)
        measure_kernels(code, Bench(writer, node.device))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
