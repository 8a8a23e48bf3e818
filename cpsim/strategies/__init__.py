"""Strategies: pure functions from a workload and a cluster to a schedule.

A strategy is ``plan(workload, cluster, pass_, **knobs) -> Schedule``; ``STRATEGIES`` is the whole registry. One that
others have built, too, takes whose code it is before the knobs. A new strategy is a file or folder here and a line of
``STRATEGIES``. Covered by tests/test_strategies.py, which validates, executes and simulates all that tests/cases.py
lists.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError, shown
from cpsim.schedule.builder import followed_by
from cpsim.schedule.schedule import Pass, Schedule
from cpsim.strategies.allgather import allgather_knobs, plan_allgather
from cpsim.strategies.dcp.strategy import dcp_knobs, plan_dcp
from cpsim.strategies.distca.strategy import plan_distca
from cpsim.strategies.hybrid_cp import hybrid_cp_knobs, plan_hybrid_cp
from cpsim.strategies.magi import plan_magi
from cpsim.strategies.mesh import mesh_knobs, plan_mesh
from cpsim.strategies.others import CPSIM, Implementation
from cpsim.strategies.replicas import plan_per_sequence, plan_wlb, replica_knobs
from cpsim.strategies.ring.ring import plan_ring, plan_striped_ring, plan_zigzag_ring, striped_knobs, zigzag_knobs
from cpsim.strategies.single import plan_single
from cpsim.strategies.sinks import with_sinks
from cpsim.strategies.sparse import ADAPTED, plan_chosen
from cpsim.strategies.ulysses import plan_ulysses, ulysses_knobs
from cpsim.strategies.usp import loongtrain_knobs, plan_loongtrain, plan_usp, usp_knobs

Knobs = Mapping[str, object]


class Strategy(NamedTuple):
    """A planner and the knob settings that are worth trying for a case, or the reason why none is."""

    plan: Callable[..., Schedule]
    knobs: Callable[[Workload, Cluster], Sequence[Knobs]]


def _no_knobs(workload: Workload, cluster: Cluster) -> Sequence[Knobs]:
    del workload, cluster
    return ({},)


STRATEGIES: Final[dict[str, Strategy]] = {
    "none": Strategy(plan_single, _no_knobs),
    "ulysses": Strategy(plan_ulysses, ulysses_knobs),
    "ring": Strategy(plan_ring, _no_knobs),
    "zigzag_ring": Strategy(plan_zigzag_ring, zigzag_knobs),
    "striped_ring": Strategy(plan_striped_ring, striped_knobs),
    "allgather": Strategy(plan_allgather, allgather_knobs),
    "usp": Strategy(plan_usp, usp_knobs),
    "loongtrain": Strategy(plan_loongtrain, loongtrain_knobs),
    "mesh": Strategy(plan_mesh, mesh_knobs),
    "hybrid_cp": Strategy(plan_hybrid_cp, hybrid_cp_knobs),
    "magi": Strategy(plan_magi, _no_knobs),
    "dcp": Strategy(plan_dcp, dcp_knobs),
    "distca": Strategy(plan_distca, _no_knobs),
    "wlb": Strategy(plan_wlb, replica_knobs),
    "per_sequence": Strategy(plan_per_sequence, replica_knobs),
}


ANY_VALUES: Final = ("none", "ulysses", "ring", "zigzag_ring", "striped_ring", "allgather", "usp", "loongtrain", "mesh")
"""Strategies that know how large values are where keys have another size."""


CACHED: Final = ("none", "ring", "striped_ring", "mesh")
"""Strategies whose ranks may hold keys of tokens that have no queries."""


@cache
def _knobs_of(planner: Callable[..., Schedule]) -> tuple[str, ...]:
    """Names of a planner's knobs."""
    return tuple(p.name for p in inspect.signature(planner).parameters.values() if p.kind is p.KEYWORD_ONLY)


def plan(
    name: str, workload: Workload, cluster: Cluster, pass_: Pass, knobs: Knobs, code: Implementation = CPSIM
) -> Schedule:
    """The schedule of a named strategy, as our executor runs it or as somebody else's code does.

    Raises:
        ScenarioError: there is no such strategy, or it does not have one of the knobs.
        InfeasibleError: it cannot run this case.
    """
    if name not in STRATEGIES:
        raise ScenarioError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {shown(name)}")
    planner = STRATEGIES[name].plan
    known = _knobs_of(planner)
    for knob in knobs:
        if knob not in known:
            offers = f"it has {', '.join(known)}" if known else "it has none"
            raise ScenarioError(f"knobs: strategy {name} has no knob {knob!r}; {offers}")
    chosen = code.check(name, workload, cluster.all_gpus, knobs)
    if workload.sparse is not None and name not in ADAPTED:
        raise InfeasibleError(f"sparse: chosen keys are planned for {', '.join(ADAPTED)}, got {name}; leave sparse out")
    if workload.value_dim not in (0, workload.head_dim) and (name not in ANY_VALUES or code.name != CPSIM.name):
        raise InfeasibleError(
            f"value_dim: values of another size than keys are planned for {', '.join(ANY_VALUES)} of our executor's "
            f"code, got {name} of {code.name}; leave value_dim out"
        )
    if workload.cached and (name not in CACHED or code.name != CPSIM.name or pass_ == "bwd"):
        raise InfeasibleError(
            f"cached: keys from before are planned for the forward pass of {', '.join(CACHED)} of our executor's code, "
            f"got {pass_} of {name} of {code.name}; leave cached out"
        )
    whose = () if code is CPSIM else (code,)
    schedule: Schedule = planner(workload, cluster, pass_, *whose, **chosen)
    alone = code is CPSIM and cluster.all_gpus == 1
    if alone:  # nobody to exchange anything with; the planner has checked its knobs
        schedule = plan_single(workload, cluster, pass_)
    if workload.sparse is not None and (alone or chosen.get("keys") != "chosen"):
        return plan_chosen(schedule, workload, pass_, by_head=name == "ulysses")
    if workload.sinks and code is CPSIM:
        return with_sinks(schedule, workload, pass_)
    if alone:
        return schedule
    if code.projections is None or pass_ == "fwd":
        return schedule
    return followed_by(schedule, code.projections.ops(workload, cluster.all_gpus))
