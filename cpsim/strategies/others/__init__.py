"""Whose code runs a strategy: facts about implementations that their schedules follow from.

Planners read a row of ``IMPLEMENTATIONS`` where an implementation differs from our executor; the schedule of a case
is then that implementation's own. Every fact is read in the source or seen in a profile, none is fitted. ``facts`` has
the words, and a file for each code base what it does. A new framework is such a file and a row of ``IMPLEMENTATIONS``;
one that cannot run here is a row that a study adds.
Covered by tests/test_implementations.py.
"""

from __future__ import annotations

from typing import Final

from cpsim.errors import check_name
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


def implementation(name: str) -> Implementation:
    """A row of the table.

    Raises:
        ScenarioError: nobody has read that code yet.
    """
    check_name("implementation", name, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[name]
