"""Fits the attention model to calls of every kernel and pass, and a model of what it leaves over."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsim.calibrate.descent import descend
from cpsim.calibrate.measurement import Point
from cpsim.calibrate.residuals import measured, pause_of, predicted_attention, predicted_calls, visits_of
from cpsim.errors import ProfileError, nearest, shown
from cpsim.masks.blocks import BANDS, CELLS, RUNS
from cpsim.models.attention.blocks import correction
from cpsim.models.attention.discrepancy import NONE, Discrepancy
from cpsim.models.attention.kernels import KERNELS, anatomy_at
from cpsim.models.attention.params import EVEN_SHARE, FITTED, PER_PAIR, SHARES, AttentionParams
from cpsim.models.standin import StandIn
from cpsim.runtime.processes import mapped

Floats = NDArray[np.float64]

FEWEST_CALLS = 6
"""Fewer calls of a kernel and pass without a stand-in give no model of it."""

_BOUNDS = {
    "busy_threshold": (0.3, 1.0),
    "busy_power": (1e-3, 1.5),
    "alone_factor": (0.5, 1.0),
    "older_share": (0.5, 0.8),
    "older_share_full": (0.5, 0.8),
    "unaligned_factor": (0.8, 2.0),
    "unaligned_full_factor": (0.8, 2.0),
    "odd_factor": (1.0, 2.0),
    "unaligned_celled_factor": (1.0, 2.0),
    "banded_factor": (1.0, 2.5),
    "query_cut_share": (1e-3, 1.5),
    "unaligned_query_cut_share": (1e-3, 1.5),
}
PARAMS_BY_RULE = {
    "celled_pair_s": CELLS,
    "unaligned_celled_pair_s": CELLS,
    "unaligned_celled_factor": CELLS,
    "banded_pair_s": BANDS,
    "unaligned_banded_pair_s": BANDS,
    "banded_factor": BANDS,
    "block_banded_s": BANDS,
}
"""Parameters that only calls tell whose pairs are decided by this rule."""
PARAMS_BY_PAIR = (
    "partial_pair_s",
    "unaligned_partial_pair_s",
    *PARAMS_BY_RULE,
    "query_pair_s",
    "query_cut_share",
    "unaligned_query_cut_share",
)
"""Parameters of kernels whose function decides about pairs in listed blocks."""


PARAMS_OF_CODE = ("unaligned_factor", "unaligned_full_factor", "odd_factor")
"""How variants of a kernel's code compare: shared by GPUs with the same number of SMs, and not fitted again to few
calls."""
STEPS = (0.5, 0.25, 0.12, 0.06, 0.25, 0.12, 0.06)
"""Differences of logarithms for derivatives: replays of blocks jump a little, so wide ones come first, to see past
that, and once more from where narrow ones ended."""
MIN_POINTS_FULL_FIT = 20
"""Fewer points of a kernel than this, and those of published tables, fit few parameters; the others stand in."""
VARIANT_PRIOR = 0.01
"""Weight that holds the logarithms of parameters of single ways to decide about pairs near where a fit starts: each way
is compiled by itself and may have few points."""
FITTED_TO_FEW = {"pair_s": 0.02} | dict.fromkeys(("block_s", "block_causal_s", "call_s"), 0.025)
"""Parameters that long dense calls tell, and weights that hold their logarithms near those of the stand-in."""
DOCUMENTS_TELL = dict.fromkeys(("block_varlen_s", "call_varlen_s", "passed_s"), 0.025)
"""Such parameters and weights more where calls have several documents or leave blocks out."""
RESTED_TELL = 0.04
"""Such a weight of `busy_power`, which calls tell some of which were rested and some not."""
HEAD_DIM_FITTED = dict.fromkeys(
    ("pair_s", "block_s", "block_causal_s", "split_pair_s", "call_s", *PARAMS_OF_CODE), 0.05
) | dict.fromkeys(PARAMS_BY_PAIR, VARIANT_PRIOR)
"""Parameters that change with the head dimension other than in proportion, and their weights: FlexAttention's backward
pass at 64 is compiled for tiles whose registers do not hold what bands need, and takes several times as long under them
as at 128."""
HEAD_DIM_REST, MANY = 0.05, 100
"""The weight of all other parameters, and the number of calls from which they are fitted, too."""
NEAR = 0.15
"""The weight of parameters near those of a GPU with as many SMs."""
SPREAD_SAMPLES, SPREAD_POINTS, SPREAD_GROUPS = 5, 30, 8
"""How much equal calls differ is told by points of at least so many samples, in groups of at least so many points; and
at most so many groups."""
QUARTILES = 1.349
"""Between those of a normal distribution, in standard deviations."""


def fitted_names(key: tuple[str, str]) -> tuple[str, ...]:
    """Parameters that calls of a kernel and pass tell, in the order of `AttentionParams`."""
    return tuple(name for name in FITTED if name in KERNELS[key].start)


def kernels_of(points: Sequence[Point]) -> list[tuple[str, str]]:
    """Attention kernels and passes that points are of, in order.

    Raises:
        ProfileError: one is not known.
    """
    keys = sorted({(p["kernel"], p["pass"]) for p in points if p["op"] == "attention"})
    for key in keys:
        if key not in KERNELS:
            known = nearest(" ".join(key), map(" ".join, sorted(KERNELS)))
            raise ProfileError(f"no model for attention kernel {shown(' '.join(key))}; {known}")
    return keys


def fit_attention(
    points: Sequence[Point], num_sms: int, stand_in: StandIn | None
) -> dict[tuple[str, str], AttentionParams]:
    """Least squares of log time, outliers softened, for every kernel and pass, on all CPUs."""
    points = [p for p in points if p["op"] == "attention"]
    keys = kernels_of(points)
    groups = [[p for p in points if (p["kernel"], p["pass"]) == key] for key in keys]
    alike = [stand_in.alike(key, num_sms) if stand_in else None for key in keys]
    starts = [
        stand_in.start(key) if stand_in and theirs is None and _tell_little(mine) else None
        for key, mine, theirs in zip(keys, groups, alike, strict=True)
    ]
    calls = list(zip(keys, groups, [num_sms] * len(keys), starts, alike, strict=True))
    return dict(zip(keys, mapped(_fit_kernel, calls, None), strict=True))


def _tell_little(points: Sequence[Point]) -> bool:
    """Whether points of one kernel and pass tell few of its parameters: too few, or of a published table."""
    return len(points) < MIN_POINTS_FULL_FIT or all(p.get("family") == "published" for p in points)


def _fit_kernel(arguments: tuple[Any, ...]) -> AttentionParams:
    return fit_kernel(*arguments)


def fit_kernel(
    key: tuple[str, str],
    points: Sequence[Point],
    num_sms: int,
    sparse: AttentionParams | None = None,
    alike: AttentionParams | None = None,
) -> AttentionParams:
    """One kernel and pass; from `sparse` parameters where there are too few points to fit all of them.

    Points of the commonest head dimension tell everything but what changes at others. If `alike`, the kernel on a GPU
    alike, is given, points of its head dimension tell how little the kernel differs from it, and other head dimensions
    change as there; what the model leaves over is nearly the same.
    """
    if sparse is not None:
        more = {"busy_power": RESTED_TELL} if any(pause_of(p) > 0 for p in points) else {}
        more |= DOCUMENTS_TELL if any(p["varlen"] or "mask" in p for p in points) else {}
        return fit_few(points, sparse, FITTED_TO_FEW | more, STEPS[1:4])
    (commonest, _), *_ = Counter(p["head_dim"] for p in points).most_common()
    alike = alike if alike is not None and any(p["head_dim"] == alike.head_dim for p in points) else None
    head_dim = int(commonest) if alike is None else alike.head_dim
    here = [p for p in points if p["head_dim"] == head_dim]
    if alike is None:
        fitted = _with_discrepancy(_fit_all(key, here, head_dim, num_sms), here)
    else:
        near = fit_few(here, replace(alike, head_dims=()), _near_priors(key))
        fitted = _with_discrepancy(near, here, alike.discrepancy)
    fitted = _with_head_dims(key, fitted, [p for p in points if p["head_dim"] != head_dim], alike)
    calls_s, calls_spread = spread_of_calls(points)
    return replace(fitted, calls_s=calls_s, calls_spread=calls_spread)


def _fit_all(key: tuple[str, str], points: Sequence[Point], head_dim: int, num_sms: int) -> AttentionParams:
    """All parameters that points of one head dimension tell, from values that any GPU's are near."""
    rules, start = {rule_of(p) for p in points} | {RUNS}, KERNELS[key].start
    names = tuple(name for name in fitted_names(key) if PARAMS_BY_RULE.get(name, RUNS) in rules)
    times = measured(points)

    def build(x: Floats) -> AttentionParams:
        values = dict(zip(names, np.exp(x).tolist(), strict=True))
        return AttentionParams(anatomy=KERNELS[key].anatomy, num_sms=num_sms, head_dim=head_dim, **values)

    first = np.log([start[name] for name in names])
    kept = np.array([name in PARAMS_BY_PAIR for name in names])

    def error(x: Floats) -> Floats:
        prior = VARIANT_PRIOR * (x - first)[kept]
        return np.concatenate([np.log(predicted_attention(build(x), points) / times), prior])

    bounds = np.log([_BOUNDS.get(name, (start[name] * 1e-3, start[name] * 30)) for name in names])
    return build(descend(error, first, (bounds[:, 0], bounds[:, 1]), STEPS, 20))


