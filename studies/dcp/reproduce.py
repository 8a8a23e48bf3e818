"""DCP's micro-benchmark on 32 A100, bar by bar: ``python -m studies dcp``.

As measured: attention with 8 query and 2 key-value heads of dimension 128, bf16; batches of up to 131,072 tokens of
whole documents, whose lengths are scaled by 0.5 to 4; one group of all GPUs; the time of a call is that of its slowest
rank, and a bar is the mean over batches. DCP plans as its released code does, and has the best of its block sizes. The
baselines pad documents to what 64 divides, LoongTrain to the longest of the batch; they and LoongTrain's inner ring are
those of the benchmark, and all of them run as their own code does.

The lengths of LongDataCollections are not published: they are drawn from another corpus here, with the benchmark's
rules for batches, and so every bar rests on an assumption.

Reference: DCP (arXiv 2510.10620), section 7.2; chenyu-jiang/dcp at 942a2c7, bars of its reference run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean, mean, median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from cpsim.calibrate.measurement import load as load_measurements
from cpsim.case.documents import load_bins
from cpsim.case.load import scenario_from
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError
from cpsim.models.attention.anatomy import flash2_ranges
from cpsim.models.attention.params import AttentionParams
from cpsim.models.profile import load_profile, save_profile
from cpsim.prediction.predict import predict_many
from cpsim.prediction.results import Infeasible, Prediction
from cpsim.runtime.processes import Progress
from studies import published_lines

FOLDER = Path(__file__).parent

CLUSTER: Final = "p4de"
GPUS: Final = 32
TOKENS: Final = 131072
"""Of a batch, and of a document, at most."""
FILLED: Final = 0.75
"""Share of them that a batch has at least."""
SEED: Final = 42
DRAWN: Final = 10000
"""Documents of the benchmark's sample."""
BATCHES: Final = 5
"""The benchmark has 50, which take ten times as long; with 3, some bars were a third lower, since plans of short
documents are uneven by chance."""
FEW_BATCHES: Final = 2
"""Where all is predicted again under every assumption."""
LENGTHS: Final = "distca_pretrain"
"""The corpus here whose documents are longest in the median, since LongDataCollections is one of long documents."""
PADDED: Final = 64
"""Documents of the rings are a multiple of this: two equal chunks on every rank."""
RANGED: Final = "fa2_ranges"
"""DCP's kernel: flash-attn 2 with up to two ranges of keys for every query."""
MASKS: Final = {"causal": "causal_document"}
"""Ours, where they have other names."""
BLOCKS: Final = (1024, 2048, 4096)
HEADS: Final = 8
"""Of queries, each placed by itself."""
VARIANT: Final = "released"
"""Of DCP's planner: what was measured."""
SOLVER: Final = "mtkahypar"
"""Comes with cpsim; the default of DCP's code is KaHyPar, see ``ASSUMED``."""
PLANNED: Final = 10**6
"""Layers that share a plan: the benchmark's plans are at hand."""
INNER: Final = (1, 2, 4, 8, 16)
CODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "ring": {"strategy": "ring", "implementation": "ring-flash-attn", "kernel": "fa2"},
    "zigzag": {"strategy": "zigzag_ring", "implementation": "ring-flash-attn", "kernel": "fa2"},
    "loongtrain": {"strategy": "loongtrain", "implementation": "internevo", "kernel": "fa2"},
    "transformer-engine": {"strategy": "usp", "implementation": "transformer-engine-thd"},
    "dcp": {"strategy": "dcp", "implementation": "dcp", "kernel": RANGED},
}
"""Rows of the benchmark, as we call them."""
KNOBS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "loongtrain": [{"ulysses": 2, "inner_ring": inner} for inner in INNER],
    "transformer-engine": [{"ulysses": 2}],
    "dcp": [{"block": block, "head_groups": HEADS, "layers": PLANNED} for block in BLOCKS],
}
"""Knobs that the benchmark tries, of which the best counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What nobody published of the run, and what comes with chance."""

    lengths: str = LENGTHS
    """Distribution of document lengths."""
    variant: str = VARIANT
    solver: str = SOLVER
    seed: int = 0
    """Of DCP's planner."""
    eps_inter: float = 0.4
    eps_intra: float = 0.1

    def knobs(self) -> dict[str, Any]:
        """Of strategy ``dcp``."""
        return {name: value for name, value in asdict(self).items() if name != "lengths"}


