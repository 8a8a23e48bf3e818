"""Measures attention kernels, memory-bound kernels and host launches on one GPU, under sustained load.

    python -m real.measure_kernels --minutes 8 --out h200-kernels.jsonl
    python -m real.measure_kernels --minutes 4 --shapes study.jsonl --out study-kernels.jsonl
    python -m real.measure_kernels --minutes 1 --rested --seed 2 --out h200-rested.jsonl

Without a pause a kernel meets the power limit and the clock falls. `--rested` measures how it runs where a schedule
leaves a GPU idle: two shapes with pauses of several lengths, then random ones at the full clock. Otherwise listed
shapes come first, and random ones take the time that is left. Writes one measurement file (see
cpsim.calibrate.measurement) as it goes and stops in time. On a CPU it runs tiny sizes of the `math` kernel, to try
the script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cpsim.calibrate.measurement import Writer
from real import attention, elementwise
from real.shapes import HEAD_DIM, Shape, draw
from real.timing import Clock, hold, host_seconds, provenance, soak, time_ops

L2_BYTES = 120e6  # inputs rotate over at least twice the 50 MB second-level cache of Hopper
POINTS = {"fa4": 0.38, "fa2": 0.32, "cudnn": 0.17, "sdpa_flash": 0.13}  # share of the measured time
MAX_FLOPS = {"fa4": 3e13, "fa2": 1.5e13, "cudnn": 2e13, "sdpa_flash": 1e13}
BUSY_SHARES = (0.95, 0.87, 0.79, 0.7, 0.6)
"""Of the time, where a kernel pauses between two calls."""
SETTLED_S = 0.4
"""After so long the power limit has made up its mind."""
RESTED_FLOPS = 2e12
"""Largest calls at the full clock: longer ones bring the clock down by themselves."""
REST_S = 3e-3
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

    def point(self, op: str, measure: Callable[[], list[float]], **parameters: object) -> None:
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


def median_error(samples: Sequence[float]) -> float:
    """Standard error of the median, relative; from the quartiles, so that a single outlier does not count."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return 1.2533 * (high - low) / 1.349 / middle / math.sqrt(len(samples))


