"""Ranks as a grid: Ulysses groups, which exchange heads, times rings, which pass keys and values on.

Reference: Fang & Zhao 2024, "USP" (arXiv 2405.07719), section 4; Gu et al. 2024, "LoongTrain" (arXiv 2406.18485),
sections 4.2 (head-first and context-first placement) and 4.3 (double rings).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from cpsim.masks import Ints

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
class Grid:
    """Every rank has a place in one ring and computes one part of the heads; what follows from that is kept."""

    ranks: Ints
    """``[places, parts]``: a row is a Ulysses group, a column is a ring."""
    inner: int
    """Places of an inner ring: keys and values circle there before they move on to the next inner ring."""
    place: Ints
    """Of every rank, ``[ranks]``."""
    part: Ints
    """Of every rank, ``[ranks]``."""
    backwards: bool = False
    """Keys travel from each place to the one before it, from where a round in the other direction leaves them."""

    @property
    def num_places(self) -> int:
        """Ranks of a ring."""
        return len(self.ranks)

    @property
    def num_parts(self) -> int:
        """Ranks of a Ulysses group."""
        return int(self.ranks.shape[1])

    def at(self, place: Ints) -> Ints:
        """The ranks at other places of every rank's own ring, in the shape of ``place`` (``[..., ranks]``)."""
        return self.ranks[place, self.part]

    @cached_property
    def source(self) -> Ints:
        """Place whose keys every rank uses in each step, ``[steps, ranks]``."""
        return np.ascontiguousarray(sources(self.num_places, self.inner, self.backwards)[:, self.place])

    @cached_property
    def hops(self) -> tuple[Ints, Ints]:
        """Where gradients go after every step, and where those come from that arrive then, ``[steps, ranks]``.

        They follow the keys: to who uses these in the next step, and home from the last one.
        """
        ranks, owner = np.arange(self.ranks.size), self.at(self.source)
        user = np.empty((self.num_places + 1, len(ranks)), np.int64)
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


@lru_cache(maxsize=16)
def make_grid(num_ranks: int, parts: int = 1, placement: str = "head_first", inner: int | None = None) -> Grid:
    """``num_ranks / parts`` places times ``parts``.

    Args:
        num_ranks: of the grid.
        parts: ranks of a Ulysses group, a divisor of it.
        placement: ``head_first``: Ulysses groups are consecutive ranks; ``context_first``: rings are.
        inner: places of an inner ring, a divisor of the places; None: all of them.
    """
    places, ranks = num_ranks // parts, np.arange(num_ranks)
    grid = ranks.reshape(places, parts) if placement == "head_first" else ranks.reshape(parts, places).T
    place, part = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    place[grid], part[grid] = np.indices(grid.shape)
    return Grid(grid, inner or places, place, part)


def sources(places: int, inner: int | None = None, backwards: bool = False) -> Ints:
    """Place whose keys each place uses in each step, ``[steps, places]``."""
    if backwards:
        return np.asarray((np.arange(places) + np.arange(places)[:, None] + 1) % places, np.int64)
    inner = inner or places
    outer, place = np.divmod(np.arange(places), inner)
    return np.asarray(
        (outer - outer[:, None]) % (places // inner) * inner + (place - place[:, None]) % inner, np.int64
    )
