"""Low-rank adapters: weights of the model are frozen, and beside linear layers two thin ones are trained.

Frozen weights are in the working type and have no gradients and no optimizer states; gradients of their inputs are
computed all the same. An adapter of rank r multiplies the input with A [r, K] and that with B [N, r], scales it and
adds it to what its linear layer makes.

- ``megatron``: as Megatron-Bridge has it, two products of cuBLAS each way and pointwise ops.
- ``huggingface``: as NeMo Automodel trains Transformers' models: Liger's Triton kernels for norms, rotary positions and
  SwiGLU, an eager loss on logits in fp32, and Triton kernels for adapters, whose time is that of the memory they read
  and write: forward one reads the input and writes the adapter's output, which is dropped out, where asked for, and
  added; backward three read the input twice and the gradient twice, and write the gradient of the input, which is added
  to that of the weights.

Reference: Hu et al., "LoRA" (2021). Source: NVIDIA-NeMo/Megatron-Bridge@067f987df, src/megatron/bridge/peft/lora.py,
lora_layers.py and utils.py (ParallelLinearAdapter); NVIDIA-NeMo/Automodel@507bfb751, nemo_automodel/_transformers/
auto_model.py and registry.py, components/_peft/lora.py and lora_kernel.py, components/loss/masked_ce.py;
linkedin/Liger-Kernel, transformers/monkey_patch.py.
Differs: collectives of adapters' thin results are left out, and the first layer's input has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from cpsim.case.model import Lora
from cpsim.errors import InfeasibleError
from cpsim.prediction.step.frameworks import Framework, Sizes, eager, torch_held, torch_last, torch_layer
from cpsim.prediction.step.layer import BF16, Gemm
from cpsim.prediction.step.program import GRADIENT, LayerCode, Node, Nodes

DROPOUT: Final = 5
"""Bytes per element that a dropout reads and writes: values, and a mask of a byte."""
ADDED: Final = 6
"""Bytes per element of a sum of two."""
SCALED: Final = 4
"""Bytes per element of a product with a number."""
MODULES: Final = {
    4: ("qkv", "proj", "gate_up", "down"),
    7: ("qkv", "qkv", "qkv", "proj", "gate_up", "gate_up", "down"),
}
"""Linear layers by their number, in the order in which they run forward."""
Forward = Callable[[Gemm, Node, str], Nodes]
"""The adapter of a product, of its node, and what it adds to a tensor of that name."""
Backward = Callable[[Gemm, Node, bool], Nodes]
"""The same of the gradients, of the node that made that of the weights, and whether there is another sum."""


def adapted(framework: Framework, lora: Lora) -> Framework:
    """A framework that trains adapters.

    Raises:
        InfeasibleError: nobody has read how it does.
    """
    if framework.name == "megatron":
        return replace(
            framework,
            lora=lora,
            layer=partial(_layer, framework.layer, lora, partial(_products, lora), partial(_products_back, lora)),
            first=lambda s, compiled: frozen(framework.first(s, compiled)),
            last=lambda s, compiled, chunks: frozen(framework.last(s, compiled, chunks)),
        )
    if framework.name == "huggingface":
        return replace(
            framework,
            lora=lora,
            layer=partial(_layer, _liger, lora, partial(_triton, lora), partial(_triton_back, lora)),
            first=lambda s, compiled: frozen(framework.first(s, compiled)),
            last=lambda s, compiled, chunks: frozen(torch_last(s, compiled, chunks)),
            held=lambda _sharding: torch_held("none"),
            launches={},
        )
    raise InfeasibleError(f"trainable: {framework.name} has no adapters; use framework megatron or huggingface, or all")


def frozen(code: LayerCode) -> LayerCode:
    """Without gradients of weights."""
    backward = tuple(node for node in code.backward if not _of_weights(node))
    return replace(code, backward=backward, kept=code.kept & _reads(backward))


def _liger(s: Sizes, _compiled: bool) -> LayerCode:
    """Transformers' layer with Liger's kernels."""
    return torch_layer(s, True)


def _layer(
    plain: Callable[[Sizes, bool], LayerCode],
    lora: Lora,
    forward_of: Forward,
    backward_of: Backward,
    s: Sizes,
    compiled: bool,
) -> LayerCode:
    """A layer whose linear layers have adapters."""
    code = plain(s, compiled)
    products = sum(isinstance(node.what, Gemm) for node in code.forward)
    names = list(MODULES[products])
    forward, backward = list[Node](), list[Node]()
    for node in code.forward:
        if isinstance(node.what, Gemm) and names.pop(0) in lora.modules:
            ((to, nbytes),) = node.makes.items()
            forward += [replace(node, makes={f"{to} alone": nbytes}), *forward_of(node.what, node, to)]
        else:
            forward.append(node)
    last = ""
    for node in code.backward:
        if isinstance(node.what, Gemm) and node.what.kind == "dgrad":
            (last,) = node.makes
        if not _of_weights(node):
            backward.append(node)
        elif isinstance(node.what, Gemm) and _module(node.reads[1]) in lora.modules:
            backward += backward_of(node.what, node, not compiled and last[-1].isdigit())
    made = {name for node in forward for name in node.makes}
    return LayerCode(forward=tuple(forward), backward=tuple(backward), kept=frozenset(made & _reads(tuple(backward))))


def _module(kept: str) -> str:
    """The linear layer that reads such an input."""
    if kept.startswith("x norm"):
        return "qkv"
    if kept.startswith("h norm"):
        return "gate_up"
    return "proj" if kept == "out" else "down"


def _of_weights(node: Node) -> bool:
    """Whether an op makes a gradient of weights."""
    return (isinstance(node.what, Gemm) and node.what.kind == "wgrad") or "embedding_bwd" in str(node.what)


def _reads(nodes: Nodes) -> frozenset[str]:
    return frozenset(name for node in nodes for name in node.reads)


def _gradient(lora: Lora, what: Gemm, of: str) -> dict[str, int]:
    """Of A and B."""
    return {f"{GRADIENT} adapter {of}": BF16 * lora.rank * (what.m + what.n)}


def _products(lora: Lora, what: Gemm, node: Node, to: str) -> Nodes:
    tokens, outer, inner, thin = what.m, what.n, what.k, f"{to} thin"
    whole = BF16 * tokens * outer
    return (
        Node(Gemm("forward", tokens, lora.rank, inner), node.reads[:1], {thin: BF16 * tokens * lora.rank}),
        Node(Gemm("forward", tokens, outer, lora.rank), (thin,), {f"{to} beside": whole}),
        eager(tokens * outer, SCALED + ADDED + DROPOUT * lora.drops, 2 + lora.drops, f"{to} beside", f"{to} alone"),
        Node(None, (f"{to} beside",), {to: whole}),
    )


def _products_back(lora: Lora, what: Gemm, node: Node, _sums: bool) -> Nodes:
    outer, inner, tokens = what.m, what.n, what.k
    dy, kept = node.reads
    name = f"{kept} of {dy}"
    into = BF16 * tokens * inner
    dropped = DROPOUT * lora.drops
    return (
        eager(tokens * outer, SCALED + dropped, 1 + lora.drops, dy, **{f"d{name} scaled": BF16 * tokens * outer}),
        Node(
            Gemm("dgrad", tokens, lora.rank, outer), (f"d{name} scaled",), {f"d{name} thin": BF16 * tokens * lora.rank}
        ),
        Node(Gemm("wgrad", outer, lora.rank, tokens), (f"d{name} scaled",)),
        Node(Gemm("wgrad", lora.rank, inner, tokens), (f"d{name} thin", kept)),
        Node(Gemm("dgrad", tokens, inner, lora.rank), (f"d{name} thin",), {f"d{name} beside": into}),
        eager(tokens * inner, ADDED, 1, f"d{name} beside"),
    )


def _triton(lora: Lora, what: Gemm, node: Node, to: str) -> Nodes:
    tokens, outer, inner = what.m, what.n, what.k
    nbytes = tokens * (BF16 * (inner + outer) + (ADDED + DROPOUT * lora.drops) * outer)
    made = {to: BF16 * tokens * outer}
    return (replace(eager(1, nbytes, 2 + lora.drops, f"{to} alone", node.reads[0]), makes=made),)


def _triton_back(lora: Lora, what: Gemm, node: Node, sums: bool) -> Nodes:
    outer, inner, tokens = what.m, what.n, what.k
    each = BF16 * (3 * inner + 2 * outer) + ((1 + sums) * ADDED + DROPOUT * lora.drops) * inner
    made = _gradient(lora, what, " ".join(node.reads))
    return (replace(eager(1, each * tokens, 4 + sums + lora.drops, *node.reads), makes=made),)
