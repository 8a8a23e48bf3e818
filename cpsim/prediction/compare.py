"""Predictions beside measurements: errors, bias, interval coverage, and whether the predicted best is the best.

An error is predicted over measured time, less one: negative where the prediction is too fast. A choice is between
cases that are the same in everything but strategy, knobs and implementation.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from cpsim.case.files import read_documents
from cpsim.case.gpu import find_gpu, gpu_of_driver
from cpsim.case.load import scenario_from
from cpsim.case.resolve import cluster_of
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError, ProfileError
from cpsim.models.uncertainty import chances
from cpsim.prediction.results import Infeasible, Prediction
from cpsim.prediction.runs import FORMAT, Run, case_key

if TYPE_CHECKING:
    from cpsim.runtime.processes import Progress

LONG_S: Final = 1e-3
"""Errors are given apart for cases from here on and below: short ones are launches, long ones kernels and links."""

TIE: Final = 0.01
"""Measured times no further apart are a tie: two runs of one case differ by as much (docs/validation.md)."""

MAX_S: Final = 1e9
"""No prediction is longer."""

TIMES: Final = ("time_s", "time_s_low", "time_s_high")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a line of predictions says of one case; without the planning that it charges, which runs do not time."""

    scenario: Scenario
    time_s: float = 0.0
    time_s_low: float = 0.0
    time_s_high: float = 0.0
    error: str | None = None
    is_apart: bool = False
    """Forward and backward, each alone; otherwise both in one window."""
    draws_s: tuple[float, ...] = ()
    """As ``Prediction.draws_s``; empty where they were read from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One case, predicted and measured."""

    predicted: Predicted
    run: Run

    @property
    def scenario(self) -> Scenario:
        """The case."""
        return self.run.scenario

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.predicted.time_s / self.run.time_s - 1

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.predicted.time_s_low <= self.run.time_s <= self.predicted.time_s_high

    @property
    def is_long(self) -> bool:
        """Whether the case took ``LONG_S`` or more."""
        return self.run.time_s >= LONG_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of several pairs."""

    num: int
    mean_absolute: float
    bias: float
    """Mean of the signed errors."""
    worst: float
    """The signed error of largest size."""
    covered: float
    """Share of the measurements inside their intervals, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Ways to compute the same thing; the first is the predicted best."""

    pairs: tuple[Pair, ...]
    """At least two, by predicted time."""

    @property
    def best(self) -> Pair:
        """The measured best."""
        return min(self.pairs, key=lambda pair: pair.run.time_s)

    @property
    def is_right(self) -> bool:
        """Whether the predicted best is the measured best."""
        return self.pairs[0] is self.best

    @property
    def is_tied(self) -> bool:
        """Whether the predicted best is the measured best, or too close to it for a measurement to tell."""
        return self.regret <= TIE

    @property
    def regret(self) -> float:
        """How much longer the predicted best takes than the measured best, as a share; 0 where it is right."""
        return self.pairs[0].run.time_s / self.best.run.time_s - 1

    def chances(self) -> list[tuple[float, bool]]:
        """Of every way, by predicted time, its probability of being the best, and whether it was.

        One that was measured several times counts once, by its median. Needs predictions with draws.
        """
        ways = list(grouped(self.pairs, lambda pair: pair.run.key).values())
        times = [median(pair.run.time_s for pair in pairs) for pairs in ways]
        won = chances(np.array([pairs[0].predicted.draws_s for pairs in ways]))
        return [(float(chance), seconds == min(times)) for chance, seconds in zip(won, times, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that two files say about each other."""

    pairs: tuple[Pair, ...]
    """Worst first."""
    failed: tuple[tuple[Scenario, str], ...] = ()
    """Cases that could not be run or predicted, and why."""
    unmatched: tuple[tuple[Scenario, str], ...] = ()
    """Cases that only one of the files has, and which."""

    def choices(self, implementation: str | None = None) -> list[Choice]:
        """Choices among all ways, or those of one implementation; largest regret first."""
        mine = [p for p in self.pairs if implementation in (None, p.scenario.implementation)]
        groups = grouped(mine, lambda pair: group_key(pair.scenario)).values()
        ways = (sorted(group, key=lambda pair: pair.predicted.time_s) for group in groups)
        found = (Choice(pairs=tuple(pairs)) for pairs in ways if len({case_key(p.scenario) for p in pairs}) > 1)
        return sorted(found, key=lambda choice: -choice.regret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """Probabilities of being the best, of all ways of several choices, beside how often they were."""

    num: int
    """Ways."""
    stated: float
    """Mean probability, 0 to 1."""
    was: float
    """Share that was the best, 0 to 1."""
    brier: float
    """Mean square of probability less outcome (1 or 0): Brier 1950, "Verification of forecasts expressed in terms of
    probability"."""


def chances_of(found: Sequence[tuple[float, bool]]) -> Chances:
    """Of at least one probability and whether it came true."""
    stated, was = np.array(found, float).T
    brier = float(((stated - was) ** 2).mean())
    return Chances(num=len(found), stated=float(stated.mean()), was=float(was.mean()), brier=brier)


def errors_of(pairs: Sequence[Pair]) -> Errors:
    """Errors of at least one pair."""
    errors = [pair.error for pair in pairs]
    return Errors(
        num=len(pairs),
        mean_absolute=sum(map(abs, errors)) / len(errors),
        bias=sum(errors) / len(errors),
        worst=max(errors, key=abs),
        covered=sum(pair.is_covered for pair in pairs) / len(pairs),
    )


def grouped(entries: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Entries by key, in order of their first appearance."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return dict(groups)


def group_key(scenario: Scenario) -> str:
    """Text that is equal for scenarios that one would choose between: all is equal but how and by whom it is done."""
    fields = json.loads(case_key(scenario))
    return json.dumps({k: v for k, v in fields.items() if k not in ("strategy", "knobs", "implementation", "compile")})


def compare(predictions: Iterable[Predicted], runs: Iterable[Run]) -> Comparison:
    """Join by case; of several predictions of a case the last counts, of several runs each."""
    by_key = {(case_key(entry.scenario), entry.is_apart): entry for entry in predictions}
    pairs, failed, unmatched = [], [], []
    used = set()
    for run in runs:
        found = by_key.get((run.key, run.is_apart)) or by_key.get((run.key, False))
        used.add(run.key)
        if run.error is not None:
            failed.append((run.scenario, f"run: {run.error}"))
        elif elsewhere := _other_gpu(run):
            failed.append((run.scenario, elsewhere))
        elif found is None:
            unmatched.append((run.scenario, "measured, not predicted"))
        elif found.error is not None:
            failed.append((run.scenario, f"prediction: {found.error}"))
        else:
            pairs.append(Pair(predicted=found, run=run))
    unmatched += [(p.scenario, "predicted, not measured") for (key, _), p in by_key.items() if key not in used]
    pairs.sort(key=lambda pair: -abs(pair.error))
    return Comparison(pairs=tuple(pairs), failed=tuple(failed), unmatched=tuple(unmatched))


def _other_gpu(run: Run) -> str:
    """Why a run says nothing about the GPU of its cluster; empty where it does."""
    try:
        cluster, where = cluster_of(run.scenario), str(run.header.get("gpu", ""))
    except CpsimError as error:
        return f"run: {error}"
    mine, theirs, known = cluster.gpu.name, gpu_of_driver(where), find_gpu(cluster.gpu.name)
    if mine == where or (where != "cpu" and (theirs is None or known is None or theirs == known)):
        return ""
    return f"run: measured on {where}, but {cluster.name} has {mine}"


def predict_runs(runs: Sequence[Run], progress: Progress | None = None, jobs: int | None = None) -> list[Predicted]:
    """Predictions of the cases that were measured, on several processes; on all cores where ``jobs`` is None.

    Passes that were timed apart are predicted apart.
    """
    from cpsim.prediction.predict import predict_many

    cases = {(run.key, run.is_apart): run.scenario for run in runs if run.error is None}
    asked = [
        [s.model_copy(update={"pass_": pass_}) for pass_ in s.passes] if is_apart else [s]
        for (_, is_apart), s in cases.items()
    ]
    found = iter(predict_many([one for several in asked for one in several], jobs, progress, timelines=False))
    return [
        _predicted(scenario, [next(found) for _ in several], is_apart)
        for ((_, is_apart), scenario), several in zip(cases.items(), asked, strict=True)
    ]


def _predicted(
    scenario: Scenario, results: Sequence[Prediction | Infeasible | CpsimError], is_apart: bool
) -> Predicted:
    """A case's prediction from those of its windows."""
    for result in results:
        if not isinstance(result, Prediction):
            reason = result.reason if isinstance(result, Infeasible) else str(result)
            return Predicted(scenario=scenario, error=reason, is_apart=is_apart)
    windows = [result for result in results if isinstance(result, Prediction)]
    planning = sum(window.parts_s.get("planning", 0.0) for window in windows)
    draws = np.sum([window.draws_s for window in windows], axis=0) - planning
    low, high = np.quantile(draws, (0.05, 0.95)).tolist()
    return Predicted(
        scenario=scenario,
        time_s=sum(window.time_s for window in windows) - planning,
        time_s_low=low,
        time_s_high=high,
        is_apart=is_apart,
        draws_s=tuple(draws.tolist()),
    )


def load_predictions(path: Path) -> list[Predicted]:
    """Reads what ``cpsim predict --out`` wrote; lines that are not about a scenario are left out.

    Raises:
        ProfileError: one line that names the file, the line and what is wrong with it.
        ScenarioError: the file cannot be read.
    """
    found = []
    for place, line in read_documents(path):
        if isinstance(line, CpsimError):
            raise ProfileError(str(line))
        if not isinstance(line, dict) or line.get("format") == FORMAT:
            kind = "a file of real runs" if isinstance(line, dict) else type(line).__name__
            raise ProfileError(f"{place}: expected predictions, got {kind}; a file of runs begins with its header")
        if "scenario" in line:
            found.append(_read(place, line))
    return found


def _read(place: str, line: dict[str, Any]) -> Predicted:
    try:
        scenario = scenario_from(line["scenario"])
    except CpsimError as error:
        raise ProfileError(f"{place}: scenario: {error}") from None
    if "error" in line:
        return Predicted(scenario=scenario, error=str(line["error"]))
    parts = line.get("parts_s", {})
    planning = _seconds(place, "planning", parts.get("planning", 0.0) if isinstance(parts, dict) else None)
    time_s, low, high = (_seconds(place, name, line.get(name), above=planning) - planning for name in TIMES)
    return Predicted(scenario=scenario, time_s=time_s, time_s_low=low, time_s_high=high)


def _seconds(place: str, name: str, value: object, above: float = -1.0) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and above < value <= MAX_S:
        return float(value)
    raise ProfileError(f"{place}: {name} must be seconds, above 0; is this a file of `cpsim predict --out`?")
