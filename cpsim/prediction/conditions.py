"""The conditions that a code's schedules are priced under."""

from __future__ import annotations

from math import inf
from typing import Literal

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.models.conditions import Conditions
from cpsim.models.profile import Profile
from cpsim.strategies.others import Implementation


def conditions(
    code: Implementation,
    strategy: str | None,
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    kernel: str,
    protocol: Literal["synced", "streamed"],
) -> Conditions:
    """What a code's ops are priced under, by the facts of it that hold for a strategy and a workload's mask.

    Synced, hosts wait for their GPUs before every iteration. Streamed, iterations run back to back, so that hosts are
    ahead as far as they can be, and GPUs never idle but for them.
    """
    support = code.support(strategy)
    return Conditions(
        cluster=cluster,
        profile=profile,
        kernel=kernel,
        head_dim=workload.head_dim,
        value_dim=workload.value_dim,
        dtype=workload.dtype,
        ahead_s=0.0 if protocol == "synced" else inf,
        pause_s=profile.host.pause_s["synced"] if protocol == "synced" else 0.0,
        launches=code.launches if support.launches is None else support.launches,
        views=support.views,
        row_kernels=code.row_kernels,
        captured=code.captured,
        direct=kernel in code.direct,
        unbatched=code.unbatched,
        messages=code.messages,
        varlen=workload.mask in support.varlen,
        reads=workload.mask in support.reads,
        sparse=workload if workload.sparse is not None else None,
    )
