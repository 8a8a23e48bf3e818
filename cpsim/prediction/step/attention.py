"""Core attention of one layer, by microbatch: kernels on the ranks that have their tokens, and context parallelism.

Two ways lead to its time. A strategy of context parallelism is planned, priced and simulated like a scenario of its own
on the ranks of one group. Planners that place tasks themselves (a query shard with the prefix of its document that it
sees) ask for the kernels' time alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.documents import as_taken
from cpsim.case.model import Model
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import UNCUT
from cpsim.models.attention.fp8 import FP8_ATTENTION, Pass
from cpsim.models.attention.params import clocked_seconds
from cpsim.models.elementwise import elementwise_seconds
from cpsim.models.feasible import limits_of
from cpsim.models.price import price
from cpsim.prediction.conditions import conditions
from cpsim.prediction.step.costs import Parts
from cpsim.prediction.step.frameworks import Sizes
from cpsim.prediction.step.layer import BF16
from cpsim.schedule.schedule import Schedule
from cpsim.sim.fast import simulate
from cpsim.strategies import plan
from cpsim.strategies.others import CPSIM, Implementation

if TYPE_CHECKING:
    from cpsim.models.profile import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PASSES = ("fwd", "bwd")
CAUSAL = ("causal", "causal_document")
TALKS = ("collective", "transfer")
"""Beginnings of cost models of messages."""
WINDOW = "causal_sliding_window"
EVERY_RANK = "sparse dsa: every tensor-parallel rank scores all heads of the indexer; context parallelism shares them"
LATE = (
    "context parallelism in compiled layers: ranks wait for each other's backward kernels, as torch.compile puts off "
    "messages of all ranks but the last; seen with PyTorch 2.13, and measured on two ranks with 2.11"
)


@dataclass(frozen=True, slots=True)
class Attended:
    """One microbatch."""

    parts: tuple[Parts, Parts]
    """Seconds by cost model, forward and backward; of the slowest rank."""
    exchange: int
    """Bytes that are allocated beyond inputs, output and their gradients."""
    sent: float
    """Bytes that the busiest rank sends in both passes."""
    area: int
    """Unmasked pairs of one head."""
    kept: int = 0
    """Bytes that stay until the backward pass beyond queries, keys, values and output."""
    notes: tuple[str, ...] = ()
    kinds: tuple[Attended, ...] = ()
    """Of a model whose layers differ: the same of each kind of ``Model.kinds``, of which this is the mean."""

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return sum(sum(parts.values()) for parts in self.parts)


def task_seconds(
    profile: Profile,
    kernel: str,
    model: Model,
    tp: int,
    start: Ints,
    q_len: Ints,
    kv_len: Ints,
    window: Ints | None = None,
) -> Floats:
    """Seconds of N varlen calls, each of some tasks: query shards that see whole prefixes, causally.

    Args:
        profile: whose kernels.
        kernel: attention kernel.
        model, tp: heads of both kinds are divided by `tp`.
        start: first task of every call, ``[N + 1]``.
        q_len: query tokens of every task, ``[M]``.
        kv_len: keys of every task, the queries' own positions being the last, ``[M]``.
        window: keys before and after a query's own that it sees, ``[M, 2]``; by default causal ones.

    Returns:
        ``[2, N]``: forward, backward, at the clock that an endless run keeps after seconds.
    """
    count, causal = len(start) - 1, np.ones(len(q_len), bool)
    heads, kv_heads = (np.full(count, number // tp) for number in (model.heads, model.kv_heads))
    calls, values = (start, q_len, kv_len, causal, heads, kv_heads, model.head_dim), model.value_dim
    return np.stack(
        [
            clocked_seconds(profile.attention_params(kernel, pass_), *calls, window=window, value_dim=values)[0]
            * profile.sustained_factor(f"{kernel} {pass_}")
            for pass_ in PASSES
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How attention of one layer runs; remembers microbatches that it has seen."""

    model: Model
    tp: int
    cluster: Cluster
    """The context-parallel group: one GPU of every tensor-parallel group, with its share of the network."""
    profile: Profile
    strategy: str
    knobs: Mapping[str, Any]
    code: Implementation
    kernel: str
    mask: str
    mask_options: Any
    slowest: Mapping[str, float]
    """By pass: time of the slowest GPU of the step over that of the mean one, where a kernel runs alone."""
    fp8: Mapping[Pass, float] | None = None
    """By pass: how much faster kernels in FP8 are; None: they are in bf16."""
    _known: dict[tuple[int, ...], Attended] = field(default_factory=dict)

    def of(self, microbatches: Sequence[tuple[int, ...]]) -> list[Attended]:
        """Attention of microbatches, each given by its document lengths [tokens].

        Raises:
            InfeasibleError: the strategy cannot run one of them.
        """
        if self.model.window:
            self._check_window()
        new = [documents for documents in dict.fromkeys(microbatches) if documents not in self._known]
        if self.cluster.num_gpus == 1 and self.mask in CAUSAL and self.model.sparse is None:
            self._known.update(zip(new, self._alone(new), strict=True))
        else:
            self._known.update((documents, self._mean_layer(documents)) for documents in new)
        if self.fp8:
            self._known.update((documents, self._in_fp8(documents, self._known[documents])) for documents in new)
        return [self._known[documents] for documents in microbatches]

    def _in_fp8(self, documents: tuple[int, ...], one: Attended) -> Attended:
        """With kernels and messages in FP8, and with casts: of queries, keys and values and of their gradients, and of
        the gradient of the output."""
        assert self.fp8 is not None
        sizes = Sizes(self.model, self.tp, sum(documents) // self.cluster.num_gpus)
        cast = {"fwd": sizes.qkv, "bwd": sizes.qkv + sizes.out}
        found = list[Parts]()
        for pass_, parts in zip(PASSES, one.parts, strict=True):
            own = {f"attention {pass_}": 1 / self.fp8[pass_]}  # type: ignore[index]
            faster = {name: s * own.get(name, 0.5 if name.startswith(TALKS) else 1.0) for name, s in parts.items()}
            copy = 3 * cast[pass_] // 2  # bf16 is read and FP8 written
            faster["elementwise of layers"] = float(elementwise_seconds(self.profile.elementwise, "copy", copy))
            found.append(faster)
        return replace(one, parts=(found[0], found[1]), sent=one.sent / 2, notes=(*one.notes, FP8_ATTENTION))

    def _check_window(self) -> None:
        """Whether layers with a sliding window can be predicted.

        Raises:
            InfeasibleError: they cannot.
        """
        if self.mask not in CAUSAL:
            raise InfeasibleError(f"window: expected mask {' or '.join(CAUSAL)} of layers without one, got {self.mask}")
        if not limits_of(self.kernel).windows:
            raise InfeasibleError(f"window: kernel {self.kernel} has no windows; use fa2, fa4 or cudnn")

    def workload(self, documents: tuple[int, ...], *, windowed: bool = False) -> Workload:
        """Attention of one microbatch on the group, its documents in the order in which the strategy takes them."""
        options = (("window", self.model.window - 1),) if windowed else self.mask_options
        documents = (sum(documents),) if windowed and self.mask == "causal" else documents
        heads, kv_heads, head_dim, values = self.model.kernel_shape
        return Workload(
            documents=as_taken(documents, self.mask, self.strategy, self.knobs),
            mask=WINDOW if windowed else self.mask,
            mask_options=options,
            num_heads=heads // self.tp,
            num_kv_heads=1 if self.model.absorbed else kv_heads // self.tp,
            head_dim=head_dim,
            value_dim=values if self.model.value_dim or self.model.absorbed else 0,
            sinks=self.model.sinks,
            dtype="bf16",
            sparse=self.model.sparse,
        )

    def _alone(self, microbatches: Sequence[tuple[int, ...]]) -> list[Attended]:
        """One varlen call each, all priced at once."""
        if not microbatches:
            return []
        seen = [(sum(m),) if self.mask == "causal" else m for m in microbatches]
        start = np.concatenate([[0], np.cumsum([len(m) for m in seen])])
        lens = np.fromiter(chain(*seen), np.int64)
        seconds = task_seconds(self.profile, self.kernel, self.model, self.tp, start, lens, lens)
        area = np.add.reduceat(lens * (lens + 1) // 2, start[:-1])
        if self.model.window:
            share, longest = self.model.windowed, np.maximum.reduceat(lens, start[:-1])
            cut = np.repeat(self.model.window - 1 < longest, np.diff(start))  # kernels drop bounds without effect
            window = np.column_stack([np.where(cut, self.model.window - 1, UNCUT), np.zeros_like(lens)])
            windowed = task_seconds(self.profile, self.kernel, self.model, self.tp, start, lens, lens, window)
            seconds = share * windowed + (1 - share) * seconds
            area = np.array([sum(map(self.model.pairs, documents)) for documents in seen]).round()
        heads = np.array([[self.model.heads // self.tp, self.model.kv_heads // self.tp]])
        notes = tuple(n for p in PASSES for n in self.profile.attention_notes(self.kernel, p, lens, lens, heads))
        return [
            Attended(
                tuple({f"attention {p}": s * self.slowest[p]} for p, s in zip(PASSES, both, strict=True)),  # type: ignore[arg-type]
                0,
                0.0,
                int(pairs),
                notes=notes,
            )
            for both, pairs in zip(seconds.T.tolist(), area, strict=True)
        ]

    def _with_waits(self, parts: Parts) -> Parts:
        """Backward parts, where the last of n ranks waits after its first kernel until others have run all of theirs,
        and they wait for each of its n - 1 other kernels."""
        name, n = "attention bwd", self.cluster.num_gpus
        return {**parts, name: parts[name] * (2 - 1 / n)} if self.code.late_gradients else parts

    def _mean_layer(self, documents: tuple[int, ...]) -> Attended:
        """The mean of layers with a window and of those without one."""
        share = self.model.windowed
        if not share:
            return self._simulated(self.workload(documents))
        inside = self._simulated(self.workload(documents, windowed=True))
        if share == 1.0:
            return inside
        whole = self._simulated(self.workload(documents))
        parts = [
            {name: share * one.get(name, 0.0) + (1 - share) * other.get(name, 0.0) for name in {**one, **other}}
            for one, other in zip(inside.parts, whole.parts, strict=True)
        ]
        return replace(
            whole,
            parts=(parts[0], parts[1]),
            exchange=max(inside.exchange, whole.exchange),
            sent=share * inside.sent + (1 - share) * whole.sent,
            area=round(share * inside.area + (1 - share) * whole.area),
            notes=tuple(dict.fromkeys((*whole.notes, *inside.notes))),
        )

    def _simulated(self, workload: Workload) -> Attended:
        """The strategy's schedule on the ranks of the group. If anything joins sinks, kernels do, and their gradients
        are summed with those of weights."""
        workload = replace(workload, sinks=workload.sinks and self.code is not CPSIM)
        parts, exchange, sent, kept, notes = list[Parts](), 0, 0.0, 0, dict[str, None]()
        under = conditions(self.code, self.strategy, workload, self.cluster, self.profile, self.kernel, "streamed")
        sizes = Sizes(self.model, self.tp, workload.num_tokens // self.cluster.num_gpus)
        out = BF16 * sizes.tokens * workload.num_heads * workload.values
        own = sizes.qkv + out + sizes.lse
        for pass_, given in zip(PASSES, (own, own + sizes.qkv + out), strict=True):
            schedule = plan(self.strategy, workload, self.cluster, pass_, self.knobs, self.code)  # type: ignore[arg-type]
            priced = price(schedule, under)
            timeline = simulate(schedule, priced.work)
            found = priced.parts(timeline.critical_path(), timeline.start_s, timeline.end_s)
            parts.append(self._with_waits(found) if pass_ == "bwd" else found)
            kept = _choices(schedule) if pass_ == "bwd" and workload.sparse else 0
            exchange = max(exchange, int(schedule.memory().max()) - given - kept)
            sent += float(schedule.bytes_sent().max())
            notes.update(dict.fromkeys(priced.notes))
        if self.code.late_gradients:
            notes[LATE] = None
        if self.model.absorbed and self.tp > 1:
            notes[EVERY_RANK] = None
        return Attended((parts[0], parts[1]), exchange, sent, workload.pairs(), kept=kept, notes=tuple(notes))


def _choices(schedule: Schedule) -> int:
    """Bytes of the choices that a backward pass is given, of the rank with most of them."""
    held = np.zeros(schedule.num_ranks, np.int64)
    for buffer, block in schedule.inputs.tolist():
        if schedule.block_tensors[schedule.block_tensor[block]] == "choice":
            held[schedule.buffer_rank[buffer]] += int(schedule.buffer_nbytes[buffer])
    return int(held.max())
