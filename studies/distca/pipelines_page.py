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

import numpy as np

from studies.distca.reproduce import TP, Floats
from studies.distca.scale import BAR, ITERATIONS, OWN_DATA, SYSTEMS, K

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
        ["## What is left", "", *_left(record)],
        ["## From start to start", "", *_walls(record)],
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
    "gathers and attends twice. DistCA's is taken to compute the MLP again, as later runs did, which would not have "
    "fitted into memory otherwise. It sent a server the keys of a document once for each of its tasks there; since 25 "
    "September 2025 it sends them once."
)
MEMORY: Final = (
    "Bytes of the fullest GPU that are predicted for DistCA's runs of 34B with 48 layers, buffers of exchanges "
    "included, and whether the run fitted. PyTorch has 150 GB of an H200. A same-phase pipeline of P stages holds up "
    "to 2 P - 1 microbatches."
)
LEFT: Final = (
    "Four of DistCA's interim runs take 1.3 to 1.5 times as long as is predicted, the others are {others} off "
    "({signed}): {settings}. No cause is proven. These are the settings none of whose plans has small nano-batches: "
    "all have 65,536 tokens of 8B or 32,768 of 34B on every GPU, or more, where each other setting has a plan with "
    "half as many. Two of the four have no counterpart with the other data set, so that its run seems not to have "
    "finished. What was examined, with errors of the four if it were so, in the order of the table run by run:"
)
EXAMINED: Final = (
    (
        "exchanges are slow, or do not hide",
        "free: {exchanges cost nothing}; 4/5 of the bandwidth: {exchanges have 4/5 of the bandwidth}; after "
        "computation: {exchanges follow computation}",
        "no",
    ),
    (
        "exchanges overflow their buffers, and work stays where it is",
        "they need {buffers} GiB of 2, and of 4 in the first of these; the program has one tolerance, which it raises "
        "since 15ca1d2 only; with buffers too small it hangs, say its scripts",
        "no",
    ),
    (
        "there are more tokens than assumed, idle stages cost more, or kernels are slow at such sizes",
        "runs of later days with as many tokens take as long as is predicted (see the next section); d2/runtime and "
        "csrc, which ran them, are those of 031ba42 but for the keys that are sent",
        "no",
    ),
    (
        "attention is deterministic, which takes about twice as long backward",
        "scripts allow the other kind (NVTE_ALLOW_NONDETERMINISTIC_ALGO in tests/test_megatron_e2e_pipeline_with_cp.sh "
        "at 9cb27ea)",
        "no",
    ),
    ("runs of ProLong have its documents", "{ProLong's runs have its documents}; others are {own} off then", "no"),
    (
        "runs stopped early: means are of the iterations that were recorded (table.ipy.py beside the results)",
        "the first one alone: {only the first iteration was recorded}",
        "not of all",
    ),
    ("only the slowest plan finished", "{slowest}", "not of all"),
    (
        "nothing is computed again, and memory is full",
        "then every plan of these settings needs {full} GB or more, each other setting has one of {room} GB or less; "
        "PyTorch that frees memory waits for all kernels, so that exchanges do not hide: {nothing is computed again, "
        "exchanges follow computation}",
        "open",
    ),
)
"""Possible causes, what speaks of each, and whether it is one. Fields are assumptions of ``OTHERWISE``, and others."""
OPEN: Final = (
    "For the last one speak: the program of 21 September (9cb27ea) has no option to compute anything again, and gets "
    "it in the commit that gives it the data set, which these runs lacked; a note that 34B with 512K and buffers of 4 "
    "GB is out of memory (`salloc_srun.test_pp_basic.missing-v1.sh` beside the results), where it needs {again} GB if "
    "the MLP is computed again and {kept} GB if not, while {most} GB fitted some days later; and a script that traces "
    "`cudaFree` in a run with 65,536 tokens of 8B (`salloc_srun.torch-cudafree.sh`). Against it: the four would leave "
    "little of PyTorch's 150 GB or need more, and the other runs would be {nothing} off. So the MLP stays computed "
    "again here.",
    "34B with 128K is {small} off on 128 GPUs, and {large} on 256. No assumption brings both together: they are "
    "{both}. Its slowest plan alone, 4 stages and 4 microbatches, would be {alone} off on 256; which plans finished is "
    "not recorded. Of runs that are alike one takes up to {noise} longer.",
)
BOTH: Final = (
    "exchanges have 4/5 of the bandwidth",
    "its scheduler's tolerance is 0.05",
    "nothing is computed again",
)
"""Assumptions under which two runs are compared."""
WALLS: Final = (
    "Names of DistCA's later runs of 34B begin with the time of their start. Until the next one starts they load, "
    "plan, and run six iterations, whose time is predicted. The rest is {start:.0f} s and {tick:.2f} s for each tick "
    "of a nano-batch that was planned, within {within:.0f} s. If iterations with 32,768 tokens took {factor} times as "
    "long, no such sum would be within {slow:.0f} s of all rests."
)
SLOW: Final = 1.35
LARGE: Final = 32768
"""Tokens of a nano-batch of 34B."""
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


