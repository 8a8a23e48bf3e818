"""Attention sinks in the executor: joined to complete outputs, and their gradients; see `cpsim.strategies.sinks`.

Legend of tensor suffixes: T tokens, H heads of a block, D head dimension, S sinks of all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsim.real.run.program import Launch

Rows = Tensor | slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A block of outputs with its log-sum-exp, as a call finds it."""

    out_THD: Tensor
    lse: Callable[[], Tensor]
    """Log-sum-exp ``[H, tokens of the buffer]``, as it is when the call runs."""
    rows: Rows
    """The block's among the tokens of the buffer."""
    sink: Tensor
    """Index of every row's and head's sink, ``[T, H]``."""


def join(kept: Kept, sinks_S: Tensor, untouched_T: Tensor) -> Launch:
    """Scales outputs and their log-sum-exps in place.

    Args:
        kept: the block.
        sinks_S: all sinks.
        untouched_T: rows that no kernel has written in this launch, zeros, whose log-sum-exps are the sinks alone.
    """

    def run() -> None:
        lse_HT, sink_HT = kept.lse()[:, kept.rows], sinks_S[kept.sink].T
        joined = torch.where(untouched_T, sink_HT, torch.logaddexp(lse_HT, sink_HT))
        kept.out_THD.mul_(torch.exp(lse_HT - joined).T[..., None].to(kept.out_THD.dtype))
        kept.lse()[:, kept.rows] = joined

    return run


def gradient(kept: Kept, dout_THD: Tensor, sinks_S: Tensor, total_S: Tensor) -> Launch:
    """Adds what a block's outputs and their gradients say to the gradients of the sinks."""

    def run() -> None:
        weight_TH = torch.exp(sinks_S[kept.sink] - kept.lse()[:, kept.rows].T)
        delta_TH = (dout_THD.to(weight_TH.dtype) * kept.out_THD).sum(-1)
        total_S.index_add_(0, kept.sink.flatten(), (weight_TH * delta_TH).flatten(), alpha=-1)

    return run
