"""Timelines of a training step: passes of a pipeline, which open into layers of their stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cpsim.report.figures import (
    BACKWARD,
    COLUMNS,
    CRITICAL,
    CRITICAL_COLOUR,
    FORWARD,
    NARROWEST,
    OUTLINED,
    Figure,
    house,
    titled,
)
from cpsim.units import MS_PER_S, format_count

if TYPE_CHECKING:
    from cpsim.prediction.results import Column
    from cpsim.prediction.step.opened import Inside, Opened, OpTime, Passes

STREAM_NAMES: Final = {
    "compute": "computation",
    "comm": "TP",
    "gather": "gathers, EP",
    "scatter": "scatters",
    "to_host": "to the host",
    "from_host": "from the host",
}
"""Streams of a GPU in words, from above to below."""
COLOURS: Final = {
    "matrix product": "#009e73",
    "attention": "#0072b2",
    "attention backward": "#6366f1",
    "memory-bound": "#56b4e9",
    "all gather": "#d55e00",
    "reduce scatter": "#e69f00",
    "all to all": "#cc79a7",
    "all reduce": "#f0e442",
    "copy": "#999999",
}
"""As in bars of a step's time; communication in warm colours."""
_SCROLLED: Final = {"meta": {"min_width": NARROWEST}}
Bar = dict[str, Any]
"""Row, begin and end, text, what it opens (-1: nothing), whether it is critical, how many it stands for."""


def pipeline(opened: Opened, gpus: int) -> Figure:
    """When every stage runs which pass.

    Args:
        opened: the step in time.
        gpus: of the step.
    """
    passes = opened.passes
    rows = [stage_text(stage, passes.stages, gpus) for stage in range(passes.stages)]
    where = {chunk: i for i, one in enumerate(opened.inside) for chunk in one.chunks}
    limit = passes.time_s / COLUMNS
    data = []
    every: list[Bar] = []
    for which, (name, colour) in enumerate((("forward", FORWARD), ("backward", BACKWARD))):
        bars = _joined(_pass_bars(passes, which, name, rows, where), limit)
        every += bars
        data.append(_bars(name, bars, colour, 1.0, "s"))
    ends = passes.end_s.max(axis=(0, 1))
    last = int(ends.argmax()) % passes.stages
    rest = {"row": rows[last], "start": float(ends.max()), "end": passes.time_s, "count": 1}
    rest |= {"text": "gradients and optimizer, of the stage that ends last", "opens": -1, "critical": True}
    data.append(_bars("gradients and optimizer", [rest], "#a855f7", 1.0, "s"))
    data.append(_critical([*every, rest], 1.0))
    axes = {"xaxis": titled("time [s]", rangemode="tozero"), "yaxis": _rows(rows)}
    layout = house(170 + 30 * len(rows)) | axes | {"barmode": "overlay", "bargap": 0.15}
    return {"data": data, "layout": layout | _SCROLLED}


def _pass_bars(passes: Passes, which: int, name: str, rows: Sequence[str], where: dict[int, int]) -> list[Bar]:
    """A bar for every forward, or every backward pass, stage by stage."""
    _, microbatches, chunks = passes.start_s.shape
    several = chunks > passes.stages
    found = [
        {
            "row": rows[chunk % passes.stages],
            "start": float(passes.start_s[which, m, chunk]),
            "end": float(passes.end_s[which, m, chunk]),
            "text": f"{name}, microbatch {m}" + f", chunk {chunk // passes.stages}" * several,
            "opens": where[chunk],
            "critical": bool(passes.critical[which, m, chunk]),
            "count": 1,
        }
        for m in range(microbatches)
        for chunk in range(chunks)
    ]
    return sorted(found, key=lambda bar: (rows.index(bar["row"]), bar["start"]))


def layers(opened: Opened) -> Figure:
    """What layers of the stages do in both passes: those of the first, others where somebody asks."""
    data: list[Figure] = []
    used = {op.stream for one in opened.inside for op in one.ops}
    streams = [text for name, text in STREAM_NAMES.items() if name in used]
    for i, one in enumerate(opened.inside):
        bars = [_op_bar(op) for op in one.ops]
        kinds = {kind: [bar for bar in bars if bar["kind"] == kind] for kind in COLOURS}
        traces = [_bars(kind, some, COLOURS[kind], MS_PER_S, "ms") for kind, some in kinds.items() if some]
        traces += [line | {"showlegend": False} for line in (_critical(bars, MS_PER_S), _turn(one, streams))]
        data += [trace | {"meta": {"inside": i}, "visible": i == 0} for trace in traces]
    axes = {"xaxis": titled("time [ms]", rangemode="tozero"), "yaxis": _rows(streams)}
    return {
        "data": data,
        "layout": house(230 + 34 * len(streams), top=95) | axes | {"barmode": "overlay", "bargap": 0.15} | _SCROLLED,
    }


