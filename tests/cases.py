"""What tests parametrize over: listed means tested."""

from dataclasses import replace

import pytest

import studies  # noqa: F401  (adds implementations)
from cpsim.case.cluster import presets
from cpsim.case.workload import Workload
from cpsim.masks.names import MASK_NAMES
from cpsim.strategies import STRATEGIES
from cpsim.strategies.others import IMPLEMENTATIONS

ALL_MASKS = tuple(MASK_NAMES)
PLAIN_MASKS = ("full", "causal", "full_document", "causal_document")
MASK_OPTIONS = {
    "full_sliding_window": {"window": 5},
    "causal_sliding_window": {"window": 6},
    "shared_question": {"answers": 3},
    "causal_blockwise": {"block": 4},
    "prefix_lm_causal": {"prefix": 13},
    "prefix_lm_document": {"prefix": 7},
    "block_causal_document": {"block": 5},
    "lambda": {"sink": 3, "window": 6},
    "global_sliding": {"window": 5},
    "block_sparse": {"block": 7, "density": 0.4},
    "variable_block_sparse": {"block": 6, "min_block": 2, "density": 0.4},
}
"""Options that make a difference to a few tokens."""
BLIND_MASK = "global_sliding of 40"
"""Its first 8 of 48 queries see no key, so that a rank of 8 has nothing to do."""
MASK_OPTIONS[BLIND_MASK] = {"window": 40}
ALL_PASSES = ("fwd", "bwd")
ALL_KNOBS = {
    "none": ({},),
    "ring": ({},),
    "zigzag_ring": (
        {"zigzag": "document"},
        {"zigzag": "sequence"},
        {"backward": "queries"},
        {"cycles": "all"},
        {"cycles": "all", "zigzag": "sequence"},
    ),
    "striped_ring": ({},),
    "ulysses": (
        {},
        {"head_groups": 2},
        {"head_chunks": 2},
        {"head_chunks": 2, "buffers": 1},
        {"token_chunks": 2},
        {"token_chunks": 3},
    ),
    "allgather": (
        {},
        {"layout": "contiguous"},
        {"layout": "contiguous", "heads_per_gather": 1},
        {"layout": "zigzag", "heads_per_gather": 1},
        {"layout": "document_zigzag", "heads_per_gather": 2},
    ),
    "usp": (
        {"ulysses": 2},
        {"ulysses": 2, "placement": "context_first", "zigzag": "sequence"},
        {"ulysses": 4, "ring": "basic"},
        {},
    ),
    "loongtrain": (
        {"ulysses": 2, "inner_ring": 2},
        {"ulysses": 1, "inner_ring": 2, "placement": "context_first"},
        {"ulysses": 1, "inner_ring": 1, "zigzag": "sequence"},
        {},
    ),
    "mesh": (
        {},
        {"keys": 1},
        {"keys": 2, "heads_per_gather": 1},
        {"keys": 2, "keys_backward": 1, "zigzag": "sequence", "heads_per_gather": 2},
        {"keys": 1, "keys_backward": 2, "heads_per_gather": 1},
    ),
    "hybrid_cp": ({}, {"tokens_per_rank": 3}, {"tokens_per_rank": 24}),
    "magi": ({}, {"chunk": 2, "smallest": 1}, {"stages": 3, "smallest": 2, "native": True}),
    "dcp": (
        {"block": 3, "variant": "paper", "solver": "greedy"},
        {"block": 7, "variant": "paper", "solver": "greedy", "head_groups": 8},
        {"block": 4, "variant": "released", "solver": "greedy", "eps_intra": 0.0, "head_groups": 1, "stages": 2},
    ),
    "distca": ({"variant": "released", "tolerance": 0.0}, {"nano_batches": 1, "variant": "paper"}, {"nano_batches": 3}),
    "wlb": ({"cp": 1},),
    "per_sequence": ({},),
}
ALL_STRATEGIES = tuple((name, knobs) for name in STRATEGIES for knobs in ALL_KNOBS[name])

OTHERS = tuple(
    (code, name, knobs)
    for code in IMPLEMENTATIONS.values()
    for name in code.strategies or ()
    if name in STRATEGIES and name != "none"  # one call on one GPU: see test_hosts
    for knobs in {
        "torch allgather": ({}, {"layout": "contiguous"}),
        "ring-flash-attn allgather": ({}, {"heads_per_gather": 1}),
        "longca-bench usp": ({"ulysses": 2},),
        "longca-bench loongtrain": ({"ulysses": 1}, {"ulysses": 2}),
        "magi-attention usp": ({"ulysses": 2},),
        "transformer-engine usp": ({"ulysses": 2},),
        "transformer-engine-thd usp": ({"ulysses": 2},),
        "internevo loongtrain": ({"ulysses": 2}, {"ulysses": 2, "inner_ring": 1}, {"ulysses": 2, "inner_ring": 2}),
        "magi-attention loongtrain": ({"ulysses": 1}, {"ulysses": 2, "inner_ring": 1}),
        "yunchang usp": (
            {"ulysses": 2},
            {"ulysses": 2, "ring": "basic"},
            {"ulysses": 2, "placement": "context_first"},
        ),
    }.get(f"{code.name} {name}", ({},))
)
"""(implementation, strategy, knobs) of other people's code."""

DOCUMENTS = {
    "one": (48,),
    "uneven": (5, 19, 24),
    "short": (1, 2, 17, 3, 1, 24),
}
"""All of 48 tokens, which ALL_RANKS divide; ``short`` has documents of fewer tokens than ranks."""
HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}
ALL_RANKS = (1, 2, 3, 4, 6, 8)


def cluster(num_ranks, gpus_per_node=8):
    return replace(presets()["dgx-h200"], num_gpus=num_ranks, gpus_per_node=gpus_per_node)


def workload(mask="causal", documents="one", heads="gqa", **changes):
    num_heads, num_kv_heads = HEADS[heads]
    fields = {
        "documents": DOCUMENTS.get(documents, documents),
        "mask": mask.partition(" ")[0],
        "mask_options": tuple(MASK_OPTIONS.get(mask, {}).items()),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 4,
        "dtype": "bf16",
    }
    return Workload(**(fields | changes))


def one_in(every, cases):
    """Cases, tuples of arguments, of which only one of so many runs where slow tests do not."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (i % every > 0)) for i, case in enumerate(cases)]
