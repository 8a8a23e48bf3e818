"""Seconds of every op that computes, at the clock of an endless run and at the full one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.workload import LATENT
from cpsim.masks.blocks import Visits
from cpsim.masks.slices import Ints
from cpsim.masks.tiles import Sequences, sequences
from cpsim.models import sparse
from cpsim.models.attention.calls import attention_op_seconds, head_shapes
from cpsim.models.attention.params import AttentionParams
from cpsim.models.conditions import PACKED_AS, Conditions
from cpsim.models.cost_models import GROUPS
from cpsim.models.elementwise import elementwise_seconds
from cpsim.models.feasible import copied_heads, limits_of, tile_visits
from cpsim.models.gemm import gemm_seconds
from cpsim.models.spread import expected_maximum
from cpsim.schedule.schedule import ATTENTION_KINDS, COMMUNICATION_KINDS, READ, Int8, Kind, Pass, Schedule
from cpsim.schedule.transformer import MAKER

Floats = NDArray[np.float64]

_MEMORY_NAMES: Final = {
    Kind.MERGE: "merge",
    Kind.ACCUMULATE: "accumulate",
    Kind.COPY: "copy",
    Kind.ELEMENTWISE: "copy",
    Kind.SCATTER: "copy",
}


@dataclass(frozen=True, slots=True)
class KernelCosts:
    """Costs of the N ops of a schedule; those that communicate have none yet."""

    endless_s: Floats
    """Seconds where the kernel runs again and again without a pause, ``[N]``."""
    full_clock_s: Floats
    """Seconds of attention ops at the full clock, ``[N]``; 0 for others."""
    group: Int8
    """Index into ``GROUPS`` of every op's cost model, ``[N]``."""
    notes: tuple[str, ...]
    """What was not measured."""


def kernel_costs(schedule: Schedule, given: Conditions) -> KernelCosts:
    """Costs of all ops that compute.

    Raises:
        ProfileError: the profile lacks the kernel.
    """
    return _Kernels(schedule, given).costs()


