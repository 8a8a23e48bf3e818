"""The plan of a case: blocks, where they are and when they run; made once for every content."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

from cpsim.cluster import Cluster
from cpsim.dcp.blocks import Blocks, Placement, cut
from cpsim.dcp.placing import Settings, plan_blocks
from cpsim.dcp.staging import stage_blocks
from cpsim.dcp.timing import Rates
from cpsim.masks import Ints
from cpsim.schedule import Pass
from cpsim.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a schedule is made from."""

    blocks: Blocks
    placement: Placement
    stage: Ints
    """Of every computation block, ``[C]``."""
    seconds: float
    """That planning took, on one core of this machine."""


def plan_case(
    workload: Workload, cluster: Cluster, block: int, head_groups: int, settings: Settings, seed: int, pass_: Pass
) -> Plan:  # fmt: skip
    """Blocks of a workload on a cluster, and the stages of a pass; see ``cut``, ``plan_blocks``, ``stage_blocks``."""
    shape = cluster.num_nodes, min(cluster.gpus_per_node, cluster.num_gpus)
    rates = Rates.of(cluster)
    blocks, placement, seconds = _placed(workload, shape, rates, block, head_groups, settings, seed)
    begin = perf_counter()
    stage = stage_blocks(blocks, placement, shape, rates, settings, pass_)
    return Plan(blocks, placement, stage, seconds + perf_counter() - begin)


@lru_cache(maxsize=8)
def _placed(
    workload: Workload, shape: tuple[int, int], rates: Rates, block: int, head_groups: int, settings: Settings,
    seed: int,
) -> tuple[Blocks, Placement, float]:  # fmt: skip
    """Both passes run the same placement."""
    begin = perf_counter()
    blocks = cut(workload, block, head_groups)
    placement = plan_blocks(blocks, shape, rates, settings, seed)
    return blocks, placement, perf_counter() - begin
