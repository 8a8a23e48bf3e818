"""The program of a training step on one GPU: ops in the order in which its host launches them, and what each makes.

A framework says what a layer runs forward and backward (`cpsim.prediction.step.frameworks`); a program is this for some
layers, with what is computed again, what is gathered and scattered layer by layer, and both ends of the model. Time
follows from simulating it, memory from how long its tensors live: from the op that makes a tensor to the last one that
reads it.

Recomputation needs no list of its own: what a backward op reads and the forward pass did not keep is made again by the
forward ops that lead to it.

Reference: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); Zhao et al., "PyTorch FSDP" (2023),
section 3 (gathers a layer ahead, scatters behind).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cpsim.prediction.step.layer import Collective, Op

Attention = Literal["fwd", "bwd"]
Stream = Literal["compute", "comm", "gather", "scatter", "to_host", "from_host"]
GRADIENT: Final = "dw"
"""First word of the names of gradients of weights. Where weights are whole they stay until the optimizer's step."""
SHARD: Final = "shard"
"""The same of a GPU's part of gradients that were summed and scattered."""
BLOCK: Final = 512
"""Bytes in whose multiples PyTorch's allocator hands out memory."""


BACK: Final = " back"
"""End of the names of tensors that return from the host."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Between this GPU and its host, by copy engines."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """One op, or attention of a layer as a whole."""

    what: Op | Attention | HostCopy | None
    """None: a tensor that is there, such as a view or a buffer."""
    reads: tuple[str, ...] = ()
    makes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every tensor that it makes."""
    stream: Stream = "compute"
    calls: int = 1
    """Launches of the host."""
    awaits: tuple[str, ...] = ()
    """Tensors that its host reads before it launches this: it waits until they are made."""

    def renamed(self, name: Callable[[str], str]) -> Node:
        """With other names of tensors."""
        makes = {name(tensor): nbytes for tensor, nbytes in self.makes.items()}
        reads, awaits = (tuple(map(name, names)) for names in (self.reads, self.awaits))
        return Node(self.what, reads, makes, self.stream, self.calls, awaits)


