"""Draws of the cost models' errors, behind every interval and every probability of being the best.

Every cost model has a relative error, known from points that it was not fitted to. Part of it is the same wherever the
model is used, so all predictions share those draws, and comparisons do not count it twice; the rest belongs to the
shapes that a prediction uses, and run-to-run noise is its own, too. What is known of a network between nodes is wrong
in the same way for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.scenario import Scenario
from cpsim.models.cost_models import GROUPS, OF_ATTENTION
from cpsim.models.profile import Profile
from cpsim.strategies.others import implementation

Floats = NDArray[np.float64]

NUM_DRAWS: Final = 400
SHARED_VARIANCE: Final = 0.5
"""Share of a cost model's variance that all predictions have in common; assumed, not measured."""


@dataclass(frozen=True)
class Draws:
    """The draws of one prediction."""

    scenario: Scenario
    cluster: Cluster
    profile: Profile

    @property
    def _names(self) -> tuple[str, ...]:
        return OF_ATTENTION if self.scenario.model is None else GROUPS

    @cached_property
    def _errors(self) -> tuple[Floats, Floats]:
        """Errors that all predictions share, and this one's own, its noise last; in standard deviations."""
        label = f"{self.scenario.strategy} {sorted(self.scenario.knobs.items())} {self.scenario.pass_}"
        label += f" {self.scenario.parallel}" if self.scenario.model else ""
        num = len(self._names)
        common = np.random.default_rng(20251019).standard_normal((num, NUM_DRAWS))
        return common, np.random.default_rng(list(label.encode())).standard_normal((num + 1, NUM_DRAWS))

    def factor(self, name: str) -> Floats:
        """By how much what a cost model prices takes longer, ``[NUM_DRAWS]``; 1 for models of layers in attention."""
        if name not in self._names:
            return np.ones(NUM_DRAWS)
        common, own = self._errors
        i, shared = self._names.index(name), 1.0 if name.endswith("between nodes") else SHARED_VARIANCE
        error = np.sqrt(shared) * common[i] + np.sqrt(1.0 - shared) * own[i]
        return np.asarray(np.exp(self._sigma(name) * error))

    def noise(self) -> Floats:
        """By how much runs of one case differ, ``[NUM_DRAWS]``."""
        return np.asarray(np.exp(self.profile.sigma["run to run"] * self._errors[1][-1]))

    def along(self, parts_s: Mapping[str, float]) -> Floats:
        """Seconds of a critical path by cost model, drawn: exact to first order, since the derivative of a makespan
        with respect to a duration is 1 on that path and 0 elsewhere."""
        there = {name: seconds for name, seconds in parts_s.items() if seconds > 0}
        return np.asarray(sum((seconds * self.factor(name) for name, seconds in there.items()), np.zeros(NUM_DRAWS)))

    def _sigma(self, name: str) -> float:
        fabric, sigma = self.cluster.fabric, self.profile.sigma
        if name.endswith("between nodes"):
            if fabric is None:
                return 0.0
            return fabric.flow_sigma_log if name.startswith("transfer") else fabric.sigma_log
        if name.startswith("attention"):
            return float(sigma[f"{name} {self.scenario.kernel}"])
        if name == "host" and implementation(self.scenario.implementation).captured:
            return float(sigma["graph"])
        return float(sigma[name])
