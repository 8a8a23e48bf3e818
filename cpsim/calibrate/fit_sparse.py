"""Fits rates of kernels of attention to chosen keys to files of `cpsim.real.measure.sparse`.

    python -m cpsim.calibrate.fit_sparse data/points/h200/h200-sparse.jsonl   # writes cpsim/data/sparse.json
    python -m cpsim.calibrate.fit_sparse mine-sparse.jsonl --into mine.json   # into a profile of one's own

Every kernel is a sum of what it does (``cpsim.models.rates.WORK``), with rates of at least 0 that fit the medians of
its points in relative terms. Each length is left out once; the root mean square of the logarithms of predicted over
measured is the kernel's uncertainty.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from scipy.optimize import nnls

from cpsim.calibrate.measurement import Point, load
from cpsim.models.profile import load_profile, save_profile
from cpsim.models.rates import WORK, Call, Rates, work
from cpsim.models.sparse import DATA, UNMEASURED_SIGMA
from cpsim.runtime.files import write

LEAST_SIGMA: Final = 0.1
"""Points vary in their length and little else."""
USED: Final = {"index": "torch", "attend_keys": "torch", "choose_keys": "torch"}
"""Which of several ways a kernel was measured in stands for it; of others there is one."""

Measured = tuple[Call, float, int]
"""A call, its seconds, and its keys."""


def by_kernel(points: Iterable[Point]) -> dict[str, list[Measured]]:
    """Points by kernel and pass."""
    found: dict[str, list[Measured]] = {name: [] for name in WORK}
    for point in points:
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


def fit(points: Iterable[Point]) -> dict[str, Rates]:
    """Rates by kernel and pass, of those with enough points."""
    found = {}
    for name, mine in by_kernel(points).items():
        if len(mine) <= len(WORK[name]):
            continue
        known, errors = fitted(name, mine), left_out(name, mine)
        sigma = float(np.sqrt(np.mean(np.square(errors)))) if errors else UNMEASURED_SIGMA
        rates = {kind: float(f"{rate:.4g}") for kind, rate in known.of_work_s.items()}
        found[name] = Rates(float(f"{known.call_s:.4g}"), rates, round(max(LEAST_SIGMA, sigma), 3))
    return found


def as_text(found: Mapping[str, Rates], files: Sequence[str]) -> str:
    """The file of rates that ships."""
    kernels = {n: {"call_s": r.call_s, "work_s": dict(r.of_work_s), "sigma": r.sigma} for n, r in found.items()}
    about: dict[str, Any] = {"made_by": "python -m cpsim.calibrate.fit_sparse", "from": list(files)}
    return json.dumps({**about, "kernels": kernels}, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, help="a profile file that gets the rates, instead of those that ship")
    args = parser.parse_args()
    found = fit(point for path in args.files for point in load(path).points)
    if args.into:
        save_profile(replace(load_profile(args.into), sparse=found), args.into)
    else:
        write(DATA, as_text(found, [path.name for path in args.files]))


if __name__ == "__main__":
    main()
