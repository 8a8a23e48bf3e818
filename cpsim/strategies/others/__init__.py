"""Whose code runs a strategy: facts about implementations that their schedules follow from.

Planners read a row of ``IMPLEMENTATIONS`` where an implementation differs from our executor; the schedule of a case
is then that implementation's own. Every fact is read in the source or seen in a profile, none is fitted. ``facts`` has
the words, and a file for each code base what it does. A new framework is such a file and a row of ``IMPLEMENTATIONS``.
Covered by tests/test_implementations.py.
"""

from __future__ import annotations

from typing import Final

from cpsim.errors import ScenarioError
from cpsim.strategies.others.dcp import DCP
from cpsim.strategies.others.facts import (
    DENSE,
    DOCUMENTS,
    GatherCode,
    HalvesCode,
    HeldRingCode,
    Implementation,
    RingCode,
    Support,
    Sweep,
    Sweeps,
    UlyssesCode,
    WrapperCode,
)
from cpsim.strategies.others.internevo import INTERNEVO
from cpsim.strategies.others.longca_bench import LONGCA_BENCH, MAGI_ATTENTION
from cpsim.strategies.others.ring_flash_attn import RING_FLASH_ATTN, YUNCHANG
from cpsim.strategies.others.torch_cp import TORCH
from cpsim.strategies.others.transformer_engine import TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_THD

__all__ = [
    "CPSIM",
    "DENSE",
    "DOCUMENTS",
    "IMPLEMENTATIONS",
    "GatherCode",
    "HalvesCode",
    "HeldRingCode",
    "Implementation",
    "RingCode",
    "Support",
    "Sweep",
    "Sweeps",
    "UlyssesCode",
    "WrapperCode",
    "implementation",
]

CPSIM: Final = Implementation(name="cpsim", source="this repository", captured=True)

IMPLEMENTATIONS: Final[dict[str, Implementation]] = {
    i.name: i
    for i in (
        CPSIM,
        RING_FLASH_ATTN,
        YUNCHANG,
        TORCH,
        LONGCA_BENCH,
        MAGI_ATTENTION,
        TRANSFORMER_ENGINE,
        TRANSFORMER_ENGINE_THD,
        INTERNEVO,
        DCP,
    )
}


def implementation(name: str) -> Implementation:
    """A row of the table.

    Raises:
        ScenarioError: nobody has read that code yet.
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ScenarioError(f"implementation: {name!r} is not available yet; available are {known}")
    return IMPLEMENTATIONS[name]
