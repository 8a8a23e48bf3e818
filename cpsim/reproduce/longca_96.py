"""LongCA-bench's study of context parallelism on 8 to 96 H100, case by case: ``cpsim reproduce longca-96``.

As its code runs it: batch 1, heads 64:8 of dimension 128, bf16, 8192 tokens a GPU, FlashAttention-3; masks with
documents are 30 samples with seed 42; the host waits before every iteration, the time of a call is the mean over
ranks, and throughputs are averaged over samples. Beside it, the same mechanisms as our executor runs them, and
hybrid_cp, which the study does not have. The paper draws its results without numbers, so what can be compared are its
findings, and what they rest on where MagiAttention has repeated the runs.

Reference: LongCA-bench (arXiv 2510.17896), sections 4.3 and 5.3; NJUDeepEngine/LongCA-bench at 22683e3, dist_attn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np

from cpsim.documents import load_bins
from cpsim.errors import InfeasibleError
from cpsim.predictor import Progress, predict, spread
from cpsim.scenario import scenario_from

GPUS: Final = (8, 16, 24, 32, 48, 64, 96)
SAMPLES: Final = 30
SEED: Final = 42
TOKENS_PER_GPU: Final = 8192
CLUSTER: Final = "magi-h100"
"""The paper does not state its network; this is that of the same authors, who repeat the benchmark on 8 to 64 H100."""
PROFILE: Final = "h100-fa3"
MASKS: Final = ("full", "causal", "full_document", "causal_document")
"""The last two are the benchmark's FULL and CAUSAL DOCUMENT LONG."""
PASSES: Final = ("fwd", "bwd")
THEIRS, OURS = "longca-bench", "cpsim"
MECHANISMS: Final = ("ulysses", "ring_p2p", "ring_allgather", "usp", "loongtrain", "hybrid_cp")
STRATEGIES: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "ulysses": ("ulysses", {}),
    "ring_p2p": ("zigzag_ring", {"zigzag": "document"}),
    "ring_allgather": ("allgather", {"layout": "document_zigzag"}),
    "usp": ("usp", {"ulysses": 8}),
    "loongtrain": ("loongtrain", {"ulysses": 8}),
    "hybrid_cp": ("hybrid_cp", {}),
}
"""Our names of the mechanisms."""
LONG_SHARE: Final = 0.6
LONG_BINS: Final = ([(8 * 1024, 30 * 1024)], [1.0])
"""Most of the tokens are of documents that are drawn uniformly between these lengths, both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pass of one case."""

    gpus: int
    mask: str
    sample: int
    documents: int
    mechanism: str
    implementation: str
    pass_: str
    work_tflop_per_gpu: float
    time_s: float = float("nan")
    """Mean over ranks."""
    slowest_s: float = float("nan")
    """Of the slowest rank."""
    tflops_per_gpu: float = float("nan")
    """By the mean over ranks."""
    reason: str = ""
    """Why the case cannot run."""


@dataclass(frozen=True, slots=True)
class Point:
    """Cases of one batch of documents, planned one after another because they share much of their plans."""

    gpus: int
    mask: str
    sample: int
    documents: tuple[int, ...]


@cache
def sample_documents(num_tokens: int, count: int = SAMPLES) -> tuple[tuple[int, ...], ...]:
    """Document lengths of the benchmark's samples, equal to its own to the last token."""
    bins, rng = load_bins("prolong512k"), random.Random(SEED)
    short = list(zip(bins.low, bins.high, strict=True)), np.diff(bins.cumulative, prepend=0.0).tolist()
    num_short, drawn = int(num_tokens * (1 - LONG_SHARE)), []
    for _ in range(count):
        lengths = [*_fill(rng, *short, num_short), *_fill(rng, *LONG_BINS, num_tokens - num_short)]
        rng.shuffle(lengths)
        drawn.append(tuple(lengths))
    return tuple(drawn)


def _fill(rng: random.Random, bins: Sequence[tuple[float, float]], weights: Sequence[float], total: int) -> list[int]:
    """Lengths, each drawn from a bin and then uniformly inside it, until they fill ``total``; the last one is cut."""
    lengths: list[int] = []
    while (missing := total - sum(lengths)) > 0:
        low, high = rng.choices(bins, weights)[0]
        lengths.append(max(1, min(rng.randint(int(low), int(high)), missing)))
    return lengths


