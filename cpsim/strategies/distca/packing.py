"""How DistCA's baselines spread documents: by work over data-parallel ranks, and each document over a CP group.

Reference: DistCA's baselines, "WLB-ideal" and per-sequence CP; hao-ai-lab/DistCA at 2afd219, planner/wlb_planner.py and
baseline/wlbllm_original; WLB-LLM (OSDI 2025) for the idea. Differs: no rank is padded to lengths that kernels like.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cpsim.errors import ScenarioError
from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.strategies.distca.tasks import Tasks, make_tasks

BREAKPOINTS: Final = {"8b": 64_000, "34b": 128 * 1024}
"""Document length at which attention takes as long as all else [tokens], as DistCA's scripts set it by model."""


def wlb_limit(context: int, batch_size: int, data_parallel: int, microbatches: int = 1, *, quirk: bool = True) -> int:
    """Tokens that a data-parallel rank of WLB-ideal takes of a microbatch before its work is looked at: the mean.

    Args:
        context: tokens of a sequence.
        batch_size: half of the sequences of a microbatch of all ranks, as DistCA's scripts count.
        data_parallel: ranks.
        microbatches: of an iteration, all packed at once.
        quirk: as in the released code, which divides by the microbatches what it has not multiplied by them: with
            several, hardly any document fits and packing goes by work alone. Without it the limit is the mean.
    """
    return context * 2 * batch_size * (1 if quirk else microbatches) // (data_parallel * microbatches)


def wlb_pack(documents: Ints, num_groups: int, limit: int, breakpoint_: int) -> Ints:
    """Group of every document, ``[D]``: the longest first, each to the group with the least work whose tokens stay
    within the limit, else to the one with the fewest tokens, else, after all others, to the one with the least work.

    Work of a document of l tokens is x² + x with x = l / breakpoint.

    Args:
        documents: lengths [tokens], ``[D]``.
        num_groups: data-parallel ranks times microbatches.
        limit: tokens of a group, see ``wlb_limit``.
        breakpoint_: document length at which attention takes as long as all else [tokens], see ``BREAKPOINTS``.

    Raises:
        ScenarioError: there are no groups.
    """
    if num_groups < 1:
        raise ScenarioError(f"wlb packing: expected at least one group, got {num_groups}")
    order = np.argsort(-documents, kind="stable")
    group = np.empty(len(documents), np.int64)
    group[order] = _wlb_pack(np.asarray(documents, np.int64)[order], num_groups, limit, float(breakpoint_))
    return group


@compiled()
def _wlb_pack(lengths, num_groups, limit, breakpoint_):  # type: ignore[no-untyped-def]
    work, tokens = np.zeros(num_groups), np.zeros(num_groups, np.int64)
    group = np.full(len(lengths), -1)
    for late in range(2):
        for i in range(len(lengths)):
            if group[i] >= 0:
                continue
            chosen = np.argmin(work)
            if late == 0 and tokens[chosen] + lengths[i] > limit:
                chosen = np.argmin(tokens)
                if tokens[chosen] + lengths[i] > limit:
                    continue
            x = lengths[i] / breakpoint_
            group[i] = chosen
            work[chosen] += x**2 + x
            tokens[chosen] += lengths[i]
    return group


def head_tail(documents: Ints, num_ranks: int) -> Tasks:
    """Every document in 2 P chunks, of which rank r has chunks r and 2 P - 1 - r; remainders go round over the chunks.

    Args:
        documents: lengths [tokens], ``[D]``.
        num_ranks: P, of the context-parallel group.
    """
    chunks = 2 * num_ranks
    even, more = np.divmod(documents, chunks)
    turn = (np.cumsum(more) - more) % chunks
    extra = (np.arange(chunks)[:, None] - turn) % chunks < more
    tokens = even + extra
    first = np.cumsum(tokens, axis=0) - tokens
    rank = np.minimum(np.arange(chunks), chunks - 1 - np.arange(chunks))
    columns = rank[:, None], rank[:, None], np.arange(len(documents)), first, tokens
    return make_tasks(*(np.broadcast_to(column, tokens.shape).ravel() for column in columns))


def per_sequence(documents: Ints, num_ranks: int) -> Tasks:
    """All documents, one after the other, as one buffer in 2 P chunks, of which rank r has chunks r and 2 P - 1 - r.

    Args:
        documents: lengths [tokens], ``[D]``, of one data-parallel rank; their sum need not divide by 2 P.
        num_ranks: P, of the context-parallel group.
    """
    ends, chunks = np.cumsum(documents), 2 * num_ranks
    cuts = np.arange(chunks + 1) * ends[-1] // chunks
    edges = np.union1d(cuts, np.append(0, ends))
    document = np.searchsorted(ends, edges[:-1], side="right")
    chunk = np.searchsorted(cuts, edges[:-1], side="right") - 1
    rank = np.minimum(chunk, chunks - 1 - chunk)
    return make_tasks(rank, rank, document, edges[:-1] - (ends - documents)[document], np.diff(edges))
