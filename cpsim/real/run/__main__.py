"""Runs scenarios for real and writes what they took, in the format of `cpsim.prediction.runs`.

    torchrun --nproc-per-node 4 -m cpsim.real.run cases.jsonl --out measured.jsonl

runs the cases that need as many GPUs as there are processes; `cpsim run` launches once per number of GPUs. How time
is taken is said in `cpsim.real.run.iterations`. `fwd_bwd` of other people's code and whole training steps are
measured as one window; passes of our executor, two CUDA graphs with buffers of their own, are timed apart.

A case that fails is recorded with the reason. Where all ranks fail alike (no memory, no such kernel) the next case
follows at once. Where only some do, or a case hangs, the ranks no longer agree on what they have sent each other, or
CUDA is lost: then all processes end, and torchrun's `--max-restarts` starts fresh ones, which go on where the file
ends. A marker beside the file says which case was running.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NoReturn, TypeVar

import torch

from cpsim.case.cluster import Cluster
from cpsim.case.load import load_scenarios
from cpsim.case.resolve import cluster_of
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError, cut
from cpsim.prediction.runs import PassRun, Run, Writer, case_key, load_runs
from cpsim.real.run import attention
from cpsim.real.run.failures import FRESH, Broken, CaseFailed, Watch, explain, marker_of, take_marker
from cpsim.real.run.iterations import time_pass
from cpsim.real.run.node import Node, end_process
from cpsim.real.run.runner import Runner
from cpsim.real.run.timing import command_line, packages, provenance

T = TypeVar("T")
Make = Callable[..., Runner]
Window = Literal["fwd", "bwd", "fwd_bwd"]


def windows_of(scenario: Scenario) -> tuple[Window, ...]:
    """What is timed by itself: passes of our executor; both together of other people's code and of whole steps."""
    apart = scenario.implementation == "cpsim" and not scenario.is_step
    return scenario.passes if apart else (scenario.pass_,)


class Launch:
    """One launch: this rank, its watch, and on rank 0 the file of runs."""

    def __init__(self, node: Node, make: Make, args: argparse.Namespace) -> None:
        self.node, self._make, self._seconds = node, make, args.seconds
        gc.freeze()  # modules are no garbage; to look through them takes most of a collection, before every pass
        self._watch = Watch(marker_of(args.out), args.limit)
        self._writer: Writer | None = None
        if node.rank == 0:
            header = _header(node, args)
            self._writer = Writer(args.out.open("a" if args.resume or args.append else "w", encoding="utf-8"), header)

    def record(self, run: Run) -> None:
        """Writes a case on rank 0."""
        if self._writer:
            self._writer.add(run)

    def run(self, scenario: Scenario) -> Run:
        """Runs one case; what goes wrong is in the result.

        Raises:
            Broken: fresh processes must go on; the case is recorded.
        """
        self._watch.start(scenario, self.node.rank)
        broken = ""
        try:
            passes = {str(window): self._pass(scenario, window) for window in windows_of(scenario)}
            result = Run(scenario=scenario, passes=passes)
        except CaseFailed as reason:
            result = Run(scenario=scenario, error=str(reason))
        except Broken as reason:
            result, broken = Run(scenario=scenario, error=str(reason)), str(reason)
        self.record(result)
        if not broken:
            self._clean()
        self.gather(None)  # rank 0 has written
        self._watch.stop()
        self._watch.marker.unlink(missing_ok=True)
        if broken:
            raise Broken(broken)
        return result

    def _pass(self, scenario: Scenario, pass_: Window) -> PassRun:
        made: list[Runner] = []
        self.together(lambda: made.append(self._make(scenario, pass_, self.node)))
        run = time_pass(made.pop(), self.node, self.together, scenario.protocol, self._seconds)
        self._clean()
        return run

    def together(self, step: Callable[[], T]) -> list[T]:
        """Does a step on every rank and returns all ranks' results, by rank.

        Raises:
            CaseFailed: all ranks failed, and can go on.
            Broken: some failed, or CUDA is lost.
        """
        mine: tuple[T | None, str] = (None, "")
        try:
            mine = (step(), "")
        except Exception as error:
            mine = (None, explain(error))
            self._watch.hurry(mine[1])
        results = self.gather(mine)
        reasons = [reason for _, reason in results]
        if not any(reasons):
            return [result for result, _ in results]
        failed = next(rank for rank, reason in enumerate(reasons) if reason)
        if all(reasons) and not any("CUDA error" in reason for reason in reasons):
            raise CaseFailed(reasons[failed])
        raise Broken(f"rank {failed}: {reasons[failed]}")

    def gather(self, value: Any) -> list[Any]:
        """What every rank says; ends this process where another one has ended."""
        try:
            return self.node.gather(value)
        except RuntimeError:
            os._exit(FRESH)

    def _clean(self) -> None:
        gc.collect()
        if self.node.cuda:
            self.node.synchronize()
            torch.cuda.empty_cache()


