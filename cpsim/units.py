"""Human units and numbers, for the command line and pictures only; everywhere else: seconds, bytes, FLOP and tokens."""

from __future__ import annotations

from typing import Final

MS_PER_S: Final = 1e3


def format_bytes(nbytes: float) -> str:
    """Bytes as text in powers of ten, e.g. ``33.6 MB``."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= factor:
            return f"{_three_digits(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def format_count(number: float) -> str:
    """A count as text, e.g. ``786,432``."""
    return f"{number:,.0f}"


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
