"""Mesh attention: ranks form a mesh; each computes the queries of its row with the keys of its column.

Rank ``u a + v`` of a mesh of b rows and a columns has row u and column v. Keys and values are gathered along columns,
some heads at a time, as ``allgather`` does. Queries travel along rows: hop i brings every rank those of the rank i
places before it, and their partial output goes straight home, where it is merged in fp32. Backward: queries, outputs
and their gradients travel, and partial gradients of queries go home; those of keys are summed in fp32 over the row's
queries and reduce-scattered along columns.

Every two zigzag shards have equally many pairs under a causal mask, whichever comes first, so meshes of any shape are
balanced. A column's shards follow each other. With one column it is ``allgather``; with one row keys stay, and only
queries travel (pass-Q).

Reference: Chen et al. 2025, "Mesh-Attention" (arXiv 2512.20968), tiles of a x b chunks; Yang et al. 2024, "Context
Parallelism for Scalable Million-Token Inference" (arXiv 2411.01783), pass-Q; Sun et al. 2024, "BurstAttention" (arXiv
2403.09347), whose backward pass sends the queries' side. Differs: keys are gathered in one collective and computed on
in one kernel for every shard of queries, so that no partial results are merged on the way; O travels where
BurstAttention's kernel takes the row sums of dO O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import Ints, RangeSets
from cpsim.masks.tiles import Tiles, make_tiles, sequences
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import Int32, Kind, Mask, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.sizes import Accumulation, Sizes

QUERY_SIDE: Final[dict[Pass, tuple[str, ...]]] = {"fwd": ("q",), "bwd": ("q", "out", "dout")}
"""What travels along rows."""
RESULT: Final[dict[Pass, str]] = {"fwd": "out", "bwd": "dq"}
"""What goes home."""


def plan_mesh(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    *,
    keys: int | None = None,
    keys_backward: int | None = None,
    zigzag: str = "document",
    heads_per_gather: int | None = None,
) -> Schedule:
    """Queries of a row meet keys of a column.

    Args:
        workload, cluster, pass_: the case.
        keys: ranks of a column, which gather each other's keys; default: what sends the fewest bytes. 1: keys stay; all
            ranks: queries stay, as with ``allgather``.
        keys_backward: the same of the backward pass alone, on the shards of the forward pass; default: ``keys``.
        zigzag: ``document`` cuts every document of 2P tokens or more into 2P chunks, shorter ones with their
            neighbours; ``sequence`` cuts the packed sequence.
        heads_per_gather: key-value heads gathered at a time; default all of them, without overlap.

    Raises:
        ScenarioError: a knob has no such value.
        InfeasibleError: columns do not divide the ranks, ``heads_per_gather`` the key-value heads, or, where keys are
            gathered, ranks the tokens.
    """
    if zigzag not in ("document", "sequence"):
        raise ScenarioError(f"knobs.zigzag: expected 'document' or 'sequence', got {zigzag!r}")
    ranks, heads = cluster.num_gpus, workload.num_kv_heads
    forward = fewest_bytes(workload, ranks) if keys is None else keys
    backward = forward if keys_backward is None else keys_backward
    at_once = heads if heads_per_gather is None else heads_per_gather
    for knob, value in (("keys", forward), ("keys_backward", backward), ("heads_per_gather", at_once)):
        if type(value) is not int or value < 1:
            raise ScenarioError(f"knobs.{knob}: expected a positive integer, got {value!r}")
    for knob, value in (("keys", forward), ("keys_backward", backward)):
        if ranks % value:
            raise InfeasibleError(f"mesh needs {knob} to divide the ranks, got {value} of {ranks} GPUs")
    column = forward if pass_ == "fwd" else backward
    if heads % at_once:
        raise InfeasibleError(
            f"mesh needs heads_per_gather to divide the key-value heads, got {at_once} for {heads} kv_heads"
        )
    if column > 1 and workload.num_tokens % ranks:
        raise InfeasibleError(
            f"mesh needs tokens divisible by ranks, since collectives move equal parts, "
            f"got {workload.num_tokens} tokens on {ranks} GPUs"
        )
    least = 2 * ranks if zigzag == "document" else workload.num_tokens
    return _Mesh(workload, _cut(workload, ranks, column, forward, least), at_once, pass_).plan()


def plan_kept_keys(workload: Workload, num_ranks: int, pass_: Pass, zigzag: str) -> Schedule:
    """Keys stay, on the shards of a zigzag ring, whose other pass may send them.

    Args:
        workload, pass_: the case.
        num_ranks: of the ring.
        zigzag: as of ``plan_zigzag_ring``.
    """
    least = 1 if zigzag == "document" else workload.num_tokens
    return _Mesh(workload, _cut(workload, num_ranks, 1, 1, least), workload.num_kv_heads, pass_).plan()


def token_bytes(workload: Workload, num_ranks: int, keys: int, pass_: Pass) -> tuple[int, int]:
    """Bytes that a rank sends along its row, and along its column, for every token that it holds.

    Of rows of a ranks and columns of b forward ``(a - 1)(Q + O + LSE)`` and ``(b - 1)(K + V)``, backward
    ``(a - 1)(Q + O + LSE + dO + dQ)`` and ``(b - 1)(K + V)`` with dK and dV in fp32. Tokens that are cached have no
    queries.
    """
    s = Sizes(workload)
    q, o, kv = s.query(workload.num_heads), s.output(workload.num_heads), s.kv(workload.num_kv_heads)
    side, backward = q + o + s.lse(workload.num_heads), pass_ == "bwd"
    along_rows, tokens = (num_ranks // keys - 1) * (side + (q + o) * backward), workload.num_tokens
    return along_rows * (tokens - workload.cached) // tokens, (keys - 1) * (kv + s.accumulator(kv) * backward)


def fewest_bytes(workload: Workload, num_ranks: int) -> int:
    """Ranks of a column for which ranks send the least in all passes; of equals the fewest."""
    passes: tuple[Pass, ...] = ("fwd",) if workload.cached else ("fwd", "bwd")
    columns = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    return min(columns, key=lambda n: sum(sum(token_bytes(workload, num_ranks, n, pass_)) for pass_ in passes))


def mesh_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying: the fewest bytes, with and without overlap; and rows that are nodes."""
    heads, ranks, nodes = workload.num_kv_heads, cluster.num_gpus, cluster.num_nodes
    at_once = dict.fromkeys(n for n in (heads, max(1, heads // 4)) if heads % n == 0)
    found: list[dict[str, object]] = [{"heads_per_gather": n} for n in at_once]
    if 1 < nodes < ranks and fewest_bytes(workload, ranks) != nodes:
        found.append({"keys": nodes, "heads_per_gather": heads})
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Who has and sees what; arrays are ``[hops, ranks]``, of which hop 0 is a rank's own queries."""

    shards: RangeSets
    sets: RangeSets
    """Shards; all tokens of every column; the keys that each rank sees in each hop."""
    tiles: Tiles
    """Tile 1 + hop * P + rank."""
    source: Ints
    """Rank whose queries each rank has."""
    queries: Ints
    """Sets of ranks' own queries, ``[ranks]``: shards, without tokens that are cached."""


@lru_cache(maxsize=2)
def _cut(workload: Workload, num_ranks: int, column: int, forward: int, least: int) -> _Cut:
    """Columns of so many ranks, on shards that follow each other in columns of ``forward`` ranks."""
    mask, ranks, row = workload.slices(), np.arange(num_ranks), num_ranks // column
    bounds = sharding.spans(sharding.documents_of(mask, workload.num_tokens), least)
    bounds = np.unique(np.append(bounds, workload.cached))
    holder = ranks % forward * (num_ranks // forward) + ranks // forward
    shards = sharding.joined(sharding.zigzag_shards(bounds, num_ranks)[0], holder, num_ranks)
    sets = sharding.stack(shards, sharding.joined(shards, ranks % row, row))
    sets, behind = sharding.with_queries(sets, num_ranks, workload.cached)
    queries = ranks + behind
    source = ranks // row * row + (ranks % row - np.arange(row)[:, None]) % row
    tiles = make_tiles(mask, sets, queries[source].ravel(), np.tile(num_ranks + ranks % row, row))
    return _Cut(shards, sharding.stack(sets, sharding.seen_keys(tiles, source.size)), tiles, source, queries)


class _Mesh:
    """One schedule under construction; arrays are ``[ranks]`` or ``[hops, ranks]``."""

    def __init__(self, workload: Workload, cut: _Cut, heads_per_gather: int, pass_: Pass) -> None:
        self.workload, self.cut, self.pass_ = workload, cut, pass_
        self.row, num_ranks = cut.source.shape
        self.ranks, self.num_groups = np.arange(num_ranks), workload.num_kv_heads // heads_per_gather
        self.column, self.columns = self.ranks % self.row, self.ranks.reshape(-1, self.row).T
        """Column of every rank; and the ranks of every column, ``[a, b]``."""
        self.gathers = self.row < num_ranks
        self.tile = 1 + np.arange(cut.source.size).reshape(cut.source.shape)
        self.whole, self.seen = num_ranks + self.column, len(cut.sets) - cut.source.size - 1 + self.tile
        """Sets of all tokens of a rank's column, and of the keys that it sees."""
        self.active = cut.tiles.area[self.tile] > 0
        self.active[0] = True
        """Hops in which a rank computes: queries travel to where they see a key."""
        self.home = np.stack([self.active[i, self.at(i)] for i in range(self.row)])
        """Hops in which others compute with a rank's queries."""
        self.rows, calls = cut.sets.num_tokens(), sequences(cut.tiles)
        self.keys = np.where(calls.one_call[self.tile], calls.keys()[self.tile], self.rows[self.seen])
        """Key rows that every kernel call reads; where no kernel can run it, those that some query sees."""
        self.packs = self.active & (self.gathers | ~calls.in_place[self.tile])
        """Keys are put in the order in which the kernel reads them."""
        self.read = np.where(self.packs, self.seen, self.whole)
        """Sets of keys that kernels are given."""
        self.tokens, self.queries = self.rows[:num_ranks], self.rows[cut.queries]
        """Of every rank's shard, and those of them that have queries."""
        self.kv_heads, self.q_heads = heads_per_gather, workload.num_heads // self.num_groups
        self.b, self.sizes = Builder(num_ranks, cut.sets, cut.tiles), Sizes(workload)
        q, o, lse = (size(self.q_heads) for size in (self.sizes.query, self.sizes.output, self.sizes.lse))
        kv = self.sizes.kv(heads_per_gather)
        self.width = {"q": q, "out": o + lse, "dout": o, "dq": q, "kv": kv, "dkv": kv}
        """Bytes of one token of every tensor, of one group of heads."""
        self.waited: dict[tuple[str, str], Ints] = {}
        """The last op of one stream that another one of the same rank has waited for, ``[ranks]``."""

    def at(self, hop: int) -> Ints:
        """The rank that has each rank's queries in a hop."""
        return np.asarray(self.ranks - self.column + (self.column + hop) % self.row)

    def plan(self) -> Schedule:
        """All groups of heads and hops."""
        given = {t: self.given(t) for t in (*QUERY_SIDE[self.pass_], "kv")}
        keys, queries = _Keys(self, given.pop("kv")), _Queries(self, given)
        gradients = _Gradients(self) if self.pass_ == "bwd" else None
        kind = Kind.ATTENTION if gradients is None else Kind.ATTENTION_BACKWARD
        for g in range(self.num_groups):
            keys.gather(g + 1)
            queries.begin(g)
            for i in range(self.row):
                queries.send(i + 1)
                held, gathered = keys.held(g, i)
                reads, made, arrived = queries.held(i)
                r = np.flatnonzero(self.active[i])
                done = self.b.add(
                    kind,
                    (r, "compute"),
                    step=g * self.row + i,
                    tile=self.tile[i, r],
                    heads=self.heads(g),
                    deps=[ops[r] for ops in (gathered, *arrived)],
                    reads=some(r, *reads, held),
                    writes=some(r, made, *([gradients.partial(g, i)] if gradients else [])),
                )
                if gradients:
                    gradients.add(g, i, r)
                queries.computed(i, self.by_rank(r, done))
            if gradients:
                gradients.reduce(g)
        queries.sum_late()
        if gradients:
            gradients.finish()
        return self.b.build()

    def heads(self, group: int) -> tuple[int, int, int, int]:
        """First query head, query heads, first key-value head, key-value heads of a group."""
        return group * self.q_heads, self.q_heads, group * self.kv_heads, self.kv_heads

    def block(self, tensor: str, group: int, sets: Ints | None = None) -> Int32:
        """A block of every rank, of one group of heads: of its own shard, or of these sets."""
        first, count, kv_first, kv_count = self.heads(group)
        heads = (kv_first, kv_count) if tensor.endswith("kv") else (first, count)
        return self.b.blocks(tensor, self.own(tensor) if sets is None else sets, heads)

    def own(self, tensor: str) -> Ints:
        """Sets of every rank's own tokens of a tensor."""
        return self.ranks if tensor.endswith("kv") else self.cut.queries

    def shard(self, name: str, tensor: str) -> Access:
        """Every rank's shard with all heads."""
        heads = self.workload.num_kv_heads if tensor.endswith("kv") else self.workload.num_heads
        nbytes = self.rows[self.own(tensor)] * self.width[tensor] * self.num_groups
        return self.b.buffers(name, nbytes), self.b.blocks(tensor, self.own(tensor), (0, heads))

    def given(self, tensor: str) -> Access:
        """A shard that is an input of the schedule."""
        made = self.shard(tensor, tensor)
        self.b.input(*made)
        return made

    def copy(self, group: int, reads: Sequence[Access], writes: Sequence[Access], nbytes: Ints) -> Ints:
        """Pack so many bytes of every rank's own; returns the ops, ``[ranks]``."""
        return self.b.add(
            Kind.COPY,
            (self.ranks, "compute"),
            step=group * self.row,
            nbytes=2 * nbytes,
            reads=reads,
            writes=writes,
        )

    def by_rank(self, ranks: Ints, ops: Ints) -> Ints:
        """Ops of some ranks, ``[ranks]``; NOTHING for the others."""
        made = np.full(len(self.ranks), NOTHING)
        made[ranks] = ops
        return made

    def wait(self, stream: str, other: str, ops: Ints, who: Mask) -> Ints:
        """Ops on the ``other`` stream of some ranks that their ``stream`` has not waited for yet, ``[ranks]``."""
        before, ops = self.waited.get((stream, other), np.full(len(self.ranks), NOTHING)), np.where(who, ops, NOTHING)
        self.waited[stream, other] = np.maximum(before, ops)
        return np.where(ops > before, ops, NOTHING)


def some(ranks: Ints, *accesses: Access) -> list[Access]:
    """These accesses of some ranks."""
    return [(buffer[ranks], block[ranks]) for buffer, block in accesses]


class _Keys:
    """Keys and values of columns, double-buffered over groups of heads; a rank's own where it is its column."""

    def __init__(self, m: _Mesh, kv: Access) -> None:
        self.m, self.source, ready = m, kv, np.full(len(m.ranks), NOTHING)
        self.arrived = {0: ready}
        """The op that brought each group."""
        self.read = [ready] * 2
        """The last op of every rank that read each buffer."""
        self.buffers = [kv[0]]
        if m.gathers:
            if m.num_groups > 1:
                self.source = m.shard("kv by group", "kv")
                ready = m.copy(0, [kv], [self.source], m.tokens * m.width["kv"] * m.num_groups)
            nbytes = m.rows[m.whole] * m.width["kv"]
            self.buffers = [m.b.buffers("kv of column", nbytes) for _ in range(min(2, m.num_groups))]
        self.packed = m.b.buffers("keys in order", np.where(m.packs, m.keys, 0).max(axis=0) * m.width["kv"])
        self.gather(0, ready)

    def gather(self, group: int, ready: Ints | None = None) -> None:
        """Begin to gather a group of heads; backward, a reduce-scatter has waited for those who read the buffer."""
        m = self.m
        if group == m.num_groups or not m.gathers:
            return
        waits = [self.read[group % 2]] if m.pass_ == "fwd" else []
        gathered = m.b.add(
            Kind.ALL_GATHER,
            (m.columns, "comm"),
            step=group * m.row,
            nbytes=m.rows[m.whole[: m.row]] * m.width["kv"],
            deps=[ops[m.columns] for ops in (waits if ready is None else [ready])],
            reads=[(self.source[0][m.columns], m.block("kv", group)[m.columns])],
            writes=[(self.buffers[group % 2][m.columns], m.block("kv", group, m.whole)[m.columns])],
        )
        self.arrived[group] = gathered[m.column]

    def held(self, group: int, hop: int) -> tuple[Access, Ints]:
        """What the kernels of a hop read, and the op that they still wait for."""
        m, r = self.m, np.flatnonzero(self.m.packs[hop])
        buffers, block = self.buffers[group % len(self.buffers)], m.block("kv", group, m.read[hop])
        after = m.wait("compute", "comm", self.arrived[group if m.gathers else 0], m.active[hop])
        packed = m.b.add(
            Kind.COPY,
            (r, "compute"),
            step=group * m.row + hop,
            heads=m.heads(group),
            nbytes=2 * m.keys[hop, r] * m.width["kv"],
            deps=[after[r]],
            reads=some(r, (buffers, block)),
            writes=some(r, (self.packed, block)),
        )
        self.read[group % 2] = np.maximum(self.read[group % 2], m.by_rank(r, packed))
        there = np.where(m.packs[hop], self.packed, buffers).astype(np.int32)
        return (there, block), np.where(m.packs[hop], NOTHING, after)


class _Queries:
    """Queries on their way along rows, and what others make of them on its way home; double-buffered over hops."""

    def __init__(self, m: _Mesh, given: Mapping[str, Access]) -> None:
        self.m, self.given, self.result, none = m, given, RESULT[m.pass_], np.full(len(m.ranks), NOTHING)
        width, slots = m.width[self.result], range(min(2, (m.row - 1) * m.num_groups))
        longest = m.queries[m.cut.source].max(axis=0)
        self.brought = [{t: m.b.buffers(f"{t} of others", longest * m.width[t]) for t in given} for _ in slots]
        self.partial = [m.b.buffers(f"{self.result} for others", longest * width) for _ in slots]
        self.returned = [m.b.buffers(f"{self.result} by others", m.queries * width) for _ in slots]
        self.read, self.added, self.took = [none] * 2, [none] * 2, [none] * 2
        """The last op of every rank that read what was brought or returned, and that took a partial result home."""
        self.group = 0
        self.parts = [self._pack(g) for g in range(m.num_groups)]
        self.arrived: list[list[Ints]] = [[]] * 2
        """What kernels of a hop wait for: what came, and what left in the same batch."""
        self.late: tuple[int, int, Access, list[Ints]] | None = None
        """The last hop, whose results are not summed yet: its number, hop, total, and what its sum waits for."""
        narrow, lse = (m.width["q"], 0) if m.pass_ == "bwd" else (m.width["dout"], m.width["out"] - m.width["dout"])
        whole, wide = np.ones_like(m.home), m.sizes.accumulator(narrow)
        sums = Accumulation(m.home, np.broadcast_to(m.queries, whole.shape), whole, np.zeros_like(m.ranks))
        self.moved, self.summing = sums.traffic(narrow, wide, 3 * lse), wide if sums.sums.any() else 0

    def _pack(self, group: int) -> tuple[dict[str, Access], Ints]:
        """One group of heads of what travels, each tensor on its own; and the op that put it there, ``[ranks]``."""
        m, parts = self.m, {t: (buffers, self.m.block(t, group)) for t, (buffers, _) in self.given.items()}
        if m.num_groups == 1 or m.row == 1:
            return parts, np.full(len(m.ranks), NOTHING)
        packed = {t: (m.b.buffers(f"{t} by group", m.queries * m.width[t]), block) for t, (_, block) in parts.items()}
        return packed, m.copy(group, [*parts.values()], [*packed.values()], m.queries * sum(m.width[t] for t in parts))

    def begin(self, group: int) -> None:
        """The hops that follow are of this group."""
        m, self.group = self.m, group
        made = m.b.buffers(self.result, m.queries * (m.width[self.result] + self.summing))
        self.total = made, m.block(self.result, group)
        m.b.output(*self.total)

    def number(self, hop: int) -> int:
        """Of a hop among those of all groups, hop 0 left out."""
        return int(self.group * (self.m.row - 1) + hop - 1)

    def theirs(self, buffers: Int32, tensor: str, hop: int) -> Access:
        """Where ranks have others' queries, or results for them."""
        return buffers, self.m.block(tensor, self.group, self.m.cut.queries[self.m.cut.source[hop]])

    def send(self, hop: int) -> None:
        """Send own queries so many ranks on."""
        m = self.m
        if hop == m.row:
            return
        r, slot, (parts, ready) = np.flatnonzero(m.home[hop]), self.number(hop) % 2, self.parts[self.group]
        to = m.at(hop)[r]
        ready = m.wait("send", "compute", ready, m.home[hop])
        free = m.wait("recv", "compute", self.read[slot], m.active[hop])
        brought = [self.theirs(self.brought[slot][t], t, hop) for t in parts]
        sent = m.b.add(
            Kind.TRANSFER,
            (r, "send"),
            (to, "recv"),
            step=self.number(hop),
            nbytes=m.queries[r] * sum(m.width[t] for t in parts),
            deps=[ready[r], free[to]],
            reads=some(r, *parts.values()),
            writes=some(to, *brought),
        )
        self.arrived[slot] = [m.by_rank(to, sent), m.by_rank(r, sent)]

    def held(self, hop: int) -> tuple[list[Access], Access, list[Ints]]:
        """What kernels read, where they leave results, and what they wait for: all of the batch that brought it."""
        m = self.m
        if hop == 0:
            own = [(buffers, m.block(t, self.group)) for t, (buffers, _) in self.given.items()]
            return own, self.total, []
        slot, streams = self.number(hop) % 2, ("recv", "send", "grad_send")
        reads = [self.theirs(self.brought[slot][t], t, hop) for t in self.given]
        ops = [*self.arrived[slot], self.took[slot]]
        waits = [m.wait("compute", other, op, m.active[hop]) for other, op in zip(streams, ops, strict=True)]
        return reads, self.theirs(self.partial[slot], self.result, hop), waits

    def computed(self, hop: int, done: Ints) -> None:
        """Send results home, and sum those that came home in the hop before."""
        m = self.m
        if hop == 0:
            self.sum_late()
            return
        number, slot = self.number(hop), self.number(hop) % 2
        r = np.flatnonzero(m.active[hop])
        to = m.cut.source[hop, r]
        follows = m.active[hop] & (m.row == 2)  # of two, who gets results has sent its own since it added the last ones
        free = m.wait("grad_recv", "compute", self.added[slot], m.home[hop] & ~follows)
        partial = self.theirs(self.partial[slot], self.result, hop)
        returned = self.returned[slot], partial[1]
        sent = m.b.add(
            Kind.TRANSFER,
            (r, "grad_send"),
            (to, "grad_recv"),
            step=number,
            nbytes=m.queries[to] * m.width[self.result],
            deps=[done[r], free[to]],
            reads=some(r, partial),
            writes=[(returned[0][to], returned[1][r])],
        )
        self.read[slot] = np.maximum(self.read[slot], done)
        self.took[slot] = np.maximum(self.took[slot], m.by_rank(r, sent))
        self.sum_late()
        self.late = number, hop, self.total, [m.by_rank(to, sent), m.by_rank(r, sent)]

    def sum_late(self) -> None:
        """Add what came home of the last hop, behind a kernel that was launched meanwhile."""
        if self.late is None:
            return
        m, (number, hop, total, arrived), self.late = self.m, self.late, None
        h, slot = np.flatnonzero(m.home[hop]), number % 2
        streams = "grad_recv", "grad_send"
        waits = [m.wait("compute", other, ops, m.home[hop]) for other, ops in zip(streams, arrived, strict=True)]
        added = m.b.add(
            Kind.ACCUMULATE if m.pass_ == "bwd" else Kind.MERGE,
            (h, "compute"),
            step=number,
            nbytes=self.moved[hop, h],
            deps=[ops[h] for ops in waits],
            reads=some(h, (self.returned[slot], total[1])),
            updates=some(h, total),
        )
        self.added[slot] = np.maximum(self.added[slot], m.by_rank(h, added))


class _Gradients:
    """Gradients of a column's keys, summed over the queries of a row and reduce-scattered."""

    def __init__(self, m: _Mesh) -> None:
        self.m, self.wide = m, m.sizes.accumulator(m.width["kv"])
        self.dkv = m.shard("dkv", "dkv")
        m.b.output(*self.dkv)
        rows = np.where(m.packs, m.keys, m.rows[m.read])
        self.rows = m.b.buffers("dkv partial", rows.max(axis=0) * m.width["kv"])
        self.home = [m.b.buffers("dkv sum", m.tokens * self.wide) for _ in range(m.num_groups)]
        count = min(2, m.num_groups) if m.gathers else 0
        self.full = [m.b.buffers("dkv sum", m.rows[m.whole] * self.wide) for _ in range(count)]
        self.last = self.reduced = np.full(len(m.ranks), NOTHING)
        """The last sum, and the last reduce-scatter; the one before it ended before this group's keys came."""

    def partial(self, group: int, hop: int) -> Access:
        """What the kernel writes: gradients of the keys that it was given."""
        return self.rows, self.m.block("dkv", group, self.m.read[hop])

    def total(self, group: int) -> Int32:
        """Where a group's gradients are summed."""
        return self.full[group % 2] if self.m.gathers else self.home[group]

    def add(self, group: int, hop: int, ranks: Ints) -> None:
        """Sum gradients of a hop in fp32; hop 0 fills in zeros where its queries see no key."""
        m = self.m
        sets = m.seen[hop] if hop else m.whole
        summed = self.total(group), m.block("dkv", group, sets)
        added = m.b.add(
            Kind.ACCUMULATE,
            (ranks, "compute"),
            step=group * m.row + hop,
            heads=m.heads(group),
            nbytes=(m.keys[hop] * m.width["kv"] + m.rows[sets] * self.wide * (2 if hop else 1))[ranks],
            reads=some(ranks, self.partial(group, hop)),
            writes=[] if hop else some(ranks, summed),
            updates=some(ranks, summed) if hop else [],
        )
        self.last = np.maximum(self.last, m.by_rank(ranks, added))

    def reduce(self, group: int) -> None:
        """Sum a group's gradients along columns."""
        m = self.m
        if not m.gathers:
            return
        reduced = m.b.add(
            Kind.REDUCE_SCATTER,
            (m.columns, "comm"),
            step=group * m.row,
            nbytes=m.rows[m.whole[: m.row]] * self.wide,
            deps=[self.last[m.columns]],
            reads=[(self.total(group)[m.columns], m.block("dkv", group, m.whole)[m.columns])],
            writes=[(self.home[group][m.columns], m.block("dkv", group)[m.columns])],
        )
        self.reduced = reduced[m.column]

    def finish(self) -> None:
        """Cast what came home into the gradients' own type and layout."""
        m = self.m
        m.b.add(
            Kind.COPY,
            (m.ranks, "compute"),
            step=m.num_groups * m.row,
            nbytes=m.tokens * (self.wide + m.width["kv"]) * m.num_groups,
            deps=[self.reduced],
            reads=[(home, m.block("dkv", g)) for g, home in enumerate(self.home)],
            writes=[self.dkv],
        )
