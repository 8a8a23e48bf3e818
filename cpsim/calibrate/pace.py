"""How fast this machine's host runs Python: a loop of what frameworks do between two launches, without a GPU.

Launches of eager PyTorch are Python calls, look-ups and small objects, so a host that takes longer for these takes
longer for launches. `cpsim.real.measure.host` times the same loop on machines whose launches are measured, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median
from typing import Final

CALLS: Final = 20_000
"""Of one sample."""
SAMPLES: Final = 15


class _Tensor:
    """What a call passes around."""

    __slots__ = ("shape", "stride")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.stride = tuple(reversed(shape))

    def view(self, *shape: int) -> _Tensor:
        return _Tensor(shape)


def _call(x: _Tensor, *settings: object, causal: bool = True, scale: float | None = None) -> dict[str, object]:
    batch, tokens, heads = x.shape
    half = x.view(batch, tokens // 2, heads) if causal else x
    return {"x": half, "scale": scale or heads**-0.5, "settings": [s for s in settings if s is not None]}


def python_seconds(samples: int = SAMPLES) -> list[float]:
    """Seconds of one call of the loop, the first sample, which warms up, left out."""
    found, x = [], _Tensor((1, 512, 32))
    for _ in range(samples + 1):
        start = time.perf_counter()
        for i in range(CALLS):
            _call(x, i, None, "q", causal=i % 2 == 0)
        found.append((time.perf_counter() - start) / CALLS)
    return found[1:]


def of_processes(count: int) -> list[float]:
    """Median seconds of one call of the loop in so many processes at once, as hosts of so many GPUs run."""
    command = [sys.executable, "-m", "cpsim.calibrate.pace"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return [float(process.communicate()[0]) for process in running]


def usual_processes() -> int:
    """Processes that keep a machine as busy as the hosts of its GPUs do: up to eight, each with a core to spare."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


if __name__ == "__main__":
    print(median(python_seconds()))
