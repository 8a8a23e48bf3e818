"""Chrome traces, which Perfetto and chrome://tracing open: every rank a process, every stream a thread.

Predicted traces also have an arrow from rank to rank for every communication, and counters of what every GPU sends and
what leaves every node.

Reference: "Trace Event Format" (Google, 2016): complete, flow, counter and metadata events.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cpsim.case.resolve import cluster_of
from cpsim.report.link_use import link_use
from cpsim.runtime.files import write
from cpsim.schedule.schedule import COMMUNICATION_KINDS

if TYPE_CHECKING:
    from cpsim.prediction.results import Prediction

US_PER_S: Final = 1e6
Row = Mapping[str, Any]
"""rank, stream, name, kind, start_s, end_s; as ``Timeline.rows`` makes them."""
Event = dict[str, Any]

MEASURED: Final = 100_000
"""Process number of rank 0 of a real run; of a predicted one it is 0."""
NODES: Final = 1_000_000
"""Process number of the counters of node 0."""
COMMUNICATION: Final = frozenset(kind.name.lower() for kind in COMMUNICATION_KINDS)


def predicted_rows(prediction: Prediction) -> list[dict[str, Any]]:
    """All ops of all ranks of a prediction, the backward pass after the forward one."""
    rows: list[dict[str, Any]] = []
    for begin, pass_, timeline in _passes(prediction):
        for row in timeline.rows(range(timeline.schedule.num_ranks)):
            later: dict[str, Any] = {name: begin + float(str(row[name])) for name in ("start_s", "end_s")}
            rows.append(row | later | {"pass": pass_})
    return rows


def write_trace(path: Path, rows: Iterable[Row], *, measured: bool = False) -> None:
    """Writes a trace of ops.

    Args:
        path: file to write; compressed where it ends with ``.gz``, which Perfetto opens, too.
        rows: ops; the earliest starts at 0.
        measured: whether the rows come from a real run; process numbers of predicted and measured ranks differ, so
            that both kinds of trace can be joined.
    """
    shown = sorted(rows, key=lambda row: float(row["start_s"]))
    origin = float(shown[0]["start_s"]) if shown else 0.0
    _write(path, _slices(shown, origin, measured))


def write_prediction(path: Path, prediction: Prediction) -> None:
    """Writes the trace of a prediction, with arrows and counters; see ``write_trace``."""
    rows = sorted(predicted_rows(prediction), key=lambda row: float(row["start_s"]))
    origin = float(rows[0]["start_s"]) if rows else 0.0
    _write(path, [*_slices(rows, origin, False), *_arrows(rows, origin), *_counters(prediction, origin)])


def _write(path: Path, events: list[Event]) -> None:
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
    write(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _passes(prediction: Prediction) -> Iterator[tuple[float, str, Any]]:
    """Start [s], name and timeline of every pass, one after another."""
    begin = 0.0
    for pass_, timeline in prediction.timelines.items():
        yield begin, pass_, timeline
        begin += timeline.makespan_s


def _threads(rows: list[Any]) -> dict[tuple[int, str], int]:
    """Number of every (rank, stream)."""
    return {lane: i for i, lane in enumerate(sorted({(int(row["rank"]), str(row["stream"])) for row in rows}))}


def _slices(rows: list[Any], origin: float, measured: bool) -> list[Event]:
    lanes = _threads(rows)
    events = [*_names(lanes, measured)]
    for row in rows:
        events.append(
            {
                "ph": "X",
                "name": row["name"],
                "cat": row["kind"],
                "pid": _process(int(row["rank"]), measured),
                "tid": lanes[int(row["rank"]), str(row["stream"])],
                "ts": _us(row["start_s"], origin),
                "dur": round(_us(row["end_s"], origin) - _us(row["start_s"], origin), 3),
            }
        )
        if row.get("critical"):
            events[-1]["args"] = {"critical path": True}
    return events


def _arrows(rows: list[Any], origin: float) -> Iterator[Event]:
    """From the sender to the receiver of a transfer, and along the ranks of a collective; in the middle of the op."""
    lanes = _threads(rows)
    ends: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for row in rows:
        if row["kind"] in COMMUNICATION:
            ends[row["pass"], row["op"]].append(row)
    for number, of_op in enumerate(ends.values()):
        for i, row in enumerate(of_op):
            yield {
                "ph": "s" if i == 0 else "f" if i == len(of_op) - 1 else "t",
                "bp": "e",
                "id": number,
                "name": row["name"],
                "cat": row["kind"],
                "pid": _process(int(row["rank"]), False),
                "tid": lanes[int(row["rank"]), str(row["stream"])],
                "ts": round((_us(row["start_s"], origin) + _us(row["end_s"], origin)) / 2, 3),
            }


def _counters(prediction: Prediction, origin: float) -> Iterator[Event]:
    cluster = cluster_of(prediction.scenario)
    named: set[int] = set()
    for begin, _, timeline in _passes(prediction):
        for where, used in link_use(timeline, cluster.gpus_per_node).items():
            for index, steps in used.items():
                process = _process(index, False) if where == "gpu" else NODES + index
                if where == "node" and process not in named:
                    named.add(process)
                    number = _padded(index, cluster.num_nodes - 1)
                    yield _meta("process_name", process, name=f"node {number}, predicted")
                word = "sent" if where == "gpu" else "leaving the node"  # Perfetto adds the unit, the key of the value
                for moment, rate in steps.tolist():
                    at = _us(begin + moment, origin)
                    yield {"ph": "C", "name": word, "pid": process, "ts": at, "args": {"GB/s": round(rate / 1e9, 3)}}


def _padded(number: int, last: int) -> str:
    """A number with the digits of the last one: Perfetto sorts processes by their names."""
    return str(number).zfill(len(str(last)))


def _us(seconds: Any, origin: float) -> float:
    return round((float(seconds) - origin) * US_PER_S, 3)


def _process(rank: int, measured: bool) -> int:
    return rank + MEASURED * measured


def _meta(what: str, process: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "args": args}


def _names(lanes: Mapping[tuple[int, str], int], measured: bool) -> Iterator[Event]:
    word = "measured" if measured else "predicted"
    ranks = sorted({rank for rank, _ in lanes})
    for rank in ranks:
        process = _process(rank, measured)
        yield _meta("process_name", process, name=f"rank {_padded(rank, ranks[-1])}, {word}")
        yield _meta("process_sort_index", process, sort_index=process)
    for (rank, stream), thread in lanes.items():
        yield _meta("thread_name", _process(rank, measured), name=stream) | {"tid": thread}
        yield _meta("thread_sort_index", _process(rank, measured), sort_index=thread) | {"tid": thread}
