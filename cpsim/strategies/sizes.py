"""Sizes that all strategies share: bytes per token of every tensor, and what an accumulation moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpsim.case.workload import LSE_BYTES, Workload
from cpsim.masks.slices import Ints

ACCUMULATOR_BYTES = 4
"""Narrowest element of an accumulator of partial outputs or gradients, fp32."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes per token for some number of heads."""

    workload: Workload

    def query(self, num_heads: int) -> int:
        """Q or dQ."""
        return num_heads * self.workload.head_dim * self.workload.bytes_per_element

    def output(self, num_heads: int) -> int:
        """O or dO."""
        return num_heads * self.workload.values * self.workload.bytes_per_element

    def kv(self, num_kv_heads: int) -> int:
        """K and V together, or dK and dV."""
        return num_kv_heads * self.workload.kv_elements * self.workload.bytes_per_element

    def lse(self, num_heads: int) -> int:
        """Log-sum-exp."""
        return num_heads * LSE_BYTES

    def accumulator(self, nbytes: int) -> int:
        """The accumulator of a tensor of ``nbytes``: fp32, or the tensor's own type where that is wider."""
        width = self.workload.bytes_per_element
        return nbytes * max(ACCUMULATOR_BYTES, width) // width


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How partial results of ring steps are summed into rows of a result; arrays ``[steps, ranks]``.

    The first partial is written by the kernel in place. The second turns rows into fp32; the last one of a row
    writes the final type, so no separate cast is left.
    """

    active: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
    """The rank computes in this step."""
    rows: Ints
    """Rows of the partial result."""
    whole: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
    """The partial covers all rows of the rank, not only the tail rows."""
    tail_rows: Ints
    """``[ranks]``."""

    @property
    def sums(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Steps whose partial must be added to earlier ones."""
        return np.asarray(self.active & (np.cumsum(self.active, axis=0) > 1))

    def traffic(self, row_bytes: int, row_bytes_fp32: int, extra: int) -> Ints:
        """Bytes read plus written by every sum, ``int64[steps, ranks]``.

        Args:
            row_bytes: one row in the working type.
            row_bytes_fp32: one row of the accumulator.
            extra: bytes per row beside it (log-sum-exp read twice and written).
        """
        nth = np.cumsum(self.active, axis=0)
        is_last = nth == nth[-1]
        later_whole = (self.active & self.whole)[::-1].cumsum(axis=0)[::-1] - (self.active & self.whole) > 0
        finished = np.where(is_last, self.rows, np.where(self.whole & ~later_whole, self.rows - self.tail_rows, 0))
        read = np.where(nth == 2, row_bytes, row_bytes_fp32)
        moved = self.rows * (row_bytes + read + extra + row_bytes_fp32)
        return np.where(self.sums, moved - finished * (row_bytes_fp32 - row_bytes), 0)
