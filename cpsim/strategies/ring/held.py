"""Rings of other people that hold every partial output and merge them all after the last step.

Facts about the code are in ``HeldRingCode``; who computes what is that of all rings. Ops are emitted step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import UPDATE, WRITE, Int32, Kind, Mask, Pass
from cpsim.strategies.others import HeldRingCode, RingCode, RowKernel, RowKernels
from cpsim.strategies.others.wrapped import RowKernelEmitter
from cpsim.strategies.ring.grid import RingGrid
from cpsim.strategies.ring.loop import Ring, RingTensors
from cpsim.strategies.ring.steps import Steps

_MADE: Final = {
    "fwd": (RowKernel("q", 1, 0), RowKernel("lse", 0, 1)),
    "bwd": (RowKernel("q", 1, 0), RowKernel("kv", 1, 0)),
}
"""What a kernel writes that has nothing to compute."""


class HeldRing(RingTensors):
    """Rings under construction; arrays are ``[ranks]`` unless they say otherwise."""

    def __init__(self, b: Builder, steps: Steps, facts: HeldRingCode) -> None:
        super().__init__(b, steps)
        self.facts, self.places, self.whole = facts, steps.grid.num_places, runs_whole(steps.workload, facts)
        self.ranks = np.flatnonzero(steps.longest)
        """Ranks whose rings have tokens."""
        self.emitter = RowKernelEmitter(b, steps.workload, steps.grid.num_parts)
        self.most = steps.longest * steps.kv_bytes
        """Bytes of the largest shard of keys and values of a rank's ring."""
        self.kernels: deque[Ints] = deque()
        """Last op on ``compute`` of every rank: what a transfer that is issued now waits for, and then the latest."""
        self.holder: dict[int, Int32] = {}
        """By step, buffers of the keys that it uses."""
        self.came: list[list[Ints]] = [[] for _ in range(self.places + 1)]
        """By step, the transfers that brought them, and those that took others along."""
        self.totals: list[Int32] = []
        """By step, buffers of the sums of gradients of these keys."""
        self.gradients_came: list[Ints] = []
        """The transfers that brought those of the current step."""

    def given(self, tensor: str, width: int) -> Access:
        """Every rank's shard as an input, or the keys that it holds when a forward pass ends."""
        if tensor != "kv" or not self.x.grid.backwards:
            return super().given(tensor, width)
        made = self.b.buffers(tensor, self.x.shard_tokens[self.x.source[0]] * width), self.blocks(tensor)
        self.b.input(made[0], made[1][self.x.of_source[0]])
        return made

    def forward(self, q: Access, kv: Access, out: Access) -> Ints:
        """All steps of a forward pass; returns the op of every rank that completes its output."""
        x, facts = self.x, self.facts
        self.enter("fwd", kv, 2 if facts.in_loop else 1)
        partials = [self.b.buffers("out partial", x.tokens * (x.o_bytes + x.lse_bytes)) for _ in range(self.places)]
        for s, partial in enumerate(partials):
            self.send_keys(s, kv[1])
            self.attend("fwd", s, [(q[0], q[1][x.of_queries[s]])], kv[1], [(partial, out[1][x.of_queries[s]])])
            if facts.in_loop:
                self.correct_lse(s)
        for s in range(0 if facts.in_loop else self.places):
            self.correct_lse(s)
        self.leave("fwd")
        for s, partial in enumerate(partials):
            row_kernel, kind, mode = (
                (facts.sum_out, facts.sum_out.kind, UPDATE) if s else (facts.first_out, Kind.ACCUMULATE, WRITE)
            )
            self.add(s, x.active[s], kind, (row_kernel,), partial, (out[0], out[1][x.of_queries[s]]), mode)
            self.idle(s, (row_kernel,))
        return self.kernels[-1]

    def backward(self, given: Sequence[Access], kv: Access, dq: Access, dkv: Access) -> tuple[Ints, Ints]:
        """All steps of a backward pass; returns the ops of every rank that complete dq and dkv."""
        b, x, facts = self.b, self.x, self.facts
        self.enter("bwd", kv, 1)
        dq_partial, dkv_partial = b.buffers("dq partial", x.tokens * x.q_bytes), b.buffers("dkv partial", self.most)
        self.totals = self.alternating("dkv ring")
        self.travel = self.totals[:2]
        if facts.turns or self.places == 1:
            self.totals[-1] = dkv[0]
        for s in range(self.places):
            if facts.turns:
                self.send_all(s, kv[1], dkv[1])
            else:
                self.send_keys(s, kv[1])
            made = [(dq_partial, dq[1][x.of_queries[s]]), (dkv_partial, dkv[1][x.of_keys[s]])]
            self.attend("bwd", s, [(t[0], t[1][x.of_queries[s]]) for t in given], kv[1], made)
            sums = (facts.first_dq,), (facts.sum_dq,)
            self.add_up(s, sums, made[0], ~x.tails[s], (dq[0], dq[1][x.own]), x.tokens * x.q_bytes)
            self.idle(s, sums[1] if s else ())
            if facts.join_dkv:
                joined = self.emitter.emit(facts.join_dkv, self.ranks, 0, x.k_rows[s, self.ranks], step=s)
                self.mark(self.ranks, joined)
            changes, total = (facts.first_dkv, facts.sum_dkv), (self.totals[s], dkv[1][x.of_source[s]])
            self.add_up(s, changes, made[1], ~x.key_heads[s], total, self.most, self.gradients_came)
            self.idle(s, changes[1] if s else ())
            if not facts.turns and self.places > 1:
                self.send_gradients(s, dkv)
        self.leave("bwd")
        home = self.kernels[-1] if facts.turns or self.places == 1 else self.gradients_came[0]
        return self.kernels[-1], home

    def correct_lse(self, s: int) -> None:
        """Merge log-sum-exps of a step."""
        rows, row_kernels = self.x.q_rows[s, self.ranks], self.facts.sum_lse if s else self.facts.first_lse
        self.mark(self.ranks, self.emitter.emit(row_kernels, self.ranks, rows, 0, step=s))

    def alone(self, pass_: Pass) -> None:
        """Kernels of ranks that have all tokens of their documents: one call, without row kernels."""
        x, r = self.x, self.ranks
        widths = {"q": x.q_bytes, "kv": x.kv_bytes, "out": x.o_bytes + x.lse_bytes, "dout": x.o_bytes}
        inputs, kind = (("q", "kv"), Kind.ATTENTION) if pass_ == "fwd" else (tuple(widths), Kind.ATTENTION_BACKWARD)
        given = [self.shard(self.given(name, widths[name])) for name in inputs]
        made = [("out", widths["out"])] if pass_ == "fwd" else [("dq", x.q_bytes), ("dkv", x.kv_bytes)]
        results = [self.shard(self.result(name, width)) for name, width in made]
        self.b.add(
            kind,
            (r, "compute"),
            tile=x.tile[0, r],
            heads=x.heads[r],
            reads=[(buffer[r], block[r]) for buffer, block in given],
            writes=[(buffer[r], block[r]) for buffer, block in results],
        )

    def alternating(self, name: str) -> list[Int32]:
        """Two buffers in turns, one for every step."""
        pair = [self.b.buffers(f"{name} {i}", self.most) for i in range(min(2, self.places))]
        return [pair[s % 2] for s in range(self.places)]

    def enter(self, pass_: Pass, kv: Access, turns: int) -> None:
        """The call and its first row kernels; transfers wait for kernels of ``turns`` steps ago."""
        x, entered = self.x, np.full(self.x.num_ranks, NOTHING)
        entered[self.ranks] = self.b.add(Kind.BARRIER, (self.ranks, "compute"), deps=[self.ready[self.ranks]])
        for row_kernel in self.facts.enter[pass_]:
            r, rows = self.ranks, x.tokens
            if row_kernel.rows == "tails":
                r, rows = r[x.tails[:, r].any(axis=0)], x.tail_rows
            entered[r] = self.emitter.emit((row_kernel,), r, rows[r], rows[r])
        self.kernels = deque([entered] * turns, maxlen=turns)
        self.holder[0] = kv[0]

    def leave(self, pass_: Pass) -> None:
        """Row kernels after the last step."""
        if self.facts.leave[pass_]:
            rows = self.x.tokens[self.ranks]
            self.mark(self.ranks, self.emitter.emit(self.facts.leave[pass_], self.ranks, rows, rows))

    def mark(self, ranks: Ints, ops: Ints) -> None:
        """These ops are now the last ones of their ranks."""
        latest = self.kernels[-1].copy()
        latest[ranks] = ops
        self.kernels[-1] = latest

    def attend(self, pass_: Pass, s: int, reads: Sequence[Access], keys: Int32, writes: Sequence[Access]) -> None:
        """The kernels of a step and what surrounds them."""
        x, facts = self.x, self.facts
        self.kernels.append(self.kernels[-1])
        for where, row_kernels in ((x.tails[s], facts.tails[pass_]), (x.key_heads[s], facts.key_heads[pass_])):
            r = np.flatnonzero(where & x.active[s])
            if len(r) and row_kernels:
                self.emitter.emit(row_kernels, r, x.q_rows[s, r], x.k_rows[s, r], [d[r] for d in self.came[s]], s)
        r = np.flatnonzero(x.active[s])
        if len(r):
            access = [*reads, (self.holder[s], keys[x.of_keys[s]])]
            done = self.emitter.attend(
                facts.wrapper,
                pass_,
                r,
                q_rows=x.q_rows[s, r],
                k_rows=x.k_rows[s, r],
                tile=x.tile[s, r],
                heads=x.heads[r],
                deps=[d[r] for d in self.came[s]],
                step=s,
                reads=[(b[r], block[r]) for b, block in access],
                writes=[(b[r], block[r]) for b, block in writes],
            )
            self.mark(r, done)
        self.idle(s, (*(facts.wrapper.before[pass_] if facts.wrapper else ()), *_MADE[pass_]))

    def idle(self, s: int, row_kernels: RowKernels) -> None:
        """Row kernels of a step on ranks whose queries see none of its keys, where the code does not know that."""
        x, r = self.x, np.flatnonzero(~self.x.active[s] & (self.x.longest > 0))
        if self.whole and row_kernels and len(r):
            self.mark(r, self.emitter.emit(row_kernels, r, x.q_rows[s, r], x.k_rows[s, r], step=s))

    def add(
        self,
        s: int,
        where: Mask,
        kind: Kind,
        row_kernels: RowKernels,
        partial: Int32,
        total: Access,
        mode: int,
        deps: Sequence[Ints] = (),
    ) -> None:
        """Copy (``WRITE``) or add (``UPDATE``) a partial result on some ranks, by one row kernel or more."""
        x, r = self.x, np.flatnonzero(where)
        if not len(r):
            return
        result = [(total[0][r], total[1][r])]
        done = self.b.add(
            kind,
            (r, "compute"),
            step=s,
            heads=x.heads[r],
            deps=[d[r] for d in deps],
            nbytes=self.emitter.nbytes(row_kernels[0], x.q_rows[s, r], x.k_rows[s, r]),
            reads=[(partial[r], total[1][r])],
            writes=result if mode == WRITE else (),
            updates=result if mode == UPDATE else (),
        )
        if row_kernels[1:]:
            done = self.emitter.emit(row_kernels[1:], r, x.q_rows[s, r], x.k_rows[s, r], step=s)
        self.mark(r, done)

    def add_up(
        self,
        s: int,
        row_kernels: tuple[RowKernels, RowKernels],
        made: Access,
        whole: Mask,
        total: Access,
        nbytes: Ints,
        deps: Sequence[Ints] = (),
    ) -> None:
        """Sum gradients in the working type: of the first step they are copied, into zeros where they are not whole.

        Args:
            s: the step.
            row_kernels: those that copy, those that add.
            made: the partial result.
            whole: where it covers the total's whole block.
            total, nbytes: what it is added to, and how big that is.
            deps: what brought the total.
        """
        active, (copies, adds) = self.x.active[s], row_kernels
        part = (total[0], made[1])
        first = active & whole & (s == 0)
        zeros = self.ranks[~(active & whole)[self.ranks]] if s == 0 else self.ranks[:0]
        if len(zeros):
            done = self.b.add(
                Kind.ACCUMULATE,
                (zeros, "compute"),
                step=s,
                heads=self.x.heads[zeros],
                nbytes=nbytes[zeros],
                writes=[(total[0][zeros], total[1][zeros])],
            )
            self.mark(zeros, done)
        self.add(s, first, Kind.COPY, copies, made[0], part, WRITE)
        self.add(s, active & ~first, adds[0].kind, adds, made[0], part, UPDATE, deps)

    def transfer(
        self,
        s: int,
        lanes: tuple[str, str],
        to: Ints,
        nbytes: Ints,
        deps: Sequence[Ints],
        moves: Sequence[tuple[Access, Int32]],
    ) -> list[Ints]:
        """Every rank sends to another one, after the kernels of both.

        Args:
            s, lanes, nbytes: of the transfers.
            to: where every rank sends.
            deps: what senders wait for.
            moves: (what every rank sends, buffers of every rank that receive it).

        Returns:
            the op that brings every rank something, and the one that it sends.
        """
        ops, kernels, mine = np.full(len(to), NOTHING), self.kernels[0], self.ranks
        pair = (to[to] == self.x.ranks).all() and not self.facts.batches_pairs
        for r in (mine[mine < to[mine]], mine[mine > to[mine]]) if pair else (mine,):
            ops[r] = self.b.add(
                Kind.TRANSFER,
                (r, lanes[0]),
                (to[r], lanes[1]),
                step=s,
                nbytes=nbytes[r],
                deps=[*(d[r] for d in deps), kernels[r], kernels[to[r]], ops[to[r]]],
                reads=[(b[r], block[r]) for (b, block), _ in moves],
                writes=[(target[to[r]], block[r]) for (_, block), target in moves],
            )
        brought = np.empty_like(ops)
        brought[to] = ops  # rings are permutations
        return [brought, ops]

    def send_keys(self, s: int, keys: Int32) -> None:
        """Keys and values that leave in a step, by themselves."""
        x = self.x
        for track in x.tracks:
            if s in track.leaves:
                used, target = int(track.used[track.leaves == s][0]), self.b.buffers("kv ring", self.most)
                moves = [((self.holder[s], keys[x.of_source[s]]), target)]
                nbytes = x.shard_tokens[x.source[s]] * x.kv_bytes
                self.came[used] = self.transfer(s, track.lanes, track.next, nbytes, self.came[s], moves)
                self.holder[used] = target

    def send_all(self, s: int, keys: Int32, gradients: Int32) -> None:
        """Keys and values, and the gradients of those of the step before, in one message."""
        x, moves, nbytes = self.x, [], np.zeros(self.x.num_ranks, np.int64)
        if self.places == 1:
            return
        if s == 0:
            self.buffers = self.alternating("kv ring")
        if s < self.places - 1:
            self.holder[s + 1] = self.buffers[s]
            moves.append(((self.holder[s], keys[x.of_source[s]]), self.holder[s + 1]))
            nbytes += x.shard_tokens[x.source[s]] * x.kv_bytes
        if s > 0:
            moves.append(((self.totals[s - 1], gradients[x.of_source[s - 1]]), self.totals[s]))
            nbytes += x.shard_tokens[x.source[s - 1]] * x.kv_bytes
        to = x.tracks[0].next
        deps = [*self.came[s], *(sent[to] for sent in self.came[s][1:])]
        self.came[s + 1] = self.transfer(s, x.tracks[0].lanes, to, nbytes, deps, moves)
        self.gradients_came = self.came[s + 1]

    def send_gradients(self, s: int, dkv: Access) -> None:
        """Sums to who uses their keys next in the inner ring, or home in it and from there to the next inner ring."""
        x, grid, blocks = self.x, self.x.grid, dkv[1][self.x.of_source[s]]
        windows, ends, last = self.places // grid.inner, (s + 1) % grid.inner == 0, s == self.places - 1
        nbytes, lanes = x.shard_tokens[x.source[s]] * x.kv_bytes, ("grad_send", "grad_recv")
        source = self.totals[s]
        if grid.inner > 1:
            to = x.tracks[-1].next
            target = dkv[0] if last and windows == 1 else self.travel[(s + 1) % 2]
            unchanged = [np.where(x.active[s], NOTHING, brought) for brought in self.gradients_came[:1]]
            deps = [*unchanged, *(sent[to] for sent in self.gradients_came[1:])]
            self.gradients_came = self.transfer(s, lanes, to, nbytes, deps, [((source, blocks), target)])
            source, blocks, nbytes = target, blocks[x.tracks[-1].previous], nbytes[x.tracks[-1].previous]
        if windows > 1 and ends:
            apart = self.b.buffers("dkv of inner ring", self.most)
            r = self.ranks
            copied = self.b.add(
                Kind.COPY,
                (r, "compute"),
                step=s,
                heads=x.heads[r],
                nbytes=2 * nbytes[r],
                deps=[d[r] for d in self.gradients_came],
                reads=[(source[r], blocks[r])],
                writes=[(apart[r], blocks[r])],
            )
            self.mark(r, copied)
            source = dkv[0] if last else self.b.buffers("dkv outer ring", self.most)
            self.gradients_came = self.transfer(s, lanes, x.tracks[0].next, nbytes, [], [((apart, blocks), source)])
        if not last:
            self.totals[s + 1] = source


def make_ring(b: Builder, steps: Steps, facts: RingCode | HeldRingCode | None) -> Ring | HeldRing:
    """A ring as the code runs it; None: ours."""
    return HeldRing(b, steps, facts) if isinstance(facts, HeldRingCode) else Ring(b, steps, facts)


def runs_whole(workload: Workload, facts: RingCode | HeldRingCode | None) -> bool:
    """Whether all steps are of whole shards, however little of them a mask leaves."""
    return isinstance(facts, HeldRingCode) and facts.whole_steps and workload.mask not in ("causal", "causal_document")


def as_run(grid: RingGrid, pass_: Pass, facts: RingCode | HeldRingCode | None) -> RingGrid:
    """The grid with the direction of a pass."""
    turns = isinstance(facts, HeldRingCode) and facts.turns and pass_ == "bwd"
    return replace(grid, backwards=True) if turns else grid
