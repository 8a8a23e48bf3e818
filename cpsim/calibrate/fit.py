"""Fits a profile from measurement files; errors are those of points that were not fitted.

Every point is predicted once by models fitted to the other four fifths of the points (five-fold cross-validation, as
in Hastie, Tibshirani and Friedman, "The Elements of Statistical Learning", section 7.10); the profile itself is
fitted to all. End-to-end runs are never used. Deterministic: the same files give the same profile, byte for byte where
processor and libraries round alike; else fits of calls of few blocks, whose time has steps, may end 1 % apart on
average, single calls 7 %.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, lsq_linear

from cpsim.block_masks import BANDS, CELLS
from cpsim.calibrate.fit_layers import fit_layers, latency_and_bandwidth
from cpsim.calibrate.measurement import ROUNDS, Measurements, Point
from cpsim.calibrate.profile import Profile
from cpsim.calibrate.residuals import (
    MEMORY_BOUND_OPS,
    Residual,
    large,
    measured,
    model_of,
    pause_of,
    predicted_attention,
    predicted_calls,
    residuals,
    summary,
    usable,
    visits_of,
)
from cpsim.calibrate.standin import StandIn
from cpsim.errors import ProfileError
from cpsim.models.attention import ANATOMY, FITTED, PER_PAIR, AttentionParams, anatomy_at
from cpsim.models.collective import COLLECTIVES, CollectiveParams, Curve, channels, ring_channels, wire_bytes
from cpsim.models.discrepancy import NONE, Discrepancy
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.host import HostParams
from cpsim.models.interference import InterferenceParams

Floats = NDArray[np.float64]
Covariance = dict[str, Any]

FOLDS = 5
DISTURBED = 2.0
"""See `host_paces`: above what hosts differ by, and below what one took while it was seen to be disturbed."""
FEWEST = (10, 2)
"""Sizes that a network curve needs; the second where no number of ranks has the first."""
FEWEST_CALLS = 6
"""Fewer calls of a kernel and pass without a stand-in give no model of it."""
FEWEST_OF_GPU, LONG_CALL_S = 5, 3e-4
"""Calls of a kernel that say something about a GPU, and how long they take."""
KNOT_RATIO = 2.0
"""Between sizes of neighbouring knots of a network curve."""


def fit_profile(
    measurements: Sequence[Measurements], name: str = "", stand_in: StandIn | None = None, *, check: bool = True
) -> Profile:
    """Fits every cost model that the measurements allow.

    Args:
        measurements: kernel files of one GPU type, and network files of it or of one with the same NVLink.
        name: of the profile; by default from the GPU.
        stand_in: gives what the measurements lack; without it that is an error.
        check: find the errors on points that were not fitted, which takes five more fits.

    Returns:
        The profile, with errors on points that were not fitted; unchecked, with assumed ones.

    Raises:
        ProfileError: no attention, memory-bound or network points, or kernels of several GPU types.
    """
    kernels = [m for m in measurements if m.of("attention")]
    networks = [m for m in measurements if m.of("collective")]
    gpus = sorted({m.header["gpu"] for m in kernels})
    if len(gpus) != 1:
        raise ProfileError(f"a profile needs attention points of one GPU type, got {', '.join(gpus) or 'none'}")
    if not networks and stand_in is None:
        raise ProfileError("a profile needs collective points: add a file of real.measure_network, or give --base")
    everything = current(measurements, gpus[0])
    points = _enough([p for p in everything if usable(p)], stand_in)
    fold = folds(points)
    counted = large_model if gpus[0] != "cpu" else model_of
    num_sms = int(kernels[0].header["num_sms"])

    def build(chosen: Sequence[Point]) -> Profile:
        attention, covariance = _attention(chosen, num_sms, stand_in)
        copies = _elementwise(chosen, stand_in)
        return Profile(
            name=name or gpus[0].removeprefix("NVIDIA ").split()[0].lower(), gpu=gpus[0],
            grade=_grade(gpus[0], networks), attention=attention,
            collective=_collective(chosen, everything, stand_in), elementwise=copies,
            host=_host([p for p in chosen if p["op"] == "host"], copies.latency_s["copy"], stand_in),
            interference=_interference(everything),
            load=_load([p for p in everything if p["op"] == "power"]), sigma={},
            valid=_valid(points), covariance=covariance, held_out=(),
            provenance=tuple(_source(m, gpus[0]) for m in measurements),
            layers=fit_layers(chosen, num_sms, copies),
        )  # fmt: skip

    by_fold: list[list[Residual]] = []
    for i in range(FOLDS if check else 0):
        inside = [p for p, k in zip(points, fold, strict=True) if k != i or not model_of(p)]
        outside = [p for p, k in zip(points, fold, strict=True) if k == i and counted(p)]
        by_fold.append(residuals(build(inside), outside))
    rows, covered = [row for rows in by_fold for row in rows], _covered(by_fold)
    profile = build(points)
    models = {row.model for row in rows} or set(filter(None, map(model_of, points)))
    sigma = _sigma(rows, models, _run_to_run(profile, kernels)) | _spreads(everything) | _between_gpus(profile, kernels)
    speeds = [float(np.log(speed)) for speed in host_speeds(measurements).values()]
    sigma |= {"host": float(np.std(speeds, ddof=1))} if len(speeds) > 1 else {}
    held_out = tuple(row | {"covered": covered[row["model"]]} for row in summary(rows))
    profile = dataclasses.replace(profile, held_out=held_out, sigma=sigma)
    return profile if stand_in is None else _completed(profile, points, kernels, stand_in)


def _enough(points: Sequence[Point], stand_in: StandIn | None) -> list[Point]:
    """The points without those of kernels and passes that have too few to fit and nothing that stands in."""
    calls = Counter((p["kernel"], p["pass"]) for p in points if p["op"] == "attention")
    few = {key for key, number in calls.items() if number < FEWEST_CALLS and stand_in is None}
    if few and few == calls.keys():
        raise ProfileError(f"a profile needs {FEWEST_CALLS} calls of a kernel and pass, got {max(calls.values())}")
    return [p for p in points if p["op"] != "attention" or (p["kernel"], p["pass"]) not in few]


def _completed(
    profile: Profile, points: Sequence[Point], kernels: Sequence[Measurements], stand_in: StandIn
) -> Profile:
    """A profile with what stands in for the parts that were not measured, and with words that say so."""
    theirs, ops = stand_in.profile, {p["op"] for p in points}
    measured_models = {model_of(p) for p in points if p["op"] != "transfer"} | (ops & {"transfer"})
    spare = {key: value for key, value in stand_in.kernels(profile.gpu).items() if key not in profile.attention}
    parts = {
        "memory-bound kernels": "elementwise" not in ops, "network": not {"collective", "transfer"} <= ops,
        "host launches": "host" not in ops, "interference": not profile.interference.computation,
        "power": not profile.load, "layers": not profile.layers and stand_in.layers(profile.gpu) is not None,
        f"kernels {', '.join(sorted({k for k, _ in spare}))}": bool(spare),
    }  # fmt: skip
    borrowed = [part for part, missing in parts.items() if missing]
    models = {f"attention {pass_} {kernel}" for kernel, pass_ in spare} | {
        m for m in theirs.sigma if not m.startswith("attention") and m not in ("run to run", "host", "graph")
    }
    if profile.interference.computation:
        models -= {"interference"}
    published = all("published" in m.header for m in kernels)
    grade = profile.grade
    if published:
        varlen = any(p["varlen"] for p in points if p["op"] == "attention")
        grade = f"kernels from published figures{'' if varlen else ' of single documents'}"
    source = {"file": f"profile {theirs.name}", "gpu": theirs.gpu, "used_for": stand_in.words(borrowed)}
    return replace(
        profile,
        grade=f"{grade}; {stand_in.words(borrowed)}" if borrowed else grade,
        attention={**spare, **profile.attention},
        interference=profile.interference if profile.interference.computation else theirs.interference,
        load=profile.load or theirs.load,
        layers=profile.layers or stand_in.layers(profile.gpu),
        sigma={**profile.sigma, **{m: stand_in.sigma(m) for m in models - measured_models}},
        valid=dict(sorted({**theirs.valid, **profile.valid}.items())),
        provenance=(*profile.provenance, source) if borrowed else profile.provenance,
    )


def current(measurements: Sequence[Measurements], gpu: str) -> list[Point]:
    """All points that describe this GPU and the code as it is.

    Memory-bound kernels of another GPU stand in only where this one's were not measured, and the executor's own form
    of one replaces others. Launches of the executor's single ops do not count: its programs are captured. Of the pause
    between two iterations, which the timing code makes, and of PyTorch's own sweeps, which take alike on all machines,
    the latest measurement counts. Overlaps count where the size of what was sent is known and the communication came
    first.
    """
    paused = [m.header["date"] for m in measurements if any(_is_pause(p) for p in m.points)]
    swept = [m.header["date"] for m in measurements if any(_is_sweep(p) for p in m.points)]
    stepped = {p["kind"] for m in measurements for p in m.of("host") if _in_steps(p)}
    paces = host_paces(measurements)
    mine = {p["kind"] for m in measurements if m.header["gpu"] == gpu for p in m.of("elementwise")}
    points = [
        p
        for m in measurements
        for p in _on_mean_host(m, stepped, paces[m.source])
        if not (p["op"] in ("gemm", "layer_op") and m.header["gpu"] != gpu)
        and not (p["op"] == "elementwise" and m.header["gpu"] != gpu and p["kind"] in mine)
        and not (p["op"] == "host" and "rank" in p and not p["kind"].startswith("graph"))
        and not (p["op"] == "overlap" and not p.get("lead_s"))
        and not (_is_pause(p) and m.header["date"] != max(paused))
        and not (_is_sweep(p) and m.header["date"] != max(swept))
    ]
    own = {p["kind"] for p in points if p["op"] == "elementwise" and p.get("kernel") == "executor"}
    return [p for p in points if p["op"] != "elementwise" or p["kind"] not in own or p.get("kernel") == "executor"]


def _on_mean_host(m: Measurements, stepped: Container[str], paces: Sequence[float]) -> Iterator[Point]:
    """The points of a file, host calls of others as the mean of all machines would make them.

    They count as they were timed among those of a step, on whatever machines they were; where nobody did so, as they
    were timed among all calls; never repeated in a row.

    Args:
        m: the file.
        stepped: calls that some file timed among those of a step.
        paces: see `host_paces`.
    """
    for p, pace in zip(m.points, paces, strict=True):
        if p["op"] == "host":
            if p.get("place") == "in a row" or (p["kind"] in stepped and not _in_steps(p)):
                continue
            p = p | {"samples_s": [s / pace for s in p["samples_s"]]}
        yield p


def _in_steps(point: Point) -> bool:
    return str(point.get("place", "")).startswith("in steps")


def host_paces(measurements: Sequence[Measurements]) -> dict[str, list[float]]:
    """How long the host took over the mean of all hosts when it made every point of each file.

    That is the machine's speed. A host that does something else may take several times as long for a while: a step
    whose eager ops took more than `DISTURBED` times what they usually take in steps counts by these.
    """
    speeds, steps = host_speeds(measurements), {m.source: _steps(m) for m in measurements}
    eager: dict[tuple[str, str], list[float]] = {}
    for source, of_point in steps.items():
        for op, seconds in (pair for step in of_point for pair in step.items()):
            eager.setdefault(op, []).append(seconds / speeds.get(source, 1.0))
    usual = {op: float(np.median(seconds)) for op, seconds in eager.items()}

    def pace(step: Mapping[tuple[str, str], float], speed: float) -> float:
        if not step:
            return speed
        found = float(np.exp(np.mean([np.log(seconds / usual[op]) for op, seconds in step.items()])))
        return found if found > DISTURBED * speed else speed

    return {
        source: [pace(step, speeds.get(source, 1.0)) for step in of_point] for source, of_point in steps.items()
    }


def _steps(m: Measurements) -> list[dict[tuple[str, str], float]]:
    """For every point, what the eager ops of its step took, which come first in each; empty for points of none."""
    found, last, step = list[dict[tuple[str, str], float]](), False, dict[tuple[str, str], float]()
    for p in m.points:
        in_step = p["op"] == "host" and _in_steps(p)
        is_eager = in_step and str(p["kind"]).startswith("eager")
        if is_eager:
            step = step if last else {}
            step[p["kind"], p["which"]] = float(np.median(p["samples_s"]))
        last = is_eager
        found.append(step if in_step else {})
    return found


def host_speeds(measurements: Sequence[Measurements]) -> dict[str, float]:
    """How long every machine's host takes over the mean of all, by file: for calls timed on all of them."""
    times: dict[str, dict[tuple[str, str], float]] = {}
    for m in measurements:
        for p in (p for p in m.of("host") if p.get("place") in ("in turns", "in bwd")):
            times.setdefault(m.source, {})[p["kind"], p["which"]] = float(np.median(p["samples_s"]))
    common = sorted(set.intersection(*map(set, times.values()))) if times else []
    logs = {source: float(np.mean(np.log([mine[call] for call in common]))) for source, mine in times.items() if common}
    return {source: float(np.exp(log - np.mean(list(logs.values())))) for source, log in logs.items()}


