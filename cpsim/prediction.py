"""What a prediction and a recommendation hold: plain values that the command line, reports and notebooks read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cpsim.scenario import Scenario
from cpsim.sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Answer to one scenario: times of the slowest rank, with a 90 % interval."""

    scenario: Scenario
    time_s: float
    """Seconds from the start of the iteration to the end of the slowest rank; forward plus backward for
    ``fwd_bwd``."""
    time_s_low: float
    """5th percentile of the predicted time [s]."""
    time_s_high: float
    """95th percentile [s]."""
    draws_s: tuple[float, ...]
    """Sampled times [s]; the same draw of every prediction shares the same cost parameters."""
    tflops_per_gpu: float
    """Model FLOP (exact mask area) of the mean rank over ``time_s``, in 1e12 FLOP/s."""
    exposed_comm_s: float
    """Seconds in which the slowest rank communicates or waits for data while computing nothing."""
    bytes_sent_per_gpu: float
    """Bytes that leave the busiest rank."""
    peak_memory_bytes: int
    """Bytes of all buffers on the fullest rank."""
    planning_s: float
    """Seconds that planning a batch takes on one core; part of ``time_s`` only as far as nothing hides it."""
    parts_s: Mapping[str, float]
    """Seconds of the critical path by cost model, e.g. ``{"attention fwd": .., "transfer": ..}``."""
    notes: tuple[str, ...]
    """What the reader must know: extrapolated sizes, published or data-sheet parameters."""
    timelines: Mapping[str, Timeline]
    """Simulated timeline of every pass, by ``"fwd"`` and ``"bwd"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """A scenario that cannot run, and why."""

    scenario: Scenario
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One row of a recommendation."""

    forward: Prediction
    backward: Prediction
    total_s: float
    total_s_low: float
    total_s_high: float
    tflops_per_gpu: float
    exposed_share: float
    """Exposed communication over total time, 0 to 1."""
    peak_memory_bytes: int
    probability_best: float
    """Share of parameter draws in which this candidate is the fastest, 0 to 1."""

    @property
    def scenario(self) -> Scenario:
        """The scenario of the forward pass: strategy and knobs of the row."""
        return self.forward.scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A recommendation: candidates fastest first, then what cannot run."""

    scenario: Scenario
    candidates: tuple[Candidate, ...]
    infeasible: tuple[Infeasible, ...]
    notes: tuple[str, ...]
