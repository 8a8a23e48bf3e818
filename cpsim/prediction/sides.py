"""Two cases side by side, each as it is best run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError
from cpsim.prediction.advise import advise
from cpsim.prediction.predict import predict
from cpsim.prediction.results import Prediction
from cpsim.prediction.step_advice import advise_step
from cpsim.runtime.processes import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One case."""

    name: str
    scenario: Scenario
    """As it was asked."""
    prediction: Prediction
    """Of the best way to run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Two cases, and how much longer the second takes for the same work."""

    a: Side
    b: Side
    ratio: float
    """Seconds of a token of B over those of A."""
    ratio_low: float
    """5th percentile; errors that both share cancel."""
    ratio_high: float
    """95th percentile."""

    def differing(self) -> dict[str, tuple[Any, Any]]:
        """Fields that were asked for otherwise, in both values."""
        a, b = self.a.scenario.to_dict(), self.b.scenario.to_dict()
        return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def sides(a: Scenario, b: Scenario, names: tuple[str, str], progress: Progress | None = None) -> Sides:
    """Predicts both.

    Args:
        a, b: the cases; what they leave open is chosen for each.
        names: of both.
        progress: called while ways are tried.

    Raises:
        InfeasibleError: one of them cannot run; says which and why.
    """
    one, other = (
        Side(name=name, scenario=case, prediction=_best(case, progress))
        for name, case in zip(names, (a, b), strict=True)
    )
    tokens = np.array([a.num_tokens, b.num_tokens])
    draws = np.array([one.prediction.draws_s, other.prediction.draws_s]) / tokens[:, None]
    ratio = draws[1] / draws[0]
    seconds = np.array([one.prediction.time_s, other.prediction.time_s]) / tokens
    return Sides(
        a=one,
        b=other,
        ratio=float(seconds[1] / seconds[0]),
        ratio_low=float(np.quantile(ratio, 0.05)),
        ratio_high=float(np.quantile(ratio, 0.95)),
    )


def _best(case: Scenario, progress: Progress | None) -> Prediction:
    """Of what is recommended for a case, or of the case itself where it leaves nothing open."""
    if case.is_step and (case.strategy is None or case.parallel is None):
        advice = advise_step(case, progress)
        best = advice.recommended or (advice.nearest[0] if advice.nearest else None)
        if best is None:
            raise InfeasibleError(advice.refused[0].reason if advice.refused else "no way to cut this step")
        return best.prediction
    if not case.is_step and case.strategy is None:
        tried = advise(case, progress)
        if not tried.candidates:
            raise InfeasibleError(tried.infeasible[0].reason if tried.infeasible else "no strategy can run this case")
        return predict(tried.candidates[0].scenario.model_copy(update={"pass_": case.pass_}))
    return predict(case)
