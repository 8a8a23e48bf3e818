"""A global batch for trainers: which ranks compute which documents together, and in which order.

Reference for the question: Megatron-Core's hybrid context parallelism (``BalancedCPScheduler``), FlexSP (arXiv
2412.01523), WLB-LLM (arXiv 2503.17924). Differs: documents cost what cpsim predicts, not their squared length; groups
are nested, so that no rank waits for another before the end; documents share microbatches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster, load_cluster
from cpsim.case.model import Model
from cpsim.errors import InfeasibleError, ScenarioError, shown
from cpsim.prediction.batches.placing import Costs, Placed, search
from cpsim.prediction.batches.prices import Ints, Prices, prices_of
from cpsim.prediction.batches.result import BatchPlan

PLACED_PER_MS, CHANGED_PER_MS = 10_000, 12_000
"""Documents and ranks that one core places, or looks at for a change, in a millisecond. Plans follow from the budget
and not from the clock: ranks that plan by themselves must come to the same plan."""
FIXED_MS: Final = 2.0
"""What a plan takes besides."""
SHARE: Final = 0.8
"""Of the budget that placements take at most; the rest is for changes."""
MOST_MS: Final = 60_000
PLACEMENTS: Final = 4, 40
"""That are always tried, and at most."""
WIDER: Final = 4
"""Groups that are tried are up to so many times as large as the longest document needs, or a node."""


def plan_batch(
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    cluster: Cluster | str,
    model: Model | str,
    budget_ms: float = 10.0,
    *,
    pack: bool = True,
    group_sizes: Sequence[int] | None = None,
    prices: Prices | None = None,
    **fields: Any,
) -> BatchPlan:
    """Place the documents of a global batch on context-parallel groups, each as large as pays for it.

    The first plan for a model on a cluster predicts a table of prices, which takes seconds; later ones keep to the
    budget. The same arguments give the same plan on machines of one kind, so that ranks may plan for themselves.

    Args:
        lengths: tokens of every document, ``[D]``.
        cluster: its GPUs in use share the batch; or a name or file, see ``load_cluster``.
        model: dimensions, or a name of ``cpsim.case.model.MODELS``.
        budget_ms: milliseconds that planning takes on one core, about, for as many documents as 4,096.
        pack: whether several documents share a microbatch; ``False`` gives each one of its own.
        group_sizes: ranks of a group, each a divisor of the next and of all ranks; None is powers of two, and all.
        prices: what ``prices_of`` made, in place of cluster, model and fields.
        **fields: of a scenario, see ``prices_of``: ``parallel``, ``framework``, ``strategy``, ``most_tokens`` ...

    Raises:
        ScenarioError: an argument has no such value.
        InfeasibleError: a document fits into no group, or the model into no GPU.
        ProfileError: there are no costs for the GPU.

    Examples:
        >>> from cpsim.case.cluster import load_cluster
        >>> plan = plan_batch([65536, *[1024] * 64], load_cluster("dgx-h100"), "llama3-8b", most_tokens=8192)
        >>> [(pack.size, len(pack.documents)) for pack in plan.packs][:2]
        [(8, 1), (1, 8)]
    """
    found = _checked(lengths)
    if not 0 < budget_ms <= MOST_MS:
        raise ScenarioError(f"budget_ms: expected up to {MOST_MS:,} milliseconds, got {shown(budget_ms)}")
    if prices is None:
        where = load_cluster(cluster) if isinstance(cluster, str) else cluster
        prices = _remembered(where, model, json.dumps(fields, sort_keys=True))
    sizes = _sizes(prices, group_sizes)
    order = np.argsort(-found, kind="stable")
    costs = costs_of(prices, found[order], sizes, alone=not pack)
    return planned(prices, found, order, costs, search(costs, *_effort(len(found) + prices.num_ranks, budget_ms)))


def _checked(lengths: Sequence[int] | NDArray[np.integer[Any]]) -> Ints:
    found = np.asarray(lengths)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu" or found.min() < 1:
        raise ScenarioError(f"lengths: expected tokens of documents, positive integers, got {shown(lengths)}")
    return found.astype(np.int64)


def _effort(work: int, budget_ms: float) -> tuple[int, int]:
    """Placements and changes that a budget allows, of so many documents and ranks."""
    left_ms = budget_ms - FIXED_MS
    placements = min(max(PLACEMENTS[0], int(SHARE * left_ms * PLACED_PER_MS / work)), PLACEMENTS[1])
    changes = max(0, int((left_ms - placements * work / PLACED_PER_MS) * CHANGED_PER_MS / (work + 10)))
    return placements, changes


@lru_cache(maxsize=16)
def _remembered(cluster: Cluster, model: Model | str, fields: str) -> Prices:
    return prices_of(cluster, model, **json.loads(fields))


def _sizes(prices: Prices, asked: Sequence[int] | None) -> Ints:
    """Sizes of groups, ascending.

    Raises:
        ScenarioError: they do not divide each other and the ranks.
    """
    if asked is None:
        return prices.sizes()
    sizes = np.unique(np.asarray(asked))
    chain = np.append(sizes, prices.num_ranks)
    if not len(sizes) or sizes.dtype.kind not in "iu" or sizes[0] < 1 or (chain[1:] % chain[:-1]).any():
        raise ScenarioError(
            f"group_sizes: expected ranks, each a divisor of the next and of {prices.num_ranks} ranks, "
            f"got {shown(list(asked))}"
        )
    return sizes.astype(np.int64)


def costs_of(prices: Prices, lengths: Ints, sizes: Ints, *, alone: bool) -> Costs:
    """Costs of documents, the longest first, on groups of some sizes.

    Left out are sizes beyond a node that are more than ``WIDER`` times what the longest document needs, unless there
    are too few documents for all ranks.

    Raises:
        InfeasibleError: a document is too long for all of them.
    """
    tokens = -(-lengths // sizes[:, None])
    fits = tokens <= prices.most_tokens
    if not fits[-1].all():
        raise InfeasibleError(
            f"memory: expected documents of at most {prices.most_tokens * sizes[-1]:,} tokens on groups of {sizes[-1]} "
            f"ranks with {prices.most_tokens:,} tokens each, got {lengths[0]:,}; cut it, or raise most_tokens"
        )
    least = fits.argmax(axis=0)
    node = prices.case.cluster.gpus_per_node // prices.case.parallel().tp
    largest = max(WIDER * int(sizes[least[0]]), node, -(-prices.num_ranks // len(lengths)))
    kept = np.flatnonzero(sizes <= max(largest, int(sizes[0])))
    sizes, tokens = sizes[kept], tokens[kept]
    rest, added, pack_s = prices.rest_table(), [], []
    for size, own in zip(sizes.tolist(), tokens, strict=True):
        column = prices.column(size)
        added.append(column.of(lengths) + (rest.of(own) - rest.fixed_s if alone else rest.token_s * own))
        pack_s.append(column.pack_s + rest.fixed_s)
    return Costs(
        num_ranks=prices.num_ranks,
        sizes=sizes,
        tokens=tokens,
        added_s=np.array(added),
        pack_s=np.array(pack_s),
        least=least,
        cap=prices.most_tokens,
        alone=alone,
    )


def planned(prices: Prices, lengths: Ints, order: Ints, costs: Costs, placed: Placed) -> BatchPlan:
    """A placement as a plan.

    Args:
        prices: of documents.
        lengths: of all documents [tokens], ``[D]``.
        order: numbers of the documents of ``costs`` and ``placed``, ``[D]``.
        costs, placed: what was placed where.
    """
    by_pack = np.lexsort((placed.pack, -placed.level))
    start = np.flatnonzero(np.diff(placed.pack[by_pack], prepend=-1))
    head = by_pack[start]
    size, group = costs.sizes[placed.level[head]], placed.group[head]
    added = np.empty(len(order))
    for level, ranks in enumerate(costs.sizes.tolist()):
        here = placed.level == level
        added[here] = prices.column(ranks).of(lengths[order[here]])
    own = -(-np.add.reduceat(lengths[order[by_pack]], start) // size)
    fixed = np.array([prices.column(ranks).pack_s for ranks in size.tolist()])
    seconds = fixed + np.add.reduceat(added[by_pack], start) + prices.rest_table().of(own)
    return BatchPlan(
        lengths=lengths,
        num_ranks=costs.num_ranks,
        most_tokens=costs.cap,
        document=order[by_pack],
        start=start,
        size=size,
        first_rank=group * size,
        seconds=seconds,
    )
