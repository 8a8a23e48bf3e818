"""Writes the validation set: cases.jsonl (one machine of four H200), emulated.jsonl (two emulated nodes of two),
documents.jsonl (many short documents on two), drawn.jsonl, drawn-2.jsonl and drawn-3.jsonl (problems drawn at random,
on two; those of the second are mostly for other people's code and for planners, the third has as many of both again),
small-others.jsonl (few tokens in other people's code, on two), two-h100.jsonl and two-h100-2.jsonl (problems drawn at
random, on two H100), two-h100-2-short.jsonl (the few tokens among the latter), pair-of-nodes.jsonl (two emulated nodes
of one H100), one-h100.jsonl, one-h100-layers.jsonl, one-h200.jsonl, one-h200-layers.jsonl, one-h200-2.jsonl, -3, -4 and
-5, one-h100-2.jsonl, one-h100-layers-2.jsonl and one-h200-layers-2.jsonl (calls of attention and whole layers drawn at
random, on one GPU; those of one-h200-5 of any number of tokens), ranks-1.jsonl, -2, -3 and -others (problems of 2
to 96 GPUs, drawn at random, of which single ranks are measured on one GPU), windows-h100.jsonl and windows-h200.jsonl
(other people's code on two GPUs, iterations back to back and apart), plain-h100.jsonl and plain-h200.jsonl (the same of
flash-attn and PyTorch on one GPU), compiled-h100.jsonl and compiled-h200.jsonl (eight of these under torch.compile),
one-ring-h100.jsonl and one-ring-h200.jsonl (yunchang's USP around rings of one, on two GPUs), newer-1-*, newer-2-* and
newer-ranks-* (strategies and masks that the first sets lack, on one and two GPUs, and single ranks of them) and the
folders four (one run on four H100 of one host, also as 2 x 2 nodes, with layers of DistCA and other people's code in
windows) and eight (one run on eight H200 of one host, also as 2 x 4 and 4 x 2 nodes).

    python data/cases/cases.py

Cases come in groups that differ in strategy, knobs and implementation only, so that choices are validated, too. What
ran is in data/runs; data/manifest.yaml has the command of every file there, for example

    cpsim run data/cases/cases.jsonl --seconds 0.3 --out runs.jsonl
    cpsim run data/cases/emulated.jsonl --seconds 0.3 --emulate-nodes 2 --out runs.jsonl
    python -m cpsim.real.measure.ranks data/cases/ranks-1.jsonl --seconds 0.05 --minutes 8 --out ranks.jsonl

The runs on four and on eight GPUs take ten minutes at most; their predictions are committed before them:

    sh data/cases/eight/predict.sh
    sh data/cases/eight/run.sh OUT
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from cpsim.case.cluster import load_cluster

FOLDER = Path(__file__).parent
K = 1024

Case = dict[str, Any]
ULYSSES: Case = {"strategy": "ulysses"}
RING: Case = {"strategy": "ring"}
ZIGZAG: Case = {"strategy": "zigzag_ring", "knobs": {"zigzag": "document"}}
ZIGZAG_SEQUENCE: Case = {"strategy": "zigzag_ring", "knobs": {"zigzag": "sequence"}}
STRIPED: Case = {"strategy": "striped_ring"}
GATHER: Case = {"strategy": "allgather", "knobs": {"layout": "contiguous"}}
GATHER_ZIGZAG: Case = {"strategy": "allgather", "knobs": {"layout": "zigzag"}}
GATHER_DOCUMENT: Case = {"strategy": "allgather", "knobs": {"layout": "document_zigzag"}}
GATHER_HEADS: Case = {"strategy": "allgather", "knobs": {"layout": "zigzag", "heads_per_gather": 2}}
USP: Case = {"strategy": "usp", "knobs": {"ulysses": 2}}
USP_SEQUENCE: Case = {"strategy": "usp", "knobs": {"ulysses": 2, "zigzag": "sequence"}}
USP_BASIC: Case = {"strategy": "usp", "knobs": {"ulysses": 2, "ring": "basic"}}
USP_CONTEXT_FIRST: Case = {"strategy": "usp", "knobs": {"ulysses": 2, "placement": "context_first"}}
LOONGTRAIN: Case = {"strategy": "loongtrain", "knobs": {"ulysses": 1, "inner_ring": 2}}
USP_4: Case = {"strategy": "usp", "knobs": {"ulysses": 4}}
LOONGTRAIN_4: Case = {"strategy": "loongtrain", "knobs": {"ulysses": 1, "inner_ring": 4}}
LOONGTRAIN_HEADS: Case = {"strategy": "loongtrain", "knobs": {"ulysses": 2, "inner_ring": 2}}
DCP: Case = {"strategy": "dcp"}
DCP_PAPER: Case = {"strategy": "dcp", "knobs": {"variant": "paper"}}
MAGI: Case = {"strategy": "magi"}
HYBRID: Case = {"strategy": "hybrid_cp"}
SPARSE = ("lambda", "causal_blockwise", "shared_question")
EVERY = (ULYSSES, ZIGZAG, RING, GATHER_ZIGZAG, GATHER_HEADS)
BALANCED = (ULYSSES, ZIGZAG, GATHER_ZIGZAG)
FLAT = (ULYSSES, RING, GATHER)
BY_DOCUMENT = (ULYSSES, ZIGZAG, ZIGZAG_SEQUENCE, GATHER_DOCUMENT)
WAYS_BY_LOT: Mapping[str, Sequence[Case]] = {
    "fa2": (ULYSSES, ZIGZAG, RING, STRIPED, GATHER_DOCUMENT, MAGI),
    "fa4": (ULYSSES, ZIGZAG, RING, STRIPED, GATHER_DOCUMENT, MAGI),
    "sdpa_flash": (ULYSSES, ZIGZAG, GATHER_DOCUMENT, RING),
    "cudnn": (ULYSSES, ZIGZAG, RING),
    "flex": (ULYSSES, ZIGZAG, GATHER_ZIGZAG),
}
MASKS_BY_LOT: Mapping[str, tuple[Sequence[str], Sequence[int]]] = {
    "fa2": (("causal", "full", "causal_document", "full_document"), (128,)),
    "fa4": (("causal", "full", "causal_document", "full_document"), (128,)),
    "sdpa_flash": (("causal", "full", "causal_document"), (64, 128)),
    "cudnn": (("causal", "full"), (64, 128)),
    "flex": (("causal", "lambda", "shared_question"), (64, 128)),
}
"""Masks and head dimensions of problems with a kernel."""
LOTS: Mapping[str, int] = {"fa2": 12, "sdpa_flash": 4, "cudnn": 4, "flex": 4}
"""Problems of every kernel."""
THEIRS: Mapping[str, Sequence[Case]] = {
    "ring-flash-attn": (ZIGZAG, RING, GATHER),
    "yunchang": (ULYSSES,),
}


def problem(gpus: int, tokens_per_gpu: int, mask: str = "causal", heads: str = "32:8", **more: Any) -> Case:
    """What to compute, without whom."""
    num_heads, kv_heads = map(int, heads.split(":"))
    cluster = {"cluster": "h200-4", "kernel": "fa4"}
    shape = {"tokens_per_gpu": tokens_per_gpu, "mask": mask, "heads": num_heads, "kv_heads": kv_heads}
    return {"gpus": gpus, **cluster, **shape, **more}


def lengths(gpus: int, tokens_per_gpu: int) -> list[int]:
    """Uneven documents, all multiples of 64 tokens: one of half of all tokens, then shorter and shorter ones."""
    left, found = gpus * tokens_per_gpu, []
    while left > 2 * K:
        found.append(left // 2 // 64 * 64)
        left -= found[-1]
    return [*found, left]


def drawn(seed: int) -> Case:
    """Documents of long-context training data."""
    return {"distribution": "prolong64k", "seed": seed}


def ours() -> Iterator[Case]:
    """Our executor."""
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        few = (ULYSSES, ZIGZAG, GATHER_ZIGZAG) if tokens == 64 else EVERY
        yield from each(problem(4, tokens * K), few)
    for tokens in (1, 4, 16, 64):
        yield from each(problem(2, tokens * K), (ULYSSES, ZIGZAG, RING, GATHER_ZIGZAG))
    for tokens in (2, 8, 32):
        yield from each(problem(4, tokens * K, mask="full"), FLAT)
        yield from each(problem(4, tokens * K, heads="32:32"), BALANCED)
    for tokens in (4, 16, 64):
        yield from each(problem(4, tokens * K, mask="causal_document", documents=drawn(tokens)), BY_DOCUMENT)
    for tokens in (8, 32):
        yield from each(problem(2, tokens * K, mask="causal_document", documents=drawn(tokens)), BY_DOCUMENT)
    yield from each(problem(4, 8 * K, mask="causal_document", documents=lengths(4, 8 * K)), BY_DOCUMENT)
    yield from each(problem(4, 8 * K, mask="full_document", documents=lengths(4, 8 * K)), FLAT)
    for gpus, tokens in ((4, 1), (4, 2), (2, 1), (2, 2)):  # forward passes: less than a millisecond
        yield from each(problem(gpus, tokens * K, **{"pass": "fwd"}), (ULYSSES, ZIGZAG, GATHER_ZIGZAG))
    for tokens in (4, 16):
        yield from each(problem(4, tokens * K, heads="16:4"), BALANCED)
    for tokens in (1, 4, 16, 64):
        yield from each(problem(1, tokens * K), ({"strategy": "none"},))
    for kernel, ways in (("fa2", BALANCED), ("cudnn", (ULYSSES, ZIGZAG)), ("sdpa_flash", BALANCED)):
        yield from each(problem(1, 16 * K, kernel=kernel), ({"strategy": "none"},))
        yield from each(problem(4, 8 * K if kernel == "cudnn" else 4 * K, kernel=kernel), ways)
    yield from each(problem(1, 8 * K, mask="full"), ({"strategy": "none"},))
    yield from each(problem(1, 16 * K, mask="causal_document", documents=drawn(1)), ({"strategy": "none"},))
    yield from each(problem(4, 2 * K, protocol="streamed"), BALANCED)
    for gpus, tokens in ((4, 2), (4, 4), (4, 8), (4, 16), (4, 32), (2, 4), (2, 16)):
        yield from each(problem(gpus, tokens * K), (STRIPED,))
    yield from each(problem(4, 8 * K, mask="causal_document", documents=lengths(4, 8 * K)), (STRIPED,))
    yield from hybrid()
    yield from planned()
    yield from masked((ZIGZAG, GATHER_ZIGZAG, USP, ULYSSES, DCP, DCP_PAPER, MAGI))


def planned() -> Iterator[Case]:
    """Strategies that place documents and blocks of the mask by what they cost, beside those that do not."""
    ways = (DCP, DCP_PAPER, MAGI, HYBRID, ZIGZAG, GATHER_DOCUMENT, ULYSSES)
    for tokens in (2, 8, 32):
        for documents in (lengths(4, tokens * K), drawn(tokens)):
            yield from each(problem(4, tokens * K, "causal_document", kernel="fa2", documents=documents), ways)
    yield from each(problem(4, 8 * K, "full_document", kernel="fa2", documents=lengths(4, 8 * K)), (DCP, MAGI, HYBRID))
    for tokens in (4, 16):
        yield from each(problem(4, tokens * K, kernel="fa2"), (DCP, DCP_PAPER, MAGI, ZIGZAG))


def documents() -> Iterator[Case]:
    """Many short documents on two GPUs: all alike, or log-normal around a median (sigma 1)."""
    rng = np.random.default_rng(3)

    def packed(total: int, median: int, sigma: float) -> list[int]:
        found: list[int] = []
        while sum(found) < total:
            length = max(64, int(median * np.exp(sigma * rng.standard_normal()))) if sigma else median
            found.append(min(length, total - sum(found)))
        return found

    simple = ({"strategy": "zigzag_ring"}, {"strategy": "allgather"}, ULYSSES)
    for tokens in (8 * K, 32 * K):
        for median, sigma in ((256, 0.0), (600, 0.0), (300, 1.0), (1000, 1.0)):
            asked = problem(2, tokens, "causal_document", kernel="fa2", documents=packed(2 * tokens, median, sigma))
            planners = () if tokens == 32 * K and median < 600 else (HYBRID, DCP)
            yield from each(asked, (*simple, *planners))
        for way in ({"strategy": "zigzag_ring"}, ULYSSES):
            for median, sigma in ((600, 0.0), (300, 1.0)):
                lens = packed(2 * tokens, median, sigma)
                yield from each(problem(2, tokens, "causal_document", kernel="sdpa_flash", documents=lens), (way,))


def size_and_heads(rng: np.random.Generator, most: float, multiple: int = 128) -> tuple[int, str]:
    """Tokens of a GPU, up to two to the power of `most`, and heads, drawn at random."""
    tokens = int(2 ** rng.uniform(10.5, most) // multiple * multiple)
    return tokens, str(rng.choice(["32:8", "40:8", "16:2", "24:24", "64:8", "28:4"]))


def by_lot(seed: int, kernels: Mapping[str, int]) -> Iterator[Case]:
    """Problems on two GPUs that nobody chose: sizes, heads, masks, documents and ways to split drawn at random, so many
    of every kernel, few of them seen before."""
    rng = np.random.default_rng(seed)
    for kernel, number in kernels.items():
        masks, head_dims = MASKS_BY_LOT[kernel]
        for _ in range(number):
            tokens, heads = size_and_heads(rng, 15)
            mask, head_dim = str(rng.choice(masks)), int(rng.choice(head_dims))
            more = {"documents": lots(rng, 2 * tokens)} if "document" in mask else {}
            asked = problem(2, tokens, mask, heads, kernel=kernel, head_dim=head_dim, **more)
            ways = WAYS_BY_LOT[kernel]
            yield from each(asked, [ways[i] for i in sorted(rng.permutation(len(ways))[:2])])
            if kernel == "fa2" and mask == "causal":
                yield from each(asked, (ZIGZAG,), "ring-flash-attn")
                yield from each(asked, (ULYSSES,), "yunchang")


def theirs_by_lot(seed: int) -> Iterator[Case]:
    """The same for what the first lots left out: other people's documents, PyTorch's, planners, streamed runs."""
    rng = np.random.default_rng(seed)

    def asked(mask: str, kernel: str, **more: Any) -> Case:
        tokens, heads = size_and_heads(rng, 14.5)
        documents = {"documents": lots(rng, 2 * tokens)} if "document" in mask else {}
        return problem(2, tokens, mask, heads, kernel=kernel, **documents, **more)

    planners = (HYBRID, DCP, MAGI, STRIPED, GATHER_HEADS)
    for mask, theirs in (("causal_document", (ZIGZAG, RING, GATHER)), ("full_document", (RING, GATHER))) * 3:
        case = asked(mask, "fa2")
        yield from each(case, [theirs[i] for i in sorted(rng.permutation(len(theirs))[:2])], "ring-flash-attn")
        yield from each(case, [planners[i] for i in sorted(rng.permutation(len(planners))[:2])])
    for mask, theirs in (("causal", (STRIPED, ZIGZAG, GATHER)), ("full", (RING, GATHER))) * 2:
        case = asked(mask, "fa2")
        yield from each(case, theirs[:2], "ring-flash-attn")
        yield from each(case, (ULYSSES,), "yunchang")
        yield from each(case, [planners[int(rng.integers(5))]])
    for kernel in ("sdpa_flash", "cudnn"):
        for mask, theirs in (("causal", (ZIGZAG, GATHER_ZIGZAG)), ("full", (RING,)), ("causal", (RING, GATHER_ZIGZAG))):
            yield from each(asked(mask, kernel), theirs, "torch")
    for mask in ("causal", "full"):
        yield from each(asked(mask, "fa2", protocol="streamed"), (ULYSSES, ZIGZAG, GATHER_DOCUMENT))


def small_others() -> Iterator[Case]:
    """Few tokens on two GPUs, where the host decides: everybody else's code in all of its ways, with its own knobs."""
    theirs = {"ring-flash-attn": ("zigzag_ring", "ring", "striped_ring", "allgather"), "yunchang": ("ulysses",)}
    for tokens, heads in ((2, "32:8"), (4, "32:8"), (1, "32:8"), (8, "32:32"), (8, "32:8")):
        asked = problem(2, tokens * K, heads=heads, kernel="fa2")
        for implementation, names in theirs.items():
            yield from each(asked, [{"strategy": name, "knobs": {}} for name in names], implementation)
        if heads == "32:8":
            ways = [{"strategy": name, "knobs": {}} for name in ("zigzag_ring", "allgather")]
            yield from each(asked | {"kernel": "sdpa_flash"}, ways, "torch")


