"""Residuals: measured beside predicted for every point, worst first. No scipy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsim.calibrate.measurement import Point
from cpsim.masks.blocks import Visits, row_sequences, sequence_slices, slice_windows, table_of, visits
from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import UNCUT, Ints, Slices
from cpsim.masks.tiles import share_of
from cpsim.models.attention.blocks import FEATURES
from cpsim.models.attention.params import AttentionParams, calls, listed_calls
from cpsim.models.elementwise import elementwise_seconds
from cpsim.models.gemm import gemm_seconds
from cpsim.models.network.collective import collective_seconds, transfer_seconds
from cpsim.models.power import settled_seconds
from cpsim.models.profile import Profile

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One point."""

    model: str
    """As in Profile.sigma: `attention fwd fa4`, `collective all_gather`, `transfer`, `memory-bound`."""
    regime: str
    """Family of attention shapes, kind of memory-bound kernel, or number of ranks."""
    measured_s: float
    predicted_s: float
    error: float
    """log(predicted / measured)."""
    point: Point


MEMORY_BOUND_OPS = ("elementwise", "cached", "layer_op")
LEAST_FLOPS = 1e10
"""Products of less are smaller than those of a layer of 1k tokens."""
PART_BYTES = 16
"""Parts of a collective that are no multiples of it take NCCL's slow path; real buffers are multiples."""


def measured(points: Sequence[Point]) -> Floats:
    """Seconds of each point: the median sample; of memory-bound kernels the lower quartile.

    Some of those are so short that the host did not keep the queue full; its gaps only ever lengthen a sample.
    """
    return np.array(
        [np.quantile(point["samples_s"], 0.25 if point["op"] in MEMORY_BOUND_OPS else 0.5) for point in points]
    )


