"""How well steps of every framework have been predicted: `cpsim/data/checked.json`, which answers of `advise` quote.

    python docs/checked.py

All published steps are predicted anew; see `studies/public_steps`. An error is predicted over published, less one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from studies.public_steps.compare import Compared, compared  # noqa: E402

from cpsim.runtime.files import write  # noqa: E402

OUT: Final = ROOT / "cpsim" / "data" / "checked.json"


def kind_of(one: Compared) -> str:
    """Framework of a row, and whether its model has experts."""
    scenario = one.row.scenario
    assert scenario is not None
    experts = " with experts" if scenario._has_experts else ""
    return f"{scenario.framework or 'megatron'}{experts}"


def summary(rows: list[Compared]) -> dict[str, Any]:
    """Errors of some rows, and what they are of."""
    scenarios = [one.row.scenario for one in rows if one.row.scenario]
    lengths = [scenario.context or scenario.num_tokens // scenario.gpus for scenario in scenarios]
    return {
        "steps": len(rows),
        "mean_error": round(mean(abs(one.error) for one in rows), 3),
        "worst_error": round(max(abs(one.error) for one in rows), 3),
        "sign": round(mean(one.error for one in rows), 3),
        "gpus": [min(s.gpus for s in scenarios), max(s.gpus for s in scenarios)],
        "context": [min(lengths), max(lengths)],
        "cp": max((s.parallel.cp or 1) if s.parallel else 1 for s in scenarios),
    }


def main() -> None:
    """Predict, compare, write."""
    kinds: dict[str, list[Compared]] = {}
    for one in compared():
        if one.quantity == "time":
            kinds.setdefault(kind_of(one), []).append(one)
    found = {kind: summary(rows) for kind, rows in sorted(kinds.items())}
    text = {"source": "python docs/checked.py, of published steps in studies/public_steps", "steps": found}
    write(OUT, json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
