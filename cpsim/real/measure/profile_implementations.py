"""What other people's code launches: kernels and host time of one iteration, to compare with the plan's ops.

    torchrun --nproc-per-node 4 -m cpsim.real.measure.profile_implementations --out DIR
    torchrun --nproc-per-node 2 -m cpsim.real.measure.profile_implementations --cases cases.jsonl --out DIR
    python -m cpsim.real.measure.profile_implementations --alone data/cases/ranks-others.jsonl --out DIR

The second profiles a file's cases, our executor's, too, whose kernels a graph launches; the third a file's cases of any
number of GPUs on one: the rank in the middle, alone (`cpsim.real.measure.alone`). Writes
`profile-rank0.json` and so on: for each case the time without the profiler, the kernels of one iteration in order of
their start (name, stream, start, duration, the host call that launched it) and the host's outermost ops.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from cpsim.case.load import load_scenarios, scenario_from
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError
from cpsim.real.others import make
from cpsim.real.run.iterations import iteration
from cpsim.real.run.node import Node, end_process
from cpsim.real.run.runner import Runner
from cpsim.schedule.schedule import Pass

CASES: tuple[tuple[str, str, str, dict[str, Any], str], ...] = (
    ("ring-flash-attn", "fa2", "zigzag_ring", {}, "causal"),
    ("ring-flash-attn", "fa2", "ring", {}, "full"),
    ("ring-flash-attn", "fa2", "ring", {}, "causal"),
    ("ring-flash-attn", "fa2", "striped_ring", {}, "causal"),
    ("ring-flash-attn", "fa2", "allgather", {"heads_per_gather": 2}, "causal"),
    ("ring-flash-attn", "fa2", "allgather", {}, "causal"),
    ("yunchang", "fa2", "ulysses", {}, "causal"),
    ("yunchang", "fa2", "usp", {"ulysses": 2}, "causal"),
    ("torch", "sdpa_flash", "zigzag_ring", {}, "causal"),
    ("torch", "sdpa_flash", "allgather", {}, "causal"),
    ("torch", "sdpa_flash", "ring", {}, "full"),
    ("torch", "cudnn", "zigzag_ring", {}, "causal"),
    ("ring-flash-attn", "fa2", "zigzag_ring", {}, "causal_document"),
    ("ring-flash-attn", "fa2", "ring", {}, "causal_document"),
    ("ring-flash-attn", "fa2", "allgather", {"heads_per_gather": 2}, "causal_document"),
)
"""Implementation, kernel, strategy, knobs, mask."""
PASSES: tuple[Pass, ...] = ("fwd", "bwd")
SMALL, LARGE = 1024, 8192
"""Tokens per GPU: where the host decides, and where it does not."""


def scenarios(num_ranks: int, cluster: str) -> Iterator[Scenario]:
    """Every case at both sizes, its documents of lengths that all cuts divide."""
    for implementation, kernel, strategy, knobs, mask in CASES:
        for tokens in (LARGE, SMALL):
            total = tokens * num_ranks
            yield scenario_from(
                {
                    "implementation": implementation,
                    "kernel": kernel,
                    "strategy": strategy,
                    "knobs": knobs,
                    "mask": mask,
                    "gpus": num_ranks,
                    "cluster": cluster,
                    "tokens": total,
                    "heads": 32,
                    "kv_heads": 8,
                    "documents": [total // 8, total // 2, total // 4, total // 8],
                }
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--cases", type=Path, help="cases of so many GPUs as there are processes")
    parser.add_argument("--alone", type=Path, help="cases of which one rank is profiled alone")
    parser.add_argument("--only", default="", help="implementations, separated by commas")
    parser.add_argument("--seconds", type=float, default=100.0, help="no new case after that")
    parser.add_argument("--emulate-nodes", type=int, default=1, metavar="N", help="nodes to make of this machine")
    args = parser.parse_args()
    started, rows = time.monotonic(), []
    torch.manual_seed(0)
    with Node(cpu=args.cpu, num_nodes=args.emulate_nodes) as node:
        rank = node.rank
        for scenario, pass_ in itertools.product(chosen(args, node.size), PASSES):
            late = torch.tensor([time.monotonic() - started > args.seconds], dtype=torch.int32, device=node.device)
            dist.all_reduce(late)
            if late.item():
                break
            if args.alone:
                node.stand_for(scenario.gpus // 2, scenario.gpus)
            rows.append(row_of(scenario, pass_, node))
            if rank == 0 or node.alone:
                print(in_words(scenario, pass_, rows[-1]), flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"profile-rank{rank}.json").write_text(lines, encoding="utf-8")
        if rank == 0:
            print(f"{time.monotonic() - started:.0f} s")
        end_process()  # communicators that a graph has captured may not close


def chosen(args: argparse.Namespace, num_ranks: int) -> list[Scenario]:
    """The cases to profile; what is wrong with others is printed."""
    found, file = [], args.alone or args.cases
    for scenario in load_scenarios(file) if file else scenarios(num_ranks, "h200-4"):
        if isinstance(scenario, CpsimError):
            print(f"cpsim.real.measure.profile_implementations: {scenario}", file=sys.stderr)
        elif not args.only or scenario.implementation in args.only.split(","):
            found.append(scenario)
    return found


def row_of(scenario: Scenario, pass_: Pass, node: Node) -> dict[str, Any]:
    """What is written of a case, or the error that it ended with."""
    row: dict[str, Any] = {"scenario": {**scenario.to_dict(), "pass": pass_}, "rank": node.rank}
    try:
        return row | measure(scenario, pass_, node)
    except CpsimError as error:
        return row | {"error": str(error)}
    except Exception as error:  # the same on all ranks, or the job hangs and is stopped from outside
        return row | {"error": f"{type(error).__name__}: {error}"[:2000]}


def in_words(scenario: Scenario, pass_: Pass, row: dict[str, Any]) -> str:
    what = f"{row.get('time_s', 0) * 1e6:.0f} us, {len(row.get('kernels', ()))} kernels"
    case = f"{scenario.implementation} {scenario.strategy} {scenario.mask_name} {scenario.kernel}"
    return f"{case} {scenario.num_tokens} {pass_}: {row.get('error', what)}"


def measure(scenario: Scenario, pass_: Pass, node: Node) -> dict[str, Any]:
    """Times of some iterations, then one iteration under the profiler."""
    runner = Marked(make(scenario, pass_, node))
    one = partial(iteration, runner, node, "synced")
    times = torch.tensor([one() for _ in range(16)][6:], dtype=torch.float64, device=node.device)
    slowest = times.clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if node.cuda else [])]
    with profile(activities=activities):  # the first profile of a process is slow and late
        one()
    with profile(activities=activities) as profiler:
        one()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    own, all_ranks = times.tolist(), slowest.tolist()
    return {"time_s": statistics.median(all_ranks), "times_s": all_ranks, "own_times_s": own, **ordered(events)}


class Marked:
    """A runner whose launches the profiler marks."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def prepare(self) -> None:
        """As the runner prepares."""
        self._runner.prepare()

    def launch(self) -> None:
        """One iteration."""
        with torch.profiler.record_function("iteration"):
            self._runner.launch()


