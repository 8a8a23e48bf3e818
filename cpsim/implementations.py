"""Whose code runs a strategy: facts about implementations that their schedules follow from.

Planners read a row of ``IMPLEMENTATIONS`` where an implementation differs from our executor; the schedule of a case
is then that implementation's own. Every fact is read in the source or seen in a profile, none is fitted.

Other people's code runs on PyTorch's eager ops, so between two attention kernels it launches *sweeps*: kernels that
pass over a tensor once to cast, add, concatenate or copy it. Each is an op of the schedule, one launch of the host.
The first sweep of a place carries what it does to buffers; those that follow it there do a part of the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.schedule import Pass
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
    knobs: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values of knobs that have fewer than ours or another default, which comes first."""
    balanced: str = ""
    """Layout that runs causal masks only."""
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


Tensor = Literal["q", "k", "kv", "lse"]
Rows = Literal["part", "whole", "tails"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One kernel of PyTorch's own that passes over rows of a tensor."""

    tensor: Tensor
    """Whose elements count: ``q`` also for outputs and gradients of queries, ``k`` for one of keys and values."""
    narrow: int
    """How often each element is read or written in the working type."""
    wide: int
    """The same in fp32."""
    rows: Rows = "part"
    """Rows of the partial result, of the rank's shard, or of its tails."""


Sweeps = tuple[Sweep, ...]
_CAST: Final = Sweep("q", 1, 1)
_CAST_K: Final = Sweep("k", 1, 1)
_ADD: Final = Sweep("q", 1, 2)
_ADD_K: Final = Sweep("k", 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCode:
    """How somebody's ring differs from ours. All of them work in lockstep with the one stream of their process group:
    a transfer starts after the kernels that both ranks launched before it, and after their last transfer; kernels
    wait for it at the end of its step. Every partial result is summed in fp32 and cast at the end.
    """

    gathers: bool = False
    """Keys and values are gathered from all ranks once instead of travelling; gradients travel."""
    queries_last: bool = False
    """Gradients of queries are summed after those of keys and values are on their way."""
    copies: int = 1
    """fp32 outputs alive at a time: two where a merge makes a new one."""
    enter: Mapping[Pass, Sweeps]
    """Before the first step."""
    leave: Mapping[Pass, Sweeps]
    """After the last step: results in the working type; the first of them is that of the queries."""
    send: Sweeps = ()
    """Before keys and values are sent."""
    tails: Sweeps = ()
    """Backward, before a kernel that reads tail queries."""
    first: Sweeps
    """After the first partial output."""
    merge: Sweeps
    """After a partial output of all rows."""
    merge_tails: Sweeps
    """After a partial output of the tail rows."""
    first_dq: Sweeps = (_CAST,)
    sum_dq: Sweeps = (_ADD,)
    sum_dq_tails: Sweeps = (_ADD,)
    idle_dq: Sweeps = ()
    """In a step without a kernel."""
    first_dkv: Sweeps = (_CAST_K, _CAST_K)
    sum_dkv: Sweeps = (_ADD_K, _ADD_K)
    sum_dkv_heads: Sweeps = (_ADD_K, _ADD_K)
    """After a kernel that read head keys only."""
    idle_dkv: Sweeps = ()
    send_dkv: Sweeps = ()
    """Before gradients of keys and values are sent."""


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
    ring: RingCode | None = None
    gathered: RingCode | None = None
    """A ring that runs as ``allgather``."""
    launches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of op, the names of `host` measurements that say what it costs the host, the best one first; other
    kinds cost what ours do. ``barrier`` is a call into the code; ``{pass}`` and ``{kernel}`` are filled in."""
    sweeps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of op, the names of `elementwise` measurements, likewise."""

    def check(
        self, strategy: str, workload: Workload, num_ranks: int, knobs: Mapping[str, object]
    ) -> Mapping[str, object]:
        """The knobs with this code's defaults filled in.

        Raises:
            InfeasibleError: this code cannot run the case; says why.
        """
        if self.support is None:
            return knobs
        if strategy not in self.support:
            raise InfeasibleError(f"{self.name} has no {strategy}; it has {', '.join(self.support)}")
        if num_ranks == 1:
            raise InfeasibleError(f"{strategy} of {self.name} runs on 2 GPUs or more, got 1")
        support = self.support[strategy]
        support.check(self.name, strategy, workload, num_ranks)
        for knob, values in support.knobs.items():
            if knob in knobs and knobs[knob] not in values:
                known = " or ".join(map(repr, values))
                raise InfeasibleError(f"{strategy} of {self.name} has {knob} {known} only, got {knobs[knob]!r}")
        chosen = {**{knob: values[0] for knob, values in support.knobs.items()}, **knobs}
        if support.balanced and chosen["layout"] == support.balanced and workload.mask != "causal":
            raise InfeasibleError(
                f"{strategy} of {self.name} with layout {support.balanced} runs mask causal, got {workload.mask}; "
                f"use another layout"
            )
        return chosen

    def check_kernel(self, kernel: str) -> None:
        """Raise ``InfeasibleError`` where this code does not call the kernel."""
        if self.kernels and kernel not in self.kernels:
            raise InfeasibleError(f"{self.name} runs kernels {', '.join(self.kernels)}, got {kernel}")


_RING_FLASH_ATTN: Final = RingCode(
    copies=2,
    enter={"fwd": (), "bwd": (Sweep("lse", 0, 2, "tails"),)},  # softmax_lse1.contiguous()
    first=(_CAST,),  # utils.py, update_out_and_lse
    merge=(_ADD,),
    merge_tails=(_ADD, Sweep("q", 0, 2), Sweep("lse", 0, 2)),  # out[slice_], lse[slice_] = ...
    leave={"fwd": (Sweep("q", 1, 1, "whole"),), "bwd": (Sweep("q", 1, 1, "whole"), _CAST_K, _CAST_K)},
)
_MERGE_EAGER: Final = (
    _CAST, *(Sweep("lse", 0, 3),) * 2, *(Sweep("q", 0, 3),) * 3, *(Sweep("lse", 0, 3),) * 3,
)  # fmt: skip
_ZEROS: Final = (Sweep("q", 0, 1), Sweep("k", 0, 1), Sweep("k", 0, 1))
_HALF_K: Final = (_ADD_K, Sweep("k", 0, 2, "whole"))
_TORCH: Final = RingCode(
    queries_last=True,
    copies=3,
    enter={"fwd": (Sweep("k", 2, 0),) * 2, "bwd": (*_ZEROS, *(Sweep("k", 2, 0),) * 2)},  # key.contiguous()
    send=(Sweep("kv", 2, 0),),  # torch.cat([key.flatten(), value.flatten()])
    tails=(Sweep("lse", 0, 2),),  # logsumexp.chunk(2)[1].contiguous()
    first=(_CAST,),  # _SDPAMerger.step
    merge=_MERGE_EAGER,
    merge_tails=(*_MERGE_EAGER, Sweep("lse", 0, 2, "whole"), Sweep("q", 0, 2, "whole")),  # _partial_update
    leave={"fwd": (Sweep("q", 1, 1, "whole"),), "bwd": (Sweep("q", 1, 1, "whole"), Sweep("kv", 1, 1))},
    first_dq=(_ADD,),
    sum_dq_tails=(_ADD, Sweep("q", 0, 2, "whole")),
    idle_dq=(Sweep("q", 0, 3, "whole"),),
    first_dkv=(_ADD_K, _ADD_K),
    sum_dkv_heads=(*_HALF_K, *_HALF_K),
    idle_dkv=(*_ZEROS, Sweep("k", 0, 3, "whole"), Sweep("k", 0, 3, "whole")),
    send_dkv=(Sweep("kv", 0, 2, "whole"),),
)

_EAGER: Final[dict[str, tuple[str, ...]]] = dict.fromkeys(("copy", "accumulate", "elementwise"), ("eager", "copy"))
_FLASH_ATTN: Final = _EAGER | {
    "barrier": ("autograd_{call}",),
    "attention": ("flash_attn fwd",),
    "attention_backward": ("flash_attn bwd",),
}

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
                "zigzag_ring": Support(masks=("causal", "causal_document"), chunks=2, knobs={"zigzag": ("document",)}),
                "striped_ring": Support(masks=("causal",), chunks=1),
                "allgather": Support(masks=DENSE + DOCUMENTS, knobs={"layout": ("contiguous",)}),
            },
            kernels=("fa2",),
            ring=_RING_FLASH_ATTN,
            launches=_FLASH_ATTN
            | {"merge": ("jit_merge", "merge"), "transfer": ("transfer_of_two",), "all_gather": ("async_all_gather",)}
            | {"reduce_scatter": ("sync_reduce_scatter",)},
            sweeps={"merge": ("jit_merge", "merge"), "accumulate": ("copy",)},
        ),
        Implementation(
            name="yunchang",
            source="yunchang 0.6.4",
            support={"ulysses": Support(masks=DENSE, chunks=1, knobs={"head_groups": (1,)}, whole_heads=True)},
            kernels=("fa2",),
            launches=_FLASH_ATTN | {"all_to_all": ("sync_all_to_all",)},
        ),
        Implementation(
            name="torch",
            source="torch 2.11, torch.distributed.tensor.experimental.context_parallel",
            support={
                "ring": Support(masks=DENSE, chunks=1),
                "zigzag_ring": Support(masks=("causal",), chunks=2),
                "allgather": Support(
                    masks=DENSE, chunks=2, knobs={"layout": ("zigzag", "contiguous")}, balanced="zigzag"
                ),
            },
            kernels=("sdpa_flash", "cudnn"),
            ring=_TORCH,
            gathered=replace(_TORCH, gathers=True),
            launches=_EAGER
            | {
                "barrier": ("context_parallel_{kernel} {pass}",),
                "merge": ("eager",),
                "transfer": ("functional_permute", "all_to_all"),
                "all_gather": ("functional_all_gather",),
            },
            sweeps={"merge": ("cast",), "accumulate": ("copy",)},
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
