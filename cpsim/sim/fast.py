"""The fast engine: the same meaning as the reference, compiled.

Without links and interference a start is the maximum of ends (max-plus), one pass in list order; otherwise ops are
followed event by event (``cpsim.sim.fluid``).
"""

from __future__ import annotations

import numpy as np

from cpsim.errors import ScheduleError
from cpsim.schedule.schedule import Schedule
from cpsim.schedule.work import Work, earliest, waits
from cpsim.sim.fluid import run
from cpsim.sim.timeline import Timeline


def simulate(schedule: Schedule, work: Work) -> Timeline:
    """Run a schedule; equal to ``simulate_reference`` bit for bit at constant rates, to 1e-9 otherwise.

    Raises:
        ScheduleError: some op never starts; the message shows its ranks, streams and text.
    """
    first, before = waits(schedule, work.eager)
    if work.constant and np.all(before < np.repeat(np.arange(len(schedule)), np.diff(first))):
        start, end, cause = earliest(first, before, work.duration_s, work.release_s)
        return Timeline(schedule, start, end, cause)
    start, end, cause = run(first, before, schedule, work)
    if np.isnan(end).any():
        held_up = int(np.flatnonzero(np.isnan(end))[0])
        raise ScheduleError(f"deadlock: this op never starts: {schedule.op(held_up)}")
    return Timeline(schedule, start, end, cause)
