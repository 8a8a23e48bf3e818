"""Placing blocks on ranks: first on nodes, then on the GPUs of each node."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np

from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.strategies.dcp.balanced import place
from cpsim.strategies.dcp.blocks import Blocks, Placement
from cpsim.strategies.dcp.hypergraph import Level, Parts, even_tokens, even_work, greedy
from cpsim.strategies.dcp.solvers import SOLVE, fold
from cpsim.strategies.dcp.timing import Rates

VARIANTS: Final = ("paper", "released", "cpsim")
SOLVERS: Final = (*SOLVE, "greedy")
RELEASED: Final = 100.0
"""Weight of the smallest token block over that of all work, in DCP's code; 32 bits then leave computations few units,
or one, where blocks are many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How blocks are placed and computations staged."""

    variant: str = "cpsim"
    """One of ``VARIANTS``."""
    eps_inter: float = 0.4
    """Work of a node over the mean, at most, less 1."""
    eps_intra: float = 0.1
    """Work of a GPU over the mean of its node, at most, less 1; the two compound. ``cpsim`` has this one alone, over
    the mean of all GPUs."""
    stages: int = 4
    """Stages with communication (``released``), or all stages."""
    solver: str = "mtkahypar"
    """One of ``SOLVERS``; variant ``cpsim`` has its own."""

    def __post_init__(self) -> None:
        for name, choices in (("variant", VARIANTS), ("solver", SOLVERS)):
            if getattr(self, name) not in choices:
                raise ScenarioError(f"knobs.{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("eps_inter", "eps_intra"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
                raise ScenarioError(f"knobs.{name}: expected a number from 0 to 100, got {value!r}")
        if type(self.stages) is not int or self.stages < 1:
            raise ScenarioError(f"knobs.stages: expected a positive integer, got {self.stages!r}")


def plan_blocks(blocks: Blocks, shape: tuple[int, int], rates: Rates, settings: Settings, seed: int) -> Placement:
    """Homes of token blocks and workers of computation blocks, the same for the same arguments.

    Args:
        blocks: what to place.
        shape: (nodes, GPUs of each); ranks fill one node after another.
        rates: of the machine; only variant ``cpsim`` looks at them.
        settings: variant and its knobs.
        seed: of whatever is random.

    Raises:
        InfeasibleError: the variant's solver is not installed.
    """
    if settings.variant == "cpsim":
        return place(blocks, shape, rates, settings.eps_intra, settings.stages, seed)
    return _by_level(blocks, shape, settings, np.random.default_rng(seed))


def _by_level(blocks: Blocks, shape: tuple[int, int], settings: Settings, rng: np.random.Generator) -> Placement:
    nodes, gpus = shape
    solver, level = settings.solver, Level.of(blocks)
    if solver != "greedy" and find_spec(solver) is None:
        raise InfeasibleError(
            f"dcp: variant {settings.variant} needs a hypergraph partitioner, and {solver} is not installed; "
            f"pip install {solver}, or use variant: cpsim, which needs none"
        )
    of_node = _partition(level, nodes, settings.eps_inter, settings.variant, solver, rng)
    home, worker = np.empty(len(blocks), np.int64), np.empty(blocks.computations, np.int64)
    for node in range(nodes):
        data, chosen = np.flatnonzero(of_node.data == node), np.flatnonzero(of_node.work == node)
        inside = Level(blocks, data, chosen)
        of_gpu = _partition(inside, gpus, settings.eps_intra, settings.variant, solver, rng)
        home[data], worker[chosen] = node * gpus + of_gpu.data, node * gpus + of_gpu.work
    return Placement(home, worker, solver)


def _partition(level: Level, num_parts: int, eps: float, variant: str, solver: str, rng: np.random.Generator) -> Parts:
    """One level. The paper's two constraints hold at the end; its code takes what a solver makes of the folded one."""
    if num_parts == 1 or not len(level.chosen):
        parts = Parts(np.zeros(len(level.data), np.int64), np.zeros(len(level.chosen), np.int64))
        return even_tokens(level, parts, num_parts)
    limit = (1 + eps) * level.work.sum() / num_parts
    if solver == "greedy":
        return greedy(level, limit, num_parts, rng)
    tokens = level.tokens
    # the paper's: a block of tokens outweighs the work that a part may have; the released code's: all work
    per_token = RELEASED / tokens.min() if variant == "released" else 2 * (1 + eps) / num_parts / tokens.max()
    parts = SOLVE[solver](level, num_parts, fold(level, num_parts, eps, per_token), rng)
    if variant == "released":
        return parts
    return even_work(level, even_tokens(level, parts, num_parts), limit, num_parts)
