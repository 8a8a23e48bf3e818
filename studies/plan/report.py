"""Planners side by side, and their regret, as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.report.tables import table
from studies.plan.compare import DISTRIBUTIONS, FASTER, PLANNERS, WORSE, Row, gains, records
from studies.plan.regret import Small, Wrong, spread

NAMES = {"megatron": "Megatron-Core", "flexsp": "FlexSP-like", "wlb": "WLB-like", "dcp": "DCP"}


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Whether bars are met, a line each."""
    found = []
    for name in DISTRIBUTIONS:
        mine = [gain for key, gain in gains(rows).items() if key[2] == name]
        low, middle = min(mine), mean(mine)
        word = "met" if middle >= FASTER else "missed"
        found.append(
            f"{name}: {middle:.0%} less time than Megatron-Core's scheduler in the mean of {len(mine)} batches, "
            f"{low:.1%} at least; bar {FASTER:.0%}: {word}"
        )
    others = sorted({row.planner for row in rows} - {"cpsim", "cpsim alone"})
    every = [gain for over in others for gain in gains(rows, over=over).values()]
    word = "met" if min(every) >= -WORSE else "missed"
    found.append(
        f"against any other planner and in any batch: {min(every):.1%} less time at least; "
        f"bar at most {WORSE:.0%} more: {word}"
    )
    return found


def compare_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Cells: of every setting and distribution the time of Megatron-Core's plan, and of others relative to it."""
    planners = [p for p in (*PLANNERS, "dcp") if any(row.planner == p for row in rows)]
    keys = dict.fromkeys((row.setting, row.gpus, row.distribution) for row in rows)
    found = []
    for key in keys:
        mine = [row for row in rows if (row.setting, row.gpus, row.distribution) == key]
        base = {row.seed: row.time_s for row in mine if row.planner == "megatron"}
        cells = [key[0], str(key[1]), key[2], str(len(base)), f"{mean(row.documents for row in mine):.0f}"]
        cells.append(f"{mean(base.values()):.1f}")
        for planner in planners[1:]:
            ratios = [row.time_s / base[row.seed] for row in mine if row.planner == planner]
            cells.append(f"{mean(ratios):.2f}" if ratios else "")
        ours = [row.planning_s for row in mine if row.planner == "cpsim"]
        found.append([*cells, f"{1e3 * mean(ours):.0f}"])
    head = ["model", "GPUs", "documents from", "batches", "documents", "Megatron-Core [s]"]
    return [[*head, *(NAMES.get(p, p) for p in planners[1:]), "planning [ms]"], *found]


def compare_view(rows: Sequence[Row]) -> RenderableType:
    """Times beside Megatron-Core's, and the bars."""
    head, *lines = compare_lines(rows)
    shown = table(*((name, "right" if i else "left") for i, name in enumerate(head)))
    for line in lines:
        shown.add_row(*line)
    return Group(shown, Text(), *map(Text, verdicts(rows)))


def small_lines(found: Sequence[Small]) -> list[list[str]]:
    """Cells: regret of every planner over all small batches with packs and without."""
    lines = [["microbatches", "planner", "batches", "mean", "95th percentile", "largest"]]
    for pack in (False, True):
        mine = [one for one in found if one.pack == pack]
        for planner in dict.fromkeys(p for one in mine for p in one.regret):
            values = [one.regret[planner] for one in mine if planner in one.regret]
            shares = [_percent(share) for share in spread(values).values()]
            kind = "packed" if pack else "one document each"
            lines.append([kind, NAMES.get(planner, planner), str(len(values)), *shares])
    return lines


def wrong_lines(found: Sequence[Wrong]) -> list[list[str]]:
    """Cells: what wrong prices of every cost model cost, over all distributions."""
    lines = [["cost model", "taken to be", "mean", "largest", "where"]]
    for what in dict.fromkeys(one.what for one in found):
        mine = [one for one in found if one.what == what]
        factors = sorted(one.factor for one in mine)
        worst = max(mine, key=lambda one: one.lost)
        span = f"{factors[0]:.2f} to {factors[-1]:.2f} times" if what != "all" else f"{len(mine)} joint draws"
        lines.append(
            [
                what,
                span,
                _percent(mean(one.lost for one in mine)),
                _percent(worst.lost),
                worst.distribution,
            ]
        )
    return lines


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # no minus before zero


def regret_view(small: Sequence[Small], wrong: Sequence[Wrong]) -> RenderableType:
    """Regret on small batches, and what wrong prices cost."""
    parts: list[RenderableType] = []
    for lines in (small_lines(small), wrong_lines(wrong)):
        shown = table(*((name, "left" if i < 2 else "right") for i, name in enumerate(lines[0])))
        for line in lines[1:]:
            shown.add_row(*line)
        parts += [shown, Text()]
    return Group(*parts)


def compare_record(rows: Sequence[Row]) -> dict[str, Any]:
    """Times for machines."""
    return {"verdicts": verdicts(rows), "rows": records(rows)}


def regret_record(small: Sequence[Small], wrong: Sequence[Wrong]) -> dict[str, Any]:
    """Regret for machines."""
    return {
        "small": [_rounded(asdict(one)) for one in small],
        "wrong": [_rounded(asdict(one)) for one in wrong],
    }


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    def short(value: Any) -> Any:
        return {k: short(v) for k, v in value.items()} if isinstance(value, dict) else round(value, 5)

    return {name: value if isinstance(value, str | bool | int) else short(value) for name, value in fields.items()}
