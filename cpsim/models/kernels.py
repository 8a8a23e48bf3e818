"""What attention kernels can be called with, apart from how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.errors import InfeasibleError
from cpsim.tiles import Sequences

DTYPES: Final = ("bf16", "fp16")
"""Element types of all flash kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Calls that a kernel's package does not offer with log-sum-exp and a backward from given outputs."""

    varlen: bool = True
    """Several sequences in one call."""
    unequal_causal: bool = True
    """Causal masks aligned to the bottom right with fewer queries than keys."""
    places_results: bool = True
    """Results are written where the caller wants them; otherwise our executor copies them there."""
    dtypes: tuple[str, ...] = DTYPES


LIMITS: Final = {
    "cudnn": Limits(varlen=False, unequal_causal=False, places_results=False),
    "sdpa_flash": Limits(places_results=False),
    "math": Limits(dtypes=(*DTYPES, "fp32", "fp64")),
}
"""Kernels with limits of their own. cuDNN: through PyTorch 2.11's SDPA, which aligns causal masks to the top left."""


def limits_of(kernel: str) -> Limits:
    """What a kernel cannot do; most can do everything."""
    return LIMITS.get(kernel, Limits())


def check_calls(kernel: str, dtype: str, sequences: Sequences, used: NDArray[np.bool_]) -> None:
    """Whether a kernel can run each of the used tiles in one call.

    Args:
        kernel: its name.
        dtype: element type of queries, keys and values.
        sequences: of all tiles.
        used: ``[num_tiles]``.

    Raises:
        InfeasibleError: it cannot; says which call it would have to make.
    """
    limits = limits_of(kernel)
    if dtype not in limits.dtypes:
        raise InfeasibleError(f"kernel {kernel} runs {' and '.join(limits.dtypes)}, got dtype {dtype}")
    of_tile = np.repeat(used, np.diff(sequences.start))
    if not sequences.regular[of_tile].all():
        raise InfeasibleError(
            f"kernel {kernel} runs full and bottom-right causal sequences; this strategy's share of the mask has others"
        )
    if not limits.varlen and (np.diff(sequences.start)[used] > 1).any():
        raise InfeasibleError(f"kernel {kernel} takes one sequence a call, this strategy needs several; use fa2 or fa4")
    unequal = sequences.causal & (sequences.q_len != sequences.k_len) & of_tile
    if not limits.unequal_causal and unequal.any():
        example = int(np.flatnonzero(unequal)[0])
        raise InfeasibleError(
            f"kernel {kernel} has no causal call with {sequences.q_len[example]} queries on "
            f"{sequences.k_len[example]} keys, which this strategy needs; use fa2 or fa4"
        )
