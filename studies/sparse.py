"""Kernels of sparse attention: rates fitted to what was measured, and how far off they are at lengths left out.

    python -m studies.sparse          # prints the tables
    python -m studies.sparse --fit    # writes cpsim/data/sparse.json
    python -m studies.sparse --update # writes the tables into docs/sparse-attention.md

Every kernel is a sum of what it does (``cpsim.models.sparse.WORK``), with rates of at least 0 that fit the medians of
its points in relative terms. Each length is left out once; the root mean square of the logarithms of predicted over
measured is the kernel's uncertainty.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from scipy.optimize import nnls

from cpsim.calibrate.measurement import load
from cpsim.models.sparse import DATA, UNMEASURED_SIGMA, WORK, Call, Rates, work
from cpsim.prediction.predict import predict
from cpsim.runtime.files import write

FOLDER: Final = Path(__file__).parent.parent / "data" / "points" / "h200"
POINTS: Final = (FOLDER / "h200-sparse.jsonl", FOLDER / "h200x1-nsa.jsonl")
PAGE: Final = Path(__file__).parent.parent / "docs" / "sparse-attention.md"
LEAST_SIGMA: Final = 0.1
"""Points vary in their length and little else."""
USED: Final = {"index": "torch", "attend_keys": "torch", "choose_keys": "torch"}
"""Which of several ways a kernel was measured in stands for it; of others there is one."""

Measured = tuple[Call, float, int]
"""A call, its seconds, and its keys."""


def measured() -> dict[str, list[Measured]]:
    """Points by kernel and pass."""
    found: dict[str, list[Measured]] = {name: [] for name in WORK}
    for path in (path for path in POINTS if path.exists()):
        for point in load(path).points:
            name = _name(point)
            if name in found:
                keys = point["keys"] if point["op"] == "sparse" else point["k_lens"][0]
                found[name].append((_call(point), median(point["samples_s"]), int(keys)))
    return found


def _name(point: Mapping[str, Any]) -> str:
    if point["op"] == "attention" and point.get("window"):
        return f"window {point['pass']}"
    if point["op"] != "sparse" or USED.get(point["kind"], point["kernel"]) != point["kernel"]:
        return ""
    return f"{point['kind']} {point['pass']}"


def _call(point: Mapping[str, Any]) -> Call:
    if point["op"] == "attention":
        dim, queries = point["head_dim"], sum(point["q_lens"])
        return Call(queries=queries, pairs=point["area"], heads=point["num_heads"], key=dim, value=dim)
    return Call(
        queries=point["queries"],
        pairs=point["pairs"],
        heads=point.get("num_heads", 1),
        key=point.get("head_dim", 1),
        value=point.get("value_dim", 0),
        top_k=point.get("chosen", 1),
        blocks=point["keys"] / point["block"] if "block" in point else 0.0,
    )


def fitted(name: str, points: Sequence[Measured]) -> Rates:
    """Rates of one kernel, its uncertainty not known yet."""
    rows = np.array([[1.0, *(work(call)[kind] for kind in WORK[name])] for call, _, _ in points])
    seconds = np.array([seconds for _, seconds, _ in points])
    if np.ptp(rows, axis=0).max() == 0:
        rows[:, 0] = 0.0  # calls of one size do not tell a call from its work
    scale = np.maximum(rows.max(axis=0), 1e-30)
    found, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))
    call_s, *of_work = (found / scale).tolist()
    return Rates(call_s, dict(zip(WORK[name], of_work, strict=True)), 0.0)


def left_out(name: str, points: Sequence[Measured]) -> list[float]:
    """Logarithms of predicted over measured, each length predicted from the others."""
    errors = []
    for length in sorted({keys for _, _, keys in points}):
        rest = [point for point in points if point[2] != length]
        if len(rest) > len(WORK[name]):
            known = fitted(name, rest)
            errors += [np.log(known.seconds(call) / seconds) for call, seconds, keys in points if keys == length]
    return errors


def kernel_rows() -> Iterator[str]:
    """Lines of the table of kernels."""
    yield "| kernel | points | left out: mean error | largest | most TFLOP/s |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, points in measured().items():
        if not points:
            yield f"| `{name}` | none | | | |"
            continue
        errors = np.abs(left_out(name, points))
        best = max(work(call)["flop"] / seconds for call, seconds, _ in points) / 1e12
        known = f"{errors.mean():.0%} | {errors.max():.0%}" if len(errors) else "too few | "
        yield f"| `{name}` | {len(points)} | {known} | {best:.0f} |"


def fit() -> str:
    """The file of rates."""
    kernels: dict[str, Any] = {}
    for name, points in measured().items():
        if len(points) <= len(WORK[name]):
            continue
        known, errors = fitted(name, points), left_out(name, points)
        sigma = float(np.sqrt(np.mean(np.square(errors)))) if errors else UNMEASURED_SIGMA
        kernels[name] = {
            "call_s": float(f"{known.call_s:.4g}"),
            "work_s": {kind: float(f"{rate:.4g}") for kind, rate in known.of_work_s.items()},
            "sigma": round(max(LEAST_SIGMA, sigma), 3),
        }
    about = {"made_by": "python -m studies.sparse --fit", "from": [path.name for path in POINTS if path.exists()]}
    return json.dumps({**about, "kernels": kernels}, indent=1) + "\n"


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
    """Prints, fits, or writes the page."""
    asked = sys.argv[1:]
    if "--fit" in asked:
        write(DATA, fit())
        return
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
