"""What PyTorch's own machinery costs: eager ops, autograd, TorchScript, wrappers of kernels and collectives.

    torchrun --nproc-per-node 4 -m cpsim.real.measure.host --out host.jsonl
    torchrun --nproc-per-node 1 -m cpsim.real.measure.host --sweeps --out sweeps.jsonl

Other people's code pays these, our executor does not. Every point is one thing in isolation, and nothing here runs a
context-parallel strategy: wall seconds that one call keeps the host busy (`op: host`), and seconds of PyTorch's
memory-bound kernels (`op: elementwise`). How long a call takes depends on what ran between it and the one before, so
calls that one code makes in a step are timed in turns, `in steps`, `ROUNDS` times over after a barrier, as in a ring
of so many ranks; the rest once after a barrier, `in turns` among all kinds. Those on the thread of a backward pass have
points of their own, `... in bwd`. `python` is the loop of `cpsim.calibrate.pace`.
What an iteration that starts cold pays once are its edges: `begin`, from the call of a package until its code first
communicates or calls its ring, and `end`, from its ring until the call has returned; `autograd entry` and `exit` are
those of a Function that does nothing, `compiled entry` and `exit` those of a compiled call of PyTorch's attention.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor

from cpsim.calibrate.measurement import ROUNDS, Writer
from cpsim.calibrate.pace import python_seconds
from cpsim.case.load import scenario_from
from cpsim.errors import CpsimError
from cpsim.real.measure.kernels import Bench
from cpsim.real.others import make as make_runner
from cpsim.real.others.autograd import forget_compiled
from cpsim.real.run import attention
from cpsim.real.run.node import Node
from cpsim.real.run.timing import hold, provenance

Call = Callable[[], object]
TOKENS = 512 if torch.cuda.is_available() else 8
"""Few enough for the queue never to fill."""
HEADS, KV_HEADS, DIM = 32, 8, 128
ENTRIES = ("_dense", "_varlen")
PASSES: tuple[Literal["fwd", "bwd"], ...] = ("fwd", "bwd")
IDLE_S = 5e-3
"""What the GPU takes for an iteration of some 8k tokens."""
STEPS = (
    ("flash_attn_fwd_dense", "jit_merge", "transfer_of_two", "cast", "view"),
    ("flash_attn_bwd_dense", "transfer_of_two", "cast", "add", "view", "empty"),
    ("flash_attn_varlen_fwd_varlen", "jit_merge", "transfer_of_two", "copy_slice"),
    ("flash_attn_varlen_bwd_varlen", "transfer_of_two", "add", "add_half", "copy_slice"),
    ("flash_attn_varlen_fwd_varlen", "async_all_gather", "copy_slice"),
    ("flash_attn_varlen_bwd_varlen", "async_all_gather", "sync_reduce_scatter", "zeros", "copy_slice"),
    ("seq_all_to_all", "flash_attn_fwd_dense", "contiguous"),
    ("seq_all_to_all", "flash_attn_bwd_dense", "contiguous"),
    ("permute_tensor", "aten_sdpa_flash_fwd_dense", "torch_eager fwd of 9", "cat"),
    ("permute_tensor", "aten_sdpa_flash_bwd_dense", "torch_eager bwd of 5", "contiguous"),
    ("permute_tensor", "aten_cudnn_fwd_dense", "torch_eager fwd of 9", "cat"),
    ("permute_tensor", "aten_cudnn_bwd_dense", "torch_eager bwd of 5", "contiguous"),
    ("all_gather_tensor", "aten_sdpa_flash_fwd_dense", "torch_eager fwd of 9", "cat", "zeros"),
)
"""What ring-flash-attn's rings and all-gathers, yunchang and PyTorch call in a step, forward and backward."""


