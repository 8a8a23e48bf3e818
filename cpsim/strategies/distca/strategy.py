"""DistCA: core attention on whichever GPU has time, in two nano-batches: exchanges of one hide behind the other.

Tokens lie on their homes in order. A scheduler makes tasks, queries with their whole causal prefix, and gives each to a
server, which is any of the GPUs. Of every nano-batch, queries travel to servers and keys to every server that needs
them, once; a server runs all its tasks in one kernel call; results travel home. While one nano-batch is computed,
inputs of the next and results of the one before are on their way. Backward sends everything again, and gradients home.

Reference: DistCA (arXiv 2510.18121), section 4; hao-ai-lab/DistCA at 2afd219. Differs: queries and keys travel in
two all-to-alls, and so do their gradients; what a GPU keeps for itself is copied once for the kernel instead of through
the exchange's buffers; streams wait for what they need, not for each other at every tick, which for attention alone is
the same; the backward pass has a plan of its own; a document that two nano-batches share sends its keys in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.documents import Order
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import Ints, RangeSets, Slices, sets_of
from cpsim.masks.tiles import Tiles, make_tiles, sequences
from cpsim.schedule.builder import NOTHING
from cpsim.schedule.schedule import Int32, Kind, Mask, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.cell_program import SIDES, CellProgram, Held, Wanted
from cpsim.strategies.dcp.program import given, routes
from cpsim.strategies.distca.kernel import Floats, flash_attention_4
from cpsim.strategies.distca.planning import Variant, schedule
from cpsim.strategies.distca.tasks import Tasks, TokenBytes, make_tasks
from cpsim.strategies.sharding import cells_of, edges_of
from cpsim.strategies.sizes import Sizes

NANO_BATCHES = 2
"""Parts that hide each other's exchanges."""


def plan_distca(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    *,
    variant: Variant = "cpsim",
    order: Order | None = None,
    tolerance: float = 0.05,
    nano_batches: int = NANO_BATCHES,
    servers: int = 0,
    barriers: bool = False,
) -> Schedule:
    """Tasks of queries and all keys that they see on servers, nano-batch by nano-batch.

    Schedulers know causal masks over documents; under another one they balance what would be the work of that.

    Every GPU is home of tokens and a server, unless some are servers alone. DistCA's servers are GPUs of different
    nodes, one for every rank of a tensor-parallel group: of such a group state the heads of one rank, and a cluster of
    nodes of one GPU.

    Args:
        workload, cluster, pass_: the case.
        variant: the scheduler: ``cpsim``, ``paper`` or ``released`` (what DistCA's code does instead).
        order: that of the documents, which the workload has already, see ``cpsim.case.documents``.
        tolerance: of the mean work.
        nano_batches: parts of equally many tokens, one computed while the others travel.
        servers: the last so many GPUs hold no tokens and compute all attention; 0: every GPU does both.
        barriers: after every kernel a GPU waits for the exchanges beside it, as DistCA's ticks do.

    Raises:
        ScenarioError: a knob has no such value.
        InfeasibleError: there is one GPU, or fewer tokens than parts.
    """
    del order
    if type(nano_batches) is not int or nano_batches < 1:
        raise ScenarioError(f"knobs.nano_batches: expected a positive integer, got {nano_batches!r}")
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise ScenarioError(f"knobs.tolerance: expected a number, got {tolerance!r}")
    ranks = cluster.num_gpus
    if type(servers) is not int or not 0 <= servers < ranks:
        raise ScenarioError(f"knobs.servers: expected fewer than all {ranks} GPUs, got {servers!r}")
    if not isinstance(barriers, bool):
        raise ScenarioError(f"knobs.barriers: expected true or false, got {barriers!r}")
    if ranks == 1:
        raise InfeasibleError("distca runs on 2 GPUs or more, got 1; use none")
    if workload.num_tokens < ranks * nano_batches:
        raise InfeasibleError(f"distca needs a token for every GPU and nano-batch, got {workload.num_tokens}")
    plans = _plan(workload, servers or ranks, pass_, variant, tolerance, nano_batches)
    if servers:
        plans = [_served_by_last(tasks, ranks, servers) for tasks in plans]
    emitted = _DistCA(workload, _cells(workload, plans, ranks), pass_, barriers)
    return emitted.forward() if pass_ == "fwd" else emitted.backward()


