"""Blocks of tokens and of computation, and what a placement of them on ranks moves.

Tokens are cut into blocks of one document each. A computation block is a (query block, key block, head group) with
unmasked pairs; heads of a group are never apart, and groups of one key-value head share its keys. A block of tokens has
one rank, its home, with all heads; a computation block runs on any rank.

Reference: DCP (arXiv 2510.10620), sections 4.1 and 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import LSE_BYTES, Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.names import MASK_NAMES
from cpsim.masks.slices import Ints, areas_between
from cpsim.runtime.compiled import compiled
from cpsim.schedule.schedule import Pass

MOST_BLOCKS: Final = 4096
"""Token blocks of one case: pairs of them are counted in a square."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """n token blocks, in the order of their tokens, and C computation blocks, ordered by group, query and key."""

    document: Ints
    """Document of every token block, ``[n]``."""
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
    groups_per_kv: int
    """Head groups, one after the other, that share keys: those of the first of them."""
    q_bytes: int
    """Bytes of Q, and of O, dO and dQ, of one token and head group."""
    kv_bytes: int
    """Bytes of K and V together, and of dK and dV."""
    lse_bytes: int
    """Bytes of the log-sum-exp."""

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
        """Bytes of one token and head group that a rank without the keys gets, and of gradients that it gives back."""
        return self.kv_bytes, self.kv_bytes * (pass_ == "bwd")

    @property
    def kv_group(self) -> Ints:
        """Head group that has the keys, ``[C]``."""
        return self.group // self.groups_per_kv * self.groups_per_kv

    @property
    def sides(self) -> Ints:
        """Unit, a head group of a token block, of every computation block's queries and of its keys, ``[2, C]``."""
        return np.stack([self.query * self.num_groups + self.group, self.key * self.num_groups + self.kv_group])

    @property
    def units(self) -> Ints:
        """Units of the queries and keys of every computation block, those of keys numbered after all those of queries,
        ``2 * n * groups`` in all."""
        return np.asarray(self.sides + np.array([[0], [len(self) * self.num_groups]]))

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
    """Solver that found it, in words."""


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
        num_groups: head groups, a divisor of the key-value heads, or a multiple that divides the heads.

    Raises:
        InfeasibleError: head groups do not fit the heads, or there are too many blocks.
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
        num_groups: head groups, a divisor of the key-value heads, or a multiple that divides the heads.

    Raises:
        InfeasibleError: head groups do not fit the heads.
    """
    w = workload
    if w.num_kv_heads % num_groups and (num_groups % w.num_kv_heads or w.num_heads % num_groups):
        raise InfeasibleError(
            f"dcp needs head groups that divide the key-value heads, or a multiple of these that divides the heads, "
            f"got {num_groups} for {w.num_heads} heads and {w.num_kv_heads} kv_heads; use head_groups: "
            f"{np.gcd(w.num_kv_heads, num_groups)}"
        )
    area = areas_between(workload.slices(), edges)
    query, key = np.nonzero(area)
    row = workload.head_dim * workload.bytes_per_element
    heads, kv_heads = w.num_heads // num_groups, max(1, w.num_kv_heads // num_groups)
    return Blocks(
        document=document,
        first=edges[:-1],
        tokens=np.diff(edges),
        query=np.tile(query, num_groups),
        key=np.tile(key, num_groups),
        group=np.repeat(np.arange(num_groups), len(query)),
        area=np.tile(area[query, key], num_groups),
        num_groups=num_groups,
        groups_per_kv=max(1, num_groups // w.num_kv_heads),
        q_bytes=heads * row,
        kv_bytes=2 * kv_heads * row,
        lse_bytes=heads * LSE_BYTES,
    )


def _documents(workload: Workload) -> Ints:
    """Lengths of what blocks must not cross: documents, or all tokens where the mask ignores documents."""
    if MASK_NAMES[workload.mask].documents == "ignored":
        return np.array([workload.num_tokens])
    return np.asarray(workload.documents, np.int64)


def judge(blocks: Blocks, placement: Placement, num_ranks: int, gpus_per_node: int, pass_: Pass) -> Quality:
    """Count what a placement moves: inputs once to every rank that needs them, by way of one rank of a node where they
    come from another one; partial results home from every rank that has some."""
    home, moved = placement.home, np.zeros((num_ranks, num_ranks), np.int64)
    for units, nbytes in zip(blocks.sides, (blocks.query_bytes(pass_), blocks.key_bytes(pass_)), strict=True):
        needs = wanted(blocks, placement.worker, units, num_ranks)
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


def wanted(blocks: Blocks, worker: Ints, units: Ints, num_ranks: int) -> Bools:
    """Which ranks compute on every unit, a head group of a token block: ``[n * groups, ranks]``.

    Args:
        units: of every computation block, one of ``blocks.sides``.
    """
    needs = np.zeros((len(blocks) * blocks.num_groups, num_ranks), np.bool_)
    needs[units, worker] = True
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
    return np.asarray(_first_of_nodes(np.ascontiguousarray(chosen), home, min(gpus_per_node, chosen.shape[1])))


@compiled()
def _first_of_nodes(chosen, home, per_node):  # type: ignore[no-untyped-def]
    num_nodes = chosen.shape[1] // per_node
    first = np.full((len(chosen), num_nodes), -1)
    for unit in range(len(chosen)):
        for node in range(num_nodes):
            for turn in range(per_node):
                rank = node * per_node + (home[unit] + turn) % per_node
                if chosen[unit, rank]:
                    first[unit, node] = rank
                    break
    return first
