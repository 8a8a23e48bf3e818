"""Attention to chosen keys under context parallelism: what is exchanged before a query can choose, and then.

Every rank scores its own queries against the candidates of all ranks, which are gathered: the indexer's keys of
``dsa``, compressed keys of ``nsa``, means of blocks of ``moba``. So choices are made once, whatever follows:

* ``none``, ``allgather`` and ``ulysses`` move keys as they do for dense attention (``plan_chosen`` adds to their
  schedule); with ``ulysses`` choices follow their queries to whoever has the heads.
* ``allgather`` with ``keys: chosen`` (``plan_fetch``) brings the keys that some query of a rank has chosen, and no
  others.

Choices are kept for the backward pass. Indexers are trained by a loss of their own, which is not here.

Reference: MoBA (arXiv 2502.13189, section 2.2 and its code: all keys gathered, choice by head); DeepSeek-V3.2 (arXiv
2512.02556, section 2.1). Differs: neither says how its context parallelism exchanges keys; candidates alone
are gathered first, so that choosing runs beside the exchange of keys.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints, RangeSets, sets_of
from cpsim.masks.tiles import join_tiles, make_tiles
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import ATTENTION_KINDS, Int32, Kind, Pass, Schedule, is_one_of
from cpsim.strategies import sharding
from cpsim.strategies.sizes import Sizes

Bools = NDArray[np.bool_]
ADAPTED = ("none", "allgather", "ulysses")
"""Strategies that move keys as for dense attention; each of their attention ops sees all keys of its queries."""


class _Choice:
    """What comes before attention, forward, on ranks with equally many tokens."""

    def __init__(self, b: Builder, workload: Workload, own: Ints, whole: Ints) -> None:
        """
        Args:
            b: the schedule under construction.
            workload: the case.
            own: token set of every rank's own tokens, ``[ranks]``.
            whole: token set of all tokens, ``[1]``.
        """
        assert workload.sparse is not None
        self.b, self.workload, self.sparse, self.own, self.whole = b, workload, workload.sparse, own, whole
        self.ranks = np.arange(len(own))
        self.tokens = workload.num_tokens // len(own)
        self.nbytes = self.sparse.choice_bytes(workload.num_heads, workload.num_kv_heads)
        """Of one query's choice."""

    def kept(self, name: str, sets: Ints, tokens: int) -> Access:
        """A buffer of every rank for the choices of some queries."""
        return self.b.buffers(name, np.full(len(self.ranks), tokens * self.nbytes)), self.b.blocks(
            "choice", sets, (0, 1)
        )

    def gather(self, kv: Access) -> tuple[Access, Ints]:
        """Candidates of all ranks on every rank, and the last ops before they are there."""
        b, w, ranks = self.b, self.workload, self.ranks
        of = w.num_kv_heads, w.head_dim, w.values, w.bytes_per_element
        mine = int(self.sparse.candidate_bytes(self.tokens, *of))
        own = b.buffers("candidates", np.full(len(ranks), mine)), b.blocks("candidates", self.own, (0, 1))
        done = np.full(len(ranks), NOTHING)
        if self.sparse.kind == "dsa":  # keys of the indexer are made with those of attention
            b.input(*own)
        else:
            moved = self.tokens * Sizes(w).kv(w.num_kv_heads) + mine
            done = b.add(Kind.ELEMENTWISE, (ranks, "compute"), nbytes=moved, reads=[kv], writes=[own])
        if len(ranks) == 1:
            return own, done
        every = np.broadcast_to(b.blocks("candidates", self.whole, (0, 1)), len(ranks))
        there = b.buffers("candidates of all", np.full(len(ranks), mine * len(ranks))), every
        one = b.add(
            Kind.ALL_GATHER,
            (ranks[None], "comm"),
            nbytes=mine * len(ranks),
            deps=[done[None]],
            reads=[(own[0][None], own[1][None])],
            writes=[(there[0][None], there[1][None])],
        )
        return there, np.repeat(one, len(ranks))

    def select(self, q: Access, candidates: tuple[Access, Ints], tile: Ints) -> tuple[Access, Ints]:
        """Every rank's choices for its own queries."""
        w, made = self.workload, self.kept("choice", self.own, self.tokens)
        done = self.b.add(
            Kind.SELECT,
            (self.ranks, "compute"),
            tile=tile,
            heads=(0, w.num_heads, 0, w.num_kv_heads),
            deps=[candidates[1]],
            reads=[q, candidates[0]],
            writes=[made],
        )
        return made, done

    def spread(self, choice: Access, done: Ints) -> tuple[Access, Ints]:
        """Choices for all queries on every rank: of an indexer's all of them, otherwise those of the rank's heads."""
        w, ranks, size = self.workload, self.ranks, len(self.ranks)
        total = w.num_tokens * self.nbytes
        choosers = self.sparse.choosers(w.num_heads, w.num_kv_heads)
        everywhere = choosers == 1
        sent = total if everywhere else total // size * max(1, size // choosers)
        every = np.broadcast_to(self.b.blocks("choice", self.whole, (0, 1)), size)
        there = self.b.buffers("choice of all", np.full(size, sent)), every
        one = self.b.add(
            Kind.ALL_GATHER if everywhere else Kind.ALL_TO_ALL,
            (ranks[None], "comm"),
            nbytes=sent,
            deps=[done[None]],
            reads=[(choice[0][None], choice[1][None])],
            writes=[(there[0][None], there[1][None])],
        )
        return there, np.repeat(one, size)


