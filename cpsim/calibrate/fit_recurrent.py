"""Fits scans of layers with a state, and the memory-bound kernels that go with them.

    python -m cpsim.calibrate.fit_recurrent data/points/h200/h200-linear.jsonl
    python -m cpsim.calibrate.fit_recurrent --gpu h100 --check data/points/published/h100-scans.jsonl
    python -m cpsim.calibrate.fit_recurrent --gpu h100 mine-linear.jsonl --into mine.json

Writes `cpsim/data/recurrent.json`, or into a profile of one's own; `--check` says errors alone. Every third point of a
kernel is held out of a first fit, whose errors on these points are the sigma; parameters come from all points.

What a file lacks is estimated: a backward pass moves its traffic as fast as the forward one and takes twice as long for
a step of its walk, which has twice the products; kernels of memory are as fast as a copy of the GPU's profile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from cpsim.calibrate.fit_layers import latency_and_bandwidth
from cpsim.calibrate.measurement import Measurements, Point, load
from cpsim.calibrate.residuals import measured
from cpsim.case.gpu import gpus
from cpsim.models.profile import load_profile, save_profile
from cpsim.models.recurrent import DATA, Scan, ScanParams, SweepParams, costs_of, design

Floats = NDArray[np.float64]
RESIDENT: Final = (1.0, 0.5, 1.5, 2.0, 3.0, 4.0)
"""Thread blocks of a walk on an SM, of which the best is taken, the first where all are as good."""
HELD_OUT: Final = 3
KINDS: Final = tuple(f"{kind}{end}" for kind in ("short_conv", "gated_norm", "grouped_norm") for end in ("", "_bwd"))
LEAST_BYTES: Final = 4e6
BACKWARD_STEPS: Final = 2.0
ESTIMATED_SIGMA: Final = 0.3
"""Standard deviation, relative, of what is estimated; assumed."""


def scan_of(point: Point) -> Scan:
    """What a point measured."""
    sizes = ("key_heads", "value_heads", "key_dim", "value_dim", "chunk")
    return Scan(kernel=point["kernel"], **{name: int(point[name]) for name in sizes})


def fit_scan(points: Sequence[Point], num_sms: int) -> ScanParams:
    """Least squares of relative errors with parameters of at least 0, by the number of slots that fits best.

    Args:
        points: of one kernel and pass.
        num_sms: of the GPU.
    """
    times, best = measured(points), (np.inf, ScanParams(call_s=0, byte_s=0, step_s=0, slots=1))
    for resident in RESIDENT:
        slots = num_sms * resident
        rows = np.array([design(scan_of(p), p["pass"], p["q_lens"], slots) for p in points]) / times[:, None]
        scale = rows.max(axis=0)
        found, error = nnls(rows / scale, np.ones(len(points)))
        call, byte, step = (found / scale).tolist()
        best = min(best, (error, ScanParams(call_s=call, byte_s=byte, step_s=step, slots=slots)), key=lambda x: x[0])
    return best[1]


def errors_of(params: ScanParams, points: Sequence[Point]) -> Floats:
    """Logarithms of predicted over measured times."""
    weights = np.array([params.call_s, params.byte_s, params.step_s])
    rows = np.array([design(scan_of(p), p["pass"], p["q_lens"], params.slots) for p in points])
    return np.asarray(np.log(rows @ weights / measured(points)))


def fit_sweep(points: Sequence[Point]) -> SweepParams:
    """Latency and rate of a memory-bound kernel."""
    latency, bandwidth = latency_and_bandwidth(np.array([p["nbytes"] for p in points], float), measured(points), 0.1)
    return SweepParams(latency_s=latency, byte_s=1 / bandwidth)


def fit(found: Measurements, gpu: str) -> tuple[dict[str, Any], dict[str, Floats]]:
    """Costs as the file has them, and errors of held-out points by kernel and pass."""
    num_sms = gpus()[gpu].num_sms
    scans, errors = dict[str, Any](), dict[str, Floats]()
    points = found.of("linear")
    for kernel, pass_ in sorted({(p["kernel"], p["pass"]) for p in points}):
        mine = [p for p in points if (p["kernel"], p["pass"]) == (kernel, pass_)]
        held = mine[HELD_OUT - 1 :: HELD_OUT]
        errors[f"{kernel} {pass_}"] = errors_of(fit_scan([p for p in mine if p not in held], num_sms), held)
        scans[f"{kernel} {pass_}"] = asdict(fit_scan(mine, num_sms))
    sweeps = {}
    for kind in sorted({p["kind"] for p in found.of("layer_op")}):
        mine = [p for p in found.of("layer_op") if p["kind"] == kind and p["nbytes"] > LEAST_BYTES]
        sweeps[kind] = asdict(fit_sweep(mine))
    sigma = float(np.sqrt(np.mean(np.concatenate(list(errors.values())) ** 2)))
    guesses = ""
    for kernel in sorted({name.split()[0] for name in scans}):
        if f"{kernel} bwd" not in scans:
            forward = scans[f"{kernel} fwd"]
            scans[f"{kernel} bwd"] = {**forward, "step_s": BACKWARD_STEPS * forward["step_s"]}
            sigma, guesses = max(sigma, ESTIMATED_SIGMA), "; backward passes are estimated"
    copies = load_profile(gpu).elementwise
    plain = {"latency_s": copies.latency_s["copy"], "byte_s": 1 / copies.bandwidth_bytes_per_s["copy"]}
    sweeps = {**dict.fromkeys(KINDS, plain), **sweeps}
    source = f"kernels {'published' if 'published' in found.header else 'measured'} on {gpu}{guesses}"
    rows = {"gpu": gpu, "source": source, "scans": scans, "sweeps": sweeps, "sigma": sigma}
    return _rounded(rows), errors


def _rounded(rows: Any) -> Any:
    """Numbers to six digits: what lies behind them differs from one machine's solver to another's."""
    if isinstance(rows, dict):
        return {name: _rounded(value) for name, value in rows.items()}
    return float(f"{rows:.6g}") if isinstance(rows, float) else rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="h200", help="its description in cpsim/data/gpus.json")
    parser.add_argument("--check", action="store_true", help="say errors, write nothing")
    parser.add_argument("--into", type=Path, help="a profile file that gets them, instead of those that ship")
    args = parser.parse_args()
    found = load(args.file)
    rows, errors = fit(found, args.gpu)
    for name, each in errors.items():
        mean, worst = np.abs(each).mean(), np.abs(each).max()
        print(f"{name}: {len(each)} held out, mean error {mean:.1%}, bias {each.mean():+.1%}, worst {worst:.1%}")
    if args.into and not args.check:
        save_profile(replace(load_profile(args.into), scans=costs_of(rows)), args.into)
    elif not args.check:
        DATA.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
