"""Where the best strategy changes: a map over sequence length and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from math import lcm
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cpsim.case.resolve import cluster_of
from cpsim.case.scenario import MAX_TOKENS, Scenario
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.report.lengths import MIN_TOKENS_PER_GPU, best_of_strategies, scaled_documents
from cpsim.report.words import knobs_text, ms_text
from cpsim.units import format_count

if TYPE_CHECKING:
    from cpsim.prediction.results import Advice, Column
    from cpsim.report.figures import Figure
    from cpsim.runtime.processes import Progress

NODES: Final = (1, 2, 4, 8, 12)
LENGTHS: Final = (1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Sequence lengths as multiples of the case's."""
MAX_TOKENS_PER_GPU: Final = 131_072
"""Longer shards are left out: nobody trains so, and their kernels take long to price."""
SLOW: Final = ("dcp", "distca")
"""Strategies whose planning takes longer than a map may: they are left out."""
MAP_CAPTION: Final = (
    "The fastest strategy at other lengths and on other numbers of GPUs, forward and backward, each strategy with the "
    "settings that are best for the case, or, where they cannot run, the first worth trying; "
    f"{' and '.join(SLOW)} take too long to plan for a map and are left out. Given documents are scaled."
)
Knobs = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The best strategy at one length and number of GPUs."""

    gpus: int
    tokens: int
    """Tokens of the whole sequence."""
    strategy: str = ""
    """Empty where none can run."""
    knobs: str = ""
    time_s: float = float("nan")
    """Forward and backward."""


def cells(scenario: Scenario) -> list[Scenario]:
    """This case at other lengths and on other numbers of GPUs, as far as its cluster has them.

    Lengths are those of the case times ``LENGTHS``, rounded so that every number of GPUs divides them.
    """
    cluster = cluster_of(scenario)
    node = cluster.gpus_per_node
    counts = [count * node for count in NODES] if cluster.fabric else [2, node // 2, node]
    gpus = sorted({count for count in (*counts, scenario.gpus) if count > 1})
    unit = lcm(*gpus)
    tokens = sorted({max(1, round(scenario.num_tokens * factor / unit)) * unit for factor in LENGTHS})
    made = []
    for count in gpus:
        for total in tokens:
            if MIN_TOKENS_PER_GPU * count <= total <= min(MAX_TOKENS, MAX_TOKENS_PER_GPU * count):
                documents = scenario.documents
                if isinstance(documents, tuple):
                    documents = scaled_documents(documents, total)
                changes = {"gpus": count, "tokens": total, "tokens_per_gpu": None, "documents": documents}
                made.append(scenario.model_copy(update=changes | {"strategy": None, "knobs": {}, "pass_": "fwd_bwd"}))
    return made


def known_knobs(advice: Advice) -> dict[str, Knobs]:
    """The best knobs of every strategy of a recommendation, fastest strategy first."""
    return {str(best.scenario.strategy): best.scenario.knobs for best in best_of_strategies(advice)}


def best_in(scenario: Scenario, known: Mapping[str, Knobs]) -> Cell:
    """The best strategy of one cell.

    A strategy has the knobs that are best for the case of the map, or, where they cannot run here, the first that are
    worth trying. Its backward pass, which is never shorter than its forward pass, is left out where two of these
    take longer than the best so far.

    Args:
        scenario: one of ``cells``.
        known: ``known_knobs`` of the map's case; strategies that it names are tried first.
    """
    from cpsim.prediction.advise import strategies_to_try
    from cpsim.prediction.predict import predict

    best = Cell(gpus=scenario.gpus, tokens=scenario.num_tokens)
    names = [name for name in strategies_to_try(scenario) if name not in SLOW]
    limit = float("inf")
    for name in sorted(names, key=lambda name: list(known).index(name) if name in known else len(known)):
        for knobs in _tries(scenario, name, known):
            asked = scenario.model_copy(update={"strategy": name, "knobs": dict(knobs)})
            try:
                seconds = predict(asked.model_copy(update={"pass_": "fwd"})).time_s
                seconds += predict(asked.model_copy(update={"pass_": "bwd"})).time_s if 2 * seconds < limit else limit
            except (InfeasibleError, ScenarioError):
                continue
            if seconds < limit:
                limit = seconds
                words = knobs_text(asked.knobs)
                best = Cell(gpus=best.gpus, tokens=best.tokens, strategy=name, knobs=words, time_s=seconds)
            break
    return best


def predict_cells(advice: Advice, progress: Progress | None = None) -> list[Cell]:
    """The map around the case of a recommendation, on all cores."""
    from cpsim.runtime.processes import mapped

    return mapped(partial(best_in, known=known_knobs(advice)), cells(advice.scenario), None, progress)


def _tries(scenario: Scenario, name: str, known: Mapping[str, Knobs]) -> Iterator[Knobs]:
    from cpsim.prediction.advise import settings

    if name in known:
        yield known[name]
    with suppress(InfeasibleError):
        yield from settings(scenario.model_copy(update={"strategy": name}))[:1]


def cell_columns(found: Sequence[Cell]) -> dict[str, Column]:
    """Cells as columns, in SI units."""
    names = ("gpus", "tokens", "strategy", "knobs", "time_s")
    return {name: np.array([getattr(cell, name) for cell in found]) for name in names}


def frontier(asked: Sequence[Scenario], found: Sequence[Cell]) -> Figure:
    """The map, as far as its cells are found: a colour for every best strategy, with its time.

    Args:
        asked: all of ``cells``.
        found: those that are answered, in any order.
    """
    from cpsim.report.figures import OTHER_COLOUR, PALETTE, house, ink_on, titled
    from cpsim.strategies import STRATEGIES

    gpus, tokens = (sorted(set(values)) for values in ([s.gpus for s in asked], [s.num_tokens for s in asked]))
    on_map = [name for name in STRATEGIES if name not in ("none", *SLOW)]
    colour = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(on_map)}
    data = []
    for name in [name for name in STRATEGIES if any(cell.strategy == name for cell in found)] + [""]:
        here = [cell for cell in found if cell.strategy == name]
        ground = colour.get(name, OTHER_COLOUR)
        data.append(
            {
                "type": "bar",
                "name": name or "none can run",
                "showlegend": bool(here),
                "width": 1.0,
                "x": [tokens.index(cell.tokens) for cell in here],
                "y": [1.0] * len(here),
                "base": [gpus.index(cell.gpus) - 0.5 for cell in here],
                "marker": {"color": ground, "line": {"color": "white", "width": 2}},
                "text": [f"{escape(name)}<br>{ms_text(cell.time_s)} ms" if name else "none" for cell in here],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "textfont": {"color": ink_on(ground)},
                "constraintext": "none",
                "customdata": list(map(_cell_text, here)),
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    axes = {
        "xaxis": titled(
            "sequence length [tokens]",
            range=[-0.5, len(tokens) - 0.5],
            showgrid=False,
            zeroline=False,
            tickvals=list(range(len(tokens))),
            ticktext=list(map(format_count, tokens)),
        ),
        "yaxis": titled(
            "GPUs",
            range=[-0.5, len(gpus) - 0.5],
            showgrid=False,
            zeroline=False,
            tickvals=list(range(len(gpus))),
            ticktext=list(map(str, gpus)),
        ),
    }
    return {"data": data, "layout": house(170 + 62 * len(gpus)) | axes | {"barmode": "overlay", "bargap": 0}}


def _cell_text(cell: Cell) -> str:
    best = f"{escape(cell.strategy)} ({escape(cell.knobs)})" if cell.knobs else escape(cell.strategy)
    return f"{cell.gpus} GPUs, {format_count(cell.tokens)} tokens: {best or 'none can run'}"
