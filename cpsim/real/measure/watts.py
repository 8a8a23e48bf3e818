"""Measures what kernels draw, at which clock, and what they take beside each other under one power limit.

    python -m cpsim.real.measure.watts --out h200-watts.jsonl

Every load runs without a pause for `LOAD_S`; watts are the mean by the GPU's energy counter over the second half, the
clock the median over it (`op: power`). Mixes run several kernels in turns, as a layer does, and say what each of them
takes there (`op: mix`): the power limit acts on their mean, over tens of milliseconds. On a CPU, or with `--cpu`, it
runs tiny loads without watts, to try the script.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from cpsim.calibrate.measurement import Writer
from cpsim.real.measure.kernels import Bench, both_passes
from cpsim.real.measure.layers import gemm_op, op_inputs
from cpsim.real.measure.products import fp8_op, optimizer_step
from cpsim.real.measure.shapes import Shape
from cpsim.real.run import attention, layer_ops
from cpsim.real.run.timing import provenance

Op = Callable[[], object]
LOAD_S: Final = 1.6
QUEUE_S: Final = 0.03
"""How far the host runs ahead."""
MIXES: Final[Mapping[str, tuple[tuple[str, int], ...]]] = {
    "{kernel} layer fwd": (("gemm", 4), ("{kernel} fwd", 1), ("rms_norm", 2), ("swiglu", 1), ("add", 2)),
    "{kernel} layer bwd": (
        ("gemm", 8),
        ("{kernel} bwd", 1),
        ("rms_norm_bwd", 2),
        ("swiglu_bwd", 1),
        ("add", 2),
    ),
    "{kernel} fwd and gemm": (("gemm", 1), ("{kernel} fwd", 1)),
    "{kernel} bwd and gemm": (("gemm", 1), ("{kernel} bwd", 1)),
    "{kernel} bwd and add": (("{kernel} bwd", 1), ("add", 8)),
}
PLAIN_MIXES: Final[Mapping[str, tuple[tuple[str, int], ...]]] = {
    "gemm and add": (("gemm", 2), ("add", 6)),
    "gemm and adamw": (("gemm", 4), ("adamw_bf16", 1)),
    "products and fp8": (("gemm", 1), ("fp8 gemm", 2)),
}


class Energy:
    """Joules that a GPU has drawn; zero where there is no counter."""

    def __init__(self, index: int) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            self._read = partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        except Exception:  # measuring goes on without
            self._read = partial(int, 0)

    def joules(self) -> float:
        """Since the driver was loaded."""
        return float(self._read()) / 1e3


def loads(bench: Bench, kernels: list[str], tokens: int) -> dict[str, Op]:
    """What a GPU can be busy with, by name."""
    small = not bench.cuda
    m, n, k = (64, 64, 64) if small else (8192, 14336, 4096)
    made: dict[str, Op] = {
        "gemm": gemm_op("forward", m, n, k, bench),
        "gemm wgrad": gemm_op("wgrad", n, k, m, bench),
        "gemm small": gemm_op("forward", m // 4, k, k, bench),
        "fp8 gemm": fp8_op("tensorwise", m, n, k, bench),
        "fp8 gemm exact": fp8_op("tensorwise_exact", m, n, k, bench),
        "adamw_bf16": optimizer_step(48 if small else 48 * 1024, torch.bfloat16, bench),
    }
    rows = 64 if small else 16384
    for kind, width in (
        ("rms_norm", 4096),
        ("rms_norm_bwd", 4096),
        ("swiglu", 14336),
        ("swiglu_bwd", 14336),
        ("add", 4096),
        ("cross_entropy", 128256),
        ("cross_entropy_bwd", 128256),
    ):
        width, count = (64 if small else width), (rows // 4 if kind.startswith("cross") else rows)
        inputs = op_inputs(kind, count, width, 0, bench)
        made[kind] = partial(layer_ops.OPS[kind] if small else layer_ops.compiled(kind), *inputs)
    for kernel in kernels:
        shape = Shape(
            family="sustained",
            num_heads=32,
            num_kv_heads=8,
            causal=True,
            varlen=False,
            q_lens=(tokens,),
            k_lens=(tokens,),
        )
        for pass_, op in both_passes(kernel, shape, bench.device).items():
            made[f"{kernel} {pass_}"] = op
    return made


def under_load(bench: Bench, energy: Energy, ops: list[Op]) -> dict[str, Any]:
    """Runs ops in turns for `LOAD_S`.

    Returns:
        ``seconds``: of each, by position, medians over the second half; ``watts``; ``sm_clock_hz``; ``temperature_c``.
    """
    for op in ops * 2:
        op()
    _wait(bench)
    started = time.perf_counter()
    for op in ops:
        op()
    _wait(bench)
    rounds = max(1, int(QUEUE_S / (time.perf_counter() - started)))
    load_s, started = LOAD_S if bench.cuda else 0.2, time.perf_counter()
    times: list[list[float]] = [[] for _ in ops]
    clocks, begun, joules = list[dict[str, float]](), 0.0, 0.0
    while (now := time.perf_counter() - started) < load_s:
        late = now > load_s / 2
        if late and not begun:
            begun, joules = time.perf_counter(), energy.joules()
        marks = _round(bench, ops, rounds)
        if late:
            clocks.append(bench.clock.read())
        _wait(bench)
        if late:
            for column, values in zip(times, marks(), strict=True):
                column += values
    watts = (energy.joules() - joules) / (time.perf_counter() - begun)
    names = ("sm_clock_hz", "temperature_c", "power_w")
    read = {name: median(one[name] for one in clocks) for name in names} if clocks else dict.fromkeys(names, 0.0)
    return {
        "seconds": [median(column) if column else 0.0 for column in times],
        "watts": [watts],
        "sm_clock_hz": read["sm_clock_hz"],
        "temperature_c": read["temperature_c"],
        "watts_read": read["power_w"],
    }


def _wait(bench: Bench) -> None:
    if bench.cuda:
        torch.cuda.synchronize(bench.device)


def _round(bench: Bench, ops: list[Op], rounds: int) -> Callable[[], list[list[float]]]:
    """Launches ops in turns; what is returned says their seconds, once they have run."""
    if not bench.cuda:
        marks = [time.perf_counter()]
        for op in ops * rounds:
            op()
            marks.append(time.perf_counter())
        return lambda: [
            [b - a for a, b in zip(marks[i :: len(ops)], marks[i + 1 :: len(ops)], strict=False)]
            for i in range(len(ops))
        ]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(ops) * rounds + 1)]
    events[0].record()
    for i, op in enumerate(ops * rounds, 1):
        op()
        events[i].record()

    def read() -> list[list[float]]:
        each = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
        return [each[i :: len(ops)] for i in range(len(ops))]

    return read


def run(bench: Bench, kernels: list[str], tokens: int, deadline: float) -> None:
    """Loads by themselves, then mixes."""
    energy, made = Energy(bench.device.index or 0), loads(bench, kernels, tokens)
    bench.writer.add("power", [0.1], kind="idle", **_idle(bench, energy))
    for kind, op in made.items():
        if time.monotonic() > deadline:
            return
        found = under_load(bench, energy, [op])
        bench.writer.add("power", found.pop("seconds"), kind=kind, tokens=tokens, **found)
        print(f"{kind:22s} {found['watts'][0]:6.1f} W {found['sm_clock_hz'] / 1e6:5.0f} MHz", flush=True)
    mixes = {
        name.format(kernel=kernel): tuple((part.format(kernel=kernel), n) for part, n in parts)
        for kernel in kernels
        for name, parts in MIXES.items()
    }
    for kind, parts in {**mixes, **PLAIN_MIXES}.items():
        if time.monotonic() > deadline:
            return
        names = [name for name, num in parts for _ in range(num)]
        found = under_load(bench, energy, [made[name] for name in names])
        bench.writer.add("mix", found.pop("seconds"), kind=kind, mix=names, tokens=tokens, **found)
        print(f"mix {kind:22s} {found['watts'][0]:6.1f} W {found['sm_clock_hz'] / 1e6:5.0f} MHz", flush=True)


def _idle(bench: Bench, energy: Energy) -> dict[str, Any]:
    _wait(bench)
    time.sleep(0.5 if bench.cuda else 0.0)
    before, start = energy.joules(), time.perf_counter()
    time.sleep(0.5 if bench.cuda else 0.01)
    watts = (energy.joules() - before) / (time.perf_counter() - start)
    return {"watts": [watts], **{name: value for name, value in bench.clock.read().items() if name != "power_w"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", default="sdpa_flash,cudnn,fa2")
    parser.add_argument("--tokens", type=int, default=8192, help="of attention")
    parser.add_argument("--minutes", type=float, default=3.0, help="start no load after so many minutes")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="tiny loads, to try the script")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    started = time.monotonic()
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", args.gpu) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    kernels = args.kernels.split(",") if cuda else ["math"]
    command = f"python -m cpsim.real.measure.watts --kernels {args.kernels} --tokens {args.tokens}"
    header = provenance(device, 1, {k: attention.kernel_version(k) for k in kernels}, command, args.commit)
    with args.out.open("w", encoding="utf-8") as file:
        bench = Bench(Writer(file, header), device)
        run(bench, kernels, args.tokens if cuda else 64, started + 60 * args.minutes)


if __name__ == "__main__":
    main()
