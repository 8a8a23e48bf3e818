"""The schedule: what every rank computes and sends, as columns; the one object that all interpreters share.

Semantics are CUDA's. An op occupies one *lane* (rank, stream) on each of its ranks. Lanes run their ops in list
order; an op starts when its dependencies have ended, it is first on each of its lanes, and the host of each of its
ranks has launched it (hosts launch in list order). Dependencies point backwards, so schedules are acyclic by
construction, and each dependency shares a rank with its op, so a stream can wait for it.

Buffers are named, sized and owned by one rank; every op says which buffers it reads and writes and which *block*
(tensor, token set, heads) it expects in or leaves in each. Attention ops point to a *tile*: the part of the mask
that falls into one (query set) x (key set) product. The same tiles serve forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import Ints, RangeSets, Whole
from cpsim.masks.stripes import striped_tokens
from cpsim.masks.tiles import Tiles
from cpsim.runtime.compiled import compiled

Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]
Mask = NDArray[np.bool_]
Pass = Literal["fwd", "bwd"]


class Kind(IntEnum):
    """What an op does; ``nbytes`` of each kind is said here."""

    ATTENTION = 0
    """One kernel call: partial output and log-sum-exp of a tile. ``nbytes`` 0."""
    ATTENTION_BACKWARD = 1
    """One kernel call: dQ, dK and dV of a tile. ``nbytes`` 0."""
    MERGE = 2
    """Log-sum-exp merge of a partial output into an accumulator. ``nbytes`` read plus written."""
    ACCUMULATE = 3
    """Sum of a partial gradient into an accumulator. ``nbytes`` read plus written."""
    COPY = 4
    """Pack, unpack, cast or reorder on one rank. ``nbytes`` read plus written."""
    TRANSFER = 5
    """Point to point, from the first lane's rank to the second's. ``nbytes`` on the wire."""
    ALL_GATHER = 6
    """``nbytes`` is nccl-tests' S: the gathered array of one rank."""
    REDUCE_SCATTER = 7
    """``nbytes`` is nccl-tests' S: the full input array of one rank."""
    ALL_TO_ALL = 8
    """``nbytes`` is nccl-tests' S: the input array of one rank, its own part included; the largest rank's. With routes:
    the most that a rank receives."""
    ALL_REDUCE = 9
    """``nbytes`` is nccl-tests' S: the array of one rank."""
    BARRIER = 10
    """All lanes wait for each other. ``nbytes`` 0."""
    GEMM = 11
    """Matrix product of a training step. ``nbytes`` counts its FLOP instead; ``products`` say its shape."""
    ELEMENTWISE = 12
    """Norm, activation, rotary and the like, or a strided copy of somebody's eager code. ``nbytes`` read plus
    written."""
    SELECT = 13
    """Scores of a tile's queries against its candidates, and the choice of the best; see ``cpsim.case.sparse``.
    ``nbytes`` 0."""
    SCATTER = 14
    """Rows gathered or scattered element by element, by an index of rows. ``nbytes`` read plus written."""


ATTENTION_KINDS: Final = (Kind.ATTENTION, Kind.ATTENTION_BACKWARD)
COLLECTIVE_KINDS: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE)
COMMUNICATION_KINDS: Final = (Kind.TRANSFER, *COLLECTIVE_KINDS)
MEMORY_BOUND_KINDS: Final = (Kind.MERGE, Kind.ACCUMULATE, Kind.COPY, Kind.ELEMENTWISE, Kind.SCATTER)
STREAMS: Final = (
    "compute",
    "send",
    "recv",
    "grad_send",
    "grad_recv",
    "comm",
    "outer_send",
    "outer_recv",
    "gather",
    "scatter",
    "to_host",
    "from_host",
)
"""Streams of a rank. A batched send and receive is one launch on two lanes; gradients travel beside keys and values
on lanes of their own (a second process group), and so do keys and values between the inner rings of a double ring;
collectives run on ``comm``. Of a training step weights are gathered on ``gather`` and gradients summed on ``scatter``.
What waits in the host's memory leaves and returns on the last two."""

HOST_STREAMS: Final = len(STREAMS) - 2, len(STREAMS) - 1
READ, WRITE, UPDATE = range(3)
MODE_NAMES: Final = ("reads", "writes", "updates")


