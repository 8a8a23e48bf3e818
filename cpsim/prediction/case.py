"""A case: a scenario with everything looked up that its predictions need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cpsim.case.cluster import Cluster
from cpsim.case.resolve import cluster_of, workload_of
from cpsim.case.scenario import Scenario
from cpsim.case.workload import Workload
from cpsim.errors import ScenarioError, check_name
from cpsim.models.conditions import Conditions
from cpsim.models.derive import DATA_SHEET
from cpsim.models.feasible import kernel_names
from cpsim.models.host_speed import on_host
from cpsim.models.network.described import with_inside
from cpsim.models.profile import Profile, derived_profile, load_profile
from cpsim.prediction.conditions import conditions
from cpsim.prediction.size import check_size
from cpsim.strategies import STRATEGIES
from cpsim.strategies.others import Implementation, implementation

FALLBACK: Final = "fa2"
"""The kernel of GPUs that do not run that of scenarios that name none."""


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario and what its names stand for."""

    scenario: Scenario
    workload: Workload
    cluster: Cluster
    profile: Profile

    @property
    def code(self) -> Implementation:
        """Whose code runs the strategy."""
        return implementation(self.scenario.implementation).calling(self.scenario.kernel, bool(self.scenario.compile))

    def conditions(self) -> Conditions:
        """What its schedules are priced under."""
        scenario = self.scenario
        return conditions(
            self.code,
            scenario.strategy,
            self.workload,
            self.cluster,
            self.profile,
            scenario.kernel,
            scenario.protocol,
        )


def check_names(scenario: Scenario) -> None:
    """Whether strategy, implementation and kernel of a scenario are known.

    Raises:
        ScenarioError: one is not; lists those that are.
    """
    if scenario.strategy is not None:
        check_name("strategy", scenario.strategy, STRATEGIES)
    implementation(scenario.implementation)
    check_name("kernel", scenario.kernel, kernel_names())


def resolve(scenario: Scenario) -> Case:
    """The case that a scenario describes.

    Raises:
        ScenarioError: it has no strategy, or asks for something that is not there.
        InfeasibleError: it would take too long to predict.
        ProfileError: there are no costs for its GPU.
    """
    check_names(scenario)
    if scenario.strategy is None:
        raise ScenarioError(
            f"strategy: expected one of {', '.join(STRATEGIES)}, got no strategy; name one, or ask `cpsim advise`"
        )
    cluster = cluster_of(scenario)
    check_size(scenario, cluster)
    name = scenario.profile or cluster.profile or DATA_SHEET
    special = cluster.faults or (cluster.fabric and cluster.fabric.spine_oversubscription > 1)
    if special and scenario.model is not None and scenario.part is None:
        raise ScenarioError(
            f"cluster: faults and leaf switches of {cluster.name} are for attention alone; expected neither with a "
            "model, since the step model would ignore them: leave them, or the model, out"
        )
    profile = profile_of(cluster, name)
    host = scenario.host if scenario.host is not None else cluster.host
    if host is not None:
        profile = on_host(profile, host)
    kernel = kernel_of(scenario, profile)
    return Case(scenario.model_copy(update={"kernel": kernel}), workload_of(scenario), cluster, profile)


def kernel_of(scenario: Scenario, profile: Profile) -> str:
    """The kernel that a scenario names; where it names none, and its GPU does not run the default, flash-attn 2."""
    if "kernel" in scenario.model_fields_set or (scenario.kernel, "fwd") in profile.attention:
        return scenario.kernel
    return FALLBACK if (FALLBACK, "fwd") in profile.attention else scenario.kernel


def profile_of(cluster: Cluster, name: str) -> Profile:
    """A profile by name, or one derived from a GPU's description, with the links that the cluster's file states."""
    return with_inside(derived_profile(cluster.gpu) if name == DATA_SHEET else load_profile(name), cluster)
