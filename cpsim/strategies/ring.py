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
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsim.builder import NOTHING, Access, Builder
from cpsim.cluster import Cluster
from cpsim.errors import ScenarioError
from cpsim.masks import Ints, RangeSets
from cpsim.schedule import Int32, Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.sizes import Accumulation, Sizes
from cpsim.tiles import Tiles, make_tiles
from cpsim.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Who holds which tokens and computes what, the same forward and backward; arrays are ``[steps, ranks]``."""

    sets: RangeSets
    """Shards (sets 0 to P-1), and under zigzag their heads (P to 2P-1) and tails (2P to 3P-1)."""
    scattered: bool
    """Heads or tails are scattered over a shard and have to be packed for a kernel call."""
    tails: NDArray[np.bool_]
    """Only tail queries compute: under a causal mask they alone see later ranks' keys."""
    key_heads: NDArray[np.bool_]
    """Only head keys are used: under a causal mask no others of earlier ranks are seen."""
    query_set: Ints
    key_set: Ints
    tiles: Tiles
    """Tile 1 + step * P + rank."""


@lru_cache(maxsize=2)
def cut(workload: Workload, num_ranks: int, chunks: str) -> Cut:
    """Shard the tokens ``contiguous``-ly, or zigzag by ``document`` or by packed ``sequence``."""
    mask = workload.slices()
    source, ranks = _sources(num_ranks), np.arange(num_ranks)
    halves = chunks != "contiguous" and sharding.is_causal(mask)
    if chunks == "contiguous":
        sets, bounds = sharding.contiguous(workload.num_tokens, num_ranks), np.array([0, workload.num_tokens])
    else:
        bounds = sharding.documents_of(mask) if chunks == "document" else np.array([0, workload.num_tokens])
        sets = sharding.stack(*sharding.zigzag_shards(bounds, num_ranks))
    later, earlier = (source > ranks) & halves, (source < ranks) & halves
    query_set = np.where(later, 2 * num_ranks + ranks, ranks)
    key_set = np.where(earlier, num_ranks + source, source)
    tiles = make_tiles(mask, sets, query_set, key_set)
    return Cut(sets, len(bounds) > 2, later, earlier, query_set, key_set, tiles)


def _sources(num_ranks: int) -> Ints:
    """Rank whose keys each rank uses in each step, ``[steps, ranks]``."""
    return (np.arange(num_ranks) - np.arange(num_ranks)[:, None]) % num_ranks


def plan_ring(workload: Workload, cluster: Cluster, pass_: Pass) -> Schedule:
    """Ring attention on contiguous shards.

    Under a causal mask rank r has work in r + 1 of the P steps only.
    """
    ring = _Ring(workload, cluster.num_gpus, "contiguous")
    return ring.forward() if pass_ == "fwd" else ring.backward()


def plan_zigzag_ring(workload: Workload, cluster: Cluster, pass_: Pass, *, zigzag: str = "document") -> Schedule:
    """Ring attention on zigzag shards, which balance causal masks.

    Args:
        workload, cluster, pass_: the case.
        zigzag: ``document`` cuts every document into 2P chunks, which balances any mix of documents;
            ``sequence`` cuts the packed sequence, which keeps short documents whole.
    """
    if zigzag not in ("document", "sequence"):
        raise ScenarioError(f"knobs.zigzag: expected 'document' or 'sequence', got {zigzag!r}")
    ring = _Ring(workload, cluster.num_gpus, zigzag)
    return ring.forward() if pass_ == "fwd" else ring.backward()


