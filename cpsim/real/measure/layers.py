"""Measures what transformer layers consist of besides attention, on one GPU and under sustained load.

    python -m cpsim.real.measure.layers --minutes 5 --out h200-layers.jsonl
    python -m cpsim.real.measure.layers --minutes 3 --out h200-layers.jsonl --resume

Matrix products of linear layers by shape, memory-bound ops by kind and size, and whole layers: their time, what they
keep for the backward pass and their peak memory. Points come in random order, the three kinds in turns by their share
of the time; `--resume` goes on with a file and skips what it holds. Layers are for validation only, fits do not read
them. On a CPU, or with `--cpu`, it runs a few tiny sizes, to try the script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from cpsim.calibrate.measurement import Writer, check_machine, cut_broken_end, known_points, point_key
from cpsim.case.model import MODELS, Model
from cpsim.real.measure.kernels import L2_BYTES, Bench, peak_bytes
from cpsim.real.run import attention, layer_calls, layer_ops
from cpsim.real.run.layer import RECOMPUTE, Layer
from cpsim.real.run.timing import provenance
from cpsim.schedule.transformer import AFTER, BEFORE, PRODUCTS, LayerOp
from cpsim.strategies.steps.layer import weights, widths

TINY = Model(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=96)
TPS = (1, 2, 4, 8)
MAX_FLOPS, MAX_BYTES = 2e13, 3e9
"""Largest product and largest traffic of an op."""
COMPILED_BYTES = 1e9
"""Traffic of the call that an op is compiled for."""
SHARES = {"gemm": 0.5, "layer_op": 0.38, "layer": 0.12}
"""Shares of the time."""
LAYERS = (
    ("llama3-8b", 1, 8192),
    ("llama-34b", 8, 65536),
    ("llama3-8b", 8, 65536),
    ("llama3-70b", 4, 16384),
    ("llama-34b", 2, 16384),
    ("llama3-70b", 8, 32768),
    ("llama3-8b", 1, 32768),
    ("llama3-8b", 2, 4096),
)
"""Model, tensor-parallel ranks and tokens."""
IN_PLACE_POINTS = 90
DOCUMENT = 8192
"""Tokens of every document of a layer, where it has as many."""


@dataclass(frozen=True, slots=True)
class Task:
    """One point to measure."""

    op: str
    parameters: dict[str, object]
    measure: Callable[[Bench], None]

    @property
    def key(self) -> str:
        """What the file calls it."""
        return point_key(self.op, **self.parameters)


def gemm_op(kind: str, m: int, n: int, k: int, bench: Bench) -> Callable[[], object]:
    """The product as a linear layer's forward or backward pass makes it; inputs rotate past the cache.

    Weights are [output, input]: forward x W^T, input gradient dy W, weight gradient dy^T x.
    """
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    shapes = {"forward": ((m, k), (n, k)), "dgrad": ((m, k), (k, n)), "wgrad": ((k, m), (k, n))}[kind]
    num_sets = int(np.clip(math.ceil(2 * L2_BYTES / (2 * (m * k + n * k + m * n))), 1, 16)) if bench.cuda else 1
    made = [[torch.randn(shape, device=bench.device, dtype=dtype) for shape in shapes] for _ in range(num_sets)]
    outs = [torch.empty(m, n, device=bench.device, dtype=dtype) for _ in range(num_sets)]
    sets = itertools.cycle(zip(made, outs, strict=True))

    def op() -> None:
        (a, b), out = next(sets)
        torch.mm(a.T if kind == "wgrad" else a, b.T if kind == "forward" else b, out=out)

    return op


def gemm_shapes(models: Sequence[Model], tokens: Sequence[int], rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """(tokens, input, output) of the models' linear layers in random order, every third one a random shape."""
    linears = [m.linears(tp).values() for m, tp in itertools.product(models, TPS if len(models) > 1 else (1,))]
    heads = [(m.hidden, m.vocab // tp) for m, tp in itertools.product(models, TPS if len(models) > 1 else (1,))]
    pairs = sorted({*itertools.chain(*linears), *heads})
    known = [(t, *pair) for t, pair in itertools.product(tokens, pairs)]
    rng.shuffle(known)
    top = max(max(pair) for pair in pairs)
    for i, shape in enumerate(known):
        yield tuple(map(int, shape))
        if i % 2:
            low, step = (256, 64) if top > 1000 else (8, 8)
            drawn = np.exp(rng.uniform(np.log(low), np.log((tokens[-1], min(top, 32768), min(top, 32768)))))
            yield tuple(int(x) // step * step for x in drawn)


def gemms(models: Sequence[Model], tokens: Sequence[int], rng: np.random.Generator) -> Iterator[Task]:
    """The three products of each linear layer."""
    for num_tokens, inner, outer in gemm_shapes(models, tokens, rng):
        if 2 * num_tokens * inner * outer > MAX_FLOPS:
            continue
        sizes = {
            "forward": (num_tokens, outer, inner),
            "dgrad": (num_tokens, inner, outer),
            "wgrad": (outer, inner, num_tokens),
        }
        for kind, (m, n, k) in sizes.items():
            parameters: dict[str, object] = {"kind": kind, "m": m, "n": n, "k": k}
            yield Task("gemm", parameters, partial(measure_gemm, kind=kind, m=m, n=n, k=k))


def measure_gemm(bench: Bench, *, kind: str, m: int, n: int, k: int) -> None:
    bench.point("gemm", lambda: bench.samples(gemm_op(kind, m, n, k, bench)), kind=kind, m=m, n=n, k=k)


def op_inputs(kind: str, rows: int, width: int, vocab: int, bench: Bench) -> tuple[torch.Tensor, ...]:
    """Random inputs of an op of `layer_ops`."""
    narrow = torch.bfloat16 if bench.cuda else torch.float32

    def make(*shape: int, dtype: torch.dtype = narrow) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device, dtype=dtype)

    def words(most: int) -> torch.Tensor:
        return torch.randint(most, (rows,), device=bench.device)

    wide = partial(make, dtype=torch.float32)
    match kind:
        case "rms_norm":
            return make(rows, width), make(width)
        case "rms_norm_bwd":
            return make(rows, width), make(rows, width), make(width)
        case "rotary":
            dim = min(128, width)
            return make(rows, width // dim, dim), wide(rows, dim // 2), wide(rows, dim // 2)
        case "swiglu":
            return (make(rows, 2 * width),)
        case "swiglu_bwd":
            return make(rows, width), make(rows, 2 * width)
        case "add":
            return make(rows, width), make(rows, width)
        case "cross_entropy":
            return make(rows, width), words(width)
        case "cross_entropy_bwd":
            return make(rows, width), words(width), wide(rows)
        case "embedding":
            return make(vocab, width), words(vocab)
        case "embedding_bwd":
            return make(rows, width), words(vocab), make(vocab, width)
        case "adam":
            return wide(rows), make(rows), wide(rows), wide(rows), wide(rows).abs()
        case "norm":
            return (wide(rows),)
    raise ValueError(kind)


def op_widths(models: Sequence[Model]) -> dict[str, tuple[int, ...]]:
    """Elements of a row of each op: few, because code is compiled for each."""
    hidden = tuple(sorted({m.hidden for m in models}))
    heads = tuple(sorted({m.heads * m.head_dim // tp for m in models for tp in ((1, 8) if len(models) > 1 else (1,))}))
    inner = tuple(sorted({m.ffn // tp for m in models for tp in ((1, 8) if len(models) > 1 else (1,))}))
    most = max(m.vocab for m in models)
    vocab = most // 8, most
    return {
        "rms_norm": hidden,
        "rms_norm_bwd": hidden,
        "rotary": heads[:: max(1, len(heads) - 1)],
        "add": hidden[:1],
        "swiglu": inner[::2],
        "swiglu_bwd": inner[::2],
        "cross_entropy": vocab,
        "cross_entropy_bwd": vocab,
        "embedding": hidden,
        "embedding_bwd": hidden,
        "adam": (1,),
        "norm": (1,),
    }


def ops(models: Sequence[Model], most: float, rng: np.random.Generator, cuda: bool) -> Iterator[Task]:
    """Memory-bound ops of 1 MB of traffic and more in random order; nine of ten compiled, which libraries are not."""
    widths = op_widths(models)
    while True:
        kinds = [*widths]
        rng.shuffle(kinds)
        for kind in kinds:
            width = int(rng.choice(widths[kind]))
            vocab = max(m.vocab for m in models) // 8 if kind.startswith("embedding") else 0
            each, fixed = layer_ops.nbytes(kind, 1, width), layer_ops.nbytes(kind, 0, width, vocab)
            size = math.exp(rng.uniform(math.log(min(1e6, most / 30)), math.log(most)))
            rows = max(1, round(size / each))
            rows = rows if kind in ("adam", "norm") else min(max(rows // 64 * 64, 64), 2**17)
            variant = "eager" if not cuda or (kind not in layer_ops.LIBRARY and rng.random() < 0.1) else "compiled"
            variant = "library" if kind in layer_ops.LIBRARY else variant
            parameters = {"kind": kind, "variant": variant, "width": width, "nbytes": each * rows + fixed}
            measure = partial(measure_op, kind=kind, variant=variant, rows=rows, width=width, vocab=vocab)
            yield Task("layer_op", parameters, measure)


def mark_dynamic(tensors: Iterable[torch.Tensor], rows: int) -> None:
    """Lets code be compiled for any number of rows."""
    for x in tensors:
        if x.dim() and x.shape[0] == rows:
            torch._dynamo.maybe_mark_dynamic(x, 0)


@cache
def compiled_op(kind: str, width: int, vocab: int, bench: Bench) -> Callable[..., object]:
    """The op compiled for a width and for as many rows as training has: the first ones that code of a reduction meets
    decide how it is split, and code made for few of them takes twice to three times as long for many."""
    f, rows = layer_ops.compiled(kind), round(COMPILED_BYTES / layer_ops.nbytes(kind, 1, width))
    inputs = op_inputs(kind, rows, width, vocab, bench)
    mark_dynamic(inputs, rows)
    f(*inputs)
    return f


def measure_op(bench: Bench, *, kind: str, variant: str, rows: int, width: int, vocab: int) -> None:
    """One op; inputs rotate past the cache."""
    nbytes = layer_ops.nbytes(kind, rows, width, vocab)
    f = compiled_op(kind, width, vocab, bench) if variant == "compiled" else layer_ops.OPS[kind]

    def measure() -> list[float]:
        num_sets = int(np.clip(math.ceil(2 * L2_BYTES / nbytes), 1, 16)) if bench.cuda else 1
        made = [op_inputs(kind, rows, width, vocab, bench) for _ in range(num_sets)]
        if variant == "compiled":
            mark_dynamic(itertools.chain(*made), rows)
        sets = itertools.cycle(made)
        return bench.samples(lambda: f(*next(sets)))

    bench.point("layer_op", measure, kind=kind, variant=variant, width=width, nbytes=nbytes)


def calls(model: Model, most: float, rng: np.random.Generator) -> Iterator[Task]:
    """Memory-bound ops as the executor runs them, of a layer on one GPU, in random order of sizes."""
    kinds = {op.kind: op for side in (BEFORE, AFTER) for ops in side.values() for op in ops if op.kind not in PRODUCTS}
    while True:
        for kind, op in kinds.items():
            heads = model.heads + 2 * model.kv_heads if kind == "rotary" else widths(model)[op.writes[0]]
            width = heads * model.head_dim
            each = op.nbytes(width)
            rows = max(64, round(math.exp(rng.uniform(math.log(most / 300), math.log(most))) / each) // 64 * 64)
            parameters = {"kind": f"{kind} in place", "variant": "in place", "width": width, "nbytes": each * rows}
            measure = partial(measure_call, model=model, op=op, rows=rows, parameters=parameters)
            yield Task("layer_op", parameters, measure)


def measure_call(bench: Bench, *, model: Model, op: LayerOp, rows: int, parameters: dict[str, object]) -> None:
    """One op on matrices of their own; inputs rotate past the cache."""
    dtype, nbytes = torch.bfloat16 if bench.cuda else torch.float32, int(str(parameters["nbytes"]))

    def matrix(name: str) -> torch.Tensor:
        if name.removeprefix("d") in weights(model):
            return torch.randn(1, model.hidden, device=bench.device, dtype=dtype)
        width = widths(model)[name] * model.head_dim * (2 if name in ("kv", "dkv") else 1)
        return torch.randn(rows, width, device=bench.device, dtype=dtype)

    def make() -> Callable[[], object]:
        given, made = ([matrix(name) for name in names] for names in (op.reads, op.writes))
        if op.kind != "rotary":
            return layer_calls.lower(op.kind, given, made, adds=False)
        angles = layer_calls.angles(torch.arange(rows, device=bench.device, dtype=torch.float32), model.head_dim)
        return layer_calls.rotary(given, made, angles, model.kv_heads)

    def measure() -> list[float]:
        num_sets = int(np.clip(math.ceil(2 * L2_BYTES / nbytes), 1, 16)) if bench.cuda else 1
        sets = itertools.cycle([make() for _ in range(num_sets)])
        return bench.samples(lambda: next(sets)())

    bench.point("layer_op", measure, **parameters)


def layers(cases: Sequence[tuple[str, Model, int, int]], kernels: Sequence[str], variant: str) -> Iterator[Task]:
    """Whole layers with every kind of recomputation."""
    for (name, model, tp, tokens), recompute in itertools.product(cases, RECOMPUTE):
        lens = (DOCUMENT,) * (tokens // DOCUMENT) or (tokens,)
        for kernel in kernels:
            parameters = {
                "model": name,
                "tp": tp,
                "q_lens": list(lens),
                "kernel": kernel,
                "recompute": recompute,
                "variant": variant,
            }
            yield Task("layer", parameters, partial(measure_layer, model=model, lens=lens, parameters=parameters))


def measure_layer(bench: Bench, *, model: Model, lens: tuple[int, ...], parameters: dict[str, object]) -> None:
    """Seconds of both passes of a layer together, bytes kept between them and at the peak.

    Input, output and gradients of weights (bf16) count; weights and the gradient of the output do not.
    """
    tp, tokens, recompute = int(str(parameters["tp"])), sum(lens), str(parameters["recompute"])
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    sizes: dict[str, int] = {}

    def measure() -> list[float]:
        layer = Layer(
            model,
            tp,
            bench.device,
            dtype,
            kernel=str(parameters["kernel"]),
            compiled=parameters["variant"] == "compiled",
        )
        call = attention.prepare(lens, lens, causal=True, device=bench.device)
        angle = torch.randn(tokens, model.head_dim // 2, device=bench.device)
        angles = angle.cos(), angle.sin()
        shape = tokens // tp, model.hidden
        dout = torch.randn(shape, device=bench.device, dtype=dtype)

        def run() -> None:
            x = torch.randn(shape, device=bench.device, dtype=dtype, requires_grad=True)
            out = layer(x, call, angles, recompute)
            if bench.cuda:
                sizes.setdefault("saved_bytes", torch.cuda.memory_allocated(bench.device) - before)
            torch.autograd.grad(out, [x, *layer.weights()], dout)

        before = torch.cuda.memory_allocated(bench.device) if bench.cuda else 0
        run()  # compiles
        sizes.clear()
        before = torch.cuda.memory_allocated(bench.device) if bench.cuda else 0
        if bench.cuda:
            sizes["peak_bytes"] = peak_bytes(run, bench.device)
        return bench.samples(run)

    bench.point("layer", measure, **parameters, sizes=sizes, **asdict(model))


def run(bench: Bench, sources: dict[str, Iterator[Task]], known: set[str], deadline: float) -> dict[str, int]:
    """Measures tasks until the deadline or until all are done, every kind for its share of the time."""
    spent, counts = dict.fromkeys(sources, 1e-9), dict.fromkeys(sources, 0)
    while sources and time.monotonic() < deadline:
        kind = min(sources, key=lambda k: spent[k] / SHARES[k])
        task = next((task for task in sources[kind] if task.key not in known), None)
        if task is None:
            del sources[kind]
            continue
        known.add(task.key)
        before = time.monotonic()
        task.measure(bench)
        spent[kind] += time.monotonic() - before
        counts[kind] += 1
    return counts


def tasks(
    device: torch.device, seed: int, kernels: Sequence[str], known: int, *, in_place: bool = False
) -> dict[str, Iterator[Task]]:
    """All points of a GPU, or a few tiny ones; ``in_place``: only those of the executor's own kernels."""
    rng = [np.random.default_rng((seed, known, i)) for i in range(2)]
    if in_place and device.type == "cuda":
        return {"layer_op": itertools.islice(calls(MODELS["llama3-8b"], MAX_BYTES, rng[0]), IN_PLACE_POINTS)}
    if in_place:
        return {"layer_op": itertools.islice(calls(TINY, 1e6, rng[0]), 6)}
    if device.type == "cuda":
        models = [model for model in MODELS.values() if not (model.experts or model.recurrent)]
        tokens = tuple(1024 * 2**i for i in range(7))
        cases = [(name, MODELS[name], tp, tokens) for name, tp, tokens in LAYERS]
        return {
            "gemm": gemms(models, tokens, rng[0]),
            "layer_op": ops(models, MAX_BYTES, rng[1], True),
            "layer": layers(cases, kernels, "compiled"),
        }
    small = [("tiny", TINY, tp, 48) for tp in (1, 2)]
    return {
        "gemm": itertools.islice(gemms([TINY], (16, 32), rng[0]), 9),
        "layer_op": itertools.islice(ops([TINY], 1e6, rng[1], False), 12),
        "layer": layers(small, kernels, "eager"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", default="sdpa_flash", help="attention of whole layers")
    parser.add_argument("--resume", action="store_true", help="go on with the file")
    parser.add_argument("--cpu", action="store_true", help="a few tiny sizes, to try the script")
    parser.add_argument("--in-place", action="store_true", help="the executor's own memory-bound kernels, nothing else")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", args.gpu) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch._dynamo.config.cache_size_limit = 64
    kernels = args.kernels.split(",") if cuda else ["math"]
    command = (
        f"python -m cpsim.real.measure.layers --minutes {args.minutes:g} --seed {args.seed} --kernels {args.kernels}"
    )
    command += " --in-place" if args.in_place else ""
    header = provenance(device, 1, {k: attention.kernel_version(k) for k in kernels}, command, args.commit)
    begun = args.resume and args.out.exists() and args.out.stat().st_size > 0
    if begun:
        cut_broken_end(args.out)
        check_machine(args.out, header["gpu"], 1)
    known = known_points(args.out) if begun else set()
    print(json.dumps(header))
    with args.out.open("a" if begun else "w", encoding="utf-8") as file:
        bench = Bench(Writer(file, None if begun else header), device)
        sources = tasks(device, args.seed, kernels, len(known), in_place=args.in_place)
        counts = run(bench, sources, known, started + 60 * args.minutes)
        bench.writer.add("end", [time.monotonic() - started], clock=bench.clock.read())
    print("points:", counts)
    for message, count in bench.errors.items():
        print(f"error x{count}: {message}")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
