"""Many draws of the costs in one pass: makespans of a simulated schedule whose ops take a little more or less time.

An op keeps what it lost to others that ran beside it, scaled by a factor of its own, so that a start remains the last
end that it waits for: exact at constant rates, and with shared links and interference as long as the same ops meet.
Which path is the longest is found anew for every draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from cpsim.runtime.compiled import compiled
from cpsim.schedule.schedule import Int8, Int32
from cpsim.schedule.work import Bools, Floats, Work, waits
from cpsim.sim.timeline import Timeline

BATCH: Final = 256
"""Draws that are followed together: so many that loops over them take longer than what begins and ends a loop, while
the ends that are waited for stay in the processor's caches."""


@dataclass(frozen=True)
class Followed:
    """What makespans with other costs follow from: of a simulated schedule of N ops what each waits for and takes."""

    first: Int32
    before: Int32
    """Predecessors, CSR: see ``waits``."""
    alone_s: Floats
    """Seconds alone, ``[N]``."""
    lost_s: Floats
    """Seconds lost to others that ran beside it, ``[N]``."""
    release_s: Floats
    """When hosts have launched it, ``[N]``."""
    group: Int8
    """Row of the factors of its cost, ``[N]``."""

    @classmethod
    def of(cls, timeline: Timeline, work: Work, group: Int8) -> Followed:
        """A schedule that was simulated with ``work``, and the row of factors of every op, ``[N]``."""
        lost = timeline.end_s - timeline.start_s
        lost -= work.duration_s
        return cls(*waits(timeline.schedule, work.eager), work.duration_s, lost, work.release_s, group)

    @cached_property
    def _kept(self) -> tuple[Int32, int, Bools]:
        return _places(self.first, self.before)  # type: ignore[no-any-return]

    def makespans(self, factors: Floats, lost: Floats, host: Floats) -> Floats:
        """Makespans of D draws.

        Args:
            factors: by how much ops take longer alone, ``[groups, D]``.
            lost: by how much they lose more to others, ``[D]``.
            host: by how much later hosts launch, ``[D]``.

        Returns:
            ``[D]`` seconds.
        """
        found = np.empty(factors.shape[1])
        for start in range(0, len(found), BATCH):
            some = slice(start, start + BATCH)
            _follow(
                self.first,
                self.before,
                self.alone_s,
                self.lost_s,
                self.release_s,
                self.group,
                np.ascontiguousarray(factors[:, some]),
                lost[some],
                host[some],
                found[some],
                *self._kept,
            )
        return found


@compiled(nogil=True, error_model="numpy")
def _follow(  # type: ignore[no-untyped-def]
    first, before, alone, lost, release, group, factor, more_lost, later, found, place, num_places, last
):
    """Each loop over draws does as much at once as it can, because these are all the time that it takes."""
    end, at = np.empty((num_places, len(found))), np.empty(len(found))
    found[:] = 0.0
    for op in range(len(alone)):
        entry, stop, mine, kind = first[op], first[op + 1], place[op], group[op]
        if entry == stop:
            for draw in range(len(found)):
                at[draw] = release[op] * later[draw]
        else:
            one = place[before[entry]]
            for draw in range(len(found)):
                at[draw] = max(release[op] * later[draw], end[one, draw])
        for pair in range(entry + 1, stop, 2):
            one, other = place[before[pair]], place[before[min(pair + 1, stop - 1)]]
            for draw in range(len(found)):
                at[draw] = max(at[draw], max(end[one, draw], end[other, draw]))
        for draw in range(len(found)):
            end[mine, draw] = at[draw] + (alone[op] * factor[kind, draw] + lost[op] * more_lost[draw])
        if last[op]:
            for draw in range(len(found)):
                found[draw] = max(found[draw], end[mine, draw])


@compiled(nogil=True, error_model="numpy")
def _places(first, before):  # type: ignore[no-untyped-def]
    """Where the ends of every op are kept until nobody waits for it any more, ``[N]``; how many places that takes: few,
    so that they stay in a cache however many ops there are; and which ops nobody waits for."""
    num_ops = len(first) - 1
    last = np.arange(num_ops, dtype=np.int32)  # op that waits for each op last
    for op in range(num_ops):
        for entry in range(first[op], first[op + 1]):
            last[before[entry]] = op
    waited_for_by_none = last == np.arange(num_ops)
    place, free = np.empty(num_ops, np.int32), np.empty(num_ops, np.int32)
    num_free, num_places = 0, 0
    for op in range(num_ops):
        for entry in range(first[op], first[op + 1]):
            then = before[entry]
            if last[then] == op:
                free[num_free], last[then] = place[then], -1
                num_free += 1
        if num_free > 0:
            num_free -= 1
            place[op] = free[num_free]
        else:
            place[op] = num_places
            num_places += 1
        if last[op] == op:
            free[num_free] = place[op]
            num_free += 1
    return place, num_places, waited_for_by_none
