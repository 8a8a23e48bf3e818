"""Fits a profile from measurement files; errors are those of points that were not fitted.

Every point is predicted once by models fitted to the other four fifths of the points (five-fold cross-validation, as
in Hastie, Tibshirani and Friedman, "The Elements of Statistical Learning", section 7.10); the profile itself is
fitted to all. End-to-end runs are never used. Deterministic: the same files give the same profile, byte for byte where
processor and libraries round alike; else fits of calls of few blocks, whose time has steps, may end 1 % apart on
average, single calls 14 %, with errors that are as large on average.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.calibrate.fit_attention import QUARTILES, fit_attention, kernels_of, rule_of, with_enough_calls
from cpsim.calibrate.fit_host import (
    FIRST_CALL,
    IN_GRAPHS,
    called,
    fit_elementwise,
    fit_hosts,
    fit_load,
    graph_start,
    host_paces,
    host_spread,
    in_steps,
    on_mean_host,
)
from cpsim.calibrate.fit_layers import fit_layers
from cpsim.calibrate.fit_network import fit_collective, fit_interference, overlaps
from cpsim.calibrate.fit_shapes import fit_shapes, is_usual
from cpsim.calibrate.measurement import Measurements, Point
from cpsim.calibrate.residuals import (
    MEMORY_BOUND_OPS,
    Residual,
    large,
    model_of,
    pause_of,
    residuals,
    summary,
    usable,
)
from cpsim.errors import ProfileError
from cpsim.masks.blocks import BANDS, RUNS
from cpsim.models.attention.kernels import KERNELS
from cpsim.models.derive import PUBLISHED
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.parameters import IN_TURNS, LayerCosts
from cpsim.models.profile import Profile
from cpsim.models.spread import NINETIES
from cpsim.models.standin import StandIn

FOLDS = 5
EARLY_S: Final = (0.15, 0.6)
"""Of a run from idle: when the clock has come down and the limiter, which looks at a second or so, has not set in; the
calls that kernels are fitted to are of this age."""
LEAST_S, LATE = 1.5, 0.85
"""Seconds that a run lasts at least to tell what a steady state is, and the share of them after which it is one."""
WINDOW_S: Final = 0.2
"""What one looks at to time a steady state; the limiter swings within a second."""
ASSUMED_SUSTAINED: Final = 0.025
"""Deviation of kernels in a steady state, where it was not measured; H100 and H200 have it."""
PASSES: Final = (" fwd", " bwd")
STANDS_IN = ("elementwise", "host", "collective", "transfer")
"""Ops of another GPU's machines that count where there are none of this one's."""
FEWEST_OF_GPU, LONG_CALL_S = 5, 3e-4
"""Calls of a kernel that say something about a GPU, and how long they take."""


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
    shaped = [p for m in measurements for p in m.of("attention") if usable(p) and not is_usual(p)]
    sources = tuple(measurements)
    measurements = [replace(m, points=tuple(filter(is_usual, m.points))) for m in measurements]
    kernels = [m for m in measurements if m.of("attention")]
    networks = [m for m in measurements if m.of("collective")]
    gpus = sorted({m.header["gpu"] for m in kernels})
    if len(gpus) != 1:
        raise ProfileError(f"a profile needs attention points of one GPU type, got {', '.join(gpus) or 'none'}")
    if not networks and stand_in is None:
        raise ProfileError(
            "a profile needs collective points: add a file of cpsim.real.measure.network, or give --base"
        )
    everything = current(measurements, gpus[0])
    points = with_enough_calls([p for p in everything if usable(p)], stand_in)
    kernels_of(points)  # also of one call, which is left out of the fit that judges it
    fold = folds(points)
    counted = large_model if gpus[0] != "cpu" else model_of
    num_sms = int(kernels[0].header["num_sms"])

    def build(chosen: Sequence[Point]) -> Profile:
        copies, network = fit_elementwise(chosen, stand_in), fit_collective(chosen, everything, stand_in)
        return Profile(
            name=name or gpus[0].removeprefix("NVIDIA ").split()[0].lower(),
            gpu=gpus[0],
            grade=_grade(gpus[0], networks),
            attention=fit_attention(chosen, num_sms, stand_in),
            collective=network,
            elementwise=copies,
            host=fit_hosts(chosen, copies, stand_in),
            interference=fit_interference(everything),
            load=fit_load(of_all_loads(measurements), network.port_bytes_per_s),
            sigma={},
            valid=_valid(points),
            held_out=(),
            provenance=tuple(_source(m, gpus[0]) for m in sources),
            layers=fit_layers(chosen, num_sms, copies),
            sustained=_sustained(measurements, stand_in.profile.sustained if stand_in else {}),
        )

    by_fold: list[list[Residual]] = []
    for i in range(FOLDS if check else 0):
        inside = [p for p, k in zip(points, fold, strict=True) if k != i or not model_of(p)]
        outside = [p for p, k in zip(points, fold, strict=True) if k == i and counted(p)]
        by_fold.append(residuals(build(inside), outside))
    rows, covered = [row for rows in by_fold for row in rows], _covered(by_fold)
    profile = build(points)
    models = {row.model for row in rows} or set(filter(None, map(model_of, points)))
    sigma = _sigma(rows, models, _run_to_run(profile, kernels)) | _spreads(everything) | _between_gpus(profile, kernels)
    sigma |= dict(zip(("host", "host thread"), host_spread(measurements), strict=True))
    sigma |= {"sustained": fit_sustained(everything)[1]}
    held_out = tuple(row | {"covered": covered[row["model"]]} for row in summary(rows))
    attention = fit_shapes(profile.attention, shaped)
    profile = replace(profile, held_out=held_out, sigma=sigma, attention=attention)
    return profile if stand_in is None else _completed(profile, points, kernels, stand_in)


def _completed(
    profile: Profile, points: Sequence[Point], kernels: Sequence[Measurements], stand_in: StandIn
) -> Profile:
    """A profile with what stands in for the parts that were not measured, and with words that say so."""
    theirs, ops = stand_in.profile, {p["op"] for p in points}
    measured_models = {model_of(p) for p in points if p["op"] != "transfer"} | (ops & {"transfer"})
    spare = {key: value for key, value in stand_in.kernels(profile.gpu).items() if key not in profile.attention}
    parts = {
        "memory-bound kernels": "elementwise" not in ops,
        "network": not {"collective", "transfer"} <= ops,
        "host launches": "host" not in ops,
        "interference": not profile.interference.computation,
        "power": not profile.load,
        "layers": not profile.layers and stand_in.layers(profile.gpu) is not None,
        f"kernels {', '.join(sorted({k for k, _ in spare}))}": bool(spare),
        "a start for kernels": any(
            alike is not None and alike.head_dim == params.head_dim
            for key, params in profile.attention.items()
            for alike in [stand_in.alike(key, params.num_sms)]
        ),
    }
    attention = {**spare, **profile.attention}
    others = tuple(f"attention {pass_} {kernel} " for kernel, pass_ in theirs.attention.keys() - spare.keys())
    lent = {key: ends for key, ends in theirs.valid.items() if not key.startswith(others)}
    borrowed = [part for part, missing in parts.items() if missing]
    models = {f"attention {pass_} {kernel}" for kernel, pass_ in spare} | {
        m
        for m in theirs.sigma
        if not m.startswith("attention") and m not in ("run to run", "host", "host thread", "sustained", "graph")
    }
    if profile.interference.computation:
        models -= {"interference"}
    published = all("published" in m.header for m in kernels)
    grade = profile.grade
    if published:
        varlen = any(p["varlen"] for p in points if p["op"] == "attention")
        newest = max((int(m.header.get("kernels", {}).get("cudnn", 0)) for m in kernels), default=0)
        of_code = f" (cuDNN up to {newest // 10_000}.{newest // 100 % 100})" if newest else ""
        grade = f"kernels from published figures{'' if varlen else ' of single documents'}{of_code}"
        mine = {f"attention {pass_} {kernel}" for kernel, pass_ in profile.attention}
        wider = {model: float(np.hypot(sigma, PUBLISHED * (model in mine))) for model, sigma in profile.sigma.items()}
        profile = replace(profile, sigma=wider)
    source = {
        "file": f"profile {stand_in.source.name}",
        "gpu": stand_in.source.gpu,
        "used_for": stand_in.words(borrowed),
    }
    return replace(
        profile,
        grade=f"{grade}; {stand_in.words(borrowed)}" if borrowed else grade,
        attention=attention,
        interference=profile.interference if profile.interference.computation else theirs.interference,
        load=profile.load or theirs.load,
        layers=with_kinds(profile.layers, stand_in.kinds(profile.gpu)) or stand_in.layers(profile.gpu),
        sigma={**profile.sigma, **{m: theirs.sigma[m] for m in models - measured_models}},
        valid=dict(sorted({**lent, **profile.valid}.items())),
        provenance=(*profile.provenance, source) if borrowed else profile.provenance,
    )


def with_kinds(mine: LayerCosts | None, theirs: LayerCosts | None) -> LayerCosts | None:
    """Costs of layers, with kinds of memory-bound ops that were not measured from others' costs."""
    if mine is None or theirs is None:
        return mine
    ops = ElementwiseParams(
        latency_s={**theirs.ops.latency_s, **mine.ops.latency_s},
        bandwidth_bytes_per_s={**theirs.ops.bandwidth_bytes_per_s, **mine.ops.bandwidth_bytes_per_s},
    )
    return replace(mine, ops=ops)


