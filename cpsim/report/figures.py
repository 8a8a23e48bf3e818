"""Figures of recommendations as plotly reads them: bars with intervals, timelines, time against sequence length.

They are plain values, ``{"data": [...], "layout": {...}}``, which ``plotly.graph_objects.Figure`` takes: its objects
check every value, which takes longer than to compute them. Templates are those of the page (``page.TEMPLATES``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from html import escape
from math import ceil, floor, log10
from re import sub
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cpsim.report.axes import tokens_text
from cpsim.report.words import interval_text, strategy_label
from cpsim.schedule.schedule import STREAMS, Kind
from cpsim.units import MS_PER_S, format_count

if TYPE_CHECKING:
    from cpsim.prediction.results import Candidate, Prediction
    from cpsim.sim.timeline import Timeline

Figure = dict[str, Any]

FORWARD, BACKWARD = "#3b82f6", "#c2610c"
PALETTE: Final = (
    "#3b82f6",
    "#ea580c",
    "#059669",
    "#a855f7",
    "#dc2626",
    "#0891b2",
    "#b97f04",
    "#6b7a90",
    "#db2777",
    "#65a30d",
)
"""Each has a contrast of 3 to the ground of figures, light or dark."""
STRATEGY_COLOURS: Final = {
    "ulysses": "#e69f00",
    "ring": "#88ccee",
    "zigzag_ring": "#0072b2",
    "striped_ring": "#332288",
    "allgather": "#009e73",
    "usp": "#d55e00",
    "loongtrain": "#cc79a7",
    "mesh": "#661100",
    "hybrid_cp": "#882255",
    "magi": "#f0e442",
    "dcp": "#117733",
    "distca": "#999933",
}
"""A strategy's colour wherever it is drawn, of palettes for any kind of colour vision: Okabe and Ito's, and Paul Tol's
(SRON/EPS/TN/09-002)."""
KIND_COLOURS: Final = {
    "attention": "#3b82f6",
    "attention backward": "#6366f1",
    "merge": "#d97706",
    "accumulate": "#c2610c",
    "copy": "#8a847e",
    "transfer": "#059669",
    "all gather": "#0d9488",
    "reduce scatter": "#0891b2",
    "all to all": "#a855f7",
    "all reduce": "#c026d3",
    "barrier": "#ef4444",
}
OTHER_COLOUR: Final = "#64748b"
KINDS: Final = {int(kind): kind.name.lower().replace("_", " ") for kind in Kind}
CRITICAL: Final = "critical path"
CRITICAL_COLOUR: Final = "#dc2626"
EXPOSED: Final = "exposed communication"
EXPOSED_COLOUR: Final = "#fca5a5"
OUTLINED: Final = 100
"""From so many bars of a kind on, outlines would hide the bars."""
LABEL: Final = 24
"""Letters of a line beside a bar."""
LINE: Final = 16
"""Height of such a line [px]."""
FINE: Final = 2.5
"""Up to so many powers of ten, an axis has ticks between them."""
NARROWEST: Final = 560
"""Width of a timeline [px]; narrower screens scroll it."""
COLUMNS: Final = 1500
"""Bars of a timeline that are closer together than the span over this number are drawn as one."""


def house(height: int, top: int = 70) -> dict[str, Any]:
    """Layout in the house style: a legend above, room for it, the height [px]."""
    return {
        "height": height,
        "margin": {"l": 10, "r": 20, "t": top, "b": 50},
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0.99,
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
    }


def bar_label(text: str) -> str:
    """What a bar is about, escaped, in lines that leave a narrow screen room for the bar; numbers stay beside their
    names."""
    return "<br>".join(escape(line) for line in wrap(sub(r"(\w) (\d)", "\\1\u00a0\\2", text), LABEL))


def rows_height(labels: Collection[str], least: int) -> int:
    """Height [px] of rows of bars, all as high as the longest label needs.

    Args:
        labels: of ``bar_label``, several lines perhaps.
        least: of a row.
    """
    return len(labels) * max((least, *(LINE * (label.count("<br>") + 1) + 6 for label in labels)))


def log_axis(title: str, values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis whose ticks are numbers: at 1, 2 and 5 times powers of ten, or at powers alone where there are
    many.

    Args:
        title: of the axis.
        values: what it shows, more than 0.
    """
    shown = [value for value in values if value > 0] or [1.0]
    low, high = log10(min(shown)), log10(max(shown))
    margin = max(0.04 * (high - low), 0.05)
    steps = (1, 2, 5) if high - low < FINE else (1,)
    powers = range(floor(low - margin), ceil(high + margin) + 1)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    inside = [tick for tick in ticks if low - margin <= log10(tick) <= high + margin]
    return titled(
        title,
        type="log",
        range=[low - margin, high + margin],
        tickvals=inside,
        ticktext=[_power_text(tick) for tick in inside],
    )


def _power_text(tick: float) -> str:
    """A number on a logarithmic axis, as a power of ten where it would have many digits."""
    power = log10(tick)
    return f"{tick:,.10g}" if -3 < power < 5 or power % 1 else f"10<sup>{power:.0f}</sup>"