def _is_sweep(point: Point) -> bool:
    """Whether a point is of a kernel that real.measure_host times."""
    return point["op"] == "elementwise" and "which" in point


def _is_pause(point: Point) -> bool:
    return point["op"] == "host" and str(point["kind"]).startswith("pause")


def folds(points: Sequence[Point]) -> NDArray[np.int64]:
    """Fold of each point, by a hash of what was measured: the same in whatever files and order, and wherever it was.

    Points of a memory-bound kernel that would all be held out at once are in no fold (-1).
    """
    fold = np.array([zlib.crc32(json.dumps(_subject(p)).encode()) % FOLDS for p in points], np.int64)
    kinds: dict[tuple[str, str], list[int]] = {}
    for i, p in enumerate(points):
        if p["op"] in MEMORY_BOUND_OPS and model_of(p):
            kinds.setdefault((p["op"], p["kind"]), []).append(i)
    for mine in kinds.values():
        if len(set(fold[mine].tolist())) == 1:
            fold[mine] = -1
    return fold


def _subject(point: Point) -> list[Any]:
    """What a point is about; attention of the same shape is the same for all kernels and passes."""
    calls = ["q_lens", "k_lens", "num_heads", "num_kv_heads", "causal", "varlen", "mask", "options"]
    others = ["op", "kind", "which", "variant", "kernel", "num_ranks", "nbytes", "width", "m", "n", "k"]
    names = calls if point["op"] == "attention" else others
    return [point[name] for name in names if name in point]


