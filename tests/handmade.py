"""Predictions and a recommendation made by hand: real schedules, invented times."""

from __future__ import annotations

import numpy as np

from cpsim.case.load import scenario_from
from cpsim.case.resolve import cluster_of, workload_of
from cpsim.case.scenario import Scenario
from cpsim.prediction.results import Advice, Candidate, Infeasible, Prediction
from cpsim.prediction.runs import PassRun, Run
from cpsim.schedule.schedule import Kind
from cpsim.sim.timeline import Timeline
from cpsim.strategies import plan

CASE = {
    "gpus": 8,
    "cluster": "dgx-h200",
    "tokens_per_gpu": 4096,
    "documents": {"distribution": "prolong512k", "seed": 42},
    "mask": "causal_document",
    "heads": 32,
    "kv_heads": 8,
}
NOTE = "network between nodes: published figures of <others> & co, not measured here"


def timeline(scenario: Scenario, pass_: str) -> Timeline:
    """Ops as early as lanes and dependencies allow, with durations from their area and bytes."""
    schedule = plan(scenario.strategy, workload_of(scenario), cluster_of(scenario), pass_, scenario.knobs)
    area = np.where(
        np.isin(schedule.kind, (Kind.ATTENTION, Kind.ATTENTION_BACKWARD)),
        schedule.tiles.area[schedule.tile],
        0,
    )
    duration = 1e-6 + area * 4.0 * 128 * 32 / 5e14 + schedule.nbytes / 2e11
    start, end = np.zeros(len(schedule)), np.zeros(len(schedule))
    lanes: dict[tuple[int, int], float] = {}
    for i in range(len(schedule)):
        deps = schedule.dep[schedule.dep_start[i] : schedule.dep_start[i + 1]]
        own = slice(schedule.lane_start[i], schedule.lane_start[i + 1])
        keys = list(zip(schedule.lane_rank[own].tolist(), schedule.lane_stream[own].tolist(), strict=True))
        start[i] = max([end[deps].max(initial=0.0), *(lanes.get(key, 0.0) for key in keys)])
        end[i] = start[i] + duration[i]
        lanes.update(dict.fromkeys(keys, end[i]))
    return Timeline(schedule, start, end, np.arange(len(schedule), dtype=np.int32))


def prediction(scenario: Scenario, time_s: float = 0.01, with_timelines: bool = False) -> Prediction:
    passes = {"fwd": ["fwd"], "bwd": ["bwd"], "fwd_bwd": ["fwd", "bwd"]}[scenario.pass_]
    return Prediction(
        scenario=scenario,
        time_s=time_s,
        time_s_low=time_s * 0.95,
        time_s_high=time_s * 1.06,
        draws_s=(time_s,) * 3,
        tflops_per_gpu=412.3,
        exposed_comm_s=time_s * 0.12,
        host_share=0.0,
        bytes_sent_per_gpu=117e6,
        planning_s=0.0,
        peak_memory_bytes=1_480_000_000,
        parts_s={"attention fwd": time_s * 0.8, "transfer": time_s * 0.2},
        notes=(NOTE,),
        timelines={name: timeline(scenario, name) for name in passes} if with_timelines else {},
    )


def candidate(strategy: str, total_s: float, probability_best: float, **knobs: object) -> Candidate:
    scenario = scenario_from(CASE | {"strategy": strategy, "knobs": knobs})
    forward = prediction(scenario.model_copy(update={"pass_": "fwd"}), total_s * 0.3, with_timelines=True)
    backward = prediction(scenario.model_copy(update={"pass_": "bwd"}), total_s * 0.7, with_timelines=True)
    return Candidate(
        forward=forward,
        backward=backward,
        total_s=total_s,
        total_s_low=total_s * 0.96,
        total_s_high=total_s * 1.05,
        tflops_per_gpu=3.2 / total_s,
        exposed_share=0.12,
        peak_memory_bytes=1_480_000_000,
        probability_best=probability_best,
    )


def advice() -> Advice:
    """Four candidates, two that cannot run, one note."""
    scenario = scenario_from(CASE)
    reason = "needs all 32,768 tokens on one GPU: 1 expected, got 8; use a context-parallel strategy"
    cannot = [
        scenario.model_copy(update={"strategy": "none"}),
        scenario.model_copy(update={"strategy": "usp"}),
    ]
    return Advice(
        scenario=scenario,
        candidates=(
            candidate("zigzag_ring", 0.0074, 0.83),
            candidate("ulysses", 0.0079, 0.16, head_groups=1),
            candidate("allgather", 0.0096, 0.01, heads_per_gather=2),
            candidate("ring", 0.0131, 0.0),
        ),
        infeasible=tuple(Infeasible(scenario=entry, reason=reason) for entry in cannot),
        notes=(NOTE, "attention: extrapolated beyond 65,536 tokens"),
    )


def run(strategy: str) -> Run:
    """A real run of the case, of 10 ms a pass."""
    passes = {name: PassRun(samples_s=(0.01,) * 3, rank_time_s=(0.01,) * 8) for name in ("fwd", "bwd")}
    return Run(scenario=scenario_from(CASE | {"strategy": strategy}), passes=passes, header={"gpu": "NVIDIA H200"})


def lengths() -> list[Prediction]:
    """Every candidate at four lengths."""
    from cpsim.report.lengths import at_length

    made = []
    for entry in advice().candidates:
        for factor in (0.25, 0.5, 1, 2, 4):
            scenario = at_length(entry.scenario, factor)
            assert scenario is not None
            made.append(prediction(scenario, entry.total_s * factor**1.4))
    return made
