"""Which strategies, kernels and other people's code can run a case, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.models.attention import kernels as table
from cpsim.models.feasible import refusal
from cpsim.schedule.schedule import Schedule
from cpsim.strategies import STRATEGIES, plan
from cpsim.strategies.others import CPSIM, RUN_HERE, Implementation

KERNELS: Final = tuple(dict.fromkeys(kernel for kernel, _ in table.KERNELS))
"""Kernels with a cost model."""
OTHERS: Final = tuple(code for code in RUN_HERE if code is not CPSIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySupport:
    """What can run one strategy; every reason is one line, and "" where there is none: it can."""

    strategy: str
    plan: str
    """Ours: its schedule is valid whatever kernel runs it; the executor's plain attention takes any mask."""
    kernels: Mapping[str, str]
    """By kernel, where ours has a plan: whether each attention op is one call of it."""
    others: Mapping[str, str]
    """By implementation of other people, where it has the strategy."""

    @property
    def is_general(self) -> bool:
        """Ours runs what the strategy's other implementations, of which there are some, all refuse."""
        return not self.plan and bool(self.others) and all(self.others.values())


def support(workload: Workload, cluster: Cluster) -> tuple[StrategySupport, ...]:
    """One entry per strategy, forward, with any of the knobs that are worth trying; ``none`` on one GPU."""
    return tuple(_support(name, workload, cluster.with_gpus(1) if name == "none" else cluster) for name in STRATEGIES)


def _support(name: str, workload: Workload, cluster: Cluster) -> StrategySupport:
    found = list(_plans(name, workload, cluster))
    schedules = [entry for entry in found if isinstance(entry, Schedule)]
    reasons = [entry for entry in found if isinstance(entry, str)]
    return StrategySupport(
        strategy=name,
        plan="" if schedules else reasons[0],
        kernels={
            kernel: _first(refusal(kernel, workload.dtype, workload.head_dim, s, workload.value_dim) for s in schedules)
            for kernel in KERNELS
            if schedules
        },
        others={c.name: _of(c, name, workload, cluster) for c in OTHERS if c.strategies and name in c.strategies},
    )


def _first(reasons: Iterator[str]) -> str:
    """No reason where one entry has none, otherwise the first."""
    every = list(reasons)
    return "" if "" in every else every[0]


def _plans(name: str, workload: Workload, cluster: Cluster) -> Iterator[Schedule | str]:
    """Schedules, or why there is none, for all knobs that are worth trying."""
    try:
        settings = STRATEGIES[name].knobs(workload, cluster)
    except InfeasibleError:
        settings = ({},)
    for knobs in settings:
        try:
            yield plan(name, workload, cluster, "fwd", knobs)
        except InfeasibleError as reason:
            yield str(reason)


def _of(code: Implementation, name: str, workload: Workload, cluster: Cluster) -> str:
    try:
        code.check(name, workload, cluster.num_gpus, {})
    except InfeasibleError as reason:
        return str(reason)
    return ""
