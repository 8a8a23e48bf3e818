"""What a prediction and a recommendation hold: plain values that the command line, reports and notebooks read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError, InfeasibleError, NotMeasuredError, OutOfMemoryError, UnmeasuredError
from cpsim.sim.timeline import Timeline

Column = NDArray[Any]
NUMBERS: Final = (
    "time_s",
    "time_s_low",
    "time_s_high",
    "tflops_per_gpu",
    "exposed_comm_s",
    "bytes_sent_per_gpu",
    "peak_memory_bytes",
    "planning_s",
    "tokens_per_s_per_gpu",
    "mfu",
)
"""What ``prediction_columns`` takes from a prediction; names are a contract."""
EFFORT: Final = {"none": 0, "usp": 2, "mesh": 2, "loongtrain": 3, "hybrid_cp": 3, "magi": 3, "dcp": 4, "distca": 4}
"""How much a strategy takes to set up: 1 is one way to communicate, 2 are two at once, 3 is a code of its own, 4 a plan
for every batch."""
TIE: Final = 0.02
"""How much longer than the fastest a simpler way may take that cannot be told from it."""
MEMORY_SPREAD: Final = (0.96, 1.06)
"""Of predicted tensors of a training step, what its allocator really holds lies between these with 90 %: of 118 steps
that ran on H100 99 % do (``python -m studies.steps.compare``), of 106 published peaks 87 % (``studies/public``)."""
Refusal = Literal["cannot", "not_measured", "does_not_fit"]
"""Why a case has no plain answer: no code can run it; nobody has measured what its time rests on; or it needs more
memory than a GPU has."""
REFUSALS: Final[Mapping[Refusal | None, str]] = {
    "cannot": "cannot run",
    "not_measured": "not measured",
    "does_not_fit": "does not fit",
    None: "not tried",
}
"""The same in words; None: predicting it would take too long, or too much of this machine's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a training step, predicted."""

    change: Mapping[str, str | int]
    """Fields of ``parallel``, e.g. ``{"recompute": "full"}``."""
    time_s: float
    needed_bytes: int
    """On the fullest rank, with communicators and context."""

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.change.items())


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
    host_share: float
    """Share of the time that would be saved if nothing had to be launched, 0 to 1."""
    bytes_sent_per_gpu: float
    """Bytes that leave the busiest rank."""
    peak_memory_bytes: int
    """Bytes on the fullest rank: buffers and what attention kernels allocate beside them; of a training step weights,
    gradients, optimizer and activations."""
    planning_s: float
    """Seconds that planning a batch takes on one core; part of ``time_s`` only as far as nothing hides it."""
    parts_s: Mapping[str, float]
    """Seconds of the critical path by cost model, e.g. ``{"attention fwd": .., "transfer": ..}``."""
    notes: tuple[str, ...]
    """What the reader must know: extrapolated sizes, published or data-sheet parameters."""
    timelines: Mapping[str, Timeline]
    """Simulated timeline of every pass, by ``"fwd"`` and ``"bwd"``."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Of a training step: bytes on the fullest rank by kind. ``peak_memory_bytes`` is the sum of all but
    ``communicators`` and ``context``, which PyTorch's allocator knows nothing of."""
    gpu_memory_bytes: int | None = None
    """Of a training step: bytes that a GPU has."""
    fits: bool = True
    """Whether all of ``memory`` is at most what a GPU has. What does not fit has a time all the same."""
    would_fit: tuple[Change, ...] = ()
    """Of a training step that does not fit: single changes with which it does, fastest first."""
    tokens_per_s_per_gpu: float | None = None
    """Of a training step."""
    mfu: float | None = None
    """Of a training step: ``tflops_per_gpu`` over the GPU's peak."""

    @property
    def needed_bytes(self) -> int:
        """All that the fullest rank needs."""
        return sum(self.memory.values()) or self.peak_memory_bytes

    @property
    def needed_interval(self) -> tuple[int, int]:
        """Interval of ``needed_bytes`` of a training step, 90 %; see ``MEMORY_SPREAD``."""
        beside = self.needed_bytes - self.peak_memory_bytes
        low, high = (round(beside + factor * self.peak_memory_bytes) for factor in MEMORY_SPREAD)
        return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """A scenario without a time, and why."""

    scenario: Scenario
    reason: str
    kind: Refusal | None = "cannot"
    """None: it was not tried."""


def refused(scenario: Scenario, error: InfeasibleError) -> Infeasible:
    """The answer to a scenario that cannot run, or does not fit."""
    kinds: dict[type[InfeasibleError], Refusal] = {OutOfMemoryError: "does_not_fit", UnmeasuredError: "not_measured"}
    default: Refusal = "cannot"
    kind = next((kind for known, kind in kinds.items() if isinstance(error, known)), default)
    return Infeasible(scenario=scenario, reason=str(error), kind=kind)