def ordered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels and host ops of the marked iteration; times in microseconds from its start."""
    marks = [e for e in events if e.get("name") == "iteration" and e.get("cat") == "user_annotation"]
    zero, end = marks[0]["ts"], marks[0]["ts"] + marks[0]["dur"]
    timed = [e for e in events if e.get("ph") == "X" and "dur" in e]
    calls = {e["args"]["correlation"]: e for e in timed if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    ops = sorted((e for e in timed if e.get("cat") == "cpu_op"), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    kernels = []
    on_gpu = [e for e in timed if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for e in sorted(on_gpu, key=lambda e: e["ts"]):
        call = calls.get(e["args"].get("correlation"))
        if call is None or not zero <= call["ts"] <= end:
            continue
        around = [o for o in ops if o["tid"] == call["tid"] and o["ts"] <= call["ts"] <= o["ts"] + o["dur"]]
        kernels.append(
            {
                "name": e["name"][:160],
                "stream": e["args"].get("stream"),
                "start_us": round(e["ts"] - zero, 2),
                "dur_us": round(e["dur"], 2),
                "launched_us": round(call["ts"] - zero, 2),
                "call_us": round(call["dur"], 2),
                "ops": [o["name"] for o in around],
            }
        )
    host = [[o["name"], round(o["ts"] - zero, 1), round(o["dur"], 1), o["tid"]] for o in ops if zero <= o["ts"] <= end]
    waits = [
        [c["name"], round(c["ts"] - zero, 1), round(c["dur"], 1)] for c in calls.values() if zero <= c["ts"] <= end
    ]
    return {"host_us": marks[0]["dur"], "kernels": kernels, "host": host, "calls": waits}


if __name__ == "__main__":
    main()
