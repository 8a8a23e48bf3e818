"""What one attention kernel call computes, and helpers that several kernels share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpsim.masks.blocks import FULL, block_kinds, sequence_slices, table_of
from cpsim.masks.slices import Slices
from cpsim.real.run.mask_blocks import Blocks, blocks_of

Grads = tuple[Tensor, Tensor, Tensor]
LN_2 = math.log(2.0)
"""Natural logarithm of one unit of FlashInfer's and FlexAttention's log-sum-exp, which is to base 2."""


class UnsupportedCall(ValueError):
    """The kernel has no such call, as cuDNN with a causal mask and unequal lengths."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """Shapes of one attention kernel call, prepared once and used for any number of launches."""

    q_lens: tuple[int, ...]
    """Query tokens of each sequence."""
    k_lens: tuple[int, ...]
    """Key tokens of each sequence."""
    causal: bool
    varlen: bool
    """Whether to use the varlen entry point."""
    cu_q: Tensor
    """[sequences + 1] int32 offsets of queries on the device."""
    cu_k: Tensor
    """[sequences + 1] int32 offsets of keys on the device."""
    max_q: int
    max_k: int
    mask: Slices | None = None
    """Mask of the one sequence, where it is neither full nor causal."""
    plans: dict[object, Any] = field(default_factory=dict)
    """Plans of kernels that plan a call on the host, by backend, heads and type."""

    @cached_property
    def blocks(self) -> Blocks:
        """Tables for kernels that visit listed blocks."""
        return blocks_of(self.slices, sum(self.q_lens), sum(self.k_lens), self.cu_q.device)

    @cached_property
    def slices(self) -> Slices:
        """The mask as slices; full and causal sequences, too."""
        if self.mask is not None:
            return self.mask
        return sequence_slices(np.array(self.q_lens), np.array(self.k_lens), np.full(len(self.q_lens), self.causal))

    @cached_property
    def visible(self) -> Tensor:
        """The mask [queries, keys] of the one sequence."""
        assert self.mask is not None
        kinds = block_kinds(table_of(self.mask), self.max_q, self.max_k, 1)
        return torch.from_numpy(kinds == FULL).to(self.cu_q.device)


def prepare_mask(mask: Slices, num_q: int, num_k: int, *, device: torch.device | str) -> Call:
    """Builds the Call of one sequence under any mask: disjoint slices of query and key rows."""
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (num_q, num_k))
    return Call(
        q_lens=(num_q,),
        k_lens=(num_k,),
        causal=False,
        varlen=False,
        cu_q=cu_q,
        cu_k=cu_k,
        max_q=num_q,
        max_k=num_k,
        mask=mask,
    )


def prepare(
    q_lens: Sequence[int], k_lens: Sequence[int], *, causal: bool, device: torch.device | str, varlen: bool = False
) -> Call:
    """Builds the Call for packed sequences; one sequence goes to the dense entry point unless `varlen`."""
    if len(q_lens) != len(k_lens) or not q_lens:
        raise ValueError(
            f"expected as many query lengths as key lengths, at least one; got {len(q_lens)} and {len(k_lens)}"
        )

    def offsets(lens: Sequence[int]) -> Tensor:
        total = [0]
        for n in lens:
            total.append(total[-1] + n)
        return torch.tensor(total, dtype=torch.int32, device=device)

    return Call(
        q_lens=tuple(q_lens),
        k_lens=tuple(k_lens),
        causal=causal,
        varlen=varlen or len(q_lens) > 1,
        cu_q=offsets(q_lens),
        cu_k=offsets(k_lens),
        max_q=max(q_lens),
        max_k=max(k_lens),
    )


def placed(made: Tensor, into: Tensor | None) -> Tensor:
    """Result of a kernel that allocates its own output, copied to where the caller wants it."""
    return made if into is None else into.copy_(made)


def all_placed(made: Grads, into: Grads | None) -> Grads:
    """Three gradients, where the caller wants them."""
    if into is None:
        return made
    dq, dk, dv = (placed(m, i) for m, i in zip(made, into, strict=True))
    return dq, dk, dv


def heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x[None].transpose(1, 2)
