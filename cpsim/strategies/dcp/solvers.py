"""Hypergraph partitioners of others: Mt-KaHyPar, which comes with cpsim, and KaHyPar (GPL), the extra ``dcp``.

Both have one weight for every vertex. A token block therefore outweighs the computation that a part may have beyond its
share, and the most that a part may weigh is its tokens, dealt out longest first, and the work that it may have.

Reference: Schlag et al., "High-Quality Hypergraph Partitioning", ACM JEA 2023; Gottesbueren et al., "Scalable
High-Quality Hypergraph Partitioning", ACM TALG 2024; DCP's public code for the folding of two weights into one.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.strategies.dcp.hypergraph import Level, Parts, moved_bytes

MOST: Final = 2**31 - 1001
"""All weights together, so that sums fit into 32 bits."""
FINEST: Final = 10_000
"""Weight of the largest computation."""
HEAVIEST_NET: Final = 45_000
ORDERS: Final = 5
"""In which Mt-KaHyPar tries vertices, at most: with so many it cuts as little as KaHyPar does at once, or less, see
``studies.dcp.solvers``."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """One whole number for every vertex, token blocks first, and the most for every part."""

    vertex: Ints
    most: Ints


def fold(level: Level, num_parts: int, eps: float, per_token: float) -> Weights:
    """Tokens and work as one weight.

    Args:
        level: what is partitioned.
        num_parts: parts.
        eps: work of a part over the mean, at most, less 1.
        per_token: weight of a token, over that of all work.
    """
    work = np.maximum(1, level.work * FINEST // level.work.max())
    data = np.maximum(1, (level.tokens * (per_token * work.sum())).astype(np.int64))
    total = (work.sum() + data.sum()) * (1 + eps)
    if total > MOST:
        work, data = (np.maximum(1, (weight * (MOST / total)).astype(np.int64)) for weight in (work, data))
    most = longest_first(data, num_parts) + int((1 + eps) * work.sum() / num_parts)
    return Weights(np.concatenate([data, work]), most)


def longest_first(weights: Ints, num_parts: int) -> Ints:
    """Sums of the parts when the longest weight left goes to the lightest part, ``[num_parts]``."""
    heap = [(0, part) for part in range(num_parts)]
    for weight in np.sort(weights)[::-1].tolist():
        held, part = heap[0]
        heapq.heapreplace(heap, (held + weight, part))
    return np.array([held for held, _ in sorted(heap, key=lambda entry: entry[1])])


def edges_of(level: Level) -> tuple[list[list[int]], list[int]]:
    """Vertices and weight of every net of two vertices or more."""
    num_data = len(level.data)
    members = [np.repeat(np.arange(num_data), level.nets_of_data().shape[1])]
    members += [np.repeat(num_data + np.arange(len(level.chosen)), 2)]
    nets = np.concatenate([level.nets_of_data().ravel(), level.nets.ravel()])
    vertices = np.concatenate(members)[np.argsort(nets, kind="stable")].tolist()
    sizes = np.bincount(nets, minlength=len(level.net_bytes))
    end = np.cumsum(sizes)
    weight = np.maximum(1, level.net_bytes * HEAVIEST_NET // level.net_bytes.max())
    kept = np.flatnonzero(sizes > 1)
    bounds = zip((end - sizes)[kept].tolist(), end[kept].tolist(), strict=True)
    return [vertices[low:high] for low, high in bounds], weight[kept].tolist()


def split(level: Level, labels: list[int]) -> Parts:
    """Parts of token blocks and of computations from parts of vertices."""
    found = np.array(labels, np.int64)
    return Parts(found[: len(level.data)], found[len(level.data) :])


@cache
def _mtkahypar() -> Any:
    import mtkahypar

    return mtkahypar, mtkahypar.initialize(1)


def with_mtkahypar(
    level: Level, num_parts: int, weights: Weights, rng: np.random.Generator, orders: int = ORDERS
) -> Parts:
    """Mt-KaHyPar on one thread, by its preset that gives the same partition whenever it is called.

    Its seed changes nothing there, so vertices are tried in several orders, until parts keep to their limits. Blocks of
    unequal tokens seldom allow that; then the order that moves least wins. Where blocks are unequal, heavy vertices
    come first, as in ``longest_first``, and those of one weight by chance: without that, more orders are beyond the
    limits and cut more.
    """
    nets, net_weights = edges_of(level)
    tried: list[Parts] = []
    while len(tried) < orders:
        order = rng.permutation(len(weights.vertex))
        if np.ptp(level.blocks.tokens):
            order = order[np.argsort(-weights.vertex[order], kind="stable")]
        place = np.argsort(order)
        moved = [place[net].tolist() for net in nets], net_weights, weights.vertex[order].tolist()
        labels = np.asarray(_labels(*moved, weights.most.tolist()))[place]
        tried.append(split(level, labels.tolist()))
        if (np.bincount(labels, weights.vertex, num_parts) <= weights.most).all():
            return tried[-1]
    return min(tried, key=lambda parts: moved_bytes(level, parts, num_parts))


def _labels(nets: list[list[int]], net_weights: list[int], vertex: list[int], most: list[int]) -> list[int]:
    """Part of every vertex."""
    library, maker = _mtkahypar()
    context = maker.context_from_preset(library.PresetType.DETERMINISTIC_QUALITY)
    context.logging = False
    context.set_partitioning_parameters(len(most), 0.03, library.Objective.KM1)
    context.set_individual_target_block_weights(most)
    graph = maker.create_hypergraph(context, len(vertex), len(nets), nets, vertex, net_weights)
    return list(graph.partition(context).get_partition())


def with_kahypar(level: Level, num_parts: int, weights: Weights, rng: np.random.Generator) -> Parts:
    """KaHyPar: direct k-way, 20 initial partitions, local search by FM and flows, as DCP's code sets it."""
    import kahypar

    nets, net_weights = edges_of(level)
    start = np.cumsum([0, *map(len, nets)]).tolist()
    vertices = [vertex for net in nets for vertex in net]
    graph = kahypar.Hypergraph(
        len(weights.vertex), len(nets), start, vertices, num_parts, net_weights, weights.vertex.tolist()
    )
    context = kahypar.Context()
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write("".join(f"{key}={value}\n" for key, value in KAHYPAR.items()))
        file.flush()
        context.loadINIconfiguration(file.name)
    context.setK(num_parts)
    context.setSeed(int(rng.integers(2**31 - 1)))
    context.setCustomTargetBlockWeights(weights.most.tolist())
    context.setEpsilon(max(0.0, float(weights.most.sum() / weights.vertex.sum() - 1)))
    context.suppressOutput(True)
    kahypar.partition(graph, context)
    return split(level, [graph.blockID(vertex) for vertex in range(len(weights.vertex))])


