"""Building schedules: ops for many ranks and steps at a time, closed into columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cpsim.masks.slices import Ints, RangeSets, Whole
from cpsim.masks.tiles import Tiles
from cpsim.runtime.compiled import compiled, unsigned
from cpsim.schedule.schedule import READ, STREAMS, UPDATE, WRITE, Int32, Kind, Schedule

NOTHING: Final = -1
"""No dependency; no op."""

Access = tuple[Int32, Int32]
"""(buffers, blocks), one each for every new op."""


@dataclass(slots=True)
class _Entries:
    """What ops have several of, as chunks of equally many entries for every op; grouped by op once at the end."""

    chunks: list[tuple[NDArray[Any], list[Int32]]] = field(default_factory=list)
    """Ops ``[n]`` and columns of entries, ``[n, g]`` each."""

    def extend(self, ops: Whole, *columns: Whole) -> None:
        """Entries of ops ``[n]``; every column ``[n]`` or ``[n, g]``."""
        if len(ops):
            tables = [np.ascontiguousarray(column, np.int32).reshape(len(ops), -1) for column in columns]
            self.chunks.append((unsigned(np.ascontiguousarray(ops, np.int32))[0], tables))

    def close(self, num_ops: int, num_columns: int) -> tuple[Int32, Int32]:
        """CSR start ``[num_ops + 1]`` and the columns ``[num_columns, X]``, ordered by op; the chunks are gone.

        Entries whose first column is negative are left out.
        """
        start = np.zeros(num_ops + 1, np.int32)
        for ops, tables in self.chunks:
            _count(start[1:], ops, tables[0])
        np.cumsum(start, dtype=np.int32, out=start)
        grouped = np.empty((num_columns, int(start[-1])), np.int32)
        for i, column in enumerate(grouped):
            filled = start.copy()
            for ops, tables in self.chunks:
                _group(filled, column, ops, tables[0], tables[i])
        self.chunks.clear()
        return start, grouped


@compiled()
def _count(counts, ops, first):  # type: ignore[no-untyped-def]
    """Add up entries of every op."""
    for i in range(len(ops)):
        for entry in range(first.shape[1]):
            counts[ops[i]] += first[i, entry] >= 0


@compiled()
def _group(filled, grouped, ops, first, column):  # type: ignore[no-untyped-def]
    """Put a column's entries behind those that their ops have."""
    for i in range(len(ops)):
        for entry in range(first.shape[1]):
            if first[i, entry] >= 0:
                grouped[filled[ops[i]]] = column[i, entry]
                filled[ops[i]] += 1


@compiled()
def _distinct(rows):  # type: ignore[no-untyped-def]
    """Where rows occur first that differ, and which of these each is; mostly it is the one after the last one's."""
    first, which, count, at = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32), 0, 0
    for i in range(len(rows)):
        tried = 0
        while tried < count:
            one, same = first[at], True
            for column in range(rows.shape[1]):
                same &= rows[one, column] == rows[i, column]
            if same:
                break
            at, tried = at + 1 if at + 1 < count else 0, tried + 1
        if tried == count:
            at, count = count, count + 1
            first[at] = i
        which[i] = at
    return first[:count], which


