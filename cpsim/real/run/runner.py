"""What can be run and timed: one case and pass on one rank, whoever's code it is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class Runner(Protocol):
    """A case with its tensors allocated, ready to be launched again and again; `cpsim.case.scenario` describes the
    case.

    Both methods return before the GPU has finished. On every rank they are called in the same order.
    """

    def prepare(self) -> None:
        """Untimed work before an iteration, such as the forward pass whose graph a timed backward pass uses."""

    def launch(self) -> None:
        """The timed work, launched so that the current stream waits for all of it."""


@runtime_checkable
class KnowsAttention(Protocol):
    """A runner that can run this rank's attention kernels alone."""

    def attention_s(self) -> float:
        """Median seconds of all of them, one after another."""
