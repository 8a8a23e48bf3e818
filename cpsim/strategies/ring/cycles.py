"""A ring on all cycles at once: keys go around as many rings as GPUs have neighbours, a share of them around each.

The links between all pairs of P GPUs are P - 1 directed cycles through all of them, no two of which have a link in
common. Every shard is cut into P - 1 pieces, one for each cycle. In every step each GPU passes the pieces that it holds
on, each to another GPU: an exchange of all with all, where one ring would send the whole shard to one neighbour. So a
GPU has pieces of P - 1 different shards in a step, and after P - 1 exchanges has had all. It sends what one ring sends.

Reference: Wang et al. 2025, "TASP: Topology-aware Sequence Parallelism" (arXiv 2509.26541), and its code,
infinigence/HamiltonAttention at 8660690. The cycles of numbers of GPUs that 4 divides are those of the paper's
algorithm 1, those of odd numbers Walecki's. Differs: any mask, and a backward pass, in which gradients of keys travel
in fp32, where TASP has none; pieces are packed before they are sent; a step is one kernel, where TASP runs two; links
of all pairs are taken to be alike, as in its K decomposition, and the one that knows nodes is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints, RangeSets, sets_of
from cpsim.masks.tiles import Tiles, make_tiles
from cpsim.schedule.builder import NOTHING, Access
from cpsim.schedule.schedule import Int32, Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.staged import Staged

MOST_GPUS: Final = 64
"""Of more, pieces are a few dozen tokens of every shard, and all with all exchange them as often as there are GPUs."""


def hamiltonian_cycles(num: int) -> Ints:
    """Cycles through all of some vertices, which have every link from one to another once, ``[num - 1, num]``.

    Of an odd number, zigzags over all but one vertex, turned. Of a multiple of 4, these cycles of one vertex less, each
    of which the last vertex joins in place of a link; these links make another cycle through it.

    Raises:
        InfeasibleError: there are none (4 and 6), or none are known here.
    """
    if num < 3:
        return np.arange(num)[None, :]
    if num in (4, 6) or num % 4 == 2:
        why = "there are none" if num in (4, 6) else "none are known here"
        raise InfeasibleError(
            f"cycles that share no link: {why} of {num} GPUs; use an odd number of GPUs or a multiple of 4 from 8 on, "
            f"or cycles: one"
        )
    rest = num - 2 + num % 2
    places = np.arange(rest)
    zigzag = np.where(places % 2, (places + 1) // 2, -(places // 2))
    turned = np.column_stack([np.full(rest, rest), (zigzag + places[:, None]) % rest])
    if num % 2:
        return turned
    k = num // 4 - 1
    opened = np.full(rest, 2 * k)
    opened[[0, k + 1, 2 * k + 2, 3 * k + 2]] = 1, 4 * k + 2, 3, 4 * k
    """Place in each cycle before which the last vertex joins it."""
    paths = np.take_along_axis(turned, (opened[:, None] + np.arange(rest + 1)) % (rest + 1), axis=1)
    after = dict(zip(paths[:, -1].tolist(), paths[:, 0].tolist(), strict=True))
    (first,) = set(after) - set(after.values())
    last = [first]
    while last[-1] in after:
        last.append(after[last[-1]])
    return np.column_stack([np.full(num - 1, num - 1), np.concatenate([paths, [last]])])


def plan_cycles(workload: Workload, num_ranks: int, pass_: Pass, zigzag: str) -> Schedule:
    """A zigzag ring on all cycles.

    Args:
        workload, pass_: the case.
        num_ranks: of the ring.
        zigzag: ``document`` or ``sequence``, what is cut into 2 P chunks.

    Raises:
        InfeasibleError: no cycles are known, or there are too many GPUs.
    """
    if num_ranks > MOST_GPUS:
        raise InfeasibleError(f"cycles: planned for at most {MOST_GPUS} GPUs, got {num_ranks}; use cycles: one, or usp")
    plan = _Cycles(workload, _routes(workload, num_ranks, zigzag))
    return plan.forward() if pass_ == "fwd" else plan.backward()


@dataclass(frozen=True, slots=True, eq=False)
class _Routes:
    """Who has which keys when."""

    sets: RangeSets
    """Own tokens; for every step the keys that each rank sees of those it has; for every step, and after the last one,
    the keys that it has."""
    tiles: Tiles
    moved: Ints
    """Tokens that every rank sends to every rank after each step, ``[steps, ranks, ranks]``."""


@lru_cache(maxsize=2)
def _routes(workload: Workload, num_ranks: int, zigzag: str) -> _Routes:
    mask, ranks, cycles = workload.slices(), np.arange(num_ranks), hamiltonian_cycles(num_ranks)
    whole = np.array([0, workload.num_tokens])
    bounds = sharding.documents_of(mask, workload.num_tokens) if zigzag == "document" else whole
    own, *halves = sharding.zigzag_shards(bounds, num_ranks)
    pieces = [sharding.split(half, len(cycles)) for half in halves]
    edges = sharding.edges_of(own, *pieces)
    in_piece = np.any([sharding.cells_of(half, edges) for half in pieces], axis=0)
    there, (shard, cycle) = in_piece.any(axis=0), np.divmod(in_piece.argmax(axis=0), len(cycles))
    place, steps = np.argsort(cycles, axis=1), np.arange(num_ranks + 1)
    at = (place[None] - steps[:, None, None]) % num_ranks
    source = np.take_along_axis(np.broadcast_to(cycles, at.shape), at, axis=2)
    """Shard whose piece every rank has on each cycle, ``[steps + 1, cycles, ranks]``."""
    has = (source[:, cycle] == shard[:, None]) & there[:, None]
    held = sets_of(has.swapaxes(1, 2).reshape(-1, len(edges) - 1), edges)
    length = np.zeros((num_ranks, len(cycles)), np.int64)
    np.add.at(length, (shard[there], cycle[there]), np.diff(edges)[there])
    to = np.take_along_axis(cycles, (place + 1) % num_ranks, axis=1)
    moved = np.zeros((num_ranks, num_ranks, num_ranks), np.int64)
    every = np.arange(len(cycles))[:, None]
    moved[:, ranks, to] = length[source[:-1], every]
    pairs = np.tile(ranks, num_ranks), num_ranks + np.arange(num_ranks**2)
    seen = sharding.seen_keys(make_tiles(mask, sharding.stack(own, held), *pairs), num_ranks**2)
    sets = sharding.stack(own, seen, held)
    return _Routes(sets, make_tiles(mask, sets, *pairs), moved)


class _Cycles(Staged):
    """One schedule under construction; a stage is a step."""

    def __init__(self, workload: Workload, routes: _Routes) -> None:
        num_ranks = len(routes.moved)
        super().__init__(workload, routes.sets, routes.tiles, num_ranks, num_ranks)
        self.moved, self.steps = routes.moved, num_ranks
        self.most = np.max([self.rows_of(step) for step in range(self.steps)], axis=0)
        """Rows of keys of the step that has most, ``[ranks]``."""
        self.ordered = self.b.buffers("keys in order", self.most * self.kv_bytes)

    def held(self, tensor: str, step: int) -> Int32:
        """Blocks of the keys that ranks have in a step, or of their own ones."""
        sets = self.key_sets(self.steps + step) if 0 < step < self.steps else self.ranks
        return self.b.blocks(tensor, sets, self.heads_of(tensor))

    def forward(self) -> Schedule:
        q, kv = self.given("q", self.q_bytes), self.given("kv", self.kv_bytes)
        out, partial = self.result("out", self.o_bytes, self.lse_bytes)
        moved = self.summed_bytes(self.o_bytes, self.lse_bytes)
        travel = _Travel(self, "kv", self.kv_bytes, kv)
        for step in range(self.steps):
            keys = self.keys(step, travel)
            self.attend(Kind.ATTENTION, step, [q, keys], [self.target(out, partial, step)])
            self.sum(Kind.MERGE, step, moved, out, partial)
        return self.b.build()

    def backward(self) -> Schedule:
        widths = {"q": self.q_bytes, "out": self.o_bytes + self.lse_bytes, "dout": self.o_bytes}
        given, kv = [self.given(tensor, width) for tensor, width in widths.items()], self.given("kv", self.kv_bytes)
        dq, partial = self.result("dq", self.q_bytes)
        dkv_partial = self.b.buffers("dkv partial", self.most * self.kv_bytes)
        moved = self.summed_bytes(self.q_bytes)
        travel = _Travel(self, "kv", self.kv_bytes, kv)
        total = self.b.buffers("dkv sum", self.tokens_held() * self.kv_wide)
        back = _Travel(self, "dkv", self.kv_wide, (total, self.held("dkv", 0)), total)
        for step in range(self.steps):
            keys = self.keys(step, travel)
            made = dkv_partial, self.blocks("dkv", step)
            self.attend(Kind.ATTENTION_BACKWARD, step, [*given, keys], [self.target(dq, partial, step), made])
            self.sum(Kind.ACCUMULATE, step, moved, dq, partial)
            self.add_gradients(step, back, made)
            back.leave(step, Kind.ACCUMULATE)
        dkv = self.b.buffers("dkv", self.own * self.kv_bytes), self.own_blocks("dkv")
        self.b.output(*dkv)
        self.b.add(
            Kind.COPY,
            (self.ranks, "compute"),
            step=self.steps,
            heads=self.heads,
            nbytes=self.own * (self.kv_wide + self.kv_bytes),
            deps=[back.arrival(self.ranks)],
            reads=[back.here],
            writes=[dkv],
        )
        return self.b.build()

    def tokens_held(self) -> Ints:
        """Tokens of the step in which every rank has most keys."""
        held = self.tokens[len(self.ranks) * (1 + self.steps) :]
        return np.asarray(held.reshape(-1, len(self.ranks)).max(axis=0))

    def keys(self, step: int, travel: _Travel) -> Access:
        """Keys of a step as its kernels read them, while those of the next one are on their way."""
        passed_on = step < self.steps - 1
        if passed_on:
            travel.pack(step, Kind.COPY)
        keys, ready = self.in_order(step, travel)
        if passed_on:
            travel.send(step, ready)
        return keys

    def in_order(self, step: int, travel: _Travel) -> tuple[Access, Ints]:
        """Keys where they are, or put in the order of the kernel's sequences; and the ops that did so."""
        source = travel.here[0]
        if step == 0 and self.calls.in_place[self.tile[0]].all():
            return (source, self.blocks("kv", 0)), np.full(len(self.ranks), NOTHING)
        block, who = self.blocks("kv", step), np.flatnonzero(self.active[step])
        made = np.full(len(self.ranks), NOTHING)
        made[who] = self.b.add(
            Kind.COPY,
            (who, "compute"),
            step=step,
            heads=self.heads,
            nbytes=2 * self.rows_of(step)[who] * self.kv_bytes,
            deps=[travel.arrival(who)],
            reads=[(source[who], block[who])],
            writes=[(self.ordered[who], block[who])],
        )
        return (self.ordered, block), made

    def add_gradients(self, step: int, back: _Travel, made: Access) -> None:
        """A step's gradients of keys into the sums that have come with them."""
        if step == 0:
            self.begin(back.here, made)
            return
        r, rows = np.flatnonzero(self.active[step]), self.tokens_of(step)
        self.b.add(
            Kind.ACCUMULATE,
            (r, "compute"),
            step=step,
            heads=self.heads,
            nbytes=self.rows_of(step)[r] * self.kv_bytes + 2 * rows[r] * self.kv_wide,
            deps=[back.arrival(r)],
            reads=[(made[0][r], made[1][r])],
            updates=[(back.here[0][r], made[1][r])],
        )


