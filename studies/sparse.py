"""Kernels of sparse attention: rates fitted to what was measured, and how far off they are at lengths left out.

    python -m studies.sparse          # prints the table
    python -m studies.sparse --fit    # writes cpsim/data/sparse.json

Every kernel is a sum of what it does (``cpsim.models.sparse.WORK``), with rates of at least 0 that fit the medians of
its points in relative terms. Each length is left out once; the root mean square of the logarithms of predicted over
measured is the kernel's uncertainty.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from scipy.optimize import nnls

from cpsim.calibrate.measurement import load
from cpsim.models.sparse import DATA, WORK, Call, Rates, work
from cpsim.runtime.files import write

POINTS: Final = (Path(__file__).parent.parent / "data" / "points" / "h100" / "h100-sparse.jsonl",)
LEAST_SIGMA: Final = 0.03
USED: Final = {"index": "triton", "attend_keys": "triton", "choose_keys": "torch"}
"""Which of several ways a kernel was measured in stands for it; of others there is one."""

Measured = tuple[Call, float, int]
"""A call, its seconds, and its keys."""


def measured() -> dict[str, list[Measured]]:
    """Points by kernel and pass."""
    found: dict[str, list[Measured]] = {name: [] for name in WORK}
    for path in POINTS:
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
    scale = rows.max(axis=0)
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


def main() -> None:
    kernels: dict[str, Any] = {}
    print("kernel                points  left out: mean error  largest   at most TFLOP/s")
    for name, points in measured().items():
        if not points:
            print(f"{name:<22}    none")
            continue
        known, errors = fitted(name, points), left_out(name, points)
        sigma = max(LEAST_SIGMA, float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.5)
        mean, largest = (float(f(np.abs(errors))) if errors else np.nan for f in (np.mean, np.max))
        best = max(work(call)["flop"] / seconds for call, seconds, _ in points) / 1e12
        print(f"{name:<22} {len(points):>6} {mean:>18.1%} {largest:>9.0%} {best:>12.0f}")
        rounded = {kind: float(f"{rate:.4g}") for kind, rate in known.of_work_s.items()}
        kernels[name] = {"call_s": float(f"{known.call_s:.4g}"), "work_s": rounded, "sigma": round(sigma, 3)}
    if "--fit" in sys.argv[1:]:
        about = {"made_by": "python -m studies.sparse --fit", "from": [path.name for path in POINTS]}
        write(DATA, json.dumps({**about, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main()