class _Pass(torch.autograd.Function):
    """A function of three tensors and eight settings that does nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: object) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.settings = settings
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return dout, None, None, *[None] * len(ctx.settings)


def eager(x: dict[str, Tensor]) -> dict[str, Call]:
    """Single eager ops as they occur between kernel calls."""
    half, wide = TOKENS // 2, x["q"].to(torch.float32, copy=True)
    parts = [x["k"].flatten(), x["v"].flatten()]
    swapped = x["k"].transpose(0, 1)
    return {
        "cast": lambda: x["q"].to(torch.float32),
        "add": lambda: wide.add_(x["q"]),
        "add_half": lambda: wide[half:].add_(x["dout"][:half]),
        "contiguous": lambda: swapped.contiguous(),
        "cat": lambda: torch.cat(parts),
        "zeros": lambda: torch.zeros_like(x["q"], dtype=torch.float32),
        "copy_slice": lambda: wide[half:].copy_(wide[:half]),
    }


def quiet(x: dict[str, Tensor]) -> dict[str, Call]:
    """Calls that launch nothing: a view, and memory for a result."""
    q = x["q"][None]
    return {"view": lambda: q.chunk(2, dim=1)[1], "empty": lambda: torch.empty_like(q)}


def autograd(x: dict[str, Tensor]) -> dict[str, Call]:
    """A Function's forward, its backward, and four Functions in a row."""
    leaves = [x[name].detach().requires_grad_() for name in ("q", "k", "v")]
    settings, function = (0.0, 0.1, True, (-1, -1), None, False, False, None), cast(Any, _Pass)
    ask = partial(torch.autograd.grad, inputs=leaves[:1], grad_outputs=x["dout"], retain_graph=True)

    def chain() -> object:
        out = leaves[0]
        for _ in range(4):
            out = function.apply(out, *leaves[1:], *settings)
        return out

    once, often = function.apply(*leaves, *settings), chain()
    return {
        "autograd fwd": lambda: function.apply(*leaves, *settings),
        "autograd bwd": lambda: ask(once),
        "autograd chain fwd of 4": chain,
        "autograd chain bwd of 4": lambda: ask(often),
    }


def edges(node: Node, call: Call, first: list[float], last: list[float]) -> tuple[list[float], list[float]]:
    """Seconds from a call until its code does something for the first time, and from the last time until it returns.

    All ranks have been idle for `IDLE_S`, in which autograd's thread sleeps, as while a GPU works on an iteration.

    Args:
        node: this rank.
        call: what is called.
        first: filled by the call with the times at which its code began to do something.
        last: the same with those at which it had done it.
    """
    before, after = [], []
    for i in range(40):
        hold(IDLE_S, node.device)
        node.synchronize()
        node.evict()
        node.meet()
        first.clear()
        last.clear()
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        if i >= 10:
            before.append(first[0] - start)
            after.append(end - last[-1])
    return before, after


def entries(x: dict[str, Tensor], node: Node) -> dict[str, list[float]]:
    """Edges of one Function, forward and backward, around what is inside of it."""
    first, last, found = list[float](), list[float](), dict[str, list[float]]()

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            first.append(time.perf_counter())
            made = torch.empty_like(x)
            last.append(time.perf_counter())
            return made

        @staticmethod
        def backward(_ctx: Any, dout: Tensor) -> Tensor:
            first.append(time.perf_counter())
            last.append(time.perf_counter())
            return dout

    leaf, dout = x["q"].detach().requires_grad_(), x["dout"]
    function: Any = Marked
    out = function.apply(leaf)
    back = partial(torch.autograd.grad, out, leaf, dout, retain_graph=True)
    for pass_, call in (("fwd", lambda: function.apply(leaf)), ("bwd", back)):
        found[f"autograd entry {pass_}"], found[f"autograd exit {pass_}"] = edges(node, call, first, last)
    return found


PACKAGES = {
    "ring-flash-attn {strategy}": [
        ("ring-flash-attn", strategy, "fa2") for strategy in ("ring", "zigzag_ring", "striped_ring", "allgather")
    ],
    "yunchang": [("yunchang", "ulysses", "fa2")],
    "torch {kernel}": [("torch", "zigzag_ring", "sdpa_flash"), ("torch", "zigzag_ring", "cudnn")],
}
"""Code whose edges are measured, by name: implementation, strategy and kernel."""