class _Kernels:
    """The costs of one schedule while they are put together, kind by kind."""

    def __init__(self, schedule: Schedule, given: Conditions) -> None:
        self.schedule, self.given, self.profile = schedule, given, given.profile
        self.notes: dict[str, None] = {}

    def costs(self) -> KernelCosts:
        schedule = self.schedule
        endless, full = np.zeros(len(schedule)), np.zeros(len(schedule))
        group = np.full(len(schedule), GROUPS.index("memory-bound"), np.int8)
        which: Pass
        for kind in schedule.kinds():
            if kind in COMMUNICATION_KINDS:
                continue
            ops = np.flatnonzero(schedule.kind == kind)
            if self.given.sparse is not None and kind in (*ATTENTION_KINDS, Kind.SELECT):
                which = "bwd" if kind == Kind.ATTENTION_BACKWARD else "fwd"
                endless[ops] = full[ops] = sparse.op_seconds(schedule, ops, self.given)
                group[ops] = GROUPS.index(f"attention {which}")
                self._note(*sparse.notes(self.given, which))
            elif kind in ATTENTION_KINDS:
                which = "fwd" if kind == Kind.ATTENTION else "bwd"
                endless[ops], full[ops] = self._attention(ops, which)
                group[ops] = GROUPS.index(f"attention {which}")
            elif kind == Kind.ELEMENTWISE and self.profile.layers and len(schedule.products):
                endless[ops], group[ops] = self._layer_ops(ops)
            elif kind in _MEMORY_NAMES:
                name = self._memory_bound(kind)
                endless[ops] = elementwise_seconds(self.profile.elementwise, name, schedule.nbytes[ops])
            elif kind == Kind.GEMM:
                endless[ops] = self._products()
                group[ops] = GROUPS.index("matrix products")
        link = schedule.over_host_link()
        if link.any():  # copy engines: kernels beside lose nothing
            endless[link] = schedule.nbytes[link] / self.given.cluster.host_link
            group[link] = GROUPS.index("transfer")
            self._note(host_link_note(self.given.cluster))
        return KernelCosts(endless, full, group, tuple(self.notes))

    def _note(self, *notes: str) -> None:
        self.notes.update(dict.fromkeys(notes))

    def _attention(self, ops: Ints, pass_: Pass) -> tuple[Floats, Floats]:
        """Seconds without a pause, at the clock that the power limit then leaves, and at the full clock."""
        schedule, profile, kernel, head_dim = self.schedule, self.profile, self.given.kernel, self.given.head_dim
        tiles, params = sequences(schedule.tiles), self.given.attention_params(pass_)
        used = np.zeros(len(tiles.start) - 1, bool)
        used[schedule.tile[ops]] = True
        masks = None
        if params.anatomy.lists_blocks:
            masks = tile_visits(schedule, ops, self.given.head_bytes)
            rules = {mask.partial_rule() for mask in masks.values()}
            profile.check_rules(kernel, pass_, rules)
            self._note(*profile.rule_notes(kernel, pass_, head_dim, rules))
        if self.given.direct:
            self._note(*estimated(kernel, tiles, used))
        seconds = attention_seconds(params, schedule, ops, self.given, masks)
        if self.given.captured and not limits_of(kernel).places_results:
            seconds += self._placing(ops)
        low, high = profile.valid.get(f"attention {pass_} {kernel} head_dim", (params.head_dim,) * 2)
        if not low <= head_dim <= high:
            self._note(f"head_dim {head_dim}, measured {' to '.join(f'{d:g}' for d in sorted({low, high}))}")
        else:
            self._note(*_unmeasured(params, head_dim, self.given.value_dim))
        if (head_dim, self.given.value_dim) == LATENT:
            self._note(
                f"{kernel} of latents: nobody has measured it here, as its FLOP take in heads of {params.head_dim}; "
                f"FlashMLA states up to 660 TFLOP/s of dense decoding on H800"
            )
        self._note(*profile.attention_notes(kernel, pass_, *tiles.longest(used), head_shapes(schedule, ops)[0]))
        return seconds[0], seconds[1]

    def _placing(self, ops: Ints) -> Floats:
        """Seconds that copies take where a kernel allocates its results, and those that PyTorch makes of its inputs."""
        costs, strided = self.profile.elementwise, "strided"
        side_by_side, apart, copies = copied_heads(self.given.kernel, self.schedule, ops)
        if strided not in costs.latency_s:
            strided = "copy"
            self._note("copies of strided rows: not measured, taken as copies")
        head_bytes = 2 * self.given.head_bytes
        if limits_of(self.given.kernel).places_others:
            copies *= ~self._other_calls(ops)
            side_by_side, apart = side_by_side * (copies > 0), apart * (copies > 0)
        seconds = side_by_side / costs.bandwidth_bytes_per_s["copy"] + apart / costs.bandwidth_bytes_per_s[strided]
        launch = self.profile.host.captured_kernel_s or costs.latency_s["copy"]
        return np.asarray(copies * launch + seconds * head_bytes)

    def _other_calls(self, ops: Ints) -> NDArray[np.bool_]:
        """Attention ops with a window, or with values of another size than keys."""
        found, tile = sequences(self.schedule.tiles), self.schedule.tile[ops]
        windows = found.one_window[tile] & ~found.one_call[tile]
        return windows | (self.given.value_dim not in (0, self.given.head_dim))

    def _products(self) -> Floats:
        """Seconds of all matrix products, as slow as on the slowest GPU."""
        _, m, n, k = self.schedule.products.T
        if self.profile.layers is None:
            self._note("matrix products: not measured, at the rate of tiles of the attention kernel")
            # two products of two FLOP per pair and element
            params = self.profile.attention_params(self.given.kernel, "fwd")
            return np.asarray(2 * m * n * k * params.pair_s / (params.num_sms * 4 * params.head_dim))
        steady = bool(np.isinf(self.given.ahead_s))
        for note in self.profile.products_notes(float((2.0 * m * n * k).max()), steady=steady):
            self._note(note)
        spread = self.profile.sigma["run to run"] * expected_maximum(round(self.schedule.num_ranks * self.given.alike))
        return gemm_seconds(self.profile.layers.gemm, m, n, k) * (1 + spread)

    def _layer_ops(self, ops: Ints) -> tuple[Floats, Ints]:
        """Seconds and cost models of elementwise ops: a layer's by what they read and make, and strided copies."""
        schedule, profile = self.schedule, self.profile
        names = _ops_of_layer(schedule, ops)
        seconds, group = np.zeros(len(ops)), np.full(len(ops), GROUPS.index("elementwise of layers"))
        for name in np.unique(names).tolist():
            here, is_layer = names == name, bool(name)
            group[here] = GROUPS.index("elementwise of layers" if is_layer else "memory-bound")
            assert profile.layers is not None
            costs = profile.layers.ops if is_layer else profile.elementwise
            kind = name or self._memory_bound(Kind.ELEMENTWISE)
            if f"{kind} in place" in costs.latency_s:
                kind = f"{kind} in place"
            elif is_layer:
                self._note("memory-bound kernels of the executor's layers: not measured, taken as compiled ones")
            seconds[here] = elementwise_seconds(costs, kind, schedule.nbytes[ops[here]])
        return seconds, group

    def _memory_bound(self, kind: Kind) -> str:
        """Name of the measured kernel that a memory-bound op costs as much as."""
        names = self.given.row_kernels.get(kind.name.lower(), ())
        for name in names:
            if name in self.profile.elementwise.latency_s:
                if name != names[0]:
                    self._note(f"memory-bound kernel {names[0]}: not measured, taken as {name}")
                return name
        return _MEMORY_NAMES[kind]