SOLVE: Final[dict[str, Callable[[Level, int, Weights, np.random.Generator], Parts]]] = {
    "mtkahypar": with_mtkahypar,
    "kahypar": with_kahypar,
}

KAHYPAR: Final[dict[str, object]] = {
    "mode": "direct",
    "objective": "km1",
    "seed": -1,
    "cmaxnet": 1000,
    "vcycles": 0,
    "p-use-sparsifier": "false",
    "p-detect-communities": "true",
    "p-detect-communities-in-ip": "true",
    "p-reuse-communities": "false",
    "p-max-louvain-pass-iterations": 100,
    "p-min-eps-improvement": 0.0001,
    "p-louvain-edge-weight": "hybrid",
    "c-type": "ml_style",
    "c-s": 1,
    "c-t": 160,
    "c-rating-score": "heavy_edge",
    "c-rating-use-communities": "true",
    "c-rating-heavy_node_penalty": "no_penalty",
    "c-rating-acceptance-criterion": "best_prefer_unmatched",
    "c-fixed-vertex-acceptance-criterion": "fixed_vertex_allowed",
    "i-mode": "recursive",
    "i-technique": "multi",
    "i-c-type": "ml_style",
    "i-c-s": 1,
    "i-c-t": 150,
    "i-c-rating-score": "heavy_edge",
    "i-c-rating-use-communities": "true",
    "i-c-rating-heavy_node_penalty": "no_penalty",
    "i-c-rating-acceptance-criterion": "best_prefer_unmatched",
    "i-c-fixed-vertex-acceptance-criterion": "fixed_vertex_allowed",
    "i-bp-algorithm": "worst_fit",
    "i-bp-heuristic-prepacking": "false",
    "i-bp-early-restart": "false",
    "i-bp-late-restart": "false",
    "i-algo": "pool",
    "i-runs": 20,
    "i-r-type": "twoway_fm",
    "i-r-runs": -1,
    "i-r-fm-stop": "simple",
    "i-r-fm-stop-i": 50,
    "r-type": "kway_fm_hyperflow_cutter_km1",
    "r-runs": -1,
    "r-fm-stop": "adaptive_opt",
    "r-fm-stop-alpha": 1,
    "r-fm-stop-i": 350,
    "r-flow-execution-policy": "exponential",
    "r-hfc-size-constraint": "mf-style",
    "r-hfc-scaling": 16,
    "r-hfc-distance-based-piercing": "true",
    "r-hfc-mbc": "true",
}
"""KaHyPar's options for the connectivity metric, direct k-way; the library has no defaults for them."""