def package_edges(node: Node) -> dict[str, list[float]]:
    """Edges of other people's code.

    Nothing is sent: communication is replaced by what returns at once.
    """
    found: dict[str, list[float]] = {}
    for name, (implementation, strategy, kernel) in ((n, code) for n, codes in PACKAGES.items() for code in codes):
        case = {
            "implementation": implementation,
            "strategy": strategy,
            "kernel": kernel,
            "mask": "causal",
            "gpus": node.size,
            "cluster": "h200-4",
            "tokens_per_gpu": TOKENS,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
        }
        words = name.format(strategy=strategy, kernel=kernel)
        try:
            for pass_ in PASSES:
                first, last = list[float](), list[float]()
                runner = make_runner(scenario_from(case), pass_, node)
                with silenced(implementation, first, last):
                    runner.prepare()
                    runner.launch()
                    begin, end = edges(node, runner.launch, first, last)
                found[f"{words} begin {pass_}"] = begin
                if implementation == "torch":  # the rest of all others runs inside of a Function
                    found[f"{words} end {pass_}"] = end
        except (CpsimError, RuntimeError, AssertionError) as error:  # the same on all ranks
            print(f"error in edges of {words}: {error}"[:300], flush=True)
    return found


def compiled_edges(node: Node) -> dict[str, list[float]]:
    """Edges of PyTorch's attention under `torch.compile`: from its call until the generated code calls the operator of
    the kernel, and from when that has returned; the operator itself is measured as it is called without.

    Each rank runs its own.
    """
    case = {
        "implementation": "torch",
        "strategy": "none",
        "kernel": "sdpa_flash",
        "compile": True,
        "gpus": node.size,
        "cluster": "h200-4",
        "tokens_per_gpu": TOKENS,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
    }
    found: dict[str, list[float]] = {}
    try:
        for pass_ in PASSES:
            runner = make_runner(scenario_from(case), pass_, node)
            name = "_scaled_dot_product_flash_attention" + ("" if node.cuda else "_for_cpu")
            operator = getattr(torch.ops.aten, name if pass_ == "fwd" else f"{name}_backward")
            first, last = list[float](), list[float]()
            with patch.object(operator, "default", noted(cache_of_one(operator.default), first, last)):
                runner.launch()
                begin, end = edges(node, runner.launch, first, last)
            found |= {f"compiled entry {pass_}": begin, f"compiled exit {pass_}": end}
    except (CpsimError, RuntimeError, AttributeError, IndexError) as error:  # the same on all ranks
        print(f"error in edges of compiled calls: {error}"[:300], flush=True)
    return found


def noted(inside: Callable[..., object], first: list[float], last: list[float]) -> Callable[..., object]:
    """A function that notes when it is called and when it returns."""

    def instead(*args: object, **kwargs: object) -> object:
        first.append(time.perf_counter())
        result = inside(*args, **kwargs)
        last.append(time.perf_counter())
        return result

    return instead


@contextmanager
def silenced(implementation: str, first: list[float], last: list[float]) -> Iterator[None]:
    """Communication that returns at once, and notes when it was called."""
    mark = partial(noted, first=first, last=last)
    done = SimpleNamespace(wait=lambda: None)
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    with ExitStack() as stack:

        def change(owner: object, name: str, new: object) -> None:
            stack.enter_context(patch.object(owner, name, new))

        for name in names:
            change(dist, name, mark(lambda *_args, **_kwargs: done))
        if implementation == "torch":
            rings = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
            for name in ("_templated_ring_attention", "_templated_ring_attention_backward"):
                change(rings, name, mark(cache_of_one(getattr(rings, name))))
        elif implementation == "yunchang":
            exchange = import_module("yunchang.comm.all_to_all")
            change(exchange, "all_to_all_4D", mark(exchange.all_to_all_4D))
        else:
            from cpsim.real.others.ring_flash import package

            ring = package().utils.RingComm
            change(ring, "send_recv_kv", mark(lambda _self, k, v, *_buffers: (k, v)))
            change(ring, "wait", mark(lambda _self: None))
        yield


