"""Ring attention: key-value shards travel around the ranks while queries stay.

Forward, P steps: rank r computes on the shard of rank r - i in step i while it receives the next one; partial
outputs are merged by log-sum-exp in fp32. Backward: key-value shards travel again, and each shard's gradient
follows one step behind on lanes of its own, accumulated in fp32, for P hops until it is home.

Reference: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv 2310.01889), algorithm 1; zigzag:
Zhu, ring-flash-attention. Differs: merge fused in one pass, double-buffered transfers, no padding of documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsim.cluster import Cluster
from cpsim.errors import ScenarioError
from cpsim.masks import Ints, RangeSets, Slices
from cpsim.schedule import Builder, Int32, Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.sizes import Accumulation, Sizes
from cpsim.tiles import make_tiles
from cpsim.workload import Workload

NOTHING = -1
"""No dependency."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Token sets of P ranks: shards (sets 0 to P-1), their heads (P to 2P-1) and tails (2P to 3P-1)."""

    sets: RangeSets
    halves: bool
    """Under a causal mask a rank's queries see only the heads of earlier ranks' keys, and only tails see later
    ranks': zigzag."""
    packed: bool
    """Heads or tails are scattered over a shard and have to be packed for a kernel call."""


def contiguous_layout(mask: Slices, num_tokens: int, num_ranks: int) -> Layout:
    """One run of tokens per rank."""
    del mask
    return Layout(sharding.contiguous(num_tokens, num_ranks), halves=False, packed=False)


def zigzag_layout(bounds: Ints, mask: Slices, num_ranks: int) -> Layout:
    """Chunks r and 2P - 1 - r of every span between ``bounds`` for rank r."""
    chunks = sharding.document_zigzag(bounds, num_ranks)
    heads, tails = sharding.part(chunks, 0, num_ranks), sharding.part(chunks, num_ranks, num_ranks)
    sets = sharding.stack(sharding.union(heads, tails), heads, tails)
    return Layout(sets, halves=sharding.is_causal(mask), packed=len(bounds) > 2)


def plan_ring(workload: Workload, cluster: Cluster, pass_: Pass) -> Schedule:
    """Ring attention on contiguous shards.

    Under a causal mask rank r has work in r + 1 of the P steps only.
    """
    mask = workload.slices()
    layout = contiguous_layout(mask, workload.num_tokens, cluster.num_gpus)
    return _plan(workload, mask, cluster.num_gpus, layout, pass_)


def plan_zigzag_ring(workload: Workload, cluster: Cluster, pass_: Pass, *, zigzag: str = "document") -> Schedule:
    """Ring attention on zigzag shards, which balance causal masks.

    Args:
        workload, cluster, pass_: the case.
        zigzag: ``document`` cuts every document into 2P chunks, which balances any mix of documents;
            ``sequence`` cuts the packed sequence, which keeps short documents whole.
    """
    mask = workload.slices()
    if zigzag not in ("document", "sequence"):
        raise ScenarioError(f"knobs.zigzag: expected 'document' or 'sequence', got {zigzag!r}")
    bounds = sharding.documents_of(mask) if zigzag == "document" else np.array([0, workload.num_tokens])
    return _plan(workload, mask, cluster.num_gpus, zigzag_layout(bounds, mask, cluster.num_gpus), pass_)


