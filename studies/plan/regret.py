"""How good planners are, and what wrong prices cost.

Two questions. Small batches are planned in every way there is: what does a planner's plan take beyond the best, by the
same prices? And of whole batches: what does it cost to plan with prices that are wrong by as much as their intervals
allow, one cost model at a time and all at once?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any, Final

import numpy as np

from cpsim.errors import InfeasibleError
from cpsim.models.cost_models import GROUPS
from cpsim.models.uncertainty import WIDER, draws_of
from cpsim.prediction.batches.placing import Costs, bound_s
from cpsim.prediction.batches.plan import costs_of, plan_batch
from cpsim.prediction.batches.prices import Ints, Prices
from cpsim.runtime.processes import Progress, mapped
from studies.plan.compare import DISTRIBUTIONS, SMALL, batch
from studies.plan.exhaustive import best_time_s
from studies.plan.megatron import Rule
from studies.plan.others import best_of, flexsp_tables, priced, wlb_tables
from studies.plan.timetable import Timetable, Turn, of_plan

RANKS: Final = 8
SIZES: Final = (4, 6, 8)
"""Documents of small batches."""
BATCHES: Final = 20
"""Small batches of every distribution and size."""
LONGER: Final = 8
"""Documents of small batches are so many times as long as drawn, up to what all ranks hold: most are short otherwise,
and a batch is its longest document."""
HALF: Final = 1.645
"""Standard deviations from the middle of a 90 % interval to its end."""
JOINT: Final = 20
"""Draws of all cost models at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """One small batch: what planners take over the best plan, less 1."""

    distribution: str
    documents: int
    pack: bool
    regret: Mapping[str, float]
    """By planner."""
    bound: float
    """The best plan over the bound that planners stop at, less 1."""


def small(case: tuple[str, int, bool]) -> list[Small]:
    """All small batches of a distribution with so many documents, with packs or without."""
    name, count, pack = case
    prices = replace(SMALL, gpus=RANKS).prices()
    rng, found = np.random.default_rng(count), list[Small]()
    for seed in range(BATCHES):
        drawn = rng.choice(batch(SMALL, SMALL.gpus, name, seed), count, replace=False) * LONGER
        lengths = np.sort(np.minimum(drawn, RANKS * SMALL.most_tokens))[::-1].astype(np.int64)
        costs = costs_of(prices, lengths, prices.sizes(), alone=not pack)
        best = best_time_s(costs, np.inf)
        regret = {
            planner: _costs_s(costs, table) / best - 1 for planner, table in _tables(prices, lengths, pack).items()
        }
        found.append(
            Small(
                distribution=name,
                documents=count,
                pack=pack,
                regret=regret,
                bound=best / bound_s(costs) - 1,
            )
        )
    return found


def _tables(prices: Prices, lengths: Ints, pack: bool) -> dict[str, Timetable]:
    """Plans of all planners that may pack, or of those that do not."""
    ours = of_plan(plan_batch(lengths, prices.case.cluster, SMALL.model, pack=pack, prices=prices))
    if not pack:
        return {"cpsim": ours, "megatron": Rule(RANKS, prices.most_tokens).timetable(lengths.tolist())}
    found = {"cpsim": ours}
    for name, made in (("flexsp", flexsp_tables), ("wlb", wlb_tables)):
        try:
            found[name] = best_of(prices, lengths.tolist(), made(prices, lengths.tolist()))
        except InfeasibleError:
            continue
    return found


def _costs_s(costs: Costs, table: Timetable) -> float:
    """Seconds of a batch by what documents and packs are planned to cost."""
    level = {size: i for i, size in enumerate(costs.sizes.tolist())}

    def seconds(turn: Turn) -> float:
        return float(costs.pack_s[level[turn.size]] + costs.added_s[level[turn.size], list(turn.documents)].sum())

    return table.time_s([[seconds(turn) for turn in turns] for turns in table.rounds])


def _time_s(prices: Prices, lengths: Ints, table: Timetable) -> float:
    return table.time_s([priced(prices, lengths.tolist(), turns) for turns in table.rounds])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A batch that was planned with wrong prices."""

    distribution: str
    what: str
    """The cost model that is wrong, or ``all``."""
    factor: float
    """How many times as long it is taken to be; of ``all`` the mean size of its errors."""
    lost: float
    """Time with right prices over that of the plan with these, less 1."""


def sigmas(prices: Prices) -> dict[str, float]:
    """Standard deviation of the logarithm of every cost model's error, as intervals of predictions have it."""
    case = prices.case
    drawn = draws_of(
        case.profile, case.cluster, case.scenario.kernel, captured=False, layers=True, steady=True, seed=(0,)
    )
    return {name: WIDER * drawn.sigma[name] for name in GROUPS if drawn.sigma[name] > 0}


def wrong(name: str, seed: int = 0) -> list[Wrong]:
    """A batch of a distribution under wrong prices of every kind."""
    true = SMALL.prices()
    lengths = np.array(batch(SMALL, true.num_ranks, name, seed))
    sigma = sigmas(true)
    best = _planned_s(true, true, lengths)
    asked: list[tuple[str, float, dict[str, float]]] = []
    for what, s in sigma.items():
        asked += [(what, factor, {what: factor}) for factor in (np.exp(-HALF * s), np.exp(HALF * s))]
    rng = np.random.default_rng(1)
    for _ in range(JOINT):
        drawn = {what: float(np.exp(s * rng.standard_normal())) for what, s in sigma.items()}
        asked.append(("all", float(np.exp(mean(abs(np.log(f)) for f in drawn.values()))), drawn))
    return [
        Wrong(
            distribution=name,
            what=what,
            factor=float(factor),
            lost=_planned_s(true, true.with_factors(factors), lengths) / best - 1,
        )
        for what, factor, factors in asked
    ]


def _planned_s(true: Prices, believed: Prices, lengths: Ints) -> float:
    """Seconds, by true prices, of the plan that others make."""
    return _time_s(true, lengths, of_plan(plan_batch(lengths, true.case.cluster, SMALL.model, prices=believed)))


def run(jobs: int | None = None, progress: Progress | None = None) -> tuple[list[Small], list[Wrong]]:
    """All small batches, and all wrong prices.

    Args:
        jobs: processes; None uses all cores.
        progress: called with (done, total) parts.
    """
    asked = [(name, count, pack) for name in DISTRIBUTIONS for count in SIZES for pack in (True, False)]
    parts: list[Any] = [partial(small, case) for case in asked] + [partial(wrong, name) for name in DISTRIBUTIONS]
    found = mapped(_called, parts, jobs, progress)
    smalls = [row for rows in found[: len(asked)] for row in rows]
    return smalls, [row for rows in found[len(asked) :] for row in rows]


def _called(part: Any) -> Any:
    return part()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, 95th percentile and largest of some shares."""
    return {
        "mean": round(mean(values), 4),
        "p95": round(float(np.quantile(values, 0.95)), 4),
        "max": round(max(values), 4),
    }