def zigzag_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying."""
    del cluster
    if len(sharding.documents_of(workload.slices())) > 2:
        return ({"zigzag": "document"}, {"zigzag": "sequence"})
    return ({},)


class _Ring:
    """One ring schedule under construction; arrays are ``[ranks]``, or ``[steps, ranks]`` and indexed by (s, r).

    A batched send and receive is one launch: whoever waits for what it brought waits for what it took along, too.
    """

    def __init__(self, workload: Workload, num_ranks: int, chunks: str) -> None:
        self.cut = cut(workload, num_ranks, chunks)
        self.num_ranks, self.ranks, self.steps = num_ranks, np.arange(num_ranks), np.arange(num_ranks)[:, None]
        self.next, self.previous = (self.ranks + 1) % num_ranks, self.ranks - 1
        self.source = _sources(num_ranks)
        self.sizes = Sizes(workload)
        self.heads = (0, workload.num_heads, 0, workload.num_kv_heads)
        self.q_bytes = self.sizes.query(workload.num_heads)
        self.kv_bytes = self.sizes.kv(workload.num_kv_heads)
        self.lse_bytes = self.sizes.lse(workload.num_heads)
        self.tails, self.query_set, self.key_set = self.cut.tails, self.cut.query_set, self.cut.key_set
        self.tile = 1 + np.arange(num_ranks**2).reshape(num_ranks, num_ranks)
        self.active = self.cut.tiles.area[self.tile] > 0
        self.packs = self.cut.key_heads & self.active & self.cut.scattered
        """Key heads are packed for the kernel."""
        tokens = self.cut.sets.num_tokens()
        self.tokens, self.tail_rows = tokens[:num_ranks], tokens[-num_ranks:]
        self.q_rows, self.k_rows = tokens[self.query_set], tokens[self.key_set]
        self.rows = Accumulation(self.active, self.q_rows, ~self.tails, self.tail_rows)
        self.sums = self.rows.sums
        self.b = Builder(num_ranks, self.cut.sets, self.cut.tiles)

    def forward(self) -> Schedule:
        b = self.b
        q, kv = self.input("q", self.q_bytes), self.input("kv", self.kv_bytes)
        out = self.output("out", self.q_bytes, self.lse_bytes)
        partial = b.buffers("out partial", self.tokens * (self.q_bytes + self.lse_bytes))
        tails = self.pack_tails([q], self.q_bytes)
        moves = np.broadcast_to(self.steps < self.num_ranks - 1, self.active.shape)
        sends, packs, attends, merges = b.interleave(moves, self.packs, self.active, self.sums)
        keys, ready = self.feed(kv, sends, packs, attends)
        s, r = np.nonzero(self.active)
        made = out[1][self.query_set[s, r]]
        b.add(
            Kind.ATTENTION, (r, "compute"), at=attends[s, r], step=s, tile=self.tile[s, r], heads=self.heads,
            deps=[d[s, r] for d in ready], reads=[self.queries(q, tails, s, r), keys],
            writes=[(np.where(self.sums[s, r], partial[r], out[0][r]), made)],
        )  # fmt: skip
        s, r = np.nonzero(self.sums)
        moved = self.rows.traffic(self.q_bytes, self.sizes.accumulator(self.q_bytes), 3 * self.lse_bytes)
        made = out[1][self.query_set[s, r]]
        b.add(
            Kind.MERGE, (r, "compute"), at=merges[s, r], step=s, heads=self.heads, nbytes=moved[s, r],
            reads=[(partial[r], made)], updates=[(out[0][r], made)],
        )  # fmt: skip
        return b.build()

    def backward(self) -> Schedule:
        b, wire = self.b, self.num_ranks > 1
        widths = {"q": self.q_bytes, "dout": self.q_bytes, "out": self.q_bytes + self.lse_bytes}
        given = [self.input(name, width) for name, width in widths.items()]
        kv = self.input("kv", self.kv_bytes)
        dq, dkv = self.output("dq", self.q_bytes, 0), self.output("dkv", self.kv_bytes, 0, summed=False)
        dq_partial = b.buffers("dq partial", self.tokens * self.q_bytes)
        widest = np.full(self.num_ranks, self.tokens.max() * self.kv_bytes)
        dkv_partial = b.buffers("dkv partial", widest) if wire else dkv[0]
        tails = self.pack_tails(given, sum(widths.values()))
        moves = np.broadcast_to(self.steps < self.num_ranks - 1, self.active.shape)
        returns = np.full(self.active.shape, wire)
        sends, packs, attends, dq_sums, dkv_sums, grad_sends = b.interleave(
            moves, self.packs, self.active, self.sums, self.active & wire, returns
        )
        keys, ready = self.feed(kv, sends, packs, attends)
        s, r = np.nonzero(self.active)
        made = dq[1][self.query_set[s, r]], dkv[1][self.key_set[s, r]]
        b.add(
            Kind.ATTENTION_BACKWARD, (r, "compute"), at=attends[s, r], step=s, tile=self.tile[s, r],
            heads=self.heads, deps=[d[s, r] for d in ready],
            reads=[*(self.queries(g, tails, s, r) for g in given), keys],
            writes=[(np.where(self.sums[s, r], dq_partial[r], dq[0][r]), made[0]), (dkv_partial[r], made[1])],
        )  # fmt: skip
        s, r = np.nonzero(self.sums)
        moved = self.rows.traffic(self.q_bytes, self.sizes.accumulator(self.q_bytes), 0)
        summed = dq[1][self.query_set[s, r]]
        b.add(
            Kind.ACCUMULATE, (r, "compute"), at=dq_sums[s, r], step=s, heads=self.heads, nbytes=moved[s, r],
            reads=[(dq_partial[r], summed)], updates=[(dq[0][r], summed)],
        )  # fmt: skip
        if wire:
            self.return_gradients(dkv, dkv_partial, dkv_sums, grad_sends)
        return b.build()

    def input(self, tensor: str, width: int) -> Access:
        """Every rank's shard of a given tensor: buffers ``[ranks]``, and blocks of every set of the layout."""
        made = self.b.buffers(tensor, self.tokens * width), self.blocks(tensor)
        self.b.input(made[0], made[1][self.ranks])
        return made

    def output(self, tensor: str, width: int, extra: int, summed: bool = True) -> Access:
        """The same of a result, with its fp32 accumulator where partial results are summed."""
        summing = self.sizes.accumulator(width) if summed and self.sums.any() else 0
        made = self.b.buffers(tensor, self.tokens * (width + extra + summing)), self.blocks(tensor)
        self.b.output(made[0], made[1][self.ranks])
        return made

    def blocks(self, tensor: str) -> Int32:
        """Blocks of a tensor for every set of the layout, in its order."""
        heads = self.heads[2:] if tensor.endswith("kv") else self.heads[:2]
        return self.b.blocks(tensor, np.arange(len(self.cut.sets)), heads)

    def travel_buffers(self, name: str, width: int, hops: int) -> Int32:
        """Two receive buffers for every rank, ``[2, ranks]``, big enough for every shard; one where one hop is all."""
        nbytes = np.full(self.num_ranks, self.tokens.max() * width)
        made = [self.b.buffers(f"{name} {i}", nbytes) for i in range(min(2, hops))]
        return np.stack([made[0], made[-1]]) if made else np.zeros((2, self.num_ranks), np.int32)

    def pack_tails(self, tensors: list[Access], width: int) -> Int32 | None:
        """Copy the tail rows of query-side tensors side by side, once; None where they lie so already."""
        if not (self.cut.scattered and self.tails.any()):
            return None
        who = np.flatnonzero(self.tails.any(axis=0))
        tails = 2 * self.num_ranks + who
        packed = self.b.buffers("query tails", self.tail_rows * width)
        self.b.add(
            Kind.COPY, (who, "compute"), heads=self.heads, nbytes=2 * width * self.tail_rows[who],
            reads=[(buffer[who], block[tails]) for buffer, block in tensors],
            writes=[(packed[who], block[tails]) for _, block in tensors],
        )  # fmt: skip
        return packed

    def queries(self, whole: Access, tails: Int32 | None, s: Ints, r: Ints) -> Access:
        """What kernels read on the query side: packed tails where they compute on tails only."""
        buffer, block = whole[0][r], whole[1][self.query_set[s, r]]
        return (buffer if tails is None else np.where(self.tails[s, r], tails[r], buffer)), block

    def feed(self, kv: Access, sends: Ints, packs: Ints, attends: Ints) -> tuple[Access, list[Ints]]:
        """Move key-value shards around the ring, double-buffered, and pack key heads where they lie scattered.

        Args:
            kv: the ranks' own shards.
            sends, packs, attends: indices of the ops.

        Returns:
            what the attention ops read, and the ops that they wait for, ``[steps, ranks]`` each: the batched send
            and receive that brought the shard is one launch, waited for as a whole.
        """
        b, travel = self.b, self.travel_buffers("kv ring", self.kv_bytes, self.num_ranks - 1)
        holder = np.where(self.steps == 0, kv[0], travel[(self.steps - 1) % 2, self.ranks])
        arrived, sent = delayed(sends[:, self.previous]), delayed(sends)
        # Only from step 2 on a receive overwrites what was sent on and read in the step before.
        used = delayed(np.where(self.packs, packs, attends))
        free = [np.where(self.steps >= 2, before[:, self.next], NOTHING) for before in (sent, used)]
        s, r = np.nonzero(sends >= 0)
        block = kv[1][self.source[s, r]]
        b.add(
            Kind.TRANSFER, (r, "send"), (self.next[r], "recv"), at=sends[s, r], step=s,
            nbytes=self.tokens[self.source[s, r]] * self.kv_bytes, deps=[d[s, r] for d in (arrived, *free)],
            reads=[(holder[s, r], block)], writes=[(travel[s % 2, self.next[r]], block)],
        )  # fmt: skip
        s, r = np.nonzero(self.packs)
        if len(s):
            most = self.cut.sets.num_tokens()[self.num_ranks : 2 * self.num_ranks].max()
            packed = b.buffers("key heads", np.full(self.num_ranks, most * self.kv_bytes))
            block = kv[1][self.key_set[s, r]]
            b.add(
                Kind.COPY, (r, "compute"), at=packs[s, r], step=s, heads=self.heads,
                nbytes=2 * self.kv_bytes * self.k_rows[s, r], deps=[arrived[s, r], sent[s, r]],
                reads=[(holder[s, r], block)], writes=[(packed[r], block)],
            )  # fmt: skip
            holder = np.where(self.packs, packed, holder)
        s, r = np.nonzero(self.active)
        ready = [np.where(self.packs, NOTHING, op) for op in (arrived, sent)]
        return (holder[s, r], kv[1][self.key_set[s, r]]), ready

    def return_gradients(self, home: Access, partial: Int32, sums: Ints, sends: Ints) -> None:
        """Key-value gradients follow the keys one step behind, summed in fp32, and are cast when they come home."""
        b, width = self.b, self.sizes.accumulator(self.kv_bytes)
        travel = self.travel_buffers("dkv ring", width, self.num_ranks)
        arrived, sent = delayed(sends[:, self.previous]), delayed(sends)
        for first in (True, False):
            s, r = np.nonzero(self.active & ((self.steps == 0) == first))
            made, read = home[1][self.key_set[s, r]], 0 if first else width
            summed = [(travel[s % 2, r], made)]
            b.add(
                Kind.ACCUMULATE, (r, "compute"), at=sums[s, r], step=s, heads=self.heads,
                nbytes=self.k_rows[s, r] * (self.kv_bytes + read + width), deps=[arrived[s, r], sent[s, r]],
                reads=[(partial[r], made)], writes=summed if first else (), updates=() if first else summed,
            )  # fmt: skip
        s, r = np.nonzero(sends >= 0)
        block = home[1][self.source[s, r]]
        free = [sent[s, self.next[r]]] if self.num_ranks > 2 else []
        b.add(
            Kind.TRANSFER, (r, "grad_send"), (self.next[r], "grad_recv"), at=sends[s, r], step=s,
            nbytes=self.tokens[self.source[s, r]] * width,
            deps=[np.where(sums >= 0, sums, arrived)[s, r], *free],
            reads=[(travel[s % 2, r], block)], writes=[(travel[(s + 1) % 2, self.next[r]], block)],
        )  # fmt: skip
        own = home[1][self.ranks]
        b.add(
            Kind.COPY, (self.ranks, "compute"), step=self.num_ranks, heads=self.heads,
            nbytes=self.tokens * (width + self.kv_bytes), deps=[sends[-1, self.previous], sends[-1]],
            reads=[(travel[self.num_ranks % 2], own)], writes=[(home[0], own)],
        )  # fmt: skip


def delayed(ops: Ints) -> Ints:
    """The ops of the step before, ``[steps, ranks]``; NOTHING before the first."""
    return np.concatenate([np.full((1, ops.shape[1]), NOTHING), ops[:-1]])
