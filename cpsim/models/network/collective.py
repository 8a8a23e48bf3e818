"""Collectives and point-to-point transfers over NVLink: monotone curves of seconds against bytes on the wire.

Sizes are nccl-tests' S, the total array in bytes, of one rank: the gathered array (all-gather), the whole input
(reduce-scatter), the send buffer (all-to-all, own part included), the array (all-reduce). A rank moves
S (n - 1) / n bytes through its port in each direction, twice that for an all-reduce; curves are kept against these
wire bytes, so bus bandwidth is wire bytes / seconds.

Point-to-point messages run on a number of channels, each one thread block at some 20 GB/s, which NCCL chooses by the
ranks of the process group and the size of the message: the same message takes half as long among two ranks as among
four, and in a group that spans several nodes even one inside a node is slow.

Reference: NVIDIA nccl-tests, doc/PERFORMANCE.md (algorithm and bus bandwidth); NCCL 2.28.9, src/enqueue.cc
(scheduleP2pTasksToPlan, addP2pToPlan) and src/graph/paths.cc (ncclTopoComputeP2pChannels) for channels;
src/init.cc (computeBuffSizes) for their buffers.
Differs: latency is not a constant; NCCL changes protocol and channel count with size, which the knots follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field

from cpsim.units import CLOSED, MEASURED_S, ByName, Quantity, Rate, Seconds

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Number = Annotated[int, Field(ge=1, le=1_000_000)]
"""Of ranks or channels; a text in files."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
MAX_CHANNELS: Final = 32
"""For messages over NVLink."""
NET_CHANNELS: Final = 2
"""For every message in a process group that spans nodes, NCCL's default for a peer behind a network."""
CHANNEL_BYTES: Final = (2**16, 2**24)
"""A channel carries at least the one, and at most the other while there are more channels."""
CHANNEL_BUFFER_BYTES: Final = 2**22
"""Between sender and receiver, NCCL_BUFFSIZE's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds against bytes, straight between knots in log-log; constant below the first knot."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    nbytes: tuple[Annotated[float, Quantity("bytes", 1, 1e15)], ...]
    """Knots, never decreasing."""
    seconds: tuple[Annotated[float, MEASURED_S], ...]
    """At the knots, never decreasing."""

    def __post_init__(self) -> None:
        if not self.nbytes or len(self.nbytes) != len(self.seconds):
            raise ValueError(f"expected as many sizes as times, got {len(self.nbytes)} and {len(self.seconds)}")
        for name, knots, unit in (("sizes", self.nbytes, "bytes"), ("times", self.seconds, "s")):
            for before, knot in pairwise(knots):
                if knot < before:
                    raise ValueError(f"expected {name} that never fall, got {knot:g} {unit} after {before:g}")

    def __call__(self, nbytes: ArrayLike) -> Floats:
        """Seconds for each size; above the last knot the bandwidth of the last knot holds."""
        size = np.maximum(np.asarray(nbytes, np.float64), 1.0)
        inside = np.exp(np.interp(np.log(size), np.log(self.nbytes), np.log(self.seconds)))
        return np.asarray(inside * np.maximum(1.0, size / self.nbytes[-1]))


PROCESSOR_GPUS: Final = 4
"""GPUs over PCIe that one processor of the host connects; more of them share the link to the other processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveParams:
    """Measured curves of one node type."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    curves: ByName[Annotated[Mapping[Number, Curve], Field(min_length=1)]]
    """By collective and number of ranks, against wire bytes."""
    hop_s: ByName[Seconds]
    """By collective: latency of one rank more than were measured."""
    rings: Annotated[Mapping[Number, Curve], Field(min_length=1)]
    """By NCCL channels, against message bytes: every rank sends to the next and receives from the previous at once."""
    port_bytes_per_s: Rate
    """What one GPU's NVLink port carries in each direction, however many operations share it."""
    flow_bytes_per_s: Rate | None = None
    """What one flow does at most, on however many channels; None: as measured, ``rings`` say."""
    crossing_bytes_per_s: Rate | None = None
    """What a flow does at most in rings of more GPUs of a node than ``PROCESSOR_GPUS``; None: what others do."""


