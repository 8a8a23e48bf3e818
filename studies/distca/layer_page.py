"""Writes studies/distca/layers.md: whole layers on H200, measured and predicted, with distca's attention and others'.

    python studies/distca/layer_page.py

Runs are those of data/runs, made by `cpsim.real.run`; nothing is fitted to them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from cpsim.calibrate.recipes import DATA
from cpsim.case.resolve import workload_of
from cpsim.case.scenario import Scenario
from cpsim.models.price import price
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.runs import Run, load_runs
from cpsim.schedule.schedule import ATTENTION_KINDS, is_one_of
from cpsim.strategies.steps.layer import plan_scenario

FOLDER = Path(__file__).parent
RUNS = sorted((DATA / "runs").rglob("h200*-distca-layer.jsonl"))
PAGE = FOLDER / "layers.md"
STRATEGIES = ("distca", "per_sequence", "wlb")
HEAD = """# Layers with DistCA's attention on H200

Written by `python studies/distca/layer_page.py` from data/runs. One Llama-3-8B layer, forward
and backward with gradients of all weights, flash-attn 2, weights whole on each GPU. Nothing is fitted to these runs.
Balance: attention kernels of the slowest server over the mean of all, each server alone.

"""
TABLE = (
    "| GPUs | tokens | documents, longest | strategy | measured ms | predicted | error | balance fwd, bwd | "
    "predicted | memory GB | predicted |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)
MARGIN = 1.05
"""From this predicted ratio on, which of two is faster is compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """One layer, measured and predicted."""

    run: Run
    seconds: float
    memory: int
    balances: tuple[tuple[float, float], ...]
    """Of every pass: attention of the slowest server over the mean of all, measured and predicted."""

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.seconds / self.run.time_s - 1

    @property
    def memory_error(self) -> float:
        """The same of peak memory."""
        return self.memory / self.run.peak_memory_bytes - 1

    @property
    def problem(self) -> tuple[int, int, tuple[int, ...]]:
        """What strategies are compared on: GPUs, tokens and documents."""
        scenario = self.run.scenario
        return scenario.gpus, scenario.num_tokens, workload_of(scenario).documents


def compared(run: Run) -> Case:
    """A run with its prediction."""
    prediction = predict(run.scenario)
    predicted = predicted_balance(run.scenario)
    measured = [max(p.attention_s) / mean(p.attention_s) for p in run.passes.values()]
    return Case(run, prediction.time_s, prediction.peak_memory_bytes, tuple(zip(measured, predicted, strict=True)))


def predicted_balance(scenario: Scenario) -> list[float]:
    """Attention of the slowest server over the mean of all, of every pass, each kernel alone."""
    case, found = resolve(scenario), []
    for pass_ in scenario.passes:
        schedule = plan_scenario(scenario, case.workload, case.cluster, pass_)
        ops = np.flatnonzero(is_one_of(schedule.kind, ATTENTION_KINDS))
        seconds = price(schedule, case.conditions()).work.duration_s[ops]
        busy = np.bincount(schedule.lane_rank[schedule.lane_start[ops]], seconds, schedule.num_ranks)
        found.append(float(busy.max() / busy.mean()))
    return found


def choices(cases: Sequence[Case]) -> tuple[int, int, list[str]]:
    """How often distca is measured faster than per_sequence where that is predicted by more than MARGIN, of how many
    such cases; and those where it is not."""
    right, wanted, wrong = 0, 0, []
    for problem in dict.fromkeys(case.problem for case in cases):
        here = {case.run.scenario.strategy: case for case in cases if case.problem == problem and _is_plain(case)}
        if not {"distca", "per_sequence"} <= set(here):
            continue
        ours, theirs = here["distca"], here["per_sequence"]
        if theirs.seconds > MARGIN * ours.seconds:
            wanted += 1
            right += theirs.run.time_s > ours.run.time_s
            wrong += [] if theirs.run.time_s > ours.run.time_s else [f"{problem[1]} tokens"]
    return right, wanted, wrong


def _is_plain(case: Case) -> bool:
    return not case.run.scenario.knobs


def _label(case: Case) -> str:
    scenario = case.run.scenario
    knobs = ", ".join(f"{k} {v}" for k, v in scenario.knobs.items())
    return f"{scenario.strategy}{f' ({knobs})' if knobs else ''}"


def text(cases: Sequence[Case]) -> str:
    """The page."""
    rows = [_row(case) for case in sorted(cases, key=lambda case: (case.problem, _label(case)))]
    return HEAD + "\n".join([*_errors(cases), "", _choice(cases), "", *TABLE, *rows]) + "\n"


def _errors(cases: Sequence[Case]) -> list[str]:
    times = {"time": [case.error for case in cases]}
    times |= {f"time, {n}": [c.error for c in cases if c.run.scenario.strategy == n] for n in STRATEGIES}
    times |= {"peak memory": [case.memory_error for case in cases]}
    off = [abs(predicted - measured) for case in cases for measured, predicted in case.balances]
    return [
        "| | mean | worst | signed |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {_percent(mean(map(abs, e)))} | {_percent(max(map(abs, e)))} | {100 * mean(e):+.1f} % |"
            for name, e in times.items()
            if e
        ),
        f"| balance | {mean(off):.3f} | {max(off):.3f} | |",
    ]


def _choice(cases: Sequence[Case]) -> str:
    right, wanted, wrong = choices(cases)
    but = f"; not with {', '.join(wrong)}" if wrong else ""
    return (
        f"`distca` is measured faster than `per_sequence` in {right} of the {wanted} problems where it is predicted to "
        f"be by more than {100 * (MARGIN - 1):.0f} %{but}."
    )


def _row(case: Case) -> str:
    gpus, tokens, documents = case.problem
    measured, predicted = zip(*case.balances, strict=True)
    ms, memory = (case.run.time_s * 1e3, case.seconds * 1e3), (case.run.peak_memory_bytes / 1e9, case.memory / 1e9)
    cells = (
        f"{gpus}",
        f"{tokens // 1024}K",
        f"{len(documents)}, {max(documents)}",
        _label(case),
        f"{ms[0]:.2f}",
        f"{ms[1]:.2f}",
        f"{100 * case.error:+.1f} %",
        _pair(measured),
        _pair(predicted),
        f"{memory[0]:.2f}",
        f"{memory[1]:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def _pair(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main() -> None:
    if not RUNS:
        sys.exit("data/runs: no runs yet; CONTRIBUTING.md says how to make them")
    runs = [run for path in RUNS for run in load_runs(path) if run.error is None]
    PAGE.write_text(text([compared(run) for run in runs]), encoding="utf-8")


if __name__ == "__main__":
    main()
