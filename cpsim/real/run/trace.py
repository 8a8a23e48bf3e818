"""A Chrome trace of one iteration of a real case: every rank a process, every GPU stream a thread."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from cpsim.case.scenario import Scenario
from cpsim.real.run.iterations import WARMUP
from cpsim.real.run.node import Node
from cpsim.real.run.runner import Runner
from cpsim.report.trace import Row, write_trace

_KINDS = {"gpu_user_annotation": "op", "user_annotation": "op", "kernel": "kernel", "gpu_memcpy": "copy"}


def trace_case(
    scenario: Scenario, passes: tuple[str, ...], node: Node, make: Callable[..., Runner], path: Path
) -> None:
    """Traces one iteration of every pass, after a warm-up, and writes one file on rank 0.

    Args:
        scenario: the case; our executor names every op for the profiler (`node.traced`), others only kernels.
        passes: its passes, or `fwd_bwd`.
        node: this rank.
        make: makes runners.
        path: file to write; it opens beside the predicted trace.
    """
    rows: list[Row] = []
    node.traced = True
    for pass_ in passes:
        runner = make(scenario, pass_, node)
        for _ in range(WARMUP):
            runner.prepare()
            runner.launch()
        runner.prepare()
        node.barrier()
        node.synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if node.cuda else [])]
        with profile(activities=activities) as recorded:
            with record_function(pass_):
                runner.launch()
            node.synchronize()
        rows += [row for rank in node.gather(_rows(recorded, node)) for row in rank]
    if node.rank == 0:
        write_trace(path, rows, measured=True)


def _rows(recorded: Any, node: Node) -> list[Row]:
    """What this rank's profiler saw: ops on the host and on the streams of the GPU, kernels below them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        whole = json.loads(file.read_text(encoding="utf-8"))
    base = float(whole.get("baseTimeNanoseconds", 0)) / 1e3
    return [
        {
            "rank": node.rank,
            "stream": f"stream {event['tid']}" if event["cat"] != "user_annotation" else "host",
            "name": str(event["name"]),
            "kind": _KINDS[event["cat"]],
            "start_s": (base + float(event["ts"])) / 1e6,
            "end_s": (base + float(event["ts"]) + float(event["dur"])) / 1e6,
        }
        for event in whole["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _KINDS
    ]