def tensors(shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
    """Random q, k, v and dout of one call."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, HEAD_DIM, device=device, dtype=dtype)

    num_q, num_k = sum(shape.q_lens), sum(shape.k_lens)
    return {
        "q": random(num_q, shape.num_heads), "k": random(num_k, shape.num_kv_heads),
        "v": random(num_k, shape.num_kv_heads), "dout": random(num_q, shape.num_heads),
    }  # fmt: skip


def both_passes(kernel: str, shape: Shape, device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls of both passes, by pass, on random tensors; the forward pass has run once."""
    x = tensors(shape, device)
    call = attention.prepare(shape.q_lens, shape.k_lens, causal=shape.causal, device=device)
    given = x["q"], x["k"], x["v"]
    out, lse = attention.forward(kernel, *given, call)
    return {
        "fwd": partial(attention.forward, kernel, *given, call),
        "bwd": partial(attention.backward, kernel, x["dout"], *given, out, lse, call),
    }


def measure_attention(bench: Bench, kernel: str, shape: Shape, rested: bool = False) -> None:
    """Forward and backward of one shape, separately; inputs rotate where they would fit in the cache."""
    timed = bench.rested if rested else bench.samples
    parameters = {
        "kernel": kernel, "family": shape.family, "num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads,
        "head_dim": HEAD_DIM, "causal": shape.causal, "varlen": shape.varlen,
        "q_lens": list(shape.q_lens), "k_lens": list(shape.k_lens), **({"rested": True} if rested else {}),
    }  # fmt: skip
    nbytes = 4 * HEAD_DIM * (sum(shape.q_lens) * shape.num_heads + sum(shape.k_lens) * shape.num_kv_heads)
    num_sets = int(np.clip(math.ceil(L2_BYTES / nbytes), 1, 4)) if bench.cuda else 1

    def make() -> list[tuple[torch.Tensor, ...]]:
        sets = []
        for _ in range(num_sets):
            x = tensors(shape, bench.device)
            out, lse = attention.forward(kernel, x["q"], x["k"], x["v"], call)
            sets.append((x["dout"], x["q"], x["k"], x["v"], out, lse))
        return sets

    call = attention.prepare(
        shape.q_lens, shape.k_lens, causal=shape.causal, device=bench.device, varlen=shape.varlen
    )
    made: list[tuple[torch.Tensor, ...]] = []

    def forward() -> list[float]:
        made.extend(make())
        rotation = itertools.cycle(made)
        return timed(lambda: attention.forward(kernel, *next(rotation)[1:4], call))

    def backward() -> list[float]:
        rotation = itertools.cycle(made)
        return timed(lambda: attention.backward(kernel, *next(rotation), call))

    bench.point("attention", forward, **{"pass": "fwd"}, **parameters)
    if made:
        bench.point("attention", backward, **{"pass": "bwd"}, **parameters)


def measure_pauses(bench: Bench, kernels: Sequence[str]) -> None:
    """Long calls, causal and full, that pause between two: how the clock follows the mean load."""
    tokens = 8192 if bench.cuda else 64
    for kernel, causal in itertools.product(kernels, (True, False)):
        shape = Shape(
            family="pauses", num_heads=32, num_kv_heads=8, causal=causal, varlen=False, q_lens=(tokens,),
            k_lens=(tokens,),
        )
        ops = both_passes(kernel, shape, bench.device)
        for (pass_, op), share in itertools.product(ops.items(), BUSY_SHARES):
            samples, pause = bench.paused(op, share)
            bench.writer.add(
                "attention", samples, kernel=kernel, family="pauses", num_heads=32, num_kv_heads=8, head_dim=HEAD_DIM,
                causal=causal, varlen=False, q_lens=[tokens], k_lens=[tokens], pause_s=pause, **{"pass": pass_},
                sm_clock_hz=bench.clock.sm_hz(),
            )  # fmt: skip


def check(bench: Bench, kernel: str) -> None:
    """Relative error of output and gradients against plain attention in fp32, dense and varlen."""
    for q_lens, k_lens, causal in (((384,), (384,), True), ((300,), (600,), False), ((200, 130), (333, 130), True)):
        shape = Shape(
            family="check", num_heads=4, num_kv_heads=1, causal=causal, varlen=len(q_lens) > 1,
            q_lens=q_lens, k_lens=k_lens,
        )  # fmt: skip
        try:
            x = tensors(shape, bench.device)
            call = attention.prepare(q_lens, k_lens, causal=causal, device=bench.device)
            got = attention.forward(kernel, x["q"], x["k"], x["v"], call)
            wide = {name: t.float() for name, t in x.items()}
            want = attention.forward("math", wide["q"], wide["k"], wide["v"], call)
            got += attention.backward(kernel, x["dout"], x["q"], x["k"], x["v"], *got, call)
            want += attention.backward("math", wide["dout"], wide["q"], wide["k"], wide["v"], *want, call)
            errors = [float((g.float() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]
        except Exception as error:
            print(f"check {kernel} {q_lens} {k_lens} causal={causal}: {type(error).__name__}: {str(error)[:300]}")
            bench.writer.add("error", failed="check", kernel=kernel, message=str(error)[:300])
            continue
        print(f"check {kernel} {q_lens} {k_lens} causal={causal}:", " ".join(f"{e:.1e}" for e in errors))
        bench.writer.add("check", kernel=kernel, q_lens=list(q_lens), k_lens=list(k_lens), relative_errors=errors)


def warm_up(kernel: str, device: torch.device) -> None:
    """Compiles the variants that the shapes need (fa4: per head ratio, mask and entry point)."""
    for (heads, kv), causal, lens in itertools.product(((8, 8), (4, 1), (8, 1)), (True, False), ([512], [384, 256])):
        compile_variant(kernel, heads, kv, causal, lens, device)


def compile_variant(kernel: str, heads: int, kv: int, causal: bool, lens: list[int], device: torch.device) -> None:
    """One small forward and backward call."""
    shape = Shape(
        family="warm-up", num_heads=heads, num_kv_heads=kv, causal=causal, varlen=len(lens) > 1,
        q_lens=tuple(lens), k_lens=tuple(lens),
    )  # fmt: skip
    try:
        both_passes(kernel, shape, device)["bwd"]()
    except Exception as error:
        print(f"warm-up {kernel} {heads}:{kv} causal={causal} {lens}: {type(error).__name__}: {str(error)[:200]}")


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


def measure_elementwise(bench: Bench, rng: np.random.Generator, num: int) -> None:
    """Every memory-bound kernel at random sizes of 64 KB to 1 GB of traffic."""
    kinds = [kind for kind in ELEMENTWISE for _ in range(num)]
    rng.shuffle(kinds)
    for kind in kinds:
        n = int(np.exp(rng.uniform(np.log(2**15), np.log(2**27 if bench.cuda else 2**17))))
        op, nbytes = elementwise_ops(kind, n, bench.device)
        bench.point("elementwise", lambda op=op: bench.samples(op), kind=kind, nbytes=nbytes)


def listed(path: Path | None) -> list[tuple[str, Shape]]:
    """Kernels and shapes of a JSON Lines file, in its order."""
    if path is None:
        return []
    shapes = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        lens = {name: tuple(row.pop(name)) for name in ("q_lens", "k_lens")}
        shapes.append((row.pop("kernel"), Shape(**row, **lens)))
    return shapes


def measure_host(bench: Bench, kernels: list[str]) -> None:
    """Wall seconds to launch each kind of op."""
    ops: dict[str, Callable[[], object]] = {
        kind: elementwise_ops(kind, 2**16, bench.device)[0] for kind in ELEMENTWISE
    }
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
        ops["event"] = lambda: (event.record(), stream.wait_event(event))

    def measure(op: Callable[[], object]) -> list[float]:
        for _ in range(num // 2):
            op()
        return [host_seconds(op, num, bench.device) for _ in range(num)]

    for kind, op in ops.items():
        bench.point("host", lambda op=op: measure(op), kind=kind)


def measure_sustained(bench: Bench, kernel: str, num_tokens: int, which: str, seconds: float) -> None:
    """One kernel from idle through seconds of load: mean duration and SM clock in each 50 ms."""
    shape = Shape(
        family="sustained", num_heads=32, num_kv_heads=8, causal=True, varlen=False,
        q_lens=(num_tokens,), k_lens=(num_tokens,),
    )  # fmt: skip
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
        "sustained", samples, kernel=kernel, **{"pass": which}, num_heads=32, num_kv_heads=8, head_dim=HEAD_DIM,
        causal=True, varlen=False, q_lens=[num_tokens], k_lens=[num_tokens], times_s=times, clocks=clocks,
    )  # fmt: skip
    print(f"sustained {kernel} {which} {num_tokens}: first {samples[0]:.6f} s, last {samples[-1]:.6f} s,", clocks[-1:])


def run(bench: Bench, kernels: list[str], seed: int, deadline: float, shapes: list[tuple[str, Shape]]) -> None:
    """Everything, in order of importance: `shapes`, then random attention shapes for the time that is left."""
    for kernel in kernels:
        check(bench, kernel)
        warm_up(kernel, bench.device)
    rng = np.random.default_rng(seed)
    measure_host(bench, kernels)
    measure_elementwise(bench, rng, 12 if bench.cuda else 2)
    if bench.cuda:
        for kernel, which in itertools.product([k for k in kernels if k in ("fa4", "fa2")], ("fwd", "bwd")):
            measure_sustained(bench, kernel, 8192, which, 2.0)
    for kernel, shape in shapes:
        if kernel in kernels and time.monotonic() < deadline:
            measure_attention(bench, kernel, shape)
    measure_random(bench, kernels, rng, deadline, rested=False)


def measure_random(
    bench: Bench, kernels: list[str], rng: np.random.Generator, deadline: float, *, rested: bool
) -> None:
    """Attention of random shapes until the deadline, every kernel for its share of the time."""
    started, spent = time.monotonic(), dict.fromkeys(kernels, 1e-9)
    counts = dict.fromkeys(kernels, 0)
    while time.monotonic() < deadline and sum(counts.values()) < (10**9 if bench.cuda else 8):
        kernel = min(kernels, key=lambda k: spent[k] / POINTS.get(k, 1.0))
        limit = MAX_FLOPS.get(kernel, 1e9) * (4 if rng.random() < 0.04 else 1) * (0.3 if rng.random() < 0.6 else 1)
        limit = min(limit, RESTED_FLOPS) if rested else limit
        before = time.monotonic()
        shape = draw(rng, limit if bench.cuda else 2e8, dense_only=kernel == "cudnn")
        measure_attention(bench, kernel, shape, rested)
        spent[kernel] += time.monotonic() - before
        counts[kernel] += 1
    print("shapes:", counts, "seconds:", {k: round(s) for k, s in spent.items()}, round(time.monotonic() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", default="fa4,fa2,cudnn,sdpa_flash")
    parser.add_argument("--shapes", type=Path, help="JSON Lines of kernels and shapes to measure first")
    parser.add_argument("--rested", action="store_true", help="attention at the full clock, and nothing else")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    parser.add_argument("--compile", default="", help="only compile one variant: heads,kv,causal,varlen")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", args.gpu) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.compile:
        heads, kv, causal, varlen = map(int, args.compile.split(","))
        compile_variant("fa4", heads, kv, bool(causal), [384, 256] if varlen else [512], device)
        return
    kernels = args.kernels.split(",") if device.type == "cuda" else ["math"]
    command = f"python -m real.measure_kernels --minutes {args.minutes:g} --seed {args.seed} --kernels {args.kernels}"
    command += f" --shapes {args.shapes.name}" if args.shapes else ""
    command += " --rested" if args.rested else ""
    header = provenance(device, 1, {k: attention.kernel_version(k) for k in kernels}, command, args.commit)
    print(json.dumps(header))
    with args.out.open("w", encoding="utf-8") as file:
        bench = Bench(Writer(file, header), device)
        deadline = started + 60 * args.minutes
        if args.rested:
            for kernel in kernels:
                warm_up(kernel, device)
            measure_pauses(bench, kernels)
            measure_random(bench, kernels, np.random.default_rng(args.seed), deadline, rested=True)
        else:
            run(bench, kernels, args.seed, deadline, listed(args.shapes))
        bench.writer.add("end", [time.monotonic() - started], clock=bench.clock.read())
    for message, count in bench.errors.items():
        print(f"error x{count}: {message}")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
