"""The words in which facts about other people's code are put.

Their code runs on PyTorch's eager ops, so between two attention kernels it launches *row kernels*: kernels that pass
over the rows of a tensor once to cast, add, concatenate or copy them. Each is an op of the schedule, one launch of the
host. The first row kernel of a place carries what it does to buffers; those that follow it there do a part of the same
work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints
from cpsim.schedule.schedule import Kind, Pass

DENSE: Final = ("full", "causal")
DOCUMENTS: Final = ("full_document", "causal_document")
WINDOWS: Final = ("full_sliding_window", "causal_sliding_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What an implementation's code of one strategy can run."""

    masks: tuple[str, ...] = ()
    """Empty: all of them."""
    chunks: int = 0
    """Every rank holds so many equal chunks of every document (of the sequence, for dense masks); 0: no such need."""
    knobs: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values of knobs that have fewer than ours or another default, which comes first."""
    balanced: tuple[str, str] | None = None
    """A knob and its value that run causal masks only."""
    whole_heads: bool = False
    """Key-value heads are not replicated, so ranks must divide them."""
    sinks: tuple[str, ...] = ()
    """Kernels that join attention sinks themselves, for which the code has no op of its own; empty: it has none."""
    alike: bool = False
    """Documents are a batch, all of one length."""
    varlen: tuple[str, ...] = ()
    """Masks under which kernels are told the lengths of their sequences even where there is only one."""
    views: tuple[int, int] = (0, 0)
    """Views of tensors that the code takes beside every call of a kernel, forward and backward: slices, chunks and
    entries, which launch nothing and cost the host a call each. Where steps differ, the mean of those behind the first.
    """
    launches: Mapping[str, tuple[str, ...]] | None = None
    """Names of host measurements as the code's, where this strategy is other code; None: the code's."""
    reads: tuple[str, ...] = ()
    """Masks under which the host reads from its GPU before it launches a kernel, so that it is never ahead."""

    def check(self, who: str, strategy: str, workload: Workload, num_ranks: int) -> None:
        """Raise ``InfeasibleError`` where the code cannot run a workload."""
        if workload.sinks and not self.sinks:
            raise InfeasibleError(f"sinks: {strategy} of {who} joins none; Transformer Engine does so with ulysses")
        if self.masks and workload.mask not in self.masks:
            raise InfeasibleError(f"{strategy} of {who} runs masks {', '.join(self.masks)}, got {workload.mask}")
        if self.masks and workload.mask in WINDOWS and len(workload.documents) > 1:
            number = len(workload.documents)
            raise InfeasibleError(f"{strategy} of {who} runs {workload.mask} over one document, got {number}")
        spans = workload.documents if workload.mask in DOCUMENTS else (workload.num_tokens,)
        parts = self.chunks * num_ranks
        odd = [n for n in spans if parts and n % parts]
        if odd:
            what = "document lengths" if workload.mask in DOCUMENTS else "tokens"
            raise InfeasibleError(f"{strategy} of {who} needs {what} divisible by {parts}, got {odd[0]}")
        if self.alike and len(set(spans)) > 1:
            raise InfeasibleError(
                f"{strategy} of {who} needs documents of one length, got {min(spans)} to {max(spans)} tokens"
            )
        if self.whole_heads and workload.num_kv_heads % num_ranks:
            raise InfeasibleError(
                f"{strategy} of {who} does not replicate key-value heads, so it needs them divisible by ranks, "
                f"got {workload.num_kv_heads} kv_heads on {num_ranks} GPUs"
            )


Tensor = Literal["q", "k", "kv", "lse", "repeated"]
Rows = Literal["part", "whole", "tails"]


@dataclass(frozen=True, slots=True)
class RowKernel:
    """One kernel of PyTorch's own that passes over rows of a tensor."""

    tensor: Tensor
    """Whose elements count: ``q`` also for outputs and gradients of queries, ``k`` for one of keys and values,
    ``repeated`` for one of these with a copy for every query head, read into or out of the one that heads share."""
    narrow: int
    """How often each element is read or written in the working type."""
    wide: int
    """How often each element is read or written in fp32."""
    rows: Rows = "part"
    """Rows of the partial result, of the rank's shard, or of its tails."""
    kind: Kind = Kind.COPY
    """PyTorch's kernels differ in speed: ``COPY`` keeps rows in order, or casts them to the working type;
    ``ACCUMULATE`` reads the working type beside fp32 or to make fp32; ``ELEMENTWISE`` reorders or joins rows;
    ``SCATTER`` moves them by an index, element by element; ``MERGE`` is a fused merge."""

    def nbytes(self, rows: Ints | int, workload: Workload) -> Ints:
        """Read plus written, in the shape of ``rows``."""
        w = workload
        heads = {
            "q": w.num_heads,
            "k": w.num_kv_heads,
            "kv": 2 * w.num_kv_heads,
            "lse": w.num_heads,
            "repeated": w.num_heads + w.num_kv_heads,
        }[self.tensor]
        width = self.narrow * w.bytes_per_element + self.wide * WIDE_BYTES
        return np.asarray(rows) * heads * (1 if self.tensor == "lse" else w.head_dim) * width


