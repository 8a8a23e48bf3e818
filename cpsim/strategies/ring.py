"""Ring attention: key-value shards travel around the ranks while queries stay.

Forward, P steps: rank r computes on the shard of rank r - i in step i while it receives the next one; partial
outputs are merged by log-sum-exp in fp32. Backward: key-value shards travel again, and each shard's gradient
follows one step behind on lanes of its own, accumulated in fp32, for P hops until it is home.

Reference: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv 2310.01889), algorithm 1; zigzag:
Zhu, ring-flash-attention. Differs: merge fused in one pass, double-buffered transfers, no padding of documents.
Other people's rings follow from facts about their code (cpsim.implementations).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsim.builder import NOTHING, Access, Builder
from cpsim.cluster import Cluster
from cpsim.errors import ScenarioError
from cpsim.implementations import CPSIM, Implementation, RingCode, Sweep, Sweeps
from cpsim.masks import Ints, RangeSets
from cpsim.schedule import READ, UPDATE, WRITE, Int8, Int32, Kind, Pass, Schedule
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
    """Shard all tokens, or all ``documents``, ``contiguous``-ly, or zigzag by ``document`` or packed ``sequence``."""
    mask = workload.slices()
    source, ranks = _sources(num_ranks), np.arange(num_ranks)
    halves = chunks in ("document", "sequence") and sharding.is_causal(mask)
    bounds = np.array([0, workload.num_tokens])
    if chunks == "contiguous":
        sets = sharding.contiguous(workload.num_tokens, num_ranks)
    elif chunks == "documents":
        sets = sharding.document_contiguous(sharding.documents_of(mask), num_ranks)
    else:
        bounds = sharding.documents_of(mask) if chunks == "document" else bounds
        sets = sharding.stack(*sharding.zigzag_shards(bounds, num_ranks))
    later, earlier = (source > ranks) & halves, (source < ranks) & halves
    query_set = np.where(later, 2 * num_ranks + ranks, ranks)
    key_set = np.where(earlier, num_ranks + source, source)
    tiles = make_tiles(mask, sets, query_set, key_set)
    return Cut(sets, len(bounds) > 2, later, earlier, query_set, key_set, tiles)


def _sources(num_ranks: int) -> Ints:
    """Rank whose keys each rank uses in each step, ``[steps, ranks]``."""
    return (np.arange(num_ranks) - np.arange(num_ranks)[:, None]) % num_ranks


def plan_ring(workload: Workload, cluster: Cluster, pass_: Pass, code: Implementation = CPSIM) -> Schedule:
    """Ring attention on contiguous shards.

    Under a causal mask rank r has work in r + 1 of the P steps only. Others cut every document into P shards, ours
    the packed sequence.
    """
    return plan_cut(workload, cluster, pass_, "contiguous" if code.ring is None else "documents", code.ring)


def plan_zigzag_ring(
    workload: Workload, cluster: Cluster, pass_: Pass, code: Implementation = CPSIM, *, zigzag: str = "document"
) -> Schedule:
    """Ring attention on zigzag shards, which balance causal masks.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        zigzag: ``document`` cuts every document into 2P chunks, which balances any mix of documents;
            ``sequence`` cuts the packed sequence, which keeps short documents whole.
    """
    if zigzag not in ("document", "sequence"):
        raise ScenarioError(f"knobs.zigzag: expected 'document' or 'sequence', got {zigzag!r}")
    several = len(sharding.documents_of(workload.slices())) > 2
    ring = code.zigzag_documents if several and code.zigzag_documents else code.ring
    return plan_cut(workload, cluster, pass_, zigzag, ring)


def plan_cut(workload: Workload, cluster: Cluster, pass_: Pass, chunks: str, code: RingCode | None) -> Schedule:
    """A ring on shards that are cut as ``cut`` says."""
    ring = _Ring(workload, cluster.num_gpus, chunks, code)
    return ring.forward() if pass_ == "fwd" else ring.backward()


def zigzag_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying."""
    del cluster
    if len(sharding.documents_of(workload.slices())) > 2:
        return ({"zigzag": "document"}, {"zigzag": "sequence"})
    return ({},)


Mask = NDArray[np.bool_]


