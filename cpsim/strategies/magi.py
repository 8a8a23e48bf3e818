"""MagiAttention: chunks of the sequence on the ranks that balance the mask, which fetch the keys they see and no more.

Forward: a rank computes on its own keys while the first part of the others arrives (group-cast), then on that while
the next part does; partial outputs are merged in fp32. Backward: keys arrive likewise, and their gradients go home
(group-reduce), summed in fp32.

Reference: SandAI-org/MagiAttention at 2c64135: min-heap dispatch by area, multi-stage overlap, group collectives as
all-to-alls of uneven parts. Differs: no cost model decides the stages; a rank's keys of others are cut into equally
many tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import Ints, RangeSets, Slices, sets_of
from cpsim.masks.tiles import Tiles, make_tiles
from cpsim.schedule.builder import NOTHING, Access
from cpsim.schedule.schedule import Int32, Kind, Mask, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.others import CPSIM, Implementation
from cpsim.strategies.sharding import cells_of, edges_of
from cpsim.strategies.staged import Staged

CHUNK: Final = 2048
"""Tokens dispatched at a time, by the benchmark."""
MAX_STAGES: Final = 1000
"""Far more than hide anything."""


def plan_magi(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    code: Implementation = CPSIM,
    *,
    chunk: int | None = None,
    stages: int = 2,
    smallest: int = 512,
    native: bool = False,
) -> Schedule:
    """Balanced chunks; keys of others come in stages.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        chunk: tokens that are dispatched together; default: about as the benchmark, or a quarter of a rank's.
        stages: parts of the keys of others, one computed on while the next arrives.
        smallest: tokens that a part has at least, if there are so many.
        native: group-casts read and write keys where they lie, so that nothing is packed, and send them to every other
            node once, whose GPUs pass them on.

    Raises:
        ScenarioError: a knob has no such value.
        InfeasibleError: chunks do not divide the tokens of a rank.
    """
    del code
    ranks, tokens = cluster.num_gpus, workload.num_tokens
    for name, value in {"stages": stages, "smallest": smallest, "chunk": chunk or CHUNK}.items():
        if type(value) is not int or value < 1:
            raise ScenarioError(f"knobs.{name}: expected a positive integer, got {value!r}")
    if stages > MAX_STAGES:
        raise ScenarioError(f"knobs.stages: expected at most {MAX_STAGES}, got {stages}")
    if type(native) is not bool:
        raise ScenarioError(f"knobs.native: expected true or false, got {native!r}")
    if ranks == 1:
        raise InfeasibleError("magi runs on 2 GPUs or more, got 1; use none")
    if tokens % ranks:
        raise InfeasibleError(f"magi needs tokens divisible by ranks, got {tokens} tokens on {ranks} GPUs")
    own = tokens // ranks
    if chunk and own % chunk:
        raise InfeasibleError(f"magi needs chunks that divide the {own} tokens of a rank, got {chunk}")
    chunks = own // chunk if chunk else _default_chunks(own)
    per_node = cluster.gpus_per_node if native and cluster.num_nodes > 1 else ranks
    plan = _Magi(workload, _share_out(workload, ranks, chunks, stages, smallest, per_node), native)
    return plan.forward() if pass_ == "fwd" else plan.backward()


def _default_chunks(own: int) -> int:
    """Chunks of a rank: as few as the benchmark's length allows, at least four."""
    return min(own, max(4, -(-own // CHUNK)))


@dataclass(frozen=True, slots=True, eq=False)
class _Shares:
    """Who holds and fetches what; set ``r`` is rank r's own tokens."""

    sets: RangeSets
    """Own tokens; of these the keys that own queries see; for every stage the keys of others that each rank fetches;
    its keys that others fetch; and where nodes relay: those that other nodes do, keys that it relays, and all that it
    sends inside its node."""
    tiles: Tiles
    """Tile 1 + stage * P + rank, of which stage 0 is a rank's own keys."""
    per_node: int
    """Ranks of a node that relays, or all."""
    moved: Ints
    """Tokens that every rank sends to every rank, each as often as somebody fetches it, ``[stages, ranks, ranks]``."""
    far: Ints
    """Tokens sent between nodes that relay: to the rank at the same place."""
    near: Ints
    """Tokens sent inside these nodes, relayed ones included, those that the relay keeps for itself, too."""


@lru_cache(maxsize=2)
def _share_out(workload: Workload, num_ranks: int, chunks: int, stages: int, smallest: int, per_node: int) -> _Shares:
    mask, ranks = workload.slices(), np.arange(num_ranks)
    own = _dispatch(mask, workload.num_tokens, num_ranks, chunks)
    whole = sharding.stack(own, sharding.contiguous(workload.num_tokens, 1))
    seen = sharding.seen_keys(make_tiles(mask, whole, ranks, np.full(num_ranks, num_ranks)), num_ranks)
    edges = edges_of(own, seen)
    remote = sharding.split(sets_of(cells_of(seen, edges) & ~cells_of(own, edges), edges), stages, smallest)
    edges = edges_of(own, seen, remote)
    mine, wanted = cells_of(own, edges), cells_of(remote, edges).reshape(num_ranks, stages, -1).swapaxes(0, 1)
    length = np.diff(edges)
    fetched = sharding.stack(*(sets_of(cells, edges) for cells in wanted))
    given = sharding.stack(*(sets_of(mine & cells.any(axis=0), edges) for cells in wanted))
    local = sets_of(cells_of(seen, edges) & mine, edges)
    wanted_there = wanted.reshape(stages, -1, per_node, len(length)).any(axis=2)
    others = wanted_there.sum(axis=1)[:, None] - wanted_there.repeat(per_node, axis=1)
    wanted_there = wanted_there.repeat(per_node, axis=1)
    passed_on = wanted_there & _rails(mine, per_node)
    relays = [(mine & (others > 0), passed_on & ~mine, passed_on)] if per_node < num_ranks else []
    extra = [sets_of(cells[s], edges) for group in relays for cells in group for s in range(stages)]
    sets = sharding.stack(own, local, fetched, given, *extra)
    tiles = make_tiles(mask, sets, np.tile(ranks, stages + 1), num_ranks + np.arange((stages + 1) * num_ranks))
    same_node, same_place = (np.equal.outer(at, at) for at in np.divmod(ranks, per_node))
    far = _common(mine, wanted_there, length) * (same_place & ~same_node)
    near = _common(passed_on, wanted, length) * same_node
    return _Shares(sets, tiles, per_node, _common(mine, wanted, length), far, near)


def _common(held: Mask, wanted: Mask, length: Ints) -> Ints:
    """Tokens that every rank ``[..., ranks, cells]`` holds of what every rank wants."""
    return np.asarray((held * length.astype(np.float64)) @ wanted.swapaxes(-1, -2).astype(np.float64)).astype(np.int64)


def _rails(mine: Mask, per_node: int) -> Mask:
    """Cells of the ranks at the same place of all nodes, ``[ranks, cells]``."""
    nodes = mine.reshape(-1, per_node, mine.shape[1])
    return np.tile(nodes.any(axis=0), (len(nodes), 1))


def _dispatch(mask: Slices, num_tokens: int, num_ranks: int, chunks: int) -> RangeSets:
    """As many chunks for every rank: the heaviest one left goes to the rank with the least work that has room."""
    count = num_ranks * chunks
    sets = sharding.stack(sharding.contiguous(num_tokens, count), sharding.contiguous(num_tokens, 1))
    work = make_tiles(mask, sets, np.arange(count), np.full(count, count)).area[1:]
    heap, held = [(0, rank, 0) for rank in range(num_ranks)], np.zeros((num_ranks, count), np.bool_)
    for i in np.argsort(-work, kind="stable").tolist():
        load, rank, holds = heapq.heappop(heap)
        held[rank, i] = True
        if holds + 1 < chunks:
            heapq.heappush(heap, (load + int(work[i]), rank, holds + 1))
    return sets_of(held, np.arange(count + 1) * num_tokens // count)


class _Magi(Staged):
    """One schedule under construction."""

    def __init__(self, workload: Workload, shares: _Shares, native: bool) -> None:
        stages, num_ranks = shares.moved.shape[:2]
        super().__init__(workload, shares.sets, shares.tiles, num_ranks, stages + 1)
        self.shares, self.stages, self.native = shares, stages, native

    def forward(self) -> Schedule:
        q, kv = self.given("q", self.q_bytes), self.given("kv", self.kv_bytes)
        out, partial = self.result("out", self.o_bytes, self.lse_bytes)
        moved = self.summed_bytes(self.o_bytes, self.lse_bytes)
        for stage, keys in self.keys(kv):
            self.attend(Kind.ATTENTION, stage, [q, keys], [self.target(out, partial, stage)])
            self.sum(Kind.MERGE, stage, moved, out, partial)
        return self.b.build()

    def backward(self) -> Schedule:
        b = self.b
        widths = {"q": self.q_bytes, "out": self.o_bytes + self.lse_bytes, "dout": self.o_bytes}
        given, kv = [self.given(tensor, width) for tensor, width in widths.items()], self.given("kv", self.kv_bytes)
        dq, partial = self.result("dq", self.q_bytes)
        total = b.buffers("dkv sum", self.own * self.kv_wide), self.own_blocks("dkv")
        moved = self.summed_bytes(self.q_bytes)
        leaving: list[tuple[int, Ints, Access]] = []
        for stage, keys in self.keys(kv):
            made = self.b.buffers("dkv partial", self.rows_of(stage) * self.kv_bytes), self.blocks("dkv", stage)
            self.attend(Kind.ATTENTION_BACKWARD, stage, [*given, keys], [self.target(dq, partial, stage), made])
            self.sum(Kind.ACCUMULATE, stage, moved, dq, partial)
            if stage == 0:
                self.begin(total, made)
            else:
                leaving.append((stage, *self.send_home(stage, made)))
            if len(leaving) > 1:
                self.bring_home(*leaving.pop(0), total)
        for entry in leaving:
            self.bring_home(*entry, total)
        dkv = b.buffers("dkv", self.own * self.kv_bytes), total[1]
        b.output(*dkv)
        b.add(
            Kind.COPY,
            (self.ranks, "compute"),
            step=self.stages + 1,
            heads=self.heads,
            nbytes=self.own * (self.kv_wide + self.kv_bytes),
            reads=[total],
            writes=[dkv],
        )
        return b.build()

    def keys(self, kv: Access) -> Iterator[tuple[int, Access]]:
        """Every stage and what its kernels read; what the next stage needs is on its way when a stage begins."""
        arrived, received = np.full(len(self.ranks), NOTHING), kv
        for stage in range(self.stages + 1):
            after, source = arrived, received
            if stage < self.stages:
                arrived, received = self.fetch(stage + 1, kv)
            yield stage, self.in_order(stage, source, after)

    def fetch(self, stage: int, kv: Access) -> tuple[Ints, Access]:
        """Group-cast: keys to all who see them; returns the op by rank, and where they arrive."""
        if self.shares.per_node < len(self.ranks):
            return self.relay(stage, kv)
        given, wanted = self.given_blocks("kv", stage), self.blocks("kv", stage)
        moved = self.shares.moved[stage - 1] * self.kv_bytes
        sent = moved.sum(axis=1)
        packed = self.b.buffers("kv by rank", sent)
        who = np.flatnonzero(sent)
        ready = np.full(len(self.ranks), NOTHING)
        ready[who] = self.copy(stage, who, 2 * sent[who], (kv[0], given), (packed, given))
        return self.exchange(stage, moved, (packed, given), ("kv of others", wanted), ready)

    def relay(self, stage: int, kv: Access) -> tuple[Ints, Access]:
        """A group-cast that sends keys to every other node once, to the rank at the same place, who passes them on."""
        b, shares, nodes = self.b, self.shares, self.ranks.reshape(-1, self.shares.per_node)
        away, brought, inside = (
            b.blocks("kv", self.key_sets((2 + i) * self.stages + stage), self.heads_of("kv")) for i in range(3)
        )
        far, near = (moved[stage - 1] * self.kv_bytes for moved in (shares.far, shares.near))
        leaving, relayed = (b.buffers(f"kv of {which}", far.sum(axis=i)) for which, i in (("nodes", 1), ("relays", 0)))
        packed = b.buffers("kv by rank", near.sum(axis=1))
        made = b.buffers("kv of others", near.sum(axis=0)), self.blocks("kv", stage)
        self.pass_on(stage, 2, [kv], (leaving, away))
        self.cast(stage, nodes.T, far, (leaving, away), (relayed, brought))
        self.pass_on(stage, 4, [kv, (relayed, brought)], (packed, inside))
        return self.cast(stage, nodes, near, (packed, inside), made), made

    def pass_on(self, stage: int, sets: int, source: Sequence[Access], target: Access) -> None:
        """The group-cast's own kernel puts keys in order as it sends them."""
        r = np.flatnonzero(self.tokens[self.key_sets(sets * self.stages + stage)])
        self.b.add(
            Kind.COPY,
            (r, "comm"),
            step=stage,
            heads=self.heads,
            reads=[(buffer[r], block[r]) for buffer, block in source],
            writes=[(target[0][r], target[1][r])],
        )

    def cast(
        self, stage: int, groups: Ints, moved: Ints, source: Access, target: Access, ready: Ints | None = None
    ) -> Ints:
        """An all-to-all of uneven parts in every group that has anything to send; returns the op by rank."""
        arrived = np.full(len(self.ranks), NOTHING) if ready is None else ready.copy()
        for ranks in groups:
            inside = moved[np.ix_(ranks, ranks)]
            if inside.any():
                sides = [[(buffer[ranks][None], block[ranks][None])] for buffer, block in (source, target)]
                (op,) = self.b.add(
                    Kind.ALL_TO_ALL,
                    (ranks[None], "comm"),
                    step=stage,
                    nbytes=inside.sum(axis=0).max(),
                    deps=[] if ready is None else [ready[ranks][None]],
                    reads=sides[0],
                    writes=sides[1],
                )
                self.b.route(int(op), ranks, inside)
                arrived[ranks] = op
        return arrived

    def send_home(self, stage: int, made: Access) -> tuple[Ints, Access]:
        """Group-reduce: gradients to who holds their keys; returns the op by rank, and where they arrive."""
        nbytes = self.tokens_of(stage) * self.kv_bytes
        packed = self.b.buffers("dkv by rank", nbytes), made[1]
        who = np.flatnonzero(nbytes)
        ready = np.full(len(self.ranks), NOTHING)
        ready[who] = self.copy(stage, who, (nbytes + self.rows_of(stage) * self.kv_bytes)[who], made, packed)
        moved = self.shares.moved[stage - 1].T * self.kv_bytes
        return self.exchange(stage, moved, packed, ("dkv of others", self.given_blocks("dkv", stage)), ready)

    def exchange(
        self, stage: int, moved: Ints, source: Access, target: tuple[str, Int32], ready: Ints
    ) -> tuple[Ints, Access]:
        """An all-to-all of uneven parts among all."""
        made = self.b.buffers(target[0], moved.sum(axis=0)), target[1]
        return self.cast(stage, self.ranks[None], moved, source, made, ready), made

    def in_order(self, stage: int, source: Access, after: Ints) -> Access:
        """Keys as the kernels read them: where they are, or packed."""
        if stage == 0 and self.calls.in_place[self.tile[0]].all():
            return source[0], self.blocks("kv", 0)
        nbytes = self.rows_of(stage) * self.kv_bytes
        packed = self.b.buffers("keys in order", nbytes), self.blocks("kv", stage)
        who = np.flatnonzero(self.active[stage])
        self.copy(stage, who, 2 * nbytes[who], (source[0], packed[1]), packed, after)
        return packed

    def copy(
        self, stage: int, who: Ints, nbytes: Ints, source: Access, target: Access, after: Ints | None = None
    ) -> Ints:
        """Pack on some ranks; takes a launch only where the group collective does it."""
        return self.b.add(
            Kind.COPY,
            (who, "compute"),
            step=stage,
            heads=self.heads,
            nbytes=nbytes * (stage == 0 or not self.native),
            deps=[] if after is None else [after[who]],
            reads=[(source[0][who], source[1][who])],
            writes=[(target[0][who], target[1][who])],
        )

    def bring_home(self, stage: int, arrived: Ints, source: Access, total: Access) -> None:
        """Add the gradients that others have sent."""
        sent = self.shares.moved[stage - 1].sum(axis=1)
        r = np.flatnonzero(sent)
        rows = self.tokens[self.given_sets(stage)][r]
        self.b.add(
            Kind.ACCUMULATE,
            (r, "compute"),
            step=stage,
            heads=self.heads,
            deps=[arrived[r]],
            nbytes=sent[r] * self.kv_bytes + 2 * rows * self.kv_wide,
            reads=[(source[0][r], source[1][r])],
            updates=[(total[0][r], source[1][r])],
        )

    def given_sets(self, stage: int) -> Ints:
        """Sets of the keys that every rank sends in a stage."""
        return self.key_sets(self.stages + stage)

    def given_blocks(self, tensor: str, stage: int) -> Int32:
        return self.b.blocks(tensor, self.given_sets(stage), self.heads_of(tensor))
