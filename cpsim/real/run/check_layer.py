"""Compares whole layers on this machine's GPUs with one dense process: every result, kept tensor and gradient.

    torchrun --nproc-per-node 4 -m cpsim.real.run.check_layer

Prints the largest error of every case and pass relative to the largest value of its tensor, as bf16 leaves it (some
1e-2), and ends with status 1 where one is larger than `WORST`. The oracle is plain PyTorch with autograd in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from cpsim.case.load import scenario_from
from cpsim.case.model import Model
from cpsim.case.resolve import workload_of
from cpsim.case.scenario import Scenario
from cpsim.case.workload import Workload
from cpsim.real.others.cpsim import make
from cpsim.real.run.executor import EAGER_RUNS
from cpsim.real.run.layer_calls import angles
from cpsim.real.run.layer_ops import EPS
from cpsim.real.run.node import Node, end_process
from cpsim.strategies.steps.layer import weights

WORST = 3e-2
MODEL = Model(layers=1, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=1536, vocab=96)
DOCUMENTS = (1024, 64, 32, 416, 256, 256)
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("distca", {}),
    ("distca", {"nano_batches": 3, "variant": "released"}),
    ("per_sequence", {}),
    ("wlb", {"cp": 2}),
    ("wlb", {"cp": 1}),
    ("zigzag_ring", {}),
    ("magi", {"chunk": 128}),
)


def dense(workload: Workload, model: Model, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """All tensors of a layer by name, ``[tokens, heads, width]``; those whose names begin with d are autograd's.

    Args:
        workload: causal documents.
        model: dimensions.
        dtype: of all tensors; inputs and weights are bf16's values unless it is float64.
        device: where.
    """
    torch.manual_seed(0)
    m, tokens = model, workload.num_tokens

    def random(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(rows, columns, device=device) * scale
        return (made.bfloat16() if dtype != torch.float64 else made).to(dtype).requires_grad_()

    w = {
        name: random(rows, heads * m.head_dim, (heads * m.head_dim) ** -0.5 if rows > 1 else 1.0)
        for name, (rows, heads) in weights(m).items()
    }
    made = {"x": random(tokens, m.hidden), **w}
    dy = random(tokens, m.hidden).detach()
    lengths = torch.tensor(workload.documents, device=device)
    position = torch.cat([torch.arange(n, device=device) for n in workload.documents])
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    seen = (document[:, None] == document[None]) & (position[:, None] >= position[None])
    made["x norm"] = _norm(made["x"], w["w attention norm"])
    made["qkv"] = made["x norm"] @ w["w qkv"].T
    q, k, v = made["qkv"].unflatten(1, (-1, m.head_dim)).split((m.heads, m.kv_heads, m.kv_heads), 1)
    cos, sin = (table[:, None] for table in angles(position.to(dtype), m.head_dim))
    made["q"], k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    made["kv"] = torch.cat([k, v], 2)
    k, v = (part.repeat_interleave(m.heads // m.kv_heads, 1) for part in made["kv"].chunk(2, 2))
    scores = torch.einsum("qhd,khd->hqk", made["q"], k) / m.head_dim**0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    made["out"] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    made["proj"] = made["out"].flatten(1) @ w["w proj"].T
    made["h"] = made["x"] + made["proj"]
    made["h norm"] = _norm(made["h"], w["w mlp norm"])
    made["gate up"] = made["h norm"] @ w["w gate up"].T
    gate, up = made["gate up"].chunk(2, 1)
    made["swiglu"] = silu(gate) * up
    made["down"] = made["swiglu"] @ w["w down"].T
    y = made["h"] + made["down"]
    grads = torch.autograd.grad(y, list(made.values()), dy)
    found = made | {f"d{name}": grad for name, grad in zip(made, grads, strict=True)} | {"y": y, "dy": dy}
    found = {
        name: t.detach().reshape(len(t), -1, t.shape[2] if "kv" in name and t.ndim == 3 else m.head_dim)
        for name, t in found.items()
    }
    return found | {"out": torch.cat([found["out"], scores.detach().logsumexp(-1).T[..., None]], 2)}


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def worst(scenario: Scenario, node: Node, wanted: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of the case on any rank, and whose."""
    found = (0.0, "")
    for pass_ in scenario.passes:
        executor = make(scenario, pass_, node).executor
        executor.load(wanted)
        for _ in range(EAGER_RUNS + 2):  # the captured program, too
            executor.launch()
        node.synchronize()
        for tensor, tokens, heads, values in executor.results():
            got = values.float()
            if tensor.startswith("dw"):  # every rank has the gradient that its own tokens give
                dist.all_reduce(got)
                right = wanted[tensor]
            else:
                right = wanted[tensor][torch.from_numpy(tokens).to(got.device)][:, heads]
            dim = executor.workload.head_dim * (2 if tensor.endswith("kv") and tensor in ("kv", "dkv") else 1)
            error = float((got[..., :dim] - right[..., :dim]).abs().max() / wanted[tensor][..., :dim].abs().max())
            found = max(found, (error, f"{tensor} {pass_}"))
    return found


def main() -> int:
    """Runs all cases; returns the exit status."""
    failed = False
    node = Node()  # its groups end with the process: captured programs still hold them
    fields = {
        "model": {**{name: getattr(MODEL, name) for name in MODEL.__slots__}},
        "part": "layer",
        "gpus": node.size,
        "cluster": "h200-4" if node.size <= 4 else "dgx-h200",
        "tokens": sum(DOCUMENTS),
        "documents": list(DOCUMENTS),
        "mask": "causal_document",
        "kernel": "fa2",
    }
    workload = replace(workload_of(scenario_from({**fields, "strategy": "distca"})), dtype="bf16")
    wanted = dense(workload, MODEL, torch.float32, node.device)
    for strategy, knobs in CASES:
        scenario = scenario_from({**fields, "strategy": strategy, "knobs": knobs})
        error, tensor = max(node.gather(worst(scenario, node, wanted)))
        failed |= not error < WORST
        if node.rank == 0:
            print(f"{strategy} {knobs}: {error:.1e} ({tensor})", flush=True)
    return int(failed)


if __name__ == "__main__":
    end_process(main())