def cache_of_one(function: Callable[..., object]) -> Callable[..., object]:
    """A function that returns what its first call has returned."""
    made: list[object] = []

    def kept(*args: object, **kwargs: object) -> object:
        if not made:
            made.append(function(*args, **kwargs))
        return made[0]

    return kept


def flash_attn(x: dict[str, Tensor]) -> dict[str, Call]:
    """flash-attn's Python functions under its autograd wrappers, which ring-flash-attn calls."""
    from flash_attn import flash_attn_interface as interface

    q, k, v, dout = (x[name][None] for name in ("q", "k", "v", "dout"))
    settings: dict[str, Any] = {
        "dropout_p": 0.0,
        "softmax_scale": DIM**-0.5,
        "causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
    out, lse, *_ = interface._flash_attn_forward(q, k, v, return_softmax=False, **settings)
    grads = {f"d{name}": torch.empty_like(x[name][None]) for name in ("q", "k", "v")}
    cu = torch.tensor([0, TOKENS], dtype=torch.int32, device=q.device)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": TOKENS, "max_seqlen_k": TOKENS}
    flat = {f"d{name}": grads[f"d{name}"][0] for name in ("q", "k", "v")}
    last: dict[str, Any] = {"deterministic": False, "rng_state": None}
    return {
        "flash_attn_fwd_dense": lambda: interface._flash_attn_forward(q, k, v, return_softmax=False, **settings),
        "flash_attn_bwd_dense": lambda: interface._flash_attn_backward(
            dout, q, k, v, out, lse, **grads, **settings, **last
        ),
        "flash_attn_varlen_fwd_varlen": lambda: interface._flash_attn_varlen_forward(
            q[0], k[0], v[0], **lengths, return_softmax=False, **settings
        ),
        "flash_attn_varlen_bwd_varlen": lambda: interface._flash_attn_varlen_backward(
            dout[0], q[0], k[0], v[0], out[0], lse[0], **flat, **lengths, **settings, **last
        ),
    }


def jit(x: dict[str, Tensor]) -> dict[str, Call]:
    """The TorchScript merge of ring-flash-attn."""
    from cpsim.real.others.ring_flash import package

    merge = package().utils.update_out_and_lse
    out, lse = merge(None, None, x["q"][None], x["lse"][None])
    return {"jit_merge": lambda: merge(out, lse, x["q"][None], x["lse"][None])}


def communication(x: dict[str, Tensor], node: Node) -> dict[str, Call]:
    """One communication and the wait for it, as other people's code writes them."""
    k, v = x["k"], x["v"]
    into = torch.empty(2, node.size * TOKENS, KV_HEADS, DIM, device=node.device, dtype=k.dtype)
    both, heads = torch.cat([k.flatten(), v.flatten()]), torch.empty_like(x["q"])

    def batch() -> None:
        """Keys and values on a ring: what ring-flash-attn's RingComm does in a step."""
        from cpsim.real.others.ring_flash import package

        comm = package().utils.RingComm(None)
        comm.send_recv_kv(k, v)
        comm.wait()

    def gather() -> None:
        dist.all_gather_into_tensor(into[0], k, async_op=True).wait()

    functional: Any = functional_collectives  # without types: results are asynchronous, groups may be missing
    permute = functional.permute_tensor
    order = [*range(1, node.size), 0]
    return {
        "transfer_of_two": batch,
        "async_all_gather": gather,
        "sync_all_to_all": lambda: dist.all_to_all_single(heads, x["q"]),
        "sync_reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty_like(k), into[0]),
        "permute_tensor": lambda: permute(both, order, dist.group.WORLD).wait(),  # as its rotaters wait
        "all_gather_tensor": lambda: functional.all_gather_tensor(both, 0, dist.group.WORLD).wait(),
    }


def torch_ring(x: dict[str, Tensor]) -> dict[str, Call]:
    """What PyTorch's rings do with the results of a step, views included: so many kernels in a row."""
    import torch.distributed.tensor.experimental._context_parallel._attention as module

    q, k, lse = heads_first(x["q"]), heads_first(x["k"]), x["lse"][None]
    merger = module._SDPAMerger(True, seq_dim=2)
    merger.step(q, lse, False)
    dq, dk, dv = (t.to(torch.float32) for t in (q, k, k))
    half = q.chunk(2, dim=2)[1]

    def sums() -> Tensor:
        dk.add_(k)
        dv.add_(k)
        torch.cat([dk.flatten(), dv.flatten()])
        return module._partial_update(dq, half, dim=2, n_chunks=2, idx=1, add=True)

    return {"torch_eager fwd of 9": lambda: merger.step(q, lse, False), "torch_eager bwd of 5": sums}


def aten_flash(x: dict[str, Tensor]) -> dict[str, Call]:
    """PyTorch's own attention as its rings call it."""
    ops = torch.ops.aten
    q, k, v, dout = (heads_first(x[name]) for name in ("q", "k", "v", "dout"))
    forward = partial(ops._scaled_dot_product_flash_attention.default, q, k, v, 0.0, True)
    out, lse, *ends, seed, offset, _ = forward()
    backward = ops._scaled_dot_product_flash_attention_backward.default
    return {
        "aten_sdpa_flash_fwd_dense": forward,
        "aten_sdpa_flash_bwd_dense": partial(backward, dout, q, k, v, out, lse, *ends, 0.0, True, seed, offset),
    }


def aten_cudnn(x: dict[str, Tensor]) -> dict[str, Call]:
    """Calls of attention in ATen with cuDNN's kernels."""
    ops = torch.ops.aten
    q, k, v, dout = (heads_first(x[name]) for name in ("q", "k", "v", "dout"))
    forward = partial(ops._scaled_dot_product_cudnn_attention.default, q, k, v, None, True, 0.0, True)
    out, lse, *ends, seed, offset, _ = forward()
    backward = ops._scaled_dot_product_cudnn_attention_backward.default
    return {
        "aten_cudnn_fwd_dense": forward,
        "aten_cudnn_bwd_dense": partial(backward, dout, q, k, v, out, lse, seed, offset, None, *ends, 0.0, True),
    }


def heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x[None].transpose(1, 2)


def seq_all_to_all(x: dict[str, Tensor]) -> dict[str, Call]:
    """yunchang's all-to-all of one tensor, on one token: then there is nothing to reorder, which would be a sweep."""
    from yunchang.comm.all_to_all import SeqAllToAll4D

    token = x["q"][:1][None].clone().requires_grad_()
    return {"seq_all_to_all": lambda: SeqAllToAll4D.apply(dist.group.WORLD, token, 2, 1, False)}


def measure(node: Node, writer: Writer | None, *, with_edges: bool = True, repeats: int = 30) -> None:
    """Every host call in turns, with errors for what is not installed.

    Args:
        node: this rank.
        writer: where points go; None on ranks that only take part.
        with_edges: what iterations that start cold pay once, too.
        repeats: rounds that count, after a third as many that do not.
    """
    dtype = torch.bfloat16 if node.cuda else torch.float32
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "dout": HEADS}
    x = {name: torch.randn(TOKENS, heads, DIM, device=node.device, dtype=dtype) for name, heads in sizes.items()}
    x["lse"] = torch.randn(HEADS, TOKENS, device=node.device)
    groups: dict[str, Callable[[], dict[str, Call]]] = {
        "eager": lambda: eager(x),
        "quiet": lambda: quiet(x),
        "autograd": lambda: autograd(x),
        "flash_attn": lambda: flash_attn(x),
        "jit": lambda: jit(x),
        "torch_ring": lambda: torch_ring(x),
        "aten_flash": lambda: aten_flash(x),
        "aten_cudnn": lambda: aten_cudnn(x),
    }
    if node.size > 1:
        groups["communication"] = lambda: communication(x, node)
        groups["seq_all_to_all"] = lambda: seq_all_to_all(x)
    calls: dict[tuple[str, str], Call] = {}
    for name, make in groups.items():
        try:
            made = make()
            for call in [*made.values()] * 5:
                call()
            calls |= {("eager", which) if name == "eager" else (which, ""): call for which, call in made.items()}
        except Exception as error:  # the same on all ranks
            if writer:
                writer.add("error", failed="host", kind=name, message=f"{type(error).__name__}: {error}"[:300])
                print(f"error in {name}: {error}"[:300], flush=True)
    found = entries(x, node) | (package_edges(node) if node.size > 1 else {}) if with_edges else {}
    add_edges(writer, found)
    if writer:
        writer.add("host", python_seconds(), kind="python")
    inner = {key: call for key, call in calls.items() if not key[0].startswith("autograd")}
    for place, chosen, time_all in (
        ("in turns", calls, in_turns),
        ("in bwd", inner, in_backward),
    ):
        cold = repeats // 3
        samples = [time_all(list(chosen.values()), node) for _ in range(repeats + cold)][cold:]
        for (kind, which), column in zip(chosen, zip(*samples, strict=True), strict=True):
            write(writer, kind, which, place, column)
        for step in STEPS:
            several = {key: call for key, call in chosen.items() if (key[1] or key[0]) in step}
            samples = [time_all([*several.values()] * ROUNDS, node) for _ in range(repeats)][cold:]
            for i, (kind, which) in enumerate(several):
                times = [t for mine in samples for t in mine[i :: len(several)]]
                write(writer, kind, which, "in steps" if place == "in turns" else "in steps in bwd", times)