def select(scenarios: Sequence[Scenario], node: Node, num_nodes: int, seed: int) -> tuple[list[Scenario], list[Run]]:
    """The cases of this launch in a shuffled order, and those that it cannot run."""
    mine, others = [], []
    for scenario in scenarios:
        reason = _refusal(scenario, node, num_nodes)
        if reason:
            others.append(Run(scenario=scenario, error=reason))
        else:
            mine.append(scenario)
    random.Random(seed).shuffle(mine)
    return mine, others


def _refusal(scenario: Scenario, node: Node, num_nodes: int) -> str:
    if scenario.gpus != node.size:
        return f"gpus: needs {scenario.gpus}, this launch has {node.size}; `cpsim run` launches for every number"
    try:
        cluster: Cluster = cluster_of(scenario)
    except CpsimError as error:
        return str(error)
    machines = node.size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if node.cuda and cluster.num_nodes != max(num_nodes, machines):
        return (
            f"cluster: {cluster.name} has {cluster.num_nodes} nodes for {scenario.gpus} GPUs, this launch has "
            f"{max(num_nodes, machines)}; see --emulate-nodes"
        )
    return ""


def _header(node: Node, args: argparse.Namespace) -> dict[str, Any]:
    kernels = {name: attention.kernel_version(name) for name in ("fa2", "fa4", "cudnn")} if node.cuda else {}
    command = args.command or command_line("torchrun -m cpsim.real.run")
    header = provenance(node.device, node.size, kernels, command, args.commit)
    environment = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "CUDA_DEVICE_MAX", "TORCH_NCCL"))}
    return header | {
        "packages": packages(),
        "emulated_nodes": args.emulate_nodes,
        "seed": args.seed,
        "environment": environment,
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cpsim.real.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", type=Path, help="scenarios: JSON Lines, YAML or JSON")
    parser.add_argument("--out", type=Path, help="file of runs to write")
    parser.add_argument("--append", action="store_true", help="write behind what the file holds")
    parser.add_argument("--resume", action="store_true", help="append, and leave out cases that the file holds")
    parser.add_argument("--cpu", action="store_true", help="gloo and CPUs even where there are GPUs")
    parser.add_argument("--emulate-nodes", type=int, default=1, metavar="N", help="nodes to make of this machine")
    parser.add_argument("--minutes", type=float, help="start no case after so many minutes")
    parser.add_argument("--until", type=float, help="start no case after this time [s since 1970]")
    parser.add_argument("--seconds", type=float, default=0.5, help="iterations to measure of every pass [s]")
    parser.add_argument("--limit", type=float, default=150.0, help="a case that takes longer hangs [s]")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the cases")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of the one case instead of runs")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    parser.add_argument("--command", default="", help="how the user said it, for the header")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.trace is None):
        parser.error("expected --out for times, or --trace for a trace of one case")
    args.resume |= int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return args


