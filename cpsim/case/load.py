"""Reads scenarios: from the fields of a file, from files of one or many, and from grids of values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cpsim.case.changes import split_name
from cpsim.case.cluster import load_cluster, presets
from cpsim.case.files import explain, read_documents, take_schema
from cpsim.case.scenario import FIELDS, Scenario
from cpsim.case.words import in_fields
from cpsim.errors import ScenarioError, shown


def scenario_from(data: Mapping[str, Any], folder: Path | None = None) -> Scenario:
    """A scenario from the fields of a file.

    Args:
        data: the fields, or what ``cpsim.case.words`` puts into fields.
        folder: where a file of lengths is looked up; None is here.

    Raises:
        ScenarioError: one line that names the field, what was expected, what came and how to mend it.
    """
    fields = take_schema(data, "scenario")
    _refuse_grid(fields)
    fields = in_fields(fields, folder)
    try:
        return Scenario.model_validate(fields)
    except ValidationError as error:
        raise ScenarioError(_counts(fields, folder) or explain(error, FIELDS)) from None


def _counts(fields: Mapping[str, Any], folder: Path | None) -> str | None:
    """What is wrong where GPUs fill no nodes and tokens do not divide among them, and numbers that do both."""
    gpus, tokens, name = (fields.get(name) for name in ("gpus", "tokens", "cluster"))
    if type(gpus) is not int or type(tokens) is not int or not isinstance(name, str) or gpus < 1 or tokens < gpus:
        return None
    try:
        cluster = load_cluster(beside(name, folder or Path()))
    except ScenarioError:
        return None
    nodes = cluster.gpus_per_node
    if gpus <= nodes or gpus % nodes == 0 or tokens % gpus == 0 or cluster.fabric is None:
        return None
    near = [number for number in (gpus // nodes * nodes, -(-gpus // nodes) * nodes) if number]
    both = " or ".join(f"gpus {number} with tokens {round(tokens / number) * number}" for number in near)
    return f"gpus: {gpus} fill no nodes of {nodes}, and {tokens} tokens do not divide by {gpus}; use {both}"


def _refuse_grid(fields: Mapping[str, Any]) -> None:
    """Lists of values to try, for which there is ``cpsim sweep``."""
    if "grid" in fields:
        raise ScenarioError("grid: expected one scenario, got a grid of them; ask `cpsim sweep`")
    for name in FIELDS:
        value, one_is_nested = fields.get(name), name in ("documents", "knobs")
        if isinstance(value, list) and (not one_is_nested or any(isinstance(one, list | Mapping) for one in value)):
            tried = "`cpsim sweep` tries lists that stand under grid"
            raise ScenarioError(f"{name}: expected one value, got the list {shown(value)}; {tried}")


ScenarioLike = Scenario | Mapping[str, Any] | str | Path
"""A case as people give it: a scenario, the fields of one, or the file that holds one."""


def as_scenario(case: ScenarioLike) -> Scenario:
    """The scenario of a case.

    Raises:
        ScenarioError: the fields or the file do not describe one.
    """
    match case:
        case Scenario():
            return case
        case str() | Path():
            return load_scenario(case)
        case fields:
            return scenario_from(fields)


def grid(case: ScenarioLike, over: Mapping[str, Sequence[Any]]) -> list[Scenario | ScenarioError]:
    """Every combination of values of some fields, the last field fastest; the other fields are those of the case.

    Args:
        case: gives the fields that do not vary. ``tokens`` replaces ``tokens_per_gpu`` and the other way round.
        over: field names and their values.

    Returns:
        one entry per combination; an error where the combination makes no sense, so that none is lost.

    Examples:
        >>> case = {"gpus": 4, "cluster": "h200-4", "tokens": 8192, "heads": 32, "kv_heads": 8}
        >>> [(s.gpus, s.strategy) for s in grid(case, {"gpus": [2, 4], "strategy": ["ring", "ulysses"]})]
        [(2, 'ring'), (2, 'ulysses'), (4, 'ring'), (4, 'ulysses')]
    """
    said_once = {"tokens": "tokens_per_gpu", "tokens_per_gpu": "tokens"}
    replaced = {said_once[name] for name in over if name in said_once}
    fields = {name: value for name, value in as_scenario(case).to_dict().items() if name not in replaced}
    cases: list[Scenario | ScenarioError] = []
    for values in product(*over.values()):
        try:
            cases.append(scenario_from(fields | dict(zip(over, values, strict=True))))
        except ScenarioError as error:
            cases.append(error)
    return cases


def load_scenario(path: str | Path) -> Scenario:
    """The one scenario of a YAML or JSON file; files of a cluster, profile and host are looked up beside it.

    Raises:
        ScenarioError: the file is unreadable, holds several scenarios or an invalid one.
    """
    entries = list(load_scenarios(path))
    if len(entries) != 1:
        raise ScenarioError(f"{path}: expected one scenario, got {len(entries)}; use `cpsim sweep` for many")
    if isinstance(entries[0], ScenarioError):
        raise entries[0]
    return entries[0]


def load_scenarios(path: str | Path) -> Iterator[Scenario | ScenarioError]:
    """The scenarios of a file, in order; what is wrong with one is an entry and does not lose the others.

    Args:
        path: JSON Lines (``.jsonl``, ``.ndjson``), or YAML or JSON with one scenario or a list of them.

    Returns:
        One entry per line or item; errors name the line or item.

    Raises:
        ScenarioError: the file as a whole cannot be read.
    """
    file = Path(path)
    return (scenario_of(place, value, file.parent) for place, value in read_documents(file))


def scenario_of(place: str, value: Any | ScenarioError, folder: Path) -> Scenario | ScenarioError:
    """An entry of a file in a folder, where cluster and profile files are looked up; or what is wrong with it."""
    if isinstance(value, ScenarioError):
        return value
    try:
        scenario = scenario_from(value, folder)
    except ScenarioError as error:
        return ScenarioError(f"{place}: {error}")
    named = {name: getattr(scenario, name) for name in ("cluster", "profile", "host")}
    found = {name: beside(value, folder) for name, value in named.items() if isinstance(value, str)}
    return scenario.model_copy(update=found)


def beside(name: str, folder: Path) -> str:
    """A file name relative to the folder of the scenario, where there is such a file; changes of a cluster stay."""
    base, changes = split_name(name)
    if base in presets() or not os.path.isfile(folder / base):
        return name
    return " ".join([str(folder / base), *changes])
