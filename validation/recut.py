"""Rewrites runs that were made before iterations followed warm-up without a gap.

    python validation/recut.py RUNS...

Until then a garbage collection of some 50 ms lay between warm-up and the measured iterations. In that gap the clock,
which the power limit had brought down, recovered, and the first tens of milliseconds that were measured ran faster
than a GPU under load does. The iterations that count are now the last ones of the warm-up, as many as were measured
but at most a quarter of it; what was measured after the gap is kept as `after_gap_s`. A pass whose warm-up was shorter
than 12 iterations took long enough to bring the clock down again, and stays as it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

FEWEST = 12


def recut(line: dict[str, Any]) -> dict[str, Any]:
    """One line of a run file; a header, an error and what is recut already stay as they are."""
    if "passes" not in line or any("after_gap_s" in run for run in line["passes"].values()):
        return line
    for run in line["passes"].values():
        warmup, measured = run["warmup_s"], run["samples_s"]
        if len(warmup) < FEWEST:
            continue
        num = min(len(measured), len(warmup) // 4)
        run |= {"samples_s": warmup[-num:], "warmup_s": warmup[:-num], "after_gap_s": measured}
    runs = line["passes"].values()
    line["samples_s"] = [sum(times) for times in zip(*(run["samples_s"] for run in runs), strict=False)]
    time_s = sum(median(run["samples_s"]) for run in runs)
    rate = line["tflops_per_gpu"] * line["time_s"] / time_s
    return line | {"time_s": round(time_s, 9), "tflops_per_gpu": round(rate, 3)}


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        text = "".join(json.dumps(recut(line), separators=(",", ":")) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