def large_model(point: Point) -> bool:
    """Whether a model predicts a point and the accuracy bars count it."""
    return bool(model_of(point)) and large(point)


# --- attention ---

_START = {
    "pair_s": 1e-10, "block_s": 3e-6, "block_shared_s": 1e-6, "block_causal_s": 3e-7, "block_varlen_s": 3e-7,
    "block_decode_s": 2e-7, "call_s": 5e-6, "call_varlen_s": 2e-6, "traffic_s_per_byte": 2.8e-13,
    "busy_threshold": 0.8, "busy_power": 0.4, "alone_factor": 0.58, "split_pair_s": 3.8e-10, "split_call_s": 2e-6,
    "unaligned_factor": 1.02, "partial_pair_s": 3e-11, "celled_pair_s": 1e-10, "banded_pair_s": 2e-9,
    "banded_factor": 1.2, "query_pair_s": 2e-10, "older_share": 0.57,
}  # fmt: skip
_BOUNDS = {"busy_threshold": (0.3, 1.0), "busy_power": (1e-3, 1.5), "alone_factor": (0.5, 1.0),
           "older_share": (0.5, 0.8), "unaligned_factor": (1.0, 1.5), "banded_factor": (1.0, 2.5)}  # fmt: skip


def _free(kernel: str, pass_: str) -> tuple[tuple[str, ...], dict[str, float]]:
    """Names to fit and where all parameters start; what is not fitted has no effect."""
    flash2, forward = kernel in ("fa2", "sdpa_flash"), pass_ == "fwd"
    lists, naive = ANATOMY[kernel, pass_].lists_blocks, kernel in ("math", "sdpa_math")
    start = dict(_START)
    start["pair_s"] *= (1.0 if forward else 2.2) * ((3.4 if forward else 2.2) if flash2 else 1.0)
    if kernel == "math":  # on a CPU, which has no power limit that a call would meet
        start |= {"pair_s": 2e-8, "block_s": 2e-6, "block_shared_s": 1e-6, "block_varlen_s": 1e-5, "call_s": 3e-4,
                  "call_varlen_s": 1e-5, "traffic_s_per_byte": 1e-10, "busy_threshold": 1.0}  # fmt: skip
    if flash2:
        start |= {"busy_threshold": 0.85, "busy_power": 0.13}
        if forward:
            start |= {"block_causal_s": 4e-6, "block_s": 2e-6, "block_decode_s": 1.5e-7}
            start |= {"call_s": 4e-6, "call_varlen_s": 1e-6}
    if lists:
        start["pair_s"] *= 1.7
    unused = {"split_pair_s", "split_call_s", "alone_factor", "older_share"} if not (flash2 and forward) else set()
    unused |= {"block_varlen_s", "block_decode_s", "call_varlen_s"} if kernel == "cudnn" or lists else set()
    unused |= {"unaligned_factor"} if kernel not in ("cudnn", "sdpa_math") and not lists else set()
    unused |= {"block_shared_s", "block_causal_s"} if lists else {"partial_pair_s"}
    unused |= {"celled_pair_s", "banded_pair_s", "banded_factor"} if kernel != "flex" else set()
    unused |= {"query_pair_s"} if kernel != "flex" or forward else set()
    unused |= {"partial_pair_s"} if kernel == "fa4_sparse" else set()
    if ANATOMY[kernel, pass_].gathers_keys:  # neither causal nor dense
        unused |= {"block_causal_s", "block_varlen_s", "call_varlen_s"}
    if naive:
        unused |= {"block_causal_s", "busy_power"}
    for name in unused:
        start[name] = {"factor": 1.0, "share": 0.5}.get(name.rpartition("_")[2], 0.0)
    fixed = {"busy_threshold"} if naive else set()
    return tuple(name for name in FITTED if name not in unused | fixed), start


