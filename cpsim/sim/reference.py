"""The reference engine: one SimPy process per op; short and slow, the oracle of the fast engine."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from cpsim.errors import ScheduleError
from cpsim.schedule.schedule import Schedule
from cpsim.schedule.work import LEAST_SPEED, Floats, Work, waits
from cpsim.sim.timeline import Timeline


def simulate_reference(schedule: Schedule, work: Work) -> Timeline:
    """Run a schedule with SimPy.

    Raises:
        ScheduleError: some op never starts; the message shows its ranks, streams and text.
    """
    env = simpy.Environment()
    first, before = waits(schedule, work.eager)
    num_ops = len(schedule)
    start, end = np.zeros(num_ops), np.zeros(num_ops)
    cause = np.arange(num_ops, dtype=np.int32)
    done = [env.event() for _ in range(num_ops)]
    floor = None if work.constant else _Floor(env, schedule, work)

    def run(op: int) -> Generator[Any, Any, None]:
        waits_for = before[first[op] : first[op + 1]].tolist()
        launched = env.timeout(work.release_s[op])
        yield env.all_of([launched, *(done[p] for p in waits_for)])
        start[op] = env.now
        if waits_for:
            last = max(waits_for, key=lambda p: end[p])
            cause[op] = last if end[last] >= work.release_s[op] else op
        yield env.timeout(work.duration_s[op]) if floor is None else floor.enter(op)
        end[op] = env.now
        done[op].succeed()

    processes = [env.process(run(op)) for op in range(num_ops)]
    try:
        env.run(until=env.all_of(processes))
    except RuntimeError as stuck:
        held_up = next(op for op in range(num_ops) if not done[op].triggered)
        raise ScheduleError(f"deadlock: this op never starts: {schedule.op(held_up)}") from stuck
    return Timeline(schedule, start, end, cause)


class _Floor:
    """All running ops at once: their speeds change when an op starts or ends."""

    def __init__(self, env: simpy.Environment, schedule: Schedule, work: Work) -> None:
        self.env, self.schedule, self.work = env, schedule, work
        self.left: dict[int, float] = {}
        """Seconds of work at full speed that every running op has left."""
        self.exits: dict[int, simpy.Event] = {}
        self.changed = env.event()
        env.process(self._supervise())

    def enter(self, op: int) -> simpy.Event:
        """Start an op; the event returned occurs at its end."""
        self.left[op], self.exits[op] = float(self.work.duration_s[op]), self.env.event()
        if not self.changed.triggered:
            self.changed.succeed()
        return self.exits[op]

    def _supervise(self) -> Generator[Any, Any, None]:
        while True:
            speed = self._speeds()
            times = {op: max(left, 0.0) / speed[op] for op, left in self.left.items()}
            wait = min(times.values(), default=float("inf"))
            since = self.env.now
            timer = self.env.timeout(wait) if times else self.env.event()
            happened = yield self.env.any_of([self.changed, timer])
            passed = self.env.now - since
            ends = [op for op, time in times.items() if timer in happened and time <= wait * (1 + 1e-14)]
            for op in times:
                self.left[op] -= passed * speed[op]
            for op in ends:
                del self.left[op]
                self.exits.pop(op).succeed()
            self.changed = self.env.event() if self.changed.triggered else self.changed

    def _speeds(self) -> dict[int, float]:
        running = list(self.left)
        present: dict[int, list[int]] = {}
        for op in running:
            for rank in self.schedule.ranks_of(op):
                present.setdefault(rank, []).append(op)
        limit = {op: min(self._left(op, present[rank]) for rank in self.schedule.ranks_of(op)) for op in running}
        return share_fairly(running, limit, self.work)

    def _left(self, op: int, present: list[int]) -> float:
        """Speed of an op beside others on one rank."""
        own, pressure = self.work.pressure[op], self.work.pressure
        running = {int(pressure[o]) for o in present if o != op}
        taken = sum(1.0 - 1.0 / float(self.work.slowdown[own, c]) for c in sorted(running))
        return max(1.0 - taken, LEAST_SPEED)


def share_fairly(running: list[int], limit: dict[int, float], work: Work) -> dict[int, float]:
    """Max-min fair speeds of running ops by progressive filling.

    Args:
        running: op indices.
        limit: speed of every op if links were infinitely fast, 0 to 1.
        work: durations, flows and links.
    """
    flows: dict[int, dict[int, float]] = {}
    for op in running:
        at = range(work.flow_start[op], work.flow_start[op + 1])
        if len(at) and work.duration_s[op] > 0:
            flows[op] = {int(work.flow_link[a]): float(work.flow_bytes[a]) for a in at}
    speed = dict(limit)
    widest = {op: max(over.values()) for op, over in flows.items()}
    cap = {op: limit[op] * widest[op] / work.duration_s[op] for op in flows}
    left: Floats = work.link_bytes_per_s.astype(np.float64)
    open_ops = set(flows)
    level = 0.0
    while open_ops:
        load = np.zeros(len(left))
        for op in open_ops:
            for link, nbytes in flows[op].items():
                load[link] += nbytes / widest[op]
        full_at = np.where(load > 0, left / np.where(load > 0, load, 1.0), np.inf)
        level = min(float(full_at.min()), min(cap[op] for op in open_ops))
        full = full_at <= level * (1 + 1e-12)
        closed = {op for op in open_ops if cap[op] <= level or any(full[link] for link in flows[op])}
        for op in closed:
            rate = min(level, cap[op])
            speed[op] = rate * work.duration_s[op] / widest[op]
            for link, nbytes in flows[op].items():
                left[link] -= rate * nbytes / widest[op]
        open_ops -= closed
    return speed
