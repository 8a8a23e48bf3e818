"""torchtitan's TOML: read, and written for what was found.

Reference: torchtitan 0.2.0, config/job_config.py, and train_configs of 0.0.2 to 0.2.2; 0.3.0 takes the same names as
options of its command line instead of a TOML.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, Final

from cpsim.case.formats.reading import Reading, Settings, without_none
from cpsim.case.formats.rotation import ROTATIONS, rotation
from cpsim.case.model import PUBLISHED, known_model, likely
from cpsim.case.parallel import Parallel
from cpsim.case.scenario import Scenario
from cpsim.errors import ScenarioError, shown

SECTIONS: Final = {
    "job": "description dump_folder print_config config_file custom_config_module use_for_integration_test",
    "profiling": None,
    "metrics": None,
    "optimizer": None,
    "lr_scheduler": None,
    "checkpoint": None,
    "comm": None,
    "memory_estimation": None,
    "fault_tolerance": None,
    "validation": None,
    "debug": None,
    "model": None,
    "training": None,
    "parallelism": None,
    "experimental": None,
    "activation_checkpoint": None,
    "compile": None,
    "float8": None,
    "mx": None,
    "quantize": None,
}
"""Sections of any version; others are mistakes."""
_RECOMPUTE: Final = {"none": "none", "full": "full"}
_SHAPES: Final = {
    ("llama2", "7b"): "llama2-7b",
    ("llama2", "13b"): "llama2-13b",
    ("llama2", "70b"): "llama2-70b",
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3.1-405b",
}
"""Models by name and flavor; Qwen's flavors are sizes."""


