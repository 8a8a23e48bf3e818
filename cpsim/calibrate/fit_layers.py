"""Fits what layers of a transformer consist of besides attention: matrix products and memory-bound ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from cpsim.calibrate.descent import descend
from cpsim.calibrate.measurement import Point
from cpsim.calibrate.residuals import measured
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.gemm import FITTED, GemmParams, gemm_seconds
from cpsim.models.parameters import LayerCosts

Floats = NDArray[np.float64]

_START: Final = {"flop_s": 1.9e-13, "tile_s": 1.5e-6, "call_s": 3e-6, "tail_share": 0.3}
_BOUNDS: Final = {"tail_share": (1e-2, 1.0)}
LATENCY_S: Final = 4e-6
PULL: Final = 0.1
"""Weight of the prior of a memory-bound op: it counts as a point of 1 / PULL times the noise."""


def fit_layers(points: Sequence[Point], num_sms: int, copies: ElementwiseParams) -> LayerCosts | None:
    """Costs of layers, where products and memory-bound ops of layers were measured.

    The gradient of the embedding goes by the number of different words, not by bytes: its mean rate stands for it, and
    no error is claimed. It runs once a microbatch, on the first stage.

    Args:
        points: of any ops.
        num_sms: of the GPU.
        copies: memory-bound kernels; products read and write as fast as a copy.
    """
    products = [p for p in points if p["op"] == "gemm"]
    sweeps = [p for p in points if p["op"] == "layer_op" and p["variant"] != "eager"]
    if not products or not sweeps:
        return None
    kinds = sorted({p["kind"] for p in sweeps})
    mine = [[p for p in sweeps if p["kind"] == kind] for kind in kinds]
    sizes = [np.array([p["nbytes"] for p in each], float) for each in mine]
    fitted = [latency_and_bandwidth(nbytes, measured(each), PULL) for nbytes, each in zip(sizes, mine, strict=True)]
    ops = ElementwiseParams(
        latency_s={kind: latency for kind, (latency, _) in zip(kinds, fitted, strict=True)},
        bandwidth_bytes_per_s={kind: rate for kind, (_, rate) in zip(kinds, fitted, strict=True)},
    )
    return LayerCosts(gemm=_fit_products(products, num_sms, 1 / copies.bandwidth_bytes_per_s["copy"]), ops=ops)


def _fit_products(points: Sequence[Point], num_sms: int, traffic_s_per_byte: float) -> GemmParams:
    """Least squares of log time; steps are wide at first, because waves jump."""
    sizes, times = [np.array([p[name] for p in points], float) for name in "mnk"], measured(points)

    def build(x: Floats) -> GemmParams:
        values = dict(zip(FITTED, np.exp(x).tolist(), strict=True))
        return GemmParams(num_sms=num_sms, traffic_s_per_byte=traffic_s_per_byte, **values)

    def error(x: Floats) -> Floats:
        return np.asarray(np.log(gemm_seconds(build(x), *sizes) / times))

    x = np.log([_START[name] for name in FITTED])
    bounds = np.log([_BOUNDS.get(name, (_START[name] * 1e-2, _START[name] * 1e5)) for name in FITTED])
    return build(descend(error, x, (bounds[:, 0], bounds[:, 1]), (0.3, 0.1, 0.03), 40))


def latency_and_bandwidth(nbytes: Floats, seconds: Floats, pull: float = 0.0) -> tuple[float, float]:
    """Least squares of log time, seconds = latency + nbytes / bandwidth; `pull` draws the latency to LATENCY_S."""

    def error(x: Floats) -> Floats:
        errors = np.log((np.exp(x[0]) + nbytes / np.exp(x[1])) / seconds)
        return np.append(errors, pull * (x[0] - np.log(LATENCY_S))) if pull else np.asarray(errors)

    fastest = float((nbytes / seconds).max())
    start = np.log([4e-6, 2.5e12 if fastest > 2.5e11 else fastest])  # a GPU, or a CPU
    latency, bandwidth = np.exp(least_squares(error, start, loss="soft_l1", f_scale=0.05).x).tolist()
    return latency, bandwidth
