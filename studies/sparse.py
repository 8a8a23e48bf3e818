"""Kernels of sparse attention: rates fitted to what was measured, and how far off they are at lengths left out.

    python -m studies.sparse          # prints the tables
    python -m studies.sparse --update # writes them into docs/sparse-attention.md

``python -m cpsim.calibrate.fit_sparse`` makes the rates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cpsim.calibrate.fit_sparse import by_kernel, left_out
from cpsim.calibrate.measurement import Point, load
from cpsim.models.rates import work
from cpsim.prediction.predict import predict
from cpsim.runtime.files import write

FOLDER: Final = Path(__file__).parent.parent / "data" / "points" / "h200"
POINTS: Final = (FOLDER / "h200-sparse.jsonl", FOLDER / "h200x1-nsa.jsonl")
PAGE: Final = Path(__file__).parent.parent / "docs" / "sparse-attention.md"


def measured() -> list[Point]:
    """All points."""
    return [point for path in POINTS for point in load(path).points]


def kernel_rows() -> Iterator[str]:
    """Lines of the table of kernels."""
    yield "| kernel | points | left out: mean error | largest | most TFLOP/s |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, points in by_kernel(measured()).items():
        if not points:
            yield f"| `{name}` | none | | | |"
            continue
        errors = np.abs(left_out(name, points))
        best = max(work(call)["flop"] / seconds for call, seconds, _ in points) / 1e12
        known = f"{errors.mean():.0%} | {errors.max():.0%}" if len(errors) else "too few | "
        yield f"| `{name}` | {len(points)} | {known} | {best:.0f} |"


@dataclass(frozen=True, slots=True)
class Claim:
    """How much faster than dense attention a paper finds its pattern, on one GPU."""

    paper: str
    case: Mapping[str, Any]
    pass_: str
    said: float

    def predicted(self) -> tuple[float, float]:
        """Seconds of dense and of sparse attention."""
        case = {"gpus": 1, "strategy": "none", "kernel": "fa2", "pass": self.pass_} | dict(self.case)
        dense = {name: value for name, value in case.items() if name != "sparse"}
        return predict(dense).time_s, predict(case).time_s


_NSA: Final = {"cluster": "dgx-h200", "tokens": 65536, "heads": 64, "kv_heads": 4, "head_dim": 128, "sparse": "nsa"}
_MOBA: Final = {"cluster": "dgx-h200", "tokens": 2**20, "heads": 32, "kv_heads": 8}
CLAIMS: Final = (
    Claim("NSA (2502.11089), figure 6: 64k tokens, A100", _NSA, "fwd", 9.0),
    Claim("NSA (2502.11089), figure 6: 64k tokens, A100", _NSA, "bwd", 6.0),
    Claim(
        "MoBA (2502.13189), abstract of its code: prefill of 1M tokens",
        {**_MOBA, "sparse": {"kind": "moba", "block": 4096, "top_k": 12}},
        "fwd",
        6.5,
    ),
    Claim(
        "issue 14 of MoonshotAI/MoBA: 512k tokens, 8 heads, blocks of 8192, A800",
        {**_MOBA, "tokens": 2**19, "heads": 8, "sparse": {"kind": "moba", "block": 8192, "top_k": 3}},
        "fwd",
        7.6,
    ),
)
"""The pass of the issue is not said, taken as forward.
Heads of 128 for NSA's 192 and 128, which flash-attn 2 has no costs of; MoBA's heads are Llama-3-8B's."""


Times = tuple[float, float]
"""Milliseconds of dense and of sparse attention."""
NSA_TIMES: Final[Mapping[str, tuple[Times, Times]]] = {
    "mdy666/Scalable-Flash-Native-Sparse-Attention at 1fe8be4 on H800, beside flash-attn 2": (
        (182.879, 34.162),
        (523.686, 73.689),
    ),
    "XunhaoLai/native-sparse-attention-triton at 1a478a6 on H100, beside flash-attn 2": (
        (187.234, 53.009 + 24.512),
        (541.054, 46.055 + 33.819),
    ),
    "the same on A100, beside flash-attn 2": ((321.240, 112.261 + 30.991), (899.181, 113.467 + 76.309)),
    "the same on A100, beside flash attention in Triton": ((511.652, 112.261 + 30.991), (2059.719, 113.467 + 76.309)),
}
"""Forward and backward as their READMEs have them, 64k tokens of 64 query and 4 key-value heads of 128. XunhaoLai's are
compressed attention with scores and that to 16 chosen blocks, without a window."""


def nsa_rows() -> Iterator[str]:
    """Lines of the table of NSA's kernels at 64k tokens."""
    yield "| NSA at 64k tokens | dense forward | sparse | times | dense backward | sparse | times |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    found = dict(NSA_TIMES)
    for stride in (16, 64):
        case = _NSA | {"sparse": {"kind": "nsa", "stride": stride}}
        forward, backward = (Claim("", case, pass_, 1.0).predicted() for pass_ in ("fwd", "bwd"))
        (dense, sparse), (dense_back, sparse_back) = (tuple(1e3 * s for s in pair) for pair in (forward, backward))
        name = f"fla-core 0.6 on H200 as cpsim predicts it, a compressed key every {stride} tokens"
        found[name] = (dense, sparse), (dense_back, sparse_back)
    for name, passes in found.items():
        cells = " | ".join(f"{dense:.0f} ms | {sparse:.0f} ms | {dense / sparse:.1f}" for dense, sparse in passes)
        yield f"| {name} | {cells} |"


def claim_rows() -> Iterator[str]:
    """Lines of the table of claims."""
    yield "| paper | pass | it finds | cpsim on H200, beside flash-attn 2 | off by |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for claim in CLAIMS:
        dense, sparse = claim.predicted()
        ratio = dense / sparse
        yield f"| {claim.paper} | {claim.pass_} | {claim.said:.1f} | {ratio:.1f} | {ratio / claim.said - 1:+.0%} |"


def main() -> None:
    """Prints the tables, or writes them."""
    asked = sys.argv[1:]
    rows = {"kernels": kernel_rows, "claims": claim_rows, "nsa": nsa_rows}
    tables = {name: "\n".join(lines()) + "\n" for name, lines in rows.items()}
    if "--update" not in asked:
        print("\n".join(tables.values()), end="")
        return
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        text = (
            before + f"<!-- {name} -->\n" + table + f"<!-- end of {name} -->" + rest.split(f"<!-- end of {name} -->")[1]
        )
    write(PAGE, text)


if __name__ == "__main__":
    main()