class Builder:
    """Collects ops for many ranks, or many ranks and steps, at a time and closes them into a ``Schedule``.

    Every ``add`` makes one op per entry of its arrays: after all others, or where ``interleave`` has kept places.
    """

    def __init__(
        self,
        num_ranks: int,
        sets: RangeSets,
        tiles: Tiles,
        stride: int = 1,
        narrow_sums: bool = False,
        head_groups: int = 1,
        copies: int = 1,
    ) -> None:
        self.num_ranks, self.head_groups, self.copies = num_ranks, head_groups, copies
        self.sets, self.tiles, self.stride, self.narrow_sums = sets, tiles, stride, narrow_sums
        self._num_ops = 0
        self._columns: list[tuple[Whole, ArrayLike, ArrayLike, ArrayLike, ArrayLike, ArrayLike]] = []
        self._lanes, self._deps, self._accesses = _Entries(), _Entries(), _Entries()
        self._buffers: list[tuple[str, Ints, Ints]] = []
        self._blocks: list[tuple[str, Ints, tuple[int, int]]] = []
        self._num_buffers = self._num_blocks = 0
        self._inputs: list[Access] = []
        self._outputs: list[Access] = []
        self._routes: list[Ints] = []
        self._products: list[Ints] = []

    def buffers(self, name: str, nbytes: ArrayLike, ranks: ArrayLike | None = None) -> Int32:
        """One buffer of ``nbytes`` on each of the ranks (default: all); returns buffer indices ``[n]``."""
        where = np.arange(self.num_ranks) if ranks is None else np.asarray(ranks, np.int64)
        self._buffers.append((name, where, np.broadcast_to(np.asarray(nbytes, np.int64), where.shape)))
        first, self._num_buffers = self._num_buffers, self._num_buffers + len(where)
        return np.arange(first, self._num_buffers, dtype=np.int32)

    def blocks(self, tensor: str, sets: ArrayLike, heads: tuple[int, int]) -> Int32:
        """One block (tensor, token set, (first head, heads)) per set; returns block indices ``[n]``."""
        chosen = np.asarray(sets, np.int64).ravel()
        self._blocks.append((tensor, chosen, heads))
        first, self._num_blocks = self._num_blocks, self._num_blocks + len(chosen)
        return np.arange(first, self._num_blocks, dtype=np.int32)

    def input(self, buffers: Int32, blocks: Int32) -> None:
        """The buffers hold these blocks before the first op."""
        self._inputs.append((buffers, blocks))

    def output(self, buffers: Int32, blocks: Int32) -> None:
        """The buffers must hold these blocks, complete, after the last op."""
        self._outputs.append((buffers, blocks))

    def interleave(self, *wanted: NDArray[np.bool_]) -> list[Int32]:
        """Keep places for ops that are issued step by step, kind by kind within a step, rank by rank.

        Args:
            wanted: one array ``[steps, ranks]`` per kind of op, True where there is one.

        Returns:
            indices of the ops, one array ``[steps, ranks]`` per kind; NOTHING where there is none.
        """
        there = np.stack(wanted, axis=1)
        kept, places = np.flatnonzero(there), np.full(there.shape, NOTHING, np.int32)
        places.reshape(-1)[kept] = np.arange(self._num_ops, self._num_ops + len(kept))
        self._num_ops += len(kept)
        return list(places.swapaxes(0, 1))

    def add(
        self,
        kind: Kind,
        *lanes: tuple[ArrayLike, str],
        at: Whole | None = None,
        step: ArrayLike = 0,
        tile: ArrayLike = 0,
        heads: ArrayLike = (0, 0, 0, 0),
        nbytes: ArrayLike = 0,
        product: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
        deps: Sequence[Ints] = (),
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        updates: Sequence[Access] = (),
    ) -> Ints:
        """Make one op per entry of the lanes' rank arrays.

        Args:
            kind: of all the new ops.
            at: their indices, kept by ``interleave``; None appends them in order.
            lanes: (ranks ``[n]``, stream) pairs; a transfer's source first. A collective names its ranks
                ``[n, g]`` on one stream.
            step, tile, heads, nbytes: columns, see ``Schedule``; one for all new ops or one each.
            product: m, n and k of matrix products, which give their FLOP, likewise.
            deps: arrays ``[n]`` or ``[n, g]`` of op indices; negative entries mean that there is none.
            reads, writes, updates: (buffers, blocks), each ``[n]`` or for collectives ``[n, g]``.

        Returns:
            indices of the new ops, ``int64[n]``.
        """
        count = len(np.asarray(lanes[0][0]))
        if count == 0:
            return np.zeros(0, np.int64)
        ops = np.arange(self._num_ops, self._num_ops + count) if at is None else at
        own = np.ascontiguousarray(ops, np.int32)
        self._num_ops += count if at is None else 0
        if product is not None:
            m, n, k = (np.broadcast_to(np.asarray(size, np.int64), count) for size in product)
            self._products.append(np.stack([ops, m, n, k], axis=1))
            nbytes = 2 * m * n * k
        step, tile = (np.asarray(column, np.int32) for column in (step, tile))
        self._columns.append((own, int(kind), step, tile, heads, nbytes))
        for ranks, stream in lanes:
            self._lanes.extend(own, np.asarray(ranks) * len(STREAMS) + STREAMS.index(stream))
        for wanted in deps:
            self._deps.extend(own, wanted)
        for mode, accesses in ((READ, reads), (WRITE, writes), (UPDATE, updates)):
            for buffers, blocks in accesses:
                self._accesses.extend(own, buffers, blocks * 3 + mode)
        return ops

    def also_reads(self, ops: Ints, access: Access) -> None:
        """Ops that read one more buffer and block each, ``[n]``."""
        self._accesses.extend(ops, access[0], access[1] * 3 + READ)

    def route(self, op: int, ranks: Ints, nbytes: Ints) -> None:
        """Bytes ``[g, g]`` that an all-to-all moves from each of its ranks ``[g]`` to each."""
        source, target = np.nonzero(nbytes)
        moved = nbytes[source, target]
        self._routes.append(np.stack([np.full(len(source), op), ranks[source], ranks[target], moved]))

    def adopt(self, s: Schedule) -> None:
        """Buffers and blocks of a finished schedule, with their indices, before any others; ``take`` brings its ops."""
        assert self._num_buffers == self._num_blocks == 0
        for name, rank, nbytes in zip(s.buffer_name.tolist(), s.buffer_rank, s.buffer_nbytes, strict=True):
            self.buffers(s.buffer_names[name], nbytes, [rank])
        for tensor, chosen, heads in zip(s.block_tensor.tolist(), s.block_set, s.block_heads.tolist(), strict=True):
            self.blocks(s.block_tensors[tensor], chosen, tuple(heads))

    def take(self, s: Schedule, first: int, end: int, moved: Ints, more: Sequence[tuple[int, int]]) -> None:
        """Ops ``first`` to ``end`` of an adopted schedule, after all others.

        Args:
            moved: new indices of its ops, filled in for these, ``[N]``.
            more: (op of the schedule, new index of another op) that it depends on besides.
        """
        ops = np.arange(self._num_ops, self._num_ops + end - first)
        moved[first:end], self._num_ops = ops, self._num_ops + end - first
        heads = s.heads_of(np.arange(first, end))
        self._columns.append((ops, s.kind[first:end], s.step[first:end], s.tile[first:end], heads, s.nbytes[first:end]))
        for name, entries in (("lane", self._lanes), ("dep", self._deps), ("access", self._accesses)):
            start = getattr(s, f"{name}_start")
            mine, of_op = slice(start[first], start[end]), ops.repeat(np.diff(start[first : end + 1]))
            match name:
                case "lane":
                    entries.extend(of_op, s.lane_rank[mine].astype(np.int64) * len(STREAMS) + s.lane_stream[mine])
                case "dep":
                    entries.extend(of_op, moved[s.dep[mine]])
                case _:
                    entries.extend(of_op, s.access_buffer[mine], s.access_block[mine] * 3 + s.access_mode[mine])
        for op, other in (pair for pair in more if first <= pair[0] < end):
            self._deps.extend(moved[[op]], np.array([other]))
        routes = slice(*np.searchsorted(s.routes[:, 0], [first, end]).tolist())
        op, source, target = s.routes[routes].T
        self._routes.append(np.stack([moved[op], source, target, s.route_nbytes[routes]]))

    def build(self) -> Schedule:
        """The finished schedule; what it was collected from is gone."""
        ops = [c[0].astype(np.intp) for c in self._columns]  # NumPy would do it anew for every column
        kind, step, tile, nbytes = (
            _spread([c[i] for c in self._columns], ops, dtype)
            for i, dtype in ((1, np.int8), (2, np.int32), (3, np.int32), (5, np.int64))
        )
        head_rows = dict[tuple[int, ...], int]()
        head_row = _spread([_numbered(c[4], head_rows) for c in self._columns], ops, np.int32)
        del ops
        self._columns.clear()
        access_start, (access_buffer, access) = self._accesses.close(self._num_ops, 2)
        mode, block = (access % 3).astype(np.int8), np.floor_divide(access, 3, out=access)
        dep_start, (deps,) = self._deps.close(self._num_ops, 1)
        lane_start, (lanes,) = self._lanes.close(self._num_ops, 1)
        stream, rank = (lanes % len(STREAMS)).astype(np.int8), np.floor_divide(lanes, len(STREAMS), out=lanes)
        names, name_index = _intern([b[0] for b in self._buffers], [len(b[1]) for b in self._buffers])
        tensors, tensor_index = _intern([b[0] for b in self._blocks], [len(b[1]) for b in self._blocks])
        block_heads = np.array([b[2] for b in self._blocks], np.int32).reshape(-1, 2)
        routes = np.concatenate([np.zeros((4, 0), np.int64), *self._routes], axis=1)
        products = np.concatenate([np.zeros((0, 4), np.int64), *self._products])
        return Schedule(
            num_ranks=self.num_ranks,
            kind=kind,
            step=step,
            tile=tile,
            head_row=head_row.astype(np.min_scalar_type(max(len(head_rows) - 1, 0))),
            head_rows=np.array(list(head_rows), np.int32).reshape(-1, 4),
            nbytes=nbytes,
            lane_start=lane_start,
            lane_rank=rank,
            lane_stream=stream,
            dep_start=dep_start,
            dep=deps,
            access_start=access_start,
            access_buffer=access_buffer,
            access_block=block,
            access_mode=mode,
            buffer_names=names,
            buffer_name=name_index,
            buffer_rank=_joined([b[1] for b in self._buffers]).astype(np.int32),
            buffer_nbytes=_joined([b[2] for b in self._buffers]),
            block_tensors=tensors,
            block_tensor=tensor_index,
            block_set=_joined([b[1] for b in self._blocks]).astype(np.int32),
            block_heads=np.repeat(block_heads, [len(b[1]) for b in self._blocks], axis=0),
            inputs=_pairs(self._inputs),
            outputs=_pairs(self._outputs),
            sets=self.sets,
            tiles=self.tiles,
            narrow_sums=self.narrow_sums,
            stride=self.stride,
            head_groups=self.head_groups,
            routes=routes[:3].T.astype(np.int32),
            route_nbytes=routes[3],
            copies=self.copies,
            products=products[np.argsort(products[:, 0], kind="stable")],
        )


