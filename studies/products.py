"""Products that plain layers do not have, measured on an H100 and an H200, beside what their models say.

    python -m studies.products

In FP8 with one scale for each operand (with Hopper's fast accumulation and, `exact`, without) and with scales by rows;
grouped by experts; and thin, as adapters have them. An error is predicted over measured, less one. *Faster* is how much
faster than in bf16 tensor cores step along k by these points, each kernel with a launch of its own: what
``cpsim.models.gemm.FP8_RATE`` and ``FP8_KERNELS`` rest on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from cpsim.calibrate.measurement import Point, load
from cpsim.calibrate.recipes import points_file
from cpsim.models.gemm import FP8_BYTES, GemmParams, gemm_seconds, in_fp8
from cpsim.models.profile import load_profile

Floats = NDArray[np.float64]
FILES: Final = {"h100": "h100x2-products.jsonl", "h200": "h200x4-products.jsonl"}
"""By profile."""
KERNELS: Final = {"tensorwise": "tensorwise", "tensorwise_exact": "exact", "rowwise": "rowwise"}
"""Of measurements and of the model."""


def points(profile: str) -> list[Point]:
    """All products that were measured on the GPU of a profile."""
    return [p for p in load(points_file(FILES[profile])).points if p["op"] == "gemm"]


def sizes(some: list[Point]) -> tuple[Floats, Floats, Floats, Floats]:
    """m, n, k and measured seconds; of grouped products of one group."""
    groups = np.array([p.get("groups", 1) for p in some], float)
    by_k = np.array([p["kind"] == "wgrad" for p in some])
    m, n, k = (np.array([p[name] for p in some], float) for name in "mnk")
    seconds = np.array([median(p["samples_s"]) for p in some])
    return np.where(by_k, m, m / groups), n, np.where(by_k, k / groups, k), seconds


def grouped_seconds(gemm: GemmParams, some: list[Point]) -> Floats:
    """One launch, and all groups one after the other."""
    m, n, k, _ = sizes(some)
    groups = np.array([p["groups"] for p in some], float)
    return np.asarray(gemm.call_s + groups * (gemm_seconds(gemm, m, n, k) - gemm.call_s))


def faster(gemm: GemmParams, some: list[Point]) -> float:
    """How much faster than in bf16 tensor cores step along k."""
    m, n, k, seconds = sizes(some)

    def errors(logs: Floats) -> Floats:
        scaled = replace(gemm, flop_s=gemm.flop_s / np.exp(logs[0]), call_s=gemm.call_s * np.exp(logs[1]))
        return np.log(gemm_seconds(scaled, m, n, k, operand_bytes=FP8_BYTES) / seconds)

    found = least_squares(errors, [np.log(2.0), 0.0], loss="soft_l1", f_scale=0.1)
    return float(np.exp(found.x[0]))


def errors(profile: str) -> Iterator[tuple[str, Floats, float | None]]:
    """Name of a group of products, their errors, and how much faster than bf16 they are."""
    layers = load_profile(profile).layers
    assert layers is not None
    gemm, every = layers.gemm, points(profile)
    plain = [p for p in every if not {"fp8", "groups", "thin"} & p.keys()]
    m, n, k, seconds = sizes(plain)
    yield "bf16", gemm_seconds(gemm, m, n, k) / seconds - 1, None
    for measured, kernel in KERNELS.items():
        mine = [p for p in every if p.get("fp8") == measured]
        m, n, k, seconds = sizes(mine)
        predicted = gemm_seconds(in_fp8(gemm, kernel), m, n, k, operand_bytes=FP8_BYTES)
        yield f"fp8 {kernel}", predicted / seconds - 1, faster(gemm, mine)
    for kind in ("forward", "wgrad"):
        mine = [p for p in every if "groups" in p and p["kind"] == kind]
        yield f"grouped, {kind}", grouped_seconds(gemm, mine) / sizes(mine)[3] - 1, None
    mine = [p for p in every if "thin" in p]
    m, n, k, seconds = sizes(mine)
    yield "thin", gemm_seconds(gemm, m, n, k) / seconds - 1, None


def main() -> None:
    """Prints the table."""
    print(f"{'products':24}{'points':>7}{'error':>8}{'sign':>8}{'faster':>8}")
    for profile in FILES:
        for name, found, ratio in errors(profile):
            said = f"{ratio:8.2f}" if ratio else ""
            print(f"{profile + ' ' + name:24}{len(found):7}{np.abs(found).mean():8.1%}{found.mean():+8.1%}{said}")


if __name__ == "__main__":
    main()
