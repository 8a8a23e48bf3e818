"""Megatron-Bridge's performance summaries: tokens per second of dense models and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from studies.public.megatron import BRIDGE, BRIDGE_DENSE, GPT_OSS, GPT_OSS_AGAIN, SHARDED, fused_experts
from studies.public.readers.models import GPT_OSS_120B, LLAMA_405B, QWEN3_235B
from studies.public.row import CLUSTERS, Code, Line, Reader, Row, instead, left_out, number

ADAPTERS: Final = {"lora": 16, "modules": ["qkv"]}
"""llama3_llm_finetune.py of the performance scripts."""
PRECISIONS: Final = {"bf16": "bf16", "fp8": {"fp8": "current"}, "mxfp8": {"fp8": "mxfp8"}, "nvfp4": "nvfp4"}
OTHERS: Final = {
    "deepseekv3": "latent attention",
    "deepseekv4": "latent attention",
    "kimi": "latent attention",
    "nemotron": "state-space layers",
    "qwen3": "tokens that are dropped",
}
"""What no scenario says, by the beginning of a model's name."""
DENSE: Final = {"LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": LLAMA_405B}
ROUTED: Final[Mapping[str, Any]] = {
    "GPT OSS 120B": GPT_OSS_120B,
    "Qwen3_235B_a22B": QWEN3_235B,
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
}
PROFILES: Final = {"B200": "b200", "GB200": "gb200", "GB300": "gb300"}
"""Others are their cluster's, or derived."""
SYSTEMS: Final = {
    "DGX-H100": "dgx-h100",
    "DGX-B200": "dgx-b200",
    "DGX-B300": str(CLUSTERS / "b300.json"),
    "DGX-GB200": str(CLUSTERS / "gb200-64.json"),
    "DGX-GB300": str(CLUSTERS / "gb300-64.json"),
}
HIDDEN: Final = "activations on their way to the host's memory and back hide behind layers"
CURRENT: Final = "FP8 without a recipe is current scaling (utils/precision.py of its performance scripts, 97ad8cc6f)"


def megatron_bridge(line: Line) -> Row:
    """A row.

    FP8 without a recipe is current scaling (utils/precision.py of its performance scripts, 97ad8cc6f). The table says
    that steps on 8 H100 shard weights; the configuration of that release does not, and computes 5 of 32 layers again
    (llama3_workload_base_configs.py), which no scenario says. Both move the same bytes once a step. A line of 26.02.01
    has four stages and no interleaving; the configurations of that time interleave them.
    """
    precision = line["precision"].split("-")[0].split()[0]
    row = Row(
        name=f"{line['model']} {line['gpus']} {line['system']} {line['precision']} ({line['release']})",
        gpu=line["system"].removeprefix("DGX-"),
        gpus=int(line["gpus"]),
        framework="megatron-bridge",
        precision="mxfp8" if line["precision"] in ("MXFP8", "FP8-MX") else precision.lower(),
        cp=number(line["cp"]),
        routed=not line["model"].startswith("LLAMA"),
        time_s=float(line["step_s_derived"]),
        code=_code(line),
    )
    if line["system"] not in SYSTEMS:
        return replace(row, **left_out(f"Megatron-Bridge on {row.gpu}", "not measured"))
    found = _fields(line, row)
    if isinstance(found, str):
        return replace(row, **left_out(found))
    assumed = (CURRENT,) * (row.precision == "fp8") + (HIDDEN,) * _shards(line)
    return replace(row, fields=found, assumed=assumed)


def _fields(line: Line, row: Row) -> dict[str, Any] | str:
    """Fields of a scenario, or why there is none."""
    if line["model"] in ROUTED:
        return _routed(line, row, ROUTED[line["model"]])
    if line["model"] not in DENSE:
        return OTHERS.get(line["model"].split("_")[0].split()[0].lower(), "another model")
    if number(line["pp"]) > 1:
        return "a pipeline without its interleaving" if line["vp"] == "n/a" else _dense(line, row)
    return _dense(line, row)


def _shards(line: Line) -> bool:
    """Whether it runs Megatron's FSDP; what the table says of it on H100 is not what the configuration does."""
    return bool(number(line["fsdp"], 0)) and line["system"] != "DGX-H100"


def _base(line: Line, row: Row) -> dict[str, Any]:
    seq, sequences = int(line["seq"]), int(line["gbs"])
    return {
        "framework": "megatron",
        "cluster": SYSTEMS[line["system"]],
        **({"profile": PROFILES[row.gpu]} if row.gpu in PROFILES else {}),
        "gpus": row.gpus,
        "tokens": sequences * seq,
        "context": seq,
        "strategy": "zigzag_ring" if row.cp > 1 else "none",
        "kernel": "cudnn",
        **({"implementation": "transformer-engine"} if row.cp > 1 else {}),
        "protocol": "streamed",
    }


