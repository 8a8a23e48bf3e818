"""How well steps of every framework have been predicted: `cpsim/data/checked.json`, which answers of `advise` quote.

    python docs/checked.py

Errors are those of the ledger of published runs, `studies/public/ledger.csv`: predicted over published, less one.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cpsim.runtime.files import write  # noqa: E402
from studies.public.ledger import ATTENTION, LEDGER  # noqa: E402
from studies.public.readers import rows  # noqa: E402
from studies.public.row import Row  # noqa: E402

OUT: Final = ROOT / "cpsim" / "data" / "checked.json"
Checked = tuple[Row, float]
"""A published step and its error."""


def checked() -> dict[str, list[Checked]]:
    """Steps with errors, by framework, those with experts apart."""
    with LEDGER.open(encoding="utf-8", newline="") as file:
        errors = {line["row"]: line["error_percent"] for line in csv.DictReader(file) if line["quantity"] == "time"}
    found: dict[str, list[Checked]] = {}
    for row in rows():
        error = errors.get(row.key)
        if row.kind in ATTENTION or row.fields is None or not error:
            continue
        kind = f"{row.fields.get('framework', 'megatron')}{' with experts' if row.routed else ''}"
        found.setdefault(kind, []).append((row, float(error) / 100))
    return found


def summary(some: list[Checked]) -> dict[str, Any]:
    """Errors of some steps, and what they are of."""
    errors = [error for _, error in some]
    lengths = [int(row.fields["context"]) for row, _ in some if row.fields and row.fields.get("context")]
    return {
        "steps": len(some),
        "mean_error": round(mean(map(abs, errors)), 3),
        "worst_error": round(max(map(abs, errors)), 3),
        "sign": round(mean(errors), 3),
        "gpus": [min(row.gpus for row, _ in some), max(row.gpus for row, _ in some)],
        "context": [min(lengths, default=0), max(lengths, default=0)],
        "cp": max(row.cp for row, _ in some),
    }


def main() -> None:
    """Reads, sums up, writes."""
    found = {kind: summary(some) for kind, some in sorted(checked().items())}
    text = {"source": "python docs/checked.py, of published steps in studies/public/ledger.csv", "steps": found}
    write(OUT, json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
