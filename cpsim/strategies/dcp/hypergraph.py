"""One level of placing: token and computation blocks in parts, so that few bytes cross between parts.

Vertices are token blocks and computation blocks; a net joins a head group of a token block, as queries or as keys, with
the computations that read it. Q, O and log-sum-exp of a unit have the same vertices, so they are one net: exact, and a
third of the nets. The objective is the connectivity metric: a net's bytes for every part that it touches but one.

Reference: DCP (arXiv 2510.10620), section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.strategies.dcp.blocks import Blocks


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """What is split at one level: D token blocks at home here, C computations."""

    blocks: Blocks
    data: Ints
    """Token blocks that have a home here, ``[D]``; others lie elsewhere wherever their computations are put."""
    chosen: Ints
    """Computation blocks, ``[C]``."""

    @classmethod
    def of(cls, blocks: Blocks) -> Level:
        """All blocks."""
        return cls(blocks, np.arange(len(blocks)), np.arange(blocks.computations))

    @property
    def tokens(self) -> Ints:
        """Tokens of every token block, ``[D]``."""
        return self.blocks.tokens[self.data]

    @property
    def work(self) -> Ints:
        """Area of every computation, ``[C]``."""
        return self.blocks.area[self.chosen]

    @property
    def nets(self) -> Ints:
        """The nets of every computation, its units, ``[C, 2]``."""
        return np.ascontiguousarray(self.blocks.units[:, self.chosen].T)

    @property
    def net_bytes(self) -> Ints:
        """Bytes that a net moves forward to one part more, ``[2 * units]``."""
        b = self.blocks
        return b.unit_bytes(sum(b.query_bytes("fwd")), b.key_bytes("fwd")[0])

    def nets_of_data(self) -> Ints:
        """The nets of every token block, ``[D, 2 * groups]``."""
        groups = self.blocks.num_groups
        query = self.data[:, None] * groups + np.arange(groups)
        return np.concatenate([query, len(self.blocks) * groups + query], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A partition of a level: part of every token block ``[D]`` and of every computation ``[C]``."""

    data: Ints
    work: Ints


def even_tokens(level: Level, parts: Parts, num_parts: int) -> Parts:
    """Move token blocks, those that cost least, until no two parts differ by more tokens than the largest block."""
    data = parts.data.copy()
    if len(data):
        pins = _pins(level.nets, parts.work, level.nets_of_data(), data, len(level.net_bytes), num_parts)
        _even_tokens(level.nets_of_data(), level.net_bytes, level.tokens, data, pins)
    return Parts(data, parts.work)


def even_work(level: Level, parts: Parts, limit: float, num_parts: int) -> Parts:
    """Move computations, those that cost least, until no part has more work than the limit, where that is possible."""
    work = parts.work.copy()
    pins = _pins(level.nets, work, level.nets_of_data(), parts.data, len(level.net_bytes), num_parts)
    _even_work(level.nets, level.net_bytes, level.work, work, pins, limit)
    return Parts(parts.data, work)


def improved(level: Level, parts: Parts, limit: float, num_parts: int, rng: np.random.Generator) -> Parts:
    """Move computations where that saves bytes, or evens work at no cost, until nothing does; homes stay."""
    work = parts.work.copy()
    pins = _pins(level.nets, work, level.nets_of_data(), parts.data, len(level.net_bytes), num_parts)
    _improve(level.nets, level.net_bytes, level.work, work, pins, limit, rng.permutation(len(work)))
    return Parts(parts.data, work)


def greedy(level: Level, limit: float, num_parts: int, rng: np.random.Generator) -> Parts:
    """Tokens in order or in zigzag, equally many in every part; computations one by one where they cost least; then
    improved. The order that moves less wins."""
    chunk = (np.cumsum(level.tokens) - level.tokens / 2) * 2 * num_parts // max(level.tokens.sum(), 1)
    chunk = np.minimum(chunk, 2 * num_parts - 1).astype(np.int64)
    homes = chunk // 2, np.minimum(chunk, 2 * num_parts - 1 - chunk)
    made = [_placed(level, home, limit, rng, num_parts) for home in homes]
    return min(made, key=lambda parts: moved_bytes(level, parts, num_parts))


def moved_bytes(level: Level, parts: Parts, num_parts: int) -> int:
    """The objective: bytes of every net for every part that it touches but one."""
    pins = _pins(level.nets, parts.work, level.nets_of_data(), parts.data, len(level.net_bytes), num_parts)
    return int((np.maximum((pins > 0).sum(axis=1) - 1, 0) * level.net_bytes).sum())


