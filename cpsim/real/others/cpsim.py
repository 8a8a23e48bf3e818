"""cpsim's own executor as a runner: the plan that predictions are made from, on this rank."""

from __future__ import annotations

from statistics import median

from cpsim.case.resolve import cluster_of, workload_of
from cpsim.case.scenario import Scenario
from cpsim.case.workload import LATENT
from cpsim.errors import InfeasibleError
from cpsim.models.feasible import check_calls
from cpsim.real.run.executor import Executor
from cpsim.real.run.node import Node
from cpsim.real.run.timing import time_ops
from cpsim.schedule.schedule import Pass
from cpsim.strategies.steps.layer import plan_scenario

ATTENTION_RUNS = 8


class ScheduleRunner:
    """Launches a schedule; there is nothing to prepare, since its inputs stay."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def prepare(self) -> None:
        """Nothing: a backward schedule is given the forward pass's results."""

    def launch(self) -> None:
        """One run."""
        self.executor.launch()

    def attention_s(self) -> float:
        """Median seconds of this rank's attention kernels, without communication."""
        program, device = self.executor.program, self.executor.node.device
        return median(time_ops(program.attend, ATTENTION_RUNS, device)[1:])


def make(scenario: Scenario, pass_: Pass, node: Node) -> ScheduleRunner:
    """One pass of a scenario on this rank, on random tensors; plain PyTorch attention where there is no GPU.

    Raises:
        InfeasibleError: the strategy or the kernel cannot run the case.
    """
    workload, cluster = workload_of(scenario), cluster_of(scenario)
    if workload.sparse is not None:
        raise InfeasibleError("sparse: the executor attends to all keys; ask `cpsim predict`, or leave sparse out")
    if (workload.head_dim, workload.value_dim) == LATENT:
        raise InfeasibleError("value_dim: the executor keeps values apart from keys; ask `cpsim predict` about latents")
    schedule = plan_scenario(scenario, workload, cluster, pass_)
    if node.cuda:
        check_calls(scenario.kernel, workload.dtype, workload.head_dim, schedule, value_dim=workload.value_dim)
    executor = Executor(schedule, workload, node, scenario.kernel if node.cuda else "math", traced=node.traced)
    executor.fill(seed=node.rank)
    return ScheduleRunner(executor)
