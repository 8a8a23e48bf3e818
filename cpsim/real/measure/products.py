"""Measures products that plain layers do not have: in FP8, grouped by experts, thin ones of adapters; and what goes
with them: memory-bound kernels of PyTorch's optimizers, of FSDP and of casts to FP8.

    python -m cpsim.real.measure.products --minutes 3 --out h200-products.jsonl

Products are points `op: gemm` with the key `fp8` (`tensorwise`; `tensorwise_exact`, which adds up without the fast
accumulation of Hopper's tensor cores, as backward passes do; `rowwise`) or `groups` (experts; `m` is the tokens of all
or, of `wgrad`, `k` is); every shape is measured in bf16, too, on the same card. The rest are points `op: layer_op` with
kinds of `SWEEPS`. Points come in random order. On a CPU, or with `--cpu`, it runs a few tiny sizes, to try the script.

Legend of tensor suffixes: M, N, K of a product, E experts, N elements.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cpsim.case.model import MODELS
from cpsim.prediction.step.experts import CLAMPS
from cpsim.real.measure.kernels import L2_BYTES, Bench, benched
from cpsim.real.measure.layers import gemm_op
from cpsim.real.run.timing import provenance

Shape = tuple[int, int, int]
Op = Callable[[], object]
KERNELS: Final = ("tensorwise", "tensorwise_exact", "rowwise")
GROUPS: Final = (8, 16, 64)
THIN: Final = (16, 64)
"""Ranks of adapters."""
TENSORS: Final = 48
"""Of an optimizer's step, as large as each other."""
MAX_FLOPS: Final = 1.2e13
TOKENS: Final = (1024, 4096, 8192, 16384, 32768)


def shapes(rng: np.random.Generator) -> Iterator[Shape]:
    """(m, n, k) of linear layers of published models and of random ones, in random order."""
    dense = [model for model in MODELS.values() if not (model.experts or model.recurrent)]
    linears = {pair for model in dense for pair in model.linears(1).values()}
    linears |= {pair for name in ("llama3-8b", "llama3-70b") for pair in MODELS[name].linears(4).values()}
    known = [(t, outer, inner) for t, (inner, outer) in itertools.product(TOKENS, sorted(linears))]
    known += [(outer, inner, t) for t, inner, outer in known]  # gradients of weights
    rng.shuffle(known)
    for m, n, k in known:
        if 2 * m * n * k < MAX_FLOPS and n < 60_000 and k < 60_000:
            yield int(m), int(n), int(k)
        low, high = math.log(512), math.log(16384)
        drawn = np.exp(rng.uniform(low, high, 3)).astype(int) // 64 * 64
        yield int(drawn[0]), int(drawn[1]), int(drawn[2])


def rotated(make: Callable[[], Op], nbytes: float, bench: Bench) -> Op:
    """One call after the other, on operands that leave the cache between."""
    num = int(np.clip(math.ceil(2 * L2_BYTES / nbytes), 1, 16)) if bench.cuda else 1
    calls = itertools.cycle([make() for _ in range(num)])
    return lambda: next(calls)()


def fp8_op(kernel: str, m: int, n: int, k: int, bench: Bench) -> Op:
    """A product [m, k] x [k, n] in FP8, result in bf16."""
    rows = kernel == "rowwise"

    def make() -> Op:
        a_MK = torch.randn(m, k, device=bench.device).to(torch.float8_e4m3fn)
        b_NK = torch.randn(n, k, device=bench.device).to(torch.float8_e4m3fn)
        scale_a = torch.rand((m, 1) if rows else (), device=bench.device)
        scale_b = torch.rand((1, n) if rows else (), device=bench.device)
        return partial(
            torch._scaled_mm,
            a_MK,
            b_NK.t(),
            scale_a,
            scale_b,
            out_dtype=torch.bfloat16,
            use_fast_accum=kernel != "tensorwise_exact",
        )

    return rotated(make, m * k + n * k + 2 * m * n, bench)


