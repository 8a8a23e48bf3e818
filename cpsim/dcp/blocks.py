"""Blocks of tokens and of computation, and what a placement of them on ranks moves.

Tokens are cut into blocks of one document each. A computation block is a (query block, key block, head group) with
unmasked pairs; head groups share key-value heads, so that heads of a group are never apart. A block of tokens has one
rank, its home, with all heads; a computation block runs on any rank.

Reference: DCP (arXiv 2510.10620), sections 4.1 and 4.2. Differs: query heads of one key-value head are one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.errors import InfeasibleError
from cpsim.mask_names import MASK_NAMES
from cpsim.masks import Ints, areas_between
from cpsim.schedule import Pass
from cpsim.workload import LSE_BYTES, Workload

MOST_BLOCKS: Final = 4096
"""Token blocks of one case: pairs of them are counted in a square."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """n token blocks, in the order of their tokens, and C computation blocks, ordered by group, query and key."""

    document: Ints
    """Of every token block, ``[n]``."""
    first: Ints
    """First token, ``[n]``."""
    tokens: Ints
    """``[n]``; the last block of a document may be shorter."""
    query: Ints
    """Token block of the queries, ``[C]``."""
    key: Ints
    """Token block of the keys, ``[C]``."""
    group: Ints
    """Head group, ``[C]``."""
    area: Ints
    """Unmasked (query, key) pairs of one head, positive, ``[C]``."""
    num_groups: int
    q_bytes: int
    """Of Q, and of O, dO and dQ, of one token and head group."""
    kv_bytes: int
    """Of K and V together, and of dK and dV."""
    lse_bytes: int
    """Of the log-sum-exp."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def computations(self) -> int:
        """C."""
        return len(self.area)

    def query_bytes(self, pass_: Pass) -> tuple[int, int]:
        """Bytes of one token and head group that a rank without the queries gets, and that it gives back."""
        if pass_ == "fwd":
            return self.q_bytes, self.q_bytes + self.lse_bytes
        return 3 * self.q_bytes + self.lse_bytes, self.q_bytes

    def key_bytes(self, pass_: Pass) -> tuple[int, int]:
        """The same of keys and values; backward their gradients go back."""
        return self.kv_bytes, self.kv_bytes * (pass_ == "bwd")

    def unit_of(self, side: Ints) -> Ints:
        """Unit, a head group of a token block, of every computation block's queries or keys, ``[C]``.

        Args:
            side: ``query`` or ``key``.
        """
        return side * self.num_groups + self.group

    @property
    def units(self) -> Ints:
        """Units of the queries and of the keys of every computation block, ``[2, C]``; those of keys are numbered after
        all those of queries, ``2 * n * groups`` in all."""
        return np.stack([self.unit_of(self.query), len(self) * self.num_groups + self.unit_of(self.key)])

    def unit_bytes(self, query: int, key: int) -> Ints:
        """Bytes of every unit, numbered as in ``units``, from those of one token: ``[2 * n * groups]``."""
        tokens = np.repeat(self.tokens, self.num_groups)
        return np.concatenate([tokens * query, tokens * key])


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which rank holds and computes what."""

    home: Ints
    """Rank of every token block, ``[n]``."""
    worker: Ints
    """Rank of every computation block, ``[C]``."""
    solver: str = ""
    """Who found it, in words."""


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """What a placement costs, before any schedule."""

    moved: Ints
    """Bytes from every rank to every other, ``[ranks, ranks]``."""
    gpus_per_node: int
    work: Ints
    """Unmasked pairs times head groups of every rank, ``[ranks]``."""
    tokens: Ints
    """Tokens at home on every rank, ``[ranks]``."""

    @property
    def between_nodes(self) -> Ints:
        """Bytes between ranks of different nodes, ``[ranks, ranks]``."""
        node = np.arange(len(self.moved)) // self.gpus_per_node
        return np.where(node[:, None] != node, self.moved, 0)

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; 1 where there is none."""
        return float(self.work.max() * len(self.work) / max(self.work.sum(), 1))


