"""No context parallelism: one GPU, one kernel call."""

from __future__ import annotations

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import RangeSets
from cpsim.masks.tiles import make_tiles
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.others import CPSIM, Implementation
from cpsim.strategies.sizes import Sizes


def plan_single(workload: Workload, cluster: Cluster, pass_: Pass, code: Implementation = CPSIM) -> Schedule:
    """All tokens and heads on one GPU; in whosever code it is one call.

    Raises:
        InfeasibleError: there is more than one GPU.
    """
    del code
    if cluster.num_gpus != 1:
        raise InfeasibleError(f"strategy none runs on 1 GPU, got {cluster.num_gpus}; choose a parallel strategy")
    return plan_apart(workload, pass_, sharding.contiguous(workload.num_tokens, 1))


def plan_apart(workload: Workload, pass_: Pass, shards: RangeSets) -> Schedule:
    """Every rank computes its own shard; no query sees the keys of another rank."""
    ranks = np.arange(len(shards))
    sets, behind = sharding.with_queries(shards, len(shards), workload.cached)
    b = Builder(len(shards), sets, make_tiles(workload.slices(), sets, ranks + behind, ranks))
    sizes, rows = Sizes(workload), sets.num_tokens()
    heads = (0, workload.num_heads, 0, workload.num_kv_heads)
    q_bytes, kv_bytes = sizes.query(workload.num_heads), sizes.kv(workload.num_kv_heads)
    dout_bytes = sizes.output(workload.num_heads)
    out_bytes = dout_bytes + sizes.lse(workload.num_heads)
    forward = (("q", q_bytes), ("kv", kv_bytes)), (("out", out_bytes),)
    backward = (*forward[0], *forward[1], ("dout", dout_bytes)), (("dq", q_bytes), ("dkv", kv_bytes))
    given, made = (
        [
            (b.buffers(name, rows[own] * width), b.blocks(name, own, heads[2:] if "kv" in name else heads[:2]))
            for name, width in side
            for own in (ranks if "kv" in name else ranks + behind,)
        ]
        for side in (forward if pass_ == "fwd" else backward)
    )
    for buffer, block in given:
        b.input(buffer, block)
    for buffer, block in made:
        b.output(buffer, block)
    kind = Kind.ATTENTION if pass_ == "fwd" else Kind.ATTENTION_BACKWARD
    b.add(kind, (ranks, "compute"), tile=1 + ranks, heads=heads, reads=given, writes=made)
    return b.build()
