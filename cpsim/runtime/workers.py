"""Processes that answer questions of several askers at once: fair shares, and a budget for each question.

Whoever asks for much does not hold up those who ask for little. Tasks of all askers take turns; a process that has been
at one task for ``SLICE_S`` while somebody else waits is set aside, to go on with what nobody else needs of the cores,
and a fresh one takes its place. A question that is over its budget, or that nobody wants any more, is dropped, and the
processes that are at it are killed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

from cpsim.errors import CpsimError, described
from cpsim.runtime.processes import begin_worker

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SLICE_S: Final = 0.2
"""CPU time for which a task keeps its process from others that wait [s]; where nothing can be set aside any more, it
begins again after ``LOST_S``."""
LOST_S: Final = 0.5
"""CPU time that may be lost by killing a task which begins again later [s]."""
TICK_S: Final = 0.05
"""How often running tasks are looked at [s]."""
FREE_S: Final = 2.0
"""Work that an asker may have had lately before others go first [s of one core]."""
HALF_LIFE_S: Final = 5.0
"""After so long, work counts half [s]."""
MOST_WAITING: Final = 64
"""Questions that may wait at once."""
MOST_ASKERS: Final = 1024
"""Askers that are remembered."""
NICE: Final = 5
"""Processes give way to whoever asked, e.g. a browser, ..."""
NICE_ASIDE: Final = 19
"""... and those set aside to all others."""
SPARE: Final = 2
"""Processes that are kept ready to take the place of others."""
TRIM_BYTES: Final = 1 << 30
"""A process that holds more than this after a task is replaced."""


class OverBudget(CpsimError):
    """A question was dropped; the message says why."""


class Busy(OverBudget):
    """A question was dropped because too many wait; it may be asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one question may cost."""

    cpu_s: float
    """Work of all its tasks [s of one core]; four times as long may pass while they run, and longer where others keep
    the cores from those that are set aside."""
    nbytes: int
    """Memory of one process [bytes]."""


@dataclass(eq=False, slots=True)
class Question:
    """What an asker wants to know; the budget is that of all its tasks together."""

    asker: str
    wanted_until: float = float("inf")
    """Moment of ``time.monotonic`` from which on nobody waits for it any more."""
    spent_s: float = 0.0
    """CPU time of tasks that ended [s]."""
    wall_s: float = 0.0
    is_long: bool = False
    """One of its tasks had to be set aside."""
    num_tasks: int = 0


@dataclass(eq=False, slots=True)
class _Task:
    question: Question
    index: int
    """Of the question's tasks, in the order in which they were given."""
    call: tuple[Callable[..., Any], tuple[Any, ...]]
    future: Future[Any] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Worker:
    process: Any
    pipe: Connection
    is_ready: bool = False
    task: _Task | None = None
    begun: float = 0.0
    """When it was given its task, by ``time.monotonic``."""
    cpu_begun: float = 0.0

    def spent(self) -> tuple[float, float, int]:
        """CPU time and time of its task so far [s], and memory of the process [bytes]."""
        wall = time.monotonic() - self.begun
        cpu, nbytes = _usage(self.process.pid)
        return (wall if cpu is None else cpu - self.cpu_begun), wall, nbytes


@dataclass(slots=True)
class _Asker:
    first: int
    """How many askers came before."""
    used_s: float = 0.0
    at: float = 0.0

    def used(self, now: float) -> float:
        return self.used_s * math.exp2((self.at - now) / HALF_LIFE_S)