STEPS = (0.5, 0.25, 0.12, 0.06, 0.25, 0.12, 0.06)
"""Differences of logarithms for derivatives: replays of blocks jump a little, so wide ones come first, to see past
that, and once more from where narrow ones ended."""
SPARSE = 20
"""Fewer points of a kernel than this, as published tables have, fit few parameters; the others stand in."""
SPARSE_PRIOR, HEAD_DIM_PRIOR = 0.02, 0.05
"""Weights that hold the logarithms of parameters near where a fit to few points starts."""
SPARSE_FITTED = ("pair_s", "block_s", "block_causal_s", "call_s")
"""Those that long dense calls tell."""
HEAD_DIM_FITTED = (
    "pair_s", "partial_pair_s", "query_pair_s", "block_s", "block_causal_s", "split_pair_s", "call_s",
    "unaligned_factor",
)
"""Those that change with the head dimension, other than in proportion."""


def _attention(
    points: Sequence[Point], num_sms: int, stand_in: StandIn | None
) -> tuple[dict[tuple[str, str], AttentionParams], dict[str, Covariance]]:
    """Least squares of log time, outliers softened, for every kernel and pass, on all CPUs."""
    points = [p for p in points if p["op"] == "attention"]
    keys = sorted({(p["kernel"], p["pass"]) for p in points})
    for key in keys:
        if key not in ANATOMY:
            raise ProfileError(f"no model for attention kernel {' '.join(key)}; known are {sorted(ANATOMY)}")
    groups = [[p for p in points if (p["kernel"], p["pass"]) == key] for key in keys]
    starts = [
        stand_in.start(key, num_sms) if stand_in and len(mine) < SPARSE else None
        for key, mine in zip(keys, groups, strict=True)
    ]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(_fit_kernel, keys, groups, [num_sms] * len(keys), starts))
    params = {key: fitted for key, (fitted, _) in zip(keys, found, strict=True)}
    return params, {f"attention {pass_} {kernel}": c for (kernel, pass_), (_, c) in zip(keys, found, strict=True)}


def _fit_kernel(
    key: tuple[str, str], points: Sequence[Point], num_sms: int, sparse: AttentionParams | None = None
) -> tuple[AttentionParams, Covariance]:
    """One kernel and pass; from `sparse` parameters where there are too few points to fit all of them.

    Points of the commonest head dimension tell everything but what changes at others.
    """
    if sparse is not None:
        return _fit_few(points, sparse, SPARSE_FITTED, SPARSE_PRIOR)
    (head_dim, _), *_ = Counter(p["head_dim"] for p in points).most_common()
    others = [p for p in points if p["head_dim"] != head_dim]
    points = [p for p in points if p["head_dim"] == head_dim]
    names, start = _free(*key)
    rules = {_rule_of(p) for p in points}
    for name, rule in (("celled_pair_s", CELLS), ("banded_pair_s", BANDS), ("banded_factor", BANDS)):
        if rule not in rules:
            names, start = tuple(n for n in names if n != name), start | {name: float(name == "banded_factor")}
    times = measured(points)

    def build(x: Floats) -> AttentionParams:
        values = start | dict(zip(names, np.exp(x).tolist(), strict=True))
        return AttentionParams(anatomy=ANATOMY[key], num_sms=num_sms, head_dim=int(head_dim), **values)

    def error(x: Floats) -> Floats:
        return np.asarray(np.log(predicted_attention(build(x), points) / times))

    bounds = np.log([_BOUNDS.get(name, (start[name] * 1e-3, start[name] * 30)) for name in names])
    x, jacobian = np.log([start[name] for name in names]), np.empty(0)
    for step in STEPS:
        fit = least_squares(
            error, x, bounds=(bounds[:, 0], bounds[:, 1]), loss="soft_l1", f_scale=0.03,
            diff_step=step / np.maximum(1, np.abs(x)), max_nfev=20,
        )  # fmt: skip
        x, jacobian = fit.x, fit.jac
    physical = build(x)
    fitted, left_over = _with_discrepancy(physical, points)
    return _with_head_dims(key, fitted, others), _covariance(names, jacobian, left_over)


def _with_discrepancy(params: AttentionParams, points: Sequence[Point]) -> tuple[AttentionParams, Floats]:
    """The same with a model of what it leaves over of these points, and that, log(predicted / measured)."""
    predicted, features = predicted_calls(params, points)
    left_over = np.log(predicted / measured(points))
    return replace(params, discrepancy=fit_discrepancy(features, left_over)), left_over


def _with_head_dims(key: tuple[str, str], params: AttentionParams, points: Sequence[Point]) -> AttentionParams:
    """What other head dimensions change, from the few points that each has."""
    fitted, names = [], [name for name in HEAD_DIM_FITTED if name in _free(*key)[0]]
    for dim in sorted({p["head_dim"] for p in points}):
        scale = dim / params.head_dim
        start = {name: getattr(params, name) * scale for name in PER_PAIR}
        other = replace(params, anatomy=anatomy_at(*key, dim), head_dim=dim, discrepancy=NONE, **start)
        mine = [p for p in points if p["head_dim"] == dim]
        fitted.append(_with_discrepancy(_fit_few(mine, other, names, HEAD_DIM_PRIOR)[0], mine)[0])
    return replace(params, head_dims=tuple(fitted))


