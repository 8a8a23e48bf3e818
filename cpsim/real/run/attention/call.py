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
from cpsim.masks.slices import UNCUT, Slices
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
    window: tuple[int, int] = (UNCUT, UNCUT)
    """Keys before and after a query's own that it sees, UNCUT where there is no bound; the last query's own key is the
    last one. A causal mask has (UNCUT, 0)."""
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
        window = np.tile(self.window, (len(self.q_lens), 1))
        return sequence_slices(np.array(self.q_lens), np.array(self.k_lens), window)

    @property
    def is_window(self) -> bool:
        """Whether the mask is neither full nor causal, but a window."""
        return self.window not in ((UNCUT, UNCUT), (UNCUT, 0))

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
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    causal: bool,
    device: torch.device | str,
    varlen: bool = False,
    batch: bool = False,
    window: tuple[int, int] | None = None,
) -> Call:
    """Builds the Call for packed sequences; one sequence goes to the dense entry point unless `varlen`, and so do
    several of one length as a `batch`. A `window` says more than `causal`; see `Call.window`."""
    if batch and (len(set(q_lens)) > 1 or len(set(k_lens)) > 1):
        raise ValueError(f"batch: expected sequences of one length, got {list(q_lens)} on {list(k_lens)}; leave it out")
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
        causal=causal if window is None else window == (UNCUT, 0),
        varlen=varlen or (len(q_lens) > 1 and not batch),
        cu_q=offsets(q_lens),
        cu_k=offsets(k_lens),
        max_q=max(q_lens),
        max_k=max(k_lens),
        window=((UNCUT, 0) if causal else (UNCUT, UNCUT)) if window is None else window,
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


def rows(x: Tensor, call: Call) -> Tensor:
    """[T, H, D] -> [sequence, T / sequences, H, D], a view."""
    made: Tensor = x.unflatten(0, (len(call.q_lens), -1))
    return made


def batched(x: Tensor, call: Call) -> Tensor:
    """[T, H, D] -> [sequence, H, T / sequences, D], a view."""
    return rows(x, call).transpose(1, 2)


def heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x[None].transpose(1, 2)
