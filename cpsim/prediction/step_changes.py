"""What makes a training step fit into memory that does not: single changes that its framework has, each predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from cpsim.case.parallel import Parallel, Recompute, Sharding
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.results import Change
from cpsim.prediction.step.frameworks import Framework
from cpsim.prediction.step.step import Step
from cpsim.prediction.steps import StepCase

RECOMPUTE: Final[tuple[Recompute, ...]] = ("none", "selective", "per_op", "mlp", "full")
"""The least first."""
SHARDING: Final[tuple[Sharding, ...]] = ("none", "zero1", "zero2", "fsdp")
"""The least first."""
CHUNKS: Final = (8, 64)
"""Parts of the loss that are tried."""
TILES: Final = 16
"""Chunks of the MLP that are tried."""
NAMED: Final = 3
"""Changes that an answer names."""
Fields = Mapping[str, str | int]


def would_fit(steps: StepCase, parallel: Parallel, strategy: str, knobs: Mapping[str, Any]) -> tuple[Change, ...]:
    """Single changes with which a step fits, fastest first, at most ``NAMED``.

    Args:
        steps: the step of a scenario.
        parallel: how it is cut.
        strategy, knobs: of context parallelism; where a change is the first to have any, the fastest is taken.
    """
    found: list[Change] = []
    if strategy == "none":  # which says nothing of several context-parallel ranks
        steps = replace(steps, scenario=steps.scenario.model_copy(update={"strategy": None, "knobs": {}}))
    for fields, changed in changes(parallel, steps.framework, steps.cluster.gpus_per_node):
        if any(fields.keys() == one.change.keys() for one in found):  # a smaller change of the kind does
            continue
        step = _fitting(steps, changed, strategy, knobs)
        if step is not None:
            found.append(Change(change=fields, time_s=step.time_s, needed_bytes=step.needed_bytes))
    return tuple(sorted(found, key=lambda one: one.time_s)[:NAMED])


def changes(parallel: Parallel, framework: Framework, gpus_per_node: int) -> Iterator[tuple[Fields, Parallel]]:
    """Single changes that need less memory, small ones of a kind first; sequences keep their length."""
    for recompute in stronger(RECOMPUTE, parallel.recompute, framework.recomputes):
        yield {"recompute": recompute}, replace(parallel, recompute=recompute)
    if parallel.replicas > 1:
        for sharding in stronger(SHARDING, parallel.sharding, framework.shardings):
            yield {"sharding": sharding}, replace(parallel, sharding=sharding)
    if parallel.replicate > 1:
        yield {"replicate": 1}, replace(parallel, replicate=1)
    for chunks in CHUNKS:
        if chunks > parallel.loss_chunks:
            yield {"loss_chunks": chunks}, replace(parallel, loss_chunks=chunks)
    if framework.tiles_mlp and parallel.tp == parallel.mlp_chunks == 1:
        yield {"mlp_chunks": TILES}, replace(parallel, mlp_chunks=TILES)
    for name in ("tp", "cp"):
        factor = 2
        while parallel.dp % factor == 0 and (name == "cp" or parallel.tp * factor <= gpus_per_node):
            degree = getattr(parallel, name) * factor
            fewer = replace(parallel, dp=parallel.dp // factor, microbatches=parallel.microbatches * factor)
            yield {name: degree}, replace(fewer, **{name: degree})
            factor *= 2


def stronger(order: tuple[str, ...], now: str, known: tuple[str, ...]) -> list[Any]:
    """Those after one in an order, of those that a framework has."""
    return [name for name in order[order.index(now) + 1 :] if name in known]


def _fitting(steps: StepCase, parallel: Parallel, strategy: str, knobs: Mapping[str, Any]) -> Step | None:
    """The step cut like this, if it can run and fits."""
    try:
        if steps.least_memory(parallel) > steps.cluster.gpu.memory_bytes:
            return None
        if parallel.cp > 1 and strategy == "none":
            strategy, knobs = steps.best_strategy(parallel)
        step = steps.simulate(parallel, strategy, knobs)
    except (InfeasibleError, ScenarioError):
        return None
    return step if step.fits else None
