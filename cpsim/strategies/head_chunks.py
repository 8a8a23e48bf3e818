"""Ulysses some heads at a time: chunks of a rank's heads take turns in the same buffers, so that exchanged tensors need
a fraction of the memory, and one chunk's all-to-alls overlap the attention of another.

Keys and values travel once, with the first chunk whose queries see them. The backward pass brings queries, keys and
values again, with the gradients of outputs; outputs and log-sum-exps stay where they were computed. Gradients of keys
that several chunks see are summed in fp32 before they travel.

Tokens are counted by groups of heads (``Workload.by_group``): every chunk of every rank is one group, so that one chunk
of all ranks is a set of tokens like any other.

Reference: Ghadia et al. 2026, "Untied Ulysses" (arXiv 2602.21196), UPipe. Differs: two sets of buffers, where UPipe has
one and no overlap (``buffers: 1``); projections are not part of it; outputs are not sent a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints, RangeSets
from cpsim.masks.tiles import make_tiles
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import Int32, Kind, Pass, Schedule
from cpsim.strategies.sizes import Sizes


def plan_head_chunks(workload: Workload, num_ranks: int, pass_: Pass, chunks: int, buffers: int) -> Schedule:
    """Ulysses with the heads of every rank in chunks.

    Args:
        workload, pass_: the case.
        num_ranks: which divide its tokens and heads.
        chunks: of a rank's heads.
        buffers: chunks that have buffers at a time.

    Raises:
        InfeasibleError: the chunks do not divide the heads of a rank.
    """
    heads, kv_heads, groups = workload.num_heads // num_ranks, workload.num_kv_heads, num_ranks * chunks
    if heads % chunks or (kv_heads % groups and groups % kv_heads):
        raise InfeasibleError(
            f"ulysses with head_chunks {chunks} needs it to divide the heads of a rank, and those of all to divide "
            f"key-value heads or the reverse, got {heads} query heads of a rank and {kv_heads} kv_heads"
        )
    plan = _Chunked(workload.by_group(groups), num_ranks, chunks, min(buffers, chunks))
    return plan.forward() if pass_ == "fwd" else plan.backward()


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Who has which queries, or keys; sets of tokens are ``[ranks]``."""

    own: Ints
    """A rank's own tokens, all heads."""
    parts: list[Ints]
    """Of these, the heads of every chunk."""
    whole: Ints
    """All tokens of the heads that a rank computes with, ``[chunks, ranks]``."""
    every: int
    """Chunks in a row that have the same."""
    slots: int
    """Buffers that chunks have in turns."""
    replicas: int
    """Ranks that have the same."""

    def begins(self, chunk: int) -> bool:
        """Whether a chunk is the first that has its heads."""
        return 0 <= chunk < len(self.parts) and chunk % self.every == 0

    def ends(self, chunk: int) -> bool:
        """Whether it is the last."""
        return 0 <= chunk < len(self.parts) and (chunk + 1) % self.every == 0

    def slot(self, chunk: int) -> int:
        """The buffer of a chunk."""
        return chunk // self.every % self.slots