def styled(figure: Any, height: int) -> Any:
    """A plotly object in the house style."""
    figure.update_layout(house(height))
    return figure


def strategy_colour(name: str) -> str:
    """The colour of a strategy; of baselines grey."""
    return STRATEGY_COLOURS.get(name, OTHER_COLOUR)


def ink_on(colour: str) -> str:
    """White or nearly black, whichever has the greater contrast to a colour, ``#rrggbb`` (WCAG 2.2, relative
    luminance)."""
    dark = "#111827"
    whites, blacks = (1.05 / (luminance(colour) + 0.05), (luminance(colour) + 0.05) / (luminance(dark) + 0.05))
    return "white" if whites > blacks else dark


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2.2), from 0 to 1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def titled(title: str, **axis: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": title}} | axis


def lengths(predictions: Iterable[Prediction]) -> Figure:
    """Time against total tokens, a line with its 90 % band per strategy and knobs, both axes logarithmic."""
    lines: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        lines[escape(strategy_label(prediction.scenario))].append(prediction)
    data: list[dict[str, Any]] = []
    for label, points in lines.items():
        colour = strategy_colour(str(points[0].scenario.strategy))
        data += _line(label, sorted(points, key=lambda p: p.scenario.num_tokens), colour)
    ticks = sorted({point.scenario.num_tokens for points in lines.values() for point in points})
    shown = {"type": "log", "tickvals": ticks, "ticktext": [tokens_text(t) for t in ticks]}
    times = [time * MS_PER_S for points in lines.values() for p in points for time in (p.time_s_low, p.time_s_high)]
    axes = {"xaxis": titled("total tokens", **shown), "yaxis": log_axis("time, forward and backward [ms]", times)}
    return {"data": data, "layout": house(520) | axes}


def _line(label: str, points: Sequence[Prediction], colour: str) -> list[dict[str, Any]]:
    """The band of one line, what sets it off from any ground, and the line."""
    tokens = [point.scenario.num_tokens for point in points]
    low, high = ([getattr(p, name) * MS_PER_S for p in points] for name in ("time_s_low", "time_s_high"))
    band = {
        "type": "scatter",
        "x": tokens + tokens[::-1],
        "y": high + low[::-1],
        "fill": "toself",
        "fillcolor": colour,
        "opacity": 0.15,
        "line": {"width": 0},
        "mode": "lines",
        "legendgroup": label,
        "showlegend": False,
        "hoverinfo": "skip",
    }
    line = {
        "type": "scatter",
        "x": tokens,
        "y": [point.time_s * MS_PER_S for point in points],
        "name": label,
        "legendgroup": label,
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 7, "line": {"width": 1}},
        "customdata": [interval_text(point.time_s_low, point.time_s_high) for point in points],
        "hovertemplate": label + ": %{y:.3g} ms (90 %: %{customdata}) at %{x:,} tokens<extra></extra>",
    }
    casing = {name: line[name] for name in ("type", "x", "y", "legendgroup")}
    look = {"mode": "lines", "line": {"width": 4}, "opacity": 0.7, "showlegend": False, "hoverinfo": "skip"}
    return [band, casing | look, line]


def timeline(candidate: Candidate, ranks: Sequence[int]) -> tuple[Figure, str]:
    """Streams of a few ranks as rows, forward beside backward.

    A line along a bar says that it is on the critical path; behind the bars of a rank's ``compute`` stream are the
    times in which the rank communicates, or waits for data, and computes nothing.

    Returns:
        The figure, and what was drawn together, in words.
    """
    passes = {
        name: timelines[pass_]
        for name, timelines, pass_ in (
            ("forward", candidate.forward.timelines, "fwd"),
            ("backward", candidate.backward.timelines, "bwd"),
        )
        if pass_ in timelines
    }
    drawn = {name: _drawn(found, ranks) for name, found in passes.items()}
    lanes = list(dict.fromkeys(_lane(*lane) for lane in sorted({bar["at"] for bars in drawn.values() for bar in bars})))
    data: list[dict[str, Any]] = []
    seen: set[str] = set()
    for column, (name, bars) in enumerate(drawn.items(), start=1):
        traces = [_exposed_bars(passes[name], ranks)]
        traces += [_kind_bars(kind, [bar for bar in bars if bar["kind"] == kind]) for kind in _kinds(bars)]
        traces.append(_critical_bars(bars))
        data += [trace | {"xaxis": f"x{column}", "showlegend": trace["name"] not in seen} for trace in traces]
        seen |= {trace["name"] for trace in traces}
    num_shown, num_drawn = (sum(bar["count"] for bars in drawn.values() for bar in bars), sum(map(len, drawn.values())))
    words = f"{format_count(num_shown)} ops of ranks {', '.join(map(str, ranks))}"
    if num_drawn < num_shown:
        words += (
            f", drawn as {format_count(num_drawn)} bars: neighbours of one kind that together are shorter "
            f"than 1/{COLUMNS} of the span share a bar"
        )
    rows = {"categoryorder": "array", "categoryarray": lanes[::-1], "automargin": True}
    layout = house(190 + 26 * len(lanes), top=115) | {"barmode": "overlay", "bargap": 0.15, "yaxis": rows}
    layout["meta"] = {"min_width": NARROWEST}
    return {"data": data, "layout": layout | _side_by_side(list(drawn))}, words  # the legend takes several lines


