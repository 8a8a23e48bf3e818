"""Writes the README's tables from the shipped profiles, the committed real runs and docs/speed.json.

    pytest -m benchmark tests/test_benchmark.py -p no:xdist --benchmark-json=raw.json
    python docs/tables.py raw.json

With the file of a benchmark run it first cuts that down to docs/speed.json; without, it only writes the tables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsim.calibrate.fit import current
from cpsim.calibrate.fit_network import errors_of_slowdowns
from cpsim.calibrate.recipes import measurements
from cpsim.models.profile import load_profile
from cpsim.prediction.compare import compare, errors_of, grouped, predict_runs
from cpsim.prediction.runs import load_runs

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
KERNELS = "fa4", "fa2", "cudnn", "sdpa_flash", "flex", "sdpa_math"
MODELS = (
    *(f"attention {pass_} {kernel}" for kernel in KERNELS for pass_ in ("fwd", "bwd")),
    "memory-bound",
    "matrix products",
    "elementwise of layers",
    *(f"collective {kind}" for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")),
    "transfer",
)
RING = {
    "test_plan": "plan",
    "test_price": "price",
    "test_simulate_with_shared_links_and_interference": "simulate, shared links and interference",
    "test_plan_and_simulate": "plan and simulate",
    "test_fast_engine": "forward only, constant rates: fast engine",
    "test_reference_engine": "the same: SimPy engine",
}
RUNS = {
    "h200": "1 to 4 H200",
    "h200-dcp-magi": "2 H200, `dcp`, `magi` and `hybrid_cp` among others",
    "h200-planned": "4 H200, `dcp`, `magi` and `hybrid_cp` among others",
    "h200-documents": "2 H200, many short documents, fa2 and sdpa_flash",
    "h200-drawn": "2 H200, drawn at random: fa2, sdpa_flash, cudnn, FlexAttention",
    "h200-drawn-2": "2 H200, drawn at random, unseen while models were made",
    "h200-drawn-3": "2 more H200, more drawn at random",
    "h200-one": "1 H200, drawn at random: fa2, sdpa_flash, cudnn, FlexAttention, naive attention",
    "h200-one-2": "1 more H200, the same and 16 more",
    "h200-one-3": "1 H200 again, 46 others, unseen",
    "h200-one-4": "1 H200 once more, 46 more, unseen",
    "h200-one-5": "1 H200, yet 46 more, unseen",
    "h200-one-6": "1 H200, 46 of any number of tokens, unseen",
    "h200-layer": "1 H200, whole layers of three models drawn at random",
    "h200-layer-2": "1 more H200, 18 others, unseen",
    "h200-layer-3": "a third H200, the same 18: 4 % slower than the second",
    "h200-small-others": "2 H200, few tokens in other people's code",
    "h200-small-others-again": "2 other H200, the same",
    "h200-small-others-2": "2 more H200, the same",
    "h200-flex": "2 and 4 H200, FlexAttention, causal and sparse masks",
    "h100": "1 H100, drawn at random: fa2, sdpa_flash, cudnn, FlexAttention, naive attention",
    "h100-2": "1 more H100, 46 others",
    "h100-two": "2 H100, drawn at random: fa2, sdpa_flash, cudnn, fa4",
    "h100-two-others": "2 more H100, few tokens in other people's code",
    "h100-two-others-again": "2 more H100, the same a minute later",
    "h100-two-2": "2 more H100, more drawn at random, unseen; a slow host",
    "h100-two-2-short": "yet 2 more H100, the few tokens among them",
    "h100-layer": "1 H100, whole layers of three models drawn at random",
    "h100-layer-2": "1 more H100, 18 others",
    "h200-emulated": "2 emulated nodes of 2 H200",
    "h200-emulated-planned": "2 emulated nodes of 2 H200, another machine",
    "h200-emulated-flex": "2 emulated nodes of 2 H200, a third machine, mostly FlexAttention",
    "h100-emulated": "2 emulated nodes of 1 H100, whose sockets were measured once, just before",
    "h100-emulated-2": "2 emulated nodes of 1 more H100, whose sockets were measured three times",
    "h100-emulated-3": "the same in fresh processes",
    "h100-emulated-4": "the same in fresh processes again",
    "h100-emulated-5": "2 emulated nodes of a third H100, whose sockets were measured before and after",
}
COMMANDS = {
    "test_advise_at_96_gpus_with_start_up": "`cpsim advise` at 96 GPUs, start-up included",
    "test_a_thousand_mixed_predictions": "1,000 predictions without dcp, 2 to 96 GPUs, mixed masks and documents",
}


def accuracy_table() -> str:
    """Errors on points that were not fitted, from the shipped profiles."""
    h200, h100 = ({row["model"]: row for row in load_profile(name).held_out} for name in ("h200", "h100"))
    lines = ["| model | H200: mean / 95 of 100 / worst (points) | H100 |", "| --- | --- | --- |"]
    for model in MODELS:
        lines.append(f"| {model} | {_errors(h200[model])} | {_errors(h100[model])} |")
    slowed = [errors_of_slowdowns(current(measurements(name), load_profile(name).gpu)) for name in ("h200", "h100")]
    for i, what in enumerate(("kernels by communication", "communication by kernels")):
        lines.append(f"| slowdown of {what} | {' | '.join(_errors(_summary(errors[i])) for errors in slowed)} |")
    return "\n".join(lines)


def _summary(errors: NDArray[np.float64]) -> dict[str, Any]:
    """What a profile says of a model's errors."""
    errors = np.abs(errors)
    spread = {"p95": np.quantile(errors, 0.95), "worst": errors.max()}
    return {"mean_absolute": errors.mean(), **spread, "points": len(errors)}


