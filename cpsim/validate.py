"""Proof that a schedule computes what its workload asks for and can be executed as it stands.

``validate`` checks, in this order and with the first violation as the error:

structure   columns are consistent; dependencies point backwards and share a rank with their op; every op is on its
            lanes once, and touches buffers of its own ranks only.
coverage    every unmasked (query, key) pair is computed exactly once per query head.
data        ops are run in list order on a *symbolic* memory: a buffer holds blocks, a block holds one 64-bit number
            per cell (run of tokens x run of heads). Attention op i adds its random weight w_i to the cells of the
            partial results that its tile touches; merges, sums and collectives add; everything else moves cells.
            Reads must find their cells in the buffer, and outputs must end with the sum of w_i over exactly the
            attention ops that touch them, so that a partial result lost or added twice is found.
ordering    two accesses of a buffer of which one writes are ordered by dependencies and lanes (vector clocks).
            A transfer orders what follows its receive after what preceded its send, but not the reverse: a send
            may be buffered and end before its receive is posted.
FLOP        equal the workload's.

Rules of memory. A buffer holds what its last writer left, all of it: an op that writes some blocks to a buffer drops
whatever was there. Output buffers are the exception: they are laid out for their output block, ops may write disjoint
parts of it, and two accesses conflict only where their parts overlap. A read may name any part of a held block (a
view). ``o`` is ``out`` without its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Final, NamedTuple, NoReturn

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cpsim.errors import ScheduleError
from cpsim.masks import Ints, Slices, slice_area
from cpsim.schedule import ATTENTION_KINDS, READ, STREAMS, UPDATE, Kind, Pass, Schedule
from cpsim.workload import Workload

Weights = NDArray[np.uint64]

ONE_LANE: Final = (*ATTENTION_KINDS, Kind.MERGE, Kind.ACCUMULATE, Kind.COPY, Kind.GEMM, Kind.ELEMENTWISE)
READS: Final = {"fwd": ("q", "kv"), "bwd": ("q", "kv", "out", "dout")}
MAKES: Final = {"fwd": ("out",), "bwd": ("dq", "dkv")}
SUMS: Final = (Kind.MERGE, Kind.ACCUMULATE, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
LSE_BYTES: Final = 4
WIDE_BYTES: Final = 4
"""Narrowest element of a buffer that partial results are summed in, fp32."""


def validate(schedule: Schedule, workload: Workload, pass_: Pass) -> None:
    """Raise unless the schedule computes this pass of the workload exactly once and without races.

    Raises:
        ScheduleError: the first line says what is wrong and at which rank, stream and op; the op and its neighbours
            on that stream follow.
    """
    _check_columns(schedule)
    _check_lanes(schedule)
    mask = workload.slices()
    _check_tiles(schedule, mask)
    _check_heads(schedule, workload, pass_)
    _check_coverage(schedule, mask, workload.num_heads)
    _check_order(schedule, _Memory(schedule, workload, pass_).run())
    wanted, got = workload.flops(pass_), schedule.flops(workload.head_dim)
    if got != wanted:
        raise ScheduleError(f"FLOP: expected {wanted:.0f}, got {got:.0f}")


def _fail(schedule: Schedule, index: int, why: str) -> NoReturn:
    """Raise with the op and its neighbours on its first lane."""
    lane = slice(schedule.lane_start[index], schedule.lane_start[index] + 1)
    rank, stream = int(schedule.lane_rank[lane][0]), int(schedule.lane_stream[lane][0])
    same = (schedule.lane_rank == rank) & (schedule.lane_stream == stream)
    lane_ops = np.repeat(np.arange(len(schedule)), np.diff(schedule.lane_start))[same]
    at = int(np.searchsorted(lane_ops, index))
    shown = (
        ("> " if i == index else "  ") + str(schedule.op(i)) for i in lane_ops[max(0, at - 2) : at + 3].tolist()
    )
    raise ScheduleError("\n".join([f"rank {rank}, stream {STREAMS[stream]}, op {index}: {why}", *shown]))


# Structure


def _check_columns(s: Schedule) -> None:
    """Lengths and index ranges of all columns."""
    num_ops = len(s)
    for name, pairs in (("lane", len(s.lane_rank)), ("dep", len(s.dep)), ("access", len(s.access_buffer))):
        start = getattr(s, f"{name}_start")
        if len(start) != num_ops + 1 or start[0] != 0 or start[-1] != pairs or (np.diff(start) < 0).any():
            raise ScheduleError(f"columns: {name}_start does not partition {pairs} entries over {num_ops} ops")
    for column, limit in (
        ("kind", len(Kind)), ("tile", len(s.tiles.area)), ("lane_rank", s.num_ranks), ("lane_stream", len(STREAMS)),
        ("dep", num_ops), ("access_buffer", len(s.buffer_rank)), ("access_block", len(s.block_set)),
        ("access_mode", UPDATE + 1), ("buffer_rank", s.num_ranks), ("buffer_name", len(s.buffer_names)),
        ("block_set", len(s.sets)), ("block_tensor", len(s.block_tensors)),
    ):  # fmt: skip
        values = getattr(s, column)
        if len(values) and not (values.min() >= 0 and values.max() < limit):
            raise ScheduleError(f"columns: {column} has entries outside 0 to {limit - 1}")
    for column in ("step", "tile", "nbytes", "heads"):
        if len(getattr(s, column)) != num_ops or (getattr(s, column) < 0).any():
            raise ScheduleError(f"columns: {column} has negative entries or another length than {num_ops} ops")
    for pairs in (s.inputs, s.outputs):
        if len(pairs) and (pairs.min() < 0 or (pairs.max(axis=0) >= [len(s.buffer_rank), len(s.block_set)]).any()):
            raise ScheduleError("columns: inputs or outputs name buffers or blocks that do not exist")


def _check_lanes(s: Schedule) -> None:
    """Lanes of every kind of op, directions of dependencies, owners of buffers."""
    num_lanes = np.diff(s.lane_start)
    if (num_lanes == 0).any():
        raise ScheduleError(f"op {int(np.flatnonzero(num_lanes == 0)[0])}: has no lanes")
    wrong = np.isin(s.kind, ONE_LANE) & (num_lanes != 1)
    if wrong.any():
        _fail(s, int(np.flatnonzero(wrong)[0]), "runs on one lane by its kind, but has several")
    wrong = (s.kind == Kind.TRANSFER) & (num_lanes != 2)
    if wrong.any():
        _fail(s, int(np.flatnonzero(wrong)[0]), "a transfer needs 2 lanes, source first")
    index, why = _first_bad_lane(
        s.kind, s.lane_start, s.lane_rank, s.dep_start, s.dep, s.access_start, s.access_buffer, s.access_mode,
        s.buffer_rank, int(Kind.TRANSFER), READ,
    )  # fmt: skip
    if why:
        _fail(s, index, _LANE_FAULTS[why])


_LANE_FAULTS: Final = (
    "",
    "has two lanes on one rank",
    "depends on itself or on a later op",
    "depends on an op with which it shares no rank",
    "touches a buffer of a rank that is not its own",
    "a transfer reads at its source and writes at its target",
)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _first_bad_lane(  # type: ignore[no-untyped-def]
    kind, lane_start, lane_rank, dep_start, dep, access_start, access_buffer, access_mode, buffer_rank, transfer, read
):
    """(op, index into ``_LANE_FAULTS``) of the first op that is not where it should be; (0, 0) if there is none."""
    seen = np.full(lane_rank.max() + 1, -1)
    for op in range(len(kind)):
        mine = lane_rank[lane_start[op] : lane_start[op + 1]]
        for rank in mine:
            if seen[rank] == op:
                return op, 1
            seen[rank] = op
        for d in dep[dep_start[op] : dep_start[op + 1]]:
            if d >= op:
                return op, 2
            shared = False
            for rank in lane_rank[lane_start[d] : lane_start[d + 1]]:
                shared |= seen[rank] == op
            if not shared:
                return op, 3
        for a in range(access_start[op], access_start[op + 1]):
            owner = buffer_rank[access_buffer[a]]
            if owner >= len(seen) or seen[owner] != op:
                return op, 4
            if kind[op] == transfer and owner != mine[0 if access_mode[a] == read else 1]:
                return op, 5
    return 0, 0


# Coverage


def _check_tiles(s: Schedule, mask: Slices) -> None:
    """Slices of tiles lie in their mask rows and have the areas that they state."""
    t, rows = s.tiles, s.tiles.rows.astype(np.int64)
    row, q0, q1, k0, k1 = rows.T
    inside = (row >= 0) & (row < len(mask))
    row = np.where(inside, row, 0)
    inside &= (q0 >= mask.q_start[row]) & (q1 <= mask.q_end[row]) & (k0 >= mask.k_start[row]) & (k1 <= mask.k_end[row])
    if not inside.all():
        raise ScheduleError(f"tiles: slice {int(np.flatnonzero(~inside)[0])} lies outside its mask row")
    areas = Slices(q0, q1, k0, k1, mask.low[row], mask.high[row]).areas()
    total = np.concatenate(([0], np.cumsum(areas)))
    if (areas != t.row_area).any() or (total[t.start[1:]] - total[t.start[:-1]] != t.area).any():
        raise ScheduleError("tiles: areas differ from those of their slices")


def _check_heads(s: Schedule, workload: Workload, pass_: Pass) -> None:
    """Attention is of this pass; its heads exist, and its key-value heads are those of its query heads."""
    wanted = ATTENTION_KINDS[pass_ == "bwd"]
    attends = np.isin(s.kind, ATTENTION_KINDS)
    first, count, kv_first, kv_count = s.heads.T
    per_kv = workload.num_heads // workload.num_kv_heads
    last = (first + count - 1) // per_kv
    bad = attends & (s.kind != wanted)
    if bad.any():
        _fail(s, int(np.flatnonzero(bad)[0]), f"does not belong to pass {pass_}")
    bad = attends & ((count < 1) | (first + count > workload.num_heads))
    bad |= attends & ((kv_first != first // per_kv) | (kv_first + kv_count - 1 != last))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        _fail(s, i, f"heads {s.heads[i].tolist()} do not match: {per_kv} query heads share a key-value head")
    bad = ~attends & (s.tile != 0)
    if bad.any():
        _fail(s, int(np.flatnonzero(bad)[0]), "has a tile but is not attention")


def _check_coverage(s: Schedule, mask: Slices, num_heads: int) -> None:
    """Every unmasked pair is in exactly one tile of every query head."""
    ops = np.flatnonzero(np.isin(s.kind, ATTENTION_KINDS))
    first, end = s.heads[ops, 0], s.heads[ops, 0] + s.heads[ops, 1]
    bounds = np.unique(np.concatenate(([0, num_heads], first, end)))
    table = np.stack([mask.q_start, mask.q_end, mask.k_start, mask.k_end, mask.low, mask.high], axis=1)
    known: set[bytes] = set()
    for head in bounds[:-1].tolist():
        here = ops[(first <= head) & (head < end)]
        tiles = np.sort(s.tile[here])
        if tiles.tobytes() in known:
            continue
        known.add(tiles.tobytes())
        rows = np.concatenate([np.arange(s.tiles.start[t], s.tiles.start[t + 1]) for t in tiles] or [bounds[:0]])
        ordered = s.tiles.rows[rows][np.argsort(s.tiles.rows[rows, 0], kind="stable")].astype(np.int64)
        q0, q1, k0, k1, times = _first_uneven(table, ordered)
        if times == 1:
            continue
        where = f"head {head}: queries {q0}:{q1} x keys {k0}:{k1} are computed {times} times, expected once"
        guilty = [i for i in here.tolist() if _touches(s, i, q0, k0)]
        if guilty:
            _fail(s, guilty[-1], f"{where}, by ops {guilty[:8]}")
        raise ScheduleError(f"coverage: {where}")


def _touches(s: Schedule, index: int, query: int, key: int) -> bool:
    rows = s.tiles.rows[s.tiles.start[s.tile[index]] : s.tiles.start[s.tile[index] + 1]]
    hit = (rows[:, 1] <= query) & (query < rows[:, 2]) & (rows[:, 3] <= key) & (key < rows[:, 4])
    return bool(hit.any())


@njit(cache=True)  # type: ignore[untyped-decorator]
def _first_uneven(table, rows):  # type: ignore[no-untyped-def]
    """First cell with unmasked pairs that the rectangles do not cover once: (q0, q1, k0, k1, times).

    ``rows`` are ordered by mask row. Each mask row is counted on its own compressed grid by a 2-D difference array.
    """
    at = 0
    for m in range(len(table)):
        last = at
        while last < len(rows) and rows[last, 0] == m:
            last += 1
        q_start, q_end, k_start, k_end, low, high = table[m]
        qs = np.unique(np.concatenate((rows[at:last, 1], rows[at:last, 2], table[m, :2])))
        ks = np.unique(np.concatenate((rows[at:last, 3], rows[at:last, 4], table[m, 2:4])))
        count = np.zeros((len(qs), len(ks)), np.int32)
        for r in range(at, last):
            i0, i1 = np.searchsorted(qs, rows[r, 1]), np.searchsorted(qs, rows[r, 2])
            j0, j1 = np.searchsorted(ks, rows[r, 3]), np.searchsorted(ks, rows[r, 4])
            count[i0, j0] += 1
            count[i1, j0] -= 1
            count[i0, j1] -= 1
            count[i1, j1] += 1
        for i in range(len(qs) - 1):
            running = 0
            for j in range(len(ks) - 1):
                running += count[i, j]
                count[i, j] = running + (count[i - 1, j] if i > 0 else 0)
                if count[i, j] != 1 and slice_area(qs[i], qs[i + 1], ks[j], ks[j + 1], low, high) > 0:
                    return qs[i], qs[i + 1], ks[j], ks[j + 1], count[i, j]
        at = last
    return 0, 0, 0, 0, 1


# Data


class _Held(NamedTuple):
    """A block in a buffer."""

    token_set: int
    heads: slice
    """Runs of heads."""
    values: Weights
    """``[runs of tokens, runs of heads]``: sums of the weights of the attention ops in it."""
    there: NDArray[np.bool_] | None
    """Same shape: cells that have been written; None where all have been."""


class _Access(NamedTuple):
    """One access of an op, decoded."""

    buffer: int
    block: int
    mode: int
    tensor: str
    token_set: int
    heads: slice


class _Cells:
    """Blocks in units of cells: runs of tokens and heads that no block and no tile cuts."""

    def __init__(self, s: Schedule, workload: Workload) -> None:
        self.s, self.num_heads = s, workload.num_heads
        ends = [s.sets.ranges.ravel(), s.tiles.rows[:, 1:].ravel(), [0, workload.num_tokens]]
        self.tokens = np.unique(np.concatenate([np.asarray(e, np.int64) for e in ends]))
        """Boundaries of the runs of tokens."""
        self.is_kv = np.array([t.endswith("kv") for t in s.block_tensors], bool)
        block_kv = self.is_kv[s.block_tensor]
        first, end = s.block_heads[:, 0], s.block_heads.sum(axis=1)
        self.heads = [
            np.unique(np.concatenate((
                [0, total], first[block_kv == kv], end[block_kv == kv],
                s.heads[:, 2 * kv], s.heads[:, 2 * kv] + s.heads[:, 2 * kv + 1],
            )))
            for kv, total in ((0, workload.num_heads), (1, workload.num_kv_heads))
        ]  # fmt: skip
        """Boundaries of the runs of query heads and of key-value heads."""
        low = [np.searchsorted(self.heads[int(kv)], h) for kv, h in zip(block_kv, first, strict=True)]
        high = [np.searchsorted(self.heads[int(kv)], h) for kv, h in zip(block_kv, end, strict=True)]
        self.block_heads = [slice(int(a), int(b)) for a, b in zip(low, high, strict=True)]
        self._rows: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        self._sets: dict[int, Ints] = {}
        self._tiles: dict[tuple[int, int], Ints] = {}

    def heads_of(self, index: int, tensor: str) -> slice:
        """Runs of heads of an attention op."""
        kv = tensor.endswith("kv")
        first, count = self.s.heads[index, 2 * kv : 2 * kv + 2].tolist()
        a, b = np.searchsorted(self.heads[kv], [first, first + count]).tolist()
        return slice(a, b)

    def of_set(self, token_set: int) -> Ints:
        """Runs of tokens of a set, ascending."""
        if token_set not in self._sets:
            self._sets[token_set] = self._runs(self.s.sets.of(token_set))
        return self._sets[token_set]

    def of_tile(self, tile: int, keys: bool) -> Ints:
        """Runs of tokens that the queries or the keys of a tile touch, ascending."""
        if (tile, keys) not in self._tiles:
            rows = self.s.tiles.rows[self.s.tiles.start[tile] : self.s.tiles.start[tile + 1]]
            self._tiles[tile, keys] = np.unique(self._runs(rows[:, 3:5] if keys else rows[:, 1:3]))
        return self._tiles[tile, keys]

    def common(self, one: int, other: int) -> tuple[Ints, Ints]:
        """Where the runs that two sets share are in the one and in the other."""
        if (one, other) not in self._rows:
            _, here, there = np.intersect1d(
                self.of_set(one), self.of_set(other), assume_unique=True, return_indices=True
            )
            self._rows[one, other] = here, there
        return self._rows[one, other]

    def _runs(self, ranges: NDArray[np.integer]) -> Ints:
        first, end = np.searchsorted(self.tokens, ranges).reshape(-1, 2).T
        length = end - first
        skipped = np.cumsum(length) - length
        return np.asarray(np.arange(length.sum()) + np.repeat(first - skipped, length), np.int64)


class _Memory:
    """All buffers of all ranks, and the symbolic execution of every op on them."""

    def __init__(self, schedule: Schedule, workload: Workload, pass_: Pass) -> None:
        s = self.s = schedule
        self.pass_, self.cells = pass_, _Cells(schedule, workload)
        self.held: list[dict[str, _Held]] = [{} for _ in s.buffer_rank]
        self.is_output = np.zeros(len(s.buffer_rank), bool)
        self.is_output[s.outputs[:, 0]] = True
        width = np.array([_width(t, workload, wide=False) for t in s.block_tensors])
        wide = np.array([_width(t, workload, wide=True) for t in s.block_tensors])
        elements = s.sets.num_tokens()[s.block_set] * s.block_heads[:, 1]
        self.nbytes, self.nbytes_wide = elements * width[s.block_tensor], elements * wide[s.block_tensor]
        weights = np.random.default_rng(0).integers(1, 2**63, len(s), np.int64)
        self.weight = weights.view(np.uint64)
        self.touched: list[list[tuple[int, _Access]]] = [[] for _ in s.buffer_rank]
        """Accesses of every buffer that a later one can still conflict with."""
        self.conflicts: list[tuple[int, int, int]] = []
        """(earlier op, later op, rank) that must be ordered."""

    def run(self) -> Ints:
        """Execute; returns ``int64[C, 3]`` of (earlier op, later op, rank of the buffer) to be ordered."""
        for pairs, filled in ((self.s.outputs, False), (self.s.inputs, True)):
            for buffer, block in pairs.tolist():
                self._place(buffer, block, filled)
            needed = np.bincount(pairs[:, 0], self.nbytes[pairs[:, 1]], len(self.s.buffer_nbytes))
            for b in np.flatnonzero(needed > self.s.buffer_nbytes).tolist():
                name, nbytes = self.s.buffer_names[self.s.buffer_name[b]], self.s.buffer_nbytes[b]
                raise ScheduleError(f"buffer #{b} {name} has {nbytes} B, too few for its blocks of {needed[b]:.0f} B")
        for index in range(len(self.s)):
            accesses = [self._decode(a) for a in range(self.s.access_start[index], self.s.access_start[index + 1])]
            self._record_conflicts(index, accesses)
            self._execute(index, accesses)
        self._check_outputs()
        return np.array(self.conflicts, np.int64).reshape(-1, 3)

    def _decode(self, at: int) -> _Access:
        s, block = self.s, int(self.s.access_block[at])
        return _Access(
            int(s.access_buffer[at]), block, int(s.access_mode[at]), s.block_tensors[s.block_tensor[block]],
            int(s.block_set[block]), self.cells.block_heads[block],
        )  # fmt: skip

    def _place(self, buffer: int, block: int, filled: bool) -> None:
        """Lay an input or output buffer out for its block."""
        tensor, token_set = self.s.block_tensors[self.s.block_tensor[block]], int(self.s.block_set[block])
        heads = self.cells.block_heads[block]
        shape = len(self.cells.of_set(token_set)), heads.stop - heads.start
        self.held[buffer][tensor] = _Held(
            token_set, heads, np.zeros(shape, np.uint64), None if filled else np.zeros(shape, bool)
        )

    def _execute(self, index: int, accesses: list[_Access]) -> None:
        kind = Kind(int(self.s.kind[index]))
        reads = [(a, self._read(index, a)) for a in accesses if a.mode != READ + 1]
        targets = [a for a in accesses if a.mode != READ]
        self._check_sizes(index, kind, accesses)
        if kind in ATTENTION_KINDS:
            values = self._attend(index, [a for a, _ in reads], targets)
        elif kind in (Kind.GEMM, Kind.ELEMENTWISE):
            values = [self._zeros(a) for a in targets]
        else:
            values = [self._gather(index, kind, reads, a) for a in targets]
        self._write(index, targets, values)

    def _zeros(self, a: _Access) -> Weights:
        return np.zeros((len(self.cells.of_set(a.token_set)), a.heads.stop - a.heads.start), np.uint64)

    def _read(self, index: int, a: _Access) -> Weights:
        """Values of a block that a buffer must hold."""
        held = self.held[a.buffer].get(a.tensor)
        if not len(self.cells.of_set(a.token_set)):
            return self._zeros(a)
        if held is None or a.heads.start < held.heads.start or a.heads.stop > held.heads.stop:
            return self._missing(index, a)
        columns = slice(a.heads.start - held.heads.start, a.heads.stop - held.heads.start)
        rows: Ints | slice = slice(None)
        if a.token_set != held.token_set:
            rows, _ = self.cells.common(held.token_set, a.token_set)
            if len(rows) != len(self.cells.of_set(a.token_set)):
                return self._missing(index, a)
        if held.there is not None and not held.there[rows, columns].all():
            return self._missing(index, a)
        return held.values[rows, columns]

    def _missing(self, index: int, a: _Access) -> NoReturn:
        text, buffer = self.s.block_text, a.buffer
        holds = [
            f"{tensor} of {self.s.sets.of(h.token_set)[:3].tolist()}{'' if h.there is None else ' in part'}"
            for tensor, h in self.held[buffer].items()
        ]
        name = self.s.buffer_names[self.s.buffer_name[buffer]]
        wants = "reads" if a.mode == READ else "updates"
        _fail(
            self.s, index,
            f"{wants} {text(a.block)} in #{buffer} {name}, which holds {' and '.join(holds) or 'nothing yet'}",
        )  # fmt: skip

    def _check_sizes(self, index: int, kind: Kind, accesses: list[_Access]) -> None:
        """Buffers are big enough for what is written and moved."""
        s = self.s
        need: dict[int, int] = {}
        for a in accesses:
            if a.mode != READ:
                sums = a.mode == UPDATE and kind in (Kind.MERGE, Kind.ACCUMULATE)
                nbytes = (self.nbytes_wide if sums else self.nbytes)[a.block]
                need[a.buffer] = need.get(a.buffer, 0) + int(nbytes)
        for buffer, nbytes in need.items():
            if nbytes > s.buffer_nbytes[buffer]:
                _fail(s, index, f"writes {nbytes} B to #{buffer}, which has {s.buffer_nbytes[buffer]} B")
        moved = int(s.nbytes[index])
        read, written = ([int(s.buffer_nbytes[a.buffer]) for a in accesses if (a.mode == READ) == r] for r in (1, 0))
        if kind == Kind.TRANSFER:
            blocks = [a.block for a in accesses if a.mode == READ]
            if moved not in (self.nbytes[blocks].sum(), self.nbytes_wide[blocks].sum()):
                _fail(s, index, f"moves {moved} B, but its blocks have {self.nbytes[blocks].sum()} B")
            if moved > min(sum(read), sum(written)):
                _fail(s, index, f"moves {moved} B between buffers of {sum(read)} and {sum(written)} B")
        elif kind == Kind.ALL_GATHER and not sum(read) >= moved <= min(written):
            _fail(s, index, f"gathers {moved} B, more than its buffers have")
        elif kind == Kind.REDUCE_SCATTER and not min(read) >= moved <= sum(written):
            _fail(s, index, f"reduces {moved} B, more than its buffers have")
        elif kind in (Kind.ALL_TO_ALL, Kind.ALL_REDUCE) and moved > min(max(read + written), max(written)):
            _fail(s, index, f"exchanges {moved} B, more than its buffers have")

    def _attend(self, index: int, reads: list[_Access], targets: list[_Access]) -> list[Weights]:
        """Partial results: this op's weight on every cell that its tile touches."""
        tile, cells = int(self.s.tile[index]), self.cells
        for tensor in READS[self.pass_]:
            wanted, heads = cells.of_tile(tile, tensor == "kv"), cells.heads_of(index, tensor)
            found = [
                cells.of_set(a.token_set)
                for a in reads
                if a.tensor == tensor and a.heads.start <= heads.start and heads.stop <= a.heads.stop
            ]
            if not found or (found[0] is not wanted and not np.isin(wanted, np.concatenate(found)).all()):
                _fail(self.s, index, f"does not read all of {tensor} that its tile needs")
        if tuple(a.tensor for a in targets if a.mode != READ) != MAKES[self.pass_]:
            _fail(self.s, index, f"expected to write {' and '.join(MAKES[self.pass_])}, once each")
        made = []
        for a in targets:
            runs, touched = cells.of_set(a.token_set), cells.of_tile(tile, a.tensor == "dkv")
            if a.heads != cells.heads_of(index, a.tensor) or not np.isin(touched, runs).all():
                _fail(self.s, index, f"{self.s.block_text(a.block)} is not where its tile and heads have results")
            values = self._zeros(a)
            values[np.searchsorted(runs, touched)] = self.weight[index]
            if a.mode == UPDATE:
                values += self._read(index, a)
            made.append(values)
        return made

    def _gather(
        self, index: int, kind: Kind, reads: list[tuple[_Access, Weights]], target: _Access
    ) -> Weights:
        """What an op that moves or adds leaves in one target block."""
        values = self._zeros(target)
        count = np.zeros(values.shape, np.int64)
        for a, found in reads:
            if a.tensor != target.tensor and (a.tensor, target.tensor) != ("out", "o"):
                continue
            if a.mode == UPDATE and kind != Kind.ALL_REDUCE and a.buffer != target.buffer:
                continue
            low, high = max(a.heads.start, target.heads.start), min(a.heads.stop, target.heads.stop)
            if low >= high:
                continue
            if a.token_set == target.token_set and a.heads == target.heads:
                values += found
                count += 1
                continue
            here, there = self.cells.common(a.token_set, target.token_set)
            to = np.ix_(there, np.arange(low, high) - target.heads.start)
            values[to] += found[np.ix_(here, np.arange(low, high) - a.heads.start)]
            count[to] += 1
        self._check_sources(index, kind, target, count)
        return values

    def _check_sources(self, index: int, kind: Kind, target: _Access, count: Ints) -> None:
        """Every cell of a target has as many sources as its op is meant to join."""
        if kind in (Kind.MERGE, Kind.ACCUMULATE) or count.size == 0:
            return
        num_lanes = int(self.s.lane_start[index + 1] - self.s.lane_start[index])
        text = self.s.block_text(target.block)
        if kind in SUMS:
            if count.min() != num_lanes or count.max() != num_lanes:
                _fail(self.s, index, f"expected every one of {num_lanes} ranks to give {text} once")
        elif count.min() < 1:
            _fail(self.s, index, f"writes {text}, but does not read all of it")
        elif count.max() > 1 and (target.tensor == "out" or (kind != Kind.ALL_TO_ALL and target.tensor[0] == "d")):
            _fail(self.s, index, f"reads {text} from several places; sum or merge partial results instead")

    def _write(self, index: int, targets: list[_Access], values: list[Weights]) -> None:
        for buffer in {a.buffer for a in targets if a.mode != UPDATE and not self.is_output[a.buffer]}:
            self.held[buffer] = {}
        for a, new in zip(targets, values, strict=True):
            held = self.held[a.buffer].get(a.tensor)
            if a.mode != UPDATE and not self.is_output[a.buffer]:
                self.held[a.buffer][a.tensor] = _Held(a.token_set, a.heads, new, None)
                continue
            if held is None or a.heads.start < held.heads.start or a.heads.stop > held.heads.stop:
                _fail(self.s, index, f"writes {self.s.block_text(a.block)} to #{a.buffer}, laid out for other blocks")
            rows, _ = self.cells.common(held.token_set, a.token_set)
            if len(rows) != len(new):
                _fail(self.s, index, f"writes {self.s.block_text(a.block)} to #{a.buffer}, laid out for other tokens")
            to = np.ix_(rows, np.arange(a.heads.start, a.heads.stop) - held.heads.start)
            held.values[to] = new
            if held.there is not None:
                held.there[to] = True

    def _check_outputs(self) -> None:
        """Outputs are complete: all cells of a pass's results, once, with the weights of all ops that touch them."""
        s, cells = self.s, self.cells
        expected = {tensor: self._expected(tensor) for tensor in MAKES[self.pass_]}
        expected |= {"o": expected["out"]} if "out" in expected else {}
        count = {tensor: np.zeros(e.shape, np.int64) for tensor, e in expected.items()}
        for buffer, block in s.outputs.tolist():
            tensor = s.block_tensors[s.block_tensor[block]]
            held, where = self.held[buffer][tensor], f"output #{buffer} = {s.block_text(block)}"
            if held.there is not None and not held.there.all():
                raise ScheduleError(f"{where}: not all of it has been written")
            if tensor in expected:
                at = np.ix_(cells.of_set(held.token_set), np.arange(held.heads.start, held.heads.stop))
                count[tensor][at] += 1
                wrong = np.argwhere(held.values != expected[tensor][at])
                if len(wrong):
                    first = int(cells.tokens[cells.of_set(held.token_set)[wrong[0, 0]]])
                    raise ScheduleError(
                        f"{where}: from token {first} on, it is not the sum of all its partial results, each once"
                    )
        for results in ([t for t in expected if t != "dq" and t != "dkv"], *([t] for t in expected if t[0] == "d")):
            if results and not any((count[t] == 1).all() for t in results):
                raise ScheduleError(f"outputs: {' or '.join(results)} of all tokens and heads expected once each")

    def _expected(self, tensor: str) -> Weights:
        kv = tensor == "dkv"
        total = np.zeros((len(self.cells.tokens) - 1, len(self.cells.heads[kv]) - 1), np.uint64)
        for index in np.flatnonzero(np.isin(self.s.kind, ATTENTION_KINDS)).tolist():
            total[self.cells.of_tile(int(self.s.tile[index]), kv), self.cells.heads_of(index, tensor)] += self.weight[index]
        return total

    # Races

    def _record_conflicts(self, index: int, accesses: list[_Access]) -> None:
        for a in accesses:
            touched, writes = self.touched[a.buffer], a.mode != READ
            rank, apart = int(self.s.buffer_rank[a.buffer]), bool(self.is_output[a.buffer])
            for earlier, b in touched:
                if (writes or b.mode != READ) and not (apart and self._disjoint(a, b)):
                    if earlier == index and (a.mode == READ or b.mode == READ):
                        _fail(self.s, index, f"reads and writes #{a.buffer}; updates are for that")
                    if earlier != index:
                        self.conflicts.append((earlier, index, rank))
            if writes:
                kept = [(e, b) for e, b in touched if e == index or (apart and b.block != a.block)]
                self.touched[a.buffer] = touched = kept
            touched.append((index, a))

    def _disjoint(self, a: _Access, b: _Access) -> bool:
        heads = max(a.heads.start, b.heads.start) < min(a.heads.stop, b.heads.stop)
        return a.tensor != b.tensor or not heads or len(self.cells.common(a.token_set, b.token_set)[0]) == 0