def zigzag_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying."""
    del cluster
    if len(sharding.documents_of(workload.slices())) > 2:
        return ({"zigzag": "document"}, {"zigzag": "sequence"})
    return ({},)


def _plan(workload: Workload, mask: Slices, num_ranks: int, layout: Layout, pass_: Pass) -> Schedule:
    ring = _Ring(workload, mask, num_ranks, layout)
    return ring.forward() if pass_ == "fwd" else ring.backward()


class _Ring:
    """One ring schedule under construction; arrays are ``[ranks]`` or ``[steps, ranks]``."""

    def __init__(self, workload: Workload, mask: Slices, num_ranks: int, layout: Layout) -> None:
        self.layout, self.num_ranks = layout, num_ranks
        self.ranks = np.arange(num_ranks)
        self.next = (self.ranks + 1) % num_ranks
        self.previous = self.ranks - 1
        self.sizes = Sizes(workload)
        self.heads = (0, workload.num_heads, 0, workload.num_kv_heads)
        self.q_bytes = self.sizes.query(workload.num_heads)
        self.kv_bytes = self.sizes.kv(workload.num_kv_heads)
        self.lse_bytes = self.sizes.lse(workload.num_heads)
        steps = np.arange(num_ranks)[:, None]
        self.source = (self.ranks - steps) % num_ranks
        """Rank whose keys are used, ``[steps, ranks]``."""
        self.tails = (self.source > self.ranks) & layout.halves
        """Only tail queries compute."""
        self.key_heads = (self.source < self.ranks) & layout.halves
        """Only head keys are used."""
        query_set = np.where(self.tails, 2 * num_ranks + self.ranks, self.ranks)
        key_set = np.where(self.key_heads, num_ranks + self.source, self.source)
        tiles = make_tiles(mask, layout.sets, query_set, key_set)
        self.tile = 1 + np.arange(num_ranks**2).reshape(num_ranks, num_ranks)
        self.active = tiles.area[self.tile] > 0
        tokens = layout.sets.num_tokens()
        self.tokens = tokens[:num_ranks]
        self.q_rows, self.k_rows = tokens[query_set], tokens[key_set]
        self.query_set, self.key_set = query_set, key_set
        self.tail_rows = tokens[2 * num_ranks :] if layout.halves else np.zeros(num_ranks, np.int64)
        self.rows = Accumulation(self.active, self.q_rows, ~self.tails, self.tail_rows)
        self.sums = self.rows.sums
        self.b = Builder(num_ranks, layout.sets, tiles)
        self.uses_tail_pack = layout.packed and bool(self.tails.any())
        self.uses_head_pack = layout.packed and bool(self.key_heads.any())

    def forward(self) -> Schedule:
        b = self.b
        q_block, kv_block, out_block = self.blocks("q"), self.blocks("kv"), self.blocks("out")
        q = b.buffers("q", self.tokens * self.q_bytes)
        kv = b.buffers("kv", self.tokens * self.kv_bytes)
        summed = self.sizes.accumulator(self.q_bytes) if self.sums.any() else 0
        out = b.buffers("out", self.tokens * (self.q_bytes + self.lse_bytes + summed))
        b.input(q, q_block[self.ranks])
        b.input(kv, kv_block[self.ranks])
        b.output(out, out_block[self.ranks])
        partial = b.buffers("out partial", self.tokens * (self.q_bytes + self.lse_bytes))
        travel = self.travel_buffers("kv ring", self.kv_bytes, self.num_ranks - 1)
        queries = self._pack_tails([(q, q_block)], self.q_bytes)
        merge_bytes = self.rows.traffic(self.q_bytes, self.sizes.accumulator(self.q_bytes), 3 * self.lse_bytes)
        feed = _Feed(self, kv, kv_block, travel)
        for step in range(self.num_ranks):
            feed.send_on(step)
            keys = self._pack_heads(feed, step)
            who = np.flatnonzero(self.active[step])
            first = ~self.sums[step, who]
            target = np.where(first, out[who], partial[who])
            made = out_block[self.query_set[step, who]]
            reads = [self._queries(queries, (q, q_block), step, who), (keys[0][who], keys[1][who])]
            done = b.add(
                Kind.ATTENTION, (who, "compute"), step=step, tile=self.tile[step, who], heads=self.heads,
                deps=feed.ready(step, who), reads=reads, writes=[(target, made)],
            )  # fmt: skip
            feed.read_by(step, who, done)
            who = np.flatnonzero(self.sums[step])
            made = out_block[self.query_set[step, who]]
            b.add(
                Kind.MERGE, (who, "compute"), step=step, heads=self.heads, nbytes=merge_bytes[step, who],
                reads=[(partial[who], made)], updates=[(out[who], made)],
            )  # fmt: skip
        return b.build()

    def backward(self) -> Schedule:
        b = self.b
        names = ("q", "dout", "out")
        blocks = [self.blocks(name) for name in names]
        widths = (self.q_bytes, self.q_bytes, self.q_bytes + self.lse_bytes)
        given = [
            (b.buffers(n, self.tokens * w), block) for n, w, block in zip(names, widths, blocks, strict=True)
        ]
        kv, kv_block = b.buffers("kv", self.tokens * self.kv_bytes), self.blocks("kv")
        for buffer, block in (*given, (kv, kv_block)):
            b.input(buffer, block[self.ranks])
        dq_block, dkv_block = self.blocks("dq"), self.blocks("dkv")
        summed = self.sizes.accumulator(self.q_bytes) if self.sums.any() else 0
        dq = b.buffers("dq", self.tokens * (self.q_bytes + summed))
        dkv = b.buffers("dkv", self.tokens * self.kv_bytes)
        b.output(dq, dq_block[self.ranks])
        b.output(dkv, dkv_block[self.ranks])
        dq_partial = b.buffers("dq partial", self.tokens * self.q_bytes)
        dkv_partial = dkv
        if self.num_ranks > 1:
            dkv_partial = b.buffers("dkv partial", np.full(self.num_ranks, self.tokens.max() * self.kv_bytes))
        queries = self._pack_tails(given, sum(widths))
        dq_bytes = self.rows.traffic(self.q_bytes, self.sizes.accumulator(self.q_bytes), 0)
        feed = _Feed(self, kv, kv_block, self.travel_buffers("kv ring", self.kv_bytes, self.num_ranks - 1))
        gradients = _Gradients(self, dkv_block, dkv)
        for step in range(self.num_ranks):
            feed.send_on(step)
            keys = self._pack_heads(feed, step)
            who = np.flatnonzero(self.active[step])
            target = np.where(self.sums[step, who], dq_partial[who], dq[who])
            reads = [self._queries(queries, g, step, who) for g in given]
            made = dq_block[self.query_set[step, who]], dkv_block[self.key_set[step, who]]
            done = b.add(
                Kind.ATTENTION_BACKWARD, (who, "compute"), step=step, tile=self.tile[step, who],
                heads=self.heads, deps=feed.ready(step, who), reads=[*reads, (keys[0][who], keys[1][who])],
                writes=[(target, made[0]), (dkv_partial[who], made[1])],
            )  # fmt: skip
            feed.read_by(step, who, done)
            add = np.flatnonzero(self.sums[step])
            summed_block = dq_block[self.query_set[step, add]]
            b.add(
                Kind.ACCUMULATE, (add, "compute"), step=step, heads=self.heads, nbytes=dq_bytes[step, add],
                reads=[(dq_partial[add], summed_block)], updates=[(dq[add], summed_block)],
            )  # fmt: skip
            gradients.add_and_send(step, who, dkv_partial)
        gradients.finish()
        return b.build()

    def blocks(self, tensor: str) -> Int32:
        """Blocks of a tensor for every set of the layout, in its order."""
        heads = self.heads[2:] if tensor.endswith("kv") else self.heads[:2]
        return self.b.blocks(tensor, np.arange(len(self.layout.sets)), heads)

    def travel_buffers(self, name: str, width: int, hops: int) -> list[Int32]:
        """Receive buffers of every rank, big enough for every shard: two, or one where one hop is all."""
        nbytes = np.full(self.num_ranks, self.tokens.max() * width)
        return [self.b.buffers(f"{name} {i}", nbytes) for i in range(min(2, hops))]

    def _pack_tails(self, tensors: list[tuple[Int32, Int32]], width: int) -> Int32 | None:
        """Copy the tail rows of query-side tensors side by side, once; None where they lie so already."""
        if not self.uses_tail_pack:
            return None
        who = np.flatnonzero(self.tails.any(axis=0))
        tails = 2 * self.num_ranks + who
        packed = self.b.buffers("query tails", self.tail_rows * width)
        self.b.add(
            Kind.COPY, (who, "compute"), heads=self.heads, nbytes=2 * width * self.tail_rows[who],
            reads=[(t[who], content[tails]) for t, content in tensors],
            writes=[(packed[who], content[tails]) for _, content in tensors],
        )  # fmt: skip
        return packed

    def _queries(
        self, tails: Int32 | None, whole: tuple[Int32, Int32], step: int, who: Ints
    ) -> tuple[Int32, Int32]:
        """What the kernel reads on the query side: packed tails where it computes on tails only."""
        buffer, block = whole[0][who], whole[1][self.query_set[step, who]]
        if tails is None:
            return buffer, block
        return np.where(self.tails[step, who], tails[who], buffer), block

    def _pack_heads(self, feed: _Feed, step: int) -> tuple[Int32, Int32]:
        """What the kernel reads on the key side, ``[ranks]``: of the shard at hand, or its heads packed."""
        holder, block = feed.holder, feed.block[self.key_set[step]]
        if not self.uses_head_pack:
            return holder, block
        if feed.packed is None:
            most = self.layout.sets.num_tokens()[self.num_ranks : 2 * self.num_ranks].max()
            feed.packed = self.b.buffers("key heads", np.full(self.num_ranks, most * self.kv_bytes))
        who = np.flatnonzero(self.key_heads[step] & self.active[step])
        packed = feed.packed
        feed.used[who] = self.b.add(
            Kind.COPY, (who, "compute"), step=step, heads=self.heads,
            nbytes=2 * self.kv_bytes * self.k_rows[step, who], deps=feed.batch(who),
            reads=[(holder[who], block[who])], writes=[(packed[who], block[who])],
        )  # fmt: skip
        return np.where(self.key_heads[step], packed, holder), block


class _Feed:
    """Key-value shards on their way around the ring, double-buffered."""

    def __init__(self, ring: _Ring, kv: Int32, block: Int32, travel: list[Int32]) -> None:
        self.ring, self.block, self.travel = ring, block, travel
        self.holder = kv
        """Buffer of every rank that holds the shard of this step."""
        self.used = np.full(ring.num_ranks, NOTHING)
        """Last op of every rank that read the shard at hand."""
        self.packed: Int32 | None = None
        """Buffers for packed key heads, made when the first step needs them."""
        self._upcoming = kv
        self._arrived = self._sent = np.full(ring.num_ranks, NOTHING)
        self._used_before = self.used.copy()
        self._next_arrived = self._next_sent = self._arrived

    def send_on(self, step: int) -> None:
        """Move to ``step``, and start moving its shards to the next rank while they are computed on."""
        ring = self.ring
        self.holder, self._arrived, self._sent = self._upcoming, self._next_arrived, self._next_sent
        self._used_before, self.used = self.used, np.full(ring.num_ranks, NOTHING)
        if step + 1 == ring.num_ranks:
            return
        self._upcoming = self.travel[step % 2]
        block = self.block[ring.source[step]]
        free = [] if step < 2 else [self._sent[ring.next], self._used_before[ring.next]]
        self._next_sent = ring.b.add(
            Kind.TRANSFER, (ring.ranks, "send"), (ring.next, "recv"), step=step,
            nbytes=ring.tokens[ring.source[step]] * ring.kv_bytes,
            deps=[self._arrived, *free],
            reads=[(self.holder, block)], writes=[(self._upcoming[ring.next], block)],
        )  # fmt: skip
        self._next_arrived = self._next_sent[ring.previous]

    def batch(self, who: Ints) -> list[Ints]:
        """The batched send and receive that brought the shard at hand: one launch, waited for as a whole."""
        return [self._arrived[who], self._sent[who]]

    def ready(self, step: int, who: Ints) -> list[Ints]:
        """What a kernel waits for, unless it reads packed copies: packing has waited."""
        return [np.where(self._direct(step, who), after, NOTHING) for after in self.batch(who)]

    def read_by(self, step: int, who: Ints, kernels: Ints) -> None:
        """These kernels read the shards of this step, unless they read packed copies."""
        direct = self._direct(step, who)
        self.used[who[direct]] = kernels[direct]

    def _direct(self, step: int, who: Ints) -> NDArray[np.bool_]:
        """Ranks whose kernels read the shard itself."""
        return np.full(len(who), True) if self.packed is None else ~self.ring.key_heads[step, who]


class _Gradients:
    """Key-value gradients on their way around the ring, one step behind the keys, summed in fp32."""

    def __init__(self, ring: _Ring, block: Int32, home: Int32) -> None:
        self.ring, self.block, self.home = ring, block, home
        self.width = ring.sizes.accumulator(ring.kv_bytes)
        self.travel = ring.travel_buffers("dkv ring", self.width, ring.num_ranks)
        self._arrived = self._sent = np.full(ring.num_ranks, NOTHING)

    def add_and_send(self, step: int, who: Ints, partial: Int32) -> None:
        """Add this step's gradients to those that came with the shard, and send the sum on."""
        ring, b = self.ring, self.ring.b
        if ring.num_ranks == 1:
            return
        block, summed = self.block[ring.source[step]], self.travel[step % 2]
        made = self.block[ring.key_set[step, who]]
        kept = [(summed[who], made)]
        read = 0 if step == 0 else self.width
        added = np.full(ring.num_ranks, NOTHING)
        added[who] = b.add(
            Kind.ACCUMULATE, (who, "compute"), step=step, heads=ring.heads,
            nbytes=ring.k_rows[step, who] * (ring.kv_bytes + read + self.width), deps=[self._arrived[who]],
            reads=[(partial[who], made)],
            writes=kept if step == 0 else (), updates=() if step == 0 else kept,
        )  # fmt: skip
        target = self.travel[(step + 1) % 2][ring.next]
        free = [self._sent[ring.next]] if ring.num_ranks > 2 else []
        sent = b.add(
            Kind.TRANSFER, (ring.ranks, "grad_send"), (ring.next, "grad_recv"), step=step,
            nbytes=ring.tokens[ring.source[step]] * self.width,
            deps=[np.where(added >= 0, added, self._arrived), *free],
            reads=[(summed, block)], writes=[(target, block)],
        )  # fmt: skip
        self._sent, self._arrived = sent, sent[ring.previous]

    def finish(self) -> None:
        """Cast the gradients that came home."""
        ring = self.ring
        if ring.num_ranks == 1:
            return
        last = self.travel[ring.num_ranks % 2]
        ring.b.add(
            Kind.COPY, (ring.ranks, "compute"), step=ring.num_ranks, heads=ring.heads,
            nbytes=ring.tokens * (self.width + ring.kv_bytes), deps=[self._arrived, self._sent],
            reads=[(last, self.block[ring.ranks])], writes=[(self.home, self.block[ring.ranks])],
        )  # fmt: skip
