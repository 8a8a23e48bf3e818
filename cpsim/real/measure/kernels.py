"""Measures attention kernels, memory-bound kernels and host launches on one GPU, under sustained load.

    python -m cpsim.real.measure.kernels --minutes 8 --out h200-kernels.jsonl
    python -m cpsim.real.measure.kernels --minutes 4 --shapes study.jsonl --out study-kernels.jsonl
    python -m cpsim.real.measure.kernels --minutes 1 --rested --seed 2 --out h200-rested.jsonl
    python -m cpsim.real.measure.kernels --minutes 2 --masked --kernels flex --out h200-masked.jsonl
    python -m cpsim.real.measure.kernels --minutes 1 --masked --masks lambda,block_sparse --kernels flex --out
    runs.jsonl python -m cpsim.real.measure.kernels --minutes 3 --masked --shares --kernels flex --out
    h200-masked-shares.jsonl python -m cpsim.real.measure.kernels --minutes 3 --families equal,heavy_tail --kernels fa2
    --out h200-documents.jsonl python -m cpsim.real.measure.kernels --minutes 1 --head-dim 64 --kernels fa4,flex --out
    h200-head-dim-64.jsonl python -m cpsim.real.measure.kernels --minutes 2 --masked --head-dim 64 --kernels flex --out
    h200-head-dim-64-masked.jsonl

Without a pause a kernel meets the power limit and the clock falls. `--rested` measures how it runs where a schedule
leaves a GPU idle: two shapes with pauses of several lengths, then random ones at the full clock. `--masked` measures
kernels that take any mask, under all masks or those of `--masks`, with `--shares` what one rank of several computes of
them at a time; `--head-dim` measures as many shapes of every kernel.
Otherwise listed shapes come first, and random ones take the time that is left. flex takes long to compile: `--warm-up`,
beside the same options, does that on all CPUs and measures nothing. Writes one measurement file (see
cpsim.calibrate.measurement) as it goes and stops in time. On a CPU it runs tiny sizes of the `math` kernel, to try the
script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from cpsim.calibrate.measurement import Writer
from cpsim.masks.slices import UNCUT
from cpsim.real.measure.shapes import (
    HEAD_DIM,
    HEADS_OF_4,
    MASKED_HEADS,
    OF_ONE_SEQUENCE,
    Shape,
    draw,
    draw_masked,
    listed_masks,
)
from cpsim.real.run import attention, elementwise
from cpsim.real.run.timing import Clock, command_line, hold, host_seconds, provenance, soak, time_ops

L2_BYTES = 120e6  # inputs rotate over at least twice the 50 MB second-level cache of Hopper
POINTS = {
    "fa4": 0.38,
    "fa2": 0.32,
    "cudnn": 0.17,
    "sdpa_flash": 0.13,
    "flex": 0.74,
    "fa4_sparse": 0.18,
    "sdpa_math": 0.08,
    "flashinfer": 0.18,
    "flashinfer_fa2": 0.18,
}  # shares of the measured time
MAX_FLOPS = {
    "fa4": 3e13,
    "fa2": 1.5e13,
    "cudnn": 2e13,
    "sdpa_flash": 1e13,
    "flex": 1e13,
    "fa4_sparse": 1e13,
    "sdpa_math": 3e11,
    "flashinfer": 1e13,
    "flashinfer_fa2": 1e13,
}
RECTANGLES = ("full", "full_document", "block_sparse", "variable_block_sparse")
"""Masks of `draw_masked` that cut no block."""
DENSE_ONLY = ("cudnn", "sdpa_math")
"""Kernels that run one sequence a call, or one after another."""
MEMORY_LENGTHS = (1024, 4096, 16384, 65536)
"""Tokens of full calls of 64:8 heads whose peak memory is measured."""
BUSY_SHARES = (0.95, 0.87, 0.79, 0.7, 0.6)
"""Shares of the time that a kernel runs, where it pauses between two calls."""
CURVE_S, CURVE_FLOPS = 1.6, 3e11
SUSTAINED, SUSTAINED_S = ("fa4", "fa2", "cudnn", "sdpa_flash"), 4.5
"""Kernels that are run for so long from idle: the limiter of power looks at a second or so."""
SETTLED_S = 0.4
"""After so long the power limit has made up its mind."""
RESTED_FLOPS = 2e12
"""Largest calls at the full clock: longer ones bring the clock down by themselves."""
REST_S = 3e-3
WRONG = 0.05
"""Relative error from which on a kernel does not compute attention: several times what 16 bits round."""
STEADY = 0.01
"""Standard error of the median, relative, above which a point gets up to twice as many rounds more."""


class Bench:
    """One GPU, its load, and the file that the points go to."""

    def __init__(self, writer: Writer, device: torch.device) -> None:
        self.writer, self.device = writer, device
        self.cuda = device.type == "cuda"
        self.clock = Clock(device.index or 0)
        self.errors: dict[str, int] = {}

    def samples(self, op: Callable[[], object]) -> list[float]:
        """Seconds of single calls in six rounds or more, the clock where this op keeps it and the queue full.

        Under the power limit the clock depends on what runs and wanders over tens of milliseconds: the op itself
        soaks the GPU first, and rounds spread the samples. Samples that scatter get more rounds, until the median
        is steady.
        """
        op()
        if not self.cuda:
            return time_ops(op, 5, self.device)
        before = time.perf_counter()
        op()
        launch = time.perf_counter() - before
        seconds = max(1e-6, min(time_ops(op, 3, self.device)))
        num = 4 if seconds < 0.01 else int(np.clip(0.05 / seconds, 1, 4))
        samples: list[float] = []
        rounds = 6 if seconds < 0.1 else 8
        for i in range(rounds if seconds > 0.02 else 3 * rounds):
            if i >= rounds and median_error(samples) < STEADY:
                break
            soak(op, 0.15 if i == 0 else 0.012, max(seconds, launch))
            if seconds < 3 * launch:
                hold(2 * num * launch + 2e-4, self.device)
            samples += time_ops(op, num, self.device)
        return samples

    def rested(self, op: Callable[[], object]) -> list[float]:
        """Seconds of single calls after a rest four times as long, so that the mean load is far from the limit."""
        op()
        seconds = min(time_ops(op, 3, self.device))
        samples: list[float] = []
        for _ in range(12 if seconds < 1e-3 else 6):
            time.sleep(max(REST_S, 4 * seconds) if self.cuda else 0.0)
            hold(1e-3, self.device)
            samples += time_ops(op, 1, self.device)
        return samples

    def paused(self, op: Callable[[], object], share: float) -> tuple[list[float], float]:
        """Seconds of calls that take a share of the time, and the pause between two, the clock settled."""
        op()
        seconds = statistics.median(self.rested(op))
        pause, num = seconds * (1 / share - 1), 30 if self.cuda else 3
        for _ in range(round(SETTLED_S / (seconds + pause)) if self.cuda else 1):
            hold(pause, self.device)
            op()
        if not self.cuda:
            return time_ops(op, num, self.device), pause
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(num)] for _ in range(2)]
        for start, end in zip(*events, strict=True):
            hold(pause, self.device)
            start.record()
            op()
            end.record()
        torch.cuda.synchronize(self.device)
        gaps = [end.elapsed_time(start) / 1e3 for end, start in zip(events[1][:-1], events[0][1:], strict=True)]
        return [a.elapsed_time(b) / 1e3 for a, b in zip(*events, strict=True)], statistics.median(gaps)

    def point(self, op: str, measure: Callable[[], list[float]], **parameters: Any) -> None:
        """Writes the samples of one point, or the error that it ended with."""
        try:
            samples = measure()
        except Exception as error:  # a failing case never stops the others
            message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"error in {op} {parameters.get('kernel', '')} {parameters.get('family', '')}: {message}")
            self.errors[message] = self.errors.get(message, 0) + 1
            self.writer.add("error", failed=op, message=message, **parameters)
            if "CUDA error" in message:  # the context is lost; the caller starts a new process
                raise
            return
        self.writer.add(op, samples, **parameters, sm_clock_hz=self.clock.sm_hz())


@contextmanager
def benched(out: Path, header: dict[str, Any], device: torch.device, started: float) -> Iterator[Bench]:
    """A bench that writes to a new file, at last how long all took since `started`, and then tells what failed."""
    print(json.dumps(header), flush=True)
    with out.open("w", encoding="utf-8") as file:
        bench = Bench(Writer(file, header), device)
        yield bench
        bench.writer.add("end", [time.monotonic() - started], clock=bench.clock.read())
    for message, count in bench.errors.items():
        print(f"error x{count}: {message}")
    print(f"{time.monotonic() - started:.0f} s")


def median_error(samples: Sequence[float]) -> float:
    """Standard error of the median, relative; from the quartiles, so that a single outlier does not count."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return 1.2533 * (high - low) / 1.349 / middle / math.sqrt(len(samples))