def one_gpu(cluster: str, seed: int, multiple: int = 128) -> Iterator[Case]:
    """Attention on one GPU, drawn at random: what one that no rank waits for takes; tokens are a `multiple`."""
    rng = np.random.default_rng(seed)
    masks = ("causal", "full", "causal_document", "full_document")
    for kernel, number, some in (
        ("fa2", 16, masks),
        ("sdpa_flash", 12, masks),
        ("cudnn", 8, masks[:2]),
        ("sdpa_math", 2, ("causal",)),
        ("flex", 8, ("causal", "lambda", "shared_question", "causal_blockwise")),
    ):
        for _ in range(number):
            tokens, heads = size_and_heads(rng, 13 if kernel == "sdpa_math" else 15.5, multiple)
            mask, head_dim = str(rng.choice(some)), int(rng.choice((128,) if kernel == "fa2" else (64, 128, 128)))
            more = {"documents": lots(rng, tokens)} if "document" in mask else {}
            asked = problem(1, tokens, mask, heads, kernel=kernel, head_dim=head_dim, **more)
            yield from each(asked | {"cluster": cluster}, ({"strategy": "none"},))


def single_ranks(seed: int) -> Iterator[Case]:
    """Problems of 4 to 96 GPUs, drawn at random, of which single ranks are measured: every way to split in turn."""
    rng, every = np.random.default_rng(seed), ("causal", "full", "causal_document", "full_document")
    planners = (MAGI, HYBRID, DCP)
    for way in (ZIGZAG, MAGI, GATHER_DOCUMENT, USP, HYBRID, DCP, RING, LOONGTRAIN_4, STRIPED, GATHER_HEADS):
        few = way in (MAGI, DCP, GATHER_DOCUMENT, GATHER_HEADS)  # more take minutes to lay out
        for gpus in (4, 8, 16) if few else (4, 8, 16, 32, 96):
            tokens, heads = size_and_heads(rng, 13.5)
            mask = str(rng.choice(every if way not in (STRIPED, GATHER_HEADS) else every[:2]))
            dense = "document" not in mask
            kernel = str(rng.choice(("fa2", "sdpa_flash", "cudnn"))) if dense and way not in planners else "fa2"
            more = {} if dense else {"documents": lots(rng, gpus * tokens, (8, 11))}
            asked = problem(gpus, tokens, mask, heads, kernel=kernel, **more)
            yield {**way, **asked, "cluster": "h200-4" if gpus == 4 else "dgx-h200", "protocol": "streamed"}


