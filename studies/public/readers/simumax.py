"""SimuMax's steps of few layers on 8 B200: milliseconds and bytes that the allocator gave out.

Source: MooreThreads/SimuMax@4dcaae513, simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh (arguments of
Megatron-LM 0.14: distributed optimizer, gradients summed in fp32 after the last backward pass, sequence parallelism,
nothing overlapped, nothing computed again) and docs/b200/b200_real_repro_guide.md. Its Llama 3 405B has 16 key-value
heads. The rate of long products is that of its own table of single ones (configs/system/b200_bf16_ceperm.json), a third
less than that of other B200. ``cef`` is Transformer Engine's fused cross entropy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from studies.public.readers.models import LLAMA_405B
from studies.public.row import CLUSTERS, GIB, Line, Peak, Reader, Row, left_out, number

LLAMA_70B: Final = {**LLAMA_405B, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}
MODELS: Final = {"llama3-70b": LLAMA_70B, "llama3-405b": {**LLAMA_405B, "kv_heads": 16}}
MACHINE: Final = "long products are as fast as in SimuMax's table of single ones, 1.09 PFLOP/s"
STRATEGIES: Final = {"": "zigzag_ring", "p2p": "zigzag_ring", "a2a": "ulysses", "all_gather": "allgather"}


def simumax(line: Line) -> Row:
    """A row."""
    row = Row(
        name=line["case"],
        gpu=line["gpu"],
        gpus=number(line["gpus"]),
        framework="megatron-lm",
        precision=line["precision"].lower(),
        cp=number(line["cp"]),
        routed=number(line["ep"]) > 1 or line["model"] not in MODELS,
        time_s=float(line["real_ms"]) / 1e3,
        peak=Peak(nbytes=float(line["real_alloc_gib"]) * GIB) if line["real_alloc_gib"] else None,
    )
    if line["model"] not in MODELS or row.routed:
        return replace(row, **left_out(f"model {line['model']}"))
    if row.gpu != "B200":
        return replace(row, **left_out(f"steps on {row.gpu}", "not measured"))
    if row.precision != "bf16":
        return replace(row, **left_out("steps in fp8 without a recipe"))
    return replace(row, fields=_fields(line, row), assumed=("a microbatch is one sequence", MACHINE))


def _fields(line: Line, row: Row) -> dict[str, Any]:
    tp, pp, chunks, dp = (number(line[name]) for name in ("tp", "pp", "vp", "dp"))
    seq, microbatches = number(line["seq"]), number(line["microbatches"])
    return {
        "framework": "megatron",
        "model": {**MODELS[line["model"]], "layers": number(line["layers_run"])},
        "cluster": str(CLUSTERS / "simumax-b200.json"),
        "profile": "data-sheet",
        "gpus": row.gpus,
        "tokens": seq * microbatches * dp,
        "context": seq,
        "mask": "causal",
        "strategy": STRATEGIES[line["cp_comm"]] if row.cp > 1 else "none",
        "kernel": "cudnn",
        **({"implementation": "transformer-engine"} if row.cp > 1 else {}),
        "protocol": "streamed",
        "parallel": {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "cp": row.cp,
            "virtual_pp": chunks,
            "microbatches": microbatches,
            "recompute": "none",
            "gradients": "exposed",
            "loss_fusion": "te" if "cef" in line["case"] else "none",
        },
    }


READER: Final = Reader(
    file="simumax_b200.csv", columns=frozenset({"layers_run", "real_ms", "real_alloc_gib"}), read=simumax
)
