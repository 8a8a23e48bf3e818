"""cpsim predicts which context-parallel attention strategy to run, how long it takes, and how sure one can be."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cpsim.case.cluster import Cluster, load_cluster
    from cpsim.case.load import grid, load_scenario, load_scenarios
    from cpsim.case.resolve import cluster_of, workload_of
    from cpsim.case.scenario import Scenario
    from cpsim.case.workload import Workload
    from cpsim.errors import (
        CpsimError,
        InfeasibleError,
        NotMeasuredError,
        OutOfMemoryError,
        ProfileError,
        ScenarioError,
        ScheduleError,
    )
    from cpsim.prediction.advise import advise
    from cpsim.prediction.batches.plan import plan_batch
    from cpsim.prediction.batches.prices import prices_of
    from cpsim.prediction.batches.result import BatchPlan
    from cpsim.prediction.predict import predict, predict_many, sweep
    from cpsim.prediction.results import Advice, Candidate, Infeasible, Prediction
    from cpsim.schedule.builder import Builder
    from cpsim.schedule.check import validate
    from cpsim.schedule.schedule import Kind, Schedule
    from cpsim.schedule.work import Work
    from cpsim.sim.fast import simulate
    from cpsim.sim.reference import simulate_reference
    from cpsim.sim.timeline import Timeline
    from cpsim.strategies import STRATEGIES, plan

_HOME: Final = {
    "cpsim.case.cluster": ("Cluster", "load_cluster"),
    "cpsim.errors": (
        "CpsimError",
        "InfeasibleError",
        "NotMeasuredError",
        "OutOfMemoryError",
        "ProfileError",
        "ScenarioError",
        "ScheduleError",
    ),
    "cpsim.prediction.advise": ("advise",),
    "cpsim.prediction.batches.plan": ("plan_batch",),
    "cpsim.prediction.batches.prices": ("prices_of",),
    "cpsim.prediction.batches.result": ("BatchPlan",),
    "cpsim.prediction.predict": ("predict", "predict_many", "sweep"),
    "cpsim.case.load": ("grid", "load_scenario", "load_scenarios"),
    "cpsim.case.resolve": ("cluster_of", "workload_of"),
    "cpsim.prediction.results": ("Advice", "Candidate", "Infeasible", "Prediction"),
    "cpsim.case.scenario": ("Scenario",),
    "cpsim.schedule.builder": ("Builder",),
    "cpsim.schedule.schedule": ("Kind", "Schedule"),
    "cpsim.sim.fast": ("simulate",),
    "cpsim.sim.reference": ("simulate_reference",),
    "cpsim.sim.timeline": ("Timeline",),
    "cpsim.schedule.work": ("Work",),
    "cpsim.strategies": ("STRATEGIES", "plan"),
    "cpsim.schedule.check": ("validate",),
    "cpsim.case.workload": ("Workload",),
}
_MODULE_OF: Final = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "STRATEGIES",
    "Advice",
    "BatchPlan",
    "Builder",
    "Candidate",
    "Cluster",
    "CpsimError",
    "Infeasible",
    "InfeasibleError",
    "Kind",
    "NotMeasuredError",
    "OutOfMemoryError",
    "Prediction",
    "ProfileError",
    "Scenario",
    "ScenarioError",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "Work",
    "Workload",
    "advise",
    "cluster_of",
    "grid",
    "load_cluster",
    "load_scenario",
    "load_scenarios",
    "plan",
    "plan_batch",
    "predict",
    "predict_many",
    "prices_of",
    "simulate",
    "simulate_reference",
    "sweep",
    "validate",
    "workload_of",
]


def __getattr__(name: str) -> object:
    """Load a public name on first use: importing cpsim costs nothing, and SimPy only loads for its engine."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cpsim' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
