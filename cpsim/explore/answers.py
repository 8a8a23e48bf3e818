"""Answers as they come: every case is computed once, strategy by strategy, in processes that are warm."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from threading import Lock, Thread
from typing import Any, Final, Generic, TypeVar

from cpsim.prediction import Advice, Candidate, Infeasible, Prediction, knobs_json
from cpsim.predictor import Tried, predict, rank, try_way, ways
from cpsim.report.frontier import Cell, best_in, cells, known_knobs
from cpsim.runs import case_key
from cpsim.scenario import Scenario

T = TypeVar("T")
KEPT: Final = 32
"""Cases whose answers are kept."""
WORKERS: Final = 2
PATIENCE_S: Final = 0.05
"""How long an answer waits for more strategies before it is shown as it is."""
LIKELY: Final = ("loongtrain", "usp", "ulysses", "hybrid_cp", "allgather", "magi", "zigzag_ring")
"""What is tried first in a first case; later, what was fast in the case before."""
WARM: Final = {"gpus": 16, "cluster": "dgx-h200", "tokens_per_gpu": 1024, "heads": 8, "kv_heads": 8}


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """Pieces of one answer, as far as they are done."""

    page: str
    """Who asks: a page, which looks at one case at a time."""
    pieces: tuple[Future[T], ...]

    @property
    def done(self) -> list[T]:
        """Pieces that are there, in order.

        Raises:
            CpsimError: what a piece raised.
        """
        return [piece.result() for piece in self.pieces if piece.done() and not piece.cancelled()]

    @property
    def is_complete(self) -> bool:
        return all(piece.done() for piece in self.pieces)


class Answers:
    """Recommendations, maps and timelines of cases, computed once; safe to use from several threads."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin)
        self._warm = [self._pool.submit(warm_up) for _ in range(workers)]
        self._lock = Lock()
        self._jobs: OrderedDict[str, Job[Any]] = OrderedDict()
        self._details: OrderedDict[str, Candidate] = OrderedDict()
        self._order: list[str] = []

    def close(self) -> None:
        """Ends the processes; what is not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_warm(self) -> bool:
        """Whether costs are loaded and engines compiled, which takes minutes once after an installation."""
        return all(one.done() for one in self._warm)

    def advice(self, scenario: Scenario, page: str, patience_s: float = PATIENCE_S) -> tuple[Advice, Job[Tried]]:
        """The recommendation as far as it is known after a short wait, with at least one strategy in it.

        Raises:
            ScenarioError, ProfileError: the case cannot be answered.
        """
        job = self._job(page, "advice", scenario, ways(scenario), lambda way: (try_way, way), self._likely)
        _, missing = wait(job.pieces, timeout=patience_s)
        while missing and all(isinstance(tried, Infeasible) for tried in job.done):
            _, missing = wait(missing, return_when=FIRST_COMPLETED)
        advice = rank(scenario, job.done)
        if job.is_complete:
            self._order = [_way(candidate.scenario) for candidate in advice.candidates]
        return advice, job

    def frontier(self, advice: Advice, page: str) -> Job[Cell]:
        """The map around the case of a recommendation, as far as it is known."""
        known = known_knobs(advice)
        asked = cells(advice.scenario)
        return self._job(page, "frontier", advice.scenario, asked, lambda cell: (best_in, cell, known), _largest)

    def details(self, candidate: Candidate) -> Candidate:
        """The candidate with the timelines of both passes."""
        key = _key("details", candidate.scenario)
        if key not in self._details:
            forward, backward = predict(candidate.forward.scenario), predict(candidate.backward.scenario)
            with self._lock:
                self._details[key] = replace(candidate, forward=forward, backward=backward)
                while len(self._details) > 4:  # timelines are large
                    self._details.popitem(last=False)
        return self._details.get(key, candidate)

    def _likely(self, way: Scenario | Infeasible) -> tuple[int, int]:
        """Sorts what was good in the last case first, then what often is, so that first answers hold what matters."""
        scenario, order = way if isinstance(way, Scenario) else way.scenario, self._order
        if _way(scenario) in order:
            return order.index(_way(scenario)), 0
        often = [*LIKELY, str(scenario.strategy)].index(str(scenario.strategy))
        return len(order), often

    def _job(
        self, page: str, what: str, scenario: Scenario, items: Sequence[Any],
        call: Callable[[Any], tuple[Any, ...]], first: Callable[[Any], tuple[int, int]],
    ) -> Job[Any]:  # fmt: skip
        """What a page asks, begun where it is new, in the order of ``first``; pieces are in that of items."""
        key = _key(what, scenario)
        with self._lock:
            if key not in self._jobs:
                self._drop_unfinished(page, what)
                order = sorted(range(len(items)), key=lambda i: first(items[i]))
                begun = {i: self._pool.submit(*_light(call(items[i]))) for i in order}
                self._jobs[key] = Job(page, tuple(begun[i] for i in range(len(items))))
                while len(self._jobs) > KEPT:
                    self._jobs.popitem(last=False)
            self._jobs.move_to_end(key)
            return self._jobs[key]

    def _drop_unfinished(self, page: str, what: str) -> None:
        """The page no longer looks at its earlier questions; a ranking drops maps, too."""
        for key, job in list(self._jobs.items()):
            if job.page == page and not job.is_complete and (what == "advice" or key.startswith(what)):
                for piece in job.pieces:
                    piece.cancel()
                del self._jobs[key]


def _key(what: str, scenario: Scenario) -> str:
    return f"{what} {case_key(scenario)} {scenario.profile}"


def _largest(cell: Scenario) -> tuple[int, int]:
    """Sorts cells that take long first, lest one process is left with them at the end."""
    return -cell.gpus, -cell.num_tokens


def _way(scenario: Scenario) -> str:
    return f"{scenario.strategy} {knobs_json(scenario)}"


def _light(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call as a worker makes it, with an answer that is light to send."""
    return (_without_timelines, *call)


def _without_timelines(work: Callable[..., Any], *arguments: Any) -> Any:
    match work(*arguments):
        case Prediction() as forward, Prediction() as backward:
            return replace(forward, timelines={}), replace(backward, timelines={})
        case result:
            return result


def _begin() -> None:
    """A process that gives way to the browser, and ends when the one that serves the page is gone, however it ended."""
    if hasattr(os, "nice"):
        os.nice(5)
    served = parent_process()
    assert served is not None

    def watch() -> None:
        served.join()
        os._exit(0)

    Thread(target=watch, daemon=True).start()


def warm_up() -> None:
    """Loads costs and engines, and compiles what is not compiled."""
    from cpsim.predictor import advise

    advise(WARM)
    advise({**WARM, "mask": "causal_document", "documents": {"distribution": "prolong64k"}})