def points(gpus: Sequence[int] = GPUS, samples: int = SAMPLES) -> list[Point]:
    """All batches of the study, the most expensive first; dense masks are the same in all samples."""
    found = []
    for n in sorted(gpus, reverse=True):
        total = n * TOKENS_PER_GPU
        for mask in MASKS:
            batches = sample_documents(total)[:samples] if mask.endswith("document") else [(total,)]
            found += [Point(n, mask, i, documents) for i, documents in enumerate(batches)]
    return found


def run(
    gpus: Sequence[int] = GPUS, samples: int = SAMPLES, jobs: int | None = None, progress: Progress | None = None
) -> Study:
    """Predict the study.

    Args:
        gpus: numbers of GPUs.
        samples: of each mask with documents, at most 30.
        jobs: processes; None uses all cores.
        progress: called with (done, total) batches.
    """
    wanted = points(gpus, samples)
    rows: list[list[Row]] = [[] for _ in wanted]
    for done, (i, found) in enumerate(spread(rows_of, wanted, jobs), 1):
        rows[i] = found
        if progress:
            progress(done, len(wanted))
    return Study(tuple(row for found in rows for row in found))


def rows_of(point: Point) -> list[Row]:
    """Every mechanism as the benchmark's code and as ours runs it, forward and backward."""
    return [
        _row(point, mechanism, implementation, pass_)
        for mechanism in MECHANISMS
        for implementation in (THEIRS, OURS)
        if (mechanism, implementation) != ("hybrid_cp", THEIRS)
        for pass_ in PASSES
    ]


def _row(point: Point, mechanism: str, implementation: str, pass_: str) -> Row:
    strategy, knobs = STRATEGIES[mechanism]
    case: dict[str, Any] = {
        "strategy": strategy, "knobs": knobs, "implementation": implementation, "kernel": "fa3", "gpus": point.gpus,
        "cluster": CLUSTER, "profile": PROFILE, "tokens_per_gpu": TOKENS_PER_GPU, "documents": point.documents,
        "mask": point.mask, "heads": 64, "kv_heads": 8, "pass": pass_,
    }  # fmt: skip
    scenario = scenario_from(case)
    work = scenario.workload().flops(scenario.passes[0]) / point.gpus / 1e12
    row = Row(
        gpus=point.gpus, mask=point.mask, sample=point.sample, documents=len(point.documents), mechanism=mechanism,
        implementation=implementation, pass_=pass_, work_tflop_per_gpu=work,
    )  # fmt: skip
    try:
        found = predict(scenario)
    except InfeasibleError as reason:
        return replace(row, reason=str(reason))
    seconds = float(found.timelines[pass_].rank_end_s().mean())
    return replace(row, time_s=seconds, slowest_s=found.time_s, tflops_per_gpu=work / seconds)


