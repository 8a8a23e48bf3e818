"""Turns the ops of one rank into calls on views of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cpsim.errors import InfeasibleError
from cpsim.masks.tiles import local_slices
from cpsim.masks.tiles import sequences as calls_of_tiles
from cpsim.models.feasible import limits_of
from cpsim.real.run import attention, elementwise, layer_calls, sinks
from cpsim.real.run.program import Call, Launch
from cpsim.real.run.rows import NOWHERE, Rows, match
from cpsim.real.run.storage import (
    PLANES,
    Access,
    Chunk,
    Ints,
    KernelSequence,
    Part,
    Walk,
    is_one_call,
    overlap,
    seen,
    sequences_of,
)
from cpsim.real.run.tensors import RankTensors
from cpsim.schedule.schedule import (
    ATTENTION_KINDS,
    COLLECTIVE_KINDS,
    COMMUNICATION_KINDS,
    READ,
    STREAMS,
    UPDATE,
    WRITE,
    Kind,
    Op,
    Schedule,
)
from cpsim.schedule.transformer import MAKER

_NOTHING, _NARROW, _WIDE = range(3)
"""What a row of a result holds while partial results are added to it."""


class Lowering:
    """Turns the ops of one rank into calls."""

    def __init__(self, tensors: RankTensors, walk: Walk) -> None:
        self.x, self.s, self.places = tensors, tensors.schedule, tensors.places
        self.rank, self.device = tensors.node.rank, tensors.node.device
        self.unseen: dict[int, Ints] = {}
        """Tokens of every partial result that its kernel call left out: they see no key, or no query sees them."""
        self.state: dict[int, Ints] = {}
        """What every row of a summed result holds."""
        self.left: dict[int, Ints] = {}
        """Partial results that every row of a summed result still gets."""
        self.later: dict[int, list[Ints]] = {}
        """The same of blocks that a buffer holds later, in turn."""
        self.reused: dict[int, int] = {}
        """Buffers that results leave from, block by block, and how many blocks they have held."""
        self.made_by: dict[int, tuple[int, Access]] = {}
        """The kernel that made what a buffer holds, and what it left there."""
        self.walk = walk
        self._sequences: dict[int, list[KernelSequence]] = {}
        limits = limits_of(self.x.kernel)
        self.windows, self.batches = bool(limits.windows), limits.batches

    def calls(self) -> list[Call]:
        """(op, call) in launch order; the call of a transfer gives its half of a batch."""
        node, made = self.x.node, list[Call]()
        program = {op.index: op for op in self.s.project(self.rank)}
        self._prepare_results()
        of_transfer, groups = self.s.process_groups()
        for i, accesses in self.walk:
            kind = Kind(int(self.s.kind[i]))
            self._follow(i, accesses)
            if kind in COMMUNICATION_KINDS:
                ranks = groups[of_transfer[i]] if kind == Kind.TRANSFER else tuple(self.s.ranks_of(i))
                lane = STREAMS[self.s.lane_stream[self.s.lane_start[i]]]
                group = node.group(ranks, lane)  # made by all ranks, in list order
            if i not in program:
                continue
            op, mine = program[i], [a for a in accesses if a.rank == self.rank]
            if kind == Kind.TRANSFER:
                made.append((op, self._transfer(op, accesses, group)))
            elif kind in COLLECTIVE_KINDS:
                made.append((op, self._collective(op, kind, accesses, group)))
            else:
                made.append((op, self._computation(op, kind, mine)))
        return made

    def _computation(self, op: Op, kind: Kind, mine: list[Access]) -> Launch:
        begins = self._begin(op, mine) if kind == Kind.ATTENTION else None
        if kind in ATTENTION_KINDS and op.area == 0:  # a share of the mask without pairs: results stay sums of nothing
            self.unseen |= self._unseen(op.index, mine)
            return begins or (lambda: None)
        if kind == Kind.ATTENTION and begins is not None:
            attend = self._attention(op, mine)
            return lambda: (begins(), attend())
        if kind == Kind.ATTENTION:
            return self._attention(op, mine)
        if kind == Kind.ATTENTION_BACKWARD:
            return self._attention_backward(op, mine)
        if kind == Kind.MERGE:
            return self._merge(mine)
        if self.places.host_link[op.index]:
            return self._over_host_link(*mine)
        if kind in (Kind.COPY, Kind.ACCUMULATE):
            return self._sum(mine)
        if kind == Kind.BARRIER:  # its events are all there is to it
            return lambda: None
        if kind == Kind.ELEMENTWISE and any(a.tensor == "dsink" for a in mine):
            return self._sink_gradient(mine)
        if kind == Kind.ELEMENTWISE and mine[0].tensor == "out":
            return self._join_sinks(op, mine[0])
        if kind in (Kind.GEMM, Kind.ELEMENTWISE):
            return self._layer_op(mine)
        raise InfeasibleError(f"the executor does not run {kind.name.lower()} ops yet")

    # --- results that partial results are added to ---

    def _prepare_results(self) -> None:
        for buffer in np.flatnonzero((self.s.buffer_rank == self.rank) & self.places.summed).tolist():
            layout = self.places.layouts[buffer]
            (part,) = layout.parts(layout.chunks[0].parts[0].plane)
            tokens = part.tokens
            self.state[buffer] = np.full(len(tokens), _NOTHING)
            self.left[buffer], self.later[buffer] = np.zeros(len(tokens), np.int64), []
        self.reused, begun = self._reused(), set[int]()
        for i, accesses in self.walk if self.state else ():
            self._follow(i, accesses)
            for a in accesses if self.s.kind[i] == Kind.ATTENTION else ():
                if a.mode == WRITE and a.buffer in self.state and a.buffer in self.reused:
                    if a.buffer in begun:
                        self.later[a.buffer].append(np.zeros_like(self.left[a.buffer]))
                    begun.add(a.buffer)
            for target in (a for a in accesses if a.mode != READ and a.buffer in self.state):
                if target.mode != UPDATE and self.s.kind[i] not in ATTENTION_KINDS:
                    continue  # sums of nothing
                if self.s.kind[i] == Kind.ELEMENTWISE:
                    continue  # a sink joins what is complete
                source = target if target.mode != UPDATE else next(a for a in accesses if a.mode == READ)
                made = source.buffer in self.made_by
                unseen: Ints | list[int] = self._unseen_by(*self.made_by[source.buffer]) if made else []
                rows = _rows_of(target, np.setdiff1d(target.tokens, unseen))
                (self.later[target.buffer] or [self.left[target.buffer]])[-1][rows] += 1
        for buffer in np.flatnonzero(self.s.buffer_rank == self.rank).tolist():
            pairs = (*self.s.inputs.tolist(), *self.s.outputs.tolist())
            for tensor, tokens, _, count in (self.places.block(k) for b, k in pairs if b == buffer):
                if tensor == "out":
                    on_host = bool(self.places.on_host[buffer])
                    self.x.lse[buffer] = self._new_lse(count, len(tokens), on_host=on_host)

    def _reused(self) -> dict[int, int]:
        """Buffers that kernels make block after block in, which all-to-alls take from there; none has held one yet."""
        s, owner = self.s, self.s.op_of_access()
        sends = (s.kind[owner] == Kind.ALL_TO_ALL) & (s.access_mode == READ)
        makes = (s.kind[owner] == Kind.ATTENTION) & (s.access_mode == WRITE)
        blocks = np.bincount(s.access_buffer[makes], minlength=len(s.buffer_rank))
        sent = np.unique(s.access_buffer[sends])
        return dict.fromkeys(sent[(blocks[sent] > 1) & ~self.places.is_output[sent]].tolist(), 0)

    def _begin(self, op: Op, mine: list[Access]) -> Launch | None:
        """Where a buffer holds block after block: clears what no kernel will write of the next."""
        target = next(a for a in mine if a.mode != READ)
        buffer, (part,) = target.buffer, target.layout.parts("out")
        if target.mode != WRITE or buffer not in self.reused:
            return None
        self.reused[buffer] += 1
        never = part.rows_of(self._unseen_by(op.index, target))
        if buffer in self.state:
            if self.reused[buffer] > 1:
                self.left[buffer] = self.later[buffer].pop(0)
            self.state[buffer] = np.full_like(self.state[buffer], _NOTHING)
            never = np.flatnonzero(self.left[buffer] == 0)
        if not len(never):
            return None
        out, rows, x = self.x.view(part), self._index(never).long(), self.x
        lse = self._new_lse(part.num_heads, len(part.tokens))

        def clear() -> None:
            out[rows] = 0
            x.lse[buffer] = lse

        return clear

    def _follow(self, i: int, accesses: Sequence[Access]) -> None:
        """Remember which kernel made what the buffers of all ranks hold, also where a transfer has taken it."""
        if self.s.kind[i] in ATTENTION_KINDS:
            self.made_by |= {a.buffer: (i, a) for a in accesses if a.mode != READ}
        elif self.s.kind[i] == Kind.TRANSFER:
            source = {a.tensor: a.buffer for a in accesses if a.mode == READ}
            made = {a.buffer: self.made_by.get(source[a.tensor]) for a in accesses if a.mode != READ}
            self.made_by |= {buffer: maker for buffer, maker in made.items() if maker is not None}

    def _new_lse(self, heads: int, tokens: int, *, on_host: bool = False) -> Tensor:
        device, pinned = torch.device("cpu") if on_host else self.device, on_host and self.x.node.cuda
        dtype = self.x.wide.dtype
        return torch.full((heads, tokens), float("-inf"), dtype=dtype, device=device, pin_memory=pinned)

    def _advance(self, target: Access, rows: Ints) -> tuple[tuple[Part, Part], Ints, Ints]:
        """Parts of an output in both types, what its rows hold now and what they will hold after the next sum."""
        (narrow,) = target.layout.parts(PLANES[target.tensor][0])
        parts = narrow, self.places.accumulator(narrow, target.buffer)
        before = self.state[target.buffer][rows]
        self.left[target.buffer][rows] -= 1
        after = np.where(self.left[target.buffer][rows] > 0, _WIDE, _NARROW)
        self.state[target.buffer][rows] = after
        return parts, before, after

    # --- attention ---

    def _unseen(self, i: int, accesses: Sequence[Access]) -> dict[int, Ints]:
        return {a.buffer: self._unseen_by(i, a) for a in accesses if a.mode != READ}

    def _unseen_by(self, i: int, result: Access) -> Ints:
        """Tokens of a result that its kernel call leaves out."""
        queries, keys = self._seen_by(int(self.s.tile[i]))
        return np.setdiff1d(result.tokens, keys if result.tensor == "dkv" else queries)

    def _seen_by(self, tile: int) -> tuple[Ints, Ints]:
        """Queries and keys of a tile's kernel call."""
        if not is_one_call(self.s, tile, packed=True, windows=self.windows):
            return seen(self.s, tile)
        none, calls = [np.zeros(0, np.int64)], self._sequences_of(tile)
        queries, keys = (np.concatenate([getattr(q, side) for q in calls] or none) for side in ("queries", "keys"))
        return queries, keys

    def _sequences_of(self, tile: int) -> list[KernelSequence]:
        """Sequences of a tile, remembered: an op's tile is asked for its results and for its call."""
        if tile not in self._sequences:
            self._sequences[tile] = sequences_of(self.s, tile)
        return self._sequences[tile]

    def _written_directly(self, target: Access) -> None:
        """The kernel itself writes rows of a summed result."""
        if target.buffer in self.state:
            rows = _rows_of(target, np.setdiff1d(target.tokens, self.unseen[target.buffer]))
            self.state[target.buffer][rows] = _NARROW
            self.left[target.buffer][rows] -= 1

    def _call(self, op: Op, queries: Access, keys: Access) -> tuple[attention.Call, Ints, slice]:
        """The kernel call, the tokens of its query rows and the rows of the keys' part that it reads.

        Rows between two sequences that the call must skip become sequences without keys, or without queries. Queries
        ahead of a causal sequence of as many queries as keys join it: aligned to the bottom right, they see no key.
        """
        tile = int(self.s.tile[op.index])
        sequences = self._sequences_of(tile)
        held = self._key_part(keys).tokens
        at_q = _rows_of(queries, np.array([q.queries[0] for q in sequences]))
        if keys.layout.tile >= 0:
            assert keys.layout.tile == tile
            lengths = np.array([len(q.keys) for q in sequences])
            at_k = np.cumsum(lengths) - lengths
        else:
            at_k = np.searchsorted(held, [q.keys[0] for q in sequences])
        window = self._window(tile)
        causal = any(q.causal for q in sequences) if window is None else window[1] == 0
        q_lens, k_lens, q_end, k_end = [], [], int(at_q[0]), int(at_k[0])
        for q, start_q, start_k in zip(sequences, at_q.tolist(), at_k.tolist(), strict=True):
            skipped_q, num_q, num_k = start_q - q_end, len(q.queries), len(q.keys)
            joins = skipped_q if causal and num_q == num_k else 0
            for more_q, more_k in ((skipped_q - joins, 0), (0, start_k - k_end), (joins + num_q, num_k)):
                if more_q or more_k:
                    q_lens.append(more_q)
                    k_lens.append(more_k)
            q_end, k_end = start_q + num_q, start_k + num_k
        batch = self.batches and len(set(q_lens)) == 1 and len(set(k_lens)) == 1
        call = attention.prepare(q_lens, k_lens, causal=causal, device=self.device, batch=batch, window=window)
        (part,) = queries.layout.parts("q")
        return call, part.tokens[int(at_q[0]) : q_end], slice(int(at_k[0]), k_end)

    def _window(self, tile: int) -> tuple[int, int] | None:
        """The window of a tile's kernel call, where it needs one."""
        found = calls_of_tiles(self.s.tiles)
        if not self.windows or found.one_call[tile]:
            return None
        left, right = found.windows[tile].tolist()
        return left, right

    def _key_part(self, keys: Access) -> Part:
        (part,) = keys.layout.parts("k")
        return part

    def _kv(self, op: Op, keys: Access, rows: slice, planes: tuple[str, str]) -> list[Tensor]:
        heads = tuple(self.s.heads_of(op.index)[2:].tolist())
        parts = [keys.layout.parts(plane) for plane in planes]
        return [self.x.view(part, rows, heads) for (part,) in parts]

    def _q(self, op: Op, access: Access, tokens: Ints) -> Tensor:
        """[T, H, D] of some consecutive tokens of a query-side tensor."""
        (part,) = access.layout.parts(PLANES[access.tensor][0])
        return self.x.view(part, _span(part, tokens), op_heads(self.s, op))

    def _attention(self, op: Op, mine: list[Access]) -> Launch:
        if not self._is_one_call(op, mine):
            return self._masked_attention(op, mine)
        queries, keys, target = (next(a for a in mine if a.tensor == t) for t in ("q", "kv", "out"))
        self.unseen |= self._unseen(op.index, mine)
        call, tokens, rows = self._call(op, queries, keys)
        q, (k, v) = self._q(op, queries, tokens), self._kv(op, keys, rows, ("k", "v"))
        out = self._q(op, target, tokens)
        self._written_directly(target)
        kernel, buffer, lse = self.x.kernel, target.buffer, self.x.lse
        (part,) = target.layout.parts("out")
        if len(tokens) == len(part.tokens) and q.shape[1] == part.num_heads:

            def whole() -> None:
                lse[buffer] = attention.forward(kernel, q, k, v, call, out)[1]

            return whole
        span, first = _span(part, tokens), op_heads(self.s, op)[0] - part.head
        kept = lse[buffer] if self.places.is_output[buffer] else self._new_lse(part.num_heads, len(part.tokens))

        def some() -> None:
            lse[buffer] = kept
            kept[first : first + q.shape[1], span] = attention.forward(kernel, q, k, v, call, out)[1]

        return some

    def _attention_backward(self, op: Op, mine: list[Access]) -> Launch:
        if not self._is_one_call(op, mine):
            return self._masked_backward(op, mine)
        given = {a.tensor: a for a in mine}
        self.unseen |= self._unseen(op.index, mine)
        call, tokens, rows = self._call(op, given["q"], given["kv"])
        q, dout, out = (self._q(op, given[t], tokens) for t in ("q", "dout", "out"))
        k, v = self._kv(op, given["kv"], rows, ("k", "v"))
        lse = self._lse_slice(op, given["out"], tokens)
        dq = self._q(op, given["dq"], tokens)
        self._written_directly(given["dq"])
        target = given["dkv"]
        if target.layout.tile != given["kv"].layout.tile:
            raise InfeasibleError("keys and their gradients lie in different orders")
        if target.layout.tile < 0:
            (kept,) = target.layout.parts("dk")
            rows = _span(kept, self._key_part(given["kv"]).tokens[rows])
        dk, dv = self._kv(op, target, rows, ("dk", "dv"))
        kernel = self.x.kernel
        return lambda: attention.backward(kernel, dout, q, k, v, out, lse(), call, (dq, dk, dv))

    def _is_one_call(self, op: Op, mine: list[Access]) -> bool:
        """Whether a varlen call runs the op's tile on keys that lie as they do."""
        tile = int(self.s.tile[op.index])
        keys = next(a for a in mine if a.tensor == "kv")
        return is_one_call(self.s, tile, packed=keys.layout.tile == tile, windows=self.windows)

    def _masked(
        self, op: Op, mine: list[Access]
    ) -> tuple[dict[str, Access], dict[str, Tensor | slice], attention.Call]:
        """Accesses, rows of each tensor's part that the op uses, and the call with a mask of any shape over them.

        Raises:
            InfeasibleError: the kernel takes no such mask; others do.
        """
        if self.x.kernel not in attention.ANY_MASK:
            raise InfeasibleError(f"kernel {self.x.kernel} does not run this strategy's share of the mask")
        given = {a.tensor: a for a in mine}
        self.unseen |= self._unseen(op.index, mine)
        rows = {t: self._rows_or_span(_rows_of(a, a.tokens)) for t, a in given.items()}
        queries, keys = given["q"].tokens, given["kv"].tokens
        mask = local_slices(
            self.s.tiles,
            int(self.s.tile[op.index]),
            lambda tokens: np.searchsorted(queries, tokens),
            lambda tokens: np.searchsorted(keys, tokens),
        )
        return given, rows, attention.prepare_mask(mask, len(queries), len(keys), device=self.device)

    def _rows_or_span(self, rows: Ints) -> Tensor | slice:
        """An index of rows, a view of them where they follow each other."""
        if np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return slice(int(rows[0]), int(rows[0]) + len(rows))
        return self._index(rows).long()

    def _planes(self, op: Op, access: Access) -> list[Tensor]:
        """All rows of an access's planes, with the op's heads."""
        heads = tuple(self.s.heads_of(op.index)[2:].tolist()) if access.tensor.endswith("kv") else op_heads(self.s, op)
        parts = [access.layout.parts(plane) for plane in PLANES[access.tensor]]
        return [self.x.view(part, None, heads) for (part,) in parts]

    def _masked_attention(self, op: Op, mine: list[Access]) -> Launch:
        given, rows, call = self._masked(op, mine)
        (q,), (k, v), (out,) = (self._planes(op, given[t]) for t in ("q", "kv", "out"))
        target, lse = given["out"], self.x.lse
        self._written_directly(target)
        (part,) = target.layout.parts("out")
        first, buffer = op_heads(self.s, op)[0] - part.head, target.buffer
        kept = lse[buffer] if self.places.is_output[buffer] else self._new_lse(part.num_heads, len(part.tokens))
        kernel = self.x.kernel

        def run() -> None:
            lse[buffer] = kept
            made = attention.forward(kernel, q[rows["q"]], k[rows["kv"]], v[rows["kv"]], call)
            out[rows["out"]], kept[first : first + q.shape[1], rows["out"]] = made

        return run

    def _masked_backward(self, op: Op, mine: list[Access]) -> Launch:
        given, rows, call = self._masked(op, mine)
        (q,), (dout,), (out,), (dq,) = (self._planes(op, given[t]) for t in ("q", "dout", "out", "dq"))
        (k, v), (dk, dv) = (self._planes(op, given[t]) for t in ("kv", "dkv"))
        self._written_directly(given["dq"])
        (part,) = given["out"].layout.parts("out")
        first, buffer, lse = op_heads(self.s, op)[0] - part.head, given["out"].buffer, self.x.lse
        kernel = self.x.kernel

        def run() -> None:
            at, keys = rows["q"], rows["kv"]
            known = lse[buffer][first : first + q.shape[1], rows["out"]].contiguous()
            made = attention.backward(
                kernel, dout[rows["dout"]], q[at], k[keys], v[keys], out[rows["out"]], known, call
            )
            for into, to, grad in zip((dq, dk, dv), ("dq", "dkv", "dkv"), made, strict=True):
                into[rows[to]] = grad

        return run

    def _lse_slice(self, op: Op, out: Access, tokens: Ints) -> Callable[[], Tensor]:
        """Contiguous log-sum-exp [H, T] of some heads and consecutive tokens; a copy where it is not all tokens."""
        (part,) = out.layout.parts("out")
        span, (head, count) = _span(part, tokens), op_heads(self.s, op)
        first, lse = head - part.head, self.x.lse
        if span == slice(0, len(part.tokens)):
            return lambda: lse[out.buffer][first : first + count]
        return lambda: lse[out.buffer][first : first + count, span].contiguous()

    # --- memory-bound ops ---

    def _merge(self, mine: list[Access]) -> Launch:
        reads, (target,) = ([a for a in mine if (a.mode == READ) == side] for side in (True, False))
        if not reads:  # a sum of nothing
            self.x.lse.setdefault(target.buffer, self._new_lse(target.num_heads, len(target.tokens)))
            return lambda: None
        (source,) = reads
        (part,) = source.layout.parts("out")
        tokens = np.setdiff1d(target.tokens, self.unseen.get(source.buffer, []))
        rows, from_rows = _rows_of(target, tokens), part.rows_of(tokens)
        parts, before, after = self._advance(target, rows)
        tables = elementwise.Merge(
            num_heads=target.num_heads,
            width=part.width,
            part=self._index(part.at + from_rows * part.stride + (target.head - part.head) * part.width),
            part_column=self._index(from_rows),
            old=self._either(parts, rows, before, target.head),
            target=self._either(parts, rows, after, target.head),
            column=self._index(rows),
        )
        x, into, taken = self.x, target.buffer, source.buffer
        assert part.num_heads == target.num_heads
        return lambda: elementwise.merge_rows(x.narrow, x.wide, x.lse[into], x.lse[taken], tables)

    def _either(
        self, parts: tuple[Part, Part], rows: Ints, state: Ints, head: int, piece: Ints | int = 0
    ) -> tuple[Tensor | None, Tensor | None]:
        """Offsets of (pieces of) rows in the working type and in the accumulator, by which of them holds each row."""
        found = []
        for part, kind in zip(parts, (_NARROW, _WIDE), strict=True):
            first = part.at + rows * part.stride + (head - part.head) * part.width
            at = np.where(state == kind, first + piece, NOWHERE)
            found.append(self._index(at) if (state == kind).any() else None)
        return found[0], found[1]

    def _sum(self, mine: list[Access]) -> Launch:
        """Copies, casts and sums; log-sum-exps that are packed beside ``out`` follow it."""
        reads, targets = ([a for a in mine if (a.mode == READ) == side] for side in (True, False))
        sources = [p for a in reads for p in a.parts(self.unseen.get(a.buffer))]
        summed = [a for a in targets if a.buffer in self.state]
        if summed and not reads:
            return lambda: None
        if summed:
            return self._add_to_result(summed[0], sources)
        parts = [p for a in targets for p in a.parts()]
        rows = match(parts, sources)
        wide = parts[0].wide
        adds = targets[0].mode == UPDATE
        if adds:
            rows = _without_sourceless(rows)
        at = self._index(rows.target)
        either = (None, at) if wide else (at, None)
        tables = elementwise.Sum(
            width=rows.width,
            source=self._index(rows.source),
            source_wide=rows.wide,
            old=either if adds else (None, None),
            target=either,
        )
        x, packed = self.x, self._packed_lse(reads, targets)
        if packed is None:
            return lambda: elementwise.sum_rows(x.narrow, x.wide, tables)
        return lambda: elementwise.sum_rows(x.narrow, x.wide, tables, packed())

    def _add_to_result(self, target: Access, sources: list[Part]) -> Launch:
        """A partial gradient into rows that change from the working type to the accumulators' and back."""
        (narrow,) = target.layout.parts(PLANES[target.tensor][0])
        tokens = target.tokens[np.isin(target.tokens, np.concatenate([p.tokens for p in sources]))]
        at = _rows_of(target, tokens)
        parts, before, after = self._advance(target, at)
        units = target.num_heads * narrow.width
        anywhere = Part(narrow.plane, tokens, target.head, target.num_heads, False, 0, units, narrow.width)
        rows = match([anywhere], sources)
        token, piece = np.divmod(rows.target, units)
        tables = elementwise.Sum(
            width=rows.width,
            source=self._index(rows.source),
            source_wide=rows.wide,
            old=self._either(parts, at[token], before[token], target.head, piece),
            target=self._either(parts, at[token], after[token], target.head, piece),
        )
        x = self.x
        return lambda: elementwise.sum_rows(x.narrow, x.wide, tables)

    def _over_host_link(self, source: Access, target: Access) -> Launch:
        """A block to the host's memory or back as it lies, in one piece, and its log-sum-exp."""
        for plane in PLANES[source.tensor]:
            (mine,), (there,) = source.layout.parts(plane), target.layout.parts(plane)
            assert np.array_equal(mine.tokens, there.tokens), "what leaves for the host lies there as it did"
        taken, into, lse = self._all_of(source), self._all_of(target), self.x.lse
        if source.tensor != "out":
            return lambda: into.copy_(taken, non_blocking=True)
        (part,), on_host = target.layout.parts("out"), bool(self.places.on_host[target.buffer])
        kept = self._new_lse(part.num_heads, len(part.tokens), on_host=on_host)

        def run() -> None:
            into.copy_(taken, non_blocking=True)
            lse[target.buffer] = kept  # the buffer may hold several blocks in turn
            kept.copy_(self._lse_of(source), non_blocking=True)

        return run

    def _packed_lse(self, reads: list[Access], targets: list[Access]) -> Callable[[], elementwise.Columns] | None:
        """Rows of the log-sum-exp that a packed ``out`` takes along."""
        target = next((a for a in targets if a.tensor == "out"), None)
        if target is None:
            return None
        sources = [a for a in reads if a.tensor == "out"]
        held = np.concatenate(
            [np.where(np.isin(p.tokens, a.tokens), p.tokens, -1) for a in sources for p in a.layout.parts("out")]
        )
        (part,) = target.layout.parts("out")
        rows = np.flatnonzero(np.isin(part.tokens, target.tokens))  # a result may be written part by part
        order = np.argsort(held, kind="stable")
        index = self._index(order[np.searchsorted(held[order], part.tokens[rows])])
        into, lse = self._new_lse(target.num_heads, len(part.tokens)), self.x.lse
        into = lse.setdefault(target.buffer, into) if self.places.is_output[target.buffer] else into
        lse[target.buffer], to = into, self._index(rows)

        def columns() -> elementwise.Columns:
            lse[target.buffer] = into  # the buffer may hold several blocks in turn
            found = [self._lse_of(a) for a in sources]
            source = found[0] if len(found) == 1 else torch.cat(found, dim=1)
            return elementwise.Columns(source_HT=source, source=index, target_HT=into, target=to)

        return columns

    def _lse_of(self, out: Access) -> Tensor:
        """Log-sum-exp of an access's heads, of all tokens that its buffer holds."""
        first = out.head - out.layout.parts("out")[0].head
        return self.x.lse[out.buffer][first : first + out.num_heads]

    def _index(self, values: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self.device)

    # --- sinks ---

    def _join_sinks(self, op: Op, target: Access) -> Launch:
        kept, (part,) = self._kept(target), target.layout.parts("out")
        if target.buffer in self.state:
            nothing = self.state[target.buffer][part.rows_of(target.tokens)] == _NOTHING
        else:
            before = [a for i, every in self.walk if i < op.index for a in every if a.buffer == target.buffer]
            made = np.concatenate([target.tokens[:0], *(a.tokens for a in before if a.mode != READ)])
            nothing = ~np.isin(target.tokens, np.setdiff1d(made, self.unseen.get(target.buffer, [])))
        return sinks.join(kept, self.x.sinks, torch.from_numpy(nothing).to(self.device))

    def _sink_gradient(self, mine: list[Access]) -> Launch:
        given, total = {a.tensor: a for a in mine}, self._sink_sum(mine[-1].buffer)
        if "out" not in given:
            return lambda: total.zero_()
        (part,) = given["dout"].layout.parts("dout")
        dout = self._block_of(given["dout"], part)
        return sinks.gradient(self._kept(given["out"]), dout, self.x.sinks, total)

    def _sink_sum(self, buffer: int) -> Tensor:
        """Gradients of all sinks, as a buffer holds them."""
        return self.x.sink_sums.setdefault(buffer, torch.zeros_like(self.x.sinks))

    def _kept(self, out: Access) -> sinks.Kept:
        """A block of outputs."""
        (part,) = out.layout.parts("out")
        span, lse = _span(part, out.tokens), self.x.lse
        lse.setdefault(out.buffer, self._new_lse(part.num_heads, len(part.tokens)))
        of_group = self.x.workload.num_tokens // self.s.head_groups
        group = self.s.tokens(out.tokens) // of_group if self.s.head_groups > 1 else np.zeros(len(out.tokens), np.int64)
        edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
        first = (group * self.x.workload.num_heads + out.head).tolist()
        runs = [(slice(a, b), slice(first[a], first[a] + out.num_heads)) for a, b in pairwise(edges) if a < b]
        return sinks.Kept(out_THD=self._block_of(out, part), lse=lambda: self._lse_of(out)[:, span], runs=tuple(runs))

    def _block_of(self, access: Access, part: Part) -> Tensor:
        """[T, H, D] of an access's tokens, which follow each other in memory."""
        return self.x.view(part, _span(part, access.tokens), (access.head, access.num_heads))

    # --- layers around attention ---

    def _layer_op(self, mine: list[Access]) -> Launch:
        """An op of a transformer layer; which one, what it makes says."""
        targets = [a for a in mine if a.mode != READ]
        op = MAKER[targets[0].tensor]
        given, made = (
            [self.x.matrix(a.layout, a.tokens) for a in side] for side in ([a for a in mine if a.mode == READ], targets)
        )
        adds = targets[-1].mode == UPDATE
        if op.kind == "rotary":
            tokens = targets[0].tokens if targets[0].tensor == "q" else mine[0].tokens
            return layer_calls.rotary(given, made, self.x.angles(tokens), self.x.workload.num_kv_heads)
        return layer_calls.lower(op.kind, given, made, adds=adds)

    # --- communication ---

    def _transfer(self, op: Op, accesses: Sequence[Access], group: Any) -> Launch:
        """Point-to-point ops for a batch, one for each tensor; see `cpsim.real.run.program`."""
        source, target = op.lanes[0][0], op.lanes[1][0]
        sends, peer = self.rank == source, target if self.rank == source else source
        mine = [a for a in accesses if (a.mode == READ) == sends]
        self.unseen |= {a.buffer: self._unseen_by(*self.made_by[a.buffer]) for a in mine if a.buffer in self.made_by}
        parts, lse = [self._span_of([a], [a]) for a in mine], self._travelling_lse(mine, sends)
        call = dist.isend if sends else dist.irecv
        return lambda: [dist.P2POp(call, part, peer, group=group) for part in (*parts, *lse())]

    def _travelling_lse(self, mine: Sequence[Access], sends: bool) -> Callable[[], list[Tensor]]:
        """Log-sum-exps that leave or arrive with a partial or final ``out``, if there is one."""
        out, lse = next((a for a in mine if a.tensor == "out"), None), self.x.lse
        if out is None:
            return list
        if sends:
            return lambda: [self._lse_of(out).contiguous()]
        arrived = self._new_lse(out.num_heads, len(out.tokens))
        lse.setdefault(out.buffer, arrived)  # computations may run without communication

        def into() -> list[Tensor]:
            lse[out.buffer] = arrived
            return [arrived]

        return into

    def _collective(self, op: Op, kind: Kind, accesses: Sequence[Access], group: Any) -> Launch:
        mine = [a for a in accesses if a.rank == self.rank]
        reads, targets = ([a for a in mine if (a.mode == READ) == side] for side in (True, False))
        ranks = [rank for rank, _ in op.lanes]
        if kind == Kind.ALL_TO_ALL:
            return self._all_to_all(accesses, reads, targets, ranks, group)
        if kind == Kind.ALL_GATHER:
            x, y = self._span_of(reads, reads, op.index), self._all_of(targets[0])
            _check_even(op, len(x) * len(ranks), len(y))
            return lambda: dist.all_gather_into_tensor(y, x, group=group)
        if kind == Kind.REDUCE_SCATTER:
            x, y = self._all_of(reads[0]), self._span_of(targets, targets)
            _check_even(op, len(y) * len(ranks), len(x))
            return lambda: dist.reduce_scatter_tensor(y, x, group=group)
        if kind == Kind.ALL_REDUCE and reads[0].tensor == "dsink":
            own, total = self._sink_sum(reads[0].buffer), self._sink_sum(targets[0].buffer)
            return lambda: (total.copy_(own), dist.all_reduce(total, group=group))
        raise InfeasibleError(f"the executor does not run {kind.name.lower()} ops yet")

    def _all_to_all(
        self,
        accesses: Sequence[Access],
        reads: Sequence[Access],
        targets: Sequence[Access],
        ranks: Sequence[int],
        group: Any,
    ) -> Launch:
        """Parts of any sizes; a rank that sends or gets nothing takes part.

        PyTorch makes one NCCL call of an exchange without given sizes and many of another one: all ranks must agree.
        """
        wanted = [[a for a in accesses if a.rank == r and a.mode != READ] for r in ranks]
        none, nothing, unit = [0] * len(ranks), self.x.flat(0, 0, False), self.places.unit
        parts = [[c.length * unit for c in theirs[0].layout.chunks] if theirs else none for theirs in wanted]
        sent = [self._span_of(reads, theirs, to=r) for r, theirs in zip(ranks, wanted, strict=True)] if reads else []
        x, y = _joined(sent) if reads else nothing, self._all_of(targets[0]) if targets else nothing
        even = len({size for row in parts for size in row}) == 1
        into, out_of = (None, None) if even else (parts[ranks.index(self.rank)], [len(part) for part in sent] or none)
        if not any(a.tensor == "out" for theirs in wanted for a in theirs):
            return lambda: dist.all_to_all_single(y, x, into, out_of, group=group)
        after = self._exchange_lse(reads, targets, wanted, group)
        return lambda: (dist.all_to_all_single(y, x, into, out_of, group=group), after())

    def _exchange_lse(
        self, reads: Sequence[Access], targets: Sequence[Access], wanted: Sequence[Sequence[Access]], group: Any
    ) -> Launch:
        """Log-sum-exps of an exchanged ``out``, which has them packed in the order in which it is sent."""
        sources = [a for a in reads if a.tensor == "out"]
        heads = next(a.num_heads for theirs in wanted for a in theirs if a.tensor == "out")
        sent, got = [len(overlap(sources, theirs)[1]) for theirs in wanted], [0] * len(wanted)
        for target in (a for a in targets if a.tensor == "out"):
            got = [len(chunk.parts[0].tokens) if chunk.parts else 0 for chunk in target.layout.chunks]
            self.x.lse[target.buffer] = self._new_lse(heads, sum(got))
        into, lse = [self.x.lse[a.buffer] for a in targets if a.tensor == "out"], self.x.lse
        arrived = torch.empty(sum(got), heads, dtype=self.x.wide.dtype, device=self.device)

        def run() -> None:
            leaving = lse[sources[0].buffer].T.contiguous() if sources else arrived[:0]
            dist.all_to_all_single(arrived, leaving, got, sent, group=group)
            for rows in into:
                rows.copy_(arrived.T)

        return run

    def _all_of(self, access: Access) -> Tensor:
        """Everything that a buffer holds, in one piece."""
        chunks = access.layout.chunks
        end, part = chunks[-1].at + chunks[-1].length, next((part for c in chunks for part in c.parts), None)
        return self.x.flat(chunks[0].at, end - chunks[0].at, bool(part and part.wide), bool(part and part.on_host))

    def _span_of(
        self, held: Sequence[Access], wanted: Sequence[Access], key: int | None = None, to: int = -1
    ) -> Tensor:
        """The piece of a buffer that holds what the wanted blocks have in common with it.

        Where several do, because tokens go to several ranks, the one that was packed for rank ``to``.
        """
        layout = held[0].layout
        tensors, tokens = overlap(held, wanted)
        if len(tokens) == 0:
            return self.x.flat(0, 0, False)
        names = {plane for tensor, *_ in tensors for plane in PLANES[tensor]}
        for chunk in sorted(layout.chunks, key=lambda chunk: chunk.key != to):
            if _fits(chunk, tensors, tokens) or (key is not None and chunk.key == key):
                part = chunk.parts[0]
                rows = _span(part, tokens)
                at, size = chunk.at + rows.start * part.stride, (rows.stop - rows.start) * part.stride
                return self.x.flat(at, size, part.wide)
        raise InfeasibleError(f"no contiguous piece of the buffer holds {sorted(names)} of {len(tokens)} tokens")


