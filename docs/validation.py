"""Writes docs/validation.md from the committed real runs in validation/runs, predicted anew.

    python docs/validation.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cpsim.comparison import Comparison, compare, predict_runs
from cpsim.report.comparison import (
    CASES_HEAD,
    CHOICES_HEAD,
    ERRORS_HEAD,
    REGRETS_HEAD,
    Rows,
    case_rows,
    choice_rows,
    error_rows,
    headline,
    left_out,
    regret_rows,
)
from cpsim.runs import Run, load_runs

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "validation.md"
RUNS = ROOT / "validation" / "runs"
WORST = 15

INTRODUCTION = """# Predicted and measured

This page is written by `python docs/validation.py` from the real runs in `validation/runs`; every prediction on it is
made anew, with the profiles that ship with cpsim. No parameter is fitted to these runs.

An error is predicted over measured time, less one: negative where the prediction is too fast. Cases of 1 ms or more
and shorter ones are given apart. In range: share of the measurements inside their 90 % interval. A choice is between
cases that are the same in everything but strategy, knobs and implementation; it is right where the predicted best is
the measured best, and its regret is how much longer the predicted best takes than the measured best.
"""
NONE_YET = "\nThere are no committed runs yet; `validation/cases.py` says how to make them.\n"


def page(folder: Path = RUNS) -> str:
    """The page; one section per file of runs."""
    sections = [_section(path) for path in sorted(folder.glob("*.jsonl"))]
    return INTRODUCTION + ("".join(sections) or NONE_YET)


def _section(path: Path) -> str:
    runs = load_runs(path)
    comparison = compare(predict_runs(runs), runs)
    parts = [f"\n## {path.stem}\n", _source(runs), f"**{headline(comparison)}**\n"]
    parts += [
        f"### {title}\n\n{table(head, rows)}"
        for title, head, rows in (
            ("Errors", ERRORS_HEAD, error_rows(comparison.pairs)),
            ("Choices", CHOICES_HEAD, choice_rows(comparison)),
            ("Choices that were not the best", REGRETS_HEAD, regret_rows(comparison.choices())),
            (f"The {WORST} worst cases", CASES_HEAD, case_rows(comparison.pairs[:WORST])),
        )
        if rows
    ]
    return "\n".join([*parts, *_left_out(comparison)])


def _source(runs: Sequence[Run]) -> str:
    headers = {str(run.header["date"]): run.header for run in runs}
    lines = []
    for header in headers.values():
        software = f"driver {header.get('driver')}, NCCL {header.get('nccl')}, torch {header['torch']}"
        what = f"{header['num_gpus']} x {header['gpu']}, {software}, commit {header['commit']}"
        lines.append(f"* {header['date'][:10]}: {what}: `{header['command']}`")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def _left_out(comparison: Comparison) -> list[str]:
    lines = left_out(comparison)
    return [f"### Not compared: {len(lines)}\n\n" + "\n".join(f"* {line}" for line in lines) + "\n"] if lines else []


def table(head: Sequence[str], rows: Rows) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
