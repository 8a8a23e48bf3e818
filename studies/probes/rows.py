"""What moves rows takes: gathers, scatters and their kin by length of rows, type of index and order, on one GPU.

    python -m studies.probes.rows --out data/points/h200/h200-rows.jsonl
    python -m studies.probes.rows --show data/points/h200/h200-rows.jsonl

PyTorch's ``gather`` and ``scatter_`` are called as LongCA-bench calls them, with an index of rows that is expanded to
every element. From PyTorch 2.8 on such gathers copy whole rows, if these lie at multiples of 16 bytes;
``gather by element`` gathers from rows that lie 2 bytes further on, as older versions always do. Where Transformer
Engine is installed, kernels of its ring are measured, too, on the tensors of LongCA-bench's ring: 8,192 tokens a GPU,
64 query and 8 key-value heads of dimension 128. Bytes are those that are read and written, without indices.

What an H200 does: gathers of whole rows, ``index_select`` and ``x[i]`` among them, move 1.6 rows a nanosecond, or
3.6 TB/s from about 1 KiB a row on; what moves elements does 1.4 TB/s (scatters, old gathers, ``index_copy_``), 0.9
(``x[i] = y``) or 0.7 (``index_add_``), down to rows of 128 bytes; neither order nor type of the index matters.
Transformer Engine's kernels run at 2.7 to 3.8 TB/s. So cpsim prices gathers of rows as copies and whatever moves
elements as a kind of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from cpsim.calibrate.measurement import Measurements, Point, Writer, load
from cpsim.real.measure.kernels import Bench
from cpsim.real.run.timing import command_line, provenance

Op = Callable[[], object]
Call = Callable[["_Rows"], object]
ROW_BYTES: Final = (32, 128, 256, 512, 2048, 16384, 131072)
TOTAL_BYTES: Final = (2**24, 2**27)
"""Of all rows."""
ORDERS: Final = ("in order", "shuffled")
INDICES: Final = {"int64": torch.int64, "int32": torch.int32}
TAKES_INT32: Final = ("index_select", "index_add", "x[i]")
TOKENS, HEADS, KV_HEADS, DIM = 8192, 64, 8, 128
ELEMENT: Final = 2


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows ``[N, C]`` of bf16, and an index of them."""

    source: Tensor
    shifted: Tensor
    """2 bytes further on."""
    made: Tensor
    where: Tensor
    """``[N]``."""
    each: Tensor
    """The same in 64 bits, expanded to every element, ``[N, C]``."""


CALLS: Final[Mapping[str, Call]] = {
    "copy": lambda x: x.made.copy_(x.source),
    "gather": lambda x: torch.gather(x.source, 0, x.each),
    "gather by element": lambda x: torch.gather(x.shifted, 0, x.each),
    "scatter": lambda x: x.made.scatter_(0, x.each, x.source),
    "index_select": lambda x: torch.index_select(x.source, 0, x.where),
    "index_copy": lambda x: x.made.index_copy_(0, x.where, x.source),
    "index_add": lambda x: x.made.index_add_(0, x.where, x.source),
    "x[i]": lambda x: x.source[x.where],
    "x[i] = y": lambda x: x.made.__setitem__(x.where, x.source),
}


def passes(kind: str) -> int:
    """How often a call reads or writes every byte of the rows."""
    return 3 if kind == "index_add" else 2


def row_op(kind: str, row_bytes: int, rows: int, index: torch.dtype, order: str, device: torch.device) -> Op:
    """A call that moves so many rows of bf16."""
    width = row_bytes // ELEMENT
    flat = torch.randn(rows * width + 8, device=device, dtype=torch.bfloat16)
    where = torch.arange(rows, device=device) if order == "in order" else torch.randperm(rows, device=device)
    given = _Rows(
        source=flat[: rows * width].view(rows, width),
        shifted=flat[1 : rows * width + 1].view(rows, width),
        made=torch.zeros(rows, width, device=device, dtype=torch.bfloat16),
        where=where.to(index),
        each=where[:, None].expand(-1, width),
    )
    return partial(CALLS[kind], given)


def row_points(rows_bytes: Sequence[int] = ROW_BYTES, totals: Sequence[int] = TOTAL_BYTES) -> Iterator[dict[str, Any]]:
    """What is measured by length of rows."""
    for kind, total, row_bytes, order, index in product(CALLS, totals, rows_bytes, ORDERS, INDICES):
        if (index == "int32" and kind not in TAKES_INT32) or (kind == "copy" and order == "shuffled"):
            continue
        yield {"kind": kind, "row_bytes": row_bytes, "order": order, "index": index, "nbytes": passes(kind) * total}


