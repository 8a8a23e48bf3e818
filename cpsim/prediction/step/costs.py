"""Seconds of a layer's ops from a profile, by cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.errors import NotMeasuredError
from cpsim.models.cost_models import GROUPS
from cpsim.models.elementwise import elementwise_seconds
from cpsim.models.gemm import FP8_BYTES, gemm_seconds, in_fp8
from cpsim.models.network.collective import collective_seconds, transfer_seconds
from cpsim.models.network.pressure import LIKE_PRODUCTS
from cpsim.models.spread import expected_maximum
from cpsim.prediction.step.layer import Collective, Copy, ElementwisePass, Gemm, Op

if TYPE_CHECKING:
    from cpsim.models.profile import LayerCosts, Profile

Floats = NDArray[np.float64]
Parts = Mapping[str, float]
"""Seconds by cost model: a key of PARTS."""
PARTS: Final = GROUPS
INSTEAD: Final = {
    "adamw_bf16": "adam",
    "adamw_fp32": "adam",
    "chunk_cat": "strided",
    "split_copy": "copy",
    "fp8_cast_rows": "copy",
}
"""Memory-bound kernels of libraries, and what stands for them in profiles that lack them."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices of ops on one GPU of many."""

    profile: Profile
    tp: int
    num_gpus: int
    """GPUs of the step: sooner or later all wait for the slowest."""
    _known: dict[Op, Parts] = field(default_factory=dict)

    @property
    def layers(self) -> LayerCosts:
        """What was measured of layers.

        Raises:
            NotMeasuredError: nothing was.
        """
        if self.profile.layers is None:
            raise NotMeasuredError(
                f"profile {self.profile.name} lacks products and memory-bound ops of layers; "
                "measure them with cpsim.real.measure.layers"
            )
        return self.profile.layers

    def seconds(self, ops: Iterable[Op]) -> Parts:
        """Seconds of ops that run one after another; communication counts where it is not hidden."""
        total: Counter[str] = Counter()
        for op in ops:
            if op not in self._known:
                self._known[op] = self._price(op)
            total.update(self._known[op])
        return total

    def notes(self, ops: Iterable[Op]) -> tuple[str, ...]:
        """What about these ops lies outside of the measured range."""
        found: dict[str, None] = {}
        for op in ops:
            talk = op.beside if isinstance(op, Gemm) else op
            if isinstance(op, Gemm):
                found.update(dict.fromkeys(self.profile.products_notes(op.flops / op.times, steady=True)))
            if isinstance(talk, Collective):
                found.update(dict.fromkeys(self.profile.collective_notes(talk.kind, talk.nbytes, self.tp)))
        return tuple(found)

    def slowest(self, spread: float) -> float:
        """Time of the slowest GPU over that of the mean one, where GPUs differ by `spread`."""
        return 1.0 + spread * expected_maximum(self.num_gpus)

    def _price(self, op: Op) -> Parts:
        match op:
            case Gemm():
                return self._product(op)
            case ElementwisePass():
                return {"elementwise of layers": op.times * float(self.swept(op.kind, op.nbytes))}
            case Collective():
                return {"collective": self._collective(op)}
            case Copy():
                return {"transfer": self._copy(op)}

    def swept(self, kind: str, nbytes: ArrayLike) -> Floats:
        """Seconds of memory-bound ops that read and write so many bytes each."""
        ops, others = self.layers.ops, self.profile.elementwise
        name = kind if kind in (*ops.latency_s, *others.latency_s) else INSTEAD.get(kind, kind)
        return elementwise_seconds(ops if name in ops.latency_s else others, name, nbytes)

    def _collective(self, op: Collective) -> float:
        return float(collective_seconds(self.profile.collective, op.kind, op.nbytes, self.tp))

    def _copy(self, op: Copy) -> float:
        """The latency of a message, and all of a port: copy engines know no channels."""
        collective = self.profile.collective
        return float(transfer_seconds(collective, 1, 2)) + op.nbytes / collective.port_bytes_per_s

    def _product(self, op: Gemm) -> Parts:
        """A product after seconds of load, slowed by what runs beside it, and what of that outlasts it."""
        gemm = self.layers.gemm
        if op.fp8:
            alone = float(gemm_seconds(in_fp8(gemm, op.fp8), op.m, op.n, op.k, operand_bytes=FP8_BYTES))
        else:
            alone = float(gemm_seconds(gemm, op.m, op.n, op.k))
        alone *= op.times * self.slowest(self.profile.sigma["run to run"])
        alone *= float(self.profile.sustained_factor("matrix products"))
        if op.beside is None:
            return {"matrix products": alone}
        lost, rest = self.beside(alone, self._collective(op.beside), op.beside.kind)
        return {"matrix products": alone, "interference": lost, "collective": rest}

    def beside(self, ours_s: float, theirs_s: float, kind: str) -> tuple[float, float]:
        """What computation loses beside a collective of its node, and what of the collective outlasts it, in seconds.

        Args:
            ours_s, theirs_s: seconds of both alone.
            kind: of the collective.
        """
        ours = self.profile.interference.computation.get(LIKE_PRODUCTS, {}).get(kind, 1.0)
        theirs = self.profile.interference.communication.get(LIKE_PRODUCTS, {}).get(kind, 1.0)
        together = min(ours_s * ours, theirs_s * theirs)
        return together * (1 - 1 / ours), max(theirs_s - together / theirs, 0.0)


def stacked(parts: Iterable[Parts]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Rows of seconds in the order of PARTS, ``[N, len(PARTS)]``."""
    return np.array([[row.get(name, 0.0) for name in PARTS] for row in parts]).reshape(-1, len(PARTS))