def _fit_few(
    points: Sequence[Point], start: AttentionParams, fitted: Sequence[str], prior: float
) -> tuple[AttentionParams, Covariance]:
    """The parameters that few points tell, near those of `start`, whose others are kept."""
    times = measured(points)
    names = tuple(name for name in fitted if getattr(start, name) > 0)
    first = np.log([getattr(start, name) for name in names])

    def build(x: Floats) -> AttentionParams:
        factors = dict(zip(names, np.exp(x - first).tolist(), strict=True))
        return start.everywhere(lambda params: _scaled(params, factors))

    def error(x: Floats) -> Floats:
        return np.concatenate([np.log(predicted_attention(build(x), points) / times), prior * (x - first)])

    step = 0.05 / np.maximum(1, np.abs(first))
    fit = least_squares(error, first, loss="soft_l1", f_scale=0.03, diff_step=step, max_nfev=60)
    return build(fit.x), _covariance(names, fit.jac, fit.fun[: len(points)])


def _scaled(params: AttentionParams, factors: Mapping[str, float]) -> AttentionParams:
    """Parameters times factors."""
    return replace(params, **{name: getattr(params, name) * factor for name, factor in factors.items()})


LENGTHS = (1.5, 1.5, 1.5, 1.0, 3.0, 3.0, 3.0, 0.4, 0.3, 1.0, 1.0)
"""Prior scales of blocks.FEATURES, by what they mean: octaves of waves, tiles, unevenness, causal, ..."""
DISCREPANCY = 0.05
"""Prior standard deviation of what the model leaves over."""
SUPPORT = 150
"""Support points of a discrepancy."""
TRUSTED = 0.25
"""Larger leftovers count as this: a single call does not speak for its neighbours."""


def fit_discrepancy(features: Floats, left_over: Floats) -> Discrepancy:
    """A sparse Gaussian process of `left_over` [N] over `features` [N, FEATURES]; see models/discrepancy.py.

    Noise and a common factor of the length scales maximise the marginal likelihood; support points are chosen
    greedily where the process is least certain (pivoted Cholesky decomposition).
    """
    y = np.clip(left_over, -TRUSTED, TRUSTED)

    def likelihood(noise: float, factor: float) -> float:
        matrix = _kernel_matrix(features, features, factor) + noise**2 * np.eye(len(y))
        root = np.linalg.cholesky(matrix)
        half = np.linalg.solve(root, y)
        return float(-0.5 * half @ half - np.log(np.diag(root)).sum())

    _, noise, factor = max((likelihood(n, f), n, f) for n in (0.01, 0.015, 0.02, 0.03) for f in (0.6, 1.0, 1.6))
    full = _kernel_matrix(features, features, factor)
    chosen: list[int] = []
    columns = np.zeros((len(y), 0))
    for _ in range(min(SUPPORT, len(y))):
        uncertain = np.diag(full) - (columns**2).sum(axis=1)
        at = int(np.argmax(uncertain))
        if uncertain[at] < 1e-2 * DISCREPANCY**2:
            break
        column = (full[:, at] - columns @ columns[at]) / np.sqrt(uncertain[at])
        chosen, columns = [*chosen, at], np.column_stack([columns, column])
    near, of_all = full[np.ix_(chosen, chosen)], full[:, chosen]
    weights = np.linalg.solve(noise**2 * near + of_all.T @ of_all + 1e-10 * np.eye(len(chosen)), of_all.T @ y)
    return Discrepancy(
        lengths=tuple((factor * np.array(LENGTHS)).tolist()),
        support=tuple(tuple(row) for row in features[chosen].tolist()),
        weights=tuple((weights * DISCREPANCY**2).tolist()),
    )


def _kernel_matrix(a: Floats, b: Floats, factor: float) -> Floats:
    """Prior covariance between points, [len(a), len(b)]."""
    distance = (a[:, None] - b[None]) / (factor * np.array(LENGTHS))
    return np.asarray(DISCREPANCY**2 * np.exp(-0.5 * (distance**2).sum(axis=-1)))


def _covariance(names: Sequence[str], jacobian: Floats, errors: Floats) -> Covariance:
    """Of the logarithms, from the Jacobian; parameters without influence get a variance of 1."""
    weak = np.linalg.norm(jacobian, axis=0) < 1e-6
    information = jacobian.T @ jacobian + np.diag(np.where(weak, 1.0, 1e-9))
    variance = float((errors**2).mean())
    matrix = np.linalg.pinv(information) * np.where(np.outer(weak, weak), 1.0, variance)
    return {"names": list(names), "covariance": matrix.tolist()}


# --- memory-bound kernels and the host ---


def _elementwise(chosen: Sequence[Point], stand_in: StandIn | None) -> ElementwiseParams:
    """Latency and bandwidth of each kind, least squares of log time."""
    points = [p for p in chosen if p["op"] == "elementwise"]
    if not points and stand_in:
        return stand_in.elementwise()
    if not points:
        raise ProfileError("a profile needs elementwise points: add a file of real.measure_kernels")
    latency, bandwidth = {}, {}
    for kind in sorted({p["kind"] for p in points}):
        mine = [p for p in points if p["kind"] == kind]
        nbytes = np.array([p["nbytes"] for p in mine], float)
        latency[kind], bandwidth[kind] = latency_and_bandwidth(nbytes, measured(mine))
    return ElementwiseParams(latency_s=latency, bandwidth_bytes_per_s=bandwidth)