def followed_by(schedule: Schedule, ops: Sequence[tuple[Kind, int | tuple[int, int, int]]]) -> Schedule:
    """A schedule with more ops on ``compute`` of every rank after all that the rank runs: (kind, nbytes) each, products
    with m, n and k."""
    s, ranks, count = schedule, np.arange(schedule.num_ranks, dtype=np.int32), len(ops)
    last = np.full((s.num_ranks, len(STREAMS)), NOTHING)
    last[s.lane_rank, s.lane_stream] = s.op_of_lane()
    per_op = [np.where(i == 0, last, NOTHING) for i in range(count)]
    deps = np.stack(per_op).reshape(count * s.num_ranks, -1)
    more = np.arange(1, count * s.num_ranks + 1)
    none = np.zeros((count * s.num_ranks, 4), np.int32)
    kinds = np.repeat([kind for kind, _ in ops], s.num_ranks)
    nbytes = np.repeat([2 * prod(size) if isinstance(size, tuple) else size for _, size in ops], s.num_ranks)
    products = [
        (len(s) + i * s.num_ranks + rank, *size)
        for i, (_, size) in enumerate(ops)
        if isinstance(size, tuple)
        for rank in range(s.num_ranks)
    ]
    return replace(
        s,
        kind=np.concatenate([s.kind, kinds.astype(np.int8)]),
        step=np.concatenate([s.step, none[:, 0]]),
        tile=np.concatenate([s.tile, none[:, 0]]),
        head_row=np.concatenate([s.head_row, np.full(len(more), len(s.head_rows), np.int32)]),
        head_rows=np.concatenate([s.head_rows, np.zeros((1, 4), np.int32)]),
        nbytes=np.concatenate([s.nbytes, nbytes]),
        lane_start=np.concatenate([s.lane_start, s.lane_start[-1] + more]),
        lane_rank=np.concatenate([s.lane_rank, np.tile(ranks, count)]),
        lane_stream=np.concatenate([s.lane_stream, np.full(len(more), STREAMS.index("compute"), np.int8)]),
        dep_start=np.concatenate([s.dep_start, s.dep_start[-1] + np.cumsum((deps >= 0).sum(axis=1))]),
        dep=np.concatenate([s.dep, deps[deps >= 0].astype(np.int32)]),
        access_start=np.concatenate([s.access_start, np.full(len(more), s.access_start[-1])]),
        products=np.concatenate([s.products, np.array(products, np.int64).reshape(-1, 4)]),
    )


