"""Attention over the rings of a grid: the ops of all ranks and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import READ, UPDATE, WRITE, Int32, Kind, Mask, Pass
from cpsim.strategies.others import RingCode
from cpsim.strategies.ring.code import Ours, Slot, Theirs, emit_row_kernels
from cpsim.strategies.ring.steps import Steps, Where


class RingTensors:
    """What rings are given and make: accesses of a buffer of every rank ``[ranks]`` and a block of every part of the
    heads and set of the cut ``[parts * sets]``.
    """

    def __init__(self, b: Builder, steps: Steps) -> None:
        self.b, self.x = b, steps
        self.ranks = steps.ranks
        self.ready = self.keys_ready = np.full(steps.num_ranks, NOTHING)
        """Ops that the first op on ``compute`` waits for, and the first transfer, where other ops made its input."""

    def blocks(self, tensor: str) -> Int32:
        """Blocks of a tensor for every part of the heads and every set of the cut, ``[parts * sets]``."""
        sets = self.x.cut.first_set + np.arange(self.x.num_sets)
        return np.concatenate([self.b.blocks(tensor, sets, heads) for heads in self.x.heads_of_parts(tensor)])

    def shard(self, tensor: Access) -> Access:
        """Every rank's whole shard of a tensor, ``[ranks]`` both."""
        return tensor[0], tensor[1][self.x.own]

    def held(self, name: str, tensor: Access) -> Access:
        """What a tensor of this name has of the ranks' own, for ranks whose rings have tokens."""
        there, own = self.x.longest > 0, self.x.own if name.endswith("kv") else self.x.own_queries
        return tensor[0][there], tensor[1][own[there]]

    def rows(self, name: str) -> Ints:
        """Tokens of every rank that a tensor of this name has, ``[ranks]``."""
        return self.x.tokens if name.endswith("kv") else self.x.queries

    def given(self, tensor: str, width: int) -> Access:
        """Every rank's shard as an input of the schedule."""
        made = self.b.buffers(tensor, self.rows(tensor) * width), self.blocks(tensor)
        self.b.input(*self.held(tensor, made))
        return made

    def result(self, tensor: str, width: int, extra: int = 0, *, summed: bool = True, output: bool = True) -> Access:
        """Buffers of a result, with its fp32 accumulator where partial results are summed in place."""
        summing = self.summing(width) if summed else 0
        name = tensor if output else f"{tensor} of group"
        made = self.b.buffers(name, self.rows(tensor) * (width + extra + summing)), self.blocks(tensor)
        if output:
            self.b.output(*self.held(tensor, made))
        return made

    def summing(self, width: int) -> int:
        """Bytes per token that a result of ``width`` needs for its sums."""
        del width
        return 0


