"""Attention sinks: one learned logit of every head that joins the denominator of its softmax, and has no value.

With the output O and the log-sum-exp L of a query without its head's sink s, those with it are ``O exp(L - L')`` and
``L' = log(exp(L) + exp(s))``. So no kernel needs to know of it. It is joined once, to what is complete, from however
many partial results that was merged: before outputs go home where heads are exchanged, at the end elsewhere. Backward,
kernels that read O and L' find the gradients of queries, keys and values as they are. The gradient of a sink is
``-sum of exp(s - L') (dO . O)`` over all queries: a partial sum on every rank, and an all-reduce of one float for each
head.

Reference: gpt-oss (openai/gpt-oss, gpt_oss/torch/model.py), whose scores have one column more; MagiAttention's "FFA
with Attention Sink" derives both passes from L. Differs: there, the first of a rank's kernels joins the sink.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints, RangeSets
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import READ, WRITE, Kind, Pass, Schedule
from cpsim.strategies.sizes import Sizes

GRADIENT_BYTES: Final = 4
"""Of one head's sink, fp32."""


class _Join(NamedTuple):
    """A complete output in a buffer."""

    last: int
    """Op after which it is complete; NOTHING where no key is seen."""
    buffer: int
    block: int
    readers: tuple[int, ...]
    """Ops that then read it without its log-sum-exp."""


class _Pair(NamedTuple):
    """An output with its log-sum-exp, and its gradient."""

    out_buffer: int
    out_block: int
    dout_buffer: int
    dout_block: int


def with_sinks(schedule: Schedule, workload: Workload, pass_: Pass) -> Schedule:
    """A strategy's schedule of attention, with a sink for every head.

    Args:
        schedule: of any strategy, without sinks.
        workload: the case.
        pass_: forward or backward.

    Raises:
        InfeasibleError: outputs and their gradients lie apart, so that no rank can sum a sink's gradient.
    """
    plan = _Sinks(schedule, workload)
    return plan.forward() if pass_ == "fwd" else plan.backward()


