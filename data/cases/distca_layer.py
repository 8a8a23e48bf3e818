"""Writes distca-layer-4.jsonl and -2.jsonl: a Llama-3-8B layer on so many H200, whose attention is distca's or others',
and four/layers.jsonl: the same on four H100.

    python data/cases/distca_layer.py

32K to 256K tokens, documents of DistCA's two distributions and one document of half of the tokens; lengths are rounded
to multiples of 16, so that ranks that gather from each other have equal shards. To run them on one machine:

    torchrun --nproc-per-node 4 -m cpsim.real.run data/cases/distca-layer-4.jsonl --seconds 0.3 --out runs.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cpsim.case.documents import draw_documents

K = 1024
TOKENS = (32 * K, 64 * K, 128 * K, 256 * K)
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "distca", "knobs": {"order": "given"}},
    {"strategy": "per_sequence"},
    {"strategy": "wlb"},
)
TWO_GROUPS = {"strategy": "wlb", "knobs": {"cp": 2}}
SINGLE_STREAM = {"strategy": "distca", "knobs": {"order": "given", "nano_batches": 1}}


def rounded(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
    """Multiples of 16 that sum to the same, the last document taking what is left or over."""
    kept = np.maximum(lengths // 16, 1) * 16
    kept[np.argmax(kept)] += lengths.sum() - kept.sum()
    return [int(n) for n in kept]


def documents(tokens: int) -> dict[str, list[int]]:
    """Lists of lengths by what they are."""
    drawn = {name: np.array(draw_documents(name, tokens, 0)) for name in ("distca_prolong", "distca_pretrain")}
    short = np.array(draw_documents("distca_prolong", tokens // 2, 1, max_length=4 * K))
    half = np.concatenate([short[: len(short) // 3], [tokens // 2], short[len(short) // 3 :]])
    return {**{name: rounded(lengths) for name, lengths in drawn.items()}, "one of half": rounded(half)}


def text(gpus: int, cluster: str = "h200-4") -> str:
    """The file for so many GPUs of a cluster."""
    lines = []
    for tokens in TOKENS:
        for name, lengths in documents(tokens).items():
            strategies = [*STRATEGIES, *([TWO_GROUPS] if gpus > 2 else [])]
            strategies += [SINGLE_STREAM] if name == "one of half" else []
            for strategy in strategies:
                lines.append(
                    {
                        "model": "llama3-8b",
                        "part": "layer",
                        "gpus": gpus,
                        "cluster": cluster,
                        "tokens": tokens,
                        "documents": lengths,
                        "mask": "causal_document",
                        "kernel": "fa2",
                        **strategy,
                    }
                )
    return "".join(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    for gpus in (4, 2):
        Path(__file__).with_name(f"distca-layer-{gpus}.jsonl").write_text(text(gpus), encoding="utf-8")
    (Path(__file__).parent / "four" / "layers.jsonl").write_text(text(4, "dgx-h100"), encoding="utf-8")
