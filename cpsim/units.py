"""Quantities: the units in which people write numbers, and between which values lies what exists.

Everywhere else numbers are in seconds, bytes, FLOP and tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema, core_schema

from cpsim.errors import NotMeasuredError, shown

CLOSED: Final = ConfigDict(extra="forbid", allow_inf_nan=False)
"""How pydantic reads the classes of files: no other fields; quantities and flags refuse other types themselves."""
Flag = Annotated[bool, Strict()]

MS_PER_S: Final = 1e3

_THOUSANDS: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PARTS: Final = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "n": 1e-9, "p": 1e-12}


def _scaled(names: Mapping[str, float], prefixes: Mapping[str, float]) -> dict[str, float]:
    return {prefix + name: factor * unit for prefix, factor in prefixes.items() for name, unit in names.items()}


UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "s": _scaled({"s": 1.0}, _PARTS),
    "bytes": _scaled({"B": 1.0, "b": 1 / 8, "bit": 1 / 8}, _THOUSANDS | _BINARY) | {"bytes": 1.0},
    "bytes/s": _scaled({"B/s": 1.0, "Bps": 1.0, "b/s": 1 / 8, "bit/s": 1 / 8, "bps": 1 / 8}, _THOUSANDS | _BINARY)
    | {"bytes/s": 1.0},
    "FLOP/s": _scaled({"FLOP/s": 1.0, "FLOPS": 1.0, "FLOPs": 1.0, "flop/s": 1.0}, _THOUSANDS),
    "Hz": _scaled({"Hz": 1.0}, _THOUSANDS),
    "W": _scaled({"W": 1.0}, _THOUSANDS | _PARTS),
    "tokens": {"k": 2.0**10, "K": 2.0**10, "Ki": 2.0**10, "M": 2.0**20, "Mi": 2.0**20, "B": 1e9, "G": 1e9, "T": 1e12},
}
"""What may stand behind a number, and how much it is, by the unit that a field is in. ``b`` is a bit, ``B`` a byte."""
_EXAMPLES: Final = {
    "s": "3 us",
    "bytes": "80 GiB",
    "bytes/s": "50 GB/s' or '400 Gb/s",
    "FLOP/s": "989 TFLOP/s",
    "tokens": "128k",
}
_TEXT: Final = re.compile(r"([-+]?[0-9][0-9_]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*([^\s\d.].{0,20})")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a number of a file measures; annotates the type of the field, and pydantic reads it by this.

    Examples:
        >>> Quantity("bytes/s", 1e5, 1e16).read("400 Gb/s")
        50000000000
    """

    unit: str
    low: float
    """The smallest value that exists, and three orders of magnitude less."""
    high: float
    """The largest value that exists, and three orders of magnitude more."""

    def read(self, value: object) -> float:
        """The number, as it is or of a text with a unit; whole ones as `int`.

        Raises:
            ValueError: it is none, its unit is not known, or nothing that exists is like it.
        """
        number = self._in_unit(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, int | float) or not self.low <= number <= self.high:
            limits = f"{self.low:g} to {self.high:g} {self.unit}".rstrip()
            raise ValueError(f"expected {limits}, got {shown(value)}{self._hint()}")
        return int(number) if isinstance(number, float) and isinstance(value, str) and number.is_integer() else number

    def _in_unit(self, text: str) -> float | None:
        known = UNITS.get(self.unit, {})
        found = _TEXT.fullmatch(text.strip()[:80])
        if found is None or found[2] not in known or math.isinf(float(found[1])):
            return None
        return float(f"{float(found[1]) * known[found[2]]:.15g}")  # 39.7 GB/s is 39.7e9, not 39700000000.000004

    def _hint(self) -> str:
        return f"; units are read, too: '{_EXAMPLES[self.unit]}'" if self.unit in _EXAMPLES else ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))


TOKENS: Final = Quantity("tokens", 1, 1e18)
"""Of a sequence, a step or a whole training: k and M are powers of two, as context lengths are said; B and T are 10^9
and 10^12."""
Seconds = Annotated[float, Quantity("s", 0, 1e4)]
"""A time of a kernel, message, launch or iteration."""
Rate = Annotated[float, Quantity("bytes/s", 1e5, 1e16)]
"""Of a link, one port or all of a node, or of a memory: 1 Gbit Ethernet is 1e8, NVLink 5 is 1e12, a memory 1e13."""
MEASURED_S: Final = Quantity("s", 1e-9, 1e4)
"""A time that was measured, which is never 0."""
SecondsPerByte = Annotated[float, Quantity("s per byte", 0, 1e-6)]
Share = Annotated[float, Quantity("", 0, 1)]
Factor = Annotated[float, Quantity("", 1e-3, 1e3)]
"""A time or rate relative to another."""


T = TypeVar("T")


class Entries(dict[str, T]):
    """What a file says by name; a name that it lacks is what is wrong with the file."""

    def __missing__(self, name: str) -> T:
        raise NotMeasuredError(f"the profile lacks {shown(name)}, which this needs; it has {shown([*self])}")


ByName = Annotated[Mapping[str, T], AfterValidator(Entries)]


def format_bytes(nbytes: float) -> str:
    """Bytes as text in powers of ten, e.g. ``33.6 MB``."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= factor:
            return f"{_three_digits(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def format_count(number: float) -> str:
    """A count as text, e.g. ``786,432``."""
    return f"{number:,.0f}"


def short_count(number: float) -> str:
    """A count in three digits, e.g. ``7.26M``."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{_three_digits(number / factor)}{unit}"
    return f"{number:.0f}"


def number_or_text(text: str) -> int | float | str:
    """The number that people typed, or their text where it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
