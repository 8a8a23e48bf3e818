"""How fast the hosts of this machine launch, in ten seconds; `cpsim calibrate --host` runs it.

    torchrun --nproc-per-node 2 -m cpsim.real.measure.pace --out host.json

All processes that a run would have make the calls of `cpsim.real.measure.host` at once, some of them on autograd's
thread, `ROUNDS` times with other work between: how fast a thread is depends on the core that it is on and on what else
that core does, for seconds. The file has geometric means.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from cpsim.calibrate.fit_host import in_steps, launch_times
from cpsim.calibrate.measurement import Writer
from cpsim.models.host_speed import PYTHON, save_host
from cpsim.real.measure.host import measure
from cpsim.real.run.node import Node

ROUNDS: Final = 4
REPEATS: Final = 9
"""Of every call in a round."""


class Collected(Writer):
    """Points in memory instead of a file."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []

    def add(self, op: str, samples_s: Iterable[float] = (), **parameters: Any) -> None:
        """One more point."""
        if op == "host":
            self.points.append({"op": op, **parameters, "samples_s": list(samples_s)})


def launches(node: Node) -> list[dict[str, float]]:
    """Seconds of every launch and of the Python loop, one dictionary for each round of this rank."""
    rounds = []
    for _ in range(ROUNDS):
        collected = Collected()
        with contextlib.redirect_stdout(io.StringIO()):
            measure(node, collected, with_edges=False, repeats=REPEATS)
        stepped = {p["kind"] for p in collected.points if in_steps(p)}
        rounds.append(launch_times([p for p in collected.points if in_steps(p) or p["kind"] not in stepped]))
    return rounds


def mean_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Geometric means by name."""
    names = sorted(set.intersection(*map(set, rounds)))
    return {name: float(np.exp(np.mean([np.log(each[name]) for each in rounds]))) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="host file to write")
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    args = parser.parse_args()
    with Node(cpu=args.cpu) as node:
        every = node.gather(launches(node))
        if node.rank == 0:
            found = mean_of([each for rounds in every for each in rounds])
            del found[PYTHON]
            gpu = torch.cuda.get_device_name(node.device) if node.cuda else ""
            python = [mean_of(rounds)[PYTHON] for rounds in every]
            save_host(args.out, gpu, python, found if node.cuda else {})


if __name__ == "__main__":
    main()
