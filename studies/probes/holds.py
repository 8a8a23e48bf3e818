"""Attention that begins while something else holds some SMs: seconds against how many, and for how long.

    python -m studies.probes.holds --out data/points/h200/holds/h200.json

A kernel of NCCL's holds one SM for every channel. Here a kernel that only waits, and leaves no room for a block of
attention, stands in for it, so that both numbers are known. Nothing is fitted to the result: it is what the blocks of
`cpsim.models.attention.blocks` are compared with. Needs CuPy and flash-attn 2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from cpsim.real.run.attention import backward, forward, prepare
from cpsim.real.run.timing import command_line, hold, provenance

SOURCE = r"""
extern "C" __global__ void wait(long long nanoseconds) {
  extern __shared__ char room[];
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
  if (nanoseconds < 0) room[0] = 1;
}
"""
ROOM_BYTES, THREADS = 200 * 1024, 640
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHAPES = (
    (2048, 2048, True),
    (1024, 2048, False),
    (2048, 1024, False),
    (1024, 4096, False),
    (4096, 4096, True),
    (4096, 2048, False),
)
"""Queries, keys, causal."""
SMS = (8, 16, 32)
HOLDS_US = (0, 10, 20, 40, 60, 80, 100, 140, 200, 300, 500)
AHEAD_US = 8
"""The waiting kernel starts so long before attention may."""
REPEATS, DROPPED = 15, 3


def attention(queries: int, keys: int, causal: bool, kernel: str) -> dict[str, Callable[[], object]]:
    """Calls of a kernel on random tensors, by pass."""

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    q, k, v, dout = random(queries, HEADS), random(keys, KV_HEADS), random(keys, KV_HEADS), random(queries, HEADS)
    call = prepare([queries], [keys], causal=causal, device="cuda")
    out, lse = forward(kernel, q, k, v, call)
    return {
        "fwd": lambda: forward(kernel, q, k, v, call),
        "bwd": lambda: backward(kernel, dout, q, k, v, out, lse, call),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", default="fa2")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    try:
        import cupy
    except ImportError:
        raise SystemExit("expected CuPy, which is not installed: pip install cupy-cuda13x") from None
    wait = cupy.RawKernel(SOURCE, "wait")
    wait.max_dynamic_shared_size_bytes = ROOM_BYTES
    device, side = torch.device("cuda", 0), torch.cuda.Stream()
    beside = cupy.cuda.ExternalStream(side.cuda_stream)

    def seconds(op: Callable[[], object], sms: int, microseconds: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun = torch.cuda.Event()
        torch.cuda.synchronize()
        hold(300e-6, device)  # until the host has launched everything
        begun.record()
        side.wait_event(begun)
        if microseconds:
            with beside:
                wait((sms,), (THREADS,), (microseconds * 1000,), shared_mem=ROOM_BYTES)
        hold(AHEAD_US * 1e-6, device)
        start.record()
        op()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    points = []
    for queries, keys, causal in SHAPES:
        for pass_, op in attention(queries, keys, causal, args.kernel).items():
            for sms in SMS:
                times = [median([seconds(op, sms, us) for _ in range(REPEATS)][DROPPED:]) for us in HOLDS_US]
                shape = {"queries": queries, "keys": keys, "causal": causal, "pass": pass_, "sms": sms}
                points.append(shape | {"us": [round(t * 1e6, 1) for t in times]})
    command = command_line("python -m studies.probes.holds")
    header = provenance(device, 1, {args.kernel: ""}, command, args.commit)
    header |= {
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "kernel": args.kernel,
        "holds_us": HOLDS_US,
        "ahead_us": AHEAD_US,
    }
    rows = ",\n".join(json.dumps(point) for point in points)
    args.out.write_text(json.dumps(header)[:-1] + ', "points": [\n' + rows + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