def _host(points: Sequence[Point], tiny_copy_s: float, stand_in: StandIn | None) -> HostParams:
    """Median launch times: an attention kernel's entry points count alike, and edges of one code with all its
    strategies and kernels; of calls of a step the first round counts apart.

    A graph of one tiny copy takes the graph's launch and what the copy takes in a long chain of them; between two
    events it takes `tiny_copy_s`. A chain that goes to and from a second stream takes more.
    """
    if stand_in and not points:
        return stand_in.profile.host
    samples: dict[str, list[float]] = {}
    for point in points:
        kind = str(point["kind"])
        if kind.endswith(("_dense", "_varlen")):  # such as sdpa_flash_fwd_dense
            kernel, pass_, _ = kind.rsplit("_", 2)
            kind = f"{kernel} {pass_}"
        elif kind == "transfer_pair":
            kind = "transfer"
        elif " begin " in kind or " end " in kind:  # such as torch sdpa_flash begin fwd
            code, *_, edge, pass_ = kind.split()
            kind = f"{code} {edge} {pass_}"
        times = point["samples_s"]
        if _in_steps(point):
            samples.setdefault(f"{kind} first", []).append(float(np.median(times[::ROUNDS])))
            times = [t for i, t in enumerate(times) if i % ROUNDS]
        samples.setdefault(kind, []).append(float(np.median(times)))
    launch = {kind: float(np.median(times)) for kind, times in sorted(samples.items())}
    graphs = {kind: launch.pop(kind) for kind in list(launch) if kind.startswith("graph")}
    pauses = {kind.split("_")[1]: launch.pop(kind) for kind in list(launch) if kind.startswith("pause")}
    if stand_in:
        launch = {**stand_in.profile.host.launch_s, **launch}
    graph_s = gain_s = cross_s = 0.0
    if "graph_chain_1" in graphs:
        each, across = ((graphs[f"graph_{name}_64"] - graphs[f"graph_{name}_16"]) / 48 for name in ("chain", "across"))
        cross_s = max(0.0, across - each)
        graph_s, gain_s = max(0.0, graphs["graph_chain_1"] - each), max(0.0, tiny_copy_s - each)
    return HostParams(
        launch_s=launch, event_s=launch.pop("event", 0.0), lead_s=1e-3, graph_s=graph_s,
        graph_cross_s=cross_s, captured_gain_s=gain_s,
        pause_s={"synced": 0.0, "streamed": 0.0} | pauses,
    )  # fmt: skip


MEMORY_BOUND = ("copy", "accumulate", "merge")


def _load(points: Sequence[Point]) -> dict[str, float]:
    """Power that ops draw above an idle GPU's, relative to what the limit allows: the most that any load draws."""
    watts = {p["kind"]: float(np.mean(p["watts"])) for p in points}
    if not {"idle", "transfer", "all_gather", *MEMORY_BOUND} < watts.keys() or not all(watts.values()):
        return {}
    share = {kind: (w - watts["idle"]) / (max(watts.values()) - watts["idle"]) for kind, w in watts.items()}
    return {
        "memory-bound": float(np.mean([share[kind] for kind in MEMORY_BOUND])),
        "transfer": share["transfer"], "collective": share["all_gather"],
    }  # fmt: skip


# --- network ---


def fit_curve(nbytes: Floats, seconds: Floats) -> Curve:
    """A monotone curve through noisy points: least squares of log time on the heights of fixed knots.

    Heights are the first knot's and non-negative steps, so the curve never falls.
    """
    low, high = float(nbytes.min()), float(nbytes.max())
    num = max(2, 1 + round(np.log(high / low) / np.log(KNOT_RATIO)))
    knots = np.geomspace(low, high, num)
    position = np.interp(np.log(nbytes), np.log(knots), np.arange(num))
    left = np.minimum(position.astype(int), num - 2)
    hat = np.zeros((len(nbytes), num))
    rows = np.arange(len(nbytes))
    hat[rows, left], hat[rows, left + 1] = 1 - (position - left), position - left
    steps = hat @ np.tril(np.ones((num, num)))
    bend = np.zeros((num - 2, num))  # a weak wish for straightness decides knots without points
    for i in range(num - 2):
        bend[i, i + 1 : i + 3] = -1e-2, 1e-2
    least = np.concatenate([[-np.inf], np.zeros(num - 1)])
    target = np.concatenate([np.log(seconds), np.zeros(num - 2)])
    heights = np.cumsum(lsq_linear(np.vstack([steps, bend]), target, bounds=(least, np.inf)).x)
    return Curve(nbytes=tuple(knots.tolist()), seconds=tuple(np.exp(heights).tolist()))


def _collective(
    chosen: Sequence[Point], everything: Sequence[Point], stand_in: StandIn | None
) -> CollectiveParams:
    """Curves of collectives and transfers, and the capacity of a port from everything that ran at once."""
    points = [p for p in chosen if p["op"] in ("collective", "transfer")]
    inside = [p for p in chosen if p["op"] == "fabric" and p["kind"] == "inside"]
    theirs = stand_in.collective() if stand_in else None
    if theirs and not points:
        return theirs
    curves: dict[str, dict[int, Curve]] = {}
    for kind in COLLECTIVES:
        mine_by_ranks = {n: [p for p in points if p["kind"] == kind and p["num_ranks"] == n]
                         for n in sorted({p["num_ranks"] for p in points if p["kind"] == kind})}  # fmt: skip
        most = max(map(len, mine_by_ranks.values()), default=0)
        for num_ranks, mine in mine_by_ranks.items():
            if len(mine) < FEWEST[most < FEWEST[0]]:  # too few aligned sizes: interpolated between group sizes instead
                continue
            wire = wire_bytes(kind, np.array([p["nbytes"] for p in mine]), num_ranks)
            curves.setdefault(kind, {})[num_ranks] = fit_curve(wire, measured(mine))
        if kind not in curves and theirs:
            curves[kind] = dict(theirs.curves[kind])
        elif kind not in curves:
            raise ProfileError(f"a profile needs {kind} points: add a file of real.measure_network")
    rings, transfers = {}, {}
    for number, mine in _by_channels([*points, *inside]).items():
        rings[number] = fit_curve(*_columns(mine))
    for pattern in sorted({p["kind"] for p in points if p["op"] == "transfer"} - {"ring"}):
        transfers[pattern] = fit_curve(*_columns([p for p in points if p["kind"] == pattern]))
    if theirs:
        rings, transfers = {**theirs.rings, **rings}, {**theirs.transfers, **transfers}
    hop = {kind: _hop_seconds(by) for kind, by in curves.items()}
    port = _port(everything, max(points, key=lambda p: p["num_ranks"])["num_ranks"])
    return CollectiveParams(curves=curves, hop_s=hop, rings=rings, transfers=transfers, port_bytes_per_s=port)