def current(measurements: Sequence[Measurements], gpu: str) -> list[Point]:
    """All points that describe this GPU and the code as it is.

    Memory-bound kernels, collectives and transfers of another GPU and graphs of its hosts stand in only where this
    one's were not measured, while calls of all hosts count alike, at the pace of this one's; the executor's own form of
    a kernel replaces others. Launches of the executor's single ops do
    not count: its programs are captured. Of the pause between two iterations, which the timing code makes, and of each
    of PyTorch's own sweeps, which take alike on all machines, the latest measurement counts. Overlaps count where the
    size of what was sent is known and the communication came first.
    """
    paused = [m.header["date"] for m in measurements if any(_is_pause(p) for p in m.points)]
    swept: dict[str, str] = {}
    for m in measurements:
        swept |= {p["kind"]: max(swept.get(p["kind"], ""), m.header["date"]) for p in m.points if _is_sweep(p)}
    stepped = {p["kind"] for m in measurements for p in m.of("host") if in_steps(p)}
    paces = host_paces(measurements, gpu)
    mine = {_what(p) for m in measurements if m.header["gpu"] == gpu for p in m.points if not _is_pause(p)}
    points = [
        p
        for m in measurements
        for p in on_mean_host(m, stepped, paces[m.source])
        if not (p["op"] in ("gemm", "layer_op") and m.header["gpu"] != gpu)
        and not (m.header["gpu"] != gpu and p["op"] in STANDS_IN and _what(p) in mine and not _is_launch(p))
        and not (p["op"] == "host" and "rank" in p and not p["kind"].startswith(("graph", "layer ")))
        and not (p["op"] == "overlap" and not p.get("lead_s"))
        and not (_is_pause(p) and m.header["date"] != max(paused))
        and not (_is_sweep(p) and m.header["date"] != swept[p["kind"]])
    ]
    own = {p["kind"] for p in points if p["op"] == "elementwise" and p.get("kernel") == "executor"}
    return [p for p in points if p["op"] != "elementwise" or p["kind"] not in own or p.get("kernel") == "executor"]


