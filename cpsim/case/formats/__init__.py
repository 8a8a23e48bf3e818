"""Files of other tools, read into fields of a scenario, and written for what was found.

A reader is a function of a file's text and path; which one reads a file, its name and content say. What a framework
takes is written by the module that reads it, and read back by it before anybody sees it. Covered by
tests/test_formats.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cpsim.case.cluster import load_cluster
from cpsim.case.files import parse_json, parse_yaml, read_text
from cpsim.case.formats import accelerate, huggingface, megatron, torchtitan
from cpsim.case.formats.reading import Reading
from cpsim.case.parallel import Parallel
from cpsim.case.resolve import parallel_of
from cpsim.case.scenario import ParallelSection, Scenario
from cpsim.errors import CpsimError, ScenarioError

__all__ = ["Reading", "check_written", "launch_text", "read_foreign"]

_KNOWN: Final = (
    "a scenario, config.json, torchtitan's TOML, Megatron's arguments, a recipe of Megatron-Bridge or NeMo, or a "
    "configuration of accelerate or TRL"
)


def read_foreign(path: Path) -> Reading | None:
    """What a file of another tool says; None where it is a scenario, or a list of them.

    Raises:
        ScenarioError: it is no file that we know, or is wrong; names the line.
    """
    name, text = str(path), read_text(path)
    if path.suffix == ".toml":
        return torchtitan.read(text, name)
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch", ".txt", ".args", ".cfg", ".conf"):
        if not megatron.is_arguments(text):
            raise ScenarioError(f"{name}: expected Megatron's arguments, e.g. --num-layers 32; or {_KNOWN}")
        return megatron.read(text, name)
    if path.suffix in (".jsonl", ".ndjson"):
        return None
    value = parse_json(text, name) if path.suffix == ".json" else _yaml(text, name)
    if huggingface.is_config(value):
        return huggingface.read(text, name)
    if accelerate.is_config(value):
        return accelerate.read(text, name)
    if isinstance(value, Mapping) and "gpus" not in value and megatron.is_recipe(value):
        return megatron.read_recipe(text, name)
    if isinstance(value, str) and megatron.is_arguments(text):
        return megatron.read(text, name)
    return None


def _yaml(text: str, path: str) -> Any:
    """A YAML value; the text where arguments of a script are none."""
    try:
        return parse_yaml(text, path)
    except CpsimError:
        if megatron.is_arguments(text):
            return text
        raise


def launch_text(scenario: Scenario, parallel: Parallel) -> str:
    """What to paste into the framework of a scenario so that it runs so.

    Raises:
        ScenarioError: the framework has no words for it; says which.
    """
    match scenario.framework:
        case "megatron" | None:
            return megatron.write(scenario, parallel)
        case "huggingface":
            return accelerate.write(scenario, parallel, load_cluster(scenario.cluster).gpus_per_node)
        case _:
            return torchtitan.write(scenario, parallel)


def check_written(text: str, scenario: Scenario, parallel: Parallel) -> tuple[str, ...]:
    """What our own readers make of a text that was written, where it is not what was meant; nothing where it is.

    Compared are degrees, sharding, recomputation, strategy, and its knobs.
    """
    reader = {"huggingface": accelerate.read, "megatron": megatron.read, None: megatron.read}
    found = reader.get(scenario.framework, torchtitan.read)(text, "written")
    section = ParallelSection(**found.fields.get("parallel", {}))
    again = parallel_of(section, scenario.gpus, scenario.num_sequences, sharding=parallel.sharding)
    wrong = [
        f"{name}: {getattr(again, name)} instead of {getattr(parallel, name)}"
        for name in ("tp", "pp", "cp", "dp", "ep", "virtual_pp", "replicate", "sharding", "recompute", "microbatches")
        if getattr(again, name) != getattr(parallel, name)
    ]
    strategy = found.fields.get("strategy", "none")
    return (*wrong, *([f"strategy: {strategy}"] if strategy != (scenario.strategy or "none") else []))
