"""Whose code runs a strategy: facts about implementations that their schedules follow from.

Planners read a row of ``IMPLEMENTATIONS`` where an implementation differs from our executor; the schedule of a case
is then that implementation's own. Every fact is read in the source or seen in a profile, none is fitted. ``facts`` has
the words, and a file for each code base what it does. A new framework is such a file and a row of ``IMPLEMENTATIONS``;
one that cannot run here is a row that a study adds.
Covered by tests/test_implementations.py.
"""

from __future__ import annotations

from typing import Final

from cpsim.errors import ScenarioError, check_name
from cpsim.strategies.others.facts import (
    DENSE,
    DOCUMENTS,
    GatherCode,
    HalvesCode,
    HeldRingCode,
    Implementation,
    RingCode,
    RowKernel,
    RowKernels,
    Support,
    UlyssesCode,
    WrapperCode,
)
from cpsim.strategies.others.flash_attn import PLAIN
from cpsim.strategies.others.ring_flash_attn import RING_FLASH_ATTN, YUNCHANG
from cpsim.strategies.others.torch_cp import TORCH

__all__ = [
    "CPSIM",
    "DENSE",
    "DOCUMENTS",
    "IMPLEMENTATIONS",
    "RUN_HERE",
    "GatherCode",
    "HalvesCode",
    "HeldRingCode",
    "Implementation",
    "RingCode",
    "RowKernel",
    "RowKernels",
    "Support",
    "UlyssesCode",
    "WrapperCode",
    "implementation",
]

CPSIM: Final = Implementation(name="cpsim", source="this repository", captured=True)

RUN_HERE: Final = (CPSIM, RING_FLASH_ATTN, YUNCHANG, TORCH, PLAIN)
"""Code that `cpsim run` runs."""
IMPLEMENTATIONS: Final[dict[str, Implementation]] = {code.name: code for code in RUN_HERE}
"""By name; studies add what they read in code that cannot run here."""


_STUDIES: Final = "is known after `import studies`, in a checkout"
_ENGINE: Final = (
    "its context parallelism is Transformer Engine's, whose cp_comm_type p2p is strategy zigzag_ring, a2a ulysses, "
    "all_gather allgather and a2a+p2p usp; name the strategy, or ask `cpsim advise --framework megatron` for steps"
)
ELSEWHERE: Final = {
    "megatron": f"megatron is a framework of training steps: {_ENGINE}",
    "megatron-core": f"megatron-core is a framework of training steps: {_ENGINE}",
    "nemo": f"nemo runs Megatron-Core's steps: {_ENGINE}",
    "transformer-engine": f"transformer-engine {_STUDIES}; of Megatron {_ENGINE}",
    "torchtitan": "torchtitan is a framework of training steps: its attention is implementation torch; ask `cpsim "
    "advise --framework torchtitan` for whole steps",
    "huggingface": "huggingface is a framework of training steps: its context parallelism is implementation torch; ask "
    "`cpsim advise --framework huggingface` for whole steps",
    "magi-attention": f"magi-attention {_STUDIES}; strategy magi with kernel fa4 is the nearest here",
    "deepspeed": "deepspeed's Ulysses has not been read; implementation yunchang with strategy ulysses is the nearest",
}
"""What people call implementations, and is another thing or elsewhere."""


def implementation(name: str) -> Implementation:
    """A row of the table.

    Raises:
        ScenarioError: nobody has read that code yet, or the name is one of another thing; says what to do.
    """
    if name not in IMPLEMENTATIONS and name.lower() in ELSEWHERE:
        raise ScenarioError(f"implementation: {ELSEWHERE[name.lower()]}")
    check_name("implementation", name, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[name]
