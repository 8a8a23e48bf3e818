"""Ranks as a grid: Ulysses groups, which exchange heads, times rings, which pass keys and values on.

Rings *apart* exchange no heads: each has all heads of tokens of its own.

Reference: Fang & Zhao 2024, "USP" (arXiv 2405.07719), section 4; Gu et al. 2024, "LoongTrain" (arXiv 2406.18485),
sections 4.2 (head-first and context-first placement) and 4.3 (double rings).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from cpsim.masks.slices import Ints, Whole
from cpsim.schedule.schedule import Int32

PLACEMENTS: Final = ("head_first", "context_first")


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """Hops of keys and values in one direction of a ring; several that overlap have lanes of their own."""

    next: Ints
    """Where every rank sends, ``[ranks]``."""
    previous: Ints
    """Where it receives from, ``[ranks]``."""
    lanes: tuple[str, str]
    leaves: Ints
    """Step in which every hop starts, ``[hops]``."""
    used: Ints
    """Step that uses what it brings, ``[hops]``."""


@dataclass(frozen=True, eq=False)
class RingGrid:
    """Every rank has a place in one ring and computes one part of the heads; what follows from that is kept."""

    ranks: Ints
    """``[places, rings]``: a column is a ring, and a row is a Ulysses group unless rings are apart."""
    inner: int
    """Places of an inner ring: keys and values circle there before they move on to the next inner ring."""
    place: Ints
    """Place of every rank in its ring, ``[ranks]``."""
    ring: Ints
    """Ring of every rank, ``[ranks]``."""
    backwards: bool = False
    """Keys travel from each place to the one before it, from where a round in the other direction leaves them."""
    apart: bool = False
    """Rings have tokens of their own, and every rank computes all heads."""
    copies: int = 1
    """Replication factor: ranks of a Ulysses group, of which one is there."""

    @property
    def num_places(self) -> int:
        """Ranks of a ring."""
        return len(self.ranks)

    @property
    def num_parts(self) -> int:
        """Ranks of a Ulysses group."""
        return 1 if self.apart else int(self.ranks.shape[1]) * self.copies

    @property
    def part(self) -> Ints:
        """Part of the heads of every rank, ``[ranks]``."""
        return np.zeros_like(self.ring) if self.apart else self.ring

    @property
    def num_shards(self) -> int:
        """Shards that the tokens are cut into: ranks at the same place hold the same one unless rings are apart."""
        return self.ranks.size if self.apart else self.num_places

    @property
    def shard(self) -> Ints:
        """Shard of every rank, ``[ranks]``."""
        return np.arange(self.ranks.size) if self.apart else self.place

    def at(self, place: Whole) -> Ints:
        """The ranks at other places of every rank's own ring, in the shape of ``place`` (``[..., ranks]``)."""
        return self.ranks[place, self.ring]

    @cached_property
    def source(self) -> Int32:
        """Shard whose keys every rank uses in each step, ``[steps, ranks]``."""
        place = np.ascontiguousarray(sources(self.num_places, self.inner, self.backwards)[:, self.place])
        return (self.at(place) if self.apart else place).astype(np.int32)

    @cached_property
    def hops(self) -> tuple[Int32, Int32]:
        """Where gradients go after every step, and where those come from that arrive then, ``[steps, ranks]``.

        They follow the keys: to who uses these in the next step, and home from the last one.
        """
        ranks, owner = np.arange(self.ranks.size), self.source if self.apart else self.at(self.source)
        user = np.empty((self.num_places + 1, len(ranks)), np.int32)
        user[np.arange(self.num_places)[:, None], owner] = ranks
        user[-1] = ranks
        to = np.take_along_axis(user[1:], owner, axis=1)
        back = np.empty_like(to)
        np.put_along_axis(back, to, np.broadcast_to(ranks, to.shape), axis=1)
        return to, back

    @cached_property
    def tracks(self) -> list[Track]:
        """How keys and values move: from inner ring to inner ring, and around them; at most these two."""
        outer, inner = np.divmod(self.place, self.inner)
        windows, steps = self.num_places // self.inner, np.arange(self.num_places)
        found = []
        for moves, leaves, ahead, to, back in (
            (windows > 1, steps[: -self.inner : self.inner], self.inner, (outer + 1, inner), (outer - 1, inner)),
            (self.inner > 1, steps[(steps + 1) % self.inner > 0], 1, (outer, inner + 1), (outer, inner - 1)),
        ):
            if moves:
                there, whence = (self.at(o % windows * self.inner + i % self.inner) for o, i in (to, back))
                there, whence = (whence, there) if self.backwards else (there, whence)
                found.append(Track(there, whence, ("send", "recv"), leaves, leaves + ahead))
        if len(found) == 2:
            found[0] = replace(found[0], lanes=("outer_send", "outer_recv"))
        return found


@lru_cache(maxsize=32)
def make_grid(
    num_ranks: int,
    parts: int = 1,
    placement: str = "head_first",
    inner: int | None = None,
    apart: bool = False,
    copies: int = 1,
) -> RingGrid:
    """``num_ranks / parts`` places times ``parts``.

    Args:
        num_ranks: of the grid.
        parts: ranks of a Ulysses group, or rings that are apart, a divisor of it.
        placement: ``head_first``: Ulysses groups are consecutive ranks; ``context_first``: rings are.
        inner: places of an inner ring, a divisor of the places; None: all of them.
        apart: rings have tokens of their own.
        copies: ranks of a Ulysses group, of which one is there; ``parts`` counts those that are there.
    """
    places, ranks = num_ranks // parts, np.arange(num_ranks)
    grid = ranks.reshape(places, parts) if placement == "head_first" else ranks.reshape(parts, places).T
    place, ring = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    place[grid], ring[grid] = np.indices(grid.shape)
    return RingGrid(grid, inner or places, place, ring, apart=apart, copies=copies)


def sources(places: int, inner: int | None = None, backwards: bool = False) -> Ints:
    """Place whose keys each place uses in each step, ``[steps, places]``."""
    if backwards:
        return np.asarray((np.arange(places) + np.arange(places)[:, None] + 1) % places, np.int64)
    inner = inner or places
    outer, place = np.divmod(np.arange(places), inner)
    return np.asarray((outer - outer[:, None]) % (places // inner) * inner + (place - place[:, None]) % inner, np.int64)
