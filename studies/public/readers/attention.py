"""Context-parallel attention alone: ring-flash-attn's table and USP's grids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from studies.public.row import CLUSTERS as FILES
from studies.public.row import Line, Reader, Row, left_out, number

CLUSTERS: Final = {"H800": str(FILES / "h800.json"), "A100": "p4de", "H100": "dgx-h100", "H200": "dgx-h200"}
STRATEGIES: Final = {"ring": "ring", "zigzag_ring": "zigzag_ring", "stripe": "striped_ring", "allgather": "allgather"}
RINGS: Final = ("basic", "zigzag")
"""Within Ulysses groups."""
ALONE: Final = {"basic": "ring", "zigzag": "zigzag_ring", "stripe": "striped_ring"}
"""Without them."""
MISPRINTED: Final = (
    "heads of 128 where the picture says 32: Ulysses takes 10.9 ms there; its rows of 131,072 tokens would be 11.9 "
    "with as many heads of 128 and a sixteenth of the pairs, and 3.9 with heads of 32"
)
"""47.65 ms of 8 heads of 128 times 4 / 16, and 62.8 ms of 32 heads of 32 / 16."""


def ring_flash_attn(line: Line) -> Row:
    """A row of 8 GPUs with the batch interface, iterations back to back."""
    gpu = line["gpu"].split("-")[0].split()[0]
    row = Row(
        name=f"{line['strategy']} {line['pass_']} {line['gpus']} {gpu}, {line['total_tokens']} tokens",
        gpu=gpu,
        gpus=number(line["gpus"]),
        framework="ring-flash-attn",
        cp=number(line["gpus"]),
        time_s=float(line["time_s"]),
    )
    if line["strategy"] not in STRATEGIES:
        return replace(row, **left_out(f"strategy {line['strategy']}"))
    if gpu not in CLUSTERS:
        return replace(row, **left_out(f"attention on {gpu}", "not measured"))
    assumed = ("one sequence", "version 0.1.8 for that of the table")
    return replace(row, assumed=assumed, fields=_call(line, row, STRATEGIES[line["strategy"]], "ring-flash-attn"))


def yunchang_usp(line: Line) -> Row:
    """A row of a grid. Sequences of a batch are as many times the heads: their kernels, messages and bytes are the
    same. ``total_tokens`` are those of a sequence: FLOP of both sequences of the batch then are what A100 can do.

    Hosts wait for every iteration where tensors are not packed, and for none where they are
    (feifeibear/long-context-attention@b93c30e66, benchmark/benchmark_longctx.py, benchmark_longctx_qkvpacked.py).
    """
    gpu = line["gpu"].split("-")[0].split()[0]
    ulysses, ring, impl = number(line["ulysses_degree"]), number(line["ring_degree"]), line["ring_impl"]
    batch = number(line["batch"])
    row = Row(
        name=(
            f"ulysses {ulysses} ring {ring} {impl} {line['api']}, {line['heads']}:{line['kv_heads']} heads of "
            f"{line['head_dim']}, {batch} x {line['total_tokens']} tokens"
        ),
        gpu=gpu,
        gpus=number(line["gpus"]),
        framework="yunchang",
        cp=number(line["gpus"]),
        time_s=float(line["time_s"]),
        ambiguous=("read off a picture; total_tokens may be of a sequence or of the batch",),
        assumed=(
            "sequences of a batch are as many times the heads",
            "version 0.6.4 for that of the picture, and three all-to-alls for one of packed tensors",
            *((MISPRINTED,) if _is_misprinted(line) else ()),
        ),
    )
    if gpu not in CLUSTERS:
        return replace(row, **left_out(f"attention on {gpu}", "not measured"))
    if ring > 1 and ulysses > 1 and impl not in RINGS:
        return replace(row, **left_out("stripes within Ulysses groups"))
    if ulysses == 1:  # whose rings are ring-flash-attn's
        fields = _call(line, row, ALONE[impl], "ring-flash-attn", batch)
    elif ring == 1:
        fields = _call(line, row, "ulysses", "yunchang", batch)
    else:
        fields = _call(line, row, "usp", "yunchang", batch) | {"knobs": {"ulysses": ulysses, "ring": impl}}
    waits = {"protocol": "synced"} if line["api"] == "no_packed" else {}
    return replace(row, fields=fields | waits | ({"head_dim": 128} if _is_misprinted(line) else {}))


def _is_misprinted(line: Line) -> bool:
    return (line["total_tokens"], line["heads"], line["head_dim"]) == ("32768", "32", "32")


def _call(line: Line, row: Row, strategy: str, code: str, batch: int = 1) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "implementation": code,
        "kernel": "fa2",
        "cluster": CLUSTERS[row.gpu],
        "gpus": row.gpus,
        "tokens": number(line["total_tokens"]),
        "mask": line["mask"],
        "heads": batch * number(line["heads"]),
        "kv_heads": batch * number(line["kv_heads"]),
        "head_dim": number(line["head_dim"]),
        "dtype": line["dtype"],
        "pass": line["pass_"],
        "protocol": "streamed",
    }


RING_FLASH_ATTN: Final = Reader(
    file="ring_flash_attn.csv",
    columns=frozenset({"strategy", "tokens_per_gpu", "theoretic_flash_iters_per_s"}),
    read=ring_flash_attn,
)
YUNCHANG: Final = Reader(
    file="yunchang_usp.csv", columns=frozenset({"ulysses_degree", "ring_degree", "ring_impl"}), read=yunchang_usp
)
