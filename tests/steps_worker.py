"""What tests/test_real_steps_cpu.py runs: steps of tiny models on forked ranks, cut in every way, in float32."""

import importlib
import itertools
import json
import sys

import torch
import torch.distributed as dist
from implementations_worker import flash_on_cpu
from ranks import fork_ranks
from torch.distributed.tensor import DTensor

from cpsim.case.load import scenario_from
from cpsim.real.run.node import end_process
from cpsim.real.steps import MODULES, make


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def gradients(runner):
    """The loss of all replicas and whole gradients by name."""
    runner.optimizer.zero_grad()
    runner.backward()
    loss = whole(runner.loss)
    dist.all_reduce(loss)
    named = runner.inner.named_parameters()
    return loss / dist.get_world_size(), {n.replace("_orig_mod.", ""): whole(p.grad) for n, p in named}


def rank_main(node, _, cases):
    for scenario, wanted in cases:
        kept = flash_on_cpu() if scenario.parallel.cp and scenario.parallel.cp > 1 else None
        runner = make(scenario, node)
        loss, found = gradients(runner)
        expected, grads = wanted[scenario.framework]
        where = str(scenario.to_dict())
        torch.testing.assert_close(loss, expected, msg=lambda m, w=where: f"{w}: {m}")
        assert found.keys() == grads.keys()
        for name, grad in found.items():
            torch.testing.assert_close(
                grad, grads[name], rtol=2e-4, atol=2e-6, msg=lambda m, w=where, n=name: f"{w} {n}: {m}"
            )
        before = {name: whole(p) for name, p in runner.inner.named_parameters()}
        runner.launch()
        after = {name: whole(p) for name, p in runner.inner.named_parameters()}
        assert all((after[name] != before[name]).any() for name in before), where
        del kept


def plain(node, _, cases):
    """Writes losses and gradients of uncut steps."""
    path, scenarios = cases
    torch.save({s.framework: gradients(make(s, node)) for s in scenarios}, path)


def main(path, folder):
    """Runs all cases against those of one rank, one microbatch, nothing sharded or computed again."""
    torch.set_num_threads(1)
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    uncut = [
        {**line, "gpus": 1, "strategy": "none", "parallel": {"sharding": "none"}, "compile": False} for line in lines
    ]
    for module in {f"cpsim.real.steps.{MODULES[line['framework']]}" for line in lines} | {"torch._dynamo"}:
        importlib.import_module(module)  # once for all ranks
    firsts = {line["framework"]: scenario_from(line) for line in uncut}
    fork_ranks(plain, 1, (f"{folder}/wanted.pt", list(firsts.values())))
    wanted = torch.load(f"{folder}/wanted.pt")
    cases = [scenario_from(line) for line in lines]
    for num_ranks, asked in itertools.groupby(cases, lambda case: case.gpus):
        fork_ranks(rank_main, num_ranks, [(case, wanted) for case in asked])
    print(len(cases))


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_process()
