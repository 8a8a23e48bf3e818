"""Whose code runs a strategy: facts about implementations that their schedules follow from.

Planners read a row of ``IMPLEMENTATIONS`` where an implementation differs from our executor; the schedule of a case
is then that implementation's own. Every fact is read in the source or seen in a profile, none is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.workload import Workload

DENSE: Final = ("full", "causal")
DOCUMENTS: Final = ("full_document", "causal_document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What an implementation's code of one strategy can run."""

    masks: tuple[str, ...] = ()
    """Empty: all of them."""
    chunks: int = 0
    """Every rank holds so many equal chunks of every document (of the sequence, for dense masks); 0: no such need."""
    fixed: Mapping[str, object] | None = None
    """Knobs that have one value only."""
    whole_heads: bool = False
    """Key-value heads are not replicated, so ranks must divide them."""

    def check(self, who: str, strategy: str, workload: Workload, num_ranks: int) -> None:
        """Raise ``InfeasibleError`` where the code cannot run a workload."""
        if self.masks and workload.mask not in self.masks:
            raise InfeasibleError(f"{strategy} of {who} runs masks {', '.join(self.masks)}, got {workload.mask}")
        spans = workload.documents if workload.mask in DOCUMENTS else (workload.num_tokens,)
        parts = self.chunks * num_ranks
        odd = [n for n in spans if parts and n % parts]
        if odd:
            what = "document lengths" if workload.mask in DOCUMENTS else "tokens"
            raise InfeasibleError(f"{strategy} of {who} needs {what} divisible by {parts}, got {odd[0]}")
        if self.whole_heads and workload.num_kv_heads % num_ranks:
            raise InfeasibleError(
                f"{strategy} of {who} does not replicate key-value heads, so it needs them divisible by ranks, "
                f"got {workload.num_kv_heads} kv_heads on {num_ranks} GPUs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One code base; the defaults are those of our executor."""

    name: str
    source: str
    """What was read: package and version."""
    support: Mapping[str, Support] | None = None
    """By strategy; None: all strategies, all cases."""
    kernels: tuple[str, ...] = ()
    """Empty: all kernels."""

    def check(self, strategy: str, workload: Workload, num_ranks: int, knobs: Mapping[str, object]) -> None:
        """Raise ``InfeasibleError`` with the reason where this code cannot run the case."""
        if self.support is None:
            return
        if strategy not in self.support:
            raise InfeasibleError(f"{self.name} has no {strategy}; it has {', '.join(self.support)}")
        support = self.support[strategy]
        support.check(self.name, strategy, workload, num_ranks)
        for knob, value in knobs.items():
            only = (support.fixed or {}).get(knob, value)
            if value != only:
                raise InfeasibleError(f"{strategy} of {self.name} has {knob} {only!r} only, got {value!r}")

    def check_kernel(self, kernel: str) -> None:
        """Raise ``InfeasibleError`` where this code does not call the kernel."""
        if self.kernels and kernel not in self.kernels:
            raise InfeasibleError(f"{self.name} runs kernels {', '.join(self.kernels)}, got {kernel}")


CPSIM: Final = Implementation(name="cpsim", source="this repository")

IMPLEMENTATIONS: Final[dict[str, Implementation]] = {
    i.name: i
    for i in (
        CPSIM,
        Implementation(
            name="ring-flash-attn",
            source="ring-flash-attn 0.1.8",
            support={
                "ring": Support(masks=DENSE + DOCUMENTS, chunks=1),
                "zigzag_ring": Support(masks=("causal", "causal_document"), chunks=2, fixed={"zigzag": "document"}),
                "striped_ring": Support(masks=("causal",), chunks=1),
                "allgather": Support(masks=DENSE + DOCUMENTS, fixed={"layout": "contiguous"}),
            },
            kernels=("fa2",),
        ),
        Implementation(
            name="yunchang",
            source="yunchang 0.6.4",
            support={"ulysses": Support(masks=DENSE, chunks=1, fixed={"head_groups": 1}, whole_heads=True)},
            kernels=("fa2",),
        ),
        Implementation(
            name="torch",
            source="torch 2.11, torch.distributed.tensor.experimental.context_parallel",
            support={
                "ring": Support(masks=DENSE, chunks=1),
                "zigzag_ring": Support(masks=("causal",), chunks=2),
                "allgather": Support(masks=DENSE, chunks=2),
            },
            kernels=("sdpa_flash", "cudnn"),
        ),
    )
}


def implementation(name: str) -> Implementation:
    """A row of the table.

    Raises:
        ScenarioError: nobody has read that code yet.
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ScenarioError(f"implementation: {name!r} is not available yet; available are {known}")
    return IMPLEMENTATIONS[name]
