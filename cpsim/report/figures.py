"""Plotly figures of recommendations: bars with intervals, timelines, time against sequence length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cpsim.report.words import interval_text, ms_text, percent_text, strategy_label
from cpsim.schedule import STREAMS
from cpsim.units import MS_PER_S, format_count

if TYPE_CHECKING:
    from cpsim.prediction import Advice, Candidate, Prediction
    from cpsim.sim.timeline import Timeline

FORWARD, BACKWARD = "#60a5fa", "#1d4ed8"
PALETTE: Final = (
    "#1d4ed8",
    "#ea580c",
    "#059669",
    "#9333ea",
    "#dc2626",
    "#0891b2",
    "#ca8a04",
    "#4b5563",
    "#db2777",
    "#65a30d",
)
KIND_COLOURS: Final = {
    "attention": "#2563eb",
    "attention backward": "#1e40af",
    "merge": "#f59e0b",
    "accumulate": "#d97706",
    "copy": "#a8a29e",
    "transfer": "#10b981",
    "all gather": "#14b8a6",
    "reduce scatter": "#0f766e",
    "all to all": "#a855f7",
    "all reduce": "#7e22ce",
    "barrier": "#ef4444",
}
OTHER_COLOUR: Final = "#64748b"
CRITICAL: Final = "critical path"
CRITICAL_COLOUR: Final = "#dc2626"
EXPOSED: Final = "exposed communication"
EXPOSED_COLOUR: Final = "#fca5a5"
OUTLINED: Final = 100
"""From so many bars of a kind on, outlines would hide the bars."""
COLUMNS: Final = 1500
"""Bars of a timeline that are closer together than the span over this number are drawn as one."""


def blank() -> Any:
    """A figure without a template: pages set theirs, and plotly takes 20 ms to check and copy one."""
    return go.Figure(layout={"template": "none"})


def styled(figure: Any, height: int) -> Any:
    """The figure in the house style, whose template is that of the page."""
    figure.update_layout(
        height=height,
        margin={"l": 10, "r": 20, "t": 70, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 0.99,
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
    )
    return figure


def bars(advice: Advice) -> Any:
    """Forward and backward of every candidate, stacked, fastest on top, with the total's 90 % interval."""
    return bars_of(advice.candidates)


def bars_of(candidates: Sequence[Candidate]) -> Any:
    """The same of some candidates, in their order."""
    labels = [escape(strategy_label(candidate.scenario)) for candidate in candidates]
    parts = {
        "forward": ([candidate.forward.time_s for candidate in candidates], FORWARD),
        "backward": ([candidate.total_s - candidate.forward.time_s for candidate in candidates], BACKWARD),
    }
    figure = blank()
    for name, (seconds, colour) in parts.items():
        values = [value * MS_PER_S for value in seconds]
        figure.add_bar(y=labels, x=values, name=name, orientation="h", marker_color=colour, width=0.6)
        figure.data[-1].hovertemplate = "%{y}: " + name + " %{x:.3g} ms<extra></extra>"
    figure.data[-1].error_x = {
        "type": "data",
        "symmetric": False,
        "array": [(c.total_s_high - c.total_s) * MS_PER_S for c in candidates],
        "arrayminus": [(c.total_s - c.total_s_low) * MS_PER_S for c in candidates],
        "thickness": 1.6,
        "width": 5,
    }
    notes = [
        {
            "x": candidate.total_s_high * MS_PER_S,
            "y": label,
            "text": f"{ms_text(candidate.total_s)} ms · P(best) {percent_text(candidate.probability_best)}",
            "showarrow": False,
            "xanchor": "left",
            "xshift": 10,
        }
        for label, candidate in zip(labels, candidates, strict=True)
    ]
    widest = max(candidate.total_s_high for candidate in candidates) * MS_PER_S
    figure.update_layout(barmode="stack", annotations=notes)
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title="time [ms], whiskers: 90 % interval of the total", range=[0, widest * 1.3])
    return styled(figure, 140 + 46 * len(candidates))


