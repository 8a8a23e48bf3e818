"""Starts torchrun: one for every number of GPUs that real runs need, one to calibrate. Nothing here imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from threading import Timer
from typing import Any, Final

from cpsim.case.resolve import cluster_of
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError

MAX_RESTARTS: Final = 10
"""Fresh processes after cases that hang or crash; each costs some ten seconds."""
PATIENCE_S: Final = 180.0
"""A calibration that takes so much longer than it may hangs."""
PROGRESS: Final = "progress "
"""Lines of cpsim.real.measure.calibrate that say how far it is: [part, points done, points in all]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run; see ``cpsim run --help``."""

    out: Path | None = None
    """File of runs; None for a trace."""
    command: str
    """How the user said it, for the header of the file."""
    num_gpus: int
    """GPUs, or processes on a CPU, that may be used."""
    cpu: bool = False
    num_nodes: int = 1
    """Nodes to emulate for cases that span several."""
    minutes: float | None = None
    seed: int = 1
    seconds: float = 0.5
    """Iterations to measure of every pass [s]."""
    commit: str = ""
    """Commit of the working tree, where git is missing."""
    resume: bool = False
    trace: Path | None = None


def local_gpus(command: str) -> list[str]:
    """Names of this machine's GPUs, as torch sees them.

    Args:
        command: who asks, for errors.

    Raises:
        CpsimError: torch is missing or broken.
    """
    if find_spec("torch") is None:
        raise CpsimError(f"{command}: PyTorch is missing in this Python; install it, e.g. pip install '.[real]'")
    names = "from torch import cuda; print(*map(cuda.get_device_name, range(cuda.device_count())), sep='\\n')"
    asked = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=False)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["unknown"])[-1]
        raise CpsimError(f"{command}: PyTorch cannot be imported: {reason}; see `python -c 'import torch'`")
    return [name for name in asked.stdout.splitlines() if name]


def launch(scenarios: Sequence[Scenario], options: Options) -> int:
    """Runs cases, those that need most GPUs first, and appends their times to one file.

    Returns:
        how many launches ended badly; what they had measured until then is in the file.
    """
    deadline = time.time() + 60 * options.minutes if options.minutes is not None else None
    if options.out and not options.resume:
        options.out.write_text("", encoding="utf-8")
    ordered = sorted(scenarios, key=_needs, reverse=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="cpsim-") as folder:
        for (gpus, nodes), group in groupby(ordered, _needs):
            cases = Path(folder) / f"{gpus}-gpus-{nodes}-nodes.jsonl"
            cases.write_text("".join(json.dumps(s.to_dict()) + "\n" for s in group), encoding="utf-8")
            emulated = options.num_nodes if nodes > 1 else 1
            command = torchrun(cases, gpus, emulated, options, deadline)
            failed += _status(command, _environment(options)) != 0
    return failed


def torchrun(cases: Path, gpus: int, num_nodes: int, options: Options, deadline: float | None) -> list[str]:
    """The command of one launch."""
    start = [*_processes(gpus, 0 if options.trace else MAX_RESTARTS), "-m", "cpsim.real.run", str(cases)]
    if options.trace:
        start += ["--trace", str(options.trace)]
    else:
        start += ["--out", str(options.out), "--resume" if options.resume else "--append"]
    start += ["--seed", str(options.seed), "--seconds", str(options.seconds), "--command", options.command]
    start += ["--emulate-nodes", str(num_nodes)] if num_nodes > 1 else []
    start += ["--commit", options.commit] if options.commit else []
    start += ["--cpu"] if options.cpu else []
    start += ["--until", str(deadline)] if deadline is not None else []
    return start


def calibrate(out: Path, options: Options, kernels: str, progress: Callable[[str, int, int], None]) -> int:
    """Measures this node into a file, going on with what it holds; returns the exit status.

    Args:
        out: the measurement file; what the processes say goes to a log beside it.
        options: how; `minutes` counts from now, start-up included.
        kernels: attention kernels, separated by commas.
        progress: called with the part, points done and points in all.
    """
    limit = 60 * (options.minutes or 10.0)
    start = [
        *_processes(options.num_gpus, 3),
        "-m",
        "cpsim.real.measure.calibrate",
        "--out",
        str(out),
        "--kernels",
        kernels,
    ]
    start += ["--until", str(time.time() + limit), "--command", options.command]
    start += ["--commit", options.commit] if options.commit else []
    start += ["--cpu"] if options.cpu else []
    with out.with_suffix(".log").open("w", encoding="utf-8") as log:
        environment = _environment(options)
        with _started(start, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
            watch = Timer(limit + PATIENCE_S, process.terminate)
            watch.start()
            try:
                for line in process.stdout or ():
                    if line.startswith(PROGRESS):
                        progress(*json.loads(line.removeprefix(PROGRESS)))
                    else:
                        log.write(line)
                        log.flush()
                return process.wait()
            finally:
                watch.cancel()


def host_pace(out: Path, num_gpus: int) -> None:
    """Measures how fast this machine's hosts launch, into a host file.

    Raises:
        CpsimError: the processes ended early; says what they said last.
    """
    command = [*_processes(num_gpus, 0), "-m", "cpsim.real.measure.pace", "--out", str(out)]
    with _started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        said = (process.communicate()[1] or "").strip().splitlines()
        if process.returncode:
            errors = [line for line in said if "Error" in line] or said or ["no reason given"]
            raise CpsimError(f"calibrate: measuring hosts ended early: {errors[-1]}")


def _status(command: Sequence[str], environment: Mapping[str, str]) -> int:
    with _started(command, env=environment) as process:
        return process.wait()


@contextmanager
def _started(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[str]]:
    """Torchrun, which ends with what is done within, and its processes with it.

    In a process group of its own: it must hear of an interrupt once, from here, or it leaves its processes behind.
    """
    process = subprocess.Popen(command, process_group=0, **how)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _environment(options: Options) -> dict[str, str]:
    """Environment of the processes: on a CPU each has one thread, whether there are several or not."""
    return {**os.environ, **({"OMP_NUM_THREADS": "1"} if options.cpu else {})}


def _processes(count: int, restarts: int) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [*start, "--max-restarts", str(restarts)]


def _needs(scenario: Scenario) -> tuple[int, int]:
    """GPUs and nodes of a case; a launch serves one such pair."""
    return scenario.gpus, cluster_of(scenario).num_nodes