def single_ranks_of_others(seed: int) -> Iterator[Case]:
    """The same in other people's code, on 2 to 16 GPUs; lengths of documents that all their cuts divide."""
    rng, dense = np.random.default_rng(seed), ("causal", "full")
    masks = (*dense, "causal_document", "full_document")
    gather: Case = {"strategy": "allgather", "knobs": {"heads_per_gather": 1}}
    for implementation, kernels, way, some in (
        *(("ring-flash-attn", ("fa2",), way, masks) for way in (RING, GATHER, gather)),
        ("ring-flash-attn", ("fa2",), ZIGZAG, ("causal", "causal_document")),
        ("ring-flash-attn", ("fa2",), STRIPED, ("causal",)),
        ("yunchang", ("fa2",), ULYSSES, dense),
        ("yunchang", ("fa2",), USP, ("causal",)),
        ("yunchang", ("fa2",), USP_BASIC, dense),
        *(("torch", ("sdpa_flash", "cudnn"), way, ("causal",)) for way in (ZIGZAG, GATHER_ZIGZAG)),
        *(("torch", ("sdpa_flash", "cudnn"), way, dense) for way in (RING, GATHER)),
    ):
        for gpus in (2, 4, 8, 16):
            tokens, heads = size_and_heads(rng, 13.5)
            mask, kernel = str(rng.choice(some)), str(rng.choice(kernels))
            whole_heads = int(heads.split(":")[1]) % gpus == 0
            if (way is ULYSSES and not whole_heads) or (way in (USP, USP_BASIC) and gpus == 2):
                continue
            more = {"documents": lots(rng, gpus * tokens, (8, 11), 2 * gpus)} if "document" in mask else {}
            asked = problem(gpus, tokens, mask, heads, kernel=kernel, **more)
            cluster = {"cluster": "h200-4" if gpus <= 4 else "dgx-h200", "protocol": "streamed"}
            yield from each(asked | cluster, (way,), implementation)