BASE: Final = Assumed()
FIRST: Final = "as assumed"
ASSUMED: Final[Mapping[str, Assumed]] = {
    "solver kahypar": Assumed(solver="kahypar"),
    "seed 1": Assumed(seed=1),
    "seed 2": Assumed(seed=2),
    "eps_inter 0.1": Assumed(eps_inter=0.1),
    "eps_inter 1.6": Assumed(eps_inter=1.6),
    "eps_intra 0.4": Assumed(eps_intra=0.4),
    "variant paper": Assumed(variant="paper"),
    "lengths distca_prolong": Assumed(lengths="distca_prolong"),
    "lengths prolong64k": Assumed(lengths="prolong64k"),
}
"""Other assumptions, each changed alone and chosen before it was known which bars they reach.

The solver of the measured run is KaHyPar, which it seeds by chance. The paper has tolerances of 0.4 between nodes and
0.1 inside, DCP's scripts also 16 times the one inside, and each stands in for the other. The branch that was measured
is not public, so that it may have planned as the paper says. Lengths are those of two other corpora here."""


KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "solver, its seed": ("solver kahypar", "seed 1", "seed 2"),
    "batches, more of them": ("5 batches", "50 batches with kahypar"),
    "tolerances": ("eps_inter 0.1", "eps_inter 1.6", "eps_intra 0.4"),
    "variant": ("variant paper",),
    "lengths": ("lengths distca_prolong", "lengths prolong64k"),
}
"""Assumptions by what they are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published bar."""

    mask: str
    scale: float
    """Of document lengths."""
    row: str
    """A key of ``CODES``."""
    pass_: str
    published_s: float
    outlier: bool
    """Of the published run."""
    predicted_s: float = float("nan")

    @property
    def error(self) -> float:
        """Predicted over published time, less one."""
        return self.predicted_s / self.published_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """DCP over the fastest baseline, forward and backward together."""

    mask: str
    scale: float
    published: float
    predicted: float
    outlier: bool
    """One of the published bars that it is the ratio of is."""

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.published - 1

    @property
    def decided(self) -> bool:
        """Whether the published run tells which is faster."""
        return not 0.9 <= self.published <= 1.1

    @property
    def agrees(self) -> bool:
        """Whether the same one is faster."""
        return (self.predicted > 1) == (self.published > 1)


@cache
def published() -> tuple[Row, ...]:
    """All bars of the benchmark."""
    return tuple(
        Row(
            mask=line["mask"],
            scale=float(line["scale"]),
            row=line["row"],
            pass_=line["pass"],
            published_s=float(line["time_ms"]) / 1000,
            outlier=line["outlier"] == "1",
        )
        for line in published_lines(FOLDER / "dcp-a100.csv")
    )


@cache
def batches(scale: float, lengths: str = LENGTHS, count: int = BATCHES) -> tuple[tuple[int, ...], ...]:
    """Document lengths of some batches, by the benchmark's rules.

    Documents are taken in a random order; a batch ends before the first that does not fit, and counts if it is full
    enough.

    Args:
        scale: of all lengths.
        lengths: the distribution that they are drawn from.
        count: batches.
    """
    bins, rng = load_bins(lengths), np.random.default_rng(SEED)
    uniform = rng.random((DRAWN, 2))
    row = np.searchsorted(bins.cumulative, uniform[:, 0], side="right").clip(max=len(bins.low) - 1)
    drawn = bins.low[row] + (bins.high - bins.low)[row] * uniform[:, 1] ** bins.exponent[row]
    scaled = np.rint(drawn.round() * scale).astype(np.int64)
    found: list[tuple[int, ...]] = []
    batch: list[int] = []
    for length in scaled[(scaled > 0) & (scaled <= TOKENS)].tolist():
        if sum(batch) + length > TOKENS:
            found += [tuple(batch)] * (sum(batch) >= FILLED * TOKENS)
            batch = []
        batch.append(length)
    return tuple(found[:count])


