"""An all-gather of other people's: one kernel for the heads of a zigzag shard and one for its tails.

Keys and values of all ranks are gathered one after the other and put in order, before any kernel and without overlap.
Facts about the code are in ``HalvesCode``.
"""

from __future__ import annotations

import numpy as np

from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints
from cpsim.masks.tiles import make_tiles, sequences
from cpsim.schedule.builder import Access, Builder
from cpsim.schedule.schedule import Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.others import HalvesCode
from cpsim.strategies.others.wrapped import RowKernelEmitter
from cpsim.strategies.sizes import Sizes


def plan_halves(workload: Workload, num_ranks: int, pass_: Pass, code: HalvesCode) -> Schedule:
    """Zigzag shards of every document; keys and values of all ranks are gathered."""
    plan = _Halves(workload, num_ranks, code)
    return plan.forward() if pass_ == "fwd" else plan.backward()


class _Halves:
    """One schedule under construction; arrays are ``[ranks]``, or ``[2 ranks]``: heads, then tails."""

    def __init__(self, workload: Workload, num_ranks: int, code: HalvesCode) -> None:
        mask = workload.slices()
        shards = sharding.stack(*sharding.zigzag_shards(sharding.documents_of(mask, workload.num_tokens), num_ranks))
        sets = sharding.stack(shards, sharding.contiguous(workload.num_tokens, 1))
        parts, self.whole = np.arange(num_ranks, 3 * num_ranks), len(shards)
        tiles = make_tiles(mask, sets, parts, np.full(2 * num_ranks, self.whole))
        self.code, self.workload, self.ranks = code, workload, np.arange(num_ranks)
        self.b, self.total = Builder(num_ranks, sets, tiles, narrow_sums=True), workload.num_tokens
        self.emitter, self.parts = RowKernelEmitter(self.b, workload), parts
        self.seen = sequences(tiles).keys()[1:].reshape(2, num_ranks)
        """Keys that a half's queries see, ``[2, ranks]``."""
        self.tokens, sizes = sets.num_tokens(), Sizes(workload)
        self.q_bytes, self.kv_bytes = sizes.query(workload.num_heads), sizes.kv(workload.num_kv_heads)
        self.lse_bytes = sizes.lse(workload.num_heads)
        self.heads = np.array([0, workload.num_heads, 0, workload.num_kv_heads])

    def forward(self) -> Schedule:
        q, out = self.shard("q", self.q_bytes), self.shard("out", self.q_bytes + self.lse_bytes)
        self.b.input(*q)
        self.b.output(*out)
        keys, arrived = self.gather()
        for half in range(2):
            self.attend("fwd", half, arrived, [(q, "q")], keys, [self.half(out, "out", half)])
        return self.b.build()

    def backward(self) -> Schedule:
        b, code = self.b, self.code
        widths = {"q": self.q_bytes, "out": self.q_bytes + self.lse_bytes, "dout": self.q_bytes}
        given = {tensor: self.shard(tensor, width) for tensor, width in widths.items()}
        dq, dkv = self.shard("dq", self.q_bytes), self.shard("dkv", self.kv_bytes)
        for access in given.values():
            b.input(*access)
        b.output(*dq)
        b.output(*dkv)
        keys, arrived = self.gather()
        partial, full = (self.of_all("dkv", name) for name in ("dkv partial", "dkv of all"))
        self.emitter.emit((code.zero, code.zero), self.ranks, 0, self.total)
        for half in range(2):
            made = [self.half(dq, "dq", half), partial]
            self.attend("bwd", half, arrived, [(a, tensor) for tensor, a in given.items()], keys, made)
            nbytes = self.emitter.nbytes(code.sum, 0, self.seen[half] if code.sums_seen else self.total)
            for i in range(2):  # dk, dv
                reads, total = ([access] * i for access in (partial, full))
                b.add(
                    Kind.ACCUMULATE,
                    (self.ranks, "compute"),
                    step=half,
                    heads=self.heads,
                    nbytes=nbytes,
                    reads=reads,
                    writes=total if half == 0 else (),
                    updates=total if half == 1 else (),
                )
        for i in range(2):
            ordered = self.emitter.emit((code.order,), self.ranks, 0, self.total, step=2)
            done = b.add(
                Kind.REDUCE_SCATTER,
                (self.ranks[None, :], "comm"),
                step=2,
                nbytes=self.total * self.kv_bytes // 2,
                deps=[ordered[None, :]],
                reads=[_together(full)] * i,
                writes=[_together(dkv)] * i,
            )
            b.add(Kind.BARRIER, (self.ranks, "compute"), step=2, deps=[done.repeat(len(self.ranks))])
        return b.build()

    def gather(self) -> tuple[Access, Ints]:
        """Keys, then values, each put in order before the next; returns where they are, and the last ops."""
        mine, whole = self.shard("kv", self.kv_bytes), self.of_all("kv", "kv of all")
        self.b.input(*mine)
        after = self.b.add(Kind.BARRIER, (self.ranks, "compute"))
        for i in range(2):
            done = self.b.add(
                Kind.ALL_GATHER,
                (self.ranks[None, :], "comm"),
                nbytes=self.total * self.kv_bytes // 2,
                deps=[after[None, :]],
                reads=[_together(mine)] * i,
                writes=[_together(whole)] * i,
            )
            arrived = [done.repeat(len(self.ranks))]
            after = self.emitter.emit((self.code.order,), self.ranks, 0, self.total, arrived)
        return whole, after

    def attend(
        self,
        pass_: Pass,
        half: int,
        arrived: Ints,
        given: list[tuple[Access, str]],
        keys: Access,
        made: list[Access],
    ) -> None:
        """One kernel on every rank and what surrounds it."""
        mine = slice(half * len(self.ranks), (half + 1) * len(self.ranks))
        rows = self.tokens[self.parts[mine]]
        if self.code.enter[pass_]:
            arrived = self.emitter.emit(self.code.enter[pass_], self.ranks, rows, 0, [arrived], half)
        self.emitter.attend(
            self.code.wrapper,
            pass_,
            self.ranks,
            q_rows=rows,
            k_rows=self.total,
            step=half,
            heads=self.heads,
            tile=1 + np.arange(2 * len(self.ranks))[mine],
            deps=[arrived],
            reads=[*(self.half(access, tensor, half) for access, tensor in given), keys],
            writes=made,
        )
        self.emitter.emit((self.code.leave,), self.ranks, rows, 0, step=half)

    def shard(self, tensor: str, width: int) -> Access:
        """Every rank's own tokens."""
        return self.b.buffers(tensor, self.tokens[self.ranks] * width), self.blocks(tensor, self.ranks)

    def of_all(self, tensor: str, name: str) -> Access:
        """All tokens of keys and values, or of their gradients, on every rank."""
        block = self.blocks(tensor, np.array([self.whole])).repeat(len(self.ranks))
        return self.b.buffers(name, np.full(len(self.ranks), self.total * self.kv_bytes)), block

    def half(self, access: Access, tensor: str, half: int) -> Access:
        """Heads or tails of a shard."""
        return access[0], self.blocks(tensor, self.parts[half * len(self.ranks) :][: len(self.ranks)])

    def blocks(self, tensor: str, sets: Ints) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Blocks of all heads."""
        first, count = self.heads[2:] if tensor.endswith("kv") else self.heads[:2]
        return self.b.blocks(tensor, sets, (int(first), int(count)))


def _together(access: Access) -> Access:
    """This access, for one collective of all ranks."""
    return access[0][None, :], access[1][None, :]
