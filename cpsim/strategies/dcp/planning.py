"""The plan of a case: blocks, where they are and when they run; made once for every content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints
from cpsim.schedule.schedule import Pass
from cpsim.strategies.dcp.blocks import Blocks, Placement, cut
from cpsim.strategies.dcp.placing import Settings, plan_blocks
from cpsim.strategies.dcp.staging import stage_blocks
from cpsim.strategies.dcp.timing import Rates

MOST_COMPUTATIONS: Final = 400_000
"""Computation blocks of one case: planning takes 20 us for each."""
PLANNING_S: Final = {
    "cpsim": (2.0e-3, 0.40, 0.75),
    "paper": (4.4e-4, 0.61, 0.70),
    "released": (3.0e-4, 0.68, 0.57),
}
"""Of every variant: seconds, and the powers of computation blocks and ranks, as ``python -m studies.dcp.planning`` fits
them."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What the schedules of both passes are made from."""

    blocks: Blocks
    placement: Placement
    stage: Mapping[Pass, Ints]
    """Stage of every computation block, ``[C]``."""
    seconds: float
    """Seconds that planning takes on one core, see ``estimated_s``."""


def plan_case(
    workload: Workload, cluster: Cluster, block: int, head_groups: int, settings: Settings, seed: int
) -> Plan:
    """Blocks of a workload on a cluster, and the stages of both passes; see ``cut``, ``plan_blocks``, ``stage_blocks``.

    The same arguments give the same plan, and the same object as long as it is remembered.

    Raises:
        InfeasibleError: there are too many blocks to plan.
    """
    shape = cluster.num_nodes, min(cluster.gpus_per_node, cluster.num_gpus)
    return _planned(workload, shape, Rates.of(cluster), block, head_groups, settings, seed)


@lru_cache(maxsize=8)
def _planned(
    workload: Workload,
    shape: tuple[int, int],
    rates: Rates,
    block: int,
    head_groups: int,
    settings: Settings,
    seed: int,
) -> Plan:
    blocks = cut(workload, block, head_groups)
    if blocks.computations > MOST_COMPUTATIONS:
        raise InfeasibleError(
            f"dcp plans up to {MOST_COMPUTATIONS} computation blocks, got {blocks.computations}; use larger blocks, or "
            "fewer head_groups"
        )
    return planned(blocks, shape, rates, settings, seed)


def planned(blocks: Blocks, shape: tuple[int, int], rates: Rates, settings: Settings, seed: int) -> Plan:
    """Where blocks are and when they run; see ``plan_blocks`` and ``stage_blocks``."""
    placement = plan_blocks(blocks, shape, rates, settings, seed)
    passes: tuple[Pass, Pass] = ("fwd", "bwd")
    stage = {pass_: stage_blocks(blocks, placement, shape, rates, settings, pass_) for pass_ in passes}
    return Plan(blocks, placement, stage, estimated_s(blocks.computations, shape[0] * shape[1], settings.variant))


def estimated_s(computations: int, num_ranks: int, variant: str) -> float:
    """Seconds that planning takes on one core of a present server, see ``studies/dcp/planning.csv``.

    An estimate, within a factor of 1.5 for two of three cases: a clock would make every prediction depend on what else
    the machine does. Of blocks with equally many tokens: where they differ, variants that partition a hypergraph try
    several orders of it, see ``cpsim.strategies.dcp.solvers.ORDERS``.

    Args:
        computations: computation blocks.
        num_ranks: GPUs.
        variant: one of ``VARIANTS``.
    """
    seconds, by_computations, by_ranks = PLANNING_S[variant]
    return float(seconds * computations**by_computations * num_ranks**by_ranks)