def _documents(row: str, batch: Sequence[int]) -> list[int]:
    """Document lengths that a code runs for a batch; of DCP's the longest is cut so that ranks divide all tokens."""
    if row == "dcp":
        longest = batch.index(max(batch))
        return [length - (i == longest) * (sum(batch) % GPUS) for i, length in enumerate(batch)]
    padded = [-(-length // PADDED) * PADDED for length in batch]
    return [max(padded)] * len(padded) if row == "loongtrain" else padded


def scenarios(row: Row, profile: str, assumed: Assumed = BASE, count: int = BATCHES) -> Iterator[list[Scenario]]:
    """What is run for a bar: for every batch one case for each choice of knobs."""
    dense = row.mask == "causal"
    for batch in batches(row.scale, assumed.lengths, count):
        documents = _documents(row.row, batch)
        case = {"kernel": "fa2" if dense else RANGED, **CODES[row.row]} | {
            "gpus": GPUS,
            "cluster": CLUSTER,
            "profile": profile,
            "tokens": sum(documents),
            "documents": documents,
            "mask": MASKS.get(row.mask, row.mask),
            "heads": HEADS,
            "kv_heads": 2,
            "pass": row.pass_,
        }
        own = assumed.knobs() if row.row == "dcp" else {}
        yield [scenario_from(case | {"knobs": {**knobs, **own}}) for knobs in KNOBS.get(row.row, [{}])]


def reproduce(
    rows: Sequence[Row] | None = None,
    assumed: Assumed = BASE,
    count: int = BATCHES,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Bars with their predictions: of every choice of knobs the mean over batches, of which the best.

    Raises:
        CpsimError: a case cannot be predicted.
    """
    chosen = published() if rows is None else rows
    if any(row.row == "dcp" for row in chosen) and find_spec(assumed.solver) is None:
        raise CpsimError(
            f"reproduce: DCP plans with {assumed.solver}, which is not installed; pip install {assumed.solver}"
        )
    with TemporaryDirectory() as folder:
        profile = str(ranged_profile(Path(folder)))
        cases = [list(scenarios(row, profile, assumed, count)) for row in chosen]
        places = [(r, b, c) for r, row in enumerate(cases) for b, batch in enumerate(row) for c in range(len(batch))]
        # both passes of a batch together, since they have one plan
        places.sort(key=lambda place: (chosen[place[0]].mask, chosen[place[0]].scale, chosen[place[0]].row, *place[1:]))
        results = predict_many([cases[r][b][c] for r, b, c in places], jobs, progress)
    times = [np.empty((len(row), len(row[0]))) for row in cases]
    for (r, b, c), result in zip(places, results, strict=True):
        times[r][b, c] = _seconds(chosen[r], result)
    best = [float(found.mean(axis=0).min()) for found in times]
    for row, seconds in zip(chosen, best, strict=True):
        if not np.isfinite(seconds):
            raise CpsimError(f"reproduce: {row.row} {row.mask}: no block size leaves every rank a block")
    return [replace(row, predicted_s=seconds) for row, seconds in zip(chosen, best, strict=True)]


def _seconds(row: Row, result: Prediction | Infeasible | CpsimError) -> float:
    """Of one case; blocks that are fewer than ranks are no choice."""
    if isinstance(result, Prediction):
        return result.time_s
    if isinstance(result, Infeasible) and row.row == "dcp":
        return float("inf")
    reason = result.reason if isinstance(result, Infeasible) else result
    raise CpsimError(f"reproduce: {row.row} {row.mask} {row.pass_}, lengths x {row.scale:g}: {reason}")


@cache
def slower_with_ranges(pass_: str) -> float:
    """How much longer the kernel takes where two ranges say for every query what a causal mask says, on H200.

    Every tile is masked, with ranges that are read for every query, and not those on the diagonal alone. Geometric mean
    over the shapes of ``fa2-ranges-h200.jsonl``, made by studies.probes.ranged.
    """
    seconds: dict[tuple[Any, ...], dict[bool, float]] = {}
    for p in load_measurements(FOLDER / "fa2-ranges-h200.jsonl").of("ranged"):
        if (p["mask"], p["pass_"]) == ("causal", pass_):
            shape = p["block"], p["keys"], p["sequences"]
            seconds.setdefault(shape, {})[p["ranged"]] = median(p["samples_s"])
    return geometric_mean(found[True] / found[False] for found in seconds.values())


def with_ranges(params: AttentionParams, pass_: str) -> AttentionParams:
    """DCP's kernel from flash-attn 2: on every block of 128 x 128 tokens that the mask touches.

    Its forward pass is flash-attn 2's kernel for split keys, compiled for the same tiles: a pair takes as much longer
    as it was measured to on H200, in dense calls of few blocks, whose keys are split. All calls are varlen ones, and
    ranges cost what they do on H200, see ``slower_with_ranges``.

    Reference: ``flash2_ranges``.
    """
    return replace(
        params,
        anatomy=flash2_ranges(pass_ == "bwd"),
        pair_s=(params.split_pair_s or params.pair_s) * slower_with_ranges(pass_),
        block_s=params.block_s + params.block_varlen_s,
        call_s=params.call_s + params.call_varlen_s,
    )


def ranged_profile(folder: Path) -> Path:
    """The profile of A100 with DCP's kernel."""
    base = load_profile("a100")
    names = {f"attention {pass_} fa2": f"attention {pass_} {RANGED}" for pass_ in ("fwd", "bwd")}

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        more = {
            new + key[len(old) :]: value
            for old, new in names.items()
            for key, value in values.items()
            if key == old or key.startswith(f"{old} ")
        }
        return {**values, **more}

    attention = {(RANGED, pass_): with_ranges(base.attention["fa2", pass_], pass_) for pass_ in ("fwd", "bwd")}
    rules = {f"{new} rule": (0.0, 2.0) for new in names.values()}
    path = folder / "a100-dcp.json"
    save_profile(
        replace(
            base,
            attention={**base.attention, **attention},
            sigma=renamed(base.sigma),
            valid=renamed(base.valid) | rules,
        ),
        path,
    )
    return path


def speed_ups(rows: Sequence[Row]) -> list[SpeedUp]:
    """DCP over the fastest baseline of every mask and scale, in the order of the rows."""
    found = []
    for mask, scale in dict.fromkeys((row.mask, row.scale) for row in rows):
        bars = [row for row in rows if (row.mask, row.scale) == (mask, scale)]
        totals = {
            name: [sum(getattr(r, of) for r in bars if r.row == name) for of in ("published_s", "predicted_s")]
            for name in dict.fromkeys(r.row for r in bars)
        }
        others = np.array([total for name, total in totals.items() if name != "dcp"]).min(axis=0)
        theirs, ours = (others / totals["dcp"]).tolist()
        compared = {"dcp", *(name for name, (seconds, _) in totals.items() if seconds == others[0])}
        found.append(
            SpeedUp(
                mask=mask,
                scale=scale,
                published=theirs,
                predicted=ours,
                outlier=any(r.outlier for r in bars if r.row in compared),
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A speed-up of DCP under several assumptions."""

    mask: str
    scale: float
    published: float
    outlier: bool
    predicted: Mapping[str, float]
    """By assumption."""

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the most."""
        return min(self.predicted.values()), max(self.predicted.values())

    @property
    def inside(self) -> bool:
        """Whether the published one lies between."""
        low, high = self.ends
        return low <= self.published <= high

    def among(self, names: Sequence[str]) -> Range:
        """The same with some assumptions only, and with what is assumed else."""
        kept = {name: self.predicted[name] for name in (FIRST, *names) if name in self.predicted}
        return replace(self, predicted=kept)


def sensitivity(
    count: int,
    names: Sequence[str] | None = None,
    bars: Sequence[Row] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Range]:
    """Speed-ups under every assumption that can be made here: without KaHyPar, not those of KaHyPar.

    Args:
        count: batches of every bar.
        names: of assumptions; None is all.
        bars: that are wanted; None is all.
        jobs: processes; None uses all cores.
        progress: called with (done, total) assumptions.
    """
    tried = {FIRST: BASE} | {
        name: assumed for name, assumed in ASSUMED.items() if find_spec(assumed.solver) and (not names or name in names)
    }
    rows, found = reproduce(bars, count=count, jobs=jobs), dict[str, list[SpeedUp]]()
    dcp, others = ([row for row in rows if (row.row == "dcp") == own] for own in (True, False))
    for done, (name, assumed) in enumerate(tried.items()):
        if assumed == BASE:
            found[name] = speed_ups(rows)
        elif assumed.lengths != LENGTHS:
            found[name] = speed_ups(reproduce(rows, assumed, count, jobs))
        else:  # baselines know nothing of planners
            found[name] = speed_ups([*others, *reproduce(dcp, assumed, count, jobs)])
        if progress:
            progress(done + 1, len(tried))
    base = {(s.mask, s.scale): s for s in found[FIRST]}
    by_name = {name: {(s.mask, s.scale): s.predicted for s in made} for name, made in found.items()}
    return [
        Range(
            mask=mask,
            scale=scale,
            published=s.published,
            outlier=s.outlier,
            predicted={name: made[mask, scale] for name, made in by_name.items()},
        )
        for (mask, scale), s in base.items()
    ]


def mean_error(found: Sequence[SpeedUp]) -> float:
    """Mean of absolute errors."""
    return mean(abs(speed_up.error) for speed_up in found)


def without_outliers(found: Sequence[SpeedUp]) -> list[SpeedUp]:
    """Those that rest on no outlier of the published run."""
    return [speed_up for speed_up in found if not speed_up.outlier]
