"""Where the blocks of a kernel run: the SM of every block, in launch order, where an SM has room for two.

    python -m studies.probes.placement --out data/points/h200/placement/h200.json

Blocks only wait for as long as they are told, so the run says what the hardware's scheduler does, without a model of
tiles: equal blocks; rows of causal heads, each a little longer than the one before; documents, most of whose blocks
are launched without work (`empties`); random ones. See `models.attention.block_schedule.homes`. Needs CuPy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cpsim.real.run.timing import command_line, provenance

SOURCE = r"""
extern "C" __global__ void wait(const long long* cycles, int* sm) {
  extern __shared__ char room[];  // so much that a third block finds none
  int block = blockIdx.x, id;
  asm volatile("mov.u32 %0, %smid;" : "=r"(id));
  long long start = clock64();
  while (clock64() - start < cycles[block]) {}
  if (threadIdx.x == 0) sm[block] = id;
}
"""
ROOM_BYTES, CYCLES_PER_US = 100 * 1024, 1980
ROW_US, HEAD_US, EMPTY_US = 4.0, 3.0, 0.2
"""A block takes so long per row above it, by itself, and without work."""
REPEATS = 2
"""Runs of each; the first one is dropped."""


def durations() -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Names and microseconds of every block, in launch order."""
    for n in (100, 132, 140, 152, 176, 200, 264, 300, 400):
        yield f"equal {n}", np.full(n, 60.0)
    heads_of = ((19, 8), (36, 4), (17, 8), (12, 4), (24, 8), (22, 8), (40, 4), (12, 32), (49, 8), (100, 1), (210, 1))
    for rows, heads in heads_of:
        yield f"causal {rows} {heads}", np.tile(HEAD_US + ROW_US * np.arange(1, rows + 1), heads)
    documents = (
        ((345, 134, 247, 1466), 4),
        ((2819, 64), 16),
        ((626, 8379, 1672, 3787), 1),
        ((444, 691, 850, 1561), 4),
        ((1465, 1398, 1272, 11907), 1),
        ((1147, 65, 885, 1619), 4),
    )
    for lengths, heads in documents:
        row = np.arange(-(-max(lengths) // 128))
        head = [np.where(row < -(-n // 128), HEAD_US + ROW_US * (row + 1), EMPTY_US) for n in lengths]
        yield f"empties {lengths} {heads}", np.tile(np.concatenate(head), heads)
    rng = np.random.default_rng(0)
    for n in (150, 250, 350, 600):
        yield f"random {n}", rng.uniform(5, 80, n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    try:
        import cupy
    except ImportError:
        raise SystemExit("expected CuPy, which is not installed: pip install cupy-cuda13x") from None
    kernel = cupy.RawKernel(SOURCE, "wait")
    kernel.max_dynamic_shared_size_bytes = ROOM_BYTES
    runs = []
    for name, microseconds in durations():
        cycles = cupy.asarray((microseconds * CYCLES_PER_US).astype(np.int64))
        sm = cupy.zeros(len(cycles), cupy.int32)
        for _ in range(REPEATS):
            kernel((len(cycles),), (128,), (cycles, sm), shared_mem=ROOM_BYTES)
            cupy.cuda.Device().synchronize()
        runs.append({"blocks": name, "num_blocks": len(cycles), "sm": sm.get().tolist()})
    command, versions = command_line("python -m studies.probes.placement"), {"cupy": cupy.__version__}
    header = provenance(torch.device("cuda"), 1, versions, command, args.commit) | {"blocks_per_sm": 2}
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in runs)
    args.out.write_text(f'{json.dumps(header)[:-1]}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
