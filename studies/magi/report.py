"""Published throughputs beside predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.report.tables import table
from cpsim.report.words import signed_percent
from studies.magi.reproduce import READING_ERROR, Row, Score, grouped, rank_correlations, summary


def reproduction_view(rows: Sequence[Row], worst: int) -> RenderableType:
    """Rows, worst first; errors by strategy and mask and by strategy; order of strategies; the summary."""
    each = table(
        ("strategy", "left"),
        ("mask", "left"),
        ("pass", "left"),
        ("GPUs", "right"),
        ("published TFLOP/s", "right"),
        ("predicted", "right"),
        ("error", "right"),
    )
    for row in sorted(rows, key=lambda row: -abs(row.error))[:worst]:
        each.add_row(
            row.strategy,
            row.mask,
            row.pass_,
            str(row.gpus),
            f"{row.published:.0f}",
            f"{row.predicted:.0f}",
            signed_percent(row.error),
        )
    pairs = _scores("strategy, mask", grouped(rows, lambda r: f"{r.strategy}, {r.mask}"))
    return Group(
        each,
        Text(),
        pairs,
        Text(),
        _scores("strategy", grouped(rows, lambda r: r.strategy)),
        Text(),
        _order(rows),
        Text(),
        _scores("rows", summary(rows)),
    )


def _scores(what: str, scores: dict[str, Score]) -> RenderableType:
    made = table((what, "left"), ("rows", "right"), ("mean error", "right"), ("signed", "right"))
    for name, score in scores.items():
        made.add_row(name, str(score.rows), f"{100 * score.mean_absolute:.1f} %", signed_percent(score.bias))
    return made


def _order(rows: Sequence[Row]) -> RenderableType:
    every, clear = rank_correlations(rows), rank_correlations(rows, 2 * READING_ERROR)
    made = table(("mask", "left"), ("GPUs", "right"), ("pass", "left"), ("Kendall's tau", "right"), ("clear", "right"))
    for (mask, gpus, pass_), tau in every.items():
        made.add_row(mask, str(gpus), pass_, f"{tau:.2f}", f"{clear[mask, gpus, pass_]:.2f}")
    made.add_row("mean", "", "", f"{mean(every.values()):.2f}", f"{mean(clear.values()):.2f}")
    return Group(made, Text(f"clear: pairs that were published more than {2 * READING_ERROR:g} TFLOP/s apart"))


def reproduction_record(rows: Sequence[Row]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "rows": [
            {
                "strategy": row.strategy,
                "mask": row.mask,
                "pass": row.pass_,
                "gpus": row.gpus,
                "published_tflops_per_gpu": row.published,
                "predicted_tflops_per_gpu": round(row.predicted, 1),
            }
            for row in rows
        ],
        "scores": {name: asdict(score) for name, score in summary(rows).items()},
        "kendall_tau_mean": mean(rank_correlations(rows).values()),
        "kendall_tau_clear_mean": mean(rank_correlations(rows, 2 * READING_ERROR).values()),
    }
