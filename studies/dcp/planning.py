"""Measures how long DCP's planner takes on one core, and fits the estimate of ``cpsim.strategies.dcp.planning``.

    pip install '.[dcp]'
    OMP_NUM_THREADS=1 python -m studies.dcp.planning measure   # writes planning.csv, some minutes
    python -m studies.dcp.planning                             # the fit, and how far the points are from it

Points are causal cases of 2 to 64 GPUs with up to 20,000 computation blocks of equally many tokens, and three variants;
seconds are those of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from time import process_time

import numpy as np

from cpsim.case.workload import Workload
from cpsim.strategies.dcp.blocks import Blocks, cut
from cpsim.strategies.dcp.placing import Settings
from cpsim.strategies.dcp.planning import estimated_s, planned
from cpsim.strategies.dcp.timing import Rates

POINTS = Path(__file__).parent / "planning.csv"
RATES = Rates(flops_per_s=6e14, port_bytes_per_s=4e11, node_bytes_per_s=4e11, node_latency_s=1e-4)
SHAPES = ((1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
MOST = 20_000
"""Computation blocks of a case, at most."""
DOCUMENTS = {
    "one": (1,),
    "even": (1, 1, 1, 1),
    "uneven": (8, 4, 2, 1, 1),
}


def cases() -> Iterator[tuple[str, str, tuple[int, int], int, Blocks]]:
    """Mask, documents, shape, blocks of a rank, and the blocks."""
    mask = "causal_document"
    for name, shape, each in product(DOCUMENTS, SHAPES, (4, 8)):
        ranks = shape[0] * shape[1]
        parts = np.array(DOCUMENTS[name]) * ranks * each
        documents = tuple((parts // sum(DOCUMENTS[name]) * 512).tolist())
        if min(documents) < 512:
            continue
        work = Workload(documents=documents, mask=mask, num_heads=8, num_kv_heads=2, head_dim=128, dtype="bf16")
        for groups in (1, 2):
            blocks = cut(work, 512, groups)
            if len(blocks) >= ranks and blocks.computations <= MOST:
                yield mask, name, shape, each, blocks


def measure() -> None:
    """Writes the points."""
    variants = [Settings(variant="cpsim"), Settings(variant="paper"), Settings(variant="released")]
    with POINTS.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("variant", "nodes", "gpus_per_node", "mask", "documents", "blocks", "computations", "seconds"))
        for mask, name, shape, _, blocks in cases():
            for settings in variants:
                begin = process_time()
                planned(blocks, shape, RATES, settings, 0)
                seconds = process_time() - begin
                row = (settings.variant, *shape, mask, name, len(blocks), blocks.computations, f"{seconds:.4f}")
                rows.writerow(row)
                file.flush()


def fit() -> None:
    """Prints what is fitted to every variant's points, and how far they are from the shipped estimate."""
    with POINTS.open() as file:
        points = list(csv.DictReader(file))
    for variant in dict.fromkeys(point["variant"] for point in points):
        mine = [point for point in points if point["variant"] == variant]
        count, ranks = (
            np.array([int(p["computations"]) for p in mine]),
            np.array([int(p["nodes"]) * int(p["gpus_per_node"]) for p in mine]),
        )
        seconds = np.array([float(p["seconds"]) for p in mine])
        terms = np.stack([np.ones(len(mine)), np.log(count), np.log(ranks)], axis=1)
        (log, *powers), *_ = np.linalg.lstsq(terms, np.log(seconds), rcond=None)
        shipped = [estimated_s(int(c), int(r), variant) for c, r in zip(count, ranks, strict=True)]
        off = np.exp(np.abs(np.log(shipped / seconds)))
        print(
            f"{variant}: ({np.exp(log):.1e}, {powers[0]:.2f}, {powers[1]:.2f}); the shipped estimate is within a "
            f"factor of {np.quantile(off, 0.67):.1f} for two of three of {len(mine)} points, {off.max():.0f} at most"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    fit()
