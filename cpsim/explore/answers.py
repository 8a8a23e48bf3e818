"""Answers as they come: every case is computed once, strategy by strategy, in processes that are warm."""

from __future__ import annotations

import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from cpsim.case.load import scenario_from
from cpsim.case.scenario import Scenario
from cpsim.models.profile import load_profile, shipped_profiles
from cpsim.prediction.advise import Evaluated, candidates_of, evaluate, rank
from cpsim.prediction.predict import predict
from cpsim.prediction.results import Advice, Candidate, Infeasible, Prediction, knobs_json
from cpsim.prediction.runs import case_key
from cpsim.report.frontier import Cell, best_in, cells, known_knobs
from cpsim.runtime.processes import begin_worker, stop

T = TypeVar("T")
KEPT: Final = 32
"""Cases whose answers are kept."""
WORKERS: Final = max(2, min(6, os.cpu_count() or 1))
FIRST: Final = 4
"""Strategies that were the best in the case before, and are tried first; of the others those that take longest are
tried first, lest one process is left with them at the end."""
LIKELY: Final = ("loongtrain", "usp", "ulysses", "hybrid_cp", "allgather", "magi", "zigzag_ring")
"""What is tried first in a first case."""
WARM: Final = {"gpus": 16, "cluster": "dgx-h200", "tokens_per_gpu": 1024, "heads": 8, "kv_heads": 8}
DETAILED: Final = ("timeline", "memory", "mask")
"""Views of one strategy, which need its timelines."""
PLANNING: Final = "being planned, which takes seconds; its row comes when it is done"


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """Pieces of one answer, as far as they are done; each with the seconds that it took."""

    page: str
    """Who asks: a page, which looks at one case at a time."""
    pieces: tuple[Future[tuple[T, float]], ...] = ()

    @property
    def done(self) -> list[T]:
        """Pieces that are there, in order.

        Raises:
            CpsimError: what a piece raised.
        """
        return [piece.result()[0] for piece in self.pieces if piece.done() and not piece.cancelled()]

    @property
    def is_complete(self) -> bool:
        return all(piece.done() for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of what a page asks."""

    advice: Advice
    chosen: Candidate | None = None
    """The strategy whose details are shown, with its timelines."""
    cells: tuple[Cell, ...] = ()
    """Cells of the map, where it was asked for."""
    left_out: tuple[str, ...] = ()
    """Strategies that nobody has asked for, and that are not tried unless somebody does."""
    done: int
    """Pieces that are there."""
    total: int

    @property
    def is_complete(self) -> bool:
        return self.done == self.total


class Answers:
    """Recommendations, maps and timelines of cases, computed once; safe to use from several threads."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin)
        self._warm = [self._pool.submit(warm_up) for _ in range(workers)]
        self._lock = Lock()
        self._jobs: OrderedDict[str, Job[Any]] = OrderedDict()
        self._details: OrderedDict[str, Candidate] = OrderedDict()
        self._order: list[str] = []
        self._seconds: dict[str, float] = {}
        self._workers = workers
        self.expected_s = math.inf
        """Seconds until a ranking is whole, if it takes as long as the last."""

    @cached_property
    def _planner(self) -> ProcessPoolExecutor:
        """A process of its own for strategies that are left out of rankings, because planning takes seconds."""
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)

    def close(self) -> None:
        """Ends the processes; what is not done is dropped."""
        for pool in (self._pool, self.__dict__.get("_planner")):
            if pool:
                stop(pool)

    @property
    def is_warm(self) -> bool:
        """Whether costs are loaded and engines compiled, which takes minutes once after an installation."""
        return all(one.done() for one in self._warm)

    def ask(self, scenario: Scenario, page: str, view: str, strategy: str | None, patience_s: float) -> Known:
        """What is known after a short wait, with at least one strategy in it.

        Args:
            scenario: the case, without a strategy.
            page: who asks.
            view: ``map`` is computed where it is asked for, once the ranking is whole; ``timeline``, ``memory`` and
                ``mask`` show details of a strategy.
            strategy: whose details are shown, None for the best. One that is left out of rankings, because planning
                takes seconds, is planned in the background.
            patience_s: how long the answer may wait to be whole.

        Raises:
            ScenarioError, ProfileError: the case cannot be answered.
        """
        until = time.monotonic() + patience_s
        tried, jobs, left_out = self._tried(scenario, page, strategy, patience_s)
        advice = rank(scenario, tried)
        whole = all(job.is_complete for job in jobs)
        found: list[Cell] = []
        if view == "map" and whole:
            jobs.append(self._map(advice, page))
            wait(jobs[-1].pieces, timeout=max(0.0, until - time.monotonic()))
            found = jobs[-1].done
        chosen = None
        if view in DETAILED:
            chosen = next((c for c in advice.candidates if strategy in (None, c.scenario.strategy)), None)
        pieces = [piece for job in jobs for piece in job.pieces]
        return Known(
            advice=advice,
            chosen=chosen and self._detailed(chosen),
            cells=tuple(found),
            left_out=left_out,
            done=sum(piece.done() for piece in pieces),
            total=len(pieces) + (view == "map" and not whole),
        )

    def _tried(
        self, scenario: Scenario, page: str, strategy: str | None, patience_s: float
    ) -> tuple[list[Evaluated], list[Job[Any]], tuple[str, ...]]:
        """What was tried so far, the jobs that try it, and what is left out."""
        asked = candidates_of(scenario)
        job: Job[Evaluated] = self._job(page, "ranking", scenario, asked, lambda way: (evaluate, way), self._soonest)
        planned: dict[str, Job[Evaluated]] = {}
        left_out = [str(way.scenario.strategy) for way in asked if isinstance(way, Infeasible)]
        for name in left_out:
            named = scenario.model_copy(update={"strategy": name})
            if name == strategy or _key("planned", named) in self._jobs:
                planned[name] = self._job(page, "planned", named, candidates_of(named), None, self._soonest)
        jobs = [job, *planned.values()]
        _, missing = wait([piece for job in jobs for piece in job.pieces], timeout=patience_s)
        while missing and all(isinstance(tried, Infeasible) for tried in job.done):
            _, missing = wait(missing, return_when=FIRST_COMPLETED)
        if job.is_complete:
            self._remember(scenario, job)
        tried = [one for one in job.done if not (isinstance(one, Infeasible) and one.scenario.strategy in planned)]
        for name, of_name in planned.items():
            named = scenario.model_copy(update={"strategy": name, "pass_": "fwd_bwd"})
            tried += of_name.done if of_name.is_complete else [Infeasible(scenario=named, reason=PLANNING)]
        return tried, jobs, tuple(name for name in left_out if name not in planned)

    def _map(self, advice: Advice, page: str) -> Job[Cell]:
        """The map around the case of a whole recommendation."""
        known = known_knobs(advice)
        asked = cells(advice.scenario)
        return self._job(page, "map", advice.scenario, asked, lambda cell: (best_in, cell, known), _largest)

    def _detailed(self, candidate: Candidate) -> Candidate:
        """The candidate with the timelines of both passes."""
        if candidate.forward.timelines:
            return candidate
        key = _key("details", candidate.scenario)
        found = self._details.get(key)
        if found is None:
            forward, backward = predict(candidate.forward.scenario), predict(candidate.backward.scenario)
            found = replace(candidate, forward=forward, backward=backward)
            with self._lock:
                self._details[key] = found
                while len(self._details) > 4:  # timelines are large
                    self._details.popitem(last=False)
        return found

    def _remember(self, scenario: Scenario, job: Job[Evaluated]) -> None:
        """What was the best, and how long everything took: for the order of the next case, and how long it may take."""
        self._order = [_way(candidate.scenario) for candidate in rank(scenario, job.done).candidates[:FIRST]]
        for tried, seconds in (piece.result() for piece in job.pieces):
            self._seconds[_way(_scenario(tried))] = seconds
        self.expected_s = sum(piece.result()[1] for piece in job.pieces) / self._workers

    def _soonest(self, way: Scenario | Infeasible) -> tuple[int, float]:
        """Sorts what was the best in the last case first, then what takes long; in a first case what often is best."""
        scenario = _scenario(way)
        if _way(scenario) in self._order:
            return 0, self._order.index(_way(scenario))
        often = [*LIKELY, str(scenario.strategy)].index(str(scenario.strategy))
        return 1, -self._seconds[_way(scenario)] if _way(scenario) in self._seconds else often

    def _job(
        self,
        page: str,
        what: str,
        scenario: Scenario,
        items: Sequence[Any],
        call: Callable[[Any], tuple[Any, ...]] | None,
        first: Callable[[Any], tuple[int, float]],
    ) -> Job[Any]:
        """What a page asks, begun where it is new, in the order of ``first``; pieces are in that of items.

        Without a ``call`` the items are ways that the planner tries, and that come with their timelines.
        """
        key = _key(what, scenario)
        with self._lock:
            if key not in self._jobs:
                self._drop_unfinished(page, what)
                order = sorted(range(len(items)), key=lambda i: first(items[i]))
                begun = {i: self._begun(items[i], call) for i in order}
                self._jobs[key] = Job(page, tuple(begun[i] for i in range(len(items))))
                while len(self._jobs) > KEPT:
                    self._jobs.popitem(last=False)
            self._jobs.move_to_end(key)
            return self._jobs[key]

    def _begun(self, item: Any, call: Callable[[Any], tuple[Any, ...]] | None) -> Future[Any]:
        if call is None:
            return self._planner.submit(_timed, evaluate, item)
        return self._pool.submit(_timed, _without_timelines, *call(item))

    def _drop_unfinished(self, page: str, what: str) -> None:
        """The page no longer looks at its earlier questions; a ranking drops maps and what is being planned, too."""
        for key, job in list(self._jobs.items()):
            if job.page == page and not job.is_complete and (what == "ranking" or key.startswith(what)):
                for piece in job.pieces:
                    piece.cancel()
                del self._jobs[key]


