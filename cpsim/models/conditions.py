"""What a schedule is priced under: a machine, a kernel, and how its code launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload, mean_head_bytes
from cpsim.models.attention.params import AttentionParams
from cpsim.models.profile import Profile

PACKED_AS: Final = {"cudnn": "fa4"}
"""Kernels that were measured with one sequence a call, and whose costs of several stand in."""
_OF_DOCUMENTS: Final = ("block_varlen_s", "block_decode_s", "call_varlen_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Everything beside the schedule that its costs depend on."""

    cluster: Cluster
    profile: Profile
    kernel: str
    head_dim: int
    value_dim: int = 0
    """Of values and outputs; 0: as ``head_dim``."""
    dtype: str
    ahead_s: float = 0.0
    """How far hosts are ahead of their GPUs when an iteration starts [s]; infinite in a steady state."""
    pause_s: float = 0.0
    """How long GPUs are idle between two iterations [s]."""
    launches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of op, names of host measurements where launches cost otherwise; see ``strategies.others``."""
    views: tuple[int, int] = (0, 0)
    """Views that hosts take beside every call of an attention kernel, forward and backward."""
    row_kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of op, names of measurements of memory-bound kernels that differ from ours."""
    captured: bool = False
    """All ops of a rank are one CUDA graph, launched at once."""
    direct: bool = False
    """The kernel is called without the limits that PyTorch's functions put on it."""
    unbatched: bool = False
    """Every two ranks that send to each other have a process group of their own."""
    messages: int = 1
    """Number of messages that a transfer is sent as, one after the other."""
    varlen: bool = False
    """Kernels are told the lengths of their sequences even where there is only one."""
    reads: bool = False
    """Hosts wait for their GPUs when an iteration starts."""
    sparse: Workload | None = None
    """The problem, where its queries choose their keys."""
    alike: float = 1.0
    """Replication factor of a folded schedule: GPUs for each simulated one, the slowest of which decides."""

    def attention_params(self, pass_: str) -> AttentionParams:
        """Parameters of the kernel: where it is called directly, with what `PACKED_AS` adds to calls of documents.

        Raises:
            ProfileError: the profile lacks the kernel.
        """
        params = self.profile.attention_params(self.kernel, pass_)
        lender = self.profile.attention.get((PACKED_AS.get(self.kernel, ""), pass_))
        if lender is None or not self.direct:
            return params
        lent = {name: getattr(lender, name) for name in _OF_DOCUMENTS}
        return params.everywhere(lambda mine: replace(mine, **lent))

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, of keys and values in the mean."""
        return mean_head_bytes(self.head_dim, self.value_dim, self.dtype)
