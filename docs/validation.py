"""Writes docs/validation.md from the committed real runs in validation/runs, predicted anew.

python docs/validation.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cpsim.prediction.compare import LONG_S, Comparison, compare, predict_runs
from cpsim.prediction.runs import Run, load_runs
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
the measured best, tied where its regret, the share by which it takes longer than the measured best, is at most 1 %.
"""
NONE_YET = "\nThere are no committed runs yet; `validation/cases.py` says how to make them.\n"


def page(folder: Path = RUNS) -> str:
    """The page; one section per file of runs."""
    files = {path.stem: load_runs(path) for path in sorted(folder.glob("*.jsonl"))}
    sections = [_section(name, runs) for name, runs in files.items()]
    return INTRODUCTION + ("".join(sections) + _repeated(list(files.values())) or NONE_YET)


def _repeated(files: Sequence[Sequence[Run]]) -> str:
    """Cases that were run on two days: how well a measurement agrees with itself."""
    by_key: dict[str, list[Run]] = {}
    for run in (run for runs in files for run in runs if run.error is None):
        by_key.setdefault(run.key, []).append(run)
    pairs = [(runs[0], runs[-1]) for runs in by_key.values() if len(runs) > 1]
    if not pairs:
        return ""
    rows = []
    for name, chosen in (
        ("cpsim, 1 ms or more", lambda run: run.scenario.implementation == "cpsim" and run.time_s >= LONG_S),
        ("cpsim, shorter", lambda run: run.scenario.implementation == "cpsim" and run.time_s < LONG_S),
        ("others, 1 ms or more", lambda run: run.scenario.implementation != "cpsim" and run.time_s >= LONG_S),
        ("others, shorter", lambda run: run.scenario.implementation != "cpsim" and run.time_s < LONG_S),
    ):
        ratios = [last.time_s / first.time_s - 1 for first, last in pairs if chosen(first)]
        if ratios:
            mean = sum(map(abs, ratios)) / len(ratios)
            rows.append((name, str(len(ratios)), f"{mean:.1%}", f"{max(ratios, key=abs):+.1%}"))
    text = "The same cases on two days and machines: what no prediction can know.\n"
    return f"\n## Repeated\n\n{text}\n{table(('cases', 'number', 'mean difference', 'largest'), rows)}"


def _section(name: str, runs: Sequence[Run]) -> str:
    comparison = compare(predict_runs(runs), runs)
    parts = [f"\n## {name}\n", _source(runs), f"**{headline(comparison)}**\n"]
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
