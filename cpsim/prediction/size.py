"""How long a prediction would take and how much memory it would need, told from the scenario alone.

What takes long is planned and simulated for every pair of a GPU and a step of its ring, or another GPU that it
exchanges with, and again for every document that is cut for all GPUs. The constants are measured on one core: rings of
512 places, 9,000 documents on 64 GPUs and a million documents on 8.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from cpsim.case.cluster import Cluster
from cpsim.case.documents import load_bins
from cpsim.case.scenario import DocumentDraw, Scenario
from cpsim.errors import InfeasibleError
from cpsim.masks.names import MASK_NAMES
from cpsim.runtime.limits import FORCE

MOST_S: Final = 240.0
MOST_BYTES: Final = 12e9
"""Of what a laptop has."""
PAIR_S, PAIR_BYTES = 7e-6, 1.7e3
"""Of a GPU and a step, or another GPU: 262,144 of them take 1.8 s and 0.46 GB."""
DOCUMENT_S, DOCUMENT_BYTES = 2.5e-5, 1e3
"""Of a document: a million of them take ``distca`` 23 s and 0.9 GB."""
PIECE_S, PIECE_BYTES = 5e-7, 25.0
"""Of a document on a pair, where every GPU has a part of every document."""
CUTTING: Final = ("zigzag_ring", "striped_ring", "usp", "loongtrain", "hybrid_cp", "wlb")
"""Strategies that cut every document into parts for all GPUs."""
KNOWN_PLACES: Final = 512
"""Longer rings of one document continue shorter ones, see ``cpsim.prediction.passes``."""
CELL_S, CELL_BYTES = 1e-7, 60.0
"""Of a pair of blocks of a block-sparse mask."""
SPARSE: Final = ("none", "ulysses", "allgather", "wlb", "per_sequence")
"""Strategies of collectives: ops grow with the GPUs, not with their square."""
STEP_S, STEP_BYTES = 2e-5, 500.0
"""Of a microbatch on a stage of a training step."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a prediction takes on one core, roughly."""

    seconds: float
    nbytes: float

    def __str__(self) -> str:
        for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
            if self.seconds >= 2 * unit:
                return f"{self.seconds / unit:,.0f} {name} and {self.nbytes / 1e9:,.0f} GB"
        return f"{self.seconds:.0f} seconds and {self.nbytes / 1e9:,.0f} GB"


def size_of(scenario: Scenario, cluster: Cluster) -> Size:
    """What predicting a scenario with a strategy takes."""
    step = scenario.model is not None and scenario.part is None
    pairs, documents = float(_pairs(scenario, cluster)), _documents(scenario)
    if step:
        cut = scenario.parallel
        sequences = scenario.num_tokens // scenario.context if scenario.context else 1
        stages = (cut.pp if cut else None) or 1
        replicas = (cut.dp if cut else None) or 1
        microbatches = max((cut.microbatches if cut else None) or 1, sequences // replicas)
        work = float(stages * microbatches + sequences)
        cp = (cut.cp if cut else None) or 1
        return Size(STEP_S * work + PAIR_S * cp * cp * (1 + documents / 10), STEP_BYTES * work + PAIR_BYTES * cp * cp)
    cells = _cells(scenario)
    pieces = pairs * documents if scenario.strategy in CUTTING else 0.0
    return Size(
        seconds=PAIR_S * pairs + PIECE_S * pieces + DOCUMENT_S * documents + CELL_S * cells,
        nbytes=PAIR_BYTES * pairs + PIECE_BYTES * pieces + DOCUMENT_BYTES * documents + CELL_BYTES * cells,
    )


def check_size(scenario: Scenario, cluster: Cluster) -> None:
    """Refuses what would take too long, before anything of it is done.

    Raises:
        InfeasibleError: more than ``MOST_S`` or ``MOST_BYTES``, and nobody forces it.
    """
    size = size_of(scenario, cluster)
    if (size.seconds > MOST_S or size.nbytes > MOST_BYTES) and not os.environ.get(FORCE):
        raise InfeasibleError(
            f"too large to predict: it would take about {size} on one core; use fewer GPUs, documents or microbatches, "
            f"or --force ({FORCE}=1)"
        )


def _pairs(scenario: Scenario, cluster: Cluster) -> int:
    """GPUs times the steps, or other GPUs, of each."""
    gpus, strategy = scenario.gpus, scenario.strategy
    if strategy in SPARSE:
        return gpus * 8
    if strategy in ("usp", "loongtrain"):
        given = scenario.knobs.get("ulysses")
        degree = given if isinstance(given, int) and given > 0 else min(scenario.heads, cluster.gpus_per_node, gpus)
        gpus = max(1, gpus // degree)
    one = scenario.documents is None and scenario.mask_name in ("full", "causal")
    if one and gpus > KNOWN_PLACES and strategy in ("ring", "zigzag_ring", "striped_ring", "usp"):
        gpus = KNOWN_PLACES
    return gpus * gpus


def _documents(scenario: Scenario) -> float:
    """Parts that the mask is made of: documents, roughly where they are drawn, or blocks and answers within them."""
    options = _options(scenario)
    blocks = scenario.num_tokens / options["block"] if "block" in options and "density" not in options else 0.0
    if MASK_NAMES[scenario.mask_name].documents == "ignored":
        return max(1.0, blocks)
    match scenario.documents:
        case DocumentDraw() as draw:
            mean = load_bins(draw.distribution).mean()
            longest = draw.max_length or scenario.num_tokens
            count = scenario.num_tokens / max(draw.min_length, min(mean, longest))
        case None:
            count = 1.0
        case lengths:
            count = float(len(lengths))
    return max(blocks, count * options.get("answers", 1))


def _cells(scenario: Scenario) -> float:
    """Pairs of blocks of a block-sparse mask."""
    options = _options(scenario)
    if "density" not in options:
        return 0.0
    return (scenario.num_tokens / options["block"]) ** 2


def _options(scenario: Scenario) -> dict[str, float]:
    """Numbers that the mask's shape has, by default where nothing is said."""
    known = MASK_NAMES[scenario.mask_name].options
    values = {name: option.default for name, option in known.items()} | dict(scenario.mask_options)
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
