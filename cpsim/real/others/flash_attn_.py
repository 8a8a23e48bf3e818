"""flash-attn's own functions on one GPU."""

from __future__ import annotations

from torch import Tensor

from cpsim.case.scenario import Scenario
from cpsim.real.others.autograd import AutogradRunner, check, compiled, offsets_of, shards
from cpsim.real.run.node import Node


def make(scenario: Scenario, pass_: str, node: Node) -> AutogradRunner:
    """One pass of a scenario.

    Raises:
        InfeasibleError: flash-attn cannot run the case.
    """
    check(scenario, node, {})
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    inputs, causal = shards(scenario, node), scenario.mask_name.startswith("causal")
    make_runner = compiled if scenario.compile else AutogradRunner
    if "document" not in scenario.mask_name:
        return make_runner(lambda q, k, v: flash_attn_func(q, k, v, causal=causal), [x[None] for x in inputs], pass_)
    offsets, longest = offsets_of(scenario, 1, node.device)
    same = offsets.clone()  # torch.compile refuses one tensor as two arguments of an autograd function

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(q, k, v, offsets, same, longest, longest, causal=causal)
        return out

    return make_runner(packed, inputs, pass_)
