"""Files that people write: the one place that reads them, strictly, with one-line errors that say how to mend them.

A file is read as UTF-8, with or without a byte order mark. Pipes, devices and whatever is too large for its kind are
refused before they are read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from cpsim.errors import CpsimError, ProfileError, ScenarioError, cut, nearest, shown, unknown_name
from cpsim.runtime.limits import MAX_DEPTH

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

SCHEMA = 1
"""Schema of the scenario and cluster files that this version reads."""
MAX_BYTES: Final = 200_000_000
"""Largest file that is read line by line."""
MAX_DOCUMENT_BYTES: Final = 20_000_000
"""Longest line, and largest file that is one document."""
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move a terminal's cursor, turn its text round or cannot be encoded; tabs and new lines are none."""


def read_text(path: Path) -> str:
    """Text of a file that is one document.

    Raises:
        ScenarioError: it is missing, no file, too large or not UTF-8.
    """
    with _opened(path, MAX_DOCUMENT_BYTES) as file:
        return _decoded(file.read(MAX_DOCUMENT_BYTES + 1), str(path))


def read_lines(path: Path) -> Iterator[tuple[int, str | ScenarioError]]:
    """Lines of a file with their numbers, read one by one; an error where a line is not UTF-8.

    Raises:
        ScenarioError: the file is missing, no file or too large.
    """
    with _opened(path, MAX_BYTES) as file:
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ScenarioError(
                    f"{path} line {number}: expected at most {MAX_DOCUMENT_BYTES // 10**6} MB, got more"
                )
            try:
                yield number, _decoded(line.rstrip(b"\r\n"), f"{path} line {number}")
            except ScenarioError as error:
                yield number, error


@contextmanager
def _opened(path: Path, most: int) -> Iterator[BinaryIO]:
    """A file of at most so many bytes; what is none, e.g. a pipe, is not opened, which might wait for ever."""
    try:
        about = path.stat()
        if not S_ISREG(about.st_mode):
            got = "a folder" if S_ISDIR(about.st_mode) else "a pipe or device; write its content into a file first"
            raise ScenarioError(f"{path}: cannot be read: expected a file, got {got}")
        if about.st_size > most:
            size = f"{about.st_size / 1e6:.0f} MB; cut it into several"
            raise ScenarioError(f"{path}: cannot be read: expected at most {most // 10**6} MB, got {size}")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        where = f"byte 0x{data[error.start]:02x} at column {column}" + (f" of line {line}" if line > 1 else "")
        raise ScenarioError(f"{place}: expected UTF-8 text, got {where}; save it as UTF-8") from None


@contextmanager
def as_profile_error(after: str = "") -> Iterator[None]:
    """What is wrong with a file is wrong with a measurement or profile; text `after` says what may have happened."""
    try:
        yield
    except ProfileError:
        raise
    except CpsimError as error:
        raise ProfileError(f"{error}{after}") from None


def read_documents(path: Path) -> list[tuple[str, Any | ScenarioError]]:
    """The entries of a file, each with its place: lines of JSON Lines, items of a list, or the whole file.

    Args:
        path: ``.jsonl`` and ``.ndjson`` are read line by line, ``.json`` as JSON, everything else as YAML.

    Returns:
        (place, value) pairs; the value is an error where a line is not JSON.
    """
    if path.suffix in (".jsonl", ".ndjson"):
        return [(place, value) for place, value in read_json_lines(path)]
    value = read_document(path)
    if isinstance(value, list):
        return [(f"{path} item {i}", item) for i, item in enumerate(value, start=1)]
    return [(str(path), value)]


def read_document(path: Path) -> Any:
    """The value that a whole file holds, as JSON or YAML by its name."""
    parse = parse_json if path.suffix == ".json" else parse_yaml
    return parse(read_text(path), str(path))


def read_json_lines(path: Path) -> Iterator[tuple[str, Any | ScenarioError]]:
    """Place and value of every line that is not empty; the value is an error where it is not JSON."""
    for number, line in read_lines(path):
        place = f"{path} line {number}"
        if isinstance(line, ScenarioError):
            yield place, line
        elif line.strip():
            try:
                yield place, parse_json(line, place)
            except ScenarioError as error:
                yield place, error


