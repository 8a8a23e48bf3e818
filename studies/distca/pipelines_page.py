"""Writes studies/distca/pipelines.md: DistCA's runs with pipelines, and what every assumption is worth.

    python -m studies distca --scale --lengths dist_prolong.json --pretrain dist_wlbllm.json \\
        --out studies/distca/scale.json
    python -m studies distca --speed-ups --lengths dist_prolong.json --pretrain dist_wlbllm.json \\
        --out studies/distca/speed-ups.json
    python -m studies.distca.pipelines_page

The lists are DistCA's (hao-ai-lab/DistCA, distca/simulator/data).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from studies.distca.scale import BAR, SYSTEMS, K

FOLDER: Final = Path(__file__).parent
FAR: Final = 0.2
"""Error of runs that are not understood."""
RECORD: Final = FOLDER / "scale.json"
RATIOS: Final = FOLDER / "speed-ups.json"
PAGE: Final = FOLDER / "pipelines.md"
BARS: Final = {"all": 0.06, "signed": 0.02, "speed-up": 0.05}
"""Mean error of all runs, its sign, and how far a speed-up may lie outside of what the paper states."""

NAMED: Final = {
    "all": "all",
    "model": "{0}",
    "gpus": "{0} GPUs",
    "context": "{1}K",
    "data": "documents of {0}",
}
"""Groups of runs by fields of their setting."""

Record = Mapping[str, Any]


def page(record: Record, ratios: Record | None) -> str:
    """The page in Markdown; without speed-ups where these were not predicted."""
    parts = (
        ["# DistCA's runs with pipelines", "", "Written by `python -m studies.distca.pipelines_page`. " + INTRODUCTION],
        ["## By group", "", *_groups(record)],
        ["## What each assumption is worth", "", WORTH, "", *_worth(record)],
        ["## What is left", "", _left(record)],
        ["## What fitted into memory", "", MEMORY, "", *_fits(record)],
        ["## Run by run", "", RUNS, "", *_runs(record)],
        ["## Runs of a known plan", "", *_known(record)],
        *([["## Speed-ups that the paper states", "", SPEED_UPS, "", *_speed_ups(ratios)]] if ratios else []),
    )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


INTRODUCTION: Final = (
    "`scale.json` has the answers of `python -m studies distca --scale` with DistCA's own lists of documents. Errors "
    "are predicted over published time, less one; nothing is fitted to these runs."
)
WORTH: Final = (
    "Interim runs if one thing were otherwise; `runs` are those whose memory allows it. What programs did is told by "
    "their code and by their authors' notes ([scale.py](scale.py), `INTERIM`). Their scripts ask to compute the MLP "
    "again in the backward pass. WLB's program does not pass this on, and Megatron-Core then takes core attention: it "
    "gathers and attends twice. DistCA's computes the MLP again, or it would not have fitted into memory. It sent a "
    "server the keys of a document once for each of its tasks there; since 25 September 2025 it sends them once."
)
MEMORY: Final = (
    "Bytes of the fullest GPU that are predicted for DistCA's runs of 34B with 48 layers, buffers of exchanges "
    "included, and whether the run fitted. H200 have 141 GB. A same-phase pipeline of P stages holds up to 2 P - 1 "
    "microbatches."
)
LEFT: Final = (
    "Four of DistCA's interim runs take 1.3 to 1.5 times as long as is predicted, the others are {others} off "
    "({signed}): {settings}. Why is not known. These are the settings none of whose plans has small "
    "nano-batches: all have 65,536 tokens of 8B or 32,768 of 34B on every GPU, or more, where each other setting has a "
    "plan with half as many. Exchanges that follow computation would not explain them. Two of the four have no "
    "counterpart with the other data set, so that its run seems not to have finished. A script of DistCA's authors "
    "traces `cudaFree`, which waits for all kernels, and its one run has just these 65,536 tokens of 8B "
    "(`salloc_srun.torch-cudafree.sh` beside the results); settings of PyTorch's allocator stand in all of them, "
    "commented out. Predicted memory of three of the four is 53 to 59 GB for some plan, far from what a GPU has, so "
    "that only fragments could fill it: that they did is not recorded."
)
FAR_OFF: Final = (
    "Further outside are {count}: {where}. With 8B and 128K on 64 GPUs DistCA's exchanges are hidden, and WLB loses "
    "little to begin with: it waits for 1 % of its time and gathers for 5 %, 13 % and 2 % with two stages, under the "
    "fastest plan. Which plans and microbatches the paper's runs had is not published."
)
SPEED_UPS: Final = (
    "`speed-ups.json` has the answers of `python -m studies distca --speed-ups` with DistCA's own lists of documents: "
    "the fastest WLB over DistCA at the paper's sizes, without pipelines and with two stages. What the paper states is "
    "for all sizes together."
)
RUNS: Final = (
    "The fastest plan of those that were tried, and shares of its time: keys and values gathered, and GPUs that wait "
    "for others."
)


def made() -> str:
    """The page of the files that are there."""
    record, *ratios = (json.loads(path.read_text(encoding="utf-8")) for path in (RECORD, RATIOS) if path.exists())
    return page(record, ratios[0] if ratios else None)


def _groups(record: Record) -> list[str]:
    interim: Sequence[Record] = record["interim"]
    groups: dict[str, list[float]] = {}
    for system, field in product(SYSTEMS, NAMED):
        mine = [run for run in interim if run["system"] == system]
        for run in sorted(mine, key=lambda run: run["setting"].get(field, 0)):
            name = NAMED[field].format(run["setting"].get(field), run["setting"]["context"] // K)
            groups.setdefault(f"{system}, {name}", []).append(_error(run))
    errors = [mean(run["predicted_s"]) / mean(run["published_s"]) - 1 for run in record["known"]]
    known = [error for run, error in zip(record["known"], errors, strict=True) if not run["setting"]["layers"]]
    groups["wlb, known plans on 512 GPUs"] = known
    groups["all 47 runs"] = [_error(run) for run in interim] + known
    groups["both, known plans of 16 layers on 512 GPUs"] = errors[len(known) :]
    rows = [(name, len(errors), _percent(_size(errors)), _signed(mean(errors))) for name, errors in groups.items()]
    every = groups["all 47 runs"]
    return [
        *_table(("runs", "number", "mean error", "signed"), rows),
        "",
        f"Bars: {_percent(BARS['all'])} for all runs ({_met(_size(every), BARS['all'])}), sign within "
        f"{_percent(BARS['signed'])} ({_met(abs(mean(every)), BARS['signed'])}), {_percent(BAR)} with pipelines "
        + ", ".join(f"({name}: {_met(_size(groups[f'{name}, all']), BAR)})" for name in ("wlb", "distca"))
        + ".",
    ]


def _worth(record: Record) -> list[str]:
    rows = [
        (system, name, len(errors), _percent(_size(errors)), _signed(mean(errors)))
        for system, assumed in record["worth"].items()
        for name, errors in assumed.items()
        if errors
    ]
    return _table(("system", "if", "runs", "mean error", "signed"), rows)


def _left(record: Record) -> str:
    runs = [run for run in record["interim"] if run["system"] == "distca"]
    far = [run for run in runs if abs(_error(run)) > FAR]
    others = [_error(run) for run in runs if abs(_error(run)) <= FAR]
    settings = "; ".join(dict.fromkeys(_what(run["setting"]) for run in far))
    assert len(far) == 4
    return LEFT.format(others=_percent(_size(others)), signed=_signed(mean(others)), settings=settings)


def _fits(record: Record) -> list[str]:
    rows = []
    for run in sorted(record["fits"], key=lambda run: run["memory_bytes"]):
        plan, needed = run["plan"], (f"{run[name] / 1e9:.0f}" for name in ("memory_bytes", "kept_bytes"))
        cut = f"{plan['stages']} stages, {plan['microbatches']} microbatches"
        rows.append((_what(run["setting"]), cut, "yes" if run["fitted"] else "no", *needed))
    return _table(("run", "plan", "fitted", "GB", "GB if nothing were computed again"), rows)


def _what(of: Record) -> str:
    return f"{of['model']}, {of['gpus']} GPUs, {of['context'] // K}K x {of['sequences']}"


def _runs(record: Record) -> list[str]:
    rows = []
    for run in sorted(record["interim"], key=_error):
        of, first = run["setting"], run["outcomes"][0]
        plan, time_s = first["plan"], first["time_s"]
        cut = f"{plan['stages']} stages, {plan['microbatches']} microbatches" + f", CP {plan['cp']}" * (plan["cp"] > 1)
        shares = [
            _percent(first[f"{name}_s"] / time_s) if run["system"] == "wlb" else "" for name in ("gathers", "idle")
        ]
        what = _what(of)
        times = f"{run['published_s']:.1f}", f"{time_s:.1f}", _signed(_error(run))
        rows.append((run["system"], of["data"], what, cut, *times, *shares))
    columns = "system", "documents", "run", "fastest plan", "published s", "predicted", "error", "gathers", "waiting"
    return _table(columns, rows)


def _known(record: Record) -> list[str]:
    rows = []
    for run in record["known"]:
        of, times = run["setting"], (run["published_s"], run["predicted_s"])
        by_iteration = (" ".join(f"{seconds:.1f}" for seconds in found) for found in times)
        error = mean(run["predicted_s"]) / mean(run["published_s"]) - 1
        layers = f", {of['layers']} layers" if of["layers"] else ""
        plan = run["plan"]
        cut = f"{plan['microbatches']} microbatches" + f", CP {plan['cp']}" * (plan["cp"] > 1)
        rows.append((run["system"], _what(of) + layers, cut, *by_iteration, _signed(error)))
    columns = "system", "run", "plan, 2 stages", "published s", "predicted, by iteration", "error of the mean"
    return _table(columns, rows)


def _speed_ups(record: Record) -> list[str]:
    rows, outside = [], Counter[str]()
    for stated in record["stated"]:
        key, (low, high) = (stated["stages"], stated["data"], stated["model"]), stated["range"]
        mine = [
            one
            for one in record["speed_ups"]
            if one["predicted"] and key == tuple(one["setting"][name] for name in ("stages", "data", "model"))
        ]
        if ratios := sorted(one["predicted"] for one in mine):
            far = [one for one in mine if not low <= one["predicted"] + BARS["speed-up"] <= high + 2 * BARS["speed-up"]]
            outside.update(f"{key[2]} at {one['setting']['context'] // K}K" for one in far)
            inside = len(ratios) - len(far)
            span = f"{low:.2f} to {high:.2f}" if low >= 1 else f"up to {high:.2f}"
            found = f"{ratios[0]:.2f} to {ratios[-1]:.2f}", f"{median(ratios):.2f}", f"{inside} of {len(ratios)}"
            rows.append((*key, span, *found))
    columns = (
        "stages",
        "documents",
        "model",
        "stated",
        "predicted",
        "median",
        f"within {BARS['speed-up']:g} of what is stated",
    )
    where = ", ".join(f"{name} ({count})" for name, count in outside.most_common())
    return (
        [*_table(columns, rows), "", FAR_OFF.format(count=outside.total(), where=where)]
        if outside
        else _table(columns, rows)
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def _error(run: Record) -> float:
    return float(run["predicted_s"] / run["published_s"] - 1)


def _size(errors: Sequence[float]) -> float:
    return mean(map(abs, errors))


def _met(found: float, bar: float) -> str:
    return "met" if found <= bar else "missed"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


if __name__ == "__main__":
    PAGE.write_text(made(), encoding="utf-8")