def lengths(predictions: Iterable[Prediction]) -> Any:
    """Time against total tokens, a line with its 90 % band per strategy and knobs, both axes logarithmic."""
    lines: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        lines[escape(strategy_label(prediction.scenario))].append(prediction)
    figure = blank()
    for number, (label, points) in enumerate(lines.items()):
        colour = PALETTE[number % len(PALETTE)]
        points = sorted(points, key=lambda point: point.scenario.num_tokens)
        tokens = [point.scenario.num_tokens for point in points]
        low, high = ([getattr(p, name) * MS_PER_S for p in points] for name in ("time_s_low", "time_s_high"))
        figure.add_scatter(
            x=tokens + tokens[::-1],
            y=high + low[::-1],
            fill="toself",
            fillcolor=colour,
            opacity=0.15,
            line={"width": 0},
            mode="lines",
            legendgroup=label,
            showlegend=False,
            hoverinfo="skip",
        )
        figure.add_scatter(
            x=tokens,
            y=[point.time_s * MS_PER_S for point in points],
            name=label,
            legendgroup=label,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            customdata=[interval_text(point.time_s_low, point.time_s_high) for point in points],
            hovertemplate=label + ": %{y:.3g} ms (90 %: %{customdata}) at %{x:,} tokens<extra></extra>",
        )
    ticks = sorted({point.scenario.num_tokens for points in lines.values() for point in points})
    figure.update_xaxes(type="log", title="total tokens", tickvals=ticks, ticktext=[format_count(t) for t in ticks])
    figure.update_yaxes(type="log", title="time, forward and backward [ms]", dtick="D2")
    return styled(figure, 520)


def timeline(candidate: Candidate, ranks: Sequence[int]) -> tuple[Any, str]:
    """Streams of a few ranks as rows, forward beside backward.

    A line along a bar says that it is on the critical path; behind the bars of a rank's ``compute`` stream are the
    times in which the rank communicates, or waits for data, and computes nothing.

    Returns:
        The figure, and what was drawn together, in words.
    """
    passes = {
        name: timelines[pass_]
        for name, timelines, pass_ in (
            ("forward", candidate.forward.timelines, "fwd"), ("backward", candidate.backward.timelines, "bwd"),
        )
        if pass_ in timelines
    }  # fmt: skip
    shown = {name: found.rows(ranks) for name, found in passes.items()}
    drawn = {name: _thinned(rows) for name, rows in shown.items()}
    every = sorted((row for rows in shown.values() for row in rows), key=_order)
    lanes = list(dict.fromkeys(map(_lane, every)))
    figure = make_subplots(cols=len(drawn), shared_yaxes=True, horizontal_spacing=0.02, subplot_titles=list(drawn))
    seen: set[str] = set()
    for column, (name, rows) in enumerate(drawn.items(), start=1):
        figure.add_trace(_exposed_bars(passes[name], ranks, column == 1), 1, column)
        for kind in dict.fromkeys(row["kind"] for row in rows):
            figure.add_trace(
                _kind_bars(kind, [row for row in rows if row["kind"] == kind], kind not in seen), 1, column
            )
            seen.add(kind)
        figure.add_trace(_critical_bars(rows, column == 1), 1, column)
        figure.update_xaxes(title="time [ms]", rangemode="tozero", row=1, col=column)
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], automargin=True)
    num_shown, num_drawn = (sum(map(len, rows.values())) for rows in (shown, drawn))
    words = f"{format_count(num_shown)} ops of ranks {', '.join(map(str, ranks))}"
    if num_drawn < num_shown:
        words += (
            f", drawn as {format_count(num_drawn)} bars: neighbours of one kind that together are shorter "
            f"than 1/{COLUMNS} of the span share a bar"
        )
    styled(figure, 190 + 26 * len(lanes)).update_layout(margin_t=115)  # the legend takes several lines
    return figure, words