def usable(point: Point) -> bool:
    """Whether a point says something about a model: it has samples, and its parts are aligned."""
    if not point["samples_s"] or point["op"] == "end":
        return False
    if point["op"] != "collective" or point["kind"] == "all_reduce":
        return True
    num_ranks = point["num_ranks"]
    return bool(point["nbytes"] // 2 // num_ranks * 2 % PART_BYTES == 0)


def predicted_attention(params: AttentionParams, points: Sequence[Point]) -> Floats:
    """Seconds that a model gives to attention points of one kernel and pass."""
    return predicted_calls(params, points)[0]


def predicted_calls(params: AttentionParams, points: Sequence[Point]) -> tuple[Floats, Floats]:
    """As `predicted_attention`, with the features of every point, [N, FEATURES]."""
    dims = np.array([(point["head_dim"], point.get("value_dim", 0)) for point in points]).reshape(-1, 2)
    seconds, features = np.empty(len(points)), np.empty((len(points), len(FEATURES)))
    for dim in np.unique(dims, axis=0).tolist():
        mine = np.flatnonzero((dims == dim).all(axis=1))
        seconds[mine], features[mine] = _predicted_calls(params, [points[i] for i in mine.tolist()], *dim)
    return seconds, features


def _predicted_calls(
    params: AttentionParams, points: Sequence[Point], head_dim: int, value_dim: int
) -> tuple[Floats, Floats]:

    def column(name: str, dtype: type) -> NDArray[Any]:
        return np.array([point[name] for point in points], dtype)

    heads = column("num_heads", np.int64), column("num_kv_heads", np.int64)
    if params.anatomy.lists_blocks:
        seconds, features, slower = listed_calls(params, [visits_of(point) for point in points], *heads, head_dim)
    else:
        q_lens, k_lens, windows = zip(*(_sequences(params, point) for point in points), strict=True)
        counts = [len(each) for each in q_lens]
        seconds, features, slower = calls(
            params,
            np.concatenate([[0], np.cumsum(counts)]),
            np.concatenate(q_lens),
            np.concatenate(k_lens),
            np.repeat(column("causal", bool), counts),
            *heads,
            head_dim,
            column("varlen", bool) | params.anatomy.gathers_keys | params.anatomy.takes_slices,
            window=np.concatenate(windows),
            value_dim=value_dim,
        )
    full = seconds / slower
    pause = np.array([pause_of(point) for point in points])
    alone = np.arange(len(points)), np.zeros(len(points))
    settled = settled_seconds(full, seconds, *alone, full + pause, params.busy_power)
    return np.where(pause > 0, settled, seconds), features


def window_of(point: Point) -> tuple[int, int]:
    """Keys before and after a query's own that a call of an attention point sees; kernels drop bounds that no sequence
    is long enough for (flash-attention 2.8.3, csrc/flash_attn/flash_api.cpp)."""
    left, right = point.get("window") or (UNCUT, 0 if point["causal"] else UNCUT)
    longest = max(point["k_lens"])
    return (UNCUT if left >= longest else left, UNCUT if right >= longest else right)


def _sequences(params: AttentionParams, point: Point) -> tuple[Sequence[int], Sequence[int], Ints]:
    """Queries, keys and windows of the sequences that a kernel without lists of blocks makes of an attention point.

    One that computes all pairs and masks them afterwards takes any mask as one sequence.
    """
    if params.anatomy.takes_slices:
        q_len, k_len, *window = slice_windows(_slices(_shape(point))[0]).T
        return q_len.tolist(), k_len.tolist(), np.stack(window, axis=1)
    if params.anatomy.gathers_keys:
        q_lens, k_lens = _rows(_shape(point))
    elif "mask" in point:
        q_lens, k_lens = [sum(point["q_lens"])], [sum(point["k_lens"])]
    else:
        q_lens, k_lens = point["q_lens"], point["k_lens"]
    return q_lens, k_lens, np.tile(window_of(point), (len(q_lens), 1))


def visits_of(point: Point) -> Visits:
    """The blocks that a call of an attention point visits."""
    return _visits(_shape(point))


def _shape(point: Point) -> str:
    names = ("mask", "options", "q_lens", "k_lens", "documents", "q_ranges", "k_ranges")
    return json.dumps({**{name: point.get(name) for name in names}, "window": window_of(point)})


def _slices(shape: str) -> tuple[Slices, int, int]:
    """The mask of a call, its queries and its keys."""
    mask, options, q_lens, k_lens, documents, q_ranges, k_ranges, window = json.loads(shape).values()
    if mask:
        slices = mask_slices(mask, documents or q_lens, options)
        slices = share_of(slices, q_ranges, k_ranges) if documents else slices
    else:
        slices = sequence_slices(np.array(q_lens), np.array(k_lens), np.tile(window, (len(q_lens), 1)))
    return slices, sum(q_lens), sum(k_lens)


@lru_cache(maxsize=4096)
def _visits(shape: str) -> Visits:
    return visits(*_slices(shape))


@lru_cache(maxsize=4096)
def _rows(shape: str) -> tuple[list[int], list[int]]:
    slices, num_q, num_k = _slices(shape)
    q_len, k_len = row_sequences(table_of(slices), num_q, num_k)
    return q_len.tolist(), k_len.tolist()


def pause_of(point: Point) -> float:
    """Idle seconds between two calls of an attention point: infinitely many where the GPU rested, 0 without a pause."""
    return float("inf") if point.get("rested") else float(point.get("pause_s", 0.0))


def flops(point: Point) -> float:
    """FLOP of an attention point on its exact mask area; a backward pass counts 2.5 times."""
    q, k = np.array(point["q_lens"], float), np.array(point["k_lens"], float)
    area = float(point.get("area", (q * k - (q * (q - 1) / 2 if point["causal"] else 0)).sum()))
    of_keys, of_values = (6, 4) if point["pass"] == "bwd" else (2, 2)
    dims = of_keys * point["head_dim"] + of_values * (point.get("value_dim") or point["head_dim"])
    return area * float(point["num_heads"] * dims)


def model_of(point: Point) -> str:
    """The model that a point belongs to, as in Profile.sigma; empty if none predicts it."""
    match point["op"]:
        case "attention":
            return f"attention {point['pass']} {point['kernel']}"
        case "collective":
            return f"collective {point['kind']}"
        case "transfer" if point["kind"] == "ring":
            return "transfer"
        case "elementwise":
            return "memory-bound"
        case "gemm":
            return "matrix products"
        case "layer_op" if point["variant"] != "eager" and point["kind"] != "embedding_bwd":
            return "elementwise of layers"
    return ""


def regime_of(point: Point) -> str:
    """Where in its model's range a point lies."""
    match point["op"]:
        case "attention":
            rested = " rested" if pause_of(point) > 0 else ""
            if "mask" in point:
                return f"{'share of ' if 'documents' in point else ''}{point['mask']}{rested}"
            return f"{point.get('family', '')} {'causal' if point['causal'] else 'full'}{rested}".lstrip()
        case "elementwise" | "layer_op":
            return str(point["kind"])
        case "gemm":
            return f"{point['kind']}, {'large' if large(point) else 'small'}"
    return f"{point['num_ranks']} ranks"


def predicted(profile: Profile, points: Sequence[Point]) -> Floats:
    """Seconds that a profile gives to points of one model."""
    first = points[0]
    if first["op"] == "attention":
        return predicted_attention(profile.attention_params(first["kernel"], first["pass"]), points)
    return np.array([_predicted_one(profile, point) for point in points])


def _predicted_one(profile: Profile, p: Point) -> float:
    """Seconds of a point of another op than attention."""
    network, layers = profile.collective, profile.layers
    match p["op"]:
        case "elementwise":
            return float(elementwise_seconds(profile.elementwise, p["kind"], p["nbytes"]))
        case "collective":
            return float(collective_seconds(network, p["kind"], p["nbytes"], p["num_ranks"]))
        case "gemm" if layers:
            return float(gemm_seconds(layers.gemm, p["m"], p["n"], p["k"]))
        case "layer_op" if layers:
            return float(elementwise_seconds(layers.ops, p["kind"], p["nbytes"]))
    return float(transfer_seconds(network, p["nbytes"], p["num_ranks"]))


def residuals(profile: Profile, points: Sequence[Point]) -> list[Residual]:
    """Every point that some model of the profile predicts, worst first."""
    by_model: dict[str, list[Point]] = {}
    for point in points:
        if usable(point) and (model := model_of(point)):
            by_model.setdefault(model, []).append(point)
    rows = []
    for model, group in by_model.items():
        for point, t, p in zip(group, measured(group), predicted(profile, group), strict=True):
            error = float(np.log(p / t))
            where = regime_of(point)
            rows.append(
                Residual(model=model, regime=where, measured_s=float(t), predicted_s=float(p), error=error, point=point)
            )
    return sorted(rows, key=lambda row: -abs(row.error))


def summary(rows: Sequence[Residual]) -> list[dict[str, Any]]:
    """Per model: points, mean absolute error, 95th percentile, worst, bias, rms; relative, worst model first."""
    table = []
    for model in sorted({row.model for row in rows}):
        errors = np.array([row.error for row in rows if row.model == model])
        table.append(
            {
                "model": model,
                "points": len(errors),
                "mean_absolute": float(np.abs(errors).mean()),
                "p95": float(np.quantile(np.abs(errors), 0.95)),
                "worst": float(np.abs(errors).max()),
                "bias": float(errors.mean()),
                "rms": float(np.sqrt((errors**2).mean())),
            }
        )
    return sorted(table, key=lambda row: -float(row["mean_absolute"]))


def large(point: Point) -> bool:
    """Whether the accuracy bars count a point: 1k tokens and more, or 1 MiB and more.

    A memory-bound op of layers has 2 bytes or more for each token and element of a row.
    """
    if point["op"] == "attention":
        return max(sum(point["q_lens"]), sum(point["k_lens"])) >= 1000
    if point["op"] == "gemm":
        return bool(2 * point["m"] * point["n"] * point["k"] >= LEAST_FLOPS)
    if point["op"] == "layer_op":
        return bool(point["nbytes"] >= max(2**20, 2 * 1024 * point["width"]))
    return bool(point["nbytes"] >= 2**20)
