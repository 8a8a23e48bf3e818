"""Plans on two real GPUs: cases for ``cpsim run``, and what they gain, predicted and measured.

    python -m studies.plan.two_gpus write            # data/cases/two-plans.jsonl
    python -m cpsim predict data/cases/two-plans.jsonl --out studies/plan/predicted-two-plans.jsonl
    python -m cpsim run data/cases/two-plans.jsonl --gpus 2 --out runs.jsonl
    python -m studies.plan.two_gpus compare runs.jsonl

Every case is a whole batch under one planner: attention of one layer, forward and backward, of all documents in the
planner's groups and order. Planners get prices of attention alone. Batches are skewed: some are drawn, others have one
document for both GPUs and many short ones of one length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from cpsim.case.cluster import load_cluster
from cpsim.case.documents import draw_documents
from cpsim.case.load import scenario_from
from cpsim.case.scenario import Scenario
from cpsim.prediction.batches.plan import plan_batch
from cpsim.prediction.batches.prices import Prices, prices_of
from cpsim.prediction.runs import load_runs
from cpsim.runtime.files import write
from studies.plan.megatron import Rule
from studies.plan.timetable import Timetable, of_plan

CASES: Final = Path(__file__).parents[2] / "data" / "cases"
SAID: Final = Path(__file__).parent / "predicted-two-plans.jsonl"
CLUSTER: Final = "dgx-h100"
GPUS: Final = 2
KERNEL: Final = "fa2"
MODEL: Final = "llama3-8b"
MOST_TOKENS: Final = 2**14
TOKENS: Final = 2**16
"""Of a batch."""
ROUNDED: Final = 128
SEEDS: Final = (5, 6)
PLANNERS: Final = ("megatron", "cpsim alone", "cpsim")
"""In the order of the file, for every batch."""
DRAWN: Final = ("prolong512k", "magi", "distca_pretrain", "prolong64k")


def batches() -> dict[str, list[int]]:
    """Documents of every batch by its name: drawn ones, and one long document with short ones of one length."""
    found = {}
    for name, seed in product(DRAWN, SEEDS):
        drawn = np.array(draw_documents(name, TOKENS, seed, max_length=2 * MOST_TOKENS))
        found[f"{name}, seed {seed}"] = (-(-drawn // ROUNDED) * ROUNDED).tolist()
    for short in (512, 2048, 6144):
        found[f"one of 32768 and many of {short}"] = [2 * MOST_TOKENS] + [short] * ((TOKENS - 2 * MOST_TOKENS) // short)
    return found


def prices() -> Prices:
    """Of attention on the two GPUs."""
    cluster = load_cluster(CLUSTER).with_gpus(GPUS)
    return prices_of(cluster, MODEL, part="attention", most_tokens=MOST_TOKENS, kernel=KERNEL)


def timetables(known: Prices, lengths: Sequence[int]) -> dict[str, Timetable]:
    """Every planner's."""
    where = known.case.cluster
    return {
        "megatron": Rule(GPUS, MOST_TOKENS).timetable(lengths),
        "cpsim alone": of_plan(plan_batch(lengths, where, MODEL, pack=False, prices=known)),
        "cpsim": of_plan(plan_batch(lengths, where, MODEL, prices=known)),
    }


def groups_of(table: Timetable) -> list[list[int]]:
    """A timetable as knob ``groups`` of ``hybrid_cp``: size, number and turn of every document's group."""
    free, found = np.zeros(table.num_ranks, np.int64), dict[int, list[int]]()
    for turns in table.rounds:
        free[:] = free.max()
        for turn in turns:
            ranks = slice(turn.first_rank, turn.first_rank + turn.size)
            at = int(free[ranks].max())
            free[ranks] = at + 1
            found |= {d: [turn.size, turn.first_rank // turn.size, at] for d in turn.documents}
    return [found[d] for d in sorted(found)]


def case_of(table: Timetable, lengths: Sequence[int], **changes: Any) -> dict[str, Any]:
    """Fields of a scenario that runs a timetable's attention."""
    fields = {"gpus": GPUS, "cluster": CLUSTER, "kernel": KERNEL, "heads": 32, "kv_heads": 8, "head_dim": 128}
    return {
        "strategy": "hybrid_cp",
        "knobs": {"groups": groups_of(table)},
        "mask": "causal_document",
        "tokens": int(sum(lengths)),
        "documents": list(lengths),
        **fields,
        **changes,
    }


def cases() -> list[dict[str, Any]]:
    """All cases, planner by planner for every batch."""
    known = prices()
    return [case_of(table, lengths) for lengths in batches().values() for table in timetables(known, lengths).values()]


def text() -> str:
    """The file of cases."""
    return "".join(json.dumps(case) + "\n" for case in cases())


def read_cases() -> dict[str, dict[str, Scenario]]:
    """The written cases by batch and planner: plans stay what they were when they were predicted."""
    lines = (CASES / "two-plans.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [scenario_from(json.loads(line)) for line in lines]
    rows = batched(asked, len(PLANNERS))
    return {name: dict(zip(PLANNERS, row, strict=True)) for name, row in zip(batches(), rows, strict=True)}


def batched(scenarios: Sequence[Scenario], size: int) -> list[Sequence[Scenario]]:
    """Scenarios in rows of so many."""
    return [scenarios[i : i + size] for i in range(0, len(scenarios), size)]


def compared(times: dict[str, float]) -> list[str]:
    """Lines: of every batch what planners save over Megatron-Core's.

    Args:
        times: seconds by scenario, see ``key``.
    """
    lines = []
    for name, asked in read_cases().items():
        found = {planner: times.get(key(scenario)) for planner, scenario in asked.items()}
        base = found.pop("megatron")
        saved = {planner: 100 * (1 - s / base) for planner, s in found.items() if base and s}
        if base and saved:
            words = ", ".join(f"{planner} {share:+.1f} %" for planner, share in saved.items())
            lines.append(f"{name}: megatron {base * 1e3:.2f} ms, saved by {words}")
    return lines


def key(scenario: Scenario) -> str:
    """What a case is known by."""
    return json.dumps([scenario.documents, scenario.knobs], default=list)


def main(arguments: Sequence[str]) -> None:
    """Writes cases, or prints predicted and measured gains."""
    if list(arguments) == ["write"]:
        write(CASES / "two-plans.jsonl", text())
        return
    if len(arguments) != 2 or arguments[0] != "compare":
        sys.exit("two_gpus: expected write, or compare and a file of runs")
    lines = SAID.read_text(encoding="utf-8").splitlines()
    said = {key(scenario_from(row["scenario"])): row["time_s"] for row in map(json.loads, lines)}
    measured = {key(run.scenario): median(run.samples_s) for run in load_runs(Path(arguments[1])) if not run.error}
    for title, times in (("predicted", said), ("measured", measured)):
        print(title, *compared(times), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