def refusal(result: Prediction | Infeasible | CpsimError) -> Refusal | None:
    """Why a case has no plain answer; None where it has one, or where it could not even be read."""
    match result:
        case Prediction():
            return None if result.fits else "does_not_fit"
        case Infeasible():
            return result.kind
        case _:
            return "not_measured" if isinstance(result, NotMeasuredError) else None


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
    draws_s: tuple[float, ...] = ()
    """Sampled times of both passes [s], see ``Prediction.draws_s``."""

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
    stands_in: str | None = None
    """The kernel whose answers these are, where the one that was asked for was not measured."""

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """The fastest, and those that cannot be told from it; see ``inseparable``."""
        return tied(self.candidates)

    @property
    def recommended(self) -> Candidate | None:
        """The simplest of those that cannot be told from the fastest and take hardly longer."""
        return recommended(self.candidates)

    def alike(self, one: Candidate) -> list[Candidate]:
        """Other candidates whose schedule is the same: equal schedules have equal draws."""
        return [other for other in self.candidates if other is not one and other.draws_s == one.draws_s != ()]

    @property
    def distinct(self) -> tuple[Candidate, ...]:
        """Candidates, of equal schedules the first only."""
        firsts = {one.draws_s or id(one): one for one in reversed(self.candidates)}
        return tuple(one for one in self.candidates if firsts[one.draws_s or id(one)] is one)

    def columns(self) -> dict[str, Column]:
        """The candidates as columns that ``pandas.DataFrame`` takes, fastest first, in SI units."""
        scenarios = [candidate.scenario for candidate in self.candidates]
        numbers = (
            "total_s",
            "total_s_low",
            "total_s_high",
            "tflops_per_gpu",
            "exposed_share",
            "peak_memory_bytes",
            "probability_best",
        )
        return {
            "strategy": np.array([str(scenario.strategy) for scenario in scenarios], dtype=str),
            "knobs": np.array([knobs_json(scenario) for scenario in scenarios], dtype=str),
            "forward_s": np.array([candidate.forward.time_s for candidate in self.candidates]),
            "backward_s": np.array([candidate.backward.time_s for candidate in self.candidates]),
            **{name: np.array([getattr(candidate, name) for candidate in self.candidates]) for name in numbers},
        }


class Way(Protocol):
    """One of several ways to run a case."""

    @property
    def scenario(self) -> Scenario: ...

    @property
    def total_s(self) -> float: ...

    @property
    def draws_s(self) -> tuple[float, ...]: ...


W = TypeVar("W", bound=Way)


def tied(ways: Sequence[W]) -> tuple[W, ...]:
    """Of ways, fastest first, the first and those that cannot be told from it."""
    return tuple(one for one in ways if inseparable(one.draws_s, ways[0].draws_s))


def recommended(ways: Sequence[W]) -> W | None:
    """Of ways, fastest first, the simplest of those that cannot be told from the first and take hardly longer."""
    near = [one for one in tied(ways) if one.total_s <= (1 + TIE) * ways[0].total_s]
    return min(
        near,
        key=lambda one: (EFFORT.get(str(one.scenario.strategy), 1), len(one.scenario.knobs), one.total_s),
        default=None,
    )


def inseparable(draws: Sequence[float], best: Sequence[float]) -> bool:
    """Whether a way cannot be told from the fastest: in the 90 % interval of the ratio of their times, which leaves out
    what they are wrong about together, lies 1."""
    return draws is best or (len(draws) > 0 and bool(np.quantile(np.array(draws) / np.array(best), 0.05) <= 1))


def knobs_json(scenario: Scenario) -> str:
    """The strategy's settings as JSON, so that a column of them can be compared and read back."""
    return json.dumps(dict(scenario.knobs), sort_keys=True)


def prediction_columns(
    asked: Sequence[Scenario | CpsimError], results: Sequence[Prediction | Infeasible | CpsimError]
) -> dict[str, Column]:
    """Cases and their answers as columns of equal length; see ``cpsim.sweep``."""
    rows = [_case(scenario) for scenario in asked]
    case = {name: np.array([row[name] for row in rows]) for name in NO_CASE}
    numbers = {
        name: np.array([getattr(result, name, None) for result in results], dtype=np.float64) for name in NUMBERS
    }
    kinds = np.array([refusal(result) or "" for result in results], dtype=str)
    return case | numbers | {"kind": kinds, "error": np.array([_error(result) for result in results], dtype=str)}


NO_CASE: Final[Mapping[str, str | int]] = {
    "strategy": "",
    "knobs": "",
    "implementation": "",
    "kernel": "",
    "gpus": 0,
    "cluster": "",
    "tokens": 0,
    "mask": "",
    "heads": 0,
    "kv_heads": 0,
    "head_dim": 0,
    "dtype": "",
    "pass": "",
}
"""Columns of a case, with what stands there where it cannot be read."""


def _case(scenario: Scenario | CpsimError) -> Mapping[str, str | int]:
    if isinstance(scenario, CpsimError):
        return NO_CASE
    fields = scenario.to_dict() | {
        "strategy": scenario.strategy or "",
        "knobs": knobs_json(scenario),
        "tokens": scenario.num_tokens,
        "mask": scenario.mask if isinstance(scenario.mask, str) else json.dumps(dict(scenario.mask)),
    }
    return {name: fields[name] for name in NO_CASE}


def _error(result: Prediction | Infeasible | CpsimError) -> str:
    match result:
        case Prediction():
            return ""
        case Infeasible():
            return result.reason
        case error:
            return str(error)
