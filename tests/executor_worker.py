"""What tests/test_executor.py runs: strategies, masks and passes on forked processes, against dense attention.

One process plans every case, lays out its memory and computes it densely; its forks are the ranks. They run every
strategy with some masks and every mask with some strategies; with "all", every strategy with every mask; with the name
of a knob, what has that knob with every mask.
"""

import importlib
import sys
from dataclasses import replace

import numpy as np
import torch
from cases import ALL_MASKS, ALL_PASSES, ALL_STRATEGIES, BLIND_MASK, DOCUMENTS, HEADS, PLAIN_MASKS, cluster, workload
from numeric import tensors
from ranks import fork_ranks

from cpsim.errors import InfeasibleError
from cpsim.models import feasible
from cpsim.real.run import attention
from cpsim.real.run.executor import Executor
from cpsim.real.run.node import end_process
from cpsim.real.run.storage import lay_out
from cpsim.strategies import ANY_VALUES, CACHED, plan

WINDOWED = "windowed"
"""Plain attention in float64 as a kernel that takes sequences and windows, but no other masks, as flash-attention."""
feasible.LIMITS[WINDOWED] = feasible.Limits(dtypes=("fp64",), windows="both")
attention.KERNELS[WINDOWED] = replace(attention.KERNELS["math"], masks="sequences")
FLEX = ("causal_document uneven gqa", "lambda uneven gqa", "shared_question uneven gqa", "block_sparse uneven gqa")
"""Cases of a second kernel that takes any mask."""


def problems(num_ranks):
    """(case in words, workload, strategies); rings run lengths that ranks do not divide, too."""
    for mask in (*ALL_MASKS, BLIND_MASK):
        plain = mask in PLAIN_MASKS
        for documents in DOCUMENTS if plain and mask.endswith("document") else ("one",) if plain else ("uneven",):
            all_heads = num_ranks == 4 and (mask, documents) in (("full", "one"), ("causal_document", "uneven"))
            for heads in HEADS if all_heads else ("gqa",):
                yield f"{mask} {documents} {heads}", workload(mask, documents, heads, dtype="fp64"), ALL_STRATEGIES
    held = [(name, knobs) for name, knobs in ALL_STRATEGIES if name in CACHED]
    for mask, cached in (("causal", 16), ("causal", 31), ("full", 40), ("causal_document", 12)):
        yield f"{mask} cached {cached}", workload(mask, "uneven", dtype="fp64", cached=cached), held
    for i, (mask, documents) in enumerate((("causal", "one"), ("causal_document", "uneven"), (BLIND_MASK, "uneven"))):
        problem = workload(mask, documents, "mha" if i else "gqa", dtype="fp64", sinks=True)
        yield f"{mask} {documents} with sinks", problem, ALL_STRATEGIES
    sized = [(name, knobs) for name, knobs in ALL_STRATEGIES if name in ANY_VALUES]
    for mask, values, heads in (("causal", 2, "gqa"), ("causal_document", 6, "mha"), (BLIND_MASK, 12, "mha")):
        problem = workload(mask, "uneven", heads, dtype="fp64", value_dim=values)
        yield f"{mask} {heads} values of {values}", problem, sized
    rings = [(name, knobs) for name, knobs in ALL_STRATEGIES if "ring" in name or name == "hybrid_cp"]
    for documents in ((49,), (11,), (1, 20, 2, 32)):
        yield f"causal_document {documents}", workload("causal_document", documents, dtype="fp64"), rings


SHARE, SHARE_OF_ALL = 5, {8: 4}
"""One of so many strategies runs with each mask, in turn; where all are asked for, by ranks."""


def planned(num_ranks, asked):
    """(name, kernel, launches, schedule, workload, its memory, dense tensors) of what this number of ranks can run.

    A second launch uses the buffers of the first again.
    """
    for turn, (case, problem, strategies) in enumerate(problems(num_ranks)):
        dense, both = tensors(problem), num_ranks == 2 and case in FLEX
        share = SHARE_OF_ALL.get(num_ranks, 1) if asked == "all" else SHARE
        mine = strategies[(turn + num_ranks) % share :: share]
        if asked not in ("", "all"):
            mine = [(name, knobs) for name, knobs in strategies if asked in knobs]
        launches = 2 if num_ranks < 4 or (num_ranks == 4 and problem.mask in PLAIN_MASKS) else 1
        for strategy, knobs in mine:
            for pass_ in ALL_PASSES:
                try:
                    nodes_of = 2 if strategy == "dcp" and num_ranks == 4 else 8  # relays
                    schedule = plan(strategy, problem, cluster(num_ranks, nodes_of), pass_, knobs)
                except InfeasibleError:
                    continue
                memory = lay_out(schedule, problem)
                yield f"{strategy} {knobs} {case} {pass_} math", "math", launches, schedule, problem, memory, dense
                if "sliding" in problem.mask and not feasible.refusal(WINDOWED, "fp64", problem.head_dim, schedule):
                    yield f"{strategy} {knobs} {case} {pass_} windows", WINDOWED, 1, schedule, problem, memory, dense
                if both and not knobs:
                    yield f"{strategy} {knobs} {case} {pass_} flex", "flex", 1, schedule, problem, memory, dense


def run(executor, dense):
    """Launches, and compares every output of this rank with dense attention."""
    executor.launch()
    for tensor, tokens, heads, values in executor.results():
        wanted = dense[tensor][tokens][:, heads]
        np.testing.assert_allclose(values.numpy(), wanted, rtol=1e-10, atol=1e-10, err_msg=tensor)


def rank_main(node, _, cases):
    """One rank runs all cases."""
    for name, kernel, launches, schedule, problem, memory, dense in cases:
        try:
            executor = Executor(schedule, problem, node, kernel, laid_out=memory)
            if kernel == "flex":
                executor.program.rehearse()
            executor.load({tensor: torch.from_numpy(array) for tensor, array in dense.items()})
            for _ in range(launches):
                run(executor, dense)
        except Exception as error:
            raise AssertionError(f"{name}, rank {node.rank}") from error


def main(num_ranks, asked):
    torch.set_num_threads(1)
    cases = list(planned(num_ranks, asked))
    if any(kernel == "flex" for _, kernel, *_ in cases):
        importlib.import_module("torch._dynamo")  # once for all ranks
    fork_ranks(rank_main, num_ranks, cases)
    print(len({name for name, *_ in cases}))


if __name__ == "__main__":
    main(int(sys.argv[1]), "".join(sys.argv[2:]))
    end_process()
