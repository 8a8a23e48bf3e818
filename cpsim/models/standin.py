"""What stands in for parts of a profile that nobody has measured: another profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from cpsim.case.gpu import Gpu, gpu_of_driver
from cpsim.models.attention.discrepancy import NONE
from cpsim.models.attention.kernels import KERNELS, anatomy_at
from cpsim.models.attention.params import AttentionParams
from cpsim.models.derive import moved
from cpsim.models.parameters import LayerCosts, Profile

ALIKE: Final = {"fa3": "fa4", "ffa": "fa4", "ffa_fa4": "fa4", "flash_mask": "fa2", "fa2_sparse": "fa2"}
"""Kernels that no profile of ours measures, and the one of whose code they are, which lends them what published tables
cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A profile of another machine, moved onto this GPU by what describes both, or an earlier one of this."""

    profile: Profile
    """As it is on this GPU."""
    source: Profile
    """As it was measured."""

    @classmethod
    def of(cls, source: Profile, gpu: Gpu | None) -> StandIn:
        """A profile that stands in on a GPU; on one that nobody describes as it is."""
        theirs = gpu_of_driver(source.gpu)
        alike = gpu is None or theirs is None or theirs == gpu
        return cls(profile=source if alike else moved(source, theirs, gpu), source=source)  # type: ignore[arg-type]

    def of_type(self, gpu: str) -> bool:
        """Whether the profile was measured on a GPU type, e.g. h100 or NVIDIA H100 80GB HBM3."""
        mine, theirs = gpu_of_driver(gpu), gpu_of_driver(self.source.gpu)
        return gpu == self.source.gpu or (mine is not None and mine == theirs)

    def kernels(self, gpu: str) -> Mapping[tuple[str, str], AttentionParams]:
        """Attention kernels that were not measured on a GPU type: of the same type; of another, moved, of published
        figures alone."""
        return self.profile.attention if self.of_type(gpu) or self.profile is not self.source else {}

    def layers(self, gpu: str) -> LayerCosts | None:
        """Products and memory-bound ops of layers, as ``kernels``."""
        return self.profile.layers if self.kernels(gpu) else None

    def kinds(self, gpu: str) -> LayerCosts | None:
        """Costs of layers whose memory-bound ops stand in, kind by kind, beside those that were measured on a GPU."""
        return self.of(self.source, gpu_of_driver(gpu)).profile.layers

    def start(self, key: tuple[str, str]) -> AttentionParams | None:
        """Where a fit to few points of one kernel and pass starts: the kernel itself or one that descends from the same
        code."""
        kernel, pass_ = key
        theirs = self.profile.attention.get((ALIKE.get(kernel, kernel), pass_))

        def own(params: AttentionParams) -> AttentionParams:
            if kernel not in ALIKE:
                return replace(params, discrepancy=NONE)
            more: dict[str, Any] = {
                name: time for name, time in KERNELS[key].start.items() if getattr(params, name) == 0.0
            }
            return replace(params, anatomy=anatomy_at(kernel, pass_, params.head_dim), discrepancy=NONE, **more)

        return None if theirs is None else theirs.everywhere(own)

    def alike(self, key: tuple[str, str], num_sms: int) -> AttentionParams | None:
        """This kernel and pass on a GPU with as many SMs, where it is the same code and takes nearly as long."""
        theirs = self.source.attention.get(key)
        return theirs if theirs is not None and theirs.num_sms == num_sms else None

    def words(self, parts: list[str]) -> str:
        """What stands in, for people."""
        how = "" if self.profile is self.source else f", {self.profile.grade.rpartition(': ')[0]}"
        how += "" if self.profile is self.source else f" ({self.profile.grade.rpartition(': ')[2]})"
        return f"{', '.join(parts)} from profile {self.source.name} ({self.source.gpu}){how}"