def grouped_op(kind: str, groups: int, m: int, n: int, k: int, bench: Bench) -> Op:
    """Products of as many experts, whose tokens differ by some 20 %."""
    dtype, tokens = torch.bfloat16, k if kind == "wgrad" else m
    shares = np.exp(np.random.default_rng(groups).normal(0, 0.2, groups))
    ends = np.floor(np.cumsum(shares / shares.sum()) * tokens / 16).astype(np.int32) * 16
    ends[-1] = tokens
    offs = torch.tensor(ends, dtype=torch.int32, device=bench.device)

    def make() -> Op:
        if kind == "wgrad":
            a, b = (torch.randn(tokens, size, device=bench.device, dtype=dtype) for size in (m, n))
            return partial(torch._grouped_mm, a.t(), b, offs=offs)
        a_MK = torch.randn(m, k, device=bench.device, dtype=dtype)
        b_ENK = torch.randn(groups, n, k, device=bench.device, dtype=dtype)
        return partial(torch._grouped_mm, a_MK, b_ENK.transpose(1, 2), offs=offs)

    return rotated(make, 2 * (m * k + groups * n * k + m * n), bench)


def largest(x_N: Tensor) -> Tensor:
    """Largest magnitude, which a scale is made of."""
    return x_N.abs().max().float()


