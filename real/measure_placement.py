"""Where the blocks of a kernel run: the SM of every block, in launch order, where an SM has room for two.

    python -m real.measure_placement --out cpsim/calibrate/data/placement/h200.json
    python -m real.measure_placement --starts --kernels fa2,sdpa_flash --out h200-starts.json

Blocks only wait for as long as they are told, so the run says what the hardware's scheduler does, without a model of
tiles: equal blocks; rows of causal heads, each a little longer than the one before; documents, most of whose blocks
are launched without work (`empties`); random ones. `cpsim.models.blocks.homes` is what came out.

`--starts` times calls of attention kernels by the GPC that they start at. Before every call random blocks move that
start along, and blocks that fill every SM once, which leave it where it is, tell the first SM after the foremost ones;
after the call others tell where it has gone. Needs CuPy.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
FOREMOST, PROBE_US = 8, 20.0
"""SMs that come before all GPCs, and how long the blocks take that tell where a call starts."""
CALLS = 60
"""Of every shape, so that all starts occur."""
REST_S = 1e-3
"""Before every one of them: the clock is the full one."""
SHAPES: tuple[tuple[int, int, bool, tuple[int, ...], int], ...] = (
    (4, 1, True, (1147, 65, 885, 1619), 5376),
    (8, 2, True, (343, 248, 1680, 326, 1294), 37632),
    (8, 1, True, (262, 552, 2201, 178, 7), 15386),
    (8, 2, True, (110, 273, 2433), 5888),
    (4, 1, True, (3186, 642, 577, 1483), 0),
    (4, 1, True, (2308, 2308), 0),
    (4, 1, True, (399, 330, 242, 269, 355, 646, 1308, 786, 17), 0),
    (1, 1, True, (861, 556, 2783, 176, 130, 5837, 1937), 0),
    (4, 1, True, (329, 821, 418, 537, 3490), 0),
    (8, 2, True, (832, 3754, 419, 1779), 0),
    (4, 1, False, (22, 588, 44, 1368, 192, 385), 0),
    (8, 2, True, (2432,), 0),
    (32, 8, True, (1280,), 0),
    (16, 4, True, (2112, 2112), 0),
)
"""Of one wave to four of unequal blocks: heads, key heads, causal, documents, tokens of the first one before its
queries."""


def durations() -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Names and microseconds of every block, in launch order."""
    for n in (100, 132, 140, 152, 176, 200, 264, 300, 400):
        yield f"equal {n}", np.full(n, 60.0)
    heads_of = ((19, 8), (36, 4), (17, 8), (12, 4), (24, 8), (22, 8), (40, 4), (12, 32), (49, 8), (100, 1), (210, 1))
    for rows, heads in heads_of:
        yield f"causal {rows} {heads}", np.tile(HEAD_US + ROW_US * np.arange(1, rows + 1), heads)
    documents = (
        ((345, 134, 247, 1466), 4), ((2819, 64), 16), ((626, 8379, 1672, 3787), 1), ((444, 691, 850, 1561), 4),
        ((1465, 1398, 1272, 11907), 1), ((1147, 65, 885, 1619), 4),
    )  # fmt: skip
    for lengths, heads in documents:
        row = np.arange(-(-max(lengths) // 128))
        head = [np.where(row < -(-n // 128), HEAD_US + ROW_US * (row + 1), EMPTY_US) for n in lengths]
        yield f"empties {lengths} {heads}", np.tile(np.concatenate(head), heads)
    rng = np.random.default_rng(0)
    for n in (150, 250, 350, 600):
        yield f"random {n}", rng.uniform(5, 80, n)


class Waiting:
    """Launches blocks that wait."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError:
            raise SystemExit("expected CuPy, which is not installed: pip install cupy-cuda13x") from None
        self._cupy = cupy
        self._kernel = cupy.RawKernel(SOURCE, "wait")
        self._kernel.max_dynamic_shared_size_bytes = ROOM_BYTES
        self.gpu: str = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()

    def prepare(self, microseconds: NDArray[np.float64]) -> tuple[Any, Any]:
        """Cycles of every block and room for its SM, on the GPU."""
        cycles = self._cupy.asarray((microseconds * CYCLES_PER_US).astype(np.int64))
        return cycles, self._cupy.zeros(len(cycles), self._cupy.int32)

    def launch(self, cycles: Any, sm: Any) -> None:
        """Starts the blocks, which write down their SMs."""
        self._kernel((len(cycles),), (128,), (cycles, sm), shared_mem=ROOM_BYTES)

    def run(self, microseconds: NDArray[np.float64]) -> list[int]:
        """SM of every block."""
        cycles, sm = self.prepare(microseconds)
        for _ in range(REPEATS):
            self.launch(cycles, sm)
            self._cupy.cuda.Device().synchronize()
        return list(sm.get().tolist())


def placements(waiting: Waiting) -> Iterator[dict[str, object]]:
    """The SMs of all blocks of every run."""
    for name, microseconds in durations():
        yield {"blocks": name, "num_blocks": len(microseconds), "sm": waiting.run(microseconds)}


def timed_starts(waiting: Waiting, kernels: list[str]) -> Iterator[dict[str, object]]:
    """Seconds of every call, and the first SM after the foremost ones before it and after it."""
    import torch

    from real import attention

    device, rng = torch.device("cuda"), np.random.default_rng(0)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    probes = [waiting.prepare(np.full(num_sms, PROBE_US)) for _ in range(2)]
    for kernel in kernels:
        for num_heads, num_kv_heads, causal, q_lens, before_first in SHAPES:
            k_lens = (q_lens[0] + before_first, *q_lens[1:])
            q, k, v = (
                torch.randn(sum(lens), heads, 128, device=device, dtype=torch.bfloat16)
                for lens, heads in ((q_lens, num_heads), (k_lens, num_kv_heads), (k_lens, num_kv_heads))
            )
            call = attention.prepare(q_lens, k_lens, causal=causal, device=device)
            op = partial(attention.forward, kernel, q, k, v, call)
            samples, before, after = [], [], []
            for i in range(CALLS + 2):
                shuffle = waiting.prepare(rng.uniform(5, 60, int(rng.integers(270, 600))))
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                torch.cuda._sleep(int(REST_S * 1.9e9))  # the host gets ahead
                waiting.launch(*shuffle)
                waiting.launch(*probes[0])
                start.record()
                op()
                end.record()
                waiting.launch(*probes[1])
                torch.cuda.synchronize()
                if i >= 2:
                    samples.append(round(start.elapsed_time(end) / 1e3, 9))
                    before.append(int(probes[0][1][FOREMOST]))
                    after.append(int(probes[1][1][FOREMOST]))
            yield {
                "kernel": kernel, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "causal": causal,
                "q_lens": q_lens, "k_lens": k_lens, "before": before, "after": after, "samples_s": samples,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--starts", action="store_true", help="time calls by the GPC that they start at")
    parser.add_argument("--kernels", default="fa2", help="of these kernels, by commas")
    args = parser.parse_args()
    waiting = Waiting()
    runs = timed_starts(waiting, args.kernels.split(",")) if args.starts else placements(waiting)
    header = {"gpu": waiting.gpu, "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "blocks_per_sm": 2}
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in runs)
    args.out.write_text(f'{json.dumps(header)[:-1]}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
