"""accelerate's configuration and TRL's: read, and written for what was found.

Reference: accelerate 1.15, commands/config/config_args.py (ClusterConfig) and parallelism_config.py; TRL 0.2x,
trainer/sft_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cpsim.case.files import parse_yaml
from cpsim.case.formats.reading import Reading, Settings, without_none
from cpsim.case.formats.rotation import ROTATIONS, rotation
from cpsim.case.formats.torchtitan import sequences_of_a_replica
from cpsim.case.model import known_model, likely
from cpsim.case.parallel import Parallel
from cpsim.case.scenario import Scenario
from cpsim.errors import ScenarioError

_PREFIX: Final = "parallelism_config_"


def is_config(value: object) -> bool:
    """Whether a YAML value is accelerate's, TRL's or Trainer's."""
    if not isinstance(value, Mapping):
        return False
    return bool({"distributed_type", "fsdp_config", "parallelism_config", "per_device_train_batch_size"} & value.keys())


def read(text: str, path: str) -> Reading:
    """A scenario's fields of a configuration of accelerate or TRL.

    Raises:
        ScenarioError: it is wrong, or asks for what a step cannot say; names the line.
    """
    value = parse_yaml(text, path)
    s = Settings(path, _flat(value), _places(text))
    kind = str(s.get("distributed_type") or "FSDP").upper()
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise ScenarioError(f"{s.place('distributed_type')}: distributed_type {kind} is not predicted; use FSDP")
    if s.values.get("fsdp_version") in (1, "1"):
        raise ScenarioError(f"{s.place('fsdp_version')}: FSDP version 1 is not predicted; use fsdp_version: 2")
    if str(s.values.get("mixed_precision")) in ("fp16", "fp8"):
        kind = s.values["mixed_precision"]
        raise ScenarioError(f"{s.place('mixed_precision')}: mixed_precision {kind} is not predicted; use bf16")
    s.refuse(["fsdp_offload_params"], "parameters on the host are not predicted; use false")
    replicate, shard = s.number("dp_replicate_size") or 1, s.number("dp_shard_size", least=-1)
    cp, tp, gpus = s.number("cp_size") or 1, s.number("tp_size") or 1, s.number("num_processes")
    if s.number("sp_size") not in (None, 1):
        raise ScenarioError(f"{s.place('sp_size')}: sequence parallelism of DeepSpeed is not predicted; use cp_size")
    dp = replicate * shard if shard and shard > 0 else None
    local, grown = s.number("per_device_train_batch_size"), s.number("gradient_accumulation_steps")
    replicas = dp or (gpus // (cp * tp) if gpus else None)
    strategy, knobs = (s.one_of("cp_comm_strategy", ROTATIONS) or ROTATIONS["allgather"]) if cp > 1 else (None, {})
    again = s.flag("fsdp_activation_checkpointing", "gradient_checkpointing")
    fields = without_none(
        {
            "framework": "huggingface",
            "model": _model(s),
            "gpus": gpus,
            "context": s.number("max_length", "max_seq_length", "cutoff_len"),
            "sequences": local * (grown or 1) * replicas if local and replicas else None,
            "compile": True if s.flag("torch_compile") else None,
            "offload": "activations" if s.flag("activation_offloading") else None,
            "strategy": strategy,
            "knobs": dict(knobs) or None,
        }
    )
    fields["parallel"] = without_none(
        {
            "tp": tp,
            "cp": cp,
            "dp": dp,
            "replicate": replicate if replicate > 1 else None,
            "batch": local,
            "sharding": "fsdp" if kind == "FSDP" else "none",
            "recompute": "full" if again else "none",
        }
    )
    return Reading(what="configuration of accelerate or TRL", fields=fields, said=tuple(s.said))


def _model(s: Settings) -> str | None:
    name = s.get("model_name_or_path")
    if name is None:
        return None
    known = known_model(str(name))
    if known is None:
        place, hint = s.place("model_name_or_path"), likely(str(name))
        raise ScenarioError(f"{place}: model {name} is not known; {hint}give --model config.json")
    if known.model is None:
        raise ScenarioError(f"{s.place('model_name_or_path')}: {known.refusal()}")
    return known.name


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            found |= _flat(entry)
        else:
            found[str(name).removeprefix(_PREFIX)] = entry
    return found


def _places(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        found.setdefault(line.split(":")[0].strip(" -").removeprefix(_PREFIX), f"line {number}")
    return found


def write(scenario: Scenario, parallel: Parallel, gpus_per_node: int) -> str:
    """accelerate's configuration, and what TRL's ``SFTConfig`` needs beside it, as a comment."""
    nodes, batch = -(-scenario.gpus // gpus_per_node), parallel.batch or sequences_of_a_replica(scenario, parallel)
    length = scenario.context or scenario.num_tokens // (parallel.dp * parallel.microbatches * batch)
    again = str(parallel.recompute == "full").lower()
    offload = ", activation_offloading=True" if scenario.offload else ""
    lines = [
        f"# SFTConfig(max_length={length}, per_device_train_batch_size={batch}, packing=True, bf16=True,",
        f"#   gradient_accumulation_steps={parallel.microbatches}, torch_compile={bool(scenario.compile)}{offload})",
        *([f"# Axolotl: tiled_mlp: true, tiled_mlp_num_shards: {parallel.mlp_chunks}"] * (parallel.mlp_chunks > 1)),
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if parallel.sharding == 'fsdp' else 'MULTI_GPU'}",
        "mixed_precision: bf16",
        f"num_machines: {nodes}",
        f"num_processes: {scenario.gpus}",
    ]
    if parallel.sharding == "fsdp":
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_reshard_after_forward: true",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
            "  fsdp_offload_params: false",
            f"  fsdp_activation_checkpointing: {again}",
            "parallelism_config:",
            f"  {_PREFIX}dp_replicate_size: {parallel.replicate}",
            f"  {_PREFIX}dp_shard_size: {parallel.dp // parallel.replicate}",
            f"  {_PREFIX}tp_size: {parallel.tp}",
            f"  {_PREFIX}cp_size: {parallel.cp}",
        ]
        if parallel.cp > 1:
            lines.append(f"  {_PREFIX}cp_comm_strategy: {rotation(scenario)}")
    return "\n".join(lines) + "\n"