def is_one_of(kind: Int8, kinds: tuple[Kind, ...]) -> NDArray[np.bool_]:
    """Whether each op is of one of the kinds, in the shape of ``kind``; kind by kind, faster than ``numpy.isin``."""
    found = np.zeros(kind.shape, np.bool_)
    for one in kinds:
        found |= kind == int(one)  # an enum would be compared as int64
    return found


@dataclass(frozen=True, slots=True)
class Op:
    """One op as people read it; made on demand from the columns."""

    index: int
    kind: Kind
    step: int
    lanes: tuple[tuple[int, str], ...]
    """(rank, stream) pairs; a transfer's first is the source."""
    deps: tuple[int, ...]
    accesses: tuple[tuple[str, int, str], ...]
    """(mode, buffer index, block in words) triples."""
    nbytes: int
    num_heads: int
    num_kv_heads: int
    area: int

    @property
    def name(self) -> str:
        """Kind and step, as in timelines and traces."""
        return f"{self.kind.name.lower().replace('_', ' ')} {self.step}"

    def __str__(self) -> str:
        lanes = ",".join(f"{rank}.{stream}" for rank, stream in self.lanes)
        parts = [f"{self.index:>6} {self.name:<24} {lanes}"]
        if self.deps:
            parts.append("after " + ",".join(map(str, self.deps)))
        if self.area:
            parts.append(f"area {self.area} heads {self.num_heads}:{self.num_kv_heads}")
        if self.nbytes:
            parts.append(f"{self.nbytes} B")
        parts.extend(f"{mode} #{buffer}={block}" for mode, buffer, block in self.accesses)
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """What making a schedule costs, where that is more than nothing."""

    seconds: float = 0.0
    """On one core, for every batch."""
    share: int = 1
    """Attention operators that run while a process plans one batch: layers of an iteration, times processes that plan
    batches to come."""
    notes: tuple[str, ...] = ()
    """How it was planned, as far as a reader must know."""

    def exposed_s(self, attention_s: float) -> float:
        """Seconds of planning for every attention operator that the operator itself does not hide."""
        return max(0.0, self.seconds / self.share - attention_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Schedule:
    """Columns of N ops; see the module's text for their meaning. Arrays are read-only, of every schedule: for others
    compiled code is compiled again.

    CSR pairs (``x_start[N + 1]``, ``x...[X]``) hold what an op has several of.
    """

    num_ranks: int
    kind: Int8
    step: Int32
    """Step of the strategy's main loop that the op belongs to."""
    tile: Int32
    """Attention: index into ``tiles``; 0 elsewhere."""
    head_row: NDArray[np.integer[Any]]
    """Row of ``head_rows`` of every op, ``[N]``, in as few bits as it takes."""
    head_rows: Int32
    """Which heads ops compute, few sets of which differ, ``[H, 4]``: first query head, query heads, first key-value
    head, key-value heads."""
    nbytes: Ints
    lane_start: Int32
    lane_rank: Int32
    lane_stream: Int8
    """Index into ``STREAMS``."""
    dep_start: Int32
    dep: Int32
    access_start: Int32
    access_buffer: Int32
    access_block: Int32
    access_mode: Int8
    """READ, WRITE (overwrites) or UPDATE (reads and overwrites)."""
    buffer_names: tuple[str, ...]
    buffer_name: Int32
    buffer_rank: Int32
    buffer_nbytes: Ints
    block_tensors: tuple[str, ...]
    block_tensor: Int32
    block_set: Int32
    block_heads: Int32
    """``[num_blocks, 2]``: first head, heads."""
    inputs: Int32
    """Buffers that hold their block before the first op, ``[I, 2]`` of (buffer, block)."""
    outputs: Int32
    """Buffers that must hold their block after the last op, ``[O, 2]`` of (buffer, block). They start as sums of
    nothing, zeros and a log-sum-exp of -inf, which is what they end as where queries see no key."""
    sets: RangeSets
    """Token sets that blocks and tiles refer to; a buffer stores a set's ranges in ascending order."""
    tiles: Tiles
    narrow_sums: bool = False
    """Partial results are summed in the working type, as some people's code does; otherwise in fp32."""
    stride: int = 1
    """Sets and tiles count positions in the order of this stride, see ``cpsim.masks.stripes``; 1: they count tokens."""
    head_groups: int = 1
    """Sets and tiles count every token once for every group of heads, see ``Workload.by_group``; heads of ops and
    blocks are those of one group."""
    routes: Int32 = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    """``[X, 3]`` of (op, source rank, target rank), ordered by op: who sends to whom in uneven all-to-alls, ranks' own
    parts included; one without routes is even."""
    route_nbytes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Bytes of every route, ``[X]``."""
    products: Ints = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    """``[X, 4]`` of (op, m, n, k), ordered by op: matrix products [m, k] x [k, n]."""
    planning: Planning = Planning()
    copies: int = 1
    """Replication factor of a folded schedule: ranks that do the same with other heads, of which one is there. It is
    priced and simulated, not executed."""

    def __post_init__(self) -> None:
        for start in ("lane_start", "dep_start", "access_start"):
            object.__setattr__(self, start, getattr(self, start).astype(np.int32, copy=False))
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def heads(self) -> Int32:
        """The row of ``head_rows`` of every op, ``[N, 4]``."""
        return np.asarray(self.head_rows[self.head_row], np.int32)

    def heads_of(self, ops: Whole | int) -> Int32:
        """The row of ``head_rows`` of one op, ``[4]``, or of some, ``[len(ops), 4]``."""
        return np.asarray(self.head_rows[self.head_row[ops]], np.int32)

    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of its ops, in order."""
        there = np.bincount(self.kind, minlength=len(Kind))
        return tuple(kind for kind in Kind if there[kind])

    def ranks_of(self, index: int) -> list[int]:
        """Ranks of one op, source first."""
        return [int(r) for r in self.lane_rank[self.lane_start[index] : self.lane_start[index + 1]]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sets, of all head groups."""
        return int(self.sets.ranges.max(initial=0))

    def tokens(self, positions: Ints) -> Ints:
        """Tokens at the positions that sets and tiles count."""
        return positions if self.stride == 1 else striped_tokens(positions, self.num_tokens, self.stride)

    def range_text(self, first: int, end: int) -> str:
        """A range of positions in words: tokens ``first:end``, or ``first:end:stride`` of one stripe."""
        if self.head_groups > 1:
            group, first = divmod(first, self.num_tokens // self.head_groups)
            return f"{first}:{end - group * (self.num_tokens // self.head_groups)} of head group {group}"
        if self.stride == 1 or first >= end:
            return f"{first}:{end}"
        a, b = self.tokens(np.array([first, end - 1])).tolist()
        one_stripe = b - a == (end - 1 - first) * self.stride
        return f"{a}:{b + 1}:{self.stride}" if one_stripe else f"positions {first}:{end}"

    def set_text(self, token_set: int) -> str:
        """A token set in words."""
        ranges = self.sets.of(token_set)
        return "+".join(self.range_text(*r) for r in ranges[:3].tolist()) + ("+.." if len(ranges) > 3 else "")

    def block_text(self, block: int) -> str:
        """A block in words: tensor, token ranges, heads."""
        first, count = self.block_heads[block].tolist()
        tokens = self.set_text(int(self.block_set[block]))
        return f"{self.block_tensors[self.block_tensor[block]]}[{tokens}]h{first}:{first + count}"

    def op(self, index: int) -> Op:
        """One op with everything spelled out."""
        lanes = slice(self.lane_start[index], self.lane_start[index + 1])
        accesses = range(self.access_start[index], self.access_start[index + 1])
        return Op(
            index=index,
            kind=Kind(int(self.kind[index])),
            step=int(self.step[index]),
            lanes=tuple(
                (r, STREAMS[s])
                for r, s in zip(self.lane_rank[lanes].tolist(), self.lane_stream[lanes].tolist(), strict=True)
            ),
            deps=tuple(self.dep[self.dep_start[index] : self.dep_start[index + 1]].tolist()),
            accesses=tuple(
                (
                    MODE_NAMES[self.access_mode[a]],
                    int(self.access_buffer[a]),
                    self.block_text(int(self.access_block[a])),
                )
                for a in accesses
            ),
            nbytes=int(self.nbytes[index]),
            num_heads=int(self.heads_of(index)[1]),
            num_kv_heads=int(self.heads_of(index)[3]),
            area=int(self.tiles.area[self.tile[index]]),
        )

    def process_groups(self) -> tuple[Int32, list[tuple[int, ...]]]:
        """Whose process group every transfer runs in: all ranks that transfers on its lanes link, such as one ring.

        Returns:
            index of the group of every op, -1 for other kinds, ``[N]``; and the ranks of every group, in order.
        """
        group, of_lane = _linked(
            self.kind == Kind.TRANSFER, self.lane_start, self.lane_rank, self.lane_stream, self.num_ranks, len(STREAMS)
        )
        lanes = np.flatnonzero(of_lane >= 0)
        order = lanes[np.argsort(of_lane[lanes], kind="stable")]
        members = np.split(order % self.num_ranks, np.flatnonzero(np.diff(of_lane[order])) + 1)
        return group, [tuple(ranks.tolist()) for ranks in members if len(ranks)]

    def project(self, rank: int) -> tuple[Op, ...]:
        """The program of one rank: its ops in launch order, with the dependencies that it can see.

        Every dependency shares a rank with its op; those of other ranks reach this one through the op's partners.
        """
        mine = np.flatnonzero(np.bincount(self.op_of_lane()[self.lane_rank == rank], minlength=len(self)))
        known = set(mine.tolist())
        ops = (self.op(int(i)) for i in mine)
        return tuple(replace(o, deps=tuple(d for d in o.deps if d in known)) for o in ops)

    def computation(self, rank: int) -> Schedule:
        """What one rank computes, without communication and without what it waits for; to be priced and simulated."""
        counts = np.bincount(self.op_of_lane()[self.lane_rank == rank], minlength=len(self))
        kept = (counts > 0) & ~is_one_of(self.kind, COMMUNICATION_KINDS)
        number = np.cumsum(kept, dtype=np.int32) - 1

        def some(start: Int32 | Ints) -> tuple[Int32, NDArray[np.bool_]]:
            starts = np.concatenate([[0], np.cumsum(np.diff(start)[kept])]).astype(np.int32)
            return starts, np.repeat(kept, np.diff(start))

        lanes, accesses = some(self.lane_start), some(self.access_start)
        needed = np.repeat(kept, np.diff(self.dep_start)) & kept[self.dep]
        ends = np.concatenate([[0], np.cumsum(needed)])[self.dep_start]
        products = self.products[kept[self.products[:, 0]]]
        return replace(
            self,
            kind=self.kind[kept],
            step=self.step[kept],
            tile=self.tile[kept],
            head_row=self.head_row[kept],
            nbytes=self.nbytes[kept],
            lane_start=lanes[0],
            lane_rank=self.lane_rank[lanes[1]],
            lane_stream=self.lane_stream[lanes[1]],
            dep_start=some(ends)[0],
            dep=number[self.dep[needed]],
            access_start=accesses[0],
            access_buffer=self.access_buffer[accesses[1]],
            access_block=self.access_block[accesses[1]],
            access_mode=self.access_mode[accesses[1]],
            routes=self.routes[:0],
            route_nbytes=self.route_nbytes[:0],
            products=np.column_stack([number[products[:, 0]], products[:, 1:]]),
        )

    def op_of_lane(self, entries: Ints | None = None) -> Ints:
        """Op of some lane entries, or of every one, as long as ``lane_rank``."""
        if entries is not None:
            return np.asarray(np.searchsorted(self.lane_start, entries, "right") - 1, np.int64)
        return np.repeat(np.arange(len(self)), np.diff(self.lane_start))

    def op_of_access(self) -> Ints:
        """Op of every access, as long as ``access_mode``."""
        return np.repeat(np.arange(len(self)), np.diff(self.access_start))

    def lines(self) -> Iterator[str]:
        """The text form: buffers, then one line an op."""
        for i, (name, rank, nbytes) in enumerate(
            zip(self.buffer_name.tolist(), self.buffer_rank.tolist(), self.buffer_nbytes.tolist(), strict=True)
        ):
            yield f"buffer #{i} {self.buffer_names[name]} on rank {rank}: {nbytes} B"
        for i in range(len(self)):
            yield str(self.op(i))

    def flops(self, head_dim: int, value_dim: int = 0) -> float:
        """Model FLOP of all attention ops of all ranks: 4 per pair, head and dimension forward, 10 backward, of which 2
        and 4 are of values' dimensions."""
        values = value_dim or head_dim
        of_pass = 2 * (head_dim + values), 6 * head_dim + 4 * values
        pairs = self.tiles.area[self.tile] * self.head_rows[self.head_row, 1] * is_one_of(self.kind, ATTENTION_KINDS)
        both = (int(pairs[(self.kind == Kind.ATTENTION) == forward].sum()) for forward in (True, False))
        return float(sum(each * number for each, number in zip(of_pass, both, strict=True)) * self.copies)

    def bytes_sent(self) -> NDArray[np.float64]:
        """Bytes that leave every rank, ``float64[num_ranks]``: transfers, routes, and (n-1)/n of a collective's S
        (all-gather and reduce-scatter by rings: the same; all-reduce twice)."""
        even = is_one_of(self.kind, COLLECTIVE_KINDS)
        even[self.routes[:, 0]] = False
        ops = np.flatnonzero(even)
        first, num_lanes = self.lane_start[ops], self.lane_start[ops + 1] - self.lane_start[ops]
        members = num_lanes * self.copies
        share = (members - 1) / np.maximum(members, 1) * np.where(self.kind[ops] == Kind.ALL_REDUCE, 2, 1)
        lanes = np.repeat(first - np.cumsum(num_lanes) + num_lanes, num_lanes) + np.arange(num_lanes.sum())
        weights = np.repeat(share * self.nbytes[ops], num_lanes)
        sent = np.bincount(self.lane_rank[lanes], weights=weights, minlength=self.num_ranks)
        moved = np.zeros(self.num_ranks)
        _add_moved(moved, self.kind == Kind.TRANSFER, self.nbytes, self.lane_start, self.lane_rank)
        leaving = self.route_nbytes * (self.routes[:, 1] != self.routes[:, 2])
        routed = np.bincount(self.routes[:, 1], weights=leaving, minlength=self.num_ranks)
        return np.asarray(sent + moved + routed, np.float64)

    def memory(self) -> Ints:
        """Bytes of all buffers on every rank's GPU, ``int64[num_ranks]``; buffers are allocated once."""
        weights = self.buffer_nbytes * ~self.on_host()
        return np.bincount(self.buffer_rank, weights=weights, minlength=self.num_ranks).astype(np.int64)

    def over_host_link(self) -> Mask:
        """Ops that copy to or from the host's memory, those on ``HOST_STREAMS``, ``[N]``; their ``nbytes`` are what
        passes the link."""
        found = np.zeros(len(self), np.bool_)
        lanes = np.flatnonzero(self.lane_stream >= HOST_STREAMS[0])
        if len(lanes):
            found[self.op_of_lane()[lanes]] = True
        return found

    def on_host(self) -> Mask:
        """Buffers in the host's memory: those that copies to it write and copies from it read, ``[buffers]``."""
        there, moves = np.zeros(len(self.buffer_nbytes), np.bool_), self.over_host_link()
        if moves.any():
            owner = self.op_of_access()
            leaves = self.lane_stream[self.lane_start[owner]] == HOST_STREAMS[0]
            there[self.access_buffer[moves[owner] & (leaves == (self.access_mode != READ))]] = True
        return there


@compiled()
def _add_moved(moved, is_transfer, nbytes, lane_start, lane_rank):  # type: ignore[no-untyped-def]
    """Add up what transfers take from their sources to other ranks."""
    for op in range(len(nbytes)):
        if is_transfer[op] and lane_rank[lane_start[op]] != lane_rank[lane_start[op] + 1]:
            moved[lane_rank[lane_start[op]]] += nbytes[op]


@compiled()
def _first(first, lane):  # type: ignore[no-untyped-def]
    """First lane of a lane's group so far; ``first`` leads there."""
    if first[lane] < 0:
        first[lane] = lane
    while first[lane] != lane:
        first[lane] = first[first[lane]]
        lane = first[lane]
    return lane


@compiled()
def _linked(is_transfer, lane_start, lane_rank, lane_stream, num_ranks, num_streams):  # type: ignore[no-untyped-def]
    """Group of every op and of every lane (stream, rank), -1 of those without transfers: transfers on lanes of one
    stream are of one group where they share ranks, directly or through others."""
    group, first = np.full(len(is_transfer), -1, np.int32), np.full(num_streams * num_ranks, -1)
    moves = np.flatnonzero(is_transfer)
    for op in moves:
        stream, at = lane_stream[lane_start[op]] * num_ranks, lane_start[op]
        source, target = _first(first, stream + lane_rank[at]), _first(first, stream + lane_rank[at + 1])
        first[max(source, target)] = min(source, target)
    number, of_lane = 0, np.full(len(first), -1)
    for lane in range(len(first)):  # the first lane of a group comes before its others
        if first[lane] == lane:
            of_lane[lane], number = number, number + 1
        elif first[lane] >= 0:
            of_lane[lane] = of_lane[first[lane]]
    for op in moves:
        group[op] = of_lane[lane_stream[lane_start[op]] * num_ranks + lane_rank[lane_start[op]]]
    return group, of_lane
