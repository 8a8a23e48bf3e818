"""Published steps of Nemotron 3 Nano (23 Mamba-2, 23 mixtures of experts, 6 attention) beside predictions.

python -m studies.recurrent.published say      writes said.jsonl, to be committed before errors are looked at
python -m studies.recurrent.published          published, said before, and predicted now

Said before means: with scans of published kernels on H100 and estimated backward passes, before any was measured here.

Lines are those of Megatron-Bridge's performance summaries (`studies/public/tables/megatron_bridge_summary.csv`). Their
configurations say: tokens are sent once to each rank (HybridEP), even routing, MXFP8, nothing computed again
(perf_recipes/nemotronh/gb200/nemotronh.py, `moe_flex_dispatcher_backend`, `recompute_modules`), attention, Mamba-2 and
routers in CUDA graphs (`cuda_graph_scope`).
Not said by a scenario: attention in FP8 and experts in one kernel, which later releases have on GB200 and GB300.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, Final

from studies.public.predict import predicted
from studies.public.readers.bridge import PRECISIONS, PROFILES, SYSTEMS
from studies.public.row import FOLDER, Line, Row

MODEL: Final = "Nemotron_3_Nano"
SAID: Final = Path(__file__).with_name("said.jsonl")


def lines() -> Iterator[Line]:
    """Published lines of the model."""
    with (FOLDER / "tables" / "megatron_bridge_summary.csv").open(encoding="utf-8", newline="") as file:
        yield from (line for line in csv.DictReader(file) if line["model"] == MODEL)


def row(line: Line) -> Row:
    """A line as a scenario."""
    gpus, batch, sequences = int(line["gpus"]), int(line["mbs"]), int(line["gbs"])
    system, seq = line["system"], int(line["seq"])
    gpu = system.removeprefix("DGX-")
    fields: dict[str, Any] = {
        "framework": "megatron",
        "cluster": SYSTEMS[system],
        **({"profile": PROFILES[gpu]} if gpu in PROFILES else {}),
        "gpus": gpus,
        "tokens": sequences * seq,
        "context": seq,
        "mask": "causal",
        "strategy": "none",
        "kernel": "cudnn",
        "protocol": "streamed",
        "model": "nemotron-3-nano-30b-a3b",
        "precision": PRECISIONS[line["precision"].lower()],
        "parallel": {
            "ep": int(line["ep"]),
            "batch": batch,
            "microbatches": sequences // gpus // batch,
            "dispatcher": "flex",
            "cuda_graphs": "attention",
        },
    }
    name = f"{line['release']} {gpus} {system} {line['precision']}"
    seconds = float(line["step_s_derived"])
    return Row(name=name, gpu=gpu, gpus=gpus, framework="megatron-bridge", fields=fields, time_s=seconds)


def say() -> None:
    """Predictions, one line each."""
    with SAID.open("w", encoding="utf-8") as file:
        for line in lines():
            one = row(line)
            found = predicted(one)
            said = {"name": one.name, "time_s": found.time_s, "low_s": found.time_s_low, "high_s": found.time_s_high}
            file.write(json.dumps(said if not found.why else {"name": one.name, "why": found.why}) + "\n")


def compare() -> None:
    """A table, and the mean of all."""
    before = {one["name"]: one for one in map(json.loads, SAID.read_text(encoding="utf-8").splitlines())}
    errors, known = [], dict[str, float]()
    print("| release, GPUs, precision | published [s] | said before [s] | error | inside | predicted now [s] | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for line in lines():
        one = row(line)
        said, key = before[one.name], json.dumps(one.fields)
        assert one.time_s is not None
        if key not in known:
            known[key] = predicted(one).time_s or 0.0
        errors.append((said["time_s"] / one.time_s - 1, known[key] / one.time_s - 1))
        inside = "yes" if said["low_s"] <= one.time_s <= said["high_s"] else "no"
        cells = f"{one.time_s:.2f} | {said['time_s']:.2f} | {errors[-1][0]:+.1%} | {inside}"
        print(f"| {one.name} | {cells} | {known[key]:.2f} | {errors[-1][1]:+.1%} |")
    for name, each in zip(("said before", "now"), zip(*errors, strict=True), strict=True):
        print(f"\n{name}: {len(each)} steps, mean error {mean(map(abs, each)):.1%}, signed {mean(each):+.1%}")


if __name__ == "__main__":
    say() if sys.argv[1:] == ["say"] else compare()