def tensors(shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
    """Random q, k, v and dout of one call."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(num_tokens: int, num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, dim, device=device, dtype=dtype)

    num_q, num_k = sum(shape.q_lens), sum(shape.k_lens)
    dim, value_dim = shape.head_dim, shape.value_dim or shape.head_dim
    return {
        "q": random(num_q, shape.num_heads, dim),
        "k": random(num_k, shape.num_kv_heads, dim),
        "v": random(num_k, shape.num_kv_heads, value_dim),
        "dout": random(num_q, shape.num_heads, value_dim),
    }


def call_of(shape: Shape, device: torch.device) -> attention.Call:
    """The call that a shape describes."""
    if (mask := shape.slices()) is not None:
        return attention.prepare_mask(mask, sum(shape.q_lens), sum(shape.k_lens), device=device)
    return attention.prepare(
        shape.q_lens,
        shape.k_lens,
        causal=shape.causal,
        device=device,
        varlen=shape.varlen,
        batch=not shape.varlen,
        window=shape.window,
    )


def both_passes(kernel: str, shape: Shape, device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls of both passes, by pass, on random tensors; the forward pass has run once."""
    x, call = tensors(shape, device), call_of(shape, device)
    given = x["q"], x["k"], x["v"]
    out, lse = attention.forward(kernel, *given, call)
    return {
        "fwd": partial(attention.forward, kernel, *given, call),
        "bwd": partial(attention.backward, kernel, x["dout"], *given, out, lse, call),
    }


def measure_attention(bench: Bench, kernel: str, shape: Shape, rested: bool = False) -> None:
    """Forward and backward of one shape, separately; inputs rotate where they would fit in the cache."""
    timed = bench.rested if rested else bench.samples
    parameters: dict[str, Any] = {"kernel": kernel, **shape.parameters(), **({"rested": True} if rested else {})}
    elements = sum(shape.q_lens) * shape.num_heads + sum(shape.k_lens) * shape.num_kv_heads
    num_sets = int(np.clip(math.ceil(L2_BYTES / (4 * shape.head_dim * elements)), 1, 4)) if bench.cuda else 1

    call = call_of(shape, bench.device)
    made: list[tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]] = []

    def forward() -> list[float]:
        given = [tensors(shape, bench.device) for _ in range(num_sets)]
        made.extend([(x, *attention.forward(kernel, x["q"], x["k"], x["v"], call)) for x in given])
        rotation = itertools.cycle([(x["q"], x["k"], x["v"]) for x in given])

        def op() -> object:
            q, k, v = next(rotation)
            return attention.forward(kernel, q, k, v, call)

        return timed(op)

    def backward() -> list[float]:
        rotation = itertools.cycle([(x["dout"], x["q"], x["k"], x["v"], out, lse) for x, out, lse in made])

        def op() -> object:
            dout, q, k, v, out, lse = next(rotation)
            return attention.backward(kernel, dout, q, k, v, out, lse, call)

        return timed(op)

    bench.point("attention", forward, **{"pass": "fwd"}, **parameters)
    if made and kernel not in attention.RECTANGLES:
        bench.point("attention", backward, **{"pass": "bwd"}, **parameters)


