"""Draws of the cost models' errors, behind every interval and every probability of being the best.

Every cost model has a relative error, known from points that it was not fitted to. Part of it is the same wherever the
model is used, so all predictions share those draws, and comparisons do not count it twice; the rest belongs to the
shapes that a prediction uses, and run-to-run noise is its own, too. What is known of a network between nodes is wrong
in the same way for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.masks.tiles import sequences
from cpsim.models.cost_models import GROUPS, OF_ATTENTION
from cpsim.models.profile import Profile
from cpsim.models.spread import late
from cpsim.schedule.schedule import Schedule

Floats = NDArray[np.float64]

NUM_DRAWS: Final = 400
SHARED_VARIANCE: Final = 0.5
"""Share of a cost model's variance that all predictions have in common; assumed, not measured."""
NOISE: Final = "run to run"
WIDER: Final = 1.3
"""By how much intervals are wider than errors of parts make them, in logarithms: so that 90 % of the runs of a
machine that was not looked at lie inside, as ``python docs/machines.py`` finds. The only number that whole runs set; it
moves no estimate."""


@dataclass(frozen=True)
class Draws:
    """The draws of one prediction."""

    sigma: Mapping[str, float]
    """Standard deviation of the logarithm of every cost model's error, and of ``NOISE``."""
    names: tuple[str, ...]
    """Cost models that are drawn; others are taken as exact."""
    seed: tuple[int, ...]
    """What the prediction's own errors follow from; see ``seed_of``."""
    steady: bool = False
    """GPUs are under seconds of load: now and then much slower than they mostly are, hardly ever much faster."""

    @cached_property
    def _errors(self) -> tuple[Floats, Floats]:
        """Errors that all predictions share, and this one's own, its noise last; in standard deviations."""
        num = len(self.names)
        common = np.random.default_rng(20251019).standard_normal((num, NUM_DRAWS))
        return common, np.random.default_rng(self.seed).standard_normal((num + 1, NUM_DRAWS))

    def factor(self, name: str) -> Floats:
        """Factors on what a cost model prices, ``[NUM_DRAWS]``; 1 for models that are not drawn."""
        if name not in self.names:
            return np.ones(NUM_DRAWS)
        common, own = self._errors
        i, shared = self.names.index(name), 1.0 if name.endswith("between nodes") else SHARED_VARIANCE
        error = np.sqrt(shared) * common[i] + np.sqrt(1.0 - shared) * own[i]
        return np.asarray(np.exp(self.sigma[name] * error))

    def noise(self) -> Floats:
        """Factors by which runs of one case differ, GPU by GPU, ``[NUM_DRAWS]``."""
        own = self._errors[1][-1]
        return np.asarray(np.exp(self.sigma[NOISE] * (late(own) if self.steady else own)))

    @staticmethod
    def around(seconds: float, drawn: Floats) -> Floats:
        """Drawn times, as far from an estimate as runs of whole machines are."""
        return np.asarray(seconds * (drawn / seconds) ** WIDER)

    def along(self, parts_s: Mapping[str, float]) -> Floats:
        """Seconds of a critical path by cost model, drawn: exact to first order, since the derivative of a makespan
        with respect to a duration is 1 on that path and 0 elsewhere."""
        there = {name: seconds for name, seconds in parts_s.items() if seconds > 0}
        return np.asarray(sum((seconds * self.factor(name) for name, seconds in there.items()), np.zeros(NUM_DRAWS)))


def draws_of(
    profile: Profile,
    cluster: Cluster,
    kernel: str,
    *,
    captured: bool,
    layers: bool,
    steady: bool = False,
    seed: Sequence[int],
) -> Draws:
    """The draws of one prediction.

    Args:
        profile: whose errors.
        cluster: with the errors of its network between nodes.
        kernel: attention kernel.
        captured: hosts launch CUDA graphs.
        layers: cost models of layers are drawn, too.
        steady: iterations run back to back, as long as it takes to heat a GPU.
        seed: of the prediction's own errors.
    """
    fabric, names = cluster.fabric, GROUPS if layers else OF_ATTENTION
    sigma = {NOISE: float(profile.sigma.get("sustained", profile.sigma[NOISE]) if steady else profile.sigma[NOISE])}
    for name in names:
        if name == "transfer between nodes":
            sigma[name] = fabric.flow_sigma_log if fabric else 0.0
        elif name == "collective between nodes":
            sigma[name] = fabric.sigma_log if fabric else 0.0
        elif name.startswith("attention"):
            sigma[name] = float(profile.sigma.get(f"{name} {kernel}", 0.0))  # of a kernel that lacks the pass
        elif name == "host" and not captured:
            sigma[name] = float(np.hypot(profile.sigma["host"], profile.sigma["host thread"]))
        else:
            sigma[name] = float(profile.sigma["graph" if name == "host" else name])
    return Draws(sigma, names, tuple(seed), steady)


def seed_of(*given: Schedule | str) -> tuple[int, ...]:
    """A seed that equal schedules and words have in common, whatever strategy made them."""
    return tuple(crc32(one.encode()) if isinstance(one, str) else _content(one) for one in given)


def _content(schedule: Schedule) -> int:
    """Checksum of what a schedule's costs follow from: its ops, lanes, dependencies and the shapes of its calls."""
    shapes, found = sequences(schedule.tiles), 0
    for column in (
        schedule.kind,
        schedule.nbytes,
        schedule.lane_start,
        schedule.lane_rank,
        schedule.lane_stream,
        schedule.dep_start,
        schedule.dep,
        schedule.heads,
        schedule.tile,
        shapes.start,
        shapes.q_len,
        shapes.k_len,
        shapes.causal,
    ):
        found = crc32(np.ascontiguousarray(column).data, found)
    return found