def add_edges(writer: Writer | None, found: dict[str, list[float]]) -> None:
    """Points of edges, on rank 0."""
    for kind, times in found.items():
        if writer:
            writer.add("host", times, kind=kind)
            print(f"{kind}: {median(times) * 1e6:.1f} us", flush=True)


def write(writer: Writer | None, kind: str, which: str, place: str, times: Sequence[float]) -> None:
    """One point, on rank 0; of a call that is several of a kind, what each takes."""
    if writer is None:
        return
    kind, _, number = kind.partition(" of ")
    times = [t / int(number or 1) for t in times]
    if place.endswith("in bwd"):  # a fit knows entry points of kernels by their ends
        kind = f"{' '.join(kind.rsplit('_', 2)[:2]) if kind.endswith(ENTRIES) else kind} in bwd"
    writer.add("host", list(times), kind=kind, which=which, place=place)
    print(f"{kind} {which} {place}: {median(times) * 1e6:.1f} us", flush=True)


def in_backward(calls: Sequence[Call], node: Node) -> list[float]:
    """Seconds of calls made in turns, on autograd's thread."""
    times: list[float] = []

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return torch.empty_like(x)

        @staticmethod
        def backward(_ctx: Any, dout: Tensor) -> Tensor:
            times.extend(timed(calls))
            return dout

    x = torch.zeros(1, device=node.device, requires_grad=True)
    function: Any = Inside
    out = function.apply(x)
    node.synchronize()
    dist.barrier()
    node.synchronize()
    torch.autograd.grad(out, x, torch.ones_like(x))
    return times