def _width(tensor: str, workload: Workload, *, wide: bool) -> int:
    """Bytes of one token and head; tensors that are not attention's own have no known size."""
    element = max(WIDE_BYTES, workload.bytes_per_element) if wide else workload.bytes_per_element
    row = workload.head_dim * element
    widths = {"out": row + LSE_BYTES, "kv": 2 * row, "dkv": 2 * row}
    return widths.get(tensor, row if tensor in ("q", "o", "dq", "dout") else 0)


# Ordering


def _check_order(s: Schedule, conflicts: Ints) -> None:
    """Every conflict's earlier op ends before its later op starts, as the rank of the buffer sees it."""
    if not len(conflicts):
        return
    conflicts = conflicts[np.argsort(conflicts[:, 1], kind="stable")]
    lanes, lane = np.unique(s.lane_rank.astype(np.int64) * len(STREAMS) + s.lane_stream, return_inverse=True)
    is_transfer = s.kind == Kind.TRANSFER
    node_start = np.concatenate(([0], np.cumsum(1 + is_transfer)))
    bad = _first_unordered(
        s.lane_start, s.lane_rank, lane.astype(np.int64), len(lanes), node_start, s.dep_start, s.dep, conflicts
    )
    if bad >= 0:
        earlier, later, rank = conflicts[bad].tolist()
        _fail(s, later, f"races on rank {rank} with op {earlier}, which nothing orders before it: {s.op(earlier)}")


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def _side(lane_start, lane_rank, node_start, op, rank):  # type: ignore[no-untyped-def]
    """(node, position of the lane) of an op as one of its ranks sees it; a transfer has a node at each end."""
    for at in range(lane_start[op], lane_start[op + 1]):
        if lane_rank[at] == rank:
            return min(node_start[op] + at - lane_start[op], node_start[op + 1] - 1), at
    return -1, -1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _first_unordered(lane_start, lane_rank, lane, num_lanes, node_start, dep_start, dep, conflicts):  # type: ignore[no-untyped-def]
    """Index of the first conflict that vector clocks leave unordered, or -1.

    ``clock[n, l]`` is the last position on lane l that ends before node n does.
    """
    clock = np.full((node_start[-1], num_lanes), -1, np.int32)
    place = np.empty(len(lane), np.int32)
    last = np.full(num_lanes, -1)
    reached = np.zeros(num_lanes, np.int32)
    next_conflict = 0
    for op in range(len(lane_start) - 1):
        first, end = lane_start[op], lane_start[op + 1]
        for at in range(first, end):
            place[at] = reached[lane[at]]
            reached[lane[at]] += 1
            node = min(node_start[op] + at - first, node_start[op + 1] - 1)
            if node > node_start[op]:
                clock[node] = np.maximum(clock[node], clock[node - 1])
            if last[lane[at]] >= 0:
                clock[node] = np.maximum(clock[node], clock[last[lane[at]]])
            for d in dep[dep_start[op] : dep_start[op + 1]]:
                before, _ = _side(lane_start, lane_rank, node_start, d, lane_rank[at])
                if before >= 0:
                    clock[node] = np.maximum(clock[node], clock[before])
        while next_conflict < len(conflicts) and conflicts[next_conflict, 1] == op:
            earlier, _, rank = conflicts[next_conflict]
            node, _ = _side(lane_start, lane_rank, node_start, op, rank)
            _, at = _side(lane_start, lane_rank, node_start, earlier, rank)
            if clock[node, lane[at]] < place[at]:
                return next_conflict
            next_conflict += 1
        for at in range(first, end):
            node = min(node_start[op] + at - first, node_start[op + 1] - 1)
            clock[node, lane[at]] = place[at]
            last[lane[at]] = node
            if node > node_start[op]:
                clock[node, lane[first]] = place[first]
    return -1
