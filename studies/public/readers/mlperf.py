"""MLPerf Training's Llama benchmarks: seconds of a step from logs, with the configuration that the row names.

Facts are those of the submitted code, NVIDIA's, which all rows here run (mlcommons/training_results_v4.0 to v5.1,
NVIDIA/benchmarks/*/implementations): packs of GovReport are 8,192 tokens that see each other causally, as
``packed_sequence_return_cu_seqlen`` is false; adapters of rank 16 are beside QKV and projection, with dropout of 0.1 of
their input; weights are frozen in FP8; scales are delayed (until 5.0; tensorwise of the current tensor in 5.1's
pretraining); userbuffers overlap tensor parallelism; context parallelism is Transformer Engine's ring in 4.x and in
pretraining, and all-to-all in 5.x (``CP_COMM_TYPE``); logits are in chunks of words by rank.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from studies.public.megatron import LOW_ACTIVATIONS, SUMS_IN_BF16
from studies.public.readers.models import LLAMA2_70B, LLAMA_405B
from studies.public.row import CLUSTERS, GIB, Code, Line, Peak, Reader, Row, instead, left_out, number

MODELS: Final = {"llama2-70b": LLAMA2_70B, "llama3.1-405b": LLAMA_405B, "llama3.1-8b": "llama3-8b"}
NODES: Final = {"H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "B300": str(CLUSTERS / "b300.json")}
PROFILES: Final = {"B200": "b200", "GB200": "gb200", "GB300": "gb300"}
"""Others are their cluster's, or derived."""
RACKS: Final = ("GB200", "GB300")
GPU: Final = re.compile(r"\b(GB300|GB200|B300|B200|H200|H100|A100)")
ADAPTERS: Final = {"lora": 16, "dropout": 0.1, "modules": ["qkv", "proj"]}
PRETRAINED: Final = instead(SUMS_IN_BF16)
RING: Final = ("", "see config", "Megatron-Core default p2p", "p2p")
"""Words of rows that say nothing of context parallelism beyond their degree, or that it is a ring."""


def mlperf(line: Line) -> Row:
    """A row; time is the median step of the logs, or what their throughput says."""
    model, lora = line["model"].split()[0], "LoRA" in line["model"]
    named = GPU.search(line["gpu"])
    gpu = named[0] if named else line["gpu"] or "unknown GPU"
    precision = "nvfp4" if line["precision"].startswith("NVFP4") else line["precision"].split()[0].lower()
    peak, time = line.get("max_mem_gb"), line["step_s_median"] or line["step_s_from_throughput"]
    row = Row(
        name=f"{model}{' LoRA' * lora} {line['gpus']} {gpu}, {line['submitter']} ({line['round']})",
        gpu=gpu,
        gpus=number(line["gpus"]),
        framework="mlperf",
        precision=precision,
        cp=number(line["cp"]),
        code=_code(line, gpu, lora),
        time_s=float(time) if time else None,
        peak=Peak(nbytes=float(peak) * GIB) if peak else None,
        ambiguous=(*(("max_memory_usage: whether GB or GiB, given out or reserved",) if peak else ()),),
        edition=line["round"],
    )
    if not time:
        return replace(row, **left_out("no time of a step is published"))
    if model not in MODELS:
        return replace(row, **left_out(f"model {model}"))
    if line.get("completeness", "complete") != "complete":
        return replace(row, **left_out("its configuration is not complete"))
    cluster = cluster_of(gpu, row.gpus)
    if cluster is None:
        return replace(row, **left_out(f"{row.gpus} {gpu}", "not measured"))
    return replace(row, fields=_fields(line, row, model, lora, cluster), assumed=_assumed(line, lora))


def _code(line: Line, gpu: str, lora: bool) -> Code | None:
    """What no field says: FP8_ACTIVATION of one node of H200 in 4.x, FP8_ACT without context parallelism in 5.0."""
    if not lora:
        return PRETRAINED
    low = gpu == "H200" and number(line["nodes"]) == 1 if line["round"] < "v5" else number(line["cp"]) == 1
    return LOW_ACTIVATIONS if low and line["round"] < "v5.1" else None


