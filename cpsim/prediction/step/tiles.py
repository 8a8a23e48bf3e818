"""A layer whose MLP runs in chunks of the sequence, each of which the backward pass computes again.

Only a chunk's inner activations exist at a time; whole are what goes into the MLP and what comes out. The forward pass
keeps no more than the input. The backward pass runs a chunk forward, its last product included, then backward: each
chunk makes gradients of all weights of the MLP, which are added to those of the chunks before, and gradients of its
tokens, which are added to a tensor of zeros. Where a layer is computed again as a whole, its MLP runs forward three
times.

Source: Bekman et al., "Arctic Long Sequence Training" (2506.13996), section 3.1.1; DeepSpeed 0.17.2,
runtime/sequence_parallel/ulysses_sp.py (TiledMLP), which Axolotl (``tiled_mlp``, ``tiled_mlp_num_shards``) and
ArcticTraining (``tiled_mlp_compute``) put in place of the MLP of Transformers' models.
Differs: the last chunk is as long as the others; weights are gathered once for all chunks, as FSDP2 does by layers.
"""

from __future__ import annotations

from dataclasses import replace

from cpsim.prediction.step.layer import BF16, ElementwisePass, Gemm
from cpsim.prediction.step.program import GRADIENT, LayerCode, Node, Nodes

TILE = "tile "
"""First word of the names of a chunk's tensors."""
SUM_BYTES = 3 * BF16
"""Of an element that is added to another one: two read, one written."""


def tiled(code: LayerCode, chunks: int) -> LayerCode:
    """The layer with its MLP in so many chunks.

    Args:
        code: a layer of one tensor-parallel rank whose ops are not compiled; its MLP makes ``down`` of ``h norm``, and
            ``dh norm`` of ``dy``. A layer without an MLP stays as it is.
        chunks: of the tokens of a rank.
    """
    makers = {name: i for i, node in enumerate(code.forward) for name in node.makes}
    if "down" not in makers:
        return code
    begin, end = makers["h norm"] + 1, makers["down"] + 1
    until = next(i for i, node in enumerate(code.backward) if "dh part" in node.makes)
    inside, back = code.forward[begin:end], code.backward[:until]
    hidden = inside[-1].makes["down"]
    parts = tuple(_chunk(node, chunks) for node in inside)
    whole = replace(parts[-1], makes={"down parts": hidden})
    joined = Node(ElementwisePass("copy", 2 * hidden), ("down parts",), {"down": hidden})
    forward = (*code.forward[:begin], *parts[:-1], whole, joined, *code.forward[end:])
    backward = (*_backward(parts, back, chunks, hidden), *code.backward[until:])
    made = {name for node in forward for name in node.makes}
    read = {name for node in backward for name in node.reads}
    return LayerCode(forward=forward, backward=backward, kept=frozenset(made & read))


def _backward(again: Nodes, back: Nodes, chunks: int, hidden: int) -> Nodes:
    """All chunks forward and backward, as one, beside the sums that live through all of them."""
    weights = {name: size for node in back for name, size in node.makes.items() if name.startswith(GRADIENT)}
    own = {name for node in (*again, *back) for name in node.makes}
    sums = tuple(
        Node(
            ElementwisePass("copy", SUM_BYTES * size // BF16, times=chunks - 1),
            (TILE + name, name),
            calls=chunks - 1,
        )
        for name, size in weights.items()
    )
    tokens = Node(
        ElementwisePass("copy", SUM_BYTES * hidden // BF16 // chunks, times=chunks),
        (f"{TILE}dh norm", "dh norm"),
        calls=chunks,
    )

    def named(node: Node) -> Node:
        return node.renamed(lambda name: TILE + name if name in own else name)

    return (
        Node(ElementwisePass("copy", hidden), (), {"dh norm": hidden}),
        Node(None, (), weights),
        *(named(node) for node in again),
        *(named(_chunk(node, chunks)) for node in back),
        *sums,
        tokens,
    )


def _chunk(node: Node, chunks: int) -> Node:
    """An op of all chunks, one after another, with the tensors of one of them; gradients of weights are whole."""
    match node.what:
        case Gemm(kind="wgrad") as what:
            part: Gemm | ElementwisePass = replace(what, k=-(-what.k // chunks), times=chunks)
        case Gemm() as what:
            part = replace(what, m=-(-what.m // chunks), times=chunks)
        case ElementwisePass() as what:
            part = replace(what, nbytes=-(-what.nbytes // chunks), times=chunks)
        case what:
            raise TypeError(f"expected products and memory-bound ops in an MLP, got {what}")
    sizes = {name: size if name.startswith(GRADIENT) else -(-size // chunks) for name, size in node.makes.items()}
    return replace(node, what=part, makes=sizes, calls=node.calls * chunks)