def _turn(one: Inside, streams: Sequence[str]) -> Figure:
    """A line where the backward pass begins."""
    turn, end = min(op.start_s for op in one.ops if op.backward), max(op.end_s for op in one.ops)
    bars = [{"row": row, "start": turn - end / 1000, "end": turn + end / 1000} for row in streams]
    look = {"width": 1.0, "marker": {"color": "#64748b", "line": {"width": 0}}, "hoverinfo": "skip"}
    return _placed("backward begins", bars, MS_PER_S) | look


def _op_bar(op: OpTime) -> Bar:
    times = {"start": op.start_s, "end": op.end_s, "critical": op.critical, "count": 1}
    return {"row": STREAM_NAMES[op.stream], "kind": op.kind, "text": op.text, "opens": -1} | times


def buttons(opened: Opened) -> str:
    """What opens layers of other stages, as HTML; nothing where all are alike."""
    if len(opened.inside) == 1:
        return ""
    words = [escape(_inside_text(one, opened.passes.stages)) for one in opened.inside]
    made = "".join(
        f'<button type="button" data-opens="{i}" aria-pressed="{str(i == 0).lower()}">{text}</button>'
        for i, text in enumerate(words)
    )
    return f'<p class="opens">Layers of {made}</p>'


def _inside_text(one: Inside, stages: int) -> str:
    """Which stages, or chunks of them, and how many of their layers are shown."""
    several = one.chunks[-1] >= stages
    names = [f"{chunk % stages}.{chunk // stages}" if several else str(chunk) for chunk in one.chunks]
    which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"stage{'s' * (len(names) > 1)} {which}, {one.shown} of {one.layers} layers"


def stage_text(stage: int, stages: int, gpus: int) -> str:
    """A stage with its GPUs, which are next to each other."""
    each = gpus // stages
    return f"stage {stage} · GPUs {stage * each}–{(stage + 1) * each - 1}" if each > 1 else f"stage {stage}"


def pass_columns(opened: Opened) -> dict[str, Column]:
    """All passes as columns, in SI units."""
    passes = opened.passes
    which, m, chunk = (axis.ravel() for axis in np.indices(passes.start_s.shape))
    return {
        "pass": np.array(["fwd", "bwd"])[which],
        "microbatch": m,
        "stage": chunk % passes.stages,
        "chunk": chunk // passes.stages,
        "start_s": passes.start_s.ravel(),
        "end_s": passes.end_s.ravel(),
        "critical": passes.critical.ravel(),
    }


def caption(opened: Opened) -> str:
    """What both figures show."""
    microbatches = opened.passes.start_s.shape[1]
    return (
        f"Above: the replica that ends last, {format_count(microbatches)} microbatches; a red line follows what "
        "decides the time. Click a pass to see below what a GPU of its stage does in its layers, for the heaviest "
        "microbatch; the backward pass follows behind the grey line. Drag to zoom, double-click to reset."
    )


def _joined(bars: Iterable[Bar], limit: float) -> list[Bar]:
    """Bars of rows, in order; neighbours that together are too short to be seen apart share one."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if last and last["row"] == bar["row"] and bar["end"] - last["start"] <= limit:
            count = last["count"] + 1
            found[-1] = last | {"end": bar["end"], "count": count, "text": f"{count} passes"}
            found[-1]["critical"] |= bar["critical"]
        else:
            found.append(bar)
    return found


def _bars(name: str, bars: Sequence[Bar], colour: str, scale: float, unit: str) -> Figure:
    """Bars of one kind; times times ``scale`` are in ``unit``."""
    outline = 0.4 if len(bars) < OUTLINED else 0.0
    return _placed(name, bars, scale) | {
        "marker": {"color": colour, "line": {"width": outline}},
        "customdata": [[escape(bar["text"]), bar["opens"]] for bar in bars],
        "hovertemplate": f"%{{customdata[0]}}<br>start %{{base:.4g}} {unit}, takes %{{x:.3g}} {unit}<extra></extra>",
    }


def _critical(bars: Iterable[Bar], scale: float) -> Figure:
    """A line along the upper edge of every bar of the critical path."""
    marker = {"color": CRITICAL_COLOUR, "line": {"width": 0}}
    look = {"width": 0.14, "offset": 0.34, "marker": marker, "hoverinfo": "skip"}
    return _placed(CRITICAL, [bar for bar in bars if bar["critical"]], scale) | look


def _placed(name: str, bars: Sequence[Bar], scale: float) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "legendgroup": name,
        "y": [bar["row"] for bar in bars],
        "base": [float(f"{bar['start'] * scale:.7g}") for bar in bars],
        "x": [float(f"{(bar['end'] - bar['start']) * scale:.7g}") for bar in bars],
    }


def _rows(names: Sequence[str]) -> dict[str, Any]:
    return {"categoryorder": "array", "categoryarray": list(names)[::-1], "automargin": True}
