"""What ranges of keys cost in DCP's flash-attn 2: its kernels with two ranges for every query, and causal ones.

    sh studies/probes/fa2_ranges/build.sh FOLDER
    python -m studies.probes.ranged --library FOLDER/libranged.so --out ranged.jsonl

Sequences are DCP's: a block of queries of one head, and some blocks of keys. Under every mask with ranges; and once
with causal masking, which sees what the first mask does. Before that both are compared with attention in float64.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cpsim.calibrate.measurement import Writer
from cpsim.real.measure.kernels import Bench
from cpsim.real.run.timing import provenance

DIM = 128
SHAPES = tuple((block, keys, count) for block in (1024, 2048, 4096) for keys in (1, 2, 8) for count in (16, 64))
"""Queries of a sequence, blocks of as many keys that it has, and sequences."""
SINK, WINDOW = 64, 4096
"""Keys that all queries see, and last ones that every query sees, of `lambda`."""
MASKS = ("causal", "full", "lambda")
WORST = 1e-2
"""Difference of a result from float64, relative to its norm, at most."""


class Calls:
    """Sequences of one length, `[tokens, heads, 128]`, forward and backward."""

    def __init__(self, library: Path, heads: tuple[int, int], queries: int, keys: int, count: int) -> None:
        """
        Args:
            library: what `studies/probes/fa2_ranges/build.sh` makes.
            heads: of queries and of keys.
            queries, keys: of a sequence.
            count: sequences.
        """
        self.library, self.heads, self.lengths = ctypes.CDLL(str(library)), heads, (queries, keys)
        self.count, self.device = count, torch.device("cuda", 0)
        made = partial(torch.randn, device=self.device, dtype=torch.bfloat16)
        self.q, self.dout = (made(count * queries, heads[0], DIM) for _ in range(2))
        self.k, self.v = (made(count * keys, heads[1], DIM) for _ in range(2))
        self.ends = [torch.arange(count + 1, dtype=torch.int32, device=self.device) * n for n in self.lengths]
        self.out, self.dq = torch.empty_like(self.q), torch.empty_like(self.q)
        self.dk, self.dv = (torch.empty(count * keys, heads[0], DIM, device=self.device).bfloat16() for _ in range(2))
        empty = partial(torch.empty, device=self.device)
        rows = count * (queries + 128)
        self.lse, self.sums, self.wide = empty(heads[0], len(self.q)), empty(heads[0], rows), empty(rows, heads[0], DIM)

    def _call(self, name: str, tensors: list[Tensor], strided: list[Tensor], ranges: Tensor | None) -> None:
        strides = [stride for t in strided for stride in t.stride()[:2]]
        pointers = [*(t.data_ptr() for t in (*tensors, *self.ends)), None if ranges is None else ranges.data_ptr()]
        sizes = self.count, len(self.q), *self.lengths, *self.heads
        stream = torch.cuda.current_stream(self.device).cuda_stream
        status = getattr(self.library, name)(
            *map(ctypes.c_void_p, pointers),
            (ctypes.c_int64 * len(strides))(*strides),
            *sizes,
            ctypes.c_float(DIM**-0.5),
            0,
            ctypes.c_void_p(stream),
        )
        if status:
            raise RuntimeError(f"{name}: status {status}, see studies/probes/fa2_ranges/launcher.cu")

    def forward(self, ranges: Tensor | None) -> None:
        """`out` and `lse`; causal where there are no ranges."""
        strided = [self.q, self.k, self.v, self.out]
        self._call("ranged_forward", [*strided, self.lse], strided, ranges)

    def backward(self, ranges: Tensor | None) -> None:
        """`dq`, and `dk` and `dv` of every query head."""
        inputs, results = [self.q, self.k, self.v, self.out], [self.dq, self.dk, self.dv]
        tensors = [self.dout, *inputs, self.lse, *results, self.wide, self.sums]
        self._call("ranged_backward", tensors, [*inputs, self.dout, *results], ranges)


def ranges(mask: str, queries: int, keys: int, count: int, device: torch.device) -> Tensor:
    """First key and end of two ranges for every query, the last of the keys: `[2, 2, count * queries]`.

    A kernel reads up to 63 numbers behind them.
    """
    total = count * queries
    found = torch.zeros(4 * total + 64, dtype=torch.int32, device=device)[: 4 * total].view(2, 2, count, queries)
    position = torch.arange(queries, dtype=torch.int32, device=device) + keys - queries
    found[:, 1] = keys if mask == "full" else position + 1
    if mask == "lambda":
        found[0, 1] = (position + 1).clamp(max=SINK)
        found[1, 0] = (position + 1 - WINDOW).clamp(min=0)
    return found.view(2, 2, total)


def check(library: Path) -> None:
    """Raise where a result is off: 8 query heads on 2 of keys, and more keys than `lambda` shows."""
    queries, keys, heads = 1024, 6144, (8, 2)
    calls = Calls(library, heads, queries, keys, 1)
    position = torch.arange(queries, device=calls.device)[:, None] + keys - queries
    key = torch.arange(keys, device=calls.device)[None, :]
    seen = {
        "causal": key <= position,
        "full": key >= 0,
        "lambda": (key <= position) & ((key < SINK) | (key > position - WINDOW)),
    }
    for mask, ranged in [*((mask, True) for mask in MASKS), ("causal", False)]:
        given = ranges(mask, queries, keys, 1, calls.device) if ranged else None
        calls.forward(given)
        calls.backward(given)
        q, k, v = (t.double().requires_grad_() for t in (calls.q, calls.k, calls.v))
        of_head = [t.repeat_interleave(heads[0] // heads[1], 1).transpose(0, 1) for t in (k, v)]
        scores = q.transpose(0, 1) @ of_head[0].transpose(1, 2) * DIM**-0.5
        out = (scores.masked_fill(~seen[mask], -torch.inf).softmax(-1) @ of_head[1]).transpose(0, 1)
        wanted = out, *torch.autograd.grad(out, (q, k, v), calls.dout.double())
        summed = [t.view(keys, heads[1], -1, DIM).double().sum(2) for t in (calls.dk, calls.dv)]
        for name, x, y in zip(("out", "dq", "dk", "dv"), (calls.out, calls.dq, *summed), wanted, strict=True):
            error = float((x.double() - y.detach()).norm() / y.detach().norm())
            print(f"{mask}, ranges {ranged}: {name} off by {error:.1e}", flush=True)
            if not error < WORST:
                raise SystemExit("results are wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="libranged.so")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    started, device = time.monotonic(), torch.device("cuda", 0)
    check(args.library)
    with args.out.open("w", encoding="utf-8") as file:
        kernels = {"fa2_ranges": "chenyu-jiang/flash-attention at a786cd0"}
        writer = Writer(file, provenance(device, 1, kernels, "python -m studies.probes.ranged", args.commit))
        bench = Bench(writer, device)
        for block, blocks, count in SHAPES:
            keys = block * blocks
            calls = Calls(args.library, (1, 1), block, keys, count)
            for mask, ranged in [*((mask, True) for mask in MASKS), ("causal", False)]:
                given = ranges(mask, block, keys, count, device) if ranged else None
                point = {"mask": mask, "ranged": ranged, "block": block, "keys": keys, "sequences": count}
                for pass_, call in (("fwd", calls.forward), ("bwd", calls.backward)):
                    bench.point("ranged", partial(bench.samples, partial(call, given)), pass_=pass_, **point)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
