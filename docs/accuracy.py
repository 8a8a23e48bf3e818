"""Predicts all committed runs anew and says how far off that is: docs/runs.html, and the accuracy table of README.md.

    python docs/accuracy.py

No parameter is fitted to these runs. An error is predicted over measured time, less one: negative where the prediction
is too fast. ``data/manifest.yaml`` says what every file of runs is, and which are left out and why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cpsim.calibrate.recipes import DATA, manifest  # noqa: E402
from cpsim.case.resolve import cluster_of  # noqa: E402
from cpsim.case.scenario import Scenario  # noqa: E402
from cpsim.prediction.compare import Comparison, Pair, compare, errors_of, grouped, predict_runs  # noqa: E402
from cpsim.prediction.runs import Run, holds_runs, load_runs  # noqa: E402

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
    "ours": ("one node, our executor", "1, 2 and 4 H200 and H100"),
    "others": ("one node, other people's code", "ring-flash-attn, yunchang, PyTorch; H200, H100"),
    "short": ("shorter than 1 ms, all code", "one GPU or one node"),
    "emulated nodes": ("two emulated nodes over sockets", "4 H200, 2 and 4 H100"),
    "real nodes": ("real nodes", "none yet: networks between nodes rest on published figures"),
    "layers": ("whole layers", "three models on 1 to 4 H200 and H100"),
    "steps": ("whole steps of few layers", "PyTorch, Transformers, Megatron-Core; 1, 2 and 4 H100 and H200"),
}
"""Rows of the table: their names and where their runs come from."""


def compared() -> list[tuple[str, str, Comparison]]:
    """Machine, day and comparison of every file of runs that is not left out."""
    found = []
    for name, about in manifest()["runs"].items():
        if "left_out" not in about and holds_runs(DATA / name):
            runs = recorded(name)
            found.append((about["machine"], str(about["day"]), compare(predict_runs(runs), runs)))
    return found


def recorded(name: str) -> list[Run]:
    """The runs of a file of the manifest, on the cluster that was measured on their own machine where there is one."""
    runs, cluster = load_runs(DATA / name), manifest()["runs"][name].get("cluster")
    if not cluster:
        return runs
    told = {"cluster": str(DATA / cluster)}
    return [replace(run, scenario=run.scenario.model_copy(update=told)) for run in runs]


def regime_of(scenario: Scenario) -> str:
    """Which row of the table a case belongs to, its time aside."""
    if scenario.model is not None:
        return "steps" if scenario.is_step else "layers"
    if cluster_of(scenario).num_nodes > 1:
        return "emulated nodes"
    if scenario.implementation != "cpsim":
        return "others"
    return "ours"


def row_of(pair: Pair) -> str:
    """The row of the table that a case belongs to."""
    regime = regime_of(pair.scenario)
    if pair.is_long or regime in ("layers", "steps", "emulated nodes"):
        return regime
    return "short"


def accuracy_table(found: Sequence[tuple[str, str, Comparison]], published: str) -> str:
    """Errors by regime, as Markdown; a regime without runs has a row without errors."""
    by_row = grouped([pair for _, _, comparison in found for pair in comparison.pairs], row_of)
    lines = ["| regime | cases | mean error | sign | inside | where |", "| --- | --- | --- | --- | --- | --- |"]
    for row, (name, where) in REGIMES.items():
        cells = ["0", "", "", ""]
        if row in by_row:
            e = errors_of(by_row[row])
            cells = [str(e.num), f"{e.mean_absolute:.1%}", f"{e.bias:+.1%}", f"{e.covered:.0%}"]
        lines.append(f"| {' | '.join([name, *cells, where])} |")
    return "\n".join([*lines, published]).replace("%", " %")


def published_row() -> str:
    """Published runs of others, predicted by ``cpsim reproduce``: whole steps are those of ``public``."""
    from studies.distca.reproduce import reproduce as distca
    from studies.magi.reproduce import reproduce as magi
    from studies.public.ledger import ATTENTION, ledger

    whole = [one for one in ledger().of("time") if one.row.kind not in ATTENTION]
    times = grouped(whole, lambda one: one.row.routed)
    found = [
        [row.error for row in magi()],
        [row.error for row in distca()],
        *([one.error for one in times[experts]] for experts in (False, True)),
    ]
    cells = (
        "published runs",
        "; ".join(str(len(errors)) for errors in found),
        "; ".join(f"{mean(map(abs, errors)):.1%}" for errors in found),
        "; ".join(f"{mean(errors):+.1%}" for errors in found),
        "",
        "MagiAttention; DistCA; whole steps; whole steps with experts",
    )
    return f"| {' | '.join(cells)} |"


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
    table = accuracy_table(found, published_row())
    print(table)
    README.write_text(with_table(README.read_text(encoding="utf-8"), "accuracy", table), encoding="utf-8")


if __name__ == "__main__":
    main()
