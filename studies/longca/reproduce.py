"""LongCA-bench's study of context parallelism on 8 to 96 H100, case by case: ``python -m studies longca-96``.

As its code runs it: batch 1, heads 64:8 of dimension 128, bf16, 8192 tokens a GPU, FlashAttention-3; masks with
documents are 30 samples with seed 42; the host waits before every iteration, the time of a call is the mean over
ranks, and throughputs are averaged over samples. Beside it, the same mechanisms as our executor runs them, and
hybrid_cp, which the study does not have. The paper draws its results without numbers, so what can be compared are its
findings, and what they rest on where MagiAttention has repeated the runs.

Reference: LongCA-bench (arXiv 2510.17896), sections 4.3 and 5.3; NJUDeepEngine/LongCA-bench at 22683e3, dist_attn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import numpy as np

from cpsim.case.documents import load_bins
from cpsim.case.load import scenario_from
from cpsim.errors import InfeasibleError
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import run_passes, window_s
from cpsim.runtime.processes import Progress, mapped

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
THEIRS, OURS, REPEATED = "longca-bench", "cpsim", "magi-attention"
"""Whose code runs: the benchmark's, our executor, and what MagiAttention repeated it with."""
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
CODES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(MECHANISMS, (THEIRS, OURS)),
    **dict.fromkeys(("ring_p2p", "ring_allgather"), (THEIRS, OURS, REPEATED)),
    "hybrid_cp": (OURS,),
}
"""Of the repeated runs, those whose steps are compared, and where they were measured."""
REPEATED_ON: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(MASKS[:2], (8, 16, 32, 64)),
    **dict.fromkeys(MASKS[2:], (8, 16)),
}
"""GPUs by mask."""
LONG_SHARE: Final = 0.6
LONG_BINS: Final = ([(8 * 1024, 30 * 1024)], [1.0])
"""Most of the tokens are of documents that are drawn uniformly between these lengths, both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pass of one case."""

    gpus: int
    mask: str
    sample: int
    mechanism: str
    implementation: str
    pass_: str
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
    rows = mapped(rows_of, points(gpus, samples), jobs, progress)
    return Study(tuple(row for found in rows for row in found))


def rows_of(point: Point) -> list[Row]:
    """Every mechanism as each code runs it, forward and backward."""
    return [
        _row(point, mechanism, implementation, pass_)
        for mechanism in MECHANISMS
        for implementation in CODES[mechanism]
        if implementation != REPEATED or point.gpus in REPEATED_ON[point.mask]
        for pass_ in PASSES
    ]


def _row(point: Point, mechanism: str, implementation: str, pass_: str) -> Row:
    strategy, knobs = STRATEGIES[mechanism]
    case: dict[str, Any] = {
        "strategy": strategy,
        "knobs": knobs,
        "implementation": implementation,
        "kernel": "fa3",
        "gpus": point.gpus,
        "cluster": CLUSTER,
        "profile": PROFILE,
        "tokens_per_gpu": TOKENS_PER_GPU,
        "documents": point.documents,
        "mask": point.mask,
        "heads": 64,
        "kv_heads": 8,
        "pass": pass_,
    }
    scenario = scenario_from(case)
    row = Row(
        gpus=point.gpus,
        mask=point.mask,
        sample=point.sample,
        mechanism=mechanism,
        implementation=implementation,
        pass_=pass_,
    )
    try:
        case = resolve(scenario)
        passes = run_passes(case)  # without what a prediction has beside its time
    except InfeasibleError as reason:
        return replace(row, reason=str(reason))
    timeline = passes[scenario.passes[0]].timeline
    assert timeline is not None
    seconds = float(timeline.rank_end_s().mean())
    work_tflop = case.workload.flops(scenario.passes[0]) / point.gpus / 1e12
    return replace(row, time_s=seconds, slowest_s=window_s(case, passes), tflops_per_gpu=work_tflop / seconds)


@dataclass(frozen=True, slots=True)
class Study:
    """All rows, and means over samples."""

    rows: tuple[Row, ...]
    _by_cell: dict[tuple[int, str, str, str, str], list[Row]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            key = row.gpus, row.mask, row.pass_, row.mechanism, row.implementation
            self._by_cell.setdefault(key, []).append(row)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of GPUs, ascending."""
        return tuple(sorted({row.gpus for row in self.rows}))

    def cell(self, gpus: int, mask: str, pass_: str, mechanism: str, implementation: str = THEIRS) -> list[Row]:
        """The samples of one bar of the paper's charts."""
        return self._by_cell[gpus, mask, pass_, mechanism, implementation]

    def mean(
        self, gpus: int, mask: str, pass_: str, mechanism: str, implementation: str = THEIRS, of: str = "tflops_per_gpu"
    ) -> float:
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
