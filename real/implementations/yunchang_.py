"""yunchang 0.6.4: Ulysses on FlashAttention 2; shards are contiguous."""

from __future__ import annotations

import torch.distributed as dist

from cpsim.scenario import Scenario
from real.implementations.autograd import AutogradRunner, check, shards
from real.node import Node


def make(scenario: Scenario, pass_: str, node: Node) -> AutogradRunner:
    """One pass of a scenario on this rank.

    Raises:
        InfeasibleError: the package cannot run the case.
    """
    check(scenario, node, {"head_groups": 1})
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    attention = UlyssesAttention(sequence_process_group=dist.group.WORLD, attn_type=AttnType.FA)
    causal = scenario.mask_name == "causal"
    inputs = [x[None] for x in shards(scenario, node)]
    return AutogradRunner(lambda q, k, v: attention(q, k, v, causal=causal), inputs, pass_)
