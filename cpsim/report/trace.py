"""Chrome traces, which Perfetto and chrome://tracing open: every rank a process, every stream a thread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cpsim.prediction import Prediction

US_PER_S: Final = 1e6
Row = Mapping[str, Any]
"""rank, stream, name, kind, start_s, end_s; as ``Timeline.rows`` makes them."""


def predicted_rows(prediction: Prediction) -> list[dict[str, Any]]:
    """All ops of all ranks of a prediction, the backward pass after the forward one."""
    rows: list[dict[str, Any]] = []
    begin = 0.0
    for timeline in prediction.timelines.values():
        for row in timeline.rows(range(timeline.schedule.num_ranks)):
            later: dict[str, Any] = {name: begin + float(str(row[name])) for name in ("start_s", "end_s")}
            rows.append(row | later)
        begin += timeline.makespan_s
    return rows


def write_trace(path: Path, rows: Iterable[Row], *, measured: bool = False) -> None:
    """Writes a trace file.

    Args:
        path: file to write.
        rows: ops; the earliest starts at 0.
        measured: whether the rows come from a real run; process numbers of predicted and measured ranks differ, so
            that both kinds of trace can be joined.
    """
    shown = sorted(rows, key=lambda row: float(row["start_s"]))
    origin = float(shown[0]["start_s"]) if shown else 0.0
    lanes = {lane: i for i, lane in enumerate(sorted({(int(row["rank"]), str(row["stream"])) for row in shown}))}
    events = [*_names(lanes, measured)]
    for row in shown:
        events.append(
            {
                "ph": "X",
                "name": row["name"],
                "cat": row["kind"],
                "pid": _process(int(row["rank"]), measured),
                "tid": lanes[int(row["rank"]), str(row["stream"])],
                "ts": round((float(row["start_s"]) - origin) * US_PER_S, 3),
                "dur": round((float(row["end_s"]) - float(row["start_s"])) * US_PER_S, 3),
            }
        )
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")


def _process(rank: int, measured: bool) -> int:
    return 2 * rank + measured


def _names(lanes: Mapping[tuple[int, str], int], measured: bool) -> Iterable[dict[str, Any]]:
    word = "measured" if measured else "predicted"
    for rank in sorted({rank for rank, _ in lanes}):
        name = {"name": f"rank {rank}, {word}"}
        yield {"ph": "M", "name": "process_name", "pid": _process(rank, measured), "args": name}
        order = {"sort_index": _process(rank, measured)}
        yield {"ph": "M", "name": "process_sort_index", "pid": _process(rank, measured), "args": order}
    for (rank, stream), thread in lanes.items():
        fields = {"ph": "M", "pid": _process(rank, measured), "tid": thread}
        yield fields | {"name": "thread_name", "args": {"name": stream}}