class _Chunked:
    """One schedule under construction; arrays are ``[ranks]``."""

    def __init__(self, w: Workload, num_ranks: int, chunks: int, buffers: int) -> None:
        """``w``: by group of heads; group ``r chunks + c`` is chunk c of rank r."""
        self.chunks, self.ahead, self.ranks = chunks, buffers - 1, np.arange(num_ranks)
        tokens, groups = w.num_tokens // w.head_groups, np.arange(w.head_groups)
        keys, shared = groups // w.groups_per_kv * w.groups_per_kv, min(w.groups_per_kv, chunks)
        sets = [_ranges(groups[[g]], 0, tokens, tokens) for g in groups]  # set g is all of group g

        def own(heads: Ints) -> Ints:
            share = tokens // num_ranks
            sets.extend(_ranges(np.unique(heads), r * share, share, tokens) for r in range(num_ranks))
            return np.arange(len(sets) - num_ranks, len(sets))

        def side(of: Ints, every: int, slots: int, replicas: int) -> _Side:
            parts = [own(of[chunk::chunks]) for chunk in range(chunks)]
            return _Side(own(of), parts, of.reshape(num_ranks, chunks).T, every, slots, replicas)

        self.queries = side(groups, 1, buffers, 1)
        self.keys = side(keys, shared, min(buffers, chunks // shared), max(1, w.groups_per_kv // chunks))
        made = RangeSets(np.cumsum([0, *map(len, sets)]), np.concatenate(sets))
        self.b = Builder(num_ranks, made, make_tiles(w.slices(), made, groups, keys), head_groups=w.head_groups)
        self.tile, self.heads, sizes = 1 + self.queries.whole, (0, w.num_heads, 0, w.num_kv_heads), Sizes(w)
        q, o, kv = sizes.query(w.num_heads), sizes.output(w.num_heads), sizes.kv(w.num_kv_heads)
        self.width = {"q": q, "o": o, "out": o + sizes.lse(w.num_heads), "dout": o, "dq": q, "kv": kv, "dkv": kv}
        """Bytes of one token of every tensor, of one group."""
        self.rows, self.wide = made.num_tokens(), sizes.accumulator(kv)
        self.out = [self.buffers("out of group", ["out"], self.queries.whole[0]) for _ in range(chunks)]

    def forward(self) -> Schedule:
        """Queries, keys and values there, outputs home."""
        home = _Home(self, self.queries, "o")

        def attend(chunk: int, given: list[Access], arrived: Ints) -> None:
            out = self.out[chunk], self.block("out", self.queries.whole[chunk])
            home.send(chunk, out, self.attention(Kind.ATTENTION, chunk, arrived, given, [out]))

        return self.plan(["q"], attend, [home])

    def backward(self) -> Schedule:
        """Queries, keys, values and gradients of outputs there, other gradients home."""
        queries, keys = self.queries, self.keys
        dq_home, dkv_home = _Home(self, queries, "dq"), _Home(self, keys, "dkv")
        dq = [self.buffers("dq of group", ["dq"], queries.whole[0]) for _ in range(queries.slots)]
        dkv = [self.buffers("dkv of group", ["dkv"], keys.whole[0]) for _ in range(keys.slots)]
        narrow, wide = self.nbytes(["dkv"], keys.whole[0]), self.rows[keys.whole[0]] * self.wide
        total = self.b.buffers("dkv sum", wide * (keys.every > 1))
        for chunk, buffers in enumerate(self.out):
            self.b.input(buffers, self.block("out", queries.whole[chunk]))

        def attend(chunk: int, given: list[Access], arrived: Ints) -> None:
            out = self.out[chunk], self.block("out", queries.whole[chunk])
            made = dq[queries.slot(chunk)], self.block("dq", queries.whole[chunk])
            block = self.block("dkv", keys.whole[chunk])
            part, summed = (dkv[keys.slot(chunk)], block), (total, block)
            done = self.attention(Kind.ATTENTION_BACKWARD, chunk, arrived, [*given, out], [made, part])
            dq_home.send(chunk, made, done)
            done = np.full_like(done, NOTHING)  # gradients of queries, which travel ahead, have waited for the kernel
            if keys.every > 1:
                begins, ends = keys.begins(chunk), keys.ends(chunk)
                writes, updates = ([summed], []) if begins else ([], [summed])
                moved = narrow + wide * (len(writes) + 2 * len(updates))
                self.work(Kind.ACCUMULATE, chunk, moved, reads=[part], writes=writes, updates=updates)
                done = self.work(Kind.COPY, chunk, narrow + wide, reads=[summed], writes=[part]) if ends else done
            dkv_home.send(chunk, part, done)

        return self.plan(["q", "dout"], attend, [dq_home, dkv_home])

    def plan(
        self, given: Sequence[str], attend: Callable[[int, list[Access], Ints], None], home: Sequence[_Home]
    ) -> Schedule:
        """All chunks; packs run ahead, and what came home waits, as far as there are buffers."""
        keys, queries = _There(self, self.keys, ["kv"]), _There(self, self.queries, given)
        for chunk in range(-self.ahead, self.chunks + self.ahead):
            for way in (keys, queries):
                way.pack(chunk + self.ahead)
            for way in (keys, queries):
                way.send(chunk + min(self.ahead, 1))
            if 0 <= chunk < self.chunks:
                attend(chunk, [*queries.held(chunk), *keys.held(chunk)], queries.arrived[chunk])
            for back in home:
                back.unpack(chunk - self.ahead)
        return self.b.build()

    def block(self, tensor: str, sets: Ints) -> Int32:
        """A block of every rank."""
        return self.b.blocks(tensor, sets, self.heads[2:] if tensor.endswith("kv") else self.heads[:2])

    def nbytes(self, tensors: Sequence[str], sets: Ints) -> Ints:
        """Of such blocks."""
        return np.asarray(self.rows[sets] * sum(self.width[t] for t in tensors))

    def buffers(self, name: str, tensors: Sequence[str], sets: Ints) -> Int32:
        """A buffer of every rank for such blocks."""
        return self.b.buffers(name, self.nbytes(tensors, sets))

    def work(
        self,
        kind: Kind,
        chunk: int,
        nbytes: Ints,
        *after: Ints,
        reads: Sequence[Access],
        writes: Sequence[Access] = (),
        updates: Sequence[Access] = (),
    ) -> Ints:
        """An op of every rank that moves or adds, with memory traffic of ``nbytes``; returns the ops, ``[ranks]``."""
        return self.b.add(
            kind,
            (self.ranks, "compute"),
            step=chunk,
            heads=self.heads,
            nbytes=nbytes,
            deps=after,
            reads=reads,
            writes=writes,
            updates=updates,
        )

    def exchange(self, chunk: int, nbytes: Ints, source: list[Access], target: list[Access], after: Ints) -> Ints:
        """An all-to-all, after an op of every rank; returns it for every rank, ``[ranks]``."""
        reads, writes = ([(buffers[None], blocks[None]) for buffers, blocks in side] for side in (source, target))
        lanes, deps = (self.ranks[None], "comm"), [after[None]]
        moved = self.b.add(Kind.ALL_TO_ALL, lanes, step=chunk, nbytes=nbytes[:1], deps=deps, reads=reads, writes=writes)
        return moved.repeat(len(self.ranks))

    def attention(self, kind: Kind, chunk: int, after: Ints, reads: list[Access], writes: list[Access]) -> Ints:
        """Attention over all tokens; returns the ops, ``[ranks]``."""
        lanes, tile = (self.ranks, "compute"), self.tile[chunk]
        return self.b.add(
            kind, lanes, step=chunk, tile=tile, heads=self.heads, deps=[after], reads=reads, writes=writes
        )


class _There:
    """Tensors on their way from the ranks of their tokens to those of their heads."""

    def __init__(self, c: _Chunked, side: _Side, tensors: Sequence[str]) -> None:
        self.c, self.side, self.tensors = c, side, tensors
        self.own = [c.buffers(t, [t], side.own) for t in tensors]
        for buffers, block in zip(self.own, self.blocks(side.own), strict=True):
            c.b.input(buffers, block)
        self.by_rank, self.of_group = (
            [c.buffers(f"{tensors[0]} {what}", tensors, side.whole[0]) for _ in range(side.slots)]
            for what in ("by rank", "of group")
        )
        self.ready: dict[int, Ints] = {}
        self.arrived: dict[int, Ints] = {}
        """Ops of every chunk, ``[ranks]``."""

    def blocks(self, sets: Ints) -> list[Int32]:
        """Blocks of all tensors."""
        return [self.c.block(t, sets) for t in self.tensors]

    def pack(self, chunk: int) -> None:
        """Order by rank what a chunk is the first to need."""
        if self.side.begins(chunk):
            part = self.side.parts[chunk]
            nbytes = self.c.nbytes(self.tensors, part) + self.c.nbytes(self.tensors, self.side.whole[chunk])
            own, packed = [*zip(self.own, self.blocks(part), strict=True)], self.packed(chunk)
            self.ready[chunk] = self.c.work(Kind.COPY, chunk, nbytes, reads=own, writes=packed)

    def packed(self, chunk: int) -> list[Access]:
        """Where it is then."""
        return [(self.by_rank[self.side.slot(chunk)], block) for block in self.blocks(self.side.parts[chunk])]

    def held(self, chunk: int) -> list[Access]:
        """Where it is in the end."""
        return [(self.of_group[self.side.slot(chunk)], block) for block in self.blocks(self.side.whole[chunk])]

    def send(self, chunk: int) -> None:
        """Exchange it."""
        if self.side.begins(chunk):
            nbytes, ready = self.c.nbytes(self.tensors, self.side.whole[chunk]), self.ready[chunk]
            self.arrived[chunk] = self.c.exchange(chunk, nbytes, self.packed(chunk), self.held(chunk), ready)


class _Home:
    """A result on its way from the ranks of its heads to those of its tokens."""

    def __init__(self, c: _Chunked, side: _Side, tensor: str) -> None:
        self.c, self.side, self.tensor = c, side, tensor
        self.own = c.buffers(tensor, [tensor], side.own)
        c.b.output(self.own, c.block(tensor, side.own))
        self.by_rank = [c.buffers(f"{tensor} by rank", [tensor], side.whole[0]) for _ in range(side.slots)]
        self.returned: dict[int, Ints] = {}
        """Ops of every chunk, ``[ranks]``."""

    def send(self, chunk: int, made: Access, done: Ints) -> None:
        """Exchange what a chunk is the last to add to."""
        if self.side.ends(chunk):
            nbytes = self.c.nbytes([self.tensor], self.side.whole[chunk])
            self.returned[chunk] = self.c.exchange(chunk, nbytes, [made], [self.came(chunk)], done)

    def came(self, chunk: int) -> Access:
        """Where it is then."""
        return self.by_rank[self.side.slot(chunk)], self.c.block(self.tensor, self.side.parts[chunk])

    def unpack(self, chunk: int) -> None:
        """Order it as a rank's own tokens lie, and sum the gradients of replicas."""
        if self.side.ends(chunk):
            source, sets = self.came(chunk), (self.side.parts[chunk], self.side.whole[chunk])
            nbytes = sum((self.c.nbytes([self.tensor], s) for s in sets), np.zeros_like(self.c.ranks))
            kind = Kind.COPY if self.side.replicas == 1 else Kind.ACCUMULATE
            own = self.own, source[1]
            self.c.work(kind, chunk, nbytes, self.returned[chunk], reads=[source], writes=[own])


def _ranges(groups: Ints, first: int, count: int, tokens: int) -> Ints:
    """``count`` tokens from the ``first`` on of every one of some groups of so many ``tokens``, ``[groups, 2]``."""
    start = groups * tokens + first
    return np.stack([start, start + count], axis=1)
