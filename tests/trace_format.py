"""A strict reading of Chrome's trace events, as Perfetto imports them: what it would drop or misplace is an error."""

import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import pairwise

FIELDS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "s": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "t": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "args"},
}
META = {f"{what}_{key}": key for what in ("process", "thread") for key in ("name", "sort_index")}


def check(text):
    """The events by phase.

    Raises:
        AssertionError: a field is missing or of another type; slices of a thread overlap without one holding the
            other; a flow has no start or end, or an end outside of a slice; a counter goes back in time or is no
            number; a process or thread of a slice has no name.
    """
    document = json.loads(text)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = defaultdict(list)
    for event in document["traceEvents"]:
        assert FIELDS[event["ph"]] <= set(event), event
        assert event["ph"] == "M" or (math.isfinite(event["ts"]) and event["ts"] >= 0), event
        assert isinstance(event["pid"], int), event
        events[event["ph"]].append(event)
    threads = _slices(events["X"])
    _flows([*events["s"], *events["t"], *events["f"]], threads)
    _counters(events["C"])
    _names(events)
    return events


def _slices(slices):
    threads = defaultdict(list)
    for event in slices:
        assert event["dur"] >= 0, event
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        for (_, end), (start, later) in pairwise(spans):
            assert start >= end - 0.0015 or later <= end, (end, start, later)  # times are rounded to 1 ns
    return threads


def _flows(flows, threads):
    phases = defaultdict(Counter)
    for event in flows:
        phases[event["id"]][event["ph"]] += 1
        spans = threads[event["pid"], event["tid"]]
        assert any(start <= event["ts"] <= end for start, end in _near(spans, event["ts"])), event
        assert event["bp"] == "e"
    for number, count in phases.items():
        assert count["s"] == count["f"] == 1, number


def _near(spans, moment):
    after = bisect_right(spans, (moment, math.inf))
    return spans[max(0, after - 2) : after + 1]


def _counters(counters):
    last = {}
    for event in counters:
        key = event["pid"], event["name"]
        assert event["ts"] >= last.get(key, 0), event
        last[key] = event["ts"]
        assert event["args"]
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in event["args"].values()), event


def _names(events):
    named = {(event["pid"], event.get("tid")) for event in events["M"] if event["name"].endswith("_name")}
    for event in events["M"]:
        assert META[event["name"]] in event["args"], event
    for event in (*events["X"], *events["C"]):
        assert (event["pid"], None) in named, event
        assert event["ph"] == "C" or (event["pid"], event["tid"]) in named, event