def cast(x_N: Tensor, scale: Tensor) -> Tensor:
    """To FP8."""
    return (x_N.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def cast_turned(x_MN: Tensor, scale: Tensor) -> Tensor:
    """To FP8, transposed."""
    return cast(x_MN, scale).t().contiguous()


def cast_rows(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    """To FP8 with a scale for each row."""
    scale = 448.0 / x_MN.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    return cast(x_MN, scale), scale


SWEEPS: Final = {
    "fp8_largest": 2,
    "fp8_cast": 3,
    "fp8_cast_turned": 3,
    "fp8_cast_rows": 3,
    "adamw_bf16": 7 * 2,
    "adamw_fp32": 7 * 4,
    "chunk_cat": 2 + 4,
    "split_copy": 2 * 2,
    **{kind: nbytes for kind, (nbytes, _) in CLAMPS.items()},
    "sink_gradient": 2 * 2,
}
"""Bytes that each reads and writes for an element: casts as Inductor makes them, PyTorch's fused AdamW with states of
each type, what FSDP does to gradients before they are scattered and to weights after they are gathered, halves of rows
clamped one by one and put together again, as Megatron-Core has gpt-oss's, and what cuDNN takes longer backward where
heads of 64 elements have sinks, for an element of outputs."""
CASTS: Final[dict[str, Callable[..., object]]] = {
    "fp8_largest": largest,
    "fp8_cast": cast,
    "fp8_cast_turned": cast_turned,
    "fp8_cast_rows": cast_rows,
}
WIDTH: Final = 4096
SINK_DIM: Final = 64
"""Elements of heads that have sinks."""
CAST_ROWS: Final = (672, 2688, 10752, 32256, 129024)
"""Rows of memory-bound kernels: multiples of ``TENSORS`` and of two chunks of seven weights."""


def sweep_op(kind: str, rows: int, bench: Bench) -> Op:
    """A memory-bound kernel on rows of `WIDTH` elements."""
    narrow = torch.bfloat16 if bench.cuda else torch.float32

    def make() -> Op:
        if kind in CASTS:
            x = torch.randn(rows, WIDTH, device=bench.device, dtype=narrow)
            scale = () if kind in ("fp8_largest", "fp8_cast_rows") else (torch.ones((), device=bench.device),)
            function = torch.compile(CASTS[kind], dynamic=False) if bench.cuda else CASTS[kind]  # once for a size
            return partial(function, x, *scale)
        if kind.startswith("clamped"):
            return clamp_op(rows, narrow, bench, backward=kind.endswith("bwd"))
        if kind.startswith("adamw"):
            return optimizer_step(rows, torch.float32 if kind.endswith("fp32") else narrow, bench)
        return shards_op(kind, rows, bench)

    return rotated(make, SWEEPS[kind] * rows * WIDTH, bench)


def clamp_op(rows: int, dtype: torch.dtype, bench: Bench, *, backward: bool) -> Op:
    """Halves of rows, each clamped, put together again; or autograd's kernels for that."""
    x_MN = torch.randn(rows, WIDTH, device=bench.device, dtype=dtype, requires_grad=backward)

    def clamped() -> Tensor:
        gate, up = x_MN.chunk(2, -1)
        return torch.cat((gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)), -1)

    if not backward:
        return clamped
    made, grad = clamped(), torch.randn(rows, WIDTH, device=bench.device, dtype=dtype)
    return lambda: torch.autograd.grad(made, x_MN, grad, retain_graph=True)


def optimizer_step(rows: int, dtype: torch.dtype, bench: Bench) -> Op:
    """PyTorch's fused AdamW on `TENSORS` weights."""
    each = max(1, rows // TENSORS)
    weights = [torch.nn.Parameter(torch.randn(each, WIDTH, device=bench.device, dtype=dtype)) for _ in range(TENSORS)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    optimizer.step()
    return optimizer.step


def shards_op(kind: str, rows: int, bench: Bench) -> Op:
    """FSDP's copies of seven weights on two GPUs: bf16 gradients into fp32 chunks, or gathered weights out."""
    each = max(2, rows // 7 // 2 * 2)
    sizes, narrow = [each] * 7, torch.bfloat16 if bench.cuda else torch.float32
    if kind == "chunk_cat":
        grads = [torch.randn(n, WIDTH, device=bench.device, dtype=narrow) for n in sizes]
        out = torch.empty(2, sum(sizes) * WIDTH // 2, device=bench.device)
        return lambda: torch._chunk_cat(grads, dim=0, num_chunks=2, out=out)
    whole = torch.randn(2, sum(sizes) * WIDTH // 2, device=bench.device, dtype=narrow)
    outs = [torch.empty(2, n * WIDTH // 2, device=bench.device, dtype=narrow) for n in sizes]
    parts = [n * WIDTH // 2 for n in sizes]
    return lambda: torch.split_with_sizes_copy(whole, parts, dim=1, out=outs)


def _samples(bench: Bench, make: Callable[[], Op]) -> list[float]:
    return bench.samples(make())


def measure_product(bench: Bench, m: int, n: int, k: int) -> None:
    """One shape in bf16 and with every kernel of FP8."""
    bench.point("gemm", lambda: bench.samples(gemm_op("forward", m, n, k, bench)), kind="forward", m=m, n=n, k=k)
    for kernel in KERNELS:
        bench.point(
            "gemm",
            partial(_samples, bench, partial(fp8_op, kernel, m, n, k, bench)),
            kind="forward",
            fp8=kernel,
            m=m,
            n=n,
            k=k,
        )


def measure_grouped(bench: Bench, kind: str, groups: int, m: int, n: int, k: int) -> None:
    """One product of experts."""
    bench.point(
        "gemm",
        lambda: bench.samples(grouped_op(kind, groups, m, n, k, bench)),
        kind=kind,
        groups=groups,
        m=m,
        n=n,
        k=k,
    )


def measure_thin(bench: Bench, kind: str, m: int, n: int, k: int) -> None:
    """One product of an adapter."""
    bench.point(
        "gemm", lambda: bench.samples(gemm_op(kind, m, n, k, bench)), kind=kind, thin=min(m, n, k), m=m, n=n, k=k
    )


def measure_sweep(bench: Bench, kind: str, rows: int) -> None:
    """One memory-bound kernel."""
    samples = sink_samples if kind == "sink_gradient" else sweep_samples
    variant, nbytes = "compiled" if kind in CASTS else "library", SWEEPS[kind] * rows * WIDTH
    if kind == "sink_gradient" and not find_spec("transformer_engine"):
        bench.writer.add("error", failed="layer_op", kind=kind, message="transformer_engine is not installed")
        return
    bench.point("layer_op", partial(samples, kind, rows, bench), kind=kind, variant=variant, width=WIDTH, nbytes=nbytes)


def sweep_samples(kind: str, rows: int, bench: Bench) -> list[float]:
    """Seconds of one kernel alone."""
    return bench.samples(sweep_op(kind, rows, bench))


def sink_samples(_kind: str, rows: int, bench: Bench) -> list[float]:
    """How much longer attention takes backward with sinks, in seconds."""
    long, short = (bench.samples(attention_back(rows, kind, bench)) for kind in ("learnable", "vanilla"))
    return [sample - float(np.median(short)) for sample in long]


def attention_back(rows: int, softmax: str, bench: Bench) -> Op:
    """Backward pass of cuDNN's attention as Transformer Engine calls it, sequences as short as kernels are quick at."""
    from transformer_engine.pytorch import DotProductAttention

    batch = max(1, rows // 1024)
    shape = batch, rows // batch, WIDTH // SINK_DIM, SINK_DIM
    attention = DotProductAttention(
        num_attention_heads=shape[2],
        kv_channels=SINK_DIM,
        attn_mask_type="causal",
        qkv_format="bshd",
        softmax_type=softmax,
    ).to(bench.device)
    q, k, v = (torch.randn(shape, device=bench.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = attention(q, k, v)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def grouped(rng: np.random.Generator) -> Iterator[Callable[[Bench], None]]:
    """Products of experts as published models have them, in random order."""
    pairs = ((4096, 14336), (2048, 1536), (2880, 5760), (7168, 2048), (1536, 2048), (5120, 8192))
    known = list(itertools.product(GROUPS, pairs, (4096, 16384, 65536), ("forward", "wgrad")))
    rng.shuffle(known)
    for groups, (inner, outer), tokens, kind in known:
        groups, inner, outer, tokens = (int(x) for x in (groups, inner, outer, tokens))
        m, n, k = (outer, inner, tokens) if kind == "wgrad" else (tokens, outer, inner)
        if 2 * m * n * k < MAX_FLOPS:
            yield partial(measure_grouped, kind=str(kind), groups=groups, m=m, n=n, k=k)


def thin(rng: np.random.Generator) -> Iterator[Callable[[Bench], None]]:
    """Both products of an adapter and their gradients."""
    known = list(itertools.product(THIN, (2048, 8192, 32768), (4096, 8192, 14336, 28672)))
    rng.shuffle(known)
    for rank, tokens, width in known:
        rank, tokens, width = int(rank), int(tokens), int(width)
        yield partial(measure_thin, kind="forward", m=tokens, n=rank, k=width)
        yield partial(measure_thin, kind="forward", m=tokens, n=width, k=rank)
        yield partial(measure_thin, kind="wgrad", m=rank, n=width, k=tokens)


def sweeps(rng: np.random.Generator) -> Iterator[Callable[[Bench], None]]:
    """Memory-bound kernels of some sizes."""
    known = list(itertools.product(SWEEPS, CAST_ROWS))
    rng.shuffle(known)
    for kind, rows in known:
        yield partial(measure_sweep, kind=str(kind), rows=int(rows))


def products(rng: np.random.Generator) -> Iterator[Callable[[Bench], None]]:
    """Products in bf16 and FP8."""
    for m, n, k in shapes(rng):
        yield partial(measure_product, m=m, n=n, k=k)


SHARES: Final = {"products": 0.55, "grouped": 0.2, "sweeps": 0.15, "thin": 0.1}
"""Of the time."""


def run(bench: Bench, seed: int, deadline: float, only: str | None = None) -> None:
    """Measures until the deadline, every kind (or one alone) for its share of the time."""
    makers = {"products": products, "grouped": grouped, "sweeps": sweeps, "thin": thin}
    sources = {
        name: make(np.random.default_rng((seed, i)))
        for i, (name, make) in enumerate(makers.items())
        if only in (None, name)
    }
    spent = dict.fromkeys(sources, 0.0)
    while sources and time.monotonic() < deadline:
        name = min(sources, key=lambda one: spent[one] / SHARES[one])
        task = next(sources[name], None)
        if task is None:
            del sources[name]
            continue
        before = time.monotonic()
        task(bench)
        spent[name] += time.monotonic() - before


def try_out(bench: Bench) -> None:
    """A few tiny sizes."""
    measure_product(bench, 64, 64, 64)
    measure_grouped(bench, "forward", 2, 64, 64, 64)
    measure_grouped(bench, "wgrad", 2, 64, 64, 64)
    measure_thin(bench, "wgrad", 16, 64, 64)
    for kind in SWEEPS:
        measure_sweep(bench, kind, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SHARES, help="one kind of them alone")
    parser.add_argument("--cpu", action="store_true", help="a few tiny sizes, to try the script")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch._dynamo.config.cache_size_limit = 256
    command = f"python -m cpsim.real.measure.products --minutes {args.minutes:g} --seed {args.seed}"
    command += f" --only {args.only}" if args.only else ""
    header = provenance(device, 1, {}, command, args.commit)
    with benched(args.out, header, device, started) as bench:
        if cuda:
            run(bench, args.seed, started + 60 * args.minutes, args.only)
        else:
            try_out(bench)


if __name__ == "__main__":
    main()