def _placed(level: Level, data: Ints, limit: float, rng: np.random.Generator, num_parts: int) -> Parts:
    """Computations where they cost least, for homes that are nearly even."""
    parts = even_tokens(level, Parts(data, np.zeros(0, np.int64)), num_parts)
    pins = _pins(level.nets[:0], parts.work, level.nets_of_data(), parts.data, len(level.net_bytes), num_parts)
    order = np.argsort(-level.work, kind="stable")
    placed = Parts(parts.data, _construct(level.nets, level.net_bytes, level.work, pins, limit, order))
    return improved(level, even_work(level, placed, limit, num_parts), limit, num_parts, rng)


@compiled()
def _pins(nets, work_part, data_nets, data_part, num_nets, num_parts):  # type: ignore[no-untyped-def]
    """How many vertices of every net are in every part, ``[nets, parts]``."""
    pins = np.zeros((num_nets, num_parts), np.int32)
    for i in range(len(work_part)):
        for net in nets[i]:
            pins[net, work_part[i]] += 1
    for i in range(len(data_part)):
        for net in data_nets[i]:
            pins[net, data_part[i]] += 1
    return pins


@compiled()
def _cost(nets, nbytes, pins, old, new):  # type: ignore[no-untyped-def]
    """Bytes more when a vertex of these nets moves from part ``old``, or from none, to part ``new``."""
    cost = 0
    for net in nets:
        if pins[net, new] == 0:
            cost += nbytes[net]
        if old >= 0 and pins[net, old] == 1:
            cost -= nbytes[net]
    return cost


@compiled()
def _move(nets, pins, old, new):  # type: ignore[no-untyped-def]
    for net in nets:
        if old >= 0:
            pins[net, old] -= 1
        pins[net, new] += 1


@compiled()
def _loads(part, weight, num_parts):  # type: ignore[no-untyped-def]
    """Sum of the weights in every part, ``[parts]``."""
    load = np.zeros(num_parts, np.int64)
    for i in range(len(part)):
        load[part[i]] += weight[i]
    return load


@compiled()
def _even_tokens(nets, nbytes, tokens, part, pins):  # type: ignore[no-untyped-def]
    held = _loads(part, tokens, pins.shape[1])
    while held.max() - held.min() > tokens.max():
        full, empty = np.argmax(held), np.argmin(held)
        best, least = -1, 0.0
        for i in range(len(tokens)):
            if part[i] == full:
                cost = _cost(nets[i], nbytes, pins, full, empty) / tokens[i]
                if best < 0 or cost < least:
                    best, least = i, cost
        _move(nets[best], pins, full, empty)
        part[best] = empty
        held[full] -= tokens[best]
        held[empty] += tokens[best]


@compiled()
def _even_work(nets, nbytes, work, part, pins, limit):  # type: ignore[no-untyped-def]
    load = _loads(part, work, pins.shape[1])
    while load.max() > limit:
        full = np.argmax(load)
        best, best_to, least = -1, -1, 0.0
        for i in range(len(work)):
            if part[i] != full:
                continue
            for to in range(len(load)):
                after = load[to] + work[i]
                if to != full and (after <= limit or after < load[full]):
                    cost = (_cost(nets[i], nbytes, pins, full, to) + (after > limit) * 1e18) / work[i]
                    if best < 0 or cost < least:
                        best, best_to, least = i, to, cost
        if best < 0:
            break
        _move(nets[best], pins, full, best_to)
        part[best] = best_to
        load[full] -= work[best]
        load[best_to] += work[best]


@compiled()
def _construct(nets, nbytes, work, pins, limit, order):  # type: ignore[no-untyped-def]
    part, load = np.zeros(len(work), np.int64), np.zeros(pins.shape[1], np.int64)
    for i in order:
        best, least = -1, 0
        for to in range(len(load)):
            if load[to] + work[i] <= limit:
                cost = _cost(nets[i], nbytes, pins, -1, to)
                if best < 0 or cost < least or (cost == least and load[to] < load[best]):
                    best, least = to, cost
        if best < 0:
            best = int(np.argmin(load))
        _move(nets[i], pins, -1, best)
        part[i] = best
        load[best] += work[i]
    return part


@compiled()
def _improve(nets, nbytes, work, part, pins, limit, order):  # type: ignore[no-untyped-def]
    load = _loads(part, work, pins.shape[1])
    moves = 1
    while moves:
        moves = 0
        for i in order:
            old = part[i]
            best, least = -1, 0
            for to in range(len(load)):
                if to == old or load[to] + work[i] > limit:
                    continue
                cost = _cost(nets[i], nbytes, pins, old, to)
                evens = cost == 0 and load[to] + work[i] < load[old]
                if cost < least or (best < 0 and evens):
                    best, least = to, cost
            if best >= 0:
                _move(nets[i], pins, old, best)
                part[i] = best
                load[old] -= work[i]
                load[best] += work[i]
                moves += 1
