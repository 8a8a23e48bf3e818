"""What tests/test_layer.py runs: whole layers on forked processes in float64, against one dense process and autograd."""

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from cases import cluster, workload
from layer_cases import LAYERS, MODEL
from torch.nn.functional import silu

from cpsim.strategies.layer import plan_layer
from cpsim.training.transformer import weights, widths
from real.executor import Executor
from real.layer_calls import angles
from real.layer_ops import EPS
from real.node import Node, end_process
from real.storage import lay_out


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x, cos, sin):
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def dense(problem):
    """All tensors of a layer by name, ``[tokens, heads, width]``; gradients are autograd's."""
    torch.manual_seed(0)
    m, tokens, wide = MODEL, problem.num_tokens, {"dtype": torch.float64}
    w = {name: torch.randn(rows, heads * m.head_dim, **wide) / 4 for name, (rows, heads) in weights(m).items()}
    x, dy = torch.randn(2, tokens, m.hidden, **wide)
    position = torch.cat([torch.arange(n) for n in problem.documents])
    document = torch.repeat_interleave(torch.arange(len(problem.documents)), torch.tensor(problem.documents))
    seen = (document[:, None] == document[None]) & (position[:, None] >= position[None])
    made = {"x": x, **w}
    for tensor in made.values():
        tensor.requires_grad_()
    made["x norm"] = norm(x, w["w attention norm"])
    made["qkv"] = made["x norm"] @ w["w qkv"].T
    rows = made["qkv"].unflatten(1, (-1, m.head_dim))
    q, k, v = rows.split((m.heads, m.kv_heads, m.kv_heads), 1)
    turn = angles(position.double(), m.head_dim)
    made["q"], k = rotated(q, *turn), rotated(k, *turn)
    made["kv"] = torch.cat([k, v], 2)
    k, v = (part.repeat_interleave(m.heads // m.kv_heads, 1) for part in made["kv"].chunk(2, 2))
    scores = torch.einsum("qhd,khd->hqk", made["q"], k) / m.head_dim**0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    made["out"] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    made["proj"] = made["out"].flatten(1) @ w["w proj"].T
    made["h"] = x + made["proj"]
    made["h norm"] = norm(made["h"], w["w mlp norm"])
    made["gate up"] = made["h norm"] @ w["w gate up"].T
    gate, up = made["gate up"].chunk(2, 1)
    made["swiglu"] = silu(gate) * up
    made["down"] = made["swiglu"] @ w["w down"].T
    made["y"] = made["h"] + made["down"]
    names = [name for name in made if name != "y"]
    grads = torch.autograd.grad(made["y"], [made[name] for name in names], dy)
    made |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)} | {"dy": dy}
    found = {name: t.detach().reshape(len(t), -1, m.head_dim) for name, t in made.items()}
    for name in ("kv", "dkv"):
        found[name] = made[name].detach()
    found["out"] = torch.cat([found["out"], scores.detach().logsumexp(-1).T[..., None]], 2)
    assert {name: t.shape[1] for name, t in found.items() if name in widths(m)} == {
        name: width for name, width in widths(m).items() if name in found
    }
    return found


def planned(num_ranks):
    for case, documents, strategy, knobs in LAYERS:
        problem = workload("causal_document", documents, dtype="fp64")
        wanted = dense(problem)
        for pass_ in ("fwd", "bwd"):
            schedule = plan_layer(strategy, problem, MODEL, cluster(num_ranks), pass_, knobs)
            yield f"{case} {pass_}", schedule, problem, lay_out(schedule, problem), wanted


def rank_main(rank, num_ranks, port, cases):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with Node(cpu=True) as node:
        for name, schedule, problem, memory, wanted in cases:
            executor = Executor(schedule, problem, node, "math", laid_out=memory)
            executor.load(wanted)
            sums = dict.fromkeys((n for n in wanted if n.startswith("dw")), 0.0)
            for _ in range(2):  # buffers are used again
                executor.launch()
                found = list(executor.results())
            for tensor, tokens, heads, values in found:
                if tensor in sums:
                    sums[tensor] = values
                    continue
                np.testing.assert_allclose(
                    values, wanted[tensor][tokens][:, heads], rtol=1e-9, atol=1e-9, err_msg=f"{name} {tensor}"
                )
            if name.endswith("bwd"):
                for tensor, part in sums.items():  # every rank has the gradient that its own tokens give
                    dist.all_reduce(part)
                    np.testing.assert_allclose(part, wanted[tensor], rtol=1e-9, atol=1e-9, err_msg=f"{name} {tensor}")


def main(num_ranks):
    torch.set_num_threads(1)
    cases = list(planned(num_ranks))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(
        rank_main, (num_ranks, store.port, cases), nprocs=num_ranks, start_method="fork"
    )
    print(len(cases))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    end_process()