def cut(workload: Workload, block: int, num_groups: int) -> Blocks:
    """Token and computation blocks of a workload.

    Args:
        workload: any mask over any documents.
        block: tokens of a block, at most.
        num_groups: head groups, a divisor of the key-value heads.

    Raises:
        InfeasibleError: head groups do not divide the key-value heads, or there are too many blocks.
    """
    lengths = _documents(workload)
    per_document = -(-lengths // block)
    document = np.repeat(np.arange(len(lengths)), per_document)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    tokens = np.minimum(block, lengths[document] - nth * block)
    if len(tokens) > MOST_BLOCKS:
        raise InfeasibleError(
            f"dcp places up to {MOST_BLOCKS} blocks of tokens, got {len(tokens)} of {len(lengths)} documents with "
            f"block: {block}; use larger blocks, or fewer documents"
        )
    return cut_at(workload, document, np.concatenate(([0], np.cumsum(tokens))), num_groups)


def cut_at(workload: Workload, document: Ints, edges: Ints, num_groups: int) -> Blocks:
    """Token blocks with given edges, and their computation blocks.

    Args:
        workload: any mask over any documents.
        document: of every token block, ``[n]``.
        edges: first token of every block, and the end of the last one, ``[n + 1]``.
        num_groups: head groups, a divisor of the key-value heads.

    Raises:
        InfeasibleError: head groups do not divide the key-value heads.
    """
    if workload.num_kv_heads % num_groups:
        raise InfeasibleError(
            f"dcp needs head groups that divide the key-value heads, got {num_groups} for "
            f"{workload.num_kv_heads} kv_heads; use head_groups: {np.gcd(workload.num_kv_heads, num_groups)}"
        )
    area = areas_between(workload.slices(), edges)
    query, key = np.nonzero(area)
    row = workload.head_dim * workload.bytes_per_element
    heads, kv_heads = workload.num_heads // num_groups, workload.num_kv_heads // num_groups
    return Blocks(
        document=document, first=edges[:-1], tokens=np.diff(edges),
        query=np.tile(query, num_groups), key=np.tile(key, num_groups),
        group=np.repeat(np.arange(num_groups), len(query)), area=np.tile(area[query, key], num_groups),
        num_groups=num_groups, q_bytes=heads * row, kv_bytes=2 * kv_heads * row, lse_bytes=heads * LSE_BYTES,
    )  # fmt: skip


def _documents(workload: Workload) -> Ints:
    """Lengths of what blocks must not cross: documents, or all tokens where the mask ignores documents."""
    if MASK_NAMES[workload.mask].documents == "ignored":
        return np.array([workload.num_tokens])
    return np.asarray(workload.documents, np.int64)


def judge(blocks: Blocks, placement: Placement, num_ranks: int, gpus_per_node: int, pass_: Pass) -> Quality:
    """Count what a placement moves: inputs once to every rank that needs them, by way of one rank of a node where they
    come from another one; partial results home from every rank that has some."""
    home, moved = placement.home, np.zeros((num_ranks, num_ranks), np.int64)
    for side, nbytes in ((blocks.query, blocks.query_bytes(pass_)), (blocks.key, blocks.key_bytes(pass_))):
        needs = wanted(blocks, placement.worker, side, num_ranks)
        unit, rank = np.nonzero(needs)
        block = unit // blocks.num_groups
        tokens, at = blocks.tokens[block], home[block]
        source = first_hops(needs, np.repeat(home, blocks.num_groups), gpus_per_node)[unit, rank]
        away = at != rank
        np.add.at(moved, (source[away], rank[away]), (tokens * nbytes[0])[away])
        np.add.at(moved, (rank[away], at[away]), (tokens * nbytes[1])[away])
    work = np.bincount(placement.worker, blocks.area, num_ranks).astype(np.int64)
    held = np.bincount(home, blocks.tokens, num_ranks).astype(np.int64)
    return Quality(moved, gpus_per_node, work, held)


def wanted(
    blocks: Blocks, worker: Ints, side: Ints, num_ranks: int, chosen: Bools | slice = slice(None)
) -> Bools:  # fmt: skip
    """Which ranks compute on every unit, a head group of a token block: ``[n * groups, ranks]``.

    Args:
        side: ``blocks.query`` or ``blocks.key``.
        chosen: the computation blocks that count.
    """
    needs = np.zeros((len(blocks) * blocks.num_groups, num_ranks), np.bool_)
    needs[blocks.unit_of(side)[chosen], worker[chosen]] = True
    return needs


def first_hops(needs: Bools, home: Ints, gpus_per_node: int) -> Ints:
    """Rank that every rank gets every unit from, ``[units, ranks]``: the home, or the relay of its own node."""
    rank = np.arange(needs.shape[1])
    relay = first_of_nodes(needs, home, gpus_per_node)[:, rank // gpus_per_node]
    near = (home // gpus_per_node)[:, None] == rank // gpus_per_node
    return np.where(near | (relay == rank), home[:, None], relay)


def first_of_nodes(chosen: Bools, home: Ints, gpus_per_node: int) -> Ints:
    """The first chosen rank of every node, -1 where there is none: ``[units, nodes]``.

    Counted from the rank at the home's place of its node, so that the ranks of a node take turns.

    Args:
        chosen: ``[units, ranks]``.
        home: rank of every unit.
    """
    units, num_ranks = chosen.shape
    per_node = min(gpus_per_node, num_ranks)
    local = (home[:, None] + np.arange(per_node)) % per_node
    by_node = chosen.reshape(units, -1, per_node)
    turned = np.take_along_axis(by_node, np.broadcast_to(local[:, None, :], by_node.shape), axis=2)
    first = np.take_along_axis(local, turned.argmax(axis=2), axis=1) + np.arange(by_node.shape[1]) * per_node
    return np.where(turned.any(axis=2), first, -1)