def op_heads(schedule: Schedule, op: Op) -> tuple[int, int]:
    """First query head and query heads of an attention op."""
    first, count = schedule.heads_of(op.index)[:2].tolist()
    return first, count


def _fits(chunk: Chunk, tensors: list[tuple[str, int, int]], tokens: Ints) -> bool:
    """Whether a chunk holds exactly these heads of these tensors, and the tokens."""
    wanted = sorted((plane, head, n) for tensor, head, n in tensors for plane in PLANES[tensor])
    there = sorted((p.plane, p.head, p.num_heads) for p in chunk.parts)
    return wanted == there and bool(np.isin(tokens, chunk.parts[0].tokens).all())


def _rows_of(access: Access, tokens: Ints) -> Ints:
    (part,) = access.layout.parts(PLANES[access.tensor][0])
    return part.rows_of(tokens)


def _span(part: Part, tokens: Ints) -> slice:
    """Rows of consecutive tokens of a part."""
    if len(tokens) == 0:
        return slice(0, 0)
    first = int(np.flatnonzero(part.tokens == tokens[0])[0])
    assert np.array_equal(part.tokens[first : first + len(tokens)], tokens)
    return slice(first, first + len(tokens))


def _without_sourceless(rows: Rows) -> Rows:
    there = (rows.source >= 0).any(axis=0)
    return Rows(rows.width, rows.source[:, there], rows.wide, rows.target[there])


def _joined(pieces: list[Tensor]) -> Tensor:
    """Neighbouring pieces of memory as one."""
    pieces = [piece for piece in pieces if len(piece)] or pieces[:1]
    first, total = pieces[0], sum(len(p) for p in pieces)
    at = first.storage_offset()
    for piece in pieces:
        assert piece.storage_offset() == at, "pieces for different ranks must lie one after the other"
        at += len(piece)
    return first.as_strided((total,), (1,))


def _check_even(op: Op, one: int, other: int) -> None:
    if one != other:
        raise InfeasibleError(f"{op.name}: the executor gathers and scatters equal parts; use tokens that ranks divide")
