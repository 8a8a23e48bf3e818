"""What hosts take for a layer of a training step, measured as a whole.

Between the kernels of a layer PyTorch runs hooks of FSDP, dispatches DTensors, checks the guards of compiled code and
walks autograd's graph, and Transformer Engine and Megatron-Core run their own Python around every product, so that a
layer takes its host several times what its launches alone would. It was measured by framework, by how a step is cut, by
what it computes again, with adapters and by the experts of a rank (`cpsim.real.measure.step_host`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cpsim.case.parallel import Parallel
from cpsim.models.host import HostParams
from cpsim.prediction.step.attention import PASSES

EXPERTS: Final = (4, 16)
"""Of a rank, that were measured; others lie on a line."""
MEASURED_WITH: Final = {"cp": ("fsdp", "ddp")}
"""What a cut was measured with, and not alone."""


def layer_seconds(
    host: HostParams, code: str, parallel: Parallel, experts: int = 0, *, biased: bool = False, adapters: bool = False
) -> tuple[float, float] | None:
    """Seconds in which a host launches a layer forward and backward.

    Ways to cut a step that were not measured together add what each adds alone. Where attention is a CUDA graph, what
    experts add to a dense layer is left.

    Args:
        host: launches of a machine.
        code: framework and how layers run, as in ``torch compiled``.
        parallel: how the step is cut.
        experts: of a rank and layer; 0: the layer is dense.
        biased: whether their linear layers have biases.
        adapters: whether the layer is frozen, with low-rank adapters beside it.

    Returns:
        None where nothing like it was measured.
    """
    layer = _Layer.of(host, code, parallel, adapters)
    forward, backward = (layer.seconds(name) for name in PASSES)
    if not (forward and backward):
        return None
    if experts:
        more = [layer.of_experts(name, experts) + biased * layer.of_biases(name, experts) for name in PASSES]
        if parallel.cuda_graphs == "attention":
            return more[0], more[1]
        return forward + more[0], backward + more[1]
    return forward, backward


def update_seconds(
    host: HostParams, code: str, parallel: Parallel, experts: int = 0, *, biased: bool = False, adapters: bool = False
) -> float:
    """Seconds in which a host launches the optimizer's update of a layer, arguments as of ``layer_seconds``; 0 where
    that was not measured."""
    layer = _Layer.of(host, code, parallel, adapters)
    dense = layer.seconds("update") or layer.measured((), "none", "update") or 0.0
    if not (dense and experts):
        return dense
    return dense + layer.of_experts("update", experts) + biased * layer.of_biases("update", experts)


def _cuts(parallel: Parallel, adapters: bool) -> Iterator[str]:
    """How a step is cut, and whether it has adapters, in words of measurements."""
    if parallel.sharding == "fsdp":
        yield "fsdp"
    elif parallel.replicas > 1 and parallel.tp == 1:
        yield "ddp"
    if parallel.tp > 1:
        yield "tp"
    if parallel.cp > 1:
        yield "cp"
    if adapters:
        yield "lora"


@dataclass(frozen=True, slots=True)
class _Layer:
    host: HostParams
    code: str
    cuts: tuple[str, ...]
    recompute: str
    shared: bool
    """Whether several ranks share the experts."""

    @classmethod
    def of(cls, host: HostParams, code: str, parallel: Parallel, adapters: bool) -> _Layer:
        return cls(host, code, tuple(_cuts(parallel, adapters)), parallel.recompute, parallel.ep > 1)

    def measured(self, cuts: tuple[str, ...], recompute: str, name: str, experts: str = "") -> float | None:
        code = f"{self.code.split()[0]} eager {experts}" if experts else self.code
        return self.host.measured([" ".join(("layer", code, *cuts, recompute, name))])

    def seconds(self, name: str) -> float | None:
        """Of a dense layer, one pass or the update; None where nothing like it was measured."""
        found = self.measured(self.cuts, self.recompute, name)
        usual = self.measured((), "none", name)
        if found or usual is None:
            return found
        alone = self.measured((), self.recompute, name)
        if alone is None:  # what runs again takes no longer than the forward pass; parts of it are not told apart
            alone = usual + (self.recompute == "full" and name == "bwd") * (self.measured((), "none", "fwd") or 0.0)
        for cut in self.cuts:
            base = self.beside(cut, name)
            more, less = self.measured((*base, cut), "none", name), self.measured(base, "none", name)
            if more is None or less is None:
                return None
            alone += max(0.0, more - less)
        return alone

    def beside(self, cut: str, name: str) -> tuple[str, ...]:
        """With what a cut was measured: a cut that the step has, too, where there is such."""
        found = [(one,) for one in MEASURED_WITH.get(cut, ()) if self.measured((one, cut), "none", name)]
        return min(found, key=lambda base: base[0] not in self.cuts, default=())

    def of_experts(self, name: str, experts: int) -> float:
        """What so many experts of a rank add to a dense layer, exchanges of their tokens included where they are
        shared."""
        cuts, beside = (("ddp", "ep"), ("ddp",)) if self.shared else ((), ())
        at = [self.measured(cuts, "none", name, f"{count} experts") for count in EXPERTS]
        dense = _Layer(self.host, f"{self.code.split()[0]} eager", beside, "none", self.shared).seconds(name)
        return _on_a_line(experts, [None if one is None or dense is None else one - dense for one in at])

    def of_biases(self, name: str, experts: int) -> float:
        """What biases of so many experts of a rank add."""
        with_, without = (
            [self.measured((), "none", name, f"{count} experts{more}") for count in EXPERTS] for more in (" biased", "")
        )
        pairs = zip(with_, without, strict=True)
        return _on_a_line(experts, [None if a is None or b is None else a - b for a, b in pairs])


def _on_a_line(experts: int, at: Sequence[float | None]) -> float:
    """What so many experts take by what ``EXPERTS`` do; 0 where that was not measured."""
    (few, many), (less, more) = EXPERTS, at
    if less is None or more is None:
        return 0.0
    return max(0.0, less + (experts - few) / (many - few) * (more - less))
