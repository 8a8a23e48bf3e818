"""Memory of one rank of a schedule, and the views of it that calls read and write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cpsim.case.workload import Workload
from cpsim.real.run import layer_calls
from cpsim.real.run.node import Node
from cpsim.real.run.storage import Ints, Layout, Part, RankMemory, Walk, lay_out
from cpsim.schedule.schedule import Schedule

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, eq=False)
class RankTensors:
    """A schedule bound to the memory of this rank."""

    schedule: Schedule
    workload: Workload
    """The workload by groups of heads, as the schedule counts its tokens."""
    node: Node
    kernel: str
    places: RankMemory
    """Where every block lies."""
    narrow: Tensor
    """The memory as rows of units in the working type."""
    wide: Tensor
    """This memory as values of the type of sums."""
    host: tuple[Tensor, Tensor]
    """The same of the host's memory, in the working type and in that of sums."""
    lse: dict[int, Tensor] = field(default_factory=dict)
    """Log-sum-exp [H, T] of every buffer that holds ``out``."""
    sinks: Tensor = field(default_factory=lambda: torch.zeros(0))
    """A sink of every head of all groups, ``[heads]``, in the type of sums."""
    sink_sums: dict[int, Tensor] = field(default_factory=dict)
    """Their gradients, of every buffer that holds ``dsink``."""

    def view(self, part: Part, rows: slice | None = None, heads: tuple[int, int] | None = None) -> Tensor:
        """[T, H, D] of a part, or of some of its rows and (first head, heads)."""
        first, count = heads or (part.head, part.num_heads)
        start, stop = (0, len(part.tokens)) if rows is None else (rows.start, rows.stop)
        memory, unit = self._memory(part.wide, part.on_host), self.places.unit
        at, dim = part.at + start * part.stride + (first - part.head) * part.width, part.width * unit
        return memory.as_strided((stop - start, count, dim), (part.stride * unit, dim, 1), at * unit)

    def matrix(self, layout: Layout, tokens: Ints) -> Tensor:
        """[T, heads * D] of consecutive tokens of a buffer whose rows are whole, all its planes side by side."""
        (chunk,) = layout.chunks
        part = chunk.parts[0]
        first = int(np.flatnonzero(part.tokens == tokens[0])[0])
        assert np.array_equal(part.tokens[first : first + len(tokens)], tokens)
        return self.flat(chunk.at + first * part.stride, len(tokens) * part.stride, part.wide).view(len(tokens), -1)

    def angles(self, tokens: Ints) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary positions of some tokens in their documents."""
        ends = np.cumsum(self.workload.documents)
        starts = ends - np.array(self.workload.documents)
        positions = tokens - starts[np.searchsorted(ends, tokens, side="right")]
        there = torch.from_numpy(positions).to(self.node.device, self.wide.dtype)
        return layer_calls.angles(there, self.workload.head_dim)

    def flat(self, at: int, length: int, wide: bool, on_host: bool = False) -> Tensor:
        """A contiguous piece of memory of so many units, as communication sees it."""
        return self._memory(wide, on_host)[at : at + length].view(-1)

    def _memory(self, wide: bool, on_host: bool) -> Tensor:
        narrow, sums = self.host if on_host else (self.narrow, self.wide)
        return sums if wide else narrow


def bind(
    schedule: Schedule, workload: Workload, node: Node, kernel: str, laid_out: tuple[RankMemory, Walk] | None = None
) -> tuple[RankTensors, Walk]:
    """Memory for a schedule on this rank, and the walk through its accesses that laid it out.

    Args:
        schedule: of any strategy and pass.
        workload: that it was planned for.
        node: this rank.
        kernel: one of `cpsim.real.run.attention.KERNELS`.
        laid_out: memory of the schedule, where one process makes that of all ranks; see `storage.lay_out`.
    """
    places, walk = laid_out or lay_out(schedule, workload)
    workload = workload.by_group(schedule.head_groups)
    dtype = DTYPES[workload.dtype]
    sums = torch.promote_types(dtype, torch.float32)
    of_gpu, of_host = places.nbytes[:, node.rank].tolist()
    memory = torch.zeros(of_gpu, dtype=torch.uint8, device=node.device)
    host = torch.zeros(of_host, dtype=torch.uint8, pin_memory=node.cuda and of_host > 0)
    narrow, wide, *on_host = (m.view(d).view(-1, places.unit) for m in (memory, host) for d in (dtype, sums))
    sinks = torch.zeros(workload.num_heads * workload.head_groups, dtype=sums, device=node.device)
    return RankTensors(
        schedule, workload, node, kernel, places, narrow, wide, (on_host[0], on_host[1]), sinks=sinks
    ), walk