def parse_json(text: str, place: str) -> Any:
    """JSON without duplicate keys."""
    try:
        return _checked(json.loads(text, object_pairs_hook=_unique), place)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ScenarioError(f"{place}: not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise ScenarioError(f"{place}: not valid JSON: {_TOO_DEEP}") from None
    except ScenarioError:
        raise
    except ValueError as error:  # duplicates; integers of thousands of digits
        why = "expected numbers of a few digits, got one of thousands" if "int_max_str" in str(error) else error
        raise ScenarioError(f"{place}: not valid JSON: {why}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{cut(twice, 60)} is given twice; keep one")
    return mapping


def parse_yaml(text: str, place: str) -> Any:
    """YAML 1.2 without duplicate keys; see ``cpsim.case.yaml12``."""
    import yaml

    from cpsim.case import yaml12

    try:
        return _checked(yaml12.load(text), place)
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ScenarioError(f"{place}: not valid YAML: {cut(error.problem or 'unreadable', 200)}{line}") from None
    except ScenarioError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # characters that YAML does not know, endless numbers
        raise ScenarioError(f"{place}: not valid YAML: {error}") from None


_TOO_DEEP: Final = f"expected at most {MAX_DEPTH} levels of lists and mappings, got more"


_LOOKED_AT: Final = frozenset((str, list, dict))


def _checked(value: Any, place: str) -> Any:
    """A value of a few levels whose texts any terminal shows as they are.

    Raises:
        ScenarioError: it is another.
    """
    level, depth = [one for one in [value] if type(one) in _LOOKED_AT], 0
    while level:
        if depth > MAX_DEPTH:
            raise ScenarioError(f"{place}: {_TOO_DEEP}")
        deeper: list[Any] = []
        for entry in level:
            if type(entry) is str:
                if not entry.isprintable() and (found := _CONTROL.search(entry)):
                    around = entry[max(0, found.start() - 20) : found.start() + 20]
                    raise ScenarioError(f"{place}: expected text without control characters, got {shown(around)}")
            elif type(entry) is dict:
                deeper += [one for pair in entry.items() for one in pair if type(one) in _LOOKED_AT]
            else:
                deeper += [one for one in entry if type(one) in _LOOKED_AT]
        level, depth = deeper, depth + 1
    return value


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


_WORDS: Final = {
    "a valid integer": "a whole number",
    "a valid dictionary": "a mapping",
    "a valid boolean": "true or false",
    "String should have ": "",
}


def _as_whole(problem: Mapping[str, Any]) -> str:
    """How to write a whole number that is there as another kind of value, such as 1e6 or '1_000'."""
    value = problem["input"]
    if problem["type"] == "int_type" and isinstance(value, str) and len(value) < 30:
        digits = re.sub(r"(?<=\d)[_,](?=\d)", "", value)
        return f"; write {digits}" if digits.isdecimal() else ""
    whole = isinstance(value, float) and abs(value) < 1e18 and value.is_integer()
    return f"; write {int(value)}" if whole and problem["type"] == "int_type" else ""


def explain(error: ValidationError, fields: Iterable[str]) -> str:
    """The first problem of a validation in one line: field, expected, got, how to mend it.

    Args:
        error: what pydantic found.
        fields: valid top-level field names, to name the nearest.
    """
    problems = _problems(error)
    more = len(problems) - 1
    suffix = f" (and {more} more problem{'s' if more > 1 else ''})" if more else ""
    return _in_words(problems[0], fields) + suffix


def explain_all(error: ValidationError, fields: Iterable[str]) -> list[str]:
    """Every problem of a validation, fields with the same one together; arguments as of ``explain``."""
    found: dict[str, list[str]] = {}
    for problem in _problems(error):
        where, _, what = _in_words(problem, fields).partition(": ")
        found.setdefault(what, []).append(where)
    several = {"missing; add it": "missing; add them", "unknown field; remove it": "unknown fields; remove them"}
    return [f"{', '.join(where)}: {several.get(what, what) if where[1:] else what}" for what, where in found.items()]


TOLD: Final = 350
"""Characters of a message about several problems."""
_ADVICE: Final = re.compile("; (?!got )")


def together(problems: Sequence[str]) -> str:
    """All problems in one line of at most ``TOLD`` characters.

    Where there are too many, the longest are told without their advice, then by the names of their fields alone.

    Args:
        problems: each as ``field: what is wrong; advice``.
    """
    told, named = list(problems), list[str]()
    for longest in sorted(told, key=len, reverse=True):
        if len(_in_line(told, named)) > TOLD:
            told[told.index(longest)] = _ADVICE.split(longest)[0]
    while len(_in_line(told, named)) > TOLD and told[1:]:
        told.remove(longest := max(told, key=len))
        named.append(longest.partition(": ")[0])
    return cut(_in_line(told, named), TOLD)


def _in_line(told: Sequence[str], named: Sequence[str]) -> str:
    return "; ".join([*told, f"wrong, too: {', '.join(named)}"] if named else told)


def _problems(error: ValidationError) -> list[ErrorDetails]:
    """What is wrong, missing fields last."""
    return sorted(error.errors(include_url=False), key=lambda entry: entry["type"].startswith("missing"))


def _in_words(problem: ErrorDetails, fields: Iterable[str]) -> str:
    where = ".".join(cut(str(part), 60) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument" if len(problem["loc"]) == 1:
            return f"{where}: unknown field; {nearest(where, fields)}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{where}: unknown field; remove it"
        case "missing" | "missing_argument":
            return f"{where}: missing; add it"
        case "literal_error":
            names = re.findall(r"'([^']*)'", str(problem["ctx"]["expected"]))
            return unknown_name(where, problem["input"], names)
        case "value_error":
            return ": ".join(filter(None, [where, str(problem["ctx"]["error"])]))
    expected = problem["msg"].removeprefix("Input should be ")
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    return f"{where}: expected {expected}, got {shown(problem['input'])}{_as_whole(problem)}"
