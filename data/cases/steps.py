"""Writes steps-1-h100.jsonl and steps-2-h100.jsonl: whole training steps of few layers on one and on two H100.

    python data/cases/steps.py

PyTorch compiled and eager, and Hugging Face; layers of four models, 2k to 65k tokens, drawn at random among those that
should fit into 80 GB and take at most 2 s by rough estimates that are no prediction. Their order is a draw, too: a run
that is cut off has all kinds. To run them:

    torchrun --nproc-per-node 1 --max-restarts 10 -m cpsim.real.run data/cases/steps-1-h100.jsonl --out runs.jsonl
    torchrun --nproc-per-node 2 --max-restarts 10 -m cpsim.real.run data/cases/steps-2-h100.jsonl --out runs.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS, Model
from cpsim.case.resolve import flops_of, model_of, workload_of

K = 1024
SEED = 44
DIMS = {
    "llama3-8b": MODELS["llama3-8b"],
    "llama3-70b": MODELS["llama3-70b"],
    "qwen2.5-7b": Model(layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, ffn=18944, vocab=152064),
    "llama3.2-1b": Model(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256),
}
COMPILED = {"framework": "torch", "compile": True}
EAGER = {"framework": "torch", "compile": False}
HUGGING_FACE = {"framework": "huggingface", "compile": False}
NONE, FSDP = {"sharding": "none"}, {"sharding": "fsdp"}
GATHER, ZIGZAG = {"strategy": "allgather"}, {"strategy": "zigzag_ring"}

Case = dict[str, Any]
Kind = tuple[Case, Case, Case, int]
"""Framework, strategy, parallel and how many cases of it."""
ONE: tuple[Kind, ...] = tuple(
    (framework, {"strategy": "none"}, parallel, count)
    for framework, counts in ((COMPILED, (12, 4)), (EAGER, (8, 4)), (HUGGING_FACE, (8, 4)))
    for parallel, count in zip((NONE, FSDP), counts, strict=True)
)
TWO: tuple[Kind, ...] = (
    (COMPILED, {"strategy": "none"}, FSDP, 10),
    (EAGER, {"strategy": "none"}, FSDP, 6),
    (HUGGING_FACE, {"strategy": "none"}, FSDP, 9),
    (COMPILED, {"strategy": "none"}, NONE, 4),
    (HUGGING_FACE, {"strategy": "none"}, NONE, 3),
    (COMPILED, {"strategy": "none"}, NONE | {"tp": 2}, 8),
    (COMPILED, {"strategy": "none"}, FSDP | {"tp": 2}, 2),
    (EAGER, {"strategy": "none"}, NONE | {"tp": 2}, 4),
    *((COMPILED, way, sharding | {"cp": 2}, 3) for way in (GATHER, ZIGZAG) for sharding in (NONE, FSDP)),
    *((EAGER, way, FSDP | {"cp": 2}, 1) for way in (GATHER, ZIGZAG)),
)
MOST_BYTES, MOST_S = 66e9, 2.0


def draw(rng: np.random.Generator, gpus: int, kind: Kind) -> Case:
    """A case of a kind, which may be too large."""
    framework, strategy, parallel, _ = kind
    name = str(rng.choice(list(DIMS), p=[0.35, 0.2, 0.25, 0.2]))
    dims = DIMS[name]
    sizes = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    layers = int(rng.choice([2, 2, 3, 4, 6, 8]))
    is_torch, tp, cp = framework["framework"] == "torch", parallel.get("tp", 1), parallel.get("cp", 1)
    recomputes = ["none", "full", "per_op"] if is_torch else ["none", "full"]
    cut = parallel | {"recompute": str(rng.choice(recomputes)), "microbatches": int(rng.choice([1, 1, 1, 1, 2]))}
    if is_torch and tp == 1 and rng.random() < 0.4:
        cut["loss_chunks"] = 8
    context = int(rng.choice([2, 4, 8, 16, 32, 64])) * K
    batch = 1 if cp > 1 else int(rng.choice([1, 1, 1, 2, 4]))
    tokens = context * batch * cut["microbatches"] * (gpus // (tp * cp))
    return {
        "model": {"layers": layers} | {size: getattr(dims, size) for size in sizes},
        **framework,
        **strategy,
        "kernel": str(rng.choice(["sdpa_flash", "sdpa_flash", "cudnn"])),
        "gpus": gpus,
        "cluster": "dgx-h100",
        "tokens": tokens,
        "context": context,
        "parallel": cut,
        "protocol": str(rng.choice(["synced", "synced", "synced", "streamed"])),
    }


def estimate(case: Case) -> tuple[float, float]:
    """Roughly how many bytes a GPU needs, and seconds."""
    scenario = scenario_from(case)
    m, cut, gpus = model_of(scenario), case["parallel"], case["gpus"]
    tp, compiled, is_fsdp = cut.get("tp", 1), case["compile"], cut["sharding"] == "fsdp"
    tokens = case["tokens"] / (gpus * cut["microbatches"])  # of a microbatch, on a GPU
    parameters, ends = m.parameters() / tp, 2 * m.vocab * m.hidden / tp
    weights = 16 * parameters * tp / gpus + 8 * ends + 4 * m.layer_parameters(tp) if is_fsdp else 8 * parameters
    layer = 2 * (8 * m.hidden + 3 * (m.heads + 2 * m.kv_heads) * m.head_dim + 4 * m.ffn)
    layer *= 0.8 if compiled else 1.6 if case["framework"] == "huggingface" else 1.3
    kept = {"none": layer, "per_op": 0.6 * layer, "full": 2.0 * m.hidden}[cut["recompute"]]
    again = 0.0 if cut["recompute"] == "none" else layer
    logits = (12 if compiled else 16) * m.vocab / cut.get("loss_chunks", 1)
    nbytes = weights + tokens * (m.layers * kept + max(again, logits)) + 2e9
    again_flops = {"none": 1.0, "per_op": 1.15, "full": 1.33}[cut["recompute"]]
    flops = flops_of(scenario, workload_of(scenario)) * again_flops / gpus
    return nbytes, flops / (4.5e14 if compiled else 3.5e14) + 3 * weights / 2.5e12


def drawn(gpus: int) -> list[Case]:
    """The cases for so many GPUs, in a random order."""
    rng, found = np.random.default_rng([SEED, gpus]), list[Case]()
    for kind in ONE if gpus == 1 else TWO:
        left = kind[3]
        while left:
            case = draw(rng, gpus, kind)
            nbytes, seconds = estimate(case)
            tokens = case["tokens"] // gpus
            if nbytes < MOST_BYTES and seconds < MOST_S and tokens <= 64 * K and case not in found:
                found.append(case)
                left -= 1
    return [found[i] for i in rng.permutation(len(found))]


def text(gpus: int) -> str:
    """The file for so many GPUs."""
    return "".join(json.dumps(case) + "\n" for case in drawn(gpus))


if __name__ == "__main__":
    for gpus in (1, 2):
        Path(__file__).with_name(f"steps-{gpus}-h100.jsonl").write_text(text(gpus), encoding="utf-8")