def windows_of_others(cluster: str, seed: int) -> Iterator[Case]:
    """Other people's code on two GPUs, 1.5K to 32K tokens on each: both passes in one window, synced and back to back,
    and the forward pass alone."""
    gather: Case = {"strategy": "allgather", "knobs": {"heads_per_gather": 2}}
    cases = [
        {**way, "implementation": implementation, "kernel": kernel, "tokens_per_gpu": tokens, "mask": "causal"}
        for tokens in (1536, 3072, 6144, 12288, 32 * K)
        for implementation, kernel, way in (
            *(("ring-flash-attn", "fa2", way) for way in (RING, ZIGZAG, STRIPED, gather)),
            ("yunchang", "fa2", ULYSSES),
            ("torch", "sdpa_flash", ZIGZAG),
            ("torch", "cudnn", GATHER_ZIGZAG),
        )
    ]
    shape: Case = {"gpus": 2, "cluster": cluster, "heads": 32, "kv_heads": 8}
    windows: tuple[Case, ...] = (
        {"protocol": "synced"},
        {"protocol": "streamed"},
        {"protocol": "streamed", "pass": "fwd"},
    )
    return (case | shape | window for case in in_turn(cases, seed) for window in windows)


def plain_calls(cluster: str, seed: int) -> Iterator[Case]:
    """flash-attn and PyTorch on one GPU, drawn at random: windows as of other people's code."""
    rng = np.random.default_rng(seed)
    for i in range(24):
        tokens, heads = size_and_heads(rng, 15.5)
        implementation, kernel = (("flash-attn", "fa2"), ("torch", "sdpa_flash"), ("torch", "cudnn"))[i % 3]
        mask = str(rng.choice(("causal", "causal", "full")))
        asked = problem(1, tokens, mask, heads, kernel=kernel) | {"cluster": cluster, "implementation": implementation}
        for protocol in ("synced", "streamed"):
            yield {"strategy": "none", **asked, "protocol": protocol}


def compiled_calls(cluster: str) -> Iterator[Case]:
    """flash-attn and PyTorch on one GPU under torch.compile, where the host decides and where it does not."""
    codes = ("torch", "sdpa_flash"), ("torch", "cudnn"), ("flash-attn", "fa2")
    cases = [
        (*code, K, pass_, protocol)
        for code in codes
        for pass_, protocol in (("fwd_bwd", "synced"), ("fwd", "streamed"))
    ]
    cases += [("torch", "cudnn", 16 * K, "fwd_bwd", "synced"), ("flash-attn", "fa2", 16 * K, "fwd_bwd", "streamed")]
    for implementation, kernel, tokens, pass_, protocol in cases:
        asked = problem(1, tokens, kernel=kernel) | {"cluster": cluster, "pass": pass_}
        named = {"implementation": implementation, "compile": True, "protocol": protocol}
        yield {"strategy": "none", **asked, **named}


def rings_of_one(cluster: str) -> Iterator[Case]:
    """yunchang's USP whose Ulysses group is both of two GPUs, beside its Ulysses."""
    for tokens in (2 * K, 16 * K):
        for window in ({"pass": "fwd"}, {"pass": "bwd"}, {"protocol": "streamed"}):
            asked = problem(2, tokens, kernel="fa2") | {"cluster": cluster, "implementation": "yunchang", **window}
            yield {**asked, "strategy": "usp", "knobs": {"ulysses": 2}}
        yield {**asked, "strategy": "ulysses"}