def in_turns(calls: Sequence[Call], node: Node) -> list[float]:
    """Host seconds of every call, one after the other, all ranks starting together."""
    node.synchronize()
    dist.barrier()
    node.synchronize()
    return timed(calls)


def timed(calls: Sequence[Call]) -> list[float]:
    """Host seconds of every call, each made once."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def sweep(kind: str, tokens: int, device: torch.device) -> Call:
    """One of PyTorch's memory-bound kernels on tokens of 32 heads."""
    size = (1, tokens, HEADS, DIM)
    narrow, wide = torch.randn(size, device=device, dtype=torch.bfloat16), torch.randn(size, device=device)
    if kind == "jit_merge":
        from cpsim.real.others.ring_flash import package

        merge, block_lse = package().utils._update_out_and_lse, torch.randn(1, HEADS, tokens, device=device)
        lse = torch.randn_like(block_lse).transpose(1, 2)[..., None]  # as the first step leaves it
        forget_compiled(merge)
        return lambda: merge(wide, lse, narrow, block_lse)[0]
    if kind == "mixed cast":
        return lambda: narrow.to(torch.float32)
    if kind == "mixed add":
        return lambda: wide.add_(narrow)
    if kind == "strided join":
        halves = [half.transpose(1, 2) for half in wide.chunk(2, dim=1)]
        return lambda: torch.cat(halves, dim=2)
    if kind.startswith("expanded"):
        index = torch.arange(tokens, device=device)[:, None, None].expand(-1, HEADS, DIM)
        rows, made = narrow[0], torch.zeros_like(narrow[0])
        if kind == "expanded_gather":
            return lambda: torch.gather(rows, 0, index)
        return lambda: made.scatter_(0, index, rows)
    ranks = int(kind.split()[-1])
    return lambda: narrow.reshape(1, tokens, ranks, -1, DIM).transpose(0, 2).contiguous()