def measure_memory(bench: Bench, kernel: str, shape: Shape) -> None:
    """Peak memory of a call of each pass: its inputs, and all that is allocated until it ends."""
    x, call = tensors(shape, bench.device), call_of(shape, bench.device)
    given = x["q"], x["k"], x["v"]
    out, lse = attention.forward(kernel, *given, call)
    attention.backward(kernel, x["dout"], *given, out, lse, call)
    calls: dict[str, tuple[tuple[torch.Tensor, ...], Callable[[], object]]] = {
        "fwd": (given, partial(attention.forward, kernel, *given, call)),
        "bwd": ((*x.values(), out, lse), partial(attention.backward, kernel, x["dout"], *given, out, lse, call)),
    }
    for pass_, (inputs, op) in calls.items():
        nbytes = sum(t.nbytes for t in inputs) + (peak_bytes(op, bench.device) if bench.cuda else 0)
        parameters: dict[str, Any] = {"kernel": kernel, "pass": pass_, **shape.parameters(), "peak_bytes": nbytes}
        bench.writer.add("memory", **parameters)


def peak_bytes(op: Callable[[], object], device: torch.device) -> int:
    """Most bytes that are allocated at once while an op runs, beyond those before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    op()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure_pauses(bench: Bench, kernels: Sequence[str]) -> None:
    """Long calls, causal and full, that pause between two: how the clock follows the mean load."""
    tokens = 8192 if bench.cuda else 64
    for kernel, causal in itertools.product(kernels, (True, False)):
        shape = Shape(
            family="pauses",
            num_heads=32,
            num_kv_heads=8,
            causal=causal,
            varlen=False,
            q_lens=(tokens,),
            k_lens=(tokens,),
        )
        ops = both_passes(kernel, shape, bench.device)
        for (pass_, op), share in itertools.product(ops.items(), BUSY_SHARES):
            samples, pause = bench.paused(op, share)
            bench.writer.add(
                "attention",
                samples,
                kernel=kernel,
                **shape.parameters(),
                pause_s=pause,
                **{"pass": pass_},
                sm_clock_hz=bench.clock.sm_hz(),
            )


def checks(head_dim: int) -> list[Shape]:
    """Calls of every entry point."""
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "head_dim": head_dim}
    lens: tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...] = (
        ((384,), (384,), True),
        ((300,), (600,), False),
        ((200, 130), (333, 130), True),
    )
    return [
        Shape(family="check", causal=causal, varlen=len(q) > 1, q_lens=q, k_lens=k, **heads) for q, k, causal in lens
    ]


def masked_checks(head_dim: int) -> list[Shape]:
    """Calls of every way to decide about a pair, with lengths that blocks divide and others."""
    cases: tuple[tuple[str, dict[str, float]], ...] = (
        ("causal_document", {}),
        ("lambda", {"window": 100}),
        ("block_sparse", {"block": 64}),
        ("block_sparse", {"block": 128}),
    )
    return [
        Shape(
            family="check",
            num_heads=64,
            num_kv_heads=8,
            causal=False,
            varlen=False,
            q_lens=lens,
            k_lens=lens,
            head_dim=head_dim,
            mask=mask,
            options=options,
        )
        for mask, options in cases
        for lens in ((384, 256), *(((400, 250),) if options.get("block") != 128 else ()))
    ]


def relative_errors(kernel: str, shape: Shape, device: torch.device) -> list[float]:
    """Relative errors of outputs, log-sum-exps and gradients of a call, against plain attention in fp32."""
    x, call = tensors(shape, device), call_of(shape, device)
    got: tuple[torch.Tensor, ...] = attention.forward(kernel, x["q"], x["k"], x["v"], call)
    wide = {name: t.float() for name, t in x.items()}
    want: tuple[torch.Tensor, ...] = attention.forward("math", wide["q"], wide["k"], wide["v"], call)
    if kernel not in attention.RECTANGLES:
        (out, lse), (wide_out, wide_lse) = got, want
        got += attention.backward(kernel, x["dout"], x["q"], x["k"], x["v"], out, lse, call)
        want += attention.backward("math", wide["dout"], wide["q"], wide["k"], wide["v"], wide_out, wide_lse, call)
    return [float((g.float() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]


def are_right(errors: Sequence[float]) -> bool:
    """Whether what a kernel computes is attention; NaN is not."""
    return all(error < WRONG for error in errors)


def check(bench: Bench, kernel: str, shapes: Sequence[Shape]) -> bool:
    """Whether no call of a kernel is wrong; writes how far off each is.

    Calls that the kernel refuses are not wrong: others of it may run.
    """
    right = True
    for shape in shapes:
        name = f"{kernel} {shape.mask} {shape.q_lens} {shape.k_lens} causal={shape.causal}"
        try:
            errors = relative_errors(kernel, shape, bench.device)
        except Exception as error:
            print(f"check {name}: {type(error).__name__}: {str(error)[:300]}")
            bench.writer.add("error", failed="check", kernel=kernel, message=str(error)[:300])
            continue
        print(f"check {name}:", " ".join(f"{e:.1e}" for e in errors))
        bench.writer.add("check", kernel=kernel, **shape.parameters(), relative_errors=errors)
        right &= are_right(errors)
    if not right:
        print(f"{kernel} at head dimension {shapes[0].head_dim} is left out: expected attention, got other results")
    return right


def those_right(bench: Bench, kernels: Sequence[str], head_dim: int = HEAD_DIM) -> list[str]:
    """Kernels without those that compute something else than attention at a head dimension."""
    return [kernel for kernel in kernels if check(bench, kernel, checks(head_dim))]


def warm_up(kernel: str, device: torch.device, head_dim: int = HEAD_DIM) -> None:
    """Compiles the variants that the shapes need, those that `--warm-up` did not."""
    for shape in variants(kernel, head_dim):
        run_once(kernel, shape, device)


def variants(kernel: str, head_dim: int, masked: bool = False) -> list[Shape]:
    """One call of every variant that a kernel is compiled in.

    fa4: per head ratio, mask and entry point; flex: per heads, whether blocks divide lengths, and rule about pairs.
    """
    shape = Shape(
        family="warm-up",
        num_heads=4,
        num_kv_heads=1,
        causal=False,
        varlen=False,
        q_lens=(512,),
        k_lens=(512,),
        head_dim=head_dim,
    )
    if kernel == "flex":
        rules: dict[str, dict[str, float]] = {"causal": {}}
        rules |= {"lambda": {"window": 100}, "block_sparse": {"block": 64}} if masked else {}
        return [
            replace(shape, num_heads=heads, num_kv_heads=kv, q_lens=(n,), k_lens=(n,), mask=mask, options=options)
            for heads, kv in (MASKED_HEADS if masked else HEADS_OF_4)
            for n in ((512,) if masked and (heads, kv) != MASKED_HEADS[0] else (512, 500))
            for mask, options in rules.items()
        ]
    ratios = ((8, 8), (4, 1), (8, 1)) if head_dim == HEAD_DIM else ((4, 1),)
    return [
        replace(shape, num_heads=heads, num_kv_heads=kv, causal=causal, varlen=len(lens) > 1, q_lens=lens, k_lens=lens)
        for (heads, kv), causal, lens in itertools.product(ratios, (True, False), ((512,), (384, 256)))
    ]


def run_once(kernel: str, shape: Shape, device: torch.device) -> None:
    """Both passes of a call; what goes wrong is printed."""
    try:
        both_passes(kernel, shape, device)["bwd"]()
    except Exception as error:
        print(f"warm-up {kernel} {shape}: {type(error).__name__}: {str(error)[:200]}")


def compile_all(shapes: Sequence[tuple[str, Shape]]) -> None:
    """Compiles what kernels need for shapes into the caches of their packages, each in a process of its own."""
    with ProcessPoolExecutor(min(len(shapes), os.cpu_count() or 1), get_context("spawn")) as pool:
        for future in [pool.submit(run_once, *each, torch.device("cuda")) for each in shapes]:
            future.result()


def elementwise_ops(kind: str, n: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """The op on about n elements of 128-element heads, inputs rotating past the cache, and the bytes it moves."""
    tokens, heads, dim = max(1, n // 4096), 32, HEAD_DIM
    elements = tokens * heads * dim
    num_sets = int(np.clip(math.ceil(2 * L2_BYTES / (8 * elements)), 1, 16))

    def rand(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(tokens, heads, dim, device=device, dtype=dtype)

    bf16, fp32 = torch.bfloat16, torch.float32
    lse = [torch.randn(heads, tokens, device=device) for _ in range(2)]
    index = torch.arange(tokens, device=device).roll(tokens // 2)
    wide = kind in ("merge", "merge_last", "accumulate", "cast")
    sets = itertools.cycle([(rand(fp32 if wide else bf16), rand(bf16)) for _ in range(num_sets)])
    spare = rand(bf16)

    def op() -> None:
        x, y = next(sets)
        if kind == "merge":
            elementwise.merge(x, lse[0], y, lse[1], x)
        elif kind == "merge_last":
            elementwise.merge(x, lse[0], y, lse[1], spare)
        elif kind == "accumulate":
            elementwise.accumulate(x, y)
        elif kind == "transpose":
            elementwise.transpose_rows(x.view(tokens, 4, -1), y.view(4, tokens, -1))
        elif kind == "gather":
            elementwise.gather_rows(x.view(tokens, -1), index, y.view(tokens, -1))
        else:
            y.copy_(x)

    per_element = {"merge": 10, "merge_last": 8, "accumulate": 10, "cast": 6}.get(kind, 4)
    return op, elements * per_element


ELEMENTWISE = ("merge", "merge_last", "accumulate", "cast", "copy", "transpose", "gather")
"""Merge into fp32 and (last) into bf16, sum, fp32 to bf16, copy, rows transposed, gathered."""


def measure_elementwise(bench: Bench, rng: np.random.Generator, num: int) -> None:
    """Every memory-bound kernel at random sizes of 64 KB to 1 GB of traffic."""
    kinds = [kind for kind in ELEMENTWISE for _ in range(num)]
    rng.shuffle(kinds)
    for kind in kinds:
        n = int(np.exp(rng.uniform(np.log(2**15), np.log(2**27 if bench.cuda else 2**17))))
        op, nbytes = elementwise_ops(kind, n, bench.device)
        bench.point("elementwise", partial(bench.samples, op), kind=kind, nbytes=nbytes)


def listed(path: Path | None) -> list[tuple[str, Shape]]:
    """Kernels and shapes of a JSON Lines file, in its order."""
    if path is None:
        return []
    shapes = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        row["window"] = tuple(row["window"]) if "window" in row else None
        lens: dict[str, Any] = {name: tuple(row.pop(name, ())) for name in ("q_lens", "k_lens", "documents")}
        lens |= {name: tuple(map(tuple, row.pop(name, ()))) for name in ("q_ranges", "k_ranges")}
        shapes.append((row.pop("kernel"), Shape(**row, **lens)))
    return shapes


def measure_host(bench: Bench, kernels: list[str]) -> None:
    """Wall seconds to launch each kind of op."""
    ops: dict[str, Callable[[], object]] = {kind: elementwise_ops(kind, 2**16, bench.device)[0] for kind in ELEMENTWISE}
    tokens, num = (64, 20) if bench.cuda else (4, 5)
    for kernel, lens in itertools.product(kernels, ((16 * tokens,), (tokens,) * 16)):
        shape = Shape(
            family="host", num_heads=4, num_kv_heads=1, causal=True, varlen=len(lens) > 1, q_lens=lens, k_lens=lens
        )
        try:
            passes = both_passes(kernel, shape, bench.device)
        except Exception as error:
            bench.writer.add("error", failed="host", kernel=kernel, message=str(error)[:300])
            continue
        ops |= {f"{kernel}_{name}_{'varlen' if shape.varlen else 'dense'}": op for name, op in passes.items()}
    if bench.cuda:
        event, stream = torch.cuda.Event(), torch.cuda.current_stream()

        def pass_event() -> None:
            event.record()
            stream.wait_event(event)

        ops["event"] = pass_event

    def measure(op: Callable[[], object]) -> list[float]:
        for _ in range(num // 2):
            op()
        return [host_seconds(op, num, bench.device) for _ in range(num)]

    for kind, op in ops.items():
        bench.point("host", partial(measure, op), kind=kind)


LONG: Final = Shape(
    family="sustained",
    num_heads=32,
    num_kv_heads=8,
    causal=True,
    varlen=False,
    q_lens=(16384,),
    k_lens=(16384,),
)
"""What usually stands for all shapes."""


def measure_sustained(bench: Bench, kernel: str, shape: Shape, which: str, seconds: float) -> None:
    """One kernel from idle through seconds of load: mean duration and SM clock in each 50 ms."""
    op = both_passes(kernel, shape, bench.device)[which]
    op()
    per_op = min(time_ops(op, 3, bench.device))
    time.sleep(1.0)
    num = max(2, int(seconds / per_op))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num + 1)]
    clocks, started, last = [], time.perf_counter(), 0.0
    events[0].record()
    for i in range(num):
        op()
        events[i + 1].record()
        if (now := time.perf_counter() - started) > last + 0.05:
            clocks.append([round(now, 3), *bench.clock.read().values()])
            last = now
    torch.cuda.synchronize(bench.device)
    ends = np.array([events[0].elapsed_time(e) / 1e3 for e in events])
    samples, times, mark = [], [], 0
    for i in range(1, num + 1):
        if ends[i] - ends[mark] >= 0.05:
            samples.append(float(ends[i] - ends[mark]) / (i - mark))
            times.append(round(float(ends[i]), 4))
            mark = i
    bench.writer.add(
        "sustained",
        samples,
        kernel=kernel,
        **{"pass": which},
        **shape.parameters(),
        times_s=times,
        clocks=clocks,
    )
    print(
        f"sustained {kernel} {which} {shape.q_lens[0]}: first {samples[0]:.6f} s, last {samples[-1]:.6f} s,",
        clocks[-1:],
    )


def run(bench: Bench, kernels: list[str], seed: int, deadline: float, shapes: list[tuple[str, Shape]]) -> None:
    """Everything, in order of importance: `shapes`, then random attention shapes for the time that is left."""
    checked = {(kernel, HEAD_DIM) for kernel in kernels} | {(k, s.head_dim) for k, s in shapes if k in kernels}
    right = {(kernel, head_dim) for kernel, head_dim in sorted(checked) if check(bench, kernel, checks(head_dim))}
    kernels = [kernel for kernel in kernels if (kernel, HEAD_DIM) in right]
    for kernel in kernels:
        warm_up(kernel, bench.device)
    rng = np.random.default_rng(seed)
    measure_host(bench, kernels)
    measure_elementwise(bench, rng, 12 if bench.cuda else 2)
    if bench.cuda:
        for kernel, which in itertools.product([k for k in kernels if k in SUSTAINED], ("fwd", "bwd")):
            measure_sustained(bench, kernel, LONG, which, SUSTAINED_S)
    for kernel, shape in shapes:
        if (kernel, shape.head_dim) in right and time.monotonic() < deadline:
            measure_attention(bench, kernel, shape)
    measure_random(bench, kernels, rng, deadline, rested=False)


def run_listed(bench: Bench, shapes: list[tuple[str, Shape]], deadline: float) -> None:
    """Listed shapes alone, of kernels that are right about small ones like them; on a CPU these, of `math`."""
    if not bench.cuda:
        shapes = [("math", small(shape)) for _, shape in shapes]
    right: dict[tuple[str, Shape], bool] = {}
    for kernel, shape in shapes:
        kind = kernel, small(shape)
        if kind not in right:
            right[kind] = check(bench, kernel, [small(shape)])
        if right[kind] and time.monotonic() < deadline:
            measure_attention(bench, kernel, shape)


def run_sustained(bench: Bench, kernels: list[str], seed: int, deadline: float) -> None:
    """Random calls of one sequence that last for half a millisecond and more, each kept up for `CURVE_S`."""
    kernels, rng = those_right(bench, kernels), np.random.default_rng(seed)
    while time.monotonic() < deadline:
        for kernel in kernels:
            limit = float(np.exp(rng.uniform(np.log(CURVE_FLOPS), np.log(20 * CURVE_FLOPS))))
            shape = draw(rng, limit, dense_only=True)
            while shape.flops() < limit / 2:
                shape = draw(rng, limit, dense_only=True)
            for which in ("fwd", "bwd"):
                measure_sustained(bench, kernel, replace(shape, family="sustained"), which, CURVE_S)


def small(shape: Shape) -> Shape:
    """A call of few tokens through the same entry point with the same kind of mask."""
    num, unequal = min(2, len(shape.q_lens)), shape.q_lens != shape.k_lens
    left, right = shape.window or (UNCUT, UNCUT)
    return replace(
        shape,
        family="check",
        num_heads=2 * shape.num_heads // shape.num_kv_heads,
        num_kv_heads=2,
        q_lens=(384,) * num,
        k_lens=(640 if unequal else 384,) * num,
        window=shape.window and (min(left, 100), min(right, 100)),
    )


def run_rested(bench: Bench, kernels: list[str], seed: int, deadline: float) -> None:
    """Calls that pause, then random ones at the full clock."""
    kernels = those_right(bench, kernels)
    for kernel in kernels:
        warm_up(kernel, bench.device)
    measure_pauses(bench, kernels)
    measure_random(bench, kernels, np.random.default_rng(seed), deadline, rested=True)


def run_masks(bench: Bench, kernels: list[str], args: argparse.Namespace, started: float) -> None:
    """Kernels of any mask, one after another, each for its share of the time."""
    masks = args.masks.split(",") if args.masks else []
    all_masks = bench.cuda and not masks and not args.shares and args.head_dim == HEAD_DIM
    shapes = listed(args.shapes) or [("flex", shape) for shape in listed_masks() if all_masks]
    total, spent = sum(POINTS.get(kernel, 1.0) for kernel in kernels), 0.0
    for kernel in kernels:
        spent += POINTS.get(kernel, 1.0)
        mine = [shape for name, shape in shapes if name == kernel]
        until = started + 60 * args.minutes * spent / total
        run_masked(bench, kernel, args.seed, until, mine, masks, shares=args.shares, head_dim=args.head_dim)


def run_masked(
    bench: Bench,
    kernel: str,
    seed: int,
    deadline: float,
    shapes: list[Shape],
    masks: Sequence[str],
    *,
    shares: bool,
    head_dim: int,
) -> None:
    """A kernel that takes any mask, or any of whole blocks: listed shapes, then random masks of some names, or all."""
    whole = kernel in attention.WHOLE_BLOCKS
    masks = masks or (RECTANGLES if kernel in attention.RECTANGLES else ())
    some = [
        s
        for s in masked_checks(head_dim)
        if (not whole or s.options.get("block") == 128) and (not masks or s.mask in masks)
    ]
    if not check(bench, kernel, some):
        return
    rng, count = np.random.default_rng(seed), 0
    limit, naive = MAX_FLOPS[kernel] if bench.cuda else 3e10, kernel == "sdpa_math" or not bench.cuda
    while time.monotonic() < deadline and count < (10**9 if bench.cuda else 3):
        draw_one = partial(
            draw_masked, rng, limit, masks, whole_blocks=whole, naive=naive, shares=shares, head_dim=head_dim
        )
        measure_attention(bench, kernel, shapes.pop(0) if shapes else draw_one())
        count += 1
    print(f"{kernel}: {count} masks")


def run_memory(bench: Bench, kernels: list[str]) -> None:
    """Peak memory of full calls of every kernel."""
    for kernel, tokens in itertools.product(those_right(bench, kernels), MEMORY_LENGTHS if bench.cuda else (128,)):
        shape = Shape(
            family="memory",
            num_heads=64,
            num_kv_heads=8,
            causal=False,
            varlen=False,
            q_lens=(tokens,),
            k_lens=(tokens,),
        )
        try:
            measure_memory(bench, kernel, shape)
        except Exception as error:  # out of memory, for one
            message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"memory {kernel} {tokens}: {message}")
            bench.writer.add("error", failed="memory", message=message, kernel=kernel, **shape.parameters())


def run_random(bench: Bench, kernels: list[str], args: argparse.Namespace, deadline: float) -> None:
    """Random calls of some families, or of another head dimension, by the kernels that are right there."""
    families = args.families.split(",") if args.families else ()
    if families and not set(families) & set(OF_ONE_SEQUENCE):
        for kernel in sorted(set(kernels) & set(DENSE_ONLY)):
            print(f"{kernel} is left out: it runs one sequence, expected {', '.join(OF_ONE_SEQUENCE)}")
        kernels = [kernel for kernel in kernels if kernel not in DENSE_ONLY]
    kernels = those_right(bench, kernels, args.head_dim)
    for kernel in kernels:
        warm_up(kernel, bench.device, args.head_dim)
    rng = np.random.default_rng(args.seed)
    measure_random(bench, kernels, rng, deadline, rested=False, head_dim=args.head_dim, families=families)


def measure_random(
    bench: Bench,
    kernels: list[str],
    rng: np.random.Generator,
    deadline: float,
    *,
    rested: bool,
    head_dim: int = HEAD_DIM,
    families: Sequence[str] = (),
) -> None:
    """Attention of random shapes until the deadline, every kernel for its share of the time.

    Of another head dimension than the usual one, whose points tell most, every kernel runs the same number of shapes.
    """
    started, spent = time.monotonic(), dict.fromkeys(kernels, 1e-9)
    counts = dict.fromkeys(kernels, 0)
    while kernels and time.monotonic() < deadline and sum(counts.values()) < (10**9 if bench.cuda else 8):
        usual = head_dim == HEAD_DIM
        kernel = min(kernels, key=lambda k: spent[k] / POINTS.get(k, 1.0) if usual else counts[k])
        limit = MAX_FLOPS.get(kernel, 1e9) * (4 if rng.random() < 0.04 else 1) * (0.3 if rng.random() < 0.6 else 1)
        limit = min(limit, RESTED_FLOPS) if rested else limit
        before = time.monotonic()
        shape = draw(
            rng, limit if bench.cuda else 2e8, dense_only=kernel in DENSE_ONLY, head_dim=head_dim, families=families
        )
        measure_attention(bench, kernel, shape, rested)
        spent[kernel] += time.monotonic() - before
        counts[kernel] += 1
    print("shapes:", counts, "seconds:", {k: round(s) for k, s in spent.items()}, round(time.monotonic() - started))


def options() -> argparse.Namespace:
    """What was asked for; options that exclude each other, or would do nothing, are refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", default="fa4,fa2,cudnn,sdpa_flash")
    parser.add_argument("--shapes", type=Path, help="JSON Lines of kernels and shapes to measure first")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--rested", action="store_true", help="attention at the full clock, and nothing else")
    modes.add_argument("--masked", action="store_true", help="kernels of any mask, and nothing else")
    modes.add_argument(
        "--sustained", action="store_true", help="random calls through seconds of load, and nothing else"
    )
    modes.add_argument("--memory", action="store_true", help="peak memory of calls, and nothing else")
    modes.add_argument("--listed", action="store_true", help="the calls of --shapes, and nothing else")
    modes.add_argument("--families", default="", help="only random calls of these, such as equal,heavy_tail")
    parser.add_argument("--masks", default="", help="of masks, only these, such as lambda,block_sparse")
    parser.add_argument("--shares", action="store_true", help="of masks, what one rank computes at a time")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, help="another than 128: random calls, nothing else")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    parser.add_argument("--warm-up", action="store_true", help="only compile flex and fa4, on all CPUs")
    args = parser.parse_args()
    other_dim = args.head_dim != HEAD_DIM
    idle = {
        "--masks": args.masks and not args.masked,
        "--shares": args.shares and not args.masked,
        "--head-dim": other_dim and (args.rested or args.memory or args.listed or args.sustained),
        "--listed": args.listed and not args.shapes,
        "--shapes": args.shapes and not args.masked and (args.rested or args.memory or args.families or other_dim),
    }
    for name in (name for name, is_idle in idle.items() if is_idle):
        parser.error(f"{name}: does nothing beside the other options")
    if args.out is None and not args.warm_up:
        parser.error("--out: expected the measurement file to write")
    return args


