"""The kinds of files that people give to cpsim: small valid ones, the commands that read them, and what is nonsense."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sense
from mutations import as_json, as_lines, as_yaml

from cpsim.case.gpu import gpu_named

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data"
Command = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of file."""

    suffixes: Mapping[str, Callable[[Any], bytes]]
    """Endings of file names, and how a tree is written in such a file; of texts: a tree is the text."""
    seeds: Sequence[Any]
    """Valid files, as trees or texts."""
    commands: Sequence[Command]
    """What reads the file: FILE stands for its name, and CASE[i] for a scenario that names it."""
    cases: Sequence[dict[str, Any]] = ()
    """Scenarios that name the file."""
    odd: Callable[[Any], str] = field(default=lambda _: "")
    """Why a tree or a text must be refused; empty where it may be accepted."""
    many: bool = False
    """Whether a file holds several questions."""
    most_tflops: float = 2300.0
    """What a GPU may reach: B200's data sheet, or more where the file itself says how fast one is."""


def _scenarios() -> list[dict[str, Any]]:
    """Committed cases: of every strategy, implementation and mask the smallest."""
    small: dict[tuple[object, ...], tuple[int, dict[str, Any]]] = {}
    for path in sorted((DATA / "cases").glob("*.jsonl")):
        for case in map(json.loads, path.read_text().splitlines()):
            mask = case["mask"] if isinstance(case["mask"], str) else case["mask"]["name"]
            key = case["strategy"], case.get("implementation"), mask, case.get("part")
            total = case.get("tokens") or case["tokens_per_gpu"] * case["gpus"]
            if case["gpus"] <= 4 and total <= 20_000 and total < small.get(key, (10**9,))[0]:
                small[key] = total, case
    return [case for _, case in small.values()] + STEPS + ADVISED


SHAPE = {"layers": 4, "hidden": 512, "heads": 4, "kv_heads": 2, "head_dim": 128, "ffn": 1024, "vocab": 8192}
LATENT = {"kv_heads": 4, "head_dim": 192, "kv_rank": 128, "rope_dim": 64, "value_dim": 128, "dense_layers": 1}
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 256, "shared_experts": 1}
STEP = {"gpus": 8, "cluster": "dgx-h200", "tokens": 32768, "context": 4096, "kernel": "fa2", "mask": "causal_document"}
STEPS = [
    {**STEP, "strategy": "ring", "model": SHAPE, "parallel": {"tp": 2, "pp": 2, "cp": 2, "recompute": "mlp"}},
    {**STEP, "strategy": "allgather", "model": "llama3-8b", "parallel": {"tp": 4, "cp": 2, "schedule": "same_phase"}},
    {**STEP, "strategy": "none", "model": SHAPE, "parallel": {"pp": 2, "virtual_pp": 2, "batch": 1, "microbatches": 2}},
    {**STEP, "strategy": "none", "model": SHAPE, "parallel": {"pp": 2, "layers_first": 1, "layers_last": 3}},
    {**STEP, "strategy": "none", "model": {**SHAPE, **EXPERTS}, "parallel": {"tp": 2, "ep": 4}, "mask": "causal"},
    {**STEP, "strategy": "none", "model": {**SHAPE, **EXPERTS, **LATENT}, "parallel": {"tp": 2}, "mask": "causal"},
    {**STEP, "strategy": "none", "model": SHAPE, "offload": "activations", "parallel": {"tp": 2}},
    {**STEP, "strategy": "none", "model": SHAPE, "framework": "huggingface", "parallel": {"mlp_chunks": 4}},
    {**STEP, "strategy": "none", "model": SHAPE, "trainable": {"lora": 16, "modules": ["qkv"], "dropout": 0.1}},
    {**STEP, "strategy": "none", "model": {**SHAPE, "window": 512, "window_pattern": 2}, "parallel": {"tp": 2}},
    {**STEP, "strategy": "none", "model": SHAPE, "documents": {"distribution": "pile", "seed": 1, "max_length": 4096}},
    {
        **STEP,
        "strategy": "none",
        "model": SHAPE,
        "framework": "torchtitan",
        "compile": True,
        "precision": {"fp8": "rowwise"},
        "parallel": {"tp": 2, "tp_overlap": True},
    },
]
SMALL = {"gpus": 4, "cluster": "h200-4", "heads": 8, "kv_heads": 2}
ADVISED = [
    {**SMALL, "tokens": 4096, "pass": "fwd"},
    {**SMALL, "tokens_per_gpu": 512, "documents": [1000, 24, 1024], "mask": {"name": "lambda", "window": 128}},
    {**SMALL, "gpus": 16, "cluster": "dgx-h200", "tokens": 16384, "strategy": "usp", "knobs": {"ulysses": 4}},
    {**SMALL, "tokens": 8192, "strategy": "distca", "knobs": {"servers": 4, "tolerance": 0.1}, "mask": "causal"},
    {**SMALL, "tokens": 8192, "strategy": "magi", "knobs": {"chunk": 512, "stages": 2}},
]