class _Travel:
    """Keys or gradients on their way around: what ranks have of them, in one buffer, packed in another."""

    def __init__(self, plan: _Cycles, tensor: str, width: int, given: Access, into: Int32 | None = None) -> None:
        self.plan, self.tensor, self.width, self.here = plan, tensor, width, given
        self.arrived, self.ready = (np.full(len(plan.ranks), NOTHING) for _ in range(2))
        """Op that brought what ranks have, until one on ``compute`` has waited for it; op that packed it."""
        nbytes = plan.tokens_held() * width
        self.packed = plan.b.buffers(f"{tensor} by rank", nbytes)
        self.into = plan.b.buffers(f"{tensor} of others", nbytes) if into is None else into

    def arrival(self, ranks: Ints) -> Ints:
        """What an op on ``compute`` of some ranks waits for; those behind it need not."""
        ops = self.arrived[ranks]
        self.arrived[ranks] = NOTHING
        return ops

    def pack(self, step: int, kind: Kind) -> None:
        """Puts what ranks have in the order of those who get it."""
        plan, block = self.plan, self.plan.held(self.tensor, step)
        sent = plan.moved[step].sum(axis=1)
        self.ready = plan.b.add(
            kind,
            (plan.ranks, "compute"),
            step=step,
            heads=plan.heads,
            nbytes=2 * sent * self.width,
            deps=[self.arrival(plan.ranks)],
            reads=[(self.here[0], block)],
            writes=[(self.packed, block)],
        )

    def send(self, step: int, after: Ints) -> None:
        """All pass a piece on to each other rank; what they had may be overwritten ``after`` some ops behind the
        packing ones."""
        plan, b, moved = self.plan, self.plan.b, self.plan.moved[step] * self.width
        source, target = (self.packed, plan.held(self.tensor, step)), (self.into, plan.held(self.tensor, step + 1))
        (op,) = b.add(
            Kind.ALL_TO_ALL,
            (plan.ranks[None], "comm"),
            step=step,
            nbytes=moved.sum(axis=0).max(),
            deps=[np.where(after == NOTHING, self.ready, after)[None]],
            reads=[(source[0][None], source[1][None])],
            writes=[(target[0][None], target[1][None])],
        )
        b.route(int(op), plan.ranks, moved)
        self.here, self.arrived = target, np.full(len(plan.ranks), op)

    def leave(self, step: int, kind: Kind) -> None:
        """Packs and sends."""
        self.pack(step, kind)
        self.send(step, np.full(len(self.plan.ranks), NOTHING))
