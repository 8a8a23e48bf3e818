"""Symbolic execution: which blocks every buffer holds, and which attention ops are in them."""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import LSE_BYTES, Workload
from cpsim.errors import ScheduleError
from cpsim.masks.slices import Ints
from cpsim.schedule.check.cells import Cells, places
from cpsim.schedule.check.fault import fail
from cpsim.schedule.schedule import ATTENTION_KINDS, READ, UPDATE, WRITE, Kind, Pass, Schedule, is_one_of

Weights = NDArray[np.uint64]

READS: Final = {"fwd": ("q", "kv"), "bwd": ("q", "kv", "out", "dout")}
MAKES: Final = {"fwd": ("out",), "bwd": ("dq", "dkv")}
SUMS: Final = (Kind.MERGE, Kind.ACCUMULATE, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
WIDE_BYTES: Final = 4
"""Narrowest element of a buffer that partial results are summed in, fp32."""


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


class MemoryUse:
    """All buffers of all ranks, and the symbolic execution of every op on them."""

    def __init__(self, schedule: Schedule, workload: Workload, pass_: Pass) -> None:
        s = self.s = schedule
        self.pass_, self.cells = pass_, Cells(schedule, workload)
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
        routed, first, count = np.unique(s.routes[:, 0], return_index=True, return_counts=True)
        self.routes = dict(zip(routed.tolist(), np.stack([first, first + count], axis=1).tolist(), strict=True))
        """First and end route of every op that has some."""
        cells = len(self.cells.tokens) - 1, len(self.cells.heads[0]) - 1
        self.sinks = np.zeros(cells, np.int64) if workload.sinks else None
        """How many times sinks have met each query and head; None: there are none."""
        self.of_sinks = np.zeros(cells, np.uint64)
        """Weights of the ops that join them to outputs."""
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
        self._check_sinks()
        return np.array(self.conflicts, np.int64).reshape(-1, 3)

    def _decode(self, at: int) -> _Access:
        s, block = self.s, int(self.s.access_block[at])
        return _Access(
            int(s.access_buffer[at]),
            block,
            int(s.access_mode[at]),
            s.block_tensors[s.block_tensor[block]],
            int(s.block_set[block]),
            self.cells.block_heads[block],
        )

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
        reads = [(a, self._read(index, a)) for a in accesses if a.mode != WRITE]
        targets = [a for a in accesses if a.mode != READ]
        self._check_sizes(index, kind, accesses)
        if kind in ATTENTION_KINDS:
            values = self._attend(index, [a for a, _ in reads], targets)
        elif kind in (Kind.GEMM, Kind.SELECT) or (
            kind == Kind.ELEMENTWISE and not _moves([a for a, _ in reads], targets)
        ):
            values = [self._zeros(a) for a in targets]
        else:
            values = [self._gather(index, kind, reads, a) for a in targets]
        if kind == Kind.ELEMENTWISE and self.sinks is not None:
            values = [v + w for v, w in zip(values, self._sink(index, accesses, targets), strict=True)]
        self._write(index, targets, values)

    def _sink(self, index: int, accesses: list[_Access], targets: list[_Access]) -> list[np.uint64]:
        """What an op adds to its targets: its weight to an output that sinks join. Counts queries and heads of such
        outputs, and of those that sinks' gradients are summed of."""
        assert self.sinks is not None
        joins = [a for a in targets if a.mode == UPDATE and a.tensor == "out"]
        summed = [a for a in accesses if a.tensor == "out"] if any(a.tensor == "dsink" for a in targets) else []
        for a in (*joins, *summed):
            self.sinks[self.cells.of_set(a.token_set), a.heads] += 1
        for a in joins:
            self.of_sinks[self.cells.of_set(a.token_set), a.heads] += self.weight[index]
        return [self.weight[index] if a in joins else np.uint64(0) for a in targets]

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
        there = np.ones(1, np.bool_) if held.there is None else held.there[rows, columns]
        if not (there.all() or (there | self._starts_as_nothing(a)).all()):
            return self._missing(index, a)
        return held.values[rows, columns]

    def _starts_as_nothing(self, a: _Access) -> NDArray[np.bool_]:
        """Cells of an output that is updated which no kernel makes: they start as what they are, sums of nothing."""
        rows = self.cells.of_set(a.token_set)
        if a.mode != UPDATE or a.tensor != "out" or not self.is_output[a.buffer]:
            return np.zeros((len(rows), a.heads.stop - a.heads.start), np.bool_)
        return np.asarray(self._of_kernels("out")[rows, a.heads] == 0)

    def _missing(self, index: int, a: _Access) -> NoReturn:
        text, buffer = self.s.block_text, a.buffer
        holds = [
            f"{tensor} of {self.s.set_text(h.token_set)}{'' if h.there is None else ' in part'}"
            for tensor, h in self.held[buffer].items()
        ]
        contents = " and ".join(holds) or "nothing yet"
        name = self.s.buffer_names[self.s.buffer_name[buffer]]
        wants = "reads" if a.mode == READ else "updates"
        fail(
            self.s,
            index,
            f"{wants} {text(a.block)} in #{buffer} {name}, which holds {contents}",
        )

    def _check_sizes(self, index: int, kind: Kind, accesses: list[_Access]) -> None:
        """Buffers are big enough for what is written and moved."""
        s = self.s
        need: dict[int, int] = {}
        for a in accesses:
            if a.mode != READ:
                sums = a.mode == UPDATE and kind in (Kind.MERGE, Kind.ACCUMULATE) and not s.narrow_sums
                nbytes = (self.nbytes_wide if sums else self.nbytes)[a.block]
                need[a.buffer] = need.get(a.buffer, 0) + int(nbytes)
        for buffer, nbytes in need.items():
            if nbytes > s.buffer_nbytes[buffer]:
                fail(s, index, f"writes {nbytes} B to #{buffer}, which has {s.buffer_nbytes[buffer]} B")
        if not accesses:  # a part of what another op says
            return
        moved = int(s.nbytes[index])
        read, written = ([int(s.buffer_nbytes[a.buffer]) for a in accesses if (a.mode == READ) == r] for r in (1, 0))
        if kind == Kind.TRANSFER:
            blocks = [a.block for a in accesses if a.mode == READ]
            if moved not in (self.nbytes[blocks].sum(), self.nbytes_wide[blocks].sum()):
                fail(s, index, f"moves {moved} B, but its blocks have {self.nbytes[blocks].sum()} B")
            if moved > min(sum(read), sum(written)):
                fail(s, index, f"moves {moved} B between buffers of {sum(read)} and {sum(written)} B")
        elif kind == Kind.ALL_GATHER and not sum(read) >= moved <= min(written):
            fail(s, index, f"gathers {moved} B, more than its buffers have")
        elif kind == Kind.REDUCE_SCATTER and not min(read) >= moved <= sum(written):
            fail(s, index, f"reduces {moved} B, more than its buffers have")
        elif kind in (Kind.ALL_TO_ALL, Kind.ALL_REDUCE) and moved > max(written, default=0):
            fail(s, index, f"exchanges {moved} B, more than its buffers have")
        if index in self.routes:
            self._check_routes(index, accesses)

    def _check_routes(self, index: int, accesses: list[_Access]) -> None:
        """Ranks get the bytes of the blocks that they write; of gradients as many as several sources give."""
        s, (first, end) = self.s, self.routes[index]
        source, target = s.routes[first:end, 1:].T
        got = np.bincount(target, s.route_nbytes[first:end], s.num_ranks)
        if s.kind[index] != Kind.ALL_TO_ALL or not np.isin([source, target], s.ranks_of(index)).all():
            fail(s, index, "has routes, which are for all-to-alls and between their ranks")
        if got.max() != s.nbytes[index]:
            fail(s, index, f"states {s.nbytes[index]} B, but routes bring {got.max():.0f} B to a rank")
        expected, summed = np.zeros(s.num_ranks), np.zeros(s.num_ranks, bool)
        for a in accesses:
            if a.mode != READ:
                expected[s.buffer_rank[a.buffer]] += self.nbytes[a.block]
                summed[s.buffer_rank[a.buffer]] |= a.tensor in MAKES["bwd"]
        wrong = (got < expected) | ((got > expected) & ~summed)
        if wrong.any():
            rank = int(np.flatnonzero(wrong)[0])
            fail(s, index, f"routes bring {got[rank]:.0f} B to rank {rank}, its blocks have {expected[rank]:.0f} B")

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
            known = found[0] if len(found) == 1 else np.unique(np.concatenate(found or [wanted[:0]]))
            if not found or places(known, wanted) is None:
                fail(self.s, index, f"does not read all of {tensor} that its tile needs")
        if tuple(a.tensor for a in targets if a.mode != READ) != MAKES[self.pass_]:
            fail(self.s, index, f"expected to write {' and '.join(MAKES[self.pass_])}, once each")
        made = []
        for a in targets:
            runs, touched = cells.of_set(a.token_set), cells.of_tile(tile, a.tensor == "dkv")
            rows = places(runs, touched)
            if a.heads != cells.heads_of(index, a.tensor) or rows is None:
                fail(
                    self.s,
                    index,
                    f"{self.s.block_text(a.block)} is not where its tile and heads have results",
                )
            values = self._zeros(a)
            values[rows] = self.weight[index]
            if a.mode == UPDATE:
                values += self._read(index, a)
            made.append(values)
        return made

    def _gather(self, index: int, kind: Kind, reads: list[tuple[_Access, Weights]], target: _Access) -> Weights:
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
            columns = slice(low - target.heads.start, high - target.heads.start)
            values[there, columns] += found[here, low - a.heads.start : high - a.heads.start]
            count[there, columns] += 1
        self._check_sources(index, kind, target, count)
        return values

    def _check_sources(self, index: int, kind: Kind, target: _Access, count: Ints) -> None:
        """Every cell of a target has as many sources as its op is meant to join."""
        if kind in (Kind.MERGE, Kind.ACCUMULATE) or count.size == 0:
            return
        num_lanes = int(self.s.lane_start[index + 1] - self.s.lane_start[index])
        least, most = count.min(), count.max()
        if kind in SUMS:
            if least != num_lanes or most != num_lanes:
                text = self.s.block_text(target.block)
                fail(self.s, index, f"expected every one of {num_lanes} ranks to give {text} once")
        elif least < 1:
            fail(self.s, index, f"writes {self.s.block_text(target.block)}, but does not read all of it")
        elif most > 1 and (target.tensor == "out" or (kind != Kind.ALL_TO_ALL and target.tensor[0] == "d")):
            text = self.s.block_text(target.block)
            fail(self.s, index, f"reads {text} from several places; sum or merge partial results instead")

    def _write(self, index: int, targets: list[_Access], values: list[Weights]) -> None:
        for buffer in {a.buffer for a in targets if a.mode != UPDATE and not self.is_output[a.buffer]}:
            self.held[buffer] = {}
        for a, new in zip(targets, values, strict=True):
            held = self.held[a.buffer].get(a.tensor)
            if a.mode != UPDATE and not self.is_output[a.buffer]:
                self.held[a.buffer][a.tensor] = _Held(a.token_set, a.heads, new, None)
                continue
            if held is None or a.heads.start < held.heads.start or a.heads.stop > held.heads.stop:
                fail(
                    self.s,
                    index,
                    f"writes {self.s.block_text(a.block)} to #{a.buffer}, laid out for other blocks",
                )
            rows, _ = self.cells.common(held.token_set, a.token_set)
            if len(rows) != len(new):
                fail(
                    self.s,
                    index,
                    f"writes {self.s.block_text(a.block)} to #{a.buffer}, laid out for other tokens",
                )
            columns = slice(a.heads.start - held.heads.start, a.heads.stop - held.heads.start)
            held.values[rows, columns] = new
            if held.there is not None:
                held.there[rows, columns] = True

    def _check_outputs(self) -> None:
        """Outputs are complete: all cells of a pass's results, once, with the weights of all their ops."""
        s, cells = self.s, self.cells
        expected = {tensor: self._expected(tensor) for tensor in MAKES[self.pass_]}
        expected |= {"o": expected["out"]} if "out" in expected else {}
        count = {tensor: (~cells.of_attention(tensor)).astype(np.int64) for tensor in expected}
        for buffer, block in s.outputs.tolist():
            tensor = s.block_tensors[s.block_tensor[block]]
            held, where = self.held[buffer][tensor], f"output #{buffer} = {s.block_text(block)}"
            at = np.ix_(cells.of_set(held.token_set), np.arange(held.heads.start, held.heads.stop))
            wanted = expected[tensor][at] != 0 if tensor in expected else True  # outputs start as sums of nothing
            if held.there is not None and (wanted & ~held.there).any():
                raise ScheduleError(f"{where}: not all of it has been written")
            if tensor in expected:
                count[tensor][at] += 1
                wrong = np.argwhere(held.values != expected[tensor][at])
                if len(wrong):
                    first = int(s.tokens(cells.tokens[cells.of_set(held.token_set)[wrong[:1, 0]]])[0])
                    raise ScheduleError(
                        f"{where}: from token {first} on, not the sum of all its partial results, each once"
                    )
        for results in (
            [t for t in expected if t != "dq" and t != "dkv"],
            *([t] for t in expected if t[0] == "d"),
        ):
            if results and not any((count[t] == 1).all() for t in results):
                raise ScheduleError(f"outputs: {' or '.join(results)} of all tokens and heads expected once each")

    def _check_sinks(self) -> None:
        """Every query meets the sink of each of its heads once."""
        if self.sinks is None:
            return
        wrong = np.argwhere((self.sinks != 1) & self.cells.of_attention("out"))
        if len(wrong):
            run, column = wrong[0].tolist()
            token = int(self.s.tokens(self.cells.tokens[run : run + 1])[0])
            raise ScheduleError(
                f"sinks: from token {token} and head {self.cells.heads[0][column]} on, met "
                f"{self.sinks[run, column]} times, expected once"
            )

    def _expected(self, tensor: str) -> Weights:
        """Weights of kernels, and of ops that join sinks."""
        found = self._of_kernels(tensor)
        return found + self.of_sinks if tensor == "out" else found

    def _of_kernels(self, tensor: str) -> Weights:
        kv = tensor == "dkv"
        total = np.zeros((len(self.cells.tokens) - 1, len(self.cells.heads[kv]) - 1), np.uint64)
        for index in np.flatnonzero(is_one_of(self.s.kind, ATTENTION_KINDS)).tolist():
            total[self.cells.of_tile(int(self.s.tile[index]), kv), self.cells.heads_of(index, tensor)] += self.weight[
                index
            ]
        return total

    def _record_conflicts(self, index: int, accesses: list[_Access]) -> None:
        for a in accesses:
            touched, writes = self.touched[a.buffer], a.mode != READ
            rank, apart = int(self.s.buffer_rank[a.buffer]), bool(self.is_output[a.buffer])
            for earlier, b in touched:
                if (writes or b.mode != READ) and not (apart and self._disjoint(a, b)):
                    if earlier == index and (a.mode == READ or b.mode == READ):
                        fail(self.s, index, f"reads and writes #{a.buffer}; updates are for that")
                    if earlier != index:
                        self.conflicts.append((earlier, index, rank))
            if writes:
                kept = [(e, b) for e, b in touched if e == index or (apart and b.block != a.block)]
                self.touched[a.buffer] = touched = kept
            touched.append((index, a))

    def _disjoint(self, a: _Access, b: _Access) -> bool:
        heads = max(a.heads.start, b.heads.start) < min(a.heads.stop, b.heads.stop)
        return a.tensor != b.tensor or not heads or len(self.cells.common(a.token_set, b.token_set)[0]) == 0


def _moves(reads: list[_Access], targets: list[_Access]) -> bool:
    """Whether all that an op writes is what it reads, in another place."""
    sources = {a.tensor for a in reads} | {"o" for a in reads if a.tensor == "out"}
    return {a.tensor for a in targets} <= sources


def _width(tensor: str, workload: Workload, *, wide: bool) -> int:
    """Bytes of one token and head; tensors that are not attention's own have no known size."""
    element = max(WIDE_BYTES, workload.bytes_per_element) if wide else workload.bytes_per_element
    row, value = workload.head_dim * element, workload.values * element
    both = workload.kv_elements * element
    widths = {"out": value + LSE_BYTES, "kv": both, "dkv": both, "o": value, "dout": value}
    return widths.get(tensor, row if tensor in ("q", "dq") else 0)