def cluster_of(gpu: str, gpus: int) -> str | None:
    """A preset or a file: racks of 72 where these are full, otherwise of the 64 that jobs of powers of two take."""
    if gpu not in RACKS:
        return NODES.get(gpu)
    for size in (72, 64):
        if gpus % size == 0 or gpus < size:
            return str(CLUSTERS / f"{gpu.lower()}-{size}.json")
    return None


def in_fp8(line: Line) -> bool:
    """Whether attention is in FP8: adapters' in 4.0 and 5.x, and in 4.1 without context parallelism; Llama 3.1 8B's
    beside NVFP4."""
    if "LoRA" not in line["model"]:
        return line["precision"].startswith("NVFP4") and "8b" in line["model"]  # config_common_fp8attn.sh
    return number(line["cp"]) == 1 if line["round"] == "v4.1" else True


def in_graphs(line: Line, lora: bool) -> bool:
    """Whether layers are CUDA graphs (LAYER_CUDA_GRAPH, MCORE_CUDA_GRAPH, FULL_CUDA_GRAPH of the configurations):
    adapters on several nodes from 4.1 on, and all in 5.1."""
    return line["round"] >= "v5.1" or (lora and line["round"] >= "v4.1" and number(line["nodes"]) > 1)


def strategy_of(line: Line, lora: bool) -> str:
    """What context parallelism is."""
    if number(line["cp"]) == 1:
        return "none"
    said = line["cp_comm"]
    if said in RING:
        return "ulysses" if lora and line["round"] >= "v5" and "p2p" not in said else "zigzag_ring"
    return {"a2a": "ulysses", "all_gather": "allgather", "a2a+p2p": "usp"}[said]


def _assumed(line: Line, lora: bool) -> tuple[str, ...]:
    packs = ("packs of 8,192 tokens see each other causally across documents",) if lora else ()
    attention = ("attention is in FP8",) if in_fp8(line) else ()
    return (*packs, *attention, "the network between nodes is that of a DGX system's preset")


def _fields(line: Line, row: Row, model: str, lora: bool, cluster: str) -> dict[str, Any]:
    tp, pp, chunks, batch = (number(line[name]) for name in ("tp", "pp", "vp", "mbs"))
    seq, large = number(line["seq"], 8192), model == "llama3.1-405b"
    sequences = number(line["gbs"], number(line["dp"]) * number(line["grad_accum"]) * batch)
    recipe = "delayed" if lora or line["round"] < "v5.1" else "current"
    return {
        "framework": "megatron",
        "model": MODELS[model],
        "cluster": cluster,
        **({"profile": PROFILES[row.gpu]} if row.gpu in PROFILES else {}),
        "gpus": row.gpus,
        "tokens": seq * sequences,
        "context": seq,
        "mask": "causal",
        "strategy": strategy_of(line, lora),
        "kernel": "cudnn",
        **({"implementation": "transformer-engine"} if row.cp > 1 else {}),
        "protocol": "streamed",
        "precision": {
            "fp8": "nvfp4" if row.precision == "nvfp4" else recipe,
            **({"attention": "fp8"} if in_fp8(line) else {}),
        },
        **({"trainable": ADAPTERS} if lora else {}),
        "parallel": {
            "tp": tp,
            "pp": pp,
            "cp": row.cp,
            "virtual_pp": chunks,
            "batch": batch,
            "microbatches": sequences // (row.gpus // (tp * pp * row.cp)) // batch,
            "recompute": "none",
            **({"tp_overlap": True} if tp > 1 and row.precision != "nvfp4" else {}),
            **({"cuda_graphs": "layers"} if in_graphs(line, lora) else {}),
            **({"embedding_as_layer": True, "loss_as_layer": True} if large and pp > 1 else {}),
        },
    }


READER: Final = Reader(
    file="mlperf_llama.csv",
    columns=frozenset({"round", "submitter", "grad_accum", "step_s_median", "step_s_from_throughput"}),
    read=mlperf,
)
