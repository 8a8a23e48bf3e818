"""Row kernels of other people's code on every rank, and kernels that are wrapped in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints
from cpsim.schedule.builder import Access, Builder
from cpsim.schedule.schedule import Kind, Pass
from cpsim.strategies.others import RowKernel, WrapperCode


@dataclass(frozen=True, slots=True)
class RowKernelEmitter:
    """Emits row kernels over the heads of a rank, of which a Ulysses group of ``parts`` has all."""

    b: Builder
    workload: Workload
    parts: int = 1
    replicas: int = 1
    """Copies of every key-value head in the group."""

    def nbytes(self, row_kernel: RowKernel, q_rows: Ints | int, k_rows: Ints | int) -> Ints:
        """Bytes of a row kernel over rows of queries or of keys, in their shape."""
        of_keys = row_kernel.tensor in ("k", "kv", "repeated")
        rows = np.asarray(k_rows) * self.replicas if of_keys else q_rows
        return np.asarray(row_kernel.nbytes(rows, self.workload) // self.parts)

    def emit(
        self,
        row_kernels: Sequence[RowKernel],
        ranks: Ints,
        q_rows: Ints | int,
        k_rows: Ints | int,
        deps: Sequence[Ints] = (),
        step: int = 0,
    ) -> Ints:
        """One row kernel or more, one after another, the first after ``deps``; returns the last ops."""
        for i, row_kernel in enumerate(row_kernels):
            nbytes = self.nbytes(row_kernel, q_rows, k_rows)
            last = self.b.add(
                row_kernel.kind, (ranks, "compute"), step=step, nbytes=nbytes, deps=deps if i == 0 else ()
            )
        return last

    def attend(
        self,
        code: WrapperCode | None,
        pass_: Pass,
        ranks: Ints,
        *,
        q_rows: Ints | int,
        k_rows: Ints | int,
        tile: Ints | int,
        heads: Ints,
        deps: Sequence[Ints],
        reads: Sequence[Access],
        writes: Sequence[Access],
        step: int = 0,
    ) -> Ints:
        """An attention kernel with the row kernels before and after it; returns the last ops, ``[ranks]``.

        Args:
            code: row kernels around the call; None: none.
            pass_, ranks, tile, heads, deps, reads, writes, step: of the kernel; its first row kernel waits, too.
            q_rows, k_rows: rows that row kernels pass over.
        """
        if code is not None and code.before[pass_]:
            self.emit(code.before[pass_], ranks, q_rows, k_rows, deps, step)
        kind = Kind.ATTENTION if pass_ == "fwd" else Kind.ATTENTION_BACKWARD
        done = self.b.add(
            kind, (ranks, "compute"), step=step, tile=tile, heads=heads, deps=deps, reads=reads, writes=writes
        )
        row_kernels = code.after[pass_] if code is not None else ()
        return self.emit(row_kernels, ranks, q_rows, k_rows, step=step) if row_kernels else done
