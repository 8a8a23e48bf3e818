"""Programs over cells: runs of tokens that lie somewhere, are copied together for others, exchanged and read.

Masks ``[ranks, cells]`` say what every rank holds, gives or gets. What ``dcp`` and ``distca`` have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints, RangeSets, sets_of
from cpsim.masks.tiles import Tiles
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import Int32, Kind, Mask, Schedule
from cpsim.strategies.sizes import Sizes

SIDES: Final = {"fwd": (("q",), ("kv",)), "bwd": (("q", "out", "dout"), ("kv",))}
"""Inputs of the queries' and of the keys' side."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Where some cells of some tensors are on every rank."""

    buffers: Mapping[str, Int32]
    """By tensor, ``[ranks]``."""
    cells: Mask
    """``[ranks, cells]``."""
    arrived: Ints
    """The op that brought them, by rank; or NOTHING."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What n kernels read of the queries' or of the keys' side."""

    tensors: Sequence[str]
    held: Sequence[Held]
    """Where these are; first, the ranks' own."""
    cells: Mask
    """``[n, cells]``."""
    rows: Ints
    """Tokens as the kernels read them, some several times where sequences share keys, ``[n]``."""
    apart: Mask
    """Whether they are copied together, ``[n]``; others are all among the ranks' own and read there."""


