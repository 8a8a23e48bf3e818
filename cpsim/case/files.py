"""Files that people write: strict reading of YAML and JSON, and one-line errors that say how to mend them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsim.errors import ScenarioError, nearest, shown, unknown_name

if TYPE_CHECKING:
    from pydantic import ValidationError

SCHEMA = 1
"""Schema of the scenario and cluster files that this version reads."""


def read_text(path: Path) -> str:
    """Text of a file.

    Raises:
        ScenarioError: it is missing, a folder, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{path}: expected UTF-8 text (YAML, JSON or JSON Lines), got binary data") from None


def read_documents(path: Path) -> list[tuple[str, Any | ScenarioError]]:
    """The entries of a file, each with its place: lines of JSON Lines, items of a list, or the whole file.

    Args:
        path: ``.jsonl`` and ``.ndjson`` are read line by line, ``.json`` as JSON, everything else as YAML.

    Returns:
        (place, value) pairs; the value is an error where a line is not JSON.
    """
    text = read_text(path)
    if path.suffix in (".jsonl", ".ndjson"):
        numbered = enumerate(text.split("\n"), start=1)
        return [(f"{path} line {i}", _line(line, f"{path} line {i}")) for i, line in numbered if line.strip()]
    value = parse_json(text, str(path)) if path.suffix == ".json" else parse_yaml(text, str(path))
    if isinstance(value, list):
        return [(f"{path} item {i}", item) for i, item in enumerate(value, start=1)]
    return [(str(path), value)]


def _line(text: str, place: str) -> Any | ScenarioError:
    try:
        return parse_json(text, place)
    except ScenarioError as error:
        return error


def parse_json(text: str, place: str) -> Any:
    """JSON without duplicate keys."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ScenarioError(f"{place}: not valid JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:  # duplicates, endless integers, endless nesting
        raise ScenarioError(f"{place}: not valid JSON: {_one_line(str(error))}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"{twice} is given twice; keep one")
    return mapping


def parse_yaml(text: str, place: str) -> Any:
    """YAML (safe subset) without duplicate keys; ``1e9`` is a number, as in YAML 1.2."""
    import yaml

    try:
        return yaml.load(text, _yaml_loader())
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = _one_line(error.problem or "unreadable")
        raise ScenarioError(f"{place}: not valid YAML: {problem}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # impossible dates, endless nesting
        raise ScenarioError(f"{place}: not valid YAML: {_one_line(str(error))}") from None


@cache
def _yaml_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    problem = f"{key.value} is given twice; keep one"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def take_schema(value: Any, what: str) -> dict[str, Any]:
    """A mapping without its ``schema`` key, which must be one that this version reads.

    Args:
        value: what a file holds.
        what: what it should describe, for the message.
    """
    if not isinstance(value, dict):
        raise ScenarioError(f"expected the fields of a {what}, e.g. 'gpus: 96', got {shown(value)}")
    for key in ("schema", "version"):
        if key in value and (value[key] != SCHEMA or isinstance(value[key], bool)):
            raise ScenarioError(
                f"{key}: expected {SCHEMA}, got {shown(value[key])}; "
                f"this cpsim reads schema {SCHEMA} only: update cpsim for newer files"
            )
    return {key: entry for key, entry in value.items() if key not in ("schema", "version")}


def explain(error: ValidationError, fields: Iterable[str]) -> str:
    """The first problem of a validation in one line: field, expected, got, how to mend it.

    Args:
        error: what pydantic found.
        fields: valid top-level field names, to name the nearest.
    """
    problems = sorted(error.errors(include_url=False), key=lambda entry: entry["type"].startswith("missing"))
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    got = shown(first["input"])
    match first["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument" if len(first["loc"]) == 1:
            message = f"{where}: unknown field; {nearest(where, fields)}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            message = f"{where}: unknown field; remove it"
        case "missing" | "missing_argument":
            message = f"{where}: missing; add it"
        case "literal_error":
            names = re.findall(r"'([^']*)'", str(first["ctx"]["expected"]))
            message = unknown_name(where, first["input"], names)
        case "value_error":
            message = ": ".join(filter(None, [where, str(first["ctx"]["error"])]))
        case _:
            expected = first["msg"].removeprefix("Input should be ")
            expected = expected.replace("a valid integer", "a whole number").replace("a valid dictionary", "a mapping")
            message = f"{where}: expected {expected}, got {got}"
    more = len(problems) - 1
    suffix = f" (and {more} more problem{'s' if more > 1 else ''})" if more else ""
    return _one_line(message) + suffix


def _one_line(text: str) -> str:
    return " ".join(text.split())