SWEEPS = {
    "jit_merge": 10,
    "mixed cast": 6,
    "mixed add": 10,
    "strided join": 8,
    "strided 2": 4,
    "strided 4": 4,
    "strided 8": 4,
    "expanded_gather": 4,
    "expanded_scatter": 4,
}
"""PyTorch's memory-bound kernels, and the bytes that each reads and writes for an element.

The last two as LongCA-bench drops padding and puts it back: by an index of rows, expanded to every element.
"""
SWEPT_TOKENS = (256, 1024, 4096, 8192, 16384, 65536)
"""4 MB to 1 GB of traffic."""


def sweep_parameters(kind: str, tokens: int) -> dict[str, Any]:
    """How a measurement file calls a point."""
    return {"kind": kind.split()[0], "which": kind, "nbytes": SWEEPS[kind] * tokens * HEADS * DIM}


def measure_sweep(bench: Bench, kind: str, tokens: int) -> None:
    """One kernel at one size."""
    parameters = sweep_parameters(kind, tokens)
    try:
        op = sweep(kind, tokens, bench.device)
    except ImportError as error:
        bench.writer.add("error", failed="elementwise", message=str(error)[:300], **parameters)
        return
    for _ in range(5):  # TorchScript specialises in its first calls
        op()
    bench.point("elementwise", lambda: bench.samples(op), **parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    parser.add_argument("--sweeps", action="store_true", help="memory-bound kernels only, for which one GPU is enough")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    started = time.monotonic()
    with Node(cpu=args.cpu) as node:
        if node.rank == 0:
            kernels = {k: attention.kernel_version(k) for k in (("fa2", "cudnn") if node.cuda else ("math",))}
            header = provenance(node.device, node.size, kernels, "python -m cpsim.real.measure.host", args.commit)
            with args.out.open("w", encoding="utf-8") as file:
                writer = Writer(file, header)
                if not args.sweeps:
                    measure(node, writer)
                    add_edges(writer, compiled_edges(node))
                bench = Bench(writer, node.device)
                for tokens, kind in product(SWEPT_TOKENS if node.cuda else SWEPT_TOKENS[:1], SWEEPS):
                    measure_sweep(bench, kind, tokens)
            print(f"{time.monotonic() - started:.0f} s")
        elif not args.sweeps:
            measure(node, None)
            compiled_edges(node)


if __name__ == "__main__":
    main()
