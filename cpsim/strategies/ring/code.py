"""What runs around the kernels of a ring: ours, and other people's from facts about their code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cpsim.masks.slices import Ints, Whole
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import Int8, Kind, Mask, Pass
from cpsim.strategies import sharding
from cpsim.strategies.others import RingCode, RowKernel, RowKernels
from cpsim.strategies.ring.steps import Steps, Where


@dataclass(slots=True)
class Slot:
    """A place in the loop over steps: one op, or none, on every rank in every step; arrays ``[steps, ranks]``."""

    where: Mask
    nbytes: Ints | int = 0
    kinds: Ints | Int8 | int = int(Kind.COPY)
    at: Whole = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Indices of the ops, once all slots of a schedule are in order; NOTHING where there is none."""


@dataclass(slots=True)
class GradientSlots:
    """Backward's slots beside the kernels."""

    reads: list[Slot]
    """Before a kernel."""
    dq: list[Slot]
    """Sum gradients of queries."""
    dkv: list[Slot]
    """Sum gradients of keys and values."""
    joins: list[Slot]
    """Before these leave."""


class Ours:
    """Our executor: results are summed in place, by one fused kernel each."""

    gathers = False
    """Keys and values are gathered once instead of travelling."""
    queries_last = False
    lockstep = False
    """Transfers wait for the kernels that were launched before them."""
    one_stream = False
    """Keys and gradients share a process group."""

    def __init__(self, b: Builder, steps: Steps) -> None:
        self.b, self.steps = b, steps
        self.firsts = np.zeros_like(steps.active)
        """Steps whose partial result is copied into an accumulator."""

    def summing(self, width: int) -> int:
        """Bytes per token that a result of ``width`` needs for its sums."""
        return self.steps.sizes.accumulator(width) if self.steps.sums.any() else 0

    def accumulator(self, result: Access, tensor: str, extra: int) -> Access:
        """Where the partial results of queries are summed."""
        del tensor, extra
        return result

    def enter(self, pass_: Pass, ready: Ints) -> Ints:
        """What runs before the first step, after the ops ``ready``; returns the last op of every rank."""
        del pass_
        return ready

    def joins(self) -> list[Slot]:
        """Before keys and values are sent."""
        return []

    def unpacked(self) -> list[Slot]:
        """Beside the packing of key heads."""
        return []

    def merges(self) -> list[Slot]:
        """After a forward kernel."""
        x = self.steps
        moved = x.rows.traffic(x.o_bytes, x.sizes.accumulator(x.o_bytes), 3 * x.lse_bytes)
        return [Slot(x.sums, moved)]

    def gradients(self, wire: bool) -> GradientSlots:
        """Backward, where gradients travel or not."""
        x = self.steps
        narrow, wide = x.kv_bytes, x.sizes.accumulator(x.kv_bytes)
        dkv = x.seen * narrow * ~x.unseen + wide * np.where(x.number == 0, x.k_rows, 2 * x.seen)
        moved = x.rows.traffic(x.q_bytes, x.sizes.accumulator(x.q_bytes), 0)
        return GradientSlots([], [Slot(x.sums, moved)], [Slot((x.active | x.unseen) & wire, dkv)], [])

    def launched(self, entered: Ints, kernels: list[Slot], transfers: Slot, to: Whole) -> list[Ints]:
        """What transfers to some ranks wait for beside data and buffers: the kernels launched before them."""
        del entered, kernels, transfers, to
        return []

    def travelling(self) -> Ints:
        """Bytes of a token's gradients when they leave after every step, ``[steps]``."""
        x = self.steps
        return np.full(x.grid.num_places, x.sizes.accumulator(x.kv_bytes))

    def casts(self, pass_: Pass, has_keys: bool) -> tuple[list[Ints], list[Ints]]:
        """Bytes of the row kernels that make results of sums: those of queries, and of gradients that came home."""
        del pass_
        x = self.steps
        return [], [x.tokens * (x.sizes.accumulator(x.kv_bytes) + x.kv_bytes)] if has_keys else []


