"""What stands in for parts of a profile that nobody has measured: another profile, scaled by stated ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from cpsim.calibrate.profile import Profile
from cpsim.models.attention import AttentionParams
from cpsim.models.collective import CollectiveParams, Curve
from cpsim.models.discrepancy import NONE
from cpsim.models.elementwise import ElementwiseParams

SCALED_SIGMA: Final = 0.15
"""Standard deviation, relative, of what a ratio of data sheets says about another GPU; assumed, not measured."""
ALIKE: Final = {"fa3": "fa4"}
"""Kernels that no profile of ours measures, and the one that lends them what published tables cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A profile of another machine, or an earlier one of this."""

    profile: Profile
    memory_ratio: float = 1.0
    """Memory bandwidth of this GPU over that of the profile's."""
    network_ratio: float = 1.0
    """The same for its NVLink port."""

    def elementwise(self) -> ElementwiseParams:
        """Memory-bound kernels: bandwidths scaled, latencies kept."""
        theirs = self.profile.elementwise
        scaled = {kind: rate * self.memory_ratio for kind, rate in theirs.bandwidth_bytes_per_s.items()}
        return replace(theirs, bandwidth_bytes_per_s=scaled)

    def collective(self) -> CollectiveParams:
        """Collectives and transfers: what they take beyond the smallest size is scaled."""
        theirs = self.profile.collective
        return replace(
            theirs,
            curves={kind: {n: self._curve(curve) for n, curve in by.items()} for kind, by in theirs.curves.items()},
            rings={number: self._curve(curve) for number, curve in theirs.rings.items()},
            transfers={pattern: self._curve(curve) for pattern, curve in theirs.transfers.items()},
            port_bytes_per_s=theirs.port_bytes_per_s * self.network_ratio,
        )

    def _curve(self, curve: Curve) -> Curve:
        latency = curve.seconds[0]
        return replace(curve, seconds=tuple(latency + (s - latency) / self.network_ratio for s in curve.seconds))

    def kernels(self, gpu: str) -> Mapping[tuple[str, str], AttentionParams]:
        """Attention kernels of the same GPU type; those of another say nothing."""
        mine, theirs = gpu.lower(), self.profile.gpu.lower()  # h100 and NVIDIA H100 80GB HBM3 are one type
        return self.profile.attention if mine in theirs or theirs in mine else {}

    def start(self, key: tuple[str, str], num_sms: int) -> AttentionParams | None:
        """Where a fit to few points of one kernel and pass starts: the kernel itself or its next of kin."""
        kernel, pass_ = key
        theirs = self.profile.attention.get((ALIKE.get(kernel, kernel), pass_))
        if theirs is None:
            return None
        return self._moved(theirs, num_sms)

    def _moved(self, params: AttentionParams, num_sms: int) -> AttentionParams:
        others = tuple(self._moved(other, num_sms) for other in params.head_dims)
        traffic = params.traffic_s_per_byte / self.memory_ratio
        return replace(params, num_sms=num_sms, traffic_s_per_byte=traffic, discrepancy=NONE, head_dims=others)

    def sigma(self, model: str) -> float:
        """Uncertainty of a cost model that stands in."""
        ratio = self.network_ratio if model.startswith(("collective", "transfer")) else self.memory_ratio
        theirs = float(self.profile.sigma[model])
        scaled = model.startswith(("collective", "transfer", "memory-bound")) and ratio != 1.0
        return float((theirs**2 + SCALED_SIGMA**2) ** 0.5) if scaled else theirs

    def words(self, parts: list[str]) -> str:
        """What stands in, for people."""
        ratios = {"memory bandwidth": self.memory_ratio, "NVLink": self.network_ratio}
        scaled = [f"{name} x {ratio:g}" for name, ratio in ratios.items() if ratio != 1.0]
        how = f", scaled by {' and '.join(scaled)}" if scaled else ""
        return f"{', '.join(parts)} from profile {self.profile.name} ({self.profile.gpu}){how}"