def _spread(values: Sequence[ArrayLike], ops: Sequence[Ints], dtype: DTypeLike) -> NDArray[Any]:
    """A column ``[N]`` from values that hold for all ops of an ``add`` or for each of them."""
    column = np.empty(sum(map(len, ops)), dtype)
    for value, where in zip(values, ops, strict=True):
        column[where] = value
    return column


def _numbered(heads: ArrayLike, known: dict[tuple[int, ...], int]) -> int | Int32:
    """Numbers of one row of heads ``[4]``, or of several ``[n, 4]``; new rows become known."""
    rows = np.asarray(heads, np.int64)
    if rows.ndim == 1:
        return known.setdefault(tuple(rows.tolist()), len(known))
    first, which = _distinct(rows)
    numbers = np.array([known.setdefault(tuple(row), len(known)) for row in rows[first].tolist()], np.int32)
    return np.asarray(numbers[which])


def _intern(names: list[str], counts: list[int]) -> tuple[tuple[str, ...], Int32]:
    unique = tuple(dict.fromkeys(names))
    return unique, np.repeat(np.array([unique.index(n) for n in names], np.int32), counts)


def _joined(chunks: list[Ints]) -> Ints:
    return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)


def _pairs(accesses: list[Access]) -> Int32:
    rows = [np.stack([np.ravel(a), np.ravel(b)], axis=1) for a, b in accesses]
    return np.concatenate(rows).astype(np.int32) if rows else np.zeros((0, 2), np.int32)