def ring_ops(device: torch.device, tokens: int = TOKENS) -> dict[str, tuple[int, Op]]:
    """Bytes and calls of what surrounds a kernel of LongCA-bench's ring.

    Raises:
        ImportError: Transformer Engine is missing.
    """
    import transformer_engine.pytorch  # noqa: F401  loads the library of the next one
    import transformer_engine_torch as tex

    def rows(heads: int, wide: bool = False, of: int = tokens) -> Tensor:
        return torch.randn(of, heads, DIM, device=device, dtype=torch.float32 if wide else torch.bfloat16)

    q, out, kv = rows(HEADS), rows(HEADS), torch.randn(2, tokens, KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
    half = rows(HEADS, of=tokens // 2)
    lse, step_lse = (torch.randn(HEADS, tokens, device=device) for _ in range(2))
    half_lse = lse[:, : tokens // 2].contiguous()
    ends = torch.tensor([0, tokens], device=device, dtype=torch.int32)
    each = torch.arange(tokens, device=device)
    by_row, by_lse = each[:, None, None].expand(-1, HEADS, DIM), each[None].expand(HEADS, -1)
    wide_lse, nothing = lse.double(), torch.full_like(lse, -torch.inf)
    whole, few = q.numel() * ELEMENT, kv.numel() * ELEMENT
    small = lse.numel() * 4

    def corrected(into: Tensor) -> Op:
        def sum_(a: Tensor, b: Tensor) -> Tensor:
            most, least = torch.max(a, b), torch.min(a, b)
            return a.copy_(most + torch.log1p(torch.exp(least - most)))

        return lambda: sum_(into, step_lse)

    return {
        "zeros of q": (whole, lambda: torch.zeros_like(q)),
        "gather of q": (2 * whole, lambda: torch.gather(q, 0, by_row)),
        "scatter of q": (2 * whole, lambda: out.scatter_(0, by_row, q)),
        "scatter of lse": (2 * small, lambda: nothing.scatter_(1, by_lse, lse)),
        "sum of lse, fp32": (3 * small, corrected(lse)),
        "sum of lse, fp64": (5 * small, corrected(wide_lse)),
        "te half of q": (whole, lambda: tex.thd_read_half_tensor(q, ends, 1)),
        "te half of kv": (few, lambda: tex.thd_read_half_tensor(kv, ends, 0)),
        "te sum of out": (3 * whole, lambda: tex.thd_out_correction(out, q, lse, step_lse, ends, False, True)),
        "te sum of half out": (
            3 * whole // 2,
            lambda: tex.thd_out_correction(out, half, lse, half_lse, ends, True, True),
        ),
        "te sum of half lse": (
            3 * small // 2,
            lambda: tex.thd_second_half_lse_correction(lse, half_lse, ends, True),
        ),
        "add to dq": (3 * whole, lambda: out.add_(q)),
        "te add to half of dq": (3 * whole // 2, lambda: tex.thd_grad_correction(out, half, ends, "none", "add")),
        "te copy to half of dq": (whole, lambda: tex.thd_grad_correction(out, half, ends, "none", "copy")),
    }


def measure(bench: Bench) -> None:
    """All points; what fails is said."""
    device = bench.device
    small = () if bench.cuda else ((32, 256), (2**12,))
    for parameters in row_points(*small):
        rows = parameters["nbytes"] // passes(parameters["kind"]) // parameters["row_bytes"]
        sizes = parameters["row_bytes"], rows, INDICES[parameters["index"]]
        _measure(bench, parameters, lambda p=parameters, s=sizes: row_op(p["kind"], *s, p["order"], device))
    try:
        ops = ring_ops(device)
    except ImportError as error:
        bench.writer.add("error", failed="rows", message=str(error)[:300])
        return
    for name, (nbytes, op) in ops.items():
        _measure(bench, {"kind": name, "nbytes": nbytes}, lambda op=op: op)


def _measure(bench: Bench, parameters: dict[str, Any], made: Callable[[], Op]) -> None:
    try:
        samples = bench.samples(made())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        bench.writer.add("error", failed="rows", message=str(error)[:300], **parameters)
    else:
        bench.writer.add("rows", samples, **parameters)


def show(found: Measurements) -> None:
    """Bandwidth of the larger of both sizes, by length of rows; and what a ring's kernels take."""
    points = found.of("rows")
    by_rows = [p for p in points if "row_bytes" in p]
    if by_rows:
        lengths = sorted({p["row_bytes"] for p in by_rows})
        print(f"TB/s by bytes of a row{'':23}" + "".join(f"{n:>9,}" for n in lengths))
        for kind, order, index in dict.fromkeys((p["kind"], p["order"], p["index"]) for p in by_rows):
            mine = [p for p in by_rows if (p["kind"], p["order"], p["index"]) == (kind, order, index)]
            print(f"{kind:18} {order:9} {index:6}{'':11}" + "".join(f"{_speed(mine, n):>9}" for n in lengths))
    for point in points:
        if "row_bytes" not in point:
            seconds = median(point["samples_s"])
            print(f"{point['kind']:24} {seconds * 1e6:8.1f} us {point['nbytes'] / seconds / 1e12:6.2f} TB/s")
    for point in found.of("error"):
        print(f"failed: {point.get('kind', point['failed'])}: {point['message'][:100]}")


def _speed(points: Sequence[Point], row_bytes: int) -> str:
    mine = [p for p in points if p["row_bytes"] == row_bytes]
    largest = max(mine, key=lambda p: p["nbytes"], default=None)
    return f"{largest['nbytes'] / median(largest['samples_s']) / 1e12:.2f}" if largest else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--show", type=Path, help="a file that was measured")
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    if not args.show:
        device = torch.device("cpu" if args.cpu else "cuda:0")
        header = provenance(device, 1, {}, command_line("python -m studies.probes.rows"), args.commit)
        with args.out.open("w", encoding="utf-8") as file:
            measure(Bench(Writer(file, header), device))
    show(load(args.show or args.out))


if __name__ == "__main__":
    main()