RowKernels = tuple[RowKernel, ...]
WIDE_BYTES: Final = 4
MIXED, STRIDED = Kind.ACCUMULATE, Kind.ELEMENTWISE
CAST: Final = RowKernel("q", 1, 1, kind=MIXED)
CAST_K: Final = RowKernel("k", 1, 1, kind=MIXED)
ADD: Final = RowKernel("q", 1, 2, kind=MIXED)
ADD_K: Final = RowKernel("k", 1, 2, kind=MIXED)
BACK: Final = RowKernel("q", 1, 1, "whole")
"""A result cast to the working type."""
BACK_K: Final = RowKernel("k", 1, 1)
LSE: Final = (RowKernel("lse", 0, 3),)
EAGER_MERGE: Final = (CAST, *LSE * 2, *(RowKernel("q", 0, 3),) * 3, *LSE * 3)
"""A partial output merged op by op, as ring-flash-attn's ``_update_out_and_lse`` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCode:
    """How somebody's ring differs from ours. All of them work in lockstep with the one stream of their process group:
    a transfer starts after the kernels that both ranks launched before it, and after their last transfer; kernels
    wait for it at the end of its step. Every partial result is summed in fp32 and cast at the end.

    Their process groups have streams of default priority, where a transfer that finds attention on the GPU waits for
    its last blocks. In the first step the host launches keys before the kernel; later both wait for the same kernels,
    and attention comes first. A backward kernel begins with a small one, beside which gradients get their SMs; keys are
    behind them on the same stream. So keys of all steps but the first travel after the kernel.
    """

    gathers: bool = False
    """Keys and values are gathered from all ranks once instead of travelling; gradients travel."""
    groups: bool = False
    """Gradients, and keys and values between inner rings, have process groups of their own; no gradients get in the way
    of keys, which then travel beside backward kernels, too."""
    batch: bool = False
    """Documents are rows of a batch, so that heads and tails of a shard are views, and nothing packs them."""
    narrows: bool = False
    """Where there are several inner rings, gradients are cast after the first one, and summed and sent in the working
    type."""
    queries_last: bool = False
    """Gradients of queries are summed after those of keys and values are on their way."""
    copies: int = 1
    """fp32 outputs alive at a time: two where a merge makes a new one."""
    enter: Mapping[Pass, RowKernels]
    """Before the first step."""
    leave: Mapping[Pass, RowKernels]
    """After the last step: results in the working type; the first of them is that of the queries."""
    per_document: Mapping[Pass, int] = field(default_factory=dict)
    """Launches and reads of the host before the first step, for every document."""
    send: RowKernels = ()
    """Before keys and values are sent."""
    pack: RowKernels = ()
    """After key heads have been packed."""
    read: RowKernels = ()
    """Backward, before a kernel of a rank whose output has been joined of heads and tails."""
    read_tails: RowKernels = ()
    """What it does first where it reads tail queries."""
    first: RowKernels
    """After the first partial output."""
    merge: RowKernels
    """After a partial output of all rows."""
    merge_tails: RowKernels
    """After a partial output of the tail rows."""
    merges_unfused: tuple[RowKernels, RowKernels] | None = None
    """These two where TorchScript does not fuse them: that of tail rows on a rank that has merged all rows twice.
    None: it fuses all."""
    shapes_change: bool = False
    """Every call has other shapes, so that TorchScript fuses none of tail rows on a rank that merges all rows, too, and
    none of all rows where a rank merges two or more of both."""
    first_dq: RowKernels = (CAST,)
    sum_dq: RowKernels = (ADD,)
    sum_dq_tails: RowKernels = (ADD,)
    idle_dq: RowKernels = ()
    """In a step without a kernel."""
    first_dkv: RowKernels = (CAST_K, CAST_K)
    sum_dkv: RowKernels = (ADD_K, ADD_K)
    sum_dkv_heads: RowKernels = (ADD_K, ADD_K)
    """After a kernel that read head keys only."""
    idle_dkv: RowKernels = ()
    send_dkv: RowKernels = ()
    """Before gradients of keys and values are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperCode:
    """Row kernels around every call of a kernel, whether they are of use or not."""

    before: Mapping[Pass, RowKernels]
    """Over the rows that it reads."""
    after: Mapping[Pass, RowKernels]
    """Over those that it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRingCode:
    """A ring of Transformer Engine's kind. Every partial output is held, and all are merged after the last step.

    Transfers are not batched: a ring of two sends in one direction after the other. They run in lockstep with kernels,
    and wait for those of the step before.
    """

    wrapper: WrapperCode | None = None
    enter: Mapping[Pass, RowKernels]
    """Before the first step: keys and values in one message; rows of ``tails`` where a rank computes them."""
    tails: Mapping[Pass, RowKernels] = field(default_factory=lambda: {"fwd": (), "bwd": ()})
    """Before a kernel that reads tail queries."""
    key_heads: Mapping[Pass, RowKernels] = field(default_factory=lambda: {"fwd": (), "bwd": ()})
    """Before a kernel that reads head keys only."""
    first_lse: RowKernels
    """For the first partial output, and what outputs are merged into."""
    sum_lse: RowKernels
    """For every other one."""
    first_out: RowKernel
    """For the first partial output, after the last step."""
    sum_out: RowKernel
    """For every other one."""
    in_loop: bool = False
    """Log-sum-exps are merged step by step, on two streams in turns, so that transfers wait for the kernels of the
    step before the last; two kernels still run one after the other, since each fills the GPU."""
    first_dq: RowKernel
    sum_dq: RowKernel
    join_dkv: RowKernels
    """Gradients of keys and values into one message."""
    first_dkv: RowKernels
    sum_dkv: RowKernels
    turns: bool
    """Backward runs against the forward direction, from the keys that a rank holds at the end of it, and gradients
    travel in one message with keys; otherwise it runs as forward does, gradients have messages and lanes of their own,
    and between inner rings they first travel home in the inner ring."""
    batches_pairs: bool = False
    """A ring of two sends in both directions at once."""
    whole_steps: bool = False
    """Under other than causal masks every step is of whole shards, whether queries see its keys or not."""
    leave: Mapping[Pass, RowKernels] = field(default_factory=lambda: {"fwd": (), "bwd": ()})
    """After the last step; forward, before outputs are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesCode:
    """An all-gather whose ranks call one kernel for their heads and one for their tails."""

    wrapper: WrapperCode | None = None
    """Over all keys, whichever the kernel reads."""
    enter: Mapping[Pass, RowKernels] = field(default_factory=lambda: {"fwd": (), "bwd": ()})
    """Before a kernel, over its half."""
    order: RowKernel
    """Puts gathered keys, and gradients before they are scattered, in order."""
    leave: RowKernel
    """Puts a half of a result where it belongs."""
    zero: RowKernel
    """An accumulator of gradients of keys, or of values."""
    sum: RowKernel
    """Adds a half's gradients to it."""
    sums_seen: bool = False
    """Over the keys that the half sees; otherwise over all keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UlyssesCode:
    """How somebody's Ulysses differs from ours: queries, keys and values travel one by one, each after a row kernel
    that orders it by rank, and every kernel waits for the all-to-all before it."""

    there: Mapping[Pass, int] = field(default_factory=lambda: {"fwd": 1, "bwd": 1})
    """Row kernels of a tensor on its way to its heads: before the all-to-all, and the second one after it."""
    back: Mapping[Pass, int] = field(default_factory=lambda: {"fwd": 2, "bwd": 2})
    """Row kernels of a result on its way back: before the all-to-all, and the second one after it."""
    wrapper: WrapperCode | None = None
    rings_of_one: bool = False
    """Groups may be all ranks."""
    groups_of_one: bool = False
    """Rings may be all ranks."""
    overlaps: bool = False
    """All is one function, and row kernels pass over tensors while others travel; two for each, on any way."""
    outputs_again: bool = False
    """Around rings, outputs of the forward pass travel in the backward pass, too, as they are kept where they ended."""
    packed: bool = False
    """Keys and values are one tensor."""
    lists: bool = False
    """The row kernel before an all-to-all is one for every rank of the group."""
    there_by_document: int = 0
    """Row kernels of every document of a tensor that has arrived, one after the other, before the last one of all."""
    back_by_document: int = 0
    """Row kernels of every document of a tensor on its way back, before the first one of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCode:
    """How somebody's all-gather differs from ours: keys and values are gathered apart, each group's after a row
    kernel that takes its heads out, and gradients are summed in the working type, in tensors that are zeroed before."""

    leave: RowKernels
    """Forward, after the last group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionCode:
    """What a timed backward pass runs besides attention: the graph goes on to the projections of Q, K and V."""

    width: int
    """Features of a token before them."""
    inputs: bool
    """Gradients of tokens, too, and these scattered to all tokens of the batch, as they lay before the dispatch."""

    def ops(self, workload: Workload, num_ranks: int) -> list[tuple[Kind, int | tuple[int, int, int]]]:
        """Kinds and sizes of what every rank runs: shapes of matrix products, bytes of the other kernels."""
        w, tokens = workload, workload.num_tokens // num_ranks
        widths = [heads * w.head_dim for heads in (w.num_heads, w.num_kv_heads, w.num_kv_heads)]
        products = [(Kind.GEMM, (tokens, width, self.width)) for width in widths]
        biases = [(Kind.COPY, tokens * width * w.bytes_per_element) for width in widths]
        if not self.inputs:
            return [*products, *biases]
        all_tokens = w.num_tokens * self.width * w.bytes_per_element
        return [*products * 2, *biases, (Kind.COPY, all_tokens), (Kind.ACCUMULATE, 3 * all_tokens)]  # zeros, add


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One code base; the defaults are those of our executor."""

    name: str
    source: str
    """What was read: package and version."""
    strategies: Mapping[str, Support] | None = None
    """What its code of each can run and does; None: all of them, all cases."""
    kernels: tuple[str, ...] = ()
    """Empty: all kernels."""
    direct: tuple[str, ...] = ()
    """Kernels that it calls without the limits that PyTorch's functions put on them."""
    with_kernel: Mapping[str, Implementation] = field(default_factory=dict)
    """Code that it runs instead with some of these kernels."""
    ring: RingCode | HeldRingCode | None = None
    zigzag_documents: RingCode | HeldRingCode | None = None
    """A zigzag ring over several documents, where it is code of its own."""
    striped: RingCode | None = None
    double_ring: RingCode | HeldRingCode | None = None
    gathered: RingCode | None = None
    """A ring that runs as ``allgather``."""
    allgather: GatherCode | HalvesCode | None = None
    ulysses: UlyssesCode | None = None
    projections: ProjectionCode | None = None
    """None: a timed backward pass is attention's alone."""
    launches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of op, the names of `host` measurements that say what it costs the host, the best one first; other
    kinds cost what ours do. ``barrier`` is a call into the code. What an iteration costs besides, when the host comes
    from waiting: ``entry`` until a Function runs, ``begin`` until the code first communicates, if that is later,
    ``exit`` after its last launch. ``{pass}`` and ``{kernel}`` are filled in."""
    row_kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of op, the names of `elementwise` measurements, likewise."""
    compiled: Implementation | None = None
    """The same under ``torch.compile``; None: nobody has read what that makes of it."""
    late_gradients: bool = False
    """In a ring, all ranks but the last compute all their gradients before they send the first; the last one sends
    after each kernel and waits."""
    captured: bool = False
    """All ops of a rank are captured in one CUDA graph, so that the host launches once."""
    pads: bool = False
    """See ``padded``."""
    messages: int = 1
    """Messages of every batch of a ring: keys and values, or their gradients, as one or as two, which NCCL sends one
    after the other on the channels of one."""
    paged: bool = False
    """In ``dcp``, kernels of any mask read inputs through tables of blocks, where these were copied once; every block
    of computation has gradients of its keys for each of its query heads, which are copied and summed; sums and merges
    are in the working type."""
    unbatched: bool = False
    """Messages are sent and received one by one, for which PyTorch makes a process group of every two ranks."""

    def check(
        self, strategy: str, workload: Workload, num_ranks: int, knobs: Mapping[str, object]
    ) -> Mapping[str, object]:
        """The knobs with this code's defaults filled in.

        Raises:
            InfeasibleError: this code cannot run the case; says why.
        """
        if self.strategies is None:
            return knobs
        if workload.sparse is not None:
            raise InfeasibleError(f"sparse: {self.name} attends to all keys; leave sparse or the implementation out")
        if strategy not in self.strategies:
            raise InfeasibleError(f"{self.name} has no {strategy}; it has {', '.join(self.strategies)}")
        if num_ranks == 1 and strategy != "none":
            raise InfeasibleError(f"{strategy} of {self.name} runs on 2 GPUs or more, got 1")
        support = self.strategies[strategy]
        support.check(self.name, strategy, workload, num_ranks)
        for knob, values in support.knobs.items():
            if knob in knobs and knobs[knob] not in values:
                known = " or ".join(map(repr, values))
                raise InfeasibleError(f"{strategy} of {self.name} has {knob} {known} only, got {knobs[knob]!r}")
        chosen = {**{knob: values[0] for knob, values in support.knobs.items()}, **knobs}
        if support.balanced and support.balanced in chosen.items() and workload.mask != "causal":
            knob, value = support.balanced
            raise InfeasibleError(
                f"{strategy} of {self.name} with {knob} {value} runs mask causal, got {workload.mask}; "
                f"use another {knob}"
            )
        return chosen

    def calling(self, kernel: str, compiles: bool = False) -> Implementation:
        """The code that it runs with a kernel, compiled or not."""
        found = self.with_kernel.get(kernel, self)
        return found.compiled if compiles and found.compiled is not None else found

    def support(self, strategy: str | None) -> Support:
        """What the code of a strategy can run and does; of one that it has not, nothing."""
        return (self.strategies or {}).get(str(strategy), Support())

    def padded(self, workload: Workload, ring: int = 0, ulysses: int = 1) -> Workload:
        """The workload that this code runs: documents, or all tokens where the mask has none, of two equal chunks on
        every rank of a ring, and equally many tokens on all ranks.

        Args:
            workload: the case.
            ring: ranks of a ring; 0: there is none.
            ulysses: ranks of a Ulysses group.
        """
        if not self.pads:
            return workload
        chunks, one = max(1, 2 * ring), workload.mask in DENSE
        padding = [0 if one else -length % chunks for length in workload.documents]
        padding[-1] += -(workload.num_tokens + sum(padding)) % (chunks * ulysses)
        return replace(workload, padding=tuple(padding)) if any(padding) else workload

    def check_kernel(self, kernel: str, strategy: str | None = None, sinks: bool = False) -> None:
        """Raise ``InfeasibleError`` where this code does not call the kernel, or the kernel joins no sinks there."""
        joins = self.support(strategy).sinks
        if sinks and joins and kernel not in joins:
            raise InfeasibleError(f"sinks: {strategy} of {self.name} joins them in {', '.join(joins)}, got {kernel}")
        if self.kernels and kernel not in self.kernels:
            raise InfeasibleError(f"{self.name} runs kernels {', '.join(self.kernels)}, got {kernel}")


