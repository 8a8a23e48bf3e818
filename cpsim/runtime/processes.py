"""Work on several processes, and how far it is."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from cpsim.errors import MachineError
from cpsim.runtime.allocator import keep_freed_memory
from cpsim.runtime.interrupts import leave_to_parent
from cpsim.runtime.streams import say

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with (done, total)."""
DIED: Final = "a process died of it, alone, too, perhaps for lack of memory"


def mapped(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int | None,
    progress: Progress | None = None,
    instead: Callable[[Item], Result] | None = None,
) -> list[Result]:
    """Results of some work on every item, in the order of items whatever ends first; see ``spread``."""
    found: dict[int, Result] = {}
    for i, result in spread(work, items, jobs, instead):
        found[i] = result
        if progress:
            progress(len(found), len(items))
    return [found[i] for i in range(len(items))]


def spread(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int | None,
    instead: Callable[[Item], Result] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Indices and results of some work on every item, as they come; on several processes where jobs, or cores, are.

    Whoever stops early, be it by an interrupt, waits for none of the rest. Where a process dies, e.g. is killed for
    lack of memory, what the processes had is tried again, one after another.

    Args:
        work: what to do with an item.
        items: of which each is one process's at a time.
        jobs: processes at most; None: as many as cores.
        instead: gives the result of an item with which a process dies alone, too.

    Raises:
        MachineError: a process dies again, and nothing is given instead.
    """
    workers = min(jobs or os.cpu_count() or 1, len(items))
    if workers <= 1:
        yield from ((i, work(item)) for i, item in enumerate(items))
        return
    left = list(range(len(items)))
    while left:
        done = set()
        with _pool(workers) as pool:
            waiting = {}
            with suppress(BrokenProcessPool):
                for i in left:
                    waiting[pool.submit(work, items[i])] = i
            for future in as_completed(waiting):
                try:
                    result = future.result()
                except BrokenProcessPool:
                    continue
                done.add(waiting[future])
                yield waiting[future], result
        left = [i for i in left if i not in done]
        if left:
            say("cpsim: a process died, perhaps for lack of memory; what it had is tried again, alone")
        begun, left = left[: 2 * workers + 1], left[2 * workers + 1 :]  # with what waited in the queue of the pool
        for i in begun:
            yield i, _again(work, items[i], instead)


def _again(work: Callable[[Item], Result], item: Item, instead: Callable[[Item], Result] | None) -> Result:
    try:
        return alone(work, item)
    except BrokenProcessPool:
        if instead is None:
            raise MachineError(DIED) from None
        return instead(item)


def alone(work: Callable[[Item], Result], item: Item) -> Result:
    """The result of some work on one item, in a process of its own.

    Raises:
        BrokenProcessPool: the process dies.
    """
    with _pool(1) as pool:
        return pool.submit(work, item).result()


def one_by_one(
    work: Callable[[list[Item]], list[Result]], items: Sequence[Item], lost: Callable[[Item], Result]
) -> list[Result]:
    """Results of work on several items, each in a process of its own, or what takes the place of those that die."""
    found: list[Result] = []
    for item in items:
        try:
            found += alone(work, [item])
        except BrokenProcessPool:
            found.append(lost(item))
    return found


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes, which end with what is done within, however that ends."""
    try:
        made = ProcessPoolExecutor(workers, initializer=begin_worker)
    except OSError as error:
        raise MachineError(f"this machine starts no more processes: {error.strerror}; try --jobs 1") from None
    with made as pool:
        try:
            yield pool
        except BaseException:
            stop(pool)
            raise


def stop(pool: ProcessPoolExecutor) -> None:
    """Ends the processes of a pool, whatever they are at, and drops what is not begun."""
    workers: list[Any] = list((pool._processes or {}).values())
    manager: Any = pool._executor_manager_thread
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    if manager is not None:  # which closes a pipe that the end of the interpreter would write to
        manager.join(timeout=5.0)


def begin_worker() -> None:
    """What a process of a pool does first: it keeps freed memory, leaves interrupts to its parent, and ends with it,
    however that ended, without which it would wait for work for ever."""
    keep_freed_memory()
    leave_to_parent()
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