def shown_ranks(candidate: Candidate) -> list[int]:
    """A few ranks for a timeline: the first two, a middle one, the last, and those that hold up each pass most."""
    last = candidate.scenario.gpus - 1
    timelines = (*candidate.forward.timelines.values(), *candidate.backward.timelines.values())
    return sorted({0, min(1, last), (last + 1) // 2, last, *(_busiest(timeline) for timeline in timelines)})


def _busiest(found: Timeline) -> int:
    """The rank with most of the critical path."""
    schedule, path = found.schedule, found.critical_path()
    seconds = np.zeros(len(schedule))
    seconds[path] = (found.end_s - found.start_s)[path]
    of_lane = seconds[schedule.op_of_lane()]
    return int(np.argmax(np.bincount(schedule.lane_rank, weights=of_lane, minlength=schedule.num_ranks)))


def _order(row: dict[str, Any]) -> tuple[int, int]:
    return row["rank"], STREAMS.index(row["stream"])


def _lane(row: dict[str, Any]) -> str:
    return f"rank {row['rank']} · {row['stream']}"


def _thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with ``count``; runs of one lane and kind that are too short to be seen apart become one row."""
    if not rows:
        return []
    limit = (max(row["end_s"] for row in rows) - min(row["start_s"] for row in rows)) / COLUMNS
    last: dict[str, dict[str, Any]] = {}
    thinned = []
    for row in sorted(rows, key=lambda row: row["start_s"]):
        lane, kind = _lane(row), str(row["kind"]).lower().replace("_", " ")
        before = last.get(lane)
        if before and before["kind"] == kind and row["end_s"] - before["start_s"] <= limit:
            before["end_s"] = row["end_s"]
            before["count"] += 1
            before["critical"] |= row["critical"]
            continue
        last[lane] = row | {"kind": kind, "count": 1, "lane": lane}
        thinned.append(last[lane])
    return thinned


def _kind_bars(kind: str, rows: Sequence[dict[str, Any]], in_legend: bool) -> Any:
    outline = 0.4 if len(rows) < OUTLINED else 0.0
    names = [escape(str(row["name"])) if row["count"] == 1 else f"{row['count']} ops" for row in rows]
    return _bars(
        kind, rows, in_legend,
        marker={"color": KIND_COLOURS.get(kind, OTHER_COLOUR), "line": {"color": "white", "width": outline}},
        customdata=names,
        hovertemplate="%{customdata}<br>%{y}<br>start %{base:.4g} ms, takes %{x:.3g} ms<extra>" + kind + "</extra>",
    )  # fmt: skip


def _critical_bars(rows: Sequence[dict[str, Any]], in_legend: bool) -> Any:
    """A line along the upper edge of every bar of the critical path."""
    critical = [row for row in rows if row["critical"]]
    marker = {"color": CRITICAL_COLOUR, "line": {"width": 0}}
    return _bars(CRITICAL, critical, in_legend, width=0.14, offset=0.34, marker=marker, hoverinfo="skip")


def _bars(name: str, rows: Sequence[dict[str, Any]], in_legend: bool, **look: Any) -> Any:
    """A bar for every row: where it begins, how long it takes, on its lane."""
    return go.Bar(
        orientation="h",
        y=[row["lane"] for row in rows],
        base=[row["start_s"] * MS_PER_S for row in rows],
        x=[(row["end_s"] - row["start_s"]) * MS_PER_S for row in rows],
        name=name,
        legendgroup=name,
        showlegend=in_legend,
        **look,
    )


def _exposed_bars(found: Timeline, ranks: Sequence[int], in_legend: bool) -> Any:
    """Where ranks communicate or wait for data and compute nothing, behind the bars of their compute streams."""
    rows = [
        {"lane": _lane({"rank": rank, "stream": STREAMS[0]}), "start_s": start, "end_s": end}
        for rank in ranks
        for start, end in found.exposed(rank).tolist()
    ]
    return _bars(
        EXPOSED, rows, in_legend, width=0.96, marker={"color": EXPOSED_COLOUR, "line": {"width": 0}},
        hovertemplate="%{y}: exposed from %{base:.4g} ms on for %{x:.3g} ms<extra></extra>",
    )  # fmt: skip
