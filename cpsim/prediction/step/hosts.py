"""What hosts take for a layer of a training step, measured as a whole.

Between the kernels of a layer PyTorch runs hooks of FSDP, dispatches DTensors, checks the guards of compiled code and
walks autograd's graph, so that a layer takes its host several times what its launches alone would. It was measured by
framework, by how a step is cut and by what it computes again (`cpsim.real.measure.step_host`).
"""

from __future__ import annotations

from collections.abc import Iterator

from cpsim.case.parallel import Parallel, Recompute
from cpsim.models.host import HostParams
from cpsim.prediction.step.attention import PASSES


def layer_seconds(host: HostParams, code: str, parallel: Parallel) -> tuple[float, float] | None:
    """Seconds in which a host launches a layer forward and backward.

    Ways to cut a step that were not measured together add what each adds alone.

    Args:
        host: launches of a machine.
        code: framework and how layers run, as in ``torch compiled``.
        parallel: how the step is cut.

    Returns:
        None where nothing like it was measured.
    """
    forward, backward = (_seconds(host, code, tuple(_cuts(parallel)), parallel.recompute, name) for name in PASSES)
    return (forward, backward) if forward and backward else None


def update_seconds(host: HostParams, code: str, parallel: Parallel) -> float:
    """Seconds in which a host launches the optimizer's update of a layer; 0 where that was not measured."""
    return _seconds(host, code, tuple(_cuts(parallel)), parallel.recompute, "update") or 0.0


def _cuts(parallel: Parallel) -> Iterator[str]:
    """How a step is cut, in words of measurements."""
    if parallel.sharding == "fsdp":
        yield "fsdp"
    elif parallel.replicas > 1 and parallel.tp == 1:
        yield "ddp"
    if parallel.tp > 1:
        yield "tp"
    if parallel.cp > 1:
        yield "cp"


def _seconds(host: HostParams, code: str, cuts: tuple[str, ...], recompute: Recompute, name: str) -> float | None:
    def measured(cuts: tuple[str, ...], recompute: str) -> float | None:
        return host.measured([" ".join(("layer", code, *cuts, recompute, name))])

    found, alone, usual = measured(cuts, recompute), measured((), recompute), measured((), "none")
    if found or alone is None or usual is None:
        return found
    beside = {"cp": ("fsdp",)}  # what a cut was measured with
    for cut in cuts:
        base = beside.get(cut, ())
        more, less = measured((*base, cut), "none"), measured(base, "none")
        if more is None or less is None:
            return None
        alone += max(0.0, more - less)
    return alone