@dataclass(slots=True)
class _Slot:
    """A place in the loop over steps: one op, or none, on every rank in every step; arrays ``[steps, ranks]``."""

    where: Mask
    nbytes: Ints | int = 0
    kinds: Ints | Int8 | int = int(Kind.COPY)
    at: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Indices of the ops, once all slots of a schedule are in order; NOTHING where there is none."""


class _Ring:
    """One ring schedule under construction; arrays are ``[ranks]``, or ``[steps, ranks]`` and indexed by (s, r).

    A batched send and receive is one launch: whoever waits for what it brought waits for what it took along, too.
    """

    def __init__(self, workload: Workload, num_ranks: int, chunks: str, code: RingCode | None) -> None:
        self.cut, self.code = cut(workload, num_ranks, chunks), code
        self.num_ranks, self.ranks, self.steps = num_ranks, np.arange(num_ranks), np.arange(num_ranks)[:, None]
        self.next, self.previous = (self.ranks + 1) % num_ranks, self.ranks - 1
        self.source = _sources(num_ranks)
        self.workload, self.sizes = workload, Sizes(workload)
        self.heads = (0, workload.num_heads, 0, workload.num_kv_heads)
        self.q_bytes = self.sizes.query(workload.num_heads)
        self.kv_bytes = self.sizes.kv(workload.num_kv_heads)
        self.lse_bytes = self.sizes.lse(workload.num_heads)
        self.tails, self.query_set, self.key_set = self.cut.tails, self.cut.query_set, self.cut.key_set
        self.tile = 1 + np.arange(num_ranks**2).reshape(num_ranks, num_ranks)
        self.active = self.cut.tiles.area[self.tile] > 0
        self.unseen = ~self.active & (self.steps == 0) & (self.cut.sets.num_tokens()[:num_ranks] > 0)
        """Ranks whose queries see none of their own keys: sums of gradients of keys start with zeros."""
        self.packs = self.cut.key_heads & self.active & self.cut.scattered
        """Key heads are packed for the kernel."""
        tokens = self.cut.sets.num_tokens()
        self.tokens, self.tail_rows = tokens[:num_ranks], tokens[-num_ranks:]
        self.q_rows, self.k_rows = tokens[self.query_set], tokens[self.key_set]
        self.rows = Accumulation(self.active, self.q_rows, ~self.tails, self.tail_rows)
        self.sums = self.rows.sums
        self.firsts = self.active & ~self.sums if code else np.zeros_like(self.active)
        """Steps whose partial result is copied into an accumulator: ours is written in place."""
        self.moves = np.broadcast_to(self.steps < num_ranks - 1, self.active.shape)
        """Steps in which keys and values are sent on."""
        sets = self.cut.sets
        if code and code.gathers:
            sets = sharding.stack(sets, sharding.contiguous(workload.num_tokens, 1))
        self.b = Builder(num_ranks, sets, self.cut.tiles)

    def forward(self) -> Schedule:
        b = self.b
        q, kv = self.input("q", self.q_bytes), self.input("kv", self.kv_bytes)
        out = self.output("out", self.q_bytes, self.lse_bytes)
        partial = b.buffers("out partial", self.tokens * (self.q_bytes + self.lse_bytes))
        total = self.accumulator(out, "out", self.lse_bytes)
        entered = self.enter("fwd")
        tails = self.pack_tails([q], self.q_bytes)
        joins, sends = self.joins(), _Slot(self.sent())
        packs, unpacks, attends, merges = _Slot(self.packs), self.unpacked(), _Slot(self.active), self.merges()
        self.order(joins, [sends], [packs], unpacks, [attends], merges)
        for sweeps in (joins, unpacks):
            self.sweep(sweeps)
        launched = self.launched(entered, [*joins, attends, *merges], sends)
        keys, ready = self.feed(kv, sends.at, packs.at, attends.at, launched)
        s, r = np.nonzero(self.active)
        made = out[1][self.query_set]
        b.add(
            Kind.ATTENTION, (r, "compute"), at=attends.at[s, r], step=s, tile=self.tile[s, r], heads=self.heads,
            deps=[d[s, r] for d in ready], reads=[self.queries(q, tails, s, r), keys],
            writes=[(self.target(partial, out)[s, r], made[s, r])],
        )  # fmt: skip
        self.add_up((Kind.ACCUMULATE, Kind.MERGE), merges, (self.firsts, self.sums), partial, self.every(total), made)
        self.leave("fwd", total, out)
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
        total = self.accumulator(dq, "dq", 0)
        entered = self.enter("bwd")
        tails = self.pack_tails(given, sum(widths.values()))
        joins, sends, packs, attends = self.joins(), _Slot(self.sent()), _Slot(self.packs), _Slot(self.active)
        unpacks = self.unpacked()
        readies, dq_sums, dkv_sums, dkv_joins = self.sums_of_gradients(wire)
        returns = _Slot(np.full(self.active.shape, wire))
        last = [dkv_sums, dkv_joins, [returns]]
        late = self.code is not None and self.code.queries_last
        after = [*last, dq_sums] if late else [dq_sums, *last]
        self.order(joins, [sends], [packs], unpacks, readies, [attends], *after)
        for sweeps in (joins, unpacks, readies, dkv_joins):
            self.sweep(sweeps)
        kernels = [*joins, *readies, attends, *dq_sums, *dkv_sums, *dkv_joins]
        launched = self.launched(entered, kernels, sends)
        if launched and wire:
            before = delayed(returns.at)
            launched += [before[:, self.previous], before[:, self.next]]
        keys, ready = self.feed(kv, sends.at, packs.at, attends.at, launched)
        s, r = np.nonzero(self.active)
        made = dq[1][self.query_set], dkv[1][self.key_set]
        b.add(
            Kind.ATTENTION_BACKWARD, (r, "compute"), at=attends.at[s, r], step=s, tile=self.tile[s, r],
            heads=self.heads, deps=[d[s, r] for d in ready],
            reads=[*(self.queries(g, tails, s, r) for g in given), keys],
            writes=[(self.target(dq_partial, dq)[s, r], made[0][s, r]), (dkv_partial[r], made[1][s, r])],
        )  # fmt: skip
        cases = self.firsts, self.sums
        self.add_up((Kind.ACCUMULATE, Kind.ACCUMULATE), dq_sums, cases, dq_partial, self.every(total), made[0])
        if wire:
            launched = self.launched(entered, kernels, returns)
            if launched:
                launched += [sends.at[:, self.previous], sends.at[:, self.next]]
            travelled = self.return_gradients(dkv, dkv_partial, dkv_sums, returns.at, launched)
            self.leave("bwd", total, dq, (travelled, dkv), returns.at)
        return b.build()

    def input(self, tensor: str, width: int) -> Access:
        """Every rank's shard of a given tensor: buffers ``[ranks]``, and blocks of every set of the layout."""
        made = self.b.buffers(tensor, self.tokens * width), self.blocks(tensor)
        self.b.input(made[0], made[1][self.ranks])
        return made

    def output(self, tensor: str, width: int, extra: int, summed: bool = True) -> Access:
        """The same of a result, with its fp32 accumulator where partial results are summed in place."""
        summed &= self.code is None and bool(self.sums.any())
        summing = self.sizes.accumulator(width) if summed else 0
        made = self.b.buffers(tensor, self.tokens * (width + extra + summing)), self.blocks(tensor)
        self.b.output(made[0], made[1][self.ranks])
        return made

    def accumulator(self, result: Access, tensor: str, extra: int) -> Access:
        """Where the partial results of queries are summed: our result itself, or an fp32 tensor beside it."""
        if self.code is None:
            return result
        nbytes = self.tokens * (self.sizes.accumulator(self.q_bytes) + extra) * (self.code.copies if extra else 1)
        return self.b.buffers(f"{tensor} sum", nbytes), result[1]

    def every(self, access: Access) -> Int32:
        """The same buffer of a rank in every step, ``[steps, ranks]``."""
        return np.broadcast_to(access[0], self.active.shape)

    def target(self, partial: Int32, result: Access) -> Int32:
        """Buffers that kernels write on the query side, ``[steps, ranks]``: a first result in place if we can."""
        return np.where(self.sums | self.firsts, partial, result[0])

    def blocks(self, tensor: str) -> Int32:
        """Blocks of a tensor for every set of the layout, in its order."""
        heads = self.heads[2:] if tensor.endswith("kv") else self.heads[:2]
        return self.b.blocks(tensor, np.arange(len(self.b.sets)), heads)

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

    def sent(self) -> Mask:
        """Ops that move keys and values: transfers, or one all-gather."""
        if self.code and self.code.gathers:
            return np.asarray(self.moves & (self.steps == 0) & (self.ranks == 0))
        return self.moves

    def order(self, *groups: list[_Slot]) -> None:
        """Put slots in the order in which every step runs through them."""
        slots = [slot for group in groups for slot in group]
        for slot, at in zip(slots, self.b.interleave(*(slot.where for slot in slots)), strict=True):
            slot.at = at

    def slots(self, *cases: tuple[Mask, Sweeps, Ints]) -> list[_Slot]:
        """Slots of sweeps: case by case the steps where they run, and rows of the partial result."""
        made = []
        for i in range(max(len(sweeps) for _, sweeps, _ in cases)):
            here = [(where, sweeps[i], rows) for where, sweeps, rows in cases if i < len(sweeps)]
            kinds = np.zeros(self.active.shape, np.int8)
            nbytes = np.zeros(self.active.shape, np.int64)
            for where, sweep, rows in here:
                kinds[where] = sweep.kind
                nbytes += np.where(where, self.swept(sweep, rows), 0)
            made.append(_Slot(np.logical_or.reduce([where for where, _, _ in here]), nbytes, kinds))
        return made

    def swept(self, sweep: Sweep, part: Ints) -> Ints:
        """Bytes of a sweep, in the shape of the rows of a partial result."""
        rows = {"part": part, "whole": self.tokens, "tails": self.tail_rows}[sweep.rows]
        return sweep.nbytes(rows, self.workload)

    def sweep(self, slots: list[_Slot]) -> None:
        """Sweeps that do a part of what other ops say."""
        for slot in slots:
            kinds, nbytes = (np.broadcast_to(x, slot.where.shape) for x in (slot.kinds, slot.nbytes))
            for kind in np.unique(kinds[slot.where]).tolist():
                s, r = np.nonzero(slot.where & (kinds == kind))
                self.b.add(Kind(kind), (r, "compute"), at=slot.at[s, r], step=s, nbytes=nbytes[s, r])

    def enter(self, pass_: Pass) -> Ints:
        """A call into other people's code and its first sweeps; returns the last op of every rank."""
        if self.code is None:
            return np.full(self.num_ranks, NOTHING)
        last = self.b.add(Kind.BARRIER, (self.ranks, "compute"))
        documents = len(sharding.documents_of(self.workload.slices())) - 1
        tiny = self.code.per_document.get(pass_, 0) * documents
        for _ in range(tiny):
            last = self.b.add(Kind.COPY, (self.ranks, "compute"))
        for sweep in self.code.enter[pass_]:
            last = self.b.add(sweep.kind, (self.ranks, "compute"), nbytes=self.swept(sweep, self.tokens))
        return last

    def joins(self) -> list[_Slot]:
        """Sweeps that bring keys and values together before they are sent."""
        return self.slots((self.moves, self.code.send, self.k_rows)) if self.code else []

    def unpacked(self) -> list[_Slot]:
        """Sweeps that go with the packing of key heads."""
        return self.slots((self.packs, self.code.pack, self.k_rows)) if self.code and self.cut.scattered else []

    def merges(self) -> list[_Slot]:
        """What follows a kernel: ours one fused merge."""
        if self.code is None:
            moved = self.rows.traffic(self.q_bytes, self.sizes.accumulator(self.q_bytes), 3 * self.lse_bytes)
            return [_Slot(self.sums, moved)]
        return self.slots(
            (self.firsts, self.code.first, self.q_rows),
            (self.sums & ~self.tails, self.code.merge, self.q_rows),
            (self.sums & self.tails, self.code.merge_tails, self.q_rows),
        )

    def sums_of_gradients(self, wire: bool) -> tuple[list[_Slot], list[_Slot], list[_Slot], list[_Slot]]:
        """Backward's sweeps before a kernel; those that sum gradients of queries; of keys; and before these leave."""
        code, later, whole = self.code, self.active & (self.steps > 0), ~self.cut.key_heads
        if code is None:
            narrow, wide = self.kv_bytes, self.sizes.accumulator(self.kv_bytes)
            dkv = self.k_rows * (narrow * ~self.unseen + wide * np.where(self.steps == 0, 1, 2))
            moved = self.rows.traffic(self.q_bytes, self.sizes.accumulator(self.q_bytes), 0)
            return [], [_Slot(self.sums, moved)], [_Slot((self.active | self.unseen) & wire, dkv)], []
        return (
            self.slots(
                (self.active & self.tails, code.read_tails, self.q_rows),
                (self.active & ~self.tails & self.tails.any(axis=0), code.read, self.q_rows),
            ),
            self.slots(
                (self.firsts, code.first_dq, self.q_rows), (self.sums & ~self.tails, code.sum_dq, self.q_rows),
                (self.sums & self.tails, code.sum_dq_tails, self.q_rows), (~self.active, code.idle_dq, self.q_rows),
            ),
            self.slots(
                (self.active & ~later, code.first_dkv, self.k_rows), (later & whole, code.sum_dkv, self.k_rows),
                (later & ~whole, code.sum_dkv_heads, self.k_rows), (~self.active, code.idle_dkv, self.k_rows),
            ),
            self.slots((np.ones_like(self.active), code.send_dkv, self.k_rows)),
        )  # fmt: skip

    def launched(self, entered: Ints, kernels: list[_Slot], transfers: _Slot) -> list[Ints] | None:
        """What transfers wait for in other people's code: the last kernels that either rank launched before them."""
        if self.code is None:
            return None
        last = np.broadcast_to(entered, self.active.shape).copy()
        ops = np.sort(np.concatenate([entered[None, :], *(slot.at for slot in kernels)]), axis=0)
        for rank in self.ranks:
            first = transfers.at.max(axis=1, where=transfers.where, initial=NOTHING)
            last[:, rank] = ops[np.searchsorted(ops[:, rank], first) - 1, rank]
        return [last, last[:, self.next]]

    def add_up(
        self, kinds: tuple[Kind, Kind], slots: list[_Slot], cases: tuple[Mask, Mask], partial: Int32, totals: Int32,
        blocks: Int32, deps: Sequence[Ints] = (), zeros: Mask | None = None,
    ) -> None:  # fmt: skip
        """Sum partial results into accumulators.

        Args:
            kinds: of the ops that copy a first result, and that sum later ones.
            slots: the first one does so, the others are sweeps that go with it.
            cases: where a first result is copied, and where a later one is summed; ``[steps, ranks]``.
            partial: buffers of the partial results, ``[ranks]``.
            totals, blocks: buffers of the accumulators and what they hold, ``[steps, ranks]``.
            deps: what the first slot waits for.
            zeros: where accumulators start with zeros instead of a first result, ``[steps, ranks]``.
        """
        zeros = np.zeros_like(self.active) if zeros is None else zeros
        rest = slots[0].where & ~cases[0] & ~cases[1] & ~zeros
        for kind, where, reads, mode in (
            (kinds[0], cases[0], True, WRITE), (kinds[1], cases[1], True, UPDATE),
            (Kind.ACCUMULATE, zeros, False, WRITE), (Kind.COPY, rest, False, READ),
        ):  # fmt: skip
            s, r = np.nonzero(where)
            read, summed = [(partial[r], blocks[s, r])], [(totals[s, r], blocks[s, r])]
            self.b.add(
                kind, (r, "compute"), at=slots[0].at[s, r], step=s, heads=self.heads,
                nbytes=np.broadcast_to(slots[0].nbytes, where.shape)[s, r], deps=[d[s, r] for d in deps],
                reads=read if reads else (), writes=summed if mode == WRITE else (),
                updates=summed if mode == UPDATE else (),
            )  # fmt: skip
        self.sweep(slots[1:])

    def leave(
        self, pass_: Pass, total: Access, result: Access, home: tuple[Int32, Access] | None = None,
        returns: Ints | None = None,
    ) -> None:  # fmt: skip
        """Cast sums into results: those of queries in other people's code, and gradients of keys that came home."""
        came = [] if returns is None else [returns[-1, self.previous], returns[-1]]
        if self.code is None:
            narrow, wide = self.kv_bytes, self.sizes.accumulator(self.kv_bytes)
            casts = [] if home is None else [(home, [self.tokens * (wide + narrow)], came)]
        else:
            first, *others = (self.swept(sweep, self.tokens) for sweep in self.code.leave[pass_])
            casts = [((total[0], result), [first], [] if self.code.queries_last else came)]
            casts += [] if home is None else [(home, others, came)]
        for (source, made), sweeps, deps in casts:
            for i, nbytes in enumerate(sweeps):
                own = made[1][self.ranks]
                self.b.add(
                    Kind.COPY, (self.ranks, "compute"), step=self.num_ranks, heads=self.heads, nbytes=nbytes, deps=deps,
                    reads=[(source, own)] * (i == 0), writes=[(made[0], own)] * (i == 0),
                )  # fmt: skip

    def feed(
        self, kv: Access, sends: Ints, packs: Ints, attends: Ints, launched: list[Ints] | None
    ) -> tuple[Access, list[Ints]]:
        """Move key-value shards around the ring, double-buffered, and pack key heads where they lie scattered.

        Args:
            kv: the ranks' own shards.
            sends, packs, attends: indices of the ops.
            launched: what transfers of other people's code wait for.

        Returns:
            what the attention ops read, and the ops that they wait for, ``[steps, ranks]`` each: the batched send
            and receive that brought the shard is one launch, waited for as a whole.
        """
        if self.code and self.code.gathers:
            return self.feed_gathered(kv, sends, launched)
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
            nbytes=self.tokens[self.source[s, r]] * self.kv_bytes,
            deps=[d[s, r] for d in (arrived, *(free if launched is None else [sent[:, self.next], *launched]))],
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

    def feed_gathered(self, kv: Access, sends: Ints, launched: list[Ints] | None) -> tuple[Access, list[Ints]]:
        """The same with one all-gather, launched in the first step."""
        b, everyone = self.b, self.ranks[None, :]
        whole = b.buffers("kv of all", np.full(self.num_ranks, self.workload.num_tokens * self.kv_bytes))
        b.add(
            Kind.ALL_GATHER, (everyone, "comm"), at=sends[0, :1], nbytes=self.workload.num_tokens * self.kv_bytes,
            deps=[ops[:1] for ops in launched or ()], reads=[(kv[0][everyone], kv[1][everyone])],
            writes=[(whole[everyone], np.broadcast_to(kv[1][-1], everyone.shape))],
        )  # fmt: skip
        s, r = np.nonzero(self.active)
        holder = np.where(self.steps == 0, kv[0], whole)
        ready = np.where(self.steps == 0, NOTHING, np.broadcast_to(sends[0, 0], self.active.shape))
        return (holder[s, r], kv[1][self.key_set[s, r]]), [ready]

    def return_gradients(
        self, home: Access, partial: Int32, sums: list[_Slot], sends: Ints, launched: list[Ints] | None
    ) -> Int32:
        """Key-value gradients follow the keys one step behind, summed in fp32; returns where they are in the end."""
        b, width = self.b, self.sizes.accumulator(self.kv_bytes)
        travel = self.travel_buffers("dkv ring", width, self.num_ranks)
        arrived, sent = delayed(sends[:, self.previous]), delayed(sends)
        cases = self.active & (self.steps == 0), self.active & (self.steps > 0)
        totals = travel[self.steps % 2, self.ranks]
        kinds = Kind.ACCUMULATE, Kind.ACCUMULATE
        zeros = self.unseen if self.code is None else None
        self.add_up(kinds, sums, cases, partial, totals, home[1][self.key_set], [arrived, sent], zeros)
        s, r = np.nonzero(sends >= 0)
        block = home[1][self.source[s, r]]
        if launched is None:
            lanes = "grad_send", "grad_recv"
            free = [sent[s, self.next[r]]] if self.num_ranks > 2 else []
            deps = [np.where(sums[0].at >= 0, sums[0].at, arrived)[s, r], *free]
        else:
            lanes = "send", "recv"
            deps = [ops[s, r] for ops in (arrived, sent[:, self.next], *launched)]
        b.add(
            Kind.TRANSFER, (r, lanes[0]), (self.next[r], lanes[1]), at=sends[s, r], step=s,
            nbytes=self.tokens[self.source[s, r]] * width, deps=deps,
            reads=[(travel[s % 2, r], block)], writes=[(travel[(s + 1) % 2, self.next[r]], block)],
        )  # fmt: skip
        return np.asarray(travel[self.num_ranks % 2])


def delayed(ops: Ints) -> Ints:
    """The ops of the step before, ``[steps, ranks]``; NOTHING before the first."""
    return np.concatenate([np.full((1, ops.shape[1]), NOTHING), ops[:-1]])
