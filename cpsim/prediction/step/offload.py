"""Activations that wait in the host's memory: what a layer keeps leaves after its forward pass and returns before its
backward pass, over the host's link, on streams of their own.

A layer's copies start when its forward pass ends, and the layer after next waits for them, so that at most two layers
have their activations on the GPU. The last layer keeps its own. Backwards, a layer's activations return while the layer
after it runs. Copy engines move them: kernels beside lose nothing.

Megatron's layers keep all that they need. Those of Transformers are computed again, so that only what goes into a
layer leaves.

Source: Megatron-Core 0.12, transformer/transformer_config.py (cpu_offloading: fewer layers than all, no pipelines, no
recomputation); Transformer Engine 2.4, pytorch/cpu_offload.py (AsyncDoubleBufferGroupOffloadHandler). TRL 0.24,
models/activation_offloading.py (streams of their own), Axolotl (``gradient_checkpointing: offload``), ArcticTraining
(``activation_checkpoint_cpu_offload``, which waits for its copies).
Differs: everything that is kept leaves, also what is too small for Transformer Engine to care; hosts always have room.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from cpsim.case.parallel import Parallel
from cpsim.errors import InfeasibleError
from cpsim.prediction.step.frameworks import Framework
from cpsim.prediction.step.program import BACK, HostCopy, Node, Program


def check(framework: Framework, parallel: Parallel) -> None:
    """Whether a framework can keep activations in the host's memory.

    Raises:
        InfeasibleError: it cannot; one line that says why.
    """
    if framework.offloads is None:
        raise InfeasibleError(
            f"offload: {framework.name} is predicted without; use framework megatron or huggingface, or leave it out"
        )
    if parallel.pp > 1:
        raise InfeasibleError(f"offload: {framework.name} has none with pipelines, got pp = {parallel.pp}; use pp = 1")
    if parallel.recompute != framework.offloads:
        how = "with" if framework.offloads == "none" else "without"
        raise InfeasibleError(
            f"offload: {framework.name} has none {how} recomputation, got recompute = {parallel.recompute}; use "
            f"{framework.offloads}"
        )


def offloaded(run: Program, layers: int, kept: Collection[str], begin: int) -> Program:
    """A program whose layers but the last keep nothing.

    Args:
        run: of the layers, and of the ends that the stage has.
        layers: how many.
        kept: tensors of a layer that are kept, beside its input.
        begin: parts before the layers, 0 or 1.
    """
    sizes = {name: nbytes for node in run.forward for name, nbytes in node.makes.items()}
    forward, backward = list(run.forward), list(run.backward)
    for layer in range(layers - 1):
        part = layer + begin
        names = tuple(name for name in (f"x {part}", *(f"{t} @{layer}" for t in sorted(kept))) if sizes.get(name))
        total, there = sum(sizes[name] for name in names), f"host {layer}"
        end = _at(forward, f"x {part + 2}", made=True) + 1
        if end < len(forward):
            forward[end] = replace(forward[end], reads=(*forward[end].reads, there))
        forward.insert(end, Node(HostCopy(total), names, {there: 0}, "to_host"))
        home = {name: name + BACK for name in names}
        backward = [replace(n, reads=tuple(home.get(name, name) for name in n.reads)) for n in backward]
        made = {home[name]: sizes[name] for name in names}
        copy = Node(HostCopy(total), (there, f"dx {part + 2}"), made, "from_host")
        backward.insert(_at(backward, f" @{layer + 1}", made=False), copy)
    return Program(forward=tuple(forward), backward=tuple(backward))


def _at(nodes: list[Node], name: str, *, made: bool) -> int:
    """The op that makes a tensor, or the first with tensors whose names end so."""
    if made:
        return next(i for i, node in enumerate(nodes) if name in node.makes)
    ends = (name, name + BACK)
    return next(i for i, node in enumerate(nodes) if any(t.endswith(ends) for t in (*node.reads, *node.makes)))
