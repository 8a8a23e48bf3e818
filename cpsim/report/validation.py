"""All that predictions were compared with: the closest published run of a step, and a scatter of everything.

The data are those of ``docs/checked.py``: runs of our machines that no fit reads, and published steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cpsim.case.resolve import cluster_of, model_of
from cpsim.prediction.step.frameworks import DEFAULT
from cpsim.report.figures import PALETTE, Figure, house, log_axis, titled
from cpsim.report.page import table
from cpsim.report.words import percent_text, seconds_text, signed_percent

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario
    from cpsim.prediction.results import Column

EXPERTS: Final = " with experts"
GPU_APART, CP_APART = 1.0, 1.0
"""How far other GPUs, and no context parallelism instead of some, are apart, in doublings of a size."""
CLOSEST: Final = 8
"""Published steps in the table of the closest ones."""
CLOSEST_HEAD: Final = ("run", "GPU", "GPUs", "cp", "sequence", "measured s", "predicted")
SYMBOLS: Final = ("circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "star", "hexagon")
CAPTION: Final = (
    "Every run that was predicted and not fitted: attention, layers and steps on our machines, and steps that others "
    "published. Hover says which; click a name to hide it, double-click to see it alone."
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One run with its error."""

    group: str
    """Whose code, or what."""
    what: str
    gpu: str
    gpus: int
    cp: int
    context: int
    """Tokens of a sequence; 0 where nobody says."""
    billions: float
    """Of parameters; 0 of attention."""
    seconds: float
    """As measured."""
    error: float
    """Predicted over measured, less one."""


@cache
def compared() -> tuple[Compared, ...]:
    """All runs."""
    path = Path(__file__).parent.with_name("data").joinpath("validation.json")
    return tuple(Compared(*row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"])


def closest(scenario: Scenario, cp: int, count: int = 1) -> list[Compared]:
    """The published steps that are most like a step, of the same framework; none where it has none.

    Args:
        scenario: a training step.
        cp: its context-parallel ranks.
        count: how many, at most.
    """
    name = scenario.framework or DEFAULT
    kind = name + EXPERTS * scenario._has_experts
    size, gpu = model_of(scenario).parameters() / 1e9, cluster_of(scenario).gpu.name.split()[-1].upper()

    def apart(one: Compared) -> float:
        sizes = (one.gpus, scenario.gpus), (one.context, scenario.context or 0), (one.billions, size)
        far = sum(abs(log2(a / b)) for a, b in sizes if a and b)
        return far + GPU_APART * (one.gpu.upper() != gpu) + CP_APART * ((one.cp > 1) != (cp > 1))

    return sorted((one for one in compared() if one.group == kind), key=apart)[:count]


def closest_text(scenario: Scenario, cp: int) -> str:
    """The same in a sentence."""
    found = closest(scenario, cp)
    if not found:
        return f"No published step of {scenario.framework or DEFAULT} is known."
    one = found[0]
    context = f", sequences of {one.context:,}" if one.context else ""
    return (
        f"Closest published run: {one.what}, {one.gpus} {one.gpu}{context}: {seconds_text(one.seconds)} s, predicted "
        f"{signed_percent(one.error)}."
    )


def closest_html(scenario: Scenario, cp: int) -> str:
    """The published steps that are closest to one as a table, nearest first; nothing where there are none."""
    rows = [
        (
            one.what,
            one.gpu,
            str(one.gpus),
            str(one.cp),
            f"{one.context:,}" if one.context else "",
            seconds_text(one.seconds),
            signed_percent(one.error),
        )
        for one in closest(scenario, cp, CLOSEST)
    ]
    return f"<h3>Closest published steps</h3>{table(CLOSEST_HEAD, rows, num_text=2)}" if rows else ""


def validation_columns() -> dict[str, Column]:
    """All runs as columns, in SI units."""
    names = ("group", "what", "gpu", "gpus", "cp", "context", "billions", "seconds", "error")
    return {name: np.array([getattr(one, name) for one in compared()]) for name in names}


def scatter() -> Figure:
    """Errors of all runs over how long they took, a colour and symbol for every group."""
    groups = list(dict.fromkeys(one.group for one in compared()))
    data = [
        _points(group, [one for one in compared() if one.group == group], PALETTE[i % len(PALETTE)], SYMBOLS[i % 9])
        for i, group in enumerate(groups)
    ]
    axes = {
        "xaxis": log_axis("measured time [s]", [one.seconds for one in compared()]),
        "yaxis": titled("error of the prediction [%]", range=[-70, 70], zeroline=True),
    }
    return {"data": data, "layout": house(560, top=110) | axes | {"shapes": _band(10), "hovermode": "closest"}}


def _points(group: str, some: Sequence[Compared], colour: str, symbol: str) -> dict[str, Any]:
    mean = sum(abs(one.error) for one in some) / len(some)
    return {
        "type": "scattergl" if len(some) > 3000 else "scatter",
        "mode": "markers",
        "name": f"{group}: {len(some)}, {percent_text(mean)} off",
        "x": [one.seconds for one in some],
        "y": [100 * one.error for one in some],
        "marker": {"color": colour, "symbol": symbol, "size": 6, "opacity": 0.6},
        "customdata": [f"{escape(one.what)}, {one.gpus} {one.gpu}" for one in some],
        "hovertemplate": "%{customdata}<br>%{x:.3g} s, predicted %{y:+.1f} %<extra>" + escape(group) + "</extra>",
    }


def _band(percent: float) -> list[dict[str, Any]]:
    """Lines at errors of so many percent."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"dash": "dot", "width": 1}}
    return [line | {"y0": y, "y1": y} for y in (-percent, percent)]
