"""What no right program accepts and no right answer says, judged from physics and not by cpsim's own checks."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from calls import NBYTES, Answer

from cpsim.case.scenario import FIELDS
from cpsim.masks.names import MASK_NAMES
from cpsim.models.attention.kernels import KERNELS
from cpsim.strategies import STRATEGIES

Bounds = tuple[float, float]
Rules = dict[str, Bounds]
"""Lowest and highest value of numbers whose place in a file matches a pattern as a whole."""

LINE = 400
"""Characters of a message at most."""
MACHINE_RATE: Bounds = (1e5, 1e16)
"""Bytes/s: what machines have is a thousand times better and worse."""

CLUSTER: Rules = {
    r"num_gpus|gpus_per_node|fabric\.nics_per_node|fabric\.nodes_per_leaf": (1, 1e6),
    r"gpu\.memory_bytes": (1e7, 1e15),
    r"gpu\.num_sms": (1, 1e5),
    r"gpu\.peak_flops_per_s": (1e10, 1e19),
    r".*bandwidth_bytes_per_s": MACHINE_RATE,
    r"fabric\.latency_s": (0, 1),
    r"fabric\.(flow_)?sigma_log": (1e-12, 3),
    r"fabric\.(spine_)?oversubscription": (1, 1e3),
    r"faults\[\d+\]\.rate": (1e-6, 1),
}
PROFILE: Rules = {
    r"attention\..*\.(pair|banded_pair|celled_pair)_s": (1e-14, 1e-6),
    r"attention\..*\.(call|block\w*|call_varlen)_s": (0, 1),
    r"attention\..*\.calls_s\[\d+\]": (1e-9, 1e3),
    r"attention\..*\.(num_sms|head_dim)": (1, 1e5),
    r"attention\..*\.anatomy\.(tile_\w+|blocks_per_sm)": (1, 1e5),
    r"collective\.(curves|rings)\..*\.nbytes\[\d+\]": (1, 1e15),
    r"collective\.(curves|rings)\..*\.seconds\[\d+\]": (1e-9, 1e5),
    r"collective\.hop_s\..*": (0, 1e3),
    r".*bytes_per_s": MACHINE_RATE,
    r"(elementwise|layers\.ops)\.latency_s\..*": (0, 1),
    r"host\.(launch_s\..*|event_s|graph_s|cold_start_s|pause_s\..*)": (0, 10),
    r"sigma\..*": (0, 10),
    r"valid\..*": (0, 1e18),
    r"layers\.gemm\.(flop_s|tile_s|call_s|traffic_s_per_byte)": (0, 1),
}
POINT: Rules = {
    r"samples_s\[\d+\]": (0, 3600),
    r"num_heads|num_kv_heads|head_dim|num_ranks|num_nodes|gpus_per_node|num_groups|[mnk]": (1, 1e9),
    r"nbytes": (0, 1e15),
    r"[qk]_lens\[\d+\]": (1, 1e10),
}
SECONDS: Bounds = (1e-9, 3600)
RUN: Rules = {r"(passes\.\w+\.)?(samples_s|rank_time_s|warmup_s)\[\d+\]": SECONDS}


def leaves(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a tree that are no containers, with their places."""
    match tree:
        case dict():
            for key, value in tree.items():
                yield from leaves(value, f"{place}.{key}" if place else str(key))
        case list():
            for i, value in enumerate(tree):
                yield from leaves(value, f"{place}[{i}]")
        case _:
            yield place, tree


def breaks(rules: Rules, tree: Any) -> str:
    """The first number of a tree that is none or outside of its bounds; texts, which may have units, are not judged."""
    for place, value in leaves(tree):
        for pattern, (low, high) in rules.items():
            if not re.fullmatch(pattern, place) or value is None or isinstance(value, str):
                continue
            if isinstance(value, bool) or not low <= value <= high:
                return f"{place} = {value!r:.40}, outside {low:g} to {high:g}"
    return ""


def falls(tree: Any) -> str:
    """The first curve whose sizes do not rise."""
    curves = tree.get("collective", {}) if isinstance(tree, dict) else {}
    for place, curve in _dicts(curves):
        sizes = curve.get("nbytes")
        if isinstance(sizes, list) and all(isinstance(n, int | float) for n in sizes) and sizes != sorted(sizes):
            return f"{place}: sizes fall"
    return ""