def plan_chosen(dense: Schedule, workload: Workload, pass_: Pass, *, by_head: bool) -> Schedule:
    """A strategy's schedule for dense attention with the choice of keys before its attention.

    Args:
        dense: of one of ``ADAPTED``, of all unmasked pairs.
        workload: the case; a list of blocks is chosen before, so that nothing is added.
        pass_: forward or backward.
        by_head: ranks attend for all queries, with some of the heads.
    """
    assert workload.sparse is not None
    if not workload.sparse.scores:
        return dense
    own, size = _own(dense), dense.num_ranks
    sets = sharding.stack(dense.sets, own, sharding.contiguous(workload.num_tokens, 1))
    mine, whole = len(dense.sets) + np.arange(size), np.array([len(sets) - 1])
    scored = make_tiles(workload.slices(), sets, mine, np.repeat(whole, size))
    b = Builder(size, sets, join_tiles([dense.tiles, scored]))
    b.adopt(dense)
    b.input(*dense.inputs.T)
    b.output(*dense.outputs.T)
    choice = _Choice(b, workload, mine, whole)
    attends = np.flatnonzero(is_one_of(dense.kind, ATTENTION_KINDS))
    first, moved, waits = int(attends[0]), np.full(len(dense), NOTHING), list[tuple[int, int]]()
    spreads = by_head and size > 1
    if pass_ == "bwd":
        tokens = workload.num_tokens if spreads else choice.tokens
        kept = choice.kept("choice", np.repeat(whole, size) if spreads else mine, tokens)
        b.input(*kept)
        b.take(dense, 0, first, moved, ())
    else:
        q, kv = (
            (_inputs_of(dense, tensor), b.blocks(tensor, mine, (0, count)))
            for tensor, count in (("q", workload.num_heads), ("kv", workload.num_kv_heads))
        )
        candidates = choice.gather(kv)
        b.take(dense, 0, first, moved, ())
        kept, done = choice.select(q, candidates, len(dense.tiles.area) + np.arange(size))
        if spreads:
            kept, done = choice.spread(kept, done)
        ranks = dense.lane_rank[dense.lane_start[attends]]
        waits = [(op, int(done[rank])) for op, rank in zip(attends.tolist(), ranks.tolist(), strict=True)]
    b.take(dense, first, len(dense), moved, waits)
    on = dense.lane_rank[dense.lane_start[attends]]
    b.also_reads(moved[attends], (kept[0][on], kept[1][on]))
    return replace(b.build(), planning=dense.planning)


def _inputs_of(s: Schedule, tensor: str) -> Int32:
    """Buffer of every rank that holds a tensor of its own tokens, ``[ranks]``."""
    found = np.full(s.num_ranks, NOTHING, np.int32)
    for buffer, block in s.inputs.tolist():
        if s.block_tensors[s.block_tensor[block]] == tensor:
            found[s.buffer_rank[buffer]] = buffer
    return found


def _own(s: Schedule) -> RangeSets:
    """Tokens of every rank: those of the queries that it is given."""
    held = {
        int(s.buffer_rank[buffer]): s.sets.of(int(s.block_set[block]))
        for buffer, block in s.inputs.tolist()
        if s.block_tensors[s.block_tensor[block]] in ("q", "dout")
    }
    ranges = [held[rank] for rank in range(s.num_ranks)]
    return RangeSets(np.cumsum([0, *map(len, ranges)]), np.concatenate(ranges))


def plan_fetch(workload: Workload, shards: RangeSets, pass_: Pass) -> Schedule:
    """Queries stay; of other ranks' keys those come that some query of a rank has chosen.

    How many these are is an expectation (``Sparse.chances``); which ones they are, the schedule states by
    spreading the expected number over the units that they may be.

    Args:
        workload: the case.
        shards: tokens of every rank, equally many.
        pass_: forward or backward.

    Raises:
        InfeasibleError: nothing is chosen.
    """
    if workload.sparse is None:
        raise InfeasibleError("keys chosen: queries see all keys here; name sparse, or leave keys out")
    return plan_wanted(workload, shards, expected_keys(workload, shards), pass_)


