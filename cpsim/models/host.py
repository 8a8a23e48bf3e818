"""The host: wall seconds that one launch keeps its thread busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict

from cpsim.units import CLOSED, ByName, Quantity, Seconds

ATTENTION = {"attention": "fwd", "attention_backward": "bwd"}
HELD_S = 1e-3
"""How long GPUs wait for hosts in the pauses that are called `held`."""
COPIES = {"elementwise": "copy", "barrier": "all_reduce"}
"""Kinds of ops that are launched as another kind is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParams:
    """Launch times of one machine, each op in its own Python call."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    launch_s: ByName[Seconds]
    """By kind of op: merge, accumulate, copy, transfer (a send and a receive, batched), the collectives; and by
    kernel and pass: `fa4 fwd`."""
    event_s: Seconds
    """Recording an event and waiting for it on another stream, once per op."""
    graph_s: Seconds
    """From the launch of a CUDA graph to the start of its first kernel, the GPU idle."""
    graph_queued_s: Seconds = 0.0
    """Seconds from a graph's launch to its first kernel, counted from when the GPU gets to a graph that was launched
    before."""
    cold_start_s: Seconds = 0.0
    """What the first kernel of a graph takes longer where the cache holds nothing of use, operands apart."""
    graph_cross_s: Seconds = 0.0
    """Extra seconds for a dependency across streams in a captured graph."""
    captured_kernel_s: Seconds = 0.0
    """What a kernel takes in a CUDA graph that does next to nothing."""
    captured_gain_s: ByName[Annotated[float, Quantity("s", -1, 1)]]
    """What two events around an op add to its measured time, which ops of a CUDA graph do not pay: attention by kernel
    and pass, as in `cudnn fwd`, and by pass where a kernel was not measured (`fwd`, also of other products);
    `memory-bound` kernels; a `message`, less what it costs kernels before and after it."""
    streamed_gain_s: ByName[Annotated[float, Quantity("s", -1, 1)]]
    """What events around ops add that are launched one by one into a stream, by a host that is ahead."""
    pause_s: ByName[Seconds]
    """From the end of one iteration to the start of the next: `synced`, and `held` where GPUs wait for hosts first."""

    def measured(self, names: Sequence[str]) -> float | None:
        """Seconds of the first of some launches that has been measured."""
        return next((self.launch_s[name] for name in names if name in self.launch_s), None)

    def seconds(self, kind: str, kernel: str, names: Sequence[str] = ()) -> float:
        """Seconds to launch one op of a kind (as cpsim.schedule.schedule.Kind names it, in lower case).

        Args:
            kind: the op's.
            kernel: of attention ops.
            names: of launches in other people's code, which make no event of their own; the first that has been
                measured counts.
        """
        found = self.measured(names)
        if found is not None:
            return found
        name = f"{kernel} {ATTENTION[kind]}" if kind in ATTENTION else COPIES.get(kind, kind)
        return self.launch_s.get(name, self.launch_s["copy"]) + (0.0 if names else self.event_s)
