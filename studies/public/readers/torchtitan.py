"""torchtitan's benchmarks: tokens per second and reserved memory of Llama-8B and 70B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cpsim.prediction.step.frameworks import TORCHTITAN, chunked, torch_held, torch_last
from studies.public.readers.models import LLAMA_405B
from studies.public.row import CLUSTERS, GIB, Line, Peak, Reader, Row, instead, left_out

LLAMA: Final[Mapping[str, Any]] = {
    "llama3.1-405b": LLAMA_405B,
    "llama3.1-8b": "llama3-8b",
    "llama3-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3-70b": "llama3-70b",
}
TORCHTITAN_2025: Final = replace(
    TORCHTITAN,
    source="torchtitan of June 2025 (e7c0cae, 820504e): the loss is compiled, AdamW is fused",
    last=lambda s, compiled, chunks: chunked(torch_last(s, compiled, chunks)),
    held=lambda sharding: replace(torch_held(sharding), clipped=True),
    lists=False,
)
LATER: Final = instead(TORCHTITAN_2025)
RECOMPUTE: Final = {"selective": "per_op", "config default": "per_op", "per-op SAC": "per_op", "full": "full"}
"""Selective is by op in torchtitan's llama3_8b.toml (9dec370)."""
SYSTEMS: Final = {
    "H200": ("dgx-h200", "h200"),
    "H100": (str(CLUSTERS / "grand-teton.json"), "data-sheet"),
}
ASSUMED: Final = ("a step is one microbatch of local_batch sequences on every replica", "attention: PyTorch's flash")
CONTEXT: Final = "context parallelism gathers keys and values in halves, torchtitan's default"


def torchtitan(line: Line) -> Row:
    """A row. Float8 without a recipe is torchao's default, tensorwise."""
    gpu = line["gpu"].split()[0]
    row = Row(
        name=f"{line['model']} {line['gpus']} GPUs tp {line['tp']} {line['precision']} {line['extras'] or 'eager'}",
        gpu=gpu,
        gpus=int(line["gpus"]),
        framework="torchtitan",
        precision=line["precision"].split()[0].replace("float8", "fp8"),
        cp=int(line["cp"] or 1),
        code=None if "2024-12" in line["framework"] else LATER,
        time_s=float(line["step_s_derived"]),
        peak=Peak(nbytes=float(line["memory_gib"]) * GIB, reserved=True) if line["memory_gib"] else None,
        # train.py of 9dec370 logs max_reserved_gib
    )
    if line["model"] not in LLAMA:
        return replace(row, **left_out(f"model {line['model']}"))
    if int(line["pp"] or 1) > 1:
        return replace(row, **left_out("pipelines of torchtitan"))
    if gpu not in SYSTEMS:
        return replace(row, **left_out(f"torchtitan on {gpu}", "not measured"))
    assumed = (*ASSUMED, *((CONTEXT,) if row.cp > 1 else ()))
    return replace(row, fields=_fields(line, gpu, row.cp), assumed=assumed)


def _fields(line: Line, gpu: str, cp: int) -> dict[str, Any]:
    recipe = line["precision"].removeprefix("float8").strip() or "tensorwise"
    tokens, seq = int(line["seq"]) * int(line["local_batch"]), int(line["seq"])
    gpus, tp = int(line["gpus"]), int(line["tp"])
    replicas = gpus // (tp * cp)
    cluster, profile = SYSTEMS[gpu]
    attention = (
        {"strategy": "allgather", "mask": "causal", "knobs": {"layout": "zigzag"}}
        if cp > 1
        else {"strategy": "none", "mask": "causal_document", "documents": [seq] * (tokens // seq * replicas)}
    )
    return {
        "framework": "torchtitan",
        "compile": "compile" in line["extras"],
        "model": LLAMA[line["model"]],
        "cluster": cluster,
        "profile": profile,
        "gpus": gpus,
        "tokens": tokens * replicas,
        "context": seq,
        **attention,
        "kernel": "sdpa_flash",
        "protocol": "streamed",
        "parallel": {
            "tp": tp,
            "cp": cp,
            "microbatches": 1,
            "recompute": RECOMPUTE.get(line["checkpointing"], line["checkpointing"] or "per_op"),
            "sharding": "fsdp",
            **({"tp_overlap": True} if "AsyncTP" in line["extras"] else {}),
        },
        **({"precision": {"fp8": recipe}} if line["precision"] != "bf16" else {}),
    }


READER: Final = Reader(
    file="torchtitan.csv",
    columns=frozenset({"local_batch", "checkpointing", "step_s_derived", "tokens_per_s_per_gpu"}),
    read=torchtitan,
)
