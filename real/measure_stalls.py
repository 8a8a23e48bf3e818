"""What warps of flash-attention 2 wait for, by the hardware's counters: instructions, where documents are short.

    python -m real.measure_stalls --out cpsim/calibrate/data/stalls/h200.jsonl

Runs Nsight Compute (ncu) on itself, call by call: equal documents, 16,384 tokens of 32 heads in all. Of every warp
that is ready or waits, `no_instruction` is the share that waits for an instruction to be fetched.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENS, HEADS, DIM = 16384, 32, 128
CALLS = tuple(
    (kernel, tokens, causal)
    for kernel in ("fa2", "sdpa_flash")
    for causal in (True, False)
    for tokens in (128, 320, 512, 1024, 2048)
)
STALL = "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio"
WARPS = "smsp__average_warp_latency_per_inst_issued.ratio"
SECONDS = "gpu__time_duration.sum"


def call(kernel: str, tokens: int, causal: bool) -> None:
    """The call, after others alike."""
    import torch

    documents = TOKENS // tokens
    starts = torch.arange(documents + 1, device="cuda", dtype=torch.int32) * tokens
    q, k, v = torch.randn(3, documents * tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        if kernel == "fa2":
            from flash_attn import flash_attn_varlen_func

            flash_attn_varlen_func(q, k, v, starts, starts, tokens, tokens, causal=causal)
        else:
            torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, tokens, tokens, 0.0, causal, False)
    torch.cuda.synchronize()


def counters(kernel: str, tokens: int, causal: bool) -> dict[str, Any]:
    """The second call's seconds and the share of its warps that wait for instructions."""
    ncu = [
        "ncu", "--clock-control", "none", "--launch-skip", "1", "--launch-count", "1", "-k", "regex:flash", "--csv",
        "--print-units", "base", "--metrics", f"{STALL},{WARPS},{SECONDS}",
    ]  # fmt: skip
    again = [sys.executable, "-m", "real.measure_stalls", "--call", kernel, str(tokens), str(int(causal))]
    done = subprocess.run([*ncu, *again], capture_output=True, text=True, check=True)
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    found = {row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in rows}
    return {
        "kernel": kernel, "tokens": tokens, "causal": causal, "no_instruction": round(found[STALL] / found[WARPS], 4),
        "seconds": round(found[SECONDS] * 1e-9, 9),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--call", nargs=3, metavar=("KERNEL", "TOKENS", "CAUSAL"), help="make this call only")
    args = parser.parse_args()
    if args.call:
        call(args.call[0], int(args.call[1]), args.call[2] == "1")
        return
    if args.out is None or shutil.which("ncu") is None:
        raise SystemExit("real.measure_stalls: expected --out and Nsight Compute's ncu on the path")
    import torch

    header = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "head_dim": DIM, "heads": HEADS,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for which in CALLS:
        try:
            rows.append(counters(*which))
            print(rows[-1], flush=True)
        except subprocess.CalledProcessError as error:
            print(f"real.measure_stalls: {which}: {error.stdout}{error.stderr}", file=sys.stderr)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
