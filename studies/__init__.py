"""Published studies of others, predicted as they were measured: ``python -m studies NAME``.

Every study has a folder: what was published with its source, facts of the code that ran, and what comes out here.
"""

from __future__ import annotations

import csv
from pathlib import Path

from studies import code  # noqa: F401  (adds its implementations to those that scenarios may name)


def published_lines(path: Path) -> list[dict[str, str]]:
    """Lines of a published table by the names of its columns; comments, which say where it is from, are left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
