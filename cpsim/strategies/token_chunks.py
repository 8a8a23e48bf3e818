"""Ulysses some tokens at a time: chunks of the sequence whose keys and values wait in the host's memory.

A rank has a piece of every chunk. Chunk by chunk, tokens go through the all-to-alls, and what arrives leaves for
the host besides. Queries of a chunk are computed with the chunk's own keys, then with those of other chunks, which come
back from the host one by one, each while the one before is computed; partial outputs are merged. Backward, chunks of
keys take turns, each with all chunks of queries that see it: these return with their outputs, the gradients of these
and what their own gradients are so far, which leave again. So a GPU holds two chunks of what is exchanged, however
long the sequence.

All ranks do the same. Which op waits for which follows from what reads and overwrites buffers (``_Lockstep``).

Reference: Yao et al. 2024, "Fully Pipelined Distributed Transformer" (arXiv 2408.16978), FPDT; DeepSpeed,
deepspeed/sequence/fpdt_layer.py. Differs: any mask, where FPDT's is causal; keys and values are one message; streams
wait for each other, where DeepSpeed's host waits for both after every kernel; projections are not part of it, so that a
rank's own queries, keys and values are on the GPU before the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints, RangeSets
from cpsim.masks.tiles import make_tiles
from cpsim.schedule.builder import Access, Builder
from cpsim.schedule.schedule import Int32, Kind, Pass, Schedule
from cpsim.strategies.sizes import Sizes


def plan_token_chunks(workload: Workload, num_ranks: int, pass_: Pass, chunks: int) -> Schedule:
    """Ulysses with the sequence in chunks.

    Args:
        workload, pass_: the case.
        num_ranks: which divide its heads.
        chunks: of the sequence.

    Raises:
        InfeasibleError: chunks and ranks do not divide the tokens.
    """
    if workload.num_tokens % (chunks * num_ranks):
        raise InfeasibleError(
            f"ulysses with token_chunks {chunks} needs tokens divisible by chunks and ranks, got {workload.num_tokens} "
            f"tokens on {num_ranks} GPUs"
        )
    plan = _Chunks(workload, num_ranks, chunks)
    return plan.forward() if pass_ == "fwd" else plan.backward()


@dataclass(slots=True)
class _Slot:
    """A buffer of every rank, and which ops last wrote and read it."""

    buffers: Int32
    writer: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


Use = tuple[_Slot, Sequence[Int32]]
"""A buffer and the blocks in it, ``[ranks]`` each."""


def _accesses(uses: Sequence[Use], together: bool) -> list[Access]:
    """As ops have them; of a collective those of all ranks."""
    each = [(slot.buffers, block) for slot, blocks in uses for block in blocks]
    return [(buffers[None], block[None]) for buffers, block in each] if together else each


class _Lockstep:
    """Ops of all ranks at once. One waits for those whose results it reads or overwrites, as far as its stream and its
    other waits do not see to it."""

    def __init__(self, b: Builder) -> None:
        self.b, self.ranks = b, np.arange(b.num_ranks)
        self.ops: list[Ints] = []
        """Indices in the schedule, ``[ranks]`` each."""
        self.streams: list[str] = []
        self.ended: list[dict[str, int]] = []
        """The last op of every stream that has ended when an op has."""
        self.last: dict[str, int] = {}

    def slot(self, name: str, nbytes: int) -> _Slot:
        """A buffer of every rank."""
        return _Slot(self.b.buffers(name, nbytes))

    def add(
        self,
        kind: Kind,
        stream: str,
        step: int,
        *,
        nbytes: int = 0,
        tile: int = 0,
        heads: Ints | None = None,
        reads: Sequence[Use] = (),
        writes: Sequence[Use] = (),
        updates: Sequence[Use] = (),
    ) -> None:
        """One op of every rank, or a collective of all."""
        new, before = len(self.ops), self.last.get(stream)
        ended = dict(self.ended[before]) if before is not None else {}
        wanted = [op for slot, _ in (*reads, *updates) for op in slot.writer]
        wanted += [op for slot, _ in (*writes, *updates) for op in slot.readers or slot.writer]
        waits = []
        for op in sorted(set(wanted), reverse=True):
            if ended.get(self.streams[op], -1) < op:
                waits.append(op)
                ended = {s: max(ended.get(s, -1), self.ended[op].get(s, -1)) for s in {**ended, **self.ended[op]}}
        together = kind == Kind.ALL_TO_ALL
        made = self.b.add(
            kind,
            (self.ranks[None] if together else self.ranks, stream),
            step=step,
            nbytes=nbytes,
            tile=tile,
            heads=(0, 0, 0, 0) if heads is None else heads,
            deps=[self.ops[op][None] if together else self.ops[op] for op in waits],
            reads=_accesses(reads, together),
            writes=_accesses(writes, together),
            updates=_accesses(updates, together),
        )
        self.ops.append(np.repeat(made, len(self.ranks)) if together else made)
        self.streams.append(stream)
        self.ended.append(ended | {stream: new})
        self.last[stream] = new
        for slot, _ in reads:
            slot.readers.append(new)
        for slot, _ in (*writes, *updates):
            slot.writer, slot.readers = [new], []


class _Chunks:
    """One schedule under construction; blocks are ``[ranks]``."""

    def __init__(self, w: Workload, num_ranks: int, chunks: int) -> None:
        self.w, self.chunks, self.sizes = w, chunks, Sizes(w)
        self.tokens = w.num_tokens // chunks
        """Of a chunk."""
        part = self.tokens // num_ranks
        pieces = np.arange(chunks * num_ranks).reshape(chunks, num_ranks)
        ranges = [np.array([[p * part, (p + 1) * part]]) for p in pieces.ravel().tolist()]
        ranges += [np.stack([mine * part, (mine + 1) * part], axis=1) for mine in pieces.T]
        ranges += [np.array([[c * self.tokens, (c + 1) * self.tokens]]) for c in range(chunks)]
        sets = RangeSets(np.cumsum([0, *map(len, ranges)]), np.concatenate(ranges))
        self.pieces, self.own = pieces, pieces.size + np.arange(num_ranks)
        self.whole = pieces.size + num_ranks + np.arange(chunks)
        queries, keys = (side.ravel() for side in np.meshgrid(self.whole, self.whole, indexing="ij"))
        tiles = make_tiles(w.slices(), sets, queries, keys)
        self.sees = tiles.area[1:].reshape(chunks, chunks) > 0
        """Which chunks of keys each chunk of queries sees; at least one, which may have no pairs."""
        self.sees[~self.sees.any(axis=1), 0] = True
        self.b = Builder(num_ranks, sets, tiles)
        self.x, self.ranks = _Lockstep(self.b), np.arange(num_ranks)
        heads, kv_heads = w.num_heads // num_ranks, max(1, w.num_kv_heads // num_ranks)
        first = self.ranks * heads
        self.heads = np.stack(
            [
                first,
                np.full(num_ranks, heads),
                first * w.num_kv_heads // w.num_heads,
                np.full(num_ranks, kv_heads),
            ],
            axis=1,
        )
        self.replicas = max(1, num_ranks // w.num_kv_heads)
        o, lse, kv = self.sizes.output(heads), self.sizes.lse(heads), self.sizes.kv(kv_heads)
        q = self.sizes.query(heads)
        self.width = {"q": q, "dq": q, "kv": kv, "dkv": kv, "o": o, "dout": o, "out": o + lse}
        """Bytes of one token of a rank's heads."""
        self.lse_bytes = lse * self.tokens
        self.hosts: dict[tuple[str, int], _Slot] = {}

    def nbytes(self, tensor: str) -> int:
        """Of a chunk of a rank's heads, which is as much as a rank's piece of it with all heads, replicas included."""
        return self.width[tensor] * self.tokens

    def wide(self, tensor: str) -> int:
        """The same in fp32."""
        return self.sizes.accumulator(self.nbytes(tensor))

    def of_own(self, tensor: str, chunk: int | None = None) -> Int32:
        """Blocks of a rank's own tokens, or of its piece of a chunk, all heads."""
        heads = self.w.num_kv_heads if tensor.endswith("kv") else self.w.num_heads
        return self.b.blocks(tensor, self.own if chunk is None else self.pieces[chunk], (0, heads))

    def of_heads(self, tensor: str, chunk: int) -> Int32:
        """Blocks of all tokens of a chunk, every rank's heads."""
        first = 2 if tensor.endswith("kv") else 0
        rows = self.heads[:, first : first + 2].tolist()
        return np.concatenate([self.b.blocks(tensor, [self.whole[chunk]], (row[0], row[1])) for row in rows])

    def slots(self, name: str, nbytes: int, count: int = 2) -> list[_Slot]:
        """Buffers that chunks have in turns."""
        return [self.x.slot(name, nbytes) for _ in range(min(count, self.chunks))]

    def given(self, tensor: str) -> _Slot:
        """A rank's own tokens of an input."""
        return self._own(tensor, self.b.input)

    def result(self, tensor: str) -> _Slot:
        """A rank's own tokens of an output."""
        return self._own(tensor, self.b.output)

    def _own(self, tensor: str, state: object) -> _Slot:
        slot = self.x.slot(tensor, self.chunks * self.nbytes(tensor) // (self.replicas if tensor.endswith("kv") else 1))
        state(slot.buffers, self.of_own(tensor))  # type: ignore[operator]
        return slot

    def kept(self, tensor: str) -> None:
        """A tensor is in the host's memory before the first op."""
        for chunk in range(self.chunks):
            self.b.input(self.host(tensor, chunk).buffers, self.of_heads(tensor, chunk))

    def host(self, tensor: str, chunk: int) -> _Slot:
        """A buffer in the host's memory for a chunk."""
        if (tensor, chunk) not in self.hosts:
            self.hosts[tensor, chunk] = self.x.slot(f"{tensor} on host", self.moved(tensor))
        return self.hosts[tensor, chunk]

    def moved(self, tensor: str) -> int:
        """Bytes of a chunk on its way to the host or back: sums of gradients stay in fp32."""
        return self.wide(tensor) if tensor == "dq" else self.nbytes(tensor)

    def save(self, tensor: str, chunk: int, step: int, source: _Slot) -> None:
        """A chunk to its host."""
        self._move(tensor, chunk, step, "to_host", source, self.host(tensor, chunk))

    def fetch(self, tensor: str, chunk: int, step: int, target: _Slot) -> None:
        """A chunk from its host."""
        self._move(tensor, chunk, step, "from_host", self.host(tensor, chunk), target)

    def _move(self, tensor: str, chunk: int, step: int, stream: str, source: _Slot, target: _Slot) -> None:
        block = [self.of_heads(tensor, chunk)]
        self.x.add(
            Kind.COPY, stream, step, nbytes=self.moved(tensor), reads=[(source, block)], writes=[(target, block)]
        )

    def stay(self, tensor: str) -> None:
        """A tensor is in the host's memory after the last op."""
        for chunk in range(self.chunks):
            self.b.output(self.host(tensor, chunk).buffers, self.of_heads(tensor, chunk))

    def bring(self, tensor: str, chunk: int, own: _Slot, packed: _Slot, there: _Slot) -> None:
        """A chunk to the ranks of its heads: its pieces are ordered by rank and exchanged."""
        piece, nbytes = [self.of_own(tensor, chunk)], self.nbytes(tensor)
        copied = nbytes + nbytes // (self.replicas if tensor.endswith("kv") else 1)
        self.x.add(Kind.COPY, "compute", chunk, nbytes=copied, reads=[(own, piece)], writes=[(packed, piece)])
        there_too = [self.of_heads(tensor, chunk)]
        self.x.add(Kind.ALL_TO_ALL, "comm", chunk, nbytes=nbytes, reads=[(packed, piece)], writes=[(there, there_too)])

    def leave(self, tensor: str, chunk: int, source: Use, returned: _Slot) -> None:
        """A chunk's result to the ranks of its tokens."""
        there = [(returned, [self.of_own(tensor, chunk)])]
        self.x.add(Kind.ALL_TO_ALL, "comm", chunk, nbytes=self.nbytes(tensor), reads=[source], writes=there)

    def arrive(self, tensor: str, chunk: int, returned: _Slot, own: _Slot) -> None:
        """It is ordered as a rank's own tokens lie, and gradients of replicas are summed."""
        piece, nbytes = [self.of_own(tensor, chunk)], self.nbytes(tensor)
        sums = self.replicas > 1 and tensor == "dkv"
        self.x.add(
            Kind.ACCUMULATE if sums else Kind.COPY,
            "compute",
            chunk,
            nbytes=nbytes + (nbytes // self.replicas if sums else nbytes),
            reads=[(returned, piece)],
            writes=[(own, piece)],
        )

    def tile(self, queries: int, keys: int) -> int:
        """Of a chunk of queries and one of keys."""
        return 1 + queries * self.chunks + keys

    # --- forward ---

    def forward(self) -> Schedule:
        own = {t: self.given(t) for t in ("q", "kv")}
        packed, here = ({t: self.slots(f"{t} {what}", self.nbytes(t)) for t in own} for what in ("by rank", "of chunk"))
        fetched = self.slots("kv of another chunk", self.nbytes("kv"))
        total = self.slots("out of chunk", self.nbytes("out") + self.wide("o"))
        part = self.x.slot("out of two chunks", self.nbytes("out"))
        returned, home = self.slots("o by rank", self.nbytes("o")), self.result("o")
        held: dict[int, int] = {}
        """Chunk of keys in every buffer that they arrive in."""
        last_key = np.maximum.accumulate([int(np.flatnonzero(row)[-1]) for row in self.sees]).tolist()
        turn = 0

        def take(tensor: str, chunk: int) -> None:
            at = chunk % len(here[tensor])
            self.bring(tensor, chunk, own[tensor], packed[tensor][at], here[tensor][at])
            self.save(tensor, chunk, chunk, here[tensor][at])
            if tensor == "kv":
                held[at] = chunk

        def prepare(chunk: int) -> None:
            for keys in range(max(held.values(), default=-1) + 1, max(last_key[chunk], chunk) + 1):
                take("kv", keys)
            take("q", chunk)

        prepare(0)
        for chunk in range(self.chunks):
            if chunk + 1 < self.chunks:
                prepare(chunk + 1)
            seen = np.flatnonzero(self.sees[chunk]).tolist()
            seen.sort(key=lambda keys: (keys not in held.values(), keys))
            for i, keys in enumerate(seen):
                at = next((slot for slot, there in held.items() if there == keys), None)
                source = fetched[turn % len(fetched)] if at is None else here["kv"][at]
                if at is None:
                    self.fetch("kv", keys, chunk, source)
                    turn += 1
                self.attend(
                    chunk,
                    keys,
                    here["q"][chunk % len(here["q"])],
                    source,
                    total[chunk % len(total)],
                    part,
                    i,
                    len(seen),
                )
            done = total[chunk % len(total)], [self.of_heads("out", chunk)]
            self.leave("o", chunk, done, returned[chunk % len(returned)])
            self.save("out", chunk, chunk, done[0])
            if chunk:
                self.arrive("o", chunk - 1, returned[(chunk - 1) % len(returned)], home)
        self.arrive("o", self.chunks - 1, returned[(self.chunks - 1) % len(returned)], home)
        for tensor in ("q", "kv", "out"):
            self.stay(tensor)
        return self.b.build()

    def attend(
        self, chunk: int, keys: int, q: _Slot, kv: _Slot, total: _Slot, part: _Slot, nth: int, count: int
    ) -> None:
        """The n-th of some chunks of keys of a chunk of queries, merged with those before."""
        out, into = [self.of_heads("out", chunk)], total if nth == 0 else part
        self.x.add(
            Kind.ATTENTION,
            "compute",
            chunk,
            tile=self.tile(chunk, keys),
            heads=self.heads,
            reads=[(q, [self.of_heads("q", chunk)]), (kv, [self.of_heads("kv", keys)])],
            writes=[(into, out)],
        )
        if nth:
            narrow, wide = self.nbytes("o"), self.wide("o")
            moved = narrow + (narrow if nth == 1 else wide) + (narrow if nth == count - 1 else wide)
            moved += 3 * self.lse_bytes
            self.x.add(Kind.MERGE, "compute", chunk, nbytes=moved, reads=[(part, out)], updates=[(total, out)])

    # --- backward ---

    def backward(self) -> Schedule:
        given, results = self.given("dout"), {t: self.result(t) for t in ("dq", "dkv")}
        for tensor in ("q", "kv", "out"):
            self.kept(tensor)
        packed = self.slots("dout by rank", self.nbytes("dout"))
        here = {t: self.slots(f"{t} of chunk", self.nbytes(t)) for t in ("q", "out", "dout", "kv")}
        total = {t: self.slots(f"{t} sum", self.wide(t)) for t in results}
        part = {t: self.x.slot(f"{t} of two chunks", self.nbytes(t)) for t in results}
        back = {t: _Back(self, t, results[t]) for t in results}
        turns = list(self.turns(len(here["q"])))
        returning = {turn.queries for turn in turns if turn.fetched and not turn.first}
        for turn in turns:
            keys, queries, at = turn.keys, turn.queries, turn.at
            at_keys = keys % len(here["kv"])
            if turn.begins:
                self.fetch("kv", keys, keys, here["kv"][at_keys])
            returns = ("q", "out") if turn.first else ("q", "out", "dout", "dq")
            for tensor in returns if turn.fetched else ():
                self.fetch(tensor, queries, keys, (total if tensor == "dq" else here)[tensor][at])
            if turn.first:
                self.bring("dout", queries, given, packed[queries % len(packed)], here["dout"][at])
                if queries in returning:
                    self.save("dout", queries, keys, here["dout"][at])
            reads = [(here[t][at], [self.of_heads(t, queries)]) for t in ("q", "out", "dout")]
            reads.append((here["kv"][at_keys], [self.of_heads("kv", keys)]))
            made = {"dq": [self.of_heads("dq", queries)], "dkv": [self.of_heads("dkv", keys)]}
            self.x.add(
                Kind.ATTENTION_BACKWARD,
                "compute",
                keys,
                tile=self.tile(queries, keys),
                heads=self.heads,
                reads=reads,
                writes=[(part[t], made[t]) for t in made],
            )
            sums = {"dq": (total["dq"][at], turn.first), "dkv": (total["dkv"][at_keys], turn.begins)}
            for tensor, (slot, starts) in sums.items():
                self.sum(tensor, keys, (part[tensor], made[tensor]), (slot, made[tensor]), starts=starts)
            if not turn.again:
                back["dq"].leave(queries, sums["dq"][0])
            elif turn.leaves:
                self.save("dq", queries, keys, total["dq"][at])
            if turn.ends:
                back["dkv"].leave(keys, sums["dkv"][0])
        for each in back.values():
            each.arrive()
        return self.b.build()

    def sum(self, tensor: str, step: int, part: Use, total: Use, *, starts: bool) -> None:
        """A partial gradient into its sum in fp32, which it may be the first of."""
        moved = self.nbytes(tensor) + self.wide(tensor) * (1 if starts else 2)
        side = ([total], []) if starts else ([], [total])
        self.x.add(Kind.ACCUMULATE, "compute", step, nbytes=moved, reads=[part], writes=side[0], updates=side[1])

    def turns(self, slots: int) -> list[_Turn]:
        """Pairs of chunks that see each other, keys by keys, with the buffers that queries are in; those of the pair
        before stay, so that one pair is computed while the next returns."""
        pairs = [(k, q) for k in range(self.chunks) for q in np.flatnonzero(self.sees[:, k]).tolist()]
        held, at, fetched = dict[int, int](), list[int](), list[bool]()
        for _, queries in pairs:
            there = next((slot for slot, chunk in held.items() if chunk == queries), None)
            fetched.append(there is None)
            at.append((at[-1] + 1) % slots if there is None and at else there or 0)
            held[at[-1]] = queries
        later = [[n for n in range(m + 1, len(pairs)) if pairs[n][1] == pairs[m][1]] for m in range(len(pairs))]
        first = {q: n for n, (_, q) in reversed(list(enumerate(pairs)))}
        return [
            _Turn(
                keys=keys,
                queries=queries,
                at=at[n],
                fetched=fetched[n],
                first=first[queries] == n,
                again=bool(later[n]),
                leaves=bool(later[n]) and fetched[later[n][0]],
                begins=n == 0 or pairs[n - 1][0] != keys,
                ends=n + 1 == len(pairs) or pairs[n + 1][0] != keys,
            )
            for n, (keys, queries) in enumerate(pairs)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A chunk of keys with one of queries, backward."""

    keys: int
    queries: int
    at: int
    """Buffers that the queries are in."""
    fetched: bool
    """They come from the host for this turn."""
    first: bool
    """The first turn of these queries."""
    again: bool
    """They have another turn later,"""
    leaves: bool
    """for which they come from the host again."""
    begins: bool
    """The first turn of the keys."""
    ends: bool
    """The last one."""


class _Back:
    """Complete gradients on their way to the ranks of their tokens, two chunks at a time."""

    def __init__(self, c: _Chunks, tensor: str, own: _Slot) -> None:
        self.c, self.tensor, self.own = c, tensor, own
        self.leaving = c.slots(f"{tensor} of chunk", c.nbytes(tensor))
        self.returned = c.slots(f"{tensor} by rank", c.nbytes(tensor))
        self.left: list[int] = []
        """Chunks, in the order in which they leave."""
        self.arrived = 0

    def leave(self, chunk: int, total: _Slot) -> None:
        """Cast and exchange a chunk; the one before it arrives."""
        c, tensor, at = self.c, self.tensor, len(self.left) % len(self.leaving)
        done, nbytes = (self.leaving[at], [c.of_heads(tensor, chunk)]), c.nbytes(tensor) + c.wide(tensor)
        c.x.add(Kind.COPY, "compute", chunk, nbytes=nbytes, reads=[(total, done[1])], writes=[done])
        c.leave(tensor, chunk, done, self.returned[at])
        self.left.append(chunk)
        if len(self.left) > 1:
            self.arrive(len(self.left) - 1)

    def arrive(self, count: int | None = None) -> None:
        """So many chunks are there, by default all that have left."""
        for i in range(self.arrived, len(self.left) if count is None else count):
            self.c.arrive(self.tensor, self.left[i], self.returned[i % len(self.returned)], self.own)
            self.arrived = i + 1
