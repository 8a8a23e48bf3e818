"""Compares the executor with dense attention on this machine's GPUs, every kernel, strategy, mask, shape and pass.

    torchrun --nproc-per-node 4 -m cpsim.real.run.check_executor --kernels fa2,fa4,cudnn,sdpa_flash,flex

Prints the largest error of every case relative to the largest value, as bf16 leaves it (some 1e-2), and ends with
status 1 where one is larger than `WORST`. The oracle is plain PyTorch attention in fp32 on one GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from cpsim.case.load import scenario_from
from cpsim.case.resolve import workload_of
from cpsim.case.scenario import Scenario
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.real.others.cpsim import make
from cpsim.real.run import attention
from cpsim.real.run.executor import EAGER_RUNS
from cpsim.real.run.node import Node, end_process
from cpsim.schedule.schedule import Pass

WORST = 3e-2
PASSES: tuple[Pass, ...] = ("fwd", "bwd")
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hybrid_cp", {"tokens_per_rank": 700}),
    ("magi", {"chunk": 128}),
    ("magi", {"chunk": 128, "stages": 1}),
    ("none", {}),
    ("ring", {}),
    ("zigzag_ring", {"zigzag": "document"}),
    ("zigzag_ring", {"zigzag": "sequence"}),
    ("zigzag_ring", {"backward": "queries"}),
    ("striped_ring", {}),
    ("ulysses", {}),
    ("ulysses", {"head_groups": 2}),
    ("ulysses", {"token_chunks": 2}),
    ("allgather", {"layout": "contiguous"}),
    ("allgather", {"layout": "zigzag", "heads_per_gather": 1}),
    ("allgather", {"layout": "document_zigzag"}),
    ("usp", {"ulysses": 2}),
    ("usp", {"ulysses": 2, "ring": "basic", "placement": "context_first"}),
    ("loongtrain", {"ulysses": 1, "inner_ring": 2}),
    ("loongtrain", {"ulysses": 2}),
    ("mesh", {"keys": 1}),
    ("mesh", {"keys": 2, "heads_per_gather": 1}),
    ("dcp", {"block": 256}),
    ("dcp", {"block": 256, "variant": "paper", "solver": "greedy"}),
)
DOCUMENTS = (700, 36, 1312)
MASKS: Mapping[str, Mapping[str, int]] = {
    "causal": {},
    "full": {},
    "causal_document": {},
    "full_document": {},
    "lambda": {"sink": 40, "window": 300},
    "causal_blockwise": {},
    "shared_question": {},
    "causal_sliding_window": {"window": 300},
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"kv_heads": 4, "head_dim": 128},
    "sinks": {"kv_heads": 4, "head_dim": 128, "sinks": True},
    "values": {"kv_heads": 16, "head_dim": 192, "value_dim": 128},
}


def dense(workload: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    """Random q, kv, dout and sinks, and out (log-sum-exp last), dq, dkv and gradients of sinks, as `Executor.load`
    takes them."""
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = workload.num_tokens, workload.num_heads, workload.num_kv_heads, workload.head_dim
    values = workload.values

    def random(count: int, width: int) -> torch.Tensor:
        return torch.randn(tokens, count, width, device=device).bfloat16().float()

    q, kv, dout = random(heads, dim), random(kv_heads, dim + values), random(heads, values)
    k, v = kv[..., :dim].contiguous(), kv[..., dim:].contiguous()
    call = attention.prepare_mask(workload.slices(), tokens, tokens, device=device)
    out, lse = attention.forward("math", q, k, v, call)
    sinks, of_sinks = torch.randn(heads, device=device), {}
    if workload.sinks:
        joined = torch.logaddexp(lse, sinks[:, None])
        out, lse = out * torch.exp(lse - joined).T[..., None], joined
        total = -(torch.exp(sinks[:, None] - lse) * (dout * out).sum(2).T).sum(1)
        of_sinks = {"sink": sinks[None, :, None], "dsink": total[None, :, None]}
    dq, dk, dv = attention.backward("math", dout, q, k, v, out, lse, call)
    return {
        "q": q,
        "kv": kv,
        "dout": dout,
        "out": torch.cat([out, lse.T[..., None]], 2),
        "o": out,
        "dq": dq,
        "dkv": torch.cat([dk, dv], 2),
        **of_sinks,
    }


def error(scenario: Scenario, pass_: Pass, node: Node, given: dict[str, torch.Tensor]) -> float:
    """Largest difference of this rank's results from dense attention, relative to the largest value."""
    executor = make(scenario, pass_, node).executor
    executor.load(given)
    worst = 0.0
    for _ in range(EAGER_RUNS + 2):  # the last ones replay the CUDA graph
        executor.launch()
        node.synchronize()
        for tensor, tokens, heads, values in executor.results():
            wanted = given[tensor][torch.from_numpy(tokens).to(node.device)][:, heads]
            worst = max(worst, float((values.float() - wanted).abs().max() / wanted.abs().max()))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", default="fa2,fa4,cudnn,sdpa_flash,flex")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--shapes", default="plain")
    parser.add_argument("--strategies", default=",".join(dict.fromkeys(name for name, _ in CASES)))
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    failed = 0
    node = Node(cpu=args.cpu)  # its groups end with the process: captured programs still hold them
    for mask, shape in product(args.masks.split(","), args.shapes.split(",")):
        base: dict[str, Any] = {
            "gpus": node.size,
            "cluster": "h200-4" if node.size <= 4 else "dgx-h200",
            "tokens": 2048,
            "mask": {"name": mask, **MASKS[mask]},
            "heads": 16,
            **SHAPES[shape],
            "dtype": "bf16",
            "pass": "fwd",
        }
        base |= {"documents": list(DOCUMENTS)} if mask.endswith("document") else {}
        given = dense(workload_of(scenario_from(base | {"strategy": "ring", "kernel": "fa2"})), node.device)
        for kernel in args.kernels.split(","):
            for strategy, knobs in (case for case in CASES if case[0] in args.strategies.split(",")):
                scenario = scenario_from(base | {"strategy": strategy, "knobs": knobs, "kernel": kernel})
                for pass_ in PASSES:
                    try:
                        worst = max(node.gather(error(scenario, pass_, node, given)))
                    except InfeasibleError:
                        continue
                    failed += not worst <= WORST
                    if node.rank == 0:
                        flag = "" if worst <= WORST else "  <-- too large"
                        print(f"{kernel:10s} {strategy} {knobs} {mask} {shape} {pass_}: {worst:.1e}{flag}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    end_process(main())
