"""YAML 1.2 from the events of PyYAML's parser: its core schema, no more aliases, levels and values than files need.

PyYAML itself reads YAML 1.1, in which 010000 is octal, 1:08:16 a number to the base of 60 and `no` is false; and it
follows aliases of aliases to any size.

Reference: YAML 1.2.2, section 10.3.2 (tag resolution of the core schema).
Differs: no tags but those of the core schema; keys are plain values, each given once; numbers have 40 digits at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from cpsim.runtime.limits import MAX_DEPTH

MAX_VALUES: Final = 500_000
"""Values of a document; what an alias stands for counts again."""
MAX_DIGITS: Final = 40

_CORE: Final = "tag:yaml.org,2002:"
_NULL: Final = ("", "~", "null", "Null", "NULL")
_BOOL: Final = {word: value for value in (True, False) for word in (str(value), str(value).lower(), str(value).upper())}
_INT: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_ENDLESS: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def load(text: str) -> Any:
    """The value of a text with one YAML document, or None where it has none.

    Raises:
        yaml.YAMLError, ValueError: it is not YAML, or goes beyond the limits above.
    """
    return _Reader(text).document()


class _Reader:
    def __init__(self, text: str) -> None:
        self._events: Iterator[Event] = yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self._anchors: dict[str, tuple[Any, int]] = {}
        """Value of every anchor, and how many values it consists of."""
        self._count = 0

    def document(self) -> Any:
        found = None
        for event in self._events:
            match event:
                case DocumentStartEvent() if self._count:
                    raise _problem(event, "expected one document, got a second")
                case ScalarEvent() | CollectionStartEvent() | AliasEvent():
                    found = self._value(event, 0)
        return found

    def _value(self, event: Any, depth: int) -> Any:
        before, self._count = self._count, self._count + 1
        if depth > MAX_DEPTH:
            raise _problem(event, f"expected at most {MAX_DEPTH} levels, got more")
        match event:
            case AliasEvent():
                value = self._alias(event)
            case ScalarEvent():
                value = _scalar(event)
            case CollectionStartEvent() if event.tag not in (None, "!", _CORE + "seq", _CORE + "map"):
                raise _problem(event, f"expected no tag, got {event.tag[:60]}")
            case SequenceStartEvent():
                value = [self._value(entry, depth + 1) for entry in self._until(SequenceEndEvent)]
            case _:
                value = self._mapping(depth)
        if self._count > MAX_VALUES:
            raise _problem(event, f"expected at most {MAX_VALUES} values, aliases (*) written out, got more")
        if event.anchor is not None and not isinstance(event, AliasEvent):
            self._anchors[event.anchor] = value, self._count - before
        return value

    def _alias(self, event: AliasEvent) -> Any:
        if event.anchor not in self._anchors:
            raise _problem(event, f"expected an alias of what stands before it, got *{event.anchor}")
        value, count = self._anchors[event.anchor]
        self._count += count
        return value

    def _mapping(self, depth: int) -> dict[Any, Any]:
        value: dict[Any, Any] = {}
        for event in self._until(MappingEndEvent):
            key = self._value(event, depth + 1)
            if isinstance(key, list | dict):
                raise _problem(event, "expected a plain name, got a list or a mapping as a key")
            if key == "<<":
                raise _problem(event, "merge keys (<<) are not part of YAML 1.2; write the fields out")
            if key in value:
                raise _problem(event, f"{key} is given twice; keep one")
            value[key] = self._value(next(self._events), depth + 1)
        return value

    def _until(self, end: type[Event]) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event


def _scalar(event: ScalarEvent) -> Any:
    if event.tag in (None, "!", _CORE + "str"):
        return _plain(event.value) if event.tag is None and event.implicit[0] else event.value
    value = _plain(event.value)
    kinds = {"null": type(None), "bool": bool, "int": int, "float": float}
    if type(value) is not kinds.get(event.tag.removeprefix(_CORE)):
        raise _problem(event, f"expected no tag or one of null, bool, int, float, str that fits, got {event.tag[:60]}")
    return value


def _plain(text: str) -> Any:
    """What a text without quotes stands for in the core schema."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return whole_number(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "", 1)) if _ENDLESS.fullmatch(text) else text


def whole_number(text: str) -> int:
    """The number that a text writes out, in decimal, or in octal after 0o or hexadecimal after 0x.

    Raises:
        ValueError: it has too many digits to be meant.
    """
    if len(text) > MAX_DIGITS:
        raise ValueError(f"expected numbers of at most {MAX_DIGITS} digits, got {text[:20]}... of {len(text)}")
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _problem(event: Any, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=event.start_mark)
