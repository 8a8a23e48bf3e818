"""yunchang 0.6.4 on FlashAttention 2: Ulysses on contiguous shards, and USP with basic or zigzag rings.

USP's shards: chunk i, or chunks i and 2P - 1 - i, for place i of a ring, cut into equal runs for its Ulysses group.
A ring of one sends gradients of keys and values to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cpsim.case.resolve import cluster_of, workload_of
from cpsim.case.scenario import Scenario
from cpsim.real.others.autograd import AutogradRunner, check, forget_compiled, shards
from cpsim.real.run.node import Node
from cpsim.strategies.others import implementation
from cpsim.strategies.usp import ulysses_degree


def make(scenario: Scenario, pass_: str, node: Node) -> AutogradRunner:
    """One pass of a scenario on this rank.

    Raises:
        InfeasibleError: the package cannot run the case.
    """
    usp: dict[str, Any] = {"ulysses": None, "ring": "zigzag", "zigzag": "document", "placement": "head_first"}
    defaults: dict[str, Any] = usp if scenario.strategy == "usp" else {"head_groups": 1}
    check(scenario, node, defaults)
    attention = _hybrid(scenario, node, {**usp, **scenario.knobs}) if scenario.strategy == "usp" else _ulysses()
    causal = scenario.mask_name == "causal"
    inputs = [x[None] for x in shards(scenario, node)]
    return AutogradRunner(lambda q, k, v: attention(q, k, v, causal=causal), inputs, pass_)


def _ulysses() -> Callable[..., Tensor]:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    made: Callable[..., Tensor] = UlyssesAttention(sequence_process_group=dist.group.WORLD, attn_type=AttnType.FA)
    return made


def _hybrid(scenario: Scenario, node: Node, knobs: dict[str, Any]) -> Callable[..., Tensor]:
    """All ranks make it together, since it may make process groups."""
    from yunchang import LongContextAttention, ring
    from yunchang.globals import PROCESS_GROUP
    from yunchang.kernels import AttnType

    placement = str(knobs["placement"])
    degree = ulysses_degree(
        "usp",
        workload_of(scenario),
        cluster_of(scenario),
        knobs["ulysses"],
        placement,
        implementation(scenario.implementation),
    )
    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = _groups(
        dist.group.WORLD, degree, node.rank, node.size, placement == "head_first"
    )
    forget_compiled(ring.utils._update_out_and_lse)
    if not node.cuda:
        _carry_to_itself(ring.utils.RingComm)
    made: Callable[..., Tensor] = LongContextAttention(ring_impl_type=str(knobs["ring"]), attn_type=AttnType.FA)
    return made


@lru_cache
def _carry_to_itself(ring_comm: Any) -> None:
    """Copies what a ring of one sends to itself, which gloo, unlike NCCL, does not carry."""
    commit = ring_comm.commit

    def carried(comm: Any) -> None:
        if comm.world_size > 1:
            commit(comm)
            return
        for send, receive in zip(comm._ops[::2], comm._ops[1::2], strict=True):
            receive.tensor.copy_(send.tensor)
        comm._reqs = []

    ring_comm.commit = carried


@lru_cache
def _groups(_world: Any, degree: int, rank: int, size: int, head_first: bool) -> tuple[Any, Any]:
    """This rank's Ulysses group and ring, made once for every grid of a world of processes."""
    from yunchang import set_seq_parallel_pg
    from yunchang.globals import PROCESS_GROUP

    set_seq_parallel_pg(degree, size // degree, rank, size, use_ulysses_low=head_first)
    return PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG
