"""The best way to run a case, as ``advise`` finds it, at a fraction of its price: for maps of many cases.

All ways are tried that ``advise`` tries. What is left out is what only a table of all of them needs: backward passes of
ways that are too slow already, and draws of those that are not near the fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError, InfeasibleError, NotMeasuredError
from cpsim.prediction.advise import candidates_of
from cpsim.prediction.case import Case, resolve
from cpsim.prediction.nearest import stand_ins
from cpsim.prediction.passes import PassResult
from cpsim.prediction.predict import TOO_LARGE, of_passes, run_passes, window_s
from cpsim.prediction.results import TIE, Infeasible, recommended, refused, tied
from cpsim.schedule.schedule import Pass

NEAR: Final = 1.05
"""Ways that take more than so many times the fastest are not asked whether they can be told from it."""
assert NEAR >= 1 + TIE


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortWay:
    """A way to run a case that is near the fastest."""

    scenario: Scenario
    total_s: float
    """Forward and backward."""
    draws_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """Ways near the fastest, or why there is none."""

    ways: tuple[ShortWay, ...] = ()
    """Fastest first."""
    refused: tuple[Infeasible, ...] = ()
    stands_in: str | None = None
    """The kernel whose answers these are, where that of the case was not measured."""

    @property
    def recommended(self) -> ShortWay | None:
        """What ``advise`` recommends."""
        return recommended(self.ways)

    @property
    def tied(self) -> tuple[ShortWay, ...]:
        """The fastest, and those that are near and cannot be told from it."""
        return tied(self.ways)


def shortlist(scenario: Scenario, first: Sequence[str] = ()) -> Shortlist:
    """The ways that are near the fastest.

    Args:
        scenario: attention or a layer; what it leaves open is chosen.
        first: strategies that are probably fast; the sooner the fastest is known, the less has to be computed.

    Raises:
        ScenarioError, ProfileError: as ``advise``.
    """
    try:
        found = _shortlist(scenario, first)
    except NotMeasuredError:
        found = None
    if found and (found.ways or all(one.kind != "not_measured" for one in found.refused)):
        return found
    for other in stand_ins(scenario):
        with suppress(CpsimError):
            instead = _shortlist(other, first)
            if instead.ways:
                return Shortlist(ways=instead.ways, refused=instead.refused, stands_in=other.kernel)
    return found or _shortlist(scenario, first)  # which raises


def _shortlist(scenario: Scenario, first: Sequence[str]) -> Shortlist:
    ways = candidates_of(scenario)
    no: list[Infeasible] = [way for way in ways if isinstance(way, Infeasible)]
    found: dict[int, tuple[float, Case, Mapping[Pass, PassResult]]] = {}
    fastest = float("inf")
    for i in _order(ways, first):
        way = ways[i]
        if isinstance(way, Infeasible):
            continue
        try:
            case = resolve(way)
            passes = run_passes(case, NEAR * fastest)
        except InfeasibleError as reason:
            no.append(refused(way, reason))
        except MemoryError:
            no.append(Infeasible(scenario=way, reason=TOO_LARGE, kind=None))
        else:
            if len(passes) == len(way.passes):
                found[i] = window_s(case, passes), case, passes
                fastest = min(fastest, found[i][0])
                found = {at: one for at, one in found.items() if one[0] <= NEAR * fastest}  # others need no memory
    drawn = [
        ShortWay(scenario=found[i][1].scenario, total_s=found[i][0], draws_s=of_passes(*found[i][1:]).draws_s)
        for i in sorted(found)
    ]
    return Shortlist(ways=tuple(sorted(drawn, key=lambda w: (w.total_s, len(w.scenario.knobs)))), refused=tuple(no))


def _order(ways: Sequence[Scenario | Infeasible], first: Sequence[str]) -> list[int]:
    """The first setting of every strategy, those first that are probably fast; then all others in the same order."""
    seen: Counter[str] = Counter()
    places = []
    for i, way in enumerate(ways):
        name = str(way.strategy) if isinstance(way, Scenario) else ""
        places.append((seen[name] > 0, first.index(name) if name in first else len(first), i))
        seen[name] += 1
    return [i for *_, i in sorted(places)]