def _plan(workload: Workload, ranks: int, pass_: Pass, variant: Variant, tolerance: float, count: int) -> list[Tasks]:
    """Tasks of every nano-batch. A document's number is its first token, and queries are counted from that of all."""
    documents = sharding.documents_of(workload.slices(), workload.num_tokens)
    sizes, heads = Sizes(workload), (workload.num_heads, workload.num_kv_heads)
    of_token = TokenBytes(q=sizes.query(heads[0]), kv=sizes.kv(heads[1]), lse=sizes.lse(heads[0]))
    kernel = flash_attention_4(pass_ == "bwd", *heads)
    starts, bounds = documents[:-1], np.arange(count + 1) * workload.num_tokens // count
    plans = []
    for low, high in pairwise(bounds.tolist()):
        first, last = np.clip([starts, documents[1:]], low, high)
        there = np.flatnonzero(first < last)
        offset = (first - starts)[there]
        tasks = schedule(
            (last - first)[there], ranks, of_token, kernel, variant=variant, tolerance=tolerance, offset=offset
        )
        document = starts[there][tasks.document]
        plans.append(Tasks(tasks.home, tasks.server, document, document + tasks.first, tasks.tokens))
    return plans


def _served_by_last(tasks: Tasks, ranks: int, servers: int) -> Tasks:
    """These tasks on the last ranks, cut where their tokens, which lie on the other ranks in order, change home."""
    others, low, high = ranks - servers, int(tasks.first.min()), int(tasks.kv.max())
    cuts = low + np.arange(1, others) * (high - low) // others
    edges = np.unique(np.concatenate([tasks.first, tasks.kv, cuts]))
    first, end = (np.searchsorted(edges, side) for side in (tasks.first, tasks.kv))
    task = np.repeat(np.arange(len(tasks)), end - first)
    at = np.arange(len(task)) - np.repeat(np.cumsum(end - first) - end + first, end - first) + first[task]
    begin, tokens = edges[at], np.diff(edges)[at]
    home = np.searchsorted(cuts, begin, side="right")
    return make_tasks(home, others + tasks.server[task], tasks.document[task], begin, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Runs of tokens that no task cuts."""

    edges: Ints
    """First token of each, and the end of the last one, ``[cells + 1]``."""
    home: Ints
    """``[cells]``."""
    query: Mask
    """Cells of the queries that every server computes, ``[nano-batches, ranks, cells]``."""
    key: Mask
    """Cells of the keys that these see; the same shape."""


def _cells(workload: Workload, plans: Sequence[Tasks], ranks: int) -> _Cells:
    mask, shape = workload.slices(), (len(plans), ranks, -1)
    sighted = _sighted(mask)
    edges = np.unique(np.concatenate([sighted.ranges.ravel(), *(ends for t in plans for ends in (t.first, t.kv))]))
    home, query = np.zeros(len(edges) - 1, np.int64), np.zeros((len(plans), ranks, len(edges) - 1), np.bool_)
    for nano, tasks in enumerate(plans):
        places = np.searchsorted(edges, np.stack([tasks.first, tasks.kv], axis=1)).tolist()
        for server, at, (first, end) in zip(tasks.server.tolist(), tasks.home.tolist(), places, strict=True):
            home[first:end] = at
            query[nano, server, first:end] = True
    queries = sets_of((query & cells_of(sighted, edges)).reshape(len(plans) * ranks, -1), edges)
    count = len(queries)
    whole = sharding.stack(queries, sharding.contiguous(workload.num_tokens, 1))
    seen = sharding.seen_keys(make_tiles(mask, whole, np.arange(count), np.full(count, count)), count)
    finer = np.union1d(edges, seen.ranges)
    return _Cells(
        edges=finer,
        home=home[np.searchsorted(edges, finer[:-1], "right") - 1],
        query=cells_of(queries, finer).reshape(shape),
        key=cells_of(seen, finer).reshape(shape),
    )


def _sighted(mask: Slices) -> RangeSets:
    """One set: queries that see a key. The outputs of others are nothing and need no task."""
    first, end = np.maximum(mask.q_start, mask.k_start - mask.high), np.minimum(mask.q_end, mask.k_end - mask.low)
    there = np.flatnonzero(first < end)
    every = RangeSets(np.array([0, len(there)]), np.stack([first[there], end[there]], axis=1))
    edges = edges_of(every)
    return sets_of(cells_of(every, edges), edges)


def _tiles_of(workload: Workload, cells: _Cells) -> Tiles:
    """Tile 1 + nano-batch * ranks + rank."""
    masks = np.concatenate([side.reshape(-1, len(cells.home)) for side in (cells.query, cells.key)])
    number = np.arange(len(masks) // 2)
    return make_tiles(workload.slices(), sets_of(masks, cells.edges), number, len(number) + number)


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """Results of one tensor of a nano-batch."""

    tensor: str
    here: Held
    """On servers."""
    home: Held
    """What has come from other servers to where its tokens are at home."""
    read: Ints
    """Bytes of a rank's own rows on its server, and of all that have come, ``[2, ranks]``."""


class _DistCA(CellProgram):
    """One schedule under construction; masks are ``[ranks, cells]``."""

    def __init__(self, workload: Workload, cells: _Cells, pass_: Pass, barriers: bool) -> None:
        self.barriers = barriers
        self.travelling = np.full(cells.query.shape[1], NOTHING)
        """The last exchange."""
        self.pass_, self.home, self.needs = pass_, cells.home, (cells.query, cells.key)
        self.num_nanos, ranks = cells.query.shape[:2]
        own = np.equal(cells.home, np.arange(ranks)[:, None])
        super().__init__(workload, own, cells.edges, _tiles_of(workload, cells))
        self.tile = 1 + np.arange(self.num_nanos * ranks).reshape(self.num_nanos, ranks)
        self.calls = sequences(self.b.tiles)
        self.any_order = self.calls.in_place | ~self.calls.one_call
        """Whether kernels read keys of a tile in the order of their tokens."""
        self.mine = own & np.any(cells.query, axis=1, keepdims=True)
        """Every rank's own tokens of every nano-batch, ``[nano-batches, ranks, cells]``."""
        self.stay: Mask = np.all(cells.query == self.mine, axis=2)
        """Ranks that compute their own queries of a nano-batch and no others, ``[nano-batches, ranks]``."""
        given = [self.given(tensors, self.own) for tensors in SIDES[pass_]]
        self.held = [[[side] for side in given] for _ in range(self.num_nanos)]
        """Where inputs are: of every nano-batch, queries' and keys' side."""
        self.nothing = np.full(ranks, NOTHING)

    # --- passes ---

    def forward(self) -> Schedule:
        out = self.result("out")
        for nano, made in self.ticks(Kind.ATTENTION, out, range(self.num_nanos)):
            self.unpack(nano, made[0], out)
        return self.build()

    def backward(self) -> Schedule:
        dq, dkv, wide = self.result("dq"), self.result("dkv"), self.rows["dkv"][1]
        rows = self.own @ self.tokens
        total, who = self.b.buffers("dkv sum", rows * wide), np.flatnonzero(rows)
        self.b.add(
            Kind.ACCUMULATE,
            (who, "compute"),
            heads=self.heads,
            nbytes=rows[who] * wide,
            writes=[(total[who], self.block("dkv", self.own[who]))],
        )
        for nano, made in self.ticks(Kind.ATTENTION_BACKWARD, dq, range(self.num_nanos)[::-1]):
            self.unpack(nano, made[0], dq)
            self.add_up(nano, made[1], total)
            self.finish(nano, total, dkv)
        return self.build()

    def ticks(self, kind: Kind, result: Int32, order: Sequence[int]) -> Iterator[tuple[int, list[_Made]]]:
        """Nano-batches whose results are on their way home; inputs of the next one and results of the one before travel
        during each."""
        self.fetch(order[0])
        before: list[tuple[int, list[_Made]]] = []
        for i, nano in enumerate(order):
            for following in order[i + 1 : i + 2]:
                self.fetch(following)
            made = self.attend(kind, nano, result)
            yield from before
            before = [(nano, made)]
        yield from before

    # --- steps ---

    def result(self, tensor: str) -> Int32:
        """Buffers of what a rank's own tokens end with."""
        buffers = self.b.buffers(tensor, self.own @ self.tokens * self.nbytes[tensor])
        self.b.output(buffers, self.block(tensor, self.own))
        return buffers

    def fetch(self, nano: int) -> None:
        """Inputs of a nano-batch, to the servers that lack them."""
        for side, tensors in enumerate(SIDES[self.pass_]):
            cells = self.needs[side][nano] & ~self.own
            if cells.any():
                gives = given(cells, self.home)
                moved = routes(cells, self.home, self.tokens, sum(self.nbytes[t] for t in tensors))
                packed = self.pack(nano, tensors, self.held[nano][side], gives, moved.sum(axis=1), "compute")
                made, op = self.exchange(nano, tensors, packed, gives, cells, moved, self.ranks[None])
                self.travelling = op
                self.held[nano][side].append(Held(dict.fromkeys(tensors, made), cells, op))

    def key_rows(self, nano: int) -> Ints:
        """Rows of keys as servers' kernels read them, ``[ranks]``."""
        tile, tokens = self.tile[nano], self.needs[1][nano] @ self.tokens
        return np.asarray(np.where(self.any_order[tile], tokens, np.maximum(self.calls.keys()[tile], tokens)))

    def attend(self, kind: Kind, nano: int, result: Int32) -> list[_Made]:
        """One kernel on every server with tasks; a rank that keeps to its own queries writes their results in place."""
        tile, stays, (query, key) = self.tile[nano], self.stay[nano], (needs[nano] for needs in self.needs)
        who, key_rows = np.flatnonzero(self.b.tiles.area[tile]), self.key_rows(nano)
        q_rows, apart = query @ self.tokens, np.any(key != self.mine[nano], axis=1) | ~self.any_order[tile]
        columns = (query, q_rows, ~stays), (key, key_rows, apart)
        reads, deps = self.gather(
            nano,
            who,
            [
                Wanted(tensors, held, *(column[who] for column in side))
                for tensors, held, side in zip(SIDES[self.pass_], self.held[nano], columns, strict=True)
            ],
        )
        tensor = "out" if kind == Kind.ATTENTION else "dq"
        partial = self.b.buffers(f"{tensor} of tasks", np.where(stays, 0, q_rows) * self.nbytes[tensor])
        made = {tensor: (np.where(stays, result, partial).astype(np.int32), query)}
        if kind == Kind.ATTENTION_BACKWARD:
            made["dkv"] = self.b.buffers("dkv of tasks", key_rows * self.nbytes["dkv"]), key
        self.b.add(
            kind,
            (who, "compute"),
            step=nano,
            tile=tile[who],
            heads=self.heads,
            deps=[deps],
            reads=reads,
            writes=[(buffers[who], self.block(t, cells[who])) for t, (buffers, cells) in made.items()],
        )
        if self.barriers:
            self.b.add(Kind.BARRIER, (self.ranks, "compute"), step=nano, deps=[self.travelling])
        repeats = {"dkv": key_rows / np.maximum(key @ self.tokens, 1)}
        return [
            self.send_home(nano, t, Held({t: buffers}, cells, self.nothing), repeats.get(t, np.ones(self.num_ranks)))
            for t, (buffers, cells) in made.items()
        ]

    def send_home(self, nano: int, tensor: str, here: Held, repeats: Floats) -> _Made:
        """Results of other ranks' tokens; a server adds up those of keys that several of its sequences read."""
        gives = here.cells & ~self.own
        moved = routes(gives, self.home, self.tokens, self.nbytes[tensor]).T
        home = Held({tensor: self.nothing.astype(np.int32)}, np.zeros_like(self.own), self.nothing)
        if gives.any():
            gets = self.own & gives.any(axis=0)
            leaving = moved.sum(axis=1)
            packed = self.pack(nano, [tensor], [here], gives, leaving, "compute", leaving * repeats)
            buffers, op = self.exchange(nano, [tensor], packed, gives, gets, moved, self.ranks[None])
            self.travelling = op
            home = Held({tensor: buffers}, gets, op)
        local = np.rint((here.cells & self.own) @ self.tokens * self.nbytes[tensor] * repeats).astype(np.int64)
        return _Made(tensor, here, home, np.stack([local, moved.sum(axis=0)]))

    def unpack(self, nano: int, made: _Made, result: Int32) -> None:
        """Results of queries in the order of a rank's own tokens."""
        who = np.flatnonzero(~self.stay[nano] & self.mine[nano].any(axis=1))
        cells, held = self.mine[nano, who], [made.here, made.home]
        self.b.add(
            Kind.COPY,
            (who, "compute"),
            step=nano,
            heads=self.heads,
            deps=self.waits(who, held, cells),
            nbytes=2 * (cells @ self.tokens) * self.nbytes[made.tensor],
            reads=self.reads(who, [made.tensor], held, cells),
            writes=[(result[who], self.block(made.tensor, cells))],
        )

    def add_up(self, nano: int, made: _Made, total: Int32) -> None:
        """Gradients of keys, from a rank's own server and from others."""
        for held, read in zip((made.here, made.home), made.read, strict=True):
            cells = held.cells & self.own
            who = np.flatnonzero(cells.any(axis=1))
            cells = cells[who]
            self.b.add(
                Kind.ACCUMULATE,
                (who, "compute"),
                step=nano,
                heads=self.heads,
                nbytes=read[who] + 2 * (cells @ self.tokens) * self.rows["dkv"][1],
                deps=self.waits(who, [held], cells),
                reads=self.reads(who, ["dkv"], [held], cells),
                updates=[(total[who], self.block("dkv", cells))],
            )

    def finish(self, nano: int, total: Int32, dkv: Int32) -> None:
        """Gradients of keys that no nano-batch before this one adds to, in their own type."""
        touched = np.any([self.mine, self.needs[1]], axis=(0, 2))
        cells = (touched[nano] if nano else ~touched[1:].any(axis=0) | touched[0]) & ~touched[:nano].any(axis=0)
        own = self.own & cells
        who = np.flatnonzero(own.any(axis=1))
        block = self.block("dkv", own[who])
        self.b.add(
            Kind.COPY,
            (who, "compute"),
            step=nano,
            heads=self.heads,
            reads=[(total[who], block)],
            nbytes=(own[who] @ self.tokens) * (self.rows["dkv"][1] + self.nbytes["dkv"]),
            writes=[(dkv[who], block)],
        )
