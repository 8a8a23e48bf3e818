"""Fits collectives, transfers and interference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from cpsim.calibrate.measurement import Point
from cpsim.calibrate.residuals import measured, usable
from cpsim.errors import ProfileError
from cpsim.models.network.collective import COLLECTIVES, CollectiveParams, Curve, channels, ring_channels, wire_bytes
from cpsim.models.network.interference import InterferenceParams
from cpsim.models.standin import StandIn

Floats = NDArray[np.float64]

FEWEST = (10, 2)
"""Sizes that a network curve needs; the second where no number of ranks has the first."""
KNOT_RATIO = 2.0
"""Between sizes of neighbouring knots of a network curve."""


def fit_curve(nbytes: Floats, seconds: Floats) -> Curve:
    """A monotone curve through noisy points: least squares of log time on the heights of fixed knots.

    Heights are the first knot's and non-negative steps, so the curve never falls.
    """
    low, high = float(nbytes.min()), float(nbytes.max())
    num = max(2, 1 + round(np.log(high / low) / np.log(KNOT_RATIO)))
    knots = np.geomspace(low, high, num)
    position = np.interp(np.log(nbytes), np.log(knots), np.arange(num))
    left = np.minimum(position.astype(int), num - 2)
    hat = np.zeros((len(nbytes), num))
    rows = np.arange(len(nbytes))
    hat[rows, left], hat[rows, left + 1] = 1 - (position - left), position - left
    steps = hat @ np.tril(np.ones((num, num)))
    bend = np.zeros((num - 2, num))  # a weak wish for straightness decides knots without points
    for i in range(num - 2):
        bend[i, i + 1 : i + 3] = -1e-2, 1e-2
    least = np.concatenate([[-np.inf], np.zeros(num - 1)])
    target = np.concatenate([np.log(seconds), np.zeros(num - 2)])
    heights = np.cumsum(lsq_linear(np.vstack([steps, bend]), target, bounds=(least, np.inf)).x)
    return Curve(nbytes=tuple(knots.tolist()), seconds=tuple(np.exp(heights).tolist()))


def fit_collective(chosen: Sequence[Point], everything: Sequence[Point], stand_in: StandIn | None) -> CollectiveParams:
    """Curves of collectives and transfers, and the capacity of a port from everything that ran at once."""
    points = [p for p in chosen if p["op"] in ("collective", "transfer")]
    inside = [p for p in chosen if p["op"] == "fabric" and p["kind"] == "inside"]
    theirs = stand_in.profile.collective if stand_in else None
    if theirs and not points:
        return theirs
    curves: dict[str, dict[int, Curve]] = {}
    for kind in COLLECTIVES:
        mine_by_ranks = {
            n: [p for p in points if p["kind"] == kind and p["num_ranks"] == n]
            for n in sorted({p["num_ranks"] for p in points if p["kind"] == kind})
        }
        most = max(map(len, mine_by_ranks.values()), default=0)
        for num_ranks, mine in mine_by_ranks.items():
            if len(mine) < FEWEST[most < FEWEST[0]]:  # too few aligned sizes: interpolated between group sizes instead
                continue
            wire = wire_bytes(kind, np.array([p["nbytes"] for p in mine]), num_ranks)
            curves.setdefault(kind, {})[num_ranks] = fit_curve(wire, measured(mine))
        if kind not in curves and theirs:
            curves[kind] = dict(theirs.curves[kind])
        elif kind not in curves:
            raise ProfileError(f"a profile needs {kind} points: add a file of cpsim.real.measure.network")
    rings = {number: fit_curve(*_columns(mine)) for number, mine in _by_channels([*points, *inside]).items()}
    if theirs:
        rings = {**theirs.rings, **rings}
    hop = {kind: _hop_seconds(by) for kind, by in curves.items()}
    port = _port(everything, max(points, key=lambda p: p["num_ranks"])["num_ranks"])
    return CollectiveParams(curves=curves, hop_s=hop, rings=rings, port_bytes_per_s=port)


def _by_channels(points: Sequence[Point]) -> dict[int, list[Point]]:
    """Messages of rings, and of those inside a node whose process group spans nodes, by NCCL's channels."""
    found: dict[int, list[Point]] = {}
    for p in points:
        if p["op"] == "fabric":
            number = ring_channels(p["nbytes"], p["num_nodes"] * p["gpus_per_node"], p["num_nodes"])
        elif p["op"] == "transfer" and p["kind"] == "ring":
            number = ring_channels(p["nbytes"], p["num_ranks"])
        else:
            continue
        found.setdefault(int(number), []).append(p)
    return dict(sorted(found.items()))


