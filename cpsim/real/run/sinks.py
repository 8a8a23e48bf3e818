"""Attention sinks in the executor: joined to complete outputs, and their gradients; see `cpsim.strategies.sinks`.

Legend of tensor suffixes: T tokens, H heads of a block, D head dimension, S sinks of all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cpsim.real.run import elementwise
from cpsim.real.run.program import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A block of outputs with its log-sum-exp, as a call finds it."""

    out_THD: Tensor
    lse: Callable[[], Tensor]
    """Its log-sum-exp ``[H, T]``, as it is when the call runs."""
    runs: tuple[tuple[slice, slice], ...]
    """Rows that follow each other and have the same heads, and the sinks of these."""


def join(kept: Kept, sinks_S: Tensor, untouched_T: Tensor) -> Launch:
    """Scales outputs and their log-sum-exps in place.

    Args:
        kept: the block.
        sinks_S: all sinks.
        untouched_T: rows that no kernel has written in this launch, zeros, whose log-sum-exps are the sinks alone.
    """

    def run() -> None:
        lse_HT = kept.lse()
        for rows, heads in kept.runs:
            elementwise.join_sinks(kept.out_THD[rows], lse_HT[:, rows], sinks_S[heads], untouched_T[rows])

    return run


def gradient(kept: Kept, dout_THD: Tensor, sinks_S: Tensor, total_S: Tensor) -> Launch:
    """Adds what a block's outputs and their gradients say to the gradients of the sinks."""

    def run() -> None:
        lse_HT = kept.lse()
        for rows, heads in kept.runs:
            given = kept.out_THD[rows], dout_THD[rows], lse_HT[:, rows], sinks_S[heads]
            elementwise.add_sink_gradients(*given, total_S[heads])

    return run
