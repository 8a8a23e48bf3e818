"""The Triton kernels of DCP's executor, on the GPU and on the host.

    torchrun --nproc-per-node 1 -m studies.dcp.measure --code dcp/dcp/ops/fused_ops.py --out dcp.jsonl

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
from torch import Tensor

from cpsim.calibrate.measurement import ROUNDS, Writer
from cpsim.real.measure.host import in_turns, write
from cpsim.real.measure.kernels import Bench
from cpsim.real.run.node import Node
from cpsim.real.run.timing import provenance

Call = Callable[[], object]
DIM, TILE, MERGE_TILE = 128, 128, 64
"""Of a head; elements that a program of a copy or sum has, and tokens that one of a merge has, in DCP's executor."""
BLOCKS = (1024, 2048, 4096)
"""Tokens of a block, as the benchmark tries them."""
COUNTS = (4, 16, 64, 256)
"""Blocks of one head that a call makes."""
STEPS = (("eager", "dcp_copy", "dcp_merge"), ("eager", "dcp_copy", "dcp_sum", "dcp_gradients"))
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


def sums(code: ModuleType, block: int, count: int, device: torch.device, parts: int = 2) -> tuple[Call, int]:
    """Gradients summed into the first of each: the call, and the bytes of the sums, read and written once.

    How many are added hardly tells: programs of `TILE` elements take as long as SMs take to start them.
    """
    size = block * DIM
    held = torch.zeros(count * parts, size, device=device, dtype=torch.bfloat16)
    ints = partial(numbers, device=device)
    pointer = ints([held.data_ptr()] * count, dtype=torch.int64)
    offsets, stride = ints([[i * parts + j for j in range(parts)] for i in range(count)]), ints([size] * count)
    first, same = ints([i * parts for i in range(count)]), ints([parts] * count)
    whole = pointer, offsets, stride, same, pointer, first, stride, ints([size] * count)
    call = partial(code.fused_blockwise_sum, *whole, torch.bfloat16, parts, size, TILE)
    return _keeping(call, held), 4 * count * size


def merge(code: ModuleType, block: int, count: int, device: torch.device) -> tuple[Call, int]:
    """Pairs of partial outputs merged into the first, with their log-sum-exps."""
    out = torch.zeros(2 * count, block, 1, DIM, device=device, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2 * count, block, device=device)
    ints, tokens = partial(numbers, device=device), 2 * count * block
    pairs = ints([[2 * i, 2 * i + 1] for i in range(count)])
    call = partial(
        code.flash_attn_update_out_lse,
        out,
        out,
        lse,
        lse,
        1,
        pairs,
        ints([2 * i * block for i in range(count)]),
        ints([block] * count),
        ints([2] * count),
        block,
        block * DIM,
        DIM,
        block,
        1,
        tokens,
        tokens,
        DIM,
        2,
        MERGE_TILE,
    )
    return call, 3 * count * block * (2 * DIM + 4)


def _keeping(call: Call, *tensors: Tensor) -> Call:
    """A call that keeps alive what it has pointers to."""

    def kept(_tensors: tuple[Tensor, ...] = tensors) -> object:
        return call()

    return kept


def measure_kernels(code: ModuleType, bench: Bench) -> None:
    """Seconds of all kernels over bytes."""
    makers = {"dcp_copy": copy, "dcp_gradients": gradients, "dcp_sum": sums, "dcp_merge": merge}
    for block, count, (kind, make) in product(BLOCKS, COUNTS, makers.items()):
        call, nbytes = make(code, block, count, bench.device)
        bench.point("elementwise", partial(bench.samples, call), kind=kind, nbytes=nbytes, block=block, blocks=count)
    for count in COUNTS:
        call, nbytes = sums(code, BLOCKS[0], count, bench.device, parts=4)
        bench.point(
            "elementwise",
            partial(bench.samples, call),
            kind="dcp_sum",
            nbytes=nbytes,
            block=BLOCKS[0],
            blocks=count,
            parts=4,
        )


def measure_host(code: ModuleType, node: Node, writer: Writer) -> None:
    """Wall seconds of calls in the steps of a pass."""
    device, wide = node.device, torch.zeros(512, 32, DIM, device=node.device)
    made: dict[str, Call] = {
        "eager": lambda: wide[256:].copy_(wide[:256]),
        "dcp_copy": copy(code, 1024, 8, device)[0],
        "dcp_merge": merge(code, 1024, 8, device)[0],
        "dcp_sum": sums(code, 1024, 8, device)[0],
        "dcp_gradients": gradients(code, 1024, 8, device)[0],
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
        header = provenance(node.device, 1, {"dcp": "942a2c7"}, "python -m studies.dcp.measure", args.commit)
        writer = Writer(file, header)
        measure_host(code, node, writer)
        measure_kernels(code, Bench(writer, node.device))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