def _routed(line: Line, row: Row, model: Any) -> dict[str, Any]:
    """A mixture of experts.

    Sequences of the one row of 25.11 on H100 that says 4 of them in a microbatch are one by one: its configuration
    says 1 (v0.2.0, scripts/performance/configs/gpt_oss/workload_base_configs.py). Where products of layers were not
    measured, they are another GPU's (``predict.steps_of``). Layers of Qwen3 are divided with both ends
    (recipes/qwen/qwen3_moe.py: account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split).
    """
    pp, chunks = number(line["pp"]), number(line["vp"])
    ends = line["model"] == "Qwen3_235B_a22B" and pp > 1
    batch = 1 if row.gpu == "H100" else int(line["mbs"])
    return {
        **_base(line, row),
        "model": model,
        "precision": PRECISIONS[row.precision],
        "parallel": {
            "tp": number(line["tp"]),
            "pp": pp,
            "cp": row.cp,
            "ep": int(line["ep"]),
            "virtual_pp": chunks,
            "batch": batch,
            "microbatches": int(line["gbs"]) // (row.gpus // (number(line["tp"]) * pp * row.cp)) // batch,
            **({"embedding_as_layer": True, "loss_as_layer": True} if ends else {}),
        },
    }


def _dense(line: Line, row: Row) -> dict[str, Any]:
    """A dense model. The 126 layers of Llama 3.1 405B are divided with both ends; tensor parallelism runs beside
    products in pipelines (comm_overlap of the performance scripts, where tp is more than 1)."""
    tp, pp, chunks = (number(line[name]) for name in ("tp", "pp", "vp"))
    each, sequences, seq = int(line["mbs"]), int(line["gbs"]), int(line["seq"])
    large, piped = line["model"] == "LLAMA3.1_405B", pp > 1
    own = (
        {"mask": "causal"}
        if piped or row.cp > 1 or _shards(line)
        else {"mask": "causal_document", "documents": [seq] * sequences}
    )
    return {
        **_base(line, row),
        **own,
        "model": DENSE[line["model"]],
        **({"trainable": ADAPTERS} if line["task"] == "LoRA" else {}),
        **({} if "documents" not in own else {"context": seq * each}),
        "precision": PRECISIONS[row.precision],
        "parallel": {
            "tp": tp,
            "pp": pp,
            "cp": row.cp,
            "virtual_pp": chunks,
            **({} if "documents" in own else {"batch": each}),
            "microbatches": sequences // (row.gpus // (tp * pp * row.cp)) // each,
            "recompute": "none",
            **({"sharding": "fsdp"} if _shards(line) else {}),
            **({"tp_overlap": True} if tp > 1 and piped and row.precision != "nvfp4" else {}),
            **({"embedding_as_layer": True, "loss_as_layer": True} if large else {}),
        },
    }


ONCE, SUMMED, SHARDS = instead(BRIDGE), instead(BRIDGE_DENSE), instead(SHARDED)
FUSED_EXPERTS: Final = instead(replace(BRIDGE, joins=fused_experts))
CODE: Final = {
    ("GPT OSS 120B", True, False): instead(GPT_OSS_AGAIN),
    ("GPT OSS 120B", False, False): instead(GPT_OSS),
    ("GPT OSS 120B", False, True): instead(replace(GPT_OSS, joins=fused_experts)),
    **{
        (model, again, fused): (FUSED_EXPERTS if fused else ONCE)
        for model in ("Qwen3_235B_a22B", "Qwen3_30B_a3B")
        for again in (True, False)
        for fused in (True, False)
    },
}
"""By model, whether something is computed again, as on all GPUs but B300 and GB300, and whether experts are one kernel:
in MXFP8 from release 26.06 on (NVTE_CUTEDSL_FUSED_GROUPED_MLP, use_transformer_engine_op_fuser)."""


def _code(line: Line) -> Code | None:
    """Whose code runs a line, where its scenario does not say."""
    if line["model"] in DENSE:
        return None if line["task"] == "LoRA" else SHARDS if _shards(line) else SUMMED
    fused = line["release"] >= "26.06" and line["precision"] == "MXFP8"
    return CODE.get((line["model"], "300" not in line["system"] and not fused, fused))


READER: Final = Reader(
    file="megatron_bridge_summary.csv",
    columns=frozenset({"release", "system", "ep", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "step_s_derived"}),
    read=megatron_bridge,
)