class Theirs(Ours):
    """Somebody else's code."""

    lockstep = True

    def __init__(self, b: Builder, steps: Steps, facts: RingCode) -> None:
        super().__init__(b, steps)
        self.facts, self.gathers, self.queries_last = facts, facts.gathers, facts.queries_last
        self.one_stream = not facts.groups
        if facts.batch:
            steps.lie_together()
        self.firsts = steps.active & ~steps.sums

    def summing(self, width: int) -> int:
        """Nothing: sums are tensors of their own."""
        del width
        return 0

    def accumulator(self, result: Access, tensor: str, extra: int) -> Access:
        """An fp32 tensor beside the result."""
        x = self.steps
        row = x.o_bytes if tensor == "out" else x.q_bytes
        nbytes = x.tokens * (x.sizes.accumulator(row) + extra) * (self.facts.copies if extra else 1)
        return self.b.buffers(f"{tensor} sum", nbytes), result[1]

    def enter(self, pass_: Pass, ready: Ints) -> Ints:
        """A call into the code and its first row kernels."""
        x, lanes = self.steps, (self.steps.ranks, "compute")
        last = self.b.add(Kind.BARRIER, lanes, deps=[ready])
        documents = len(sharding.documents_of(x.workload.slices(), x.workload.num_tokens)) - 1
        for _ in range(self.facts.per_document.get(pass_, 0) * documents):
            last = self.b.add(Kind.COPY, lanes)
        for row_kernel in self.facts.enter[pass_]:
            last = self.b.add(row_kernel.kind, lanes, nbytes=self._nbytes(row_kernel, x.tokens))
        return last

    def joins(self) -> list[Slot]:
        """Row kernels that bring keys and values together."""
        return self._slots((self.steps.moves, self.facts.send, self.steps.k_rows))

    def unpacked(self) -> list[Slot]:
        """Row kernels that go with the packing of key heads."""
        x = self.steps
        return self._slots((x.packs, self.facts.pack, x.k_rows)) if x.scattered.any() else []

    def merges(self) -> list[Slot]:
        """A cast, or a merge of several row kernels."""
        x, facts = self.steps, self.facts
        whole, tails = x.sums & ~x.tails, x.sums & x.tails
        unfused = self._unfused(whole, tails)
        whole_unfused, tails_unfused = facts.merges_unfused or ((), ())
        return self._slots(
            (self.firsts, facts.first, x.q_rows),
            (whole & ~unfused, facts.merge, x.q_rows),
            (whole & unfused, whole_unfused, x.q_rows),
            (tails & ~unfused, facts.merge_tails, x.q_rows),
            (tails & unfused, tails_unfused, x.q_rows),
        )

    def _unfused(self, whole: Mask, tails: Mask) -> Mask:
        """Which merges, of all rows and of tail rows, TorchScript does not fuse."""
        if self.facts.merges_unfused is None:
            return np.zeros_like(whole)
        if self.facts.shapes_change:
            many = np.minimum(whole.sum(axis=0), tails.sum(axis=0)) > 1
            return np.asarray((tails & whole.any(axis=0)) | (whole & many))
        return np.asarray(tails & (whole.cumsum(axis=0) > 1))

    def gradients(self, wire: bool) -> GradientSlots:
        """Row kernels of each kind."""
        del wire
        x, facts = self.steps, self.facts
        later, whole, idle = x.active & (x.number > 0), ~x.key_heads, ~x.active
        wide = x.number < (x.grid.inner if facts.narrows else x.grid.num_places)
        return GradientSlots(
            self._slots(
                (x.active & x.tails, facts.read_tails, x.q_rows),
                (x.active & ~x.tails & x.tails.any(axis=0), facts.read, x.q_rows),
            ),
            self._slots(
                (self.firsts, facts.first_dq, x.q_rows),
                (x.sums & ~x.tails & wide, facts.sum_dq, x.q_rows),
                (x.sums & x.tails & wide, facts.sum_dq_tails, x.q_rows),
                (idle, facts.idle_dq, x.q_rows),
                (x.sums & ~wide, narrow(facts.sum_dq), x.q_rows),
            ),
            self._slots(
                (x.active & ~later, facts.first_dkv, x.k_rows),
                (later & whole & wide, facts.sum_dkv, x.k_rows),
                (later & ~whole & wide, facts.sum_dkv_heads, x.k_rows),
                (idle, facts.idle_dkv, x.k_rows),
                (later & ~wide, narrow(facts.sum_dkv), x.k_rows),
            ),
            self._slots((np.ones_like(x.active), facts.send_dkv, x.k_rows)),
        )

    def launched(self, entered: Ints, kernels: list[Slot], transfers: Slot, to: Whole) -> list[Ints]:
        """The last kernels that either rank of a transfer launched before it."""
        x = self.steps
        last = np.broadcast_to(entered, x.active.shape).copy()
        ops = np.sort(np.concatenate([entered[None, :], *(slot.at for slot in kernels)]), axis=0)
        for rank in x.ranks:
            first = transfers.at.max(axis=1, where=transfers.where, initial=NOTHING)
            last[:, rank] = ops[np.searchsorted(ops[:, rank], first) - 1, rank]
        return [last, np.take_along_axis(last, np.broadcast_to(to, last.shape), axis=1)]

    def travelling(self) -> Ints:
        """fp32, or of the working type from the last step of the first of several inner rings on."""
        made, grid = super().travelling(), self.steps.grid
        if self.facts.narrows and grid.inner < grid.num_places:
            made[grid.inner - 1 :] = self.steps.kv_bytes
        return made

    def casts(self, pass_: Pass, has_keys: bool) -> tuple[list[Ints], list[Ints]]:
        """Every result from its fp32 sum."""
        first, *others = (self._nbytes(row_kernel, self.steps.tokens) for row_kernel in self.facts.leave[pass_])
        return [first], others if has_keys else []

    def _slots(self, *cases: tuple[Mask, RowKernels, Ints]) -> list[Slot]:
        """Slots of row kernels: case by case the steps where they run, and rows of the partial result."""
        made = []
        shape = self.steps.active.shape
        for i in range(max(len(row_kernels) for _, row_kernels, _ in cases)):
            here = [(where, row_kernels[i], rows) for where, row_kernels, rows in cases if i < len(row_kernels)]
            kinds, nbytes = np.zeros(shape, np.int8), np.zeros(shape, np.int64)
            for where, row_kernel, rows in here:
                kinds[where] = row_kernel.kind
                nbytes += np.where(where, self._nbytes(row_kernel, rows), 0)
            made.append(Slot(np.logical_or.reduce([where for where, _, _ in here]), nbytes, kinds))
        return made

    def _nbytes(self, row_kernel: RowKernel, part: Ints) -> Ints:
        """Bytes of a row kernel over a rank's heads, in the shape of the rows of a partial result."""
        rows = {"part": part, "whole": self.steps.tokens, "tails": self.steps.tail_rows}[row_kernel.rows]
        return row_kernel.nbytes(rows, self.steps.workload) // self.steps.grid.num_parts


def narrow(row_kernels: RowKernels) -> RowKernels:
    """These sums in the working type."""
    return tuple(replace(row_kernel, narrow=row_kernel.narrow + row_kernel.wide, wide=0) for row_kernel in row_kernels)


def emit_row_kernels(b: Builder, slots: Sequence[Slot]) -> None:
    """Row kernels that do a part of what other ops say."""
    for slot in slots:
        kinds, nbytes = (np.broadcast_to(x, slot.where.shape) for x in (slot.kinds, slot.nbytes))
        for kind in np.unique(kinds[slot.where]).tolist():
            here = Where.true(slot.where & (kinds == kind))
            b.add(Kind(kind), (here.r, "compute"), at=here.of(slot.at), step=here.s, nbytes=here.of(nbytes))
