"""Collectives and point-to-point transfers over NVLink: monotone curves of seconds against bytes on the wire.

Sizes are nccl-tests' S, the total array in bytes, of one rank: the gathered array (all-gather), the whole input
(reduce-scatter), the send buffer (all-to-all, own part included), the array (all-reduce). A rank moves
S (n - 1) / n bytes through its port in each direction, twice that for an all-reduce; curves are kept against these
wire bytes, so bus bandwidth is wire bytes / seconds.

Reference: NVIDIA nccl-tests, doc/PERFORMANCE.md (algorithm and bus bandwidth).
Differs: latency is not a constant; NCCL changes protocol and channel count with size, which the knots follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds against bytes, straight between knots in log-log; constant below the first knot."""

    nbytes: tuple[float, ...]
    """Knots, increasing."""
    seconds: tuple[float, ...]
    """At the knots, never decreasing."""

    def __call__(self, nbytes: ArrayLike) -> Floats:
        """Seconds for each size; above the last knot the bandwidth of the last knot holds."""
        size = np.maximum(np.asarray(nbytes, np.float64), 1.0)
        inside = np.exp(np.interp(np.log(size), np.log(self.nbytes), np.log(self.seconds)))
        return np.asarray(inside * np.maximum(1.0, size / self.nbytes[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveParams:
    """Measured curves of one node type."""

    curves: Mapping[str, Mapping[int, Curve]]
    """By collective and number of ranks, against wire bytes."""
    hop_s: Mapping[str, float]
    """By collective: latency of one rank more than were measured."""
    transfers: Mapping[str, Curve]
    """By pattern, against message bytes: `ring` (every rank sends to the next and receives from the previous at
    once), `ring_of_two` (both with the same peer), `unidirectional`, `unbatched`, `unbatched_bidirectional`."""
    port_bytes_per_s: float
    """What one GPU's NVLink port carries in each direction, however many operations share it."""


def wire_bytes(kind: str, nbytes: ArrayLike, num_ranks: int) -> Floats:
    """Bytes that a rank sends in a collective of size S = nbytes."""
    rounds = 2.0 if kind == "all_reduce" else 1.0
    return np.asarray(nbytes, np.float64) * (rounds * (num_ranks - 1) / num_ranks)


def collective_seconds(params: CollectiveParams, kind: str, nbytes: ArrayLike, num_ranks: int) -> Floats:
    """Seconds of a collective inside a node.

    Group sizes between measured ones are interpolated at equal wire bytes; larger ones keep the wire bytes' time of
    the largest measured group and add a latency per rank.

    Args:
        params: measured curves.
        kind: one of COLLECTIVES.
        nbytes: S, any shape.
        num_ranks: ranks in the group.

    Returns:
        Seconds, in the shape of nbytes; 0 for a single rank.
    """
    if num_ranks == 1:
        return np.zeros_like(np.asarray(nbytes, np.float64))
    curves, wire = params.curves[kind], wire_bytes(kind, nbytes, num_ranks)
    measured = sorted(curves)
    if num_ranks in curves:
        return curves[num_ranks](wire)
    if num_ranks > measured[-1]:
        return np.asarray(curves[measured[-1]](wire) + params.hop_s[kind] * (num_ranks - measured[-1]))
    below = max(n for n in measured if n < num_ranks)
    above = min(n for n in measured if n > num_ranks)
    share = (num_ranks - below) / (above - below)
    return np.asarray(curves[below](wire) ** (1 - share) * curves[above](wire) ** share)


def transfer_seconds(params: CollectiveParams, nbytes: ArrayLike, pattern: str = "ring") -> Floats:
    """Seconds of one transfer in a pattern that all ranks run at once, in the shape of nbytes (bytes per message)."""
    return params.transfers[pattern](nbytes)
