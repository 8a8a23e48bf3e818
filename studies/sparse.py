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
    tables = {"kernels": "\n".join(kernel_rows()) + "\n", "claims": "\n".join(claim_rows()) + "\n"}
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
