"""Megatron-LM's functional tests: peak memory, with all arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from studies.public.megatron import TESTED
from studies.public.row import Line, Peak, Reader, Row, instead, left_out, number

TESTED_CODE: Final = instead(TESTED)
CLUSTERS: Final = {
    "A100": "p4de",
    "H100": "dgx-h100",
    "GB200": "dgx-b200",
    "GB300": "dgx-b200",
    "B200": "dgx-b200",
    "H200": "dgx-h200",
}
"""Whose memory does not matter here: the tests fill a hundredth of it."""
STRATEGIES: Final = {
    "": "zigzag_ring",
    "p2p": "zigzag_ring",
    "a2a": "ulysses",
    "all_gather": "allgather",
    "a2a+p2p": "usp",
}
"""By ``cp_comm_type``; nothing said is p2p."""
CUBLAS: Final = 8 * 4096 * 1024
"""CUBLAS_WORKSPACE_CONFIG=:4096:8 of the tests of experts (model_config.yaml)."""
ASSUMED: Final = (
    "an MLP of two linear layers of 4 hidden units with GELU between is a gated one of 8/3",
    "every replica has all of the optimizer's states, as nothing is said of a distributed optimizer",
)


def megatron_golden(line: Line) -> Row:
    """A row.

    The tests' GPT has an MLP of two linear layers with GELU between, of 4 hidden units each; a gated one of 8/3 hidden
    units has as many weights and keeps as many bytes. Embeddings are tied where there is one stage. Words are padded to
    a multiple of 128 per tensor-parallel rank (``vocab_utils.py``). Mixtures of experts send every token to one. The
    last rank writes (``global_vars.py``).
    """
    family, routed = line["case"].split("/")[0], line["case"].startswith("moe/")
    stages = int(line["pp"])
    row = Row(
        name=f"{line['case'].removeprefix('gpt/gpt3_mcore_te_')} {line['env']}",
        gpu=line["gpu"],
        gpus=int(float(line["gpus"] or 8)),
        framework="megatron-lm",
        cp=int(line["cp"] or 1),
        routed=routed,
        code=TESTED_CODE if routed else None,
        peak=Peak(
            nbytes=float(line["mem_max_alloc_bytes"]),
            stage=stages - 1,
            cublas=CUBLAS if routed else None,
            tied=stages == 1,  # with more stages each end has its own
        )
        if line["mem_max_alloc_bytes"]
        else None,
    )
    if family not in ("gpt", "moe"):
        return replace(row, **left_out({"t5": "encoder and decoder"}.get(family, "another architecture")))
    if line["gpu"] not in CLUSTERS:
        return replace(row, **left_out(f"tests on {line['gpu']}", "not measured"))
    if line["fp8"] or line["fsdp"] or line["cp_comm"] not in STRATEGIES:
        return replace(row, **left_out("tests in FP8, or of Megatron's FSDP"))
    return replace(row, fields=_fields(line, row), assumed=ASSUMED)


def _fields(line: Line, row: Row) -> dict[str, Any]:
    tp, pp, vp = int(line["tp"]), int(line["pp"]), number(line["vp"])
    hidden, heads = int(line["hidden"]), int(line["heads"])
    pad = 128 * tp
    sequences, gpus = int(float(line["gbs"])), row.gpus
    replicas = gpus // (tp * pp * row.cp)
    strategy = STRATEGIES[line["cp_comm"]] if row.cp > 1 else "none"
    return {
        "framework": "megatron",
        "model": {
            "layers": int(float(line["layers"])),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": min(heads, number(line["kv_groups"], heads)),
            "head_dim": hidden // heads,
            "ffn": round(8 * hidden / 3 / tp) * tp,
            "vocab": -(-50257 // pad) * pad,
            **({"experts": int(float(line["experts"])), "top_k": 1} if row.routed else {}),
        },
        "cluster": CLUSTERS[line["gpu"]],
        "profile": "h100",  # times do not matter here
        "gpus": gpus,
        "tokens": sequences * int(float(line["seq"])),
        "context": int(float(line["seq"])),
        "strategy": strategy,
        "knobs": {"ulysses": int(line["hier"].split()[0])} if strategy == "usp" else {},
        "kernel": "fa2",
        "parallel": {
            "tp": tp,
            "pp": pp,
            "cp": row.cp,
            "microbatches": sequences // replicas // int(line["mbs"]),
            "recompute": "full" if line["recompute"] == "full" else "none",
            "sharding": "zero1" if line["dist_opt"] else "none",
            **({"virtual_pp": vp} if vp > 1 else {}),
            **({"ep": int(line["ep"])} if row.routed else {}),
            "loss_fusion": "none",
        },
    }


READER: Final = Reader(
    file="megatron_lm_golden.csv",
    columns=frozenset({"case", "env", "hier", "mem_max_alloc_bytes"}),
    read=megatron_golden,
)
