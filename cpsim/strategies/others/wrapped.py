"""RowKernels of other people's code on every rank, and kernels that are wrapped in them."""

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
class Sweeper:
    """Emits sweeps over the heads of a rank, of which a Ulysses group of ``parts`` has all."""

    b: Builder
    workload: Workload
    parts: int = 1
    replicas: int = 1
    """Copies of every key-value head in the group."""

    def nbytes(self, sweep: RowKernel, q_rows: Ints | int, k_rows: Ints | int) -> Ints:
        """Bytes of a sweep over rows of queries or of keys, in their shape."""
        of_keys = sweep.tensor in ("k", "kv")
        rows = np.asarray(k_rows) * self.replicas if of_keys else q_rows
        return np.asarray(sweep.nbytes(rows, self.workload) // self.parts)

    def sweep(
        self,
        sweeps: Sequence[RowKernel],
        ranks: Ints,
        q_rows: Ints | int,
        k_rows: Ints | int,
        deps: Sequence[Ints] = (),
        step: int = 0,
    ) -> Ints:
        """One sweep or more, one after another, the first after ``deps``; returns the last ops."""
        for i, sweep in enumerate(sweeps):
            nbytes = self.nbytes(sweep, q_rows, k_rows)
            last = self.b.add(sweep.kind, (ranks, "compute"), step=step, nbytes=nbytes, deps=deps if i == 0 else ())
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
        """A kernel call with the sweeps before and after it; returns the last ops, ``[ranks]``.

        Args:
            code: what is swept; None: nothing.
            pass_, ranks, tile, heads, deps, reads, writes, step: of the kernel; its first sweep waits, too.
            q_rows, k_rows: rows that sweeps pass over.
        """
        if code is not None and code.before[pass_]:
            self.sweep(code.before[pass_], ranks, q_rows, k_rows, deps, step)
        kind = Kind.ATTENTION if pass_ == "fwd" else Kind.ATTENTION_BACKWARD
        done = self.b.add(
            kind, (ranks, "compute"), step=step, tile=tile, heads=heads, deps=deps, reads=reads, writes=writes
        )
        sweeps = code.after[pass_] if code is not None else ()
        return self.sweep(sweeps, ranks, q_rows, k_rows, step=step) if sweeps else done