class _Sinks:
    """One schedule under construction."""

    def __init__(self, dense: Schedule, workload: Workload) -> None:
        self.dense, self.heads = dense, workload.num_heads
        sets = RangeSets(np.append(dense.sets.start, dense.sets.start[-1]), dense.sets.ranges)
        self.b = Builder(
            dense.num_ranks, sets, dense.tiles, dense.stride, dense.narrow_sums, dense.head_groups, dense.copies
        )
        self.b.adopt(dense)
        self.b.input(*dense.inputs.T)
        self.b.output(*dense.outputs.T)
        self.taken, self.moved = 0, np.full(len(dense), NOTHING)
        self.waits: list[tuple[int, int]] = []
        """(op of the schedule, new op that it waits for)."""
        self.owner = dense.op_of_access()
        self.tensor = [dense.block_tensors[t] for t in dense.block_tensor.tolist()]
        self.nbytes = dense.sets.num_tokens()[dense.block_set] * dense.block_heads[:, 1] * Sizes(workload).output(1)
        """Of every block, as one of outputs or of their gradients."""

    def _take(self, end: int) -> None:
        """Ops of the schedule up to one of them."""
        self.b.take(self.dense, self.taken, end, self.moved, self.waits)
        self.taken = end

    def _built(self) -> Schedule:
        self._take(len(self.dense))
        return replace(self.b.build(), planning=self.dense.planning)

    def forward(self) -> Schedule:
        """Complete outputs are scaled, all that become complete before the first of them is read in one go."""
        together: list[_Join] = []
        for join in self._joins():
            if min(chain(*(j.readers for j in together)), default=len(self.dense)) < join.last:
                self._scale(together)
                together = []
            together.append(join)
        if together:
            self._scale(together)
        return self._built()

    def _joins(self) -> list[_Join]:
        """Outputs in the order in which they become complete."""
        s, found = self.dense, list[_Join]()
        copies = s.on_host()
        whole = {b: k for b, k in s.outputs.tolist() if self.tensor[k] == "out" and not copies[b]}
        made, read = dict[int, tuple[int, int]](), dict[int, list[int]]()

        def close(buffer: int) -> None:
            last, block = made.pop(buffer)
            found.append(_Join(last, buffer, whole.get(buffer, block), tuple(read.pop(buffer, ()))))

        leaves = {
            op
            for op, k, m in zip(self.owner.tolist(), s.access_block, s.access_mode, strict=True)
            if m != READ and self.tensor[k] == "o"
        } | set(np.flatnonzero(s.over_host_link()).tolist())
        columns = self.owner, s.access_buffer, s.access_block, s.access_mode
        for op, buffer, block, mode in zip(*(column.tolist() for column in columns), strict=True):
            if mode == READ and op in leaves and buffer in made:
                read.setdefault(buffer, []).append(op)
            elif mode != READ and self.tensor[block] == "out":
                if buffer in read:
                    close(buffer)
                made[buffer] = op, block if mode == WRITE else made.get(buffer, (op, block))[1]
        for buffer in [b for b in made if b in read or b in whole]:
            close(buffer)
        written = {join.buffer for join in found}
        found += [_Join(NOTHING, buffer, block, ()) for buffer, block in whole.items() if buffer not in written]
        return sorted(found)

    def _scale(self, joins: Sequence[_Join]) -> None:
        self._take(joins[-1].last + 1)
        buffers, blocks = (np.array(column, np.int32) for column in list(zip(*joins, strict=True))[1:3])
        scaled = self.b.add(
            Kind.ELEMENTWISE,
            (self.dense.buffer_rank[buffers], "compute"),
            nbytes=2 * self.nbytes[blocks],
            deps=[np.array([NOTHING if join.last == NOTHING else self.moved[join.last] for join in joins])],
            updates=[(buffers, blocks)],
        )
        for join, op in zip(joins, scaled.tolist(), strict=True):
            self.waits.extend((reader, op) for reader in join.readers)

    def backward(self) -> Schedule:
        """Sums over a rank's queries where outputs and their gradients are, and over ranks."""
        b, ranks = self.b, np.arange(self.dense.num_ranks)
        nbytes, block = self.heads * GRADIENT_BYTES, b.blocks("dsink", [len(self.dense.sets)], (0, self.heads))
        blocks = np.repeat(block, len(ranks))
        mine, every = ((b.buffers(name, nbytes, ranks), blocks) for name in ("dsink", "dsink of all"))
        self.last = b.add(Kind.ELEMENTWISE, (ranks, "compute"), nbytes=nbytes, writes=[mine]).copy()  # zeros
        at_home, at_kernels = self._pairs()
        self._sum(at_home, mine, [])
        for ops, pairs in _neighbours(at_kernels, self.dense):
            self._take(ops[0])
            ends = [self.dense.dep_start[ops], self.dense.dep_start[ops + 1]]
            waits = np.full((len(ops), max(1, int((ends[1] - ends[0]).max()))), NOTHING)
            for i, (first, end) in enumerate(zip(*ends, strict=True)):
                waits[i, : end - first] = self.moved[self.dense.dep[first:end]]
            self._sum(pairs, mine, [waits])
        self._take(len(self.dense))
        if len(ranks) > 1:
            reads, writes = ((buffers[None], blocks[None]) for buffers, blocks in (mine, every))
            deps = [self.last[None]]
            b.add(Kind.ALL_REDUCE, (ranks[None], "comm"), nbytes=nbytes, deps=deps, reads=[reads], writes=[writes])
        b.output(*(every if len(ranks) > 1 else mine))
        return self._built()

    def _sum(self, pairs: Sequence[_Pair], mine: Access, deps: Sequence[Ints]) -> None:
        """Add what some outputs and their gradients say to the sums of their ranks."""
        if not pairs:
            return
        table = np.array(pairs, np.int32)
        ranks = self.dense.buffer_rank[table[:, 0]]
        added = self.b.add(
            Kind.ELEMENTWISE,
            (ranks, "compute"),
            nbytes=2 * self.nbytes[table[:, 1]],
            deps=deps,
            reads=[(table[:, 0], table[:, 1]), (table[:, 2], table[:, 3])],
            updates=[(mine[0][ranks], mine[1][ranks])],
        )
        self.last[ranks] = added

    def _pairs(self) -> tuple[list[_Pair], list[tuple[int, _Pair]]]:
        """Kept outputs with their gradients: those that a rank is given both of, and those that meet at a kernel."""
        s, home, kernels, at_kernels = self.dense, list[_Pair](), list[tuple[int, _Pair]](), self._at_kernels()
        given = {self._place(b, k): (b, k) for b, k in s.inputs.tolist() if self.tensor[k] == "dout"}
        for buffer, block in s.inputs.tolist():
            if self.tensor[block] != "out":
                continue
            place = self._place(buffer, block)
            if place in given:
                home.append(_Pair(buffer, block, *given[place]))
            elif place in at_kernels:
                kernels.append(at_kernels[place])
            else:
                text = s.block_text(block)
                raise InfeasibleError(f"sinks: no rank has {text} and its gradient together; leave sinks out")
        return home, sorted(kernels)

    def _place(self, buffer: int, block: int) -> tuple[int, int, int, int]:
        """Rank, tokens and heads of a block."""
        first, count = self.dense.block_heads[block].tolist()
        return int(self.dense.buffer_rank[buffer]), int(self.dense.block_set[block]), first, count

    def _at_kernels(self) -> dict[tuple[int, int, int, int], tuple[int, _Pair]]:
        """By rank, tokens and heads: the first kernel that reads an output and its gradient, and where it does."""
        s, found = self.dense, dict[tuple[int, int, int, int], tuple[int, _Pair]]()
        for op in np.flatnonzero(s.kind == Kind.ATTENTION_BACKWARD).tolist():
            every = slice(s.access_start[op], s.access_start[op + 1])
            accesses = zip(s.access_buffer[every].tolist(), s.access_block[every].tolist(), strict=True)
            read = {self.tensor[k]: (b, k) for b, k in accesses if self.tensor[k] in ("out", "dout")}
            place = self._place(*read["out"])
            if place not in found and self._place(*read["dout"]) == place:
                found[place] = op, _Pair(*read["out"], *read["dout"])
        return found


def _neighbours(pairs: Sequence[tuple[int, _Pair]], s: Schedule) -> Iterator[tuple[Ints, list[_Pair]]]:
    """Pairs of kernels that follow each other and wait for nothing in between."""
    together: list[tuple[int, _Pair]] = []
    for op, pair in pairs:
        first = together[0][0] if together else op
        if op - first != len(together) or (s.dep[s.dep_start[op] : s.dep_start[op + 1]] >= first).any():
            yield np.array([one for one, _ in together]), [other for _, other in together]
            together = []
        together.append((op, pair))
    if together:
        yield np.array([one for one, _ in together]), [other for _, other in together]
