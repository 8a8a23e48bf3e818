"""DCP's published bars beside predicted ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import geometric_mean, mean
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.report.tables import table
from cpsim.report.words import signed_percent
from studies.dcp.reproduce import (
    FOLDER,
    KINDS,
    Assumed,
    Range,
    Row,
    SpeedUp,
    mean_error,
    speed_ups,
    without_outliers,
)

SENSITIVITY: Final = FOLDER / "sensitivity.json"
MORE: Final = {"50 batches with kahypar": FOLDER / "dcp-reproduced.json", "5 batches": FOLDER / "dcp-mtkahypar.json"}
"""What this study predicts with more batches: the solver of the measured run with as many as it had, and the usual."""
INSIDE: Final = 0.85
"""Share of the published speed-ups that ranges are to hold."""


def dcp_view(rows: Sequence[Row], assumed: Assumed, worst: int) -> RenderableType:
    """Bars, worst first; errors by code; speed-ups over the fastest baseline, worst first; the summary."""
    bars = table(
        ("row", "left"),
        ("mask", "left"),
        ("pass", "left"),
        ("lengths", "right"),
        ("published ms", "right"),
        ("predicted", "right"),
        ("error", "right"),
    )
    for row in sorted(rows, key=lambda row: -abs(row.error))[:worst]:
        bars.add_row(
            row.row + " (outlier)" * row.outlier,
            row.mask,
            row.pass_,
            f"x {row.scale:g}",
            f"{row.published_s * 1e3:.2f}",
            f"{row.predicted_s * 1e3:.2f}",
            signed_percent(row.error),
        )
    parts = bars, _by_code(rows), _speed_ups(speed_ups(rows), read_ranges()), Text(basis(assumed))
    return Group(*(one for part in parts for one in (part, Text())))


def basis(assumed: Assumed) -> str:
    """What all predictions rest on, in words."""
    return (
        f"document lengths: drawn from {assumed.lengths}, since those of LongDataCollections are not published; "
        f"DCP plans as {assumed.variant}, with {assumed.solver} (its own code: KaHyPar; --solver kahypar)"
    )


def read_ranges() -> list[Range]:
    """Speed-ups under other assumptions, as ``python -m studies dcp --sensitivity`` wrote them to `SENSITIVITY`, and
    those of `MORE`; none where it was not run."""
    if not SENSITIVITY.exists():
        return []
    return with_more([Range(**row) for row in json.loads(SENSITIVITY.read_text(encoding="utf-8"))["ranges"]])


def with_more(found: Sequence[Range]) -> list[Range]:
    """The same with the predictions of `MORE`."""
    for name, path in MORE.items():
        known = json.loads(path.read_text(encoding="utf-8"))["speed_ups"]
        by_case = {(one["mask"], one["length_scale"]): one["predicted"] for one in known}
        found = [replace(one, predicted={**one.predicted, name: by_case[one.mask, one.scale]}) for one in found]
    return list(found)


def ranges_view(found: Sequence[Range]) -> RenderableType:
    """Between which ends every speed-up lies under other assumptions, and which published ones are inside."""
    made = table(
        ("DCP over the fastest baseline, by assumption", "left"),
        ("lengths", "right"),
        ("published", "right"),
        ("range", "right"),
        ("inside", "left"),
        ("least with", "left"),
        ("most with", "left"),
    )
    for one in found:
        (low, high), by = one.ends, one.predicted
        least, most = min(by, key=by.__getitem__), max(by, key=by.__getitem__)
        name, inside = one.mask + " (outlier)" * one.outlier, "yes" if one.inside else "no"
        span = f"{low:.2f}-{high:.2f}"
        made.add_row(name, f"x {one.scale:g}", f"{one.published:.2f}", span, inside, least, most)
    kinds = table(("ranges, if only this varies", "left"), ("inside", "right"), ("most over least, mean", "right"))
    for name, (inside, width) in by_kind(found).items():
        kinds.add_row(name, inside, f"{width:.1f}")
    return Group(made, Text(), kinds, Text(coverage(found)))


def by_kind(found: Sequence[Range]) -> dict[str, tuple[str, float]]:
    """By what assumptions are about: how many published speed-ups are inside of ranges of these alone, without
    outliers, and how wide these ranges are, most over least, in the geometric mean."""
    steady = [one for one in found if not one.outlier]
    rows = {}
    for name, names in {**KINDS, "all of them": tuple(found[0].predicted)}.items():
        some = [one.among(names) for one in steady]
        width = geometric_mean(high / low for low, high in (one.ends for one in some))
        rows[name] = f"{sum(one.inside for one in some)} of {len(some)}", width
    return rows


def coverage(found: Sequence[Range]) -> str:
    """How many published speed-ups are inside of their ranges, and what these are made of, in words."""
    steady = [one for one in found if not one.outlier]
    within = sum(one.inside for one in steady)
    return (
        f"inside: {within} of {len(steady)} without outliers ({within / len(steady):.0%}; bar {INSIDE:.0%}); "
        f"assumptions, each changed alone: {', '.join(found[0].predicted)}"
    )


def ranges_record(found: Sequence[Range], count: int) -> dict[str, Any]:
    """The same for machines."""
    rows = [asdict(one) for one in found]
    for row in rows:
        row["predicted"] = {name: round(value, 3) for name, value in row["predicted"].items()}
    return {"batches": count, "ranges": rows}


def _by_code(rows: Sequence[Row]) -> RenderableType:
    made = table(("row", "left"), ("pass", "left"), ("bars", "right"), ("mean error", "right"), ("signed", "right"))
    for name, pass_ in dict.fromkeys((row.row, row.pass_) for row in rows):
        errors = [row.error for row in rows if (row.row, row.pass_) == (name, pass_) and not row.outlier]
        made.add_row(
            name, pass_, str(len(errors)), f"{100 * mean(map(abs, errors)):.0f} %", signed_percent(mean(errors))
        )
    return made


def _speed_ups(found: Sequence[SpeedUp], ranges: Sequence[Range]) -> RenderableType:
    by_bar = {(one.mask, one.scale): one for one in ranges}
    made = table(
        ("DCP over the fastest baseline", "left"),
        ("lengths", "right"),
        ("published", "right"),
        ("predicted", "right"),
        ("error", "right"),
        ("range", "right"),
        ("inside", "left"),
        ("same one faster", "left"),
    )
    for s in sorted(found, key=lambda s: -abs(s.error)):
        known = by_bar.get((s.mask, s.scale))
        made.add_row(
            s.mask + " (outlier)" * s.outlier,
            f"x {s.scale:g}",
            f"{s.published:.2f}",
            f"{s.predicted:.2f}",
            signed_percent(s.error),
            "{:.2f}-{:.2f}".format(*known.ends) if known else "",
            ("yes" if known.inside else "no") if known else "",
            ("yes" if s.agrees else "no") if s.decided else "",
        )
    agree = [s.agrees for s in found if s.decided]
    summary = f"mean error of speed-ups {100 * mean_error(found):.0f} %; {sum(agree)} of {len(agree)} agree"
    if (steady := without_outliers(found)) and len(steady) < len(found):
        summary += f"; mean error without outliers of the published run {100 * mean_error(steady):.0f} %"
    return Group(made, Text(summary), *([Text(coverage(ranges))] if ranges else []))


def dcp_record(rows: Sequence[Row], assumed: Assumed, batches: int) -> dict[str, Any]:
    """The same for machines."""
    found, ranges = speed_ups(rows), {(one.mask, one.scale): one for one in read_ranges()}
    steady = without_outliers(found)
    return {
        **asdict(assumed),
        "batches": batches,
        "rows": [
            {
                "row": row.row,
                "mask": row.mask,
                "pass": row.pass_,
                "length_scale": row.scale,
                "published_ms": row.published_s * 1e3,
                "predicted_ms": round(row.predicted_s * 1e3, 3),
                "outlier": row.outlier,
            }
            for row in rows
        ],
        "speed_ups": [
            {
                "mask": s.mask,
                "length_scale": s.scale,
                "published": round(s.published, 3),
                "predicted": round(s.predicted, 3),
                "range": known.ends if known else None,
                "outlier": s.outlier,
            }
            for s in found
            for known in [ranges.get((s.mask, s.scale))]
        ],
        "speed_up_mean_error": round(mean_error(found), 4),
        "speed_up_mean_error_without_outliers": round(mean_error(steady), 4) if steady else None,
        "same_one_faster": sum(s.agrees for s in found if s.decided),
        "decided": sum(s.decided for s in found),
    }
