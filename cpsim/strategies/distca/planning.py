"""Tasks of a nano-batch by any of the schedulers."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from cpsim.errors import ScenarioError
from cpsim.masks.slices import Ints
from cpsim.strategies.distca.balanced import balanced
from cpsim.strategies.distca.greedy import TimeTable, as_in_paper, released
from cpsim.strategies.distca.kernel import Kernel
from cpsim.strategies.distca.tasks import Tasks, TokenBytes

Variant = Literal["released", "paper", "cpsim"]


def schedule(
    documents: Ints,
    num_servers: int,
    sizes: TokenBytes,
    kernel: Kernel,
    *,
    variant: Variant = "released",
    tolerance: float = 0.05,
    offset: Ints | int = 0,
) -> Tasks:
    """Tasks of one nano-batch, whose documents lie on the servers one after the other.

    Args:
        documents: lengths [tokens], ``[D]``; every server is home of as many tokens.
        num_servers: n.
        sizes: of a token.
        kernel: of the pass that is planned; ``released`` counts pairs instead.
        variant: ``released``, ``paper`` or ``cpsim``; see the functions of this name in ``greedy`` and ``balanced``.
        tolerance: of the mean work.
        offset: tokens of every document that come before, in another nano-batch.

    Raises:
        ScenarioError: there is no such variant, or the tolerance is negative.
    """
    if tolerance < 0:
        raise ScenarioError(f"tolerance: expected a share of the mean work from 0, got {tolerance}")
    match variant:
        case "released":
            return released(documents, num_servers, sizes, tolerance, offset)
        case "paper":
            return as_in_paper(documents, num_servers, sizes, tolerance, profiled(kernel), offset)
        case "cpsim":
            return balanced(documents, num_servers, sizes, tolerance, kernel, offset)
    raise ScenarioError(f"variant: expected one of {', '.join(get_args(Variant))}, got {variant!r}")


@lru_cache(maxsize=8)
def profiled(kernel: Kernel) -> TimeTable:
    """A profiler's grid of a kernel: 128 to 48K queries after 0 to 768K tokens of context, two lengths an octave."""
    lengths = 128 * np.outer(2 ** np.arange(13), [2, 3]).ravel() // 2
    queries, context = lengths[: 2 * 9], np.append(0, lengths)
    first, tokens = np.broadcast_arrays(context, queries[:, None])
    seconds = kernel.cost(first.ravel(), tokens.ravel()).reshape(first.shape)
    return TimeTable(queries.astype(np.float64), context.astype(np.float64), seconds)
