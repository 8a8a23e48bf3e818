"""What PyTorch's own machinery costs the host: eager ops, autograd, TorchScript, wrappers of kernels and collectives.

    torchrun --nproc-per-node 2 -m real.measure_host --out host.jsonl

Other people's code pays these, our executor does not. Every point is one thing in isolation (`op: host`, wall seconds
that one call keeps the host busy); nothing here runs a context-parallel strategy. Communication needs two ranks or
more, the rest runs on each rank alone, all at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpsim.calibrate.measurement import Writer
from real import attention
from real.node import Node
from real.timing import host_seconds, provenance

Call = Callable[[], object]
TOKENS = 512 if torch.cuda.is_available() else 8
"""Few enough for the queue never to fill."""
HEADS, KV_HEADS, DIM = 32, 8, 128


class _Pass(torch.autograd.Function):
    """A function of three tensors and eight settings that does nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: object) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.settings = settings
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return dout, None, None, *[None] * len(ctx.settings)


def eager(x: dict[str, Tensor]) -> dict[str, Call]:
    """Single eager ops as they occur between kernel calls."""
    half, wide = TOKENS // 2, x["q"].float()
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


def autograd(x: dict[str, Tensor]) -> dict[str, Call]:
    """A Function's forward, and the backward of one and of four in a row."""
    leaves = [x[name].detach().requires_grad_() for name in ("q", "k", "v")]
    settings = (0.0, 0.1, True, (-1, -1), None, False, False, None)
    once = _Pass.apply(*leaves, *settings)
    often = once
    for _ in range(3):
        often = _Pass.apply(often, *leaves[1:], *settings)
    ask = partial(torch.autograd.grad, inputs=leaves[:1], grad_outputs=x["dout"], retain_graph=True)
    return {
        "autograd_apply": lambda: _Pass.apply(*leaves, *settings),
        "autograd_backward": lambda: ask(once),
        "autograd_backward_4": lambda: ask(often),
    }


def flash_attn(x: dict[str, Tensor]) -> dict[str, Call]:
    """flash-attn's Python functions under its autograd wrappers, which ring-flash-attn calls."""
    from flash_attn import flash_attn_interface as interface

    q, k, v, dout = (x[name][None] for name in ("q", "k", "v", "dout"))
    settings: dict[str, Any] = {
        "dropout_p": 0.0, "softmax_scale": DIM**-0.5, "causal": True, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
    }  # fmt: skip
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
    from real.implementations.ring_flash import package

    merge = package().utils.update_out_and_lse
    out, lse = merge(None, None, x["q"][None], x["lse"][None])
    return {"jit_merge": lambda: merge(out, lse, x["q"][None], x["lse"][None])}


@cache
def alone(node: Node) -> DeviceMesh:
    """A mesh of this rank only."""
    groups = [dist.new_group([rank]) for rank in range(node.size)]
    return DeviceMesh.from_group(groups[node.rank], node.device.type)


def context_parallel(x: dict[str, Tensor], node: Node, kernel: str) -> dict[str, Call]:
    """PyTorch's scaled_dot_product_attention under context parallel on a mesh of one rank: all but communication."""
    from real.implementations.torch_cp import attend

    leaves = [x[name][None].detach().requires_grad_() for name in ("q", "k", "v")]
    call = attend(kernel, True, alone(node))
    ask = partial(torch.autograd.grad, inputs=leaves, grad_outputs=x["dout"][None], retain_graph=True)
    out = call(*leaves)
    return {f"context_parallel_{kernel}_fwd": lambda: call(*leaves), f"context_parallel_{kernel}_bwd": lambda: ask(out)}


def communication(x: dict[str, Tensor], node: Node) -> dict[str, Call]:
    """One communication and the wait for it, as other people's code writes them."""
    there, back = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    k, v = x["k"], x["v"]
    into = torch.empty(2, node.size * TOKENS, KV_HEADS, DIM, device=node.device, dtype=k.dtype)
    both, heads = torch.cat([k.flatten(), v.flatten()]), torch.empty_like(x["q"])

    def batch(tensors: list[Tensor]) -> None:
        ops = [
            dist.P2POp(kind, data, peer)
            for t in tensors
            for kind, data, peer in ((dist.isend, t, there), (dist.irecv, torch.empty_like(t), back))
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def gather() -> None:
        dist.all_gather_into_tensor(into[0], k, async_op=True).wait()

    permute = functional_collectives.permute_tensor
    order = [*range(1, node.size), 0]
    return {
        "transfer_of_two": lambda: batch([k, v]),
        "async_all_gather": gather,
        "sync_all_to_all": lambda: dist.all_to_all_single(heads, x["q"]),
        "sync_reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty_like(k), into[0]),
        "functional_permute": lambda: functional_collectives.wait_tensor(permute(both, order, dist.group.WORLD)),
        "functional_all_gather": lambda: functional_collectives.wait_tensor(
            functional_collectives.all_gather_tensor(both, 0, dist.group.WORLD)
        ),
    }


def measure(node: Node, writer: Writer | None) -> None:
    """Every point, with errors for what is not installed."""
    dtype = torch.bfloat16 if node.cuda else torch.float32
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "dout": HEADS}
    x = {name: torch.randn(TOKENS, heads, DIM, device=node.device, dtype=dtype) for name, heads in sizes.items()}
    x["lse"] = torch.randn(HEADS, TOKENS, device=node.device)
    groups: dict[str, Callable[[], dict[str, Call]]] = {
        "eager": lambda: eager(x), "autograd": lambda: autograd(x), "flash_attn": lambda: flash_attn(x),
        "jit": lambda: jit(x),
    }  # fmt: skip
    if node.size > 1:
        groups["communication"] = lambda: communication(x, node)
    for kernel in ("sdpa_flash", "cudnn"):
        groups[f"context_parallel {kernel}"] = lambda kernel=kernel: context_parallel(x, node, kernel)  # type: ignore[misc]
    for name, make in groups.items():
        try:
            calls = make()
            for kind, call in calls.items():
                for _ in range(10):
                    call()
                samples = [_together(call, node) for _ in range(20)]
                if writer:
                    kind, which = ("eager", kind) if name == "eager" else (kind, "")
                    writer.add("host", samples, kind=kind, **({"which": which} if which else {}))
                    print(f"{kind} {which}: {sorted(samples)[10] * 1e6:.1f} us", flush=True)
        except Exception as error:  # the same on all ranks
            if writer:
                writer.add("error", failed="host", kind=name, message=f"{type(error).__name__}: {error}"[:300])
                print(f"error in {name}: {error}"[:300], flush=True)


def _together(call: Call, node: Node) -> float:
    """Host seconds of one call, the ranks starting together."""
    node.synchronize()
    dist.barrier()
    return host_seconds(call, 10, node.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    started = time.monotonic()
    with Node(cpu=args.cpu) as node:
        if node.rank == 0:
            kernels = {k: attention.kernel_version(k) for k in (("fa2", "cudnn") if node.cuda else ("math",))}
            header = provenance(node.device, node.size, kernels, "python -m real.measure_host", args.commit)
            with args.out.open("w", encoding="utf-8") as file:
                measure(node, Writer(file, header))
            print(f"{time.monotonic() - started:.0f} s")
        else:
            measure(node, None)


if __name__ == "__main__":
    main()