def newer(cluster: str, seed: int) -> Iterator[Case]:
    """Strategies and masks that the first sets lack, on two GPUs, sizes and heads drawn at random: pass-Q and meshes of
    one row or column, chunks of heads, rings whose backward pass sends queries, cached prefixes, windows, values of
    another size than keys."""
    rng = np.random.default_rng(seed)
    mesh_ways: tuple[Case, ...] = (
        {"strategy": "mesh", "knobs": {"keys": 1}},
        {"strategy": "mesh", "knobs": {"keys": 2, "keys_backward": 1}},
        {"strategy": "mesh", "knobs": {"keys": 2, "heads_per_gather": 2}},
    )
    back: Case = {"strategy": "zigzag_ring", "knobs": {"backward": "queries"}}
    chunks = [{"strategy": "ulysses", "knobs": {"head_chunks": parts}} for parts in (2, 4)]
    apart: tuple[Case, ...] = (ULYSSES, {"strategy": "zigzag_ring"}, GATHER_ZIGZAG)

    def asked(kernel: str, mask: Any = "causal", heads: str = "", most: float = 15, **more: Any) -> Case:
        tokens, drawn_heads = size_and_heads(rng, most)
        return problem(2, tokens, mask, heads or drawn_heads, kernel=kernel, **more) | {"cluster": cluster}

    for kernel in ("fa2", "sdpa_flash", "fa2", "flex"):
        yield from each(asked(kernel), mesh_ways[: 3 if kernel == "fa2" else 2])
    for kernel in ("fa2", "cudnn", "sdpa_flash"):
        yield from each(asked(kernel), (back,))
        yield from each(asked(kernel, "full"), ({"strategy": "ring"},))
        for heads in ("32:8", "64:8"):
            yield from each(asked(kernel, heads=heads), chunks)
    for kernel in ("fa2", "sdpa_flash", "fa2"):
        for share in (0.5, 0.9):
            case = asked(kernel, most=16.5, **{"pass": "fwd"})
            cached = int(2 * share * case["tokens_per_gpu"] // 512 * 512)
            ways: tuple[Case, ...] = (RING, {"strategy": "mesh", "knobs": {"keys": 1}}, STRIPED)
            yield from each(case | {"cached": cached}, ways[:2] if kernel == "sdpa_flash" else ways)
    for kernel, window in (("fa2", 1024), ("fa2", 4096), ("flex", 1024), ("fa2", 128)):
        yield from each(asked(kernel, {"name": "causal_sliding_window", "window": window}, most=17), apart)
    for heads in ("16:16", "64:64"):
        case = asked("cudnn", heads=heads, head_dim=192, value_dim=128)
        yield from each(case, (ULYSSES, {"strategy": "zigzag_ring"}))


def newer_ranks(cluster: str, seed: int) -> Iterator[Case]:
    """The same strategies on 4 to 16 GPUs, of which single ranks are measured."""
    rng = np.random.default_rng(seed)
    ways: tuple[tuple[Case, Case], ...] = (
        ({"strategy": "mesh", "knobs": {"keys": 1}}, {}),
        ({"strategy": "mesh", "knobs": {"keys": 2}}, {}),
        ({"strategy": "mesh", "knobs": {"keys": 4, "keys_backward": 2}}, {}),
        ({"strategy": "zigzag_ring", "knobs": {"backward": "queries"}}, {}),
        ({"strategy": "ulysses", "knobs": {"head_chunks": 2}}, {"heads": "64:32"}),
        ({"strategy": "ring"}, {"pass": "fwd", "share": 0.6}),
        ({"strategy": "mesh", "knobs": {"keys": 1}}, {"pass": "fwd", "share": 0.6}),
        ({"strategy": "allgather"}, {"mask": {"name": "causal_sliding_window", "window": 2048}}),
    )
    for (way, more), gpus in product(ways, (4, 8, 16)):
        tokens, heads = size_and_heads(rng, 13.5)
        kernel = str(rng.choice(("fa2", "sdpa_flash") if "mask" not in more else ("fa2",)))
        given = dict(more)
        cached = {"cached": int(given.pop("share") * gpus * tokens // 512 * 512)} if "share" in given else {}
        asked = problem(gpus, tokens, given.pop("mask", "causal"), given.pop("heads", heads), kernel=kernel, **given)
        yield {**way, **asked, **cached, "cluster": cluster, "protocol": "streamed"}


def newer_calls(cluster: str, seed: int) -> Iterator[Case]:
    """The same masks and sizes of heads on one GPU."""
    rng = np.random.default_rng(seed)
    for kernel, window in product(("fa2", "cudnn", "flex"), (128, 1024, 4096)):
        tokens, heads = size_and_heads(rng, 17)
        mask: Any = {"name": "causal_sliding_window", "window": window}
        yield from each(problem(1, tokens, mask, heads, kernel=kernel) | {"cluster": cluster}, ({"strategy": "none"},))
    for heads in ("16:16", "64:64", "128:128"):
        tokens, _ = size_and_heads(rng, 14)
        case = problem(1, tokens, "causal", heads, kernel="cudnn", head_dim=192, value_dim=128)
        yield from each(case | {"cluster": cluster}, ({"strategy": "none"},))


def other_calls(cluster: str, seed: int) -> Iterator[Case]:
    """Calls of a millisecond and more on one GPU: attention sinks, values of another size than keys, windows."""
    rng = np.random.default_rng(seed)

    def window(keys: int) -> Any:
        return {"name": "causal_sliding_window", "window": keys}

    small, values = {"head_dim": 64, "sinks": True}, {"head_dim": 192, "value_dim": 128}
    asked: tuple[tuple[str, Any, str, float, Case], ...] = (
        ("cudnn", "causal", "64:8", 14, small),
        ("cudnn", window(128), "64:8", 17, small),
        ("sdpa_flash", "causal", "64:8", 14, small),
        ("sdpa_flash", window(128), "64:8", 17, small),
        ("cudnn", "full", "32:8", 14, {"sinks": True}),
        ("fa2", "causal", "32:8", 14.5, {"sinks": True}),
        ("fa2", window(1024), "24:24", 16.5, {"sinks": True}),
        *(("cudnn", window(keys), "", 17, {}) for keys in (128, 512, 1024, 2048, 4096, 8192)),
        *((kernel, window(keys), "", 17, {}) for kernel, keys in (("fa2", 512), ("sdpa_flash", 2048))),
        *(("cudnn", "causal", heads, 15, values) for heads in ("16:16", "32:32", "64:64", "128:128")),
        *(("cudnn", "full", heads, 14, values) for heads in ("16:16", "128:128")),
        ("cudnn", window(2048), "32:32", 15.5, values),
    )
    for kernel, mask, heads, most, more in asked:
        tokens, drawn_heads = int(2 ** rng.uniform(most - 1.5, most) // 128 * 128), size_and_heads(rng, 14)[1]
        case = problem(1, tokens, mask, heads or drawn_heads, kernel=kernel, **more)
        yield from each(case | {"cluster": cluster}, ({"strategy": "none"},))


def other_ranks(cluster: str, seed: int) -> Iterator[Case]:
    """Single ranks of 4 and 8 GPUs: chunks of tokens in the host's memory, and what `other_calls` has, split."""
    rng = np.random.default_rng(seed)
    values = {"head_dim": 192, "value_dim": 128}
    window = {"mask": {"name": "causal_sliding_window", "window": 1024}}
    ways: tuple[tuple[Case, str, str, Case], ...] = (
        *(({"strategy": "ulysses", "knobs": {"token_chunks": n}}, "cudnn", "32:8", {}) for n in (2, 4, 8)),
        ({"strategy": "ulysses", "knobs": {"token_chunks": 4}}, "fa2", "24:24", {}),
        *((way, "cudnn", "32:32", values) for way in (ULYSSES, ZIGZAG, RING)),
        ({"strategy": "mesh", "knobs": {"keys": 1}}, "cudnn", "16:16", {**values, "mask": "full"}),
        (ULYSSES, "cudnn", "64:32", window),
        *((way, "fa2", "32:8", {"sinks": True}) for way in (ULYSSES, ZIGZAG, GATHER_ZIGZAG)),
    )
    for i, (way, kernel, heads, more) in enumerate(ways):
        tokens, given = int(2 ** rng.uniform(12.5, 14) // 512 * 512), dict(more)
        tokens *= 2 if more is window else 1
        asked = problem((4, 8)[i % 2], tokens, given.pop("mask", "causal"), heads, kernel=kernel, **given)
        yield {**way, **asked, "cluster": cluster, "protocol": "streamed"}


def cycle_ranks(cluster: str, seed: int) -> Iterator[Case]:
    """Single ranks of rings on all cycles of 8 and 16 GPUs, and of one ring beside them."""
    rng = np.random.default_rng(seed)
    every: Case = {"strategy": "zigzag_ring", "knobs": {"cycles": "all"}}
    for kernel, mask, gpus in (("fa2", "causal", 8), ("fa2", "full", 16), ("sdpa_flash", "causal", 8)):
        tokens, heads = int(2 ** rng.uniform(12, 13.5) // 256 * 256), size_and_heads(rng, 13)[1]
        asked = problem(gpus, tokens, mask, heads, kernel=kernel) | {"cluster": cluster, "protocol": "streamed"}
        yield from each(asked, (every, {"strategy": "zigzag_ring"}))


def in_turn(cases: list[Case], seed: int) -> list[Case]:
    """Shuffled, so that those at the front are of all sorts."""
    return [cases[i] for i in np.random.default_rng(seed).permutation(len(cases))]


def one_gpu_layers(cluster: str, seed: int) -> Iterator[Case]:
    """Layers of three models on one GPU, drawn at random: forward passes, and both."""
    rng = np.random.default_rng(seed)
    for i in range(18):
        tokens, mask = int(2 ** rng.uniform(11, 15) // 128 * 128), str(rng.choice(("causal", "causal_document")))
        model = ("llama3-8b", "llama-34b", "llama3-70b")[i % 3]
        tokens = tokens if model == "llama3-8b" else min(tokens, 12 * K)
        case: Case = {"model": model, "part": "layer", "gpus": 1, "cluster": cluster, "tokens": tokens, "mask": mask}
        case |= {"documents": lots(rng, tokens)} if mask == "causal_document" else {}
        kernels = ("fa2", "sdpa_flash", "cudnn")[: 3 if mask == "causal" else 2]
        kernel, pass_ = str(rng.choice(kernels)), ("fwd_bwd", "fwd_bwd", "fwd")[i // 3 % 3]
        yield {**case, "kernel": kernel, "pass": pass_, "strategy": "none"}


def lots(rng: np.random.Generator, total: int, logs: tuple[float, float] = (6, 9), multiple: int = 4) -> list[int]:
    """Log-normal document lengths that sum to `total`, multiples of 4, so that two ranks' zigzag chunks are whole, or
    of what is said; the logarithm of their median is drawn, too."""
    median, sigma, found = float(np.exp(rng.uniform(*logs))), float(rng.uniform(0.3, 1.5)), list[int]()
    while sum(found) < total:
        length = max(64, int(median * np.exp(sigma * rng.standard_normal())) // multiple * multiple)
        found.append(min(length, total - sum(found)))
    return found


def masked(ways: Sequence[Case]) -> Iterator[Case]:
    """64k and 128k tokens on four GPUs under causal and sparse masks, whose shares only FlexAttention takes."""
    for tokens in (16, 32):
        for mask in ("causal", *SPARSE):
            yield from each(problem(4, tokens * K, mask=mask, kernel="flex"), ways)


def hybrid() -> Iterator[Case]:
    """Heads and context together on four GPUs: Ulysses groups and rings of two, and double rings."""
    for tokens in (2, 4, 8, 16, 32):
        yield from each(problem(4, tokens * K), (USP, LOONGTRAIN))
    yield from each(problem(4, 8 * K, mask="full"), (USP_BASIC, LOONGTRAIN))
    yield from each(problem(4, 8 * K, heads="32:32"), (USP,))
    yield from each(problem(4, 2 * K, **{"pass": "fwd"}), (USP, LOONGTRAIN))
    documents = problem(4, 8 * K, mask="causal_document", documents=lengths(4, 8 * K))
    yield from each(documents, (USP, USP_SEQUENCE, LOONGTRAIN))


def side_by_side() -> Iterator[Case]:
    """Other people's code, and ours with the same kernel."""
    for gpus, tokens in ((4, 2), (4, 8), (4, 32), (2, 4), (2, 16)):
        yield from everyone(problem(gpus, tokens * K, kernel="fa2"))
    for gpus in (2, 4):
        yield from everyone(problem(gpus, 2 * K, kernel="fa2", **{"pass": "fwd"}))
    yield from everyone(problem(4, 8 * K, kernel="fa2", heads="32:32"))
    documents = problem(4, 8 * K, kernel="fa2", mask="causal_document", documents=lengths(4, 8 * K))
    yield from each(documents, (ZIGZAG, GATHER))
    yield from each(documents, (ZIGZAG, GATHER), "ring-flash-attn")
    full = problem(4, 8 * K, kernel="fa2", mask="full")
    yield from each(full, FLAT)
    yield from each(full, (RING, GATHER), "ring-flash-attn")
    yield from each(full, (ULYSSES,), "yunchang")
    yield from each(problem(4, 1 * K, kernel="fa2"), (ZIGZAG,), "ring-flash-attn")
    yield from each(problem(4, 1 * K, kernel="fa2"), (ULYSSES,), "yunchang")
    for tokens in (2, 8, 32):
        for implementation in ("cpsim", "yunchang"):
            yield from each(problem(4, tokens * K, kernel="fa2"), (USP,), implementation)
    for implementation in ("cpsim", "yunchang"):
        yield from each(full, (USP_BASIC,), implementation)
    for gpus, tokens in ((4, 2), (4, 8), (4, 32), (2, 4), (2, 16)):
        yield from each(problem(gpus, tokens * K, kernel="sdpa_flash"), (ZIGZAG, GATHER_ZIGZAG), "torch")
    for gpus, tokens in ((4, 2), (4, 8), (4, 32), (2, 4), (2, 16)):
        for who in ("cpsim", "ring-flash-attn"):
            yield from each(problem(gpus, tokens * K, kernel="fa2"), (STRIPED,), who)
    yield from each(problem(4, 8 * K, kernel="cudnn"), (ZIGZAG, GATHER_ZIGZAG), "torch")
    yield from each(problem(4, 8 * K, kernel="cudnn", mask="full"), (RING,), "torch")


def emulated() -> Iterator[Case]:
    """Two nodes of two GPUs, linked by sockets."""
    nodes = {"cluster": "h200-2x2-sockets"}
    for tokens in (2, 8, 32):
        yield from each(problem(4, tokens * K) | nodes, (ULYSSES, ZIGZAG, GATHER_ZIGZAG, GATHER_HEADS))
        yield from each(problem(4, tokens * K) | nodes, (USP, USP_CONTEXT_FIRST, LOONGTRAIN))
    yield from each(problem(4, 8 * K, mask="full") | nodes, FLAT)
    documents = problem(4, 8 * K, mask="causal_document", documents=lengths(4, 8 * K))
    yield from each(documents | nodes, (ULYSSES, ZIGZAG, GATHER_DOCUMENT))
    yield from each(problem(4, 8 * K, kernel="fa2") | nodes, (ZIGZAG,), "ring-flash-attn")
    yield from each(problem(4, 8 * K, kernel="fa2") | nodes, (ULYSSES, USP), "yunchang")
    yield from each(documents | nodes | {"kernel": "fa2"}, (DCP, DCP_PAPER, MAGI, HYBRID, ZIGZAG))
    yield from (case | nodes for case in masked((ZIGZAG, GATHER_ZIGZAG, USP, DCP, DCP_PAPER)))


SECOND_LOTS = {"fa2": 8, "sdpa_flash": 4, "cudnn": 4}


def two_h100(seed: int, kernels: Mapping[str, int]) -> Iterator[Case]:
    """Problems of both kinds drawn at random, on two H100."""
    parts = by_lot(seed, kernels), theirs_by_lot(seed + 1)
    yield from (case | {"cluster": "dgx-h100"} for part in parts for case in part)


def few_tokens(cases: Iterable[Case]) -> Iterator[Case]:
    """Those of up to 2,560 tokens per GPU in which hosts start with the GPUs: hosts and launches count."""
    return (c for c in cases if c["tokens_per_gpu"] <= 2560 and c.get("protocol") != "streamed")


def pair_of_nodes() -> Iterator[Case]:
    """Two nodes of one H100 each, whose sockets are measured just before."""
    nodes: Case = {"cluster": "h100-2x1-sockets.json", "kernel": "fa2"}
    for tokens in (2, 8, 32):
        yield from each(problem(2, tokens * K) | nodes, (ULYSSES, ZIGZAG, GATHER_ZIGZAG, GATHER_HEADS))
    yield from each(problem(2, 8 * K, mask="full") | nodes, FLAT)
    documents = problem(2, 8 * K, mask="causal_document", documents=lengths(2, 8 * K))
    yield from each(documents | nodes, (ULYSSES, ZIGZAG, GATHER_DOCUMENT, DCP, MAGI, HYBRID))
    for tokens in (8, 32):
        yield from each(problem(2, tokens * K) | nodes, (ZIGZAG, RING, GATHER), "ring-flash-attn")
        yield from each(problem(2, tokens * K) | nodes, (ULYSSES,), "yunchang")


def four() -> Iterator[Case]:
    """Four GPUs of one host: strategies in our executor, planners of documents on 64K and 128K tokens."""
    host: Case = {"cluster": "dgx-h100", "kernel": "fa2"}
    for tokens in (4, 16, 32):
        yield from each(problem(4, tokens * K) | host, (ULYSSES, RING, ZIGZAG, GATHER_ZIGZAG, USP, LOONGTRAIN))
    yield from each(problem(4, 8 * K, "full") | host, FLAT)
    for tokens in (16, 32):
        documents = problem(4, tokens * K, "causal_document", documents=lengths(4, tokens * K))
        yield from each(documents | host, (*BY_DOCUMENT, HYBRID, DCP, MAGI))


def four_of_others() -> Iterator[Case]:
    """Other people's code on four GPUs, both passes in one window, synced and back to back."""
    codes = (
        *(("ring-flash-attn", "fa2", way) for way in (RING, ZIGZAG, STRIPED, GATHER)),
        *(("yunchang", "fa2", way) for way in (ULYSSES, USP)),
        ("torch", "sdpa_flash", ZIGZAG),
        ("torch", "cudnn", GATHER_ZIGZAG),
    )
    for tokens, (code, kernel, way) in product((2, 8, 32), codes):
        case = {**way, **problem(4, tokens * K), "implementation": code, "kernel": kernel, "cluster": "dgx-h100"}
        yield from ({**case, "protocol": protocol} for protocol in ("synced", "streamed"))


def four_as_nodes() -> Iterator[Case]:
    """The same GPUs as two nodes, whose sockets are measured just before."""
    host: Case = {"cluster": "h100-2x2-sockets.json", "kernel": "fa2"}
    for tokens in (2, 8):
        yield from each(problem(4, tokens * K) | host, (ULYSSES, ZIGZAG, GATHER_ZIGZAG, USP, LOONGTRAIN))
    documents = problem(4, 8 * K, "causal_document", documents=lengths(4, 8 * K))
    yield from each(documents | host, (ZIGZAG, HYBRID, DCP, MAGI))


def eight() -> Iterator[Case]:
    """Eight GPUs of one host, with the kernel that everybody's code can use."""
    host: Case = {"cluster": "dgx-h200", "kernel": "fa2"}
    ways = (ULYSSES, RING, ZIGZAG, GATHER_ZIGZAG, USP, USP_4, LOONGTRAIN, LOONGTRAIN_4, LOONGTRAIN_HEADS)
    for tokens in (4, 8, 16, 32):
        yield from each(problem(8, tokens * K) | host, ways)
    yield from each(problem(8, 8 * K, "full") | host, (ULYSSES, RING, GATHER, USP_BASIC))
    for tokens in (8, 32):
        documents = problem(8, tokens * K, "causal_document", documents=lengths(8, tokens * K))
        yield from each(documents | host, (ULYSSES, ZIGZAG, GATHER_DOCUMENT, USP, HYBRID))
    for tokens in (4, 8, 32):
        yield from each(problem(8, tokens * K) | host, (ZIGZAG, RING, GATHER), "ring-flash-attn")
        yield from each(problem(8, tokens * K) | host, (ULYSSES, USP), "yunchang")


def eight_as_nodes(cluster: str) -> Iterator[Case]:
    """The same GPUs as nodes that sockets link."""
    host: Case = {"cluster": cluster, "kernel": "fa2"}
    yield from each(problem(8, 8 * K) | host, (ULYSSES, ZIGZAG, GATHER_ZIGZAG, USP, USP_4, LOONGTRAIN, LOONGTRAIN_4))
    documents = problem(8, 8 * K, "causal_document", documents=lengths(8, 8 * K))
    yield from each(documents | host, (ZIGZAG, HYBRID))


def as_nodes(num_nodes: int, gpus: int, gpu: str) -> Case:
    """A cluster of so many GPUs of one machine whose nodes are linked as those of `h200-2x2-sockets` are."""
    fabric = load_cluster("h200-2x2-sockets").fabric
    assert fabric is not None
    values = ((f, getattr(fabric, f.name)) for f in dataclasses.fields(fabric))
    linked = {f.name: value for f, value in values if value != f.default}
    each = gpus // num_nodes
    name, notes = f"{gpu}-{num_nodes}x{each}-sockets", f"{num_nodes} emulated nodes of {each} GPUs"
    return {"name": name, "gpus_per_node": each, "gpu": gpu, "profile": gpu, "notes": notes, "fabric": linked}


def everyone(asked: Case) -> Iterator[Case]:
    """A causal problem for all who can run it."""
    yield from each(asked, (ULYSSES, ZIGZAG, RING, GATHER))
    for implementation, ways in THEIRS.items():
        yield from each(asked, ways, implementation)


def each(asked: Case, ways: Sequence[Case], implementation: str = "cpsim") -> Iterator[Case]:
    """A problem solved in several ways."""
    return ({**way, "implementation": implementation, **asked} for way in ways)


def stated(case: Case) -> Case:
    """A case with the knobs of its planner, which it keeps when defaults change."""
    own = case.get("tokens_per_gpu") or case.get("tokens", 0) // case["gpus"]
    knobs: Case = {}
    if case["strategy"] == "dcp":
        whole, quarter = (1 << max(0, (own // parts).bit_length() - 1) for parts in (1, 4))
        knobs = {"order": "given", "block": min(4 * K, max(quarter, min(512, whole)))}
    elif case["strategy"] == "magi":
        fewest = min(own, max(4, -(-own // (2 * K))))
        chunks = next((count for count in range(fewest, 2 * fewest) if own % count == 0), None)
        knobs = {"chunk": own // chunks} if chunks else {}
    return {**case, "knobs": knobs | case.get("knobs", {})} if knobs else case


def text(cases: Iterable[Case]) -> str:
    """JSON Lines, each case once."""
    return "".join(dict.fromkeys(json.dumps(stated(case)) + "\n" for case in cases))


def files() -> dict[Path, str]:
    """What the set's files hold."""
    found = {
        FOLDER / "cases.jsonl": text(case for part in (ours(), side_by_side()) for case in part),
        FOLDER / "emulated.jsonl": text(emulated()),
        FOLDER / "documents.jsonl": text(documents()),
        FOLDER / "drawn.jsonl": text(by_lot(11, LOTS)),
        FOLDER / "drawn-2.jsonl": text(theirs_by_lot(12)),
        FOLDER / "drawn-3.jsonl": text(case for part in (by_lot(15, LOTS), theirs_by_lot(16)) for case in part),
        FOLDER / "small-others.jsonl": text(small_others()),
        FOLDER / "two-h100.jsonl": text(two_h100(31, {"fa4": 8, "fa2": 8, "sdpa_flash": 4, "cudnn": 4})),
        FOLDER / "two-h100-2.jsonl": text(two_h100(33, SECOND_LOTS)),
        FOLDER / "two-h100-2-short.jsonl": text(few_tokens(two_h100(33, SECOND_LOTS))),
        FOLDER / "pair-of-nodes.jsonl": text(pair_of_nodes()),
        FOLDER / "one-h100.jsonl": text(one_gpu("dgx-h100", 13)),
        FOLDER / "one-h100-layers.jsonl": text(one_gpu_layers("dgx-h100", 14)),
        FOLDER / "one-h100-2.jsonl": text(one_gpu("dgx-h100", 22)),
        FOLDER / "one-h100-layers-2.jsonl": text(one_gpu_layers("dgx-h100", 23)),
        FOLDER / "one-h200.jsonl": text(one_gpu("h200-4", 17)),
        FOLDER / "one-h200-layers.jsonl": text(one_gpu_layers("h200-4", 18)),
        FOLDER / "one-h200-layers-2.jsonl": text(one_gpu_layers("h200-4", 24)),
        FOLDER / "one-h200-2.jsonl": text(one_gpu("h200-4", 19)),
        FOLDER / "one-h200-3.jsonl": text(one_gpu("h200-4", 20)),
        FOLDER / "one-h200-4.jsonl": text(one_gpu("h200-4", 21)),
        FOLDER / "one-h200-5.jsonl": text(one_gpu("h200-4", 25, multiple=1)),
        FOLDER / "eight" / "cases.jsonl": text(eight()),
        FOLDER / "windows-h100.jsonl": text(windows_of_others("dgx-h100", 41)),
        FOLDER / "windows-h200.jsonl": text(windows_of_others("h200-4", 41)),
        FOLDER / "plain-h100.jsonl": text(plain_calls("dgx-h100", 43)),
        FOLDER / "plain-h200.jsonl": text(plain_calls("h200-4", 43)),
        FOLDER / "compiled-h100.jsonl": text(compiled_calls("dgx-h100")),
        FOLDER / "compiled-h200.jsonl": text(compiled_calls("h200-4")),
        FOLDER / "one-ring-h100.jsonl": text(rings_of_one("dgx-h100")),
        FOLDER / "one-ring-h200.jsonl": text(rings_of_one("h200-4")),
        FOLDER / "newer-1-h100.jsonl": text(newer_calls("dgx-h100", 52)),
        FOLDER / "newer-1-h200.jsonl": text(newer_calls("h200-4", 52)),
        FOLDER / "newer-ranks.jsonl": text(in_turn(list(newer_ranks("dgx-h200", 53)), 53)),
        FOLDER / "newer-1-h200-2.jsonl": text(in_turn(list(other_calls("h200-4", 54)), 54)),
        FOLDER / "newer-ranks-2.jsonl": text(in_turn(list(other_ranks("dgx-h200", 55)), 55)),
        FOLDER / "newer-ranks-3.jsonl": text(cycle_ranks("dgx-h200", 56)),
        FOLDER / "newer-2-h100.jsonl": text(in_turn(list(newer("dgx-h100", 51)), 51)),
        FOLDER / "newer-2-h200.jsonl": text(in_turn(list(newer("h200-4", 51)), 51)),
        FOLDER / "ranks-1.jsonl": text(single_ranks(26)),
        FOLDER / "ranks-others.jsonl": text(in_turn(list(single_ranks_of_others(28)), 28)),
        FOLDER / "ranks-2.jsonl": text(in_turn([c for c in single_ranks(27) if c["gpus"] <= 16], 27)),
        FOLDER / "ranks-3.jsonl": text(in_turn([c for c in single_ranks(29) if c["gpus"] <= 16], 29)),
    }
    found |= {
        FOLDER / "four" / "cases.jsonl": text(four()),
        FOLDER / "four" / "others.jsonl": text(in_turn(list(four_of_others()), 44)),
        FOLDER / "four" / "nodes-2.jsonl": text(four_as_nodes()),
    }
    cluster = as_nodes(2, 4, "h100")
    found[FOLDER / "four" / f"{cluster['name']}.json"] = json.dumps(cluster, indent=1) + "\n"
    for num_nodes in (2, 4):
        cluster = as_nodes(num_nodes, 8, "h200")
        found[FOLDER / "eight" / f"{cluster['name']}.json"] = json.dumps(cluster, indent=1) + "\n"
        found[FOLDER / "eight" / f"nodes-{num_nodes}.jsonl"] = text(eight_as_nodes(f"{cluster['name']}.json"))
    return found


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
