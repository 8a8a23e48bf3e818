"""How well predictions have been checked: `cpsim/data/checked.json`, sums that answers of `advise` quote, and
`cpsim/data/validation.json`, all that was compared, which the explorer draws.

    python docs/checked.py

Errors are predicted over measured, less one: of published runs those of the ledger, `studies/public/ledger.csv`, of our
own machines those of `docs/runs.html`.
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

from cpsim.case.resolve import model_of  # noqa: E402
from cpsim.runtime.files import write  # noqa: E402
from studies.public.ledger import ATTENTION, LEDGER  # noqa: E402
from studies.public.readers import rows  # noqa: E402
from studies.public.row import Row  # noqa: E402

OUT: Final = ROOT / "cpsim" / "data" / "checked.json"
ROWS: Final = ROOT / "cpsim" / "data" / "validation.json"
RUNS: Final = ROOT / "docs" / "runs.html"
COLUMNS: Final = ("group", "what", "gpu", "gpus", "cp", "context", "billions", "seconds", "error")
"""Of all that was compared: whose code and what; seconds as measured."""
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


def own_runs() -> list[dict[str, Any]]:
    """Runs of our machines that no fit reads, as `docs/runs.html` has them, by column."""
    _, _, text = RUNS.read_text(encoding="utf-8").partition("const data = ")
    data, _ = json.JSONDecoder().raw_decode(text)
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def attention(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of attention of a millisecond or more by GPU and by how many of them: one, several of a node, or nodes
    that are emulated."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        if run["regime"] in ("ours", "others", "emulated nodes") and run["measured ms"] >= 1:
            size = "nodes" if run["regime"] == "emulated nodes" else "one" if run["GPUs"] == 1 else "node"
            groups.setdefault(run["machine"][:4], {}).setdefault(size, []).append(run)
    return {gpu: {size: errors_of(some) for size, some in sizes.items()} for gpu, sizes in sorted(groups.items())}


def errors_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A sum of runs."""
    errors = [abs(run["error %"]) / 100 for run in runs]
    return {
        "runs": len(runs),
        "gpus": max(run["GPUs"] for run in runs),
        "mean_error": round(mean(errors), 3),
        "worst_error": round(max(errors), 3),
    }


def everything(runs: list[dict[str, Any]], steps: dict[str, list[Checked]]) -> list[list[Any]]:
    """All that was compared, as rows of ``COLUMNS``; context and billions of parameters are 0 where there are none."""
    names = {"ours": "cpsim", "others": "other code"}
    found = [
        [
            names.get(run["regime"], run["regime"]),
            " ".join(filter(None, (run["code"], run["strategy"], run["kernel"], run["mask"], run["pass"]))),
            run["machine"][:4].upper(),
            run["GPUs"],
            run["GPUs"],
            run["tokens per GPU"] * run["GPUs"],
            0,
            run["measured ms"] / 1e3,
            run["error %"] / 100,
        ]
        for run in runs
    ]
    for kind, some in steps.items():
        for row, error in some:
            assert row.scenario is not None
            context, size = row.scenario.context or 0, round(model_of(row.scenario).parameters() / 1e9, 1)
            found.append(
                [kind, row.name, row.gpu, row.gpus, row.cp, context, size, round(float(row.time_s or 0), 4), error]
            )
    return found


def main() -> None:
    """Reads, sums up, writes."""
    steps, runs = checked(), own_runs()
    found = {kind: summary(some) for kind, some in sorted(steps.items())}
    text = {
        "source": "python docs/checked.py, of published steps in studies/public/ledger.csv and runs in docs/runs.html",
        "steps": found,
        "attention": attention(runs),
    }
    write(OUT, json.dumps(text, indent=1) + "\n")
    rows_ = json.dumps({"columns": COLUMNS, "rows": everything(runs, steps)}, separators=(",", ":"))
    write(ROWS, rows_.replace("],[", "],\n[") + "\n")


if __name__ == "__main__":
    main()
