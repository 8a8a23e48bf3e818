"""What every process of tests/test_executor.py runs: all strategies, masks and passes against dense attention."""


import numpy as np
import torch
from cases import ALL_MASKS, ALL_PASSES, ALL_STRATEGIES, BLIND_MASK, DOCUMENTS, PLAIN_MASKS, cluster, workload
from numeric import tensors

from cpsim.errors import InfeasibleError
from cpsim.strategies import plan
from real.executor import Executor
from real.node import Node, end_process

FLEX = ("causal_document uneven gqa", "lambda uneven gqa", "shared_question uneven gqa", "block_sparse uneven gqa")
"""Cases of a second kernel that takes any mask."""


def worst_difference(executor, given):
    """Largest difference of any output of this rank from dense attention."""
    executor.launch()
    worst = 0.0
    for tensor, tokens, heads, values in executor.results():
        wanted = given[tensor][tokens][:, heads]
        np.testing.assert_allclose(values.numpy(), wanted, rtol=1e-10, atol=1e-10, err_msg=tensor)
        worst = max(worst, float(np.abs(values.numpy() - wanted).max(initial=0.0)))
    return worst


def problems(num_ranks):
    """(case in words, workload, strategies); rings run lengths that ranks do not divide, too."""
    for mask in (*ALL_MASKS, BLIND_MASK):
        plain = mask in PLAIN_MASKS
        for documents in DOCUMENTS if plain and mask.endswith("document") else ("one",) if plain else ("uneven",):
            for heads in ("gqa", "mha", "mqa") if plain and num_ranks in (2, 4) else ("gqa",):
                yield f"{mask} {documents} {heads}", workload(mask, documents, heads, dtype="fp64"), ALL_STRATEGIES
    rings = [(name, knobs) for name, knobs in ALL_STRATEGIES if "ring" in name or name == "hybrid_cp"]
    for documents in ((49,), (11,), (1, 20, 2, 32)):
        yield f"causal_document {documents}", workload("causal_document", documents, dtype="fp64"), rings


def main():
    torch.set_num_threads(1)
    ran = 0
    with Node(cpu=True) as node:
        for case, problem, strategies in problems(node.size):
            given = tensors(problem)
            on_rank = {name: torch.from_numpy(array) for name, array in given.items()}
            for strategy, knobs in strategies:
                for pass_ in ALL_PASSES:
                    try:
                        nodes_of = 2 if strategy == "dcp" and node.size == 4 else 8  # relays
                        schedule = plan(strategy, problem, cluster(node.size, nodes_of), pass_, knobs)
                    except InfeasibleError:
                        continue
                    for kernel in ("math", "flex") if node.size == 2 and not knobs and case in FLEX else ("math",):
                        executor = Executor(schedule, problem, node, kernel)
                        if kernel == "flex":
                            executor.program.rehearse()
                        executor.load(on_rank)
                        try:
                            for _ in range(1 if node.size == 8 else 2):  # buffers are used again
                                worst_difference(executor, given)
                        except Exception as error:
                            raise AssertionError(f"{strategy} {knobs} {case} {pass_} {kernel}") from error
                    ran += 1
        if node.rank == 0:
            print(ran)


if __name__ == "__main__":
    main()
    end_process()
