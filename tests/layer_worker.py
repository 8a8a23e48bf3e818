"""What tests/test_layer.py runs: whole layers on forked processes in float64, against autograd on one process."""

import sys

import numpy as np
import torch
import torch.distributed as dist
from cases import cluster, workload
from layer_cases import LAYERS, MODEL
from ranks import fork_ranks

from cpsim.real.run.check_layer import dense
from cpsim.real.run.executor import Executor
from cpsim.real.run.node import end_process
from cpsim.real.run.storage import lay_out
from cpsim.strategies.steps.layer import plan_layer, widths


def planned(num_ranks):
    for case, documents, strategy, knobs in LAYERS:
        problem = workload("causal_document", documents, dtype="fp64")
        wanted = dense(problem, MODEL, torch.float64, torch.device("cpu"))
        assert all(wanted[name].shape[1] == width for name, width in widths(MODEL).items() if name in wanted)
        for pass_ in ("fwd", "bwd"):
            schedule = plan_layer(strategy, problem, MODEL, cluster(num_ranks), pass_, knobs)
            yield f"{case} {pass_}", schedule, problem, lay_out(schedule, problem), wanted


def rank_main(node, _, cases):
    for name, schedule, problem, memory, wanted in cases:
        executor = Executor(schedule, problem, node, "math", laid_out=memory)
        executor.load(wanted)
        sums = {n: torch.zeros_like(t) for n, t in wanted.items() if n.startswith("dw")}
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
    fork_ranks(rank_main, num_ranks, cases)
    print(len(cases))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    end_process()
