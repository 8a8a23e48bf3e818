"""How well solvers cut batches of DCP's benchmark between its four nodes: ``python -m studies.dcp.solvers``.

    pip install kahypar mtkahypar
    python -m studies.dcp.solvers measure   # writes solvers.csv, a minute
    python -m studies.dcp.solvers           # its means

All get the folded problem of DCP's released code (``cpsim.strategies.dcp.solvers.fold``): limits of single nodes, which
KaHyPar gets there. ``one limit`` gives every node that of the heaviest, as that code calls Mt-KaHyPar. What counts are
the bytes that cross between nodes, which is what solvers minimize, and how far nodes are beyond their limits.
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
from cpsim.strategies.dcp.solvers import Weights, fold, with_kahypar, with_mtkahypar
from studies.dcp.reproduce import BASE, HEADS, MASKS, batches

POINTS: Final = Path(__file__).parent / "solvers.csv"
NODES: Final = 4
Solver = Callable[[Level, int, Weights, np.random.Generator], Parts]


def _one_limit(level: Level, num_parts: int, weights: Weights, rng: np.random.Generator) -> Parts:
    same = Weights(weights.vertex, np.full(num_parts, weights.most.max()))
    return with_mtkahypar(level, num_parts, same, rng, orders=1)


SOLVERS: Final[dict[str, Solver]] = {
    "kahypar": with_kahypar,
    **{f"mtkahypar, {n} orders": partial(with_mtkahypar, orders=n) for n in (1, 2, 4, 8)},
    "mtkahypar, one limit": _one_limit,
}


def levels() -> Iterator[tuple[str, float, int, int, Level]]:
    """Mask, scale of lengths, batch, block and what is to be cut."""
    for mask, scale, batch, block in product(("causal", "lambda"), (0.5, 1.0, 2.0, 4.0), (0, 1, 2), (2048,)):
        work = Workload(
            documents=batches(scale)[batch],
            mask=MASKS.get(mask, mask),
            num_heads=HEADS,
            num_kv_heads=2,
            head_dim=128,
            dtype="bf16",
        )
        yield mask, scale, batch, block, Level.of(cut(work, block, HEADS))


def measure() -> None:
    """Writes the points."""
    with POINTS.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("solver", "mask", "scale", "batch", "block", "mb", "beyond_percent", "imbalance", "seconds"))
        for *case, level in levels():
            weights = fold(level, NODES, BASE.eps_inter, RELEASED / level.tokens.min())
            for name, solve in SOLVERS.items():
                begin = process_time()
                parts = solve(level, NODES, weights, np.random.default_rng(0))
                seconds = process_time() - begin
                held = np.bincount(np.concatenate([parts.data, parts.work]), weights.vertex, NODES)
                load = np.bincount(parts.work, level.work, NODES)
                found = (
                    moved_bytes(level, parts, NODES) / 1e6,
                    100 * max(0.0, (held / weights.most - 1).max()),
                    load.max() / load.mean(),
                    seconds,
                )
                rows.writerow((name, *case, *(f"{value:.3f}" for value in found)))
                file.flush()


def means() -> dict[str, tuple[float, ...]]:
    """Of every solver: megabytes between nodes, percent beyond the limit, imbalance of work, and seconds."""
    with POINTS.open() as file:
        points = list(csv.DictReader(file))
    columns = "mb", "beyond_percent", "imbalance", "seconds"
    return {
        name: tuple(mean(float(point[column]) for point in points if point["solver"] == name) for column in columns)
        for name in dict.fromkeys(point["solver"] for point in points)
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    for name, (moved, beyond, imbalance, seconds) in means().items():
        print(
            f"{name:20} {moved:5.0f} MB between nodes, limits passed by {beyond:.2f} %, work {imbalance:.2f} of the "
            f"mean on the busiest node, {seconds:.2f} s"
        )
