"""Tables of rows: which piece of memory every row of a copy or a sum comes from and goes to. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsim.real.run.storage import Part

Int32 = NDArray[np.int32]
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of ``width`` units; offsets ``int32[N]`` count units from the start of memory, NOWHERE: there is none."""

    width: int
    source: Int32
    """``[S, N]``: sources of every row, to be added."""
    wide: bool
    """Sources are in the accumulators' type."""
    target: Int32
    """``[N]``."""


def match(targets: Sequence[Part], sources: Sequence[Part]) -> Rows:
    """Rows that fill or add to all target parts from whatever source parts have the same plane, token and head.

    A row whose token lies in several source parts, or twice in one, has several sources.
    """
    runs = [(t, *run) for t in targets if t.num_heads for run in _runs(t, [s for s in sources if s.plane == t.plane])]
    width = math.gcd(*(count * t.width for t, _, count, _ in runs)) if runs else 1
    rows = [_rows(*run, width) for run in runs]
    most = max((len(source) for source, _ in rows), default=1)
    source = [np.concatenate([s, np.full((most - len(s), s.shape[1]), NOWHERE)]) for s, _ in rows]
    return Rows(
        width=width,
        source=np.concatenate(source, axis=1).astype(np.int32) if rows else np.zeros((1, 0), np.int32),
        wide=bool(sources and sources[0].wide),
        target=np.concatenate([t for _, t in rows]).astype(np.int32) if rows else np.zeros(0, np.int32),
    )


def _runs(target: Part, sources: Sequence[Part]) -> list[tuple[int, int, list[Part]]]:
    """(first head, heads, sources that have them) of the target's heads, cut where any source begins or ends."""
    last = target.head + target.num_heads
    cuts = {target.head, last}
    for s in sources:
        cuts |= {edge for edge in (s.head, s.head + s.num_heads) if target.head < edge < last}
    edges = sorted(cuts)
    return [
        (a, b - a, [s for s in sources if s.head <= a and b <= s.head + s.num_heads])
        for a, b in itertools.pairwise(edges)
    ]


def _rows(
    target: Part, head: int, count: int, sources: list[Part], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources ``[S, N]`` and targets ``[N]`` of one run of heads, cut into rows of ``width`` units."""
    row = np.flatnonzero(target.tokens >= 0)
    found = [column for s in sources for column in _found(s, target.tokens[row], head)]
    source = np.stack(found) if found else np.full((1, len(row)), NOWHERE)
    at = target.at + row * target.stride + (head - target.head) * target.width
    pieces = np.arange(0, count * target.width, width)
    spread = np.where(source[..., None] >= 0, source[..., None] + pieces, NOWHERE)
    return spread.reshape(len(source), -1), (at[:, None] + pieces).ravel()


def _found(part: Part, tokens: NDArray[np.int64], head: int) -> list[NDArray[np.int64]]:
    """Where a part holds every token's head, once per copy that it holds."""
    order = np.argsort(part.tokens, kind="stable")
    held = part.tokens[order]
    low, high = np.searchsorted(held, tokens), np.searchsorted(held, tokens, side="right")
    copies = int((high - low).max(initial=0))
    made = []
    for nth in range(copies):
        there = low + nth < high
        row = order[np.where(there, low + nth, 0)]
        made.append(np.where(there, part.at + row * part.stride + (head - part.head) * part.width, NOWHERE))
    return made
