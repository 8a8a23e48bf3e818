"""Megatron-Bridge's performance summaries: tokens per second of dense models and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from studies.public.megatron import AGAIN, BRIDGE_DENSE, FROM_LATENTS, SHARDED, Recipe, by_recipe
from studies.public.readers.models import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_405B, QWEN3_235B
from studies.public.row import CLUSTERS, Code, Line, Reader, Row, instead, left_out, number

ADAPTERS: Final = {"lora": 16, "modules": ["qkv"]}
"""llama3_llm_finetune.py of the performance scripts."""
PRECISIONS: Final = {"bf16": "bf16", "fp8": {"fp8": "current"}, "mxfp8": {"fp8": "mxfp8"}, "nvfp4": "nvfp4"}
OTHERS: Final = {
    "deepseekv3": "layers that do not divide among stages",
    "deepseekv4": "attention to chosen keys",
    "nemotron": "experts on latents",
    "qwen3": "tokens that are dropped",
}
"""What no scenario says, by the beginning of a model's name."""
DENSE: Final = {"LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": LLAMA_405B}
ROUTED: Final[Mapping[str, Any]] = {
    "GPT OSS 120B": GPT_OSS_120B,
    "Qwen3_235B_a22B": QWEN3_235B,
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "DeepSeekV3": DEEPSEEK_V3,
    "DeepSeekV3 (w/ MTP)": DEEPSEEK_V3,
    "Kimi_K2": "kimi-k2",
    "Nemotron_3_Nano": "nemotron-3-nano-30b-a3b",
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
SECOND: Final = "what predicts a second token takes as long as a layer"
OVERLAPPED: Final = "what runs beside another microbatch takes hosts no longer than alone"
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
    if row.routed:
        recipe = _recipe(line)
        assumed += (OVERLAPPED,) * (_overlaps(line) and not recipe.fused)
        assumed += (SECOND,) * (line["model"] in DEEPSEEK)
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
    attends = _recipe(line).fused and line["model"] not in DEEPSEEK
    return {
        **_base(line, row),
        "model": model,
        "precision": {"fp8": "mxfp8", "attention": "fp8"} if attends else PRECISIONS[row.precision],
        "parallel": {
            "tp": number(line["tp"]),
            "pp": pp,
            "cp": row.cp,
            "ep": int(line["ep"]),
            "virtual_pp": chunks,
            "batch": _routed_batch(line),
            "microbatches": _routed_microbatches(line),
            **({"embedding_as_layer": True, "loss_as_layer": True} if ends else {}),
            **({"layout": _layout(line)} if line["model"] in LATENT else {}),
            **({"ep_overlap": True} if _overlaps(line) else {}),
            **({"dispatcher": "flex"} if _once(line) else {}),
            "cuda_graphs": _graphs(line),
        },
    }


def _layout(line: Line) -> list[int]:
    """Layers of every virtual stage of DeepSeek-V3 and Kimi K2: as many on all but the last one, which has what is left
    of 61, and the layer that predicts a second token (recipes/deepseek/deepseek_v3.py, recipes/kimi/kimi_k2.py)."""
    stages = number(line["pp"]) * number(line["vp"])
    each = -(-61 // stages)
    return [each] * (stages - 1) + [61 - each * (stages - 1) + (line["model"] in DEEPSEEK)]


def _routed_batch(line: Line) -> int:
    return 1 if line["system"] == "DGX-H100" else int(line["mbs"])


def _routed_microbatches(line: Line) -> int:
    ranks = number(line["tp"]) * number(line["pp"]) * number(line["cp"])
    return int(line["gbs"]) // (int(line["gpus"]) // ranks) // _routed_batch(line)


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


SUMMED, SHARDS = instead(BRIDGE_DENSE), instead(SHARDED)
DEEPSEEK: Final = ("DeepSeekV3", "DeepSeekV3 (w/ MTP)")
LATENT: Final = (*DEEPSEEK, "Kimi_K2")
FUSED: Final = {
    ("DeepSeekV3", "DGX-GB200"): "26.06",
    ("GPT OSS 120B", "DGX-GB200"): "26.06",
    ("GPT OSS 120B", "DGX-GB300"): "26.06",
    ("Qwen3_30B_a3B", "DGX-B200"): "26.06.01",
    ("Qwen3_30B_a3B", "DGX-B300"): "26.06",
    ("Qwen3_30B_a3B", "DGX-GB200"): "26.06",
    ("Qwen3_30B_a3B", "DGX-GB300"): "26.06",
    ("Qwen3_235B_a22B", "DGX-B200"): "26.06.01",
    ("Qwen3_235B_a22B", "DGX-B300"): "26.06.01",
    ("Qwen3_235B_a22B", "DGX-GB200"): "26.06",
    ("Qwen3_235B_a22B", "DGX-GB300"): "26.06",
}
"""Releases from which on steps in MXFP8 are one CUDA graph, with attention in FP8 but for DeepSeek's, experts in one
kernel and exchanges that overlap (fp8_dot_product_attention, cutedsl_fused_grouped_mlp, moe_a2a_overlap)."""
ONCE: Final = {
    ("DeepSeekV3", "DGX-GB200"): ("25", "99"),
    ("Kimi_K2", "DGX-GB300"): ("25", "99"),
    ("Nemotron_3_Nano", "DGX-B200"): ("25", "99"),
    ("Nemotron_3_Nano", "DGX-GB200"): ("25", "99"),
    ("Nemotron_3_Nano", "DGX-GB300"): ("25", "99"),
    ("GPT OSS 120B", "DGX-B300"): ("26.04", "99"),
    ("GPT OSS 120B", "DGX-GB200"): ("26.04", "26.04.01"),
    ("Qwen3_30B_a3B", "DGX-B200"): ("25", "99"),
    ("Qwen3_30B_a3B", "DGX-B300"): ("25", "99"),
    ("Qwen3_30B_a3B", "DGX-GB200"): ("25", "99"),
    ("Qwen3_30B_a3B", "DGX-GB300"): ("25", "99"),
    ("Qwen3_30B_a3B", "DGX-H100"): ("26.02", "99"),
    ("Qwen3_235B_a22B", "DGX-B200"): ("26.02.01", "26.02.01"),
    ("Qwen3_235B_a22B", "DGX-B300"): ("26.06", "99"),
    ("Qwen3_235B_a22B", "DGX-GB200"): ("25", "99"),
    ("Qwen3_235B_a22B", "DGX-GB300"): ("25", "99"),
}
"""First and last release whose other steps have HybridEP or DeepEP (moe_flex_dispatcher_backend), not all-to-alls."""


def _recipe(line: Line) -> Recipe:
    """What its configuration says of experts."""
    fused = _fused(line)
    return Recipe(
        fused=fused,
        native_loss=line["model"] == "Nemotron_3_Nano",
        again=_again(line, fused),
    )


def _once(line: Line) -> bool:
    """Whether tokens are sent once to each rank."""
    first, last = ONCE.get((line["model"], line["system"]), ("99", ""))
    return _fused(line) or first <= line["release"] <= last


def _graphs(line: Line) -> str:
    """What is launched as CUDA graphs: `cuda_graph_impl` and `cuda_graph_scope` of the configurations of its release
    (scripts/performance/configs, v0.2.0 to v0.6.0). Where graphs hold routers alone, hosts launch what takes them long.
    """
    model, system, release = line["model"], line["system"], line["release"]
    eager = (
        system in ("DGX-H100", "DGX-B200"),
        model in ("Kimi_K2", "Qwen3_30B_a3B"),
        (model, system) == ("Qwen3_235B_a22B", "DGX-B300"),
        (model, system, line["precision"]) == ("GPT OSS 120B", "DGX-GB200", "BF16"),
        (model, system, release) == ("Qwen3_235B_a22B", "DGX-GB300", "25.11"),
    )
    return "layers" if _fused(line) else "none" if any(eager) else "attention"


def _fused(line: Line) -> bool:
    """Whether experts are one kernel."""
    return line["precision"] == "MXFP8" and line["release"] >= FUSED.get((line["model"], line["system"]), "99")


def _overlaps(line: Line) -> bool:
    """Whether exchanges run beside other microbatches (moe_a2a_overlap): where all-to-alls or DeepEP send tokens of
    Qwen3 and stages are interleaved, and on GB200 for GPT-OSS from 26.04 on, too."""
    model, system = line["model"], line["system"]
    piped = model.startswith("Qwen3") and system in ("DGX-H100", "DGX-B200", "DGX-B300") and number(line["vp"]) > 1
    oss = model == "GPT OSS 120B" and system == "DGX-GB200" and line["release"] >= "26.04"
    return _fused(line) or piped or oss


def _again(line: Line, fused: bool) -> frozenset[str]:
    """What is computed again (recompute_modules); on GB200 DeepSeek's dense MLPs alone from 26.04 to 26.04.01."""
    if line["model"] in LATENT:
        return frozenset() if line["model"] in DEEPSEEK and line["release"].startswith("26.04") else FROM_LATENTS
    often = line["model"] == "GPT OSS 120B" and "300" not in line["system"] and not fused
    return AGAIN if often else frozenset()


def _code(line: Line) -> Code | None:
    """Whose code runs a line, where its scenario does not say."""
    if line["model"] in DENSE:
        return None if line["task"] == "LoRA" else SHARDS if _shards(line) else SUMMED
    return by_recipe(_recipe(line)) if line["model"] in ROUTED else None


READER: Final = Reader(
    file="megatron_bridge_summary.csv",
    columns=frozenset({"release", "system", "ep", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "step_s_derived"}),
    read=megatron_bridge,
)
