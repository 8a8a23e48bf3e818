"""Writes steps-{1,2,3,5}-{h100,h200}.jsonl: whole training steps of few layers on one and on two GPUs, in plain PyTorch
(compiled and eager) and in Hugging Face's Transformers; and {four,eight}/steps.jsonl, on all GPUs of a host.

    python data/cases/steps.py

Dimensions of four models, 2K to 64K tokens on a GPU; with FSDP, tensor and context parallelism on two. Cases are
shuffled, so that a run that is cut off has some of all kinds. Their predictions are in `studies/steps`.

    cpsim run data/cases/steps-2-h100.jsonl --gpus 2 --seconds 0.3 --out runs.jsonl
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
K = 1024
Case = dict[str, Any]

MODELS: dict[str, Case] = {
    "llama3-8b": {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    "llama3-70b": {"layers": 2, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256},
    "qwen2.5-7b": {"layers": 4, "hidden": 3584, "heads": 28, "kv_heads": 4, "ffn": 18944, "vocab": 152064},
    "llama3.2-1b": {
        "layers": 8,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "ffn": 8192,
        "vocab": 128256,
    },
}
"""Dimensions of published models, with few layers."""
OTHERS: dict[str, Case] = {
    "qwen3-14b": {"layers": 2, "hidden": 5120, "heads": 40, "kv_heads": 8, "ffn": 17408, "vocab": 151936},
    "llama3.2-3b": {"layers": 6, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "olmo2-7b": {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 100352},
    "qwen3-1.7b": {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 6144, "vocab": 151936},
}
"""The same of four more, which no step of the set had when their steps were predicted."""
COMPILED: Case = {"framework": "torch", "compile": True}
EAGER: Case = {"framework": "torch", "compile": False}
HUGGING_FACE: Case = {"framework": "huggingface"}
MEGATRON: Case = {"framework": "megatron"}
FP8: Case = {**MEGATRON, "precision": {"fp8": "current"}}
ROUTED: dict[str, Case] = {
    "qwen3-30b": {
        "layers": 4,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "ffn": 6144,
        "vocab": 151936,
        "experts": 32,
        "top_k": 8,
        "expert_ffn": 768,
    },
    "mixtral": {
        "layers": 2,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": 14336,
        "vocab": 32000,
        "experts": 4,
        "top_k": 2,
        "expert_ffn": 14336,
    },
}
"""Dimensions of published mixtures of experts, with fewer layers and experts."""
CHUNKED = 8
"""Chunks of the loss from 16K tokens on, so that logits fit."""


def case(model: Case, tokens: int, code: Case, gpus: int = 1, kernel: str = "sdpa_flash", **parallel: Any) -> Case:
    """One step on H100; ``tokens`` on a GPU."""
    if code["framework"] != "megatron" and tokens >= 16 * K and parallel.get("tp", 1) == 1 and code is not HUGGING_FACE:
        parallel["loss_chunks"] = CHUNKED
    strategy = parallel.pop("strategy", "none")
    common: Case = {
        "gpus": gpus,
        "cluster": "dgx-h100",
        "kernel": kernel,
        "tokens": tokens * gpus,
        "strategy": strategy,
    }
    return {"model": model, **code, **common, "mask": "causal", "parallel": parallel}


def on_one() -> list[Case]:
    """One GPU."""
    found = list[Case]()
    for model in MODELS.values():
        for tokens in (2 * K, 8 * K, 32 * K):
            found.append(case(model, tokens, COMPILED, sharding="none"))
        found.append(case(model, 8 * K, COMPILED, kernel="cudnn", sharding="none"))
        found.append(case(model, 8 * K, COMPILED, sharding="none", recompute="per_op"))
        found.append(case(model, 32 * K, COMPILED, sharding="none", recompute="full"))
        found.append(case(model, 2 * K, EAGER, sharding="none"))
        found.append(case(model, 8 * K, EAGER, sharding="none", recompute="full"))
        found.append(case(model, 2 * K, HUGGING_FACE, sharding="none"))
        found.append(case(model, 8 * K, HUGGING_FACE, sharding="none", recompute="full"))
    found.append(case(MODELS["llama3-8b"], 64 * K, COMPILED, sharding="none", recompute="full"))
    return found


def on_two() -> list[Case]:
    """Two GPUs."""
    found = list[Case]()
    for model, tokens in product(MODELS.values(), (4 * K, 16 * K)):
        found.append(case(model, tokens, COMPILED, 2, sharding="fsdp"))
        found.append(case(model, tokens, EAGER, 2, sharding="fsdp", recompute="full"))
        if model["heads"] != 28:
            found.append(case(model, tokens // 2, COMPILED, 2, sharding="none", tp=2))
        for strategy in ("allgather", "zigzag_ring"):
            found.append(case(model, tokens, COMPILED, 2, sharding="fsdp", cp=2, strategy=strategy, recompute="full"))
    for model in MODELS.values():
        found.append(case(model, 4 * K, HUGGING_FACE, 2, sharding="fsdp", recompute="full"))
        found.append(case(model, 4 * K, COMPILED, 2, sharding="none"))
        found.append(case(model, 8 * K, COMPILED, 2, sharding="fsdp", recompute="per_op", microbatches=2))
    return found


def of_others() -> list[Case]:
    """Two GPUs, other models."""
    found = list[Case]()
    for model in OTHERS.values():
        found.append(case(model, 6 * K, COMPILED, 2, sharding="fsdp"))
        found.append(case(model, 6 * K, EAGER, 2, sharding="fsdp", recompute="full"))
        found.append(case(model, 3 * K, COMPILED, 2, sharding="none", tp=2))
        found.append(case(model, 6 * K, COMPILED, 2, sharding="fsdp", cp=2, strategy="allgather", recompute="full"))
        found.append(case(model, 6 * K, HUGGING_FACE, 2, sharding="fsdp", recompute="full"))
        found.append(case(model, 20 * K, COMPILED, 2, sharding="fsdp", recompute="per_op"))
    return found


def of_host(gpus: int) -> list[Case]:
    """All GPUs of a host."""
    found = list[Case]()
    for model, tokens in product(MODELS.values(), (4 * K, 16 * K)):
        found.append(case(model, tokens, COMPILED, gpus, sharding="fsdp"))
        for strategy in ("allgather", "zigzag_ring"):
            given: Case = {"sharding": "fsdp", "strategy": strategy, "recompute": "full"}
            found.append(case(model, tokens, COMPILED, gpus, cp=gpus, **given))
            if model["heads"] != 28:
                found.append(case(model, tokens // 2, COMPILED, gpus, tp=2, cp=gpus // 2, **given))
    return found


def of_megatron(gpus: int) -> list[Case]:
    """Megatron-Core, on one GPU or two."""
    found = list[Case]()
    cuts: list[Case] = [{"sharding": "none"}]
    if gpus == 2:
        cuts = [{"sharding": "zero1"}, {"sharding": "none", "tp": 2}]
        cuts += [{"sharding": "zero1", "cp": 2, "strategy": each} for each in ("zigzag_ring", "allgather", "ulysses")]
    for (name, model), cut in product(MODELS.items(), cuts):
        fewer = {**model, "layers": model["layers"] // 2, "head_dim": model.get("head_dim", 128)}
        few, many = (K, 4 * K) if name == "llama3-70b" else (2 * K, 8 * K)
        for tokens in (many,) if "cp" in cut else (few, many):
            found.append(megatron(fewer, tokens, MEGATRON, gpus, **cut))
        if cut["sharding"] == "none":
            found.append(megatron(fewer, 4 * K, FP8, gpus, **cut))
    shared: Case = {"sharding": "zero1", "ep": 2} if gpus == 2 else {"sharding": "none"}
    for model, tokens in product(ROUTED.values(), (2 * K, 8 * K)):
        found.append(megatron(model, tokens, MEGATRON, gpus, **shared))
    found.append(megatron({**MODELS["llama3-8b"], "head_dim": 128}, 8 * K, MEGATRON, gpus, recompute="full", **cuts[0]))
    return found


def megatron(model: Case, tokens: int, code: Case, gpus: int, **parallel: Any) -> Case:
    """One step of Megatron-Core on H100; ``tokens`` on a GPU."""
    return case(model, tokens, code, gpus, "cudnn", **{"recompute": "none", **parallel})


def longer(cases: list[Case], cluster: str) -> list[Case]:
    """The same steps of half as many tokens again."""
    return [{**one, "cluster": cluster, "tokens": one["tokens"] * 3 // 2} for one in cases]


def text(cases: list[Case], seed: int) -> str:
    """JSON Lines in random order, every fourth case back to back."""
    order = np.random.default_rng(seed).permutation(len(cases))
    lines = ({**cases[i], "protocol": "streamed" if n % 4 == 3 else "synced"} for n, i in enumerate(order.tolist()))
    return "".join(json.dumps(line) + "\n" for line in lines)


def files() -> dict[Path, str]:
    """What the set's files hold."""
    return {
        FOLDER / "steps-1-h100.jsonl": text(on_one(), 51),
        FOLDER / "steps-2-h100.jsonl": text(on_two(), 52),
        FOLDER / "steps-1-h200.jsonl": text(longer(on_one(), "dgx-h200"), 53),
        FOLDER / "steps-2-h200.jsonl": text(longer(on_two(), "dgx-h200"), 54),
        FOLDER / "steps-3-h100.jsonl": text(longer(on_two(), "dgx-h100"), 55),
        FOLDER / "steps-5-h200.jsonl": text([{**one, "cluster": "dgx-h200"} for one in of_others()], 58),
        FOLDER / "four" / "steps.jsonl": text([{**one, "cluster": "dgx-h200"} for one in of_host(4)], 59),
        FOLDER / "eight" / "steps.jsonl": text([{**one, "cluster": "dgx-h200"} for one in of_host(8)], 60),
        FOLDER / "steps-megatron-1-h100.jsonl": text(of_megatron(1), 56),
        FOLDER / "steps-megatron-2-h100.jsonl": text(of_megatron(2), 57),
    }


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