def _dicts(tree: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(tree, dict):
        yield place, tree
        for key, value in tree.items():
            yield from _dicts(value, f"{place}.{key}")


COUNTS = ("gpus", "tokens", "tokens_per_gpu", "heads", "kv_heads", "head_dim", "context")
STEP_COUNTS = {
    "parallel": ("tp", "pp", "dp", "cp", "ep", "microbatches", "batch", "virtual_pp", "layers_first", "layers_last"),
    "model": ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"),
}


def odd_scenario(tree: Any) -> str:
    """What is wrong with the fields of a scenario, whatever they ask for; empty where nothing surely is."""
    if isinstance(tree, list):
        return ""
    if not isinstance(tree, dict):
        return "no fields"
    unknown = [str(key) for key in tree if key not in (*FIELDS, "schema", "version")]
    if unknown:
        return f"unknown field {unknown[0]:.40}"
    for name in COUNTS:
        value = tree.get(name)
        if isinstance(value, str):
            if not re.search(r"\d", value):
                return f"{name} without a number"
        elif value is not None and (isinstance(value, bool | list | dict) or not 1 <= value <= 1e12 or value % 1):
            return f"{name} = {value!r:.40}"
    names = {"strategy": STRATEGIES, "kernel": {kernel for kernel, _ in KERNELS} | {"math"}}
    for name, known in names.items():
        if name in tree and tree[name] is not None and tree[name] not in list(known):
            return f"{name} = {tree[name]!r:.40}"
    mask = tree.get("mask", "causal")
    if (mask.get("name") if isinstance(mask, dict) else mask) not in list(MASK_NAMES):
        return f"mask = {mask!r:.40}"
    if found := _odd_step(tree):
        return found
    precision, parallel = tree.get("precision"), tree.get("parallel")
    if not (precision in (None, "bf16", "fp8") or (isinstance(precision, dict) and set(precision) == {"fp8"})):
        return f"precision = {precision!r:.40}"
    for name in ("tp_overlap", "ep_overlap"):
        if isinstance(parallel, dict) and not isinstance(parallel.get(name), bool | None):
            return f"{name} = {parallel[name]!r:.40}"
    infinite = [place for place, value in leaves(tree) if isinstance(value, float) and not math.isfinite(value)]
    return f"{infinite[0]:.40} is not finite" if infinite else ""


def _odd_step(tree: dict[str, Any]) -> str:
    """What is wrong with how a step is cut, or with its model: counts that are none, more experts for a token than
    there are."""
    for section, names in STEP_COUNTS.items():
        fields = tree.get(section)
        for name in names if isinstance(fields, dict) else ():
            value = fields.get(name, 1)  # type: ignore[union-attr]
            is_count = isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and not value % 1
            if value is not None and not isinstance(value, str) and not is_count:
                return f"{section}.{name} = {value!r:.40}"
    model = tree.get("model")
    experts, top_k = (model.get(name) if isinstance(model, dict) else None for name in ("experts", "top_k"))
    if tree.get("offload", "activations") not in ("activations", None):
        return f"offload = {tree['offload']!r:.40}"
    lora = tree.get("trainable")
    if isinstance(lora, dict) and not (type(rank := lora.get("lora")) is int and rank >= 1):
        return f"trainable.lora = {rank!r:.40}"
    if isinstance(lora, str) and lora != "all":
        return f"trainable = {lora!r:.40}"
    too_many = isinstance(experts, int) and isinstance(top_k, int) and top_k > experts
    return f"top_k = {top_k} of {experts} experts" if too_many else ""


def odd_points(tree: Any) -> str:
    """What is wrong with a measurement file: a number, or a rate that nothing reaches."""
    for row in tree if isinstance(tree, list) else []:
        if not isinstance(row, dict) or "format" in row or row.get("op") in ("error", "check"):
            continue
        if found := breaks(POINT, row) or _too_fast(row):
            return found
    return ""


def _too_fast(point: dict[str, Any]) -> str:
    samples = point.get("samples_s")
    try:
        if point["op"] == "attention":
            pairs = sum(q * k for q, k in zip(point["q_lens"], point["k_lens"], strict=True))
            work, most = 4.0 * point["num_heads"] * point["head_dim"] * pairs, 1e20
        else:
            work, most = float(point["nbytes"]), 1e17
        return f"{work / min(samples):.3g} per second" if work > most * min(samples) else ""  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return ""


def odd_runs(tree: Any) -> str:
    """What is wrong with the times of real runs."""
    for row in tree if isinstance(tree, list) else []:
        if isinstance(row, dict) and "scenario" in row and "error" not in row:
            found = breaks(RUN, {"passes": row.get("passes")})
            if found:
                return found
    return ""


def odd_log(text: str) -> str:
    """What is wrong with a log of nccl-tests: times that are none, or ranks that are missing."""
    ranks = {int(n) for n in re.findall(r"\bRank\s+(\d+)\s+Group\b", text)}
    if ranks and max(ranks) >= len(ranks):
        return "ranks are missing"
    for line in text.splitlines():
        cells = line.split()
        if len(cells) == 13 and re.fullmatch(r"\d+", cells[0]) and cells[2] == "float":
            times = [cells[9 if cells[3] == "sum" and "all_reduce" in text else 5]]
            for time in times:
                if re.fullmatch(r"-?(inf|nan)|-\d.*", time):
                    return f"a time of {time} us"
    return ""


def odd_table(text: str) -> str:
    """What is wrong with a table of kernels: rates that are none."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in lines[1:]:
        rate = line.split(",")[-1]
        if re.fullmatch(r"-?(inf|nan)|-\d.*|0+(\.0*)?", rate) and line.count(",") == lines[0].count(","):
            return f"a rate of {rate} TFLOP/s"
    return ""


# --- answers ---

REFUSED = (3, 4, 5)
"""Exit codes of cases that cannot run, were not measured, or do not fit."""


def wrong(answer: Answer, *, many: bool, most_tflops: float) -> str:
    """What is wrong with an answer; empty where nothing is.

    Args:
        answer: of a command with ``--json``.
        many: whether it was asked several things, each of which may have a line on stderr.
        most_tflops: what a GPU may be said to reach.
    """
    lines = answer.err.splitlines()
    if answer.status not in (0, 2, *REFUSED):
        return f"exit code {answer.status}"
    if answer.nbytes > NBYTES:
        return f"{answer.nbytes / 1e9:.1f} GB of memory"
    if answer.status == 2 and (not lines or (len(lines) > 1 and not many)):
        return f"{len(lines)} lines on stderr"
    for line in lines:
        if not line.isprintable():
            return f"control characters on stderr: {line!r}"
        if len(line) > LINE:
            return f"a message of {len(line)} characters: {line}"
        if re.search("Traceback|internal error|fits? into this machine's memory", line):
            return line
    if answer.status == 2 and not lines[0].startswith("cpsim: "):
        return f"not a message of cpsim: {lines[0]}"
    if not all(line.isprintable() for line in answer.out.splitlines()):
        return "control characters on stdout"
    return _odd_answer(answer.out, most_tflops)


def _odd_answer(out: str, most_tflops: float) -> str:
    if not out.startswith(("{", "[")):  # tables, where the command line lost --json
        return ""
    try:
        found = [json.loads(out)]
    except json.JSONDecodeError:
        found = [json.loads(line) for line in out.splitlines()]
    for place, value in (leaf for tree in found for leaf in leaves(tree)):
        if isinstance(value, str) and "internal error" in value:
            return value
        if isinstance(value, int | float) and not place.startswith("scenario") and (odd := _odd(place, value)):
            return f"{place} = {value}: {odd}"
        if place.endswith("tflops_per_gpu") and value > most_tflops:
            return f"{place} = {value}"
    for tree in found:
        for _, row in _dicts(tree):
            if "time_s_low" in row and not row["time_s_low"] <= row["time_s"] <= row["time_s_high"]:
                return f"interval {row['time_s_low']} to {row['time_s_high']} around {row['time_s']}"
    return ""


def _odd(place: str, value: float) -> str:
    name = re.sub(r"\[\d+\]", "", place.rpartition(".")[2])
    if not math.isfinite(value):
        return "not finite"
    if name in ("time_s", "time_s_low", "time_s_high", "forward_s", "backward_s") and not 0 < value < 1e9:
        return "no time"
    if name.endswith("_s") and value < 0:
        return "negative seconds"
    if ("bytes" in name or "tflops" in name) and value < 0:
        return "negative"
    if ("share" in name or "probability" in name) and not 0 <= value <= 1 + 1e-9:
        return "no share"
    return ""