def _clusters() -> list[dict[str, Any]]:
    """Shipped ones, each with its GPU written out, and one with all fields."""
    shipped = json.loads((ROOT / "cpsim/data/clusters.json").read_text())
    known = {c["name"]: {**c, "gpu": gpu_named(c["gpu"]).to_dict()} for c in shipped["clusters"]}
    whole = {**known["dgx-h200"], "num_gpus": 16, "faults": [{"part": "nic", "number": 3, "rate": 0.5}]}
    leaves = {"oversubscription": 2.0, "nodes_per_leaf": 1, "spine_oversubscription": 4.0, "rails": False}
    whole["fabric"] = {**whole["fabric"], **leaves}
    sockets = {**known["h200-2x2-sockets"], "gpu": "h200", "schema": 1}
    return [whole, sockets, {**known["h200-4"], "profile": "h200"}]


ON_CLUSTER = [
    {**SMALL, "strategy": "allgather", "tokens_per_gpu": 512, "mask": "causal", "pass": "fwd"},
    {**SMALL, "strategy": "ring", "gpus": 16, "tokens_per_gpu": 256, "mask": "full"},
    {**SMALL, "strategy": "usp", "gpus": 16, "tokens_per_gpu": 256, "knobs": {"ulysses": 2}},
]


def _profiles() -> list[dict[str, Any]]:
    """A small whole profile and the shipped ones that have a base."""
    folder = ROOT / "cpsim/data/profiles"
    whole = json.loads((folder / "h200.json").read_text())
    whole["attention"] = {key: value for key, value in whole["attention"].items() if key.startswith("fa4 ")}
    for params in whole["attention"].values():
        few = {name: params["discrepancy"][name][:3] for name in ("support", "weights")}
        params |= {"discrepancy": {**params["discrepancy"], **few}, "head_dims": params["head_dims"][:1]}
    whole |= {"held_out": whole["held_out"][:1], "provenance": whole["provenance"][:1]}
    return [whole, *(json.loads((folder / f"{name}.json").read_text()) for name in ("h100-fa3", "a100"))]


ON_PROFILE = [
    {**SMALL, "strategy": strategy, "kernel": kernel, "tokens_per_gpu": 512}
    for kernel in ("fa4", "fa3", "fa2")
    for strategy in ("ring", "allgather")
]


def _lines(path: str, chosen: Callable[[int, dict[str, Any]], bool]) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (DATA / path).read_text().splitlines()]
    return [rows[0], *(row for i, row in enumerate(rows[1:]) if chosen(i, row))]


def _measurements() -> list[list[dict[str, Any]]]:
    """Attention of one kernel alone, and with a few points of everything else that a profile holds."""
    attention = _lines("points/published/h100-magi.jsonl", lambda i, _: i % 2 == 0)
    network = _lines("points/h200/h200x4-network.jsonl", lambda i, row: i % 20 == 0 and row["op"] != "end")
    kernels = _lines("points/h200/h200-kernels-0.jsonl", lambda i, row: i % 7 == 0 and row["op"] != "attention")
    short = ("samples_s", "times_s")
    others = [
        {name: value[:3] if name in short else value for name, value in row.items()}
        for row in (*network[1:], *kernels[1:])
    ]
    return [attention, attention + others]