def _what(point: Point) -> tuple[Any, ...]:
    """What a point is a measurement of, sizes apart; launches of the executor's single ops are something else."""
    return point["op"], point.get("kind"), point.get("num_ranks"), point["op"] == "host" and "rank" in point


def _is_sweep(point: Point) -> bool:
    """Whether a point is of a kernel that cpsim.real.measure.host times."""
    return point["op"] == "elementwise" and "which" in point


def _is_launch(point: Point) -> bool:
    """Whether a point is of what a host takes, whatever its GPU."""
    return point["op"] == "host" and not str(point["kind"]).startswith(IN_GRAPHS)


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
    calls = [
        "q_lens",
        "k_lens",
        "num_heads",
        "num_kv_heads",
        "causal",
        "varlen",
        "mask",
        "options",
        "documents",
        "q_ranges",
        "k_ranges",
    ]
    others = ["op", "kind", "which", "variant", "kernel", "num_ranks", "nbytes", "width", "m", "n", "k"]
    names = calls if point["op"] == "attention" else others
    return [point[name] for name in names if name in point]


def large_model(point: Point) -> bool:
    """Whether a model predicts a point and the accuracy bars count it."""
    return bool(model_of(point)) and large(point)


def _sigma(rows: Sequence[Residual], models: set[str], run_to_run: float) -> dict[str, float]:
    """Standard deviations by model, such that a normal 90 % interval holds 90 % of the held-out errors."""

    def spread(prefix: str) -> float:
        errors = [abs(row.error) for row in rows if row.model.startswith(prefix)]
        return float(np.quantile(errors, 0.9)) / 1.645 if errors else 0.05

    sigma = {model: spread(model) for model in sorted(models | {"collective"})}
    return sigma | {"run to run": run_to_run}


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
    """Standard deviations, relative, of what overlapping costs (over shapes) and of graph launches (over processes)."""
    spread = {"interference": 0.5, "graph": 0.3}
    computation, _ = overlaps([p for p in points if p["op"] == "overlap"])
    spans = [np.array(spans) for by in computation.values() for spans in by.values()]
    shares = [lost / beside for beside, lost in (mine.T for mine in spans)]
    relative = [share / share.mean() for share in shares if share.mean() > 0.02]
    if relative:
        spread["interference"] = float(np.std(np.concatenate(relative)))
    launches = [graph_start(p) for p in points if p["op"] == "graph" and called(p) == FIRST_CALL]
    if len(launches) > 1:
        low, high = np.quantile(np.log(launches), (0.25, 0.75))
        spread["graph"] = float(high - low) / QUARTILES
    return spread


