"""Communication beside computation: tensor parallelism's beside matrix products, both cut into chunks, and experts'
exchanges beside layers of another microbatch.

A framework's layer says what is gathered and scattered among tensor-parallel ranks. Here an all-gather and the
products of what was gathered, and a product and the reduce-scatter of its result, become chunks along the tokens:
while one chunk is on its way another one is multiplied. Products of chunks are smaller, and cost what such products do.

Source: pytorch/pytorch, torch/_inductor/fx_passes/micro_pipeline_tp.py (what is replaced: products whose left operand
is gathered, and a product that alone makes what is scattered) and torch/distributed/_symmetric_memory/__init__.py
(_pipelined_all_gather_and_consume, _pipelined_produce_and_all2all: the order of copies and products on two streams);
NVIDIA/TransformerEngine, transformer_engine/pytorch/module/base.py (initialize_ub: methods of the layers, splits, copy
engines).
Differs: products of two chunks never run at once, though they are on two streams (three in Transformer Engine).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from cpsim.prediction.step.layer import BF16, Collective, Copy, ElementwisePass, Gemm
from cpsim.prediction.step.program import LayerCode, Node, Nodes

SPLITS: Final = 4
"""Parts of a product whose results Transformer Engine scatters one by one."""
Gather = Callable[[Node, Sequence[Node], int], Nodes]
"""Nodes of a gather, of products of what it makes, among so many ranks."""
Scatter = Callable[[Node, Node, int], Nodes]
"""Nodes of a product and of the scatter of its result, among so many ranks."""


def micro_pipelined(code: LayerCode, tp: int) -> LayerCode:
    """PyTorch's asynchronous tensor parallelism: as many chunks as ranks, fetched by copy engines.

    Where tokens are the second dimension, chunks of all sequences lie side by side, as products of chunks want them.
    Gradients of weights want the sequences one after the other: what was gathered is copied for them.
    """
    joined = {name for nodes in (code.forward, code.backward) for i in range(len(nodes)) for name in _joined(nodes, i)}
    new = _replaced(code, tp, _fetched, _fetched_and_summed)
    return replace(new, backward=_in_order(new.backward, joined))


def userbuffers(code: LayerCode, tp: int) -> LayerCode:
    """Transformer Engine's userbuffers: gathers go around a ring of copy engines, results of forward products are
    scattered in parts. What is exchanged in bulk beside another product stays as it is."""
    return _replaced(code, tp, _around_a_ring, _scattered_in_parts)


def beside_others(code: LayerCode, alone: float) -> LayerCode:
    """A layer whose experts exchange tokens beside another microbatch that runs the other way, but for a share: nothing
    waits for the rest.

    Source: NVIDIA/Megatron-LM, core_v0.15.0, pipeline_parallel/combined_1f1b.py (overlap_moe_expert_parallel_comm).
    """
    return code.with_exchanges([alone, 1 - alone])


def _replaced(code: LayerCode, tp: int, gather: Gather, scatter: Scatter) -> LayerCode:
    def side(nodes: Nodes) -> Nodes:
        found, i = list[Node](), 0
        while i < len(nodes):
            new, i = _fused(nodes, i, tp, gather, scatter)
            found += new
        return tuple(found)

    return replace(code, forward=side(code.forward), backward=side(code.backward))


def _fused(nodes: Nodes, i: int, tp: int, gather: Gather, scatter: Scatter) -> tuple[Nodes, int]:
    """What stands for nodes from number ``i`` on, and the number of the first one that is left."""
    node = nodes[i]
    if _is(node, "all_gather"):
        joined = _joins_chunks(nodes, i)
        whole = replace(node, makes=nodes[i + 1].makes) if joined else node
        first, (name,) = i + 1 + joined, whole.makes
        users = [j for j in range(first, len(nodes)) if _multiplies(nodes[j], name)]
        between = [j for j in range(first, users[-1] if users else first) if j not in users]
        if users and not any(name in nodes[j].reads for j in between):
            early = tuple(nodes[j] for j in between)
            return (*early, *gather(whole, [nodes[j] for j in users], tp)), users[-1] + 1
    if isinstance(node.what, Gemm) and node.what.kind == "forward":
        cut = int(i + 2 < len(nodes) and _is(nodes[i + 2], "reduce_scatter") and _cuts_chunks(nodes, i))
        if i + 1 + cut < len(nodes) and _is(nodes[i + 1 + cut], "reduce_scatter"):
            last = nodes[i + 1 + cut]
            if cut or set(last.reads) == set(node.makes):
                return scatter(node, last, tp), i + 2 + cut
    return (node,), i + 1


def _is(node: Node, kind: str) -> bool:
    return isinstance(node.what, Collective) and node.what.kind == kind and node.stream == "comm"


def _joined(nodes: Nodes, i: int) -> tuple[str, ...]:
    """What a copy puts together after the gather of that number."""
    return tuple(nodes[i + 1].makes) if _is(nodes[i], "all_gather") and _joins_chunks(nodes, i) else ()


def _in_order(nodes: Nodes, joined: Collection[str]) -> Nodes:
    """With copies of gathered tensors that gradients of weights read."""
    found, copied = list[Node](), set[str]()
    for node in nodes:
        if isinstance(node.what, Gemm) and node.what.kind == "wgrad":
            m, n, k = node.what.m, node.what.n, node.what.k
            for name, elements in zip(node.reads, (m * k, n * k), strict=False):
                if name in joined and name not in copied:
                    copied.add(name)
                    nbytes = BF16 * elements
                    found.append(Node(ElementwisePass("copy", 2 * nbytes), (name,), {f"{name} in order": nbytes}))
            node = replace(node, reads=tuple(f"{name} in order" if name in joined else name for name in node.reads))
        found.append(node)
    return tuple(found)


def _joins_chunks(nodes: Nodes, i: int) -> bool:
    """Whether a copy puts together what was gathered along the second dimension: chunks need none."""
    after = nodes[i + 1] if i + 1 < len(nodes) else nodes[i]
    (made,) = nodes[i].makes
    return isinstance(after.what, ElementwisePass) and after.reads == (made,) and made.endswith(" chunks")


def _cuts_chunks(nodes: Nodes, i: int) -> bool:
    """Whether a copy cuts the result of a product into chunks, which are scattered."""
    copy, last = nodes[i + 1], nodes[i + 2]
    return copy.reads == tuple(nodes[i].makes) and last.reads == tuple(copy.makes)


def _multiplies(node: Node, name: str) -> bool:
    """Whether that is the left operand of a product; of gradients of weights it is not."""
    return isinstance(node.what, Gemm) and node.what.kind != "wgrad" and node.reads[0] == name


def _chunk(node: Node, parts: int, *reads: str) -> Node:
    """A product over one of so many chunks of the tokens, whose left operand is called so."""
    assert isinstance(node.what, Gemm)
    what = replace(node.what, m=node.what.m // parts)
    return replace(node, what=what, reads=(*reads, *node.reads[1:]))


def _own_chunk(node: Node) -> tuple[str, int, dict[str, int]]:
    """The chunk that a rank has, its bytes among all ranks, and what a gather makes."""
    assert isinstance(node.what, Collective)
    return node.reads[0], node.what.nbytes, dict(node.makes)


def _fetched(node: Node, users: Sequence[Node], tp: int) -> Nodes:
    """A rank lays its chunk open, multiplies it, and fetches the others one by one. A chunk is fetched when the product
    before last is done, as both are on one of two streams."""
    mine, nbytes, made = _own_chunk(node)
    (whole,), chunk = made, nbytes // tp
    opened, name = f"{whole} opened", [mine, *(f"{whole} {k}" for k in range(1, tp))]
    found = [Node(ElementwisePass("copy", 2 * chunk), (mine,), {opened: 0})]
    for k in range(tp):
        if k + 1 < tp:
            found.append(Node(Copy(chunk), (opened,), {**made, name[k + 1]: 0}, "comm"))
        found += [_chunk(user, tp, name[k]) for user in users]
    return (*found, Node(ElementwisePass("copy", 2 * chunk), (mine,), made))


def _around_a_ring(node: Node, users: Sequence[Node], tp: int) -> Nodes:
    """Chunks go on from rank to rank while the one before is multiplied."""
    mine, nbytes, made = _own_chunk(node)
    (whole,), chunk = made, nbytes // tp
    name = [f"{whole} {k}" for k in range(tp)]
    found = [Node(ElementwisePass("copy", 2 * chunk), (mine,), {**made, name[0]: 0})]
    found += [Node(Copy(chunk), (name[k],), {**made, name[k + 1]: 0}, "comm") for k in range(tp - 1)]
    return (*found, *(_chunk(user, tp, name[k]) for k in range(tp) for user in users))


def _fetched_and_summed(node: Node, last: Node, tp: int) -> Nodes:
    """A rank multiplies the chunks of the others, who fetch them, then its own, and sums what it has fetched. Buffers
    are two: a third chunk waits until the first one is fetched."""
    assert isinstance(last.what, Collective)
    (whole,), total = node.makes, last.what.nbytes
    found, fetched = list[Node](), list[str]()
    for k in range(1, tp):
        waits = tuple(fetched[-2:-1])
        product = replace(_chunk(node, tp, node.reads[0]), makes={f"{whole} {k}": 0})
        found.append(replace(product, reads=(*product.reads, *waits)))
        fetched.append(f"{whole} {k} fetched")
        found.append(Node(Copy(total // tp), (f"{whole} {k}",), {whole: total, fetched[-1]: 0}, "comm"))
    own = replace(_chunk(node, tp, node.reads[0]), makes={whole: total})
    return (*found, own, Node(ElementwisePass("copy", total + total // tp), (whole, *fetched), last.makes))


def _scattered_in_parts(node: Node, last: Node, _tp: int) -> Nodes:
    """Each part of the result is scattered by kernels on some SMs, beside the product of the next one."""
    assert isinstance(last.what, Collective)
    part = replace(last.what, nbytes=last.what.nbytes // SPLITS)
    (whole,) = node.makes
    found = list[Node]()
    for k in range(SPLITS):
        found.append(replace(_chunk(node, SPLITS, node.reads[0]), makes={**node.makes, f"{whole} {k}": 0}))
        found.append(replace(last, what=part, reads=(whole, f"{whole} {k}")))
    return tuple(found)
