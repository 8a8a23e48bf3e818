"""How much computation and NCCL kernels on one GPU slow each other while both run.

NCCL's kernels occupy SMs and memory bandwidth. Factors come from pairs in which one lies wholly inside the other,
the communication starting first. A communication that is launched while an attention kernel runs also waits for
that kernel's last blocks to be scheduled; that delay is not part of these factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LIKE = {"cudnn": "fa4", "fa3": "fa4", "sdpa_flash": "fa2"}
"""Kernels that were not measured beside communication, and the one of their class that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceParams:
    """Slowdown factors, at least 1."""

    computation: Mapping[str, Mapping[str, float]]
    """By computation (`fa4 fwd`, `memory-bound`) and communication (`transfer`, `collective`): of the computation."""
    communication: Mapping[str, Mapping[str, float]]
    """By the same: of the communication."""

    def slowdown(self, kernel: str, classes: Sequence[str]) -> Floats:
        """Matrix [C, C] of slowdowns of class a while class b runs on the same GPU.

        Args:
            kernel: attention kernel behind the classes `attention fwd` and `attention bwd`.
            classes: names of the C classes; `transfer` and `collective` communicate, unknown ones disturb nothing.
        """
        matrix = np.ones((len(classes), len(classes)))
        for i, work in enumerate(classes):
            name = work.replace("attention", kernel)
            if name not in self.computation:
                name = work.replace("attention", LIKE.get(kernel, kernel))
            if name not in self.computation:
                continue
            for j, communication in enumerate(classes):
                if communication in self.computation[name]:
                    matrix[i, j] = self.computation[name][communication]
                    matrix[j, i] = self.communication.get(name, {}).get(communication, 1.0)
        return matrix