def _side_by_side(names: Sequence[str]) -> dict[str, Any]:
    """Axes of time of plots beside each other that share their rows, with their names above."""
    width = (1.02 / max(1, len(names))) - 0.02
    starts = [column * (width + 0.02) for column in range(len(names))]
    axes = {
        f"xaxis{column}": titled("time [ms]", rangemode="tozero", domain=[start, start + width], anchor="y")
        for column, start in enumerate(starts, start=1)
    }
    above = {"xref": "paper", "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 15}}
    titles = [above | {"text": name, "x": start + width / 2} for name, start in zip(names, starts, strict=True)]
    return axes | {"annotations": titles}


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


def _drawn(found: Timeline, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Bars of the streams of ranks, lane by lane; ops of one kind that are too short to be seen apart share one."""
    schedule = found.schedule
    entries = np.flatnonzero(np.isin(schedule.lane_rank, list(ranks)))
    op = schedule.op_of_lane()[entries]
    if not len(op):
        return []
    critical = np.zeros(len(schedule), np.bool_)
    critical[found.critical_path()] = True
    start, end = found.start_s[op], found.end_s[op]
    limit = float(end.max() - start.min()) / COLUMNS
    rank, stream = schedule.lane_rank[entries], schedule.lane_stream[entries]
    order = np.lexsort((start, stream, rank))
    columns = (rank, stream, schedule.kind[op], schedule.step[op], start, end, critical[op])
    bars: list[dict[str, Any]] = []
    for on, lane, kind, step, begin, until, is_critical in zip(*(c[order].tolist() for c in columns), strict=True):
        last = bars[-1] if bars else None
        if last and last["at"] == (on, lane) and last["kind"] == KINDS[kind] and until - last["start_s"] <= limit:
            last["end_s"], last["count"] = until, last["count"] + 1
            last["critical"] |= is_critical
            continue
        bars.append(
            {
                "at": (on, lane),
                "lane": _lane(on, lane),
                "kind": KINDS[kind],
                "name": f"{KINDS[kind]} {step}",
                "start_s": begin,
                "end_s": until,
                "count": 1,
                "critical": is_critical,
            }
        )
    return bars


def _lane(rank: int, stream: int) -> str:
    return f"rank {rank} · {STREAMS[stream]}"


def _kinds(bars: Sequence[dict[str, Any]]) -> list[str]:
    """Kinds in the order in which they begin."""
    return list(dict.fromkeys(bar["kind"] for bar in sorted(bars, key=lambda bar: bar["start_s"])))


def _kind_bars(kind: str, bars: Sequence[dict[str, Any]]) -> dict[str, Any]:
    outline = 0.4 if len(bars) < OUTLINED else 0.0
    return _bars(
        kind,
        bars,
        marker={"color": KIND_COLOURS.get(kind, OTHER_COLOUR), "line": {"width": outline}},
        customdata=[bar["name"] if bar["count"] == 1 else f"{bar['count']} ops" for bar in bars],
        hovertemplate="%{customdata}<br>%{y}<br>start %{base:.4g} ms, takes %{x:.3g} ms<extra>" + kind + "</extra>",
    )


def _critical_bars(bars: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A line along the upper edge of every bar of the critical path."""
    marker = {"color": CRITICAL_COLOUR, "line": {"width": 0}}
    critical = [bar for bar in bars if bar["critical"]]
    return _bars(CRITICAL, critical, width=0.14, offset=0.34, marker=marker, hoverinfo="skip")


def _bars(name: str, bars: Sequence[dict[str, Any]], **look: Any) -> dict[str, Any]:
    """A bar for everything that takes time on a lane: where it begins, how long it takes."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "legendgroup": name,
        "y": [bar["lane"] for bar in bars],
        "base": [_digits(bar["start_s"] * MS_PER_S) for bar in bars],
        "x": [_digits((bar["end_s"] - bar["start_s"]) * MS_PER_S) for bar in bars],
    } | look


def _digits(value: float) -> float:
    """Seven digits: more cannot be seen, and pages hold thousands of bars."""
    return float(f"{value:.7g}")


def _exposed_bars(found: Timeline, ranks: Sequence[int]) -> dict[str, Any]:
    """Where ranks communicate or wait for data and compute nothing, behind the bars of their compute streams."""
    bars = [
        {"lane": _lane(rank, 0), "start_s": start, "end_s": end}
        for rank in ranks
        for start, end in found.exposed(rank).tolist()
    ]
    return _bars(
        EXPOSED,
        bars,
        width=0.96,
        marker={"color": EXPOSED_COLOUR, "line": {"width": 0}},
        hovertemplate="%{y}: exposed from %{base:.4g} ms on for %{x:.3g} ms<extra></extra>",
    )
