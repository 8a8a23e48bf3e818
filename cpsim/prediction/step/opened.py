"""A step opened: when every pass of its pipeline runs, and what layers of a stage do meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.prediction.step.layer import Collective, Copy, ElementwisePass, Gemm
from cpsim.prediction.step.pipeline import Pipeline
from cpsim.prediction.step.program import HostCopy, Node, Program
from cpsim.prediction.step.timing import Simulated
from cpsim.units import format_bytes, format_count

Floats = NDArray[np.float64]
LAYERS: Final = 2
"""Layers of a stage that are shown."""
_PRODUCTS: Final = {"forward": "matrix product", "dgrad": "gradient of inputs", "wgrad": "gradient of weights"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Every pass of the replica that ends last; arrays ``[2, M, virtual stages]``: forward and backward, microbatch,
    chunk of layers, of which chunk c of stage s is number c * P + s."""

    start_s: Floats
    end_s: Floats
    critical: NDArray[np.bool_]
    """Whether the step's time consists of it."""
    stages: int
    """P."""
    time_s: float
    """Of the step, gradients' sums and optimizer included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """One op of a layer, in time."""

    stream: str
    kind: str
    text: str
    """What it does, in words."""
    backward: bool
    start_s: float
    """From the start of the forward pass on, which the backward one follows at once."""
    end_s: float
    critical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What a GPU does in both passes of a few layers of a stage, with what ends of the model it has."""

    chunks: tuple[int, ...]
    """Virtual stages that are like this."""
    layers: int
    """That these have."""
    shown: int
    """Layers that are shown."""
    ops: tuple[OpTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A step in time."""

    passes: Passes
    inside: tuple[Inside, ...]
    """For the heaviest microbatch of that replica; first stages first."""


def passes_of(pipeline: Pipeline, seconds: Floats, stages: int, time_s: float) -> tuple[int, Passes]:
    """The replica that ends last, and its passes.

    Args:
        pipeline: simulated.
        seconds: of every pass, ``[2, R, M, virtual stages]``.
        stages: of the pipeline.
        time_s: of the step.
    """
    replica = int(pipeline.end_s.max(axis=1).argmax())
    critical = np.zeros(seconds[:, replica].shape, np.bool_)
    for where, one in pipeline.path:
        critical[one] |= where == replica
    end = pipeline.done_s[:, replica]
    start = end - seconds[:, replica]
    return replica, Passes(start_s=start, end_s=end, critical=critical, stages=stages, time_s=time_s)


def ops_of(program: Program, found: Simulated) -> tuple[OpTime, ...]:
    """Ops of a simulated program."""
    nodes = [node for node in (*program.forward, *program.backward) if node.what is not None]
    start, end, path = found.timeline.start_s, found.timeline.end_s, set(found.timeline.critical_path().tolist())
    ops = []
    for i, node in enumerate(nodes):
        kind, text = _said(node)
        ops.append(
            OpTime(
                stream=node.stream,
                kind=kind,
                text=text,
                backward=i >= found.forward,
                start_s=float(start[i]),
                end_s=float(end[i]),
                critical=i in path,
            )
        )
    return tuple(ops)


def _said(node: Node) -> tuple[str, str]:
    """Kind of an op, and what it does."""
    match node.what:
        case Gemm() as op:
            shape = " x ".join(map(format_count, (op.m, op.n, op.k)))
            many = f"{op.times} times " if op.times > 1 else ""
            return "matrix product", f"{_PRODUCTS[op.kind]} {many}{shape}{' in FP8' if op.fp8 else ''}"
        case ElementwisePass() as op:
            many = f"{op.times} times " if op.times > 1 else ""
            return "memory-bound", f"{op.kind.replace('_', ' ')}, {many}{format_bytes(op.nbytes)}"
        case Collective() as op:
            kind = op.kind.replace("_", " ")
            return kind, f"{kind}, {format_bytes(op.nbytes)}"
        case Copy() | HostCopy() as copied:
            return "copy", f"copy, {format_bytes(copied.nbytes)}"
        case what:
            return ("attention", "attention") if what == "fwd" else ("attention backward", "attention backward")