class CellProgram:
    """One schedule under construction."""

    def __init__(self, workload: Workload, own: Mask, edges: Ints, tiles: Tiles) -> None:
        """
        Args:
            workload: by head group.
            own: cells that ranks are home of, ``[ranks, cells]``.
            edges: first position of every cell, and the end of the last one, ``[cells + 1]``.
            tiles: of the kernel calls.
        """
        self.own, self.edges, self.tokens = own, edges, np.diff(edges)
        self.num_ranks, self.ranks = len(own), np.arange(len(own))
        self.heads = np.array([0, workload.num_heads, 0, workload.num_kv_heads])
        sizes = Sizes(workload)
        q, kv, lse = sizes.query(workload.num_heads), sizes.kv(workload.num_kv_heads), sizes.lse(workload.num_heads)
        self.nbytes = {"q": q, "out": q + lse, "dout": q, "dq": q, "kv": kv, "dkv": kv}
        """Bytes of one token of every tensor."""
        self.rows = {
            "out": (q, sizes.accumulator(q), lse),
            "dq": (q, sizes.accumulator(q), 0),
            "dkv": (kv, sizes.accumulator(kv), 0),
        }
        """Bytes of a token of a partial result, of its sum, and of its log-sum-exp."""
        self.sets: dict[bytes, int] = {}
        none = RangeSets(np.zeros(1, np.int64), np.zeros((0, 2), np.int64))  # sets are known when all ops are
        self.b = Builder(self.num_ranks, none, tiles, head_groups=workload.head_groups)
        self.seen = np.full(self.num_ranks, NOTHING)
        """The last op of ``comm`` that every rank's ``compute`` has waited for."""

    def build(self) -> Schedule:
        """The schedule, with the sets that its blocks name."""
        masks = np.stack([np.unpackbits(np.frombuffer(key, np.uint8)) for key in self.sets])
        self.b.sets = sets_of(masks[:, : len(self.tokens)].astype(np.bool_), self.edges)
        return self.b.build()

    def given(self, tensors: Sequence[str], own: Mask) -> Held:
        """Inputs of a rank's own tokens, of these cells."""
        made = {t: self.b.buffers(t, own @ self.tokens * self.nbytes[t]) for t in tensors}
        for tensor, buffers in made.items():
            self.b.input(buffers, self.block(tensor, own))
        return Held(made, own, np.full(self.num_ranks, NOTHING))

    def pack(
        self,
        stage: int,
        tensors: Sequence[str],
        held: Sequence[Held],
        gives: Mask,
        nbytes: Ints,
        lane: str,
        read: Ints | NDArray[np.float64] | None = None,
    ) -> tuple[Int32, Ints]:
        """Blocks for every rank, one rank's after the other's; returns buffers and the ops to wait for, by rank.

        Args:
            nbytes: of what is packed, ``[ranks]``.
            read: bytes that it is made of, where these are others: sums are wider, or rows lie there several times.
        """
        packed, who = self.b.buffers(f"{tensors[0]} by rank", nbytes), np.flatnonzero(nbytes)
        ready = np.full(self.num_ranks, NOTHING)
        copied = np.rint(nbytes + (nbytes if read is None else read)).astype(np.int64)
        ops = self.b.add(
            Kind.COPY,
            (who, lane),
            step=stage,
            heads=self.heads,
            nbytes=copied[who],
            deps=self.waits(who, held, gives[who]) if lane == "compute" else (),
            reads=self.reads(who, tensors, held, gives[who]),
            writes=[(packed[who], self.block(t, gives[who])) for t in tensors],
        )
        ready[who] = ops if lane == "compute" else NOTHING
        return packed, ready

    def exchange(
        self,
        stage: int,
        tensors: Sequence[str],
        packed: tuple[Int32, Ints],
        gives: Mask,
        gets: Mask,
        moved: Ints,
        groups: Ints,
    ) -> tuple[Int32, Ints]:
        """All-to-alls of uneven parts in groups of ranks; returns where blocks arrive, and the op by rank."""
        made, arrived = self.b.buffers(f"{tensors[0]} of others", moved.sum(axis=0)), np.full(self.num_ranks, NOTHING)
        sent, got = ([self.block(t, cells) for t in tensors] for cells in (gives, gets))

        def some(buffers: Int32, axis: int) -> Int32:
            return np.where(moved.any(axis=axis), buffers, NOTHING).astype(np.int32)

        for ranks in groups:
            inside = moved[np.ix_(ranks, ranks)]
            if inside.any():
                (op,) = self.b.add(
                    Kind.ALL_TO_ALL,
                    (ranks[None], "comm"),
                    step=stage,
                    nbytes=inside.sum(axis=0).max(),
                    deps=[packed[1][ranks][None]],
                    reads=[(some(packed[0], 1)[ranks][None], block[ranks][None]) for block in sent],
                    writes=[(some(made, 0)[ranks][None], block[ranks][None]) for block in got],
                )
                arrived[ranks] = op
                self.b.route(int(op), ranks, inside)
        return made, arrived

    def reads(self, who: Ints, tensors: Sequence[str], held: Sequence[Held], cells: Mask) -> list[Access]:
        """Accesses of cells ``[len(who), cells]`` wherever ranks hold them."""
        found = []
        for h in held:
            part = cells & h.cells[who]
            there, sets = part.any(axis=1), self.sets_of(part)
            for t in tensors:
                found.append((np.where(there, h.buffers[t][who], NOTHING).astype(np.int32), self.block_of(t, sets)))
        return found

    def waits(self, who: Ints, held: Sequence[Held], cells: Mask) -> list[Ints]:
        """The op that brought the last of the cells to every rank, where ``compute`` has not waited for it yet."""
        last = np.full(len(who), NOTHING)
        for h in held:
            last = np.where((cells & h.cells[who]).any(axis=1), np.maximum(last, h.arrived[who]), last)
        new = last > self.seen[who]
        self.seen[who] = np.maximum(last, self.seen[who])
        return [np.where(new, last, NOTHING)]

    def gather(self, stage: int, who: Ints, sides: Sequence[Wanted]) -> tuple[list[Access], Ints]:
        """What kernels read, copied together where they need it; and the op that they still wait for.

        Args:
            stage: of the copies.
            who: rank of every kernel, ``[n]``.
            sides: what they read of queries and of keys.
        """
        found, reads, writes, waits = list[Access](), list[Access](), list[Access](), list[Ints]()
        nbytes = np.zeros(len(who), np.int64)
        for side in sides:
            waits += self.waits(who, side.held, side.cells)
            there = side.cells & side.apart[:, None]
            rows = np.where(side.apart, side.rows, 0)
            for t in side.tensors:
                copied = self.b.buffers(f"{t} in order", rows * self.nbytes[t], who)
                block = self.block(t, side.cells)
                found.append((np.where(side.apart, copied, side.held[0].buffers[t][who]).astype(np.int32), block))
                reads += self.reads(who, [t], side.held, there)
                writes.append((np.where(side.apart, copied, NOTHING).astype(np.int32), block))
            nbytes += rows * 2 * sum(self.nbytes[t] for t in side.tensors)
        deps, c = np.max(waits, axis=0), np.flatnonzero(nbytes)
        self.b.add(
            Kind.COPY,
            (who[c], "compute"),
            step=stage,
            heads=self.heads,
            nbytes=nbytes[c],
            deps=[deps[c]],
            reads=[(buffer[c], block[c]) for buffer, block in reads],
            writes=[(buffer[c], block[c]) for buffer, block in writes],
        )
        deps[c] = NOTHING
        return found, deps

    def block(self, tensor: str, cells: Mask) -> Int32:
        """A block for every mask of cells ``[n, cells]``."""
        return self.block_of(tensor, self.sets_of(cells))

    def sets_of(self, cells: Mask) -> list[int]:
        """The set of every mask of cells ``[n, cells]``."""
        keys, sets = np.packbits(cells, axis=1), self.sets
        whole, size = keys.tobytes(), keys.shape[1]
        return [sets.setdefault(whole[at : at + size], len(sets)) for at in range(0, len(whole), size)]

    def block_of(self, tensor: str, chosen: list[int]) -> Int32:
        """A block for every set."""
        first, count = (self.heads[2:] if tensor.endswith("kv") else self.heads[:2]).tolist()
        return self.b.blocks(tensor, chosen, (first, count))
