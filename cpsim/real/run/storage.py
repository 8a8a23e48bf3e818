"""Where blocks lie: the layout of every buffer after every op of a schedule, for all ranks. No torch.

A buffer is a run of *units*: elements of a head, or where values have another size than keys, as many as divide both
(64 of keys of 192 and values of 128). What a buffer holds is cut into chunks, one after the other; a chunk holds for
each of its tokens the heads of one or several tensors side by side, keys before values. Who reads or writes a buffer
decides about its chunks:

* a collective needs what it sends to each rank, and what it receives from each, in one piece;
* an attention kernel needs the keys in the order of its sequences, some of them twice where sequences overlap;
* everything else takes one chunk with ascending tokens.

Accumulators of partial results are wide (fp32, or the working type where that is wider). Buffers in the host's memory
are counted from the start of that. Tokens are positions in the order that the schedule counts in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import Workload
from cpsim.masks.tiles import sequence_places, sequences
from cpsim.schedule.schedule import ATTENTION_KINDS, READ, UPDATE, WRITE, Kind, Schedule
from cpsim.schedule.transformer import TENSORS
from cpsim.strategies.sizes import Sizes

Ints = NDArray[np.int64]

PLANES = {
    "q": ("q",),
    "kv": ("k", "v"),
    "out": ("out",),
    "o": ("out",),
    "dout": ("dout",),
    "dq": ("dq",),
    "dkv": ("dk", "dv"),
    "dsink": ("dsink",),
    **{name: (name,) for name in TENSORS},
}
"""What the tensors of a schedule consist of; ``out`` has a log-sum-exp beside it, which no other op than those that
make and read ``out`` touches."""
OF_VALUES = ("v", "dv", "out", "dout")
"""Planes whose heads are as large as values."""
NOT_HELD = -1


@dataclass(frozen=True, slots=True)
class Part:
    """Some tokens and heads of one plane, in rows of equal stride; offsets count units."""

    plane: str
    tokens: Ints
    """Token of every row in storage order."""
    head: int
    num_heads: int
    wide: bool
    at: int
    """First unit of the first row, from the start of the rank's memory."""
    stride: int
    width: int = 1
    """Units of a head."""
    on_host: bool = False

    def rows_of(self, tokens: Ints) -> Ints:
        """Row of each token, -1 where it is not here; of tokens that lie here twice, one of the rows."""
        order = np.argsort(self.tokens, kind="stable")
        place = np.minimum(np.searchsorted(self.tokens[order], tokens), max(len(order) - 1, 0))
        found = self.tokens[order[place]] == tokens if len(order) else np.zeros(len(tokens), bool)
        return np.where(found, order[place] if len(order) else 0, -1)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous piece of a buffer."""

    key: int
    """Rank that it comes from or goes to, or the op that reads it."""
    parts: tuple[Part, ...]
    at: int
    length: int
    """Units."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a buffer holds."""

    chunks: tuple[Chunk, ...] = ()
    tile: int = -1
    """Tile whose kernel call the keys are ordered for; -1 where they ascend."""

    def parts(self, plane: str) -> list[Part]:
        """All parts of a plane, neighbours joined."""
        joined: list[Part] = []
        for part in (p for c in self.chunks for p in c.parts if p.plane == plane):
            last = joined[-1] if joined else None
            if last is not None and _continues(last, part):
                joined[-1] = replace(last, tokens=np.concatenate([last.tokens, part.tokens]))
            else:
                joined.append(part)
        return joined


def _continues(last: Part, part: Part) -> bool:
    same = (last.head, last.num_heads, last.wide, last.stride) == (part.head, part.num_heads, part.wide, part.stride)
    return same and part.at == last.at + len(last.tokens) * last.stride


@dataclass(frozen=True, slots=True)
class KernelSequence:
    """One sequence of a kernel call: its tokens."""

    queries: Ints
    keys: Ints
    causal: bool


