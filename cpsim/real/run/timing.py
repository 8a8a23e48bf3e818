"""Timing on a GPU under load, clocks and provenance, shared by the measurement scripts."""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


class Clock:
    """SM clock, temperature and power of one GPU through NVML; zeros where there is none."""

    def __init__(self, index: int = 0) -> None:
        self._handle = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except Exception:  # no NVML: measuring goes on without clocks
            self._handle = None

    def sm_hz(self) -> float:
        """Current SM clock in Hz."""
        return self.read()["sm_clock_hz"]

    def read(self) -> dict[str, float]:
        """SM clock in Hz, temperature in degrees Celsius, power in watts."""
        if self._handle is None:
            return {"sm_clock_hz": 0.0, "temperature_c": 0.0, "power_w": 0.0}
        n, h = self._nvml, self._handle
        try:
            return {
                "sm_clock_hz": n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) * 1e6,
                "temperature_c": float(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
                "power_w": n.nvmlDeviceGetPowerUsage(h) / 1e3,
            }
        except Exception:
            return {"sm_clock_hz": 0.0, "temperature_c": 0.0, "power_w": 0.0}


def soak(op: Callable[[], object], seconds: float, per_op: float) -> None:
    """Queues `op` for that many seconds, so that the clock settles where this very op keeps it."""
    for _ in range(max(1, min(4000, int(seconds / per_op)))):
        op()


def hold(seconds: float, device: torch.device) -> None:
    """Keeps the GPU waiting for that long, so that the host gets ahead of it."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.9e9))  # SM cycles; no power is drawn, so clocks do not fall


def time_ops(op: Callable[[], object], num: int, device: torch.device) -> list[float]:
    """Seconds of each of `num` back-to-back calls: CUDA events around each, or the wall clock on a CPU."""
    if device.type != "cuda":
        times = []
        for _ in range(num):
            start = time.perf_counter()
            op()
            times.append(time.perf_counter() - start)
        return times
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(num)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(num)]
    for before, after in zip(starts, ends, strict=True):
        before.record()
        op()
        after.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]


def events_s(device: torch.device) -> float:
    """Seconds between two events that the GPU meets one after the other, the host far ahead; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    for _ in range(2):  # what a process does for the first time takes longer
        hold(2e-3, device)
        samples = time_ops(lambda: None, 50, device)
    return round(statistics.median(samples), 10)


def host_seconds(op: Callable[[], object], num: int, device: torch.device) -> float:
    """Wall seconds the host spends to launch `op` once, the queue empty at the start and never full."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(num):
        op()
    seconds = (time.perf_counter() - start) / num
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds


def command_line(program: str) -> str:
    """How this process was called, for the header of a file; of this machine's paths the last parts."""
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv[1:])
    return " ".join([program, *words])


def provenance(
    device: torch.device, num_gpus: int, kernels: dict[str, str], command: str, commit: str
) -> dict[str, Any]:
    """Header of a measurement file; `commit` stands in where git is missing."""
    cuda = device.type == "cuda"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else "cpu",
        "num_gpus": num_gpus,
        "num_sms": torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1,
        "memory_bytes": _memory_bytes(device) // (1 if cuda else num_gpus),
        "driver": _driver(),
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() if cuda else 0,
        "nccl": nccl,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "kernels": kernels,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "command": command,
        "clock_source": "CUDA events" if cuda else "time.perf_counter",
        "events_s": events_s(device),
        "clock_at_start": Clock(device.index or 0).read() if cuda else {},
    }


def packages() -> dict[str, str]:
    """Versions of other people's code that is installed, and of NumPy."""
    found = {}
    for name in ("ring-flash-attn", "yunchang", "transformers", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return ""


def _commit() -> str:
    try:
        run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # no git
        return "unknown"
    return run.stdout.strip() or "unknown"
