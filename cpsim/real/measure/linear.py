"""Measures layers with a state instead of keys: chunked scans, short convolutions and gated norms, both passes apart.

    python -m cpsim.real.measure.linear --seconds 100 --out h100-linear.jsonl

Needs flash-linear-attention's kernels (package `fla-core`) and the Triton part of `mamba-ssm`; what is missing is left
out. Scans are points `op: linear`: `gated_delta` and `kda` of fla, `mamba2` of mamba-ssm, with and without states
before and after, which context parallelism needs, and of several sequences. The rest are points `op: layer_op` of kinds
`short_conv`, `gated_norm`, `grouped_norm` and their gradients.

Triton compiles every configuration that a kernel may choose among, which takes minutes: kernels choose among ``FEW`` of
their configurations here, other processes compile, and families of shapes are measured as they get ready, until the
time is over. Small calls are compared with the recurrence in fp32: points `op: check`. On a CPU, or with `--cpu`, the
recurrence itself runs on a few tiny sizes, to try the script.

flash-linear-attention refuses gradients of gated rules with Triton 3.4 to 3.7.0 on Hopper, whose values can be wrong
there (its issue 640). They are timed all the same; checks say how wrong they are.

Legend of tensor suffixes: T tokens, H value heads, G key heads, K key dimensions, V value dimensions, C channels.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cpsim.models import recurrent
from cpsim.real.measure.kernels import Bench, benched
from cpsim.real.measure.products import rotated
from cpsim.real.run.recurrent import recurrence
from cpsim.real.run.timing import provenance

Op = Callable[[], object]
WIDTH: Final = 4
"""Tokens that a short convolution sees."""
TOKENS: Final = (8192, 1024, 65536, 32768, 2048, 16384, 131072, 4096)
FEW: Final = 3
"""Configurations that a kernel chooses among: those nearest to 4 warps and 3 stages; one of norms, which are compiled
anew for every number of rows (``NB``)."""
COMPILED: Final = 2048
"""Tokens of calls that only compile: arguments are then as divisible as those of longer ones."""
THREADS: Final = 6
"""That compile, of a process."""
TUNING_MS: Final = (3, 12)
"""Milliseconds of warm-up and of repetitions of every configuration that Triton chooses among."""
MAX_BYTES: Final = 55e9
"""Of what a call of both passes keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan(recurrent.Scan):
    """A scan of one layer over packed sequences."""

    lens: tuple[int, ...]
    """Tokens of the sequences."""
    states: bool = False
    """Whether a state comes in and one goes out, and gradients of both."""

    def parameters(self) -> dict[str, Any]:
        """Of a point."""
        found = asdict(self)
        lens, states = found.pop("lens"), found.pop("states")
        return {**found, "q_lens": list(lens), "states": states}

    def kept_bytes(self) -> float:
        """Rough bytes of both passes: tensors of tokens, and states of chunks in 4 bytes with their gradients."""
        tokens, wide = sum(self.lens), self.key_dim + self.value_dim
        chunks = self.key_dim * self.value_dim / self.chunk
        return 2.0 * tokens * self.value_heads * (12 * wide + 6 * chunks)


def _family(kernel: str, key_heads: int, value_heads: int, key_dim: int, value_dim: int, chunk: int = 64) -> Scan:
    return Scan(
        kernel=kernel,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        chunk=chunk,
        lens=(256,),
    )


QWEN3_NEXT: Final = _family("gated_delta", 16, 32, 128, 128)
NEMOTRON_H: Final = _family("mamba2", 8, 128, 128, 64, 128)
KIMI: Final = _family("kda", 32, 32, 128, 128)
FAMILIES: Final = (
    QWEN3_NEXT,
    NEMOTRON_H,
    _family("gated_delta", 2, 4, 128, 128),
    _family("mamba2", 1, 16, 128, 64, 128),
    _family("gated_delta", 8, 16, 128, 128),
    _family("mamba2", 8, 64, 128, 64, 128),  # Nemotron 3 Nano
    KIMI,
)
"""Whole layers of published models and shares of tensor-parallel ranks, in order of importance."""
SMALL: Final = FAMILIES[2:4]


