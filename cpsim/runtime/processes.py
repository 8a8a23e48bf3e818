"""Work on several processes, and how far it is."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from cpsim.runtime.allocator import keep_freed_memory
from cpsim.runtime.interrupts import leave_to_parent

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with (done, total)."""


def mapped(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int | None, progress: Progress | None = None
) -> list[Result]:
    """Results of some work on every item, in the order of items whatever ends first; see ``spread``."""
    found: dict[int, Result] = {}
    for i, result in spread(work, items, jobs):
        found[i] = result
        if progress:
            progress(len(found), len(items))
    return [found[i] for i in range(len(items))]


def spread(work: Callable[[Item], Result], items: Sequence[Item], jobs: int | None) -> Iterator[tuple[int, Result]]:
    """Indices and results of some work on every item, as they come; on several processes where jobs, or cores, are.

    Whoever stops early, be it by an interrupt, waits for none of the rest.
    """
    workers = min(jobs or os.cpu_count() or 1, len(items))
    if workers <= 1:
        yield from ((i, work(item)) for i, item in enumerate(items))
        return
    with ProcessPoolExecutor(workers, initializer=begin_worker) as pool:
        waiting = {pool.submit(work, item): i for i, item in enumerate(items)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
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