def under_compile(code: Implementation, alone: Mapping[str, tuple[str, ...]]) -> Implementation:
    """Plain calls of a code under ``torch.compile``, as inductor writes them (torch 2.13, flash-attn 2.8.3).

    The call checks guards and runs generated code, which takes no views, makes no layout copies and calls the same
    operator of the kernel once; so does the backward pass, inside one function of autograd's.

    Args:
        code: whose calls on one GPU.
        alone: their launches where they are not compiled, see ``Implementation.launches``.
    """
    edges = {edge: (f"compiled {edge} {{pass}}", *alone[edge]) for edge in ("entry", "exit")}
    support = replace((code.strategies or {})["none"], views=(0, 0), launches={**alone, **edges})
    return replace(code, strategies={"none": support})


EAGER: Final[dict[str, tuple[str, ...]]] = dict.fromkeys(
    ("copy", "accumulate", "elementwise", "scatter", "merge"), ("eager",)
)
EAGER_ROW_KERNELS: Final = {
    "accumulate": ("mixed", "accumulate"),
    "elementwise": ("strided", "transpose"),
    "scatter": ("expanded_scatter", "strided", "transpose"),
    "merge": ("mixed", "accumulate"),
}
FLASH_ATTN: Final = EAGER | {
    "entry": ("autograd entry {pass}",),
    "exit": ("autograd exit {pass}",),
    "barrier": ("autograd chain {pass}", "autograd {pass}"),
    "attention": ("flash_attn fwd",),
    "attention_backward": ("flash_attn bwd",),
}
