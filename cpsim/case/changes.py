"""What-ifs: fields of a scenario or of its cluster with other values, ``parallel.tp=4``, ``cluster.nic=2x``.

A changed cluster is named by what was changed, ``dgx-h100 nic=2x``, so that scenarios, answers and messages say it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cpsim.case.yaml12 import load
from cpsim.errors import ScenarioError, shown

TIMES: Final = re.compile(r"([0-9]+\.?[0-9]*)x")
"""Twice as much: ``2x``."""
_CHANGE: Final = re.compile(r"\s+(?=[a-z_]+(?:\.[a-z_]+)?=)")


def changed(fields_: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Fields of a scenario with other values.

    Args:
        fields_: of a scenario.
        changes: ``field=value`` each; ``a.b=value`` is a field within a field, ``2x`` twice what is there.

    Raises:
        ScenarioError: a change that says nothing, or of nothing.
    """
    found = dict(fields_)
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not path.strip():
            raise ScenarioError(f"set: expected field=value, e.g. parallel.tp=4 or cluster.nic=2x, got {shown(change)}")
        first, *rest = path.strip().split(".")
        if first == "cluster" and rest:
            found["cluster"] = f"{found.get('cluster', '')} {'.'.join(rest)}={text.strip()}"
        else:
            found = with_value(found, [first, *rest], text.strip(), path.strip())
    return found


def with_value(fields_: Mapping[str, Any], path: list[str], text: str, whole: str) -> dict[str, Any]:
    """A mapping with one value changed, at any depth.

    Args:
        fields_: what there is.
        path: names, the outermost first.
        text: the value as YAML, or how many times what is there.
        whole: what was asked for, for the message.

    Raises:
        ScenarioError: there is nothing to change.
    """
    first, *rest = path
    there = fields_.get(first)
    if rest:
        if there is not None and not isinstance(there, Mapping):
            raise ScenarioError(f"set: {whole}: {first} is {shown(there)}, which has no {'.'.join(rest)}")
        return {**fields_, first: with_value(there or {}, rest, text, whole)}
    if times := TIMES.fullmatch(text):
        if not isinstance(there, int | float) or isinstance(there, bool):
            raise ScenarioError(f"set: {whole}: expected a number to be there, of which {text}, got {shown(there)}")
        many = there * float(times[1])
        return {**fields_, first: int(many) if float(many).is_integer() else many}
    if text in ("", "null", "none") and first != "strategy" and text != "none":
        return {name: value for name, value in fields_.items() if name != first}
    both = {"tokens": "tokens_per_gpu", "tokens_per_gpu": "tokens"}
    return {name: value for name, value in fields_.items() if name != both.get(first)} | {first: _value(text)}


def _value(text: str) -> Any:
    """What a text says as YAML; the text where it is none."""
    try:
        return load(text)
    except ValueError:
        return text


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """A cluster's name or path, and what is changed of it."""
    base, *changes = _CHANGE.split(name.strip())
    return base, tuple(changes)
