"""Published rows as scenarios: one function for each source, from a line of its table to a ``Row``.

A row that a scenario cannot say is left out with the reason; what is published of it stays in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cpsim.case.load import scenario_from
from cpsim.case.scenario import ModelSection, Scenario
from cpsim.prediction.step.frameworks import TORCHTITAN, Framework, chunked, torch_held, torch_last
from studies import published_lines
from studies.public_steps.bridge import BRIDGE, TESTED, gpt_oss

FOLDER: Final = Path(__file__).parent
GIB: Final = 2.0**30
Line = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published step."""

    source: str
    """The table."""
    number: int
    """Line of the table, from 1."""
    name: str
    """What ran, in words."""
    left_out: str = ""
    """Why no scenario says it; empty where one does."""
    scenario: Scenario | None = None
    framework: Framework | None = None
    """Whose code runs it, where no scenario can say it."""
    time_s: float | None = None
    """Published seconds of a step."""
    memory_bytes: float | None = None
    """Published peak."""
    reserved: bool = False
    """Whether the peak is what the allocator reserved; otherwise what it gave out."""
    stage: int | None = None
    """Pipeline stage of the rank whose peak was logged; None: the fullest."""
    cublas: int | None = None
    """Bytes of a workspace of cuBLAS where an environment variable says them; None: PyTorch's own choice."""
    tied: bool = False
    """Whether both embeddings are one tensor, on one stage, which no scenario says."""

    @property
    def group(self) -> str:
        """Source, and whether there are experts."""
        routed = self.scenario is not None and isinstance(self.scenario.model, ModelSection)
        return f"{self.source}, experts" if routed and self.scenario.model.experts else self.source

    @property
    def key(self) -> str:
        """Source and line."""
        return f"{self.source} {self.number}"


LLAMA: Final = {"llama3.1-8b": "llama3-8b", "llama3-8b": "llama3-8b", "llama3.1-70b": "llama3-70b"}
LLAMA_70B: Final = {"llama3-70b": "llama3-70b"}
TORCHTITAN_2025: Final = replace(
    TORCHTITAN,
    source="torchtitan of June 2025 (e7c0cae, 820504e): the loss is compiled, AdamW is fused",
    last=lambda s, compiled, chunks: chunked(torch_last(s, compiled, chunks)),
    held=lambda sharding: replace(torch_held(sharding), clipped=True),
    lists=False,
)
RECOMPUTE: Final = {"selective": "per_op", "config default": "per_op", "per-op SAC": "per_op", "full": "full"}
"""Selective is by op in torchtitan's llama3_8b.toml (9dec370)."""


