"""How well solvers cut batches of DCP's benchmark, between nodes and inside them: ``python -m studies.dcp.solvers``.

    pip install kahypar mtkahypar
    python -m studies.dcp.solvers measure   # writes solvers.csv, some minutes
    python -m studies.dcp.solvers           # its means

All get the folded problem of DCP's released code (``cpsim.strategies.dcp.solvers.fold``): limits of single nodes, which
KaHyPar gets there. ``one limit`` gives every node that of the heaviest, as that code calls Mt-KaHyPar; of GPUs, such
limits are beyond 32 bits. GPUs are those of each node, with the blocks that it gets from Mt-KaHyPar. What counts are
the bytes that cross between parts, which is what solvers minimize, how far parts are beyond their limits, and how
uneven work is.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Final

import numpy as np

from cpsim.case.workload import Workload
from cpsim.strategies.dcp.blocks import cut
from cpsim.strategies.dcp.hypergraph import Level, Parts, moved_bytes
from cpsim.strategies.dcp.placing import RELEASED
from cpsim.strategies.dcp.solvers import ORDERS, Weights, fold, with_kahypar, with_mtkahypar
from studies.dcp.reproduce import BASE, HEADS, MASKS, batches

POINTS: Final = Path(__file__).parent / "solvers.csv"
SHAPE: Final = {"nodes": 4, "GPUs": 8}
"""Parts of all blocks, and of those of a node."""
Solver = Callable[[Level, int, Weights, np.random.Generator], Parts]


def _one_limit(level: Level, num_parts: int, weights: Weights, rng: np.random.Generator) -> Parts:
    same = Weights(weights.vertex, np.full(num_parts, weights.most.max()))
    return with_mtkahypar(level, num_parts, same, rng, orders=1)


_BOTH: Final[dict[str, Solver]] = {
    "kahypar": with_kahypar,
    **{f"mtkahypar, {n} orders": partial(with_mtkahypar, orders=n) for n in (1, 3, ORDERS)},
}
SOLVERS: Final = {"nodes": {**_BOTH, "mtkahypar, one limit": _one_limit}, "GPUs": _BOTH}


def levels() -> Iterator[tuple[str, float, int, int, str, Level]]:
    """Mask, scale of lengths, batch, block, what is cut (a key of ``SHAPE``), and its blocks."""
    for mask, scale, batch, block in product(("causal", "lambda"), (0.5, 1.0, 2.0, 4.0), (0, 1, 2), (2048,)):
        work = Workload(
            documents=batches(scale)[batch],
            mask=MASKS.get(mask, mask),
            num_heads=HEADS,
            num_kv_heads=2,
            head_dim=128,
            dtype="bf16",
        )
        case, every = (mask, scale, batch, block), Level.of(cut(work, block, HEADS))
        yield *case, "nodes", every
        parts = with_mtkahypar(every, SHAPE["nodes"], _folded(every, "nodes"), np.random.default_rng(0))
        for node in range(SHAPE["nodes"]):
            inside = Level(every.blocks, np.flatnonzero(parts.data == node), np.flatnonzero(parts.work == node))
            if len(inside.data) and len(inside.chosen):
                yield *case, "GPUs", inside


def _folded(level: Level, between: str) -> Weights:
    eps = {"nodes": BASE.eps_inter, "GPUs": BASE.eps_intra}[between]
    return fold(level, SHAPE[between], eps, RELEASED / level.tokens.min())


def measure() -> None:
    """Writes the points."""
    with POINTS.open("w", newline="") as file:
        rows = csv.writer(file)
        names = "solver", "mask", "scale", "batch", "block", "between", "mb", "beyond_percent", "imbalance", "seconds"
        rows.writerow(names)
        for *case, between, level in levels():
            weights, num_parts = _folded(level, between), SHAPE[between]
            for name, solve in SOLVERS[between].items():
                begin = process_time()
                parts = solve(level, num_parts, weights, np.random.default_rng(0))
                seconds = process_time() - begin
                held = np.bincount(np.concatenate([parts.data, parts.work]), weights.vertex, num_parts)
                load = np.bincount(parts.work, level.work, num_parts)
                found = (
                    moved_bytes(level, parts, num_parts) / 1e6,
                    100 * max(0.0, (held / weights.most - 1).max()),
                    load.max() / load.mean(),
                    seconds,
                )
                rows.writerow((name, *case, between, *(f"{value:.3f}" for value in found)))
                file.flush()


def means() -> dict[tuple[str, str], tuple[float, ...]]:
    """By what is cut, and solver: megabytes between parts, percent beyond the limit, imbalance of work, and seconds."""
    with POINTS.open() as file:
        points = list(csv.DictReader(file))
    columns = "mb", "beyond_percent", "imbalance", "seconds"
    keys = [(between, name) for between, solvers in SOLVERS.items() for name in solvers]
    of = {key: [p for p in points if (p["between"], p["solver"]) == key] for key in keys}
    return {key: tuple(mean(float(p[column]) for p in mine) for column in columns) for key, mine in of.items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    for (between, name), (moved, beyond, imbalance, seconds) in means().items():
        print(
            f"{name:20} {moved:5.1f} MB between {between}, limits passed by {beyond:.2f} %, work {imbalance:.2f} of "
            f"the mean on the busiest, {seconds:.2f} s"
        )
