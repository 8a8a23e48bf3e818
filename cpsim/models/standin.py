"""What stands in for parts of a profile that nobody has measured: another profile, scaled by stated ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from cpsim.case.cluster import Gpu, presets
from cpsim.models.attention.discrepancy import NONE
from cpsim.models.attention.params import PER_PAIR, AttentionParams
from cpsim.models.elementwise import OF_SMS, ElementwiseParams
from cpsim.models.network.collective import CollectiveParams, Curve
from cpsim.models.profile import LayerCosts, Profile

SCALED_SIGMA: Final = 0.15
"""Standard deviation, relative, of what a ratio of data sheets says about another GPU; assumed, not measured."""
ALIKE: Final = {"fa3": "fa4"}
"""Kernels that no profile of ours measures, and the one that lends them what published tables cannot tell."""


DATA_SHEET: Final = "data-sheet"
"""What scenarios name as their profile where there is none of their GPU."""
SHEET_SIGMA: Final = 0.4
"""Standard deviation, relative, of costs scaled by data sheets: rates of pairs, scaled from H200's, miss those of
profiles a100 and b200 by 0.39 (root mean square of the logarithms of six kernels and passes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A profile of another machine, or an earlier one of this."""

    profile: Profile
    memory_ratio: float = 1.0
    """Memory bandwidth of this GPU over that of the profile's."""
    network_ratio: float = 1.0
    """Bandwidth of this GPU's NVLink port over that of the profile's."""
    sm_ratio: float = 1.0
    """SMs times clock of this GPU over those of the profile's."""

    def elementwise(self) -> ElementwiseParams:
        """Memory-bound kernels: bandwidths scaled, of some with SMs, and latencies kept."""
        theirs = self.profile.elementwise
        scaled = {
            kind: rate * (self.sm_ratio if kind in OF_SMS else self.memory_ratio)
            for kind, rate in theirs.bandwidth_bytes_per_s.items()
        }
        return replace(theirs, bandwidth_bytes_per_s=scaled)

    def collective(self) -> CollectiveParams:
        """Collectives and transfers: what they take beyond the smallest size is scaled."""
        theirs = self.profile.collective
        return replace(
            theirs,
            curves={kind: {n: self._curve(curve) for n, curve in by.items()} for kind, by in theirs.curves.items()},
            rings={number: self._curve(curve) for number, curve in theirs.rings.items()},
            port_bytes_per_s=theirs.port_bytes_per_s * self.network_ratio,
        )

    def _curve(self, curve: Curve) -> Curve:
        latency = curve.seconds[0]
        return replace(curve, seconds=tuple(latency + (s - latency) / self.network_ratio for s in curve.seconds))

    def kernels(self, gpu: str) -> Mapping[tuple[str, str], AttentionParams]:
        """Attention kernels of the same GPU type; those of another say nothing."""
        mine, theirs = gpu.lower(), self.profile.gpu.lower()  # h100 and NVIDIA H100 80GB HBM3 are one type
        return self.profile.attention if mine in theirs or theirs in mine else {}

    def layers(self, gpu: str) -> LayerCosts | None:
        """Products and memory-bound ops of layers on the same GPU type; those of another say nothing."""
        return self.profile.layers if self.kernels(gpu) else None

    def start(self, key: tuple[str, str], num_sms: int) -> AttentionParams | None:
        """Where a fit to few points of one kernel and pass starts: the kernel itself or one that descends from the same
        code."""
        kernel, pass_ = key
        theirs = self.profile.attention.get((ALIKE.get(kernel, kernel), pass_))
        if theirs is None:
            return None
        return theirs.everywhere(lambda params: replace(_moved(params, num_sms, self.memory_ratio), discrepancy=NONE))

    def alike(self, key: tuple[str, str], num_sms: int) -> AttentionParams | None:
        """This kernel and pass on a GPU with as many SMs, where it is the same code and takes nearly as long."""
        theirs = self.profile.attention.get(key)
        return theirs if theirs is not None and theirs.num_sms == num_sms else None

    def sigma(self, model: str) -> float:
        """Uncertainty of a cost model that stands in."""
        ratio = self.network_ratio if model.startswith(("collective", "transfer")) else self.memory_ratio
        theirs = float(self.profile.sigma[model])
        scaled = model.startswith(("collective", "transfer", "memory-bound")) and ratio != 1.0
        return float((theirs**2 + SCALED_SIGMA**2) ** 0.5) if scaled else theirs

    def words(self, parts: list[str]) -> str:
        """What stands in, for people."""
        ratios = {"memory bandwidth": self.memory_ratio, "NVLink": self.network_ratio, "SMs": self.sm_ratio}
        scaled = [f"{name} x {ratio:g}" for name, ratio in ratios.items() if ratio != 1.0]
        how = f", scaled by {' and '.join(scaled)}" if scaled else ""
        return f"{', '.join(parts)} from profile {self.profile.name} ({self.profile.gpu}){how}"


def from_data_sheet(gpu: Gpu, base: Profile) -> Profile:
    """Costs of a GPU that nobody has measured: those of another, scaled by what the data sheets say of both.

    Tensor-core rates scale what a thread block does on an SM, memory bandwidth what is read and written. The network
    inside a node and launches are kept.
    """
    theirs = next(cluster.gpu for cluster in presets().values() if cluster.gpu.name in base.gpu.lower())
    flops = gpu.peak_flops_per_s / theirs.peak_flops_per_s
    memory = gpu.memory_bandwidth_bytes_per_s / theirs.memory_bandwidth_bytes_per_s
    rate = flops * theirs.num_sms / gpu.num_sms
    attention = {
        key: params.everywhere(lambda each: _moved(each, gpu.num_sms, memory, rate))
        for key, params in base.attention.items()
    }
    scaled = ("attention", "memory-bound", "collective", "transfer", "matrix products", "elementwise of layers")
    wider = {
        model: float((sigma**2 + SHEET_SIGMA**2) ** 0.5)
        for model, sigma in base.sigma.items()
        if model.startswith(scaled) and not model.endswith("between GPUs")
    }
    grade = f"data sheet: {base.name}'s costs scaled by tensor-core rate x {flops:.3g} and memory bandwidth x "
    grade += f"{memory:.3g}, its network inside a node and launches kept"
    return replace(
        base,
        name=DATA_SHEET,
        gpu=gpu.name,
        grade=grade,
        attention=attention,
        sigma={**base.sigma, **wider},
        elementwise=StandIn(profile=base, memory_ratio=memory, sm_ratio=gpu.num_sms / theirs.num_sms).elementwise(),
        held_out=(),
        layers=_moved_layers(base.layers, gpu.num_sms, memory, rate) if base.layers else None,
    )


def _moved_layers(layers: LayerCosts, num_sms: int, memory_ratio: float, rate_ratio: float) -> LayerCosts:
    """Products and memory-bound ops of layers on another GPU's memory and SMs, each so many times as fast."""
    gemm, ops = layers.gemm, layers.ops
    faster = {kind: rate * memory_ratio for kind, rate in ops.bandwidth_bytes_per_s.items()}
    return LayerCosts(
        gemm=replace(
            gemm,
            num_sms=num_sms,
            flop_s=gemm.flop_s / rate_ratio,
            traffic_s_per_byte=gemm.traffic_s_per_byte / memory_ratio,
        ),
        ops=replace(ops, bandwidth_bytes_per_s=faster),
    )


def _moved(params: AttentionParams, num_sms: int, memory_ratio: float, rate_ratio: float = 1.0) -> AttentionParams:
    """A kernel on another GPU's memory and SMs, each so many times as fast."""
    pairs = {name: getattr(params, name) / rate_ratio for name in PER_PAIR}
    traffic = params.traffic_s_per_byte / memory_ratio
    return replace(params, num_sms=num_sms, traffic_s_per_byte=traffic, **pairs)