def main(argv: Sequence[str] | None = None, make: Make | None = None) -> NoReturn:
    """Entry point; ends the process.

    Args:
        argv: arguments; those of the process where not given.
        make: `(scenario, pass_, node) -> Runner`; that of `cpsim.real.others` or `cpsim.real.steps` where not
            given.
    """
    args = _arguments(argv)
    try:
        end_process(_main(args, make))
    except CpsimError as error:
        print(f"cpsim.real.run: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(2)


def _main(args: argparse.Namespace, make: Make | None) -> int:
    scenarios, broken = list[Scenario](), list[CpsimError]()
    for entry in load_scenarios(args.cases):
        if isinstance(entry, CpsimError):
            broken.append(entry)
        else:
            scenarios.append(entry)
    if make is None:
        make = _make
    with Node(cpu=args.cpu, num_nodes=args.emulate_nodes) as node:
        if args.trace:
            from cpsim.real.run.trace import trace_case

            cases, others = select(scenarios, node, args.emulate_nodes, args.seed)
            if len(cases) != 1:
                why = f": {others[0].error}" if others else ""
                raise CpsimError(f"trace: expected one case for {node.size} GPUs, got {len(cases)}{why}")
            trace_case(cases[0], windows_of(cases[0]), node, make, args.trace)
            return 0
        if node.rank == 0:
            for error in broken:
                print(f"cpsim.real.run: {error}", file=sys.stderr, flush=True)
        return _run_all(scenarios, node, make, args)


def _make(scenario: Scenario, pass_: Window, node: Node) -> Runner:
    if scenario.is_step:
        from cpsim.real import steps  # takes seconds to import

        return steps.make(scenario, node)
    from cpsim.real import others  # needs what tests replace

    return others.make(scenario, pass_, node)


def _run_all(scenarios: Sequence[Scenario], node: Node, make: Make, args: argparse.Namespace) -> int:
    deadline = args.until or time.time() + 60 * (args.minutes or float("inf"))
    done, left = node.gather(_read(args) if node.rank == 0 else None)[0]
    launch = Launch(node, make, args)
    mine, others = select([s for s in scenarios if case_key(s) not in done], node, args.emulate_nodes, args.seed)
    for run in (*left, *others):
        launch.record(run)
    for number, scenario in enumerate(mine, 1):
        if max(node.gather(time.time())) > deadline:
            _say(node, f"{len(mine) - number + 1} cases not run: the time is over; see --resume")
            break
        label, begun = f"{number}/{len(mine)} {_label(scenario)}", time.monotonic()
        try:
            run = launch.run(scenario)
        except Broken as reason:
            _say(node, f"{label}: {reason}; fresh processes go on where torchrun has --max-restarts")
            os._exit(FRESH)
        _say(node, f"{label}: {_result(run)} ({time.monotonic() - begun:.1f} s)")
    return 0


def _read(args: argparse.Namespace) -> tuple[set[str], list[Run]]:
    """What the file of runs holds already, and the case at which earlier processes ended."""
    if not args.resume:
        marker_of(args.out).unlink(missing_ok=True)
        return set(), []
    left = take_marker(marker_of(args.out))
    known = load_runs(args.out) if args.out.exists() else []
    return {run.key for run in (*known, *filter(None, [left]))}, [left] if left else []


def _say(node: Node, text: str) -> None:
    if node.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _label(scenario: Scenario) -> str:
    per_gpu = scenario.num_tokens // scenario.gpus
    if scenario.is_step:
        given = scenario.parallel.model_dump(exclude_defaults=True) if scenario.parallel else {}
        degrees = "".join(f" {name}={value}" for name, value in given.items())
        return f"{scenario.framework or 'megatron'} step{degrees} {scenario.kernel} {per_gpu}"
    knobs = "".join(f" {name}={cut(str(value), 60)}" for name, value in scenario.knobs.items())
    return f"{scenario.implementation} {scenario.strategy}{knobs} {scenario.kernel} {scenario.mask_name} {per_gpu}"


def _result(run: Run) -> str:
    if run.error:
        return run.error
    return ", ".join(f"{name} {median(entry.samples_s) * 1e3:.3f} ms" for name, entry in run.passes.items())


if __name__ == "__main__":
    main()
