"""What tests/test_executor.py runs: strategies, masks and passes on forked processes, against dense attention.

One process plans every case, lays out its memory and computes it densely; its forks are the ranks. Two and four of
them run every strategy with every mask.
"""

import sys

import numpy as np
import torch
from cases import ALL_MASKS, ALL_PASSES, ALL_STRATEGIES, BLIND_MASK, DOCUMENTS, HEADS, PLAIN_MASKS, cluster, workload
from numeric import tensors
from ranks import fork_ranks

from cpsim.errors import InfeasibleError
from cpsim.strategies import plan
from real.executor import Executor
from real.node import end_process
from real.storage import lay_out

FLEX = ("causal_document uneven gqa", "lambda uneven gqa", "shared_question uneven gqa", "block_sparse uneven gqa")
"""Cases of a second kernel that takes any mask."""


def problems(num_ranks):
    """(case in words, workload, strategies); rings run lengths that ranks do not divide, too."""
    for mask in (*ALL_MASKS, BLIND_MASK):
        plain = mask in PLAIN_MASKS
        for documents in DOCUMENTS if plain and mask.endswith("document") else ("one",) if plain else ("uneven",):
            for heads in HEADS if num_ranks == 4 and mask in ("full", "causal_document") else ("gqa",):
                yield f"{mask} {documents} {heads}", workload(mask, documents, heads, dtype="fp64"), ALL_STRATEGIES
    rings = [(name, knobs) for name, knobs in ALL_STRATEGIES if "ring" in name or name == "hybrid_cp"]
    for documents in ((49,), (11,), (1, 20, 2, 32)):
        yield f"causal_document {documents}", workload("causal_document", documents, dtype="fp64"), rings


def planned(num_ranks):
    """(name, kernel, schedule, workload, its memory, dense tensors) of what this number of ranks can run.

    On 3 and 8 a third of all strategies with each mask, in turn.
    """
    for turn, (case, problem, strategies) in enumerate(problems(num_ranks)):
        dense = tensors(problem)
        for strategy, knobs in strategies[turn % 3 :: 3] if num_ranks in (3, 8) else strategies:
            for pass_ in ALL_PASSES:
                try:
                    nodes_of = 2 if strategy == "dcp" and num_ranks == 4 else 8  # relays
                    schedule = plan(strategy, problem, cluster(num_ranks, nodes_of), pass_, knobs)
                except InfeasibleError:
                    continue
                memory = lay_out(schedule, problem)
                for kernel in ("math", "flex") if num_ranks == 2 and not knobs and case in FLEX else ("math",):
                    yield f"{strategy} {knobs} {case} {pass_} {kernel}", kernel, schedule, problem, memory, dense


def run(executor, dense):
    """Launches, and compares every output of this rank with dense attention."""
    executor.launch()
    for tensor, tokens, heads, values in executor.results():
        wanted = dense[tensor][tokens][:, heads]
        np.testing.assert_allclose(values.numpy(), wanted, rtol=1e-10, atol=1e-10, err_msg=tensor)


def rank_main(node, num_ranks, cases):
    """One rank runs all cases."""
    for name, kernel, schedule, problem, memory, dense in cases:
        try:
            executor = Executor(schedule, problem, node, kernel, laid_out=memory)
            if kernel == "flex":
                executor.program.rehearse()
            executor.load({tensor: torch.from_numpy(array) for tensor, array in dense.items()})
            for _ in range(2 if kernel == "math" and num_ranks < 8 else 1):  # buffers are used again
                run(executor, dense)
        except Exception as error:
            raise AssertionError(f"{name}, rank {node.rank}") from error


def main(num_ranks):
    torch.set_num_threads(1)
    cases = list(planned(num_ranks))
    fork_ranks(rank_main, num_ranks, cases)
    print(len({name for name, *_ in cases}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    end_process()