def _fabrics() -> list[list[dict[str, Any]]]:
    return [_lines("points/h200/h200x4-sockets.jsonl", lambda i, _: i % 3 == 0)]


def _runs() -> list[list[dict[str, Any]]]:
    return [
        _lines("runs/h200x4-1122c/h200-emulated-dcp.jsonl", lambda *_: True),
        _lines("runs/h200x2-1122b/h200-flex-mtkahypar.jsonl", lambda *_: True),
    ]


def _log(test: str, factor: float, hosts: int) -> str:
    """What nccl-tests prints."""
    ranks = 8 * hosts
    lines = [f"# Collective test starting: {test}_perf", "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824"]
    for rank in range(ranks):
        place = f"on node-{rank // 8} device {rank % 8:2d} [0000:{0x18 + rank:02x}:00] NVIDIA H100 80GB HBM3"
        lines.append(f"#  Rank {rank:2d} Group  0 Pid {41000 + rank:6d} {place}")
    halves = "     time   algbw   busbw #wrong" * 2
    lines += ["#", f"#       size         count      type   redop    root{halves}"]
    for nbytes in (2**k for k in range(12, 31, 3)):
        micros, redop = 20 + nbytes / 3e5, "sum" if "reduce" in test else "none"
        rate = nbytes / micros / 1e3
        cells = f"{micros:8.2f} {rate:7.2f} {rate * factor:7.2f}       0"
        lines.append(f"{nbytes:12d}  {nbytes // 4:12d}     float  {redop:>6s}      -1  {cells}  {cells}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1", ""])


def _logs() -> list[str]:
    sums = {"all_gather": 0.875, "reduce_scatter": 0.875, "all_reduce": 1.75, "alltoall": 0.875, "sendrecv": 1.0}
    return [*(_log(test, factor, 1) for test, factor in sums.items()), _log("all_reduce", 1.875, 2)]


def _tables() -> list[str]:
    rows = (ROOT / "cpsim/data/published/magi.csv").read_text().splitlines()
    return ["\n".join([*rows[:15], ""]), "\n".join(["kernel,wd,mask,tokens,ms", "fa3,fwd,causal,16k,3.1", ""])]


GRID: dict[str, Any] = {
    "base": {"cluster": "h200-4", "heads": 8, "kv_heads": 2, "pass": "fwd", "kernel": "fa4"},
    "grid": {"strategy": ["ring", "ulysses"], "gpus": [2, 4], "tokens_per_gpu": [256, 512], "mask": ["full", "causal"]},
    "sample": {"count": 3, "seed": 1},
}
TREES = {".json": as_json, ".yaml": as_yaml}
LINES = {".jsonl": as_lines}
OUT = ["--out", "OUT"]
PREDICTS = [["predict", "CASE", "--json", "--jobs", "1"]]

