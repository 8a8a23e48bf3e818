"""What a command says: on any terminal, into any pipe, whatever its encoding and width."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Final

NARROWEST: Final = 40
WIDEST: Final = 1000
"""Columns of a terminal that tables are laid out for."""


def prepare() -> None:
    """Makes the streams of this process fit for any text, and its environment for libraries that lay it out.

    What an encoding lacks is replaced. A stream that is closed is as if nobody read it: otherwise the next file that
    is opened would get its number, and what is said.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
        if isinstance(stream := getattr(sys, name), TextIOWrapper) and number:
            stream.reconfigure(errors="replace")
    if (asked := os.environ.get("COLUMNS")) is not None:
        if asked.isdecimal() and int(asked):
            os.environ["COLUMNS"] = str(min(max(int(asked), NARROWEST), WIDEST))
        else:
            del os.environ["COLUMNS"]


def say(line: str) -> None:
    """A line on stderr; where that cannot be written to, nobody hears it and nothing else happens."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence("stderr")


def silence(name: str) -> None:
    """From now on nobody reads a stream that cannot be written to: it is no error when the process ends, either."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), getattr(sys, name).fileno())