def _errors(row: dict[str, Any]) -> str:
    return f"{100 * row['mean_absolute']:.1f} / {100 * row['p95']:.0f} / {100 * row['worst']:.0f} % ({row['points']})"


def runs_table() -> str:
    """Errors against the committed real runs, by whose code ran."""
    lines = ["| real runs of 1 ms or more | cases | mean error | signed | in their 90 % interval |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for path, where in RUNS.items():
        runs = load_runs(DOCS.parent / "validation" / "runs" / f"{path}.jsonl")
        pairs = [pair for pair in compare(predict_runs(runs), runs).pairs if pair.is_long]
        for name, mine in sorted(grouped(pairs, lambda pair: pair.scenario.implementation).items()):
            e = errors_of(mine)
            lines.append(
                f"| {name}, {where} | {len(mine)} | {100 * e.mean_absolute:.1f} % | {100 * e.bias:+.1f} % "
                f"| {100 * e.covered:.0f} % |"
            )
    return "\n".join(lines)


def speed_table() -> str:
    """Medians of the benchmarks, from docs/speed.json."""
    rows = json.loads((DOCS / "speed.json").read_text(encoding="utf-8"))["benchmarks"]
    median = {row["name"]: row["median_s"] for row in rows}
    lines = ["| 96-rank zigzag ring, forward and backward (73,440 ops) | |", "| --- | --- |"]
    lines += [f"| {text} | {_duration(median[name])} |" for name, text in RING.items()]
    lines += ["", "| whole commands | |", "| --- | --- |"]
    lines += [f"| {text} | {_duration(median[name])} |" for name, text in COMMANDS.items()]
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


def with_tables(readme: str) -> str:
    """The README with its tables between their markers."""
    for name, table in (("runs", runs_table()), ("accuracy", accuracy_table()), ("speed", speed_table())):
        before, rest = readme.split(f"<!-- {name} -->\n", 1)
        after = rest.split(f"<!-- end of {name} -->", 1)[1]
        readme = f"{before}<!-- {name} -->\n{table}\n<!-- end of {name} -->{after}"
    return readme


def main() -> None:
    for raw in sys.argv[1:2]:
        kept = cut_down(json.loads(Path(raw).read_text(encoding="utf-8")))
        (DOCS / "speed.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
