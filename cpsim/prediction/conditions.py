"""The conditions that a code's schedules are priced under."""

from __future__ import annotations

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.models.conditions import Conditions, Protocol
from cpsim.models.profile import Profile
from cpsim.strategies.others import Implementation


def conditions(
    code: Implementation,
    strategy: str | None,
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    kernel: str,
    protocol: Protocol,
) -> Conditions:
    """What a code's ops are priced under, by the facts of it that hold for a strategy and a workload's mask."""
    support = code.support(strategy)
    return Conditions(
        cluster=cluster,
        profile=profile,
        kernel=kernel,
        head_dim=workload.head_dim,
        dtype=workload.dtype,
        protocol=protocol,
        launches=code.launches,
        row_kernels=code.row_kernels,
        captured=code.captured,
        unbatched=code.unbatched,
        messages=code.messages,
        varlen=workload.mask in support.varlen,
        reads=workload.mask in support.reads,
    )
