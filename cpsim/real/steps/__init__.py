"""Whole training steps in other people's frameworks: one module per framework, each with a function that makes a model,
or a step where a framework runs models its own way.

An iteration is a step: gradients set to none, forward passes, loss and backward passes of all microbatches, gradients
summed over replicas, and AdamW (fused). Covered by tests/test_real_steps_cpu.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError
from cpsim.real.run.node import Node
from cpsim.real.steps.cut import cut_of
from cpsim.real.steps.step import StepModel, StepRunner, Steps

MODULES: Final = {"torch": "llama_torch", "huggingface": "hugging_face", "megatron": "megatron"}


def make(scenario: Scenario, node: Node) -> Steps:
    """A step of a scenario on this rank, on random tokens.

    Raises:
        InfeasibleError: the framework cannot run the case, or is not installed; says why.
    """
    framework = scenario.framework or "megatron"
    if framework not in MODULES:
        raise InfeasibleError(f"framework: {framework} cannot be run here; expected one of {', '.join(MODULES)}")
    try:
        module = import_module(f"cpsim.real.steps.{MODULES[framework]}")
        cut = cut_of(scenario, node)
        made: StepModel | Steps = module.make(cut, node)
        return StepRunner(made, cut, node) if isinstance(made, StepModel) else made
    except ModuleNotFoundError as error:
        raise InfeasibleError(f"framework: {framework} needs package {error.name}, which is not installed") from None