def host_link_note(cluster: Cluster) -> str:
    """What is assumed of copies to the host's memory."""
    how = "as its file says" if cluster.host_link_bytes_per_s else "87 % of its data sheet, as an H200 copies one way"
    return f"offload: {cluster.host_link / 1e9:.1f} GB/s each way between GPU and host, {how}"


def estimated(kernel: str, tiles: Sequences, used: NDArray[np.bool_]) -> Iterator[str]:
    """Which calls of a kernel are priced from measured ones of other kinds, since it was measured through PyTorch.

    Args:
        kernel: its name.
        tiles: what each call computes, ``[T]``.
        used: which of them are called, ``[T]``.
    """
    limits, sequences_used = limits_of(kernel), np.repeat(used, np.diff(tiles.start))
    if not limits.varlen and (np.diff(tiles.start)[used] > 1).any():
        lent = f"with what {PACKED_AS[kernel]} adds"
        yield f"{kernel}: calls of several sequences not measured, estimated from calls of one, {lent}"
    if not limits.unequal_causal and (tiles.causal & (tiles.q_len != tiles.k_len) & sequences_used).any():
        yield f"{kernel}: causal masks of fewer queries than keys not measured, estimated from those of as many"


def attention_seconds(
    params: AttentionParams,
    schedule: Schedule,
    ops: Ints,
    given: Conditions,
    visited: Mapping[int, Visits] | None = None,
) -> Floats:
    """Seconds of attention ops, ``[2, A]``: at the clock of an endless run, and at the full clock; ``visited`` as of
    `attention_op_seconds`."""
    how = given.kernel, given.dtype, given.head_dim
    return attention_op_seconds(params, *how, schedule, ops, given.varlen, given.value_dim, visited)


def _ops_of_layer(schedule: Schedule, ops: Ints) -> NDArray[np.str_]:
    """Names of a layer's memory-bound ops, by the tensors that they read first and make; empty for copies."""
    first, end = schedule.access_start[ops], schedule.access_start[ops + 1]
    makes = np.append(np.flatnonzero(schedule.access_mode != READ), len(schedule.access_mode))
    made, num = makes[np.searchsorted(makes, first)], len(schedule.block_tensors)
    tensor = np.append(schedule.block_tensor[schedule.access_block], num)
    pair = np.where(first < end, tensor[first], num) * (num + 1) + np.where(made < end, tensor[made], num)
    alike, of_op = np.unique(pair, return_inverse=True)
    known = (*schedule.block_tensors, "")
    given = [(known[read], MAKER.get(known[write])) for read, write in (divmod(p, num + 1) for p in alike.tolist())]
    return np.array([op.kind if op is not None and op.reads[0] == read else "" for read, op in given])[of_op]


def _unmeasured(params: AttentionParams, head_dim: int, value_dim: int) -> tuple[str, ...]:
    """That heads of this size are taken in proportion to others."""
    found, _ = params.sized(head_dim, value_dim)
    if (found.head_dim, found.value_dim or found.head_dim) == (head_dim, value_dim or head_dim):
        return ()
    values = f" with values of {value_dim}" if value_dim not in (0, head_dim) else ""
    return (f"head_dim {head_dim}{values}: not measured, in proportion to {found.head_dim}",)
