"""How much computation and NCCL kernels on one GPU slow each other while both run.

NCCL's kernels occupy SMs, one thread block for every channel, and memory bandwidth. Factors come from pairs in which
one lies wholly inside the other, the communication starting first. A communication that is launched while an
attention kernel runs also waits for that kernel's last blocks to be scheduled; that delay is not part of these factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from cpsim.units import CLOSED, Quantity

Floats = NDArray[np.float64]
Slowdown = Annotated[float, Quantity("", 0.5, 1e3)]

LIKE = {
    "cudnn": "fa4",
    "fa3": "fa4",
    "ffa": "fa4",
    "ffa_fa4": "fa4",
    "fa4_sparse": "fa4",
    "flex": "fa4",
    "sdpa_flash": "fa2",
    "fa2_ranges": "fa2",
    "flash_mask": "fa2",
    "fa2_sparse": "fa2",
}
"""Kernels that were not measured beside communication, and the one of their class that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceParams:
    """Slowdown factors, at least 1.

    Communication is named as a collective (`all_gather`) or as a transfer and its channels (`transfer 8`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    computation: Mapping[str, Mapping[str, Slowdown]]
    """Slowdown of the computation, by computation (`fa4 fwd`, `memory-bound`) and communication."""
    communication: Mapping[str, Mapping[str, Slowdown]]
    """Slowdown of the communication, by computation and communication."""

    def slowdown(self, kernel: str, classes: Sequence[str]) -> Floats:
        """Matrix [C, C] of slowdowns of class a while class b runs on the same GPU.

        Transfers on other numbers of channels than were measured disturb computation in proportion, none at none.

        Args:
            kernel: attention kernel behind the classes `attention fwd` and `attention bwd`.
            classes: names of the C classes, computations and communications; unknown ones disturb nothing.
        """
        matrix = np.ones((len(classes), len(classes)))
        for i, work in enumerate(classes):
            running, moving = (_of(factors, work, kernel) for factors in (self.computation, self.communication))
            for j, communication in enumerate(classes):
                matrix[i, j] *= _factor(running, communication, {0: 1.0})
                matrix[j, i] *= _factor(moving, communication, {})
        return matrix


def _of(factors: Mapping[str, Mapping[str, float]], work: str, kernel: str) -> Mapping[str, float]:
    """Factors of a class of computations, of the kernel or else of one like it; none of what was not measured."""
    names = (work.replace("attention", name) for name in (kernel, LIKE.get(kernel, kernel)))
    return next((factors[name] for name in names if name in factors), {})


def _factor(factors: Mapping[str, float], communication: str, ends: Mapping[int, float]) -> float:
    """The factor of a communication, interpolated over channels of transfers; 1 where there is none."""
    kind, _, number = communication.partition(" ")
    if not number.isdigit():
        return factors.get(communication, 1.0)
    known = {int(name.split()[1]): factor for name, factor in factors.items() if name.startswith(f"{kind} ")}
    if not known:
        return 1.0
    points = sorted({**ends, **known}.items())
    return float(np.interp(int(number), [n for n, _ in points], [factor for _, factor in points]))