def _columns(points: Sequence[Point]) -> tuple[Floats, Floats]:
    return np.array([p["nbytes"] for p in points], float), measured(points)


def _hop_seconds(curves: Mapping[int, Curve]) -> float:
    """Latency that one more rank adds, from the smallest sizes."""
    few, many = min(curves), max(curves)
    return max(0.0, (curves[many].seconds[0] - curves[few].seconds[0]) / max(1, many - few))


def _port(points: Sequence[Point], num_ranks: int) -> float:
    """Highest wire rate of one port in one direction that any operation or pair of them reached; messages of rings tell
    it where nothing else was measured."""
    rates, messages = [0.0], [0.0]
    for p in points:
        if p["op"] == "transfer" and p["kind"] == "ring":
            messages.append(float(p["nbytes"]) / float(np.median(p["samples_s"])))
        if p["op"] == "collective" and usable(p):
            rates.append(float(wire_bytes(p["kind"], p["nbytes"], p["num_ranks"])) / float(np.median(p["samples_s"])))
        if p["op"] == "interference" and all(p[side].rsplit("_", 1)[-1].isdigit() for side in "ab"):
            rate = 0.0
            for side in "ab":
                kind, size = p[side].rsplit("_", 1)
                if kind.startswith(("fa", "math")):
                    break
                share = 1.0 if kind.startswith("ring") else (num_ranks - 1) / num_ranks
                together = p[f"{side}_together_s"]
                rate += int(size) * 2**20 * share / float(np.median(together)) if together else 0.0
            else:
                rates.append(rate)
    return max(rates) or max(messages)


def fit_interference(points: Sequence[Point]) -> InterferenceParams:
    """Slowdowns from overlaps, of all shapes together.

    How much a computation is slowed is seen both where it lies inside a communication and where a communication lies
    inside it; a communication's slowdown only where it lies inside.
    """
    computation, communication = overlaps([p for p in points if p["op"] == "overlap"])

    def factors(store: Spans) -> dict[str, dict[str, float]]:
        return {a: {b: _slowdown(spans) for b, spans in by.items()} for a, by in sorted(store.items())}

    return InterferenceParams(
        computation=factors(computation),
        communication=factors(communication),
    )


def errors_of_slowdowns(points: Sequence[Point]) -> tuple[Floats, Floats]:
    """log(predicted / measured) slowdowns of computations and of communications in overlaps, each by the others alone.

    Kinds of which there is one overlap are left out.
    """

    def errors(store: Spans) -> Floats:
        found = [
            np.log(_slowdown([*spans[:i], *spans[i + 1 :]]) / (beside / (beside - lost)))
            for by in store.values()
            for spans in by.values()
            for i, (beside, lost) in enumerate(spans)
            if len(spans) > 1 and lost < beside
        ]
        return np.array(found)

    computation, communication = overlaps([p for p in points if p["op"] == "overlap"])
    return errors(computation), errors(communication)


Spans = dict[str, dict[str, list[tuple[float, float]]]]
"""By the names of both ops: seconds that one ran beside the other, and what it lost in them."""
LEAST_OVERLAP: Final = 0.2
"""Share of an op's time during which another has to run beside it, for its loss to stand out from noise."""


def overlaps(points: Sequence[Point]) -> tuple[Spans, Spans]:
    """What computations lose beside communications, and the reverse."""
    computation: Spans = {}
    communication: Spans = {}
    for p in points:
        name, other = _names(p)
        alone, together = ([float(np.median(p[f"{s}_{how}_s"])) for s in "ab"] for how in ("alone", "together"))
        beside = min(together)
        for store, i in ((computation, 0), (communication, 1)):
            if beside > LEAST_OVERLAP * together[i] and (i == 0 or p["inside"] == "b"):
                lost = together[i] - alone[i]
                store.setdefault(name, {}).setdefault(other, []).append((beside, lost))
    return computation, communication


def _names(p: Point) -> tuple[str, str]:
    """Computation and communication of a point, as the interference model names them."""
    words = p["a"].rsplit("_", 2)  # kernel, pass, tokens
    name = f"{words[0]} {words[1]}" if len(words) > 2 else "memory-bound"
    return name, f"transfer {channels(p['nbytes'], p['num_ranks'])}" if p["b"] == "ring" else p["b"]


def _slowdown(spans: Sequence[tuple[float, float]]) -> float:
    """Time beside another op over what the same work takes alone, at least 1."""
    beside, lost = np.sum(spans, axis=0)
    return max(1.0, float(beside / (beside - lost))) if lost < beside else 1.0
