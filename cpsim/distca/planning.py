"""Tasks of a nano-batch by any of the schedulers, and the tolerance at which exchanges fit their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal, get_args

import numpy as np

from cpsim.distca.balanced import balanced
from cpsim.distca.greedy import Grid, as_in_paper, released
from cpsim.distca.kernel import Kernel
from cpsim.distca.tasks import Tasks, TokenBytes, dispatch
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks import Ints

Variant = Literal["released", "paper", "cpsim"]

TOLERANCES: Final = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8,
                     0.9, 1.0)  # fmt: skip
"""That the released code tries one after the other, from the one asked for."""


def schedule(
    documents: Ints, num_servers: int, sizes: TokenBytes, kernel: Kernel, *, variant: Variant = "released",
    tolerance: float = 0.05, offset: Ints | int = 0,
) -> Tasks:  # fmt: skip
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


def schedule_within(
    nano_batches: Sequence[Ints], num_servers: int, sizes: TokenBytes, kernel: Kernel, buffer_bytes: float, *,
    variant: Variant = "released", tolerance: float = 0.05,
) -> tuple[list[Tasks], float]:  # fmt: skip
    """Tasks of all nano-batches at the first tolerance whose exchanges fit, and that tolerance.

    Args:
        nano_batches: documents of each.
        buffer_bytes: that any rank may send or receive in one exchange, its own part included; DistCA has 2 GB, with
            pipeline stages 1.5 GB, for each of two exchanges.
        tolerance: the first to be tried, before those of TOLERANCES that are higher.

    Raises:
        InfeasibleError: none fits.
    """
    for tried in (tolerance, *(t for t in TOLERANCES if t > tolerance)):
        plans = [
            schedule(documents, num_servers, sizes, kernel, variant=variant, tolerance=tried)
            for documents in nano_batches
        ]
        most = max(dispatch(tasks, num_servers, sizes).buffer_bytes() for tasks in plans)
        if most <= buffer_bytes:
            return plans, tried
    raise InfeasibleError(f"distca: exchanges need buffers of {most} B at any tolerance, got {buffer_bytes:.0f} B")


@lru_cache(maxsize=8)
def profiled(kernel: Kernel) -> Grid:
    """A profiler's grid of a kernel: 128 to 48K queries after 0 to 768K tokens of context, two lengths an octave."""
    lengths = 128 * np.outer(2 ** np.arange(13), [2, 3]).ravel() // 2
    queries, context = lengths[: 2 * 9], np.append(0, lengths)
    first, tokens = np.broadcast_arrays(context, queries[:, None])
    seconds = kernel.cost(first.ravel(), tokens.ravel()).reshape(first.shape)
    return Grid(queries.astype(np.float64), context.astype(np.float64), seconds)