def _by_channels(points: Sequence[Point]) -> dict[int, list[Point]]:
    """Messages of rings, and of those inside a node whose process group spans nodes, by NCCL's channels."""
    found: dict[int, list[Point]] = {}
    for p in points:
        if p["op"] == "fabric":
            number = ring_channels(p["nbytes"], p["num_nodes"] * p["gpus_per_node"], p["num_nodes"])
        elif p["op"] == "transfer" and p["kind"] == "ring":
            number = ring_channels(p["nbytes"], p["num_ranks"])
        else:
            continue
        found.setdefault(int(number), []).append(p)
    return dict(sorted(found.items()))


def _columns(points: Sequence[Point]) -> tuple[Floats, Floats]:
    return np.array([p["nbytes"] for p in points], float), measured(points)


def _hop_seconds(curves: Mapping[int, Curve]) -> float:
    """Latency that one more rank adds, from the smallest sizes."""
    few, many = min(curves), max(curves)
    return max(0.0, (curves[many].seconds[0] - curves[few].seconds[0]) / max(1, many - few))


def _port(points: Sequence[Point], num_ranks: int) -> float:
    """Highest wire rate of one port in one direction that any operation or pair of them reached."""
    rates = [0.0]
    for p in points:
        if p["op"] == "collective" and usable(p):
            rates.append(float(wire_bytes(p["kind"], p["nbytes"], p["num_ranks"])) / float(np.median(p["samples_s"])))
        if p["op"] == "interference" and all(p[side].rsplit("_", 1)[-1].isdigit() for side in "ab"):
            rate = 0.0
            for side in "ab":
                kind, size = p[side].rsplit("_", 1)
                if kind.startswith(("fa", "math")):
                    break
                share = 1.0 if kind.startswith("ring") else (num_ranks - 1) / num_ranks
                together = p[f"{side}_together_s"]
                rate += int(size) * 2**20 * share / float(np.median(together)) if together else 0.0
            else:
                rates.append(rate)
    return max(rates)


# --- interference ---


def _interference(points: Sequence[Point]) -> InterferenceParams:
    """Slowdowns from overlaps and from communications that wait, of all shapes together.

    How much a computation is slowed is seen both where it lies inside a communication and where a communication lies
    inside it; a communication's slowdown only where it lies inside.
    """
    computation, communication = _overlaps([p for p in points if p["op"] == "overlap"])

    def factors(store: Spans) -> dict[str, dict[str, float]]:
        return {a: {b: _slowdown(spans) for b, spans in by.items()} for a, by in sorted(store.items())}

    return InterferenceParams(
        computation=factors(computation),
        communication=factors(communication),
        waiting=factors(_waits([p for p in points if p["op"] == "waiting"])),
    )


Spans = dict[str, dict[str, list[tuple[float, float]]]]
"""By the names of both ops: seconds that one ran beside the other, and what it lost in them."""
LEAST_OVERLAP: Final = 0.2
"""Share of an op's time during which another has to run beside it, for its loss to stand out from noise."""


def _overlaps(points: Sequence[Point]) -> tuple[Spans, Spans]:
    """What computations lose beside communications, and the reverse."""
    computation: Spans = {}
    communication: Spans = {}
    for p in points:
        name, other = _names(p)
        alone, together = ([float(np.median(p[f"{s}_{how}_s"])) for s in "ab"] for how in ("alone", "together"))
        beside = min(together)
        for store, i in ((computation, 0), (communication, 1)):
            if beside > LEAST_OVERLAP * together[i] and (i == 0 or p["inside"] == "b"):
                lost = together[i] - alone[i]
                store.setdefault(name, {}).setdefault(other, []).append((beside, lost))
    return computation, communication


def _waits(points: Sequence[Point]) -> Spans:
    """What computations lose beside communications that wait."""
    store: Spans = {}
    for p in points:
        name, other = _names(p)
        alone, beside = (float(np.median(p[f"a_{how}_s"])) for how in ("alone", "beside"))
        store.setdefault(name, {}).setdefault(other, []).append((beside, beside - alone))
    return store


def _names(p: Point) -> tuple[str, str]:
    """Computation and communication of a point, as the interference model names them."""
    words = p["a"].rsplit("_", 2)  # kernel, pass, tokens
    name = f"{words[0]} {words[1]}" if len(words) > 2 else "memory-bound"
    return name, f"transfer {channels(p['nbytes'], p['num_ranks'])}" if p["b"] == "ring" else p["b"]


def _slowdown(spans: Sequence[tuple[float, float]]) -> float:
    """Time beside another op over what the same work takes alone, at least 1."""
    beside, lost = np.sum(spans, axis=0)
    return max(1.0, float(beside / (beside - lost))) if lost < beside else 1.0


# --- uncertainty, validity, provenance ---


def _sigma(rows: Sequence[Residual], models: set[str], run_to_run: float) -> dict[str, float]:
    """Standard deviations by model, such that a normal 90 % interval holds 90 % of the held-out errors."""

    def spread(prefix: str) -> float:
        errors = [abs(row.error) for row in rows if row.model.startswith(prefix)]
        return float(np.quantile(errors, 0.9)) / 1.645 if errors else 0.05

    sigma = {model: spread(model) for model in sorted(models | {"collective"})}
    return sigma | {"host": 0.2, "run to run": run_to_run}  # assumed, where one machine's was measured


