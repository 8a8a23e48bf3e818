"""Planners of global batches beside each other: who places the documents of public long-tailed distributions best.

Every planner gets the same documents and the same GPUs, and groups run the same strategy of context parallelism. Each
microbatch that a planner asks for is simulated by itself on the ranks of its group; a batch takes as long as its
busiest rank, with the waits that the planner's order brings about. Sums of gradients and the optimizer, which are the
same for all, are left out.

Lengths are rounded up to multiples of 128, as zigzag shards of up to 64 ranks need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np

from cpsim.case.cluster import load_cluster
from cpsim.case.documents import draw_documents
from cpsim.errors import InfeasibleError
from cpsim.prediction.batches.plan import plan_batch
from cpsim.prediction.batches.prices import Prices, prices_of
from cpsim.runtime.processes import Progress, mapped
from studies.plan.megatron import Rule
from studies.plan.others import best_of, dcp_seconds, flexsp_tables, wlb_tables
from studies.plan.timetable import Judge, Timetable, of_plan

DISTRIBUTIONS: Final = {
    "prolong512k": "ProLong of LongCA-bench (arXiv 2510.17896), up to 512K tokens",
    "magi": "MagiAttention's benchmark, up to 160K tokens",
    "distca_pretrain": "pretraining mix of DistCA (arXiv 2510.18121), up to 128K tokens",
}
"""The three that the bar is about."""
MORE: Final = {"prolong64k": "ProLong of LongCA-bench, up to 64K tokens", "pile": "The Pile of LongCA-bench"}
ROUNDED: Final = 128
LONGEST: Final = 2**19
"""Longer documents are cut [tokens]."""
BUDGET_MS: Final = 10.0
PLANNERS: Final = ("megatron", "flexsp", "wlb", "cpsim alone", "cpsim")
"""``cpsim alone``: one document for each microbatch, as Megatron-Core 0.16 runs them."""
FASTER: Final = 0.10
"""Time that plans save over Megatron-Core's, at least, in the mean of every distribution of the bar."""
WORSE: Final = 0.01
"""Time that a plan takes longer than any other planner's, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What batches are planned for."""

    name: str
    model: str
    cluster: str
    gpus: int
    tokens_per_rank: int
    """Tokens of a batch over the ranks that share it."""
    most_tokens: int
    """Of a rank in a microbatch."""
    fields: dict[str, Any] = field(default_factory=dict)

    def prices(self, **more: Any) -> Prices:
        """Of this setting."""
        cluster = load_cluster(self.cluster).with_gpus(self.gpus)
        return prices_of(cluster, self.model, most_tokens=self.most_tokens, **self.fields, **more)


SMALL: Final = Setting(
    name="8B",
    model="llama3-8b",
    cluster="dgx-h100",
    gpus=64,
    tokens_per_rank=2**16,
    most_tokens=2**14,
    fields={"parallel": {"recompute": "full"}},
)
LARGE: Final = Setting(
    name="70B",
    model="llama3-70b",
    cluster="dgx-h200",
    gpus=512,
    tokens_per_rank=2**17,
    most_tokens=2**15,
    fields={"parallel": {"tp": 8, "recompute": "full"}},
)
SETTINGS: Final = (*(replace(SMALL, gpus=gpus) for gpus in (64, 128, 256, 512, 1024)), LARGE, replace(LARGE, gpus=1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch under one planner."""

    setting: str
    gpus: int
    distribution: str
    seed: int
    documents: int
    planner: str
    time_s: float
    rounds: int
    planning_s: float
    """On the machine that ran the study."""


def batch(setting: Setting, ranks: int, distribution: str, seed: int) -> list[int]:
    """Lengths of the documents of a batch [tokens]."""
    drawn = draw_documents(distribution, setting.tokens_per_rank * ranks, seed, max_length=LONGEST)
    return [int(n) for n in -(-np.array(drawn) // ROUNDED) * ROUNDED]


def timetables(prices: Prices, lengths: Sequence[int]) -> dict[str, Callable[[], Timetable]]:
    """What every planner makes of a batch."""

    def ours(pack: bool) -> Timetable:
        where, model = prices.case.cluster, str(prices.case.scenario.model)
        return of_plan(plan_batch(lengths, where, model, BUDGET_MS, pack=pack, prices=prices))

    return {
        "megatron": lambda: Rule(prices.num_ranks, prices.most_tokens).timetable(lengths),
        "flexsp": lambda: best_of(prices, lengths, flexsp_tables(prices, lengths)),
        "wlb": lambda: best_of(prices, lengths, wlb_tables(prices, lengths)),
        "cpsim alone": lambda: ours(False),
        "cpsim": lambda: ours(True),
    }


Case = tuple[Setting, str, int]
"""Setting, distribution and seed."""


def compared(case: Case, dcp: bool = False) -> list[Row]:
    """One batch under every planner.

    Args:
        case: the batch.
        dcp: whether DCP plans it, too, which takes minutes.
    """
    setting, distribution, seed = case
    prices = setting.prices()
    lengths = batch(setting, prices.num_ranks, distribution, seed)
    judge, rows = Judge(prices, lengths), list[Row]()
    about = Row(
        setting=setting.name,
        gpus=setting.gpus,
        distribution=distribution,
        seed=seed,
        documents=len(lengths),
        planner="",
        time_s=0.0,
        rounds=0,
        planning_s=0.0,
    )
    for name, make in timetables(prices, lengths).items():
        make() if name.startswith("cpsim") else None  # prices are at hand in a run
        begun = time.perf_counter()
        try:
            table = make()
        except InfeasibleError:
            continue
        planning_s = time.perf_counter() - begun
        seconds = judge.seconds(table)
        rows.append(
            replace(about, planner=name, time_s=seconds, rounds=len(table.rounds), planning_s=round(planning_s, 4))
        )
    if dcp:
        begun = time.perf_counter()
        seconds = dcp_seconds(setting.prices(strategy="dcp"), lengths)
        rows.append(replace(about, planner="dcp", time_s=seconds, planning_s=time.perf_counter() - begun))
    return rows


def cases(seeds: int, settings: Sequence[Setting] = SETTINGS) -> list[Case]:
    """All batches: of the largest settings one of every distribution."""
    return [
        (setting, name, seed)
        for setting in settings
        for name in (*DISTRIBUTIONS, *MORE)
        for seed in range(seeds if setting.gpus <= 128 else 1)
    ]


def run(
    asked: Sequence[Case], dcp: bool = False, jobs: int | None = None, progress: Progress | None = None
) -> list[Row]:
    """Batches under every planner.

    Args:
        asked: batches.
        dcp: whether DCP plans them, too.
        jobs: processes; None uses all cores.
        progress: called with (done, total) batches.
    """
    return [row for rows in mapped(partial(compared, dcp=dcp), asked, jobs, progress) for row in rows]


def gains(
    rows: Sequence[Row], planner: str = "cpsim", over: str = "megatron"
) -> dict[tuple[str, int, str, int], float]:
    """Share of the time that a planner saves over another, by batch."""
    times = {(row.setting, row.gpus, row.distribution, row.seed, row.planner): row.time_s for row in rows}
    return {
        key[:4]: 1 - seconds / times[*key[:4], over]
        for key, seconds in times.items()
        if key[4] == planner and (*key[:4], over) in times
    }


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for machines."""
    return [asdict(row) | {"time_s": float(f"{row.time_s:.5g}")} for row in rows]
