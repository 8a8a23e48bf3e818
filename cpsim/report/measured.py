"""Predictions of one case beside its real runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cpsim.report.figures import PALETTE, Figure, bar_label, house, rows_height, titled
from cpsim.report.words import strategy_label
from cpsim.units import MS_PER_S

if TYPE_CHECKING:
    from cpsim.prediction.compare import Pair
    from cpsim.prediction.results import Column


def measured_columns(pairs: Sequence[Pair]) -> dict[str, Column]:
    """Pairs as columns, in SI units; ``error`` is predicted over measured time, less one."""
    return {
        "strategy": np.array([_label(pair) for pair in pairs], dtype=str),
        "measured_s": np.array([pair.run.time_s for pair in pairs]),
        "predicted_s": np.array([pair.predicted.time_s for pair in pairs]),
        "predicted_s_low": np.array([pair.predicted.time_s_low for pair in pairs]),
        "predicted_s_high": np.array([pair.predicted.time_s_high for pair in pairs]),
        "error": np.array([pair.error for pair in pairs]),
        "date": np.array([str(pair.run.header.get("date", "")) for pair in pairs], dtype=str),
    }


def measured(pairs: Sequence[Pair]) -> Figure:
    """A row for every way to compute the case: its prediction with the 90 % interval, and every run of it."""
    columns = measured_columns(sorted(pairs, key=lambda pair: pair.predicted.time_s))
    labels = [bar_label(label) for label in columns["strategy"].tolist()]
    low, mean, high = (columns[f"predicted_s{end}"] * MS_PER_S for end in ("_low", "", "_high"))
    between = {"type": "data", "symmetric": False, "array": (high - mean).tolist(), "arrayminus": (mean - low).tolist()}
    cross = {"color": PALETTE[1], "size": 11, "symbol": "x-thin", "line": {"width": 2.5, "color": PALETTE[1]}}
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "predicted, 90 % interval",
            "y": labels,
            "x": mean.tolist(),
            "error_x": between,
            "marker": {"color": PALETTE[0], "size": 9},
            "hovertemplate": "%{y}: predicted %{x:.4g} ms<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "measured",
            "y": labels,
            "marker": cross,
            "x": (columns["measured_s"] * MS_PER_S).tolist(),
            "customdata": [f"{error:+.1%}" for error in columns["error"].tolist()],
            "hovertemplate": "%{y}: measured %{x:.4g} ms, the prediction is off by %{customdata}<extra></extra>",
        },
    ]
    axes = {
        "xaxis": titled("time, slowest GPU [ms]", rangemode="tozero"),
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    return {"data": data, "layout": house(170 + rows_height(set(labels), 40)) | axes}


def _label(pair: Pair) -> str:
    code = pair.scenario.implementation
    return strategy_label(pair.scenario) + ("" if code == "cpsim" else f", {code}")
