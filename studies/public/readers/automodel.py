"""NeMo Automodel's summary: seconds of a step."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from studies.public.readers.models import QWEN_7B, QWEN_32B
from studies.public.row import Line, Reader, Row, left_out, number

TUNED: Final = {
    "Llama3 8B": ("llama3-8b", 0.1),
    "Qwen2.5 7B": (QWEN_7B, 0.0),
    "Llama3 70B": ("llama3-70b", 0.0),
    "Qwen2.5 32B": (QWEN_32B, 0.0),
}
"""Models, and the dropout of their adapters (examples/llm_finetune of 507bfb751)."""
CLUSTERS: Final = {"DGX-H100": "dgx-h100", "DGX-H200": "dgx-h200"}


def nemo_automodel(line: Line) -> Row:
    """A row.

    Steps on several GPUs compile layers and compute them again (examples/llm_benchmark/llama3_3 and qwen, custom_*).
    Their tensor parallelism is asynchronous, which is not said here.
    """
    model, gpu = re.sub(r" \d+-node$", "", line["model"]), line["system"].removeprefix("DGX-")
    tuned = line["task"].startswith("Fine-Tuning")
    row = Row(
        name=f"{line['model']} {line['gpus']} GPUs tp {line['tp']}",
        gpu=gpu,
        gpus=int(line["gpus"]),
        framework="automodel",
        precision=line["precision"].lower(),
        cp=number(line["cp"]),
        routed=not tuned,
        time_s=float(line["step_s"]),
    )
    if not tuned:
        return replace(row, **left_out("mixture of experts"))
    if model not in TUNED or line["precision"] != "BF16" or number(line["pp"]) * row.cp > 1:
        return replace(row, **left_out("adapters of another model, precision or cut"))
    if line["system"] not in CLUSTERS:
        return replace(row, **left_out(f"Automodel on {gpu}", "not measured"))
    assumed = ("layers are compiled and computed again on several GPUs, as its benchmark files say",)
    return replace(row, fields=_fields(line, model), assumed=assumed)


def _fields(line: Line, named: str) -> dict[str, Any]:
    model, dropout = TUNED[named]
    sequences, seq, gpus, tp = (int(line[name]) for name in ("gbs", "seq", "gpus", "tp"))
    many = gpus > 1
    return {
        "framework": "huggingface",
        "model": model,
        "cluster": CLUSTERS[line["system"]],
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


READER: Final = Reader(
    file="nemo_automodel.csv", columns=frozenset({"task", "lbs", "kernels", "step_s"}), read=nemo_automodel
)