def shapes(family: Scan) -> Iterator[Scan]:
    """Scans of a family, the most telling first."""
    for tokens in TOKENS if family in FAMILIES[:2] else TOKENS[:6]:
        yield replace(family, lens=(tokens,))


def packed(family: Scan) -> Iterator[Scan]:
    """Scans of several sequences, alike or not."""
    for tokens in (32768, 8192):
        yield replace(family, lens=(tokens // 8,) * 8)
        yield replace(family, lens=(tokens // 2, *(tokens // 32,) * 8, *(tokens // 128,) * 32))


def random(*sizes: int, device: torch.device, scale: float = 1.0) -> Tensor:
    """Random inputs whose gradients are asked for."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    return (torch.randn(*sizes, device=device) * scale).to(dtype).requires_grad_()


def inputs(scan: Scan, device: torch.device) -> dict[str, Tensor]:
    """Random inputs of a scan by name, and the parameters that go with them."""
    make, tokens, heads = partial(random, device=device), sum(scan.lens), scan.value_heads
    x = {
        "q": make(1, tokens, scan.key_heads, scan.key_dim),
        "k": make(1, tokens, scan.key_heads, scan.key_dim),
        "v": make(1, tokens, heads, scan.value_dim),
        "gate": make(1, tokens, heads, *([scan.key_dim] if scan.kernel == "kda" else [])),
        "log_a": torch.rand(heads, device=device).requires_grad_(),
        "bias": torch.rand(heads * (scan.key_dim if scan.kernel == "kda" else 1), device=device).requires_grad_(),
    }
    if scan.kernel == "mamba2":
        x["d"] = torch.ones(heads, device=device).requires_grad_()
    else:
        x["beta"] = make(1, tokens, heads)
    if scan.states:
        dims = (scan.value_dim, scan.key_dim) if scan.kernel == "mamba2" else (scan.key_dim, scan.value_dim)
        x["state"] = (torch.randn(len(scan.lens), heads, *dims, device=device) * 0.1).requires_grad_()
    return x


def by_token(scan: Scan, x: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """A scan by its recurrence, in the precision of its inputs."""
    shape = x["gate"].shape[1:]
    rate = x["gate"].float() if x["gate"].dtype == torch.bfloat16 else x["gate"]
    width = (shape[1], shape[2] if len(shape) == 3 else 1)
    step = F.softplus(rate[0].reshape(-1, *width) + x["bias"].reshape(width))
    decay = -x["log_a"].exp()[:, None] * step
    q, k, v = (x[name][0].to(rate.dtype) for name in "qkv")
    if scan.kernel == "mamba2":
        made, strength = (q, k, step * v, decay), None
    else:
        q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        made, strength = (q * scan.key_dim**-0.5, k, v, decay), torch.sigmoid(x["beta"][0].to(rate.dtype))
    outs, start = [], 0
    for length in scan.lens:
        part = slice(start, start + length)
        q, k, x_THV, log_decay = (y[part] for y in made)
        out, _ = recurrence(q, k, x_THV, log_decay, None if strength is None else strength[part])
        outs.append(out + x["d"][:, None] * v[part] if scan.kernel == "mamba2" else out)
        start += length
    return (torch.cat(outs)[None],)


def by_chunk(scan: Scan, x: Mapping[str, Tensor], documents: Tensor | None) -> tuple[Tensor, ...]:
    """A scan by its kernel: outputs, and the last state where states are asked for.

    Args:
        scan, x: what to compute.
        documents: ends of sequences from 0 on (fla) or the number of each token's sequence (mamba-ssm).
    """
    if scan.kernel == "mamba2":
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        made = mamba_chunk_scan_combined(
            x["v"],
            x["gate"],
            -x["log_a"].exp(),
            x["k"],
            x["q"],
            scan.chunk,
            D=x["d"],
            dt_bias=x["bias"],
            dt_softplus=True,
            initial_states=x.get("state"),
            seq_idx=documents,
            return_final_states=scan.states,
        )
        return made if scan.states else (made,)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    out, state = (chunk_kda if scan.kernel == "kda" else chunk_gated_delta_rule)(
        x["q"],
        x["k"],
        x["v"],
        x["gate"],
        x["beta"],
        initial_state=x.get("state"),
        output_final_state=scan.states,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=False,
        A_log=x["log_a"],
        dt_bias=x["bias"],
        cu_seqlens=documents,
    )
    return (out, state) if scan.states else (out,)


def documents_of(scan: Scan, device: torch.device) -> Tensor | None:
    """What tells a kernel of several sequences."""
    if len(scan.lens) == 1:
        return None
    lens = torch.tensor(scan.lens, device=device)
    if scan.kernel == "mamba2":
        return torch.repeat_interleave(torch.arange(len(lens), device=device), lens)[None].int()
    return F.pad(lens.cumsum(0), (1, 0))


def both_passes(scan: Scan, device: torch.device) -> tuple[Op, Callable[[], Op]]:
    """A call of the forward pass, and what makes one of the backward pass."""
    x, documents = inputs(scan, device), documents_of(scan, device)
    forward = partial(by_chunk, scan, x, documents) if device.type == "cuda" else partial(by_token, scan, x)
    return forward, partial(gradients, forward, list(x.values()))


def gradients(forward: Callable[[], tuple[Tensor, ...]], wanted: list[Tensor]) -> Op:
    """A call of the backward pass alone; it can be repeated."""
    outs = forward()
    given = [torch.randn_like(out) for out in outs]
    return lambda: torch.autograd.grad(outs, wanted, given, retain_graph=True, allow_unused=True)


def measure_scan(bench: Bench, scan: Scan) -> None:
    """Both passes of one scan."""
    passes: list[Any] = []

    def forward() -> list[float]:
        passes[:] = both_passes(scan, bench.device)
        return bench.samples(passes[0])

    bench.point("linear", forward, **{"pass": "fwd"}, **scan.parameters())
    if passes:
        bench.point("linear", lambda: bench.samples(passes[1]()), **{"pass": "bwd"}, **scan.parameters())
    del passes[:]
    if bench.cuda:
        torch.cuda.empty_cache()


def sweep_calls(kind: str, width: int, rows: int, device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """A memory-bound kernel with what its gradients are of."""
    make = partial(random, device=device)
    if kind == "short_conv":
        x_TC, weight_CW = make(1, rows, width), make(width, WIDTH)
        if device.type != "cuda":
            padded = F.pad(x_TC.mT, (WIDTH - 1, 0))
            return lambda: F.silu(F.conv1d(padded, weight_CW[:, None], groups=width)).mT, [x_TC, weight_CW]
        from fla.modules.causal_conv1d.ops import causal_conv1d

        return lambda: causal_conv1d(x_TC, weight_CW, activation="silu")[0], [x_TC, weight_CW]
    group = 128 if kind == "gated_norm" else min(1024, width)
    x_TC, gate_TC = make(rows, width), make(rows, width)
    weight_C = make(group if kind == "gated_norm" else width)
    wanted = [x_TC, gate_TC, weight_C]
    if device.type != "cuda":
        return lambda: F.rms_norm(x_TC.view(-1, group), (group,)).view(rows, width) * F.silu(gate_TC), wanted
    if kind == "gated_norm":
        from fla.modules.norm.fused_norm_gate import rms_norm_gated

        return lambda: rms_norm_gated(x_TC.view(-1, group), gate_TC.view(-1, group), weight_C, None), wanted
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    return lambda: rmsnorm_fn(x_TC, weight_C, None, z=gate_TC, group_size=group, norm_before_gate=False), wanted


SWEEPS: Final = {"short_conv": (4, 6), "gated_norm": (6, 10), "grouped_norm": (6, 10)}
"""Bytes that each reads and writes for an element, forward and backward."""
WIDTHS: Final = {"short_conv": (8192, 1024), "gated_norm": (4096,), "grouped_norm": (8192,)}
ELEMENTS: Final = (2**26, 2**23, 2**29, 2**21)


def measure_sweep(bench: Bench, kind: str, width: int, elements: int) -> None:
    """Both passes of a memory-bound kernel."""
    rows = max(4, elements // width)
    for i, name in enumerate((kind, f"{kind}_bwd")):
        nbytes = SWEEPS[kind][i] * rows * width

        def make(backward: bool) -> Op:
            forward, wanted = sweep_calls(kind, width, rows, bench.device)
            if not backward:
                return forward
            return gradients(lambda: (forward(),), wanted)

        samples = partial(
            lambda make, nbytes: bench.samples(rotated(make, nbytes, bench)), partial(make, i > 0), nbytes
        )
        bench.point("layer_op", samples, kind=name, variant="library", width=width, nbytes=nbytes)


def check(bench: Bench, scan: Scan) -> None:
    """Relative errors of a kernel, outputs and gradients, against the recurrence in fp32; 0 on a CPU."""
    torch.manual_seed(0)
    x = inputs(scan, bench.device)
    with torch.no_grad():
        for name in "qk":  # as an activation and a norm leave them
            x[name].mul_(0.3)
    documents = documents_of(scan, bench.device)
    outs = [by_chunk(scan, x, documents) if bench.cuda else by_token(scan, x), by_token(scan, x)]
    given = torch.randn_like(outs[1][0])
    grads = [torch.autograd.grad(out, list(x.values()), given.to(out.dtype), retain_graph=True) for (out,) in outs]
    pairs = [(outs[0][0], outs[1][0]), *zip(*grads, strict=True)]
    errors = [float(((a.double() - b.double()).norm() / b.double().norm()).detach()) for a, b in pairs]
    bench.writer.add("check", relative_errors=errors, names=["out", *x], **scan.parameters())


@dataclass(frozen=True, slots=True)
class Family:
    """What is compiled together."""

    small: Scan | tuple[str, int]
    """A scan of few tokens, or a memory-bound kernel and its width."""
    measures: tuple[Callable[[Bench], None], ...]


def families() -> list[Family]:
    """All there is to measure."""
    found = [
        Family(
            (kind, width),
            tuple(partial(measure_sweep, kind=kind, width=width, elements=elements) for elements in ELEMENTS),
        )
        for kind, widths in WIDTHS.items()
        for width in widths
    ]
    for i, family in enumerate(FAMILIES):
        checks = (partial(check, scan=family),) if family in SMALL else ()
        fit = [scan for scan in shapes(family) if scan.kept_bytes() < MAX_BYTES]
        found.insert(
            2 * i,
            Family(replace(family, lens=(COMPILED,)), (*checks, *(partial(measure_scan, scan=scan) for scan in fit))),
        )
    for family in (QWEN3_NEXT, NEMOTRON_H):
        scans = tuple(partial(measure_scan, scan=scan) for scan in packed(family))
        found.insert(4, Family(replace(family, lens=(COMPILED // 2,) * 2), scans))
    return found


def run(bench: Bench, every: list[Family], compiled: Callable[[int], bool], deadline: float) -> None:
    """Measures what is compiled, family by family in turns, until the deadline."""
    left = {i: list(family.measures) for i, family in enumerate(every)}
    while left and time.monotonic() < deadline:
        ready = [i for i in left if compiled(i)]
        if not ready:
            time.sleep(0.2)
        for i in ready:
            if time.monotonic() > deadline:
                return
            try:
                left[i].pop(0)(bench)
            except Exception as error:  # a failing case never stops the others
                message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                bench.errors[message] = bench.errors.get(message, 0) + 1
                bench.writer.add("error", failed="check", message=message)
            if not left[i]:
                del left[i]


def few_configurations() -> None:
    """Lets Triton's kernels choose among few configurations; before they are imported."""
    from triton.runtime.autotuner import Autotuner

    plain = Autotuner.__init__

    def distance(config: Any) -> float:
        rows = config.kwargs.get("BT", 32)  # of a norm
        return float(abs(math.log2(config.num_warps / 4)) + abs(config.num_stages - 3) / 2 + abs(math.log2(rows / 32)))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.configs = sorted(self.configs, key=distance)[: 1 if "NB" in getattr(self, "keys", ()) else FEW]

    Autotuner.__init__ = init


def lift_guard() -> None:
    """Lets fla run gradients of gated rules on Hopper with any Triton."""
    with suppress(ImportError):
        import fla.ops.common.chunk_o as common

        common.TRITON_ABOVE_3_7_1 = True


def compile_family(num: int) -> str:
    """Lets Triton compile all configurations of one of `families()`: called in a process of its own."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    started = time.monotonic()
    import triton
    from triton.runtime.autotuner import Autotuner

    few_configurations()
    triton.testing.do_bench = lambda call, **_: [call() or 1.0] * 3  # compiled is enough
    plain_run, problems = Autotuner.run, set[str]()

    def compiled_ahead(self: Any, *args: Any, **kwargs: Any) -> object:
        given = {name: value for name, value in kwargs.items() if name != "warmup"}
        if not getattr(self, "compiled_ahead", False):
            self.compiled_ahead = True
            try:
                with ThreadPoolExecutor(THREADS) as pool, triton.AsyncCompileMode(pool):
                    self.warmup(*args, **given)
            except Exception as error:  # then one after another
                problems.add(f"{type(error).__name__}: {error}"[:100])
        return plain_run(self, *args, **kwargs)

    Autotuner.run = compiled_ahead
    small, device = families()[num].small, torch.device("cuda", 0)
    lift_guard()
    if isinstance(small, Scan):
        _, backward = both_passes(small, device)
        backward()()
    else:
        forward, wanted = sweep_calls(*small, COMPILED, device)
        gradients(lambda: (forward(),), wanted)()
    torch.cuda.synchronize()
    return f"{small} {time.monotonic() - started:.0f} s {problems or ''}"


def measure_all(bench: Bench, deadline: float) -> None:
    """Compiles in other processes and measures what is ready."""
    every = families()
    pool = ProcessPoolExecutor(min(len(every), max(1, (os.cpu_count() or 2) - 1)), get_context("spawn"))
    tasks = [pool.submit(compile_family, i) for i in range(len(every))]
    told = set[int]()

    def compiled(i: int) -> bool:
        if tasks[i].done() and i not in told:
            told.add(i)
            problem = tasks[i].exception()
            print(f"compiled {tasks[i].result()}" if problem is None else f"{every[i].small}: {problem}"[:300])
        return tasks[i].done()

    import triton

    few_configurations()
    patient = triton.testing.do_bench

    def quick(call: Callable[[], object], **given: Any) -> object:
        return patient(call, **{**given, "warmup": TUNING_MS[0], "rep": TUNING_MS[1]})

    triton.testing.do_bench = quick
    lift_guard()
    try:
        run(bench, every, compiled, deadline)
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def installed() -> dict[str, str]:
    """Versions of the kernels."""
    found = {}
    for name in ("fla-core", "mamba-ssm", "triton"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def try_out(bench: Bench) -> None:
    """A few tiny sizes."""
    for family in (QWEN3_NEXT, NEMOTRON_H, KIMI):
        small = replace(family, key_heads=1, value_heads=2, key_dim=8, value_dim=8, lens=(5, 11))
        check(bench, small)
        measure_scan(bench, small)
    for kind in SWEEPS:
        measure_sweep(bench, kind, 128, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="a few tiny sizes, to try the script")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(1)
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    command = f"python -m cpsim.real.measure.linear --seconds {args.seconds:g}"
    header = provenance(device, 1, installed(), command, args.commit)
    with benched(args.out, header, device, started) as bench:
        if cuda:
            measure_all(bench, started + args.seconds)
        else:
            try_out(bench)


if __name__ == "__main__":
    main()