@dataclass(frozen=True, slots=True)
class Access:
    """One access of an op: what it reads or leaves, and how the buffer is laid out then."""

    rank: int
    buffer: int
    mode: int
    tensor: str
    tokens: Ints
    head: int
    num_heads: int
    layout: Layout

    def parts(self, absent: Ints | None = None) -> list[Part]:
        """The parts that hold the block, all planes, cut to its heads; rows of other or absent tokens get token -1."""
        tokens = self.tokens if absent is None else np.setdiff1d(self.tokens, absent)
        return [self._cut(p, tokens) for plane in PLANES[self.tensor] for p in self.layout.parts(plane)]

    def _cut(self, part: Part, tokens: Ints) -> Part:
        first = max(part.head, self.head)
        count = max(0, min(part.head + part.num_heads, self.head + self.num_heads) - first)
        kept = part.tokens
        if not np.array_equal(kept, tokens):
            kept = np.where(np.isin(kept, tokens), kept, NOT_HELD)
        return replace(part, tokens=kept, head=first, num_heads=count, at=part.at + (first - part.head) * part.width)


Walk = list[tuple[int, list[Access]]]
"""Every op of a schedule, of all ranks, with its accesses."""


@dataclass(slots=True)
class RankMemory:
    """Walks through a schedule in list order and keeps every buffer's layout; see ``accesses``."""

    schedule: Schedule
    workload: Workload
    base: Ints = field(init=False)
    """First byte of every buffer in its rank's memory, or its host's."""
    nbytes: Ints = field(init=False)
    """Bytes of every rank's memory, and of that of its host, ``[2, ranks]``."""
    unit: int = field(init=False)
    """Elements of a unit."""
    on_host: NDArray[np.bool_] = field(init=False)
    """Buffers in the host's memory."""
    layouts: list[Layout] = field(init=False)
    is_output: NDArray[np.bool_] = field(init=False)
    summed: NDArray[np.bool_] = field(init=False)
    """Results that partial results are added to: a wide accumulator lies before them."""
    host_link: NDArray[np.bool_] = field(init=False)
    """Ops that copy to or from the host's memory."""
    inputs: dict[int, Layout] = field(init=False)
    """Layouts of the buffers that are filled before the first op."""
    later: list[list[tuple[int, int]]] = field(init=False)
    """(op, access) of every buffer in list order."""

    def __post_init__(self) -> None:
        s, self.host_link, self.on_host = self.schedule, self.schedule.over_host_link(), self.schedule.on_host()
        self.unit = math.gcd(self.workload.head_dim, self.workload.values)
        align = int(np.lcm(256, self.unit_bytes(True)))
        padded = -(-s.buffer_nbytes // align) * align
        self.base, self.nbytes = np.zeros(len(padded), np.int64), np.zeros((2, s.num_ranks), np.int64)
        for b, place in enumerate(zip(self.on_host.astype(int).tolist(), s.buffer_rank.tolist(), strict=True)):
            self.base[b], self.nbytes[place] = self.nbytes[place], self.nbytes[place] + padded[b]
        self.is_output = np.zeros(len(padded), bool)
        self.is_output[s.outputs[:, 0]] = True
        self.summed = np.zeros(len(padded), bool)
        owner = s.op_of_access()
        partial = ~np.isin(s.kind[owner], (Kind.GEMM, Kind.ELEMENTWISE))  # these add to gradients of weights in place
        self.summed[s.access_buffer[(s.access_mode == UPDATE) & partial]] = True
        in_turns = np.isin(s.kind[owner], (*ATTENTION_KINDS, Kind.MERGE))
        self.summed &= self.is_output | np.isin(np.arange(len(padded)), s.access_buffer[in_turns])
        self.later = [[] for _ in padded]
        for a, (op, buffer) in enumerate(zip(owner.tolist(), s.access_buffer.tolist(), strict=True)):
            self.later[buffer].append((op, a))
        self.layouts = [Layout() for _ in padded]
        for pairs in (s.inputs, s.outputs):
            for buffer in dict.fromkeys(pairs[:, 0].tolist()):
                blocks = [self.block(k) for b, k in pairs.tolist() if b == buffer]
                tensors = [(tensor, head, count) for tensor, _, head, count in blocks]
                self.layouts[buffer] = self.lay(buffer, [(-1, tensors, blocks[0][1])], False)
        self.inputs = {b: self.layouts[b] for b in s.inputs[:, 0].tolist()}

    def unit_bytes(self, wide: bool) -> int:
        """Bytes of a unit."""
        nbytes = self.unit * self.workload.bytes_per_element
        return Sizes(self.workload).accumulator(nbytes) if wide else nbytes

    def width(self, plane: str) -> int:
        """Units of a head of one token."""
        return (self.workload.values if plane in OF_VALUES else self.workload.head_dim) // self.unit

    def block(self, block: int) -> tuple[str, Ints, int, int]:
        """Tensor, tokens, first head and heads of a block."""
        s = self.schedule
        first, count = s.block_heads[block].tolist()
        return s.block_tensors[s.block_tensor[block]], tokens_of(s.sets.of(int(s.block_set[block]))), first, count

    def lay(
        self, buffer: int, chunks: Sequence[tuple[int, list[tuple[str, int, int]], Ints]], wide: bool, tile: int = -1
    ) -> Layout:
        """Chunks one after the other: (key, (tensor, first head, heads) of every tensor, tokens) each."""
        at, on_host = int(self.base[buffer]) // self.unit_bytes(wide), bool(self.on_host[buffer])
        if self.summed[buffer]:
            at += self.accumulator_units(buffer) * self.unit_bytes(True) // self.unit_bytes(False)
        made = []
        for key, tensors, tokens in chunks:
            planes = [(plane, head, n, self.width(plane)) for t, head, n in tensors for plane in PLANES[t]]
            stride, start, parts = sum(n * width for *_, n, width in planes), at, []
            for plane, head, n, width in planes:
                parts.append(Part(plane, tokens, head, n, wide, at, stride, width, on_host))
                at += n * width
            at = start + stride * len(tokens)
            made.append(Chunk(key, tuple(parts), start, at - start))
        return Layout(tuple(made), tile)

    def accumulator_units(self, buffer: int) -> int:
        """Units in the accumulator of a result that partial results are added to: all that it is laid out for."""
        s = self.schedule
        if self.is_output[buffer]:
            block = s.outputs[s.outputs[:, 0] == buffer, 1][0]
        else:
            block = next(s.access_block[a] for _, a in self.later[buffer] if s.access_mode[a] == WRITE)
        tensor, tokens, _, count = self.block(int(block))
        return len(tokens) * count * sum(map(self.width, PLANES[tensor]))

    def accumulator(self, part: Part, buffer: int) -> Part:
        """The wide twin of a result's part; the result is its buffer's only block."""
        return replace(part, wide=True, at=int(self.base[buffer]) // self.unit_bytes(True))

    def accesses(self) -> Iterator[tuple[int, list[Access]]]:
        """Every op with its accesses; reads before writes. A written buffer is laid out as its readers need it."""
        s = self.schedule
        for op in range(len(s)):
            made = [self._access(a) for a in range(s.access_start[op], s.access_start[op + 1])]
            reads = [a for a in made if a.mode == READ]
            targets = [a for a in made if a.mode != READ]
            for buffer in dict.fromkeys(a.buffer for a in targets if a.mode == WRITE and not self.is_output[a.buffer]):
                mine = [a for a in targets if a.buffer == buffer]
                self.layouts[buffer] = self._written(op, buffer, mine, reads)
            yield op, [*reads, *(replace(a, layout=self.layouts[a.buffer]) for a in targets)]

    def _access(self, a: int) -> Access:
        s, buffer = self.schedule, int(self.schedule.access_buffer[a])
        tensor, tokens, head, count = self.block(int(s.access_block[a]))
        rank, mode = int(s.buffer_rank[buffer]), int(s.access_mode[a])
        return Access(rank, buffer, mode, tensor, tokens, head, count, self.layouts[buffer])

    def _written(self, op: int, buffer: int, targets: list[Access], reads: list[Access]) -> Layout:
        kind = Kind(int(self.schedule.kind[op]))
        if kind == Kind.ALL_TO_ALL or kind == Kind.ALL_GATHER:
            chunks = [
                (rank, *overlap([r for r in reads if r.rank == rank], targets)) for rank in self.schedule.ranks_of(op)
            ]
            wide = next((part.wide for r in reads for part in r.parts()), False)  # some ranks may send nothing
            return self.lay(buffer, chunks, wide)
        if kind == Kind.TRANSFER or kind == Kind.REDUCE_SCATTER:
            return self.lay(buffer, [_whole(-1, targets)], reads[0].parts()[0].wide)
        if self.host_link[op]:  # as it is
            return self.lay(buffer, [_whole(-1, targets)], reads[0].parts()[0].wide)
        wide = kind == Kind.ACCUMULATE
        if kind == Kind.ATTENTION_BACKWARD:
            return self._gradients(buffer, targets, reads)
        return self._for_readers(op, buffer, targets, wide)

    def _gradients(self, buffer: int, targets: list[Access], reads: list[Access]) -> Layout:
        """Gradients of keys lie as the keys do that the kernel read; those of queries ascend."""
        keys = next(r for r in reads if r.tensor == "kv")
        key, tensors, tokens = _whole(-1, targets)
        if tensors[0][0] == "dkv" and keys.layout.tile >= 0:
            tokens = np.concatenate([p.tokens for p in keys.layout.parts("k")])
            return self.lay(buffer, [(key, tensors, tokens)], False, keys.layout.tile)
        return self.lay(buffer, [(key, tensors, tokens)], False)

    def _for_readers(self, op: int, buffer: int, targets: list[Access], wide: bool) -> Layout:
        """A packed copy: in the pieces that collectives send, or in the order of a kernel's keys; transfers send it
        as it is."""
        s, chunks = self.schedule, []
        for reader, a in self.later[buffer]:
            if reader <= op:
                continue
            if s.access_mode[a] == WRITE:
                break
            kind = Kind(int(s.kind[reader]))
            if kind == Kind.TRANSFER:
                break
            if kind in ATTENTION_KINDS and targets[0].tensor == "kv":
                tile = int(s.tile[reader])
                if not is_one_call(s, tile, packed=True):
                    break
                keys = np.concatenate([q.keys for q in sequences_of(s, tile)])
                if len(keys) * Sizes(self.workload).kv(targets[0].num_heads) > s.buffer_nbytes[buffer]:
                    break
                return self.lay(buffer, [(*_whole(-1, targets)[:2], keys)], wide, tile)
            if kind == Kind.ALL_GATHER:
                tensor, tokens, head, count = self.block(int(s.access_block[a]))
                chunks.append((reader, [(tensor, head, count)], tokens))
            elif kind in (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER) and not chunks:
                theirs = self._targets(reader)
                chunks = [(rank, *overlap(targets, theirs.get(rank, []))) for rank in s.ranks_of(reader)]
        return self.lay(buffer, chunks or [_whole(-1, targets)], wide)

    def _targets(self, op: int) -> dict[int, list[Access]]:
        """What a collective leaves on every rank."""
        s, by_rank = self.schedule, dict[int, list[Access]]()
        for a in range(s.access_start[op], s.access_start[op + 1]):
            if s.access_mode[a] != READ:
                access = self._access(a)
                by_rank.setdefault(access.rank, []).append(access)
        return by_rank


def lay_out(schedule: Schedule, workload: Workload) -> tuple[RankMemory, Walk]:
    """The memory of all ranks, and every op with its accesses in it."""
    memory = RankMemory(schedule, workload.by_group(schedule.head_groups))
    return memory, list(memory.accesses())


def _whole(key: int, accesses: Sequence[Access]) -> tuple[int, list[tuple[str, int, int]], Ints]:
    """One chunk of everything; all blocks have the same tokens."""
    return key, [(a.tensor, a.head, a.num_heads) for a in accesses], accesses[0].tokens


def overlap(sources: Sequence[Access], targets: Sequence[Access]) -> tuple[list[tuple[str, int, int]], Ints]:
    """What one rank's blocks have in common with another's: tensors with their heads, and tokens."""
    tensors: list[tuple[str, int, int]] = []
    tokens = np.zeros(0, np.int64)
    for source in sources:
        for target in targets:
            if PLANES[source.tensor] != PLANES[target.tensor]:
                continue
            first = max(source.head, target.head)
            last = min(source.head + source.num_heads, target.head + target.num_heads)
            if first < last:
                tensors.append((target.tensor, first, last - first))
                tokens = np.intersect1d(source.tokens, target.tokens, assume_unique=True)
    return tensors, tokens


def tokens_of(ranges: Ints) -> Ints:
    """All tokens of some ranges, in their order."""
    return np.concatenate([np.arange(a, b) for a, b in ranges.tolist()] or [np.zeros(0, np.int64)])


def sequences_of(schedule: Schedule, tile: int) -> list[KernelSequence]:
    """The sequences of a tile that is one kernel call with their tokens, as ``cpsim.masks.tiles.sequences`` groups
    them.
    """
    made, tiles, places = sequences(schedule.tiles), schedule.tiles, sequence_places(schedule.tiles)
    found = []
    for i in range(made.start[tile], made.start[tile + 1]):
        first, end, q_from, q_to = places[i].tolist()
        q_to -= int(made.unseen[i])
        rows = tiles.rows[first:end].astype(np.int64)
        mask_row, q0, q1, k0, k1 = rows[(rows[:, 1] < q_to) & (rows[:, 2] > q_from)].T
        k0 = np.maximum(k0, q_from + tiles.mask.low[mask_row])
        k1 = np.minimum(k1, q_to + tiles.mask.high[mask_row])
        shared = np.stack([np.maximum(q0, q_from), np.minimum(q1, q_to)], axis=1)
        queries, keys = tokens_of(np.unique(shared, axis=0)), np.unique(tokens_of(np.stack([k0, k1], axis=1)))
        assert len(queries) == made.q_len[i] - made.unseen[i]
        assert len(keys) == made.k_len[i]
        found.append(KernelSequence(queries, keys, bool(made.causal[i])))
    return found


def is_one_call(schedule: Schedule, tile: int, *, packed: bool, windows: bool = False) -> bool:
    """Whether one varlen call runs a tile on keys that ascend, or are packed in the order of its sequences; one with a
    window, where the kernel has ``windows``."""
    found = sequences(schedule.tiles)
    there = found.start[tile] < found.start[tile + 1]
    one = found.one_call[tile] or (windows and found.one_window[tile])
    return bool(there and one and (packed or found.in_place[tile]))


def seen(schedule: Schedule, tile: int) -> tuple[Ints, Ints]:
    """Queries of a tile that see a key, and keys that a query sees: tokens in ascending order."""
    tiles = schedule.tiles
    mask_row, q0, q1, k0, k1 = tiles.rows[tiles.start[tile] : tiles.start[tile + 1]].astype(np.int64).T
    low, high = tiles.mask.low[mask_row], tiles.mask.high[mask_row]
    q0, q1 = np.maximum(q0, k0 - high), np.minimum(q1, k1 - low)
    k0, k1 = np.maximum(k0, q0 + low), np.minimum(k1, q1 + high)
    some = q0 < q1
    queries, keys = (tokens_of(np.stack(ends, axis=1)[some]) for ends in ((q0, q1), (k0, k1)))
    return np.unique(queries), np.unique(keys)