def fit_sustained(points: Sequence[Point]) -> tuple[dict[str, float], float]:
    """How much longer kernels take after seconds of load, as ``Profile.sustained`` has it, and the deviation of
    ``cpsim.models.spread.late`` from GPU to GPU and from one moment to the next."""
    logs: dict[str, list[float]] = {}
    moments: dict[str, list[float]] = {}
    for p in (p for p in points if p["op"] == "sustained"):
        at, seconds = np.array([*p["times_s"], 0.0]), np.array([*p["samples_s"], 0.0])
        early, late = seconds[(at > EARLY_S[0]) & (at <= EARLY_S[1])], seconds[at >= LATE * at.max()]
        if at.max() >= LEAST_S and len(early):
            name = f"{p['kernel']} {p['pass']}"
            logs.setdefault(name, []).append(float(np.log(np.median(late) / np.median(early))))
            hot = _windows(at[:-1], seconds[:-1])
            moments.setdefault(name, []).extend(np.log(hot / np.median(early)).tolist())
    if not logs:
        return {}, ASSUMED_SUSTAINED
    found = {name: float(np.median(each)) for name, each in sorted(logs.items())}
    everything = [one for each in logs.values() for one in each]
    low, high = np.quantile([one - found[name] for name, each in moments.items() for one in each], (0.05, 0.95))
    return found | {"others": float(np.median(everything))}, float(high - low) / NINETIES