Nodes = tuple[Node, ...]
ENDS: Final = ("first", "last")
"""Names of what comes before the layers of a model and what follows them; layers are named by numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCode:
    """What a framework runs for one layer: tensors are named within it; ``x`` goes in, ``y`` comes out, and backward
    ``dy`` and ``dx``. Gradients of weights are called ``dw ...``; ops that need weights read ``weights``."""

    forward: Nodes
    backward: Nodes
    kept: frozenset[str]
    """Tensors that are kept for the backward pass where nothing is computed again, of those that it reads."""

    def with_exchanges(self, shares: Sequence[float]) -> LayerCode:
        """A layer that exchanges tokens of experts in parts: of these shares of the bytes, the first of which brings
        what others read."""

        def parts(node: Node) -> Nodes:
            if not isinstance(node.what, Collective) or node.what.kind != "all_to_all":
                return (node,)
            whats = [replace(node.what, nbytes=round(share * node.what.nbytes)) for share in shares]
            return tuple(replace(node, what=what, makes={} if i else node.makes) for i, what in enumerate(whats))

        forward, backward = (
            tuple(one for node in side for one in parts(node)) for side in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)

    def again(self, kept: Collection[str], to: Collection[str] = ()) -> Nodes:
        """Forward ops that run again before the backward pass where only these tensors, and ``x``, are kept: those that
        lead to what it reads, and to tensors that a second run makes though nobody reads them."""
        there = {"x", "weights", *kept}
        needed = ({name for node in self.backward for name in node.reads} | set(to)) - there
        made = {name for node in self.forward for name in node.makes}
        found = list[Node]()
        for node in reversed(self.forward):
            if needed & node.makes.keys():
                found.append(node)
                needed |= (set(node.reads) & made) - there
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Both passes of some layers and of the ends that a stage has."""

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How weights of a layer come and gradients go where every replica has a part."""

    gather: Callable[[str], Nodes]
    """What brings the weights of a part of the model, by its name: makes ``weights <name>``."""
    scatter: Callable[[str, Sequence[str]], Nodes]
    """What sums and scatters its gradients, by its name and theirs: makes ``shard <name>``."""
    root: bool = False
    """Whether both ends are one part, ``root``, which is gathered once and stays until its gradients are scattered."""

    def own(self, name: str) -> bool:
        """Whether a part is gathered and scattered by itself."""
        return not (self.root and name in ENDS)


def program(
    code: LayerCode,
    first: LayerCode | None,
    last: LayerCode | None,
    layers: int,
    kept: Collection[str],
    shards: Shards | None = None,
    again_to: Collection[str] = (),
) -> Program:
    """A stage of so many layers.

    Args:
        code: of a layer.
        first: what comes before the layers of the first stage; its ``y`` is what the first layer is given.
        last: what follows the layers of the last stage.
        layers: how many.
        kept: tensors of a layer that are kept for the backward pass, beside its input.
        shards: None where weights are whole.
        again_to: see ``LayerCode.again``.
    """
    parts = [*([("first", first)] if first else []), *((str(i), code) for i in range(layers))]
    parts += [("last", last)] if last else []
    forward, backward, of_root, before = list[Node](), list[Node](), list[str](), ""
    if shards and shards.root and (first or last):
        forward += shards.gather("root")
    for i, (name, part) in enumerate(parts):
        ends = {"x": f"x {i}", "y": f"x {i + 1}", "weights": f"weights {name}"}
        if shards and shards.own(name):  # a gather starts when the part before does
            forward += _after(shards.gather(name), f"x {i - 1}" if i else None)
        elif shards:
            ends["weights"] = "weights root"
        here = _names(name, ends)
        forward += [node.renamed(here) for node in part.forward]
    for i, (name, part) in reversed(list(enumerate(parts))):
        ends = {"x": f"x {i}", "y": f"x {i + 1}", "dy": f"dx {i + 1}", "dx": f"dx {i}", "weights": f"weights {name}"}
        if shards and shards.own(name):
            ends["weights"] += " again"
            backward += _after(shards.gather(f"{name} again"), f"dx {i + 2}" if i + 2 <= len(parts) else None)
        elif shards:
            ends["weights"] = "weights root"
        once_more = part.again(kept, again_to) if part is code else ()
        made = {tensor for node in once_more for tensor in node.makes}
        stays = Node(None, tuple(sorted(kept if part is code else part.kept)))  # what is kept lives until now
        here = _names(name, ends, made)
        backward += [stays.renamed(_names(name, ends))]
        backward += [node.renamed(here) for node in (*once_more, *part.backward)]
        summed = [f"{t} @{name}" for node in part.backward for t in node.makes if t.startswith(GRADIENT)]
        if shards and shards.own(name) and summed:
            backward += _scattered(shards, name, summed, before)
            before = name
        elif shards and not shards.own(name):
            of_root += summed
    if shards and of_root:
        backward += [Node(None, ("weights root",))]  # freed before its gradients are copied
        backward += _scattered(shards, "root", of_root, before)
    return Program(forward=tuple(forward), backward=tuple(backward))


def _scattered(shards: Shards, name: str, gradients: Sequence[str], before: str) -> list[Node]:
    """Sums of a part's gradients; those of the part before are done then, and their copies, which lived until now, are
    freed.

    Source: PyTorch 2.11, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (post_backward).
    """
    copy, *rest = shards.scatter(name, gradients)
    if not before:
        return [Node(None), copy, *rest]  # so that all layers are alike
    return [Node(None, (f"sums {before}",)), replace(copy, reads=(*copy.reads, f"shard {before}")), *rest]


def _names(place: str, ends: Mapping[str, str], again: Collection[str] = ()) -> Callable[[str], str]:
    """Names of tensors of one part: what it is given and gives, what is made again, and what is its own."""

    known = {**ends, **{tensor: f"{tensor} @{place} again" for tensor in again}}

    def name(tensor: str) -> str:
        if tensor not in known:
            known[tensor] = f"{tensor} @{place}"
        return known[tensor]

    return name


def _after(nodes: Iterable[Node], tensor: str | None) -> list[Node]:
    return [replace(node, reads=(*node.reads, tensor)) if tensor else node for node in nodes]


def lives(nodes: Sequence[Node], stays: tuple[str, ...]) -> list[tuple[int, int]]:
    """First and last op of every tensor, in the order in which they are made; those whose names begin so stay."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in node.makes:
            first.setdefault(name, i)
        last |= dict.fromkeys((*node.reads, *node.makes), i)
    end = len(nodes)
    return [(i, end if name.startswith(stays) else last[name]) for name, i in first.items()]


def live_bytes(
    nodes: Sequence[Node], stays: tuple[str, ...], of: Callable[[str], int], kinds: int
) -> NDArray[np.int64]:
    """Bytes that are allocated while every op runs, in whole blocks, ``[kinds, N]``; ``of`` says which kind a tensor is
    of."""
    sizes: dict[str, int] = {}
    for node in nodes:
        for name, nbytes in node.makes.items():
            sizes.setdefault(name, -(-nbytes // BLOCK) * BLOCK)
    change = np.zeros((kinds, len(nodes) + 1), np.int64)
    whole = [(of(name), nbytes, *life) for (name, nbytes), life in zip(sizes.items(), lives(nodes, stays), strict=True)]
    kind, size, first, last = np.array(whole, np.int64).reshape(-1, 4).T
    np.add.at(change, (kind, first), size)
    ends = last < len(nodes)
    np.subtract.at(change, (kind[ends], last[ends] + 1), size[ends])
    return np.cumsum(change, axis=1)[:, :-1]