def _key(what: str, scenario: Scenario) -> str:
    return f"{what} {case_key(scenario)} {scenario.cluster} {scenario.profile}"


def _largest(cell: Scenario) -> tuple[int, float]:
    """Sorts cells that take long first."""
    return -cell.gpus, -cell.num_tokens


def _scenario(tried: Scenario | Evaluated) -> Scenario:
    match tried:
        case Scenario():
            return tried
        case Infeasible():
            return tried.scenario
        case forward, _, _:
            return forward.scenario


def _way(scenario: Scenario) -> str:
    return f"{scenario.strategy} {knobs_json(scenario)}"


def _timed(work: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    begun = time.perf_counter()
    return work(*arguments), time.perf_counter() - begun


def _without_timelines(work: Callable[..., Any], *arguments: Any) -> Any:
    """An answer that is light to send."""
    match work(*arguments):
        case (Prediction(), Prediction(), Prediction()) as predictions:
            return tuple(replace(one, timelines={}) for one in predictions)
        case result:
            return result


def _begin() -> None:
    """A process of a pool that gives way to the browser."""
    begin_worker()
    if hasattr(os, "nice"):
        os.nice(5)


def load_costs() -> None:
    """Loads what every case needs, and the profiles among which a page chooses."""
    for name in shipped_profiles():
        load_profile(name)
    candidates_of(scenario_from(WARM))


def warm_up() -> None:
    """Loads costs and engines, and compiles what is not compiled."""
    from cpsim.prediction.advise import advise

    load_costs()
    advise(WARM)
    advise({**WARM, "mask": "causal_document", "documents": {"distribution": "prolong64k"}})
