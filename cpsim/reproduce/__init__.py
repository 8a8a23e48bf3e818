"""Published studies of others, predicted as they were measured: ``cpsim reproduce NAME``.

What was published lies in ``data``, with its source. A study is a module of its own.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).with_name("data")


def published_lines(name: str) -> list[dict[str, str]]:
    """Lines of a table in ``data``, by the names of its columns; comments, which say where it is from, are left out."""
    lines = DATA.joinpath(name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
