"""What every process of tests/test_executor.py runs: all strategies, masks and passes against dense attention."""

import sys

import numpy as np
import torch
from cases import ALL_MASKS, ALL_PASSES, ALL_STRATEGIES, BLIND_MASK, DOCUMENTS, PLAIN_MASKS, cluster, workload
from numeric import tensors

from cpsim.errors import InfeasibleError
from cpsim.strategies import plan
from real.executor import Executor
from real.node import Node


def worst_difference(executor, given):
    """Largest difference of any output of this rank from dense attention."""
    executor.launch()
    worst = 0.0
    for tensor, tokens, heads, values in executor.results():
        wanted = given[tensor][tokens][:, heads]
        np.testing.assert_allclose(values.numpy(), wanted, rtol=1e-10, atol=1e-10, err_msg=tensor)
        worst = max(worst, float(np.abs(values.numpy() - wanted).max(initial=0.0)))
    return worst


def main():
    torch.set_num_threads(1)
    ran = 0
    with Node(cpu=True) as node:
        for mask in (*ALL_MASKS, BLIND_MASK):
            plain = mask in PLAIN_MASKS
            for documents in DOCUMENTS if plain and mask.endswith("document") else ("one",) if plain else ("uneven",):
                for heads in ("gqa", "mha", "mqa") if plain and node.size in (2, 4) else ("gqa",):
                    problem = workload(mask, documents, heads, dtype="fp64")
                    given = tensors(problem)
                    on_rank = {name: torch.from_numpy(array) for name, array in given.items()}
                    for strategy, knobs in ALL_STRATEGIES:
                        for pass_ in ALL_PASSES:
                            try:
                                schedule = plan(strategy, problem, cluster(node.size), pass_, knobs)
                            except InfeasibleError:
                                continue
                            executor = Executor(schedule, problem, node, "math")
                            executor.load(on_rank)
                            try:
                                worst_difference(executor, given)
                                worst_difference(executor, given)  # buffers are used again
                            except Exception as error:
                                case = f"{strategy} {knobs} {mask} {documents} {heads} {pass_}"
                                raise AssertionError(case) from error
                            ran += 1
        if node.rank == 0:
            print(ran)


if __name__ == "__main__":
    sys.exit(main())
