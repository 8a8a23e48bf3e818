"""The error of an op: where it is, what is wrong, and its neighbours."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from cpsim.errors import ScheduleError
from cpsim.schedule.schedule import STREAMS, Schedule


def fail(schedule: Schedule, index: int, why: str) -> NoReturn:
    """Raise with the op and its neighbours on its first lane."""
    lane = slice(schedule.lane_start[index], schedule.lane_start[index] + 1)
    rank, stream = int(schedule.lane_rank[lane][0]), int(schedule.lane_stream[lane][0])
    same = (schedule.lane_rank == rank) & (schedule.lane_stream == stream)
    lane_ops = schedule.op_of_lane()[same]
    at = int(np.searchsorted(lane_ops, index))
    shown = (("> " if i == index else "  ") + str(schedule.op(i)) for i in lane_ops[max(0, at - 2) : at + 3].tolist())
    raise ScheduleError("\n".join([f"rank {rank}, stream {STREAMS[stream]}, op {index}: {why}", *shown]))