def spread_of_calls(points: Sequence[Point]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times of calls, and how much equal calls without a pause that take so long differ on one GPU.

    Standard deviations, relative, from quartiles, which single disturbed calls do not move; means over groups of points
    that take about as long.
    """
    several = [p for p in points if len(p["samples_s"]) >= SPREAD_SAMPLES and pause_of(p) == 0]
    several.sort(key=lambda p: float(np.median(p["samples_s"])))
    num = min(max(1, len(several) // SPREAD_POINTS), SPREAD_GROUPS)
    seconds, spread = [], []
    for group in np.array_split(np.arange(len(several)), num) if several else ():
        found = [np.log(several[i]["samples_s"]) for i in group]
        low, middle, high = np.mean([np.quantile(x, (0.25, 0.5, 0.75)) for x in found], axis=0)
        seconds.append(float(np.exp(middle)))
        spread.append(float((high - low) / QUARTILES))
    return tuple(seconds), tuple(spread)


def _with_discrepancy(params: AttentionParams, points: Sequence[Point], theirs: Discrepancy = NONE) -> AttentionParams:
    """Parameters with a model of what their physics leave over of these points, log(predicted / measured)."""
    predicted, features = predicted_calls(replace(params, discrepancy=NONE), points)
    left_over = np.log(predicted / measured(points))
    return replace(params, discrepancy=fit_discrepancy(features, left_over, theirs))


def _with_head_dims(
    key: tuple[str, str], params: AttentionParams, points: Sequence[Point], alike: AttentionParams | None
) -> AttentionParams:
    """What other head dimensions change, from the few points that each has; without any, as on a GPU alike."""
    theirs = {other.head_dim for other in alike.head_dims if not other.value_dim} if alike else set()
    fitted = []
    for dim in sorted(theirs | {p["head_dim"] for p in points}):
        mine = [p for p in points if p["head_dim"] == dim]
        fitted.append(
            _near(key, params, dim, mine, alike) if alike and dim in theirs else _alone(key, params, dim, mine)
        )
    return replace(params, head_dims=(*fitted, *(_other_values(params, alike) if alike else ())))


def _other_values(params: AttentionParams, alike: AttentionParams) -> list[AttentionParams]:
    """Sizes of values that a GPU alike has, changed as the kernel is at sizes that both have."""
    factors = _changes(alike, params)
    return [scaled(other, factors) for other in alike.head_dims if other.value_dim]


def _near(
    key: tuple[str, str], params: AttentionParams, dim: int, points: Sequence[Point], alike: AttentionParams
) -> AttentionParams:
    """A kernel at another head dimension, which changes it nearly as on a GPU alike; without points just so."""
    theirs = alike.at(dim)
    start = replace(
        _at_head_dim(key, params, dim, _changes(alike, theirs)),
        older_share=theirs.older_share,
        older_share_full=theirs.older_share_full,
        block_window_s=theirs.block_window_s,
        window_pair_s=theirs.window_pair_s,
        shared_window_factor=theirs.shared_window_factor,
        discrepancy=theirs.discrepancy,
    )
    if not points:
        return start
    made = fit_few(points, start, {n: w for n, w in _near_priors(key).items() if n in HEAD_DIM_FITTED})
    return _with_discrepancy(made, points, theirs.discrepancy)


def _near_priors(key: tuple[str, str]) -> dict[str, float]:
    """What is fitted of a kernel near a GPU alike, and weights that hold it there."""
    return {name: NEAR for name in fitted_names(key) if name not in PARAMS_OF_CODE}


def _alone(key: tuple[str, str], params: AttentionParams, dim: int, points: Sequence[Point]) -> AttentionParams:
    """A kernel at another head dimension, to which pairs are proportional but for what the points tell."""
    many = len(points) >= MANY
    priors = {
        name: HEAD_DIM_FITTED.get(name, HEAD_DIM_REST) for name in fitted_names(key) if name in HEAD_DIM_FITTED or many
    }
    made = fit_few(points, _at_head_dim(key, params, dim, dict.fromkeys(PER_PAIR, dim / params.head_dim)), priors)
    if (shared := _best_shares(made, points)) != made:
        made = fit_few(points, shared, priors)
    return _with_discrepancy(made, points)


def _best_shares(params: AttentionParams, points: Sequence[Point]) -> AttentionParams:
    """These parameters, or with blocks that share SMs evenly, under a mask or without: what the points are nearest to.

    No derivative tells: blocks end together or they do not.
    """

    def error(made: AttentionParams) -> float:
        left_over = np.log(predicted_attention(made, points) / measured(points))
        return float(np.abs(left_over - np.median(left_over)).mean())

    choices = itertools.product((params.older_share, EVEN_SHARE), (params.older_share_full, EVEN_SHARE))
    return min((replace(params, older_share=a, older_share_full=b) for a, b in choices), key=error)


def _at_head_dim(
    key: tuple[str, str], params: AttentionParams, dim: int, factors: Mapping[str, float]
) -> AttentionParams:
    """A kernel at another head dimension, before anything is known of what the model leaves over there."""
    return replace(scaled(params, factors), anatomy=anatomy_at(*key, dim), head_dim=dim, discrepancy=NONE)


def _changes(params: AttentionParams, other: AttentionParams) -> dict[str, float]:
    """Every parameter of `other` over that of `params`, where both have it."""
    pairs = {name: (getattr(params, name), getattr(other, name)) for name in FITTED}
    return {name: b / a for name, (a, b) in pairs.items() if a > 0 and b > 0}


def fit_few(
    points: Sequence[Point], start: AttentionParams, priors: Mapping[str, float], steps: Sequence[float] = (0.05,)
) -> AttentionParams:
    """The parameters that few points tell, near those of `start`, whose others are kept; `priors` weigh how near.

    `steps` as in STEPS; with a narrow one alone, a flat optimum far from the start is left to how processors round.
    """
    times = measured(points)
    even = {name for name in SHARES if getattr(start, name) == EVEN_SHARE}  # and so they stay
    names = tuple(name for name in priors if getattr(start, name) > 0 and name not in even)
    prior = np.array([priors[name] for name in names])
    first = np.log([getattr(start, name) for name in names])

    def build(x: Floats) -> AttentionParams:
        factors = dict(zip(names, np.exp(x - first).tolist(), strict=True))
        factors = dict.fromkeys(PER_PAIR, factors.get("pair_s", 1.0)) | factors  # tensor cores do them all
        return start.everywhere(lambda params: scaled(params, factors))

    def error(x: Floats) -> Floats:
        return np.concatenate([np.log(predicted_attention(build(x), points) / times), prior * (x - first)])

    bounded = ("alone_factor", *SHARES)  # two blocks on an SM make no sense beyond
    low, high = np.array([np.log(_BOUNDS[name]) if name in bounded else (-np.inf, np.inf) for name in names]).T
    with np.errstate(invalid="ignore"):  # steps to where nothing is finite are taken back
        return build(descend(error, first.clip(low + 1e-6, high - 1e-6), (low, high), steps, 60))


def scaled(params: AttentionParams, factors: Mapping[str, float]) -> AttentionParams:
    """Parameters times factors."""
    return replace(params, **{name: getattr(params, name) * factor for name, factor in factors.items()})


LENGTHS = (1.5, 1.5, 1.5, 1.0, 3.0, 3.0, 3.0, 0.4, 0.3, 1.0, 1.0)
"""Prior scales of blocks.FEATURES, by what they mean: octaves of waves, tiles, unevenness, causal, ..."""
DISCREPANCY = 0.05
"""Prior standard deviation of what the model leaves over."""
SIGMA_ACROSS_GPUS = 0.02
"""Standard deviation of the same on a GPU alike from it here."""
SUPPORT = 300
"""Support points of a discrepancy."""
MAX_RESIDUAL = 0.25
"""Larger leftovers count as this: a single call does not speak for its neighbours."""


def fit_discrepancy(features: Floats, left_over: Floats, theirs: Discrepancy = NONE) -> Discrepancy:
    """A sparse Gaussian process of `left_over` [N] over `features` [N, FEATURES]; see models/attention/discrepancy.py.

    Noise and a common factor of the length scales maximise the marginal likelihood; support points are chosen
    greedily where the process is least certain (pivoted Cholesky decomposition). What is left over on a GPU alike is
    observed here, too, at its support points, within `SIGMA_ACROSS_GPUS`.
    """
    given = theirs.arrays()
    support = np.ascontiguousarray(given[0].T)
    own, features = len(left_over), np.concatenate([features, support])
    y = np.append(left_over, [correction(look, *given) for look in support]).clip(-MAX_RESIDUAL, MAX_RESIDUAL)

    def counts(noise: float) -> Floats:
        """What an observation counts beside one of this GPU."""
        return np.where(np.arange(len(y)) < own, 1.0, (noise / SIGMA_ACROSS_GPUS) ** 2)

    def likelihood(noise: float, factor: float) -> float:
        matrix = _kernel_matrix(features, features, factor) + np.diag(noise**2 / counts(noise))
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
    root = np.sqrt(counts(noise))
    near, of_all = full[np.ix_(chosen, chosen)], root[:, None] * full[:, chosen]
    weights = np.linalg.solve(noise**2 * near + of_all.T @ of_all + 1e-10 * np.eye(len(chosen)), of_all.T @ (root * y))
    return Discrepancy(
        lengths=tuple((factor * np.array(LENGTHS)).tolist()),
        support=tuple(tuple(row) for row in features[chosen].tolist()),
        weights=tuple((weights * DISCREPANCY**2).tolist()),
    )


def _kernel_matrix(a: Floats, b: Floats, factor: float) -> Floats:
    """Prior covariance between points, [len(a), len(b)]."""
    distance = (a[:, None] - b[None]) / (factor * np.array(LENGTHS))
    return np.asarray(DISCREPANCY**2 * np.exp(-0.5 * (distance**2).sum(axis=-1)))


def rule_of(point: Point) -> int | None:
    """How pairs of partial blocks are decided in a call of a kernel that lists blocks, if it has such blocks."""
    if not KERNELS[point["kernel"], point["pass"]].anatomy.lists_blocks:
        return None
    return visits_of(point).partial_rule()


def with_enough_calls(points: Sequence[Point], stand_in: StandIn | None) -> list[Point]:
    """The points without those of kernels and passes that have too few to fit and nothing that stands in."""
    calls = Counter((p["kernel"], p["pass"]) for p in points if p["op"] == "attention")
    few = {key for key, number in calls.items() if number < FEWEST_CALLS and stand_in is None}
    if few and few == calls.keys():
        raise ProfileError(f"a profile needs {FEWEST_CALLS} calls of a kernel and pass, got {max(calls.values())}")
    return [p for p in points if p["op"] != "attention" or (p["kernel"], p["pass"]) not in few]
