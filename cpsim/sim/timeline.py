"""The result of a simulation: when every op ran, what held it back, and what that means for a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.schedule.schedule import COMMUNICATION_KINDS, STREAMS, Int32, Kind, Schedule, is_one_of
from cpsim.schedule.work import Floats


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every op of a schedule, ``float64[N]`` seconds."""

    schedule: Schedule
    start_s: Floats
    end_s: Floats
    cause: Int32
    """The op whose end let each op start; its own index where it waited for its host, ``[N]``."""

    @property
    def makespan_s(self) -> float:
        """End of the last op; 0 for an empty schedule."""
        return float(self.end_s.max(initial=0.0))

    def rank_end_s(self) -> Floats:
        """End of the last op of every rank, ``[num_ranks]``."""
        ends = np.zeros(self.schedule.num_ranks)
        _last_ends(ends, self.schedule.lane_start, self.schedule.lane_rank, self.end_s)
        return ends

    def critical_path(self, last: int | None = None) -> Ints:
        """Ops that the makespan consists of, first to last; the first one waited for its host or for nothing.

        Args:
            last: op whose end is asked for in place of the makespan.
        """
        if len(self.schedule) == 0:
            return np.zeros(0, np.int64)
        path = [int(np.argmax(self.end_s)) if last is None else last]
        while self.cause[path[-1]] != path[-1]:
            path.append(int(self.cause[path[-1]]))
        return np.array(path[::-1])

    def exposed_communication_s(self) -> float:
        """Seconds in which the slowest rank communicates, or waits for data, and computes nothing.

        What it waits for its own host only is not counted.
        """
        return float(np.diff(self.exposed(int(np.argmax(self.rank_end_s())))).sum())

    def exposed(self, rank: int) -> Floats:
        """When a rank communicates, or waits for data, and computes nothing: start and end, ``float64[K, 2]`` s."""
        mine = np.unique(self.schedule.op_of_lane(np.flatnonzero(self.schedule.lane_rank == rank)))
        talks = is_one_of(self.schedule.kind[mine], COMMUNICATION_KINDS)
        host_bound = (self.cause[mine] == mine) & (self.start_s[mine] > 0)
        finish = float(self.end_s[mine].max(initial=0.0))
        return np.asarray(_uncovered(self.start_s[mine], self.end_s[mine], talks, host_bound, finish), np.float64)

    def rows(self, ranks: Iterable[int]) -> list[dict[str, object]]:
        """One row per op and rank, ready for a table or a Gantt chart; ``critical``: it is on the critical path."""
        schedule = self.schedule
        critical = np.zeros(len(schedule), np.bool_)
        critical[self.critical_path()] = True
        wanted = np.isin(schedule.lane_rank, list(ranks))
        return [
            {
                "op": int(i),
                "rank": int(schedule.lane_rank[entry]),
                "stream": STREAMS[schedule.lane_stream[entry]],
                "name": schedule.op(int(i)).name,
                "kind": Kind(int(schedule.kind[i])).name.lower(),
                "start_s": float(self.start_s[i]),
                "end_s": float(self.end_s[i]),
                "critical": bool(critical[i]),
            }
            for entry, i in zip(np.flatnonzero(wanted).tolist(), schedule.op_of_lane()[wanted].tolist(), strict=True)
        ]


@compiled()
def _last_ends(ends, lane_start, lane_rank, end):  # type: ignore[no-untyped-def]
    for op in range(len(end)):
        for lane in range(lane_start[op], lane_start[op + 1]):
            ends[lane_rank[lane]] = max(ends[lane_rank[lane]], end[op])


@compiled()
def _uncovered(start, end, talks, host_bound, finish):  # type: ignore[no-untyped-def]
    """Times before ``finish`` that no computing op covers, without those before a host-bound computing op."""
    compute = np.flatnonzero(~talks)
    gaps, count, covered_to = np.zeros((len(compute) + 1, 2)), 0, 0.0
    for i in compute[np.argsort(start[compute])]:
        if start[i] > covered_to and not host_bound[i]:
            gaps[count, 0], gaps[count, 1] = covered_to, start[i]
            count += 1
        covered_to = max(covered_to, end[i])
    if finish > covered_to:
        gaps[count, 0], gaps[count, 1] = covered_to, finish
        count += 1
    return gaps[:count]