def expected_keys(workload: Workload, shards: RangeSets) -> RangeSets:
    """Keys that queries of every rank are expected to choose, its own among them; see ``plan_fetch``."""
    sparse = workload.sparse
    assert sparse is not None
    lengths = np.array(workload.documents if workload.mask == "causal_document" else (workload.num_tokens,))
    ends = np.cumsum(lengths)
    per_kv = max(1, sparse.choosers(workload.num_heads, workload.num_kv_heads) // workload.num_kv_heads)
    found: list[Ints] = []
    for rank in range(len(shards)):
        ranges, units, left = shards.of(rank), list[Ints](), 0.0
        for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
            low, high = np.maximum(ranges[:, 0], start), np.minimum(ranges[:, 1], end)
            if not (low < high).any():
                continue
            wanted = sparse.chances(low[low < high] - start, high[low < high] - start, per_kv)
            total = left + np.cumsum(wanted)
            taken = np.flatnonzero((np.floor(total) > np.floor(total - wanted)) | (wanted == 1.0))
            left = float(total[-1] % 1.0)
            last = int(high[low < high].max())
            units.append(
                np.stack([start + taken * sparse.unit, np.minimum(start + (taken + 1) * sparse.unit, last)], 1)
            )
        found.append(np.concatenate([ranges, *units]))
    sets = RangeSets(np.cumsum([0, *map(len, found)]), np.concatenate(found))
    edges = sharding.edges_of(sets)
    return sets_of(_cells(sets, edges), edges)


def _cells(sets: RangeSets, edges: Ints) -> Bools:
    """Which cells each set has, ``[sets, cells]``; ranges of a set may overlap."""
    count = np.zeros((len(sets), len(edges)), np.int64)
    owner = np.repeat(np.arange(len(sets)), np.diff(sets.start))
    np.add.at(count, (owner, np.searchsorted(edges, sets.ranges[:, 0])), 1)
    np.add.at(count, (owner, np.searchsorted(edges, sets.ranges[:, 1])), -1)
    return np.asarray(np.cumsum(count, axis=1)[:, :-1] > 0)


def plan_wanted(workload: Workload, shards: RangeSets, wanted: RangeSets, pass_: Pass) -> Schedule:
    """The schedule of ``plan_fetch`` for the keys that every rank wants, its own among them.

    Args:
        workload: the case.
        shards: tokens of every rank.
        wanted: keys of every rank.
        pass_: forward or backward.
    """
    plan = _Fetch(workload, shards, wanted)
    return plan.forward() if pass_ == "fwd" else plan.backward()


class _Fetch:
    """One schedule of fetched keys under construction."""

    def __init__(self, workload: Workload, shards: RangeSets, wanted: RangeSets) -> None:
        size = len(shards)
        self.workload, self.sizes, self.ranks = workload, Sizes(workload), np.arange(size)
        edges = sharding.edges_of(shards, wanted)
        tokens, own, wants = np.diff(edges), _cells(shards, edges), _cells(wanted, edges)
        asked = wants & ~own
        lent = np.array([own[s] & asked.any(axis=0) for s in range(size)])
        self.moved = (own * tokens).astype(np.int64) @ asked.T.astype(np.int64)
        """Keys that go from each rank to each, ``[ranks, ranks]``."""
        whole = sharding.contiguous(workload.num_tokens, 1)
        sets = sharding.stack(shards, sets_of(own | asked, edges), sets_of(asked, edges), sets_of(lent, edges), whole)
        self.own, self.seen, self.asked, self.lent = (i * size + self.ranks for i in range(4))
        self.whole = np.array([4 * size])
        mask = workload.slices()
        scored = make_tiles(mask, sets, self.own, np.repeat(self.whole, size))
        attended = make_tiles(mask, sets, self.own, self.seen)
        self.b = Builder(size, sets, join_tiles([scored, attended]))
        self.scored, self.attended = 1 + self.ranks, 1 + size + self.ranks
        self.tokens, self.num_seen = shards.num_tokens(), sets.num_tokens()[self.seen]
        self.heads = 0, workload.num_heads, 0, workload.num_kv_heads
        self.kv_bytes = self.sizes.kv(workload.num_kv_heads)
        self.choice = _Choice(self.b, workload, self.own, self.whole)

    def forward(self) -> Schedule:
        b, sparse = self.b, self.choice.sparse
        q, kv = self._given("q", self.sizes.query), self._given("kv", self.sizes.kv)
        out = self._shard("out", self.sizes.output(self.workload.num_heads) + self.sizes.lse(self.workload.num_heads))
        b.output(*out)
        ready, reads = np.full(len(self.ranks), NOTHING), [q, kv]
        if sparse.scores:
            chosen, ready = self.choice.select(q, self.choice.gather(kv), self.scored)
            reads.append(chosen)
        fetched, arrived = self._fetch(kv, ready)
        b.add(
            Kind.ATTENTION,
            (self.ranks, "compute"),
            tile=self.attended,
            heads=self.heads,
            deps=[arrived],
            reads=[*reads, *fetched],
            writes=[out],
        )
        return b.build()

    def backward(self) -> Schedule:
        b, w, accumulator = self.b, self.workload, self.sizes.accumulator
        kv = self._given("kv", self.sizes.kv)
        given = [self._given("q", self.sizes.query), kv, self._given("dout", self.sizes.output)]
        out = self._shard("out", self.sizes.output(w.num_heads) + self.sizes.lse(w.num_heads))
        b.input(*out)
        if self.choice.sparse.scores:
            kept = self.choice.kept("choice", self.own, self.choice.tokens)
            b.input(*kept)
            given.append(kept)
        dq, dkv = self._shard("dq", self.sizes.query(w.num_heads)), self._shard("dkv", self.kv_bytes)
        for access in (dq, dkv):
            b.output(*access)
        fetched, arrived = self._fetch(kv, np.full(len(self.ranks), NOTHING))
        whole_heads = (0, w.num_kv_heads)
        partial = b.buffers("dkv of keys seen", self.num_seen * accumulator(self.kv_bytes))
        done = b.add(
            Kind.ATTENTION_BACKWARD,
            (self.ranks, "compute"),
            tile=self.attended,
            heads=self.heads,
            deps=[arrived],
            reads=[*given, out, *fetched],
            writes=[dq, (partial, b.blocks("dkv", self.seen, whole_heads))],
        )
        mine = partial, b.blocks("dkv", self.own, whole_heads)
        returned = self.moved.sum(axis=1) * accumulator(self.kv_bytes)
        reads = [mine]
        if self.moved.any():
            back = b.buffers("dkv of others", returned), b.blocks("dkv", self.lent, whole_heads)
            sent = partial, b.blocks("dkv", self.asked, whole_heads)
            done = self._exchange(self.moved.T * accumulator(self.kv_bytes), sent, back, done)
            reads.append(back)
        rows = self.tokens * (accumulator(self.kv_bytes) + self.kv_bytes)
        b.add(
            Kind.ACCUMULATE,
            (self.ranks, "compute"),
            nbytes=rows + returned,
            deps=[done],
            reads=reads,
            writes=[dkv],
        )
        return b.build()

    def _shard(self, tensor: str, width: int) -> Access:
        heads = self.heads[2:] if tensor.endswith("kv") else self.heads[:2]
        return self.b.buffers(tensor, self.tokens * width), self.b.blocks(tensor, self.own, (heads[0], heads[1]))

    def _given(self, tensor: str, width: object) -> Access:
        heads = self.workload.num_kv_heads if tensor == "kv" else self.workload.num_heads
        access = self._shard(tensor, width(heads))  # type: ignore[operator]
        self.b.input(*access)
        return access

    def _fetch(self, kv: Access, ready: Ints) -> tuple[list[Access], Ints]:
        """Keys of others that a rank has asked for, and the op after which they are there."""
        if not self.moved.any():
            return [], ready
        sparse, w = self.choice.sparse, self.workload
        if sparse.scores and (ready >= 0).all():  # who wants which units: one bit of each for every key-value head
            bits = -(-w.num_tokens // sparse.unit) * w.num_kv_heads
            asked = self.b.add(Kind.ALL_TO_ALL, (self.ranks[None], "comm"), nbytes=-(-bits // 8), deps=[ready[None]])
            ready = np.repeat(asked, len(self.ranks))
        nbytes = self.moved * self.kv_bytes
        there = self.b.buffers("kv of others", nbytes.sum(axis=0)), self.b.blocks("kv", self.asked, self.heads[2:])
        return [there], self._exchange(nbytes, kv, there, ready)

    def _exchange(self, nbytes: Ints, source: Access, target: Access, ready: Ints) -> Ints:
        """An uneven all-to-all; returns its op for every rank."""
        op = self.b.add(
            Kind.ALL_TO_ALL,
            (self.ranks[None], "comm"),
            nbytes=int(nbytes.sum(axis=0).max()),
            deps=[ready[None]],
            reads=[(source[0][None], source[1][None])],
            writes=[(target[0][None], target[1][None])],
        )
        self.b.route(int(op[0]), self.ranks, nbytes)
        return np.repeat(op, len(self.ranks))
