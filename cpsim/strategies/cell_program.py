"""Programs over cells: runs of tokens that lie somewhere, are copied together for others, exchanged and read.

Masks ``[ranks, cells]`` say what every rank holds, gives or gets. What ``dcp`` and ``distca`` have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpsim.builder import NOTHING, Access, Builder
from cpsim.masks import Ints, RangeSets, sets_of
from cpsim.schedule import Int32, Kind, Mask, Schedule
from cpsim.strategies.sizes import Sizes
from cpsim.tiles import Tiles
from cpsim.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Where some cells of some tensors are on every rank."""

    buffers: Mapping[str, Int32]
    """By tensor, ``[ranks]``."""
    cells: Mask
    """``[ranks, cells]``."""
    arrived: Ints
    """The op that brought them, by rank; or NOTHING."""


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
        """Of a token of every tensor."""
        self.rows = {"out": (q, sizes.accumulator(q), lse), "dq": (q, sizes.accumulator(q), 0),
                     "dkv": (kv, sizes.accumulator(kv), 0)}  # fmt: skip
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

    def given(self, tensors: Sequence[str]) -> Held:
        """Inputs of a rank's own tokens."""
        made = {t: self.b.buffers(t, self.own @ self.tokens * self.nbytes[t]) for t in tensors}
        for tensor, buffers in made.items():
            self.b.input(buffers, self.block(tensor, self.own))
        return Held(made, self.own, np.full(self.num_ranks, NOTHING))

    def pack(
        self, stage: int, tensors: Sequence[str], held: Sequence[Held], gives: Mask, nbytes: Ints, lane: str
    ) -> tuple[Int32, Ints]:  # fmt: skip
        """Blocks for every rank, one rank's after the other's; returns buffers and the ops to wait for, by rank."""
        packed, who = self.b.buffers(f"{tensors[0]} by rank", nbytes), np.flatnonzero(nbytes)
        ready = np.full(self.num_ranks, NOTHING)
        ops = self.b.add(
            Kind.COPY, (who, lane), step=stage, heads=self.heads, nbytes=2 * nbytes[who],
            deps=self.waits(who, held, gives[who]) if lane == "compute" else (),
            reads=self.reads(who, tensors, held, gives[who]),
            writes=[(packed[who], self.block(t, gives[who])) for t in tensors],
        )  # fmt: skip
        ready[who] = ops if lane == "compute" else NOTHING
        return packed, ready

    def exchange(
        self, stage: int, tensors: Sequence[str], packed: tuple[Int32, Ints], gives: Mask, gets: Mask, moved: Ints,
        groups: Ints,
    ) -> tuple[Int32, Ints]:  # fmt: skip
        """All-to-alls of uneven parts in groups of ranks; returns where blocks arrive, and the op by rank."""
        made, arrived = self.b.buffers(f"{tensors[0]} of others", moved.sum(axis=0)), np.full(self.num_ranks, NOTHING)
        sent, got = ([self.block(t, cells) for t in tensors] for cells in (gives, gets))

        def some(buffers: Int32, axis: int) -> Int32:
            return np.where(moved.any(axis=axis), buffers, NOTHING).astype(np.int32)

        for ranks in groups:
            inside = moved[np.ix_(ranks, ranks)]
            if inside.any():
                (op,) = self.b.add(
                    Kind.ALL_TO_ALL, (ranks[None], "comm"), step=stage, nbytes=inside.sum(axis=0).max(),
                    deps=[packed[1][ranks][None]],
                    reads=[(some(packed[0], 1)[ranks][None], block[ranks][None]) for block in sent],
                    writes=[(some(made, 0)[ranks][None], block[ranks][None]) for block in got],
                )  # fmt: skip
                arrived[ranks] = op
                self.b.route(int(op), ranks, inside)
        return made, arrived

    def reads(self, who: Ints, tensors: Sequence[str], held: Sequence[Held], cells: Mask) -> list[Access]:
        """Accesses of cells ``[len(who), cells]`` wherever ranks hold them."""
        found = []
        for h in held:
            part = cells & h.cells[who]
            there = part.any(axis=1)
            for t in tensors:
                found.append((np.where(there, h.buffers[t][who], NOTHING).astype(np.int32), self.block(t, part)))
        return found

    def waits(self, who: Ints, held: Sequence[Held], cells: Mask) -> list[Ints]:
        """The op that brought the last of the cells to every rank, where ``compute`` has not waited for it yet."""
        last = np.full(len(who), NOTHING)
        for h in held:
            last = np.where((cells & h.cells[who]).any(axis=1), np.maximum(last, h.arrived[who]), last)
        new = last > self.seen[who]
        self.seen[who] = np.maximum(last, self.seen[who])
        return [np.where(new, last, NOTHING)]

    def block(self, tensor: str, cells: Mask) -> Int32:
        """A block for every mask of cells ``[n, cells]``."""
        keys = np.packbits(cells, axis=1)
        chosen = [self.sets.setdefault(key.tobytes(), len(self.sets)) for key in keys]
        first, count = (self.heads[2:] if tensor.endswith("kv") else self.heads[:2]).tolist()
        return self.b.blocks(tensor, chosen, (first, count))
