"""How accurate cpsim means to be: targets of the product, which do not follow results.

A test calls ``check``: a target that is met passes, one that is missed without being listed as missed fails, and one
that is listed as missed is reported as an expected failure with its cause.
"""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Target:
    most: float
    """Largest error, as a share of the measured value."""
    missed: str = ""
    """Why it is missed today; empty where it is met."""


EVENTS = "kernels' times no longer contain what CUDA events cost, and errors that had cancelled no longer do"
HELD = "not understood"
FEW = "profile a100 rests on few published calls and on ratios of data sheets"
TARGETS = {
    "runs, ours, 1 ms or more, mean": Target(0.02),
    "runs, ours, shorter, mean": Target(0.05),
    "runs, ours, by strategy, signed": Target(0.021),
    "ranks, mean": Target(0.015),
    "ranks, shorter than 1 ms, mean": Target(0.02),
    "ranks, later, mean": Target(0.02),
    "ranks, unseen, mean": Target(0.011),
    "ranks, unseen, worst": Target(0.065),
    "ranks, unseen again, mean": Target(0.013, EVENTS),
    "ranks, unseen again, signed": Target(0.005, EVENTS),
    "ranks, unseen again, worst": Target(0.09),
    "ranks, others' code, mean": Target(0.03),
    "holds fwd, mean": Target(0.02, HELD),
    "holds fwd, worst": Target(0.10, HELD),
    "holds bwd, mean": Target(0.02, HELD),
    "holds bwd, worst": Target(0.10, HELD),
    "A100, flash-attn 2's table, mean": Target(0.035, FEW),
    "A100, flash-attn 2's table, worst": Target(0.11, FEW),
    "DCP's ranges fwd, mean": Target(0.025, EVENTS),
    "DCP's ranges bwd, mean": Target(0.05),
}


def check(name, value):
    """Whether a measured error meets its target."""
    target = TARGETS[name]
    if abs(value) <= target.most:
        return
    said = f"{name}: {value:.2%}, target {target.most:.2%}"
    if target.missed:
        pytest.xfail(f"{said}: {target.missed}")
    raise AssertionError(said)
