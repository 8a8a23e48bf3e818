"""What planners answer, in one form, and what it takes when every microbatch is simulated by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsim.prediction.batches.prices import Prices
from cpsim.prediction.batches.result import BatchPlan

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Turn:
    """Documents that a group computes in one microbatch."""

    first_rank: int
    size: int
    """Ranks of the group, consecutive ones."""
    documents: tuple[int, ...]
    """Numbers in the batch."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """Turns in rounds: all ranks wait for each other between rounds, and for their group before every turn."""

    num_ranks: int
    rounds: tuple[tuple[Turn, ...], ...]

    def documents(self) -> list[int]:
        """Of all turns, ascending: of a whole batch every number once."""
        return sorted(d for turns in self.rounds for turn in turns for d in turn.documents)

    def time_s(self, seconds: Sequence[Sequence[float]]) -> float:
        """Seconds of the batch, of those of every turn of every round."""
        end = 0.0
        for turns, taken in zip(self.rounds, seconds, strict=True):
            free = np.full(self.num_ranks, end)
            for turn, s in zip(turns, taken, strict=True):
                ranks = slice(turn.first_rank, turn.first_rank + turn.size)
                free[ranks] = free[ranks].max() + s
            end = float(free.max())
        return end


def of_plan(plan: BatchPlan) -> Timetable:
    """A plan of ``plan_batch``: one round."""
    turns = tuple(Turn(pack.first_rank, pack.size, pack.documents) for pack in plan.packs)
    return Timetable(plan.num_ranks, (turns,))


class Judge:
    """Times of timetables; microbatches that are alike are simulated once."""

    def __init__(self, prices: Prices, lengths: Sequence[int]) -> None:
        self.prices, self.lengths = prices, tuple(lengths)
        self.known: dict[tuple[int, tuple[int, ...]], float] = {}

    def turn_seconds(self, turns: Iterable[Turn]) -> list[float]:
        """Seconds of turns, each simulated on the ranks of its group."""
        keys = [(turn.size, tuple(sorted(self.lengths[d] for d in turn.documents))) for turn in turns]
        new: dict[int, list[tuple[int, ...]]] = {}
        for size, pack in dict.fromkeys(keys):
            if (size, pack) not in self.known:
                new.setdefault(size, []).append(pack)
        for size, packs in new.items():
            found = self.prices.seconds(packs, size).tolist()
            self.known.update({(size, pack): s for pack, s in zip(packs, found, strict=True)})
        return [self.known[key] for key in keys]

    def seconds(self, table: Timetable) -> float:
        """Seconds of all passes of a batch."""
        return table.time_s([self.turn_seconds(turns) for turns in table.rounds])