def _left(record: Record) -> list[str]:
    runs = sorted((run for run in record["interim"] if run["system"] == "distca"), key=_error)
    far, near = ([run for run in runs if (abs(_error(run)) > FAR) == is_far] for is_far in (True, False))
    assert len(far) == 4
    fields = {name: _each(_if(run, name) for run in far) for name in record["worth"]["distca"]} | {
        OWN_DATA: _each(_if(run, OWN_DATA) if OWN_DATA in run["otherwise"] else _error(run) for run in far),
        "others": _percent(_size([_error(run) for run in near])),
        "signed": _signed(mean(map(_error, near))),
        "settings": "; ".join(dict.fromkeys(_what(run["setting"]) for run in far)),
        "buffers": ", ".join(f"{run['outcomes'][0]['buffer_bytes'] / 2**30:.1f}" for run in far),
        "own": _percent(_size([_if(run, OWN_DATA) or 0.0 for run in near if OWN_DATA in run["otherwise"]])),
        "slowest": _each(map(_slowest, far)),
        "full": _gb(min(run["kept_bytes"] for run in far)),
        "room": _gb(max(run["kept_bytes"] for run in near)),
        "again": _gb(far[0]["outcomes"][0]["memory_bytes"]),
        "kept": _gb(far[0]["kept_bytes"]),
        "most": _gb(max(run["memory_bytes"] for run in record["fits"] if run["fitted"])),
        "nothing": _signed(mean(_if(run, BOTH[-1]) or 0.0 for run in near)),
        **_opposite(near),
    }
    rows = [(cause, text.format_map(fields), verdict) for cause, text, verdict in EXAMINED]
    table = _table(("possible cause", "evidence", "the cause"), rows)
    return [LEFT.format_map(fields), "", *table, "", OPEN[0].format_map(fields), "", OPEN[1].format_map(fields)]


def _opposite(runs: Sequence[Record]) -> dict[str, str]:
    """Of 34B with 128K on 128 and 256 GPUs, and how far times of two runs of the same documents are apart."""
    on: dict[int, list[Record]] = {128: [], 256: []}
    alike: dict[str, list[float]] = {}
    for run in runs:
        of = run["setting"]
        alike.setdefault(_what(of), []).append(run["published_s"])
        if of["model"] == "34b" and of["context"] == 128 * K:
            on[of["gpus"]].append(run)
    small, large = (_signed(mean(map(_error, found))) for found in on.values())
    both = [
        " and ".join(_signed(mean(_if(run, name) or 0.0 for run in found)) for found in on.values()) + f" if {name}"
        for name in BOTH
    ]
    noise = max(max(times) / min(times) - 1 for times in alike.values())
    alone = _each(map(_slowest, on[256]), " and ")
    return {"small": small, "large": large, "both": "; ".join(both), "alone": alone, "noise": _percent(noise)}


def _walls(record: Record) -> list[str]:
    runs = record["walls"]
    ticks = np.array([2 * ITERATIONS * (run["plan"]["microbatches"] + run["plan"]["stages"] - 1) for run in runs])
    tokens = [_nano_batch(run) for run in runs]
    predicted, wall = (np.array([run[name] for run in runs]) for name in ("predicted_s", "wall_s"))
    columns = np.stack([np.ones(len(runs)), ticks], axis=1)

    def unexplained(seconds: Floats) -> tuple[Floats, float]:
        """What fits best of what is left, and how much it leaves at most."""
        found = np.linalg.lstsq(columns, seconds, rcond=None)[0]
        return found, float(np.abs(seconds - columns @ found).max())

    (start, tick), within = unexplained(wall - predicted)
    _, slow = unexplained(wall - predicted * np.where(np.array(tokens) >= LARGE, SLOW, 1.0))
    rows = []
    for run, size, count in zip(runs, tokens, ticks, strict=True):
        times = (f"{s:.0f}" for s in (run["wall_s"], run["predicted_s"], run["wall_s"] - run["predicted_s"]))
        rows.append((_what(run["setting"]), _cut(run["plan"]), f"{size:,}", *times, count))
    names = "run", "plan", "tokens of a nano-batch", "start to start s", "six iterations, predicted", "rest", "ticks"
    return [WALLS.format(start=start, tick=tick, within=within, slow=slow, factor=SLOW), "", *_table(names, rows)]


def _cut(plan: Record) -> str:
    return f"{plan['stages']} stages, {plan['microbatches']} microbatches"


def _nano_batch(run: Record) -> int:
    """Tokens of a GPU in one nano-batch."""
    of, plan = run["setting"], run["plan"]
    replicas = of["gpus"] // TP // plan["stages"]
    return int(of["sequences"] * of["context"] // replicas // plan["microbatches"] // 2)


def _if(run: Record, name: str) -> float | None:
    """Error under an assumption; None where no plan fits into memory then."""
    return run["otherwise"][name] / run["published_s"] - 1 if name in run["otherwise"] else None


def _slowest(run: Record) -> float:
    """Error if the slowest plan were the one that counts."""
    return float(run["outcomes"][-1]["time_s"] / run["published_s"] - 1)


def _each(errors: Iterable[float | None], between: str = ", ") -> str:
    return between.join("does not fit" if error is None else _signed(error) for error in errors)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.0f}"


def _fits(record: Record) -> list[str]:
    rows = []
    for run in sorted(record["fits"], key=lambda run: run["memory_bytes"]):
        needed = (_gb(run[name]) for name in ("memory_bytes", "kept_bytes"))
        rows.append((_what(run["setting"]), _cut(run["plan"]), "yes" if run["fitted"] else "no", *needed))
    return _table(("run", "plan", "fitted", "GB", "GB if nothing were computed again"), rows)


def _what(of: Record) -> str:
    return f"{of['model']}, {of['gpus']} GPUs, {of['context'] // K}K x {of['sequences']}"


def _runs(record: Record) -> list[str]:
    rows = []
    for run in sorted(record["interim"], key=_error):
        of, first = run["setting"], run["outcomes"][0]
        plan, time_s = first["plan"], first["time_s"]
        cut = _cut(plan) + f", CP {plan['cp']}" * (plan["cp"] > 1)
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
