"""Answers as they come: every case is computed once, strategy by strategy, in processes that are warm.

A page has one question at a time, and each question a budget; see ``cpsim.runtime.workers``.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Condition, Lock
from typing import Any, Final, Generic, TypeVar

from cpsim.case.load import scenario_from
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError
from cpsim.models.profile import load_profile, shipped_profiles
from cpsim.prediction.advise import Evaluated, advise, candidates_of, evaluate, rank
from cpsim.prediction.predict import TOO_LARGE, predict
from cpsim.prediction.results import Advice, Candidate, Infeasible, knobs_json
from cpsim.prediction.runs import case_key
from cpsim.prediction.step.opened import Opened
from cpsim.prediction.step_advice import StepAdvice, advise_step, opened
from cpsim.report.axes import Around, Spot
from cpsim.report.frontier import Cell, best_in, likely
from cpsim.runtime.workers import Budget, Busy, OverBudget, Question, Workers

T = TypeVar("T")
KEPT: Final = 128
"""Answers that are kept."""
KEPT_WAYS: Final = 2048
"""Strategies with their knobs whose time is remembered."""
PAGES: Final = 1024
"""Pages whose question is remembered."""
WORKERS: Final = max(2, min(6, os.cpu_count() or 1))
BUDGET_S: Final = 60.0
"""What one answer may cost [s of one core]."""
BUDGET_BYTES: Final = 4 << 30
"""Memory of one process, where that of the machine is enough for all [bytes]."""
WANTED_S: Final = 10.0
"""A page that has not asked for so long is gone, and its answer is dropped; pages ask for more three times a second."""
FIRST_S: Final = 0.3
"""How long an answer waits for its first strategy, or for the details of one."""
LIGHT_BYTES: Final = 32 << 20
"""Timelines that may be sent from process to process [bytes]."""
FIRST: Final = 4
"""Strategies that were the best in the case before, and are tried first; of the others those that take longest are
tried first, lest one process is left with them at the end."""
LIKELY: Final = ("loongtrain", "usp", "ulysses", "hybrid_cp", "allgather", "magi", "zigzag_ring")
"""What is tried first in a first case."""
WARM: Final = {"gpus": 16, "cluster": "dgx-h200", "tokens_per_gpu": 1024, "heads": 8, "kv_heads": 8}
WARM_STEP: Final = {"gpus": 16, "cluster": "dgx-h200", "model": "llama3.2-1b", "context": 16384, "tokens": 2**19}
DETAILED: Final = ("timeline", "memory", "mask")
"""Views of one strategy, which need its timelines."""
PLANNING: Final = "being planned, which takes seconds; its row comes when it is done"


class Dropped(CpsimError):
    """An answer that is over its budget; says what that is and how to get the answer."""


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """Pieces of one answer, as far as they are done; each with the seconds that it took."""

    question: Question
    pages: set[str]
    """Who looks at it."""
    items: Sequence[Any] | None = None
    """What the pieces are about; None as long as that is being listed."""
    pieces: tuple[Future[Any], ...] = ()
    """Of all items, in their order; the list itself as long as there is none."""
    changed: Condition = field(default_factory=Condition)
    """Notified when a piece is done."""

    @property
    def done(self) -> list[T]:
        """Pieces that are there, in order; of those that are over budget nothing is.

        Raises:
            CpsimError: what a piece raised.
        """
        return [answer for _, answer, _ in self.answers() if not isinstance(answer, OverBudget)]

    def answers(self) -> list[tuple[Any, T | OverBudget, float]]:
        """Items with their answers, or why they were dropped, and the seconds that they took.

        Raises:
            CpsimError: what a piece raised; ``Dropped`` where that is all there is.
        """
        items, pieces = self.items, self.pieces
        found: list[tuple[Any, T | OverBudget, float]] = []
        for i, piece in enumerate(pieces):
            if not piece.done() or piece.cancelled():
                continue
            error = piece.exception()
            if isinstance(error, Busy) or (error and items is None):
                raise Dropped(dropped_text(error)) if isinstance(error, OverBudget) else error
            if isinstance(error, OverBudget):
                assert items is not None
                found.append((items[i], error, 0.0))
            elif items is not None:
                result, seconds = piece.result()
                found.append((items[i], result, seconds))
        return found

    @property
    def is_complete(self) -> bool:
        return self.items is not None and all(piece.done() for piece in self.pieces)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes, be it that it could not be listed."""
        listing = self.items is None and not any(p.done() and (p.cancelled() or p.exception()) for p in self.pieces)
        return not listing and all(piece.done() for piece in self.pieces)

    @property
    def is_lost(self) -> bool:
        """Whether it has to be asked again: it was dropped for its page's or other pages' sake."""
        return any(p.done() and (p.cancelled() or isinstance(p.exception(), Busy)) for p in self.pieces)

    def wait(self, until: float, enough: Callable[[], bool]) -> None:
        """Waits until there is enough, everything, or no time left."""
        with self.changed:
            while not (self.has_ended or enough()) and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)

    def tell(self, _piece: Future[Any] | None = None) -> None:
        """Wakes who waits."""
        with self.changed:
            self.changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of what a page asks."""

    advice: Advice
    chosen: Any = None
    """What was made of the strategy whose details are shown, with its timelines; None where it is not there."""
    cells: tuple[Cell, ...] = ()
    """Cells of the map, where it was asked for."""
    left_out: tuple[str, ...] = ()
    """Strategies that nobody has asked for, and that are not tried unless somebody does."""
    dropped: str = ""
    """What is over the budget of an answer, and why."""
    done: int
    """Pieces that are there."""
    total: int

    @property
    def is_complete(self) -> bool:
        return self.done == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStep:
    """What is known of a training step that a page asks."""

    advice: StepAdvice | None
    """Of all ways to cut it, or as long as these are searched of the way that was the best in the page's last case;
    None where neither is there."""
    is_whole: bool
    """Whether all ways were tried."""
    opened: Opened | None = None
    """What is recommended in time, where its timeline was asked for and is there."""
    done: int
    total: int


def as_it_is(candidate: Candidate) -> Candidate:
    """Nothing is made of a candidate."""
    return candidate


class Answers:
    """Recommendations, maps and timelines of cases, computed once; safe to use from several threads."""

    def __init__(self, workers: int = WORKERS, cpu_s: float = BUDGET_S) -> None:
        """
        Args:
            workers: processes that work at once.
            cpu_s: what one answer may cost [s of one core].
        """
        budget = Budget(cpu_s=cpu_s, nbytes=min(BUDGET_BYTES, _memory_bytes() // (4 * workers)))
        self._workers = Workers(workers, budget, "cpsim.explore.warm")
        self._num_workers = workers
        self._lock = Lock()
        self._jobs: OrderedDict[str, Job[Any]] = OrderedDict()
        self._at: OrderedDict[str, str] = OrderedDict()
        self._order: list[str] = []
        self._seconds: OrderedDict[str, float] = OrderedDict()
        self._cut: OrderedDict[str, Scenario] = OrderedDict()
        self.expected_s = math.inf
        """Seconds until a ranking is whole, if it takes as long as the last."""

    def close(self) -> None:
        """Ends the processes; what is not done is dropped."""
        self._workers.close()

    @property
    def is_warm(self) -> bool:
        """Whether costs are loaded and engines compiled, which takes minutes once after an installation."""
        return self._workers.is_ready

    def ask(
        self,
        scenario: Scenario,
        page: str,
        view: str,
        strategy: str | None,
        patience_s: float,
        draw: Callable[[Candidate], Any] = as_it_is,
        axes: tuple[str, str] = ("tokens", "gpus"),
    ) -> Known:
        """What is known after a short wait.

        Args:
            scenario: the case, without a strategy.
            page: who asks.
            view: ``map`` is computed where it is asked for, once the ranking is whole; so are details of a strategy
                for ``timeline``, ``memory`` and ``mask``.
            strategy: whose details are shown, None for the best. One that is left out of rankings, because planning
                takes seconds, is planned in the background.
            patience_s: how long the answer may wait to be whole.
            draw: what to make of the strategy whose details are shown, in the process that has its timelines.
            axes: of the map, to the right and upwards.

        Raises:
            ScenarioError, ProfileError: the case cannot be answered.
            Dropped: it is over the budget of an answer.
        """
        until = time.monotonic() + patience_s
        ranking, planned, left_out = self._tried(scenario, page, strategy, until)
        jobs: list[Job[Any]] = [ranking, *planned.values()]
        tried = self._evaluated(scenario, ranking, planned)
        dropped = {str(i.scenario.strategy): i.reason for i in tried if isinstance(i, Infeasible) and is_dropped(i)}
        advice = rank(scenario, tried)
        whole = all(job.is_complete for job in jobs)
        chosen = None
        if view in DETAILED:
            mine = (one for one in advice.candidates if one.scenario.strategy == strategy)
            chosen = advice.recommended if strategy is None else next(mine, None)
        later = not whole and (view == "map" or (view in DETAILED and strategy not in planned))
        shown: list[Any] = []
        if view == "map" and whole:
            jobs.append(self._map(advice, axes, page, until))
            jobs[-1].wait(until, lambda: False)
            shown = jobs[-1].done
            missing = [str(cell) for _, cell, _ in jobs[-1].answers() if isinstance(cell, OverBudget)]
            dropped |= {f"{len(missing)} cells of the map": dropped_text(missing[0])} if missing else {}
        elif chosen and ranking.is_complete:
            jobs.append(self._details(chosen, page, until, draw))
            jobs[-1].wait(max(until, time.monotonic() + FIRST_S), lambda: False)
            shown = [self._result(jobs[-1])] if jobs[-1].is_complete else []
        pieces = [piece for job in jobs for piece in job.pieces]
        return Known(
            advice=advice,
            chosen=shown[0] if chosen and shown else None,
            cells=tuple(shown) if view == "map" else (),
            left_out=left_out,
            dropped=f"{', '.join(dropped)} {next(iter(dropped.values()))}" if dropped else "",
            done=sum(piece.done() for job in jobs for piece in job.pieces if job.items is not None),
            total=len(pieces) + later,
        )

    def ask_step(self, scenario: Scenario, page: str, view: str, patience_s: float) -> KnownStep:
        """What is known of a training step after a short wait.

        Ways to cut it are searched, which takes a second or more; what the page's last answer recommends is tried in
        the new case meanwhile, and is there at once.

        Args:
            scenario: the step.
            page: who asks.
            view: for ``timeline`` what is recommended is opened, too.
            patience_s: how long the answer may wait to be whole.

        Raises:
            ScenarioError, ProfileError: the case cannot be answered.
            Dropped: it is over the budget of an answer.
        """
        until = time.monotonic() + patience_s
        self._move(page, _key("step", scenario))
        job = self._job(page, "step", scenario, until, _step_piece, lambda _: (0, 0), self._cuts(scenario, page))
        job.wait(until, lambda: False)
        job.wait(max(until, time.monotonic() + FIRST_S), lambda: bool(job.done))
        answers = {item[1] is None: answer for item, answer, _ in job.answers()}
        whole = answers.get(True)
        if isinstance(whole, OverBudget):
            raise Dropped(dropped_text(whole))
        if whole is not None and whole.recommended:
            self._cut[page] = whole.recommended.prediction.scenario
            while len(self._cut) > PAGES:
                self._cut.popitem(last=False)
        before = answers.get(False)
        advice = whole or (None if isinstance(before, OverBudget) else before)
        jobs = [job, *self._opened(advice, page, view, until)]
        return KnownStep(
            advice=advice,
            is_whole=whole is not None,
            opened=self._result(jobs[1]) if jobs[1:] and jobs[1].is_complete else None,
            done=sum(piece.done() for one in jobs for piece in one.pieces),
            total=sum(len(one.pieces) for one in jobs),
        )

    def _opened(self, advice: StepAdvice | None, page: str, view: str, until: float) -> list[Job[Opened]]:
        """What opens a step for its timeline, after a short wait; nothing for other views."""
        best = advice.foremost if advice and view == "timeline" else None
        if best is None:
            return []
        scenario = best.prediction.scenario
        job = self._job(page, "opened", scenario, until, lambda one: (opened, one), lambda _: (0, 0), (best,))
        job.wait(max(until, time.monotonic() + FIRST_S), lambda: False)
        return [job]

    def _cuts(self, scenario: Scenario, page: str) -> Sequence[tuple[Scenario, Scenario | None]]:
        """What is tried of a step: the cut that was the best before, where there is one, and all."""
        before = self._cut.get(page)
        return [*([(scenario, before)] if before else []), (scenario, None)]

    def _tried(
        self, scenario: Scenario, page: str, strategy: str | None, until: float
    ) -> tuple[Job[Evaluated], dict[str, Job[Evaluated]], tuple[str, ...]]:
        """The jobs that try strategies, those that were asked for by name apart, and what is left out."""
        self._move(page, _key("ranking", scenario))
        job: Job[Evaluated] = self._job(page, "ranking", scenario, until, _ranking_piece, self._soonest, candidates_of)
        first = max(until, time.monotonic() + FIRST_S)
        job.wait(first, lambda: job.items is not None)
        planned: dict[str, Job[Evaluated]] = {}
        left_out = [str(way.scenario.strategy) for way in job.items or () if isinstance(way, Infeasible)]
        for name in left_out:
            named = scenario.model_copy(update={"strategy": name})
            if name == strategy or _key("planned", named) in self._jobs:
                planned[name] = self._job(page, "planned", named, until, _planned_piece, self._soonest, candidates_of)

        def has_first() -> bool:
            return any(not isinstance(one, Infeasible) for one in job.done)

        for one in (job, *planned.values()):
            one.wait(until, lambda: False)
        job.wait(first, has_first)
        if job.is_complete:
            self._remember(scenario, job)
        return job, planned, tuple(name for name in left_out if name not in planned)

    def _evaluated(
        self, scenario: Scenario, ranking: Job[Evaluated], planned: dict[str, Job[Evaluated]]
    ) -> list[Evaluated]:
        """What was tried so far, be it in vain."""
        tried: list[Evaluated] = []
        for job in (ranking, *(job for job in planned.values() if job.is_complete)):
            for way, answer, _ in job.answers():
                if isinstance(way, Infeasible) and way.scenario.strategy in planned:
                    continue
                tried.append(_in_words(way, answer))
        for name, job in planned.items():
            if not job.is_complete:
                named = scenario.model_copy(update={"strategy": name, "pass_": "fwd_bwd"})
                job.answers()  # raises what is wrong with it
                tried.append(Infeasible(scenario=named, reason=PLANNING, kind=None))
        return tried

    def _map(self, advice: Advice, axes: tuple[str, str], page: str, until: float) -> Job[Cell]:
        """The map around the case of a whole recommendation."""
        around = Around(scenario=advice.scenario, across=axes[0], up=axes[1])
        first, what = likely(advice), f"map {' '.join(axes)}"
        spots = around.spots()
        return self._job(page, what, advice.scenario, until, lambda spot: (best_in, spot, first), _largest, spots)

    def _details(self, candidate: Candidate, page: str, until: float, draw: Callable[[Candidate], Any]) -> Job[Any]:
        """What ``draw`` makes of the candidate with the timelines of both passes."""
        what = f"details {draw!r}"
        return self._job(
            page, what, candidate.scenario, until, lambda one: (_drawn, one, draw), lambda _: (0, 0), (candidate,)
        )

    def _result(self, job: Job[T]) -> T:
        """That of a job with one piece.

        Raises:
            Dropped: it is over the budget of an answer.
        """
        [(_, answer, _)] = job.answers()
        if isinstance(answer, OverBudget):
            raise Dropped(dropped_text(answer))
        return answer

    def _remember(self, scenario: Scenario, job: Job[Evaluated]) -> None:
        """What was the best, and how long everything took: for the order of the next case, and how long it may take."""
        answers = job.answers()
        tried = [answer for _, answer, _ in answers if not isinstance(answer, OverBudget)]
        self._order = [_way(candidate.scenario) for candidate in rank(scenario, tried).candidates[:FIRST]]
        with self._lock:
            for way, _, seconds in answers:
                self._seconds[_way(_scenario(way))] = seconds
            while len(self._seconds) > KEPT_WAYS:
                self._seconds.popitem(last=False)
        self.expected_s = sum(seconds for _, _, seconds in answers) / self._num_workers

    def _soonest(self, way: Scenario | Infeasible) -> tuple[int, float]:
        """Sorts what was the best in the last case first, then what takes long; in a first case what often is best."""
        scenario = _scenario(way)
        order, taken = self._order, self._seconds.get(_way(scenario))
        if _way(scenario) in order:
            return 0, order.index(_way(scenario))
        often = [*LIKELY, str(scenario.strategy)].index(str(scenario.strategy))
        return 1, -taken if taken is not None else often

    def _move(self, page: str, key: str) -> None:
        """The page looks at this case, and no longer at another."""
        with self._lock:
            before = self._at.pop(page, None)
            self._at[page] = key
            while len(self._at) > PAGES:
                self._at.popitem(last=False)
            if before != key:
                self._leave(page, "", key)

    def _job(
        self,
        page: str,
        what: str,
        scenario: Scenario,
        until: float,
        call: Callable[[Any], tuple[Any, ...]],
        first: Callable[[Any], tuple[int, float]],
        items: Callable[[Scenario], Sequence[Any]] | Sequence[Any],
    ) -> Job[Any]:
        """What a page asks, begun where it is new, in the order of ``first``; pieces are in that of items.

        Args:
            page, what, scenario: who asks, and what.
            until: when the page stops waiting.
            call: the work of one item: a function and its arguments.
            first: sorts items.
            items: what lists them, which is work, too; or the items.
        """
        key = _key(what, scenario)
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.is_lost:
                self._leave(page, what, key)
                job = self._jobs[key] = Job(Question(page), {page})
                if callable(items):
                    listing = self._workers.submit(job.question, _timed, items, scenario)
                    job.pieces = (listing,)
                    begun = job
                    listing.add_done_callback(lambda done: self._listed(begun, done, call, first))
                else:
                    self._begin(job, items, call, first)
                for old in [k for k, one in self._jobs.items() if one.has_ended][: max(0, len(self._jobs) - KEPT)]:
                    del self._jobs[old]
            if not job.has_ended:
                job.pages.add(page)
            job.question.wanted_until = max(until, time.monotonic()) + WANTED_S
            if key in self._jobs:
                self._jobs.move_to_end(key)
            return job

    def _listed(self, job: Job[Any], listing: Future[Any], call: Any, first: Any) -> None:
        """Begins the pieces of a job whose items are known now."""
        if not listing.cancelled() and listing.exception() is None:
            self._begin(job, listing.result()[0], call, first)
        job.tell()

    def _begin(self, job: Job[Any], items: Sequence[Any], call: Any, first: Any) -> None:
        order = sorted(range(len(items)), key=lambda i: first(items[i]))
        begun = {i: self._workers.submit(job.question, _timed, *call(items[i])) for i in order}
        job.pieces = tuple(begun[i] for i in range(len(items)))
        job.items = items
        for piece in job.pieces:
            piece.add_done_callback(job.tell)
        if job.question.wanted_until < time.monotonic():  # it was left while it was listed
            self._workers.drop(job.pieces)

    def _leave(self, page: str, what: str, but: str) -> None:
        """The page no longer looks at its earlier questions, or at those of a kind; what nobody looks at is dropped."""
        for key, job in list(self._jobs.items()):
            if (
                page in job.pages
                and not job.has_ended
                and key != but
                and key.startswith(what.split()[0] if what else "")
            ):
                job.pages.discard(page)
                if not job.pages:
                    job.question.wanted_until = -math.inf
                    self._workers.drop(job.pieces)
                    del self._jobs[key]


DROPPED: Final = "dropped: "


def is_dropped(one: Infeasible) -> bool:
    """Whether this is no answer, but one that would cost too much."""
    return one.reason.startswith(DROPPED)


def dropped_text(why: Exception | str) -> str:
    """Why an answer, or a part of it, was dropped, and how to get it."""
    if isinstance(why, Busy):
        return f"{DROPPED}{why}"
    instead = "`cpsim advise` of the scenario file takes longer, and as long as it likes with --force"
    return f"{DROPPED}{why}, the most that the page spends on one answer; {instead}"


def _in_words(way: Any, answer: Evaluated | OverBudget) -> Evaluated:
    """An answer, or why there is none."""
    if isinstance(answer, Infeasible) and answer.reason == TOO_LARGE:
        answer = OverBudget("it needs more memory than it may have")
    if isinstance(answer, OverBudget):
        return Infeasible(scenario=_scenario(way), reason=dropped_text(answer), kind=None)
    return answer


def _key(what: str, scenario: Scenario) -> str:
    return f"{what} {case_key(scenario)} {scenario.cluster} {scenario.profile}"


def _largest(spot: Spot) -> tuple[int, float]:
    """Sorts cells that take long first."""
    return (-spot.scenario.gpus, -spot.scenario.num_tokens) if spot.scenario else (0, 0)


def _scenario(way: Scenario | Infeasible) -> Scenario:
    return way if isinstance(way, Scenario) else way.scenario


def _way(scenario: Scenario) -> str:
    return f"{scenario.strategy} {knobs_json(scenario)}"


def _ranking_piece(way: Scenario | Infeasible) -> tuple[Any, ...]:
    return _evaluate, way, 0


def _planned_piece(way: Scenario | Infeasible) -> tuple[Any, ...]:
    return _evaluate, way, LIGHT_BYTES


def _step_piece(item: tuple[Scenario, Scenario | None]) -> tuple[Any, ...]:
    scenario, cut = item
    return (advise_step, scenario) if cut is None else (_cut_again, scenario, cut)


def _cut_again(scenario: Scenario, before: Scenario) -> StepAdvice | None:
    """A step as another one was cut, as far as it leaves that open; None where that is no way to cut it."""
    mine = scenario.parallel.model_dump(exclude_none=True, exclude_unset=True) if scenario.parallel else {}
    theirs = before.parallel.model_dump(exclude_none=True) if before.parallel else {}
    kept = ("tp", "pp", "cp", "ep", "virtual_pp", "sharding", "replicate", "recompute", "loss_chunks", "mlp_chunks")
    section = {name: theirs[name] for name in kept if name in theirs} | mine
    asked = {"parallel": section, "strategy": before.strategy, "knobs": dict(before.knobs)}
    try:
        found = advise_step(scenario_from(scenario.to_dict() | asked))
    except CpsimError:
        return None
    return found if found.candidates else None


def _timed(work: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    begun = time.perf_counter()
    return work(*arguments), time.perf_counter() - begun


def _evaluate(way: Scenario | Infeasible, most: int) -> Evaluated:
    """A way that was tried; with its timelines where they are no larger than that [bytes]."""
    tried = evaluate(way)
    if isinstance(tried, Infeasible):
        return tried
    forward, backward, both = tried
    both = replace(both, timelines={})
    if most and len(pickle.dumps((forward, backward))) <= most:
        return forward, backward, both
    return replace(forward, timelines={}), replace(backward, timelines={}), both


def _drawn(candidate: Candidate, draw: Callable[[Candidate], T]) -> T:
    """What is made of a candidate with the timelines of both passes."""
    if not candidate.forward.timelines:
        forward, backward = predict(candidate.forward.scenario), predict(candidate.backward.scenario)
        candidate = replace(candidate, forward=forward, backward=backward)
    return draw(candidate)


def _memory_bytes() -> int:
    """Memory of this machine; where it does not say, much."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return BUDGET_BYTES * 4 * WORKERS


def load_costs() -> None:
    """Loads what every case needs, and the profiles among which a page chooses."""
    for name in shipped_profiles():
        load_profile(name)
    candidates_of(scenario_from(WARM))


def warm_up() -> None:
    """Loads costs and engines, and compiles what is not compiled."""
    load_costs()
    documents = {"mask": "causal_document", "documents": {"distribution": "prolong64k"}}
    for changes in ({}, documents, {"gpus": 8, "mask": "full"}):
        best = advise({**WARM, **changes}).candidates[0]
        predict(best.forward.scenario)
    advise_step(scenario_from(WARM_STEP))