class Ring(RingTensors):
    """Rings under construction; arrays are ``[ranks]`` or ``[steps, ranks]``.

    A batched send and receive is one launch: whoever waits for what it brought waits for what it took along, too.
    """

    def __init__(self, b: Builder, steps: Steps, facts: RingCode | None) -> None:
        super().__init__(b, steps)
        self.code = Ours(b, steps) if facts is None else Theirs(b, steps, facts)
        self.put_off: list[Callable[[], object]] | None = None
        """Where the last casts are put instead of being emitted, so that other kernels can run before them."""

    def summing(self, width: int) -> int:
        """As its code does."""
        return self.code.summing(width)

    def forward(self, q: Access, kv: Access, out: Access) -> Ints:
        """All steps of a forward pass; returns the op of every rank that completes its output."""
        b, x, code = self.b, self.x, self.code
        partial = b.buffers("out partial", x.queries * (x.o_bytes + x.lse_bytes))
        total = code.accumulator(out, "out", x.lse_bytes)
        entered = code.enter("fwd", self.ready)
        tails = self.pack_tails([q], x.q_bytes, entered)
        joins, (ahead, behind) = code.joins(), self.sends()
        packs, unpacks, attends, merges = Slot(x.packs), code.unpacked(), Slot(x.active), code.merges()
        self.order(joins, ahead, [packs], unpacks, [attends], behind, merges)
        sends = joined(ahead, behind)
        emit_row_kernels(b, [*joins, *unpacks])
        launched = self.launched(entered, [*joins, attends, *merges], sends)
        keys, ready = self.feed(kv, sends, packs.at, attends.at, launched)
        here, made = Where.true(x.active), out[1][x.of_queries]
        b.add(
            Kind.ATTENTION,
            (here.r, "compute"),
            at=here.of(attends.at),
            step=here.s,
            tile=here.of(x.tile),
            heads=x.heads_of(here.r),
            deps=[*self.first(here, tails, entered), *map(here.of, ready)],
            reads=[self.queries(q, tails, here), keys],
            writes=[(here.of(self.target(partial, out)), here.of(made))],
        )
        cases = code.firsts, x.sums
        self.add_up((Kind.ACCUMULATE, Kind.MERGE), merges, cases, partial, self.every(total), made)
        casts = self.leave("fwd", total, out)
        return casts[0] if casts else _last(attends, merges[0])

    def backward(self, given: Sequence[Access], kv: Access, dq: Access, dkv: Access) -> tuple[Ints, Ints]:
        """All steps of a backward pass.

        Args:
            given: q, dout and out.
            kv: keys and values.
            dq, dkv: results.

        Returns:
            the ops of every rank that complete dq and dkv.
        """
        b, x, code = self.b, self.x, self.code
        wire = code.lockstep or x.grid.num_places > 1  # others send the gradients of a ring of one to themselves
        dq_partial = b.buffers("dq partial", x.tokens * x.q_bytes)
        dkv_partial = b.buffers("dkv partial", x.longest * x.kv_bytes) if wire else dkv[0]
        total = code.accumulator(dq, "dq", 0)
        entered = code.enter("bwd", self.ready)
        tails = self.pack_tails(given, x.q_bytes + 2 * x.o_bytes + x.lse_bytes, entered)
        joins, packs, attends = code.joins(), Slot(x.packs), Slot(x.active)
        ahead, behind = self.sends(code.one_stream)
        unpacks, g, returns = code.unpacked(), code.gradients(wire), Slot(x.mask(x.number[:, 0]) & wire)
        last = [g.dkv, g.joins, [returns]]
        after = [*last, g.dq] if code.queries_last else [g.dq, *last]
        self.order(joins, ahead, [packs], unpacks, g.reads, [attends], behind, *after)
        sends = joined(ahead, behind)
        emit_row_kernels(b, [*joins, *unpacks, *g.reads, *g.joins])
        kernels = [*joins, *g.reads, attends, *g.dq, *g.dkv, *g.joins]
        launched = self.launched(entered, kernels, sends)
        if code.one_stream and wire and launched:
            before = delayed(returns.at)
            launched[0] += [before[:, x.tracks[0].previous], before[:, x.tracks[0].next]]
        keys, ready = self.feed(kv, sends, packs.at, attends.at, launched)
        here, made = Where.true(x.active), (dq[1][x.of_queries], dkv[1][x.of_keys])
        b.add(
            Kind.ATTENTION_BACKWARD,
            (here.r, "compute"),
            at=here.of(attends.at),
            step=here.s,
            tile=here.of(x.tile),
            heads=x.heads_of(here.r),
            deps=[*self.first(here, tails, entered), *map(here.of, ready)],
            reads=[*(self.queries(t, tails, here) for t in given), keys],
            writes=[(here.of(self.target(dq_partial, dq)), here.of(made[0])), (dkv_partial[here.r], here.of(made[1]))],
        )
        cases = code.firsts, x.sums
        self.add_up((Kind.ACCUMULATE, Kind.ACCUMULATE), g.dq, cases, dq_partial, self.every(total), made[0])
        if not wire:
            return _last(attends, g.dq[0]), _last(attends)
        before_returns = code.launched(entered, kernels, returns, x.grid.hops[0])
        if code.one_stream and sends:
            before_returns += [sends[0].at[:, x.tracks[0].previous], sends[0].at[:, x.tracks[0].next]]
        travelled, came = self.return_gradients(dkv, dkv_partial, g.dkv, returns.at, before_returns)
        casts = self.leave("bwd", total, dq, (travelled, dkv), came)
        return casts[0] if len(casts) > 1 else _last(attends, g.dq[0]), casts[-1] if casts else came[0]

    def every(self, access: Access) -> Int32:
        """Buffer of a rank, equal in every step, ``[steps, ranks]``."""
        return np.broadcast_to(access[0], self.x.active.shape)

    def target(self, partial: Int32, result: Access) -> Int32:
        """Buffers that kernels write on the query side, ``[steps, ranks]``: a first result in place if we can."""
        return np.where(self.x.sums | self.code.firsts, partial, result[0])

    def travel_buffers(self, name: str, width: int, hops: int) -> Int32:
        """Two receive buffers for every rank, ``[2, ranks]``, big enough for the shards of its ring; one where one hop
        is all."""
        nbytes = self.x.longest * width
        made = [self.b.buffers(f"{name} {i}", nbytes) for i in range(min(2, hops))]
        return np.stack([made[0], made[-1]]) if made else np.zeros((2, self.x.num_ranks), np.int32)

    def first(self, kernels: Where, tails: Int32 | None, entered: Ints) -> list[Ints]:
        """What the first kernel of a rank waits for, which is in a later step where it sees none of its own keys."""
        waits = (entered >= 0) & (not self.code.lockstep)
        if tails is not None:
            waits &= ~(self.x.tails.any(axis=0) & self.x.scattered)
        if not waits.any():
            return []
        r, begins = kernels.r, self.x.active.argmax(axis=0)
        return [np.where((kernels.s == begins[r]) & waits[r], entered[r], NOTHING)]

    def pack_tails(self, tensors: Sequence[Access], width: int, after: Ints) -> Int32 | None:
        """Copy the tail rows of query-side tensors side by side, once; None where they lie so already."""
        x = self.x
        who = np.flatnonzero(x.tails.any(axis=0) & x.scattered)
        if len(who) == 0:
            return None
        packed = self.b.buffers("query tails", x.tail_rows * width)
        self.b.add(
            Kind.COPY,
            (who, "compute"),
            heads=x.heads_of(who),
            nbytes=2 * width * x.tail_rows[who],
            deps=[] if self.code.lockstep else [after[who]],
            reads=[(buffer[who], block[x.tail[who]]) for buffer, block in tensors],
            writes=[(packed[who], block[x.tail[who]]) for _, block in tensors],
        )
        return packed

    def queries(self, whole: Access, tails: Int32 | None, kernels: Where) -> Access:
        """What kernels read on the query side: packed tails where they compute on tails only."""
        buffer, block = whole[0][kernels.r], whole[1][kernels.of(self.x.of_queries)]
        if tails is None:
            return buffer, block
        packed = kernels.of(self.x.tails) & self.x.scattered[kernels.r]
        return np.where(packed, tails[kernels.r], buffer), block

    def launched(self, entered: Ints, kernels: list[Slot], sends: list[Slot]) -> list[list[Ints]]:
        """What transfers of keys and values wait for beside data and buffers, for every track."""
        tracks = zip(sends, self.x.tracks, strict=False)
        return [self.code.launched(entered, kernels, slot, track.next) for slot, track in tracks]

    def sends(self, late: bool = True) -> tuple[list[Slot], list[Slot]]:
        """Ops that move keys and values, transfers of every track or one all-gather: those that run beside the kernel
        of their step, and those that come after it, if any of other people's code do.
        """
        x = self.x
        if self.code.gathers:
            return [Slot(x.moves & (x.number == 0) & (self.ranks == 0))], []
        leaves, after = [x.mask(track.leaves) for track in x.tracks], (x.number > 0) & (self.code.lockstep and late)
        return [Slot(here & ~after) for here in leaves], [Slot(here & after) for here in leaves]

    def order(self, *groups: list[Slot]) -> None:
        """Put slots in the order in which every step runs through them."""
        slots = [slot for group in groups for slot in group]
        for slot, at in zip(slots, self.b.interleave(*(slot.where for slot in slots)), strict=True):
            slot.at = at

    def add_up(
        self,
        kinds: tuple[Kind, Kind],
        slots: list[Slot],
        cases: tuple[Mask, Mask],
        partial: Int32,
        totals: Int32,
        blocks: Int32,
        deps: Sequence[Ints] = (),
        zeros: Mask | None = None,
    ) -> None:
        """Sum partial results into accumulators.

        Args:
            kinds: of the ops that copy a first result, and that sum later ones.
            slots: the first one does so, the others are row kernels that go with it.
            cases: where a first result is copied, and where a later one is summed; ``[steps, ranks]``.
            partial: buffers of the partial results, ``[ranks]``.
            totals, blocks: buffers of the accumulators and what they hold, ``[steps, ranks]``.
            deps: what the first slot waits for.
            zeros: where accumulators start with zeros instead of a first result, ``[steps, ranks]``.
        """
        zeros = np.zeros_like(self.x.active) if zeros is None else zeros
        rest = slots[0].where & ~cases[0] & ~cases[1] & ~zeros
        for kind, where, reads, mode in (
            (kinds[0], cases[0], True, WRITE),
            (kinds[1], cases[1], True, UPDATE),
            (Kind.ACCUMULATE, zeros, False, WRITE),
            (Kind.COPY, rest, False, READ),
        ):
            if not where.any():
                continue
            here = Where.true(where)
            block = here.of(blocks)
            read, summed = [(partial[here.r], block)], [(here.of(totals), block)]
            self.b.add(
                kind,
                (here.r, "compute"),
                at=here.of(slots[0].at),
                step=here.s,
                heads=self.x.heads_of(here.r),
                nbytes=here.of(np.broadcast_to(slots[0].nbytes, where.shape)),
                deps=[here.of(d) for d in deps],
                reads=read if reads else (),
                writes=summed if mode == WRITE else (),
                updates=summed if mode == UPDATE else (),
            )
        emit_row_kernels(self.b, slots[1:])

    def leave(
        self,
        pass_: Pass,
        total: Access,
        result: Access,
        home: tuple[Int32, Access] | None = None,
        came: Sequence[Ints] = (),
    ) -> list[Ints]:
        """Cast sums into results: those of queries in other people's code, and gradients of keys that came home.

        Returns the first op of each; none where they are put off.
        """
        emit = partial(self._cast, pass_, total, result, home, came)
        if self.put_off is None:
            return emit()
        self.put_off.append(emit)
        return []

    def _cast(
        self, pass_: Pass, total: Access, result: Access, home: tuple[Int32, Access] | None, came: Sequence[Ints]
    ) -> list[Ints]:
        """Emit these casts."""
        queries, keys = self.code.casts(pass_, home is not None)
        jobs = [((total[0], result), queries, [] if self.code.queries_last else came)] if queries else []
        jobs += [] if home is None else [(home, keys, came)]
        done, r = [], np.flatnonzero(self.x.longest)
        for (source, made), sizes, deps in jobs:
            own = made[0][r], made[1][self.x.own[r]]
            for i, nbytes in enumerate(sizes):
                cast = self.b.add(
                    Kind.COPY,
                    (r, "compute"),
                    step=self.x.grid.num_places,
                    heads=self.x.heads_of(r),
                    nbytes=nbytes[r],
                    deps=[d[r] for d in deps],
                    reads=[(source[r], own[1])] * (i == 0),
                    writes=[own] * (i == 0),
                )
                done += [cast] if i == 0 else []
        return done

    def feed(
        self, kv: Access, slots: list[Slot], packs: Ints, attends: Ints, launched: list[list[Ints]]
    ) -> tuple[Access, list[Ints]]:
        """Move key-value shards around the rings, double-buffered, and pack key heads where they lie scattered.

        Args:
            kv: the ranks' own shards.
            slots: transfers of every track.
            packs, attends: indices of the ops.
            launched: what transfers of every track of other people's code wait for.

        Returns:
            what the attention ops read, and the ops that they wait for, ``[steps, ranks]`` each: the batched send
            and receive that brought the shard is one launch, waited for as a whole.
        """
        x = self.x
        if self.code.gathers:
            return self.feed_gathered(kv, slots[0].at, launched[0])
        holder = np.broadcast_to(kv[0], x.active.shape).copy()
        arrived, sent = np.full((2, *x.active.shape), NOTHING, np.int32)
        arrived[0] = self.keys_ready
        travels = []
        for track, slot in zip(x.tracks, slots, strict=True):
            name = "kv outer ring" if track.lanes[0] == "outer_send" else "kv ring"
            travels.append(self.travel_buffers(name, x.kv_bytes, len(track.leaves)))
            holder[track.used] = travels[-1][np.arange(len(track.leaves)) % 2]
            arrived[track.used] = slot.at[track.leaves][:, track.previous]
            sent[track.used] = slot.at[track.leaves]
        used = np.where(x.packs, packs, attends)
        for i in range(len(slots)):
            self.transfer_keys(i, kv, slots, travels[i], holder, used, arrived, launched[i])
        if x.packs.any():
            holder = np.where(x.packs, self.pack_keys(kv, packs, holder, [arrived, sent]), holder)
        arrived[0] = NOTHING
        ready = [np.where(x.packs, NOTHING, op) for op in (arrived, sent)]
        here = Where.true(x.active)
        return (here.of(holder), kv[1][here.of(x.of_keys)]), ready

    def transfer_keys(
        self,
        number: int,
        kv: Access,
        slots: list[Slot],
        travel: Int32,
        holder: Int32,
        used: Ints,
        arrived: Ints,
        launched: list[Ints],
    ) -> None:
        """The transfers of one track.

        A receive overwrites what the target used, and sent on, in the step for which its last but one hop came.
        """
        x, track, sends = self.x, self.x.tracks[number], slots[number].at
        hops = Where.true(sends[track.leaves] >= 0)
        hop, here = hops.s, Where.pairs(track.leaves[hops.s], hops.r, x.num_ranks)
        to = track.next[here.r]
        if self.code.lockstep:
            free = [Where.pairs(here.s, to, x.num_ranks).of(delayed(sends)), *map(here.of, launched)]
        else:
            last_use = Where.pairs(track.used[np.maximum(hop - 2, 0)], to, x.num_ranks)
            free = [np.where(hop >= 2, last_use.of(op), NOTHING) for op in (*(slot.at for slot in slots), used)]
        block = kv[1][here.of(x.of_source)]
        self.b.add(
            Kind.TRANSFER,
            (here.r, track.lanes[0]),
            (to, track.lanes[1]),
            at=here.of(sends),
            step=here.s,
            nbytes=x.shard_tokens[here.of(x.source)] * x.kv_bytes,
            deps=[here.of(arrived), *free],
            reads=[(here.of(holder), block)],
            writes=[(Where.pairs(hop % 2, to, x.num_ranks).of(travel), block)],
        )

    def pack_keys(self, kv: Access, packs: Ints, holder: Int32, deps: list[Ints]) -> Int32:
        """Copy the heads of shards side by side; returns the buffers, ``[ranks]``."""
        x, here = self.x, Where.true(self.x.packs)
        packed = self.b.buffers("key heads", x.head_rows[x.source].max(axis=0) * x.kv_bytes)
        block = kv[1][here.of(x.of_keys)]
        self.b.add(
            Kind.COPY,
            (here.r, "compute"),
            at=here.of(packs),
            step=here.s,
            heads=x.heads_of(here.r),
            nbytes=2 * x.kv_bytes * here.of(x.k_rows),
            deps=[here.of(d) for d in deps],
            reads=[(here.of(holder), block)],
            writes=[(packed[here.r], block)],
        )
        return packed

    def feed_gathered(self, kv: Access, sends: Ints, launched: list[Ints]) -> tuple[Access, list[Ints]]:
        """Keys and values brought by one all-gather, launched in the first step, where there is one ring."""
        b, x, everyone = self.b, self.x, self.ranks[None, :]
        nbytes = x.workload.num_tokens * x.kv_bytes
        whole = b.buffers("kv of all", np.full(x.num_ranks, nbytes))
        b.add(
            Kind.ALL_GATHER,
            (everyone, "comm"),
            at=sends[0, :1],
            nbytes=nbytes,
            deps=[ops[:1] for ops in launched],
            reads=[(kv[0][everyone], kv[1][everyone])],
            writes=[(whole[everyone], np.broadcast_to(kv[1][-1], everyone.shape))],
        )
        here, holder = Where.true(x.active), np.where(x.number == 0, kv[0], whole)
        ready = np.where(x.number == 0, NOTHING, np.broadcast_to(sends[0, 0], x.active.shape))
        return (here.of(holder), kv[1][here.of(x.of_keys)]), [ready]

    def return_gradients(
        self, home: Access, partial: Int32, sums: list[Slot], sends: Ints, launched: list[Ints]
    ) -> tuple[Int32, list[Ints]]:
        """Key-value gradients follow the keys one step behind, summed in fp32.

        Returns where they are in the end, and the ops that brought and took the last ones.
        """
        b, x = self.b, self.x
        widths, places = self.code.travelling(), x.grid.num_places
        to, back = x.grid.hops
        travel = self.travel_buffers("dkv ring", x.sizes.accumulator(x.kv_bytes), places + 1)
        arrived, sent = delayed(np.take_along_axis(sends, back, axis=1)), delayed(sends)
        cases = x.active & (x.number == 0), x.active & (x.number > 0)
        totals = travel[x.number % 2, self.ranks]
        kinds = Kind.ACCUMULATE, Kind.ACCUMULATE
        zeros = None if self.code.lockstep else x.unseen
        self.add_up(kinds, sums, cases, partial, totals, home[1][x.of_keys], [arrived, sent], zeros)
        here = Where.true(sends >= 0)
        s, r, block, target = here.s, here.r, home[1][here.of(x.of_source)], here.of(to)
        if self.code.lockstep:
            lanes = ("send", "recv") if self.code.one_stream else ("grad_send", "grad_recv")
            deps = [here.of(ops) for ops in (arrived, np.take_along_axis(sent, to, axis=1), *launched)]
        else:
            lanes = "grad_send", "grad_recv"
            free = np.where(back[s - 1, r] == target, NOTHING, Where.pairs(s, target, x.num_ranks).of(sent))
            deps = [here.of(np.where(sums[0].at >= 0, sums[0].at, arrived)), free]
        b.add(
            Kind.TRANSFER,
            (r, lanes[0]),
            (target, lanes[1]),
            at=here.of(sends),
            step=s,
            nbytes=x.shard_tokens[here.of(x.source)] * widths[s],
            deps=deps,
            reads=[(travel[s % 2, r], block)],
            writes=[(travel[(s + 1) % 2, target], block)],
        )
        return np.asarray(travel[places % 2]), [sends[-1, back[-1]], sends[-1]]


def joined(some: list[Slot], others: list[Slot]) -> list[Slot]:
    """Slots of the same ops in other steps as one, once they are in order."""
    pairs = zip(some, others, strict=True) if others else ((slot, slot) for slot in some)
    return [Slot(a.where | b.where, at=np.maximum(a.at, b.at)) for a, b in pairs]


def delayed(ops: Ints) -> Ints:
    """The ops of the step before, ``[steps, ranks]``; NOTHING before the first."""
    return np.concatenate([np.full((1, ops.shape[1]), NOTHING, ops.dtype), ops[:-1]])


def _last(*slots: Slot) -> Ints:
    """The last op of every rank in some slots."""
    return np.asarray(np.max([slot.at.max(axis=0) for slot in slots], axis=0))
