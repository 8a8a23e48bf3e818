"""How long a prediction would take and how much memory it would need, told from the scenario alone.

What takes long is planned and simulated for every pair of a GPU and a step of its ring, or another GPU that it
exchanges with, and again for every document that is cut for all GPUs. The constants are measured on one core;
``pytest -m slow tests/test_size.py -s`` prints estimates beside what predictions take.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import isqrt
from typing import Final

from cpsim.case.cluster import Cluster
from cpsim.case.documents import load_bins
from cpsim.case.scenario import DocumentDraw, ParallelSection, Scenario
from cpsim.errors import InfeasibleError
from cpsim.masks.names import MASK_NAMES, Options
from cpsim.models.attention.kernels import KERNELS
from cpsim.runtime.limits import FORCE

MOST_S: Final = 240.0
MOST_BYTES: Final = 12e9
"""Of what a laptop has."""
PAIR_S, PAIR_BYTES = 7e-6, 1.7e3
"""Of a GPU and a step, or another GPU: 262,144 of them take 1.8 s and 0.46 GB."""
DOCUMENT_S, DOCUMENT_BYTES = 2.5e-5, 1e3
"""Of a document: a million of them take ``distca`` 23 s and 0.9 GB."""
PIECE_S, PIECE_BYTES = 3e-7, 25.0
"""Of a document on a pair, where every GPU has a part of every document."""
LISTED_S: Final = 1.2e-4
"""Of a pair of a ring under a kernel that lists the blocks of its mask: 16,384 of them take ``zigzag_ring`` 2 s."""
CUTTING: Final = ("zigzag_ring", "striped_ring", "usp", "loongtrain", "mesh", "hybrid_cp", "wlb")
"""Strategies that cut every document into parts for all GPUs."""
DRAWN_GPUS: Final = 256
"""Every GPU is simulated up to this many; above, Ulysses groups are folded."""
MOST_PLACES: Final = 384
"""Places of a ring up to which all its steps are simulated."""
KNOWN_PLACES: Final = (96, 128, 192)
"""Places, or somewhat more, of the rings that longer ones continue."""
RINGS: Final = ("ring", "zigzag_ring", "striped_ring")
WINDOWS: Final = {
    "full": (),
    "causal": (),
    "full_sliding_window": ("window",),
    "causal_sliding_window": ("window",),
    "lambda": ("sink", "window"),
}
"""Masks of one document under which a ring of any length is alike, and the options that say how far a query sees."""
NARROW: Final = 1 / 16
"""Of the shortest ring that is known, how far queries see at most."""
CELL_S, CELL_BYTES = 1e-7, 60.0
"""Of a pair of blocks of a block-sparse mask."""
SPARSE: Final = ("allgather", "wlb", "per_sequence")
"""Strategies of collectives: ops grow with the GPUs, not with their square."""
STEP_S, STEP_BYTES = 2e-5, 500.0
"""Of a microbatch on a stage of a training step."""
PRICED_S, SIMULATED_S = 4e-4, 3e-3
"""Of a sequence of a training step whose documents no other has: where kernels alone are priced, and where a schedule
is simulated (2.5 ms of ``none`` under other than causal masks and ``ulysses``, 8 ms of a ring of four)."""


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
    documents = _documents(scenario)
    if scenario.model is not None and scenario.part is None:
        return _size_of_step(scenario, documents)
    pairs = _pairs(scenario, cluster)
    cells = _cells(scenario)
    pieces = pairs * documents if scenario.strategy in CUTTING else 0.0
    kernel, rings = KERNELS.get((scenario.kernel, "fwd")), scenario.strategy in {*CUTTING, *RINGS}
    listed = pairs if rings and kernel is not None and kernel.anatomy.lists_blocks else 0
    return Size(
        seconds=PAIR_S * pairs + LISTED_S * listed + PIECE_S * pieces + DOCUMENT_S * documents + CELL_S * cells,
        nbytes=PAIR_BYTES * pairs + PIECE_BYTES * pieces + DOCUMENT_BYTES * documents + CELL_BYTES * cells,
    )


def _size_of_step(scenario: Scenario, documents: float) -> Size:
    cut = scenario.parallel or ParallelSection()
    by_batch = cut.batch * (cut.microbatches or 1) * (cut.dp or scenario.gpus) if cut.batch else 1
    sequences = scenario.num_tokens // scenario.context if scenario.context else by_batch
    microbatches = max(cut.microbatches or 1, sequences // ((cut.dp or 1) * (cut.batch or 1)))
    work, pairs = (cut.pp or 1) * (cut.virtual_pp or 1) * microbatches + sequences, (cut.cp or 1) ** 2
    alone = pairs == 1 and scenario.mask_name in ("causal", "causal_document")
    unlike = sequences * (PRICED_S if alone else SIMULATED_S) if _has_unlike_documents(scenario) else 0.0
    return Size(STEP_S * work + PAIR_S * pairs * (1 + documents / 10) + unlike, STEP_BYTES * work + PAIR_BYTES * pairs)


def _has_unlike_documents(scenario: Scenario) -> bool:
    """Whether hardly two sequences have the same documents."""
    given = scenario.documents
    alike = given is None or (isinstance(given, tuple) and len(set(given)) == 1)
    return not alike and MASK_NAMES[scenario.mask_name].documents != "ignored"


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
    gpus, strategy, knobs = scenario.gpus, scenario.strategy, scenario.knobs
    if strategy in ("none", "ulysses"):  # which refuse more GPUs than they can use
        return gpus
    if strategy in SPARSE:
        return gpus * 8
    places, rows = gpus, gpus
    if strategy == "mesh":
        keys, heads = knobs.get("keys"), knobs.get("heads_per_gather")
        row = gpus // keys if isinstance(keys, int) and 0 < keys <= gpus else isqrt(gpus)
        return gpus * row * (scenario.kv_heads // heads if isinstance(heads, int) and heads > 0 else 1)
    if strategy in ("usp", "loongtrain"):
        given = knobs.get("ulysses")
        degree = given if isinstance(given, int) and given > 0 else min(scenario.heads, cluster.gpus_per_node, gpus)
        places = max(1, gpus // degree)
        if gpus > DRAWN_GPUS and knobs.get("placement", "head_first") == "head_first":
            rows = places
    ring = scenario.documents is None and (strategy in RINGS or (strategy == "usp" and rows < gpus))
    if ring and grows_along_a_line(
        str(strategy), scenario.mask_name, scenario.mask_options, scenario.num_tokens // places
    ):
        return min(places, MOST_PLACES) * min(rows, MOST_PLACES)
    return rows * places


def grows_along_a_line(strategy: str, mask: str, options: Options, tokens: int) -> bool:
    """Whether the time of a long ring over one document grows along a line with its places.

    Args:
        strategy: whose ring it is. Stripes of a long ring lie further apart than those of a short one, so that the
            same window covers fewer of them.
        mask, options: of the case.
        tokens: of a place of the ring.
    """
    if mask not in WINDOWS:
        return False
    sees = sum(values_of(mask, options)[name] for name in WINDOWS[mask])
    return not sees or (strategy != "striped_ring" and sees <= NARROW * KNOWN_PLACES[0] * tokens)


def _documents(scenario: Scenario) -> float:
    """Parts that the mask is made of: documents, roughly where they are drawn, or blocks and answers within them."""
    options = values_of(scenario.mask_name, scenario.mask_options)
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
    options = values_of(scenario.mask_name, scenario.mask_options)
    if "density" not in options:
        return 0.0
    return (scenario.num_tokens / options["block"]) ** 2


def values_of(mask: str, options: Options) -> dict[str, float]:
    """Numbers that a mask's shape has, by default where nothing is said."""
    values = {name: option.default for name, option in MASK_NAMES[mask].options.items()} | dict(options)
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