@dataclass(frozen=True, slots=True)
class Study:
    """All rows, and means over samples."""

    rows: tuple[Row, ...]
    _by_cell: dict[tuple[int, str, str, str, str], list[Row]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            key = row.gpus, row.mask, row.pass_, row.mechanism, row.implementation
            self._by_cell.setdefault(key, []).append(row)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of GPUs, ascending."""
        return tuple(sorted({row.gpus for row in self.rows}))

    def cell(
        self, gpus: int, mask: str, pass_: str, mechanism: str, implementation: str = THEIRS
    ) -> list[Row]:  # fmt: skip
        """The samples of one bar of the paper's charts."""
        return self._by_cell[gpus, mask, pass_, mechanism, implementation]

    def mean(
        self, gpus: int, mask: str, pass_: str, mechanism: str, implementation: str = THEIRS, of: str = "tflops_per_gpu"
    ) -> float:  # fmt: skip
        """Its height, TFLOP/s per GPU, or the mean of another column; NaN where the case cannot run."""
        return float(np.mean([getattr(row, of) for row in self.cell(gpus, mask, pass_, mechanism, implementation)]))

    def spread(self, gpus: int, mask: str, pass_: str, mechanism: str) -> float:
        """Standard deviation of the throughput over samples, relative to its mean."""
        values = [row.tflops_per_gpu for row in self.cell(gpus, mask, pass_, mechanism)]
        return float(np.std(values) / np.mean(values))

    def reasons(self) -> dict[str, list[int]]:
        """Why cases cannot run, and on how many GPUs each reason holds."""
        found: dict[str, list[int]] = {}
        for row in self.rows:
            if row.reason and row.gpus not in found.setdefault(f"{row.mechanism}: {row.reason}", []):
                found[f"{row.mechanism}: {row.reason}"].append(row.gpus)
        return found


@dataclass(frozen=True, slots=True)
class Finding:
    """What the paper or the repeated runs say, and whether the simulation says so, too."""

    claim: str
    holds: bool
    found: str
    """The numbers that decide."""
    reason: str = ""
    """Why it does not hold, as far as that is known."""


def findings(study: Study) -> list[Finding]:
    """Every finding, judged by the benchmark's own code on the study's numbers of GPUs."""
    judged = [Finding(claim, *judge(study)) for claim, judge in _FINDINGS]
    return [f if f.holds else replace(f, reason=REASONS.get(f.claim, "not known")) for f in judged]


REASONS: Final = {
    "LoongTrain gains modestly over USP forward: up to 15 %": (
        "on 32 GPUs its windows are rings of two, which send and receive in turns; dense masks hide that, documents "
        "do not, and the runs that were repeated have no documents on 32 GPUs"
    ),
    "The same on CAUSAL": (
        "forward 0.3 to 0.5 ms a step are missing, as many as on FULL: gathers and scatters around each kernel, which "
        "nobody has measured, are priced as strided copies"
    ),
}
"""Findings that the whole study does not have, and why."""
Verdict = tuple[bool, str]
HYBRIDS: Final = ("usp", "loongtrain")
DENSE: Final = MASKS[:2]
DOCUMENT: Final = MASKS[2:]


def _ratios(
    study: Study, above: str, below: str, masks: Sequence[str], passes: Sequence[str], least: int, most: int = GPUS[-1]
) -> list[float]:  # fmt: skip
    """Throughput of one mechanism over another's, on ``least`` to ``most`` GPUs."""
    return [
        study.mean(n, mask, p, above) / study.mean(n, mask, p, below)
        for n in study.gpus if least <= n <= most for mask in masks for p in passes
    ]  # fmt: skip


def _over_gpus(study: Study, mask: str, pass_: str, mechanism: str, least: int = 0) -> list[float]:
    return [study.mean(n, mask, pass_, mechanism) for n in study.gpus if n >= least]


def _hybrids_lead(study: Study) -> Verdict:
    ratios = {}
    for n in (n for n in study.gpus if n > 8):
        overall = {
            m: float(np.mean([study.mean(n, mask, p, m) for mask in MASKS for p in PASSES])) for m in MECHANISMS[:5]
        }  # fmt: skip
        ratios[n] = max(overall[m] for m in HYBRIDS) / np.nanmax([overall[m] for m in MECHANISMS[:3]])
    return min(ratios.values()) >= 1, "best hybrid over the best other: " + _by_gpus(ratios, ".2f")


def _network_decides(study: Study) -> Verdict:
    first, second = study.gpus[:2]
    falls = {
        m: float(np.mean([study.mean(second, k, p, m) / study.mean(first, k, p, m) for k in DOCUMENT for p in PASSES]))
        for m in MECHANISMS[:5]
    }  # fmt: skip
    text = ", ".join(f"{m} {value:.2f}" for m, value in falls.items())
    return max(falls.values()) <= 0.97, f"DOCUMENT throughput on {second} GPUs over {first}: {text}"


def _heads_bound_ulysses(study: Study) -> Verdict:
    out = [n for n in study.gpus if study.cell(n, "full", "fwd", "ulysses")[0].reason]
    return out == [n for n in study.gpus if 64 % n], f"infeasible on {', '.join(map(str, out)) or 'none'}"


def _ulysses_solid(study: Study) -> Verdict:
    ratios = {
        n: min(
            study.mean(n, mask, p, "ulysses") / max(study.mean(n, mask, p, m) for m in MECHANISMS[:5] if m != "ulysses")
            for mask in DENSE for p in PASSES
        )
        for n in study.gpus if 64 % n == 0
    }  # fmt: skip
    return min(ratios.values()) >= 0.9, "over the best other, worst dense case: " + _by_gpus(ratios, ".2f")


def _ulysses_balanced(study: Study) -> Verdict:
    rows = [row for row in study.rows if row.mechanism == "ulysses" and row.implementation == THEIRS and not row.reason]
    worst = max(row.slowest_s / row.time_s for row in rows)
    return worst <= 1.01, f"slowest rank over the mean: at most {worst:.3f}"


def _ring_full_best(study: Study) -> Verdict:
    worst = max(
        study.mean(n, mask, p, "ring_p2p") / study.mean(n, "full", p, "ring_p2p")
        for n in study.gpus for mask in MASKS[1:] for p in PASSES
    )  # fmt: skip
    return worst < 1, f"other masks reach at most {worst:.2f} of FULL"


def _ring_full_constant(study: Study) -> Verdict:
    ratios = {p: max(found) / min(found) for p in PASSES if (found := _over_gpus(study, "full", p, "ring_p2p", 16))}
    return max(ratios.values()) <= 1.05, "largest over smallest from 16 GPUs on: " + _by_pass(ratios, ".3f")


def _ring_causal_lower(study: Study) -> Verdict:
    ratios = {
        p: [c / f for c, f in zip(*(_over_gpus(study, k, p, "ring_p2p") for k in ("causal", "full")), strict=True)]
        for p in PASSES
    }  # fmt: skip
    text = ", ".join(f"{p} {min(found):.2f} to {max(found):.2f}" for p, found in ratios.items())
    return all(max(found) <= 0.97 for found in ratios.values()), f"CAUSAL over FULL: {text}; published 0.82-0.92"


def _ring_documents_low(study: Study) -> Verdict:
    ratios = _ratios(study, "ring_p2p", "usp", DOCUMENT, PASSES, 16)
    return max(ratios) <= 0.5, f"Ring P2P over USP from 16 GPUs on: {min(ratios):.2f} to {max(ratios):.2f}"


def _hybrids_decline(study: Study) -> Verdict:
    """Down from one node to the most GPUs, and no step by more than a quarter."""
    totals, steps = [], []
    for mask in DOCUMENT:
        for p in PASSES:
            found = _over_gpus(study, mask, p, "usp")
            totals.append(found[-1] / found[0])
            steps += [b / a for a, b in pairwise(found)]
    text = f"most GPUs over 8: {min(totals):.2f} to {max(totals):.2f}; steps: {min(steps):.2f} to {max(steps):.2f}"
    return max(totals) < 1 and min(steps) >= 0.75, text


def _hybrids_stable(study: Study) -> Verdict:
    """Over numbers of GPUs; samples of one number differ by their work, whatever the mechanism."""
    compared = "ulysses", "ring_p2p", *HYBRIDS
    scales = {
        m: float(np.mean([_variation(_over_gpus(study, k, p, m)) for k in DOCUMENT for p in PASSES])) for m in compared
    }
    samples = {
        m: float(np.nanmean([study.spread(n, k, p, m) for n in study.gpus for k in DOCUMENT for p in PASSES]))
        for m in compared
    }
    text = ", ".join(f"{m} {scales[m]:.0%} ({samples[m]:.0%})" for m in compared)
    steadier = max(scales[m] for m in HYBRIDS) < min(scales["ulysses"], scales["ring_p2p"])
    return steadier, f"standard deviation over GPUs (over samples): {text}"


def _variation(values: Sequence[float]) -> float:
    """Standard deviation relative to the mean; NaN is left out."""
    return float(np.nanstd(values) / np.nanmean(values))


def _loongtrain_forward(study: Study) -> Verdict:
    """At scale: from 32 GPUs on, where its ring has windows."""
    means = _loongtrain_over_usp(study, "fwd", 32)
    good = all(0.99 <= ratio <= 1.15 for ratio in means.values()) and max(means.values()) > 1.01
    return good, f"LoongTrain over USP: {_by_gpus(means, '.2f')}"


def _loongtrain_backward(study: Study) -> Verdict:
    means = _loongtrain_over_usp(study, "bwd", 16)
    good = all(0.85 <= ratio <= 1.02 for ratio in means.values())
    return good, f"LoongTrain over USP: {_by_gpus(means, '.2f')}; published, by mask: 0.82 to 1.00"


def _loongtrain_over_usp(study: Study, pass_: str, least: int) -> dict[int, float]:
    """Mean over masks of the ratio of throughputs, by GPUs."""
    ratio = {n: _ratios(study, "loongtrain", "usp", MASKS, (pass_,), n, n) for n in study.gpus if n >= least}
    return {n: float(np.mean(found)) for n, found in ratio.items()}


def _steps(mask: str, forward: tuple[float, float], backward: tuple[float, float], dense: bool) -> Any:
    """A judge of how long a step of Ring P2P takes [ms], within 10 % of what was measured on 8 (16) to 64 GPUs."""

    def judge(study: Study) -> Verdict:
        good, text = True, []
        for p, (low, high) in zip(PASSES, (forward, backward), strict=True):
            numbers = [n for n in study.gpus if (8 if dense else 16) <= n <= 64]
            found = [1e3 * study.mean(n, mask, p, "ring_p2p", of="time_s") / n for n in numbers]
            good &= min(found) >= 0.9 * low and max(found) <= 1.1 * high
            text.append(f"{p} {min(found):.2f} to {max(found):.2f} ms, measured {low} to {high}")
        return good, "; ".join(text)

    return judge


def _gather_backward_grows(study: Study) -> Verdict:
    first, second = (1e3 * study.mean(n, "causal_document", "bwd", "ring_allgather", of="time_s") for n in (8, 16))
    return 1.5 <= second / first <= 2.5, f"{first:.1f} ms on 8 GPUs, {second:.1f} on 16; measured 13.5 and 27.4"


def _by_gpus(values: Mapping[int, float], digits: str) -> str:
    return ", ".join(f"{value:{digits}} on {n}" for n, value in values.items())


def _by_pass(values: Mapping[str, float], digits: str) -> str:
    return ", ".join(f"{p} {value:{digits}}" for p, value in values.items())


_FINDINGS: Final[tuple[tuple[str, Callable[[Study], Verdict]], ...]] = (
    ("Hybrids (USP, LoongTrain) are best overall as soon as nodes are several", _hybrids_lead),
    ("The network between nodes is what costs most: everything falls from one node to two", _network_decides),
    ("Ulysses cannot split 64 heads over 24, 48 or 96 GPUs", _heads_bound_ulysses),
    ("Ulysses does solidly: within 10 % of the best on dense masks", _ulysses_solid),
    ("Ulysses is balanced: ranks end within 1 % of each other", _ulysses_balanced),
    ("FULL is the best mask of Ring P2P", _ring_full_best),
    ("Ring P2P on FULL is nearly constant with scale: within 5 %", _ring_full_constant),
    ("CAUSAL lowers the throughput of Ring P2P, by 3 % or more", _ring_causal_lower),
    ("DOCUMENT masks make Ring P2P slow: at most half of USP", _ring_documents_low),
    ("Hybrids decline gradually with scale on DOCUMENT masks", _hybrids_decline),
    ("Hybrids are more stable over DOCUMENT masks than Ulysses and Ring P2P", _hybrids_stable),
    ("LoongTrain gains modestly over USP forward: up to 15 %", _loongtrain_forward),
    ("LoongTrain is on par with USP backward or slower, by up to 15 %", _loongtrain_backward),
    ("A step of Ring P2P on FULL takes what it was measured to, within 10 %",
     _steps("full", (4.11, 4.31), (10.6, 11.1), dense=True)),
    ("The same on CAUSAL", _steps("causal", (2.42, 2.61), (5.79, 6.36), dense=True)),
    ("The network between nodes paces a step on FULL DOCUMENT",
     _steps("full_document", (1.52, 1.59), (3.10, 3.78), dense=False)),
    ("The same on CAUSAL DOCUMENT", _steps("causal_document", (1.36, 1.59), (3.09, 3.32), dense=False)),
    ("Backward, Ring All-Gather takes about twice as long on 16 GPUs as on 8: traffic grows with all tokens",
     _gather_backward_grows),
)  # fmt: skip
"""Sections 7.2 (the first thirteen, from the paper) and 7.4 of what has been gathered about the benchmark; times of
steps and of all-gathers are MagiAttention's, whose documents differ."""
