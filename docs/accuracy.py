"""Predicts all committed runs anew and says how far off that is: docs/runs.html, and the accuracy table of README.md.

    python docs/accuracy.py

No parameter is fitted to these runs. An error is predicted over measured time, less one: negative where the prediction
is too fast. ``data/manifest.yaml`` says what every file of runs is, and which are left out and why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cpsim.calibrate.recipes import DATA, manifest  # noqa: E402
from cpsim.case.resolve import cluster_of  # noqa: E402
from cpsim.case.scenario import Scenario  # noqa: E402
from cpsim.models.profile import load_profile  # noqa: E402
from cpsim.prediction.compare import Comparison, Pair, compare, errors_of, grouped, predict_runs  # noqa: E402
from cpsim.prediction.runs import holds_runs, load_runs  # noqa: E402

PAGE, TEMPLATE, README = ROOT / "docs" / "runs.html", ROOT / "docs" / "runs-template.html", ROOT / "README.md"
COLUMNS: Final = (
    "machine",
    "day",
    "regime",
    "code",
    "strategy",
    "knobs",
    "kernel",
    "GPUs",
    "tokens per GPU",
    "mask",
    "pass",
    "measured ms",
    "predicted ms",
    "error %",
    "inside",
)
REGIMES: Final = {
    "one GPU": "one GPU, 1 ms or more",
    "one node": "one node of 2 to 4 GPUs, our executor, 1 ms or more",
    "others": "one node, ring-flash-attn, yunchang, PyTorch, 1 ms or more",
    "short": "runs of either shorter than 1 ms",
    "emulated nodes": "emulated nodes over sockets",
    "layers": "whole transformer layers, one GPU",
}


def compared() -> list[tuple[str, str, Comparison]]:
    """Machine, day and comparison of every file of runs that is not left out."""
    found = []
    for name, about in manifest()["runs"].items():
        if "left_out" not in about and holds_runs(DATA / name):
            runs = load_runs(DATA / name)
            found.append((about["machine"], str(about["day"]), compare(predict_runs(runs), runs)))
    return found


def regime_of(scenario: Scenario) -> str:
    """Which row of the table a case belongs to, its time aside."""
    if scenario.part is not None:
        return "layers"
    if cluster_of(scenario).num_nodes > 1:
        return "emulated nodes"
    if scenario.implementation != "cpsim":
        return "others"
    return "one GPU" if scenario.gpus == 1 else "one node"


def row_of(pair: Pair) -> str:
    """The row of the table that a case belongs to."""
    regime = regime_of(pair.scenario)
    if pair.is_long or regime in ("layers", "emulated nodes"):
        return regime
    return "short"


def accuracy_table(found: Sequence[tuple[str, str, Comparison]], published: Iterable[str]) -> str:
    """Errors by regime, as Markdown."""
    lines = [
        "| regime | cases | machines | mean error | signed | in their 90% interval |",
        "| --- | --- | --- | --- | --- | --- |",
        kernels_row(),
    ]
    pairs = [(machine, pair) for machine, _, comparison in found for pair in comparison.pairs]
    by_row = grouped(pairs, lambda one: row_of(one[1]))
    for row, text in REGIMES.items():
        if row in by_row:
            e = errors_of([pair for _, pair in by_row[row]])
            machines = len({machine for machine, _ in by_row[row]})
            lines.append(f"| {text} | {e.num} | {machines} | {e.mean_absolute:.1%} | {e.bias:+.1%} | {e.covered:.0%} |")
    return "\n".join([*lines, *published]).replace("%", " %").replace("  %", " %")


def kernels_row() -> str:
    """Attention calls that the fits of H100 and H200 did not see."""
    rows = [row for name in ("h200", "h100") for row in load_profile(name).held_out]
    rows = [row for row in rows if row["model"].startswith("attention")]
    points = sum(row["points"] for row in rows)
    error = sum(row["mean_absolute"] * row["points"] for row in rows) / points
    bias = sum(row["bias"] * row["points"] for row in rows) / points if all("bias" in row for row in rows) else None
    signed = f"{bias:+.1%}" if bias is not None else ""
    return f"| attention kernels alone, held out of the fit (H100, H200) | {points} | | {error:.1%} | {signed} | |"


def published_rows() -> list[str]:
    """Published runs of others, predicted by ``python -m studies``."""
    from studies.distca.reproduce import reproduce as distca
    from studies.magi.reproduce import reproduce as magi

    both = [row.error for row in magi()], [row.error for row in distca()]
    cells = (
        "published: MagiAttention on 8 to 64 H100; DistCA's 34B steps on 256 H200",
        "; ".join(str(len(errors)) for errors in both),
        "2",
        "; ".join(f"{mean(map(abs, errors)):.1%}" for errors in both),
        "; ".join(f"{mean(errors):+.1%}" for errors in both),
        "",
    )
    return [f"| {' | '.join(cells)} |"]


def table_rows(found: Iterable[tuple[str, str, Comparison]]) -> list[list[Any]]:
    """Cells of every compared case, as in ``COLUMNS``."""
    return [[machine, day, *_cells(pair)] for machine, day, comparison in found for pair in comparison.pairs]


def _cells(pair: Pair) -> list[Any]:
    s = pair.scenario
    knobs = " ".join(f"{name}={value}" for name, value in sorted(s.knobs.items()))
    return [
        regime_of(s),
        s.implementation,
        str(s.strategy),
        knobs,
        s.kernel,
        s.gpus,
        s.num_tokens // s.gpus,
        s.mask_name,
        s.pass_,
        round(pair.run.time_s * 1e3, 3),
        round(pair.predicted.time_s * 1e3, 3),
        round(pair.error * 100, 1),
        int(pair.is_covered),
    ]


def page(found: Iterable[tuple[str, str, Comparison]]) -> str:
    """The page: a table that filters and sorts, beside a scatter plot of what it shows."""
    data = json.dumps({"columns": COLUMNS, "rows": table_rows(found)}, separators=(",", ":"))
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", data.replace("</", "<\\/"))


def with_table(text: str, name: str, table: str) -> str:
    """A page with a table between its markers."""
    before, rest = text.split(f"<!-- {name} -->\n", 1)
    after = rest.split(f"<!-- end of {name} -->", 1)[1]
    return f"{before}<!-- {name} -->\n{table}\n<!-- end of {name} -->{after}"


def main() -> None:
    found = compared()
    PAGE.write_text(page(found), encoding="utf-8")
    table = accuracy_table(found, published_rows())
    print(table)
    README.write_text(with_table(README.read_text(encoding="utf-8"), "accuracy", table), encoding="utf-8")


if __name__ == "__main__":
    main()
