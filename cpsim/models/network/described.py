"""Profiles of machines whose links inside a node are described, not measured."""

from __future__ import annotations

from dataclasses import replace

from cpsim.case.cluster import Cluster
from cpsim.case.transports import constants
from cpsim.models.network.collective import COLLECTIVES
from cpsim.models.network.nccl import LARGEST_BYTES, collective_params
from cpsim.models.profile import Profile

OF_LINKS = ("collective", "transfer")
"""Cost models that links inside a node decide."""


def with_inside(profile: Profile, cluster: Cluster) -> Profile:
    """A profile with the links that a cluster's file describes; the same one where it describes none."""
    inside = cluster.inside
    if inside is None:
        return profile
    spread = constants().links[inside.link].sigma_log
    sizes = (1.0, float(LARGEST_BYTES))
    valid = dict.fromkeys(("transfer", *(f"collective {kind}" for kind in COLLECTIVES)), sizes)
    words = f"links inside a node: {inside.link} of {inside.port_bandwidth_bytes_per_s / 1e9:g} GB/s, by NCCL's "
    return replace(
        profile,
        collective=collective_params(inside, cluster.gpus_per_node),
        grade=f"{profile.grade}; {words}algorithms and data sheets",
        sigma={**profile.sigma, **{n: spread for n in profile.sigma if n.startswith(OF_LINKS)}},
        valid={**profile.valid, **valid},
    )
