"""What was predicted of later strategies and masks before they ran, beside what they took.

python -m studies.newer [-v]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from cpsim.calibrate.measurement import load
from cpsim.calibrate.recipes import manifest, runs_file
from cpsim.case.load import scenario_from
from cpsim.prediction.runs import case_key, load_runs

HERE: Final = Path(__file__).parent
RUNS: Final = tuple(f"h200-newer-{part}.jsonl" for part in ("1a", "1b", "1c", "2a", "2b"))
RANKS: Final = ("ranks-h200-newer.jsonl", "ranks-h200-newer-2.jsonl", "ranks-h200-newer-3.jsonl")
SHORT_S: Final = 1e-3
Row = tuple[str, float, float]
"""What ran, its time, and predicted over measured time less one."""


def said(name: str) -> Iterator[dict[str, Any]]:
    """Lines of a file of predictions."""
    yield from map(json.loads, (HERE / name).read_text(encoding="utf-8").splitlines())


def there(names: Iterable[str]) -> list[Path]:
    """Files of runs, as far as they have run."""
    known = {Path(path).name for path in manifest()["runs"]}
    return [runs_file(name) for name in names if name in known]


def of_runs() -> list[Row]:
    """All runs; those that failed are left out."""
    files = ("predicted-1-h200.jsonl", "predicted-1-h200-2.jsonl", "predicted-2-h200.jsonl")
    before = {case_key(scenario_from(one["scenario"])): float(one["time_s"]) for file in files for one in said(file)}
    found = []
    for run in (run for path in there(RUNS) for run in load_runs(path) if not run.error):
        s = run.scenario
        name = f"{s.strategy} {s.knobs or ''} {s.kernel} {s.mask_name}{' cached' if s.cached else ''}"
        found.append((name, run.time_s, before[case_key(s)] / run.time_s - 1))
    return found


def of_ranks() -> list[Row]:
    """All passes of single ranks."""

    def key(one: dict[str, Any]) -> str:
        return json.dumps([one["scenario"], one["pass"], one["rank"]], sort_keys=True)

    files = ("predicted-ranks.jsonl", "predicted-ranks-2.jsonl", "predicted-ranks-3.jsonl")
    before = {key(one): one["time_s"] for file in files for one in said(file)}
    found = []
    for point in (point for path in there(RANKS) for point in load(path).of("rank")):
        took, s = median(point["samples_s"]), point["scenario"]
        name = (
            f"{s['strategy']} {s['knobs'] or ''} {s['kernel']}, {point['pass']} of rank {point['rank']} of {s['gpus']}"
        )
        found.append((name, took, before[key(dict(point))] / took - 1))
    return found


def main() -> None:
    """Prints errors, and with -v every row, worst first."""
    print("| what | 1 ms and more | mean error | sign | worst | shorter | mean error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, rows in {"runs on one and two GPUs": of_runs(), "passes of single ranks": of_ranks()}.items():
        long, short = ([error for _, took, error in rows if (took >= SHORT_S) is wanted] for wanted in (True, False))
        print(
            f"| {name} | {len(long)} | {mean(map(abs, long)):.1%} | {mean(long):+.1%} | {max(long, key=abs):+.1%} "
            f"| {len(short)} | {mean(map(abs, short)):.1%} |"
        )
    if "-v" in sys.argv[1:]:
        for name, took, error in sorted(of_runs() + of_ranks(), key=lambda row: -abs(row[2])):
            print(f"{error:+7.1%} {took * 1e3:9.3f} ms  {name}")


if __name__ == "__main__":
    main()
