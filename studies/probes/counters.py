"""What a GPU's counters say of attention kernels: how blocks are launched, and whether warps wait for instructions.

    python -m studies.probes.counters --out data/points/h200/counters/h200.jsonl

Runs Nsight Compute (ncu) on itself. Of every call the kernel that takes longest: its grid, thread blocks of a cluster,
how many clusters the GPU holds at once, registers of a thread and how many blocks an SM has room for. Of every warp
that is ready or waits, `no_instruction` is the share that waits for an instruction to be fetched.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from cpsim.real.measure.kernels import are_right, both_passes, relative_errors
from cpsim.real.measure.shapes import Shape
from cpsim.real.run import attention
from cpsim.real.run.timing import command_line, provenance

KERNELS = ("fa2", "sdpa_flash", "cudnn")
TOKENS, HEADS = 16384, 32
"""Of calls of equal documents, forward."""
DOCUMENTS = (128, 320, 512, 1024, 2048)
ROWS, FEW_HEADS = 2112, 4
"""Of calls of one sequence: 33 rows of 64 tokens, an odd number."""
STALL = "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio"
WARPS = "smsp__average_warp_latency_per_inst_issued.ratio"
SECONDS = "gpu__time_duration.sum"
LAUNCH = {
    "cluster": "launch__cluster_size",
    "clusters_at_once": "launch__cluster_max_active",
    "registers": "launch__registers_per_thread",
    "by_registers": "launch__occupancy_limit_registers",
    "by_shared_memory": "launch__occupancy_limit_shared_mem",
    "by_warps": "launch__occupancy_limit_warps",
}


def calls() -> Iterator[tuple[str, str, Shape]]:
    """Kernels, passes and shapes."""
    for kernel, causal, tokens in itertools.product(("fa2", "sdpa_flash"), (True, False), DOCUMENTS):
        lengths = (tokens,) * (TOKENS // tokens)
        yield (
            kernel,
            "fwd",
            Shape(
                family="documents",
                num_heads=HEADS,
                num_kv_heads=HEADS,
                causal=causal,
                varlen=True,
                q_lens=lengths,
                k_lens=lengths,
            ),
        )
    for kernel, pass_, head_dim, causal in itertools.product(KERNELS, ("fwd", "bwd"), (64, 128, 256), (True, False)):
        yield (
            kernel,
            pass_,
            Shape(
                family="one",
                num_heads=FEW_HEADS,
                num_kv_heads=FEW_HEADS,
                causal=causal,
                varlen=False,
                q_lens=(ROWS,),
                k_lens=(ROWS,),
                head_dim=head_dim,
            ),
        )


def make_calls() -> None:
    """Every call once after one alike, in a range of the profiler that bears its number."""
    for number, (kernel, pass_, shape) in enumerate(calls()):
        try:
            if not are_right(relative_errors(kernel, shape, torch.device("cuda"))):
                raise ValueError("expected attention, got other results")
            call = both_passes(kernel, shape, torch.device("cuda"))[pass_]
            call()
        except Exception as error:  # the others go on
            print(f"studies.probes.counters: {kernel} {pass_} {shape}: {error}", file=sys.stderr)
            continue
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.nvtx.range_push(str(number))
        call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        torch.cuda.cudart().cudaProfilerStop()


def counted() -> str:
    """What ncu prints of all calls, a line of CSV for each kernel and counter; kernels' names begin with the range."""
    ncu = [
        "ncu",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--nvtx",
        "--print-nvtx-rename",
        "kernel",
        "--csv",
        "--print-units",
        "base",
        "--metrics",
        ",".join((STALL, WARPS, SECONDS, *LAUNCH.values())),
    ]
    again = [sys.executable, "-m", "studies.probes.counters", "--calls"]
    done = subprocess.run([*ncu, *again], capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    return done.stdout


def longest_kernels(lines: Iterable[str]) -> dict[int, dict[str, Any]]:
    """Of every call, by its number, grid and counters of the kernel that takes longest."""
    kernels: dict[tuple[int, str], dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        number, _, name = row["Kernel Name"].partition("/")
        if number.isdigit() and name:
            grid = json.loads(row["Grid Size"].replace("(", "[").replace(")", "]"))
            what = {"name": name.removeprefix("void ").partition("<")[0], "grid": grid}
            kernel = kernels.setdefault((int(number), row["ID"]), what)
            kernel[row["Metric Name"]] = _number(row["Metric Value"])
    found: dict[int, dict[str, Any]] = {}
    for (call, _), kernel in kernels.items():
        found[call] = max(found.get(call, kernel), kernel, key=lambda k: k[SECONDS])
    return found


def _number(text: str) -> float | None:
    """A counter; some do not exist for every kernel."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def row_of(kernel: str, pass_: str, shape: Shape, counters: dict[str, Any]) -> dict[str, Any]:
    """What is committed of a call."""
    return {
        "kernel": kernel,
        "pass": pass_,
        "head_dim": shape.head_dim,
        "num_heads": shape.num_heads,
        "causal": shape.causal,
        "varlen": shape.varlen,
        "documents": len(shape.q_lens),
        "tokens": shape.q_lens[0],
        "name": counters["name"],
        "grid": counters["grid"],
        **{name: counters.get(metric) for name, metric in LAUNCH.items()},
        "no_instruction": round(counters[STALL] / counters[WARPS], 4),
        "seconds": round(counters[SECONDS] * 1e-9, 9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--calls", action="store_true", help="make the calls only")
    args = parser.parse_args()
    if args.calls:
        make_calls()
        return
    if args.out is None or shutil.which("ncu") is None:
        raise SystemExit("studies.probes.counters: expected --out and Nsight Compute's ncu on the path")
    versions = {kernel: attention.kernel_version(kernel) for kernel in KERNELS}
    header = provenance(
        torch.device("cuda"), 1, versions, command_line("python -m studies.probes.counters"), args.commit
    )
    printed = counted()
    found = longest_kernels(printed.splitlines())
    if not found:
        raise SystemExit(f"studies.probes.counters: ncu counted no kernel, but said: {printed[:2000]}")
    rows = [row_of(*call, found[number]) for number, call in enumerate(calls()) if number in found]
    for row in rows:
        print(row)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
