"""What single ranks of many compute, measured on one GPU: a program, ours or somebody else's, without communication.

    python -m cpsim.real.measure.ranks data/cases/ranks-1.jsonl --out data/runs/MACHINE/ranks-h200.jsonl

Takes cases of any number of GPUs, and of each the first rank, the last and the one in the middle, pass by pass. All
work on random tensors of the real sizes; what would have arrived is there. Times are those of `held` iterations.
`cpsim.prediction.passes.run_ranks` predicts them. Nothing is fitted to the result.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from cpsim.calibrate.measurement import Writer
from cpsim.case.load import load_scenarios
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError
from cpsim.models.host import HELD_S
from cpsim.prediction.passes import ranks_of
from cpsim.real.others import make
from cpsim.real.others.autograd import AutogradRunner
from cpsim.real.run import attention
from cpsim.real.run.failures import explain
from cpsim.real.run.iterations import time_pass
from cpsim.real.run.node import Node, end_process
from cpsim.real.run.timing import command_line, packages, provenance
from cpsim.schedule.schedule import Pass

T = TypeVar("T")


def measure(scenario: Scenario, pass_: Pass, rank: int, node: Node, writer: Writer, args: argparse.Namespace) -> str:
    """Writes one rank's pass, or why it does not run; returns what to tell the user."""
    which = {"scenario": scenario.to_dict(), "pass": pass_, "rank": rank, "lead_s": args.lead}
    try:
        node.stand_for(rank, scenario.gpus)
        runner = make(scenario, pass_, node)
        run = time_pass(runner, node, _alone, "held", args.seconds, args.lead)
        finite = not isinstance(runner, AutogradRunner) or runner.is_finite()
    except Exception as error:
        writer.add("error", failed="rank", message=explain(error), **which)
        return explain(error)
    finally:
        gc.collect()
        if node.cuda:
            node.synchronize()
            torch.cuda.empty_cache()
    attention = {"attention_s": run.attention_s[0]} if run.attention_s else {"finite": finite}
    writer.add("rank", run.samples_s, **which, **attention, clock=run.clock)
    return f"{median(run.samples_s) * 1e3:.3f} ms{'' if finite else ' (not finite)'}"


def _alone(step: Callable[[], T]) -> list[T]:
    return [step()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", type=Path, help="scenarios: JSON Lines, YAML or JSON")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--cpu", action="store_true", help="the CPU even where there is a GPU")
    parser.add_argument("--seconds", type=float, default=0.1, help="iterations to measure of every pass [s]")
    parser.add_argument("--lead", type=float, default=HELD_S, help="time that the host has to launch ahead [s]")
    parser.add_argument("--skip", type=int, default=0, help="cases to pass over, from the first: those already run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after so many minutes")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    deadline, node = time.monotonic() + 60 * args.minutes, Node(cpu=args.cpu)
    kernels = {name: attention.kernel_version(name) for name in ("fa2", "fa4", "cudnn")} if node.cuda else {}
    command = command_line("python -m cpsim.real.measure.ranks")
    gc.freeze()  # modules are no garbage
    with args.out.open("w", encoding="utf-8") as file:
        header = provenance(node.device, 1, kernels, command, args.commit) | {"packages": packages()}
        writer = Writer(file, header)
        for case in islice(load_scenarios(args.cases), args.skip, None):
            if isinstance(case, CpsimError):
                print(f"cpsim.real.measure.ranks: {case}", file=sys.stderr)
                continue
            if time.monotonic() > deadline:
                print("cpsim.real.measure.ranks: cases not run: the time is over", file=sys.stderr)
                break
            for pass_ in case.passes:
                found = [f"rank {r} {measure(case, pass_, r, node, writer, args)}" for r in ranks_of(case.gpus)]
                label = f"{case.gpus} x {case.num_tokens // case.gpus} {case.strategy} {case.kernel} {case.mask_name}"
                print(f"{label} {pass_}: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
    end_process()