def wire_bytes(kind: str, nbytes: ArrayLike, num_ranks: int) -> Floats:
    """Bytes that a rank sends in a collective of size S = nbytes."""
    rounds = 2.0 if kind == "all_reduce" else 1.0
    return np.asarray(nbytes, np.float64) * (rounds * (num_ranks - 1) / num_ranks)


def collective_seconds(params: CollectiveParams, kind: str, nbytes: ArrayLike, num_ranks: int) -> Floats:
    """Seconds of a collective inside a node.

    Group sizes between measured ones are interpolated at equal wire bytes; smaller ones take the wire bytes' time of
    the smallest measured group, and larger ones that of the largest with a latency per rank.

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
    if num_ranks < measured[0]:
        return curves[measured[0]](wire)
    below = max(n for n in measured if n < num_ranks)
    above = min(n for n in measured if n > num_ranks)
    share = (num_ranks - below) / (above - below)
    return np.asarray(curves[below](wire) ** (1 - share) * curves[above](wire) ** share)


def ring_channels(nbytes: ArrayLike, num_ranks: ArrayLike, num_nodes: ArrayLike = 1) -> Ints:
    """Channels among which NCCL divides a message over NVLink, 1 to 32, in the common shape.

    Args:
        nbytes: of the message; small ones do not fill them, see ``channels``.
        num_ranks: of its process group.
        num_nodes: that the group spans.
    """
    nbytes, num_ranks, num_nodes = np.broadcast_arrays(nbytes, num_ranks, num_nodes)
    count = np.maximum(MAX_CHANNELS >> np.ceil(np.log2(num_ranks)).astype(np.int64), 1)
    for _ in range(MAX_CHANNELS.bit_length()):
        count = np.where((nbytes > count * CHANNEL_BYTES[1]) & (count < MAX_CHANNELS), 2 * count, count)
    return np.asarray(np.where(num_nodes > 1, NET_CHANNELS, count))


def channels(nbytes: ArrayLike, num_ranks: ArrayLike, num_nodes: ArrayLike = 1) -> Ints:
    """Channels that carry a part of a message, each one thread block; arguments as of ``ring_channels``."""
    filled = np.ceil(np.maximum(nbytes, 1) / CHANNEL_BYTES[0]).astype(np.int64)
    return np.minimum(ring_channels(nbytes, num_ranks, num_nodes), filled)


def fits_buffers(nbytes: ArrayLike, num_ranks: ArrayLike, num_nodes: ArrayLike = 1, messages: int = 1) -> Bools:
    """Whether a batch of messages over NVLink leaves its sender before the receiver is there, in the common shape.

    Arguments as of ``transfer_seconds``.
    """
    size = np.asarray(nbytes, np.float64)
    return np.asarray(size <= ring_channels(size / messages, num_ranks, num_nodes) * CHANNEL_BUFFER_BYTES)


def transfer_seconds(
    params: CollectiveParams, nbytes: ArrayLike, num_ranks: ArrayLike, num_nodes: ArrayLike = 1, messages: int = 1
) -> Floats:
    """Seconds of a batch of messages over NVLink while every rank of its process group sends and receives one like it.

    For numbers of channels that were not measured a channel takes as long as one of the nearest number.

    Args:
        params: measured curves.
        nbytes: of the batch.
        num_ranks, num_nodes: as ``ring_channels`` takes them.
        messages: equal ones of the batch, one after the other on the channels of one.

    Returns:
        Seconds, in the common shape.
    """
    size = np.asarray(nbytes, np.float64)
    size, count = np.broadcast_arrays(size, ring_channels(size / messages, num_ranks, num_nodes))
    seconds = np.empty(size.shape)
    for number in np.unique(count).tolist():
        nearest = min(params.rings, key=lambda known: (abs(np.log2(known / number)), -known))
        chosen = count == number
        seconds[chosen] = params.rings[nearest](size[chosen] * (nearest / number))
    if params.flow_bytes_per_s is not None:
        seconds = np.maximum(seconds, size / params.flow_bytes_per_s)
    if params.crossing_bytes_per_s is not None:
        crosses = np.asarray(num_ranks) > PROCESSOR_GPUS * np.asarray(num_nodes)
        seconds = np.where(crosses, np.maximum(seconds, size / params.crossing_bytes_per_s), seconds)
    return seconds
