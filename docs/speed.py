"""Writes the README's tables from the shipped profiles, the committed real runs and docs/speed.json.

    pytest -m benchmark tests/test_benchmark.py -p no:xdist --benchmark-json=raw.json
    python docs/speed.py raw.json

With the file of a benchmark run it first cuts that down to docs/speed.json; without, it only writes the tables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
RING = {
    "test_plan": "plan",
    "test_price": "price",
    "test_simulate_with_shared_links_and_interference": "simulate, shared links and interference",
    "test_plan_and_simulate": "plan and simulate",
    "test_fast_engine": "forward only, constant rates: fast engine",
    "test_reference_engine": "the same: SimPy engine",
}
COMMANDS = {
    "test_advise_at_96_gpus_with_start_up": "`cpsim advise` at 96 GPUs, start-up included",
    "test_a_thousand_mixed_predictions": "1,000 predictions without dcp, 2 to 96 GPUs, mixed masks and documents",
}


def speed_table() -> str:
    """The least time of each benchmark's rounds, which other programs slow least, from docs/speed.json."""
    rows = json.loads((DOCS / "speed.json").read_text(encoding="utf-8"))["benchmarks"]
    least = {row["name"]: row["min_s"] for row in rows}
    lines = ["| 96-rank zigzag ring, forward and backward (73,440 ops) | |", "| --- | --- |"]
    lines += [f"| {text} | {_duration(least[name])} |" for name, text in RING.items()]
    lines += ["", "| whole commands | |", "| --- | --- |"]
    lines += [f"| {text} | {_duration(least[name])} |" for name, text in COMMANDS.items()]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2f} ms"


def cut_down(run: dict[str, Any]) -> dict[str, Any]:
    """What docs/speed.json keeps of a file that pytest-benchmark wrote."""
    machine = run["machine_info"]
    return {
        "schema": 1,
        "date": run["datetime"][:10],
        "machine": f"{machine['cpu'].get('count', '?')} cores, {machine['cpu'].get('brand_raw', 'unknown')}",
        "python": machine["python_version"],
        "command": "pytest -m benchmark tests/test_benchmark.py -p no:xdist --benchmark-json=raw.json",
        "benchmarks": [
            {
                "name": row["name"],
                "group": row["group"],
                "median_s": row["stats"]["median"],
                "min_s": row["stats"]["min"],
                "max_s": row["stats"]["max"],
                "rounds": row["stats"]["rounds"],
            }
            for row in run["benchmarks"]
        ],
    }


def main() -> None:
    for raw in sys.argv[1:2]:
        kept = cut_down(json.loads(Path(raw).read_text(encoding="utf-8")))
        (DOCS / "speed.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    before, rest = text.split("<!-- speed -->\n", 1)
    after = rest.split("<!-- end of speed -->", 1)[1]
    README.write_text(f"{before}<!-- speed -->\n{speed_table()}\n<!-- end of speed -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