def measure(bench: Bench, kernels: list[str], args: argparse.Namespace, started: float) -> None:
    """What the options ask for."""
    deadline = started + 60 * args.minutes
    if args.listed:
        run_listed(bench, listed(args.shapes), deadline)
    elif args.rested:
        run_rested(bench, kernels, args.seed, deadline)
    elif args.masked:
        run_masks(bench, kernels, args, started)
    elif args.sustained:
        run_sustained(bench, kernels, args.seed, deadline)
    elif args.memory:
        run_memory(bench, kernels)
    elif args.head_dim != HEAD_DIM or args.families:
        run_random(bench, kernels, args, deadline)
    else:
        run(bench, kernels, args.seed, deadline, listed(args.shapes))


def main() -> None:
    args = options()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", args.gpu) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.warm_up:
        kernels = args.kernels.split(",")
        needed = ((kernel, shape) for kernel in kernels for shape in variants(kernel, args.head_dim, args.masked))
        compile_all(listed(args.shapes) or list(needed))
        return
    kernels = args.kernels.split(",") if device.type == "cuda" or args.masked else ["math"]
    kernels = sorted({kernel for kernel, _ in listed(args.shapes)}) if args.listed else kernels
    versions = {kernel: attention.kernel_version(kernel) for kernel in kernels}
    header = provenance(device, 1, versions, command_line("python -m cpsim.real.measure.kernels"), args.commit)
    with benched(args.out, header, device, started) as bench:
        measure(bench, kernels, args, started)


if __name__ == "__main__":
    main()