def _covered(by_fold: Sequence[Sequence[Residual]]) -> dict[str, float]:
    """Share of held-out points inside the 90 % interval that the errors of the other folds give, by model."""
    inside: dict[str, list[bool]] = {}
    for i, mine in enumerate(by_fold):
        errors: dict[str, list[float]] = {}
        for row in (row for j, rows in enumerate(by_fold) if j != i for row in rows):
            errors.setdefault(row.model, []).append(abs(row.error))
        for row in mine:
            width = float(np.quantile(errors.get(row.model, [0.0]), 0.9))
            inside.setdefault(row.model, []).append(abs(row.error) <= width)
    return {model: float(np.mean(each)) for model, each in inside.items()}


def _spreads(points: Sequence[Point]) -> dict[str, float]:
    """Standard deviations, relative, of what overlapping costs (over shapes) and of graph launches (over ranks)."""
    spread = {"interference": 0.5, "graph": 0.3}
    computation, _ = _overlaps([p for p in points if p["op"] == "overlap"])
    spans = [np.array(spans) for by in computation.values() for spans in by.values()]
    shares = [lost / beside for beside, lost in (mine.T for mine in spans)]
    if shares:
        spread["interference"] = float(np.std(np.concatenate([x / x.mean() for x in shares if x.mean() > 0.02])))
    launches = [np.median(p["samples_s"]) for p in points if p["op"] == "host" and p["kind"] == "graph_chain_1"]
    if len(launches) > 1:
        spread["graph"] = float(np.std(np.log(launches)))
    return spread


def _run_to_run(profile: Profile, kernels: Sequence[Measurements]) -> float:
    """Spread between GPUs of one type over all kernels, at least 1 %."""
    means = [float(np.mean(errors)) for errors in _errors_by_gpu(profile, kernels, "attention").values()]
    return max(0.01, float(np.std(means, ddof=1)) if len(means) > 1 else 0.0)


def _between_gpus(profile: Profile, kernels: Sequence[Measurements]) -> dict[str, float]:
    """Spread between GPUs of one type of every kernel and pass that was measured on several."""
    spreads = {}
    for kernel, pass_ in profile.attention:
        errors = _errors_by_gpu(profile, kernels, model := f"attention {pass_} {kernel}")
        several = [mine for mine in errors.values() if len(mine) >= FEWEST_OF_GPU]
        if len(several) > 1:
            of_means = float(np.mean([np.var(mine, ddof=1) / len(mine) for mine in several]))
            variance = float(np.var([np.mean(mine) for mine in several], ddof=1)) - of_means
            spreads[f"{model} between GPUs"] = max(variance, 0.0) ** 0.5
    return spreads


def _errors_by_gpu(profile: Profile, kernels: Sequence[Measurements], model: str) -> dict[tuple[str, int], list[float]]:
    """Errors on long calls without a pause, by file and rank; of kernels that several GPUs were measured with."""
    gpus: dict[tuple[str, int], list[Point]] = {}
    users = {(p["kernel"], m.source, p.get("rank", 0)) for m in kernels for p in m.of("attention")}
    several = Counter(kernel for kernel, *_ in users)
    for m in kernels:
        for p in m.of("attention"):
            if several[p["kernel"]] > 1 and np.median(p["samples_s"]) > LONG_CALL_S and pause_of(p) == 0:
                if not model_of(p).startswith(model):
                    continue
                gpus.setdefault((m.source, p.get("rank", 0)), []).append(p)
    return {gpu: [row.error for row in residuals(profile, long)] for gpu, long in gpus.items()}


def _valid(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """Smallest and largest measured value of what each model depends on."""
    seen: dict[str, tuple[float, float]] = {}

    def note(key: str, low: float, high: float) -> None:
        a, b = seen.get(key, (low, high))
        seen[key] = (float(min(a, low)), float(max(b, high)))

    for p in points:
        if p["op"] == "attention":
            key = f"attention {p['pass']} {p['kernel']}"
            note(f"{key} queries", min(p["q_lens"]), max(p["q_lens"]))
            note(f"{key} keys", min(p["k_lens"]), max(p["k_lens"]))
            note(f"{key} heads", p["num_heads"], p["num_heads"])
            note(f"{key} head_dim", p["head_dim"], p["head_dim"])
            if (rule := _rule_of(p)) is not None:
                note(f"{key} rule", rule, rule)
        elif p["op"] == "gemm":
            note("matrix products", flops := 2 * p["m"] * p["n"] * p["k"], flops)
        elif p["op"] in ("collective", "transfer", "elementwise"):
            key = {"elementwise": "memory-bound", "transfer": "transfer"}.get(p["op"], f"collective {p['kind']}")
            note(key, p["nbytes"], p["nbytes"])
    several = {key: ends for key, ends in seen.items() if not key.endswith("head_dim") or ends[0] < ends[1]}
    return dict(sorted(several.items()))


def _rule_of(point: Point) -> int | None:
    """How pairs of partial blocks are decided in a call of a kernel that lists blocks, if it has such blocks."""
    if not ANATOMY[point["kernel"], point["pass"]].lists_blocks:
        return None
    return visits_of(point).partial_rule()


def _grade(gpu: str, networks: Sequence[Measurements]) -> str:
    if networks and all("files" in m.header for m in networks):
        return "kernels measured here, network from logs of nccl-tests"
    others = sorted({m.header["gpu"] for m in networks} - {gpu})
    if others:
        return f"kernels measured here, network measured on {', '.join(others)} (same NVLink generation)"
    return "measured here"


def _source(m: Measurements, gpu: str) -> dict[str, Any]:
    use = "network, host launches of communication, interference" if m.of("collective") else "launches, power, copies"
    use = "interference" if m.of("waiting") else use
    use = "kernels" if m.of("attention") else use
    use = "matrix products and memory-bound ops of layers" if m.of("gemm") else use
    use = "everything" if m.of("attention") and m.of("collective") else use
    if m.header["gpu"] != gpu:
        use += f" (stands in for {gpu}: same NVLink generation)"
    kept = ("gpu", "num_gpus", "driver", "cuda", "cudnn", "nccl", "torch", "kernels", "date", "commit", "command")
    return {"file": m.source, "used_for": use} | {key: m.header[key] for key in kept if key in m.header}