def _sustained(measurements: Sequence[Measurements], theirs: Mapping[str, float]) -> dict[str, float]:
    """``Profile.sustained``, of what was measured here or else of what stands in."""
    alone = fit_sustained([p for m in measurements for p in m.points])[0] or theirs
    turns = {IN_TURNS: theirs[IN_TURNS]} if IN_TURNS in theirs else {}
    return {**alone, **turns, **fit_in_turns(measurements)}


def of_all_loads(measurements: Sequence[Measurements]) -> list[Point]:
    """Watts of files that know communication, too."""
    return [p for m in measurements if not m.of("mix") for p in m.of("power")]


def fit_in_turns(measurements: Sequence[Measurements]) -> dict[str, float]:
    """How much longer products and attention take in the turns of a layer than alone, if all that it loses is theirs,
    as ``Profile.sustained`` has it; nothing where no such loads were measured."""
    logs = []
    for m in measurements:
        alone = {p["kind"]: float(np.median(p["samples_s"])) for p in m.of("power")}
        for p in (p for p in m.of("mix") if " layer " in p["kind"]):
            limited = sum(alone[kind] for kind in p["mix"] if kind.startswith("gemm") or kind.endswith(PASSES))
            lost = sum(p["samples_s"]) - sum(alone[kind] for kind in p["mix"])
            logs.append(float(np.log1p(lost / limited)))
    return {IN_TURNS: float(np.mean(logs))} if logs else {}


def _windows(ends: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean seconds of a kernel in windows of ``WINDOW_S`` and more, from when the limiter sets in.

    Args:
        ends: of samples, each the mean since the one before, in seconds from idle, ``[n]``.
        seconds: of the kernel, ``[n]``.
    """
    lasts, hot = np.diff(ends, prepend=0.0), ends > EARLY_S[1]
    window = np.floor((np.cumsum(lasts[hot]) - lasts[hot] / 2) / WINDOW_S).astype(int)
    return np.asarray(
        [np.average(seconds[hot][window == w], weights=lasts[hot][window == w]) for w in np.unique(window)]
    )


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
            if (rule := rule_of(p)) is not None:
                ends = (RUNS, BANDS) if KERNELS[p["kernel"], p["pass"]].decides_alike else (rule, rule)
                note(f"{key} rule", *ends)
                note(f"{key} rule at {p['head_dim']}", *ends)
        elif p["op"] == "gemm":
            note("matrix products", flops := 2 * p["m"] * p["n"] * p["k"], flops)
        elif p["op"] in ("collective", "transfer", "elementwise"):
            key = {"elementwise": "memory-bound", "transfer": "transfer"}.get(p["op"], f"collective {p['kind']}")
            note(key, p["nbytes"], p["nbytes"])
    several = {key: ends for key, ends in seen.items() if not key.endswith("head_dim") or ends[0] < ends[1]}
    return dict(sorted(several.items()))


def _grade(gpu: str, networks: Sequence[Measurements]) -> str:
    if networks and all("files" in m.header for m in networks):
        return "kernels measured here, network from logs of nccl-tests"
    others = sorted({m.header["gpu"] for m in networks} - {gpu})
    here = max((m.header["num_gpus"] for m in networks if m.header["gpu"] == gpu), default=0)
    if not others:
        return "measured here"
    which = f"kernels and network of {here} GPUs measured here, of more" if here else "kernels measured here, network"
    return f"{which} measured on {', '.join(others)} (same NVLink generation)"


def _source(m: Measurements, gpu: str) -> dict[str, Any]:
    use = "network, host launches of communication, interference" if m.of("collective") else "launches, power, copies"
    use = "kernels" if m.of("attention") else use
    use = "matrix products and memory-bound ops of layers" if m.of("gemm") else use
    use = "everything" if m.of("attention") and m.of("collective") else use
    if m.header["gpu"] != gpu:
        use += f" (stands in for {gpu}: same NVLink generation)"
    kept = ("gpu", "num_gpus", "driver", "cuda", "cudnn", "nccl", "torch", "kernels", "date", "commit", "command")
    return {"file": m.source, "used_for": use} | {key: m.header[key] for key in kept if key in m.header}
