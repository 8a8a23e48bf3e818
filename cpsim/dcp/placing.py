"""Placing blocks on ranks: one function, dispatched on the variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cpsim.dcp.blocks import Blocks, Placement
from cpsim.errors import ScenarioError

VARIANTS: Final = ("paper", "released", "cpsim")
SOLVERS: Final = ("mtkahypar", "kahypar", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How blocks are placed and computations staged."""

    variant: str = "paper"
    """One of ``VARIANTS``."""
    eps_inter: float = 0.4
    """Work of a node over the mean, at most, less 1."""
    eps_intra: float = 0.1
    """Work of a GPU over the mean of its node, at most, less 1; the two compound."""
    stages: int = 4
    """Stages with communication (``released``), or all stages (``paper``)."""
    solver: str = "mtkahypar"
    """One of ``SOLVERS``; variant ``cpsim`` has its own."""


def plan_blocks(blocks: Blocks, shape: tuple[int, int], settings: Settings, seed: int) -> Placement:
    """Homes of token blocks and workers of computation blocks, the same for the same arguments.

    Args:
        blocks: what to place.
        shape: (nodes, GPUs of each); ranks fill one node after another.
        settings: variant and its knobs.
        seed: of whatever is random.

    Raises:
        ScenarioError: there is no such variant, or it is not available yet.
    """
    del blocks, shape, seed
    if settings.variant not in VARIANTS:
        raise ScenarioError(f"knobs.variant: expected one of {', '.join(VARIANTS)}, got {settings.variant!r}")
    raise ScenarioError(f"knobs.variant: {settings.variant!r} is not available yet")