def torchtitan(line: Line) -> dict[str, Any] | str:
    """Fields of a scenario, or why there is none.

    A step is one microbatch of ``local_batch`` sequences on every replica. Attention is PyTorch's flash kernel, the
    first of those that SDPA may take. Float8 without a recipe is torchao's default, tensorwise.
    """
    recipe = line["precision"].removeprefix("float8").strip() or "tensorwise"
    h200 = line["gpu"] == "H200"
    tokens = int(line["seq"]) * int(line["local_batch"])
    gpus, tp = int(line["gpus"]), int(line["tp"])
    return {
        "framework": "torchtitan",
        "compile": "compile" in line["extras"],
        "model": {**LLAMA, **LLAMA_70B}[line["model"]],
        "cluster": "dgx-h200" if h200 else str(FOLDER / "grand-teton.json"),
        "profile": "h200" if h200 else "data-sheet",
        "gpus": gpus,
        "tokens": tokens * gpus // tp,
        "context": int(line["seq"]),
        "documents": [int(line["seq"])] * (tokens // int(line["seq"]) * gpus // tp),
        "mask": "causal_document",
        "strategy": "none",
        "kernel": "sdpa_flash",
        "protocol": "streamed",
        "parallel": {
            "tp": tp,
            "cp": int(line["cp"]),
            "microbatches": 1,
            "recompute": RECOMPUTE[line["checkpointing"]],
            "sharding": "fsdp",
            **({"tp_overlap": True} if "AsyncTP" in line["extras"] else {}),
        },
        **({"precision": {"fp8": recipe}} if line["precision"] != "bf16" else {}),
    }


QWEN_7B: Final = {
    "layers": 28,
    "hidden": 3584,
    "heads": 28,
    "kv_heads": 4,
    "ffn": 18944,
    "vocab": 152064,
}
"""Qwen/Qwen2.5-7B, config.json."""
QWEN_32B: Final = {
    "layers": 64,
    "hidden": 5120,
    "heads": 40,
    "kv_heads": 8,
    "ffn": 27648,
    "vocab": 152064,
}
"""Qwen/Qwen2.5-32B, config.json."""
TUNED: Final = {
    "Llama3 8B": ("llama3-8b", 0.1),
    "Qwen2.5 7B": (QWEN_7B, 0.0),
    "Llama3 70B": ("llama3-70b", 0.0),
    "Qwen2.5 32B": (QWEN_32B, 0.0),
}
"""Models, and the dropout of their adapters (examples/llm_finetune of 507bfb751)."""


def nemo_automodel(line: Line) -> dict[str, Any] | str:
    """Fields of a scenario, or why there is none.

    Steps on several GPUs compile layers and compute them again (examples/llm_benchmark/llama3_3 and qwen, custom_*).
    Their tensor parallelism is asynchronous, which is not said here.
    """
    if not line["task"].startswith("Fine-Tuning"):
        return "mixture of experts"
    model, dropout = TUNED[line["model"].removesuffix(" 2-node")]
    sequences, seq, gpus, tp = (int(line[name]) for name in ("gbs", "seq", "gpus", "tp"))
    many = gpus > 1
    return {
        "framework": "huggingface",
        "model": model,
        "cluster": "dgx-h100",
        "gpus": gpus,
        "tokens": sequences * seq,
        "context": seq,
        "documents": [seq] * sequences,
        "mask": "causal_document",
        "strategy": "none",
        "kernel": "fa2",
        **({"compile": True} if many else {}),
        "trainable": {"lora": 16, "dropout": dropout},
        "parallel": {
            "tp": tp,
            "microbatches": sequences * tp // gpus // int(line["mbs"]),
            "sharding": "fsdp" if many else "none",
            "recompute": "full" if many else "none",
        },
    }


LLAMA_405B: Final = {
    "layers": 126,
    "hidden": 16384,
    "heads": 128,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 53248,
    "vocab": 128256,
}
DENSE: Final = {"LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": LLAMA_405B}
GPT_OSS_120B: Final = {
    "layers": 36,
    "hidden": 2880,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn": 2880,
    "vocab": 201088,
    "experts": 128,
    "top_k": 4,
    "window": 128,
    "window_pattern": 2,
}
"""openai/gpt-oss-120b, config.json; its biases are those of ``bridge.gpt_oss``."""
QWEN3_235B: Final = {
    "layers": 94,
    "hidden": 4096,
    "heads": 64,
    "kv_heads": 4,
    "head_dim": 128,
    "ffn": 12288,
    "vocab": 151936,
    "experts": 128,
    "top_k": 8,
    "expert_ffn": 1536,
}
"""Qwen/Qwen3-235B-A22B, config.json; without the norms of queries and keys."""
ROUTED: Final = {"GPT OSS 120B": GPT_OSS_120B, "Qwen3_235B_a22B": QWEN3_235B}
SYSTEMS: Final = {
    "DGX-H100": "dgx-h100",
    "DGX-B200": "dgx-b200",
    "DGX-B300": str(FOLDER / "b300.json"),
    "DGX-GB200": str(FOLDER / "gb200-64.json"),
    "DGX-GB300": str(FOLDER / "gb300-64.json"),
}


def _routed(line: Line, model: Mapping[str, Any]) -> dict[str, Any]:
    """A mixture of experts.

    Sequences of the one row of 25.11 on H100 that says 4 of them in a microbatch are one by one: its configuration
    says 1 (v0.2.0, scripts/performance/configs/gpt_oss/workload_base_configs.py). Layers of Qwen3 are divided with both
    ends (recipes/qwen/qwen3_moe.py: account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split).
    """
    seq, gpus, sequences, pp = int(line["seq"]), int(line["gpus"]), int(line["gbs"]), int(line["pp"])
    batch = 1 if line["system"] == "DGX-H100" else int(line["mbs"])
    chunks = 1 if line["vp"] == "n/a" else int(line["vp"])
    return {
        "framework": "megatron",
        "model": model,
        "cluster": SYSTEMS[line["system"]],
        "gpus": gpus,
        "tokens": sequences * seq,
        "context": seq,
        "strategy": "none",
        "kernel": "cudnn",
        "protocol": "streamed",
        "parallel": {
            "pp": pp,
            "ep": int(line["ep"]),
            "virtual_pp": chunks,
            "batch": batch,
            "microbatches": sequences // (gpus // pp) // batch,
            **({"embedding_as_layer": True, "loss_as_layer": True} if pp * chunks > 4 else {}),
        },
    }


def _interleaved(line: Line) -> dict[str, Any]:
    """A dense model in chunks of layers. The 126 layers of Llama 3.1 405B are divided with both ends; tensor
    parallelism runs beside products (comm_overlap of the performance scripts, where tp is more than 1)."""
    seq, gpus, sequences, batch = (int(line[name]) for name in ("seq", "gpus", "gbs", "mbs"))
    tp, pp, chunks = (int(line[name]) for name in ("tp", "pp", "vp"))
    large = line["model"] == "LLAMA3.1_405B"
    return {
        "framework": "megatron",
        "model": DENSE[line["model"]],
        "cluster": SYSTEMS[line["system"]],
        "gpus": gpus,
        "tokens": sequences * seq,
        "context": seq,
        "strategy": "none",
        "kernel": "cudnn",
        "mask": "causal",
        "protocol": "streamed",
        "precision": {"fp8": "mxfp8" if line["precision"] == "MXFP8" else "current"},
        "parallel": {
            "tp": tp,
            "pp": pp,
            "virtual_pp": chunks,
            "batch": batch,
            "microbatches": sequences // (gpus // (tp * pp)) // batch,
            **({"tp_overlap": True} if tp > 1 else {}),
            **({"embedding_as_layer": True, "loss_as_layer": True} if large else {}),
        },
    }


def megatron_bridge(line: Line) -> dict[str, Any] | str:
    """Fields of a scenario, or why there is none.

    FP8 without a recipe is current scaling (utils/precision.py of its performance scripts, 97ad8cc6f). The table says
    that steps on 8 H100 shard weights; the configuration of that release does not, and computes 5 of 32 layers again
    (llama3_workload_base_configs.py), which no scenario says. Both move the same bytes once a step. A line of 26.02.01
    has four stages and no interleaving; the configurations of that time interleave them.
    """
    if line["model"] in ROUTED and line["precision"] == "BF16":
        return _routed(line, ROUTED[line["model"]])
    if line["model"] not in DENSE:
        return "latent attention" if line["precision"] == "BF16" else "mixture of experts in fp8 or fp4"
    if line["precision"] == "NVFP4":
        return "fp4"
    if line["task"] == "LoRA":
        return "adapters in fp8"
    if line["vp"] not in ("", "1", "n/a") or line["pp"] not in ("", "1"):
        return "a pipeline without its interleaving" if line["vp"] == "n/a" else _interleaved(line)
    if line["fsdp"] not in ("", "0") and line["system"] != "DGX-H100":
        return "Megatron's FSDP with activations in the host's memory"
    seq, gpus, sequences = int(line["seq"]), int(line["gpus"]), int(line["gbs"])
    tp, each = int(line["tp"]), int(line["mbs"])
    return {
        "framework": "megatron",
        "model": DENSE[line["model"]],
        "cluster": "dgx-h100",
        "gpus": gpus,
        "tokens": seq * sequences,
        "context": seq * each,
        "documents": [seq] * sequences,
        "mask": "causal_document",
        "strategy": "none",
        "kernel": "cudnn",
        "protocol": "streamed",
        "precision": {"fp8": "mxfp8" if line["precision"] == "MXFP8" else "current"},
        "parallel": {
            "tp": tp,
            "microbatches": sequences * tp // gpus // each,
            "recompute": "none",
        },
    }


CLUSTERS: Final = {"A100": "p4de", "H100": "dgx-h100", "GB200": "dgx-b200"}
"""Whose memory does not matter here: the tests fill a hundredth of it."""


CUBLAS: Final = 8 * 4096 * 1024
"""CUBLAS_WORKSPACE_CONFIG=:4096:8 of the tests of experts (model_config.yaml)."""


def megatron_golden(line: Line) -> dict[str, Any] | str:
    """Fields of a scenario, or why there is none.

    The tests' GPT has an MLP of two linear layers with GELU between, of 4 hidden units each; a gated one of 8/3 hidden
    units has as many weights and keeps as many bytes. Embeddings are tied, see ``Row.tied``. Words are padded to a
    multiple of 128 per tensor-parallel rank (``vocab_utils.py``). Nothing is said of a distributed optimizer, so that
    every replica has all states. Mixtures of experts send every token to one.
    """
    family = line["case"].split("/")[0]
    if family not in ("gpt", "moe"):
        return {"t5": "encoder and decoder"}.get(family, "another architecture")
    routed = family == "moe"
    tp, pp, cp = (int(line[name]) for name in ("tp", "pp", "cp"))
    hidden, heads = int(line["hidden"]), int(line["heads"])
    pad = 128 * tp
    sequences, gpus = int(float(line["gbs"])), int(line["gpus"] or 8)
    replicas = gpus // (tp * pp * cp)
    hierarchical = line["cp_comm"] == "a2a+p2p"
    return {
        "framework": "megatron",
        "model": {
            "layers": int(float(line["layers"])),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "ffn": round(8 * hidden / 3 / tp) * tp,
            "vocab": -(-50257 // pad) * pad,
            **({"experts": int(float(line["experts"])), "top_k": 1} if routed else {}),
        },
        "cluster": CLUSTERS[line["gpu"]],
        "profile": "h100",  # times do not matter here
        "gpus": gpus,
        "tokens": sequences * int(float(line["seq"])),
        "context": int(float(line["seq"])),
        "strategy": "usp" if hierarchical else "zigzag_ring",
        "knobs": {"ulysses": int(line["hier"].split()[0])} if hierarchical else {},
        "kernel": "fa2",
        "parallel": {
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "microbatches": sequences // replicas // int(line["mbs"]),
            "recompute": "none",
            "sharding": "none",
            **({"ep": int(line["ep"])} if routed else {}),
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One table."""

    file: str
    fields: Callable[[Line], dict[str, Any] | str]
    name: Callable[[Line], str]
    time_s: str = ""
    """Column of the seconds of a step."""
    memory: str = ""
    """Column of the peak."""
    unit: float = 1.0
    """Bytes of one of its numbers."""
    reserved: bool = False
    last_stage: bool = False


SOURCES: Final[Mapping[str, Source]] = {
    "torchtitan": Source(
        file="torchtitan.csv",
        fields=torchtitan,
        name=lambda x: f"{x['model']} {x['gpus']} GPUs tp {x['tp']} {x['precision']} {x['extras'] or 'eager'}",
        time_s="step_s_derived",
        memory="memory_gib",
        unit=GIB,
        reserved=True,  # train.py of 9dec370 logs max_reserved_gib
    ),
    "automodel": Source(
        file="nemo_automodel.csv",
        fields=nemo_automodel,
        name=lambda x: f"{x['model']} {x['gpus']} GPUs tp {x['tp']}",
        time_s="step_s",
    ),
    "megatron-bridge": Source(
        file="megatron_bridge_summary.csv",
        fields=megatron_bridge,
        name=lambda x: f"{x['model']} {x['gpus']} {x['system']} {x['precision']} ({x['release']})",
        time_s="step_s_derived",
    ),
    "megatron-golden": Source(
        file="megatron_lm_golden.csv",
        fields=megatron_golden,
        name=lambda x: f"{x['case'].removeprefix('gpt/gpt3_mcore_te_')} {x['env']}",
        memory="mem_max_alloc_bytes",
        last_stage=True,  # the last rank writes (global_vars.py)
    ),
}


def _framework(source: str, line: Line) -> Framework | None:
    """Whose code runs a line, where its scenario does not say."""
    if source == "torchtitan" and "2024-12" not in line["framework"]:
        return TORCHTITAN_2025
    if source == "megatron-golden" and line["case"].startswith("moe/"):
        return TESTED
    if source != "megatron-bridge" or line["precision"] != "BF16":
        return None
    return {"GPT OSS 120B": gpt_oss(again="300" not in line["system"]), "Qwen3_235B_a22B": BRIDGE}.get(line["model"])


def rows() -> Iterator[Row]:
    """All rows of all tables."""
    for name, source in SOURCES.items():
        for number, line in enumerate(published_lines(FOLDER / source.file), start=1):
            fields = source.fields(line)
            yield Row(
                source=name,
                number=number,
                name=source.name(line),
                left_out=fields if isinstance(fields, str) else "",
                scenario=None if isinstance(fields, str) else scenario_from(fields),
                framework=_framework(name, line),
                time_s=float(line[source.time_s]) if source.time_s else None,
                memory_bytes=float(line[source.memory]) * source.unit if line.get(source.memory) else None,
                reserved=source.reserved,
                stage=int(line["pp"]) - 1 if source.last_stage else None,
                cublas=CUBLAS if line.get("case", "").startswith("moe/") else None,
                tied=source.last_stage and line["pp"] == "1",  # with more stages each end has its own
            )