def read(text: str, path: str) -> Reading:
    """A scenario's fields of a configuration of torchtitan.

    Raises:
        ScenarioError: it is none, or asks for what a step cannot say; names the line.
    """
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: not valid TOML: {error}") from None
    unknown = next((name for name in value if name not in SECTIONS), None)
    if unknown is not None or not {"model", "training", "parallelism"} & value.keys():
        got = shown(unknown if unknown is not None else [*value])
        raise ScenarioError(f"{path}: expected torchtitan's sections [model], [training], [parallelism]; got {got}")
    s = Settings(path, _flat(value), _places(text))
    parallel, gpus = _parallel(s)
    strategy, knobs = _strategy(s, parallel["cp"] or 1)
    local = s.number("training.local_batch_size", "training.batch_size") or 8
    fields = without_none(
        {
            "framework": "torchtitan",
            "model": _model(s),
            "gpus": gpus,
            "context": s.number("training.seq_len") or 2048,
            "sequences": _sequences(s, local, parallel, gpus),
            "compile": True if s.flag("compile.enable", "training.compile") else None,
            "precision": _precision(s),
            "strategy": strategy,
            "knobs": knobs or None,
        }
    )
    fields["parallel"] = without_none(parallel | {"batch": local, **_recompute(s)})
    return Reading(what="torchtitan's TOML", fields=fields, said=tuple(s.said))


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            found |= _flat(entry, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = entry
    return found


def _places(text: str) -> dict[str, str]:
    """Lines of settings."""
    found: dict[str, str] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.split("#")[0].strip()
        if bare.startswith("["):
            section = bare.strip("[] ") + "."
        elif "=" in bare:
            found[section + bare.split("=")[0].strip().strip('"')] = f"line {number}"
    return found


def _model(s: Settings) -> str | None:
    """Our name of a model and its flavor; None for a debug model, which is none."""
    name, flavor = str(s.get("model.name") or "llama3").lower(), s.get("model.flavor")
    if flavor is None or str(flavor).startswith("debug"):
        return None
    short = str(flavor).lower().removesuffix("_flex_attn").removesuffix("_flex").removesuffix("_varlen_attn")
    found = _SHAPES.get((name, short)) or f"{name}-{short}"
    known = PUBLISHED.get(found) or known_model(found)
    if known is None:
        place, hint = s.place("model.flavor"), likely(found)
        raise ScenarioError(f"{place}: model {name} {flavor} is not known; {hint}give --model config.json")
    if known.model is None:
        raise ScenarioError(f"{s.place('model.flavor')}: {known.refusal()}")
    return known.name


def _parallel(s: Settings) -> tuple[dict[str, Any], int | None]:
    """Degrees, and GPUs where they say how many."""

    def degree(name: str) -> int:
        return s.number(f"parallelism.{name}", f"experimental.{name}", f"training.{name}", least=-1) or 1

    tp, pp = degree("tensor_parallel_degree"), degree("pipeline_parallel_degree")
    cp, replicate = degree("context_parallel_degree"), degree("data_parallel_replicate_degree")
    sharded = s.get("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree")
    shard = (
        -1
        if sharded is None
        else s.number("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree", least=-1)
    )
    if pp > 1:
        place = s.place("parallelism.pipeline_parallel_degree")
        raise ScenarioError(
            f"{place}: pipelines of torchtitan are not predicted, got {pp}; use 1, or framework megatron"
        )
    overlap = s.flag("parallelism.enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel")
    ep = s.number("parallelism.expert_parallel_degree")
    gpus = None if shard == -1 else replicate * int(shard or 1) * cp * tp
    dp = None if shard == -1 else replicate * int(shard or 1)
    return {
        "tp": tp,
        "cp": cp,
        "dp": dp,
        "replicate": replicate if replicate > 1 else None,
        "ep": ep if ep and ep > 1 else None,
        "tp_overlap": overlap or None,
    }, gpus


def _sequences(s: Settings, local: int, parallel: Mapping[str, Any], gpus: int | None) -> int | str | None:
    """Sequences of a step, all replicas'; per replica where GPUs are not known yet."""
    every = s.number("training.global_batch_size", least=-1)
    if every and every > 0:
        return every
    if gpus is None:
        return None
    return local * int(parallel["dp"] or 1)


def _strategy(s: Settings, cp: int) -> tuple[str | None, dict[str, Any]]:
    """What the rotation method stands for."""
    names = ("parallelism.context_parallel_rotate_method", "experimental.context_parallel_rotate_method")
    name = next((one for one in names if one in s), names[0])
    if cp == 1:
        return None, {}
    found = s.one_of(name, ROTATIONS)
    strategy, knobs = found or ROTATIONS["allgather"]
    return strategy, dict(knobs)


def _recompute(s: Settings) -> dict[str, Any]:
    mode, option = s.get("activation_checkpoint.mode"), s.get("activation_checkpoint.selective_ac_option")
    if mode is None or mode == "selective":
        if mode and str(option or "2") not in ("op", "2"):
            place = s.place("activation_checkpoint.selective_ac_option")
            raise ScenarioError(f"{place}: selective_ac_option: expected op, got {shown(option)}; use op, full or none")
        if mode and str(option or "2") == "2":
            place = s.place("activation_checkpoint.mode")
            raise ScenarioError(
                f'{place}: selective of every second layer is not predicted; use selective_ac_option = "op", or full'
            )
        return {"recompute": "per_op"} if mode else {}
    return {"recompute": s.one_of("activation_checkpoint.mode", _RECOMPUTE)}


def _precision(s: Settings) -> Any:
    """FP8 of linear layers, where a converter asks for it."""
    converters = s.get("model.converters") or ()
    if not any("float8" in str(one) for one in converters) and not s.flag("float8.enable_float8_linear"):
        return None
    recipe = s.get("quantize.linear.float8.recipe_name", "float8.recipe_name") or "tensorwise"
    return {"fp8": "rowwise" if "rowwise" in str(recipe) else "tensorwise"}


def write(scenario: Scenario, parallel: Parallel) -> str:
    """Sections that launch what was found."""
    dp = parallel.dp
    lines = [
        "[training]",
        f"local_batch_size = {parallel.batch or sequences_of_a_replica(scenario, parallel)}",
        f"global_batch_size = {max(1, scenario.num_sequences)}",
        f"seq_len = {scenario.context or scenario.num_tokens // (dp * parallel.microbatches)}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {parallel.replicate}",
        f"data_parallel_shard_degree = {dp // parallel.replicate}",
        f"tensor_parallel_degree = {parallel.tp}",
        f"context_parallel_degree = {parallel.cp}",
    ]
    if parallel.cp > 1:
        lines.append(f'context_parallel_rotate_method = "{rotation(scenario)}"')
    if parallel.tp_overlap:
        lines.append("enable_async_tensor_parallel = true")
    mode = {"per_op": "selective"}.get(parallel.recompute, parallel.recompute)
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    lines += ['selective_ac_option = "op"'] if mode == "selective" else []
    lines += ["", "[compile]", f"enable = {'true' if scenario.compile else 'false'}"]
    return "\n".join(lines) + "\n"


def sequences_of_a_replica(scenario: Scenario, parallel: Parallel) -> int:
    """Sequences of a microbatch of a replica."""
    return max(1, scenario.num_sequences // (parallel.dp * parallel.microbatches))