class Workers:
    """Processes that work for several askers; safe to use from several threads."""

    def __init__(self, num: int, budget: Budget, warm: str) -> None:
        """
        Args:
            num: processes that work at once; as many again may be set aside.
            budget: of each question.
            warm: a module that processes import first. Where the system can, one process imports it and all others
                are copies of it, so that one which is killed is replaced in hundredths of a second.
        """
        self._num, self._budget, self._warm = num, budget, warm
        self._context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            from multiprocessing import forkserver

            self._context.set_forkserver_preload([warm])
            forkserver.ensure_running()
        self._given: deque[_Task] = deque()
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)
        self._closed = self.is_ready = False
        self._born: deque[_Worker | None] = deque()
        self._expected: SimpleQueue[None] = SimpleQueue()
        # What follows belongs to the thread that manages.
        self._waiting: list[_Task] = []
        self._num_unborn = 0
        self._spare: list[_Worker] = []
        self._active: list[_Worker] = []
        self._aside: list[_Worker] = []
        self._askers: dict[str, _Asker] = {}
        self._count = count()
        self._thread = Thread(target=self._manage, daemon=True)
        self._thread.start()
        Thread(target=self._bear, daemon=True).start()

    def submit(self, question: Question, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Work of a question, which may begin at once; its future is never running, so that it can be cancelled."""
        task = _Task(question, question.num_tasks, (work, arguments))
        question.num_tasks += 1
        self._given.append(task)
        self._ring()
        return task.future

    def drop(self, futures: Sequence[Future[Any]]) -> None:
        """Cancels work, also such as is being done."""
        for future in futures:
            future.cancel()
        self._ring()

    def close(self) -> None:
        """Ends the processes; what is not done is dropped."""
        self._closed = True
        self._ring()
        self._thread.join(timeout=5.0)
        self._expected.put(None)
        for worker in (*filter(None, self._born), *self._everyone()):
            _end(worker)
            worker.process.join(timeout=1.0)

    def _ring(self) -> None:
        with suppress(OSError):  # it rings already, or is closed
            self._bell.send(b"!")

    def _everyone(self) -> list[_Worker]:
        return [*self._active, *self._aside, *self._spare]

    def _manage(self) -> None:
        while not self._closed:
            self._take()
            self._watch()
            self._make_room()
            self._hand_out()
            everyone = self._everyone()
            is_busy = self._waiting or any(worker.task for worker in everyone)
            ready = wait([self._rung, *(worker.pipe for worker in everyone)], TICK_S if is_busy else None)
            for worker in everyone:
                if worker.pipe in ready:
                    self._hear(worker)
            if self._rung in ready:
                with suppress(OSError):
                    self._rung.recv(4096)
        for task in (*self._waiting, *self._given, *(worker.task for worker in self._everyone() if worker.task)):
            task.future.cancel()
        self._bell.close()
        self._rung.close()

    def _take(self) -> None:
        """New tasks begin to wait; those that nobody wants do no longer; too many questions are too many."""
        now = time.monotonic()
        while self._given:
            task = self._given.popleft()
            self._asker(task.question.asker)
            self._waiting.append(task)
        for task in self._waiting:
            if task.question.wanted_until < now:
                task.future.cancel()
        self._waiting = [task for task in self._waiting if not task.future.done()]
        questions = {task.question for task in self._waiting}
        while len(questions) > MOST_WAITING:
            last = max(questions, key=lambda question: (*self._rank(question, now), self._asker(question.asker).first))
            questions.remove(last)
            self._give_up(last, Busy(f"{MOST_WAITING} questions wait already; ask again in a moment"))

    def _watch(self) -> None:
        """Ends what is over budget, and what nobody waits for unless it soon ends by itself."""
        now = time.monotonic()
        for worker in [w for w in (*self._active, *self._aside) if w.task]:
            task = worker.task
            assert task is not None
            question = task.question
            cpu, wall, nbytes = worker.spent()
            unwanted = task.future.cancelled() or question.wanted_until < now
            if unwanted and (wall > SLICE_S or worker in self._aside):
                task.future.cancel()
                self._kill(worker)
            elif nbytes > self._budget.nbytes:
                self._kill(worker)
                _fail(task, OverBudget(_too_large(self._budget.nbytes)))
            elif question.spent_s + cpu > self._budget.cpu_s:
                self._give_up(question, OverBudget(f"it took more than {self._budget.cpu_s:g} s of work"))
            elif worker in self._active and question.wall_s + wall > (longest := 4 * self._budget.cpu_s * self._num):
                self._give_up(question, OverBudget(f"it took longer than {longest:g} s"))

    def _give_up(self, question: Question, reason: OverBudget) -> None:
        """Drops all that a question still needs."""
        dropped = [task for task in self._waiting if task.question is question]
        self._waiting = [task for task in self._waiting if task.question is not question]
        for worker in [w for w in (*self._active, *self._aside) if w.task and w.task.question is question]:
            assert worker.task is not None
            dropped.append(worker.task)
            self._kill(worker)
        for task in dropped:
            _fail(task, reason)

    def _make_room(self) -> None:
        """Sets tasks aside that keep a process from others which wait; one for each that waits."""
        now = time.monotonic()
        free = self._num - sum(worker.task is not None for worker in self._active)
        wants = sorted({task.question for task in self._waiting if not task.question.is_long}, key=self._turn)
        for question in wants[max(0, free) :]:
            has_room = len(self._aside) < self._num and hasattr(os, "setpriority")
            holding = [
                worker
                for worker in self._active
                if worker.task
                and worker.task.question is not question
                and worker.spent()[0] > (SLICE_S if has_room else LOST_S)
                and self._rank(worker.task.question, now) >= self._rank(question, now)
            ]
            if not holding:
                return
            worker = min(holding, key=lambda one: one.begun)
            assert worker.task is not None
            worker.task.question.is_long = True
            if has_room:
                self._set_aside(worker)
            else:
                self._waiting.append(worker.task)
                self._kill(worker)

    def _set_aside(self, worker: _Worker) -> None:
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, worker.process.pid, NICE_ASIDE)
        if worker in self._active:
            self._active.remove(worker)
        self._aside.append(worker)

    def _hand_out(self) -> None:
        """Tasks whose turn it is, to processes that are free."""
        self._staff(self._active, self._num)
        self._waiting.sort(key=lambda task: (self._turn(task.question)[0], task.index, self._turn(task.question)[1]))
        for worker in self._active:
            if self._waiting and worker.task is None:
                self._give(worker, self._waiting.pop(0))
        long = [task for task in self._waiting if task.question.is_long]
        if hasattr(os, "setpriority"):
            self._staff(self._aside, min(len(long), self._num))
        for worker in [one for one in self._aside if one.task is None]:
            if long:
                self._waiting.remove(long[0])
                self._give(worker, long.pop(0))
            else:
                self._kill(worker)

    def _staff(self, group: list[_Worker], num: int) -> None:
        """Fills a group up with processes that are ready, and has others started, without waiting for them."""
        while self._born:
            self._num_unborn -= 1
            born = self._born.popleft()
            self._spare += [born] if born else []
        ready = [worker for worker in self._spare if worker.is_ready]
        while len(group) < num and ready:
            worker = ready.pop()
            self._spare.remove(worker)
            if group is self._aside:
                self._set_aside(worker)
            else:
                group.append(worker)
        while len(self._spare) + self._num_unborn < SPARE + max(0, num - len(group)):
            self._num_unborn += 1
            self._expected.put(None)

    def _bear(self) -> None:
        """Starts processes in a thread of its own, since each takes hundredths of a second, and the first one more."""
        while True:
            self._expected.get()
            if self._closed:
                return
            worker = None
            try:
                worker = self._start()
            except (OSError, EOFError):  # the system has no room for one more now
                time.sleep(TICK_S)
            if self._closed and worker:
                _end(worker)
            self._born.append(worker)
            self._ring()

    def _give(self, worker: _Worker, task: _Task) -> None:
        worker.task, worker.begun = task, time.monotonic()
        worker.cpu_begun = _usage(worker.process.pid)[0] or 0.0
        try:
            worker.pipe.send(task.call)
        except OSError:  # it has ended: its pipe says so next
            pass
        except Exception as error:  # what cannot be sent is its asker's fault
            worker.task = None
            _fail(task, error)

    def _hear(self, worker: _Worker) -> None:
        """What a process says: that it is ready, an answer, or by an end of its pipe that it has ended."""
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            task = worker.task
            self._kill(worker)
            if task:
                _fail(task, OverBudget("its process ended, which happens where memory is short"))
            return
        if answer is None:
            worker.is_ready = self.is_ready = True
            return
        assert worker.task is not None
        task, nbytes = worker.task, self._charge(worker)
        worker.task = None
        if nbytes > TRIM_BYTES:
            self._kill(worker)
        succeeded, value = answer
        if not succeeded:
            _fail(task, OverBudget(_too_large(self._budget.nbytes)) if isinstance(value, MemoryError) else value)
            return
        with suppress(InvalidStateError):  # it was cancelled
            task.future.set_result(value)

    def _charge(self, worker: _Worker) -> int:
        """Counts what a task has cost so far; returns the memory of its process [bytes]."""
        assert worker.task is not None
        cpu, wall, nbytes = worker.spent()
        worker.task.question.spent_s += cpu
        worker.task.question.wall_s += wall
        asker, now = self._asker(worker.task.question.asker), time.monotonic()
        asker.used_s, asker.at = asker.used(now) + cpu, now
        return nbytes

    def _kill(self, worker: _Worker) -> None:
        """Ends a process, whatever it is at; what that has cost counts."""
        if worker.task:
            self._charge(worker)
            worker.task = None
        _end(worker)
        for group in (self._active, self._aside, self._spare):
            if worker in group:
                group.remove(worker)

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._budget.nbytes, self._warm), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _asker(self, name: str) -> _Asker:
        if name not in self._askers:
            if len(self._askers) >= MOST_ASKERS:  # those that did nothing for longest
                for old in sorted(self._askers, key=lambda one: self._askers[one].at)[: MOST_ASKERS // 2]:
                    del self._askers[old]
            self._askers[name] = _Asker(next(self._count), 0.0, time.monotonic())
        return self._askers[name]

    def _rank(self, question: Question, now: float) -> tuple[bool, int]:
        """Who goes first: what is short, then of those who had least lately."""
        return question.is_long, int(self._asker(question.asker).used(now) / FREE_S)

    def _turn(self, question: Question) -> tuple[tuple[bool, int], int]:
        return self._rank(question, time.monotonic()), self._asker(question.asker).first


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.pipe.close()


def _fail(task: _Task, reason: Exception) -> None:
    with suppress(InvalidStateError):  # it was cancelled
        task.future.set_exception(reason)


def _too_large(nbytes: int) -> str:
    return f"it needs more than {nbytes / 1e9:.1f} GB of memory"


def _usage(pid: int) -> tuple[float | None, int]:
    """CPU time [s] and resident memory [bytes] of a process; None and 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None, 0
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    return (int(fields[11]) + int(fields[12])) / ticks, int(fields[21]) * page


def _serve(pipe: Connection, nbytes: int, warm: str) -> None:
    """A process: does what comes through the pipe until that ends."""
    begin_worker()
    if hasattr(os, "nice"):
        os.nice(NICE)
    import_module(warm)
    _limit_memory(nbytes)
    with suppress(EOFError, OSError):  # nobody waits any more
        pipe.send(None)
        while True:
            work, arguments = pipe.recv()
            pipe.send_bytes(_done(work, arguments))


def _done(work: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Whether work succeeded, and its result or its error."""
    try:
        return pickle.dumps((True, work(*arguments)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        known = isinstance(error, CpsimError | MemoryError)
        return pickle.dumps((False, error if known else RuntimeError(described(error))))


def _limit_memory(nbytes: int) -> None:
    """One array that is too large fails at once, where the system can say so; processes are looked at besides."""
    if resource is None or sys.platform != "linux":
        return
    with open("/proc/self/statm", "rb") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # there is a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (held + nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