KINDS: dict[str, Kind] = {
    "scenario": Kind(
        suffixes=TREES,
        seeds=_scenarios(),
        commands=[
            *[["predict", "FILE", "--json"]] * 5,
            ["advise", "FILE", "--json"],
            ["trace", "FILE", "--json", "--out", "OUT.json"],
            ["sweep", "FILE", "--json", "--jobs", "1", "--out", "OUT.jsonl"],
        ],
        odd=sense.odd_scenario,
    ),
    "batch": Kind(
        suffixes=LINES,
        seeds=[_scenarios()[i : i + 3] for i in range(0, 30, 3)],
        commands=[["predict", "FILE", "--json", "--jobs", "1"]],
        many=True,
    ),
    "cluster": Kind(
        suffixes=TREES,
        seeds=_clusters(),
        cases=[case | {"cluster": "FILE"} for case in ON_CLUSTER],
        commands=PREDICTS,
        odd=lambda tree: sense.breaks(sense.CLUSTER, tree),
    ),
    "profile": Kind(
        suffixes={".json": as_json},
        seeds=_profiles(),
        cases=[case | {"profile": "FILE"} for case in ON_PROFILE],
        commands=PREDICTS,
        odd=lambda tree: sense.breaks(sense.PROFILE, tree) or sense.falls(tree),
        most_tflops=1e7,
    ),
    "measurement": Kind(
        suffixes=LINES,
        seeds=_measurements(),
        commands=[["fit", "FILE", "--base", "h200", "--json", "--out", "OUT.json"]],
        odd=sense.odd_points,
    ),
    "fabric": Kind(
        suffixes=LINES,
        seeds=_fabrics(),
        commands=[["fit-fabric", "FILE", "--cluster", "dgx-h200", "--json"]],
        odd=sense.odd_points,
    ),
    "runs": Kind(
        suffixes=LINES,
        seeds=_runs(),
        commands=[["validate", "FILE", "--json"]],
        odd=sense.odd_runs,
        many=True,
    ),
    "log": Kind(
        suffixes={".log": str.encode},
        seeds=_logs(),
        commands=[["import", "FILE", "--json", "--out", "OUT.jsonl"]],
        odd=sense.odd_log,
        many=True,
    ),
    "table": Kind(
        suffixes={".csv": str.encode},
        seeds=_tables(),
        commands=[["import", "FILE", "--json", "--out", "OUT.jsonl", "--gpu", "h100", "--heads", "32"]],
        odd=sense.odd_table,
        many=True,
    ),
    "grid": Kind(
        suffixes=TREES,
        seeds=[GRID, {key: value for key, value in GRID.items() if key != "sample"}],
        commands=[["sweep", "FILE", "--json", "--jobs", "1", "--out", "OUT"]],
        many=True,
    ),
}

OPTIONS: list[Command] = [
    ["mask", "causal", "--tokens", "4096", "--json"],
    ["mask", "lambda", "--tokens", "4096", "--option", "window=128", "--gpus", "4", "--cluster", "h200-4", "--json"],
    ["mask", "causal_document", "--tokens", "4096", "--documents", "100,300,3696", "--json"],
    ["mask", "full_document", "--tokens", "4096", "--documents", "pile", "--json"],
    ["mask", "block_sparse", "--tokens", "4096", "--option", "density=0.5", "--option", "block=128", "--json"],
    ["kernels", "--profile", "a100", "--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--json"],
    ["predict", "ring.json", "--jobs", "1", "--json"],
    ["advise", "ring.json", "--json"],
    ["strategies", "--json"],
]
"""Valid command lines that write no file, for broken words."""
RING = {**SMALL, "strategy": "ring", "tokens": 4096}
MILLION = {"gpus": 10**6, "tokens": 10**9, "cluster": "dgx-h200"}
MANY_LAYERS = {"layers": 10_000, "hidden": 1024, "heads": 8, "kv_heads": 2, "ffn": 1024, "vocab": 1000}
SIZES: dict[str, dict[str, Any]] = {
    "a million GPUs": MILLION,
    "a million GPUs, any strategy": {**MILLION, "strategy": None},
    "a trillion tokens": {"tokens": 10**12},
    "ten million documents": {
        "tokens": 80_000_000,
        "documents": {"distribution": "pile", "max_length": 8},
        "mask": "causal_document",
    },
    "a knob of one token": {
        **MILLION,
        "gpus": 64,
        "tokens": 6_400_000,
        "strategy": "hybrid_cp",
        "knobs": {"tokens_per_rank": 1},
    },
    "blocks of one token": {"tokens": 40_000_000, "mask": {"name": "block_sparse", "block": 1}},
    "ten thousand stages": {
        **MILLION,
        "gpus": 160_000,
        "strategy": "none",
        "model": MANY_LAYERS,
        "parallel": {"pp": 10_000, "dp": 16, "microbatches": 10_000},
    },
    "a step on a million GPUs": {
        **MILLION,
        "strategy": "none",
        "heads": 64,
        "kv_heads": 8,
        "model": "llama3-70b",
        "parallel": {"tp": 8, "pp": 10, "dp": 12_500},
    },
}
"""Changes of RING that make it absurdly large: some have an answer at once, the others are refused at once."""
