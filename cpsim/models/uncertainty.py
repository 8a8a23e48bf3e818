"""Draws of the cost models' errors, behind every interval and every probability of being the best.

Every cost model has a relative error, known from points that it was not fitted to. Part of it is the same wherever the
model is used, so all predictions share those draws, and comparisons do not count it twice; the rest belongs to the
shapes that a prediction uses, and run-to-run noise is its own, too. What a machine is, all strategies find alike: the
pace of its hosts, the heat of its GPUs, and its network between nodes. Threads of one host differ by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
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
"""Share of a cost model's variance that all predictions have in common; assumed, not measured. How often what is called
the best is the best, ``python docs/machines.py`` finds."""
NOISE: Final = "run to run"
AT_ONCE: Final = 2**18
"""Numbers of a column whose checksum is made at a time: offsets count as 64 bits, whatever they are stored in."""
WIDER: Final = 1.3
"""By how much intervals are wider than errors of parts make them, in logarithms: so that 90 % of the runs of a
machine that was not looked at lie inside, as ``python docs/machines.py`` finds. The only number that whole runs set; it
moves no estimate."""


@dataclass(frozen=True)
class Draws:
    """The draws of one prediction."""

    sigma: Mapping[str, float]
    """Standard deviation of the logarithm of every cost model's error, and of ``NOISE``."""
    shared: Mapping[str, float]
    """Shares of their variances that all predictions have in common, 0 to 1."""
    names: tuple[str, ...]
    """Cost models that are drawn; others are taken as exact."""
    seed: tuple[int, ...]
    """What the prediction's own errors follow from; see ``seed_of``."""
    steady: bool = False
    """GPUs are under seconds of load: now and then much slower than they mostly are, hardly ever much faster."""

    @cached_property
    def _errors(self) -> tuple[Floats, Floats]:
        """Errors that all predictions share, and this one's own, noise last; in standard deviations."""
        shape = len(self.names) + 1, NUM_DRAWS
        common = np.random.default_rng(20251019).standard_normal(shape)
        return common, np.random.default_rng(self.seed).standard_normal(shape)

    def factor(self, name: str) -> Floats:
        """Factors on what a cost model prices, ``[NUM_DRAWS]``; 1 for models that are not drawn."""
        if name not in self.names:
            return np.ones(NUM_DRAWS)
        return np.asarray(np.exp(self.sigma[name] * self._error(self.names.index(name), name)))

    def noise(self) -> Floats:
        """Factors by which runs of one case differ, ``[NUM_DRAWS]``."""
        error = self._error(-1, NOISE)
        return np.asarray(np.exp(self.sigma[NOISE] * (late(error) if self.steady else error)))

    def _error(self, i: int, name: str) -> Floats:
        """In standard deviations, ``[NUM_DRAWS]``."""
        (common, own), shared = self._errors, self.shared[name]
        return np.asarray(np.sqrt(shared) * common[i] + np.sqrt(1.0 - shared) * own[i])

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
    noise, shared = float(profile.sigma[NOISE]), dict.fromkeys(names, SHARED_VARIANCE)
    load = max(noise, float(profile.sigma.get("sustained", noise))) if steady else noise
    sigma, shared[NOISE] = {NOISE: load}, 1.0 - (noise / load) ** 2  # what load adds is the machine's
    for name in names:
        if name.endswith("between nodes"):
            flows = name.startswith("transfer")
            sigma[name], shared[name] = (fabric.flow_sigma_log if flows else fabric.sigma_log) if fabric else 0.0, 1.0
        elif name.startswith("attention"):
            sigma[name] = float(profile.sigma.get(f"{name} {kernel}", 0.0))  # of a kernel that lacks the pass
        elif name == "host" and not captured:
            sigma[name], shared[name] = _together(profile.sigma["host"], profile.sigma["host thread"])
        else:
            sigma[name] = float(profile.sigma["graph" if name == "host" else name])
    return Draws(sigma, shared, names, tuple(seed), steady)


def _together(of_machine: float, own: float) -> tuple[float, float]:
    """Standard deviation of two errors, and the share of its variance that one machine has in common."""
    both = float(np.hypot(of_machine, own))
    return both, (of_machine / both) ** 2 if both else 0.0


def chances(draws: Floats) -> Floats:
    """Share of draws in which each of several ways is the fastest, ``[ways]``; of ``draws`` ``[ways, NUM_DRAWS]``.

    Equal ones share.
    """
    best = draws == draws.min(axis=0)
    return np.asarray((best / best.sum(axis=0)).mean(axis=1))


def seed_of(words: str, *contents: int) -> tuple[int, ...]:
    """A seed that equal words and schedules of equal ``content`` have in common, whatever strategy made them."""
    return (crc32(words.encode()), *contents)


def content(schedule: Schedule) -> int:
    """Checksum of what a schedule's costs follow from: its ops, lanes, dependencies and the shapes of its calls."""
    s, shapes, found = schedule, sequences(schedule.tiles), 0
    columns: tuple[tuple[Any, Callable[[Any], Any] | None], ...] = (
        (s.kind, None),
        (s.nbytes, None),
        (s.lane_start, np.int64),
        (s.lane_rank, None),
        (s.lane_stream, None),
        (s.dep_start, np.int64),
        (s.dep, None),
        (s.head_row, lambda rows: s.head_rows[rows]),
        (s.tile, None),
        (shapes.start, None),
        (shapes.q_len, None),
        (shapes.k_len, None),
        (shapes.causal, None),
    )
    for column, meant in columns:
        for first in range(0, len(column), AT_ONCE):
            some = column[first : first + AT_ONCE]
            found = crc32(np.ascontiguousarray(meant(some) if meant else some).data, found)
    return found
