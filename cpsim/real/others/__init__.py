"""Whose code runs a scenario: one module per implementation, each with `make(scenario, pass_, node) -> Runner`.

Another framework is an adapter here. Covered by tests/test_real_implementations_cpu.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError
from cpsim.real.run.node import Node
from cpsim.real.run.runner import Runner

MODULES: Final = {
    "cpsim": "cpsim",
    "flash-attn": "flash_attn_",
    "ring-flash-attn": "ring_flash",
    "torch": "torch_cp",
    "yunchang": "yunchang_",
}


def make(scenario: Scenario, pass_: str, node: Node) -> Runner:
    """One pass of a scenario, or `fwd_bwd`, on this rank, in the code that the scenario names.

    Raises:
        InfeasibleError: that code cannot run the case, or is not installed; says why.
    """
    name = scenario.implementation
    if name not in MODULES:
        raise InfeasibleError(f"implementation: {name!r} cannot be run; expected one of {', '.join(MODULES)}")
    try:
        module = import_module(f"cpsim.real.others.{MODULES[name]}")
        runner: Runner = module.make(scenario, pass_, node)
    except ModuleNotFoundError as error:
        raise InfeasibleError(f"implementation: {name} needs package {error.name}, which is not installed") from None
    return runner
